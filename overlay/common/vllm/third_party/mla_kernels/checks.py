# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""What the kernels compute, by definition in float64, and checks of each against it on
small inputs.

`kernel_checks` runs anywhere: on the GPU, or on the CPU through Triton's interpreter.
"""

from collections.abc import Callable

import torch

from . import (
    compress_norm_rope_store,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    sparse_mla,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
EPS, SCALE, KV_SCALE = 1e-6, 512**-0.5, 0.0625
# Relative error of a whole result. Rounding it to BF16 costs 1.66e-3, and softmax
# weights may round too.
TOLERANCE = 2e-3
# The sm90 provider's kernel follows from the number of tokens: with so many copies of
# the 2 or 3 that are checked, each of its kernels serves a call. Those of larger calls
# round weights over BF16 rows to BF16, and values of 656-byte rows, which adds 2.3e-3
# to an output and 4e-3 to lse at most (bounds of tests/kernels).
COPIES_OF_2, COPIES_OF_3 = (1, 10, 71), (1, 33, 47)
TOLERANCE_OF_COPIES = 5e-3
# Of the worst of many heads and tokens, so that none hides among the others.
TOLERANCE_OF_HEAD = 1e-2


class Failed(Exception):
    """A check found something wrong; the text says what."""


def expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Failed(otherwise)


def bounded(what: str, error: torch.Tensor, tolerance: float) -> None:
    expect(error <= tolerance, f"{what} {error:.1e}, more than {tolerance:.0e}")


def relative_error(
    found: torch.Tensor, expected: torch.Tensor, tolerance: float
) -> float:
    error = (found.cpu().double() - expected).norm() / expected.norm()
    bounded("relative error", error, tolerance)
    return float(error)


def attention_error(found: torch.Tensor, expected: torch.Tensor, copies: int) -> float:
    """Of the outputs [tokens, ..., 512] of so many copies of the tokens of
    `expected`."""
    each = found.cpu().double().unflatten(0, (copies, len(expected)))
    off, size = (each - expected).norm(dim=-1), expected.norm(dim=-1)  # of heads
    error = off.norm() / size.norm() / copies**0.5
    tolerance = TOLERANCE if copies == 1 else TOLERANCE_OF_COPIES
    bounded("relative error", error, tolerance)
    bounded("relative error of a head", (off / size).max(), TOLERANCE_OF_HEAD)
    return float(error)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Interleaved RoPE on the last 64 columns of `x` [tokens, ..., 512] by `cos_sin`
    [tokens, 64], float64."""
    cos, sin = cos_sin.double().view(len(x), *[1] * (x.dim() - 2), 64).chunk(2, -1)
    even, odd = x[..., 448::2], x[..., 449::2]
    tail = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., :448], tail), -1)


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS)


