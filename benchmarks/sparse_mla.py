#!/usr/bin/env python3
"""Sparse MLA kernels of DeepSeek V4: every provider here against FlashMLA, in one run on one GPU.

    python benchmarks/sparse_mla.py --out benchmarks/results/sparse_mla.json

Needs a Hopper GPU and a vLLM with the overlay applied (its wheel carries FlashMLA). FlashMLA runs at the 64 or
128 heads it pads to, decode on its `fp8_ds_mla` cache, prefill on BF16 rows that were gathered beforehand (the
gather is not counted). Times are medians of CUDA-graph replays, in turns with FlashMLA's; a replay makes CALLS
calls (prefill 3), each with rows of its own drawn at random from pools larger than the L2 cache. The ceilings are
measured in the same run; the share of the roofline is the time that the bytes or the products need at them,
whichever is longer, over the time taken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from timing import CALLS, REPLAYS, captured, copy_tb_s, in_turns, microseconds, provenance
from vllm.third_party.dsv4_kernels import native, sparse_mla
from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

DEVICE = "cuda"
PAGE, HEAD_DIM, WINDOW = 64, 512, 128
PAGES = 1 << 14  # 2^20 rows: 0.5 GiB of E4M3, 1 GiB of BF16
SCALE = HEAD_DIM**-0.5
DECODE_TOKENS = (1, 16, 128, 512)
PREFILL_TOKENS = 4096
# Heads, and how many compressed rows a token picks: V4-Flash up to 64 heads, V4-Pro at 128.
TOP_K = {8: 512, 16: 512, 32: 512, 64: 512, 128: 1024}
CACHES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}


def ceilings() -> dict[str, float]:
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = microseconds(lambda _: a @ b, 3)
    return {
        "copy_tb_s": copy_tb_s(),
        "bf16_product_tflop_s": 2 * 8192**3 / product / 1e6,
    }


class Inputs:
    """Queries, rows and lengths of CALLS calls of one shape; every token has all its keys."""

    def __init__(self, tokens: int, heads: int, top_k: int, calls: int = CALLS) -> None:
        self.tokens, self.heads, self.width = tokens, heads, WINDOW + top_k
        self.query = torch.randn(tokens, heads, HEAD_DIM, device=DEVICE).bfloat16()
        shape = (calls, tokens, self.width)
        self.indices = torch.randint(0, PAGES * PAGE, shape, dtype=torch.int32, device=DEVICE)
        self.lens = torch.full((tokens,), self.width, dtype=torch.int32, device=DEVICE)
        self.sinks = torch.randn(heads, device=DEVICE)
        self.out = torch.empty_like(self.query)

    def provider(self, name: str, pool: torch.Tensor) -> Callable[[int], object]:
        pool = pool.unsqueeze(2)
        return lambda i: sparse_mla(
            self.query[:, None], pool, None, self.indices[i], pool, self.lens, self.lens, out=self.out[:, None],
            bmm1_scale=SCALE, sinks=self.sinks, kv_layout="NHD", provider=name,
        )  # fmt: skip

    def flashmla_decode(self, pool: torch.Tensor) -> Callable[[int], object]:
        plan = get_mla_metadata()[0]  # made by the first call, shared by the others, as vLLM does in a step
        window = self.indices[:, :, None, :WINDOW].contiguous()
        picked = self.indices[:, :, None, WINDOW:].contiguous()
        full = torch.full_like(self.lens, WINDOW), self.lens - WINDOW
        return lambda i: flash_mla_with_kvcache(
            q=self.query[:, None], k_cache=pool, block_table=None, head_dim_v=HEAD_DIM, cache_seqlens=None,
            tile_scheduler_metadata=plan, is_fp8_kvcache=True, indices=window[i], topk_length=full[0],
            softmax_scale=SCALE, attn_sink=self.sinks, extra_k_cache=pool,
            extra_indices_in_kvcache=picked[i], extra_topk_length=full[1], out=self.out[:, None],
        )  # fmt: skip

    def flashmla_prefill(self, rows: torch.Tensor) -> Callable[[int], object]:
        return lambda i: flash_mla_sparse_fwd(
            q=self.query, kv=rows, indices=self.indices[i, :, None], sm_scale=SCALE, attn_sink=self.sinks,
            topk_length=self.lens, out=self.out,
        )  # fmt: skip


def fp8_ds_mla_pool() -> torch.Tensor:
    """FlashMLA's cache with random finite rows: 448 E4M3 + 64 BF16 a row, then 8 scale bytes (2^0) a row."""
    pool = torch.empty(PAGES, PAGE * 584, dtype=torch.uint8, device=DEVICE)
    rows = pool[:, : PAGE * 576].unflatten(1, (PAGE, 576))
    nope = torch.randn(PAGE, 448, device=DEVICE).to(torch.float8_e4m3fn).view(torch.uint8)
    rope = torch.randn(PAGE, 64, device=DEVICE).bfloat16().view(torch.uint8)
    rows[..., :448], rows[..., 448:] = nope, rope
    pool[:, PAGE * 576 :] = 127
    return pool.view(PAGES, PAGE, 1, 584)


