"""check-release.sh: what a release that has no series yet needs, seam by seam."""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
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
from .names import Need, missing_imports, missing_overrides
from .series import (
    FileDiff,
    Hunk,
    Mismatch,
    Patch,
    Series,
    Stack,
    find_series,
    load_overlay,
    load_series,
    places,
    release_folders,
    sha256,
    split_lines,
)
from .target import detect

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
    path: str, pristine: dict[str, bytes], ours: dict[str, bytes], elsewhere: Callable[[str, Need], bool]
) -> list[Finding]:
    """One finding for each name that an overlay file needs of vLLM and that is not there; one if all are.

    `elsewhere` says of a name that a function of the file at a path imports, whether only other releases need it.
    """
    found = []
    for what, missing_names in (("imports from", missing_imports), ("overrides in", missing_overrides)):
        count, missing = missing_names(path, pristine, ours)
        missing = [need for need in missing if not (need.later and elsewhere(path, need))]
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
    root: Path, base: Series, pristine: dict[str, bytes], source_of: Callable[[Series], dict[str, bytes] | None]
) -> list[Finding]:
    """What became of every seam of `base` in the vLLM whose files are `pristine`.

    `source_of` gives the files of the release that a series was made for, if they can be had.
    """
    found = [finding for patch in base.patches for finding in check_patch(patch, base.files, pristine)]
    ours = {path: file.data for path, file in load_overlay(root, Stack([base])).items() if path.endswith(".py")}

    def elsewhere(path: str, need: Need) -> bool:
        lacking = {folder.name: need in missing_imports(path, files, ours)[1] for folder in release_folders(root)
                   if (files := source_of(load_series(folder))) is not None}  # fmt: skip
        # Without it the base is served, so it does without; but a name that none has is a mistake.
        return lacking.get(base.release, False) and not all(lacking.values())

    for path in sorted(ours):
        found += check_overlay(path, pristine, ours, elsewhere)
    return found + check_relied_on(base.relied_on, pristine)


def bases(root: Path, release: str, near: str | None = None, name: str | None = None) -> list[Series]:
    """The series to compare `release` with, as they apply to it: those that it has, else one of each name.

    Of each name that is the one that serves `near` (default: `release`), or the highest below it, or the lowest.
    With `name` only that one. Raises Refusal: wrong-release, no-series.
    """
    every = [load_series(folder) for folder in release_folders(root)]
    names = sorted({series.name for series in every})
    if near:
        find_series(root, near, [name] if name else [])  # or refuse
    elif name and name not in names:
        raise Refusal("no-series", f"There is no series {name!r}; there is: {', '.join(names)}.")
    wanted = [name] if name else [series.name for series in every if release in series.sdists] or names
    near, found = near or release, []
    for one in wanted:
        series = sorted((s for s in every if s.name == one), key=lambda s: Version(s.release))
        below = [s for s in series if Version(s.release) < Version(near)]
        found += [s for s in series if near in s.sdists] or below[-1:] or series[:1]
    return [series.of(release) for series in found]


def verdict(findings: list[Finding], served: bool) -> str:
    """What became of all seams of one series, in a sentence."""
    count = {verdict: sum(f.verdict == verdict for f in findings)
             for verdict in ("applies", "moved", "changed", "upstream")}  # fmt: skip
    misfits = [finding for finding in findings if not finding.fits]
    if not misfits:
        so = "the series fits" + ("." if served else "; name the release in `serves`.")
    elif all(finding.seam == RELIED_ON for finding in misfits):
        so = "patches and names fit; whether files relied on still do is for you to read; docs/porting.md."
    elif all(finding.verdict == "upstream" for finding in findings):
        so = "vLLM does this itself by now, so the series is not needed; read how, docs/porting.md."
    else:
        so = "a port is needed; docs/porting.md."
    return ", ".join(f"{number} {verdict}" for verdict, number in count.items()) + f": {so}"


def check_release_main(argv: list[str], root: Path) -> int:
    """check-release.sh: returns 0 if the series fit as they are, 1 if not, 2 if it cannot be told."""
    parser = argparse.ArgumentParser(
        prog="check-release.sh",
        description="Say for each seam of the overlay what became of it in vLLM RELEASE: applies, "
        "moved (where to), changed (the lines), or already upstream. A supported release is compared with the "
        "series that it has, another one with one of each name.",
        epilog="exit status: 0 the series fit as they are; 1 something has to be read or ported, see "
        "docs/porting.md; 2 wrong usage, or the release cannot be fetched",
    )
    parser.add_argument("release", metavar="RELEASE")
    parser.add_argument("--series", metavar="NAME", help="compare with this one only, e.g. full-width")
    parser.add_argument("--base", metavar="RELEASE", help="compare with its series; default: the nearest below")
    parser.add_argument("--pristine", metavar="DIR", type=Path, help="the unpacked source, instead of fetching it")
    args = parser.parse_args(argv)
    try:
        args.release = str(Version(args.release))
        against = bases(root, args.release, args.base, args.series)
        if args.pristine:
            pristine, origin = pristine_from_folder(args.pristine), str(args.pristine)
            found = None
            with contextlib.suppress(Refusal):  # a folder that does not say which
                found = detect(args.pristine, against).release
            if found not in (None, args.release):
                raise Refusal("wrong-release", f"{args.pristine} holds vLLM {found}, not {args.release}.")
        else:
            pinned = [series for series in against if args.release in series.sdists]
            archive = fetch.archive(pinned[0], args.release) if pinned else fetch.unpinned(args.release)
            pristine, origin = pristine_from_archive(archive), f"sha256 {sha256(archive.read_bytes())}"
    except InvalidVersion:
        parser.error(f"{args.release} is not a release like 0.23.0")
    except Refusal as refusal:
        print(f"error: {refusal.code}: {refusal.message}", file=sys.stderr)
        return 2
    except (tarfile.TarError, zlib.error, EOFError):
        print(f"error: archive-mismatch: {archive} is damaged; remove it and run again.", file=sys.stderr)
        return 2

    sources = {args.release: pristine}

    def source_of(series: Series) -> dict[str, bytes] | None:
        if series.release not in sources:
            try:
                place = fetch.archive(series, series.release, download=not args.pristine)
                sources[series.release] = pristine_from_archive(place)
            except Refusal:
                return None
        return sources[series.release]

    summary, fits, supported = [], True, []
    for base in against:
        try:
            findings = check_release(root, base, pristine, source_of)
        except SyntaxError as error:
            what = f"Python {sys.version.split()[0]} cannot read {error.filename}, line {error.lineno}"
            print(f"error: not-readable: {what}; activate one that vLLM {args.release} is for.", file=sys.stderr)
            return 2
        print(f"vLLM {args.release} ({origin}) against the series {base.name} of {base.release}")
        for finding in findings:
            print(f"{finding.verdict:8}  {finding.seam}: {finding.where}")
            for line in finding.lines:
                print(f"              {line}")
        summary.append(f"{base.name}: {verdict(findings, args.release in base.sdists)}")
        fit = all(finding.fits for finding in findings)
        fits = fits and fit
        supported += [base.name] * (fit and args.release in base.sdists)
    print("\n".join(summary))
    lacking = sorted({folder.parent.name for folder in release_folders(root)} - set(supported))
    if supported and lacking and not args.series:
        supported.append(f"not {', '.join(lacking)}")
    lacks = f"has no series {args.series}." if args.series else "is not supported."
    print(f"vLLM {args.release} " + (f"is supported: {', '.join(supported)}." if supported else lacks))
    return 0 if fits else 1
