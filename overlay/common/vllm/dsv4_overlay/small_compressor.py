# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""Steps of few tokens: one launch for a compressor, in place of two or three."""

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.third_party.mla_kernels import save_compress_store

# Tokens up to which launches cost the most. One program compresses a whole window: of
# 128 tokens that is slower than vLLM's kernels, so not where some window often ends.
_MAX_TOKENS = {4: 256, 128: 16}
# Bytes of the rows that the kernel writes. Others: full width, MXFP4.
_ROW_BYTES = {512: 584, 128: 132}


def save_and_compress(
    compressor: Any,
    kv_score: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    attn_metadata: dict[str, Any],
) -> bool:
    """Do what `DeepseekCompressor.forward` would; False if that is for vLLM to do."""
    state = attn_metadata[compressor.state_cache.prefix]
    kv_cache = compressor._static_forward_context[compressor.k_cache_prefix].kv_cache
    if (
        state.slot_mapping.shape[0] > _MAX_TOKENS[compressor.compress_ratio]
        or compressor.use_fp4_cache
        or kv_score.dtype != torch.float32
        or kv_cache.dtype != torch.uint8
        or kv_cache.shape[-1] != _ROW_BYTES[compressor.head_dim]
        # Whose kernels' rounding it follows.
        or not current_platform.is_device_capability(90)
    ):
        return False
    save_compress_store(
        kv_score=kv_score,
        ape=compressor.ape,
        positions=positions,
        state_cache=compressor.state_cache.kv_cache,
        slot_mapping=state.slot_mapping,
        token_to_req_indices=state.token_to_req_indices,
        block_table=state.block_table,
        cos_sin_cache=cos_sin_cache,
        kv_cache=kv_cache,
        kv_slot_mapping=attn_metadata[compressor.k_cache_prefix].slot_mapping,
        rms_norm_weight=compressor.norm.weight,
        rms_norm_eps=compressor.rms_norm_eps,
        compress_ratio=compressor.compress_ratio,
    )
    return True
