# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""The rows that the tokens of a step attend to in a DeepSeek V4 layer, from vLLM's
metadata."""

from typing import Any

import torch
from vllm.forward_context import get_forward_context

from ..third_party.mla_kernels import SparseIndexTable, build_sparse_index_table


def tables() -> dict[Any, Any]:
    """Those of this forward pass; vLLM may reuse metadata objects after changing what
    they point to, so they live no longer."""
    return get_forward_context().additional_kwargs.setdefault("dsv4_tables", {})


def of_step(
    layer: torch.nn.Module,
    swa_metadata: Any,
    compressed_metadata: Any,
    first: int,
    tokens: int,
) -> SparseIndexTable:
    """As `build`; one table serves all window-only and all C128A layers of a step.

    C4A layers differ in what their indexer picked. The key holds both metadata, since
    vLLM may spread the layers over several KV cache groups with block tables of their
    own.
    """
    made = tables()
    key = (id(swa_metadata), id(compressed_metadata), layer.compress_ratio)
    if key in made:
        return made[key]
    table = build(layer, swa_metadata, compressed_metadata, first, tokens)
    if layer.compress_ratio != 4:
        made[key] = table
    return table


def build(
    layer: torch.nn.Module,
    swa_metadata: Any,
    compressed_metadata: Any,
    first: int,
    tokens: int,
) -> SparseIndexTable:
    """Rows of the window and of the compressed cache for `tokens` tokens of the step
    from number `first` on.

    Args:
        layer: V4's attention layer: compress_ratio, max_model_len and, for C4A,
            topk_indices_buffer.
        swa_metadata: vLLM's of the layer's window.
        compressed_metadata: of its compressed cache; None if it has none.
    """
    ratio = layer.compress_ratio
    compressed = {}
    if compressed_metadata is not None:
        compressed = dict(
            compressed_block_table=compressed_metadata.block_table,
            compressed_block_size=compressed_metadata.block_size // ratio,
            compressed_width=compressed_columns(layer, compressed_metadata),
            topk_indices=layer.topk_indices_buffer if ratio == 4 else None,
        )
    return build_sparse_index_table(
        swa_metadata.token_to_req_indices,
        swa_metadata.is_valid_token,
        swa_metadata.query_start_loc,
        swa_metadata.seq_lens,
        swa_metadata.block_table,
        swa_metadata.block_size,
        tokens,
        ratio,
        first_token=first,
        **compressed,
    )


def compressed_columns(layer: torch.nn.Module, compressed_metadata: Any) -> int:
    """The most compressed rows that a token of this launch may attend to; a captured
    graph is replayed with longer sequences than it has now."""
    if compressed_metadata is None:
        return 0
    if compressed_metadata.block_table.is_cuda and (
        torch.cuda.is_current_stream_capturing()
    ):
        return compressed_width(layer, layer.max_model_len)
    length = min(compressed_metadata.max_seq_len, layer.max_model_len)
    return compressed_width(layer, length)


def compressed_width(layer: torch.nn.Module, longest: int) -> int:
    """The most compressed rows that a token of this layer attends to in sequences of up
    to `longest` tokens."""
    if layer.compress_ratio == 4:
        return layer.topk_indices_buffer.shape[1]
    return longest // layer.compress_ratio if layer.compress_ratio > 1 else 0


def warm_up(device: torch.device) -> None:
    """Compile what `build` launches for the three kinds of V4's layers."""
    ints = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device)  # noqa: E731
    padding = torch.zeros(1, dtype=torch.bool, device=device)
    for ratio in (1, 4, 128):
        compressed = {}
        if ratio > 1:
            compressed = dict(
                compressed_block_table=ints(1, 16),
                compressed_block_size=256 // ratio,
                compressed_width=16,
                topk_indices=ints(1, 512) if ratio == 4 else None,
            )
        build_sparse_index_table(
            ints(1), padding, ints(2), ints(1), ints(1, 16), 64, 1, ratio, **compressed
        )
