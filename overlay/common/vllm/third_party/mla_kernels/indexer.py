# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""The indexer of DeepSeek sparse attention: scores of keys and the rows that are
picked, in Triton, for GPUs that DeepGEMM does not serve; and picks in CUDA, for Hopper.

A query token's score of a key is `scale * sum over heads of weight * max(0, q . k)`
(DeepSeek-V3.2-Exp's report, equation 1; the key's scale, and the query's in `weights`,
are those of their E4M3 values). E4M3 values become fp16, which is exact, so products
are exact too and sums run in float32 on every GPU from compute capability 8.0 on.
"""

import torch
import triton
import triton.language as tl

from .insert import check_packed_blocks, check_same_device
from .sm90 import serves_topk, topk_sm90
from .triton_sparse_mla import _bytes, _converts_e4m3, _from_e4m3

_TOPK_BLOCK = 1024
_SCORE_HEADS, _SCORE_KEYS = (32, 64), 64  # GLM-5's heads, and V3.2's


def indexer_scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    key_scales: torch.Tensor | None,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    width: int | None = None,
    *,
    clean: bool = True,
    provider: str | None = None,
) -> torch.Tensor:
    """Scores of keys that lie together, those of a chunk's requests one after another.

    Args:
        q: E4M3 or BF16 `[tokens, heads, dim]`; dim is a power of two from 16 on, vLLM's
            128.
        keys: of q's dtype, `[keys, dim]`; rows contiguous.
        key_scales: float32 `[keys]`; None is 1.
        weights: float32 `[tokens, heads]`.
        starts, ends: int32 `[tokens]`: token t sees keys `starts[t]` to `ends[t] - 1`.
        width: None: column n is key n. Else: column n of token t is key
            `starts[t] + n`, and there are `width` columns.
        clean: False may leave what a token does not see undefined, and so costs what
            it sees, not what is there.
        provider: "reference" or "triton"; None picks by the device.

    Returns:
        float32 `[tokens, keys or width]`, -inf where a token does not see the key
        (but see `clean`).

    Raises:
        ValueError: an argument does not fit. One sentence.
    """
    tokens = _check_query(q, weights, 3)
    if keys.dim() != 2 or keys.shape[1] != q.shape[-1] or keys.dtype != q.dtype:
        raise ValueError(
            f"keys must be {q.dtype} [keys, {q.shape[-1]}], got {keys.dtype} "
            f"{list(keys.shape)}."
        )
    _check_last("keys", keys)
    if key_scales is not None:
        _check("key_scales", key_scales, torch.float32, len(keys))
    _check("starts", starts, torch.int32, tokens)
    _check("ends", ends, torch.int32, tokens)
    tensors = {"keys": keys, "weights": weights, "starts": starts, "ends": ends}
    if key_scales is not None:
        tensors["key_scales"] = key_scales
    check_same_device(q.device, **tensors)
    columns = len(keys) if width is None else width
    out = torch.empty(tokens, columns, dtype=torch.float32, device=q.device)
    if _provider(provider, q) == "reference":
        from .indexer_reference import scores_reference

        scores_reference(q, keys, key_scales, weights, starts, ends, width, out)
    elif out.numel():
        _launch_scores(
            q,
            weights,
            out,
            keys=_bytes(keys),
            scales=key_scales,
            key_stride=keys.stride(0),
            starts=starts,
            ends=ends,
            limit=len(keys),
            FROM_START=width is not None,
            CLEAN=clean,
        )
    return out


def paged_indexer_scores(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    width: int,
    *,
    clean: bool = True,
    provider: str | None = None,
) -> torch.Tensor:
    """Scores of the keys in vLLM's indexer cache.

    Args:
        q: E4M3 `[batch, q_len, heads, dim]`.
        cache: uint8 `[blocks, block_size, dim + 4]`, or with a dimension of 1 before
            the last: a block holds its rows' values first, then their float32 scales.
        weights: float32 `[batch * q_len, heads]`.
        context_lens: int32 `[batch, q_len]`, the keys that each token sees; `[batch]`
            with a q_len of 1.
        block_table: int32 `[batch, blocks]`.
        width: columns, at least the largest of `context_lens`.
        clean: False may leave what a token does not see undefined, and so costs what
            it sees, not `width`.
        provider: "reference" or "triton"; None picks by the device.

    Returns:
        float32 `[batch * q_len, width]`, -inf from `context_lens` on (but see `clean`).

    Raises:
        ValueError: an argument does not fit. One sentence.
    """
    tokens = _check_query(q, weights, 4)
    batch, q_len, heads, dim = q.shape
    if cache.dim() == 4 and cache.shape[2] == 1:
        cache = cache.squeeze(2)
    if (
        q.dtype != torch.float8_e4m3fn
        or cache.dtype != torch.uint8
        or cache.dim() != 3
        or cache.shape[2] != dim + 4
    ):
        raise ValueError(
            f"q must be E4M3 and cache uint8 [blocks, block_size, {dim + 4}], got "
            f"{q.dtype} and {cache.dtype} {list(cache.shape)}."
        )
    check_packed_blocks("cache", cache)
    if context_lens.numel() != tokens or context_lens.dtype != torch.int32:
        raise ValueError(
            f"context_lens must be int32 [{batch}, {q_len}], got "
            f"{context_lens.dtype} {list(context_lens.shape)}."
        )
    if (
        block_table.dtype != torch.int32
        or block_table.dim() != 2
        or len(block_table) < batch
    ):
        raise ValueError(
            f"block_table must be int32 of {batch} rows or more, got "
            f"{block_table.dtype} {list(block_table.shape)}."
        )
    _check_last("block_table", block_table)
    check_same_device(
        q.device,
        cache=cache,
        weights=weights,
        context_lens=context_lens,
        block_table=block_table,
    )
    out = torch.empty(tokens, width, dtype=torch.float32, device=q.device)
    # Side by side: a column of a matrix, or one expanded, stays a view of its stride.
    context_lens = context_lens.reshape(-1).contiguous()
    if _provider(provider, q) == "reference":
        from .indexer_reference import paged_scores_reference

        paged_scores_reference(q, cache, weights, context_lens, block_table, out)
    elif out.numel():
        _launch_scores(
            q.flatten(0, 1),
            weights,
            out,
            keys=cache,
            key_stride=cache.stride(0),
            ends=context_lens,
            table=block_table,
            limit=len(cache),
            block_size=cache.shape[1],
            q_len=q_len,
            CLEAN=clean,
        )
    return out


def indexer_topk(
    scores: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor,
    k: int,
    out: torch.Tensor | None = None,
    *,
    provider: str | None = None,
) -> torch.Tensor:
    """The columns of the k largest scores of each row, counted from `starts`.

    Of equal scores the leftmost are taken. Columns come in ascending order, then -1
    where a row has fewer than k.

    Args:
        scores: float32 `[rows, columns]`, without NaN.
        starts, ends: int32 `[rows]`: row r has scores in `starts[r]` to `ends[r] - 1`,
            as far as there are columns; None starts at 0.
        k: how many.
        out: int32 `[rows, k]`, rows contiguous; allocated when None.
        provider: "reference", "triton" or "sm90" (csrc/topk.cu: without `starts`, up to
            262144 columns and a k of 8191); None picks by the device and what fits.

    Raises:
        ValueError: an argument does not fit. One sentence.
        RuntimeError: "sm90" without the native library or on another GPU.
    """
    rows = len(scores)
    if scores.dtype != torch.float32 or scores.dim() != 2:
        raise ValueError(
            f"scores must be float32 [rows, columns], got {scores.dtype} "
            f"{list(scores.shape)}."
        )
    _check_last("scores", scores)
    if starts is not None:
        _check("starts", starts, torch.int32, rows)
    _check("ends", ends, torch.int32, rows)
    if out is None:
        out = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    if out.shape != (rows, k) or out.dtype != torch.int32:
        raise ValueError(
            f"out must be int32 [{rows}, {k}], got {out.dtype} {list(out.shape)}."
        )
    _check_last("out", out)
    spans = {"ends": ends, "out": out} | ({} if starts is None else {"starts": starts})
    check_same_device(scores.device, **spans)
    if provider is None and starts is None and serves_topk(scores, k):
        provider = "sm90"
    if provider == "sm90":
        if starts is not None:
            raise ValueError("the provider sm90 takes no starts.")
        topk_sm90(scores, ends, out)
    elif _provider(provider, scores, "sm90") == "reference":
        from .indexer_reference import topk_reference

        topk_reference(scores, starts, ends, k, out)
    elif out.numel():
        with torch.cuda.device_of(scores):
            _topk_kernel[(rows,)](
                scores,
                starts,
                ends,
                out,
                scores.stride(0),
                out.stride(0),
                scores.shape[1],
                k,
                BLOCK=_TOPK_BLOCK,
                num_warps=8,
            )
    return out


def _provider(name: str | None, x: torch.Tensor, *more: str) -> str:
    name = name or ("triton" if x.device.type == "cuda" else "reference")
    names = ("reference", "triton", *more)
    if name not in names:
        raise ValueError(f"the indexer has no provider {name!r}; {', '.join(names)}.")
    return name


def _check(name: str, x: torch.Tensor, dtype: torch.dtype, length: int) -> None:
    if x.dtype != dtype or x.shape != (length,) or not x.is_contiguous():
        raise ValueError(
            f"{name} must be {dtype} [{length}], contiguous, got {x.dtype} "
            f"{list(x.shape)}."
        )


def _check_last(name: str, x: torch.Tensor) -> None:
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, not stride "
            f"{x.stride(-1)}."
        )


def _check_query(q: torch.Tensor, weights: torch.Tensor, dims: int) -> int:
    """The number of tokens."""
    dim = q.shape[-1]
    if (
        q.dim() != dims
        or q.dtype not in (torch.float8_e4m3fn, torch.bfloat16)
        or not q.is_contiguous()
        or dim < 16
        or dim & (dim - 1)
    ):
        raise ValueError(
            "q must be E4M3 or BF16, contiguous, its last dimension a power of two "
            f"from 16 on, got {q.dtype} {list(q.shape)}."
        )
    tokens = q.shape[:-2].numel()
    if weights.dtype != torch.float32 or weights.shape != (tokens, q.shape[-2]):
        raise ValueError(
            f"weights must be float32 [{tokens}, {q.shape[-2]}], got {weights.dtype} "
            f"{list(weights.shape)}."
        )
    _check_last("weights", weights)
    return tokens


def _launch_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    *,
    keys: torch.Tensor,
    key_stride: int,
    ends: torch.Tensor,
    limit: int,
    scales: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    block_size: int = 1,
    q_len: int = 1,
    FROM_START: bool = False,
    CLEAN: bool = True,
) -> None:
    tokens, heads, dim = q.shape
    columns = out.shape[1]
    with torch.cuda.device_of(q):
        # One dimension: of the others a grid has at most 65535, which keys can exceed.
        _scores_kernel[(tokens * triton.cdiv(columns, _SCORE_KEYS),)](
            _bytes(q),
            keys,
            scales,
            weights,
            starts,
            ends,
            table,
            out,
            tokens,
            columns,
            limit,
            0 if table is None else table.shape[1],
            heads,
            key_stride,
            weights.stride(0),
            0 if table is None else table.stride(0),
            block_size,
            q_len,
            DIM=dim,
            FROM_START=FROM_START,
            CLEAN=CLEAN,
            HARDWARE_E4M3=_converts_e4m3(q.device),
            BLOCK_H=_SCORE_HEADS[heads > _SCORE_HEADS[0]],
            BLOCK_N=_SCORE_KEYS,
            num_warps=4,
        )


# Sequences grow from step to step; none of this may select a new kernel while requests
# wait.
@triton.jit(
    do_not_specialize=[
        "tokens",
        "columns",
        "limit",
        "table_blocks",
        "table_stride",
        "q_len",
    ]
)
def _scores_kernel(
    q_ptr,
    keys_ptr,
    scales_ptr,
    weights_ptr,
    starts_ptr,
    ends_ptr,
    table_ptr,
    out_ptr,
    tokens,
    columns,
    limit,
    table_blocks,
    heads,
    key_stride,
    weight_stride,
    table_stride,
    block_size,
    q_len,
    DIM: tl.constexpr,
    FROM_START: tl.constexpr,
    CLEAN: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One token and `BLOCK_N` columns. With a table, `keys_ptr` is the paged cache."""
    program = tl.program_id(0)
    token = (program % tokens).to(tl.int64)  # neighbours share the keys
    first = program // tokens * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    out_ptr += token * columns + column
    start = 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + token)
    end = tl.load(ends_ptr + token)
    if FROM_START:
        end -= start
        seen = (column >= 0) & (column < end)
        key = column + start
        begin = 0
    else:
        seen = (column >= start) & (column < end)
        key = column
        begin = start
    if (first >= end) | (first + BLOCK_N <= begin):
        if CLEAN:
            tl.store(
                out_ptr,
                tl.full((BLOCK_N,), float("-inf"), tl.float32),
                mask=column < columns,
            )
        return

    if table_ptr is not None:
        block = key // block_size
        seen &= block < table_blocks
        request = token // q_len
        number = tl.load(
            table_ptr + request * table_stride + block, mask=seen, other=-1
        )
        seen &= (number >= 0) & (number < limit)
        block_ptr = keys_ptr + tl.where(seen, number, 0).to(tl.int64) * key_stride
        row = key % block_size
        key_ptr = block_ptr + row * DIM
        scale_ptr = (block_ptr + block_size * DIM).to(tl.pointer_type(tl.float32)) + row
        scale = tl.load(scale_ptr, mask=seen, other=0.0)
    else:
        seen &= (key >= 0) & (key < limit)
        key_ptr = keys_ptr + tl.where(seen, key, 0).to(tl.int64) * key_stride
        scale = tl.full((BLOCK_N,), 1.0, tl.float32)
        if scales_ptr is not None:
            scale = tl.load(scales_ptr + key, mask=seen, other=0.0)

    dim = tl.arange(0, DIM)
    keys = tl.load(key_ptr[:, None] + dim, mask=seen[:, None], other=0)
    if keys.dtype == tl.uint8:
        keys = _from_e4m3(keys, HARDWARE_E4M3)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first_head in range(0, heads, BLOCK_H):
        head = first_head + tl.arange(0, BLOCK_H)
        q = tl.load(
            q_ptr + (token * heads + head[:, None]) * DIM + dim,
            mask=head[:, None] < heads,
            other=0,
        )
        if q.dtype == tl.uint8:
            q = _from_e4m3(q, HARDWARE_E4M3)
        weight = tl.load(
            weights_ptr + token * weight_stride + head, mask=head < heads, other=0.0
        )
        products = tl.maximum(tl.dot(q, tl.trans(keys)), 0.0)
        total += tl.sum(products * weight[:, None], 0)
    tl.store(
        out_ptr, tl.where(seen, total * scale, float("-inf")), mask=column < columns
    )


