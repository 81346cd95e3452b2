"""check-release.sh: what a release that has no series yet needs, seam by seam."""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import sys
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from . import fetch
from .errors import Refusal
from .maintain import pristine_from_archive, pristine_from_folder, upstream_sign
from .names import missing_imports, missing_overrides
from .series import (
    FileDiff,
    Hunk,
    Mismatch,
    Patch,
    Series,
    find_series,
    load_overlay,
    load_series,
    places,
    release_folders,
    sha256,
    split_lines,
)

RELIED_ON = "relied on"  # the seam of files that are not patched
SPREAD = 10  # lines that a changed place may have more than the hunk has


@dataclass(frozen=True)
class Finding:
    """What became of one seam: a hunk, or what an overlay file imports from vLLM."""

    verdict: str  # applies | moved | changed | upstream
    where: str
    seam: str  # the patch or overlay file it belongs to
    fits: bool = True  # the series as it is would do
    lines: list[str] = field(default_factory=list)


def _nearest(hunk: Hunk, lines: list[str]) -> tuple[int, float]:
    """Where in `lines` most of what `hunk` replaces stands together, and the share of it by length."""
    worth = {line: len(line.strip()) for line in hunk.source if len(line.strip()) > 3}
    width = len(hunk.source) + SPREAD
    best = (0.0, 0)
    for start in range(len(lines)):
        if lines[start] in worth:
            score = sum(worth.get(line, 0) for line in set(lines[start : start + width]))
            best = max(best, (score / sum(worth.values()), -start))
    return -best[1], best[0]


def _changed_lines(hunk: Hunk, lines: list[str], start: int) -> list[str]:
    """The diff from the lines that the hunk replaces to those that stand there instead."""
    first = max(0, start - 2)
    found = lines[first : start + len(hunk.source) + SPREAD]
    matcher = difflib.SequenceMatcher(None, hunk.source, found, autojunk=False)
    blocks = [block for block in matcher.get_matching_blocks() if block.size]
    if blocks:  # with what may stand for the hunk's own lines before the first and after the last
        end = blocks[-1].b + len(hunk.source) - blocks[-1].a
        found = found[max(0, blocks[0].b - blocks[0].a) : end]
    diff = difflib.ndiff(hunk.source, found)
    return [line.rstrip("\n") for line in diff if line[0] in "-+"]


def _moved_file(hunk: Hunk, pristine: dict[str, bytes]) -> list[str]:
    """Every place in vLLM that has the lines of `hunk`, as path:line."""
    text = "".join(hunk.source).encode("latin-1")
    return [f"{path}:{at + 1}" for path, data in sorted(pristine.items()) if text in data
            for at in places(hunk, split_lines(data))]  # fmt: skip


def check_patch(patch: Patch, pins: dict[str, str], pristine: dict[str, bytes]) -> list[Finding]:
    """Look for the hunks of one patch of the base, whose files have the sha256 `pins`, in another release's."""
    if signed := upstream_sign(patch, pristine):
        return [Finding("upstream", signed, patch.name, fits=False)]
    return [finding for diff in patch.diffs for finding in check_diff(patch, diff, pins.get(diff.path), pristine)]


def check_diff(patch: Patch, diff: FileDiff, pin: str | None, pristine: dict[str, bytes]) -> list[Finding]:
    # As apply and check-series have it: in the pinned file a hunk goes to its line, else to the one place it fits.
    data = pristine.get(diff.path, b"")
    diff = replace(diff, moved=diff.moved or sha256(data) != pin)
    found = [check_hunk(patch, diff, hunk, pristine) for hunk in diff.hunks]
    if all(finding.fits for finding in found):
        try:
            after = diff.apply(data)
            if diff.path.endswith(".py"):
                ast.parse(after)
        except Mismatch as mismatch:
            what = f"{diff.path}:{mismatch.line}: its hunks are no longer in this order"
            found.append(Finding("changed", what, patch.name, fits=False))
        except (SyntaxError, ValueError) as error:
            what = f"{diff.path}: with the patch invalid Python: {error}"
            found.append(Finding("changed", what, patch.name, fits=False))
    return found


def check_hunk(patch: Patch, diff: FileDiff, hunk: Hunk, pristine: dict[str, bytes]) -> Finding:
    here = f"{diff.path}:{hunk.start + 1}"
    lines = split_lines(pristine.get(diff.path, b""))
    found = places(hunk, lines)
    if hunk.start in found and (not diff.moved or len(found) == 1):
        return Finding("applies", here, patch.name)
    if len(found) == 1:
        return Finding("moved", f"{here} to line {found[0] + 1}", patch.name)
    if found:
        return Finding("changed", f"{here}: its lines are in {len(found)} places", patch.name, fits=False)
    path = diff.path
    start, score = _nearest(hunk, lines)
    if score < 0.5:  # else some lines that happen to be the same elsewhere are not these
        elsewhere = _moved_file(hunk, pristine)
        if len(elsewhere) == 1:
            return Finding("moved", f"{here} to {elsewhere[0]}", patch.name, fits=False)
    if path not in pristine:
        here += ", a file that is gone"
        for name in sorted(pristine):
            if name.endswith(".py") and "deepseek" in name:
                best = *_nearest(hunk, split_lines(pristine[name])), name
                start, score, path = max((start, score, path), best, key=lambda found: found[1])
    if not score:
        return Finding("changed", f"{here}: none of its lines are left", patch.name, fits=False)
    lines = _changed_lines(hunk, split_lines(pristine[path]), start)
    return Finding("changed", f"{here}, nearest {path}:{start + 1}", patch.name, fits=False, lines=lines)


