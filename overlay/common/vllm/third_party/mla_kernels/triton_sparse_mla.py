# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""The `triton` provider: portable sparse MLA over rows of any format, split over keys
when the batch is small.

One program serves one token, a block of heads and one share of the token's keys. Rows
are gathered once and used as K and as V. Products are exact up to the rounding of the
softmax weights:

- E4M3 rows become fp16 (exact), q is scaled into fp16 by a power of two a head,
  weights round to fp16;
- BF16 rows stay BF16, and so does q; weights are split into two BF16 terms, since one
  would cost more accuracy (2^-9) than the output's own rounding;
- V4's rows become BF16: an E4M3 value times a power of two is exact there. Their last
  64 dimensions, BF16 in the row, are a product of their own;
- V32's E4M3 values become BF16 (exact), and their float32 scales stay outside: those
  of K multiply the products of 128 dimensions, those of V the weights, before these
  are split into two terms.

The number of splits is a function of the shapes alone and partial results are merged in
a fixed order, so equal inputs give equal bits.
"""

import functools

import torch
import triton
import triton.language as tl

from .attention import VALUE_DIM, SparseAttention
from .interface import SparseMLACall

_D = tl.constexpr(VALUE_DIM)
_LOG2E = tl.constexpr(1.4426950408889634)


def sparse_mla_triton(call: SparseMLACall) -> None:
    """Write `call.out` for every token; see `sparse_mla` for the arguments and the
    formula."""
    attend_triton(call.attention)


def attend_triton(call: SparseAttention) -> None:
    """Write `call.out`, and `call.max_logits` and `call.lse` where they are asked
    for."""
    tokens, heads, head_dim = call.query.shape
    device = call.query.device
    row_format = call.pools[0].format.name
    block_h, block_n, num_warps = _tile(heads, row_format, head_dim)
    head_blocks = triton.cdiv(heads, block_h)
    columns = sum(pool.indices.shape[1] for pool in call.pools)
    splits = _num_splits(tokens * head_blocks, triton.cdiv(columns, block_n), device)
    if splits > 1:
        partial_out = torch.empty(
            tokens, splits, heads, VALUE_DIM, dtype=torch.float32, device=device
        )
        partial_max_sum = torch.empty(
            tokens, splits, heads, 2, dtype=torch.float32, device=device
        )
    else:
        partial_out = partial_max_sum = call.out
    _attend_kernel[(tokens, head_blocks, splits)](
        _bytes(call.query),
        call.visible,
        call.sinks,
        call.out,
        call.max_logits,
        call.lse,
        partial_out,
        partial_max_sum,
        call.scale,
        call.out_scale,
        *_pool_arguments(call.pools[0]),
        *_pool_arguments(call.pools[-1]),
        splits,
        heads,
        call.query.stride(0),
        call.query.stride(1),
        call.out.stride(0),
        call.out.stride(1),
        FORMAT=row_format,
        HEAD_DIM=head_dim,
        BASES=tuple(pool.base for pool in call.pools),
        SCALE_TENSORS=tuple(
            isinstance(scale, torch.Tensor) for scale in (call.scale, call.out_scale)
        ),
        HARDWARE_E4M3=_converts_e4m3(device),
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
            call.max_logits,
            call.lse,
            call.out_scale,
            splits,
            heads,
            call.out.stride(0),
            call.out.stride(1),
            SCALE_TENSOR=isinstance(call.out_scale, torch.Tensor),
            num_warps=4,
        )


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Triton has no E4M3 below compute capability 8.9, not even as a pointer."""
    return x if x.dtype == torch.bfloat16 else x.view(torch.uint8)


def _pool_arguments(pool) -> tuple:
    blocks, block_size, _ = pool.cache.shape
    return (
        _bytes(pool.cache),
        pool.cache.stride(0),
        pool.cache.stride(1),
        max(block_size, 1),
        blocks * block_size,
        pool.indices,
        pool.indices.stride(0),
        pool.indices.shape[1],
        pool.token_lengths(),
    )


