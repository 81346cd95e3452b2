"""--fetch: from a package index in a folder, since pip's configuration says where to look."""

import contextlib
import http.server
import io
import os
import socket
import sys
import tarfile
import threading
import zipfile

import pytest
from dsv4_overlay_tools import fetch
from dsv4_overlay_tools.maintain import check_main
from dsv4_overlay_tools.series import load_series
from smallworld import EDITED, PRISTINE, RELEASE, SERIES, metadata, sha256, snapshot
from unearth.fetchers import PyPIClient


def make_archive(files=None, top=f"vllm-{RELEASE}", extra=()):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for path, data in {**(PRISTINE if files is None else files),
                           "PKG-INFO": metadata(RELEASE)}.items():  # fmt: skip
            info = tarfile.TarInfo(f"{top}/{path}")
            info.size, info.mode, info.mtime = len(data), 0o644, 10**9
            tar.addfile(info, io.BytesIO(data))
        for info in extra:
            tar.addfile(info)
    return out.getvalue()


@pytest.fixture
def index(engine, tmp_path, monkeypatch):
    """Returns publish(archive, pin=None): put it on the index and pin it in release.toml."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    folder = tmp_path / "index/vllm"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())

    def publish(data, pin=None):
        name = f"vllm-{RELEASE}.tar.gz"
        (folder / name).write_bytes(data)
        (folder / "index.html").write_text(f'<a href="{name}">{name}</a>')
        pins = engine.root / f"{SERIES}/release.toml"
        text = pins.read_text()
        old = text.partition('sdist_sha256 = "')[2][:64]
        pins.write_text(text.replace(old, pin or sha256(data), 1))

    return publish


def test_fetch_then_apply(engine, index, tmp_path, capsys):
    index(make_archive())
    report = engine.ok("--fetch", RELEASE, tmp_path / "deep/tree")
    assert (report["kind"], report["state"]) == ("source", "applied")
    assert (tmp_path / "deep/tree/vllm/config.py").read_bytes() == EDITED["vllm/config.py"]
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["tree"]
    engine.ok(tmp_path / "deep/tree", "--revert")
    assert (tmp_path / "deep/tree/vllm/config.py").read_bytes() == PRISTINE["vllm/config.py"]


def test_the_cache_is_used_and_checked(engine, index, tmp_path, monkeypatch):
    index(make_archive())
    engine.ok("--fetch", RELEASE, tmp_path / "one")
    assert (tmp_path / f"index/vllm/vllm-{RELEASE}.tar.gz").exists()  # copied, not moved
    monkeypatch.setenv("PIP_INDEX_URL", "file:///nowhere/at/all")
    (tmp_path / "two").mkdir()  # an empty folder is as good as none
    engine.ok("--fetch", RELEASE, tmp_path / "two")
    cached = tmp_path / f"cache/vllm-dsv4-overlay/sdist/vllm-{RELEASE}.tar.gz"
    cached.write_bytes(cached.read_bytes()[:100])
    engine.refused("download-failed", "--fetch", RELEASE, tmp_path / "three")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    engine.ok("--fetch", RELEASE, tmp_path / "three")


def test_archive_mismatch(engine, index, tmp_path):
    index(make_archive(), pin="a" * 64)
    error = engine.refused("archive-mismatch", "--fetch", RELEASE, tmp_path / "tree")
    assert "a" * 64 in error["message"]
    assert not (tmp_path / "tree").exists()
    assert list((tmp_path / "cache/vllm-dsv4-overlay/sdist").iterdir()) == []


def test_target_not_empty(engine, index, tmp_path):
    index(make_archive())
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/mine").write_text("mine")
    before = snapshot(tmp_path / "tree")
    engine.refused("fetch-target-not-empty", "--fetch", RELEASE, tmp_path / "tree")
    assert snapshot(tmp_path / "tree") == before
    (tmp_path / "file").write_text("")
    engine.refused("fetch-target-not-empty", "--fetch", RELEASE, tmp_path / "file")


def test_unknown_release_and_unreachable_index(engine, index, tmp_path, monkeypatch):
    index(make_archive())
    engine.refused("wrong-release", "--fetch", "3.0.0", tmp_path / "tree")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    engine.refused("download-failed", "--fetch", RELEASE, tmp_path / "tree")
    assert not (tmp_path / "tree").exists()
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "nowhere.pem"))
    message = engine.refused("download-failed", "--fetch", RELEASE, tmp_path / "tree")["message"]
    assert "No such file" in message and "check the network and pip's index configuration" in message


def test_a_link_to_an_empty_folder(engine, index, tmp_path):
    index(make_archive())
    (tmp_path / "disk/tree").mkdir(parents=True)
    (tmp_path / "tree").symlink_to("disk/tree")
    engine.ok("--fetch", RELEASE, tmp_path / "tree")
    assert (tmp_path / "disk/tree/vllm/config.py").read_bytes() == EDITED["vllm/config.py"]


def test_passwords_are_not_shown(engine, index, tmp_path, monkeypatch):
    index(make_archive())
    (tmp_path / f"index/vllm/vllm-{RELEASE}.tar.gz").unlink()
    (tmp_path / "index/vllm/index.html").write_text("")
    monkeypatch.setattr(fetch, "pip_sources", lambda: {"index-url": [(tmp_path / "index").as_uri()],
                                                       "find-links": ["file://me:secret@/nowhere"]})  # fmt: skip
    message = engine.refused("download-failed", "--fetch", RELEASE, tmp_path / "tree")["message"]
    assert "nowhere" in message and "secret" not in message


@pytest.mark.parametrize("value", ["1", "True"])
def test_folders_instead_of_an_index(engine, index, tmp_path, monkeypatch, value):
    index(make_archive())
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "http://127.0.0.1:9/extra")
    monkeypatch.setenv("PIP_NO_INDEX", value)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index/vllm"))
    engine.ok("--fetch", RELEASE, tmp_path / "tree")


def test_a_folder_that_is_not_there_is_skipped_as_by_pip(engine, index, tmp_path, monkeypatch):
    index(make_archive())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "nowhere").as_uri())
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    engine.ok("--fetch", RELEASE, tmp_path / "tree")


def test_an_index_with_a_wheel_too(engine, index, tmp_path):
    """As every real one: a wheel would be preferred to the source archive."""
    index(make_archive())
    name = f"vllm-{RELEASE}-py3-none-any.whl"
    (tmp_path / "index/vllm" / name).write_bytes(b"")
    with (tmp_path / "index/vllm/index.html").open("a") as page:
        page.write(f'<a href="{name}">{name}</a>')
    assert engine.ok("--fetch", RELEASE, tmp_path / "tree")["kind"] == "source"


@contextlib.contextmanager
def served(folder, host=""):
    """The port of a server of its files; also a proxy, which is asked for them at http://`host`."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path):
            return str(folder) + path.removeprefix(f"http://{host}")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize("scheme", ["http://", ""])
