"""For maintainers: write a series from an edited tree (export), see that it is right (check)."""

from __future__ import annotations

import argparse
import ast
import datetime
import difflib
import functools
import os
import re
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import tomlkit
from packaging.version import Version

from . import fetch
from .errors import Refusal
from .names import defines, imports, module_path
from .record import read_record
from .series import (
    STATE_DIR,
    Mismatch,
    OverlayFile,
    Patch,
    Series,
    Stack,
    load_overlay,
    load_series,
    order,
    overlay_files,
    pinned_files,
    release_folders,
    series_of,
    sha256,
    split_lines,
)
from .target import detect
from .transaction import state_of

REQUIRED_FIELDS = (
    "Description", "Origin", "Forwarded", "Last-Update", "Hooks", "Drop-When", "Files",
)  # fmt: skip
MAX_ADDED_LINES = 200
CONTEXT = 2
KERNELS = "vllm/third_party/mla_kernels"
KERNEL_IMPORTS = {"torch", "triton"} | set(sys.stdlib_module_names)
# Made by a build or by Python in a tree that somebody works in; never part of a patch.
BUILT = re.compile(r"(^|/)__pycache__/|\.(pyc|so)$|^vllm/_version\.py$")

# ---------------------------------------------------------------- the pristine source


def pristine_from_folder(folder: Path) -> dict[str, bytes]:
    """The files below vllm/ in `folder`. Raises Refusal(not-vllm, source-changed)."""
    if not (folder / "vllm/__init__.py").is_file():
        raise Refusal("not-vllm", f"{folder} holds no vLLM; give the folder of an unpacked source archive.")
    if (folder / STATE_DIR).exists():
        raise Refusal("source-changed", f"{folder} has the overlay applied; give an unmodified vLLM.")
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in (folder / "vllm").rglob("*")
        if path.is_file()
    }


@functools.cache  # several series are checked against the same ones; `fetch.archive` has compared their sha256
def pristine_from_archive(archive: Path) -> dict[str, bytes]:
    """The files below vllm/ in a source archive, in memory."""
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            if member.isfile() and path.startswith("vllm/"):
                found[path] = tar.extractfile(member).read()  # type: ignore[union-attr]
    return found


def _pristine(series: Series, folder: Path | None) -> dict[str, bytes]:
    if folder is None:
        return pristine_from_archive(fetch.archive(series, series.release))
    release = detect(folder, [series]).release
    if release != series.release:
        raise Refusal("wrong-release", f"{folder} holds vLLM {release}, not {series.release}.")
    return pristine_from_folder(folder)


# ---------------------------------------------------------------- export


def unified(path: str, before: bytes, after: bytes) -> bytes:
    """The diff of one file, or nothing if both are the same.

    Not by git, whose output depends on its version and on the user's configuration.
    """
    out = difflib.unified_diff(split_lines(before), split_lines(after), f"a/{path}", f"b/{path}", n=CONTEXT)
    marked = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in out)
    return "".join(marked).encode("latin-1")


def export_patch(patch: Patch, pristine: dict[str, bytes], edited: dict[str, bytes]) -> bytes:
    """`patch` with its header as it is and its diff made anew from the files it owns.

    Raises Refusal(unowned-change) if it owns a file that one side does not have.
    """
    body = b""
    for path in sorted(patch.owned):
        if path not in pristine or path not in edited:
            where = "the tree" if path in pristine else "the pristine source"
            raise Refusal(
                "unowned-change",
                f"{patch.name} lists {path} in Files, but {where} has no such file; a patch only "
                "changes files, new ones belong in overlay/.",
                path=path,
            )
        body += unified(path, pristine[path], edited[path])
    return patch.header.rstrip(b"\n") + b"\n" + (b"\n" + body if body else b"")


