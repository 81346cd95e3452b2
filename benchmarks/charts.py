#!/usr/bin/env python3
"""Charts of the committed results: attention and serving as ratios over FlashMLA, and a decode step's kernels.

    pip install -r benchmarks/requirements.txt
    python benchmarks/charts.py

Reads benchmarks/results, writes docs/attention_speedup.svg, docs/serving.svg, docs/serving_users.svg and
docs/decode_step.svg: the same bytes for the same results and the same matplotlib. Bars are medians, lines on them
the least and most that the results leave open. What was measured while kernels were compiled has no bar.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
ROWS = {"fp8": "e4m3", "bf16": "bf16"}  # of these caches
PANELS = {
    "584": "Drop-in, FlashMLA's cache (no bar: it leaves such calls to FlashMLA, which is faster)",
    "fp8": "Full-width cache, FP8",
    "bf16": "Full-width cache, BF16",
}
# Of sparse_mla.py: phase, tokens, label.
ATTENTION = [("decode", tokens, f"decode, {tokens} token{'s' * (tokens > 1)}") for tokens in (1, 16, 128, 512)]
ATTENTION.append(("prompt", 4096, "prefill, a prompt of 4096"))
RUNS = {"DropIn": "drop-in", "FP8": "full-width, FP8", "BF16": "full-width, BF16"}  # of serve.py
# Of `vllm bench serve`: key, what the ratio is of, whether more is better.
SERVING = [
    ("output_throughput", "output tokens per second", True),
    ("mean_ttft_ms", "time to first token, FlashMLA's over ours", False),
    ("mean_tpot_ms", "time per output token, FlashMLA's over ours", False),
]
# Decode steps of 16 requests that serve.py has profiled: file, run.
STEPS = {
    "stock vLLM": ("serve_share_long_stock_8k_h200", "FlashMLA"),
    "drop-in and small-kernels": ("serve_share_long_small_8k_h200", "SmallKernels"),
}
# Loads that serve.py measured of FlashMLA, and of all that is faster: label, a word of the files' names, case.
LOADS = [
    ("16 at once, 8192 tokens in, 256 out", "burst", "16"),
    ("64 at once, 8192 in, 256 out", "burst", "64"),
    ("16 in a steady load, 8192 in, 1024 out", "steady", "8192/1024 steady 16"),
    ("16 in a steady load, 1024 in, 1024 out", "steady", "1024/1024 steady 16"),
    ("16 at once, 8192 in, 6144 out (no FP8)", "long_8k", "16"),
    ("16 at once, 1024 in, 8192 out (no FP8)", "long_1k", "16"),
]
# FlashMLA's and ours: what follows serve_share_ in the files' names.
LOAD_FILES = {
    "burst": ("burst_stock", "burst_fp8_16k"),
    "steady": ("steady_stock", "steady_fp8"),
    "long_8k": ("long_stock_8k", "long_small_8k"),
    "long_1k": ("long_stock_1k", "long_small_1k"),
}
BURST = (8192, 256)  # tokens in and out, of the bars
Bar = tuple[float, float, float]  # median, least, most


def kernel_results(results: Path, gpu: str = "h200") -> dict[str, Any]:
    """What sparse_mla.py wrote."""
    return json.loads((results / f"stock_rows_{gpu}.json").read_text("utf-8"))


def attention_bars(result: dict[str, Any]) -> dict[str, dict[str, dict[int, Bar]]]:
    """By cache or rows, by label of a phase, by heads: FlashMLA's time over that of the native kernels."""
    bars: dict[str, dict[str, dict[int, Bar]]] = {cache: {} for cache in PANELS}
    for phase, tokens, label in ATTENTION:
        for cache in PANELS:
            for row in result["results"]:
                if cache == "584" and row["speedup"] < 1:  # the drop-in leaves it to FlashMLA
                    continue
                if (row["rows"], row["phase"], row["tokens"]) == (ROWS.get(cache, cache), phase, tokens):
                    every = row["rounds"]["speedup"]
                    of_phase = bars[cache].setdefault(label, {})
                    of_phase[row["heads"]] = row["speedup"], min(every), max(every)
    return bars


def in_turns(result: dict[str, Any]) -> bool:
    """Whether servers ran together, and so were measured in turns."""
    return (result.get("together") or 1) > 1


def next_to_each_other(run: dict[str, Any], other: dict[str, Any], key: str) -> list[float]:
    """One server's figures over the other's next to them; a time limit may have cut off the last of one."""
    pairs = zip(*(measured.get("repeats", [measured]) for measured in (run, other)), strict=False)
    return [one[key] / near[key] for one, near in pairs]