def _tile(heads: int, row_format: str, head_dim: int) -> tuple[int, int, int]:
    """Heads and keys of one program, and its warps.

    For full-width rows the fastest of 36 tiles at 512 tokens on an H200. Others spill
    registers with 4 warps. All need less than the 99 KiB of shared memory that the
    smallest of GPUs from compute capability 8.0 on has.
    """
    block_h, block_n = (16, 64) if heads <= 16 else (32, 32)
    return block_h, block_n, 4 if head_dim == VALUE_DIM and row_format != "v4" else 8


def _num_splits(programs: int, key_blocks: int, device: torch.device) -> int:
    """Shares of the keys: enough programs for every multiprocessor, at least one key
    block each."""
    return max(1, min(_multiprocessors(device) // programs, key_blocks, 16))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8  # interpreted: small, but splits still happen
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _converts_e4m3(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


# Splits and columns change from step to step; none may select a new kernel while
# requests wait.
@triton.jit(do_not_specialize=["splits", "columns0", "columns1", "rows0", "rows1"])
def _attend_kernel(
    q_ptr,
    visible_ptr,
    sinks_ptr,
    out_ptr,
    max_logits_ptr,
    lse_ptr,
    partial_out_ptr,
    partial_max_sum_ptr,
    scale,
    out_scale,
    cache0_ptr,
    block_stride0,
    row_stride0,
    block_size0,
    rows0,
    indices0_ptr,
    indices_stride0,
    columns0,
    lengths0_ptr,
    cache1_ptr,
    block_stride1,
    row_stride1,
    block_size1,
    rows1,
    indices1_ptr,
    indices_stride1,
    columns1,
    lengths1_ptr,
    splits,
    heads,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BASES: tl.constexpr,
    SCALE_TENSORS: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(2)
    head_mask = (head < heads)[:, None]

    length0 = columns0
    if lengths0_ptr is not None:
        length0 = tl.minimum(
            tl.maximum(tl.load(lengths0_ptr + token), BASES[0]) - BASES[0],
            columns0,
        )
    length1 = 0
    if len(BASES) == 2:
        length1 = columns1
        if lengths1_ptr is not None:
            length1 = tl.minimum(
                tl.maximum(tl.load(lengths1_ptr + token), BASES[1]) - BASES[1],
                columns1,
            )
    if visible_ptr is not None:
        visible = tl.load(visible_ptr + token) > 0
        length0 = tl.where(visible, length0, 0)
        length1 = tl.where(visible, length1, 0)
    # Each split takes a contiguous run of the token's key blocks, those of the first
    # pool first.
    blocks0 = tl.cdiv(length0, BLOCK_N)
    blocks = blocks0 + tl.cdiv(length1, BLOCK_N)
    begin = split * blocks // splits
    end = (split + 1) * blocks // splits
    begin0, end0 = tl.minimum(begin, blocks0), tl.minimum(end, blocks0)
    begin1, end1 = tl.maximum(begin - blocks0, 0), tl.maximum(end - blocks0, 0)
    indices0_ptr += token * indices_stride0
    indices1_ptr += token * indices_stride1

    if SCALE_TENSORS[0]:
        scale = tl.load(scale)
    score_scale = tl.full((BLOCK_H,), 1.0, tl.float32)
    q_ptr += token * q_token_stride + head[:, None] * q_head_stride
    largest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    q_rope = None
    if HEAD_DIM == 576 or FORMAT == "v4":
        q_rope = tl.load(
            q_ptr + HEAD_DIM - 64 + tl.arange(0, 64), mask=head_mask, other=0.0
        )

    if FORMAT == "v32":
        q = ()
        acc = ()
        for i in tl.static_range(4):
            dim = i * 128 + tl.arange(0, 128)
            q = q + (tl.load(q_ptr + dim, mask=head_mask, other=0.0),)
            acc = acc + (tl.zeros((BLOCK_H, 128), tl.float32),)
    else:
        dim = tl.arange(0, _D)
        if FORMAT == "v4":
            q = tl.load(q_ptr + dim, mask=head_mask & (dim < 448), other=0.0)
            acc = (
                tl.zeros((BLOCK_H, _D), tl.float32),
                tl.zeros((BLOCK_H, 64), tl.float32),
            )
        else:
            q = tl.load(q_ptr + dim, mask=head_mask, other=0.0)
            acc = (tl.zeros((BLOCK_H, _D), tl.float32),)
        if FORMAT == "e4m3":
            if q.dtype == tl.uint8:
                q = _from_e4m3(q, HARDWARE_E4M3)
            # q / 2^e fits fp16 whatever q is; the power of two goes back in with the
            # scale. From 2^-126 to 2^126, so that its inverse is a normal number too: q
            # is at most 4 then.
            q = q.to(tl.float32)
            exponent = tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) & 0x7F800000
            exponent = tl.minimum(tl.maximum(exponent, 0x00800000), 0x7E800000)
            inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
            q = (q * inverse[:, None]).to(tl.float16)
            score_scale = exponent.to(tl.float32, bitcast=True)
    score_scale = score_scale * scale * _LOG2E

    acc, largest, total = _attend_pool(
        acc,
        largest,
        total,
        q,
        q_rope,
        score_scale,
        cache0_ptr,
        block_stride0,
        row_stride0,
        block_size0,
        rows0,
        indices0_ptr,
        begin0,
        end0,
        length0,
        FORMAT,
        HARDWARE_E4M3,
        BLOCK_N,
    )
    if len(BASES) == 2:
        acc, largest, total = _attend_pool(
            acc,
            largest,
            total,
            q,
            q_rope,
            score_scale,
            cache1_ptr,
            block_stride1,
            row_stride1,
            block_size1,
            rows1,
            indices1_ptr,
            begin1,
            end1,
            length1,
            FORMAT,
            HARDWARE_E4M3,
            BLOCK_N,
        )

    if WHOLE:
        if SCALE_TENSORS[1]:
            out_scale = tl.load(out_scale)
        factor = _finish(
            largest,
            total,
            out_scale,
            sinks_ptr,
            max_logits_ptr,
            lse_ptr,
            head,
            token * heads + head,
            head < heads,
        )
        out_ptr += token * out_token_stride + head[:, None] * out_head_stride
    else:
        part = (token * splits + split) * heads + head
        tl.store(partial_max_sum_ptr + part * 2, largest, mask=head < heads)
        tl.store(partial_max_sum_ptr + part * 2 + 1, total, mask=head < heads)
        factor = tl.full((BLOCK_H,), 1.0, tl.float32)
        out_ptr = partial_out_ptr + part[:, None] * _D
    if FORMAT == "v32":
        for i in tl.static_range(4):
            _store(
                out_ptr + i * 128 + tl.arange(0, 128),
                acc[i] * factor[:, None],
                head_mask,
            )
    elif FORMAT == "v4":
        _store(
            out_ptr + tl.arange(0, _D),
            acc[0] * factor[:, None],
            head_mask & (tl.arange(0, _D) < 448),
        )
        _store(out_ptr + 448 + tl.arange(0, 64), acc[1] * factor[:, None], head_mask)
    else:
        _store(out_ptr + tl.arange(0, _D), acc[0] * factor[:, None], head_mask)


@triton.jit
def _attend_pool(
    acc,
    largest,
    total,
    q,
    q_rope,
    score_scale,
    cache_ptr,
    block_stride,
    row_stride,
    block_size,
    pool_rows,
    indices_ptr,
    begin,
    end,
    length,
    FORMAT: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Online softmax over key blocks `begin` to `end` of one pool; scores are in units
    of log 2."""
    for step in range(begin, end):
        column = step * BLOCK_N + tl.arange(0, BLOCK_N)
        index = tl.load(indices_ptr + column, mask=column < length, other=-1)
        # Rows that are not keys are not read: they may hold anything, NaN included.
        active = (index >= 0) & (index < pool_rows)
        index = tl.where(active, index, 0)
        block_ptr = cache_ptr + (index // block_size).to(tl.int64) * block_stride
        row = (index % block_size).to(tl.int64)

        if FORMAT == "v32":
            row_ptr = block_ptr + row * 656
            rows = ()
            for i in tl.static_range(4):
                values = _load_e4m3(row_ptr, i * 128, 128, active, HARDWARE_E4M3)
                rows = rows + (values.to(tl.bfloat16),)
            scale_ptr = (row_ptr + 512).to(tl.pointer_type(tl.float32))
            scales = ()
            for i in tl.static_range(4):
                scales = scales + (tl.load(scale_ptr + i, mask=active, other=0.0),)
            rope = _load_bf16(row_ptr + 528, active)
            scores = tl.dot(q_rope, tl.trans(rope))
            for i in tl.static_range(4):
                scores += tl.dot(q[i], tl.trans(rows[i])) * scales[i][None, :]
        elif FORMAT == "v4":
            rows = _load_v4(
                block_ptr + row * 576,
                block_ptr + block_size * 576 + row * 8,
                active,
                HARDWARE_E4M3,
            )
            rope = _load_bf16(block_ptr + row * 576 + 448, active)
            scores = tl.dot(q, tl.trans(rows)) + tl.dot(q_rope, tl.trans(rope))
        elif FORMAT == "e4m3":
            rows = _load_e4m3(
                block_ptr + row * row_stride, 0, _D, active, HARDWARE_E4M3
            )
            scores = tl.dot(q, tl.trans(rows))
        else:
            row_ptr = block_ptr + row * row_stride
            rows = tl.load(
                row_ptr[:, None] + tl.arange(0, _D), mask=active[:, None], other=0.0
            )
            scores = tl.dot(q, tl.trans(rows))
            if q_rope is not None:
                scores += tl.dot(q_rope, tl.trans(_load_bf16(row_ptr + _D, active)))

        scores = tl.where(active[None, :], scores * score_scale[:, None], float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # No key so far: subtract 0, since -inf - -inf is NaN.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        correction = tl.exp2(largest - shift)
        weights = tl.exp2(scores - shift[:, None])
        total = total * correction + tl.sum(weights, 1)
        largest = new_largest
        if FORMAT == "v32":
            sums = ()
            for i in tl.static_range(4):
                before = acc[i] * correction[:, None]
                scaled = weights * scales[i][None, :]
                sums = sums + (_add_values(before, scaled, rows[i]),)
            acc = sums
        elif FORMAT == "v4":
            acc = (
                _add_values(acc[0] * correction[:, None], weights, rows),
                _add_values(acc[1] * correction[:, None], weights, rope),
            )
        else:
            acc = (_add_values(acc[0] * correction[:, None], weights, rows),)
    return acc, largest, total


@triton.jit
def _add_values(acc, weights, rows):
    """acc + weights rows: in fp16, or as BF16 in two terms of the weights."""
    if rows.dtype == tl.float16:
        return tl.dot(weights.to(tl.float16), rows, acc)
    else:
        high = weights.to(tl.bfloat16)
        low = (weights - high.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(high, rows, acc)
        return tl.dot(low, rows, acc)


@triton.jit
def _from_e4m3(raw, HARDWARE: tl.constexpr):
    """Bytes of E4M3 to fp16, exactly."""
    if HARDWARE:
        return raw.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # The same bits as fp16 are the value times 2^-8, subnormals too; all ones are
        # NaN.
        bits = raw.to(tl.int16)
        magnitude = (bits & 0x7F) << 7
        magnitude = tl.where(magnitude == 0x3F80, 0x7E00, magnitude).to(tl.int16)
        return (magnitude | (bits & 0x80) << 8).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _load_e4m3(
    row_ptr, FIRST: tl.constexpr, WIDTH: tl.constexpr, active, HARDWARE: tl.constexpr
):
    raw = tl.load(
        row_ptr[:, None] + FIRST + tl.arange(0, WIDTH), mask=active[:, None], other=0
    )
    return _from_e4m3(raw, HARDWARE)


@triton.jit
def _load_bf16(byte_ptr, active):
    """64 BF16 of each row, RoPE's."""
    row_ptr = byte_ptr.to(tl.pointer_type(tl.bfloat16))
    return tl.load(row_ptr[:, None] + tl.arange(0, 64), mask=active[:, None], other=0.0)


@triton.jit
def _load_v4(value_ptr, scale_ptr, active, HARDWARE: tl.constexpr):
    """The 448 E4M3 values of V4's rows times their scales as BF16 [rows, 512], 0 from
    dimension 448 on."""
    group = tl.arange(0, 8)
    raw = tl.load(
        value_ptr[:, None, None]
        + group[None, :, None] * 64
        + tl.arange(0, 64)[None, None, :],
        mask=active[:, None, None] & (group < 7)[None, :, None],
        other=0,
    )
    exponent = tl.load(
        scale_ptr[:, None] + group[None, :],
        mask=active[:, None] & (group < 7)[None, :],
        other=127,
    ).to(tl.int32)
    # UE8M0: 2^(exponent - 127), of which 2^-127 is not a normal float32; 255 is NaN.
    bits = exponent << 23 | ((exponent == 0) | (exponent == 255)).to(tl.int32) << 22
    rows = (
        _from_e4m3(raw, HARDWARE).to(tl.float32)
        * bits.to(tl.float32, bitcast=True)[:, :, None]
    )
    return tl.reshape(rows.to(tl.bfloat16), (raw.shape[0], _D))


@triton.jit
def _store(ptr, values, mask):
    tl.store(ptr, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _finish(
    largest, total, out_scale, sinks_ptr, max_logits_ptr, lse_ptr, head, at, mask
):
    """Store max_logits and lse of heads whose maximum (in units of log 2) and sum are
    known.

    Returns what the sum of weighted values is multiplied with.
    """
    lse = largest + tl.log2(tl.where(total == 0, 1.0, total))
    if max_logits_ptr is not None:
        tl.store(max_logits_ptr + at, largest / _LOG2E, mask=mask)
    if lse_ptr is not None:
        tl.store(
            lse_ptr + at, tl.where(total == 0, float("inf"), lse / _LOG2E), mask=mask
        )
    factor = out_scale / tl.where(total == 0, 1.0, total)
    if sinks_ptr is not None:
        # The sink joins the denominator and has no value.
        sink = tl.load(sinks_ptr + head, mask=mask, other=float("-inf")) * _LOG2E
        factor = tl.where(total == 0, 0.0, factor / (1.0 + tl.exp2(sink - lse)))
    return factor


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    partial_out_ptr,
    partial_max_sum_ptr,
    sinks_ptr,
    out_ptr,
    max_logits_ptr,
    lse_ptr,
    out_scale,
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
        out_scale = tl.load(out_scale)
    largest = float("-inf")
    for split in range(splits):
        part = (token * splits + split) * heads + head
        largest = tl.maximum(largest, tl.load(partial_max_sum_ptr + part * 2))
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = 0.0
    acc = tl.zeros((_D,), tl.float32)
    for split in range(splits):
        part = (token * splits + split) * heads + head
        weight = tl.exp2(tl.load(partial_max_sum_ptr + part * 2) - shift)
        total += weight * tl.load(partial_max_sum_ptr + part * 2 + 1)
        acc += weight * tl.load(partial_out_ptr + part * _D + dim)
    at = token * heads + head
    factor = _finish(
        largest, total, out_scale, sinks_ptr, max_logits_ptr, lse_ptr, head, at, True
    )
    out_ptr += token * out_token_stride + head * out_head_stride
    tl.store(out_ptr + dim, (acc * factor).to(tl.bfloat16))
