"""docker/build.sh: the image of a vLLM release, from the pins in its release.toml."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import tomlkit
from dsv4_overlay_tools.errors import Refusal
from dsv4_overlay_tools.series import DEFAULT, Stack, find_series, load_series, release_folders

NAME = "vllm-dsv4-overlay"
BASE = "docker.io/vllm/vllm-openai"
# Options of a builder by which an image is another one than its tag says.
OTHER_CONTENT = (
    "--build-arg", "--platform", "--target", "--file", "-f", "--build-context",
    "--from", "--env", "--arch", "--os",
)  # fmt: skip
# Each with a command that fails if it cannot build: a docker without its daemon or without BuildKit, for one.
BUILDERS = {
    "docker": ["docker", "buildx", "inspect"],
    "podman": ["podman", "info"],
    "buildah": ["buildah", "info"],
}


def releases(root: Path) -> list[str]:
    """Every release that a series serves."""
    return sorted({release for folder in release_folders(root) for release in load_series(folder).sdists})


def pins(stack: Stack, release: str) -> dict[str, str]:
    """The [image] table for `release`: `digest` of the base and `flashinfer`, empty where it has none."""
    image: dict[str, Any] = {}
    for series in stack.series:
        image |= tomlkit.parse((series.folder / "release.toml").read_text("utf-8")).unwrap().get("image", {})
    return {
        "digest": image.get("digests", {}).get(release, ""),
        "flashinfer": image.get("flashinfer", ""),
    }


class Source(NamedTuple):
    """The commit of this repository: its hash, its time (RFC 3339) and where it is from, each empty if unknown."""

    revision: str = ""
    created: str = ""
    url: str = ""
    dirty: bool = False


def source(root: Path) -> Source:
    """What is checked out at `root`; all empty without git."""
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # or importing it fails without the git program
    import git

    try:
        repo = git.Repo(root)
        # First: in another user's clone it fails with an error of git's, the others perhaps with a broken pipe.
        # Without the user's own list of files to ignore.
        dirty = bool(repo.git(c="core.excludesFile=").status("--porcelain", "--untracked-files=normal"))
        commit = repo.head.commit
        url = repo.remotes["origin"].url if "origin" in repo.remotes else ""
    except (git.GitError, git.GitCommandNotFound, ValueError):
        return Source()
    created = commit.committed_datetime.astimezone(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Source(commit.hexsha, created, public_url(url), dirty)


def public_url(url: str) -> str:
    """`url` of a git remote as a web address without credentials; empty for one that is not on the web."""
    if match := re.fullmatch(r"(?:ssh://)?git@([^:/]+)[:/](.+)", url):
        url = f"https://{match[1]}/{match[2]}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        return ""
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().removesuffix(".git")


def arguments(
    root: Path, release: str, base: str = "", digest: str = "", blackwell: bool = False, series: Iterable[str] = ()
) -> dict[str, str]:
    """The Dockerfile's build arguments, less those of the commit. Raises Refusal."""
    image = pins(find_series(root, release, [*series, DEFAULT]), release)
    if blackwell and not image["flashinfer"]:
        raise Refusal("no-variant", f"The image of vLLM {release} has no variant for Blackwell; omit --blackwell.")
    name = base or f"{BASE}:v{release}"
    digest = digest or ("" if base else image["digest"])
    return {
        "BASE_IMAGE": f"{name}@{digest}" if digest else name,
        "BASE_NAME": name,
        "BASE_DIGEST": digest,
        "RELEASE": release,
        "SERIES": " ".join(f"--series={name}" for name in sorted(set(series))),
        "FLASHINFER": image["flashinfer"] if blackwell else "",
        "VERSION": (root / "VERSION").read_text("utf-8").strip(),
    }


def tag(given: dict[str, str], revision: str, pinned: str) -> str:
    """The tag that says all that the image is made of, so that it cannot come to mean something else.

    `pinned` is the digest that release.toml has for the base: another one becomes part of the tag.
    """
    name = f"{NAME}:{given['RELEASE']}-{given['VERSION']}-g{revision}" + "-blackwell" * bool(given["FLASHINFER"])
    name += f"-{platform.machine()}" * (platform.machine() != "x86_64")
    name += given["SERIES"].replace(" ", "").replace("--series=", "_")
    digest = given["BASE_DIGEST"]
    return name if digest == pinned else f"{name}-base-{digest.partition(':')[2][:12]}"


def bake(root: Path) -> str:
    """docker-bake.json: a target for each release whose base is pinned, for bake cannot ask a registry.

    What is of the commit comes from the environment of bake, which refuses to go on without REVISION.
    """
    of_commit = ("REVISION", "CREATED", "SOURCE")
    groups: dict[str, list[str]] = {"default": [], "blackwell": []}
    targets = {}
    for release in releases(root):
        image = pins(find_series(root, release), release)
        for group, names in groups.items():
            if not image["digest"] or (group == "blackwell" and not image["flashinfer"]):
                continue
            given = arguments(root, release, blackwell=group == "blackwell")
            name = "release-" + release.replace(".", "-") + "-blackwell" * (group == "blackwell")
            names.append(name)
            targets[name] = {
                "args": given | {key: f"${{{key}}}" for key in of_commit},
                "tags": [tag(given, '${regex("^[0-9a-f]{12}", REVISION)}', image["digest"])],
            }
    file = {
        "variable": {key: {"default": ""} for key in of_commit},
        "group": {group: {"targets": names} for group, names in groups.items()},
        "target": targets,
    }
    return json.dumps(file, indent=2) + "\n"


