"""Runs in a process of its own: vLLM's DeepSeek V4 that takes images, on an H200, and its draft, load a mini
checkpoint, and prompts with pictures become what the first layer sees.

The argument is what the server takes: `images`, or `text` alone. Prints which parameters were not loaded (the
loader itself stops at a tensor without a place), which of what only such checkpoints have hold other values than
were drawn, and for `images` what became of the prompts. Kernels of the layers are left out.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import hopper
import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import make_mini_checkpoint as mini  # noqa: E402
import mini_model  # noqa: E402
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
IMAGE = images.FIRST_ID - 1
SIZES = [(640, 480), (100, 300), (1400, 300)]


def experts(*args, **kwargs):
    layer = Nothing()
    layer.routed_experts = Experts(SHAPE, FP8, "weight_scale_inv", torch.float32, (128, 128))
    return layer


class Gated(torch.nn.Module):
    """vLLM's own is compiled."""

    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


def build(folder, **settings):
    info = hopper.models._ModelInfo.from_model_cls(deepseek_v4.DeepseekV4ForConditionalGeneration)
    hopper.models._LazyRegisteredModel.inspect_model_cls = lambda model: info
    config = hopper.EngineArgs(
        model=str(folder), max_model_len=4096, max_num_batched_tokens=2048, enforce_eager=True, block_size=256,
        kv_cache_dtype="fp8", mm_encoder_attn_backend="TORCH_SDPA", hf_overrides={"quantization_config": None},
        **settings,
    ).create_engine_config()  # fmt: skip
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


def picture(size, seed):
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (*reversed(size), 3), dtype=np.uint8))


def rendered(renderer, prompt, sizes, seed):
    """A prompt as the engine gets it."""
    pictures = [picture(size, seed + i) for i, size in enumerate(sizes)]
    return renderer.render_cmpl([prompt | {"multi_modal_data": {"image": pictures}}])[0]


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
    """What became of two prompts, and how their pictures show in what the layers get."""
    text = [list(range(16, 16 + length)) for length in (7, 30, 5)]
    parts = [*text[0], IMAGE, *text[1], IMAGE, *text[2]]
    one = rendered(renderer, {"prompt": f"See {images.SPECIAL_TOKENS[IMAGE]} here"}, SIZES[:1], 0)
    two = rendered(renderer, {"prompt_token_ids": parts}, SIZES[1:], 1)
    other = rendered(renderer, {"prompt_token_ids": parts}, SIZES[1:], 5)
    assert other["prompt_token_ids"] == two["prompt_token_ids"]
    x, place = embedded(model, two)
    y, _ = embedded(model, other)
    tokens = torch.tensor(two["prompt_token_ids"])
    marks = (tokens >= images.FIRST_ID) & (tokens < images.FIRST_ID + 5) & ~place
    return {
        "images": [[[found.offset, found.length] for found in p["mm_placeholders"]["image"]] for p in (one, two)],
        "kinds": [sorted({token - images.FIRST_ID for token in p["prompt_token_ids"]} & set(range(5)))
                  for p in (one, two)],
        "starts": (tokens == images.FIRST_ID).nonzero().flatten().tolist(),
        "features": halves(x[place]),
        "marks": halves(x[marks]),
        "same": torch.equal(x[~place], y[~place]),
        "alike": torch.cosine_similarity(x[place], y[place]).mean().item(),
    }  # fmt: skip


@torch.no_grad()
def main():
    folder = Path(tempfile.mkdtemp())
    recipe = images.Recipe(SHAPE, 0)
    mini.write_checkpoint(folder, recipe, log=lambda _: None)
    limits = {"language_model_only": True, "skip_tokenizer_init": True}
    model, config = build(folder, **limits if sys.argv[1] == "text" else {"limit_mm_per_prompt": {"image": 2}})
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
