"""Runs in a process of its own: a small V3.2 of vLLM's own layers, filled by benchmarks/seeded_weights.py.

Its arguments are those of dsa_model.py. Prints how many of 128 index scores differ, and which weights were seeded.
"""

import json
import sys
import tempfile
from pathlib import Path

import dsa_model
import torch
from mini_model import dense

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import seeded_weights  # noqa: E402
from vllm.config.load import LoadConfig  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402

KEYS = 128


def projected(x, linear):
    return x @ dense(linear.weight, getattr(linear, "weight_scale_inv", None)).float().T


def normed(x, norm):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm.weight.float()


@torch.no_grad()
def index_scores(model):
    """Of the last of 128 different tokens over them all (RoPE and rounding left out)."""
    layer, s = model.model.layers[1], dsa_model.SHAPE
    attention = layer.self_attn
    tokens = torch.randperm(s.vocab, generator=torch.Generator().manual_seed(0))[:KEYS]
    hidden = normed(model.model.embed_tokens.weight[tokens].float(), layer.input_layernorm)
    q = normed(projected(hidden[-1:], attention.fused_qkv_a_proj)[:, : s.q_lora], attention.q_a_layernorm)
    q = projected(q, attention.indexer.wq_b).view(s.index_heads, s.index_dim)
    k, weights = projected(hidden, attention.indexer.wk_weights_proj).split([s.index_dim, s.index_heads], -1)
    norm = attention.indexer.k_norm
    k = torch.nn.functional.layer_norm(k, [s.index_dim], norm.weight.float(), norm.bias.float())
    return (torch.relu(q @ k.T) * weights[-1:].T).sum(0)


def main():
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(dsa_model.MODULE.model_config(dsa_model.SHAPE)))
    model, config = dsa_model.build(folder)
    loader = get_model_loader(LoadConfig(load_format="dummy"))
    assert type(loader) is seeded_weights.SeededDummyLoader
    loader.load_weights(model, config.model_config)
    scores = index_scores(model)
    found = {"distinct": len(set(scores.tolist())), "finite": bool(scores.isfinite().all())}
    print("\n" + json.dumps(found | {"names": sorted(seeded_weights.seed_weights(model))}))


if __name__ == "__main__":
    main()
