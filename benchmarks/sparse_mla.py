#!/usr/bin/env python3
"""Sparse MLA kernels on Hopper: the sm90 provider against FlashMLA on every format of rows, in one run on one GPU.

    python benchmarks/sparse_mla.py --out benchmarks/results/stock_rows_h200.json

Needs a Hopper GPU and a vLLM with the overlay applied (its wheel carries FlashMLA). Rows: `e4m3` and `bf16` of
the full-width caches, and those of vLLM's own: `584` bytes of DeepSeek V4, the `512` BF16 values that vLLM
makes of these before a prefill, `656` bytes of V3.2 and GLM-5, `576` BF16 values of V3.2. Both read the same
rows by the same queries, which is checked. FlashMLA runs at the 64 or 128 heads it pads to, by the calls that
vLLM makes: decode on the packed rows, and on the same values for full-width ones, which vLLM does not have;
prefill of 584-byte rows, and of 656-byte ones from 32 heads on, by gathering rows into BF16 and
`flash_mla_sparse_fwd`, both counted; of full-width ones on rows that were gathered beforehand.

Times are medians of CUDA-graph replays, in turns with FlashMLA's; a replay makes 20 calls (prefill 3), each
with rows of its own. All of it is done --rounds times, each with new rows and new graphs. The results are
medians of the rounds, beside the figure of each and the clocks and temperature meanwhile; OUT is written after
every round. The ceilings are measured in the same run; the share of the roofline is the time that the bytes or
the products need at them, whichever is longer, over the time taken.

--triton adds the Triton provider's times, --others those of FlashInfer and of vLLM's FlashAttention 3, where they
install and serve such rows. --flashmla DIR needs no vLLM: DIR is the vllm/ of an unpacked wheel,
of which `_flashmla_C.abi3.so` and `third_party/flashmla/flash_mla_interface.py` are loaded; what needs vLLM's
gathers is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import sparse_mla_inputs as inputs
import torch
from e2e import check_out
from gpu_watch import Watch
from sparse_mla_inputs import CALLS, FORMATS, HEADS, PAGE, PAGES, PHASES, PREFILL_CALLS, VALUE_DIM, native
from sparse_mla_others import others
from timing import REPLAYS, captured, copy_tb_s, in_turns, microseconds, provenance

LARGEST_DIFFERENCE = 0.1  # of an output from FlashMLA's, relative; the E4M3 cache's RoPE dimensions make 0.02
IDENTITY = ("rows", "phase", "heads", "tokens", "keys")


def ceilings() -> dict[str, float]:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = microseconds(lambda _: a @ b, 3)
    return {
        "copy_tb_s": copy_tb_s(),
        "bf16_product_tflop_s": 2 * 8192**3 / product / 1e6,
    }


def cases(
    formats: list[str], counts: Iterable[int], pools: inputs.Pools, stock: inputs.Stock
) -> Iterator[tuple[str, inputs.Inputs]]:
    """Rows, and a call over them; formats of one model share queries and indices."""
    for name, phase in PHASES.items():
        for tokens, model in itertools.product(phase.tokens, phase.models):
            drawn: dict[int, inputs.Rows] = {}
            for heads in counts if (wanted := [rows for rows in formats if FORMATS[rows].model == model]) else ():
                top_k = inputs.top_k(model, heads)
                if top_k not in drawn:
                    drawn = {top_k: phase.rows(model, tokens, top_k)}
                case = inputs.Inputs(name, drawn[top_k], model, heads, pools, stock)
                for rows in wanted:
                    yield rows, case


def measure(
    formats: list[str],
    counts: Iterable[int],
    providers: list[str],
    pools: inputs.Pools,
    stock: inputs.Stock,
    watch: Watch,
    repeat: int,
    with_others: bool = False,
) -> Iterator[dict[str, Any]]:
    """One round: what a measurement is of, and its figures. The first provider's time is `us`."""
    torch.manual_seed(repeat)
    for rows, case in cases(formats, counts, pools, stock):
        began = time.monotonic()
        if (flashmla := case.flashmla(rows)) is None:
            continue
        ours = [case.ours(rows, provider) for provider in providers]
        apart = [case.difference(call, flashmla) for call in ours]
        if not max(apart) < LARGEST_DIFFERENCE:
            sys.exit(
                f"error: {case.phase} of {rows} rows, {case.heads} heads, {case.tokens} tokens: outputs of "
                f"{', '.join(providers)} are {', '.join(f'{value:.2g}' for value in apart)} away from FlashMLA's, "
                "so nothing is compared."
            )
        more = others(case, rows, case.without_sinks(rows), LARGEST_DIFFERENCE) if with_others else {}
        calls = [flashmla, *ours, *more.values()]
        flashmla_us, us, *times = in_turns(*(captured(call, case.calls) for call in calls))
        yield {
            "rows": rows, "phase": case.phase, "heads": case.heads, "tokens": case.tokens,
            "keys": case.keys / case.tokens, "us": us, "flashmla_us": flashmla_us,
            **{f"{name}_us": value for name, value in zip([*providers[1:], *more], times, strict=True)},
            "difference": round(apart[0], 5), "gpu": watch.summary(began),
        }  # fmt: skip


