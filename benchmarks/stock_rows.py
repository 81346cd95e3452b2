#!/usr/bin/env python3
"""FlashMLA's two sparse calls over the rows that vLLM writes: the sm90 provider against FlashMLA, in one run.

    python benchmarks/stock_rows.py --out benchmarks/results/stock_rows_h200.json

Needs a Hopper GPU and a vLLM with the overlay applied (its wheel carries FlashMLA). Both read the same cache
with the same indices; FlashMLA runs at the 64 or 128 heads it pads to, ours at the heads as they are. Outputs
are compared. Times are medians of CUDA-graph replays, in turns; a replay makes several calls, each with rows of
its own drawn over a cache of 2^20 rows, so that nothing is in the L2 cache. Prefill of 656-byte rows is compared
with FlashMLA's decode call on all tokens at once, which is what vLLM does below 32 heads; what it does from
there on, a gather before `flash_mla_sparse_fwd`, is not measured here, nor is that of 584-byte rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_watch import Watch
from sparse_mla import PAGE, PAGES, ceilings, drawn, lengths
from timing import captured, in_turns, provenance
from vllm.third_party.mla_kernels import flash_mla, native
from vllm.v1.attention.ops import flashmla as stock

DEVICE = "cuda"
LARGEST_DIFFERENCE = 2e-2
# By the name of a format: dimensions of a key, bytes of a row, keys of a token.
ROWS = {"584": (512, 584, 640), "656": (576, 656, 2048), "576": (576, 1152, 2048)}
HEADS = (8, 16, 32, 64, 128)
DECODE_TOKENS, PREFILL_TOKENS = (1, 16, 128, 512), 4096
V4_PRO_KEYS, WINDOW = 1152, 128


def cache_of(rows: str) -> torch.Tensor:
    """Random finite rows, 2^20 of them."""
    nope = torch.randn(PAGES // 16, PAGE, 512, device=DEVICE).mul_(64).clamp_(-448, 448).to(torch.float8_e4m3fn)
    nope = nope.view(torch.uint8).repeat(16, 1, 1)
    rope = torch.randn(PAGES, PAGE, 64, device=DEVICE).bfloat16()
    if rows == "576":
        wide = nope.view(torch.float8_e4m3fn).bfloat16() / 64
        return torch.cat((wide, rope), -1).view(-1, 1, 576)
    if rows == "656":
        scales = torch.rand(PAGES, PAGE, 4, device=DEVICE) / 64
        parts = (nope, scales.view(torch.uint8), rope.view(torch.uint8))
        return torch.cat(parts, -1)[:, :, None]
    block = torch.empty(PAGES, -(-PAGE * 584 // 576) * 576, dtype=torch.uint8, device=DEVICE)
    values = block[:, : PAGE * 576].unflatten(1, (PAGE, 576))
    values[..., :448], values[..., 448:] = nope[..., :448], rope.view(torch.uint8)
    exponents = torch.randint(119, 123, (PAGES, PAGE * 8), dtype=torch.uint8, device=DEVICE)
    block[:, PAGE * 576 : PAGE * 584] = exponents
    return block.as_strided((PAGES, PAGE, 1, 584), (block.shape[1], 584, 584, 1))


def call_of(
    module: Any, rows: str, cache: torch.Tensor, query: torch.Tensor, indices: torch.Tensor, sinks: torch.Tensor
) -> tuple[Callable[[int], object], torch.Tensor]:
    """A function of the number of a call, and where its output is."""
    tokens, heads, dims = query.shape
    out = torch.full((tokens, heads, 512), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    if rows == "576":
        return lambda i: module.flash_mla_sparse_fwd(query, cache, indices[i, :, None], dims**-0.5, out=out), out
    plan = stock.get_mla_metadata()[0]  # made by the first call, shared by the others, as vLLM does in a step
    common = dict(
        q=query[:, None], k_cache=cache, block_table=None, cache_seqlens=None, head_dim_v=512,
        tile_scheduler_metadata=plan, softmax_scale=dims**-0.5, is_fp8_kvcache=True, out=out[:, None],
    )  # fmt: skip
    if rows == "656":
        return lambda i: module.flash_mla_with_kvcache(**common, indices=indices[i, :, None]), out
    parts = indices.split((WINDOW, indices.shape[-1] - WINDOW), -1)
    window, picked = (part[:, :, None].contiguous() for part in parts)
    of = [lengths(part.shape[-1]).repeat(tokens) for part in (window, picked)]
    return lambda i: module.flash_mla_with_kvcache(
        **common, indices=window[i], topk_length=of[0], attn_sink=sinks, extra_k_cache=cache,
        extra_indices_in_kvcache=picked[i], extra_topk_length=of[1],
    ), out  # fmt: skip


def cases() -> Iterator[tuple[str, str, int, int, int]]:
    """Rows, phase, heads, tokens and keys of a token."""
    for rows, (_, _, keys) in ROWS.items():
        for heads in HEADS:
            of = V4_PRO_KEYS if rows == "584" and heads == 128 else keys
            for tokens in DECODE_TOKENS:
                yield rows, "decode", heads, tokens, of
            if rows == "576" or (rows == "656" and heads < 32):
                yield rows, "prefill", heads, PREFILL_TOKENS, of


def measure(ceiling: dict[str, float], watch: Watch, only: list[str]) -> Iterator[dict[str, Any]]:
    cache, of = None, None
    for rows, phase, heads, tokens, keys in cases():
        if rows not in only:
            continue
        if of != rows:
            del cache
            cache, of = cache_of(rows), rows
        began = time.monotonic()
        dims, row_bytes, _ = ROWS[rows]
        calls = 20 if tokens <= 128 else 6 if phase == "decode" else 2
        padded = torch.randn(tokens, max(64, heads), dims, device=DEVICE).bfloat16()
        sinks = torch.randn(max(64, heads), device=DEVICE)
        indices = drawn(calls, tokens, keys)
        theirs, truth = call_of(stock, rows, cache, padded, indices, sinks)
        query = padded[:, :heads].contiguous()
        ours, out = call_of(flash_mla, rows, cache, query, indices, sinks[:heads].contiguous())
        theirs(0), ours(0)
        truth = truth[:, :heads].float()
        difference = float((out.float() - truth).norm() / truth.norm())
        if not difference < LARGEST_DIFFERENCE:
            sys.exit(
                f"error: {rows}-byte rows, {heads} heads, {tokens} tokens: outputs are {difference:.2g} away from "
                "FlashMLA's, so nothing is compared."
            )
        flashmla_us, us = in_turns(captured(theirs, calls), captured(ours, calls))
        moved = tokens * (keys * row_bytes + heads * (dims + 512) * 2)
        products = 2 * tokens * keys * heads * (dims + 512)
        floor = max(moved / ceiling["copy_tb_s"], products / ceiling["bf16_product_tflop_s"]) / 1e6
        yield {
            "rows": rows, "phase": phase, "heads": heads, "tokens": tokens, "keys": keys, "us": round(us, 2),
            "flashmla_us": round(flashmla_us, 2), "speedup": round(flashmla_us / us, 3),
            "roofline_share": round(floor / us, 3), "difference": round(difference, 5),
            "gpu": watch.summary(began),
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON with every figure")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="formats (default: all)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("error: this benchmark compares with FlashMLA on a Hopper GPU, and there is none.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    measured = ceilings()
    print("rows  phase    heads tokens  keys        us   FlashMLA  speedup  share", flush=True)
    results = []
    with Watch() as watch:
        for row in measure(measured, watch, arguments.rows):
            results.append(row)
            print("{rows:6}{phase:8}{heads:6}{tokens:7}{keys:6}{us:10.1f}{flashmla_us:11.1f}{speedup:9.2f}"
                  "{roofline_share:7.2f}".format(**row), flush=True)  # fmt: skip
        report = {
            **provenance(),
            "native_build": native.build_info(native.LIBRARY),
            "ceilings": measured,
            "gpu_meanwhile": watch.summary(),
            "results": results,
        }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