def serving_bars(results: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, dict[int, Bar]]]]:
    """By machine, by key of SERVING, by run, by requests at once: how much better than FlashMLA."""
    bars: dict[str, dict[str, dict[str, dict[int, Bar]]]] = {}
    pairs: dict[tuple[str, ...], list[float]] = {}  # several machines' too
    seeded = {(result["share_of"], result["tensor_parallel_size"])
              for result in results if result["weights"] != "dummy"}  # fmt: skip
    for result in results:
        if (result["input_len"], result["output_len"]) != BURST or result.get("speculation"):
            continue  # else its bars would take the places of others
        share, gpus, tied = result["share_of"], result["tensor_parallel_size"], result["weights"] == "dummy"
        if tied and (share, gpus) in seeded:
            continue  # measured again
        machine = f"the share of one of {share} GPUs" if share > 1 else f"tensor parallel {gpus}"
        machine += ", index scores tied" if tied else ""
        of = result["machine"]
        machine += f", {of['overlay']['overlay_version']} on vLLM {of['versions']['vllm']}"
        stock = result["runs"]["FlashMLA"]["concurrency"]
        for run, found in result["runs"].items():
            for count, row in found["concurrency"].items():
                burst = count.isdigit() and count in stock  # other loads and lengths are not drawn
                if run == "FlashMLA" or not burst or row["compiled"] or stock[count]["compiled"]:
                    continue
                for key, _, more in SERVING:
                    if in_turns(result):
                        ratios = pairs.setdefault((machine, key, run, count), [])
                        ratios += next_to_each_other(row, stock[count], key)
                        ratio, least, most = statistics.median(ratios), min(ratios), max(ratios)
                    else:
                        one = [each[key] for each in row.get("repeats", [row])]
                        other = [each[key] for each in stock[count].get("repeats", [stock[count]])]
                        ratio = row[key] / stock[count][key]
                        least, most = min(one) / max(other), max(one) / min(other)
                    bar = (ratio, least, most) if more else (1 / ratio, 1 / most, 1 / least)
                    of_run = bars.setdefault(machine, {}).setdefault(key, {}).setdefault(run, {})
                    of_run[int(count)] = bar
    return bars


def users(results: Path) -> dict[str, list[tuple[float, float]]]:
    """Of LOADS, FlashMLA's and ours: tokens a second of a user after the first token, and of a GPU."""
    found: dict[str, list[tuple[float, float]]] = {}
    for label, load, case in LOADS:
        for name in LOAD_FILES[load]:
            (run,) = json.loads((results / f"serve_share_{name}_h200.json").read_text("utf-8"))["runs"].values()
            row = run["concurrency"][case]
            found.setdefault(label, []).append((row["output_per_user"], row["output_per_gpu"]))
    return found


def step_kinds(results: Path) -> dict[str, dict[str, tuple[float, float]]]:
    """The kernels of a decode step by what they are for, the longest first: microseconds and launches, of each of
    STEPS."""
    found = {}
    for title, (name, run) in STEPS.items():
        kinds = json.loads((results / f"{name}.json").read_text("utf-8"))["runs"][run]["decode_step"]["kinds"]
        found[title] = {kind: (of["us"], of["launches"]) for kind, of in kinds.items()}
    longest = sorted(kinds, key=lambda kind: -max(of[kind][0] for of in found.values()))
    return {title: {kind: of[kind] for kind in longest} for title, of in found.items()}


def grouped(panel: Any, series: dict[str, dict[int, Bar]], labels: list[str], size: float) -> dict[str, Any]:
    """Bars side by side, with their values, and a line where FlashMLA is; returns the bars of each label.

    `labels` are those of all panels, so that a series has one colour in each.
    """
    drawn = {}
    places = sorted({place for of_one in series.values() for place in of_one})
    width = 0.84 / len(series)
    for number, (label, of_one) in enumerate(series.items()):
        at = [places.index(place) + (number - (len(series) - 1) / 2) * width for place in of_one]
        values, least, most = zip(*of_one.values(), strict=True)
        spread = [[v - low for v, low in zip(values, least, strict=True)],
                  [high - v for v, high in zip(values, most, strict=True)]]  # fmt: skip
        colour = f"C{labels.index(label)}"
        drawn[label] = panel.bar(at, values, width * 0.94, label=label, color=colour, yerr=spread,
                                 error_kw={"elinewidth": 0.8})  # fmt: skip
        panel.bar_label(drawn[label], fmt="%.2f", fontsize=size, padding=2, rotation=90 if len(series) > 2 else 0)
    panel.axhline(1, color="black", linewidth=0.8, linestyle="--", zorder=0)
    panel.set_xticks(range(len(places)), [str(place) for place in places])
    panel.margins(y=0.16)  # for the values; of the highest panel, where they share an axis
    panel.spines[["top", "right"]].set_visible(False)
    return drawn


