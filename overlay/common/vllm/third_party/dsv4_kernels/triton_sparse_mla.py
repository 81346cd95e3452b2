"""The `triton` provider: portable sparse MLA, split over keys when the batch is small.

One program serves one token, a block of heads and one share of the token's keys. Rows are gathered once and
used as K and as V. Products are exact up to the rounding of the softmax weights:

- E4M3 rows become fp16 (exact), q is scaled into fp16 by a power of two a head, weights round to fp16;
- BF16 rows stay BF16, and so does q; weights are split into two BF16 terms, since one would cost more
  accuracy (2^-9) than the output's own rounding.

The number of splits is a function of the shapes alone and partial results are merged in a fixed order, so
equal inputs give equal bits.
"""

import functools

import torch
import triton
import triton.language as tl

from .interface import HEAD_DIM, SWA_COLUMNS, SparseMLACall

_SWA_COLUMNS = tl.constexpr(SWA_COLUMNS)
_D = tl.constexpr(HEAD_DIM)
_LOG2E = tl.constexpr(1.4426950408889634)


def sparse_mla_triton(call: SparseMLACall) -> None:
    """Write `call.out` for every token; see `sparse_mla` for the arguments and the formula."""
    tokens, heads, _ = call.query.shape
    block_h, block_n, num_warps = _tile(heads)
    head_blocks = triton.cdiv(heads, block_h)
    splits = _num_splits(tokens * head_blocks, triton.cdiv(call.indices.shape[1], block_n), call.query.device)
    device = call.query.device
    if splits > 1:
        partial_out = torch.empty(tokens, splits, heads, HEAD_DIM, dtype=torch.float32, device=device)
        partial_max_sum = torch.empty(tokens, splits, heads, 2, dtype=torch.float32, device=device)
    else:
        partial_out = partial_max_sum = call.out
    scale_args = (call.bmm1_scale, call.bmm2_scale)
    _attend_kernel[(tokens, head_blocks, splits)](
        call.query,
        call.swa_pool,
        call.compressed_pool,
        call.indices,
        call.topk_lens,
        call.visible,
        call.sinks,
        call.out,
        partial_out,
        partial_max_sum,
        *scale_args,
        splits,
        heads,
        call.query.stride(0),
        call.query.stride(1),
        call.swa_pool.stride(0),
        call.swa_pool.stride(1),
        call.swa_pool.shape[1],
        call.swa_pool.shape[0] * call.swa_pool.shape[1],
        call.compressed_pool.stride(0),
        call.compressed_pool.stride(1),
        call.compressed_pool.shape[1],
        call.compressed_pool.shape[0] * call.compressed_pool.shape[1],
        call.indices.stride(0),
        call.indices.shape[1],
        call.out.stride(0),
        call.out.stride(1),
        SCALE_TENSORS=tuple(isinstance(scale, torch.Tensor) for scale in scale_args),
        WHOLE=splits == 1,
        BLOCK_H=block_h,
        BLOCK_N=block_n,
        num_warps=num_warps,
        num_stages=2,
    )
    if splits > 1:
        _merge_kernel[(tokens, heads)](
            partial_out,
            partial_max_sum,
            call.sinks,
            call.out,
            call.bmm2_scale,
            splits,
            heads,
            call.out.stride(0),
            call.out.stride(1),
            SCALE_TENSOR=isinstance(call.bmm2_scale, torch.Tensor),
            num_warps=4,
        )


def _tile(heads: int) -> tuple[int, int, int]:
    """Heads and keys of one program, and its warps: the fastest of 36 tiles at 512 tokens on an H200."""
    return (16, 64, 4) if heads <= 16 else (32, 32, 4)


