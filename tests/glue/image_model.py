"""Runs in a process of its own: vLLM's DeepSeek V4 that takes images, on an H200, and its draft, load a mini
checkpoint, and the prompts of the step `images` of features_e2e.py become what the first layer sees.

The argument is what the engine takes: `images`, as in that step, or `text` alone, as in the others. Prints which
parameters were not loaded (the loader itself stops at a tensor without a place), which of what only such
checkpoints have hold other values than were drawn, and what became of the prompts. Kernels of the layers are left
out.
"""

import contextlib
import json
import re
import sys
import tempfile
from pathlib import Path

import hopper
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]
import make_mini_checkpoint as mini  # noqa: E402
import mini_model  # noqa: E402
from features import one_gpu  # noqa: E402
from features.run import Run, engine_arguments  # noqa: E402
from mini_checkpoint import images  # noqa: E402
from mini_checkpoint.layouts import FP8  # noqa: E402
from mini_checkpoint.recipe import CONTEXT_SCALE  # noqa: E402
from mini_model import Experts, Nothing  # noqa: E402
from vllm import renderers  # noqa: E402
from vllm.model_executor.layers.attention import mm_encoder_attention  # noqa: E402
from vllm.models import deepseek_v4  # noqa: E402
from vllm.models.deepseek_v4 import attention  # noqa: E402
from vllm.models.deepseek_v4.common import vision  # noqa: E402
from vllm.models.deepseek_v4.nvidia import model as text_model  # noqa: E402
from vllm.multimodal.utils import group_and_batch_mm_kwargs  # noqa: E402
from vllm.v1.attention.ops import vit_attn_wrappers  # noqa: E402

SHAPE = images.Shape(hidden=512, heads=8, o_groups=1, q_lora=256, o_lora=128, index_heads=8, index_topk=64,
                     moe_intermediate=128, experts=8)  # fmt: skip


def experts(*args, **kwargs):
    layer = Nothing()
    layer.routed_experts = Experts(SHAPE, FP8, "weight_scale_inv", torch.float32, (128, 128))
    return layer


class Gated(torch.nn.Module):
    """vLLM's own is compiled."""

    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


def settings_of_the_step():
    asked = []

    def start(run, **changes):
        asked.append(changes)
        raise StopIteration

    Run.start = start
    with contextlib.suppress(StopIteration):
        one_gpu.images(Run({"vocab": SHAPE.vocab}))
    return asked[0]


def build(folder, settings):
    info = hopper.models._ModelInfo.from_model_cls(deepseek_v4.DeepseekV4ForConditionalGeneration)
    hopper.models._LazyRegisteredModel.inspect_model_cls = lambda model: info
    arguments = engine_arguments({"model": str(folder), "backend": "stock"}, **settings)
    here = {"mm_encoder_attn_backend": "TORCH_SDPA", "hf_overrides": {"quantization_config": None}}
    config = hopper.EngineArgs(**arguments, **here).create_engine_config()
    # Its own check imports every method's kernels.
    quantisation = json.loads((folder / "config.json").read_text())["quantization_config"]
    config.quant_config = deepseek_v4.DeepseekV4FP8Config.from_config(quantisation)
    text_model.FusedMoEFactory, text_model.SiluAndMulWithClamp = experts, Nothing
    attention.SparseAttnIndexer, vision.SiluAndMul = Nothing, Gated
    # The operator is one of CUDA's.
    mm_encoder_attention.vit_torch_sdpa_wrapper = vit_attn_wrappers.torch_sdpa_wrapper
    vision.async_tensor_h2d, torch.cuda.Stream = torch.Tensor.to, Nothing
    config.kernel_config.enable_jit_warmup = False
    hopper.platforms._current_platform.device_type = "cpu"
    return mini_model.made(config, folder), config


