# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""The backends and their cache specs, as far as every release has them alike; `adapter`
has the rest of V4's, `sparse_mla_backend` that of V3.2's and GLM-5's."""

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.dsv4_overlay.config import ACCEPTED_DTYPES, is_full_cache, storage_dtype
from vllm.platforms.interface import DeviceCapability
from vllm.third_party.mla_kernels import (
    MAX_HEADS,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
)
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec


def require(owner: object, name: str) -> None:
    """Refuse a vLLM whose class or object has no `name`, which the overlay replaces:
    its own would run instead.

    Raises:
        RuntimeError: one sentence.
    """
    cls = owner if isinstance(owner, type) else type(owner)
    declared = any(
        name in vars(base).get("__annotations__", {}) for base in cls.__mro__
    )
    if not hasattr(owner, name) and not declared:
        raise RuntimeError(
            f"{cls.__module__}.{cls.__name__} of this vLLM has no {name}, which "
            "vllm-dsv4-overlay replaces; "
            "scripts/apply-patches.sh --status says what differs from the release it "
            "is for."
        )


def overriding(*added: str) -> Callable[[type], type]:
    """Decorate a class derived from vLLM's: all that it defines, but for `added`, is
    there to be overridden."""

    def check(cls: type) -> type:
        ours = [
            base
            for base in cls.__mro__
            if base.__module__.startswith("vllm.dsv4_overlay.")
        ]
        theirs = next(base for base in cls.__mro__ if base not in ours)
        for name in {name for base in ours for name in vars(base)}.difference(added):
            if not name.startswith("__"):
                require(theirs, name)
        return cls

    return check


class FullCacheBackend:
    """Sparse MLA over 512-wide rows: what it has other than the V4 FlashMLA backend
    that it is mixed into."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = list(ACCEPTED_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER_MLA_SPARSE_DSV4"

    @classmethod
    def get_builder_cls(cls) -> type:
        return _without_c128a_tables(super().get_builder_cls())


@functools.cache
def _without_c128a_tables(builder: type) -> type:
    """vLLM's builder of metadata less what only FlashMLA reads: which rows a token of a
    C128A layer sees.

    Those are two tables of int32 [max_num_batched_tokens, max_model_len / 128], filled
    in every step and made after memory was measured; with a million tokens of context
    and 8192 in a step, 512 MiB.
    """

    @overriding()
    class FullCacheMetadataBuilder(builder):
        def __init__(
            self,
            kv_cache_spec: Any,
            layer_names: list[str],
            vllm_config: VllmConfig,
            device: torch.device,
        ) -> None:
            short = copy.copy(vllm_config)
            short.model_config = copy.copy(vllm_config.model_config)
            short.model_config.max_model_len = (
                1  # a table of the smallest width there is
            )
            super().__init__(kv_cache_spec, layer_names, short, device)
            self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
            if self.compress_ratio == 128:
                for name in (
                    "c128a_global_decode_buffer",
                    "c128a_decode_lens_buffer",
                    "c128a_prefill_buffer",
                ):
                    require(self, name)
                    delattr(self, name)

        def _build_c128a_metadata(self, *args: Any) -> dict[str, Any]:
            return {}

    return FullCacheMetadataBuilder


@overriding()
class DeepseekV4FullCacheSWACache(DeepseekV4SWACache):
    """The sliding window with rows of 512 elements and no padding of its pages."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> SlidingWindowMLASpec:
        # Without `model_version`, whose page size is FlashMLA's 584 bytes a token.
        return SlidingWindowMLASpec(
            block_size=self.block_size,
            num_kv_heads=1,
            head_size=self.head_dim,
            dtype=_page_dtype(self.cache_config.cache_dtype),
            sliding_window=self.window_size,
            cache_dtype_str=self.cache_config.cache_dtype,
        )


def swa_cache_class(cache_config: CacheConfig) -> type[DeepseekV4SWACache]:
    return (
        DeepseekV4FullCacheSWACache
        if is_full_cache(cache_config.cache_dtype)
        else DeepseekV4SWACache
    )


def main_cache_spec(
    layer: torch.nn.Module, vllm_config: VllmConfig
) -> MLAAttentionSpec:
    """The compressed cache of a C4A or C128A layer."""
    return MLAAttentionSpec(
        block_size=vllm_config.cache_config.block_size,
        num_kv_heads=1,
        head_size=layer.head_dim,
        dtype=_page_dtype(layer.kv_cache_dtype),
        compress_ratio=layer.compress_ratio,
        cache_dtype_str=layer.kv_cache_dtype,
        model_version="deepseek_v4",
    )


def state_alignment(
    vllm_config: VllmConfig, cache: torch.nn.Module, stock: int
) -> int | None:
    """Page alignment in bytes of a compressor's state cache.

    States share pages with the cache they feed. Those of the 512-wide cache fill an FP8
    page exactly (32768 bytes), and FlashMLA's alignment would make them too large for
    it; the indexer's keep theirs.
    """
    # kv and score, each 512 channels wide, or twice that where windows overlap; the
    # indexer's have 128.
    feeds_main_cache = cache.state_dim >= 2 * 512
    full_cache = is_full_cache(vllm_config.cache_config.cache_dtype)
    return None if full_cache and feeds_main_cache else stock


def _page_dtype(cache_dtype: str) -> torch.dtype:
    # vLLM zeroes and copies pages; bytes are what every one of its paths takes for FP8.
    dtype = storage_dtype(cache_dtype)
    return torch.uint8 if dtype == torch.float8_e4m3fn else dtype


# DeepSeek V3.2 and GLM-5: sparse MLA over 576-wide rows.
SPARSE_MLA = "MLA_KERNELS_SPARSE"
PAGE = 64
HEAD_SIZE = 576
CACHE_DTYPES = ("auto", "bfloat16", "fp8_ds_mla", "fp8")


class SparseMLABackendMixin:
    """What it is and refuses, for a class of vLLM's `AttentionBackend`.

    Every token of a batch, decode or prefill, is one call over the rows in place, with
    as many heads as the GPU has: no padding to 64, no second path for prefill and none
    of FLASHMLA_SPARSE's workspace of 5 * max_model_len BF16 rows (900 MiB at 163840).

    No GPU has run it yet. So vLLM's registry has no name for it, and its list of
    priorities none either.
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