def _num_splits(programs: int, key_blocks: int, device: torch.device) -> int:
    """Shares of the keys: enough programs for every multiprocessor, at least one key block each."""
    return max(1, min(_multiprocessors(device) // programs, key_blocks, 16))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8  # interpreted: small, but splits still happen
    return torch.cuda.get_device_properties(device).multi_processor_count


# Splits and width change from step to step; neither may select a new kernel while requests wait.
@triton.jit(do_not_specialize=["splits", "width", "swa_rows", "compressed_rows"])
def _attend_kernel(
    q_ptr,
    swa_ptr,
    compressed_ptr,
    indices_ptr,
    topk_lens_ptr,
    visible_ptr,
    sinks_ptr,
    out_ptr,
    partial_out_ptr,
    partial_max_sum_ptr,
    bmm1_scale,
    bmm2_scale,
    splits,
    heads,
    q_token_stride,
    q_head_stride,
    swa_page_stride,
    swa_row_stride,
    swa_page,
    swa_rows,
    compressed_page_stride,
    compressed_row_stride,
    compressed_page,
    compressed_rows,
    indices_stride,
    width,
    out_token_stride,
    out_head_stride,
    SCALE_TENSORS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(2)
    dim = tl.arange(0, _D)
    head_mask = (head < heads)[:, None]

    visible = tl.load(visible_ptr + token)
    swa_len = tl.maximum(tl.minimum(visible, _SWA_COLUMNS), 0)
    compressed_len = tl.minimum(tl.load(topk_lens_ptr + token), width) - _SWA_COLUMNS
    compressed_len = tl.where(visible > 0, tl.maximum(compressed_len, 0), 0)
    # Each split takes a contiguous run of the token's key blocks, SWA first.
    swa_blocks = tl.cdiv(swa_len, BLOCK_N)
    blocks = swa_blocks + tl.cdiv(compressed_len, BLOCK_N)
    begin = split * blocks // splits
    end = (split + 1) * blocks // splits

    if SCALE_TENSORS[0]:
        bmm1_scale = tl.load(bmm1_scale)
    q = tl.load(
        q_ptr + token * q_token_stride + head[:, None] * q_head_stride + dim, mask=head_mask, other=0.0
    )
    if swa_ptr.dtype.element_ty == tl.bfloat16:
        score_scale = tl.full((BLOCK_H,), 1.0, tl.float32)
    else:
        # q / 2^e fits fp16 whatever q is; the power of two goes back in with the scale. From 2^-126 to 2^126, so
        # that its inverse is a normal number too: q is at most 4 then.
        q = q.to(tl.float32)
        exponent = tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) & 0x7F800000
        exponent = tl.minimum(tl.maximum(exponent, 0x00800000), 0x7E800000)
        inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
        q = (q * inverse[:, None]).to(tl.float16)
        score_scale = exponent.to(tl.float32, bitcast=True)
    score_scale = score_scale * bmm1_scale * _LOG2E

    largest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, _D), tl.float32)
    row_indices_ptr = indices_ptr + token * indices_stride
    acc, largest, total = _attend_pool(
        acc, largest, total, q, score_scale, swa_ptr, swa_page_stride, swa_row_stride, swa_page,
        swa_rows, row_indices_ptr, tl.minimum(begin, swa_blocks), tl.minimum(end, swa_blocks), swa_len, BLOCK_N,
    )  # fmt: skip
    acc, largest, total = _attend_pool(
        acc, largest, total, q, score_scale, compressed_ptr, compressed_page_stride, compressed_row_stride,
        compressed_page, compressed_rows, row_indices_ptr + _SWA_COLUMNS, tl.maximum(begin - swa_blocks, 0),
        tl.maximum(end - swa_blocks, 0), compressed_len, BLOCK_N,
    )  # fmt: skip

    if WHOLE:
        if SCALE_TENSORS[1]:
            bmm2_scale = tl.load(bmm2_scale)
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=head < heads, other=float("-inf")) * _LOG2E
            acc, total = _add_sink(acc, largest, total, sink)
        out = acc * (bmm2_scale / tl.where(total > 0, total, 1.0))[:, None]
        tl.store(
            out_ptr + token * out_token_stride + head[:, None] * out_head_stride + dim,
            out.to(tl.bfloat16),
            mask=head_mask,
        )
    else:
        part = (token * splits + split) * heads + head
        tl.store(partial_out_ptr + part[:, None] * _D + dim, acc, mask=head_mask)
        tl.store(partial_max_sum_ptr + part * 2, largest, mask=head < heads)
        tl.store(partial_max_sum_ptr + part * 2 + 1, total, mask=head < heads)


