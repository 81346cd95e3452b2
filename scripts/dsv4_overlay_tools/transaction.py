"""Changes a vLLM tree as one step, and puts it back.

Everything the tool keeps in the target lies in vllm/_dsv4_overlay/:

    staged/        new contents, complete and synced before any file of vLLM is touched
    originals/     the files as they were; --revert needs nothing else
    journal.json   what is being changed: while it exists, the tree is between two states
    record.json    what was changed: the same bytes under another name

Apply writes staged/ and originals/, then journal.json, then renames each staged file over its
place, and last renames journal.json to record.json. Revert renames it back first, restores each
file, and removes the journal last. So one rename begins and one ends each change, and at any moment
a crash leaves exactly one of: nothing, a folder without journal (vLLM untouched), a journal
(restore from it), a record (applied).
"""

from __future__ import annotations

import base64
import contextlib
import csv
import fcntl
import glob
import io
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from . import TOOL_VERSION
from .errors import Refusal
from .series import (
    STATE_DIR,
    FileDiff,
    Mismatch,
    OverlayFile,
    Series,
    load_overlay,
    sha256,
    split_lines,
)
from .target import Target

STAGED = f"{STATE_DIR}/staged"
ORIGINALS = f"{STATE_DIR}/originals"
JOURNAL = f"{STATE_DIR}/journal.json"
RECORD = f"{STATE_DIR}/record.json"


@dataclass(frozen=True)
class Change:
    path: str
    action: str  # patched | added | updated (the wheel's own list of files)
    real: Path
    before: bytes | None
    after: bytes
    mode: int
    patch: str | None = None


@dataclass
class Plan:
    root: Path
    changes: list[Change]
    record: bytes
    directories: list[str] = field(default_factory=list)


# ---------------------------------------------------------------- places


def resolve(root: Path, path: str) -> Path:
    """Where `path` really is. Raises Refusal(symlink-escape) if a link leads it out of `root`."""
    inside = os.path.realpath(root)
    real = os.path.realpath(root / path)
    if os.path.commonpath([inside, real]) != inside:
        raise Refusal(
            "symlink-escape",
            f"{path} leads out of {root} through a symbolic link, to {real}; replace the link by "
            "what it points to.",
            path=path,
        )
    return Path(real)


def _kept(folder: str, path: str) -> str:
    # A flat name that does not end in .py: nothing may import or compile what is kept there.
    return f"{folder}/{quote(path, safe='')}.orig"


def _differs_at(expected: bytes, found: bytes) -> int:
    old, new = split_lines(expected), split_lines(found)
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    return same + 1


