#!/usr/bin/env python3
"""Write the figures of README.md and docs/ from the committed results, or with --check see that none is stale.

    python benchmarks/tables.py

Figures stand between the lines `<!-- figures: NAME -->` and `<!-- end of figures -->`; NAME is a function below.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from charts import LOAD_FILES, ROWS, in_turns, kernel_results, next_to_each_other, step_kinds
from serve_report import ATTENTION

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "docs/results.md",
    "docs/choosing.md",
    "docs/releases.md",
    "docs/serving.md",
    "docs/kernel-notebook.md",
)
BLOCK = re.compile(r"(?<=<!-- figures: )(\w+) -->\n.*?(?=<!-- end of figures -->\n)", re.DOTALL)
# Phases of sparse_mla.py, those of decode and those of prefill.
PHASES = {
    "decode": {
        "decode": "decode of {}",
        "mixed": "decode of {}, mixed lengths",
        "one_long": "decode of {}, one of them long",
    },
    "prefill": {
        "prompt": "prefill of {}",
        "prefill": "prefill of {}, end of a long prompt",
        "scattered": "prefill of {}, scattered rows",
    },
}
FEW = (8, 16)  # heads
CACHES = {"fp8": "FP8", "bf16": "BF16"}  # full-width
STOCK = {rows: rows for rows in ("584", "656", "576")}
SERVING = ("serve_tp4_h200x4", "serve_tp4_256_h200x4")
TP4_IN_TURNS = ("serve_tp4_third_h200x4_0.33.0",)
IN_TURNS = ("serve_share_in_turns_h200", "serve_share_in_turns_h200_0.33.0")  # without the full-width cache
SHARE = ("serve_share_h200", IN_TURNS[0])
DSPARK = tuple(f"serve_share_dspark_{of}_h200_0.33.0" for of in ("stock", "drop_in"))
DSPARK_IN_TURNS = ("serve_share_dspark_in_turns_h200_0.33.0",)
DSPARK_AGAIN = ("serve_share_dspark_again_h200_0.33.0",)
EXPERTS = tuple(f"serve_share_burst_{of}_h200" for of in ("stock", "fp8_graph", "fp8_16k"))
# Of serve_report.KINDS, what a step has besides products, experts and mHC.
SMALL = ("attention", "compressors and inserts", "index tables", "top-k", "fills", "quantisation")
CURRENT = "accuracy_e2e_h200_64heads"
MODELS = {"V4-Flash's shape, TP 4": "throughput_flash_h200x4", "mini checkpoint": "throughput_mini_h200"}
MODEL_SHARE = ("throughput_flash_share_h200", "throughput_flash_share_fp8_experts_h200")
V32 = {"flashmla": "FLASHMLA_SPARSE", "sparse": "MLA_KERNELS_SPARSE"}
WITH_FA3 = V32 | {"fa3": "FLASH_ATTN_MLA_SPARSE"}  # over a BF16 cache only
V32_AND_FA3 = {f"{run}_bf16": name for run, name in WITH_FA3.items()}
WITH_SMALL = V32 | {"sparse": f"{V32['sparse']}, `small-kernels`"}
# The BF16 cache was measured again, with `small-kernels`: later files have what counts.
V32_RUNS = ("throughput_v32_h200", "throughput_v32_bf16_stock_h200", "throughput_v32_bf16_small_h200")
# Of a server, what its tables have.
MEASURED = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms")
# What serve.py's own table marks.
MARKED = "\n\\* Kernels were compiled during some of these measurements, which count in the median.\n"
# Checkpoints by how they are quantised, as make_mini_checkpoint.py names them.
LAYOUTS = {
    "none": "DeepSeek's own",
    "ct-w4a16": "compressed-tensors: 4-bit experts, FP8 in blocks",
    "nvfp4-experts": "NVFP4 experts, the rest as DeepSeek's",
    "ct-nvfp4": "compressed-tensors: NVFP4 experts, FP8 in blocks",
    "ct-fp8-tensor": "compressed-tensors: NVFP4 experts, FP8 with one scale a tensor",
    "autoround": "AutoRound",
    "nvfp4": "NVFP4 everywhere",
}
LOADED = re.compile(r"Model loading took ([\d.]+) GiB")
BACKENDS = {"flashmla": "FlashMLA", "fp8": "FP8 cache", "bf16": "BF16 cache"}
DROP_IN = "FlashMLA's cache, drop-in"
# Of runs of serve.py.
NAMES = BACKENDS | {
    "dropin": DROP_IN,
    "fp8experts": "drop-in, `small-kernels`, `fp8-experts`; a graph of 8192 tokens",
    "fp8experts16k": "the same; steps of 16384 tokens instead",
}


@cache
def load(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def markdown(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    lines = [list(map(str, head)), *(list(map(str, row)) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def span(values: Iterable[float], form: str = ".2f") -> str:
    ordered = sorted(values)
    low, high = format(ordered[0], form), format(ordered[-1], form)
    return low if low == high else f"{low} to {high}"


def tiny(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}".replace("e-0", "e-")


def by_call(
    store: str, kind: str, gpu: str = "h200", more: Iterable[str] = (), of: str = "speedup"
) -> dict[tuple[str, int, int], float]:
    """Of a cache or of rows, in decode or prefill: (phase, tokens, heads) -> FlashMLA's time over ours, or another
    field. `more` phases than the tables have."""
    rows = kernel_results(ROOT / "benchmarks/results", gpu)["results"]
    return {(row["phase"], row["tokens"], row["heads"]): row[of] for row in rows
            if row["rows"] == ROWS.get(store, store) and row["phase"] in {*PHASES[kind], *more}}  # fmt: skip


def served(names: Iterable[str] = SERVING) -> dict[int, dict[str, dict[str, Any]]]:
    """Requests at once -> backend -> what was measured, where nothing was compiled under the clock."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for runs in (load(name)["runs"] for name in names):
        for count in map(int, runs["FlashMLA"]["concurrency"]):
            measured = {key.lower(): run["concurrency"][str(count)] for key, run in runs.items()}
            if not any(run["compiled"] for run in measured.values()):
                found[count] = together(found[count], measured) if count in found else measured
    return found