def release_toml(
    text: str,
    files: dict[str, str],
    relied_on: dict[str, str],
    moved: dict[str, dict[str, str]] | None = None,
) -> str:
    """`text` with what its tables [files] and [relied_on] pin replaced, and with `moved` in [also.RELEASE.files].

    All else, comments included, is as it is.
    """
    toml = tomlkit.parse(text)
    tables = [(toml, "files", files), (toml, "relied_on", relied_on)]
    tables += [(toml["also"][release], "files", pins) for release, pins in (moved or {}).items()]
    for parent, name, pins in tables:
        if name in parent:
            after = _cut_end(parent[name])
        elif pins:
            after = _cut_end(parent)
            parent.add(tomlkit.nl())
            parent.add(name, tomlkit.table())
        else:
            continue
        parent[name].clear()
        for path in sorted(pins):
            parent[name].add(path, pins[path])
        for item in after:
            parent[name].add(item)
    return tomlkit.dumps(toml)


def _cut_end(table: tomlkit.items.Table) -> list[tomlkit.items.Item]:
    """Cut off the blank lines and comments at the end of `table`, which are about what comes next."""
    body = table.value.body
    end = len(body)
    while end and body[end - 1][0] is None:
        end -= 1
    items = [item for _, item in body[end:] if item.as_string()]
    del body[end:]
    return items


def served_sources(series: Series, pinned: dict[str, bytes]) -> dict[str, dict[str, bytes]]:
    """The pinned files in each other release that `series` serves, and in rebuilt wheels of this one.

    `pinned` are this release's. Raises Refusal(bad-series) if a wheel's changes do not fit them.
    """
    found = {}
    for build, changes in series.rebuilt.items():
        try:
            found[build] = pinned | {diff.path: diff.apply(pinned[diff.path]) for diff in changes.diffs}
        except (KeyError, Mismatch):
            raise Refusal(
                "bad-series", f"{series.folder / changes.name} does not fit the pinned files of {series.release}."
            ) from None
    for release in sorted(series.sdists.keys() - {series.release}):
        source = pristine_from_archive(fetch.archive(series, release))
        found[release] = {path: source[path] for path in pinned if path in source}
    return found


def moved_files(
    pristine: dict[str, bytes], others: dict[str, dict[str, bytes]]
) -> dict[str, dict[str, str]]:
    """What [also.RELEASE.files] should hold: the sha256 of those that differ from this release's."""
    return {release: {path: sha256(data) for path, data in files.items() if data != pristine[path]}
            for release, files in others.items()}


