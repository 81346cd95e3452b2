"""The series sparse-mla: its modules come from the repository; what asks for the backend by name gets a tree."""

import pytest
import vllm.dsv4_overlay
from on_request import ON_REQUEST, ROOT, tree_with

NAME = "sparse-mla"
SERIES = ON_REQUEST.get(NAME)
if SERIES:
    folders = [ROOT / "overlay" / part / "vllm/dsv4_overlay" for part in ("common", SERIES.release)]
    vllm.dsv4_overlay.__path__.extend(map(str, folders))


def needed():
    if not SERIES:
        pytest.skip(f"this release has no series {NAME}", allow_module_level=True)


@pytest.fixture(scope="session")
def tree_with_series(tmp_path_factory):
    needed()
    return tree_with(tmp_path_factory.mktemp("tree"), NAME)
