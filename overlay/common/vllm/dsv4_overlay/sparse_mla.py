# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""MLA_KERNELS_SPARSE, the sparse MLA of DeepSeek V3.2 and GLM-5 over 576-wide rows, as
far as every release has it alike; `sparse_mla_backend` has the rest."""

from typing import ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.third_party.mla_kernels import (
    MAX_HEADS,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
)

SPARSE_MLA = "MLA_KERNELS_SPARSE"
PAGE = 64
HEAD_SIZE = 576
CACHE_DTYPES = ("auto", "bfloat16", "fp8_ds_mla", "fp8")


class SparseMLABackendMixin:
    """What it is and refuses, for a class of vLLM's `AttentionBackend`.

    Every token of a batch, decode or prefill, is one call over the rows in place, with
    as many heads as the GPU has: no padding to 64, no second path for prefill and none
    of FLASHMLA_SPARSE's workspace of 5 * max_model_len BF16 rows (900 MiB at 163840).

    No GPU has run it yet. So its series is applied on request only, and vLLM's list of
    priorities does not have it.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        # vLLM asks for this very name before it takes `fp8` to mean the 656-byte rows.
        return "FLASHMLA_SPARSE"

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [HEAD_SIZE]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        *others: object,
    ) -> str | None:
        """The first reason against it, a sentence. vLLM asks when it makes the model,
        before it reads weights."""
        capability = others[-1]
        assert isinstance(capability, DeviceCapability)
        return sparse_mla_refusal(head_size, kv_cache_dtype, block_size, capability)


def sparse_mla_refusal(
    head_size: int,
    kv_cache_dtype: str | None,
    block_size: int | None,
    capability: DeviceCapability,
) -> str | None:
    if not SparseMLABackendMixin.supports_compute_capability(capability):
        return (
            f"{SPARSE_MLA} needs a GPU of compute capability 8.0 or newer, and this "
            f"one has {capability.as_version_str()}."
        )
    if head_size != HEAD_SIZE:
        return (
            f"{SPARSE_MLA} reads rows of {HEAD_SIZE} values (DeepSeek V3.2, GLM-5), "
            f"and this model has {head_size}."
        )
    if kv_cache_dtype not in (None, *CACHE_DTYPES):
        return (
            f"{SPARSE_MLA} has the cache dtypes auto, bfloat16 and fp8_ds_mla (or fp8, "
            f"the same), not {kv_cache_dtype}; pass one of them as --kv-cache-dtype."
        )
    if block_size is not None and block_size % PAGE:
        return (
            f"{SPARSE_MLA} reads pages of {PAGE} tokens, so --block-size must be a "
            f"multiple of {PAGE}, and is {block_size}."
        )
    config = get_current_vllm_config()
    if config.model_config is None:
        return None
    if getattr(config.model_config.hf_text_config, "q_lora_rank", None) is None:
        return (
            f"{SPARSE_MLA} serves models whose indexer reads the compressed query, and "
            "this one's configuration has no q_lora_rank."
        )
    heads = config.model_config.get_num_attention_heads(config.parallel_config)
    if heads > MAX_HEADS:
        return (
            f"{SPARSE_MLA} has at most {MAX_HEADS} heads on a GPU, and this model has "
            f"{heads}; raise --tensor-parallel-size."
        )
    return None


def attend_slots(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of each token over its slots.

    Args:
        q: BF16 `[tokens, heads, 576]`, or its first 512 and its last 64 dimensions.
        rows: the cache, `[blocks, block_size, 576]` BF16 or `[blocks, block_size, 656]`
            bytes.
        slots: int32 `[tokens, columns]`, block * block_size + row, -1 for none.

    Returns:
        BF16 `[tokens, heads, 512]`; zeros for a token without a key.
    """
    if isinstance(q, tuple):
        q = torch.cat(q, dim=-1)
    if rows.shape[-1] == HEAD_SIZE:
        flat = rows.view(-1, 1, HEAD_SIZE)  # never a copy of the cache
        return flash_mla_sparse_fwd(q, flat, slots.unsqueeze(1), scale)[0]
    out, _ = flash_mla_with_kvcache(
        q.unsqueeze(1),
        rows.view(torch.uint8).unsqueeze(2),
        block_table=None,
        cache_seqlens=None,
        head_dim_v=512,
        tile_scheduler_metadata=None,
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=slots.unsqueeze(1),
    )
    return out.squeeze(1)
