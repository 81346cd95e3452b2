# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""Fused insertion of a token: Q norm and RoPE, KV RoPE, and the store of one full-width
cache row.

Registers three operators, `full_cache_bf16_insert`, `full_cache_fp8_insert` and
`full_cache_fp8_insert_bf16_q`, in the torch namespace `mla_kernels`; the functions of
the same names below are their Triton implementations. Native ones (native.py) take over
on the GPUs that they were built for. One launch covers the Q heads and the KV rows.
Formula: vLLM 0.22.1, `fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert` (an RMS norm
without weight on each Q head, interleaved RoPE on the last 64 of 512 dimensions); that
one stores another row format.

Shapes, with N tokens, H in 1..128 heads and S <= N slots:

- `q` [N, H, 512] bf16; the last dimension is contiguous, the others may be strided.
- `kv` [M >= S, 512] bf16; rows may be strided.
- `k_cache` `cache_block_size` rows of 512 elements in each block, as
  [B, cache_block_size, 512], [B, cache_block_size * 512], or with one singleton head
  dimension. Blocks may lie any distance apart. BF16, or E4M3 as float8_e4m3fn or as
  uint8.
- `slot_mapping` [S] int32 or int64, in units of cache rows: block * cache_block_size +
  row. A slot outside the cache, be it negative or too large, writes nothing. Tokens
  from S on are padding: their Q is processed, their KV is not.
- `position_ids` [>= N] int32 or int64, rows of `cos_sin_cache`, which is not checked.
- `cos_sin_cache` [max_position, 64] fp32 or bf16: 32 cosines, then 32 sines.
- `fp8_scale` float, rounded to fp32: what a stored E4M3 value is multiplied with to
  give the KV back.
- `q_fp8_scale_inv` float, rounded to fp32: what Q is multiplied with before it is
  rounded to E4M3.

Every implementation of these operators has to give the same bits, so this is the order
of the operations. All are fp32 operations rounded to nearest even, with subnormals;
none are contracted into an FMA.

1. Q only. With s_i = x_i * x_i, the sum of squares is a tree. u_j = s_j + s_(j+256) for
   j < 256. Each run of eight u is summed as ((u0+u4) + (u2+u6)) + ((u1+u5) + (u3+u7)).
   The 32 sums r are halved five times: r_l = r_l + r_(l+16) for l < 16, then 8, 4, 2
   and 1. (One warp does it with two 16-byte loads a lane, and butterfly shuffles.) Then
   y_i = x_i * (1 / sqrt(sum * 2^-9 + eps)), where eps is rounded to fp32, and the
   square root and the division are the IEEE ones.
2. Q and KV. For pair p < 32 with a = y_(448+2p), b = y_(449+2p) and c, s from
   `cos_sin_cache`: a' = a * c - b * s, b' = b * c + a * s. The first 448 values stay as
   they are.
3. BF16 result: one rounding. E4M3 result: Q is multiplied by `q_fp8_scale_inv`, KV is
   divided by `fp8_scale` (an IEEE division); values beyond +-448 become +-448, NaN
   stays NaN (of either sign), and one rounding follows.
"""

import functools

import torch
import triton
import triton.language as tl

from . import native

HEAD_DIM = tl.constexpr(512)
HALF_DIM = tl.constexpr(256)
ROPE_DIM = tl.constexpr(64)
E4M3_MAX = tl.constexpr(448.0)

_MAX_HEADS = 128
# A warp holds a head, in 16 registers a lane; programs of four warps fill an SM.
_HEADS_PER_PROGRAM = 4
_INDEX_DTYPES = (torch.int32, torch.int64)
_E4M3_STORAGE = (torch.float8_e4m3fn, torch.uint8)


@triton.jit
def rotate_tail(x, cos_sin_row, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Interleaved RoPE (step 2 above) on the last ROPE_DIM columns of `x` [ROWS, WIDTH]
    fp32."""
    first: tl.constexpr = (WIDTH - ROPE_DIM) // 2
    pair = tl.arange(0, WIDTH // 2)
    rotated = pair >= first
    cos = tl.load(cos_sin_row + pair - first, mask=rotated, other=0.0).to(tl.float32)
    sin = tl.load(
        cos_sin_row + pair - first + ROPE_DIM // 2, mask=rotated, other=0.0
    ).to(tl.float32)
    a, b = tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))
    # Selected, not rotated by cos 1 and sin 0: that would lose -0 and let an infinity
    # reach its neighbour.
    new_a = tl.where(rotated[None, :], a * cos[None, :] - b * sin[None, :], a)
    new_b = tl.where(rotated[None, :], b * cos[None, :] + a * sin[None, :], b)
    return tl.reshape(tl.join(new_a, new_b), (ROWS, WIDTH))


