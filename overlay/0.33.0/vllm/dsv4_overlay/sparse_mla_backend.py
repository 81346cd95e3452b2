# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""MLA_KERNELS_SPARSE in vLLM 0.33.0: metadata, picks and their slots are vLLM's own.
`sparse_mla` says what it is."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.dsv4_overlay.overriding import overriding
from vllm.dsv4_overlay.sparse_mla import PAGE, SparseMLABackendMixin, workspace_rows
from vllm.dsv4_overlay.sparse_mla_attention import (
    SeparatePrefills,
    attend_separately,
    attend_slots,
    reserve_workspace,
    separate_prefills,
    warm_up_scores,
)
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayer,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.sparse_utils import (
    align_blocks_to_rows,
    flat_kv_row_view,
    triton_convert_req_index_to_global_index,
)
from vllm.v1.attention.ops.metadata import compute_token_to_req_indices
from vllm.v1.kv_cache_interface import AttentionSpec, is_quantized_kv_cache


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


@dataclass(kw_only=True)
class SparseMLAMetadata(SparseMLACommonMetadata):
    separate: SeparatePrefills | None = None


@overriding()
class SparseMLAMetadataBuilder(SparseMLACommonMetadataBuilder[SparseMLAMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    metadata_cls = SparseMLAMetadata

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        self._init_reorder_batch_threshold(
            1,
            supports_spec_as_decode=True,
            # The picks alone say what a token sees.
            supports_dcp_with_varlen=interleave == 1,
        )
        # Drafts in a CUDA graph of all their steps.
        self.supports_draft_decode_metadata_update = (
            not workspace_rows(vllm_config) and self.dcp_world_size == 1
        )

    def update_draft_decode_metadata(self, metadata: SparseMLAMetadata) -> None:
        # The rest are the runner's buffers, and picks become slots in every forward.
        if tokens := metadata.num_decode_tokens:
            owners, starts = metadata.req_id_per_token, metadata.query_start_loc
            compute_token_to_req_indices(starts, owners, tokens, tokens)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SparseMLAMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.separate = separate_prefills(
            common_attn_metadata,
            metadata.req_id_per_token,
            self.reorder_batch_threshold,
            workspace_rows(self.vllm_config),
        )
        return metadata


@overriding()
class SparseMLAImpl(SparseMLACommonImpl[SparseMLAMetadata]):
    supports_quant_query_input = False
    # Decode context parallelism: a GPU attends to its share of a sequence with the
    # heads of the whole group, and vLLM merges by log-sum-exp.
    supports_dcp = True
    can_return_lse_for_decode = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Prompts no longer than the picks have vLLM's dense attention and no indexer,
        # as with FLASHMLA_SPARSE. It gathers cached rows into rows as wide as q.
        packed = is_quantized_kv_cache(self.kv_cache_dtype)
        self.supports_dense_mha_prefill = (
            current_platform.is_device_capability(90)
            and not (packed and self.head_size == 512)
            and not workspace_rows(get_current_vllm_config())
        )
        reserve_workspace(self.head_size)
        warm_up_scores(self.topk_indices_buffer.device, width=1)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        separate = attn_metadata.separate
        cache = kv_c_and_k_pe_cache
        if separate is None:
            return super().forward_mqa(q, cache, attn_metadata, layer)
        tokens = len(q[0] if isinstance(q, tuple) else q)
        picked = self.topk_indices_buffer[:tokens]
        rows, stride = flat_kv_row_view(cache, attn_metadata.block_size)
        table = attn_metadata.block_table
        slots, keys = triton_convert_req_index_to_global_index(
            attn_metadata.req_id_per_token[:tokens],
            table,
            picked,
            BLOCK_SIZE=attn_metadata.block_size,
            BLOCK_STRIDE_ROWS=stride,
            NUM_TOPK_TOKENS=picked.shape[1],
            HAS_PREFILL_WORKSPACE=True,
            prefill_workspace_request_ids=separate.prefill_of_token[:tokens],
            prefill_workspace_starts=separate.starts,
            return_valid_counts=True,
        )
        rows = rows.unsqueeze(0)
        out = attend_separately(
            q, cache, rows, slots, keys, table, separate, self.scale
        )
        return out, None

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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Slots count the rows that lie between blocks: one block of them all.
        rows, _ = flat_kv_row_view(kv_cache, block_size)
        rows = rows.unsqueeze(0)
        out, lse = attend_slots(q, rows, topk_indices, valid_counts, self.scale)
        if not self.need_to_return_lse_for_decode:
            return out, None
        # A token without a key here has no part in the merge.
        return out, lse.masked_fill(lse == torch.inf, -torch.inf)
