"""Series on request: the tree under test is without them, so a test that needs one gets a copy of it with them."""

import json
import shutil
import sys
from pathlib import Path

import vllm

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/engine")]
from dsv4_overlay_tools.series import series_of  # noqa: E402
from smallworld import Engine  # noqa: E402

TREE = Path(vllm.__file__).parents[1]
RECORD = json.loads((TREE / "vllm/_dsv4_overlay/record.json").read_text())
RELEASE = RECORD["release"]
ON_REQUEST = {series.name: series for series in series_of(ROOT, RELEASE) if series.name not in RECORD["series"]}


def tree_with(folder, *names, beside=RECORD["series"]):
    """A copy of the tree, in `folder`, with these series too, or `beside` no others."""
    for package in ("vllm", "vllm.egg-info"):  # without the latter newer releases leave Triton out
        # With bytecode, but not the files by way of which other tests write it meanwhile: they vanish.
        shutil.copytree(TREE / package, folder / package, ignore=shutil.ignore_patterns("*.pyc.*"))
    for file in ("PKG-INFO", "pyproject.toml"):
        shutil.copy(TREE / file, folder)
    engine = Engine(ROOT)
    engine.ok(folder, "--revert")
    engine.ok(folder, *(f"--series={name}" for name in [*beside, *names]))
    return folder
