#!/usr/bin/env python3
"""A prompt of a million tokens on the memory that vLLM's own profiling leaves.

    python benchmarks/long_context.py --out benchmarks/results/long_context_h200.json

What profiling does not see is missing later: vLLM gives all else to the caches. An index table of C128A layers is
[tokens of a step, 128 + max_model_len / 128] int32, 1 GiB for 32768 tokens of a million, so the overlay holds one
while memory is measured. Here a model of the mini checkpoint's shape (dummy weights, seeded) gets no size for its
cache, and serves a prompt of --context tokens. Overrun: how much more is then in use than vLLM was given
(`gpu_memory_utilization`); the rest of the GPU is there for it. vLLM itself overruns, in its indexer. Runs, each a
process of its own:

    stock                        FlashMLA on its own cache
    fp8, bf16                    the full-width caches; may overrun as far as stock does, and a tenth of a table
    fp8_without, bf16_without    without what the overlay holds while memory is measured; have to overrun further,
                                 by half a table or more, or else the check shows nothing

Results are written after every run. The exit status is 1 if one is not as it has to be.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from e2e import (
    STOCK_KERNELS,
    child_environment,
    import_flashinfer,
    log,
    machine,
    need_gpus,
    prepare,
    run_child,
    tail,
)

BACKEND = "FLASHINFER_MLA_SPARSE_DSV4"
CACHES = {"stock": "fp8", "fp8": "fp8_per_tensor", "bf16": "bfloat16"}
RUNS = ("stock", "fp8", "fp8_without", "bf16", "bf16_without")
UTILIZATION = 0.92  # vLLM's default
OUTPUT_TOKENS = 4
REPORTS = {
    "available_kv_gib": re.compile(r"Available KV cache memory: ([\d.]+) GiB"),
    "kv_cache_tokens": re.compile(r"GPU KV cache size: ([\d,]+) tokens"),
}
OUT_OF_MEMORY = re.compile(r"^.*out of memory.*$", re.MULTILINE | re.IGNORECASE)


def model_config() -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
    import make_mini_checkpoint as mini

    return mini.model_config(mini.Shape())


def engine_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `LLM`; no size of the cache."""
    run = job["run"].removesuffix("_without")
    cache = {"kv_cache_dtype": CACHES[run]} | ({} if run == "stock" else {"attention_backend": BACKEND})
    return dict(
        model=job["model"],
        load_format="dummy",
        worker_extension_cls="seeded_weights.SeededWeights",
        skip_tokenizer_init=True,
        block_size=256,
        max_model_len=job["context"],
        max_num_batched_tokens=job["tokens"],
        max_num_seqs=4,
        enable_prefix_caching=False,
        enforce_eager=True,
        gpu_memory_utilization=UTILIZATION,
        seed=0,
        **cache,
    )


def child(job: dict[str, Any]) -> None:
    """One run; writes what it finds to job["out"]."""
    import_flashinfer()
    import numpy as np
    import torch
    from vllm import LLM, SamplingParams

    if job["run"].endswith("_without"):
        from vllm.dsv4_overlay import attention

        attention._reserve = lambda layer, q: None
    llm = LLM(**engine_arguments(job))
    log("started")
    torch.cuda.reset_peak_memory_stats()
    prompt = np.random.default_rng(0).integers(16, job["vocab"], job["context"] - 2 * OUTPUT_TOKENS).tolist()
    began = time.perf_counter()
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    answers = llm.generate({"prompt_token_ids": prompt}, sampling)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()  # torch gives nothing back, so that this is the least there was
    result = {
        "served": len(answers[0].outputs[0].token_ids) == OUTPUT_TOKENS,
        "seconds": round(time.perf_counter() - began, 1),
        "overrun_gib": round((total * (1 - UTILIZATION) - free) / 2**30, 3),
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
    }
    Path(job["out"]).write_text(json.dumps(result))


