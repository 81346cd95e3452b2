# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""What differs in vLLM 0.22.1 (and 0.22.0): where its layers are, and how one finds its
implementation."""

from typing import Any

import torch
from vllm.dsv4_overlay import attention
from vllm.dsv4_overlay.backend import FullCacheBackend
from vllm.dsv4_overlay.overriding import overriding
from vllm.models.deepseek_v4.nvidia.flashmla import (
    DeepseekV4FlashMLASparseBackend,
    DeepseekV4SparseMLAAttentionImpl,
)

ATTENTION = "vllm.models.deepseek_v4.attention"
COMPRESSOR = "vllm.models.deepseek_v4.compressor"


@overriding()
class DeepseekV4FullCacheBackend(FullCacheBackend, DeepseekV4FlashMLASparseBackend):
    """Metadata, block sizes and graph support are those of the V4 FlashMLA backend."""

    @staticmethod
    def get_impl_cls() -> type["DeepseekV4FullCacheImpl"]:
        return DeepseekV4FullCacheImpl


@overriding()
class DeepseekV4FullCacheImpl(DeepseekV4SparseMLAAttentionImpl):
    backend_cls = DeepseekV4FullCacheBackend

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        return num_heads

    @classmethod
    def forward_mqa(
        cls,
        layer: torch.nn.Module,
        q: torch.Tensor,
        kv: torch.Tensor,
        positions: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        attention.forward(layer, q, output)


def outer_layer(layer: torch.nn.Module, context: dict[str, Any]) -> torch.nn.Module:
    """The layer that has made `layer`, and has what the kernels that write need: RoPE,
    norm and compressor."""
    return context[f"{layer.prefix}.deepseek_v4_multi_head_latent_attention"]
