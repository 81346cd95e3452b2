"""What differs in vLLM 0.21.0 (and 0.20.2): where its layers are."""

from vllm.dsv4_overlay.backend import FullCacheBackend
from vllm.v1.attention.backends.mla.flashmla_sparse import DeepseekV4FlashMLASparseBackend

ATTENTION = "vllm.model_executor.layers.deepseek_v4_attention"
COMPRESSOR = "vllm.model_executor.layers.deepseek_compressor"


class DeepseekV4FullCacheBackend(FullCacheBackend, DeepseekV4FlashMLASparseBackend):
    """Metadata, block sizes and graph support are those of the V4 FlashMLA backend.

    The layer calls the kernels itself in this release, so the implementation that is inherited is never made.
    """
