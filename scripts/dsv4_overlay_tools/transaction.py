"""Changes a vLLM tree as one step, and puts it back.

Everything the tool keeps in the target lies in vllm/_dsv4_overlay/:

    staged/        new contents before they are put in place; when taken off, what was in place
    originals/     the files as they were; --revert needs nothing else
    journal.json   what is being changed
    record.json    what was changed: the same bytes under another name

What is in it tells the state of the tree, and the state alone decides what is done. One rename, or one
folder made or removed, leads from each state to the next, so a run can die anywhere.

    state      how to tell it             files of vLLM             recover()            revert()
    clean      no vllm/_dsv4_overlay      as released               -                    -
    begun      neither of the two files   as released               clears               clears
    changing   journal.json               each as before or after   puts back, clears    puts back, clears
    applied    record.json                each as after             -                    puts back, clears
    (lost)     originals/ alone           unknown                   refuses              refuses

To apply: write staged/ and originals/ (begun), let the journal appear (changing), rename each staged file over
its place, rename the journal to record.json (applied).

To put back: rename record.json to journal.json, if there is one; for each file, move what is there to staged/ and
the original to its place. Renames need no room on the disk, and if one fails, those before it are undone: a tree
that was applied stays applied. To clear: remove the folder, the journal last.

When apply fails or is interrupted, what recover() does is done. What is then said depends on the state that was
reached, not on where the failure was.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import Refusal
from .files import check_writable, empty, make_folder, new_mtime, purge_bytecode, read, resolve, sync, write
from .planning import Change, Plan
from .record import JOURNAL, ORIGINALS, RECORD, STAGED, edited, kept, original_lost, read_record, survey
from .series import STATE_DIR
from .target import Target

DRAFT = f"{JOURNAL}.tmp"


class Stopped(Exception):
    """A change was stopped, not by the system: `code` and `path` as in Refusal, `what` without its end."""

    def __init__(self, code: str, what: str, path: str | None = None) -> None:
        super().__init__(what)
        self.code, self.what, self.path = code, what, path


# ---------------------------------------------------------------- keeping others away


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


@contextlib.contextmanager
def _signals_wait() -> Iterator[Callable[[], None]]:
    """Have the signals that ask a program to end wait; the function given raises Stopped if one came."""
    came: list[int] = []

    def stop() -> None:
        if came:
            raise Stopped("interrupted", f"Interrupted ({signal.Signals(came[0]).name})")

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as below nohup
                before[number] = signal.signal(number, lambda number, frame: came.append(number))
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- states


def state_of(root: Path) -> str:
    """The state of the table above. Raises Refusal: symlink-escape, file-in-the-way; record-lost, the last row."""
    resolve(root, STATE_DIR)
    place = root / STATE_DIR
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise Refusal(
            "file-in-the-way",
            f"{place} is not the folder of the overlay's record; move it away.",
            path=STATE_DIR,
        )
    try:
        found = {f"{STATE_DIR}/{name}" for name in os.listdir(root / STATE_DIR)}
    except FileNotFoundError:
        return "clean"
    if JOURNAL in found:
        return "changing"
    if RECORD in found:
        return "applied"
    # staged/ comes before originals/ and goes after it, so that this is not a run that died.
    if ORIGINALS in found and STAGED not in found:
        raise Refusal(
            "record-lost",
            f"{RECORD} is gone but {ORIGINALS}/ is there, so what was changed is unknown; install "
            f"vLLM afresh, or restore its files by git and remove {place}.",
            path=RECORD,
        )
    return "begun"


# ---------------------------------------------------------------- putting on


def apply(plan: Plan) -> None:
    """Write the plan to its target, which is clean.

    Raises Refusal. Having changed nothing, or put it back: not-writable, source-changed or file-in-the-way if
    somebody changed a file while this ran, interrupted. Else: half-applied, not-synced.
    """
    check_writable(plan.places)
    with _signals_wait() as stop:
        try:
            _put_on(plan, stop)
        except (OSError, Stopped) as error:
            with contextlib.suppress(OSError, Stopped):  # the state that is left tells of it
                _take_off(plan.target, finished=False)
            raise _told(plan.target, error, "on") from error


def _put_on(plan: Plan, stop: Callable[[], None]) -> None:
    root = plan.target.root
    for folder in (STATE_DIR, STAGED, ORIGINALS):  # begun
        make_folder(root / folder)
    for change in plan.changes:
        stop()
        path, like, mtime = change.path, root / "vllm", 0
        if change.before is not None:
            like, mtime = change.real, change.real.stat().st_mtime_ns
            write(root / kept(ORIGINALS, path), change.before, change.mode, like=like, mtime_ns=mtime)
        write(root / kept(STAGED, path), change.after, change.mode, like=like, mtime_ns=new_mtime(mtime))
    write(root / DRAFT, plan.record, 0o644, like=root / "vllm", mtime_ns=time.time_ns())
    for folder in (STAGED, ORIGINALS):
        sync(root / folder)

    os.replace(root / DRAFT, root / JOURNAL)  # changing
    for folder in (STATE_DIR, "vllm"):
        sync(root / folder)
    for folder in plan.directories:
        make_folder(root / folder)
    for change in plan.changes:
        stop()
        _expect(change)
        # A rename, so that a hard link (uv shares files with its cache) keeps the old file.
        os.replace(root / kept(STAGED, change.path), change.real)
    made = {(root / folder).parent for folder in plan.directories}
    for folder in {change.real.parent for change in plan.changes} | made:
        sync(folder)
    for change in plan.changes:
        purge_bytecode(root, change.path, change.real)
    os.rmdir(root / STAGED)

    os.replace(root / JOURNAL, root / RECORD)  # applied
    sync(root / STATE_DIR)
    stop()


def _expect(change: Change) -> None:
    """Raise Stopped unless the place is as it was when the plan was made."""
    if change.before is not None:
        if read(change.real) != change.before:
            raise Stopped("source-changed", f"{change.path} was edited while this ran", change.path)
        return
    with contextlib.suppress(FileNotFoundError):
        os.lstat(change.real)
        raise Stopped("file-in-the-way", f"{change.path} appeared while this ran", change.path)


# ---------------------------------------------------------------- taking off


def recover(target: Target) -> list[str]:
    """Bring a tree that a run left unfinished back to clean; return what the user should know of it.

    Raises Refusal as revert() does.
    """
    return _answered(target, finished=False)


def revert(target: Target) -> list[str]:
    """Take the overlay off, finished or not; return what the user should know of it.

    A signal to end is answered when that is done. Raises Refusal. Having changed nothing, or put it back:
    edited-since-apply, record-lost, record-format, file-in-the-way, not-writable. Having done it: interrupted,
    not-synced. Else: half-applied.
    """
    return _answered(target, finished=True)


def _answered(target: Target, *, finished: bool) -> list[str]:
    with _signals_wait() as stop:
        try:
            notes = _take_off(target, finished=finished)
            stop()
        except (OSError, Stopped) as error:
            raise _told(target, error, "off") from error
    return notes


def _take_off(target: Target, *, finished: bool) -> list[str]:
    """The last columns of the table: those of recover(), or if `finished` those of revert()."""
    notes: list[str] = []
    match state_of(target.root):
        case "begun":
            _refuse_strangers(target.root)
        case "changing":
            notes = _put_back(target, "changing")
        case "applied" if finished:
            notes = _put_back(target, "applied")
        case "clean" | "applied":
            return notes
    _clear(target.root)
    return notes


def _put_back(target: Target, state: str) -> list[str]:
    """Make every file the one of before, or leave everything as it is and raise."""
    root = target.root
    record, _ = read_record(root)
    back, notes = _restorable(target, state)
    reals = {entry["path"]: resolve(root, entry["path"]) for entry, _, _ in back}
    check_writable([*reals.values(), root / JOURNAL, root / kept(ORIGINALS, ""), root / STATE_DIR])
    moved: list[tuple[Path, Path]] = []

    def move(source: Path, place: Path) -> None:
        moved.append((source, place))  # first: a call can fail and have its effect
        os.replace(source, place)

    try:
        if state == "applied":
            move(root / RECORD, root / JOURNAL)
            sync(root / STATE_DIR)
        if not (root / STAGED).is_dir():
            make_folder(root / STAGED)
        for entry, now, data in back:
            path, staged = entry["path"], root / kept(STAGED, entry["path"])
            if now == "after":
                move(reals[path], staged)
                if read(staged) != data:
                    raise Stopped("edited-since-apply", f"{path} was edited while this ran", path)
            if entry["sha256_before"]:  # else it was added
                move(root / kept(ORIGINALS, path), reals[path])
            purge_bytecode(root, path, reals[path])
        for folder in {real.parent for real in reals.values()}:
            sync(folder)
    except BaseException:
        for source, place in reversed(moved):
            with contextlib.suppress(FileNotFoundError):  # a move that had no effect; no place was taken before
                os.replace(place, source)
        if state == "applied":
            with contextlib.suppress(OSError):
                os.rmdir(root / STAGED)
        raise
    return notes + _remove_folders(root, record["directories"])


def _restorable(target: Target, state: str) -> tuple[list[tuple[dict, str, bytes | None]], list[str]]:
    """The entries of survey() that have to be put back, and what the user should know of the others.

        entry is     changing                                applied
        before       -                                       -
        replaced     -                                       -
        after        put back                                put back
        missing      put back: a move of ours was cut short  refused
        edited       left alone if the other version is      refused
                     still in staged/; else refused

    Raises Refusal: edited-since-apply, file-in-the-way, or record-lost if an original is needed and gone.
    """
    root = target.root
    back, replaced, notes = [], [], []
    for entry, now, data in survey(target):
        path = entry["path"]
        if now == "after" or (now == "missing" and state == "changing"):
            if lost := original_lost(root, entry):
                raise lost
            back.append((entry, now, data))
        elif now == "edited" and state == "changing" and (root / kept(STAGED, path)).exists():
            # Its place has not been taken by us, or was given back; so nothing of ours is in it.
            notes.append(f"{path} was edited after the run that was interrupted had begun; it is left as it is")
        elif now in ("edited", "missing"):
            raise edited(root, entry, now, data, root, None)
        elif now == "replaced":
            replaced.append(path)
    if replaced:
        notes.append(f"left as installed since then: {', '.join(replaced)}")
    _refuse_strangers(root)
    return back, notes


def _remove_folders(root: Path, folders: list[str]) -> list[str]:
    """Remove what apply made of `folders`, if nothing else is in it by now; return what to say of the rest."""
    for folder in sorted(folders, reverse=True):  # from the inside out
        for place in (root / folder / "__pycache__", root / folder):
            try:
                os.rmdir(place)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
    there = [folder for folder in folders if (root / folder).is_dir()]
    left = {f"{folder}/{name}" for folder in there for name in os.listdir(root / folder)}.difference(folders)
    left |= {folder for folder in folders if folder not in there and os.path.lexists(root / folder)}
    return [f"not from this overlay, and left where it is: {path}" for path in sorted(left)]


def _refuse_strangers(root: Path) -> None:
    """Raise Refusal(file-in-the-way) if what would be cleared is not all from this tool."""
    ours = {Path(path).name for path in (STAGED, ORIGINALS, JOURNAL, DRAFT, RECORD)} | {"__pycache__"}
    items = [item for item in (root / STATE_DIR).iterdir() if item.name not in ours]
    for folder in (STAGED, ORIGINALS):
        items += [item for item in (root / folder).glob("*") if item.suffix != ".orig"]
    for item in sorted(items):
        path = item.relative_to(root).as_posix()
        what = f"{path} in {root} is not from this overlay; move it away."
        raise Refusal("file-in-the-way", what, path=path)


def _clear(root: Path) -> None:
    """Remove the state folder of a tree whose vLLM files are as they were; the journal last."""
    empty(root / ORIGINALS)
    empty(root / STAGED)
    for name in (DRAFT, JOURNAL):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(root / name)
    empty(root / STATE_DIR / "__pycache__")
    os.rmdir(root / STATE_DIR)
    sync(root / "vllm")


# ---------------------------------------------------------------- what is said


def _told(target: Target, error: OSError | Stopped, wanted: str) -> Refusal:
    """What to say when `error` stopped a change that was to put the overlay "on" or take it "off"."""
    late = ""
    if isinstance(error, OSError):
        path = str(error.filename2 or error.filename or target.root)
        error = Stopped("not-writable", f"Reading or writing {path} failed ({error.strerror})", path)
        late = ", but the disk may not have it yet: run --status after a power cut"
    state = state_of(target.root)
    if state == "changing" and all(now in ("before", "replaced") for _, now, _ in survey(target)):
        state = "begun"
    code = error.code
    match wanted, state:
        case "on", "clean":
            end = "everything was put back"
        case "off", "applied":
            end = "everything was put back, so the overlay is applied"
        case ("on", "applied") | ("off", "clean"):
            code = "not-synced" if late else code
            end = ("the overlay is applied" if wanted == "on" else "the overlay is off") + late
        case _, "begun":
            code = "half-applied"
            end = f"vLLM's own files are as they were, but {STATE_DIR} is still there: run --revert"
        case _:
            code = "half-applied"
            end = "the tree is between two states: see to that and run --revert"
    return Refusal(code, f"{error.what}; {end}.", path=error.path)
