#!/usr/bin/env python3
"""Sparse MLA kernels of DeepSeek V4: every provider here against FlashMLA, in one run on one GPU.

    python benchmarks/sparse_mla.py --out benchmarks/results/sparse_mla.json

Needs a Hopper GPU and a vLLM with the overlay applied (its wheel carries FlashMLA). Both read the same rows by the
same queries, which is checked. FlashMLA runs at the 64 or 128 heads it pads to, decode on its `fp8_ds_mla` cache,
prefill on BF16 rows that were gathered beforehand (the gather is not counted). Times are medians of CUDA-graph
replays, in turns with FlashMLA's; a replay makes CALLS calls (prefill 3), each with rows of its own. All of it is
done --rounds times, each with new rows and new graphs. The results are medians of the rounds, beside the figure of
each and the clocks and temperature meanwhile; OUT is written after every round. The ceilings are measured in the
same run; the share of the roofline is the time that the bytes or the products need at them, whichever is longer,
over the time taken.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_watch import Watch
from timing import CALLS, REPLAYS, captured, copy_tb_s, in_turns, microseconds, provenance
from vllm.third_party.mla_kernels import native, sparse_mla
from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

DEVICE = "cuda"
PAGE, HEAD_DIM, ROPE_DIM, WINDOW = 64, 512, 64, 128
PAGES = 1 << 14  # 2^20 rows: 0.5 GiB of E4M3, 1 GiB of BF16
SCALE = HEAD_DIM**-0.5
PREFILL_CALLS, PREFILL_TOKENS = 3, 4096
# Heads, and how many compressed rows a token picks: V4-Flash up to 64 heads, V4-Pro at 128.
TOP_K = {8: 512, 16: 512, 32: 512, 64: 512, 128: 1024}
CACHES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
PROVIDERS = ("triton", "sm90")
LARGEST_DIFFERENCE = 0.1  # of an output from FlashMLA's, relative; the E4M3 cache's RoPE dimensions make 0.02


@dataclasses.dataclass
class Rows:
    """What the tokens of some calls attend to.

    window: int32 `[calls, tokens, 128]` rows of the pool, of which a token has the first `window_lens`.
    picked: int32 `[calls, tokens, top-k]`, of which it has the first `picked_lens`. Lengths: int32 `[tokens]`.
    """

    window: torch.Tensor
    picked: torch.Tensor
    window_lens: torch.Tensor
    picked_lens: torch.Tensor

    @property
    def lens(self) -> torch.Tensor:
        return self.window_lens + self.picked_lens

    def indices(self) -> torch.Tensor:
        """`[calls, tokens, 128 + top-k]`, as `sparse_mla` takes them."""
        return torch.cat((self.window, self.picked), -1)

    def packed(self) -> torch.Tensor:
        """The same with every token's keys first, as FlashMLA's prefill takes them."""
        column = torch.arange(WINDOW + self.picked.shape[-1], device=DEVICE)
        first = self.window_lens[:, None]
        source = torch.where(column < first, column, column + WINDOW - first).clamp_(max=len(column) - 1)
        return self.indices().gather(-1, source.expand(len(self.window), -1, -1))


def lengths(*values: int | torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randint(0, PAGES * PAGE, shape, dtype=torch.int32, device=DEVICE)


def decode_rows(picked_lens: torch.Tensor, top_k: int) -> Rows:
    """A request a token: its window is a run of rows in pages of its own; its picks lie anywhere in the pool."""
    tokens = len(picked_lens)
    pages = torch.randint(0, PAGES, (CALLS, tokens, WINDOW // PAGE + 1), device=DEVICE)
    place = torch.randint(0, PAGE, (CALLS, tokens, 1), device=DEVICE) + torch.arange(WINDOW, device=DEVICE)
    window = pages.gather(-1, place // PAGE) * PAGE + place % PAGE
    return Rows(window.int(), drawn(CALLS, tokens, top_k), torch.full_like(picked_lens, WINDOW), picked_lens)


def full(tokens: int, top_k: int) -> Rows:
    return decode_rows(lengths(top_k).expand(tokens).contiguous(), top_k)


def mixed(tokens: int, top_k: int) -> Rows:
    """Every token has its own number of picks, from none to 1024."""
    del top_k
    return decode_rows(torch.randint(0, 1025, (tokens,), dtype=torch.int32, device=DEVICE), 1024)


def one_long(tokens: int, top_k: int) -> Rows:
    """As in a layer with one row in 128: the one of 65,536 tokens has 512 compressed rows, those of 256 two."""
    del top_k
    picked = lengths(2).repeat(tokens)
    picked[tokens // 3] = 65536 // 128
    return decode_rows(picked, 512)


def scattered(tokens: int, top_k: int) -> Rows:
    rows = [drawn(PREFILL_CALLS, tokens, width) for width in (WINDOW, top_k)]
    return Rows(*rows, *(lengths(width).repeat(tokens) for width in (WINDOW, top_k)))


def of_a_prompt(first: int) -> Callable[[int, int], Rows]:
    """Tokens `first`, `first` + 1, … of one prompt in a layer with one row in 4.

    The window is the run of the last 128 rows up to the token's own; the picks are drawn, without repetition, from
    the rows that are complete by then.
    """

    def rows(tokens: int, top_k: int) -> Rows:
        position = torch.arange(first, first + tokens, device=DEVICE)
        complete = (position + 1) // 4
        window_lens, picked_lens = (position + 1).clamp(max=WINDOW), complete.clamp(max=top_k)
        last = first + tokens
        windows, picks = [], []
        for _ in range(PREFILL_CALLS):
            pages = torch.randperm(PAGES, device=DEVICE)
            own, compressed = pages[: last // PAGE], pages[last // PAGE :]
            place = (position - window_lens + 1)[:, None] + torch.arange(WINDOW, device=DEVICE)
            place.clamp_(max=last - 1)  # behind the lengths
            windows.append(own[place // PAGE] * PAGE + place % PAGE)
            order = torch.rand(tokens, last // 4, device=DEVICE)
            order.masked_fill_(torch.arange(last // 4, device=DEVICE) >= complete[:, None], -1)
            place = order.topk(top_k, -1).indices
            picks.append(compressed[place // PAGE] * PAGE + place % PAGE)
        return Rows(torch.stack(windows).int(), torch.stack(picks).int(), window_lens.int(), picked_lens.int())

    return rows


# What tokens attend to: phase, numbers of tokens, rows, in words.
CASES: dict[str, tuple[str, tuple[int, ...], Callable[[int, int], Rows], str]] = {
    "full": ("decode", (1, 16, 128, 512), full,
             "a request a token, all with 128 + top-k keys; windows are runs of rows, picks lie anywhere"),
    "mixed": ("decode", (128, 512), mixed,
              "a request a token, each with its own number of keys, drawn from 128 to 1152"),
    "one_long": ("decode", (128,), one_long,
                 "C128A layer: one request of 65,536 tokens (640 keys) among 127 of 256 (130 keys)"),
    "prompt": ("prefill", (PREFILL_TOKENS,), of_a_prompt(0),
               "C4A layer: one prompt from its first token on; keys are causal, windows runs of rows"),
    "prompt_end": ("prefill", (PREFILL_TOKENS,), of_a_prompt(65536 - PREFILL_TOKENS),
                   "C4A layer: the last tokens of one prompt of 65,536; keys are causal, windows runs of rows"),
    "scattered": ("prefill", (PREFILL_TOKENS,), scattered,
                  "all rows drawn over a pool of 2^20, which no prompt does: nothing is in the L2 cache"),
}  # fmt: skip


def ceilings() -> dict[str, float]:
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = microseconds(lambda _: a @ b, 3)
    return {
        "copy_tb_s": copy_tb_s(),
        "bf16_product_tflop_s": 2 * 8192**3 / product / 1e6,
    }


class Pools:
    """The same rows in three caches: 448 values that E4M3 holds exactly, and 64 of RoPE."""

    def __init__(self) -> None:
        nope = torch.randn(PAGES // 16, PAGE, HEAD_DIM - ROPE_DIM, device=DEVICE).to(torch.float8_e4m3fn)
        rope = torch.randn(PAGES // 16, PAGE, ROPE_DIM, device=DEVICE).bfloat16()
        rows = torch.cat((nope.bfloat16(), rope), -1).repeat(16, 1, 1)
        self.full = {name: rows.to(dtype) for name, dtype in CACHES.items()}
        # FlashMLA's: 448 E4M3 + 64 BF16 a row; behind a page's rows 8 scale bytes (2^0) a row.
        self.packed = torch.empty(PAGES, PAGE * 584, dtype=torch.uint8, device=DEVICE)
        packed = self.packed[:, : PAGE * 576].unflatten(1, (PAGE, 576))
        packed[..., :448] = nope.view(torch.uint8).repeat(16, 1, 1)
        packed[..., 448:] = rope.view(torch.uint8).repeat(16, 1, 1)
        self.packed[:, PAGE * 576 :] = 127
        self.packed = self.packed.view(PAGES, PAGE, 1, 584)


class Inputs:
    """Queries of one shape, and the calls over its rows."""

    def __init__(self, rows: Rows, heads: int, pools: Pools) -> None:
        self.rows, self.heads, self.pools = rows, heads, pools
        self.tokens = len(rows.window_lens)
        self.padded = torch.randn(self.tokens, max(64, heads), HEAD_DIM, device=DEVICE).bfloat16()
        self.query = self.padded[:, :heads].contiguous()
        self.sinks = torch.randn(max(64, heads), device=DEVICE)
        self.out, self.padded_out = torch.empty_like(self.query), torch.empty_like(self.padded)
        self.keys = int(rows.lens.sum())

    def provider(self, name: str, cache: str) -> Callable[[int], object]:
        pool = self.pools.full[cache].unsqueeze(2)
        indices, lens, seen = self.rows.indices(), self.rows.picked_lens + WINDOW, self.rows.window_lens
        sinks = self.sinks[: self.heads]
        return lambda i: sparse_mla(
            self.query[:, None], pool, None, indices[i], pool, lens, seen, out=self.out[:, None],
            bmm1_scale=SCALE, sinks=sinks, kv_layout="NHD", provider=name,
        )  # fmt: skip

    def flashmla_decode(self) -> Callable[[int], object]:
        plan = get_mla_metadata()[0]  # made by the first call, shared by the others, as vLLM does in a step
        pool, rows = self.pools.packed, self.rows
        window, picked = rows.window[:, :, None].contiguous(), rows.picked[:, :, None].contiguous()
        return lambda i: flash_mla_with_kvcache(
            q=self.padded[:, None], k_cache=pool, block_table=None, head_dim_v=HEAD_DIM, cache_seqlens=None,
            tile_scheduler_metadata=plan, is_fp8_kvcache=True, indices=window[i], topk_length=rows.window_lens,
            softmax_scale=SCALE, attn_sink=self.sinks, extra_k_cache=pool,
            extra_indices_in_kvcache=picked[i], extra_topk_length=rows.picked_lens, out=self.padded_out[:, None],
        )  # fmt: skip

    def flashmla_prefill(self) -> Callable[[int], object]:
        kv, indices, lens = self.pools.full["bf16"].view(-1, 1, HEAD_DIM), self.rows.packed(), self.rows.lens
        return lambda i: flash_mla_sparse_fwd(
            q=self.padded, kv=kv, indices=indices[i, :, None], sm_scale=SCALE, attn_sink=self.sinks,
            topk_length=lens, out=self.padded_out,
        )  # fmt: skip

    def difference(self, provider: Callable[[int], object], flashmla: Callable[[int], object]) -> float:
        """Of the outputs of both, relative; outputs of tokens of different lengths count alike."""
        self.out.fill_(float("nan"))
        provider(0), flashmla(0)
        truth = self.padded_out[:, : self.heads].float()
        apart = (self.out.float() - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
        return float(apart.max())


def measure(pools: Pools, watch: Watch, repeat: int) -> Iterator[dict[str, Any]]:
    """One round: what a measurement is of, and its figures."""
    torch.manual_seed(repeat)
    for heads in TOP_K:
        for case, (phase, numbers, rows, _) in CASES.items():
            for tokens in numbers:
                calls = CALLS if phase == "decode" else PREFILL_CALLS
                inputs = Inputs(rows(tokens, TOP_K[heads]), heads, pools)
                stock = inputs.flashmla_decode() if phase == "decode" else inputs.flashmla_prefill()
                flashmla = captured(stock, calls)
                for cache in CACHES:
                    for name in PROVIDERS:
                        began = time.monotonic()
                        ours = inputs.provider(name, cache)
                        difference = inputs.difference(ours, stock)
                        if not difference < LARGEST_DIFFERENCE:
                            sys.exit(
                                f"error: {case}, {heads} heads, {tokens} tokens: outputs of {name} on {cache} are "
                                f"{difference:.2g} away from FlashMLA's, so nothing is compared."
                            )
                        flashmla_us, us = in_turns(flashmla, captured(ours, calls))
                        yield {
                            "phase": phase, "case": case, "heads": heads, "tokens": tokens, "cache": cache,
                            "provider": name, "keys": inputs.keys, "difference": round(difference, 4),
                            "us": us, "flashmla_us": flashmla_us, "gpu": watch.summary(began),
                        }  # fmt: skip


IDENTITY = ("phase", "case", "heads", "tokens", "cache", "provider")


def merged(rounds: list[list[dict[str, Any]]], ceiling: dict[str, float]) -> list[dict[str, Any]]:
    """A row a measurement: the median of the rounds, and beside it the figure of each."""
    results = []
    for rows in zip(*rounds, strict=True):
        row = {key: rows[0][key] for key in IDENTITY}
        us, flashmla_us, speedup = ([figure(one) for one in rows] for figure in (
            lambda one: one["us"], lambda one: one["flashmla_us"], lambda one: one["flashmla_us"] / one["us"]
        ))  # fmt: skip
        # Rows, queries and outputs pass through memory once; both products count for the real heads alone.
        keys = statistics.mean(one["keys"] for one in rows)
        width = CACHES[row["cache"]].itemsize
        moved = keys * HEAD_DIM * width + 2 * row["tokens"] * row["heads"] * HEAD_DIM * 2
        products = 4 * keys * HEAD_DIM * row["heads"]
        floor = max(moved / ceiling["copy_tb_s"], products / ceiling["bf16_product_tflop_s"])
        seconds = statistics.median(us) / 1e6
        row |= {
            "keys_a_token": round(keys / row["tokens"], 1),
            "us": round(statistics.median(us), 2),
            "flashmla_us": round(statistics.median(flashmla_us), 2),
            "speedup": round(statistics.median(speedup), 3),
            "rounds": {
                "us": [round(value, 2) for value in us],
                "flashmla_us": [round(value, 2) for value in flashmla_us],
                "speedup": [round(value, 3) for value in speedup],
                "gpu": [one["gpu"] for one in rows],
            },
            "difference": max(one["difference"] for one in rows),
            "tb_s": round(keys * HEAD_DIM * width / seconds / 1e12, 3),
            "tflop_s": round(products / seconds / 1e12, 1),
            "roofline_share": round(floor / seconds / 1e12, 3),
        }
        results.append(row)
    return results


def table(results: list[dict[str, Any]]) -> str:
    lines = ["case       cache  heads tokens    keys  provider        us   FlashMLA  speedup  least   most  share"]
    for row in results:
        ratios = row["rounds"]["speedup"]
        lines.append(
            "{case:11}{cache:6}{heads:6}{tokens:7}{keys_a_token:8.0f}  {provider:9}{us:9.1f}{flashmla_us:11.1f}"
            "{speedup:9.2f}".format(**row)
            + f"{min(ratios):7.2f}{max(ratios):7.2f}{row['roofline_share']:7.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON with every figure")
    parser.add_argument("--rounds", type=int, default=3, help="of the whole measurement (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}; give 1 or more.")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("error: this benchmark compares with FlashMLA on a Hopper GPU, and there is none.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    measured = ceilings()
    print({name: round(value, 2) for name, value in measured.items()}, flush=True)
    pools = Pools()
    rounds: list[list[dict[str, Any]]] = []
    with Watch() as watch:
        for repeat in range(arguments.rounds):
            began = time.monotonic()
            rounds.append(list(measure(pools, watch, repeat)))
            results = merged(rounds, measured)
            report = {
                **provenance(),
                "native_build": native.build_info(native.LIBRARY),
                "method": {"calls_a_graph": {"decode": CALLS, "prefill": PREFILL_CALLS}, "replays": REPLAYS,
                           "rounds": len(rounds), "rows_a_pool": PAGES * PAGE},
                "cases": {name: words for name, (*_, words) in CASES.items()},
                "gpu_meanwhile": watch.summary(),
                "ceilings": measured,
                "results": results,
            }  # fmt: skip
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
            print(f"round {len(rounds)} of {arguments.rounds}: {time.monotonic() - began:.0f} s", flush=True)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
