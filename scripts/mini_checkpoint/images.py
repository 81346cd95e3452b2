"""DeepSeek V4 that takes images, as DeepSeek-V4-Flash-Vision-Exp does; vLLM has it from 0.30.0 on.

What such a checkpoint has beside V4's:

* a vision tower and an aligner, all of it BF16. Here their output is about as large as an embedding, in both
  halves of the hidden channels, and has a cluster's direction, so that routers and indexers treat the tokens of an
  image as those of a text;
* vectors for the tokens around an image's own: its start, its end, the ends of its rows, padding;
* a second router bias in every layer, `bias_vl`, for the tokens of images, and a first one also where text is
  routed by hash;
* the public vocabulary: vLLM knows the tokens of images by their ids in it, and their names in the tokenizer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar

import torch

from . import deepseek_v4
from .layouts import Fp8Blocks
from .recipe import CONTEXT_SCALE, Entry

FIRST_ID = 129257  # of the five kinds of tokens that vLLM puts in the placeholder's stead
SPECIAL_TOKENS = {
    FIRST_ID - 1: "<｜deepseek_image｜>",  # the placeholder
    **{FIRST_ID + i: f"<|place_holder_mm_span_{431 + i:04}|>" for i in range(5)},
}
# Of an embedding's norm. Less than in text: pictures have it in common, and attention over many tokens adds it up.
CLUSTER_SHARE = 0.3
OWN_SHARE = math.sqrt(1 - CLUSTER_SHARE**2)
GELU_MEAN, GELU_STD = 0.28, 0.59  # of unit-RMS inputs


@dataclasses.dataclass(frozen=True)
class Shape(deepseek_v4.Shape):
    """Sizes of the model. The defaults are those of V4 Flash Vision except where marked small."""

    vocab: int = 129280
    vision_layers: int = 2  # small (24)
    vision_dim: int = 256  # small (1024)
    vision_heads: int = 4  # small (16)
    vision_intermediate: int = 512  # small (2816)
    patch: int = 14  # pixels each way
    merged: int = 3  # patches each way that make a token
    image_tokens: int = 384  # of an image, at most

    module: ClassVar[str] = "language_model.model"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab < Shape.vocab:
            raise ValueError(f"images need the public vocabulary of {Shape.vocab}, whose ids vLLM knows")


def model_config(s: Shape, layout: Fp8Blocks | None = None) -> dict:
    """config.json; the public one names the architecture of text, too."""
    return deepseek_v4.model_config(s, layout) | {
        "vision_n_layers": s.vision_layers,
        "vision_dim": s.vision_dim,
        "vision_n_heads": s.vision_heads,
        "vision_inter_dim": s.vision_intermediate,
        "vision_patch_size": s.patch,
        "vision_rope_theta": 10000.0,
        "vision_downsample_ratio": s.merged,
        "vision_max_n_token": s.image_tokens,
        "vision_min_pixels": 384 * 384,
        "vision_max_wh_ratio": 8,
    }


class Recipe(deepseek_v4.Recipe):
    s: Shape
    special_tokens = SPECIAL_TOKENS

    def config(self) -> dict:
        return model_config(self.s, self.layout)

    def shards(self) -> Iterator[tuple[str, list[Entry]]]:
        yield from super().shards()
        yield "images", [*self.tower(), *self.aligner()]

    def block(self, layer: str, ratio: int, hashed: bool = False) -> Iterator[Entry]:
        yield from super().block(layer, ratio, hashed)
        for bias in ("bias", "bias_vl") if hashed else ("bias_vl",):
            yield Entry(f"{layer}.ffn.gate.{bias}", "f32", self.router_bias)

    def projection(self, name: str, out: int, fan_in: int, gain: float = 1.0) -> Iterator[Entry]:
        yield Entry(f"{name}.weight", "bf16", lambda n: self.linear(n, out, fan_in, gain))
        yield Entry(f"{name}.bias", "bf16", lambda n: self.normal(n, out, std=0.1))

    def tower(self) -> Iterator[Entry]:
        s, dim, wide = self.s, self.s.vision_dim, self.s.vision_intermediate
        yield from self.projection("vision.patch_embed.proj", dim, 3 * s.patch**2, 1.5)
        for i in range(s.vision_layers):
            block = f"vision.blocks.{i}"
            yield from self.projection(f"{block}.attn.wqkv", 3 * dim, dim)
            yield from self.projection(f"{block}.attn.wo", dim, dim)
            yield Entry(f"{block}.mlp.w1.weight", "bf16", lambda n: self.linear(n, 2 * wide, dim, 1.3))
            yield Entry(f"{block}.mlp.w2.weight", "bf16", lambda n: self.linear(n, dim, wide))
            for part in ("norm1", "norm2"):
                yield Entry(f"{block}.{part}.weight", "bf16", lambda n: self.norm_weight(n, dim))
        yield Entry("vision.norm.weight", "bf16", lambda n: self.norm_weight(n, dim))

    def aligner(self) -> Iterator[Entry]:
        s = self.s
        yield from self.projection("aligner.w1", s.hidden, s.vision_dim * s.merged**2)
        yield Entry("aligner.w2.weight", "bf16", lambda n: self.to_embeddings())
        yield Entry("aligner.w2.bias", "bf16", lambda n: self.cluster() - GELU_MEAN * self.to_embeddings().sum(1))
        for part in ("start", "end", "newline", "pad"):
            yield Entry(f"image_{part}", "f32", self.image_vector)

    def to_embeddings(self) -> torch.Tensor:
        h = self.s.hidden
        return self.embedded(self.linear("aligner.w2.weight", h, h, OWN_SHARE / GELU_STD))

    def image_vector(self, name: str) -> torch.Tensor:
        return self.embedded(self.normal(name, self.s.hidden, std=OWN_SHARE)) + self.cluster()

    def embedded(self, w: torch.Tensor) -> torch.Tensor:
        """Rows as an embedding's channels: those of the context are small."""
        w[self.halves()[1]] *= CONTEXT_SCALE
        return w

    def cluster(self) -> torch.Tensor:
        """What the tokens of images share, as those of a cluster do."""
        return self.cluster_directions()[0] * (CLUSTER_SHARE * math.sqrt(self.s.hidden / 2))
