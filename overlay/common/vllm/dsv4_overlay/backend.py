# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""The backend and its cache specs, as far as every release has them alike; `adapter`
has the rest."""

import copy
import functools
from typing import Any, ClassVar

import torch
from vllm.config import CacheConfig, VllmConfig
from vllm.dsv4_overlay.config import ACCEPTED_DTYPES, is_full_cache, storage_dtype
from vllm.dsv4_overlay.overriding import overriding, require
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec


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
            # For tables of the smallest width there is.
            short.model_config.max_model_len = 1
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
