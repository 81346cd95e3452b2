"""The command line of apply-patches.sh, and its report."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from . import fetch, transaction
from .errors import Refusal
from .files import check_writable, read
from .planning import as_built, build_plan
from .record import changed_since, edited, original_lost, read_record, survey
from .series import Mismatch, Stack, find_series, load_overlay, load_series, release_folders, series_of, sha256
from .target import Target, check_index, check_relied_on, detect, locate_installed

DESCRIPTION = "Put the DeepSeek-V4 overlay onto a pinned vLLM, or take it off again."
NATIVE_LOADER = "vllm/third_party/mla_kernels/native.py"
LIBRARY = "vllm/third_party/mla_kernels/lib/libmla_kernels.so"
EPILOG = "exit status: 0 done, or nothing to do; 1 refused, nothing changed; 2 wrong usage"


class UsageError(Exception):
    """The command line makes no sense; the text says why."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="apply-patches.sh", description=DESCRIPTION, epilog=EPILOG,
                     allow_abbrev=False)
    parser.add_argument("target", nargs="?", type=Path, metavar="TARGET",
                        help="git checkout, unpacked source archive or site-packages folder")
    parser.add_argument("--installed", action="store_true",
                        help="the vLLM that the active Python would import")
    parser.add_argument("--fetch", metavar="RELEASE",
                        help="first download the pinned source of RELEASE into TARGET")
    parser.add_argument("--series", metavar="NAME", action="append", default=[],
                        help="of the release's series this one, e.g. drop-in; may be given again; `default`, "
                        "as without the option: all but those on request (docs/releases.md)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", dest="mode", action="store_const", const="check",
                      help="would it apply? change nothing")
    mode.add_argument("--status", dest="mode", action="store_const", const="status",
                      help="what is applied, file by file")
    mode.add_argument("--revert", dest="mode", action="store_const", const="revert",
                      help="take it off: every byte as before")
    parser.add_argument("--json", action="store_true", help="the report as JSON on standard output")
    parser.set_defaults(mode="apply")
    return parser


def _parse(argv: list[str]) -> argparse.Namespace:
    args = _parser().parse_args(argv)
    if "" in [*argv, *args.series, args.fetch]:
        raise UsageError("an argument is empty (is a variable unset?)")
    if (args.target is None) != args.installed:
        raise UsageError("give either TARGET or --installed")
    if args.fetch and (args.installed or args.mode != "apply"):
        raise UsageError("--fetch takes a TARGET and none of --check, --status and --revert")
    if args.series and args.mode not in ("apply", "check"):
        raise UsageError("--series goes with apply and --check; --status and --revert take what is applied")
    return args


