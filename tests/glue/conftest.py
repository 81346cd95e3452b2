"""Glue tests need a vLLM with the overlay: VLLM_SOURCE names a tree (see scripts/test.sh), or one is installed."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Before vLLM and Triton are imported. vLLM keeps Triton without a GPU only if none is meant to be visible.
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

if os.environ.get("VLLM_SOURCE"):
    sys.path.insert(0, os.environ["VLLM_SOURCE"])
spec = importlib.util.find_spec("vllm")
if spec is None or not spec.origin or not (Path(spec.origin).parent / "_dsv4_overlay/record.json").is_file():
    raise pytest.UsageError("tests/glue needs a vLLM with the overlay; run scripts/test.sh.")


@pytest.fixture(scope="session")
def applied() -> Path:
    """The folder that holds the applied vllm/."""
    return Path(spec.origin).parents[1]