@contextlib.contextmanager
def locked(root: Path, *, exclusive: bool, waiting: Callable[[], None]) -> Iterator[None]:
    """Keep other runs off the target; calls `waiting` before it waits for one.

    The lock is on vllm/ itself, not on a lock file (as filelock would have it): it vanishes with
    the process however that ends, and leaves nothing behind in the tree.
    """
    fd = os.open(root / "vllm", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(fd, kind)
        yield
    finally:
        os.close(fd)


# ---------------------------------------------------------------- planning


def _source_changed(target: Target, diff: FileDiff, found: bytes) -> Refusal:
    line = None
    try:
        diff.apply(found)
        where = "outside the lines the patch touches"
    except Mismatch as mismatch:
        line = mismatch.line
        where = f"first at line {line}"
    return Refusal(
        "source-changed",
        f"{diff.path} is not the one of vLLM {target.release}: it differs {where}; restore it in "
        f"{target.root} or use a pristine vLLM.",
        path=diff.path,
        line=line,
    )


def _patched(target: Target, series: Series) -> list[Change]:
    root = target.root
    changes = []
    for patch, diff in series.pairs():
        real = resolve(root, diff.path)
        try:
            before = real.read_bytes()
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
        if sha256(before) != series.files[diff.path]:
            raise _source_changed(target, diff, before)
        try:
            after = diff.apply(before)
        except Mismatch as mismatch:
            raise Refusal(
                "bad-series",
                f"{patch.name} does not fit line {mismatch.line} of the pristine {diff.path}; "
                "run scripts/check-series.sh.",
                path=diff.path,
                line=mismatch.line,
            ) from None
        changes.append(Change(diff.path, "patched", real, before, after, mode, patch.name))
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
            raise Refusal(
                "file-in-the-way",
                f"{taken[-1]} is already in {root} and is not from this overlay; move it away.",
                path=taken[-1],
            )
        directories |= {parent for parent in parents if not (root / parent).exists()}
        changes.append(Change(path, "added", real, None, file.data, file.mode))
    return changes, sorted(directories)


def _wheel_record(before: bytes, files: dict[str, tuple[str, int]]) -> bytes:
    """RECORD of a wheel with the rows of `files` (path -> sha256, size) replaced or added."""
    left = dict(files)
    end = b"\r\n" if b"\r\n" in before else b"\n"

    def row(path: str, digest: str, size: int) -> bytes:
        encoded = base64.urlsafe_b64encode(bytes.fromhex(digest)).rstrip(b"=").decode()
        out = io.StringIO()
        csv.writer(out, lineterminator="").writerow([path, f"sha256={encoded}", size])
        return out.getvalue().encode() + end

    rows = []
    for line in before.splitlines(keepends=True):
        name = next(csv.reader([line.decode("utf-8", "surrogateescape")]), [""])[0]
        rows.append(row(name, *left.pop(name)) if name in left else line)
    if rows and not rows[-1].endswith(b"\n"):
        rows[-1] += end
    return b"".join(rows + [row(path, *left[path]) for path in sorted(left)])


def _record_rows(record: dict, record_bytes: bytes) -> dict[str, tuple[str, int]]:
    """What the wheel's RECORD must say of everything this tool changed, itself excepted."""
    rows = {RECORD: (sha256(record_bytes), len(record_bytes))}
    for entry in record["files"]:
        if entry["sha256_before"]:
            rows[_kept(ORIGINALS, entry["path"])] = (entry["sha256_before"], entry["size_before"])
        if entry["action"] != "updated":
            rows[entry["path"]] = (entry["sha256_after"], entry["size_after"])
    return rows


def _provenance(repo_root: Path) -> tuple[str | None, bool | None]:
    """The commit of this repository, and whether what gets applied differs from it."""
    if not (repo_root / ".git").exists():  # as in an image's build, which is told
        return os.environ.get("DSV4_OVERLAY_COMMIT") or None, None
    try:
        import git
    except ImportError:  # it asks for the git program
        return None, None
    try:
        repo = git.Repo(repo_root)
        changed = repo.git.status("--porcelain", "--", "patches", "overlay", "VERSION")
        return repo.head.commit.hexsha, bool(changed)
    except (ValueError, git.GitError):
        return None, None


def as_built(series: Series, root: Path) -> Series:
    """`series`, or as it applies to the rebuilt wheel whose files `root` holds or held before it was applied."""

    def found(path: str) -> str:
        kept = root / _kept(ORIGINALS, path)
        return sha256((kept if kept.is_file() else root / path).read_bytes())

    for build in series.rebuilt:
        with contextlib.suppress(OSError):
            if all(found(path) == pin for path, pin in series.moved[build].items() if path in series.files):
                return series.of(build)
    return series


def build_plan(repo_root: Path, target: Target, series: Series) -> Plan:
    """Compute every new file in memory; writes nothing.

    Raises Refusal: source-changed, not-readable, file-in-the-way, symlink-escape, bad-series.
    """
    root = target.root
    resolve(root, STATE_DIR)
    changes = _patched(target, series)
    added, directories = _added(root, load_overlay(repo_root, series))
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
        before = real.read_bytes()
        mode = stat.S_IMODE(real.stat().st_mode)
        # Its own new sha256 cannot be here: RECORD holds that of this very record. It follows from
        # the rest of the record instead (_wheel_after).
        entries.append({
            "path": listing, "action": "updated", "patch": None, "mode": f"{mode:04o}",
            "sha256_before": sha256(before), "size_before": len(before),
            "sha256_after": None, "size_after": None,
        })  # fmt: skip

    commit, dirty = _provenance(repo_root)
    record = {
        "tool_version": TOOL_VERSION,
        "release": target.release,
        "series": series.release,
        "overlay_version": (repo_root / "VERSION").read_text("utf-8").strip(),
        "overlay_commit": commit,
        "overlay_dirty": dirty,
        "patches": [{"name": p.name, "sha256": sha256(p.data)} for p in series.patches],
        "files": entries,
        "directories": directories,
    }
    # No time and no host in it: applied twice, the same bytes.
    data = (json.dumps(record, indent=1) + "\n").encode()
    if entries and entries[-1]["action"] == "updated":
        after = _wheel_record(before, _record_rows(record, data))
        changes.append(Change(listing, "updated", real, before, after, mode))
    return Plan(root, changes, data, directories)


# ---------------------------------------------------------------- writing


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _give(place: Path | int, like: os.stat_result) -> None:
    """Give a path or an open file the owner of `like`."""
    if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):  # only root may give files away
            os.chown(place, like.st_uid, like.st_gid)


