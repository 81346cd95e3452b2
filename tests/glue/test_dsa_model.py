"""vLLM's own loader fills every parameter of V3.2 and GLM-5 from a mini checkpoint, and their attention layers
are those of MLA_KERNELS_SPARSE."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "model, given, cache, width", [("v3.2", "fp8", "fp8_ds_mla", 656), ("glm-5", "auto", "auto", 1152)]
)
def test_vllm_loads_a_mini_checkpoint(applied, model, given, cache, width):
    """On an A100, where no backend of vLLM's own takes the model."""
    if not (applied / "vllm/dsv4_overlay/sparse_mla_backend.py").is_file():
        pytest.skip("this release has no MLA_KERNELS_SPARSE")
    env = os.environ | {"PYTHONPATH": str(applied), "CAPABILITY": "8.0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, HERE / "dsa_model.py", model, given]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["missing"] == found["differ"] == []
    assert found["layers"] == 2 and found["impl"] == ["vllm.dsv4_overlay.sparse_mla_backend.SparseMLAImpl"]
    assert found["cache"] == [cache] and found["page"] == [found["block"] * width]
