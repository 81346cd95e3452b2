"""What serve.py says of what it measured: one result of all runs, a table, and where a decode step's time goes."""

from __future__ import annotations

import collections
import gzip
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

TRACE = "*rank0*.json.gz"
# Attention, but not what fills caches or picks rows: FlashMLA's, FlashAttention 3's, ours in CUDA and in Triton.
ATTENTION = re.compile(
    # vLLM's compressor has sparse_attn_compress in its kernels' names.
    "flash_fwd|FlashAttnFwd|flash_mla|mla_combine|mla_metadata|sparse_attn(?!_compress)|splitkv|sparse_mla|"
    "_attend_kernel|_merge_kernel"
)
# The kernels of a step by what they are for, as vLLM 0.22.1 and the overlay name them; the first that fits counts.
KINDS = {
    "attention": ATTENTION,
    "experts": re.compile("(?i)marlin|humming|moe|expert|topkGating|act_and_mul"),
    "FP8 products": re.compile("deep_gemm::.*fp8.*gemm"),
    "quantisation": re.compile("scale_1x128|quant_(8bit|per_head)|fp8_quant"),
    "compressors and inserts": re.compile("(?i)compress_norm|_compress_|insert|save_partial_states"),
    "index tables": re.compile(
        "_indices_and_lens|_slot_mapping|c128a_topk|(build|slots|columns)_kernel|topk_swa_indices"
    ),
    "top-k": re.compile("(persistent|cooperative)_topk|top_k_per_row|mla::.*topk_kernel"),
    "index scores": re.compile("mqa_logits|(?i:indexer_?q)"),
    "mHC": re.compile("mhc_|hc_head|hc_prenorm"),
    "fills": re.compile("FillFunctor"),
    "BF16 products": re.compile("nvjet|cublas|gemm"),
}
OTHER = "all else"
COMPILED = "*: kernels were compiled while the clock ran, so not to be compared"
# Key in the result of `vllm bench serve` or of `row_of`, heading, factor.
COLUMNS = [
    ("duration", "s", 1.0),
    ("output_throughput", "output tok/s", 1.0),
    ("output_per_gpu", "a GPU", 1.0),
    ("output_per_user", "a user", 1.0),
    ("mean_ttft_ms", "TTFT, s", 1e-3),
    ("p99_ttft_ms", "P99", 1e-3),
    ("mean_tpot_ms", "TPOT, ms", 1.0),
    ("p99_tpot_ms", "P99", 1.0),
    ("mean_itl_ms", "ITL, ms", 1.0),
    ("p99_itl_ms", "P99", 1.0),
]
GOODPUT = ("request_goodput", "good prompts a second", 1.0)
PROFILED_STEPS = 8


def profiler(folder: Path) -> dict[str, Any]:
    """vLLM's --profiler-config for traces in `folder`."""
    return {
        "profiler": "torch", "torch_profiler_dir": str(folder.absolute()), "torch_profiler_with_stack": False,
        "ignore_frontend": True,
    }  # fmt: skip


def newest_traces(folder: Path, count: int = 1) -> list[Path]:
    """Rank 0's last `count` in `folder`, in their order."""
    traces = sorted(folder.glob(TRACE))[-count:]
    if len(traces) < count:
        left = f"{len(traces)} of {count} traces" if traces else "no trace"
        sys.exit(f"error: the profiler left {left} in {folder}.")
    return traces


def attention_share(folder: Path) -> dict[str, Any]:
    """Kernels of a decode step, from the newest trace in `folder`."""
    return profiled_step(newest_traces(folder)[0])


