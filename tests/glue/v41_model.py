"""Runs in a process of its own: vLLM's DeepSeek V4.1 on an H200, and its draft, load a mini checkpoint.

The layout is the argument. Prints which parameters were not loaded (the loader itself stops at a tensor without a
place), which of some hold other values than were drawn, and the class and caches of the attention layers. Kernels
are left out.
"""

import dataclasses
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
from mini_model import Experts, Nothing, dense, left_out  # noqa: E402
from vllm.models.deepseek_v4.nvidia import model as deepseek_v4  # noqa: E402
from vllm.models.deepseek_v41 import DeepseekV4FP8Config, DSparkDeepseekV4ForCausalLM, attention  # noqa: E402

MODULE = mini.MODELS["v4.1"]
SHAPE = MODULE.Shape(hidden=512, heads=8, o_groups=1, q_lora=256, o_lora=128, index_heads=8, index_topk=64,
                     moe_intermediate=128, experts=8, vocab=1024, dspark=True, mtp_layers=2,
                     compress_ratios=(0, 2, 2, 1, 1, 1, 0, 0))  # fmt: skip


# Weights, their scales' name and dtype, and what a scale is of.
EXPERTS = {
    "mxfp8": (torch.uint8, "weight_scale", torch.uint8, (1, 32)),
    "fp8": (FP8, "weight_scale_inv", torch.float32, (128, 128)),
}


def experts(*args, **kwargs):
    layer = Nothing()
    layer.routed_experts = Experts(SHAPE, *EXPERTS[sys.argv[1]])
    return layer


def multimodal(model):
    return dataclasses.replace(hopper.model_info(model), supports_multimodal=True)


def build(folder):
    hopper.models._LazyRegisteredModel.inspect_model_cls = multimodal
    config = hopper.EngineArgs(
        model=str(folder), skip_tokenizer_init=True, max_model_len=4096, enforce_eager=True, kv_cache_dtype="fp8",
        language_model_only=True, hf_overrides={"quantization_config": None},
    ).create_engine_config()  # fmt: skip
    # Its own check imports every method's kernels.
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert DeepseekV4FP8Config.override_quantization_method(settings, None, config.model_config.hf_config)
    config.quant_config = DeepseekV4FP8Config.from_config(settings)
    deepseek_v4.FusedMoEFactory, deepseek_v4.SiluAndMulWithClamp = experts, Nothing
    attention.DeepseekV4Indexer.attn_cls = Nothing
    torch.cuda.Stream = Nothing
    config.kernel_config.enable_jit_warmup = False
    hopper.platforms._current_platform.device_type = "cpu"
    return mini_model.made(config, folder), config


def values(parameters, name, expert=None):
    separator = "." if expert is None else "_"
    scales = [parameters.get(f"{name}{separator}weight_scale{end}") for end in ("", "_inv")]
    scale = next((scale for scale in scales if scale is not None), None)
    whole = parameters[f"{name}{separator}weight"]
    if expert is not None:
        whole, scale = whole[expert], scale[expert]
    return dense(whole.data, None if scale is None else scale.data)


def differ(parameters, recipe, prefix, layer, parts):
    """Of a layer, the modules whose values are not those of these modules of the checkpoint."""
    found = []
    for name, sources in parts.items():
        name, _, expert = name.partition(":")
        have = values(parameters, f"{prefix}.{name}", int(expert) if expert else None)
        if mini_model.differs(have, recipe, [f"{layer}.{source}" for source in sources]):
            found.append(f"{layer}.{name}")
    return found


PARTS = {
    "attn.fused_wqa_wkv": ["attn.wq_a", "attn.wkv"],
    "attn.wq_b": ["attn.wq_b"],
    "attn.wo_a": ["attn.wo_a"],
    "attn.wo_b": ["attn.wo_b"],
    "ffn.gate": ["ffn.gate"],
    "ffn.shared_experts.gate_up_proj": ["ffn.shared_experts.w1", "ffn.shared_experts.w3"],
    "ffn.shared_experts.down_proj": ["ffn.shared_experts.w2"],
    "ffn.experts.routed_experts.w13:3": ["ffn.experts.3.w1", "ffn.experts.3.w3"],
    "ffn.experts.routed_experts.w2:3": ["ffn.experts.3.w2"],
}
INDEXER = {name: [name] for name in ("attn.indexer.wq_b", "attn.indexer.weights_proj")}
SOURCE = INDEXER | {name: [name] for name in ("attn.indexer.wk", "attn.indexer.k_norm", "attn.compressor.norm")}
KINDS = {
    0: {},
    1: SOURCE | {"attn.compressor.fused_wkv_wgate": ["attn.compressor.wkv", "attn.compressor.wgate"]},
    2: {},
    3: SOURCE | {"attn.compressor.fused_wkv_wgate": ["attn.compressor.wkv"]},
    4: INDEXER,
    5: {},
}


def attention_layers(config):
    """Of each: its compress ratio, whose rows it reads, who picks them, and the bytes of a row in each cache."""
    context = config.compilation_config.static_forward_context
    found = []
    for layer in context.values():
        if not isinstance(layer, attention.DeepseekV4Attention):
            continue
        caches = {}
        for name, cache in context.items():
            spec = cache.get_kv_cache_spec(config) if name.startswith(layer.prefix) else None
            if spec is not None:
                part = name.removeprefix(layer.prefix).strip(".")
                caches[part] = spec.state_content_size_bytes
        found.append([layer.compress_ratio, layer.kv_source_layer_id, layer.index_source_layer_id, caches])
    return found


@torch.no_grad()
def main():
    folder = Path(tempfile.mkdtemp())
    recipe = MODULE.Recipe(SHAPE, 0, None if sys.argv[1] == "mxfp8" else Fp8Blocks())
    mini.write_checkpoint(folder, recipe, log=lambda _: None)
    model, config = build(folder)
    found = {"missing": left_out(model, config, SHAPE.heads), "differ": []}
    parameters = dict(model.named_parameters())
    for number, parts in KINDS.items():
        prefix = f"language_model.model.layers.{number}"
        found["differ"] += differ(parameters, recipe, prefix, f"layers.{number}", PARTS | parts)
    found["layers"] = attention_layers(config)
    layers = model.language_model.model.layers
    found["candidates"] = model.language_model.model.candidate_block_buffer.shape[1]
    found["attention"] = sorted({type(layer.attn).__name__ for layer in layers})
    found["methods"] = sorted({type(layer.attn.wq_b.quant_method).__name__ for layer in layers})

    draft = mini_model.draft(config, DSparkDeepseekV4ForCausalLM, 3, "use_dspark")
    # The embedding and the output layer are the target's.
    names = ("model.embed_tokens.weight", "lm_head.weight")
    found["missing"] += [name for name in left_out(draft, config, SHAPE.heads) if name not in names]
    parameters = dict(draft.named_parameters())
    for stage in (0, 1):
        found["differ"] += differ(parameters, recipe, f"model.layers.{stage}", f"mtp.{stage}", PARTS)
    found["differ"] += differ(parameters, recipe, "model", "mtp.0", {"main_proj": ["main_proj"]})
    heads = {"markov_head.markov_w1": ["markov_head.embed"], "markov_head.markov_w2": ["markov_head.head"]}
    found["differ"] += differ(parameters, recipe, "model", "mtp.1", heads)
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