def together(*files: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What several files have of servers in turns; a measurement without one next to it is left out."""
    turns = [turn for measured in files
             for turn in zip(*(measured[store]["repeats"] for store in files[0]), strict=False)]  # fmt: skip
    found = {}
    for store, every in zip(files[0], zip(*turns, strict=True), strict=True):
        medians = {key: median(one[key] for one in every) for key in MEASURED}
        found[store] = {"repeats": every, "compiled": []} | medians
    return found


def ratios(store: str, what: str) -> list[float]:
    """Of one GPU's share, by requests at once; of the drop-in where both servers were measured in turns."""
    if store == "dropin":
        found = (runs for name in IN_TURNS for runs in served([name]).values())
        return [median(next_to_each_other(runs[store], runs["flashmla"], what)) for runs in found]
    return [runs[store][what] / runs["flashmla"][what] for runs in served(SHARE).values() if store in runs]


def speedup_span(store: str, kind: str, form: str = ".2f", heads: Iterable[int] = FEW) -> str:
    """FlashMLA's time over ours, with so many heads; `584` is the drop-in over V4's own rows. Of decode, sizes
    between those of the tables too; of prefill, what prompts do."""
    found = by_call(store, kind, more=["small"] if kind == "decode" else [])
    found = {call: ratio for call, ratio in found.items() if call[0] != "scattered"}
    return span((ratio for (_, _, number), ratio in found.items() if number in heads), form)


def kl(name: str, pair: str) -> float:
    return load(name)["comparisons"][pair]["decode"]["kl_mean"]


def headline() -> str:
    full, drop_in = (speedup_span(store, "decode", ".1f") for store in ("fp8", "584"))
    fp8, share = (span((ratio * 100 - 100 for ratio in ratios(store, "output_throughput")), ".0f")
                  for store in ("fp8", "dropin"))  # fmt: skip
    return (
        f"**On H200 with 8 or 16 heads on each GPU, attention in decode (writing answers) is {full} times "
        f"as fast as\nFlashMLA with the full-width cache in FP8, and {drop_in} times with the drop-in. "
        "It is a small part of a server's\nwork: one H200 doing one GPU's share of V4-Flash's shape at TP 4, "
        f"with dummy weights, wrote\n{fp8}% more tokens per second with the full-width cache in FP8, and "
        f"{share}% more with the drop-in.**\n"
    )


def attention(
    calls: Iterable[tuple[str, int]] = (),
    stores: Iterable[tuple[str, str]] = CACHES.items(),
    gpu: str = "h200",
    of: str = "speedup",
) -> str:
    """All calls, or those of some phases and numbers of tokens."""
    rows: dict[str, dict[int, float]] = {}
    for store, title in stores:
        for kind, titles in PHASES.items():
            for (phase, tokens, heads), value in by_call(store, kind, gpu, of=of).items():
                if not calls or (phase, tokens) in calls:
                    rows.setdefault(f"{title}, {titles[phase].format(tokens)}", {})[heads] = value
    heads = sorted({number for by in rows.values() for number in by})
    cells = ([call, *(f"{by[h]:.2f}" if h in by else "" for h in heads)] for call, by in rows.items())
    return markdown(["heads on each GPU", *heads], cells)


def by_heads() -> str:
    return attention([("decode", 16), ("prompt", 4096)], [("fp8", "FP8")])


def stock_rows() -> str:
    return attention(stores=STOCK.items())


def others() -> str:
    """FlashInfer's and FlashAttention 3's time over ours."""
    results = load("stock_rows_others_h200")["results"]
    rows: dict[str, dict[int, float]] = {}
    for store, title in (CACHES | {"576": "576"}).items():
        for other, name in {"flashinfer": "FlashInfer", "fa3": "FlashAttention 3"}.items():
            for row in results:
                named = {"decode": "decode", "prompt": "prefill"}.get(row["phase"])
                if row["rows"] == ROWS.get(store, store) and named and f"{other}_us" in row:
                    call = f"{title}, {named} of {row['tokens']}, {name}"
                    rows.setdefault(call, {})[row["heads"]] = row[f"{other}_us"] / row["us"]
    heads = sorted({number for by in rows.values() for number in by})
    cells = ([call, *(f"{by[h]:.2f}" for h in heads)] for call, by in rows.items())
    return markdown(["heads on each GPU", *heads], cells)


def portable() -> str:
    """FlashMLA's time over that of ours and of each kernel in Triton."""
    kernels = {"us": "native", "triton_us": "Triton", "xpu_us": "vLLM's"}
    kernels |= {f"pr{number}_us": f"#{number}" for number in (38476, 54929)}
    cells = []
    for row in sorted(load("portable_rows_h200")["results"], key=lambda row: (row["rows"], row["heads"])):
        named = {"decode": "decode", "prompt": "prefill"}.get(row["phase"])
        if named and row["heads"] != 16:
            call = f"{row['rows']}, {row['heads']} heads, {named} of {row['tokens']}"
            ratios = (f"{row['flashmla_us'] / row[key]:.2f}" if key in row else "" for key in kernels)
            cells.append([call, f"{row['flashmla_us']:.0f}", *ratios])
    return markdown(["", "FlashMLA, µs", *kernels.values()], cells)


def h100() -> str:
    calls = [*(("decode", tokens) for tokens in (1, 16, 128, 512)), ("prompt", 4096)]
    return attention(calls, (CACHES | STOCK).items(), "h100")


def roofline() -> str:
    """The share of it that the largest calls reach."""
    return attention([("decode", 512), ("scattered", 4096)], (CACHES | STOCK).items(), of="roofline_share")


def choosing() -> str:
    """What the drop-in and the full-width cache give where each GPU has few heads."""
    rows: dict[str, list[str]] = {}
    for phase in ("decode", "prefill"):
        rows[f"Attention, {phase}"] = ["1", *(speedup_span(store, phase) for store in ("584", "fp8", "bf16"))]
    own = []
    for store in ("dropin", "fp8"):
        names = IN_TURNS if store == "dropin" else SHARE
        counts = (count for count, runs in served(names).items() if store in runs)
        own.append(f"{span(ratios(store, 'output_throughput'))} ({span(counts, 'd')} requests)")
    rows["Served tokens a second, one GPU's share of TP 4"] = ["1", *own, "not measured"]
    runs = load(MODELS["V4-Flash's shape, TP 4"])["runs"]
    tokens = [str(runs[store]["kv_cache"]["tokens_per_gib"]) for store in BACKENDS]
    rows["Tokens in 1 GiB of cache, vLLM's estimate at the start"] = [tokens[0], *tokens]
    runs = ("flashmla", "drop_in", "fp8", "bf16")
    kls = [tiny(kl(CURRENT, f"truth|{run}")) for run in runs]
    rows["Mean KL of decode (less is better)"] = kls
    head = ["", "stock vLLM", "drop-in", "full-width, FP8", "full-width, BF16"]
    return markdown(head, ([title, *cells] for title, cells in rows.items()))


def more_heads() -> str:
    """As the first rows of `choosing`, where each GPU has more heads."""
    rows = []
    for store, title in {"584": "drop-in", "fp8": "full-width, FP8", "bf16": "full-width, BF16"}.items():
        for kind in ("decode", "prefill"):
            left = (store, kind) == ("584", "prefill")
            many = "left to FlashMLA" if left else speedup_span(store, kind, heads=(64, 128))
            rows.append([f"{title}, {kind}", speedup_span(store, kind, heads=(32,)), many])
    return markdown(["speed relative to FlashMLA", "32 heads", "64 and 128 heads"], rows)


def accuracy() -> str:
    native, triton = "accuracy_e2e_h200", "accuracy_e2e_h200_triton"
    rows = []
    for title, name, pair in (
        ("FlashMLA", CURRENT, "truth|flashmla"),
        (DROP_IN, CURRENT, "truth|drop_in"),
        ("BF16 cache, native kernels", CURRENT, "truth|bf16"),
        ("BF16 cache, Triton kernels", triton, "truth|bf16"), ("FP8 cache, native kernels", CURRENT, "truth|fp8"),
        ("FP8 cache, Triton kernels", triton, "truth|fp8"),
        ("FP8 cache, calibrated scales", native, "truth|fp8_calibrated"),
        ("FP8 cache, against the reference on an FP8 cache", native, "truth_fp8|fp8"),
    ):  # fmt: skip
        decode = load(name)["comparisons"][pair]["decode"]
        rows.append([title, tiny(decode["kl_mean"]), f"{decode['logprob_diff_max']:.2f}", f"{decode['top1']:.1%}"])
    return markdown(["", "mean KL, decode", "largest difference of a log-probability", "same top token"], rows)


def row_sizes() -> str:
    results = {"64": "scales_64_h200", "2.5": "accuracy_e2e_h200", "1/64": "scales_0.015625_h200"}
    runs = {"FlashMLA": "flashmla", "BF16 cache": "bf16", "FP8 cache, scale 1.0": "fp8",
            "FP8 cache, calibrated scales": "fp8_calibrated"}  # fmt: skip
    rows = [[title, *(tiny(kl(name, f"truth|{run}")) for name in results.values())] for title, run in runs.items()]
    return markdown(["RMS of the rows", *results], rows)


def one_call() -> str:
    sizes = load("accuracy_attention_cpu")["relative_error_by_rows_rms_cache"]["heavy"]
    rows = [[title, *(f"{errors[title]['all']:.2%}" for errors in sizes.values()), f"{rope['rope']:.2%}"]
            for title, rope in sizes["1"].items()]  # fmt: skip
    return markdown(["cache dtype", *(f"RMS {size}" for size in sizes), "RoPE dimensions alone, RMS 1"], rows)


def rates(run: dict[str, Any]) -> list[float]:
    """Tokens a second: prefill, and decode by batch."""
    calls = run["decode"] | {"0": run["prefill"]}
    return [calls[n]["tokens_per_second"] for n in sorted(calls, key=int)]


def speeds(runs: dict[str, Any], names: dict[str, str]) -> list[list[Any]]:
    """Of each run: prefill, decode by batch, and capacity. Tokens a second of the first; the others over it."""
    rows, first = [], []
    for run, name in names.items():
        starts = [of for key, of in runs.items() if key.split("-")[0] == run]  # also `run-2` and so on
        own = [median(column) for column in zip(*map(rates, starts), strict=True)]
        cells = [f"{a / b:.2f}" for a, b in zip(own, first, strict=True)] if first else [f"{a:.0f}" for a in own]
        first = first or own
        rows.append([name, *cells, runs[run]["kv_cache"]["tokens_per_gib"]])
    return rows


def speeds_head(runs: dict[str, Any]) -> list[str]:
    batches = sorted(next(iter(runs.values()))["decode"], key=int)
    return ["", "prefill", *(f"decode, {n}" for n in batches), "tokens in 1 GiB"]


def models() -> str:
    runs = {title: load(name)["runs"] for title, name in MODELS.items()}
    rows = []
    for title, of in runs.items():
        rows += speeds(of, {run: f"{title}, {name}" for run, name in BACKENDS.items()})
    return markdown(speeds_head(of), rows)


def models_share() -> str:
    names = {"flashmla": "FlashMLA", "drop_in": "drop-in",
             "fp8_experts": "drop-in, `small-kernels`, `fp8-experts`"}  # fmt: skip
    runs = {run: of for name in MODEL_SHARE for run, of in load(name)["runs"].items()}
    return markdown(speeds_head(runs), speeds(runs, names))


def models_glm5() -> str:
    runs = load("throughput_glm5_8heads_h200_0.33.0")["runs"]
    return markdown(speeds_head(runs), speeds(runs, V32_AND_FA3))


def over_cache(store: str, names: dict[str, str]) -> dict[str, str]:
    return {f"{run}_{store}": f"{CACHES[store]} cache, {name}" for run, name in names.items()}


def of_16heads(model: str) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """For each cache, as other batches were measured: runs on 0.33.0, and their names."""
    for store, names in {"bf16": WITH_FA3, "fp8": V32}.items():
        yield load(f"throughput_{model}_16heads_{store}_h200_0.33.0")["runs"], over_cache(store, names)


def models_glm5_16heads() -> str:
    return "\n".join(markdown(speeds_head(runs), speeds(runs, names)) for runs, names in of_16heads("glm5"))


def speeds_v32(runs: dict[str, Any], store: str, names: dict[str, str]) -> list[list[Any]]:
    return speeds(runs, over_cache(store, names))


def models_v32() -> str:
    runs = {run: of for name in V32_RUNS for run, of in load(name)["runs"].items()}
    return markdown(speeds_head(runs), speeds_v32(runs, "bf16", WITH_SMALL) + speeds_v32(runs, "fp8", V32))


def models_v32_8heads() -> str:
    """A table for each cache, as other batches were measured."""
    tables = []
    for store in ("bf16", "fp8"):
        files = (f"throughput_v32_8heads_{store}_{of}_h200" for of in ("stock", "small"))
        runs = {run: of for file in files for run, of in load(file)["runs"].items()}
        tables.append(markdown(speeds_head(runs), speeds_v32(runs, store, WITH_SMALL)))
    return "\n".join(tables)


def rates_and_steps(runs: dict[str, Any], names: dict[str, str]) -> str:
    """Tokens a second, and milliseconds of the GPU in a decode step."""
    batches = sorted(next(iter(runs.values()))["decode"], key=int)
    rows = []
    for run, name in names.items():
        steps = (runs[run]["decode"][n]["step"]["busy_us"] for n in batches)
        speed = (f"{rate:.0f}" for rate in rates(runs[run]))
        rows.append([name, *speed, ", ".join(f"{us / 1e3:.2f}" for us in steps)])
    return markdown([*speeds_head(runs)[:-1], f"GPU's ms in a step of {', '.join(batches)}"], rows)


def models_v32_fa3() -> str:
    runs = load("throughput_v32_8heads_32layers_h200_0.33.0")["runs"]
    return rates_and_steps(runs, {"drop_in_bf16": "FLASHMLA_SPARSE, drop-in"} | V32_AND_FA3)


def models_v32_16heads() -> str:
    return "\n".join(rates_and_steps(runs, names) for runs, names in of_16heads("v32"))


def layouts() -> str:
    """Quantised checkpoints: tokens a second over DeepSeek's own of the same release, GiB of weights."""

    def speeds_of(run: dict[str, Any]) -> list[float]:
        decode = [run["decode"][n]["tokens_per_second"] for n in ("1", "16")]
        return [*decode, max(run["prefill"]["all"])]  # the processor slows prefill, at times more, at times less

    rows = []
    for layout, title in LAYOUTS.items():
        cells = []
        for release in ("", "_0.33.0"):
            files = (f"throughput_layout_{of}_h200{release}" for of in ("none", layout))
            own, run = (load(file)["runs"]["drop_in"] for file in files)
            pairs = zip(speeds_of(run), speeds_of(own), strict=True)
            cells += [f"{speed:.0f}" if run is own else f"{speed / first:.2f}" for speed, first in pairs]
            loaded = next(match[1] for line in run["vllm_reports"] if (match := LOADED.search(line)))
            cells.append(f"{float(loaded):.1f}")
        rows.append([title, *cells])
    columns = ("decode, 1 request", "16", "prefill", "GiB")
    head = [f"{release}: {column}" for release in ("0.22.1", "0.33.0") for column in columns]
    return markdown(["layout", *head], rows)


def serving_table(names: Iterable[str], found: dict[int, dict[str, Any]]) -> str:
    """Of servers measured in turns, a ratio is the median of those of measurements next to each other."""
    paired, key = all(in_turns(load(name)) for name in names), "output_throughput"

    def over(run: dict[str, Any], other: dict[str, Any]) -> float:
        return median(next_to_each_other(run, other, key)) if paired else run[key] / other[key]

    rows = [[count, NAMES[store] + "\\*" * bool(run["compiled"]), f"{run['output_throughput']:.0f}",
             f"{over(run, runs['flashmla']):.2f}",
             f"{run['mean_ttft_ms'] / 1e3:.2f}", f"{run['mean_tpot_ms']:.1f}"]
            for count, runs in sorted(found.items()) for store, run in runs.items()]  # fmt: skip
    head = ["requests at once", "", "output tokens/s", "over FlashMLA", "TTFT, s", "TPOT, ms"]
    marked = any(run["compiled"] for runs in found.values() for run in runs.values())
    return markdown(head, rows) + MARKED * marked


def serving(names: Iterable[str] = SERVING) -> str:
    weights = " or ".join(dict.fromkeys(load(name)["weights"] for name in names))
    times = span((len(run.get("repeats", [run])) for runs in served(names).values() for run in runs.values()), "d")
    return f"{serving_table(names, served(names))}\nWeights: {weights}. Each the median of {times}.\n"


def serving_tp4_drop_in() -> str:
    return serving(TP4_IN_TURNS)


def serving_share() -> str:
    return serving(SHARE)


def serving_share_in_turns() -> str:
    return serving(IN_TURNS[1:])


def of_servers(names: Iterable[str]) -> str:
    """One file a server."""
    runs = {key.lower(): run["concurrency"] for name in names for key, run in load(name)["runs"].items()}
    return serving_table(names, {int(n): {key: of[n] for key, of in runs.items()} for n in runs["flashmla"]})


def serving_experts() -> str:
    return of_servers(EXPERTS)


def serving_dspark() -> str:
    return of_servers(DSPARK)


def serving_dspark_in_turns() -> str:
    return of_servers(DSPARK_IN_TURNS)


def serving_dspark_again() -> str:
    return of_servers(DSPARK_AGAIN)


def lengths(loads: Iterable[str], name: str) -> str:
    """By lengths of prompts and answers, of some of LOAD_FILES; `name` is what ours are called."""
    rows = []
    for of_load in loads:
        runs = (load(f"serve_share_{of}_h200")["runs"].values() for of in LOAD_FILES[of_load])
        stock, ours = (run["concurrency"] for (run,) in runs)
        for case, first in stock.items():
            for title, run in (("FlashMLA", first), (name, ours[case])):
                every = span((repeat["output_throughput"] for repeat in run["repeats"]), ".0f")
                rows.append([
                    f"{run['case']['input_len']}/{run['case']['output_len']}",
                    title,
                    f"{run['output_throughput']:.0f} ({every})",
                    f"{run['output_throughput'] / first['output_throughput']:.2f}",
                    f"{run['output_per_gpu']:.0f}",
                    f"{run['output_per_user']:.0f}",
                    f"{run['mean_ttft_ms'] / 1e3:.2f}",
                    f"{run['median_itl_ms']:.1f}",
                    f"{run['request_goodput']:.2f}",
                ])  # fmt: skip
    speeds = ["output tokens/s", "over FlashMLA", "a GPU of four", "a user"]
    return markdown(["tokens in/out", "", *speeds, "TTFT, s", "ITL, ms", "goodput, requests/s"], rows)


def serving_steady() -> str:
    return lengths(["steady"], "drop-in, `small-kernels`, `fp8-experts`")


def serving_long() -> str:
    return lengths(["long_1k", "long_8k"], "drop-in, `small-kernels`")


def small_costs() -> str:
    steps = step_kinds(ROOT / "benchmarks/results").values()
    stock, ours = (sum(kinds[kind][0] for kind in SMALL) / 1e3 for kinds in steps)
    return (
        "Attention, compressors, inserts, index tables, top-k, fills and quantisation take "
        f"{ours:.2f} ms of that step\ntogether, and {stock:.2f} ms in stock vLLM.\n"
    )


def decode_step() -> str:
    parts = []
    for name, run in load(SERVING[0])["runs"].items():
        step = run["decode_step"]  # its `share`: FlashMLA's with compressors, which were not told apart then
        longest = max(us for kernel, us in step["longest_us"].items() if ATTENTION.search(kernel))
        parts.append(f"{longest / step['kernels_us']:.1%} ({NAMES[name.lower()]})")
    return (
        "In a decode step of 16 requests the kernel that attends takes this part of the GPU's time: "
        f"{', '.join(parts)}. FlashMLA has smaller ones beside it.\n"
    )


def steps() -> str:
    """The largest mean KL of decode steps that each step of features_e2e.py measured; FlashMLA's in the run of the
    drop-in, if that had the step."""
    found: dict[str, dict[str, float | None]] = {}
    drop_in = [f"features_drop_in_{of}" for of in ("h200", "32heads_h200x4", "tp4_h200x4", "h200_1bcf04f")]
    for result in map(load, (*drop_in, "features_h200", "features_h200x4")):
        for store, steps_of_store in result["steps"].items():
            for step, ran in steps_of_store.items():
                kls = [check["measured"] for name, check in ran["checks"].items() if "decode: mean KL" in name]
                if step == "reference" and store != "stock":  # that one is compared with FlashMLA's
                    kls = [ran["measured"]["noise"]["decode"]["kl_mean"]]
                found.setdefault(step, {}).setdefault(store, max(kls, default=None))
    flashmla, *others = BACKENDS.items()
    stores = dict([flashmla, ("stock", DROP_IN), *others])
    rows = [[f"`{step}`", *(tiny(by.get(s)) for s in stores)] for step, by in found.items() if any(by.values())]
    return markdown(["step", *stores.values()], rows)


FIGURES = {figure.__name__: figure for figure in (
    headline, by_heads, more_heads, choosing, attention, stock_rows, others, portable, h100, roofline, accuracy,
    row_sizes, one_call, models, models_share, models_v32, models_v32_8heads, models_v32_fa3, models_glm5,
    models_v32_16heads, models_glm5_16heads, layouts,
    serving, serving_tp4_drop_in, serving_share, serving_share_in_turns, serving_experts, serving_dspark,
    serving_dspark_in_turns, serving_dspark_again, serving_steady, serving_long, small_costs, decode_step, steps,
)}  # fmt: skip


def written(text: str) -> str:
    """A page with its figures as the results have them; KeyError names a figure or a field that is not there."""
    return BLOCK.sub(lambda found: f"{found[1]} -->\n{FIGURES[found[1]]()}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page is stale")
    check = parser.parse_args().check
    pages = {ROOT / page: (ROOT / page).read_text("utf-8") for page in PAGES}
    stale = {path: new for path, text in pages.items() if (new := written(text)) != text}
    for path, new in stale.items():
        if not check:
            path.write_text(new, "utf-8")
        print(f"{path.relative_to(ROOT)}: {'stale; run benchmarks/tables.py' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