@triton.jit
def _attend_pool(
    acc,
    largest,
    total,
    q,
    score_scale,
    pool_ptr,
    page_stride,
    row_stride,
    page,
    pool_rows,
    indices_ptr,
    begin,
    end,
    length,
    BLOCK_N: tl.constexpr,
):
    """Online softmax over key blocks `begin` to `end` of one pool; scores are in units of log 2."""
    dim = tl.arange(0, _D)
    for block in range(begin, end):
        column = block * BLOCK_N + tl.arange(0, BLOCK_N)
        index = tl.load(indices_ptr + column, mask=column < length, other=-1)
        active = (index >= 0) & (index < pool_rows)
        index = tl.where(active, index, 0)
        row = (index // page).to(tl.int64) * page_stride + (index % page).to(tl.int64) * row_stride
        # Rows that are not keys are not read: they may hold anything, NaN included.
        rows = tl.load(pool_ptr + row[:, None] + dim, mask=active[:, None], other=0.0)
        if pool_ptr.dtype.element_ty != tl.bfloat16:
            rows = rows.to(tl.float16)
        scores = tl.dot(q, tl.trans(rows)) * score_scale[:, None]
        scores = tl.where(active[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # No key so far: subtract 0, since -inf - -inf is NaN.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        correction = tl.exp2(largest - shift)
        weights = tl.exp2(scores - shift[:, None])
        total = total * correction + tl.sum(weights, 1)
        acc = acc * correction[:, None]
        if pool_ptr.dtype.element_ty == tl.bfloat16:
            high = weights.to(tl.bfloat16)
            low = (weights - high.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(high, rows, acc)
            acc = tl.dot(low, rows, acc)
        else:
            acc = tl.dot(weights.to(tl.float16), rows, acc)
        largest = new_largest
    return acc, largest, total


@triton.jit
def _add_sink(acc, largest, total, sink):
    """Join the sink (in units of log 2) to the denominator, rescaling to a maximum that covers it."""
    shift = tl.maximum(largest, sink)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    correction = tl.exp2(largest - shift)
    return acc * correction[:, None], total * correction + tl.exp2(sink - shift)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    partial_out_ptr,
    partial_max_sum_ptr,
    sinks_ptr,
    out_ptr,
    bmm2_scale,
    splits,
    heads,
    out_token_stride,
    out_head_stride,
    SCALE_TENSOR: tl.constexpr,
):
    """Merge the splits of one token and head in order, then the sink."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, _D)
    if SCALE_TENSOR:
        bmm2_scale = tl.load(bmm2_scale)
    largest = float("-inf")
    for split in range(splits):
        part = (token * splits + split) * heads + head
        largest = tl.maximum(largest, tl.load(partial_max_sum_ptr + part * 2))
    sink = float("-inf")
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head) * _LOG2E
    shift = tl.maximum(largest, sink)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    total = tl.exp2(sink - shift)
    acc = tl.zeros((_D,), tl.float32)
    for split in range(splits):
        part = (token * splits + split) * heads + head
        weight = tl.exp2(tl.load(partial_max_sum_ptr + part * 2) - shift)
        total += weight * tl.load(partial_max_sum_ptr + part * 2 + 1)
        acc += weight * tl.load(partial_out_ptr + part * _D + dim)
    out = acc * (bmm2_scale / tl.where(total > 0, total, 1.0))
    tl.store(out_ptr + token * out_token_stride + head * out_head_stride + dim, out.to(tl.bfloat16))