def draw(results: Path, docs: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "vllm-dsv4-overlay"  # no random names
    from matplotlib import pyplot

    attention = kernel_results(results)
    found = (json.loads(path.read_text()) for path in sorted(results.glob("serve_*.json")))
    serving = serving_bars([result for result in found if "FlashMLA" in result.get("runs", {})])
    gpu = attention["gpu"].split(",")[0]

    figure, panels = pyplot.subplots(len(PANELS), 1, figsize=(9, 8.6), layout="constrained", sharey=True)
    for panel, (cache, series) in zip(panels, attention_bars(attention).items(), strict=True):
        drawn = grouped(panel, series, list(series), 7)
        panel.set_title(PANELS[cache], fontsize=10)
        panel.set(ylabel="times as fast as FlashMLA", xlabel="attention heads on each GPU")
    title = f"Speed of sparse attention relative to FlashMLA on one {gpu}"
    figure.suptitle(f"{title} (higher is better; dashed: FlashMLA)")
    figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=5, fontsize=7)
    figure.savefig(docs / "attention_speedup.svg", metadata={"Date": None})

    figure, rows = pyplot.subplots(
        len(serving), len(SERVING), figsize=(11, 2.9 * len(serving) + 0.6), layout="constrained", squeeze=False,
        sharey=True,
    )  # fmt: skip
    runs = {run: None for bars in serving.values() for of_key in bars.values() for run in of_key}
    labels, drawn = [RUNS.get(run, run) for run in RUNS | runs], {}
    for panels, (machine, bars) in zip(rows, serving.items(), strict=True):
        for panel, (key, title, _) in zip(panels, SERVING, strict=True):
            drawn |= grouped(panel, {RUNS.get(run, run): of_run for run, of_run in bars[key].items()}, labels, 8)
            panel.set_title(f"{title}\n({machine})", fontsize=8)
            panel.set_xlabel("requests at once")
    figure.suptitle("Serving V4-Flash's shape, relative to FlashMLA (higher is better; dashed: FlashMLA)")
    figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=len(drawn))
    figure.savefig(docs / "serving.svg", metadata={"Date": None})

    figure, panel = pyplot.subplots(figsize=(7.5, 4.6), layout="constrained")
    for label, (stock, ours) in users(results).items():
        (line,) = panel.plot(*zip(stock, ours, strict=True), linewidth=1, label=label)
        panel.plot(*stock, "o", color=line.get_color(), fillstyle="none")
        panel.plot(*ours, "o", color=line.get_color())
    title = "Open: FlashMLA; filled: drop-in, small-kernels and experts in FP8\n(one of four GPUs' share)"
    panel.set(xlabel="tokens a second of a user", ylabel="tokens a second of a GPU")
    panel.set(xlim=(0, None), ylim=(0, None))
    panel.set_title(title, fontsize=10)
    panel.legend(loc="lower right", fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(docs / "serving_users.svg", metadata={"Date": None})

    figure, panel = pyplot.subplots(figsize=(9, 5.6), layout="constrained")
    for number, (title, kinds) in enumerate(step_kinds(results).items()):
        names, (times, launches) = list(kinds)[::-1], zip(*list(kinds.values())[::-1], strict=True)
        bars = panel.barh([place + 0.2 - 0.4 * number for place in range(len(names))], times, 0.38,
                          label=f"{title}: {sum(times) / 1e3:.1f} ms, {sum(launches):.0f} launches")  # fmt: skip
        labels = [f"{us:.0f} µs, {count:.0f} launches" for us, count in zip(times, launches, strict=True)]
        panel.bar_label(bars, labels, fontsize=7, padding=3)
    panel.set_yticks(range(len(names)), names)
    panel.legend(loc="lower right")
    title = "Kernels of a decode step of 16 requests, one of four GPUs' share of V4-Flash's shape"
    panel.set(title=title, xlabel="µs")
    panel.margins(x=0.2)  # for the labels
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(docs / "decode_step.svg", metadata={"Date": None})
    return [docs / f"{name}.svg" for name in ("attention_speedup", "serving", "serving_users", "decode_step")]


def main() -> None:
    try:
        print(*draw(REPO / "benchmarks/results", REPO / "docs"), sep="\n")
    except ImportError:
        sys.exit("error: charts need matplotlib; pip install -r benchmarks/requirements.txt.")
    except (KeyError, TypeError, ValueError) as error:
        sys.exit(f"error: a result lacks what the charts show ({error!r}); measure it again with this version.")


if __name__ == "__main__":
    main()
