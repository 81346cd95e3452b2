"""The `reference` provider: sparse MLA in float32 torch, written from the definition.

It is the truth that every other provider is compared with, so it is plain rather than fast: one softmax over
the gathered rows of each token, nothing split, nothing approximated.
"""

import torch

from .interface import SWA_COLUMNS, SparseMLACall

# Rows gathered at once are tokens x columns x 512 x 4 bytes; this bounds them to about 1 GiB.
_GATHERED_FLOATS = 1 << 28


def sparse_mla_reference(call: SparseMLACall) -> None:
    """Write `call.out` for every token; see `sparse_mla` for the arguments and the formula.

    A token without a key gets zeros. Sums run in float32, products too, whatever the pools hold.
    """
    head_dim = call.query.shape[-1]
    step = max(1, _GATHERED_FLOATS // (call.indices.shape[1] * head_dim))
    for start in range(0, call.query.shape[0], step):
        _attend(call, slice(start, start + step))


def _attend(call: SparseMLACall, tokens: slice) -> None:
    indices = call.indices[tokens].long()
    column = torch.arange(indices.shape[1], device=indices.device)
    in_window = column < SWA_COLUMNS
    visible = call.visible[tokens, None]
    active = torch.where(in_window, column < visible, column < call.topk_lens[tokens, None])
    rows = torch.where(in_window, _rows(call.swa_pool), _rows(call.compressed_pool))
    active &= (visible > 0) & (indices >= 0) & (indices < rows)

    rows = torch.where(
        in_window[None, :, None],
        _gather(call.swa_pool, indices.where(active & in_window, 0)),
        _gather(call.compressed_pool, indices.where(active & ~in_window, 0)),
    )
    # A row that is not a key may hold anything, NaN included, and 0 * NaN is NaN.
    rows = rows.masked_fill(~active[..., None], 0.0)

    scores = torch.einsum("thd,tkd->thk", call.query[tokens].float(), rows) * call.bmm1_scale
    scores = scores.masked_fill(~active[:, None, :], float("-inf"))
    if call.sinks is None:
        sinks = scores.new_full(scores.shape[:2], float("-inf"))
    else:
        sinks = call.sinks.expand(scores.shape[:2])
    # The sink joins the denominator and has no value row.
    largest = torch.maximum(scores.amax(-1), sinks)
    largest = largest.masked_fill(largest == float("-inf"), 0.0)
    weights = torch.exp(scores - largest[..., None])
    total = weights.sum(-1) + torch.exp(sinks - largest)
    out = torch.einsum("thk,tkd->thd", weights, rows) * call.bmm2_scale
    out = torch.where(total[..., None] > 0, out / total[..., None], 0.0)
    call.out[tokens].copy_(out)


def _rows(pool: torch.Tensor) -> int:
    return pool.shape[0] * pool.shape[1]


def _gather(pool: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Flat rows of a `[pages, page, 512]` pool, in float32; works on any page stride."""
    page = pool.shape[1]
    return pool.view(torch.uint8)[rows // page, rows % page].view(pool.dtype).float()
