# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""DeepSeek V4's compressor into the packed rows of vLLM's own caches, in one launch:
the partial states of a batch are saved, and windows that end in it become cache rows.

For steps of few tokens, where latency is all the cost. Tokens of a window that are in
the batch are read from the batch, and not from the state cache: so no launch waits for
the states. Rounding follows vLLM 0.22.1's kernels for NVIDIA operation by operation (of
512-wide rows the CuTe DSL kernels as compiled, of the indexer's the Triton kernel), so
that the cache holds the same bytes.
"""

import torch
import triton
import triton.language as tl

from .insert import (
    E4M3_MAX,
    ROPE_DIM,
    add_halves,
    check_block_table,
    check_cos_sin,
    check_indices,
    check_norm_weight,
    check_packed_blocks,
    check_same_device,
)

_LOWEST = tl.constexpr(-2e38)
_RATIOS_OF_HEAD = {512: (4, 128), 128: (4,)}
# Bytes of a packed row: 448 E4M3, 64 BF16 and 8 scales; 128 E4M3 and one FP32 scale.
_ROW_BYTES = {512: 584, 128: 132}
# The compiler fuses the indexer's products and sums as it does in vLLM's kernel,
# which has one warp too. Those of the other rows are fused by hand, where CuTe DSL's
# compiler does it.
_OPTIONS = {
    (512, 4): {"num_warps": 8, "enable_fp_fusion": False},
    (512, 128): {"num_warps": 16, "enable_fp_fusion": False},
    (128, 4): {"num_warps": 1, "enable_fp_fusion": True},
}


@triton.jit
def _state_row(back, at, states, STATE_BLOCK_SIZE: tl.constexpr):
    """Where the state of `back` tokens before the one `at` is, whether that is in the
    batch, and whether there is such a token."""
    token, request, position = at
    (
        batch,
        batch_stride,
        token_to_req_indices,
        positions,
        state_cache,
        state_block_stride,
        state_row_stride,
        block_table,
        block_table_stride,
    ) = states
    source = token - back
    source_position = position - back
    exists = source_position >= 0
    reachable = exists & (source >= 0)
    fresh = (
        tl.load(token_to_req_indices + source, mask=reachable, other=-1) == request
    ) & (tl.load(positions + source, mask=reachable, other=-1) == source_position)
    block = tl.load(
        block_table
        + request.to(tl.int64) * block_table_stride
        + source_position // STATE_BLOCK_SIZE,
        mask=exists,
        other=0,
    ).to(tl.int64)
    saved = (
        state_cache
        + block * state_block_stride
        + (source_position % STATE_BLOCK_SIZE).to(tl.int64) * state_row_stride
    )
    return tl.where(fresh, batch + source * batch_stride, saved), fresh, exists


@triton.jit
def _exp(x):
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _add_sixteen(x):
    """The rows of `x` [16, 512], as a tree: those 8 apart first, neighbours last."""
    for level in tl.static_range(4):
        x = tl.sum(tl.reshape(x, (2, 8 >> level, 512)), axis=0)
    return tl.reshape(x, (512,))


@triton.jit
def _split_four(x):
    """The scalars x[0], x[1], x[2], x[3]."""
    even, odd = tl.split(tl.reshape(x, (2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _indexer_window(at, states, ape, STATE_BLOCK_SIZE: tl.constexpr):
    """Compress 8 states of the indexer, in the order of the Triton kernel: [128]."""
    width: tl.constexpr = 256
    channel = tl.arange(0, 128)
    number = tl.arange(0, 8)
    state, fresh, exists = _state_row(7 - number, at, states, STATE_BLOCK_SIZE)
    column = (number >= 4).to(tl.int32)[:, None] * 128 + channel[None, :]
    score = tl.load(
        state[:, None] + column + width, mask=exists[:, None], other=float("-inf")
    )
    bias = tl.load(
        ape + (number % 4)[:, None] * width + column, mask=fresh[:, None], other=0.0
    )
    value = tl.load(state[:, None] + column, mask=exists[:, None], other=0.0)
    score += bias
    weight = tl.exp(score - tl.max(score, axis=0)[None, :])
    weight = weight / tl.sum(weight, axis=0)[None, :]
    return tl.sum(value * weight, axis=0)


@triton.jit
def _short_window(at, states, ape, STATE_BLOCK_SIZE: tl.constexpr):
    """Compress 8 states of attention, in the order of the CuTe DSL kernel: [512]."""
    width: tl.constexpr = 1024
    channel = tl.arange(0, 512)
    # All addresses, then all rows, then the first use: two latencies and not 16.
    found = ()
    for number in tl.static_range(8):
        found = found + (_state_row(7 - number, at, states, STATE_BLOCK_SIZE),)
    rows = ()
    for number in tl.static_range(8):
        state, fresh, exists = found[number]
        column = number // 4 * 512 + channel
        rows = rows + (
            (
                tl.load(state + width + column, mask=exists, other=float("-inf")),
                tl.load(ape + number % 4 * width + column, mask=fresh, other=0.0),
                tl.load(state + column, mask=exists, other=0.0),
            ),
        )
    # An online softmax a channel. The maximum starts finite: rows that do not exist
    # then have weights of 0, and not of exp(inf - inf).
    top = tl.full((512,), _LOWEST, tl.float32)
    denominator = tl.zeros((512,), tl.float32)
    weighted = tl.zeros((512,), tl.float32)
    for number in tl.static_range(8):
        score, bias, value = rows[number]
        score += bias
        new_top = tl.maximum(top, score)
        rescale = _exp(top - new_top)
        weight = _exp(score - new_top)
        denominator = tl.fma(denominator, rescale, weight)
        weighted = tl.fma(weighted, rescale, value * weight)
        top = new_top
    return tl.div_rn(weighted, denominator)


@triton.jit
def _long_window(at, states, ape, STATE_BLOCK_SIZE: tl.constexpr):
    """Compress 128 states of attention, in the order of the CuTe DSL kernel: [512].

    That has 16 warps of 8 rows, of which half a warp takes the even and half the odd
    ones, and adds up the warps as a tree: those 8 apart first, neighbours last. Here a
    row of a tensor stands for a warp.
    """
    channel = tl.arange(0, 512)
    tops = ()
    sums = ()
    for half in tl.static_range(2):
        rows = ()
        half_top = tl.full((16, 512), _LOWEST, tl.float32)
        for number in tl.static_range(4):
            row = tl.arange(0, 16) * 8 + 2 * number + half
            state, fresh, exists = _state_row(127 - row, at, states, STATE_BLOCK_SIZE)
            source = state[:, None] + channel[None, :]
            score = tl.load(source + 512, mask=exists[:, None], other=float("-inf"))
            score += tl.load(
                ape + row[:, None] * 512 + channel[None, :],
                mask=fresh[:, None],
                other=0.0,
            )
            half_top = tl.maximum(half_top, score)
            value = tl.load(source, mask=exists[:, None], other=0.0)
            rows = rows + ((score, value),)
        total = tl.zeros((16, 512), tl.float32)
        product = tl.zeros((16, 512), tl.float32)
        for number in tl.static_range(4):
            score, value = rows[number]
            weight = _exp(score - half_top)
            total += weight
            product = tl.fma(value, weight, product)
        tops = tops + (half_top,)
        sums = sums + ((total, product),)
    warp_top = tl.maximum(tops[0], tops[1])
    even_scale = _exp(tops[0] - warp_top)
    odd_scale = _exp(tops[1] - warp_top)
    scale = _exp(warp_top - tl.max(warp_top, axis=0)[None, :])
    total = tl.fma(sums[0][0], even_scale, sums[1][0] * odd_scale) * scale
    product = tl.fma(sums[0][1], even_scale, sums[1][1] * odd_scale) * scale
    denominator = _add_sixteen(total)
    return tl.div_rn(_add_sixteen(product), denominator)


@triton.jit
def _store_attention_row(x, weight, eps, cos, sin, row, scales):
    """Norm, RoPE and rounding of 512 channels, in the order of the CuTe DSL kernel."""
    channel = tl.arange(0, 512)
    even, odd = tl.split(tl.reshape(x, (256, 2)))
    # There a warp has 64 channels, adds them by a butterfly, and one thread adds warps.
    squares = tl.fma(even, even, odd * odd)
    for level in tl.static_range(5):
        squares = add_halves(squares, 8, 16 >> level)
    even, odd = tl.split(tl.reshape(squares, (4, 2)))
    sum0, sum2, sum4, sum6 = _split_four(even)
    sum1, sum3, sum5, sum7 = _split_four(odd)
    total = sum0 + sum1 + sum2 + sum3 + sum4 + sum5 + sum6 + sum7
    normed = x * tl.rsqrt(tl.fma(total, 1.0 / 512, eps)) * weight

    even, odd = tl.split(tl.reshape(normed, (256, 2)))
    real = tl.fma(even, cos, -(odd * sin))
    imaginary = tl.fma(odd, cos, even * sin)
    tail = tl.reshape(tl.join(real, imaginary), (512,)).to(tl.bfloat16)
    target = (row + 448).to(tl.pointer_type(tl.bfloat16)) + channel - 448
    tl.store(target, tail, mask=channel >= 448)

    rounded = tl.reshape(normed.to(tl.bfloat16).to(tl.float32), (8, 64))
    largest = tl.max(tl.abs(rounded), axis=1)
    raw = tl.maximum(tl.div_rn(largest, tl.full((8,), 448.0, tl.float32)), 1e-4)
    # Up to a power of two; as its exponent is stored.
    exponent = ((raw.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) & 0xFF
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = tl.clamp(rounded * inverse[:, None], -E4M3_MAX, E4M3_MAX)
    stored = tl.reshape(scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True), (512,))
    tl.store(row + channel, stored, mask=channel < 448)
    group = tl.arange(0, 8)
    tl.store(scales + group, tl.where(group < 7, exponent, 0).to(tl.uint8))


@triton.jit
def _store_indexer_row(x, weight, eps, cos, sin, row, scales):
    """The same of 128 channels with one scale, in the order of the Triton kernel."""
    channel = tl.arange(0, 128)
    mean = tl.sum(x * x, axis=0) * (1.0 / 128)
    normed = x * tl.rsqrt(mean + eps) * weight
    even, odd = tl.split(tl.reshape(normed, (64, 2)))
    # The sum is fused by hand: the compiler's choice is not always as in vLLM.
    imaginary = tl.fma(odd, cos, even * sin)
    turned = tl.interleave(even * cos - odd * sin, imaginary)
    rounded = turned.to(tl.bfloat16).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(rounded), axis=0), 1e-4)
    exponent = tl.ceil(tl.log2(largest * (1.0 / 448)))
    scaled = tl.clamp(rounded * tl.exp2(-exponent), -E4M3_MAX, E4M3_MAX)
    tl.store(row + channel, scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True))
    tl.store(scales.to(tl.pointer_type(tl.float32)), tl.exp2(exponent))


# These follow from the batch and from --max-model-len: no variant for some values.
@triton.jit(do_not_specialize=["block_table_stride", "num_req_indices", "num_kv_slots"])
def _save_compress_kernel(
    batch,
    batch_stride,
    ape,
    positions,
    state_cache,
    state_block_stride,
    state_row_stride,
    slot_mapping,
    token_to_req_indices,
    num_req_indices,
    block_table,
    block_table_stride,
    cos_sin_cache,
    cos_sin_stride,
    kv_cache,
    kv_block_stride,
    kv_slot_mapping,
    num_kv_slots,
    rms_norm_weight,
    rms_norm_eps,
    HEAD_DIM: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK_SIZE: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
):
    """Two programs a token: the first saves its state, the second compresses the window
    that it ends, if it does."""
    overlap: tl.constexpr = RATIO == 4
    width: tl.constexpr = HEAD_DIM * (1 + overlap)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    position = tl.load(positions + token)
    request = tl.load(
        token_to_req_indices + token, mask=token < num_req_indices, other=-1
    )
    kv_slot = tl.load(kv_slot_mapping + token, mask=token < num_kv_slots, other=-1)
    kv_slot = kv_slot.to(tl.int64)
    if slot < 0:
        return

    if tl.program_id(1) == 0:
        column = tl.arange(0, width)
        source = batch + token * batch_stride + column
        value = tl.load(source)
        score = tl.load(source + width)
        bias = tl.load(ape + position % RATIO * width + column)
        target = (
            state_cache
            + slot // STATE_BLOCK_SIZE * state_block_stride
            + slot % STATE_BLOCK_SIZE * state_row_stride
            + column
        )
        tl.store(target, value)
        tl.store(target + width, score + bias)
        return

    if ((position + 1) % RATIO != 0) | (kv_slot < 0) | (request < 0):
        return
    channel = tl.arange(0, HEAD_DIM)
    norm_weight = tl.load(rms_norm_weight + channel).to(tl.float32)
    pair = tl.arange(0, HEAD_DIM // 2) - (HEAD_DIM - ROPE_DIM) // 2
    cos_sin = cos_sin_cache + position // RATIO * RATIO * cos_sin_stride + pair
    cos = tl.load(cos_sin, mask=pair >= 0, other=1.0)
    sin = tl.load(cos_sin + ROPE_DIM // 2, mask=pair >= 0, other=0.0)
    at = token, request, position
    states = (
        batch,
        batch_stride,
        token_to_req_indices,
        positions,
        state_cache,
        state_block_stride,
        state_row_stride,
        block_table,
        block_table_stride,
    )
    if HEAD_DIM == 128:
        x = _indexer_window(at, states, ape, STATE_BLOCK_SIZE)
    elif RATIO == 4:
        x = _short_window(at, states, ape, STATE_BLOCK_SIZE)
    else:
        x = _long_window(at, states, ape, STATE_BLOCK_SIZE)

    block = kv_cache + kv_slot // KV_BLOCK_SIZE * kv_block_stride
    offset = kv_slot % KV_BLOCK_SIZE
    if HEAD_DIM == 512:
        _store_attention_row(
            x,
            norm_weight,
            rms_norm_eps,
            cos,
            sin,
            block + offset * 576,
            block + KV_BLOCK_SIZE * 576 + offset * 8,
        )
    else:
        _store_indexer_row(
            x,
            norm_weight,
            rms_norm_eps,
            cos,
            sin,
            block + offset * 128,
            block + KV_BLOCK_SIZE * 128 + offset * 4,
        )


def save_compress_store(
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    compress_ratio: int,
) -> None:
    """Save the states of a batch, and store one packed row for each window that ends in
    it.

    Tokens of a request lie side by side in the batch, in the order of their positions.
    Those of a negative slot write nothing; a row is stored if (position + 1) %
    compress_ratio == 0 and its KV slot is not negative. What a row holds before it is
    rounded: `compress_norm_rope_store`. Its first 448 channels (the indexer's: all 128)
    are rounded to BF16, then to E4M3 with a power of two for 64 (128) of them; the last
    64 to BF16.

    Args:
        kv_score: [tokens, 2 * width] fp32, values, then scores; width 2 * head_dim for
            ratio 4 and head_dim for ratio 128. Rows may be strided.
        ape: [compress_ratio, width] fp32, contiguous, added to the scores.
        positions: [tokens or more] int32 or int64.
        slot_mapping: [tokens] int32 or int64.
        state_cache: [blocks, rows, 2 * width] fp32. Blocks may lie any distance apart.
        token_to_req_indices: int32 or int64, a token's row of `block_table`. Where it
            is shorter than `slot_mapping`, or `kv_slot_mapping` is, the rest stores no
            rows.
        block_table: [requests, blocks] int32, the state blocks of a request.
        cos_sin_cache: [max_position, 64] fp32, 32 cosines, then 32 sines.
        kv_cache: [blocks, rows, 584 or 132] uint8. A block holds the values of all its
            rows and behind them their scales; blocks may lie any distance apart that is
            a multiple of 4 bytes.
        kv_slot_mapping: int32 or int64, in rows of `kv_cache`.
        rms_norm_weight: [head_dim] bf16 or fp32; head_dim is 512, or 128 of the
            indexer.
        rms_norm_eps: added to the mean of squares.
        compress_ratio: 4, or for head_dim 512 also 128.

    Raises:
        ValueError: an argument does not match the above.
    """
    head_dim = rms_norm_weight.shape[0]
    if compress_ratio not in _RATIOS_OF_HEAD.get(head_dim, ()):
        raise ValueError(
            f"no rows of {head_dim} channels for a compress_ratio of {compress_ratio}."
        )
    width = head_dim * (2 if compress_ratio == 4 else 1)
    tokens = slot_mapping.shape[0]
    for name, tensor, shape in (
        ("kv_score", kv_score, (kv_score.shape[0], 2 * width)),
        ("ape", ape, (compress_ratio, width)),
        ("state_cache", state_cache, (*state_cache.shape[:2], 2 * width)),
    ):
        if (
            tensor.shape != shape
            or tensor.dtype != torch.float32
            or tensor.stride(-1) != 1
        ):
            raise ValueError(
                f"{name} must be {list(shape)} fp32 with contiguous rows, got "
                f"{list(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}."
            )
    if not ape.is_contiguous():
        raise ValueError(f"ape must be contiguous, its strides are {ape.stride()}.")
    if (
        kv_cache.dtype != torch.uint8
        or kv_cache.dim() != 3
        or kv_cache.shape[2] != _ROW_BYTES[head_dim]
    ):
        raise ValueError(
            f"kv_cache must be [blocks, rows, {_ROW_BYTES[head_dim]}] uint8, got "
            f"{list(kv_cache.shape)} {kv_cache.dtype}."
        )
    check_packed_blocks("kv_cache", kv_cache)
    check_norm_weight(rms_norm_weight, head_dim)
    check_block_table(block_table)
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError(f"cos_sin_cache must be fp32, got {cos_sin_cache.dtype}.")
    check_cos_sin(cos_sin_cache)
    vectors = {
        "positions": positions,
        "slot_mapping": slot_mapping,
        "token_to_req_indices": token_to_req_indices,
        "kv_slot_mapping": kv_slot_mapping,
    }
    check_indices(**vectors)
    check_same_device(
        state_cache.device,
        kv_score=kv_score,
        ape=ape,
        block_table=block_table,
        cos_sin_cache=cos_sin_cache,
        kv_cache=kv_cache,
        rms_norm_weight=rms_norm_weight,
        **vectors,
    )
    if tokens > min(kv_score.shape[0], positions.shape[0]):
        raise ValueError(
            f"{tokens} slots need as many states (got {kv_score.shape[0]}) and "
            f"positions (got {positions.shape[0]})."
        )
    if tokens == 0:
        return
    with torch.cuda.device_of(state_cache):
        _save_compress_kernel[(tokens, 2)](
            kv_score,
            kv_score.stride(0),
            ape,
            positions,
            state_cache,
            state_cache.stride(0),
            state_cache.stride(1),
            slot_mapping,
            token_to_req_indices,
            token_to_req_indices.shape[0],
            block_table,
            block_table.stride(0),
            cos_sin_cache,
            cos_sin_cache.stride(0),
            kv_cache,
            kv_cache.stride(0),
            kv_slot_mapping,
            kv_slot_mapping.shape[0],
            rms_norm_weight,
            rms_norm_eps,
            HEAD_DIM=head_dim,
            RATIO=compress_ratio,
            STATE_BLOCK_SIZE=state_cache.shape[1],
            KV_BLOCK_SIZE=kv_cache.shape[1],
            **_OPTIONS[head_dim, compress_ratio],
        )
