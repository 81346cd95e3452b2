"""The pinned source archive of a vLLM release: download, check, unpack."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .errors import Refusal
from .series import Series


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or os.path.expanduser("~/.cache")).absolute() / "vllm-dsv4-overlay"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def pip_sources() -> dict[str, list[str]]:
    """Where pip would look: its index-url, extra-index-url, no-index, find-links, trusted-host, cert and proxy.

    Asked of pip itself, so that its files and PIP_* variables count as they do for `pip install`.
    Raises Refusal(download-failed) if there is no pip to ask.
    """
    done = subprocess.run(
        [sys.executable, "-I", "-m", "pip", "--disable-pip-version-check", "config", "list"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Refusal("download-failed", f"{sys.executable} has no pip that could name its index; remove "
                      f"{Path(sys.prefix)}, which the next run makes anew.")  # fmt: skip
    found: dict[str, tuple[int, list[str]]] = {}
    for line in done.stdout.split("\n"):
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        # Strongest last, as in pip: [global], then [install] of the command, then the environment.
        rank = {"global": 0, "install": 1, ":env:": 2}.get(section)
        if rank is not None and rank >= found.get(name, (0, []))[0]:
            with contextlib.suppress(ValueError, SyntaxError):
                found[name] = (rank, str(ast.literal_eval(value)).split())
    return {name: values for name, (_, values) in found.items()}


def _without_passwords(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", text)


@contextlib.contextmanager
def _finder(what: str, **options: Any) -> Iterator[tuple[Any, str]]:
    """unearth's finder, where pip would look, and these places in words; `options` are its own.

    Raises Refusal(download-failed), also for what is done with it, which is `what`.
    """
    import ssl

    import httpx2
    import unearth  # half a second that only a download should cost
    from unearth.fetchers import PyPIClient

    sources = pip_sources()
    indexes = sources.get("index-url", ["https://pypi.org/simple/"])
    # pip skips a local index or folder that is not there; unearth would stop at it.
    if sources.get("no-index", ["0"])[0].lower() in ("1", "true", "yes", "on"):
        indexes, sources = [], sources | {"extra-index-url": []}
    extra = [url for url in sources.get("extra-index-url", []) if not url.startswith("file:")
             or Path(url.removeprefix("file://"), "vllm").is_dir()]
    links = [url for url in sources.get("find-links", []) if "://" in url or Path(url).is_dir()]
    hosts = sources.get("trusted-host", [])
    certs = sources.get("cert")
    proxy = sources.get("proxy", [None])[0]
    if proxy and "://" not in proxy:  # as pip takes it
        proxy = f"http://{proxy}"
    try:
        more: dict[str, Any] = {"verify": ssl.create_default_context(cafile=certs[0])} if certs else {}
        if proxy:  # past which unearth would go to trusted hosts
            trusting = httpx2.HTTPTransport(verify=False, proxy=proxy)
            more["mounts"] = {f"all://{host}": trusting for host in hosts}
        with PyPIClient(trusted_hosts=hosts, proxy=proxy, **more) as session:
            finder = unearth.PackageFinder(
                session=session,
                index_urls=indexes + extra,
                find_links=links,
                ignore_compatibility=True,  # it is read here, not run
                **options,
            )
            yield finder, ", ".join(indexes + extra + links)
    except Refusal:
        raise
    except Exception as error:  # unearth lets the errors of its HTTP and TLS libraries through
        raise Refusal(
            "download-failed",
            _without_passwords(
                f"{what} failed ({type(error).__name__}: {error}); check the network and pip's index "
                "configuration."
            ),
        ) from error


def _nothing(what: str, where: str) -> Refusal:
    return Refusal(
        "download-failed",
        _without_passwords(
            f"No {what} at {where}; check the number of the release and pip's index configuration."
        ),
    )


def _download(release: str, folder: Path) -> Path:
    """Download the source archive of `release` into `folder`. Raises Refusal(download-failed)."""
    with _finder(f"Downloading vLLM {release}", no_binary=["vllm"]) as (finder, where):
        best = finder.find_best_match(f"vllm=={release}").best
        if best is None:
            raise _nothing(f"source archive of vLLM {release}", where)
        with _progress(f"vllm-{release}.tar.gz") as report:
            return finder.download(best.link, folder, download_reporter=report)


class _Ranged(io.RawIOBase):
    """A file on a web server, of which is fetched what is read."""

    def __init__(self, session: Any, url: str) -> None:
        self.session, self.url, self.at = session, url, 0
        found = session.head(url, follow_redirects=True).raise_for_status()
        self.size = int(found.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        end = min(self.at + len(buffer), self.size)
        if end <= self.at:
            return 0
        wanted = {"Range": f"bytes={self.at}-{end - 1}", "Accept-Encoding": "identity"}
        got = self.session.get(self.url, headers=wanted, follow_redirects=True).raise_for_status()
        if got.status_code != 206 or len(got.content) != end - self.at:
            raise OSError("its server does not send parts of files")
        buffer[: len(got.content)] = got.content
        self.at = end
        return len(got.content)


def wheels(release: str, paths: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Of each wheel for Linux that the index has of `release`: its name and, by path, the sha256 of what it has.

    Fetches some megabytes of each. Raises Refusal(download-failed).
    """
    with _finder(f"Reading wheels of vLLM {release}", only_binary=["vllm"]) as (finder, where):
        links = {}
        for package in finder.find_matches(f"vllm=={release}"):
            if "linux" in package.link.filename and package.version == release:
                links.setdefault(package.link.filename, package.link)
        if not links:
            raise _nothing(f"wheel of vLLM {release}", where)
        for name, link in sorted(links.items()):
            url = link.url_without_fragment
            raw = link.file_path.open("rb", 0) if link.is_file else _Ranged(finder.session, url)
            with io.BufferedReader(raw, 1 << 20) as file, zipfile.ZipFile(file) as wheel:
                there = set(paths) & set(wheel.namelist())
                found = {path: hashlib.sha256(wheel.read(path)).hexdigest() for path in sorted(there)}
            yield name, found