def export(
    root: Path, series: Series, pristine: dict[str, bytes], tree: Path, *, served: bool
) -> tuple[dict[Path, bytes], list[str]]:
    """What the files of `series` should hold for `tree`: place -> bytes, and notes for the user.

    With `served`, also the pins of the other releases that it serves.
    Raises Refusal(unowned-change), naming the files, if the tree has a change no patch owns.
    """
    state = state_of(tree)
    if state in ("begun", "changing"):
        what = f"{tree} is between two states because a run was interrupted; run apply-patches.sh on it first."
        raise Refusal("half-applied", what)
    if state == "applied" and (applied := list(read_record(tree)[0]["series"])) != [series.name]:
        raise Refusal(
            "unowned-change",
            f"{tree} has the series {' and '.join(applied)} applied, and all that is changed there would go into "
            f"{series.name}; use a tree with that one only (apply-patches.sh --series {series.name}).",
        )
    owner = {path: patch for patch in series.patches for path in patch.owned}
    if sum(len(patch.owned) for patch in series.patches) != len(owner):
        doubled = [p for p in owner if sum(p in patch.owned for patch in series.patches) > 1]
        raise Refusal("bad-series", f"Several patches list {', '.join(doubled)} in Files.")
    overlay = overlay_files(root, [series.release])
    edited: dict[str, bytes] = {}
    stray: list[str] = []
    notes: list[str] = []
    present = {path.relative_to(tree).as_posix(): path for path in (tree / "vllm").rglob("*")
               if path.is_file()}
    for path, place in sorted(present.items()):
        if path in owner:
            edited[path] = place.read_bytes()
        elif path.startswith(STATE_DIR + "/") or BUILT.search(path):
            continue
        elif path in pristine:
            if place.read_bytes() != pristine[path]:
                stray.append(path)
        elif path not in overlay:
            notes.append(f"{path} is new in the tree and not exported: put it into overlay/")
        elif place.read_bytes() != overlay[path].data:
            notes.append(f"{path} differs from {overlay[path].source}, which is left as it is")
    for path in sorted(pristine.keys() - present.keys()):
        if path not in owner and not BUILT.search(path):
            notes.append(f"{path} is missing in the tree; patches cannot delete, so it is ignored")
    if stray:
        raise Refusal(
            "unowned-change",
            f"No patch owns {', '.join(stray)}; add the path to the Files field of a patch, or "
            f"make a new one: a file with only a header in {series.folder}, named in its series.",
            path=stray[0],
        )
    out = {series.folder / p.name: export_patch(p, pristine, edited) for p in series.patches}
    if lost := [p.name for p in series.patches if p.diffs and b"\n@@ " not in out[series.folder / p.name]]:
        raise Refusal(
            "nothing-applied",
            f"{tree} has nothing of {', '.join(lost)}; apply the series to it before it is edited, or remove a "
            "patch that is not wanted.",
        )
    pins = series.folder / "release.toml"
    hashes = {path: sha256(pristine[path]) for path in owner if pristine[path] != edited[path]}
    relied_on = {}
    for path in series.relied_on.keys() - hashes.keys():
        if path not in pristine:
            what = f"{pins}: vLLM {series.release} has no {path}; remove it from [relied_on]."
            raise Refusal("bad-series", what, path=path)
        relied_on[path] = sha256(pristine[path])
    pinned = {path: pristine[path] for path in hashes | relied_on}
    moved = moved_files(pristine, served_sources(series, pinned)) if served else None
    out[pins] = release_toml(pins.read_text("utf-8"), hashes, relied_on, moved).encode()
    return out, notes


def _write_all(files: dict[Path, bytes]) -> list[Path]:
    changed = [path for path, data in files.items() if path.read_bytes() != data]
    for path in changed:
        draft = path.with_name(path.name + ".new")
        draft.write_bytes(files[path])
        os.replace(draft, path)
    return changed


def _chosen(root: Path, release: str, name: str | None) -> Series:
    """The series made for `release`: the one, or that with this name. Raises Refusal(no-series)."""
    folders = release_folders(root, release=release)
    found = [folder for folder in folders if name in (None, folder.parent.name)]
    if len(found) != 1:
        has = ", ".join(folder.parent.name for folder in folders) or "none"
        what = "choose one with --series" if found else f"none is called {name!r}" if folders else "see patches/"
        raise Refusal("no-series", f"The series made for vLLM {release} are: {has}; {what}.")
    return load_series(found[0])


