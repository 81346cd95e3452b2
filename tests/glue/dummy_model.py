"""Runs in a process of its own: a small DeepSeek V4 of vLLM's own layers, filled by its dummy loader.

Prints how many of its index scores differ, without and with benchmarks/seeded_weights.py. Experts and kernels are
left out.
"""

import json
import sys
import tempfile
import types
from pathlib import Path

import hopper
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]
import make_mini_checkpoint as mini  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.config.load import LoadConfig  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.model_executor.layers.quantization.fp8 import Fp8Config  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402

SHAPE = mini.Shape(hidden=512, heads=8, o_groups=1, q_lora=128, o_lora=128, vocab=512, experts=8,
                   moe_intermediate=128, index_heads=8, index_topk=64)  # fmt: skip
FP8 = torch.float8_e4m3fn


class Nothing(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()


class Experts(Nothing):
    """MXFP4, as the layer has them before they are processed."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        for name, size in (("w13_weight", 64), ("w2_weight", 64), ("w13_weight_scale", 4), ("w2_weight_scale", 4)):
            value = torch.full((8, 128, size), 255, dtype=torch.uint8)
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))


def build():
    folder = tempfile.mkdtemp()
    (Path(folder) / "config.json").write_text(json.dumps(mini.model_config(SHAPE)))
    config = hopper.EngineArgs(
        model=folder, skip_tokenizer_init=True, block_size=256, max_model_len=4096, kv_cache_dtype="fp8",
        load_format="dummy", enforce_eager=True, hf_overrides={"quantization_config": None},
    ).create_engine_config()  # fmt: skip
    config.quant_config = Fp8Config(True, "dynamic", None, [128, 128])  # its check imports every method's kernels
    config.model_config.hf_config.quantization_config = {"scale_fmt": "ue8m0"}
    hopper.platforms._current_platform.device_type = "cpu"
    torch.cuda.Stream = Nothing
    try:
        from vllm.models.deepseek_v4 import attention
        from vllm.models.deepseek_v4.nvidia import model
    except ModuleNotFoundError:  # up to 0.21.0
        name = "vllm.model_executor.layers.mhc"  # needs TileLang
        sys.modules[name] = types.ModuleType(name)
        from vllm.model_executor.layers import deepseek_v4_attention as attention
        from vllm.model_executor.models import deepseek_v4 as model
    attention.SparseAttnIndexer, model.DeepseekV4MoE = Nothing, Experts
    model.DeepseekV4ForCausalLM.set_moe_parameters = lambda self: None
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        initialize_model_parallel(1)
        return model.DeepseekV4ForCausalLM(vllm_config=config), config


def normed(x, norm):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm.weight.float()


def projected(x, linear):
    weight = linear.weight.float()
    if linear.weight.dtype == FP8:
        scale = linear.weight_scale_inv.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight = weight * scale[: weight.shape[0], : weight.shape[1]]
    return x @ weight.T


def quantized(x):
    """As vLLM's indexer rounds its queries and keys."""
    scale = (x.abs().amax(-1, keepdim=True).clamp_(min=1e-4) / 448).log2().ceil().exp2()
    return (x / scale).to(FP8).float() * scale


@torch.no_grad()
def index_scores(model):
    """Of the last of 128 random tokens over compressed rows of 4 (RoPE and overlap left out)."""
    layer = model.model.layers[2]
    attention, indexer = layer.attn, getattr(layer.attn, "indexer", None) or layer.attn.mla_attn.indexer
    tokens = torch.randint(0, SHAPE.vocab, (128,), generator=torch.Generator().manual_seed(0))
    hidden = normed(model.model.embed_tokens.weight[tokens].float(), layer.attn_norm)
    q = normed(projected(hidden[-1:], attention.fused_wqa_wkv)[:, : SHAPE.q_lora], attention.q_norm)
    q = quantized(projected(q, indexer.wq_b).view(SHAPE.index_heads, SHAPE.index_dim))
    rows, gates = projected(hidden, indexer.compressor.fused_wkv_wgate).view(32, 4, 2, -1).unbind(2)
    rows = (rows * (gates + indexer.compressor.ape.float()).softmax(1)).sum(1)[:, -SHAPE.index_dim :]
    k = quantized(normed(rows, indexer.compressor.norm))
    weights = projected(hidden[-1:], indexer.weights_proj)
    return (torch.relu(q @ k.T) * weights.T).sum(0)


def main():
    model, config = build()
    found = {}
    for seeded in (False, True):
        if seeded:
            import seeded_weights
        get_model_loader(LoadConfig(load_format="dummy")).load_weights(model, config.model_config)
        scores = index_scores(model)
        first = {name: tensor.clone() for name, tensor in model.named_parameters()}
        found[str(seeded)] = {"distinct": len(set(scores.tolist())), "finite": bool(scores.isfinite().all())}
    get_model_loader(LoadConfig(load_format="dummy")).load_weights(model, config.model_config)
    found["same again"] = all(
        torch.equal(tensor.view(torch.uint8), first[name].view(torch.uint8))
        for name, tensor in model.named_parameters()
    )
    experts = [tensor for name, tensor in first.items() if name.endswith("_weight_scale")]
    found["expert scales"] = sorted({int(value) for tensor in experts for value in tensor.unique()})
    found["names"] = sorted(seeded_weights.seed_weights(model))
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