@pytest.mark.parametrize("trusted", ["", "index.example"])
def test_the_proxy_of_pip_s_configuration(engine, index, tmp_path, monkeypatch, scheme, trusted):
    """Also on the way to a host that is trusted without TLS."""
    index(make_archive())
    host = trusted or "127.0.0.1:9"
    with served(tmp_path, host) as port:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://{host}/index")
        monkeypatch.setenv("PIP_TRUSTED_HOST", trusted)
        monkeypatch.setenv("PIP_PROXY", f"{scheme}127.0.0.1:{port}")
        engine.ok("--fetch", RELEASE, tmp_path / "tree")


def test_a_host_that_is_trusted_without_tls(engine, index, tmp_path, monkeypatch):
    index(make_archive())
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *args, **kwargs: real("127.0.0.1", *args, **kwargs))
    with served(tmp_path) as port:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://index.example:{port}/index")
        engine.refused("download-failed", "--fetch", RELEASE, tmp_path / "tree")
        monkeypatch.setenv("PIP_TRUSTED_HOST", "index.example")
        engine.ok("--fetch", RELEASE, tmp_path / "tree")


def test_a_place_that_cannot_be_written(engine, index, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "archive", lambda *_: pytest.fail("downloaded"))
    monkeypatch.setattr(fetch.os, "access", lambda folder, _: folder != tmp_path)
    assert engine.refused("not-writable", "--fetch", RELEASE, tmp_path / "a/b")["path"] == str(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "is the current folder" in engine.refused("not-writable", "--fetch", RELEASE, ".")["message"]
    monkeypatch.setattr(fetch.Path, "is_mount", lambda _: True)
    assert "is a mount point" in engine.refused("not-writable", "--fetch", RELEASE, tmp_path / "c")["message"]


def test_tools_without_pip(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named pip >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(fetch.Refusal, match="has no pip that could name its index; remove "):
        fetch.pip_sources()


@pytest.mark.parametrize("filters", [True, False])
def test_what_is_unpacked_is_the_users_own(engine, index, tmp_path, monkeypatch, filters):
    """Not of the user that the archive names, nor for a group to write; also by Python 3.11.2."""
    if not filters:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    owners = {}
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda path, *owner, **how: owners.update({os.path.basename(path): owner}))
    more = tarfile.TarInfo(f"vllm-{RELEASE}/vllm/for_all.py")
    more.mode, more.uid, more.gid = 0o666, 1000, 1000
    index(make_archive(extra=[more]))
    engine.ok("--fetch", RELEASE, tmp_path / "tree")
    assert (tmp_path / "tree/vllm/for_all.py").stat().st_mode & 0o022 == 0
    assert owners.get("for_all.py", (-1, -1)) == (-1, -1)


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="this Python's tarfile has no filters")
@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped"])
def test_an_archive_that_writes_elsewhere(engine, index, tmp_path, name):
    link = tarfile.TarInfo(f"vllm-{RELEASE}/link")
    link.type, link.linkname = tarfile.SYMTYPE, name
    index(make_archive(extra=[link]))
    engine.refused("archive-mismatch", "--fetch", RELEASE, tmp_path / "tree")
    assert not (tmp_path / "tree").exists()
    assert not [path for path in tmp_path.iterdir() if "fetching" in path.name]


