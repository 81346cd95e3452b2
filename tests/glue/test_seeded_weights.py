"""Index scores of vLLM's dummy weights are all equal; those of benchmarks/seeded_weights.py differ."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sparse_mla_series import tree_with_series  # noqa: F401
from vllm.model_executor.model_loader import weight_utils

HERE = Path(__file__).parent


def test_index_scores_of_dummy_weights(applied):
    env = os.environ | {"PYTHONPATH": str(applied), "CAPABILITY": "9.0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, HERE / "dummy_model.py"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # 0.33.0 fills E4M3 weights up to 1 itself.
    own = hasattr(weight_utils, "_DUMMY_FP8_RANGE")
    assert found["False"] == {"distinct": 32 if own else 1, "finite": True}
    assert found["True"] == {"distinct": 32, "finite": True}
    assert found["same again"] and found["expert scales"] == [119]
    layer = [name for name in found["names"] if ".layers.2." in name]
    indexer = {name.split(".indexer.")[1] for name in layer if ".indexer." in name}
    assert {"compressor.ape", "compressor.fused_wkv_wgate.weight", "compressor.norm.weight", "weights_proj.weight",
            "wq_b.weight"} <= indexer  # fmt: skip


@pytest.mark.parametrize("model", ["v3.2", "glm-5"])
def test_index_scores_of_sparse_mla(model, tree_with_series):  # noqa: F811
    env = os.environ | {"PYTHONPATH": str(tree_with_series), "CAPABILITY": "9.0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, HERE / "dummy_dsa_model.py", model, "auto"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["distinct"] == 128 and found["finite"]
    layer = {name.split(".layers.1.")[1] for name in found["names"] if ".layers.1." in name}
    assert layer == {f"{name}.weight" for name in (
        "input_layernorm", "post_attention_layernorm", "self_attn.fused_qkv_a_proj", "self_attn.q_a_layernorm",
        "self_attn.kv_a_layernorm", "self_attn.indexer.wq_b", "self_attn.indexer.wk_weights_proj",
        "self_attn.indexer.k_norm",
    )}  # fmt: skip
