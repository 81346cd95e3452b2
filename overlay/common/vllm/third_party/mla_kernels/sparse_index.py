# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""The index table of `sparse_mla` for a mixed batch (decodes first), built on the GPU
from vLLM's metadata."""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .interface import SWA_COLUMNS

_SWA_COLUMNS = tl.constexpr(SWA_COLUMNS)
_BLOCK = 128


@dataclass(frozen=True)
class SparseIndexTable:
    """What `sparse_mla` takes for queries of one token each (`[tokens, 1, heads,
    512]`).

    indices: [tokens, width] int32, flat rows of the SWA pool (columns 0-127), then of
        the compressed pool; -1 behind the keys of a token, 0 throughout for padding.
    lens: [tokens] int32, 128 + compressed keys: `sparse_topk_lens`.
    visible: [tokens] int32, cached tokens up to and including this one, 0 for padding:
        `seq_lens`.
    """

    indices: torch.Tensor
    lens: torch.Tensor
    visible: torch.Tensor

    @functools.cached_property  # layers share tables
    def compressed(self) -> torch.Tensor:
        """[tokens] int32, compressed keys."""
        return self.lens - SWA_COLUMNS


def table_width(compressed_rows: int) -> int:
    """Columns for up to `compressed_rows` compressed keys; a multiple of 16, so that
    rows stay aligned."""
    return SWA_COLUMNS + triton.cdiv(compressed_rows, 16) * 16


def build_sparse_index_table(
    token_to_request: torch.Tensor,
    is_valid_token: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    swa_block_table: torch.Tensor,
    swa_block_size: int,
    num_tokens: int,
    compress_ratio: int = 1,
    compressed_block_table: torch.Tensor | None = None,
    compressed_block_size: int = 1,
    compressed_width: int = 0,
    topk_indices: torch.Tensor | None = None,
    first_token: int = 0,
) -> SparseIndexTable:
    """Rows of the window and of the compressed cache that each token attends to.

    A token at position p sees the window `[max(0, p - 127), p]`, oldest first, and of
    the `(p + 1) // compress_ratio` compressed rows so far either those that the indexer
    picked (`topk_indices`) or all. Lengths follow from positions alone: rows of the
    inputs that belong to padding may be stale.

    Args:
        token_to_request: int32 `[tokens]`, the request of each token.
        is_valid_token: bool `[tokens]`, False for CUDA-graph padding.
        query_start_loc: int32 `[requests + 1]`.
        seq_lens: int32 `[requests]`, query tokens included.
        swa_block_table: int32 `[requests, blocks]`; a block holds `swa_block_size`
            rows.
        num_tokens: tokens to build for, from `first_token` on; the inputs have them
            all.
        compress_ratio: 1 (window only), 4 or 128.
        compressed_block_table: int32 `[requests, blocks]`; a block holds
            `compressed_block_size` rows.
        compressed_width: the most compressed keys a token can have; sets the table's
            width.
        topk_indices: int32 `[tokens, >= compressed_width]`, compressed rows
            counted within the request, valid ones first; None takes every compressed
            row in order. What is not a row so far, be it negative or too large, becomes
            -1.

    Raises:
        ValueError: elements of a vector, or of a row of a table, do not lie together;
            with `compressed_width` there is no compressed table, or `topk_indices` is
            narrower. One sentence.
    """
    for name, tensor in (
        ("token_to_request", token_to_request),
        ("is_valid_token", is_valid_token),
        ("query_start_loc", query_start_loc),
        ("seq_lens", seq_lens),
        ("swa_block_table", swa_block_table),
        ("compressed_block_table", compressed_block_table),
        ("topk_indices", topk_indices),
    ):
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, not stride "
                f"{tensor.stride(-1)}."
            )
    if compressed_width and compressed_block_table is None:
        raise ValueError(
            f"compressed_width is {compressed_width}, and there is no "
            "compressed_block_table."
        )
    if topk_indices is not None and topk_indices.shape[1] < compressed_width:
        raise ValueError(
            f"topk_indices has {topk_indices.shape[1]} columns, and compressed_width "
            f"is {compressed_width}."
        )
    width = table_width(compressed_width)
    device = seq_lens.device
    indices = torch.empty(num_tokens, width, dtype=torch.int32, device=device)
    lens = torch.empty(num_tokens, dtype=torch.int32, device=device)
    visible = torch.empty(num_tokens, dtype=torch.int32, device=device)
    if num_tokens:
        has_compressed = compressed_block_table is not None
        with torch.cuda.device_of(seq_lens):
            _build_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
                indices,
                lens,
                visible,
                token_to_request,
                is_valid_token,
                query_start_loc,
                seq_lens,
                swa_block_table,
                swa_block_table.stride(0),
                swa_block_size,
                compressed_block_table,
                compressed_block_table.stride(0) if has_compressed else 0,
                compressed_block_size,
                topk_indices,
                topk_indices.stride(0) if topk_indices is not None else 0,
                width,
                compressed_width,
                first_token,
                COMPRESS_RATIO=compress_ratio,
                BLOCK=_BLOCK,
                num_warps=1,
            )
    return SparseIndexTable(indices, lens, visible)