@contextlib.contextmanager
def _progress(name: str) -> Iterator[Callable[..., None]]:
    """A bar on standard error where that is a terminal, else one line."""
    from rich.console import Console  # a quarter of a second that only a download should cost
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"Downloading {name}", file=sys.stderr)
        yield lambda *_, **__: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=None)

        def report(link: Any, completed: int, total: int | None) -> None:
            progress.update(task, completed=completed, total=total)

        yield report


def archive(series: Series, release: str, *, download: bool = True) -> Path:
    """The source archive of `release` in the cache, downloaded if it is not there.

    Raises Refusal: download-failed (also if it is not there and not to be downloaded), archive-mismatch.
    """
    pin = series.sdists[release]
    folder = cache_dir() / "sdist"
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"vllm-{release}.tar.gz"
    with _locked(folder):
        if place.is_file() and _file_sha256(place) == pin:
            return place
        if not download:
            raise Refusal("download-failed", f"The source archive of vLLM {release} is not in {folder}.")
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            fetched = _download(release, Path(temporary))
            found = _file_sha256(fetched)
            if found != pin:
                raise Refusal(
                    "archive-mismatch",
                    f"The archive of vLLM {release} has sha256 {found} but "
                    f"{series.folder / 'release.toml'} pins {pin}; do not use it, and check the "
                    "package index.",
                )
            if fetched.parent != Path(temporary):  # unearth hands out a local index's own file
                fetched = Path(shutil.copy(fetched, temporary))
            os.replace(fetched, place)
    return place


def unpinned(release: str) -> Path:
    """The source archive of a release that nothing pins, to be looked at and not to be applied to.

    Raises Refusal(download-failed).
    """
    folder = cache_dir() / "sdist"
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"vllm-{release}.tar.gz"
    with _locked(folder):
        if not place.is_file():
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                shutil.copy(_download(release, Path(temporary)), place.with_suffix(".new"))
                os.replace(place.with_suffix(".new"), place)
    return place


def _unpack(source: Path, folder: Path) -> None:
    with tarfile.open(source) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
            return
        # Python 3.11.2, which is Debian 12's. The archive is the pinned one; as above it is the user's.
        tar.chown = lambda *member: None
        for member in tar:
            member.mode &= ~0o022
        tar.extractall(folder)


def _refuse_used(target: Path) -> None:
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise Refusal(
            "fetch-target-not-empty",
            f"{target} exists and is not an empty folder; --fetch needs a new one.",
            path=str(target),
        )


def fetch(series: Series, release: str, target: Path) -> None:
    """Unpack the pinned source of `release` so that `target` is its tree.

    Raises Refusal: fetch-target-not-empty, file-in-the-way, download-failed, archive-mismatch, not-writable.
    """
    target = Path(os.path.realpath(target))  # what is unpacked cannot be renamed over a link
    _refuse_used(target)
    for name, used in (("a mount point", target.is_mount()), ("the current folder", target == Path.cwd())):
        if used:
            what = f"{target} is {name}, which cannot be replaced; give a new folder in it."
            raise Refusal("not-writable", what, path=str(target))
    above = next(folder for folder in target.parents if folder.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        raise Refusal("not-writable", f"{above} is not writable; run as its owner.", path=str(above))
    source = archive(series, release)
    # Unpacked beside its place and renamed, so that TARGET is never there in part. The name is
    # fixed so that a killed run's leftovers are found and removed by the next, which knows them by the mark.
    temporary = target.parent / f".{target.name}.fetching"
    mark = temporary / "made-by-vllm-dsv4-overlay"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent):
            _refuse_used(target)  # by another run meanwhile
            if mark.is_file() and not temporary.is_symlink():
                shutil.rmtree(temporary)
            if os.path.lexists(temporary):
                what = f"{temporary} is not from this tool, which needs that name; move it away."
                raise Refusal("file-in-the-way", what, path=str(temporary))
            temporary.mkdir()
            try:
                mark.touch()
                _unpack(source, temporary)
                os.rename(temporary / f"vllm-{release}", target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except tarfile.TarError as error:
        raise Refusal("archive-mismatch", f"{source} cannot be unpacked ({error}).") from error
    except OSError as error:
        raise Refusal(
            "not-writable", f"{target} cannot be written ({error.strerror}).", path=str(target)
        ) from error