def _make_folder(path: Path, like: os.stat_result) -> None:
    os.mkdir(path)
    os.chmod(path, 0o755)  # whatever the umask: vLLM reads the record
    _give(path, like)


def _write(path: Path, data: bytes, mode: int, *, like: os.stat_result, mtime_ns: int) -> None:
    """Write a complete, synced file that has the owner of `like`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        _give(fd, like)
        os.fchmod(fd, mode)  # after chown, which clears setuid bits
        os.utime(fd, ns=(mtime_ns, mtime_ns))
        os.fsync(fd)
    finally:
        os.close(fd)


def _new_mtime(old: os.stat_result | None) -> int:
    """Now, or a second later when `old` is of this second.

    Python takes a .pyc for current if the source has the mtime (in whole seconds) and the size
    noted in it. We delete those we can find; one in a cache we do not know must not match either.
    """
    now = time.time_ns()
    while old and now // 10**9 == old.st_mtime_ns // 10**9:
        now += 10**9
    return now


def _purge_bytecode(root: Path, path: str, real: Path) -> None:
    """Delete what Python compiled from `path`, for any version of Python."""
    if not path.endswith(".py"):
        return
    prefix = os.environ.get("PYTHONPYCACHEPREFIX")
    for source in {root / path, real}:
        stem = glob.escape(source.stem)
        patterns = [
            f"{glob.escape(str(source.parent))}/__pycache__/{stem}.*.pyc",
            f"{glob.escape(str(source.parent))}/{stem}.pyc",
        ]
        if prefix:
            place = Path(prefix).absolute() / str(source.parent).lstrip("/")
            patterns.append(f"{glob.escape(str(place))}/{stem}.*.pyc")
        for pattern in patterns:
            for found in glob.glob(pattern):
                os.unlink(found)


def _empty(folder: Path) -> None:
    """Remove the folder and the plain files in it."""
    if folder.is_dir():
        for item in sorted(folder.iterdir()):
            os.unlink(item)
        os.rmdir(folder)


def check_writable(root: Path, places: list[Path]) -> None:
    for folder in sorted({place.parent for place in places} | {root / "vllm"}):
        while not folder.exists():
            folder = folder.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise Refusal(
                "not-writable",
                f"{folder} is not writable; run as its owner (nothing was changed).",
                path=str(folder),
            )


def apply(plan: Plan) -> None:
    """Write the plan to the target.

    If the system says no, puts back what was written and raises Refusal: not-writable, or
    half-applied if it could not put it back either.
    """
    root = plan.root
    check_writable(root, [change.real for change in plan.changes])
    owner = (root / "vllm").stat()  # of what is new, as of all that is there
    try:
        # staged/ exists before originals/ and goes before the record comes: originals alone
        # (somebody deleted the record) can be told from a run that never got to its journal.
        for folder in (STATE_DIR, STAGED, ORIGINALS):
            _make_folder(root / folder, owner)
        for change in plan.changes:
            old = None
            if change.before is not None:
                old = change.real.stat()
                _write(
                    root / _kept(ORIGINALS, change.path),
                    change.before,
                    change.mode,
                    like=old,
                    mtime_ns=old.st_mtime_ns,
                )
            _write(
                root / _kept(STAGED, change.path),
                change.after,
                change.mode,
                like=old or owner,
                mtime_ns=_new_mtime(old),
            )
        draft = root / (JOURNAL + ".tmp")
        _write(draft, plan.record, 0o644, like=owner, mtime_ns=time.time_ns())
        for folder in (STAGED, ORIGINALS):
            _sync(root / folder)
        os.replace(draft, root / JOURNAL)
        _sync(root / STATE_DIR)
        _sync(root / "vllm")

        for folder in plan.directories:
            _make_folder(root / folder, owner)
        for change in plan.changes:
            # A rename, so that a hard link (uv shares files with its cache) keeps the old file.
            os.replace(root / _kept(STAGED, change.path), change.real)
        for folder in {change.real.parent for change in plan.changes}:
            _sync(folder)
        for change in plan.changes:
            _purge_bytecode(root, change.path, change.real)
        os.rmdir(root / STAGED)
        os.replace(root / JOURNAL, root / RECORD)
        _sync(root / STATE_DIR)
    except OSError as error:
        what = f"Writing {error.filename or root} failed ({error.strerror})"
        try:
            _recover(root)
        except OSError:
            raise Refusal(
                "half-applied",
                f"{what}, and so did putting things back; make room and run --revert.",
                path=str(error.filename or root),
            ) from error
        raise Refusal(
            "not-writable",
            f"{what}; everything was put back.",
            path=str(error.filename or root),
        ) from error
    except KeyboardInterrupt:
        recover(root)
        raise


# ---------------------------------------------------------------- reading back


def state_of(root: Path) -> str:
    """clean (nothing of ours), begun (vLLM still untouched), changing (a journal), applied.

    Raises Refusal: symlink-escape, or record-lost if there are originals and nothing else.
    """
    resolve(root, STATE_DIR)
    if not os.path.lexists(root / STATE_DIR):
        return "clean"
    if (root / JOURNAL).exists():
        return "changing"
    if (root / RECORD).exists():
        return "applied"
    if (root / ORIGINALS).exists() and not (root / STAGED).exists():
        raise Refusal(
            "record-lost",
            f"{RECORD} is gone but {ORIGINALS}/ is there, so what was changed is unknown; install "
            "vLLM afresh.",
            path=RECORD,
        )
    return "begun"


def read_record(root: Path) -> tuple[dict, bytes]:
    """The record, or the journal while there is one. Raises Refusal(record-lost) if unreadable."""
    path = JOURNAL if (root / JOURNAL).exists() else RECORD
    try:
        data = (root / path).read_bytes()
        record = json.loads(data)
        for entry in record["files"]:
            entry["path"], entry["sha256_before"], entry["sha256_after"], int(entry["mode"], 8)
            entry["action"], entry["size_before"], entry["size_after"]
        record["directories"], record["release"], record["overlay_version"], record["patches"]
        record["files"][0]  # a record of nothing would be reverted by forgetting the originals
    except (OSError, ValueError, LookupError, TypeError):
        raise Refusal(
            "record-lost", f"{path} in {root} is damaged; install vLLM afresh.", path=path
        ) from None
    return record, data


def _wheel_after(root: Path, entry: dict, record: dict, data: bytes) -> bytes | None:
    """What the wheel's RECORD holds after apply; None if its original is gone."""
    try:
        before = (root / _kept(ORIGINALS, entry["path"])).read_bytes()
    except OSError:
        return None
    return _wheel_record(before, _record_rows(record, data))


