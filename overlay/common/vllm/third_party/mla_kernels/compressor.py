# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""Compression of a window of tokens into one full-width row of the BF16 or E4M3 KV
cache.

The last step of DeepSeek V4's compressor, for the 512-wide attention cache (the
indexer's cache has another row). Earlier kernels have stored each token's partial
state, `[kv | score]` in fp32 with the learned position bias added to the scores. Every
`compress_ratio` tokens, a window of states becomes one cache row.
"""

import torch
import triton
import triton.language as tl

from .insert import (
    HEAD_DIM,
    as_cache_blocks,
    check_block_table,
    check_cos_sin,
    check_indices,
    check_norm_weight,
    check_same_device,
    check_scale,
    rotate_tail,
    to_e4m3,
)

_OVERLAPPING_RATIO = 4
_RATIOS = (_OVERLAPPING_RATIO, 128)
# Four warps cover the 512 channels with 16 bytes a lane. So each lane holds all rows of
# its channels, and the softmax needs neither shuffles nor barriers. 16 rows are 64 KB
# in flight, which is what hides the latency when few windows end in a batch.
_NUM_WARPS = 4
_MAX_ROWS_PER_STEP = 16


# Wide as the longest sequence allows: warm-up does not know it.
@triton.jit(do_not_specialize=["block_table_stride", "state_blocks", "kv_rows"])
def _compress_kernel(
    state_cache,
    state_block_stride,
    state_row_stride,
    state_blocks,
    token_to_req_indices,
    positions,
    slot_mapping,
    block_table,
    block_table_stride,
    cos_sin_cache,
    cos_sin_stride,
    kv_cache,
    kv_block_stride,
    kv_block_size,
    kv_rows,
    kv_slot_mapping,
    rms_norm_weight,
    rms_norm_eps,
    fp8_scale,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    STATE_BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program a token; those that do not end a window leave at once."""
    window: tl.constexpr = RATIO * (1 + OVERLAP)
    state_width: tl.constexpr = HEAD_DIM * (1 + OVERLAP)

    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token)
    kv_slot = tl.load(kv_slot_mapping + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int32)
    if (
        (slot < 0)
        | (kv_slot < 0)
        | (kv_slot >= kv_rows)
        | ((position + 1) % RATIO != 0)
    ):
        return

    blocks = (
        block_table
        + tl.load(token_to_req_indices + token).to(tl.int64) * block_table_stride
    )
    channel = tl.arange(0, HEAD_DIM)
    # An online softmax a channel. The maximum starts finite: a step with no finite
    # score then has weights of 0, and not of exp(inf - inf).
    top = tl.full((HEAD_DIM,), -3.4028234663852886e38, tl.float32)
    denominator = tl.zeros((HEAD_DIM,), tl.float32)
    weighted = tl.zeros((HEAD_DIM,), tl.float32)
    for first in range(0, window, ROWS):
        row = first + tl.arange(0, ROWS)
        source_position = position - window + 1 + row
        # The first overlapping window starts before the sequence. No block behind it
        # may be looked up.
        exists = source_position >= 0
        block = tl.load(
            blocks + source_position // STATE_BLOCK_SIZE, mask=exists, other=0
        ).to(tl.int64)
        exists &= (block >= 0) & (block < state_blocks)
        state = (
            state_cache
            + block * state_block_stride
            + (source_position % STATE_BLOCK_SIZE).to(tl.int64) * state_row_stride
        )
        if OVERLAP:
            # The older half of the window reads the first channels of a state, the
            # newer half the second ones.
            state += (row >= RATIO) * HEAD_DIM
        state = state[:, None] + channel[None, :]
        score = tl.load(state + state_width, mask=exists[:, None], other=float("-inf"))
        value = tl.load(state, mask=exists[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(score, axis=0))
        rescale = tl.exp(top - new_top)
        weight = tl.exp(score - new_top[None, :])
        denominator = denominator * rescale + tl.sum(weight, axis=0)
        weighted = weighted * rescale + tl.sum(weight * value, axis=0)
        top = new_top
    row_value = tl.div_rn(weighted, denominator)

    mean = tl.sum(row_value * row_value, axis=0) * (1.0 / HEAD_DIM)
    weight = tl.load(rms_norm_weight + channel).to(tl.float32)
    normed = row_value * tl.div_rn(1.0, tl.sqrt_rn(mean + rms_norm_eps)) * weight

    window_start = position - RATIO + 1
    cos_sin_row = cos_sin_cache + window_start.to(tl.int64) * cos_sin_stride
    rotated = tl.reshape(
        rotate_tail(normed[None, :], cos_sin_row, 1, HEAD_DIM), (HEAD_DIM,)
    )
    if fp8_scale is None:
        result = rotated.to(tl.bfloat16)
    else:
        result = to_e4m3(tl.div_rn(rotated, fp8_scale))
    target = (
        kv_cache
        + kv_slot // kv_block_size * kv_block_stride
        + kv_slot % kv_block_size * HEAD_DIM
    )
    tl.store(target + channel, result)


def compress_norm_rope_store(
    state_cache: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    compress_ratio: int,
    fp8_scale: float | None = None,
) -> None:
    """Compress the windows that end in this batch, and store one 512-wide cache row for
    each.

    A token ends a window if (position + 1) % compress_ratio == 0, its slot is not
    negative and its KV slot is one of `kv_cache`; all other tokens write nothing. The
    window is the last `compress_ratio` tokens, or for ratio 4 the last 8, of which the
    older 4 give the first 512 channels of their state and the newer 4 the second 512.
    Tokens before position 0 do not take part. In fp32 (FMA contraction allowed):

        x = sum over the window of softmax(score) * kv, for each channel
        y = x * (1 / sqrt(mean(x^2) + eps)) * weight
        y[448:] = interleaved RoPE of y[448:] at position + 1 - compress_ratio

    followed by one rounding to BF16, or by a division by `fp8_scale`, saturation at
    +-448 and one rounding to E4M3. Formula: vLLM 0.22.1,
    `models/deepseek_v4/common/ops`, the compressor's kernel for 512-wide rows; that one
    stores another row format.

    Args:
        state_cache: [state blocks, rows, 2 * width] fp32, width 1024 for ratio 4 and
            512 for ratio 128: `width` values, then `width` scores. Blocks and rows may
            lie any distance apart.
        token_to_req_indices: [tokens] int32 or int64, the token's row of `block_table`.
        positions: [tokens] int32 or int64, in the sequence.
        slot_mapping: [tokens] int32 or int64, the token's slot in `state_cache`; only
            its sign is read.
        block_table: [requests, blocks] int32, the state blocks of a request. Only
            entries of blocks that hold a token of a window are read; others may be
            stale. Tokens of a block outside `state_cache` do not take part.
        cos_sin_cache: [max_position, 64] fp32 or bf16, 32 cosines, then 32 sines.
        kv_cache: [blocks, rows, 512] bf16, or with `fp8_scale` float8_e4m3fn or uint8;
            a singleton head dimension is allowed. Blocks may lie any distance apart.
        kv_slot_mapping: [tokens] int32 or int64, in rows of `kv_cache`: block * rows +
            row.
        rms_norm_weight: [512] bf16 or fp32.
        rms_norm_eps: added to the mean of squares.
        compress_ratio: 4 or 128.
        fp8_scale: float, rounded to fp32, what a stored E4M3 value is multiplied with
            to give the row back.

        The four vectors over tokens may have padding of different lengths; tokens
        beyond the shortest of them write nothing.

    Raises:
        ValueError: an argument does not match the above.
    """
    if compress_ratio not in _RATIOS:
        raise ValueError(
            f"compress_ratio must be one of {_RATIOS}, got {compress_ratio}."
        )
    overlap = compress_ratio == _OVERLAPPING_RATIO
    head_dim = HEAD_DIM.value
    state_dim = 2 * head_dim * (1 + overlap)
    if (
        state_cache.dim() != 3
        or state_cache.shape[2] != state_dim
        or state_cache.stride(2) != 1
    ):
        raise ValueError(
            f"state_cache must be [blocks, rows, {state_dim}], got "
            f"{list(state_cache.shape)}."
        )
    if state_cache.dtype != torch.float32:
        raise ValueError(f"state_cache must be fp32, got {state_cache.dtype}.")
    check_block_table(block_table)
    check_norm_weight(rms_norm_weight, head_dim)
    vectors = {
        "token_to_req_indices": token_to_req_indices,
        "positions": positions,
        "slot_mapping": slot_mapping,
        "kv_slot_mapping": kv_slot_mapping,
    }
    check_indices(**vectors)
    check_cos_sin(cos_sin_cache)
    kv_block_size = kv_cache.shape[1:].numel() // head_dim
    kv_cache = as_cache_blocks(kv_cache, kv_block_size, fp8=fp8_scale is not None)
    check_same_device(
        state_cache.device,
        block_table=block_table,
        rms_norm_weight=rms_norm_weight,
        cos_sin_cache=cos_sin_cache,
        kv_cache=kv_cache,
        **vectors,
    )
    if fp8_scale is not None:
        check_scale("fp8_scale", fp8_scale)
    num_tokens = min(vector.shape[0] for vector in vectors.values())
    if num_tokens == 0:
        return

    with torch.cuda.device_of(state_cache):
        _compress_kernel[(num_tokens,)](
            state_cache,
            state_cache.stride(0),
            state_cache.stride(1),
            state_cache.shape[0],
            token_to_req_indices,
            positions,
            slot_mapping,
            block_table,
            block_table.stride(0),
            cos_sin_cache,
            cos_sin_cache.stride(0),
            kv_cache,
            kv_cache.stride(0),
            kv_block_size,
            kv_cache.shape[0] * kv_block_size,
            kv_slot_mapping,
            rms_norm_weight,
            rms_norm_eps,
            fp8_scale,
            RATIO=compress_ratio,
            OVERLAP=overlap,
            STATE_BLOCK_SIZE=state_cache.shape[1],
            ROWS=min(_MAX_ROWS_PER_STEP, compress_ratio * (1 + overlap)),
            num_warps=_NUM_WARPS,
        )