@triton.jit
def to_e4m3(x):
    """Round fp32 to E4M3: saturating at +-448, NaN stays NaN."""
    return tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL).to(
        tl.float8e4nv
    )


@triton.jit
def add_halves(x, RUNS: tl.constexpr, HALF: tl.constexpr):
    # A sum of two operands: no layout that the compiler may choose can change the
    # order.
    return tl.sum(tl.reshape(x, (RUNS, 2, HALF)), axis=1)


@triton.jit
def _sum_of_squares(low, high, ROWS: tl.constexpr):
    """Over both halves of a head, each [ROWS, HALF_DIM], by the tree of step 1 above:
    [ROWS, 1]."""
    runs: tl.constexpr = HALF_DIM // 8
    total = low * low + high * high
    for level in tl.static_range(3):
        total = add_halves(total, ROWS * runs, 4 >> level)
    for level in tl.static_range(5):
        total = add_halves(total, ROWS, (runs // 2) >> level)
    return total


# The number of slots changes with every batch: no variant of the kernel for some of its
# values.
@triton.jit(do_not_specialize=["num_slots", "cache_rows"])
def _insert_kernel(
    q,
    q_token_stride,
    q_head_stride,
    q_out,
    q_out_token_stride,
    q_out_head_stride,
    kv,
    kv_stride,
    k_cache,
    k_cache_block_stride,
    slot_mapping,
    num_slots,
    position_ids,
    cos_sin_cache,
    cos_sin_stride,
    fp8_scale,
    q_fp8_scale_inv,
    eps,
    cache_block_size,
    cache_rows,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program for HEADS heads of a token, and one more a token for its KV row."""
    head_programs: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    program = tl.program_id(0)
    token = (program // (head_programs + 1)).to(tl.int64)
    tile = program % (head_programs + 1)
    # A row is kept as two halves: 256 bf16 are one 16-byte load a lane, and so a head
    # stays within one warp.
    column = tl.arange(0, HALF_DIM)[None, :]

    if tile < head_programs:
        head = tile.to(tl.int64) * HEADS + tl.arange(0, HEADS)[:, None]
        live = head < NUM_HEADS
        source = q + token * q_token_stride + head * q_head_stride + column
        low = tl.load(source, mask=live, other=0.0).to(tl.float32)
        high = tl.load(source + HALF_DIM, mask=live, other=0.0).to(tl.float32)
        mean = _sum_of_squares(low, high, HEADS) * (1.0 / HEAD_DIM)
        reciprocal = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        position = tl.load(position_ids + token).to(tl.int64)
        low = low * reciprocal
        high = rotate_tail(
            high * reciprocal,
            cos_sin_cache + position * cos_sin_stride,
            HEADS,
            HALF_DIM,
        )
        target = q_out + token * q_out_token_stride + head * q_out_head_stride + column
        if q_fp8_scale_inv is None:
            tl.store(target, low.to(tl.bfloat16), mask=live)
            tl.store(target + HALF_DIM, high.to(tl.bfloat16), mask=live)
        else:
            tl.store(target, to_e4m3(low * q_fp8_scale_inv), mask=live)
            tl.store(target + HALF_DIM, to_e4m3(high * q_fp8_scale_inv), mask=live)
    elif token < num_slots:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if (slot >= 0) & (slot < cache_rows):
            source = kv + token * kv_stride + column
            low = tl.load(source).to(tl.float32)
            high = tl.load(source + HALF_DIM).to(tl.float32)
            position = tl.load(position_ids + token).to(tl.int64)
            high = rotate_tail(
                high, cos_sin_cache + position * cos_sin_stride, 1, HALF_DIM
            )
            block = slot // cache_block_size
            row = slot % cache_block_size
            target = k_cache + block * k_cache_block_stride + row * HEAD_DIM + column
            if fp8_scale is None:
                tl.store(target, low.to(tl.bfloat16))
                tl.store(target + HALF_DIM, high.to(tl.bfloat16))
            else:
                tl.store(target, to_e4m3(tl.div_rn(low, fp8_scale)))
                tl.store(target + HALF_DIM, to_e4m3(tl.div_rn(high, fp8_scale)))


def as_cache_blocks(cache: torch.Tensor, block_size: int, fp8: bool) -> torch.Tensor:
    """The cache as kernels address it: [B, block_size * 512], typed by content, any
    block stride.

    Args:
        cache: any of the shapes of `k_cache` in the module docstring.
        block_size: rows a block.
        fp8: whether the rows are E4M3 (float8_e4m3fn or uint8) or BF16.

    Raises:
        ValueError: the dtype, the rows a block or the strides inside a block are
            others.
    """
    if cache.dtype not in (_E4M3_STORAGE if fp8 else (torch.bfloat16,)):
        raise ValueError(
            f"the cache holds {'E4M3' if fp8 else 'BF16'} rows and cannot be "
            f"{cache.dtype}."
        )
    # With fewer than two dimensions, shape[1:] is of one element.
    if block_size < 1 or cache.shape[1:].numel() != block_size * HEAD_DIM.value:
        raise ValueError(
            f"a cache of shape {list(cache.shape)} does not hold blocks of "
            f"{block_size} x 512."
        )
    if fp8:
        cache = cache.view(torch.float8_e4m3fn)
    try:
        blocks = cache.view(cache.shape[0], block_size * HEAD_DIM.value)
        contiguous = blocks.stride(1) == 1
    except RuntimeError:
        contiguous = False
    if not contiguous or (blocks.shape[0] > 1 and blocks.stride(0) < blocks.shape[1]):
        raise ValueError(
            "a block of the cache must be contiguous and alone, strides are "
            f"{cache.stride()}."
        )
    return blocks


def check_indices(**indices: torch.Tensor) -> None:
    """Raise ValueError unless each tensor is one-dimensional, contiguous and int32 or
    int64."""
    for name, index in indices.items():
        if (
            index.dim() != 1
            or not index.is_contiguous()
            or index.dtype not in _INDEX_DTYPES
        ):
            raise ValueError(f"{name} must be a contiguous int32 or int64 vector.")


def check_cos_sin(cos_sin_cache: torch.Tensor) -> None:
    """Raise ValueError unless `cos_sin_cache` is [max_position, 64] fp32 or bf16."""
    if (
        cos_sin_cache.dim() != 2
        or cos_sin_cache.shape[1] != ROPE_DIM.value
        or cos_sin_cache.stride(1) != 1
    ):
        raise ValueError(
            "cos_sin_cache must be [max_position, 64], got "
            f"{list(cos_sin_cache.shape)}."
        )
    if cos_sin_cache.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"cos_sin_cache must be fp32 or bf16, got {cos_sin_cache.dtype}."
        )


def check_block_table(block_table: torch.Tensor) -> None:
    """Raise ValueError unless `block_table` is [requests, blocks] int32 with contiguous
    rows."""
    if (
        block_table.dim() != 2
        or block_table.stride(1) != 1
        or block_table.dtype != torch.int32
    ):
        raise ValueError(
            "block_table must be [requests, blocks] int32 with contiguous rows, got "
            f"{list(block_table.shape)} {block_table.dtype}, strides "
            f"{block_table.stride()}."
        )


def check_packed_blocks(name: str, cache: torch.Tensor) -> None:
    """Raise ValueError unless each block of [blocks, rows, bytes] is in one piece and
    starts where a float32 can."""
    in_one_piece = cache.stride()[1:] == (cache.shape[2], 1)
    if not in_one_piece or cache.stride(0) % 4 or cache.data_ptr() % 4:
        raise ValueError(
            f"a block of {name} must be in one piece and start at a multiple of 4 "
            f"bytes, strides are {cache.stride()}."
        )


def check_norm_weight(weight: torch.Tensor, head_dim: int) -> None:
    """Raise ValueError unless `weight` is [head_dim] bf16 or fp32, contiguous."""
    if (
        weight.shape != (head_dim,)
        or weight.dtype not in (torch.bfloat16, torch.float32)
        or not weight.is_contiguous()
    ):
        raise ValueError(
            f"rms_norm_weight must be [{head_dim}] bf16 or fp32, contiguous, got "
            f"{list(weight.shape)} {weight.dtype}, stride {weight.stride()}."
        )


def check_scale(name: str, scale: float) -> None:
    """Raise ValueError unless `scale` is a float."""
    if not isinstance(scale, float):
        raise ValueError(f"{name} must be a float, got {type(scale).__name__}.")


def check_same_device(device: torch.device, **tensors: torch.Tensor) -> None:
    """Raise ValueError unless all tensors are on `device`."""
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device}, got {tensor.device}.")


def _insert(
    q: torch.Tensor,
    q_out: torch.Tensor,
    kv: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    position_ids: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    cache_block_size: int,
    fp8_scale: float | None = None,
    q_fp8_scale_inv: float | None = None,
) -> None:
    if (
        q.dim() != 3
        or q.shape[2] != HEAD_DIM.value
        or q.stride(2) != 1
        or q.dtype != torch.bfloat16
    ):
        raise ValueError(f"q must be [N, H, 512] bf16, got {list(q.shape)} {q.dtype}.")
    num_tokens, num_heads = q.shape[:2]
    if not 1 <= num_heads <= _MAX_HEADS:
        raise ValueError(f"q must have 1 to {_MAX_HEADS} heads, got {num_heads}.")
    if (
        kv.dim() != 2
        or kv.shape[1] != HEAD_DIM.value
        or kv.stride(1) != 1
        or kv.dtype != torch.bfloat16
    ):
        raise ValueError(f"kv must be [M, 512] bf16, got {list(kv.shape)} {kv.dtype}.")
    check_indices(slot_mapping=slot_mapping, position_ids=position_ids)
    num_slots = slot_mapping.shape[0]
    if (
        not num_slots <= min(num_tokens, kv.shape[0])
        or position_ids.shape[0] < num_tokens
    ):
        raise ValueError(
            f"{num_slots} slots need as many rows of kv (got {kv.shape[0]}) and of q "
            "(got "
            f"{num_tokens}), and q needs as many positions (got "
            f"{position_ids.shape[0]})."
        )
    check_cos_sin(cos_sin_cache)
    k_cache = as_cache_blocks(k_cache, cache_block_size, fp8=fp8_scale is not None)
    check_same_device(
        q.device,
        kv=kv,
        k_cache=k_cache,
        slot_mapping=slot_mapping,
        position_ids=position_ids,
        cos_sin_cache=cos_sin_cache,
    )
    if fp8_scale is not None:
        check_scale("fp8_scale", fp8_scale)
    if q_fp8_scale_inv is not None:
        check_scale("q_fp8_scale_inv", q_fp8_scale_inv)
        check_same_device(q.device, q_fp8=q_out)
        if (
            q_out.shape != q.shape
            or q_out.dtype != torch.float8_e4m3fn
            or q_out.stride(2) != 1
        ):
            raise ValueError(
                f"q_fp8 must be {list(q.shape)} float8_e4m3fn, got {list(q_out.shape)} "
                f"{q_out.dtype}."
            )
    if num_tokens == 0:
        return

    heads = min(_HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
    with torch.cuda.device_of(q):
        _insert_kernel[(num_tokens * (triton.cdiv(num_heads, heads) + 1),)](
            q,
            q.stride(0),
            q.stride(1),
            q_out,
            q_out.stride(0),
            q_out.stride(1),
            kv,
            kv.stride(0),
            k_cache,
            k_cache.stride(0),
            slot_mapping,
            num_slots,
            position_ids,
            cos_sin_cache,
            cos_sin_cache.stride(0),
            fp8_scale,
            q_fp8_scale_inv,
            eps,
            cache_block_size,
            k_cache.shape[0] * cache_block_size,
            NUM_HEADS=num_heads,
            HEADS=heads,
            num_warps=heads,
            enable_fp_fusion=False,
        )


def full_cache_bf16_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    position_ids: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    cache_block_size: int,
) -> None:
    """Norm and rotate `q` in place; rotate `kv` and store it in a BF16 cache.

    Arguments as in the module docstring. Raises ValueError where an argument does not
    match it.
    """
    _insert(
        q,
        q,
        kv,
        k_cache,
        slot_mapping,
        position_ids,
        cos_sin_cache,
        eps,
        cache_block_size,
    )


def full_cache_fp8_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_fp8: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    position_ids: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    fp8_scale: float,
    q_fp8_scale_inv: float,
    eps: float,
    cache_block_size: int,
) -> None:
    """Norm and rotate `q` into `q_fp8`; rotate `kv` and store it in an E4M3 cache.

    `q_fp8` is [N, H, 512] float8_e4m3fn, strided as `q` may be. Other arguments as in
    the module docstring. Raises ValueError where an argument does not match it.
    """
    _insert(
        q,
        q_fp8,
        kv,
        k_cache,
        slot_mapping,
        position_ids,
        cos_sin_cache,
        eps,
        cache_block_size,
        fp8_scale,
        q_fp8_scale_inv,
    )


def full_cache_fp8_insert_bf16_q(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    position_ids: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    fp8_scale: float,
    eps: float,
    cache_block_size: int,
) -> None:
    """Norm and rotate `q` in place; rotate `kv` and store it in an E4M3 cache.

    For attention kernels that read BF16 queries. Arguments as in the module docstring.
    Raises ValueError where an argument does not match it.
    """
    _insert(
        q,
        q,
        kv,
        k_cache,
        slot_mapping,
        position_ids,
        cos_sin_cache,
        eps,
        cache_block_size,
        fp8_scale,
    )


_OPERATORS = {
    full_cache_bf16_insert: (
        "(Tensor! q, Tensor kv, Tensor! k_cache, Tensor slot_mapping, Tensor "
        "position_ids, "
        "Tensor cos_sin_cache, float eps, int cache_block_size) -> ()"
    ),
    full_cache_fp8_insert: (
        "(Tensor q, Tensor kv, Tensor! q_fp8, Tensor! k_cache, Tensor slot_mapping, "
        "Tensor position_ids, Tensor cos_sin_cache, float fp8_scale, "
        "float q_fp8_scale_inv, float eps, int cache_block_size) -> ()"
    ),
    full_cache_fp8_insert_bf16_q: (
        "(Tensor! q, Tensor kv, Tensor! k_cache, Tensor slot_mapping, Tensor "
        "position_ids, "
        "Tensor cos_sin_cache, float fp8_scale, float eps, int cache_block_size) -> ()"
    ),
}
# Holds the registrations: they end when the object is collected.
_library = torch.library.Library("mla_kernels", "FRAGMENT")


def _serve(function, *args) -> None:
    """The kernel for all backends: `function`, unless the native kernel only waited to
    be loaded."""
    # Not loaded when this module is: which GPU there is cannot be asked without
    # initialising CUDA.
    if args[0].is_cuda and native.load(args[0].device):
        getattr(torch.ops.mla_kernels, function.__name__)(*args)
    else:
        function(*args)


def _register() -> None:
    for function, schema in _OPERATORS.items():
        name = function.__name__
        # The package may be imported under two names (alone, and as part of vLLM) in
        # one process.
        if hasattr(torch.ops.mla_kernels, name):
            continue
        _library.define(name + schema)
        _library.impl(
            name, functools.partial(_serve, function), "CompositeExplicitAutograd"
        )
        torch.library.register_fake(
            f"mla_kernels::{name}", lambda *args, **kwargs: None, lib=_library
        )


def keep_triton() -> None:
    """Let Triton serve every GPU although the native library is loaded; the bits are
    the same."""
    for function in _OPERATORS:
        _library.impl(function.__name__, function, "CUDA", allow_override=True)


_register()
