"""Runs in a process of its own: vLLM's DeepSeek V3.2 or GLM-5, with MLA_KERNELS_SPARSE, loads a mini checkpoint.

The model's name and the cache dtype are the arguments. Prints which parameters were not loaded, which of some hold
other values than were drawn, and the attention layers' class and cache. Kernels are left out, FlashMLA's too.
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import hopper
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import make_mini_checkpoint as mini  # noqa: E402
import mini_model  # noqa: E402
from mini_checkpoint.layouts import FP8, Fp8Blocks  # noqa: E402
from mini_model import Experts, Nothing, dense  # noqa: E402
from vllm.model_executor.layers.quantization.fp8 import Fp8Config  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402
from vllm.model_executor.models import deepseek_v2, utils  # noqa: E402
from vllm.v1.attention.backends.mla.prefill import flash_attn  # noqa: E402

deepseek = [deepseek_v2]
if importlib.util.find_spec("vllm.models.deepseek_v32"):  # 0.33.0
    deepseek.append(importlib.import_module("vllm.models.deepseek_v32.attention"))
MODULE = mini.MODELS[sys.argv[1]]
SHAPE = MODULE.Shape(hidden=512, layers=2, heads=8, q_lora=256, index_heads=8, intermediate=256,
                     moe_intermediate=128, experts=8, vocab=1024)  # fmt: skip


def experts(*args, **kwargs):
    return Experts(SHAPE, FP8, "weight_scale_inv", torch.float32, (128, 128))


def build(folder):
    config = hopper.EngineArgs(
        model=str(folder), skip_tokenizer_init=True, max_model_len=4096, enforce_eager=True,
        attention_backend="MLA_KERNELS_SPARSE", kv_cache_dtype=sys.argv[2],
        hf_overrides={"quantization_config": None},
    ).create_engine_config()  # fmt: skip
    # The check of `quantization_config` imports every method's kernels.
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignored_layers"]
    config.quant_config = Fp8Config(True, "dynamic", ignored, [128, 128])
    hopper.platforms._current_platform.device_type = "cpu"
    deepseek_v2.FusedMoE, deepseek_v2.SiluAndMul = experts, Nothing
    flash_attn.flash_attn_varlen_func = print
    torch.cuda.Stream = Nothing
    for module in deepseek:
        module.SparseAttnIndexer = Nothing
    return mini_model.made(config, folder), config


def next_token_layer(config):
    if len(deepseek) > 1:
        from vllm.models.deepseek_v32 import DeepseekV32MTP as Draft
    else:
        from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP as Draft
    return mini_model.draft(config, Draft, 1)


def second_stage(model, load):
    """Parameters that are not loaded by a second pipeline stage: the first layer is another's."""
    model.model.layers[0] = utils.PPMissingLayer()
    utils._model_to_pp_missing_layer_names.clear()  # found when all layers were loaded
    return sorted(set(dict(model.named_parameters())) - load())


@torch.no_grad()
def main():
    folder = Path(tempfile.mkdtemp())
    recipe = MODULE.Recipe(SHAPE, 0)
    assert type(recipe.layout) is Fp8Blocks
    mini.write_checkpoint(folder, recipe, log=lambda _: None)
    model, config = build(folder)
    loader = get_model_loader(config.load_config)

    def load(model=model):
        return model.load_weights(loader.get_all_weights(config.model_config, model))

    names = load()
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
        have = dense(parameters[f"{layer}{name}.weight"], parameters.get(f"{layer}{name}.weight_scale_inv"))
        if mini_model.differs(have, recipe, [layer + source for source in sources]):
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
    if not hopper.platforms.current_platform.support_deep_gemm():
        import dsa_indexer

        found["differ"] += dsa_indexer.compiled_with_e4m3(config)
        for step in dsa_indexer.STEPS:
            found["differ"] += dsa_indexer.wrong_tokens(step, config)
    draft = next_token_layer(config)
    found["missing"] += sorted(set(dict(draft.named_parameters())) - load(draft))
    found["missing"] += second_stage(model, load)
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