def profiled_step(trace: Path) -> dict[str, Any]:
    """GPU time of a step, as the mean of those in the trace, and what of it is attention, with all kinds of
    kernels, the launches of each, and the longest kernels. A kernel that waits on the GPU for the one before it
    counts from its own start, so that `kernels_us` can be more than `busy_us`, in which any kernel ran."""
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    # vLLM marks each step with what is in it.
    steps = [e["name"] for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("execute_")]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not steps or not kernels:
        sys.exit(f"error: {trace} has {len(steps)} steps and {len(kernels)} kernels; remove it to profile again.")
    busy = end = 0.0
    for event in sorted(kernels, key=lambda event: event["ts"]):
        busy += max(0.0, event["ts"] + event["dur"] - max(event["ts"], end))
        end = max(end, event["ts"] + event["dur"])
    times: dict[str, float] = {}
    kinds = {kind: [0.0, 0.0] for kind in (*KINDS, OTHER)}
    for event in kernels:
        name, time = event["name"], event["dur"] / len(steps)
        times[name[:120]] = times.get(name[:120], 0.0) + time
        kind = kinds[next((kind for kind, names in KINDS.items() if names.search(name)), OTHER)]
        kind[0] += time
        kind[1] += 1 / len(steps)
    total = sum(times.values())
    attention = kinds["attention"][0]
    longest = sorted(times, key=lambda name: -times[name])[:12]
    return {
        "steps": dict(collections.Counter(steps)),
        "busy_us": round(busy / len(steps), 1),
        "kernels_us": round(total, 1),
        "attention_us": round(attention, 1),
        "share": round(attention / total, 4),
        "kinds": {kind: {"us": round(us, 1), "launches": round(count, 1)} for kind, (us, count) in kinds.items()},
        "longest_us": {name: round(times[name], 1) for name in longest},
    }


def row_of(repeats: list[dict[str, Any]], gpus: int) -> dict[str, Any]:
    """The medians of `repeats`, which are of one case, and each of them; with the tokens a second that one of
    `gpus` writes, and that a user gets once the first has come."""
    for found in repeats:
        found["output_per_gpu"] = found["output_throughput"] / gpus
        found["output_per_user"] = 1e3 / (found["median_tpot_ms"] or float("inf"))  # 0 for one token
    figures = [key for key, *_ in COLUMNS] + ["total_input_tokens", "total_output_tokens", "median_itl_ms"]
    if repeats[0].get("request_goodput") is not None:
        figures.append("request_goodput")
    row: dict[str, Any] = {key: statistics.median(found[key] for found in repeats) for key in figures}
    row["compiled"] = sorted({name for found in repeats for name in found["compiled"]})
    preemptions = [found["preemptions"] for found in repeats]
    row["preemptions"] = None if None in preemptions else sum(preemptions)
    of_each = [*figures, "compiled", "gpu_meanwhile", "host_meanwhile"]
    row["repeats"] = [{key: found[key] for key in of_each} for found in repeats]
    return row


def compiled_meanwhile(result: dict[str, Any]) -> bool:
    return any(row["compiled"] for run in result["runs"].values() for row in run["concurrency"].values())


def spread(row: dict[str, Any], key: str, factor: float) -> str:
    """In brackets, least and most of the repetitions."""
    values = [found[key] * factor for found in row["repeats"]]
    return f" ({min(values):,.2f}-{max(values):,.2f})" if len(values) > 1 else ""


def table(result: dict[str, Any]) -> str:
    columns = [*COLUMNS, *([GOODPUT] if result["goodput"] else [])]
    heads = ["at once", "", *(head for _, head, _ in columns), "KV cache, tokens"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for count in next(iter(result["runs"].values()))["concurrency"]:
        for name, run in result["runs"].items():
            row = run["concurrency"][count]
            values = [f"{row[key] * factor:,.2f}{spread(row, key, factor)}" for key, _, factor in columns]
            mark = "*" if row["compiled"] else ""
            capacity = f"{run['kv_cache_tokens']:,}" if "kv_cache_tokens" in run else ""
            lines.append("| " + " | ".join([count, name + mark, *values, capacity]) + " |")
    if compiled_meanwhile(result):
        lines.append(COMPILED)
    for name, run in result["runs"].items():
        for count, row in run["concurrency"].items():
            if number := row["preemptions"]:
                lines.append(f"{name}, {count} at once: {number} requests were preempted; the cache is too small")
        for title in ("start", "first_requests"):
            if what := run.get(title):
                costs = what["compiled"].items()
                by = [f"{of['seconds']:,.0f} s {library} ({of['files']})" for library, of in costs]
                words = title.replace("_", " ")
                lines.append(f"{name}: {words} {what['seconds']:,.0f} s; compiling {', '.join(by) or 'nothing'}")
        if step := run.get("decode_step"):
            of = f"a decode step's {step['kernels_us']:,.0f} us in kernels"
            lines.append(f"{name}: {step['share']:.1%} of {of} is attention")
    return "\n".join(lines)