def found(job: dict[str, Any], log_file: Path, status: Any, seconds: float) -> dict[str, Any]:
    """What a run left: its own figures, vLLM's reports, and why it ended."""
    out, text = Path(job["out"]), log_file.read_text(errors="replace")
    result = {"ended": str(status), "wall_seconds": seconds}
    result |= json.loads(out.read_text()) if out.exists() else {"served": False}
    result["served"] = result["served"] and status == 0
    for key, pattern in REPORTS.items():
        if matches := pattern.findall(text):
            result[key] = float(matches[-1].replace(",", ""))
    if not result["served"]:
        words = OUT_OF_MEMORY.search(text)
        result["out_of_memory"] = words[0].strip()[-300:] if words else None
    return result


def compared_with(run: str) -> str | None:
    """The run that has to come before it."""
    if run == "stock":
        return None
    return run.removesuffix("_without") if run.endswith("_without") else "stock"


def verdict(run: str, runs: dict[str, Any], table_gib: float) -> tuple[bool, str]:
    """Whether `run` is as it has to be, beside those before it, and in words."""
    result = runs[run]
    if not result["served"]:
        return False, result["out_of_memory"] or f"not served: {result['ended']}"
    overrun = result["overrun_gib"]
    words = f"served in {result['seconds']} s, {overrun:.2f} GiB over"
    beside = compared_with(run)
    if beside is None:
        return True, words
    if not runs.get(beside, {}).get("served"):
        return False, f"{words}, and there is no {beside} to compare it with"
    more = overrun - runs[beside]["overrun_gib"]
    words += f", {more:+.2f} beside {beside}"
    if beside == "stock":
        return more <= table_gib / 10, words
    return more >= table_gib / 2, words if more >= table_gib / 2 else f"{words}: {beside} shows nothing"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the results, JSON")
    parser.add_argument("--work", type=Path, help="logs (default: OUT without suffix)")
    parser.add_argument("--runs", default=",".join(RUNS), help="in this order (default: %(default)s)")
    parser.add_argument("--context", type=int, default=1 << 20, help="max_model_len (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32768, help="of a step (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=500, help="seconds a run (default: %(default)s)")
    args = parser.parse_args(argv)
    args.runs = args.runs.split(",")
    if unknown := [run for run in args.runs if run not in RUNS]:
        parser.error(f"--runs names {', '.join(unknown)}; there are {', '.join(RUNS)}.")
    for at, run in enumerate(args.runs):
        beside = compared_with(run)
        if beside and beside not in args.runs[:at]:
            parser.error(f"--runs names {run}, which is compared with {beside}; name that before it.")
    if args.context % 256 or args.context < 1024:
        parser.error(f"--context is {args.context}; give a multiple of 256, 1024 or more.")
    if not 0 < args.tokens <= args.context:
        parser.error(f"--tokens is {args.tokens}; give 1 to --context.")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    need_gpus(1)
    prepare(args)
    config, good = model_config(), True
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "machine": machine(),
        "context": args.context,
        "tokens_a_step": args.tokens,
        "table_mib": args.tokens * (128 + args.context // 128) * 4 / 2**20,
        "runs": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for run in args.runs:
            job = {"run": run, "model": folder, "vocab": config["vocab_size"], "context": args.context,
                   "tokens": args.tokens,
                   "out": str((args.work / f"{run}.result.json").absolute())}  # fmt: skip
            job_file, log_file = args.work / f"{run}.job.json", args.work / f"{run}.log"
            job_file.write_text(json.dumps(job))
            Path(job["out"]).unlink(missing_ok=True)
            command = [sys.executable, str(Path(__file__).resolve()), "--child", str(job_file)]
            env = child_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", **STOCK_KERNELS)
            status, seconds = run_child(command, log_file, env, args.timeout)
            result = report["runs"][run] = found(job, log_file, status, seconds)
            result["as_expected"], result["verdict"] = verdict(run, report["runs"], report["table_mib"] / 1024)
            args.out.write_text(json.dumps(report, indent=1) + "\n")
            good &= result["as_expected"]
            state = "ok" if result["as_expected"] else "FAILED"
            print(f"{run:13} {state:7} {seconds:6.0f} s  {result['verdict']}", flush=True)
            if not result["as_expected"]:
                print(tail(log_file, 25), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--child":
        child(json.loads(Path(sys.argv[2]).read_text()))
        sys.exit(0)
    sys.exit(main())
