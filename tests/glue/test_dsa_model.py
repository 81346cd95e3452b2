"""vLLM's own loader fills every parameter of V3.2 and GLM-5 from a mini checkpoint, and their attention layers
are those of MLA_KERNELS_SPARSE."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sparse_mla_series import SERIES, tree_with_series  # noqa: F401

HERE = Path(__file__).parent


V32, GLM5 = ("v3.2", "fp8", "fp8_ds_mla", 656), ("glm-5", "auto", "auto", 1152)
# 0.33.0 has a model of its own for GPUs from 8.9 on, with Triton kernels that need 8-bit floats.
NEWER = [(*V32, "8.9"), (*GLM5, "9.0")] if SERIES and SERIES.release == "0.33.0" else []


@pytest.mark.parametrize("model, given, cache, width, gpu", [(*V32, "8.0"), (*GLM5, "8.0"), *NEWER])
def test_vllm_loads_a_mini_checkpoint(tree_with_series, model, given, cache, width, gpu):  # noqa: F811
    """On an A100, where nothing of vLLM's own serves it: also what its indexer picks there."""
    env = os.environ | {"PYTHONPATH": str(tree_with_series), "CAPABILITY": gpu, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, HERE / "dsa_model.py", model, given]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["missing"] == found["differ"] == []
    assert found["layers"] == 2 and found["impl"] == ["vllm.dsv4_overlay.sparse_mla_backend.SparseMLAImpl"]
    assert found["cache"] == [cache] and found["page"] == [found["block"] * width]
