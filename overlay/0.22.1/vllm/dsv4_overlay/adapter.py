"""What differs in vLLM 0.22.1 (and 0.22.0): where its layers are, and how one finds its implementation."""

import torch
from vllm.dsv4_overlay import attention
from vllm.dsv4_overlay.backend import FullCacheBackend
from vllm.models.deepseek_v4.nvidia.flashmla import (
    DeepseekV4FlashMLASparseBackend,
    DeepseekV4SparseMLAAttentionImpl,
)

ATTENTION = "vllm.models.deepseek_v4.attention"
COMPRESSOR = "vllm.models.deepseek_v4.compressor"


class DeepseekV4FullCacheBackend(FullCacheBackend, DeepseekV4FlashMLASparseBackend):
    """Metadata, block sizes and graph support are those of the V4 FlashMLA backend."""

    @staticmethod
    def get_impl_cls() -> type["DeepseekV4FullCacheImpl"]:
        return DeepseekV4FullCacheImpl


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