def check_overlay(
    path: str, pristine: dict[str, bytes], ours: dict[str, bytes], of_base: Callable[[], dict[str, bytes] | None]
) -> list[Finding]:
    """One finding for each name that an overlay file needs of vLLM and that is not there; one if all are.

    `of_base` gives the files of the release that the overlay serves, if they can be had: what a function imports
    that they lack too, it imports on other releases only.
    """
    found = []
    for what, missing_names in (("imports from", missing_imports), ("overrides in", missing_overrides)):
        count, missing = missing_names(path, pristine, ours)
        if any(need.later for need in missing) and (files := of_base()) is not None:
            elsewhere = missing_names(path, files, ours)[1]
            missing = [need for need in missing if not (need.later and need in elsewhere)]
        found += [Finding("changed", f"{path}:{need.line}", "overlay", fits=False, lines=[f"- {need.what}"])
                  for need in missing]  # fmt: skip
        if count and not missing:
            found.append(Finding("applies", f"{path}: what it {what} vLLM", "overlay"))
    return found


def check_relied_on(pins: dict[str, str], pristine: dict[str, bytes]) -> list[Finding]:
    """One finding for each file that the overlay calls and does not patch."""
    found = []
    for path, pin in sorted(pins.items()):
        if path in pristine and sha256(pristine[path]) == pin:
            found.append(Finding("applies", path, RELIED_ON))
        else:
            what = "other bytes; read them" if path in pristine else "there is no such file"
            found.append(Finding("changed", f"{path}: {what}", RELIED_ON, fits=False))
    return found


def check_release(
    root: Path, base: Series, pristine: dict[str, bytes], of_base: Callable[[], dict[str, bytes] | None]
) -> list[Finding]:
    """What became of every seam of `base`, whose files `of_base` gives, in the vLLM whose files are `pristine`."""
    found = [finding for patch in base.patches for finding in check_patch(patch, base.files, pristine)]
    ours = {path: file.data for path, file in load_overlay(root, base).items() if path.endswith(".py")}
    for path in sorted(ours):
        found += check_overlay(path, pristine, ours, of_base)
    return found + check_relied_on(base.relied_on, pristine)


def nearest_series(root: Path, release: str) -> Series:
    """The series that serves `release`, or that of the highest release below it, or else of the lowest."""
    try:
        return find_series(root, release)
    except Refusal:
        pass
    every = sorted((load_series(folder) for folder in release_folders(root)), key=lambda s: Version(s.release))
    return [every[0], *(series for series in every if Version(series.release) < Version(release))][-1]


def check_release_main(argv: list[str], root: Path) -> int:
    """check-release.sh: returns 0 if a series fits as it is, 1 if a port is needed, 2 if it cannot be told."""
    parser = argparse.ArgumentParser(
        prog="check-release.sh",
        description="Say for each seam of the overlay what became of it in vLLM RELEASE: applies, "
        "moved (where to), changed (the lines), or already upstream.",
        epilog="exit status: 0 a series fits as it is; 1 it has to be ported, see docs/porting.md; "
        "2 wrong usage, or the release cannot be fetched",
    )
    parser.add_argument("release", metavar="RELEASE")
    parser.add_argument("--base", metavar="RELEASE", help="compare with its series; default: the nearest below")
    parser.add_argument("--pristine", metavar="DIR", type=Path, help="the unpacked source, instead of fetching it")
    args = parser.parse_args(argv)
    try:
        args.release = str(Version(args.release))
        base = find_series(root, args.base) if args.base else nearest_series(root, args.release)
        base = load_series(base.folder).of(args.release)
        if args.pristine:
            pristine, origin = pristine_from_folder(args.pristine), str(args.pristine)
        else:
            pinned = args.release in base.sdists
            archive = fetch.archive(base, args.release) if pinned else fetch.unpinned(args.release)
            pristine, origin = pristine_from_archive(archive), f"sha256 {sha256(archive.read_bytes())}"
    except InvalidVersion:
        parser.error(f"{args.release} is not a release like 0.23.0")
    except Refusal as refusal:
        print(f"error: {refusal.code}: {refusal.message}", file=sys.stderr)
        return 2
    except (tarfile.TarError, zlib.error, EOFError):
        print(f"error: archive-mismatch: {archive} is damaged; remove it and run again.", file=sys.stderr)
        return 2

    @functools.cache
    def of_base() -> dict[str, bytes] | None:
        if args.release == base.release:
            return pristine
        try:
            return pristine_from_archive(fetch.archive(base, base.release, download=not args.pristine))
        except Refusal:
            return None

    findings = check_release(root, base, pristine, of_base)
    print(f"vLLM {args.release} ({origin}) against the series of {base.release}")
    for finding in findings:
        print(f"{finding.verdict:8}  {finding.seam}: {finding.where}")
        for line in finding.lines:
            print(f"              {line}")
    count = {verdict: sum(f.verdict == verdict for f in findings)
             for verdict in ("applies", "moved", "changed", "upstream")}
    misfits = [finding for finding in findings if not finding.fits]
    if not misfits:
        so = "the series fits" + ("." if args.release in base.sdists else "; name the release in `serves`.")
    elif all(finding.seam == RELIED_ON for finding in misfits):
        so = "patches and names fit; whether files relied on still do is for you to read; docs/porting.md."
    else:
        so = "a port is needed; docs/porting.md."
    print(", ".join(f"{number} {verdict}" for verdict, number in count.items()) + f": {so}")
    return 1 if misfits else 0
