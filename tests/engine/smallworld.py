"""A small repository with a series and an overlay, and a small vLLM of each kind to apply it to."""

import contextlib
import difflib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from base64 import urlsafe_b64encode
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from dsv4_overlay_tools import cli  # noqa: E402

RELEASE = "1.0.0"
NAME = "full-width"  # what the series adds
SERIES = f"patches/{NAME}/{RELEASE}"
KINDS = ("source", "git", "installed")

# What breaks tools that treat source as text: CRLF, no final newline, bytes that are not UTF-8,
# characters that str.splitlines takes for line ends, an empty file, an executable.
PRISTINE = {
    "vllm/__init__.py": b"",
    "vllm/config.py": b"".join(b"line%d = %d\n" % (i, i) for i in range(40)),
    "vllm/crlf.py": b"a = 1\r\nb = 2\r\nc = 3\r\n",
    "vllm/noeol.py": b"first = 1\nlast = 2",
    "vllm/odd.py": b"# -*- coding: latin-1 -*-\nx = '\xe9\x85\x0c'\n\x0c\ny = 2\n",
    "vllm/empty/__init__.py": b"",
    "vllm/tool.sh": b"#!/bin/sh\necho one\n",
    "vllm/sub/__init__.py": b"",
    "vllm/sub/untouched.py": b"value = 'as released'\n",
    "vllm/sub/relied.py": b"def called():\n    return 'as released'\n",
}
EDITED = {
    "vllm/config.py": PRISTINE["vllm/config.py"]
    .replace(b"line3 = 3\n", b"line3 = 33\n")
    .replace(b"line30 = 30\n", b"line30 = 30\nfrom vllm.dsv4.main import run\n"),
    "vllm/crlf.py": b"a = 1\r\nb = 22\r\nc = 3\r\n",
    "vllm/noeol.py": b"first = 1\nlast = 3",
    "vllm/odd.py": PRISTINE["vllm/odd.py"].replace(b"y = 2", b"y = '\xfe'"),
    "vllm/empty/__init__.py": b"filled = True\n",
    "vllm/tool.sh": b"#!/bin/sh\necho two\n",
}
PATCHES = {
    "config.patch": ["vllm/config.py", "vllm/crlf.py", "vllm/noeol.py"],
    "rest.patch": ["vllm/empty/__init__.py", "vllm/odd.py", "vllm/tool.sh"],
}
OVERLAY = {
    "common/vllm/dsv4/__init__.py": b"",
    "common/vllm/dsv4/main.py": b"from ..sub import glue\nfrom .deep.inner import go as run\n"
    b"TABLE = 'table.json'\n",
    "common/vllm/dsv4/deep/__init__.py": b"",
    "common/vllm/dsv4/deep/inner.py": b"def go():\n    return 'went'\n",
    "common/vllm/dsv4/table.json": b"{}\n",
    f"{RELEASE}/vllm/sub/glue.py": b"glue = 1\n",
}
RELIED_ON = ["vllm/sub/relied.py"]
MODES = {"vllm/tool.sh": 0o755, "vllm/odd.py": 0o640}


def header(files):
    return (
        "Description: a test\nOrigin: own\nForwarded: not-needed\nLast-Update: 2026-01-31\n"
        "Hooks: nothing\nDrop-When: never\nFiles:\n" + "".join(f" {name}\n" for name in files)
    ).encode()


def diff(path, before, after, context=2):
    """A unified diff by difflib, so that the engine's own writer is not its only reader."""

    def lines(data):
        parts = data.decode("latin-1").split("\n")
        return [part + "\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])

    out = difflib.unified_diff(lines(before), lines(after), "a/" + path, "b/" + path, n=context)
    marked = (x if x.endswith("\n") else x + "\n\\ No newline at end of file\n" for x in out)
    return "".join(marked).encode("latin-1")


def write(root, files, modes=None):
    for path, data in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        place.chmod((modes or {}).get(path, 0o644))


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def make_repo(root, patches=None, overlay=None, pristine=None, edited=None, release=RELEASE, name=NAME,
              served=("0.9.9",)):  # fmt: skip
    patches = PATCHES if patches is None else patches
    pristine = PRISTINE if pristine is None else pristine
    edited = EDITED if edited is None else edited
    folder = root / "patches" / name / release
    folder.mkdir(parents=True)
    touched = sorted(path for paths in patches.values() for path in paths)
    for name, paths in patches.items():
        body = b"".join(diff(path, pristine[path], edited[path]) for path in sorted(paths))
        (folder / name).write_bytes(header(sorted(paths)) + b"\n" + body)
    (folder / "series").write_text("# order\n" + "".join(f"{name}\n" for name in patches))
    (folder / "release.toml").write_text(
        f'release = "{release}"\ngit_tag = "v{release}"\ngit_commit = "{"0" * 40}"\n'
        f'git_commit_source = "made up"\nsdist_sha256 = "{"0" * 64}"\nserves = {json.dumps(list(served))}\n\n'
        + "".join(f'[also."{one}"]\nsdist_sha256 = "{"1" * 64}"\n\n' for one in served)
        + "[files]\n"
        + "".join(f'"{path}" = "{sha256(pristine[path])}"\n' for path in touched)
        + "\n# of what the overlay calls\n[relied_on]\n"
        + "".join(f'"{path}" = "{sha256(pristine[path])}"\n' for path in RELIED_ON if path in pristine)
    )
    write(root / "overlay", OVERLAY if overlay is None else overlay)
    (root / "VERSION").write_text("0.1.0\n")
    return root


def git(root, *args):
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    done = subprocess.run(
        ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.invalid",
         "-c", "init.defaultBranch=main", *args],
        check=True, capture_output=True, text=True, env=env,
    )  # fmt: skip
    return done.stdout.strip()


def metadata(release):
    return f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n".encode()


def record_row(path, data):
    digest = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}\n"


def make_target(root, kind, files=None, release=RELEASE, modes=None):
    files = PRISTINE if files is None else files
    write(root, files, MODES if modes is None else modes)
    if kind == "git":
        git(root, "init", "-q")
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", "release")
        git(root, "tag", f"v{release}")
    elif kind == "source":
        write(root, {"PKG-INFO": metadata(release)})
    else:
        info = f"vllm-{release}.dist-info"
        rows = "".join(record_row(path, data) for path, data in files.items())
        rows += record_row(f"{info}/METADATA", metadata(release)) + f"{info}/RECORD,,\n"
        write(root, {f"{info}/METADATA": metadata(release), f"{info}/RECORD": rows.encode()})
    return root


def snapshot(root):
    """Everything below `root` that a user can see: kinds, modes, contents and links."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if name == ".git" or name.startswith(".git/"):
            continue
        info = path.lstat()
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = ("folder", oct(info.st_mode))
        else:
            found[name] = ("file", oct(info.st_mode), path.read_bytes())
    return found


def copy(source, place):
    return Path(shutil.copytree(source, place, symlinks=True))


class Engine:
    """The tool on one repository, in this process."""

    def __init__(self, root):
        self.root = root

    def __call__(self, *argv):
        """Run with --json; return (exit status, report)."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            status = cli.main([str(arg) for arg in argv] + ["--json"], self.root)
        return status, json.loads(out.getvalue())

    def ok(self, *argv):
        status, report = self(*argv)
        assert (status, report["error"]) == (0, None), report
        return report

    def refused(self, code, *argv):
        status, report = self(*argv)
        assert report["error"] and (status, report["error"]["code"]) == (1, code), report
        return report["error"]