def _entry_state(root: Path, entry: dict, record: dict, data: bytes) -> tuple[str, bytes | None]:
    """before | after | missing | edited, with the bytes found."""
    real = resolve(root, entry["path"])
    expected = Path(os.path.realpath(root)) / entry.get("real", entry["path"])
    try:
        if real != expected or not stat.S_ISREG(os.lstat(expected).st_mode):
            return "edited", None
        found = real.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return ("before" if entry["sha256_before"] is None else "missing"), None
    digest = sha256(found)
    after = entry["sha256_after"]
    if entry["action"] == "updated":
        listing = _wheel_after(root, entry, record, data)
        after = None if listing is None else sha256(listing)
    if digest == after:
        return "after", found
    return ("before" if digest == entry["sha256_before"] else "edited"), found


def survey(root: Path) -> list[tuple[dict, str, bytes | None]]:
    """Each entry of the record (or journal) with its state in the tree (see _entry_state)."""
    record, data = read_record(root)
    return [(entry, *_entry_state(root, entry, record, data)) for entry in record["files"]]


def edited(
    root: Path, entry: dict, state: str, found: bytes | None, repo_root: Path, series: Series | None
) -> Refusal:
    """The refusal for an entry that is no longer as applied, with the line if it can be told."""
    path = entry["path"]
    line = None
    if state == "before":
        return Refusal(
            "edited-since-apply",
            f"{path} is as before the overlay was applied (git reset?); run --revert, which takes off the rest.",
            path=path,
        )
    if found is None:
        what = "is gone or no longer a plain file"
    else:
        what = "was edited since the overlay was applied"
        applied = _applied_bytes(root, entry, repo_root, series)
        if applied is not None:
            line = _differs_at(applied, found)
            what += f", first at line {line}"
    return Refusal(
        "edited-since-apply",
        f"{path} {what}; undo that (or install vLLM afresh) and run again.",
        path=path,
        line=line,
    )


