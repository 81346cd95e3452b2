"""Kernel tests import the package alone, without vLLM, and run on the GPU or through Triton's interpreter."""

import importlib
import os
import pkgutil
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "overlay/common/vllm/third_party"))

# An operator can be registered once in a process, and other tests import the package as a part of vLLM: the copy
# that comes first serves both names.
ALONE, IN_VLLM = "mla_kernels", "vllm.third_party.mla_kernels"
first, second = (IN_VLLM, ALONE) if IN_VLLM in sys.modules else (ALONE, IN_VLLM)
package = importlib.import_module(first)
for module in pkgutil.walk_packages(package.__path__, f"{first}."):
    importlib.import_module(module.name)
for name, module in list(sys.modules.items()):
    if name == first or name.startswith(f"{first}."):
        sys.modules[second + name.removeprefix(first)] = module


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def second_gpu() -> torch.device:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return torch.device("cuda", 1 - torch.cuda.current_device())


@pytest.fixture(autouse=True)
def give_memory_back(request):
    """After a test on the GPU: several processes share it, and pools of 2^31 elements stay in torch's cache."""
    yield
    if request.node.get_closest_marker("gpu"):
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
