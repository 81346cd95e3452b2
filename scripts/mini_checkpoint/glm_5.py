"""GLM-5: V3.2's layers with 64 heads of 192 + 64 and values of 256, plain RoPE, 32 index heads."""

from __future__ import annotations

import dataclasses

from . import deepseek_v32
from .layouts import Fp8Blocks


@dataclasses.dataclass(frozen=True)
class Shape(deepseek_v32.Shape):
    """Sizes of the model. The defaults are GLM-5's except where marked small."""

    hidden: int = 4096  # small (6144)
    layers: int = 4  # small (78)
    heads: int = 64
    nope_dim: int = 192
    v_dim: int = 256
    q_lora: int = 2048
    index_heads: int = 32
    intermediate: int = 2048  # small (12288)
    vocab: int = 8192  # small (154880)


def model_config(s: Shape, layout: Fp8Blocks | None = None) -> dict:
    """config.json; `layout` is FP8 blocks unless given."""
    config = deepseek_v32.model_config(s, layout) | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
        "indexer_rope_interleave": True,
    }
    del config["rope_theta"], config["rope_scaling"]
    return config


class Recipe(deepseek_v32.Recipe):
    s: Shape
    mscale = 1.0
    index_rope_halves = False

    def config(self) -> dict:
        return model_config(self.s, self.layout)
