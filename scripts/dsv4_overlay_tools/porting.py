"""check-release.sh: what a release that has no series yet needs, seam by seam."""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
import tarfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from . import fetch
from .errors import Refusal
from .maintain import pristine_from_archive, pristine_from_folder, upstream_sign
from .series import (
    FileDiff,
    Hunk,
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


def check_patch(patch: Patch, pristine: dict[str, bytes]) -> list[Finding]:
    """Look for the hunks of one patch of the base's series in the files of another release."""
    if signed := upstream_sign(patch, pristine):
        return [Finding("upstream", signed, patch.name, fits=False)]
    return [check_hunk(patch, diff, hunk, pristine) for diff in patch.diffs for hunk in diff.hunks]


def check_hunk(patch: Patch, diff: FileDiff, hunk: Hunk, pristine: dict[str, bytes]) -> Finding:
    here = f"{diff.path}:{hunk.start + 1}"
    lines = split_lines(pristine.get(diff.path, b""))
    found = places(hunk, lines)
    if found == [hunk.start]:
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


def _defines(source: bytes, name: str) -> bool:
    """Whether a module has `name` after it is run, as far as its text tells."""
    word = rf"\b{re.escape(name)}\b"
    return bool(re.search(rf"^\s*((class |def |async def )?{word}\s*[:=(,]|[^#\n]*import\b.*{word})",
                          source.decode("latin-1"), re.MULTILINE))  # fmt: skip


def check_imports(path: str, source: bytes, pristine: dict[str, bytes], ours: set[str]) -> list[Finding]:
    """One finding for each name that an overlay file imports from vLLM and that is not there; one if all are."""
    missing = []
    imports = False
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or node.level or not (node.module or "").startswith("vllm"):
            continue
        base = node.module.replace(".", "/")
        module = pristine.get(base + ".py") or pristine.get(base + "/__init__.py")
        for alias in node.names:
            inside = f"{base}/{alias.name}"
            candidates = {base + ".py", base + "/__init__.py", inside + ".py", inside + "/__init__.py"}
            if candidates & ours:
                continue
            imports = True
            if {inside + ".py", inside + "/__init__.py"} & pristine.keys():
                continue
            if module is None or not _defines(module, alias.name):
                what = f"from {node.module} import {alias.name}"
                where = f"{path}:{node.lineno}"
                missing.append(Finding("changed", where, "overlay", fits=False, lines=["- " + what]))
    found = [Finding("applies", f"{path}: what it imports from vLLM", "overlay")] if imports else []
    return missing or found


def check_relied_on(pins: dict[str, str], pristine: dict[str, bytes]) -> list[Finding]:
    """One finding for each file that the overlay calls and does not patch."""
    found = []
    for path, pin in sorted(pins.items()):
        if path in pristine and sha256(pristine[path]) == pin:
            found.append(Finding("applies", path, "relied on"))
        else:
            what = "other bytes; read them" if path in pristine else "there is no such file"
            found.append(Finding("changed", f"{path}: {what}", "relied on", fits=False))
    return found


def check_release(root: Path, base: Series, pristine: dict[str, bytes]) -> list[Finding]:
    """What became of every seam of `base` in the vLLM whose files are `pristine`."""
    found = [finding for patch in base.patches for finding in check_patch(patch, pristine)]
    overlay = load_overlay(root, base)
    for path, file in sorted(overlay.items()):
        if path.endswith(".py"):
            found += check_imports(path, file.data, pristine, set(overlay))
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
    findings = check_release(root, base, pristine)
    print(f"vLLM {args.release} ({origin}) against the series of {base.release}")
    for finding in findings:
        print(f"{finding.verdict:8}  {finding.seam}: {finding.where}")
        for line in finding.lines:
            print(f"              {line}")
    count = {verdict: sum(f.verdict == verdict for f in findings)
             for verdict in ("applies", "moved", "changed", "upstream")}
    fits = all(finding.fits for finding in findings)
    print(", ".join(f"{number} {verdict}" for verdict, number in count.items()), end=": ")
    print("the series fits; name the release in `serves`." if fits else "a port is needed; docs/porting.md.")
    return 0 if fits else 1
