"""docker/build.sh: the image of a vLLM release, from the pins in its release.toml."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomlkit

from .errors import Refusal
from .series import Series, find_series, load_series, release_folders

NAME = "vllm-dsv4-overlay"
BASE = "docker.io/vllm/vllm-openai"
BUILDERS = ("docker", "podman", "buildah")


def releases(root: Path) -> list[str]:
    """Every release that a series serves."""
    return sorted(release for folder in release_folders(root) for release in load_series(folder).sdists)


def pins(series: Series, release: str) -> dict[str, str]:
    """The [image] table for `release`: `digest` of the base and `flashinfer`, empty where it has none."""
    table: dict[str, Any] = tomlkit.parse((series.folder / "release.toml").read_text("utf-8")).unwrap()
    image = table.get("image", {})
    return {
        "digest": image.get("digests", {}).get(release, ""),
        "flashinfer": image.get("flashinfer", ""),
    }


def revision(root: Path) -> str:
    """The commit of this repository, with -dirty if the tree differs or has more; empty without git."""
    try:
        done = [
            subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=False)
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        ]
    except FileNotFoundError:
        return ""
    commit, changes = (each.stdout.strip() if each.returncode == 0 else "" for each in done)
    return commit and commit + "-dirty" * bool(changes)


def arguments(root: Path, release: str, base: str = "", digest: str = "") -> dict[str, str]:
    """The Dockerfile's build arguments. Raises Refusal(wrong-release)."""
    image = pins(find_series(root, release), release)
    name = base or f"{BASE}:v{release}"
    digest = digest or ("" if base else image["digest"])
    return {
        "BASE_IMAGE": f"{name}@{digest}" if digest else name,
        "BASE_NAME": name,
        "BASE_DIGEST": digest,
        "RELEASE": release,
        "FLASHINFER": image["flashinfer"],
        "VERSION": (root / "VERSION").read_text("utf-8").strip(),
    }


def bake(root: Path) -> str:
    """docker-bake.json: a target for each release. The revision comes from the environment of bake."""
    targets = {
        "release-" + release.replace(".", "-"): {
            "args": {**arguments(root, release), "REVISION": "${REVISION}"},
            "tags": [f"{NAME}:{release}"],
        }
        for release in releases(root)
    }
    file = {
        "variable": {"REVISION": {"default": ""}},
        "group": {"default": {"targets": list(targets)}},
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


def main(argv: list[str], root: Path) -> int:
    """build.sh: returns 0, 1 for a refusal or a failed build, or 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="build.sh",
        description="Build vLLM RELEASE's image with the overlay. Other options, given last, go to the builder.",
    )
    parser.add_argument("release", nargs="?", metavar="RELEASE")
    parser.add_argument("--base", default="", help="build on this image: of a mirror, or one of your own")
    parser.add_argument("--tag", help=f"default: {NAME}:RELEASE")
    parser.add_argument("--builder", choices=BUILDERS, help="default: the first of these on PATH")
    parser.add_argument("--bake", action="store_true", help="print docker-bake.json and build nothing")
    args, options = parser.parse_known_args(argv)
    if args.bake == bool(args.release):
        parser.error("give either RELEASE or --bake")
    try:
        if args.bake:
            print(bake(root), end="")
            return 0
        name, _, digest = args.base.partition("@")
        given = arguments(root, args.release, name, digest)
        builder = args.builder or next(filter(shutil.which, BUILDERS), "")
        if not shutil.which(builder):
            raise Refusal("build-failed", f"There is no {builder or ', '.join(BUILDERS)} on PATH; install one.")
        if not given["BASE_DIGEST"]:
            given = arguments(root, args.release, given["BASE_NAME"], resolve(builder, given["BASE_NAME"]))
        given["REVISION"] = revision(root)
        tag = args.tag or f"{NAME}:{args.release}"
        command = [builder, "build", "--tag", tag, *(["--layers"] if builder == "buildah" else [])]
        for key, value in given.items():
            command += ["--build-arg", f"{key}={value}"]
        _run([*command, *options, str(root)])
    except Refusal as refusal:
        print(f"error: {refusal.code}: {refusal.message}", file=sys.stderr)
        return 1
    print(f"built {tag} on {given['BASE_IMAGE']}")
    return 0
