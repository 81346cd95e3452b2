"""Index scores of vLLM's dummy weights are all equal; those of benchmarks/seeded_weights.py differ."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sparse_mla_series import tree_with_series  # noqa: F401
from vllm.model_executor import model_loader
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


@pytest.mark.parametrize("scale, packed", [("weight_scale_2", "weight"), ("weight_global_scale", "weight_packed")])
def test_nvfp4_experts_of_dummy_weights_are_finite(monkeypatch, scale, packed):
    """As large as MXFP4 experts are, whose scale is a byte; a scale near zero has an infinite inverse in BF16."""
    monkeypatch.setattr(model_loader, "register_model_loader", lambda name: lambda loader: loader)
    monkeypatch.syspath_prepend(HERE.parents[1] / "benchmarks")
    seeded_weights = importlib.import_module("seeded_weights")

    def module(**tensors):
        of = torch.nn.Module()
        for name, tensor in tensors.items():
            of.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        return of

    experts = {
        f"w13_{packed}": torch.zeros(4, 8, 8, dtype=torch.uint8),
        "w13_weight_scale": torch.zeros(4, 8, 1).to(torch.float8_e4m3fn),
        f"w13_{scale}": torch.full((4, 2), 1e-6),
    }
    model = torch.nn.ModuleDict({"experts": module(**experts), "embed_tokens": module(weight=torch.zeros(8, 8))})
    for name in ("wq_b", "weights_proj", "indexer_norm", "fused_wqa_wkv", "fused_wkv_wgate"):
        model[name] = module(weight=torch.zeros(8, 8))
        model[name].input_size = 8
    model["compressor"] = module(ape=torch.zeros(8))
    seeded_weights.seed_weights(model)
    found = {name.removeprefix("w13_"): value for name, value in model["experts"].named_parameters()}
    factor = found[scale] if scale == "weight_scale_2" else 1 / found[scale]
    assert (factor * found["weight_scale"].float().mean() == 2.0 ** (seeded_weights.EXPERT_SCALE - 127)).all()
    assert found[packed].unique().numel() > 100