class Report:
    """What gets printed: filled in as far as the run gets."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {
            "release": None,
            "target": None,
            "kind": None,
            "commit": None,
            "series": [],
            "overlay": None,
            "state": "unknown",
            "files": [],
            "notes": [],
            "error": None,
        }

    def refuse(self, refusal: Refusal) -> None:
        self.data["error"] = {
            "code": refusal.code,
            "message": refusal.message,
            "path": refusal.path,
            "line": refusal.line,
        }

    @contextlib.contextmanager
    def changing(self, root: Path) -> Iterator[None]:
        """If what is done here is refused, the report has the state that was reached instead of the files."""
        try:
            yield
        except Refusal:
            state = transaction.state_of(root)
            self.data.update(state=state if state in ("clean", "applied") else "drifted", files=[])
            raise

    def applied(self, record: dict) -> None:
        self.data["release"] = record["release"]
        self.data["series"] = list(record["series"])
        self.data["overlay"] = {key: record[f"overlay_{key}"] for key in ("version", "commit", "dirty")}

    def add(self, path: str, action: str) -> None:
        self.data["files"].append({"path": path, "action": action})

    def print(self, as_json: bool) -> None:
        data = self.data
        lines = []
        if as_json:
            lines = [json.dumps(data, indent=1)]
        elif data["files"] or not data["error"]:
            lines = [f"{file['action']:12}  {file['path']}" for file in data["files"]]
            if overlay := data["overlay"]:
                lines.append(f"overlay {overlay['version']}, commit {overlay['commit'] or 'unknown'}"
                             + ", with changes" * bool(overlay["dirty"]))
            line = (f"vLLM {data['release'] or 'of unknown release'} ({data['kind'] or 'unknown'}) "
                    f"in {data['target']}: {data['state']}")  # fmt: skip
            if names := ", ".join(data["series"]):
                line += f"; apply would put on {names}" if data["state"] == "clean" else f" ({names})"
            lines.append(line)
        try:
            for line in lines:
                print(line, flush=True)
        except OSError as error:  # the exit status still says what was done
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python fails again when it ends
            print(f"note: the report could not be written ({error.strerror})", file=sys.stderr)
        for note in () if as_json else data["notes"]:
            print(f"note: {note}", file=sys.stderr)
        if data["error"] and not as_json:
            print(f"error: {data['error']['code']}: {data['error']['message']}", file=sys.stderr)


def _waiting() -> None:
    print("Another run is at work on this target; waiting for it.", file=sys.stderr)


def _half_applied(report: Report, state: str) -> None:
    report.data["state"] = "drifted"
    what = "is between two states" if state == "changing" else "has what an apply prepares, and vLLM as it was,"
    raise Refusal(
        "half-applied",
        f"{report.data['target']} {what} because a run was interrupted; run again "
        "to complete it, or with --revert to take it off.",
    )


def _series_for(root: Path, target: Target, names: Iterable[str] = ()) -> Stack:
    if target.release is None:
        why = target.notes[0] if target.notes else "its metadata names no version"
        raise Refusal(
            "wrong-release",
            f"The release of {target.root} is unknown ({why}); fetch the tags or use a release.",
        )
    return as_built(find_series(root, target.release, names), target.root)


def _survey(
    report: Report, root: Path, target: Target, series: Stack | None, good: tuple[str, ...] = ("after",)
) -> None:
    """Report an applied tree file by file. Raises Refusal(edited-since-apply) unless all are in a `good` state."""
    first = None
    for entry, state, found in survey(target):
        # Without its original, what the wheel's RECORD should be after apply cannot be told.
        needed = state == "after" or (state == "edited" and entry["action"] == "updated")
        lost = original_lost(target.root, entry) if needed else None
        if state in good and not lost:
            report.add(entry["path"], entry["action"])
            continue
        report.add(entry["path"], "not-revertible" if lost else "missing" if found is None else "edited")
        if first is None:
            first = lost or edited(target.root, entry, state, found, root, series)
    if first:
        report.data["state"] = "drifted"
        raise first
    report.data["state"] = "applied"


def _run(args: argparse.Namespace, root: Path, report: Report) -> None:
    data = report.data
    data["target"] = str(args.target.absolute()) if args.target else None
    pins = []
    for folder in release_folders(root):
        try:
            pins.append(load_series(folder))
        except Refusal:  # what is applied can be told, and taken off, without any series
            if args.mode not in ("status", "revert"):
                raise
    if args.fetch:
        data["release"] = args.fetch
        stack = find_series(root, args.fetch, args.series)
        _check_kernels(root, set(load_overlay(root, stack)))  # before anything is unpacked
        fetch.fetch(stack.series[0], args.fetch, args.target)
    path = args.target
    if args.installed:
        # The shell script names the Python that was active when it was called.
        path = locate_installed(os.environ.get("DSV4_OVERLAY_PYTHON") or "python3")
    target = detect(path, pins)
    data.update(target=str(target.root), kind=target.kind, release=target.release,
                commit=target.commit)
    data["notes"] += target.notes
    if args.fetch and target.release != args.fetch:
        raise Refusal("archive-mismatch", f"The archive of {args.fetch} holds {target.release}.")
    writes = args.mode in ("apply", "revert")
    with transaction.locked(target.root, exclusive=writes, waiting=_waiting):
        if args.mode == "revert":
            _revert(root, report, target)
        else:
            _apply(args.mode, root, report, target, args.series)


def _apply(mode: str, root: Path, report: Report, target: Target, names: list[str]) -> None:
    """apply, --check and --status: they differ in what they do once the tree is understood."""
    data = report.data
    state = transaction.state_of(target.root)
    if state in ("begun", "changing"):
        if mode != "apply":
            _half_applied(report, state)
        with report.changing(target.root):
            data["notes"] += transaction.recover(target)
        data["notes"].append("an interrupted run was undone first")
        state = "clean"
    if state == "applied":
        record, _ = read_record(target.root)
        report.applied(record)
        wanted = record["series"] if mode == "status" else _series_for(root, target, names).releases
        series = None
        with contextlib.suppress(Refusal):  # what is applied can be told without a series
            series = _series_for(root, target, record["series"])
        _survey(report, root, target, series)
        if list(record["series"]) != list(wanted):
            raise Refusal(
                "patch-changed",
                f"{target.root} has {', '.join(record['series'])} applied, and not {', '.join(wanted)}; run with "
                "--revert first, or name what is applied with --series.",
            )
        other = changed_since(root, series, record) if series else None
        if other is None and record["release"] == target.release:
            if series:
                _check_relied_on(report, target, series)
            data["notes"] += _of_kernels(root, {entry["path"] for entry in record["files"]})
            if mode != "status":
                data["notes"].append("already applied; nothing to do")
            return
        message = (
            f"{other or target.root} is not the one that was applied (overlay "
            f"{record['overlay_version']}, vLLM {record['release']}); run with --revert first."
        )
        if mode == "status":
            data["notes"] += [*_of_kernels(root, {entry["path"] for entry in record["files"]}), message]
            return
        raise Refusal("patch-changed", message, path=other)

    series = _series_for(root, target, names)
    check_index(target, series)
    try:
        plan = build_plan(root, target, series)
    except Refusal as refusal:
        if refusal.code != "bad-series":
            data["state"] = "drifted"
        if refusal.code == "source-changed":
            _refuse_remains(root, target)
        raise
    _check_relied_on(report, target, series)
    paths = {change.path for change in plan.changes}
    notes = [] if mode == "status" else _check_kernels(root, paths)
    if mode == "check":
        check_writable(plan.places)
    data["state"] = "clean"
    if mode != "status":
        data["notes"] += plan.notes + notes
    verbs = {
        "apply": {},
        "check": {"patched": "would-patch", "added": "would-add", "updated": "would-update"},
        "status": {"patched": "pristine", "added": "absent", "updated": "pristine"},
    }[mode]
    data["series"] = list(series.releases)
    if mode == "apply":
        with report.changing(target.root):
            transaction.apply(plan)
        data["state"] = "applied"
        report.applied(json.loads(plan.record))
    for change in plan.changes:
        report.add(change.path, verbs.get(change.action, change.action))


def _check_relied_on(report: Report, target: Target, series: Stack) -> None:
    try:
        check_relied_on(target, series)
    except Refusal:
        report.data["state"] = "drifted"
        raise


def _of_kernels(root: Path, paths: set[str]) -> list[str]:
    """Notes on the native kernels, if `paths` (applied, or to be) need any: none, or of other sources."""
    if NATIVE_LOADER not in paths:
        return []
    if LIBRARY not in paths:
        return ["the native kernels are missing, so Triton's (full-width) or FlashMLA's (drop-in) run instead, on "
                "Hopper mostly slower; run scripts/build-kernels.sh, then --revert and apply again"]  # fmt: skip
    library = root / "overlay/common" / LIBRARY
    if not library.is_file():  # what was applied is not at hand
        return []
    built = re.search(rb'"sources": "([0-9a-f]{64})"', library.read_bytes())
    sources = b"".join(file.read_bytes() for file in sorted((root / "csrc").glob("[!.]*")))  # as build-kernels.sh
    if built and built[1].decode() == sha256(sources):
        return []
    return [f"{library} was not built from csrc as it is; run scripts/build-kernels.sh, then --revert and apply "
            "again"]  # fmt: skip


def _check_kernels(root: Path, paths: set[str]) -> list[str]:
    """`_of_kernels`. Raises Refusal(other-sources) if they would be applied, and are of other sources."""
    notes = _of_kernels(root, paths)
    if notes and LIBRARY in paths:
        raise Refusal(
            "other-sources",
            f"{root / 'overlay/common' / LIBRARY} was not built from csrc as it is; run scripts/build-kernels.sh, "
            "or delete the file to apply without native kernels.",
            path=LIBRARY,
        )
    return notes


def _refuse_remains(root: Path, target: Target) -> None:
    """Raise Refusal(record-lost) if files are patched that no record tells of, as after `git clean`."""
    patched = []
    with contextlib.suppress(Refusal):  # of a release without a series nothing can be told
        every = _series_for(root, target, [one.name for one in series_of(root, target.release)]).series
        for some in itertools.chain(*(itertools.combinations(every, count) for count in range(1, len(every) + 1))):
            series = Stack(list(some))  # any may have been applied
            for _, diff in series.pairs():
                with contextlib.suppress(OSError, Mismatch):
                    if sha256(diff.undo(read(target.root / diff.path))) == series.files[diff.path]:
                        patched += [diff.path] * (diff.path not in patched)
    if patched:
        raise Refusal(
            "record-lost",
            f"The record of what was applied is gone (git clean?) but {', '.join(patched)} in {target.root} still "
            "have the patches; restore them (git checkout) or install vLLM afresh.",
            path=patched[0],
        )


def _revert(root: Path, report: Report, target: Target) -> None:
    data = report.data
    state = transaction.state_of(target.root)
    if state == "clean":
        _refuse_remains(root, target)
        data["state"] = "clean"
        data["notes"].append("nothing is applied; nothing to do")
        return
    if state in ("begun", "changing"):
        with report.changing(target.root):
            data["notes"] += transaction.recover(target)
        data["notes"].append("an interrupted run was undone")
    else:
        try:
            record, _ = read_record(target.root)
            series = _series_for(root, target, record["series"])
        except Refusal:
            series = None  # only helps to name a line; the record suffices to revert
        _survey(report, root, target, series, ("after", "before", "replaced"))
        with report.changing(target.root):
            data["notes"] += transaction.revert(target)
        for file in data["files"]:
            file["action"] = "removed" if file["action"] == "added" else "restored"
    data["state"] = "clean"


def main(argv: list[str], root: Path) -> int:
    """Run apply-patches.sh with the patches and overlay of the repository at `root`.

    Returns the exit status.
    """
    report = Report()
    as_json = "--json" in argv
    try:
        args = _parse(argv)
        _run(args, root, report)
    except UsageError as error:
        if as_json:
            report.refuse(Refusal("usage", str(error)))
            report.print(as_json=True)
        else:
            print(f"error: usage: {error}; see --help.", file=sys.stderr)
        return 2
    except Refusal as refusal:
        report.refuse(refusal)
    except OSError as error:
        report.refuse(Refusal("not-readable", f"{error.filename or report.data['target']}: {error.strerror}."))
    except KeyboardInterrupt:
        report.refuse(Refusal("interrupted", "Interrupted; --status says what is applied."))
    report.print(as_json)
    return 1 if report.data["error"] else 0
