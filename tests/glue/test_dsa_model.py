"""vLLM's own loader fills every parameter of DeepSeek V3.2 and GLM-5 from a mini checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("model", ["v3.2", "glm-5"])
def test_vllm_loads_a_mini_checkpoint(applied, model):
    if not (applied / "vllm/model_executor/layers/sparse_attn_indexer.py").is_file():
        pytest.skip("this vLLM has no sparse MLA")
    env = os.environ | {"PYTHONPATH": str(applied), "CAPABILITY": "9.0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, HERE / "dsa_model.py", model], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["missing"] == found["differ"] == []
