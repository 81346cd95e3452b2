# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""MLA_KERNELS_SPARSE in vLLM 0.33.0: metadata, picks and their slots are vLLM's own.
`backend` says what it is."""

from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.dsv4_overlay.backend import (
    PAGE,
    SparseMLABackendMixin,
    attend_slots,
    overriding,
)
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayer,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.sparse_utils import (
    align_blocks_to_rows,
    flat_kv_row_view,
)
from vllm.v1.kv_cache_interface import AttentionSpec


@overriding()
class SparseMLABackend(SparseMLABackendMixin, AttentionBackend):
    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: AttentionSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(PAGE)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        # Blocks of several layers lie between this one's: a whole number of rows apart.
        return align_blocks_to_rows(spec)

    @staticmethod
    def get_builder_cls() -> type["SparseMLAMetadataBuilder"]:
        return SparseMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type["SparseMLAImpl"]:
        return SparseMLAImpl


@overriding()
class SparseMLAMetadataBuilder(SparseMLACommonMetadataBuilder[SparseMLACommonMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    metadata_cls = SparseMLACommonMetadata

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)


@overriding()
class SparseMLAImpl(SparseMLACommonImpl[SparseMLACommonMetadata]):
    supports_dense_mha_prefill = False  # one path for all tokens
    supports_quant_query_input = False

    def _forward_mqa_kernel(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: AttentionLayer,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, None]:
        # Slots count the rows that lie between blocks: one block of them all.
        rows, _ = flat_kv_row_view(kv_cache, block_size)
        return attend_slots(q, rows.unsqueeze(0), topk_indices, self.scale), None
