# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""The `reference` provider: sparse MLA in float32 torch, written from the definition.

It is the truth that every other provider is compared with, so it is plain rather than
fast: one softmax over the gathered rows of each token, nothing split, nothing
approximated.
"""

import torch

from .attention import VALUE_DIM, KeyPool, SparseAttention
from .interface import SparseMLACall

# Rows gathered at once are tokens x columns x 576 x 4 bytes; this bounds them to about
# 1 GiB.
_GATHERED_FLOATS = 1 << 28


def sparse_mla_reference(call: SparseMLACall) -> None:
    """Write `call.out` for every token; see `sparse_mla` for the arguments and the
    formula."""
    attend_reference(call.attention)


def attend_reference(call: SparseAttention) -> None:
    """Write `call.out`, and `call.max_logits` and `call.lse` where they are asked for.

    Sums run in float32, products too, whatever the pools hold.
    """
    tokens, _, head_dim = call.query.shape
    columns = sum(pool.indices.shape[1] for pool in call.pools)
    step = max(1, _GATHERED_FLOATS // (max(1, columns) * head_dim))
    for start in range(0, tokens, step):
        _attend(call, slice(start, start + step))


def _attend(call: SparseAttention, tokens: slice) -> None:
    active = torch.cat([_active(pool, tokens) for pool in call.pools], 1)
    if call.visible is not None:
        active &= call.visible[tokens, None] > 0
    keys = torch.cat(
        [_keys(pool, tokens, call.query.shape[-1]) for pool in call.pools], 1
    )
    # A row that is not a key may hold anything, NaN included, and 0 * NaN is NaN.
    keys = keys.masked_fill(~active[..., None], 0.0)

    scores = torch.einsum("thd,tkd->thk", call.query[tokens].float(), keys) * call.scale
    scores = scores.masked_fill(~active[:, None, :], float("-inf"))
    largest = (
        scores.amax(-1)
        if scores.shape[-1]
        else scores.new_full(scores.shape[:2], float("-inf"))
    )
    shift = largest.masked_fill(largest == float("-inf"), 0.0)
    weights = torch.exp(scores - shift[..., None])
    total = weights.sum(-1)
    lse = shift + total.log()
    out = torch.einsum("thk,tkd->thd", weights, keys[..., :VALUE_DIM])
    out *= (call.out_scale / total.masked_fill(total == 0, 1.0))[..., None]
    if call.sinks is not None:
        # The sink joins the denominator and has no value.
        share = torch.sigmoid(lse - call.sinks)
        out *= share.masked_fill(total == 0, 0.0)[..., None]
    call.out[tokens].copy_(out)
    if call.max_logits is not None:
        call.max_logits[tokens] = largest
    if call.lse is not None:
        call.lse[tokens] = lse.masked_fill(total == 0, float("inf"))


def _active(pool: KeyPool, tokens: slice) -> torch.Tensor:
    indices = pool.indices[tokens]
    active = (indices >= 0) & (indices < pool.cache.shape[0] * pool.cache.shape[1])
    if pool.lengths is not None:
        column = torch.arange(
            pool.base, pool.base + indices.shape[1], device=indices.device
        )
        active &= column < pool.token_lengths()[tokens, None]
    return active


def _keys(pool: KeyPool, tokens: slice, head_dim: int) -> torch.Tensor:
    rows = pool.indices[tokens].long().where(_active(pool, tokens), 0)
    if pool.cache.numel() == 0:
        return torch.zeros(*rows.shape, head_dim, device=rows.device)
    return pool.format.keys(pool.cache, rows)