def differ(model, recipe):
    """Of the tensors that only a checkpoint with images has, those that the model has otherwise."""
    have, found = dict(model.named_parameters()), []
    for entry in (entry for _, entries in recipe.shards() for entry in entries):
        place = entry.name
        if re.fullmatch(r"layers\.\d+\.ffn\.gate\.bias(_vl)?", place):
            place = "language_model.model." + re.sub("bias$", "e_score_correction_bias", place)
        elif not place.startswith(("vision.", "aligner.", "image_")) or sys.argv[1] == "text":
            continue
        stored = recipe.layout.store(entry.name, entry.kind, entry.make(entry.name))[entry.name]
        if have[place].dtype != stored.dtype or not torch.equal(have[place], stored):
            found.append(entry.name)
    return found


def embedded(model, prompt):
    """What the first layer gets for its tokens."""
    kwargs = [("image", item) for item in prompt["mm_kwargs"]["image"]]
    features = []
    for _, _, batch in group_and_batch_mm_kwargs(kwargs, device=torch.device("cpu")):
        features += model.embed_multimodal(**batch)
    tokens = torch.tensor(prompt["prompt_token_ids"])
    place = torch.zeros(len(tokens), dtype=torch.bool)
    for found, feature in zip(prompt["mm_placeholders"]["image"], features, strict=True):
        assert found.get_num_embeds() == len(feature)
        place[found.offset : found.offset + found.length] = found.is_embed
    return model.embed_input_ids(tokens, features, is_multimodal=place).float(), place


def halves(x):
    """The RMS of what the tokens and the context have; of an embedding one is 1 and the other `CONTEXT_SCALE`."""
    token, context = (part.square().mean(-1).sqrt() for part in x.split(SHAPE.hidden // 2, -1))
    return [token.min().item(), token.max().item(), (context / CONTEXT_SCALE).mean().item()]


def described(model, renderer):
    """What became of the prompts, and how their pictures show in what the layers get."""
    place = renderer.get_tokenizer().convert_tokens_to_ids("<｜deepseek_image｜>")
    found = []
    for number in range(len(one_gpu.PICTURES)):
        asked = [one_gpu.with_pictures(number, place, noise) for noise in (0, 1)]
        prompt, other = renderer.render_cmpl(asked)
        assert prompt["prompt_token_ids"] == other["prompt_token_ids"]
        (x, of_pictures), (y, _) = (embedded(model, p) for p in (prompt, other))
        tokens = torch.tensor(prompt["prompt_token_ids"])
        kinds = tokens - images.FIRST_ID
        marks = (kinds >= 0) & (kinds < 5) & ~of_pictures
        found.append({
            "pictures": [[at.offset, at.length] for at in prompt["mm_placeholders"]["image"]],
            "kinds": sorted(set(kinds[kinds >= 0].tolist())),
            "starts": (kinds == 0).nonzero().flatten().tolist(),
            "features": halves(x[of_pictures]),
            "marks": halves(x[marks]),
            "text is the same": torch.equal(x[~of_pictures], y[~of_pictures]),
            "alike": torch.cosine_similarity(x[of_pictures], y[of_pictures]).mean().item(),
        })  # fmt: skip
    written = {"prompt": f"See {images.SPECIAL_TOKENS[place]}.", "multi_modal_data": asked[0]["multi_modal_data"]}
    written["multi_modal_data"] = {"image": written["multi_modal_data"]["image"][:1]}
    (prompt,) = renderer.render_cmpl([written])
    return {"prompts": found, "written": len(prompt["mm_placeholders"]["image"])}


@torch.no_grad()
def main():
    folder = Path(tempfile.mkdtemp())
    recipe = images.Recipe(SHAPE, 0)
    mini.write_checkpoint(folder, recipe, log=lambda _: None)
    model, config = build(folder, {} if sys.argv[1] == "text" else settings_of_the_step())
    found = {"missing": mini_model.left_out(model, config, SHAPE.heads), "differ": differ(model, recipe)}
    layers = model.language_model.model.layers
    found["architecture"] = config.model_config.architecture
    found["wo_b"] = sorted({type(layer.attn.wo_b.quant_method).__name__ for layer in layers})
    if sys.argv[1] == "images":
        found |= described(model, renderers.renderer_from_config(config))
    draft = mini_model.draft(config, deepseek_v4.DeepSeekV4MTP, 1, "use_mtp")
    found["draft"] = mini_model.left_out(draft, config, SHAPE.heads)
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