def export_main(argv: list[str], root: Path) -> int:
    """export-series.sh: returns 0, 1 for a refusal or 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="export-series.sh",
        description="Write the patches of RELEASE anew from the edited vLLM in TREE.",
    )
    parser.add_argument("release", metavar="RELEASE")
    parser.add_argument("tree", metavar="TREE", type=Path)
    parser.add_argument("--series", metavar="NAME", help="which, if the release has several")
    parser.add_argument("--pristine", metavar="DIR", type=Path,
                        help="the unpacked source archive, instead of the one in the cache")
    args = parser.parse_args(argv)
    try:
        series = _chosen(root, args.release, args.series)
        target = detect(args.tree, [series])
        if target.release != series.release:
            raise Refusal(
                "wrong-release", f"{args.tree} holds vLLM {target.release}, not {series.release}."
            )
        pristine = _pristine(series, args.pristine)
        files, notes = export(
            root, series, pristine, target.root, served=args.pristine is None
        )
        changed = _write_all(files)
    except Refusal as refusal:
        print(f"error: {refusal.code}: {refusal.message}", file=sys.stderr)
        return 1
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    for path in changed:
        print(f"wrote {path.relative_to(root)}")
    if not changed:
        print("nothing to write: the series is what the tree says")
    return 0


# ---------------------------------------------------------------- check


def _kernel_problems(overlay: dict[str, OverlayFile]) -> list[str]:
    problems = []
    for path, file in sorted(overlay.items()):
        if not path.startswith(KERNELS + "/") or not path.endswith(".py"):
            continue
        try:
            names = sorted(imports(path, file.data))
        except (SyntaxError, ValueError) as error:
            problems.append(f"{path} is invalid Python: {error}")
            continue
        for name in names:
            inside = (name + ".").startswith(KERNELS.replace("/", ".") + ".")
            provider = path == f"{KERNELS}/flashinfer_sparse_mla.py" and name.startswith("flashinfer.")
            if not (inside or provider) and name.partition(".")[0] not in KERNEL_IMPORTS:
                problems.append(f"{path} imports {name}: the kernels may use torch, triton, the "
                                "standard library and each other only")
    return problems


def _is_there(name: str, files: dict[str, bytes]) -> bool:
    """Whether `name`, dotted, is a module in `files` or what one defines."""
    module, _, last = name.rpartition(".")
    place = module_path(module, files)
    return bool(module_path(name, files) or (place and defines(place, last, files)))


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text  # not 20260131, which later Pythons take
    except ValueError:
        return False


def upstream_sign(patch: Patch, pristine: dict[str, bytes]) -> str | None:
    """The first path:line that matches the Upstream-Sign of `patch`: what it does is already there.

    Raises Refusal(bad-series).
    """
    if sign := patch.fields.get("Upstream-Sign"):
        try:
            pattern = re.compile(sign.encode(), re.MULTILINE)
        except re.error as error:
            what = f"{patch.name}: Upstream-Sign is not a regular expression ({error})."
            raise Refusal("bad-series", what) from None
        for path, data in sorted(pristine.items()):
            if path.endswith(".py") and (match := pattern.search(data)):
                return f"{path}:{data.count(10, 0, match.start()) + 1}"
    return None


def check(
    root: Path, folder: Path, get_pristine: Callable[[Series], dict[str, bytes]], *, served: bool
) -> tuple[list[str], list[tuple[str, int]]]:
    """Everything wrong with the series in `folder`, and the lines each patch adds.

    With `served`, also that it fits the releases that it claims to serve.
    Raises Refusal if the series cannot be read or the source not be had.
    """
    names = order(folder)
    problems = [f"{name} is twice in series" for name in sorted(set(names))
                if names.count(name) > 1]
    on_disk = {path.name for path in folder.glob("*.patch")}
    problems += [f"{name} is not in series" for name in sorted(on_disk - set(names))]
    series = load_series(folder)
    pristine = get_pristine(series)

    known = pristine | {path: file.data for path, file in load_overlay(root, Stack([series])).items()}
    edited: dict[str, bytes] = {}
    for patch in series.patches:
        for name in REQUIRED_FIELDS:
            if not patch.fields.get(name, "").strip():
                problems.append(f"{patch.name}: the field {name} is missing or empty")
        date = patch.fields.get("Last-Update", "").strip()
        if date and not _is_date(date):
            problems.append(f"{patch.name}: Last-Update is not a date like 2026-01-31")
        try:
            if signed := upstream_sign(patch, pristine):
                problems.append(f"{patch.name}: Upstream-Sign is already in {signed}")
        except Refusal as refusal:
            problems.append(refusal.message)
        if not patch.diffs:
            problems.append(f"{patch.name} changes nothing")
        for name in sorted(patch.uses):
            if not _is_there(name, known):
                problems.append(f"{patch.name} uses {name}, which neither vLLM nor the overlay has")
        touched = {diff.path for diff in patch.diffs}
        for path in sorted(touched ^ set(patch.owned)):
            problems.append(f"{patch.name}: Files and the diff disagree about {path}")
        for diff in patch.diffs:
            if diff.path in edited:
                problems.append(f"{patch.name}: {diff.path} is already touched by another patch")
                continue
            if diff.path not in pristine:
                problems.append(f"{patch.name}: vLLM {series.release} has no {diff.path}")
                continue
            before = pristine[diff.path]
            if series.files.get(diff.path) != sha256(before):
                problems.append(f"release.toml: [files] has another sha256 for {diff.path}")
            try:
                edited[diff.path] = diff.apply(before)
            except Mismatch as mismatch:
                problems.append(f"{patch.name} does not fit {diff.path}, line {mismatch.line}")
                continue
            if edited[diff.path] == before:
                problems.append(f"{patch.name} has no effect on {diff.path}")
            if diff.path.endswith(".py"):
                try:
                    ast.parse(edited[diff.path])
                except (SyntaxError, ValueError) as error:
                    problems.append(f"{patch.name} makes {diff.path} invalid Python: {error}")
        complete = all(path in edited for path in patch.owned)
        if complete and export_patch(patch, pristine, edited) != patch.data:
            problems.append(f"{patch.name} is not what export-series.sh writes; run it")
    pins = folder / "release.toml"
    hashes = {path: sha256(pristine[path]) for path in edited}
    relied_on = {path: sha256(pristine[path]) for path in series.relied_on if path in pristine}
    for path, pin in series.relied_on.items():
        if path not in pristine:
            problems.append(f"release.toml: vLLM {series.release} has no {path}; remove it from [relied_on]")
        elif pin != relied_on[path]:
            problems.append(f"release.toml: [relied_on] has another sha256 for {path}")
    others = served_sources(series, {path: pristine[path] for path in hashes | relied_on}) if served else {}
    moved = moved_files(pristine, others)
    if release_toml(pins.read_text("utf-8"), hashes, relied_on, moved) != pins.read_text("utf-8"):
        problems.append("release.toml: a pin of a file is not what export-series.sh writes; run it")
    added = [(patch.name, patch.added) for patch in series.patches]
    total = sum(count for _, count in added)
    if total > MAX_ADDED_LINES:
        problems.append(f"the series adds {total} lines to vLLM; at most {MAX_ADDED_LINES} are "
                        "allowed: move code into overlay/")
    for release, sources in others.items():
        problems += [f"for vLLM {release}, {path} in [relied_on]: there is no such file"
                     for path in relied_on if path not in sources]
        for patch in series.of(release).patches:
            for diff in patch.diffs:
                where = f"{patch.name} for vLLM {release}, {diff.path}"
                try:
                    after = diff.apply(sources[diff.path])
                    if diff.path.endswith(".py"):
                        ast.parse(after)
                except KeyError:
                    problems.append(f"{where}: there is no such file")
                except Mismatch as mismatch:
                    problems.append(f"{where}: the hunk at line {mismatch.line} has no place, or several")
                except (SyntaxError, ValueError) as error:
                    problems.append(f"{where}: invalid Python: {error}")
    for release, sources in {series.release: pristine, **others}.items():
        if release in series.sdists:
            problems += _together(root, release, sources)
    return problems, added


def _together(root: Path, release: str, sources: dict[str, bytes]) -> list[str]:
    """Why the series of `release` cannot be applied together, by the files that several of them change."""
    problems = []
    try:
        for names, diff in Stack(series_of(root, release)).pairs():
            if ", " not in names or diff.path not in sources:  # of another release, there is what one series pins
                continue
            try:
                ast.parse(diff.apply(sources[diff.path]))
            except (Mismatch, SyntaxError, ValueError):
                problems.append(f"{names} do not fit {diff.path} of vLLM {release} together")
    except Refusal as refusal:
        problems.append(refusal.message)
    return problems


def _overlay_problems(root: Path) -> list[str]:
    """What of overlay/ no series leads to, and what the kernels import that they may not."""
    try:
        names = {path.parent.name for path in (root / "overlay").glob("*/vllm")} - {"common"}
        folders = [[name] for name in names] or [[]]
        files = {file.source: (path, file) for folder in folders
                 for path, file in overlay_files(root, folder).items()}  # fmt: skip
        stacks = [Stack([load_series(folder)]) for folder in release_folders(root)]
        used = {file.source for stack in stacks for file in load_overlay(root, stack).values()}
    except Refusal as refusal:
        return [f"{refusal.code}: {refusal.message}"]
    problems = [f"{source.relative_to(root)} is used by nothing" for source in sorted(files.keys() - used)]
    return problems + _kernel_problems(dict(files.values()))


def check_wheels(release: str, pinned: dict[str, set[str]]) -> int:
    """Whether the index's wheels of `release` hold the files that are pinned: prints what it finds, and returns
    how many wheels do not. Raises Refusal."""
    wrong = 0
    for wheel, found in fetch.wheels(release, pinned):
        others = [path for path, pins in sorted(pinned.items()) if found.get(path) not in pins]
        if others:
            wrong += 1
            print(f"error: {wheel}: not as pinned: {', '.join(others)}", file=sys.stderr)
        else:
            print(f"{wheel}: {len(pinned)} files as pinned", flush=True)
    return wrong


def check_main(argv: list[str], root: Path) -> int:
    """check-series.sh: returns 0, 1 if anything is wrong or 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="check-series.sh",
        description="See that a patch series is what an export gives, complete and all in use.",
    )
    parser.add_argument("release", nargs="?", metavar="RELEASE", help="only this one")
    parser.add_argument("--pristine", metavar="DIR", type=Path,
                        help="the unpacked source archive, instead of the one in the cache; the "
                        "other releases that the series serves are then not looked at")
    parser.add_argument("--wheels", action="store_true",
                        help="see instead that the wheels at the package index, of the releases that are served, "
                        "hold the files that are pinned")
    args = parser.parse_args(argv)
    if args.pristine and not args.release:
        parser.error("--pristine needs RELEASE")
    if args.pristine and args.wheels:
        parser.error("--wheels reads the wheels of the index, and takes no --pristine")
    if args.wheels:
        try:
            pinned = pinned_files(root)
            if args.release and args.release not in pinned:
                series_of(root, args.release)  # refuses it
            asked = [args.release] if args.release else sorted(pinned, key=Version)
            return int(sum([check_wheels(release, pinned[release]) for release in asked]) > 0)
        except Refusal as refusal:
            print(f"error: {refusal.code}: {refusal.message}", file=sys.stderr)
            return 1
    folders = release_folders(root, release=args.release or "*")
    if args.release and not folders:
        try:
            made = ", ".join(sorted({one.release for one in series_of(root, args.release)}, key=Version))
            raise Refusal("no-series", f"vLLM {args.release} takes series made for {made}; give one of these.")
        except Refusal as refusal:
            print(f"error: {refusal.code}: {refusal.message}", file=sys.stderr)
    failed = not folders
    for folder in folders:
        where = f"{folder.parent.name} {folder.name}"
        try:
            problems, added = check(
                root, folder, lambda series: _pristine(series, args.pristine),
                served=args.pristine is None,
            )
        except Refusal as refusal:
            problems, added = [f"{refusal.code}: {refusal.message}"], []
        for name, count in added:
            print(f"{where}: {name}: {count} lines added")
        if added:
            print(f"{where}: {sum(count for _, count in added)} of {MAX_ADDED_LINES} lines")
        for problem in problems:
            print(f"error: {where}: {problem}", file=sys.stderr)
        failed |= bool(problems)
    for problem in (problems := _overlay_problems(root)):
        print(f"error: {problem}", file=sys.stderr)
        failed = True
    return 1 if failed else 0