def test_killed_while_unpacking(engine, index, tmp_path, monkeypatch):
    index(make_archive())
    engine.ok("--fetch", RELEASE, tmp_path / "warm")
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(fetch.os, "rename", lambda *_: os._exit(9))
        try:
            engine("--fetch", RELEASE, tmp_path / "tree")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not (tmp_path / "tree").exists()
    engine.ok("--fetch", RELEASE, tmp_path / "tree")
    assert not [path for path in tmp_path.iterdir() if "fetching" in path.name]


def test_a_folder_of_somebody_else_where_it_unpacks(engine, index, tmp_path):
    index(make_archive())
    for name, place in (("one", tmp_path / ".one.fetching"), ("two", tmp_path / "elsewhere")):
        place.mkdir()
        if place.name == "elsewhere":
            (place / "made-by-vllm-dsv4-overlay").touch()
            (tmp_path / ".two.fetching").symlink_to(place)
        (place / "mine").write_text("mine")
        before = snapshot(tmp_path)
        error = engine.refused("file-in-the-way", "--fetch", RELEASE, tmp_path / name)
        assert error["path"] == str(tmp_path / f".{name}.fetching") and "move it away" in error["message"]
        assert {path: found for path, found in snapshot(tmp_path).items() if not path.startswith("cache")} == {
            path: found for path, found in before.items() if not path.startswith("cache")}  # fmt: skip