def _applied_bytes(
    root: Path, entry: dict, repo_root: Path, series: Series | None
) -> bytes | None:
    """What was applied at `entry`, if the files at hand still produce it."""
    data = None
    with contextlib.suppress(OSError, Mismatch, Refusal):
        if entry["action"] == "updated":
            record, raw = read_record(root)
            return _wheel_after(root, entry, record, raw)
        if series and entry["action"] == "added":
            data = load_overlay(repo_root, series)[entry["path"]].data
        elif series:
            before = (root / _kept(ORIGINALS, entry["path"])).read_bytes()
            diffs = {diff.path: diff for _, diff in series.pairs()}
            data = diffs[entry["path"]].apply(before) if entry["path"] in diffs else None
    return data if data is not None and sha256(data) == entry["sha256_after"] else None


def changed_since(repo_root: Path, series: Series, record: dict) -> str | None:
    """The first patch or overlay file that is not the one in the record, or None."""
    applied = {item["name"]: item["sha256"] for item in record["patches"]}
    at_hand = {patch.name: sha256(patch.data) for patch in series.patches}
    applied |= {
        entry["path"]: entry["sha256_after"]
        for entry in record["files"]
        if entry["action"] == "added"
    }
    at_hand |= {path: sha256(file.data) for path, file in load_overlay(repo_root, series).items()}
    return min((name for name in applied.keys() | at_hand.keys()
                if applied.get(name) != at_hand.get(name)), default=None)


# ---------------------------------------------------------------- taking off


def recover(root: Path) -> None:
    """Bring a tree that a run left between two states back to pristine.

    Raises Refusal: edited-since-apply, having changed nothing, if a file is neither as before nor as
    after; half-applied if it fails on the way.
    """
    try:
        _recover(root)
    except OSError as error:
        raise _between(root, error) from error


def _between(root: Path, error: OSError) -> Refusal:
    place = str(error.filename or root)
    return Refusal(
        "half-applied",
        f"Writing {place} failed ({error.strerror}); the tree is between two states: make room and run "
        "--revert again.",
        path=place,
    )


