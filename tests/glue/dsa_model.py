"""Runs in a process of its own: vLLM's DeepSeek V3.2 or GLM-5, with MLA_KERNELS_SPARSE, loads a mini checkpoint.

The model's name and the cache dtype are the arguments. Prints which parameters were not loaded, which of some hold
other values than were drawn, and the attention layers' class and cache. Kernels are left out, FlashMLA's too.
"""

import importlib.util
import json
import sys
import tempfile
import types
from pathlib import Path

import hopper
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import make_mini_checkpoint as mini  # noqa: E402
from mini_checkpoint.layouts import FP8, Fp8Blocks  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.dsv4_overlay import adapter  # noqa: E402
from vllm.model_executor.layers.quantization.fp8 import Fp8Config  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.model_executor.models import deepseek_v2  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402
from vllm.v1.attention.backends.mla.prefill import flash_attn  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # noqa: E402

deepseek = [deepseek_v2]
if importlib.util.find_spec("vllm.models.deepseek_v32"):  # 0.33.0
    deepseek.append(importlib.import_module("vllm.models.deepseek_v32.attention"))
MODULE = mini.MODELS[sys.argv[1]]
SHAPE = MODULE.Shape(hidden=512, layers=2, heads=8, q_lora=256, index_heads=8, intermediate=256,
                     moe_intermediate=128, experts=8, vocab=1024)  # fmt: skip


class Nothing(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()


class Experts(torch.nn.Module):
    """vLLM's own layer chooses kernels when it is made."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        n, wide, h = SHAPE.experts, SHAPE.moe_intermediate, SHAPE.hidden
        for name, rows, columns in (("w13", 2 * wide, h), ("w2", h, wide)):
            for kind, dtype, block in (("weight", FP8, 1), ("weight_scale_inv", torch.float32, 128)):
                value = torch.zeros(n, rows // block, columns // block).to(dtype)
                parameter = torch.nn.Parameter(value, requires_grad=False)
                parameter.weight_loader = self.load
                self.register_parameter(f"{name}_{kind}", parameter)

    def load(self, parameter, weight, name, shard_id, expert_id, return_success):
        place = parameter.data[expert_id]
        if shard_id != "w2":
            half = len(place) // 2
            place = place[:half] if shard_id == "w1" else place[half:]
        place.copy_(weight)
        return return_success


def build(folder):
    register_backend(AttentionBackendEnum.CUSTOM, adapter.SPARSE_MLA_BACKEND)
    config = hopper.EngineArgs(
        model=str(folder), skip_tokenizer_init=True, max_model_len=4096, enforce_eager=True,
        attention_backend="CUSTOM", kv_cache_dtype=sys.argv[2], hf_overrides={"quantization_config": None},
    ).create_engine_config()  # fmt: skip
    # The check of `quantization_config` imports every method's kernels.
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignored_layers"]
    config.quant_config = Fp8Config(True, "dynamic", ignored, [128, 128])
    hopper.platforms._current_platform.device_type = "cpu"
    deepseek_v2.FusedMoE, deepseek_v2.SiluAndMul = Experts, Nothing
    flash_attn.flash_attn_varlen_func = print
    torch.cuda.Stream = Nothing
    for module in deepseek:
        module.SparseAttnIndexer = Nothing
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        initialize_model_parallel(1)
        return initialize_model(config), config


def dense(tensors, name):
    """A module's weights as float32."""
    w, scale = tensors[f"{name}.weight"].float(), tensors.get(f"{name}.weight_scale_inv")
    if scale is None:
        return w
    scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return w * scale[: w.shape[0], : w.shape[1]]


def drawn(recipe, name):
    """What the checkpoint has under a module's name."""
    entry = next(e for _, shard in recipe.shards() for e in shard if e.name == f"{name}.weight")
    return dense(recipe.layout.store(*entry[:2], entry.make(entry.name)), name)


class Speculative:
    """A draft of one token, of the target's own layer; whatever else is asked for is off."""

    num_speculative_tokens = 1

    def __init__(self, hf_config):
        self.draft_model_config = types.SimpleNamespace(hf_config=hf_config)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return False


def next_token_layer(config):
    """The draft's model, made as vLLM does: with the same layers and the target's configuration."""
    if len(deepseek) > 1:
        from vllm.models.deepseek_v32.nvidia.mtp import DeepseekV32MTP as Draft
    else:
        from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP as Draft
    config.speculative_config = Speculative(config.model_config.hf_config)
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        return Draft(vllm_config=config)


@torch.no_grad()
def main():
    folder = Path(tempfile.mkdtemp())
    recipe = MODULE.Recipe(SHAPE, 0)
    assert type(recipe.layout) is Fp8Blocks
    mini.write_checkpoint(folder, recipe, log=lambda _: None)
    model, config = build(folder)
    loader = get_model_loader(config.load_config)
    names = model.load_weights(loader.get_all_weights(config.model_config, model))
    parameters = dict(model.named_parameters())
    layer = "model.layers.1."
    parts = {
        "self_attn.q_b_proj": ["self_attn.q_b_proj"],
        "self_attn.kv_b_proj": ["self_attn.kv_b_proj"],
        "self_attn.o_proj": ["self_attn.o_proj"],
        "self_attn.indexer.wq_b": ["self_attn.indexer.wq_b"],
        "self_attn.indexer.wk_weights_proj": ["self_attn.indexer.wk", "self_attn.indexer.weights_proj"],
        "mlp.shared_experts.gate_up_proj": ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"],
    }
    differ = []
    for name, sources in parts.items():
        want = torch.cat([drawn(recipe, layer + source) for source in sources])
        have = dense(parameters, layer + name)
        if have.shape != want.shape or not torch.equal(have, want):
            differ.append(name)
    missing = sorted(set(parameters) - names)
    context = config.compilation_config.static_forward_context
    layers = [layer for layer in context.values() if hasattr(layer, "impl")]
    found = {
        "missing": missing,
        "differ": differ,
        "layers": len(layers),
        "impl": sorted({f"{type(layer.impl).__module__}.{type(layer.impl).__name__}" for layer in layers}),
        "cache": sorted({layer.kv_cache_dtype for layer in layers}),
        "page": sorted({layer.get_kv_cache_spec(config).page_size_bytes for layer in layers}),
        "block": config.cache_config.block_size,
    }
    print("\n" + json.dumps(found), flush=True)
    draft = next_token_layer(config)
    names = draft.load_weights(loader.get_all_weights(config.model_config, draft))
    found["missing"] += sorted(set(dict(draft.named_parameters())) - names)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
