"""Reads and writes single files and folders: whole, synced, with the owner and attributes they should have."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import stat
import time
from pathlib import Path

from .errors import Refusal


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


def read(path: Path) -> bytes:
    """The bytes of a plain file. Raises OSError for anything else; a FIFO would make a plain open() wait."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        return file.read()


def sync(folder: Path) -> None:
    """Have the disk keep what `folder` lists. Raises OSError that names it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        error.filename = str(folder)
        raise
    finally:
        os.close(fd)


def _give(place: Path | int, like: os.stat_result) -> None:
    """Give a path or an open file the owner of `like`."""
    if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
        try:  # only root may give files away, and only to those that this user namespace knows
            os.chown(place, like.st_uid, like.st_gid)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EINVAL):
                raise


def make_folder(path: Path) -> None:
    """Make a folder with the owner and mode of the one that it is in, whatever the umask."""
    like = path.parent.stat()
    os.mkdir(path)
    _give(path, like)
    os.chmod(path, stat.S_IMODE(like.st_mode))  # after chown, which may clear setgid


def write(path: Path, data: bytes, mode: int, *, like: Path, mtime_ns: int) -> None:
    """Write a new, complete and synced file.

    It has the owner of `like`, which is a folder or the file that it will replace. Of the latter it also
    has the extended attributes. Raises OSError that names the file.
    """
    found = like.stat()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        _give(fd, found)
        if stat.S_ISREG(found.st_mode):
            with contextlib.suppress(PermissionError):  # SELinux may keep its labels to itself
                shutil.copystat(like, path)
        os.fchmod(fd, mode)  # after chown, which clears setuid bits
        os.utime(fd, ns=(mtime_ns, mtime_ns))
        os.fsync(fd)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(fd)


def new_mtime(old: int) -> int:
    """Now, or a second later when `old` is of this second; both in ns.

    Python takes a .pyc for current if the source has the mtime (in whole seconds) and the size
    noted in it. We delete those we can find; one in a cache we do not know must not match either.
    """
    now = time.time_ns()
    return now + 10**9 if now // 10**9 == old // 10**9 else now


def purge_bytecode(root: Path, path: str, real: Path) -> None:
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
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(found)


def empty(folder: Path) -> None:
    """Remove the folder and the plain files in it."""
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(folder)):
            os.unlink(folder / name)
        os.rmdir(folder)


def check_writable(places: list[Path]) -> None:
    """Raise Refusal(not-writable) unless files can be made, replaced and removed at `places`."""
    folders = {place.parent for place in places}
    folders |= {cache for folder in folders if (cache := folder / "__pycache__").is_dir()}
    for folder in sorted(folders):
        while not folder.exists():
            folder = folder.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise Refusal(
                "not-writable",
                f"{folder} is not writable; run as its owner (nothing was changed).",
                path=str(folder),
            )
