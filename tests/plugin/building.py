"""A copy of this repository with a library in it, the wheel that it builds, and pip."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "overlay/common/vllm/third_party/mla_kernels"
LIBRARY = f"{KERNELS}/lib/libmla_kernels.so"
SOME = "markupsafe._speedups"  # a library that is there, for its form


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)


def copy_repository(root):
    """This repository without its history, with a library that says what a built one says, and is another."""
    ignored = shutil.ignore_patterns("__pycache__", "lib", "results")
    for name in ("csrc", "docs", "overlay", "patches", "scripts"):
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in ("LICENSE", "VERSION", "pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / name, root)
    sources = b"".join(path.read_bytes() for path in sorted((root / "csrc").iterdir()))
    (root / "csrc/.main.cu.swp").write_text("an editor's, which counts for nothing")
    (root / "csrc/.cache").mkdir()
    interface = re.search(r"^INTERFACE = (\d+)", (root / KERNELS / "native.py").read_text(), re.M)[1]
    build = {"interface": int(interface), "torch": "2.11", "cuda": "13.0", "archs": "90a"}
    build["sources"] = hashlib.sha256(sources).hexdigest()
    (root / LIBRARY).parent.mkdir()
    some = Path(importlib.util.find_spec(SOME).origin).read_bytes()
    (root / LIBRARY).write_bytes(some + b"mla_kernels_build " + json.dumps(build).encode() + b"\0")


def install(wheel, site):
    done = run(sys.executable, "-m", "pip", "install", "--no-index", "--quiet", "--target", site, wheel)
    assert done.returncode == 0, done.stderr
    return site


def archive(release):
    """The source archive of a release, where apply-patches.sh --fetch leaves it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / f"vllm-dsv4-overlay/sdist/vllm-{release}.tar.gz"
