"""What apply would write: every new file, computed in memory before anything is touched."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

from . import TOOL_VERSION
from .errors import Refusal
from .files import read, resolve
from .record import ORIGINALS, kept, record_rows, seal, wheel_record
from .series import STATE_DIR, FileDiff, Mismatch, OverlayFile, Stack, load_overlay, sha256
from .target import Target


@dataclass(frozen=True)
class Change:
    path: str
    action: str  # patched | added | updated (the wheel's own list of files)
    real: Path
    before: bytes | None
    after: bytes
    mode: int
    patch: str | None = None


@dataclass(frozen=True)
class Plan:
    target: Target
    changes: list[Change]  # by path, the wheel's own list of files last
    record: bytes
    directories: list[str]  # that the overlay needs and vLLM does not have, from the outside in
    notes: list[str]  # what the user should know

    @property
    def places(self) -> list[Path]:
        """Where something is written."""
        return [change.real for change in self.changes] + [self.target.root / STATE_DIR]


def _source_changed(target: Target, diff: FileDiff, found: bytes) -> Refusal:
    line = None
    try:
        diff.apply(found)
        where = "it differs outside the lines the patch touches"
    except Mismatch as mismatch:
        line = mismatch.line  # not where the file begins to differ: only its sha256 is known
        where = f"line {line} is not what the patch expects there"
    return Refusal(
        "source-changed",
        f"{diff.path} is not the one of vLLM {target.release}: {where}; restore it in "
        f"{target.root} or use a pristine vLLM.",
        path=diff.path,
        line=line,
    )


def _patched(target: Target, stack: Stack) -> list[Change]:
    root = target.root
    changes = []
    pins = stack.files
    for names, diff in stack.pairs():
        real = resolve(root, diff.path)
        try:
            before = read(real)
            mode = stat.S_IMODE(real.stat().st_mode)
        except PermissionError:
            raise Refusal(
                "not-readable",
                f"{diff.path} cannot be read in {root}; run as its owner.",
                path=diff.path,
            ) from None
        except OSError as error:
            raise Refusal(
                "source-changed",
                f"{diff.path} of vLLM {target.release} is not a file in {root} "
                f"({error.strerror}); use a pristine vLLM.",
                path=diff.path,
            ) from None
        if sha256(before) != pins[diff.path]:
            raise _source_changed(target, diff, before)
        try:
            after = diff.apply(before)
        except Mismatch as mismatch:
            raise Refusal(
                "bad-series",
                f"{names} does not fit line {mismatch.line} of the pristine {diff.path}; "
                "run scripts/check-series.sh.",
                path=diff.path,
                line=mismatch.line,
            ) from None
        changes.append(Change(diff.path, "patched", real, before, after, mode, names))
    return changes


def _added(root: Path, overlay: dict[str, OverlayFile]) -> tuple[list[Change], list[str]]:
    changes = []
    directories: set[str] = set()
    for path, file in overlay.items():
        real = resolve(root, path)
        parents = [parent.as_posix() for parent in Path(path).parents][:-1]
        taken = [path] if os.path.lexists(root / path) else []
        taken += [p for p in parents if os.path.lexists(root / p) and not (root / p).is_dir()]
        if taken:
            ours = taken == [path] and real.is_file() and read(real) == file.data
            whose = "as this overlay has it, but no record tells of it" if ours else "and is not from this overlay"
            raise Refusal(
                "file-in-the-way",
                f"{taken[-1]} is already in {root} {whose}; move it away.",
                path=taken[-1],
            )
        directories |= {parent for parent in parents if not (root / parent).exists()}
        changes.append(Change(path, "added", real, None, file.data, file.mode))
    return changes, sorted(directories)


def _provenance(repo_root: Path) -> tuple[str | None, bool | None, str]:
    """The commit of this repository, whether what gets applied differs from it, and why no commit is known."""
    if not (repo_root / ".git").exists():  # as in an image's build, which is told
        commit = os.environ.get("DSV4_OVERLAY_COMMIT") or None
        return commit, None, "it is no git checkout; use a clone, or set DSV4_OVERLAY_COMMIT"
    try:
        import git
    except ImportError:  # it asks for the git program
        return None, None, "there is no git program; install git"
    try:
        repo = git.Repo(repo_root)
        # Without two settings of the user's, who may not want to be shown every file.
        plain = repo.git(c="core.excludesFile=")
        changed = plain.status("--porcelain", "--untracked-files=all", "--", "patches", "overlay", "VERSION")
        return repo.head.commit.hexsha, bool(changed), ""
    except (ValueError, git.GitError) as error:
        if "dubious ownership" in str(error):
            trust = f"git config --global --add safe.directory {shlex.quote(str(repo_root))}"
            return None, None, f"git distrusts it because another user owns it; run {trust}"
        return None, None, "git finds no commit in it; use a clone"


def as_built(stack: Stack, root: Path) -> Stack:
    """`stack`, or as it applies to the rebuilt wheel whose files `root` holds or held before it was applied."""

    def found(path: str) -> str:
        original = root / kept(ORIGINALS, path)
        return sha256(read(original if original.is_file() else root / path))

    built = []
    for series in stack.series:
        for build in series.rebuilt:
            with contextlib.suppress(OSError):
                if all(found(path) == pin for path, pin in series.moved[build].items() if path in series.files):
                    series = series.of(build)
                    break
        built.append(series)
    return Stack(built)


def build_plan(repo_root: Path, target: Target, stack: Stack) -> Plan:
    """Compute every new file in memory; writes nothing.

    Raises Refusal: source-changed, not-readable, file-in-the-way, symlink-escape, bad-series.
    """
    root = target.root
    resolve(root, STATE_DIR)
    changes = _patched(target, stack)
    added, directories = _added(root, load_overlay(repo_root, stack))
    changes = sorted(changes + added, key=lambda change: change.path)
    places: dict[Path, str] = {}
    for change in changes:
        if change.real in places:
            raise Refusal(
                "symlink-escape",
                f"{change.path} and {places[change.real]} are one file through a symbolic link; "
                "replace the link by what it points to.",
                path=change.path,
            )
        places[change.real] = change.path

    entries = []
    for change in changes:
        entry = {
            "path": change.path,
            "action": change.action,
            "patch": change.patch,
            "mode": f"{change.mode:04o}",
            "sha256_before": None if change.before is None else sha256(change.before),
            "size_before": None if change.before is None else len(change.before),
            "sha256_after": sha256(change.after),
            "size_after": len(change.after),
        }
        if change.real != Path(os.path.realpath(root)) / change.path:
            entry["real"] = change.real.relative_to(os.path.realpath(root)).as_posix()
        entries.append(entry)

    listing = f"{target.dist_info}/RECORD" if target.dist_info else None
    if listing and (root / listing).is_file():
        real = resolve(root, listing)
        before = read(real)
        mode = stat.S_IMODE(real.stat().st_mode)
        # Its own new sha256 cannot be here: RECORD holds that of this very record. It follows from
        # the rest of the record instead (record.survey).
        entries.append({
            "path": listing, "action": "updated", "patch": None, "mode": f"{mode:04o}",
            "sha256_before": sha256(before), "size_before": len(before),
            "sha256_after": None, "size_after": None,
        })  # fmt: skip

    commit, dirty, why = _provenance(repo_root)
    notes = [] if commit else [f"the commit of the overlay in {repo_root} is unknown and not recorded: {why}"]
    record = {
        "tool_version": TOOL_VERSION,
        "release": target.release,
        "series": stack.releases,
        "overlay_version": (repo_root / "VERSION").read_text("utf-8").strip(),
        "overlay_commit": commit,
        "overlay_dirty": dirty,
        "patches": [{"name": name, "sha256": sha256(patch.data)} for name, patch in stack.patches],
        "files": entries,
        "directories": directories,
    }
    # No time and no host in it: applied twice, the same bytes.
    data = seal(record)
    if entries and entries[-1]["action"] == "updated":
        after = wheel_record(before, record_rows(record, data))
        changes.append(Change(listing, "updated", real, before, after, mode))
    return Plan(target, changes, data, directories, notes)
