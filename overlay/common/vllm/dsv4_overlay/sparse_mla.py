# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""MLA_KERNELS_SPARSE, the sparse MLA of DeepSeek V3.2 and GLM-5 over 576-wide rows, as
far as every release has it alike; `sparse_mla_backend` has the rest."""

from typing import ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.platforms import current_platform
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
    def supports_combination(cls, *args: object) -> str | None:
        """vLLM asks when it makes a layer, before it reads weights."""
        return refusal(get_current_vllm_config())


def verify_config(vllm_config: VllmConfig) -> None:
    """Refuse what MLA_KERNELS_SPARSE cannot serve when it is asked for, before a model
    that would fail in words of its own is made.

    Raises:
        ValueError: one sentence.
    """
    backend = vllm_config.attention_config.backend
    if backend and backend.name == SPARSE_MLA and (why := refusal(vllm_config)):
        raise ValueError(why)


def refusal(config: VllmConfig) -> str | None:
    """Why MLA_KERNELS_SPARSE cannot serve this configuration, a sentence, or None."""
    model, cache = config.model_config, config.cache_config
    hf_config = model.hf_text_config
    if not current_platform.support_deep_gemm():
        capability = current_platform.get_device_capability()
        return (
            f"{SPARSE_MLA} takes the indexer's scores from DeepGEMM, which does not "
            f"serve this GPU (compute capability {capability.as_version_str()})."
        )
    if model.get_head_size() != HEAD_SIZE or not hasattr(hf_config, "index_topk"):
        return (
            f"{SPARSE_MLA} serves models with an indexer and cache rows of {HEAD_SIZE} "
            f"values (DeepSeek V3.2, GLM-5), and {model.architecture} is none."
        )
    if getattr(hf_config, "q_lora_rank", None) is None:
        return (
            f"{SPARSE_MLA} serves models whose indexer reads the compressed query, and "
            "this one's configuration has no q_lora_rank."
        )
    if cache.cache_dtype not in CACHE_DTYPES:
        return (
            f"{SPARSE_MLA} has the cache dtypes auto, bfloat16 and fp8_ds_mla (or fp8, "
            f"the same), not {cache.cache_dtype}; pass one of them as "
            "--kv-cache-dtype."
        )
    if cache.user_specified_block_size and cache.block_size % PAGE:
        return (
            f"{SPARSE_MLA} reads pages of {PAGE} tokens, so --block-size must be a "
            f"multiple of {PAGE}, and is {cache.block_size}."
        )
    heads = model.get_num_attention_heads(config.parallel_config)
    if heads > MAX_HEADS:
        return (
            f"{SPARSE_MLA} has at most {MAX_HEADS} heads on a GPU, and this model has "
            f"{heads}; raise --tensor-parallel-size."
        )
    if config.parallel_config.decode_context_parallel_size > 1:
        return (
            f"{SPARSE_MLA} reads whole sequences on each GPU; leave "
            "--decode-context-parallel-size at 1."
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
