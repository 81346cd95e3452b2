"""The series sparse-mla is on request, so the tree under test is without. Its modules come from the repository,
and what asks for the backend by name gets a copy of the tree with the series."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import vllm.dsv4_overlay

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/engine")]
from dsv4_overlay_tools.series import series_of  # noqa: E402
from smallworld import Engine  # noqa: E402

NAME = "sparse-mla"
TREE = Path(vllm.dsv4_overlay.__file__).parents[2]
RECORD = json.loads((TREE / "vllm/_dsv4_overlay/record.json").read_text())
SERIES = next((series for series in series_of(ROOT, RECORD["release"]) if series.name == NAME), None)
if SERIES:
    folders = [ROOT / "overlay" / part / "vllm/dsv4_overlay" for part in ("common", SERIES.release)]
    vllm.dsv4_overlay.__path__.extend(map(str, folders))


def needed():
    if not SERIES:
        pytest.skip(f"this release has no series {NAME}", allow_module_level=True)


@pytest.fixture(scope="session")
def tree_with_series(tmp_path_factory):
    needed()
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(TREE / "vllm", tree / "vllm")
    for file in ("PKG-INFO", "pyproject.toml"):
        shutil.copy(TREE / file, tree)
    engine = Engine(ROOT)
    engine.ok(tree, "--revert")
    engine.ok(tree, *(word for name in [*RECORD["series"], NAME] for word in ("--series", name)))
    return tree