def merged(rounds: list[list[dict[str, Any]]], ceiling: dict[str, float]) -> list[dict[str, Any]]:
    """A row a measurement: the median of the rounds, and beside it the figure of each."""
    results = []
    for found in zip(*rounds, strict=True):
        row = {key: found[0][key] for key in IDENTITY}
        row["keys"] = round(statistics.mean(one["keys"] for one in found), 1)
        if row["keys"].is_integer():
            row["keys"] = int(row["keys"])
        times = [key for key in found[0] if key.endswith("us") and all(key in one for one in found)]
        every = {key: [one[key] for one in found] for key in times}
        every["speedup"] = [one["flashmla_us"] / one["us"] for one in found]
        row |= {key: round(statistics.median(values), 3) for key, values in every.items()}
        # Rows, queries and outputs pass through memory once; both products count for the real heads alone.
        of, tokens, heads, keys = FORMATS[row["rows"]], row["tokens"], row["heads"], row["keys"]
        moved = tokens * (keys * of.row_bytes + heads * (of.key_dim + VALUE_DIM) * 2)
        products = 2 * tokens * keys * heads * (of.key_dim + VALUE_DIM)
        floor = max(moved / ceiling["copy_tb_s"], products / ceiling["bf16_product_tflop_s"]) / 1e6
        row["roofline_share"] = round(floor / row["us"], 3)
        row["difference"] = max(one["difference"] for one in found)
        row["rounds"] = {key: [round(value, 3) for value in values] for key, values in every.items()}
        row["rounds"]["gpu"] = [one["gpu"] for one in found]
        results.append(row)
    return results


def table(results: list[dict[str, Any]]) -> str:
    more = sorted({key for row in results for key in row if key.endswith("_us")} - {"flashmla_us"})
    lines = ["rows  phase      heads tokens    keys        us   FlashMLA  speedup  least   most  share"
             + "".join(f"{key.removesuffix('_us'):>11}" for key in more)]  # fmt: skip
    for row in results:
        ratios = row["rounds"]["speedup"]
        lines.append(
            "{rows:6}{phase:10}{heads:6}{tokens:7}{keys:8.0f}{us:10.1f}{flashmla_us:11.1f}{speedup:9.2f}"
            "{least:7.2f}{most:7.2f}{roofline_share:7.2f}".format(**row, least=min(ratios), most=max(ratios))
            + "".join(f"{row[key]:11.1f}" if key in row else f"{'':11}" for key in more)
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON with every figure")
    parser.add_argument("--rounds", type=int, default=3, help="of the whole measurement (default: %(default)s)")
    parser.add_argument("--rows", nargs="+", choices=FORMATS, default=list(FORMATS), help="formats (default: all)")
    parser.add_argument("--heads", nargs="+", type=int, choices=HEADS, default=HEADS, help="heads (default: all)")
    parser.add_argument("--triton", action="store_true", help="also the Triton provider")
    parser.add_argument("--others", action="store_true", help="also FlashInfer, FlashAttention 3, Triton ports")
    parser.add_argument("--flashmla", type=Path, metavar="DIR", help="FlashMLA of a wheel's vllm/, without vLLM")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}; give 1 or more.")
    if arguments.flashmla and not (arguments.flashmla / "_flashmla_C.abi3.so").is_file():
        parser.error(f"{arguments.flashmla} has no _flashmla_C.abi3.so; give the vllm/ of an unpacked wheel.")
    check_out(arguments.out)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("error: this benchmark compares with FlashMLA on a Hopper GPU, and there is none.", file=sys.stderr)
        return 1
    stock = inputs.of_library(arguments.flashmla) if arguments.flashmla else inputs.of_vllm()
    providers = ["sm90", "triton"] if arguments.triton else ["sm90"]
    torch.manual_seed(0)
    measured = ceilings()
    print({name: round(value, 2) for name, value in measured.items()}, flush=True)
    pools = inputs.Pools()
    rounds: list[list[dict[str, Any]]] = []
    with Watch() as watch:
        for repeat in range(arguments.rounds):
            began = time.monotonic()
            what = (arguments.rows, arguments.heads, providers)
            rounds.append(list(measure(*what, pools, stock, watch, repeat, arguments.others)))
            results = merged(rounds, measured)
            report = {
                **provenance(),
                "native_build": native.build_info(native.LIBRARY),
                "method": {"calls_a_graph": {"decode": CALLS, "prefill": PREFILL_CALLS}, "replays": REPLAYS,
                           "rounds": len(rounds), "rows_a_pool": PAGES * PAGE},
                "phases": {name: phase.words for name, phase in PHASES.items()},
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