def _recover(root: Path) -> None:
    if state_of(root) == "changing":
        _restore(root, _restorable(root))
    elif (root / STATE_DIR).exists():
        _refuse_strangers(root)
        _clear(root)


def revert(root: Path) -> None:
    """Take the overlay off an applied tree. If interrupted, does so all the same.

    Raises Refusal: half-applied if it fails on the way; before anything is changed not-writable, and what
    _restorable() says.
    """
    found = _restorable(root)
    check_writable(root, [resolve(root, entry["path"]) for entry, _, _ in found])
    try:
        os.replace(root / RECORD, root / JOURNAL)
        _sync(root / STATE_DIR)
        _restore(root, found)
    except OSError as error:
        raise _between(root, error) from error
    except KeyboardInterrupt:
        if state_of(root) != "applied":
            recover(root)
        raise


def _refuse_strangers(root: Path) -> None:
    ours = {Path(path).name for path in (STAGED, ORIGINALS, JOURNAL, JOURNAL + ".tmp", RECORD)}
    for item in sorted((root / STATE_DIR).iterdir()):
        if item.name not in ours | {"__pycache__"}:
            path = f"{STATE_DIR}/{item.name}"
            what = f"{path} in {root} is not from this overlay; move it away."
            raise Refusal("file-in-the-way", what, path=path)


def _restorable(root: Path) -> list[tuple[dict, str, bytes | None]]:
    """survey() of a tree that can be put back as it was.

    Raises Refusal: edited-since-apply, record-lost if an original is gone or damaged, file-in-the-way.
    """
    found = survey(root)
    for entry, state, data in found:
        if state in ("edited", "missing"):
            raise edited(root, entry, state, data, root, None)
        kept, pin = root / _kept(ORIGINALS, entry["path"]), entry["sha256_before"]
        if state == "after" and pin and not (kept.is_file() and sha256(kept.read_bytes()) == pin):
            raise Refusal(
                "record-lost", f"{kept} is gone or damaged; install vLLM afresh.", path=entry["path"]
            )
    _refuse_strangers(root)
    return found


def _restore(root: Path, found: list[tuple[dict, str, bytes | None]]) -> None:
    """Put everything in the journal back; `found` is what _restorable() says of it. Whatever is already
    back is left as it is, so a crash in here is mended by both again."""
    record, _ = read_record(root)
    (root / STAGED).mkdir(exist_ok=True)
    for entry, state, _ in found:
        real = resolve(root, entry["path"])
        if state == "after" and entry["sha256_before"]:
            kept = root / _kept(ORIGINALS, entry["path"])
            old = kept.stat()
            staged = root / _kept(STAGED, entry["path"])
            _write(
                staged,
                kept.read_bytes(),
                int(entry["mode"], 8),
                like=old,
                mtime_ns=old.st_mtime_ns,
            )
            os.replace(staged, real)
        elif state == "after":
            os.unlink(real)
        _purge_bytecode(root, entry["path"], real)
    for folder in sorted(record["directories"], reverse=True):
        # Only if empty: somebody may have put a file of their own there.
        with contextlib.suppress(OSError):
            os.rmdir(root / folder / "__pycache__")
        with contextlib.suppress(OSError):
            os.rmdir(root / folder)
    for parent in {resolve(root, entry["path"]).parent for entry, _, _ in found}:
        if parent.is_dir():
            _sync(parent)
    _clear(root)


def _clear(root: Path) -> None:
    """Remove the state folder of a tree whose vLLM files are as they were; the journal last."""
    _empty(root / ORIGINALS)
    _empty(root / STAGED)
    for name in (JOURNAL + ".tmp", JOURNAL):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(root / name)
    for cache in (root / STATE_DIR).glob("__pycache__"):
        _empty(cache)
    os.rmdir(root / STATE_DIR)
    _sync(root / "vllm")