def test_pip_configuration_is_read(tmp_path, monkeypatch):
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://a.example/simple\nextra-index-url =\n  https://b.example\n"
        "  https://c.example\n[install]\nfind-links = /wheels\n"
    )
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_TRUSTED_HOST", "a.example")
    found = fetch.pip_sources()
    assert found["index-url"] == ["https://a.example/simple"]
    assert found["extra-index-url"] == ["https://b.example", "https://c.example"]
    assert (found["find-links"], found["trusted-host"]) == (["/wheels"], ["a.example"])
    monkeypatch.setenv("PIP_INDEX_URL", "https://d.example/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "/others")  # stronger than either section
    found = fetch.pip_sources()
    assert (found["index-url"], found["find-links"]) == (["https://d.example/simple"], ["/others"])


def test_runs_at_once_download_and_unpack_one_after_another(engine, index, tmp_path, monkeypatch):
    index(make_archive())
    locked = []

    def flock(fd, how):
        locked.append((os.readlink(f"/proc/self/fd/{fd}"), how))

    monkeypatch.setattr(fetch.fcntl, "flock", flock)
    engine.ok("--fetch", RELEASE, tmp_path / "tree")
    cache = tmp_path / "cache/vllm-dsv4-overlay/sdist"
    assert locked[:2] == [(str(cache), fetch.fcntl.LOCK_EX), (str(tmp_path), fetch.fcntl.LOCK_EX)]


def test_a_target_that_another_run_made_meanwhile(engine, index, tmp_path, monkeypatch):
    index(make_archive())
    real = fetch.archive

    def archive(*given):
        (tmp_path / "tree/mine").mkdir(parents=True)
        return real(*given)

    monkeypatch.setattr(fetch, "archive", archive)
    engine.refused("fetch-target-not-empty", "--fetch", RELEASE, tmp_path / "tree")
    assert [path.name for path in (tmp_path / "tree").iterdir()] == ["mine"]


@pytest.fixture
def wheels(engine, index, tmp_path):
    """Returns publish(files): a wheel that holds them goes onto the index, beside one for another system."""
    names = [f"vllm-{RELEASE}-cp38-abi3-{system}.whl" for system in ("manylinux_2_28_x86_64", "macosx_11_0_arm64")]

    def publish(files):
        for name, contents in zip(names, (files, {}), strict=True):
            with zipfile.ZipFile(tmp_path / "index/vllm" / name, "w") as wheel:
                for path, data in contents.items():
                    wheel.writestr(path, data)
        links = "".join(f'<a href="{name}">{name}</a>' for name in names)
        (tmp_path / "index/vllm/index.html").write_text(links)
        return names[0]

    return publish


def test_wheels_of_the_index(engine, wheels, tmp_path, capsys):
    """Also one whose file differs, or lacks it; and an index without any."""
    pinned = load_series(engine.root / SERIES).files | load_series(engine.root / SERIES).relied_on
    name = wheels(PRISTINE)
    assert check_main([RELEASE, "--wheels"], engine.root) == 0
    assert capsys.readouterr().out == f"{name}: {len(pinned)} files as pinned\n"
    other = name.replace(RELEASE, f"{RELEASE}+cu129")  # somebody's own build, which nothing pins
    zipfile.ZipFile(tmp_path / "index/vllm" / other, "w").close()
    with (tmp_path / "index/vllm/index.html").open("a") as page:
        page.write(f'<a href="{other}">{other}</a>')
    assert check_main([RELEASE, "--wheels"], engine.root) == 0
    assert capsys.readouterr().out == f"{name}: {len(pinned)} files as pinned\n"
    first, last = min(pinned), max(pinned)
    wheels({path: data for path, data in PRISTINE.items() if path != last} | {first: b"other"})
    assert check_main([RELEASE, "--wheels"], engine.root) == 1
    assert capsys.readouterr().err == f"error: {name}: not as pinned: {first}, {last}\n"
    assert check_main(["0.9.9", "--wheels"], engine.root) == 1
    error = capsys.readouterr().err
    assert "error: download-failed: No wheel of vLLM 0.9.9 at " in error and "check the number of the rel" in error
    assert check_main(["3.0.0", "--wheels"], engine.root) == 1  # of which nothing is pinned
    assert "error: wrong-release: There is no patch series for vLLM 3.0.0; " in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        check_main([RELEASE, "--wheels", "--pristine", str(engine.root)], engine.root)
    assert "--wheels reads the wheels of the index, and takes no --pristine" in capsys.readouterr().err


@pytest.mark.parametrize("ranges", [True, False])
def test_parts_of_a_file_on_a_server(tmp_path, ranges):
    """Only what is read is sent; a server that cannot is said to."""
    data, sent = os.urandom(1 << 16), []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()

        def do_GET(self):
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            part = data[first : last + 1] if ranges else data
            sent.append(len(part))
            self.send_response(206 if ranges else 200)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server, PyPIClient() as session:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file = io.BufferedReader(fetch._Ranged(session, f"http://127.0.0.1:{server.server_port}/it"), 1 << 10)
        file.seek(-100, 2)
        if ranges:
            assert file.read() == data[-100:] and file.read() == b"" and sum(sent) == 100
            file.seek(5)
            assert file.read(7) == data[5:12]
        else:
            with pytest.raises(OSError, match="does not send parts of files"):
                file.read()
        server.shutdown()
