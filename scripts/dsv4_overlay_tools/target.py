"""Which vLLM a folder holds: a git checkout, an unpacked source archive or an installed wheel."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from packaging.version import InvalidVersion, Version

from .errors import Refusal
from .files import read
from .series import STATE_DIR, Series, Stack, sha256

if TYPE_CHECKING:
    from git import Repo

# Runs in the user's Python. It must not import vllm (that loads CUDA), and must not see the current
# directory, which `-c` puts first on the path: a source tree there is not what is installed.
LOCATE = """
import sys
if sys.path and sys.path[0] == "":
    del sys.path[0]
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("vllm")
found = next(iter(importlib.metadata.distributions(name="vllm")), None)
print(json.dumps({
    "package": list(spec.submodule_search_locations or [])[:1] if spec and spec.origin else [],
    "dist_root": str(found.locate_file("")) if found else None,
}))
"""


@dataclass
class Target:
    root: Path
    kind: str  # git | source | installed
    release: str | None
    commit: str | None = None
    dist_info: str | None = None  # folder name, for an installed wheel
    notes: list[str] = field(default_factory=list)


def _public(version: str) -> str:
    """The release in a version: 0.22.1 for the wheel 0.22.1+cu129, which is the same source."""
    try:
        return Version(version).public
    except InvalidVersion:
        return version


def _metadata_release(path: Path) -> str | None:
    headers = HeaderParser().parsestr(path.read_text("utf-8", "replace"))
    version = headers["Version"]
    return _public(version) if headers["Name"] == "vllm" and version else None


def _carried_commit(root: Path) -> str | None:
    """The (short) commit that a released archive or wheel names in vllm/_version.py."""
    try:
        text = read(root / "vllm/_version.py").decode("utf-8", "replace")
    except OSError:
        return None
    match = re.search(r"^__commit_id__ = commit_id = 'g?([0-9a-f]+)'", text, re.MULTILINE)
    return match[1] if match else None


def open_git(root: Path) -> Repo:
    """Open the repository at `root`. Raises Refusal(not-vllm) if git cannot."""
    try:
        import git  # needs the git program, which only this kind of target has to have
    except ImportError:
        raise Refusal(
            "not-vllm", f"{root} is a git checkout but there is no git program; install git."
        ) from None
    try:
        return git.Repo(root)
    except git.GitError:
        raise Refusal("not-vllm", f"git cannot read the repository at {root}.") from None


def _git_release(repo: Repo, pins: list[Series]) -> tuple[str | None, str | None, list[str]]:
    """The release, its commit here, and notes for the user."""
    import git

    head = None
    try:
        head = repo.git.rev_parse("--verify", "HEAD^{commit}")
        # No release of vLLM has a hyphen; tags of one's own often have.
        tag = repo.git.describe("--tags", "--match", "v[0-9]*", "--exclude", "*-*", "--abbrev=0")
        commit = repo.git.rev_parse(tag + "^{commit}")
    except git.GitCommandError as error:
        # No commit, no tag, or git refuses to work here at all: the files are another user's.
        if "dubious ownership" in error.stderr:
            raise Refusal(
                "not-vllm",
                f"git distrusts {repo.working_dir} because another user owns it; run "
                f"git config --global --add safe.directory {shlex.quote(str(repo.working_dir))}.",
            ) from None
        for series in pins:
            if head and head.startswith(series.git_commit):
                return series.release, head, []
        return None, head, ["no v* tag is reachable"]
    names = {_public(name[1:]) for name in repo.git.tag("--points-at", commit).split("\n")
             if re.match(r"v\d", name)}
    for series in pins:
        for release in series.sdists:
            if release not in names:
                continue
            notes = []
            if release == series.release and not commit.startswith(series.git_commit):
                notes.append(
                    f"the tag {series.git_tag} is {commit[:12]} here but {series.git_commit[:12]} "
                    "in the pin; every touched file is checked by sha256"
                )
            return release, commit, notes
    return _public(tag[1:]), commit, []


def detect(path: Path, pins: list[Series]) -> Target:
    """Say what `path` holds. `pins` are the known series, for checkouts that have no tags.

    Raises Refusal: not-vllm, or editable-install for a site-packages whose vLLM is elsewhere.
    """
    root = path.absolute()
    infos = sorted(info for info in root.glob("vllm-*.dist-info") if (info / "METADATA").is_file())
    if not (root / "vllm/__init__.py").is_file():
        for info in infos:
            refuse_editable(info)
        folder = "the folder that has it (of an installed wheel: site-packages)"
        if (root / "__init__.py").is_file() and root.name == "vllm":
            folder = f"the folder above it, {root.parent}"
        raise Refusal("not-vllm", f"{root} has no vllm/__init__.py, so it holds no vLLM; give {folder}.")
    if (root / ".git").exists():
        repo = open_git(root)
        release, commit, notes = _git_release(repo, pins)
        if release or not (root / "PKG-INFO").is_file():
            return Target(root, "git", release, commit, notes=notes)
        # An unpacked archive that somebody put under git to follow edits: read as an archive.
    if len(infos) > 1:
        raise Refusal(
            "not-vllm",
            f"{root} holds {len(infos)} vLLM installations ({', '.join(i.name for i in infos)}); "
            "reinstall vLLM so that one is left.",
        )
    if infos:
        release = _metadata_release(infos[0] / "METADATA")
        return Target(root, "installed", release, _carried_commit(root), infos[0].name)
    if (root / "PKG-INFO").is_file():
        release = _metadata_release(root / "PKG-INFO")
        return Target(root, "source", release, _carried_commit(root))
    raise Refusal(
        "not-vllm",
        f"{root} holds a vllm/ folder but neither .git, PKG-INFO nor vllm-*.dist-info, so its "
        "release is unknown; use a git checkout, an unpacked source archive or an installed wheel.",
    )


def _editable_tree(info: Path) -> str | None:
    try:
        direct = json.loads((info / "direct_url.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not direct.get("dir_info", {}).get("editable"):
        return None
    return unquote(urlsplit(direct["url"]).path)


def refuse_editable(info: Path) -> None:
    """Raise Refusal(editable-install) if the dist-info folder `info` is that of one."""
    tree = _editable_tree(info)
    if tree:
        raise Refusal(
            "editable-install",
            f"vLLM is installed in editable mode from {tree}; apply to that tree instead.",
        )


def locate_installed(python: str) -> Path:
    """The site-packages folder of the vLLM that `python` would import.

    Raises Refusal: not-vllm if there is none, editable-install if its files are a source tree.
    """
    done = subprocess.run([python, "-c", LOCATE], capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout.strip().split("\n")[-1])
    except ValueError:
        reason = done.stderr.strip().split("\n")[-1] or "no output"
        raise Refusal("not-vllm", f"{python} could not look for vLLM ({reason}); give its folder.") from None
    dist_root = Path(found["dist_root"]).absolute() if found["dist_root"] else None
    if dist_root:
        for info in sorted(dist_root.glob("vllm-*.dist-info")):
            refuse_editable(info)
    if not found["package"]:
        raise Refusal(
            "not-vllm",
            f"{python} finds no vLLM; activate the environment that has it, or give its folder.",
        )
    root = Path(found["package"][0]).absolute().parent
    if not any(root.glob("vllm-*.dist-info")):
        raise Refusal(
            "editable-install",
            f"{python} imports vLLM from {root}, which is a source tree and not an installed "
            "wheel; apply to that tree instead.",
        )
    return root


def check_index(target: Target, stack: Stack) -> None:
    """Raise Refusal(wrong-release) if git's index holds a touched file of another release.

    That is a checkout somebody half switched (`git checkout v0.21.0 -- .`): HEAD, and with it the
    release, says one thing and the files another.
    """
    if target.kind != "git" or not stack.files:
        return
    repo = open_git(target.root)
    import git

    try:
        staged = repo.git.diff("--cached", "--raw", "--no-abbrev", "--no-renames", "-z",
                               "--", *sorted(stack.files))
    except git.GitCommandError:
        raise Refusal(
            "not-vllm", f"git cannot read the index of {target.root}; mend what 'git status' says there."
        ) from None
    parts = iter(staged.rstrip("\0").split("\0") if staged else [])
    for fields, path in zip(parts, parts, strict=True):
        blob = fields.split()[3]
        for tag in repo.git.tag("--list", "v[0-9]*").split():
            listed = repo.git.ls_tree(tag, "--", path).split()
            if listed[2:3] == [blob]:
                raise Refusal(
                    "wrong-release",
                    f"HEAD is at vLLM {target.release} but the index holds {path} of {tag}; run "
                    "'git reset --hard' or check out one release.",
                    path=path,
                )


def check_relied_on(target: Target, stack: Stack) -> None:
    """Raise Refusal(source-changed) if a file that the overlay calls, and does not patch, is not as pinned."""
    for path, pin in stack.relied_on.items():
        try:
            found = sha256(read(target.root / path))
        except PermissionError:
            raise
        except OSError:  # it is not there, or no plain file
            found = None
        if found != pin:
            raise Refusal(
                "source-changed",
                f"{path}, on which the overlay relies, is not the one of vLLM {target.release}; restore it in "
                f"{target.root} or use a pristine vLLM.",
                path=path,
            )


def as_installed(target: Target, release: str) -> Callable[[str, bytes | None], bool]:
    """A function that tells whether a file (None: that there is none) is what was installed here after `release`.

    That is, what a wheel's own RECORD says, or what git has in HEAD if that is another release by now. Of an
    unpacked archive nothing can be told. Only the path of a file that vLLM itself has may be asked for.
    """
    if target.kind == "git" and target.release not in (None, release):
        tree = open_git(target.root).head.commit.tree

        def committed(path: str, data: bytes | None) -> bool:
            try:
                return tree[path].data_stream.read() == data
            except KeyError:
                return data is None

        return committed
    listing = f"{target.dist_info}/RECORD"
    try:
        text = read(target.root / listing).decode("utf-8", "surrogateescape")
    except OSError:
        return lambda path, data: False
    digests = {row[0]: row[1] for row in csv.reader(text.splitlines()) if len(row) == 3}

    def listed(path: str, data: bytes | None) -> bool:
        if data is None:
            return path not in digests
        if path == listing:  # it has no digest of itself; rows of ours are there only from apply to revert
            return not any(name.startswith(STATE_DIR + "/") for name in digests)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        return digests.get(path) == "sha256=" + digest

    return listed
