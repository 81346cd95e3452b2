# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""Sparse MLA over any rows: the one form in which providers see every call of this
package."""

from dataclasses import dataclass

import torch

from .row_formats import RowFormat

VALUE_DIM = 512


@dataclass(frozen=True)
class KeyPool:
    """A cache, and which of its rows each token attends to.

    cache: [blocks, block_size, width] as `format` says; rows any distance apart for
        BF16 and E4M3, else a block in one piece; blocks any distance apart.
    format: what the rows mean.
    indices: [tokens, columns] int32, flat rows (block * block_size + row); one outside
        the cache is a missing row.
    lengths: [tokens, or a divisor of it] int32, each for as many tokens that follow
        each other: the leftmost `length - base` columns count, None for all of them.
    base: columns that `lengths` counts and that are not among these.
    """

    cache: torch.Tensor
    format: RowFormat
    indices: torch.Tensor
    lengths: torch.Tensor | None = None
    base: int = 0

    def token_lengths(self) -> torch.Tensor | None:
        """`lengths` as [tokens], contiguous."""
        tokens = self.indices.shape[0]
        if self.lengths is None or len(self.lengths) == tokens:
            return self.lengths
        each = self.lengths[:, None].expand(-1, tokens // len(self.lengths))
        # Before it is flattened: one length for all would stay a view of stride 0.
        return each.contiguous().flatten()


@dataclass(frozen=True)
class SparseAttention:
    """A validated call. Over the keys k_j of all pools, with values v_j = k_j[:512],
    for each token and head h:

        s_j        = scale * <q, k_j>
        max_logits = max_j s_j
        lse        = log sum_j exp(s_j)
        out        = out_scale * sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink_h))

    Without a key, out is 0, max_logits -inf and lse +inf, as in FlashMLA. A sink of
    +inf makes out 0.

    query: [tokens, heads, 512 or 576] BF16, or E4M3 over E4M3 rows.
    pools: one or two, of one format.
    out: [tokens, heads, 512] BF16.
    scale, out_scale: floats, or one-element float32 tensors.
    sinks: [heads] float32, or None.
    visible: [tokens] int32, or None: a token with <= 0 has no key whatever the lengths
        say.
    max_logits, lse: [tokens, heads] float32, contiguous, or None.
    """

    query: torch.Tensor
    pools: tuple[KeyPool, ...]
    out: torch.Tensor
    scale: float | torch.Tensor
    out_scale: float | torch.Tensor = 1.0
    sinks: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    max_logits: torch.Tensor | None = None
    lse: torch.Tensor | None = None