def stored(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What float64 rows are after a trip through the cache."""
    if dtype == BF16:
        return rows.to(BF16).double()
    return (rows / KV_SCALE).clamp(-448, 448).float().to(E4M3).double() * KV_SCALE


def compressed_rows(
    states: torch.Tensor, norm: torch.Tensor, cos_sin: torch.Tensor, ratio: int
) -> torch.Tensor:
    """What a compressor makes of the states [tokens, value or score, width] of a
    sequence, before it is stored."""
    out = []
    for start in range(0, len(states) - ratio + 1, ratio):
        window = states[start : start + ratio].double()
        if ratio == 4:
            # The four tokens before give the first 512 channels, these the second.
            before = states[max(0, start - 4) : start].double()
            window = torch.cat((before[..., :512], window[..., 512:]))
        out.append((window[:, 0] * window[:, 1].softmax(0)).sum(0))
    first = torch.arange(len(out)) * ratio
    return rotate(normed(torch.stack(out)) * norm.double(), cos_sin[first])


class Sequence:
    """One request of `length` tokens in paged caches whose blocks lie in any order; NaN
    where nothing is."""

    def __init__(self, length: int, heads: int, ratio: int, dtype: torch.dtype):
        gen = torch.Generator().manual_seed(ratio)
        self.length, self.ratio, self.dtype, self.gen = length, ratio, dtype, gen
        self.q = torch.randn(length, heads, 512, generator=gen).to(BF16)
        self.kv = torch.randn(length, 512, generator=gen).to(BF16)
        self.sink = torch.randn(heads, generator=gen)
        angle = torch.rand(length, 32, generator=gen) * 6.28
        self.cos_sin = torch.cat((angle.cos(), angle.sin()), -1)
        self.window, self.window_table = self.pages(64, 64, 512, dtype)
        self.rows = self.rows_table = None
        if ratio > 1:
            self.rows, self.rows_table = self.pages(256, 256 // ratio, 512, dtype)
            # Partial states: [values | scores], twice as wide where windows overlap.
            width = 1024 if ratio == 4 else 512
            self.states = torch.randn(length, 2, width, generator=gen)
            block = 4 if ratio == 4 else 8
            self.state_cache, self.state_table = self.pages(
                block, block, 2 * width, torch.float32
            )
            position = torch.arange(length)
            blocks = self.state_table.cpu()[0].long()[position // block]
            self.state_cache[blocks.to(DEVICE), (position % block).to(DEVICE)] = (
                self.states.flatten(1).to(DEVICE)
            )
            self.norm = torch.rand(512, generator=gen) + 0.5

    def pages(
        self, tokens: int, rows: int, width: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = -(-self.length // tokens)
        table = (
            torch.randperm(blocks + 2, generator=self.gen)[None, :blocks]
            .int()
            .to(DEVICE)
        )
        cache = torch.full((blocks + 2, rows, width), float("nan")).to(dtype).to(DEVICE)
        return (cache.view(torch.uint8) if dtype == E4M3 else cache), table

    def slots(self, table: torch.Tensor, rows: int, ratio: int = 1) -> torch.Tensor:
        row = torch.arange(self.length) // ratio
        return (table.cpu()[0].long()[row // rows] * rows + row % rows).to(DEVICE)

    def compressed(self) -> torch.Tensor:
        return compressed_rows(self.states, self.norm, self.cos_sin, self.ratio)


def sequence_attention(
    seq: Sequence, picked: torch.Tensor | None, first: int, q_dtype: torch.dtype
) -> torch.Tensor:
    """Attention of the tokens from `first` on over the last 128 tokens and compressed
    rows, in float64."""
    query = rotate(normed(seq.q.double()), seq.cos_sin).to(q_dtype).double()
    window = stored(rotate(seq.kv.double(), seq.cos_sin), seq.dtype)
    rows = stored(seq.compressed(), seq.dtype) if seq.ratio > 1 else None
    out = []
    for position in range(first, seq.length):
        keys = window[max(0, position - 127) : position + 1]
        if rows is not None:
            count = (position + 1) // seq.ratio
            chosen = torch.arange(count) if picked is None else picked[position - first]
            keys = torch.cat((keys, rows[chosen[chosen >= 0].long()]))
        scores = query[position] @ keys.T * SCALE
        # The sink is one more key that has no value.
        weights = torch.cat((scores, seq.sink.double()[:, None]), 1).softmax(1)[:, :-1]
        out.append(weights @ keys)
    return torch.stack(out)


def check_insert(op: str, dtype: torch.dtype) -> str:
    seq = Sequence(length=12, heads=6, ratio=1, dtype=dtype)
    slots = seq.slots(seq.window_table, 64)
    slots[5] = -1  # padding: no row is stored
    q = seq.q.clone().to(DEVICE)
    q_out, q_scale = q, 1.0
    before, scales = [q, seq.kv.to(DEVICE)], [KV_SCALE]
    if op == "full_cache_fp8_insert":
        q_scale = 4.0
        q_out = torch.empty(q.shape, dtype=E4M3, device=DEVICE)
        before.append(q_out)
        scales.append(q_scale)
    run = getattr(torch.ops.mla_kernels, op)
    positions = torch.arange(seq.length, device=DEVICE)
    scales = scales if dtype == E4M3 else []
    run(*before, seq.window, slots, positions, seq.cos_sin.to(DEVICE), *scales, EPS, 64)

    query = rotate(normed(seq.q.double()), seq.cos_sin)
    # Rounding to E4M3 costs 2^-4 at most, 2.7% in the mean; to BF16 a sixteenth of
    # that.
    q_error = relative_error(
        q_out.float() / q_scale, query, 3e-2 if q_out.dtype == E4M3 else TOLERANCE
    )
    cache = seq.window.view(dtype).flatten(0, 1).cpu().double() * (
        KV_SCALE if dtype == E4M3 else 1
    )
    written = torch.zeros(len(cache), dtype=torch.bool)
    written[slots[slots >= 0].cpu()] = True
    right = not cache[written].isnan().any() and bool(cache[~written].isnan().all())
    expect(right, "other rows of the cache are written than the slots say")
    expected = stored(rotate(seq.kv.double(), seq.cos_sin), dtype)[slots.cpu() >= 0]
    row_error = relative_error(cache[slots[slots >= 0].cpu()], expected, TOLERANCE)
    return f"error of q {q_error:.1e}, of rows {row_error:.1e}"


def check_compressor(ratio: int, dtype: torch.dtype) -> str:
    seq = Sequence(length=ratio * 3 + 1, heads=1, ratio=ratio, dtype=dtype)
    compress_norm_rope_store(
        seq.state_cache,
        torch.zeros(seq.length, dtype=torch.int32, device=DEVICE),
        torch.arange(seq.length, device=DEVICE),
        torch.zeros(seq.length, dtype=torch.int64, device=DEVICE),
        seq.state_table,
        seq.cos_sin.to(DEVICE),
        seq.rows,
        seq.slots(seq.rows_table, 256 // ratio, ratio),
        seq.norm.to(DEVICE),
        EPS,
        ratio,
        None if dtype == BF16 else KV_SCALE,
    )
    slots = seq.slots(seq.rows_table, 256 // ratio, ratio)[ratio - 1 :: ratio][:3].cpu()
    rows = seq.rows.view(dtype).flatten(0, 1).cpu().double() * (
        KV_SCALE if dtype == E4M3 else 1
    )
    error = relative_error(rows[slots], stored(seq.compressed(), dtype), TOLERANCE)
    return f"3 rows, error {error:.1e}"


def check_sparse_mla(
    provider: str,
    heads: int,
    q_dtype: torch.dtype,
    dtype: torch.dtype,
    copies: tuple[int, ...] | None = None,
) -> str:
    gen = torch.Generator().manual_seed(heads)
    tokens, width = 2, 128 + 64
    query = torch.randn(tokens, 1, heads, 512, generator=gen).to(q_dtype).to(DEVICE)
    pools = [
        torch.randn(6, 1, page, 512, generator=gen).to(dtype).to(DEVICE)
        for page in (64, 32)
    ]
    indices = torch.randint(
        0, 192, (tokens, width), generator=gen, dtype=torch.int32
    ).to(DEVICE)
    lens = torch.tensor([width, 128 + 7], dtype=torch.int32, device=DEVICE)
    seen = torch.tensor([1000, 60], dtype=torch.int32, device=DEVICE)
    sinks = torch.randn(heads, generator=gen).to(DEVICE)

    def call(provider: str, times: int) -> torch.Tensor:
        return sparse_mla(
            # E4M3 is copied as bytes.
            query.view(torch.uint8).repeat(times, 1, 1, 1).view(q_dtype),
            pools[0],
            None,
            indices.repeat(times, 1),
            pools[1],
            lens.repeat(times),
            seen.repeat(times),
            None,
            SCALE,
            1.0,
            sinks,
            provider=provider,
        )

    expected = call("reference", 1).cpu().double()
    # Both results are rounded to BF16.
    error = max(
        attention_error(call(provider, times), expected, times)
        for times in copies or (COPIES_OF_2 if provider == "sm90" else (1,))
    )
    return f"error to the reference {error:.1e}"


def _packed(rows: str, gen: torch.Generator) -> torch.Tensor:
    """A cache as `flash_mla_with_kvcache` takes it, 4 blocks of 16 random rows."""
    blocks, page, width = 4, 16, 584 if rows == "v4" else 656
    noise = torch.randn(blocks, page, 512, generator=gen, dtype=torch.float32)
    nope, rope = noise.to(E4M3).view(torch.uint8), noise[..., :64].to(BF16)
    rope = rope.view(torch.uint8)
    if rows == "v4":
        scales = torch.randint(124, 130, (blocks, page * 8), generator=gen)
        values = torch.cat((nope[..., :448], rope), -1).flatten(1)
        cache = torch.cat((values, scales.to(torch.uint8)), -1)
    else:
        scales = torch.rand(blocks, page, 4, generator=gen, dtype=torch.float32) + 0.1
        cache = torch.cat((nope, scales.view(torch.uint8), rope), -1)
    return cache.view(blocks, page, 1, width)


def check_flash_mla(
    provider: str, rows: str, heads: int, copies: tuple[int, ...] | None = None
) -> str:
    """Calls over `rows` ("v4", "v32", "bf16" of 512 or "bf16-576") with missing rows,
    lengths and sinks."""
    dims = 512 if rows in ("v4", "bf16") else 576
    with torch.device("cpu"):  # vLLM makes layers under another default
        gen = torch.Generator().manual_seed(heads)
        query = torch.randn(3, heads, dims, generator=gen, dtype=torch.float32)
        indices = torch.randint(-8, 64, (2, 3, 1, 128), generator=gen).int()
        lengths = torch.tensor([[128, 77, 9], [0, 128, 30]], dtype=torch.int32)
        sinks = torch.randn(heads, generator=gen, dtype=torch.float32)
        if rows in ("v4", "v32"):
            caches = [_packed(rows, gen) for _ in range(2)]
        else:
            noise = torch.randn(64, 1, dims, generator=gen, dtype=torch.float32)
            caches = [noise.to(BF16)]

    def call(provider: str, device: torch.device, times: int) -> list[torch.Tensor]:
        q, picked, some, *pools = (
            x.to(device) for x in (query.to(BF16), indices, lengths, *caches)
        )
        q, picked = q.repeat(times, 1, 1), picked.repeat(1, times, 1, 1)
        some = some.repeat(1, times)
        rest = {"attn_sink": sinks.to(device), "provider": provider}
        if len(pools) == 1:
            return flash_mla_sparse_fwd(
                q, pools[0], picked[0], dims**-0.5, topk_length=some[0], **rest
            )
        return flash_mla_with_kvcache(
            q[:, None],
            pools[0],
            block_table=None,
            cache_seqlens=None,
            head_dim_v=512,
            tile_scheduler_metadata=None,
            is_fp8_kvcache=True,
            indices=picked[0],
            topk_length=some[0],
            extra_k_cache=pools[1],
            extra_indices_in_kvcache=picked[1],
            extra_topk_length=some[1],
            **rest,
        )

    # On the CPU, where nobody has made float32 less than it is.
    wanted, *wanted_logits = call("reference", torch.device("cpu"), 1)
    error = 0.0
    for times in copies or (COPIES_OF_3 if provider == "sm90" else (1,)):
        tolerance = TOLERANCE if times == 1 else TOLERANCE_OF_COPIES
        found, *logits = call(provider, DEVICE, times)
        names = ("max_logits", "lse")[-len(logits) :]
        for name, x, want in zip(names, logits, wanted_logits, strict=True):
            off = (x.cpu() - want.repeat(times, *[1] * (want.dim() - 1))).abs().max()
            expect(
                float(off) <= tolerance,
                f"{name} is {float(off):.1e} off, more than {tolerance:.0e}, in "
                f"{3 * times} tokens",
            )
        error = max(error, attention_error(found, wanted.double(), times))
    return f"error to the reference {error:.1e}"


def kernel_checks(providers: list[str]) -> list[tuple[str, Callable[..., str], tuple]]:
    """(label, function, arguments) of each check; the function returns what it
    measured, or raises `Failed`."""
    checks: list[tuple[str, Callable[..., str], tuple]] = []
    for op in (
        "full_cache_bf16_insert",
        "full_cache_fp8_insert_bf16_q",
        "full_cache_fp8_insert",
    ):
        checks.append((op, check_insert, (op, BF16 if "bf16_insert" in op else E4M3)))
    for name, dtype in (("BF16", BF16), ("FP8", E4M3)):
        checks += [
            (f"compressor, ratio {r}, {name}", check_compressor, (r, dtype))
            for r in (4, 128)
        ]
    formats = (
        ("BF16", BF16, BF16),
        ("FP8 cache", BF16, E4M3),
        ("FP8 cache and q", E4M3, E4M3),
    )
    for provider in providers:
        for heads in (8, 64, 128):
            # FlashInfer takes query and rows of one dtype.
            for kind, q, dtype in (
                f for f in formats if provider != "flashinfer" or f[1] == f[2]
            ):
                label = f"{provider}, {heads} heads, {kind}"
                checks.append((label, check_sparse_mla, (provider, heads, q, dtype)))
        if provider != "flashinfer":  # which has not FlashMLA's calls
            checks += [
                (
                    f"{provider}, {heads} heads, FlashMLA's call, {rows} rows",
                    check_flash_mla,
                    (provider, rows, heads),
                )
                for rows in ("v4", "v32", "bf16", "bf16-576")
                for heads in ((8, 32, 128) if DEVICE.type == "cuda" else (8,))
            ]
    return checks