def _run(command: list[str], *, read: bool = False) -> str:
    """Run `command`; show its standard output, or return it. Raises Refusal(build-failed)."""
    print("+", " ".join(command), file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE if read else sys.stderr, text=True, check=False)
    if done.returncode:
        what = " ".join(command[:2])
        raise Refusal("build-failed", f"{what} ended with {done.returncode}; its output says why.")
    return done.stdout.strip() if read else ""


def working_builder() -> str:
    """The first of BUILDERS that is installed and works. Raises Refusal(build-failed)."""
    installed = [name for name in BUILDERS if shutil.which(name)]
    for name in installed:
        if subprocess.run(BUILDERS[name], capture_output=True, check=False).returncode == 0:
            return name
    if installed:
        tried = ", ".join(f"`{' '.join(BUILDERS[name])}`" for name in installed)
        raise Refusal("build-failed", f"No builder works: {tried} failed; run one of these to see why.")
    raise Refusal("build-failed", f"There is no {' or '.join(BUILDERS)} on PATH; install one.")


def resolve(builder: str, base: str) -> str:
    """The digest of `base`, asked of its registry now; empty for an image that no registry has. Raises Refusal."""
    if builder == "buildah":
        _run([builder, "pull", "--policy", "ifnewer", base])
        return _run([builder, "images", "--format", "{{.Digest}}", base], read=True).split("\n")[0]
    with contextlib.suppress(Refusal):  # perhaps it is only here
        _run([builder, "pull", base])
    digests = _run([builder, "image", "inspect", "--format", "{{json .RepoDigests}}", base], read=True)
    repository = re.sub(r":[^/:]*$", "", base)
    for found in json.loads(digests) or []:
        name, _, digest = found.partition("@")
        # Docker leaves out docker.io/, and library/ after it.
        if name == repository or repository.removeprefix("docker.io/").removeprefix("library/") == name:
            return digest
    return ""


def build(root: Path, args: argparse.Namespace, options: list[str]) -> str:
    """Build the image; returns its tag and its base. Raises Refusal."""
    name, _, digest = args.base.partition("@")
    given = arguments(root, args.release, name, digest, args.blackwell, args.series)
    commit = source(root)
    if not args.tag and (commit.dirty or not commit.revision):
        why = "has changes that are not committed" if commit.dirty else "has no commit that git tells of"
        raise Refusal("no-tag", f"{root} {why}, so no tag could say what is in the image; commit, or give --tag.")
    if not args.tag and any(option.startswith(OTHER_CONTENT) for option in options):
        raise Refusal("no-tag", "A build with other arguments has another content than its tag says; give --tag.")
    builder = args.builder or working_builder()
    if not shutil.which(builder):
        raise Refusal("build-failed", f"There is no {builder} on PATH; install it.")
    if not given["BASE_DIGEST"]:
        digest = resolve(builder, given["BASE_NAME"])
        given = arguments(root, args.release, given["BASE_NAME"], digest, args.blackwell, args.series)
        if not digest and not args.tag:
            raise Refusal("no-tag", f"No registry knows {given['BASE_NAME']}, so it has no digest; give --tag.")
    pinned = pins(find_series(root, args.release), args.release)["digest"]
    tagged = args.tag or tag(given, commit.revision[:12], pinned)
    given["REVISION"] = commit.revision + "-dirty" * commit.dirty
    given |= {"CREATED": commit.created, "SOURCE": commit.url}
    command = [builder, "build", "--tag", tagged, *(["--layers"] if builder == "buildah" else [])]
    for key, value in given.items():
        command += ["--build-arg", f"{key}={value}"]
    _run([*command, *options, str(root)])
    return f"{tagged} on {given['BASE_IMAGE']}"


def main(argv: list[str], root: Path) -> int:
    """build.sh: returns 0, 1 for a refusal or a failed build, or 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="build.sh",
        description="Build vLLM RELEASE's image with the overlay. Other options, given last, go to the builder.",
    )
    parser.add_argument("release", nargs="?", metavar="RELEASE")
    parser.add_argument("--blackwell", action="store_true", help="with the FlashInfer that Blackwell needs")
    parser.add_argument("--series", metavar="NAME", action="append", default=[],
                        help="as of apply-patches.sh; becomes part of the tag")  # fmt: skip
    parser.add_argument("--base", default="", help="build on this image: of a mirror, or one of your own")
    parser.add_argument("--tag", help=f"default: {NAME}:RELEASE-VERSION-gCOMMIT")
    parser.add_argument("--builder", choices=BUILDERS, help="default: the first of these that works")
    parser.add_argument("--bake", action="store_true", help="print docker-bake.json and build nothing")
    if "" in argv:
        parser.error("an argument is empty (is a variable unset?)")
    args, options = parser.parse_known_args(argv)
    if args.bake == bool(args.release):
        parser.error("give either RELEASE or --bake")
    try:
        if args.bake:
            print(bake(root), end="")
        else:
            print("built", build(root, args, options))
    except Refusal as refusal:
        print(f"error: {refusal.code}: {refusal.message}", file=sys.stderr)
        return 1
    return 0
