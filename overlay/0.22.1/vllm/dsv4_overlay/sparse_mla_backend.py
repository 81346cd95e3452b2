# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""MLA_KERNELS_SPARSE in vLLM 0.22.1 (and 0.22.0): its backend, metadata and
implementation. `sparse_mla` says what it is."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import pad
from vllm.config import VllmConfig
from vllm.dsv4_overlay.overriding import overriding
from vllm.dsv4_overlay.sparse_mla import PAGE, SparseMLABackendMixin, workspace_rows
from vllm.dsv4_overlay.sparse_mla_attention import (
    SeparatePrefills,
    attend_separately,
    attend_slots,
    reserve_workspace,
    separate_prefills,
    warm_up_attention,
    warm_up_scores,
)
from vllm.third_party.mla_kernels.slots import request_rows_to_slots
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
    SparseMLAAttentionImpl,
)
from vllm.v1.kv_cache_interface import AttentionSpec


@overriding()
class SparseMLABackend(SparseMLABackendMixin, AttentionBackend):
    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [PAGE]

    @staticmethod
    def get_builder_cls() -> type["SparseMLAMetadataBuilder"]:
        return SparseMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type["SparseMLAImpl"]:
        return SparseMLAImpl

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        width = 656 if cache_dtype_str == "fp8_ds_mla" else head_size
        return num_blocks, block_size, width


@dataclass
class SparseMLAMetadata(AttentionMetadata):
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor  # int32 [requests, blocks]
    req_id_per_token: torch.Tensor  # int32 [tokens]; past the table for padding
    keys_per_token: torch.Tensor  # int32 [tokens]; below 0 for padding
    block_size: int
    separate: SeparatePrefills | None


class SparseMLAMetadataBuilder(AttentionMetadataBuilder[SparseMLAMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # As the indexer's builder, so that both agree on what a decode is.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        # Graphs keep their addresses. All are written in each step: sleep mode discards
        # what a builder holds.
        self._number = torch.empty(tokens, dtype=torch.int32, device=device)
        self._req_id_per_token = torch.empty_like(self._number)
        self._keys_per_token = torch.empty_like(self._number)
        self._workspace_rows = workspace_rows(vllm_config)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SparseMLAMetadata:
        common = common_attn_metadata
        tokens = common.num_actual_tokens
        ends = common.query_start_loc[1:]
        number = torch.arange(1, tokens + 1, out=self._number[:tokens])
        req_id_per_token = self._req_id_per_token[:tokens]
        keys_per_token = self._keys_per_token[:tokens]
        # Tokens past the last request's are padding, and get the number of requests.
        torch.searchsorted(ends, number, out_int32=True, out=req_id_per_token)
        # A request's last token sees all its keys, and the one before it one fewer.
        before = pad(common.seq_lens - ends, (0, 1), value=-tokens - 1)
        torch.index_select(before, 0, req_id_per_token, out=keys_per_token)
        keys_per_token += number
        return SparseMLAMetadata(
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=tokens,
            query_start_loc=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            req_id_per_token=req_id_per_token,
            keys_per_token=keys_per_token,
            block_size=self.kv_cache_spec.block_size,
            separate=separate_prefills(
                common,
                req_id_per_token,
                self.reorder_batch_threshold,
                self._workspace_rows,
            ),
        )


class SparseMLAImpl(SparseMLAAttentionImpl[SparseMLAMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        indexer: Any = None,
        **mla_args: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank: int = mla_args["kv_lora_rank"]
        self.topk_indices_buffer: torch.Tensor = indexer.topk_indices_buffer
        reserve_workspace(head_size)
        # Compiled now, and not while requests wait: the slots of a token of none, and
        # attention, which vLLM runs before only to capture graphs of decodes.
        nobody = self.topk_indices_buffer.new_full((1,), -1)
        rows = self.topk_indices_buffer[:1]
        request_rows_to_slots(rows, nobody, nobody.view(1, 1), PAGE)
        warm_up_scores(rows.device)
        columns = rows.shape[1]
        warm_up_attention(num_heads, head_size, kv_cache_dtype, columns, rows.device)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, None]:
        tokens = len(q[0] if isinstance(q, tuple) else q)
        separate = attn_metadata.separate
        slots = request_rows_to_slots(
            self.topk_indices_buffer[:tokens],
            attn_metadata.req_id_per_token,
            attn_metadata.block_table,
            attn_metadata.block_size,
            separate and separate.prefill_of_token,
            separate and separate.starts,
        )
        cache, keys = kv_c_and_k_pe_cache, attn_metadata.keys_per_token[:tokens]
        if separate is None:
            return attend_slots(q, cache, slots, keys, self.scale)[0], None
        table = attn_metadata.block_table
        out = attend_separately(
            q, cache, cache, slots, keys, table, separate, self.scale
        )
        return out, None
