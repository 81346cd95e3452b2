# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""What differs in vLLM 0.21.0 (and 0.20.2): where its layers are."""

from typing import Any

import torch
from vllm.dsv4_overlay.backend import FullCacheBackend
from vllm.dsv4_overlay.overriding import overriding
from vllm.v1.attention.backends.mla.flashmla_sparse import (
    DeepseekV4FlashMLASparseBackend,
)

ATTENTION = "vllm.model_executor.layers.deepseek_v4_attention"
COMPRESSOR = "vllm.model_executor.layers.deepseek_compressor"


@overriding()
class DeepseekV4FullCacheBackend(FullCacheBackend, DeepseekV4FlashMLASparseBackend):
    """Metadata, block sizes and graph support are those of the V4 FlashMLA backend.

    The layer calls the kernels itself in this release, so the implementation that is
    inherited is never made.
    """


def outer_layer(layer: torch.nn.Module, context: dict[str, Any]) -> torch.nn.Module:
    """The layer that has made `layer`, and has what the kernels that write need: RoPE,
    norm and compressor."""
    return context[f"{layer.prefix}.deepseek_v4_multi_head_latent_attention"]