# Widths follow the longest sequence of the step; none may select a new kernel while
# requests wait.
@triton.jit(
    do_not_specialize=[
        "width",
        "compressed_width",
        "swa_block_table_stride",
        "compressed_block_table_stride",
        "first_token",
    ]
)
def _build_kernel(
    indices_ptr,
    lens_ptr,
    visible_ptr,
    token_to_request_ptr,
    is_valid_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    swa_block_table_ptr,
    swa_block_table_stride,
    swa_block_size,
    compressed_block_table_ptr,
    compressed_block_table_stride,
    compressed_block_size,
    topk_ptr,
    topk_stride,
    width,
    compressed_width,
    first_token,
    COMPRESS_RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = row + first_token
    part = tl.program_id(1)
    if tl.load(is_valid_ptr + token) == 0:
        column = part * BLOCK + tl.arange(0, BLOCK)
        tl.store(
            indices_ptr + row * width + column,
            tl.zeros([BLOCK], tl.int32),
            mask=column < width,
        )
        if part == 0:
            tl.store(lens_ptr + row, _SWA_COLUMNS)
            tl.store(visible_ptr + row, 0)
        return
    request = tl.load(token_to_request_ptr + token).to(tl.int64)
    to_end = tl.load(query_start_loc_ptr + request + 1) - token.to(tl.int32)
    visible = tl.load(seq_lens_ptr + request) - to_end + 1
    row_ptr = indices_ptr + row * width

    if part == 0:
        offset = tl.arange(0, _SWA_COLUMNS)
        first = tl.maximum(visible - _SWA_COLUMNS, 0)
        active = offset < visible
        position = first + offset
        block = tl.load(
            swa_block_table_ptr
            + request * swa_block_table_stride
            + position // swa_block_size,
            mask=active,
            other=0,
        )
        tl.store(
            row_ptr + offset,
            tl.where(active, block * swa_block_size + position % swa_block_size, -1),
        )
        compressed_len = 0
        if compressed_block_table_ptr is not None:
            compressed_len = tl.minimum(visible // COMPRESS_RATIO, compressed_width)
        tl.store(lens_ptr + row, compressed_len + _SWA_COLUMNS)
        tl.store(visible_ptr + row, visible)
    elif compressed_block_table_ptr is not None:
        offset = (part - 1) * BLOCK + tl.arange(0, BLOCK)
        so_far = visible // COMPRESS_RATIO
        active = offset < tl.minimum(so_far, compressed_width)
        local = offset
        if topk_ptr is not None:
            local = tl.load(
                topk_ptr + token * topk_stride + offset, mask=active, other=-1
            )
            active &= (local >= 0) & (local < so_far)
        block = tl.load(
            compressed_block_table_ptr
            + request * compressed_block_table_stride
            + local // compressed_block_size,
            mask=active,
            other=0,
        )
        flat = block * compressed_block_size + local % compressed_block_size
        tl.store(
            row_ptr + _SWA_COLUMNS + offset,
            tl.where(active, flat, -1),
            mask=offset + _SWA_COLUMNS < width,
        )