@triton.jit
def _ordered(score_ptr, mask):
    """Scores as integers of the same order; -0 is 0."""
    score = tl.load(score_ptr, mask=mask, other=0.0)
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit(do_not_specialize=["columns", "k"])
def _topk_kernel(
    scores_ptr,
    starts_ptr,
    ends_ptr,
    out_ptr,
    score_stride,
    out_stride,
    columns,
    k,
    BLOCK: tl.constexpr,
):
    """Radix selection of one row: the k-th largest score digit by digit, then every
    larger one and the leftmost of its equals."""
    row = tl.program_id(0).to(tl.int64)
    start = 0
    if starts_ptr is not None:
        start = tl.maximum(tl.load(starts_ptr + row), 0)
    count = tl.maximum(tl.minimum(tl.load(ends_ptr + row), columns) - start, 0)
    scores_ptr += row * score_stride + start
    out_ptr += row * out_stride
    lane = tl.arange(0, BLOCK)
    if count <= k:
        for begin in range(0, k, BLOCK):
            column = begin + lane
            tl.store(
                out_ptr + column, tl.where(column < count, column, -1), mask=column < k
            )
        return

    digit = tl.arange(0, 256)
    prefix = tl.full((), 0, tl.uint32)
    missing = k
    for place in tl.static_range(4):
        found = tl.zeros((256,), tl.int32)
        for begin in range(0, count, BLOCK):
            inside = begin + lane < count
            bits = _ordered(scores_ptr + begin + lane, inside)
            if place > 0:
                inside &= (bits >> (32 - 8 * place)) == prefix
            digits = ((bits >> (24 - 8 * place)) & 0xFF).to(tl.int32)
            found += tl.histogram(digits, 256, mask=inside)
        above = tl.sum(found) - tl.cumsum(found, 0)
        chosen = (above < missing) & (above + found >= missing)
        missing -= tl.sum(tl.where(chosen, above, 0))
        prefix = (prefix << 8) | tl.sum(tl.where(chosen, digit, 0)).to(tl.uint32)

    written = 0
    for begin in range(0, count, BLOCK):
        inside = begin + lane < count
        bits = _ordered(scores_ptr + begin + lane, inside)
        equal = (inside & (bits == prefix)).to(tl.int32)
        nth = tl.cumsum(equal, 0)
        take = (inside & (bits > prefix)).to(tl.int32)
        take += equal * (nth <= missing).to(tl.int32)
        at = written + tl.cumsum(take, 0) - 1
        tl.store(out_ptr + at, begin + lane, mask=take == 1)
        written += tl.sum(take)
        missing -= tl.sum(equal)