def measure(
    providers: list[str], pools: dict[str, torch.Tensor], packed: torch.Tensor, ceiling: dict[str, float]
) -> list[dict]:
    results = []

    def compare(phase: str, inputs: Inputs, stock: Callable[[int], object], calls: int) -> None:
        flashmla = captured(stock, calls)
        keys = inputs.tokens * inputs.width
        for cache, name in itertools.product(pools, providers):
            flashmla_us, us = in_turns(flashmla, captured(inputs.provider(name, pools[cache]), calls))
            seconds = us / 1e6
            # Rows, queries and outputs pass through memory once; both products count for the real heads alone.
            moved = keys * HEAD_DIM * CACHES[cache].itemsize + 2 * inputs.query.nbytes
            products = 4 * keys * HEAD_DIM * inputs.heads
            floor = max(moved / ceiling["copy_tb_s"], products / ceiling["bf16_product_tflop_s"])
            row = {
                "phase": phase,
                "cache": cache,
                "heads": inputs.heads,
                "tokens": inputs.tokens,
                "keys_a_token": inputs.width,
                "provider": name,
                "us": round(us, 2),
                "flashmla_us": round(flashmla_us, 2),
                "speedup": round(flashmla_us / us, 3),
                "tb_s": round(keys * HEAD_DIM * CACHES[cache].itemsize / seconds / 1e12, 3),
                "tflop_s": round(products / seconds / 1e12, 1),
                "roofline_share": round(floor / seconds / 1e12, 3),
            }
            results.append(row)
            print("{phase:8}{cache:6}{heads:6}{tokens:7}  {provider:10}{us:9.1f}{flashmla_us:11.1f}"
                  "{speedup:9.2f}{tb_s:8.2f}{tflop_s:9.1f}{roofline_share:10.2f}"
                  .format(**row), flush=True)  # fmt: skip

    print("phase   cache  heads tokens  provider         us   FlashMLA  speedup    TB/s  TFLOP/s  roofline")
    for heads, top_k in TOP_K.items():
        for tokens in DECODE_TOKENS:
            stock = Inputs(tokens, max(64, heads), top_k).flashmla_decode(packed)
            compare("decode", Inputs(tokens, heads, top_k), stock, CALLS)
    rows = pools["bf16"].view(-1, 1, HEAD_DIM)
    for heads in TOP_K:
        stock = Inputs(PREFILL_TOKENS, max(64, heads), 512, 3).flashmla_prefill(rows)
        compare("prefill", Inputs(PREFILL_TOKENS, heads, 512, 3), stock, 3)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON with every figure")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("error: this benchmark compares with FlashMLA on a Hopper GPU, and there is none.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    measured = ceilings()
    print({name: round(value, 2) for name, value in measured.items()})
    base = torch.randn(PAGES // 16, PAGE, HEAD_DIM, device=DEVICE).repeat(16, 1, 1)
    pools = {name: base.to(dtype) for name, dtype in CACHES.items()}
    del base
    results = measure(["triton", "sm90"], pools, fp8_ds_mla_pool(), measured)
    report = {
        **provenance(),
        "native_build": native.build_info(native.LIBRARY),
        "method": {"calls_a_graph": CALLS, "replays": REPLAYS, "rows_a_pool": PAGES * PAGE},
        "ceilings": measured,
        "results": results,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
