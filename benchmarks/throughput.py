#!/usr/bin/env python3
"""Tokens a second of a whole DeepSeek V4, V3.2 or GLM-5 model, by attention backend, with vLLM's offline `LLM`.

    python benchmarks/throughput.py --model /tmp/mini-v4 --out mini.json         # a checkpoint
    python benchmarks/throughput.py --model flash --tp 4 --out flash.json        # V4-Flash's shape, dummy weights
    python benchmarks/throughput.py --model v3.2 --share-of 8 --batches 1,2,4,8,16,128 --out v32.json
    python benchmarks/throughput.py --model flash --share-of 4 --layout ct-w4a16 --runs drop_in --out w4a16.json

Each run is a process of its own and is merged into OUT as it ends, its measurements one by one as they come, so
`--runs flashmla` and later `--runs fp8,bf16` of the same software on the same kind of GPU, with the same options
and VLLM_* variables, fill the same file. Runs:

    flashmla    FLASHMLA_SPARSE_DSV4 on fp8_ds_mla, stock kernels
    drop_in     the same by ours, where they serve
    fp8, bf16   FLASHINFER_MLA_SPARSE_DSV4 on fp8_per_tensor / bfloat16
    fp8_experts    drop_in, with experts in FP8 in steps of 2048 tokens and more; only if --runs names it

Those of DeepSeek V3.2 and GLM-5, with the drop-in off unless named:

    flashmla_bf16, flashmla_fp8    FLASHMLA_SPARSE on a BF16 cache / the rows of 656 bytes
    sparse_bf16, sparse_fp8        MLA_KERNELS_SPARSE on the same
    drop_in_bf16, drop_in_fp8      FLASHMLA_SPARSE on the same, with the drop-in
    fa3_bf16                       FLASH_ATTN_MLA_SPARSE, which vLLM 0.33.0 has; only if --runs names it

Prefill: 8 prompts of 8192 random tokens (--prompt), one token out; median of 3 after one that warms up. Decode:
the largest batch is filled once, steps are timed while every request decodes (median of 4 windows of 16 steps, by
full CUDA graphs), then requests are aborted down to the next smaller batch. If the first run's prefill would need
more than --fill-seconds to fill the largest batch, contexts are cut, for all runs alike, but not below 2304
tokens, from where on the top-k of 512 (V3.2's of 2048) is full.

`flash` has 43 layers, 256 MXFP4 experts and V4-Flash's sizes. Dummy weights are near zero but for those of
seeded_weights.py, so that index scores differ and top-k takes the time that it does with trained ones. A router of
near-zero weights would send every token to the same six experts: here all layers route by token id
(`num_hash_layers` 43), and tokens are sampled at temperature 1 from what is then a flat distribution.

With --layout its weights are as a quantised checkpoint has them (make_mini_checkpoint.py names the layouts), and
without it as DeepSeek's has: two such results, with the memory of weights that vLLM reports, say whether it pays.

`v3.2` and `glm-5` have these models' sizes with --layers layers, 3 of them dense, and FP8 weights. --share-of N is
what one of N tensor-parallel GPUs computes: its share of the heads, of the width of every expert and of the
vocabulary, and nothing sent between GPUs. Of V3.2, 8 leaves 16 heads and 16 leaves 8; of GLM-5, 8 leaves 8. With
too few layers a decode step waits for the CPU, and attention does not show. --profile tells: it adds the kernels
of 8 steps of each batch, and of the steps that read two prompts, by torch's profiler (`step`; in `busy_us` any of
them ran). Embeddings are seeded: tokens spread over the experts even by routers of near-zero weights.

With --lock FILE several commands start beside each other, each with a --work of its own, and one at a time
measures; lock the file with flock(1) until all have started. They may share OUT, so their contexts are not cut:
none knows yet how far another cuts its own. --timeout and the clocks are of the whole run, waiting included.

The result has the figure of every repetition, and the clocks and temperature meanwhile. --repeat N has every run N
times, from a new start each, as `flashmla`, `flashmla-2`, …; ratios are of medians, in V3.2 over the same cache.

What keeps start-up short: no torch.compile (mode 0), graphs for the measured batches only, --kv-gib instead of
profiling graph memory, no FlashInfer autotuning, VLLM_DEEP_GEMM_WARMUP=skip, dummy weights.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import json
import math
import re
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from e2e import (
    DROP_IN,
    SPARSE_MLA,
    SPARSE_MLA_BASE,
    SPARSE_MLA_ENVIRONMENT,
    STOCK_KERNELS,
    child_environment,
    compiled_when_used,
    has_sparse_mla,
    import_flashinfer,
    kept,
    log,
    machine,
    model_settings,
    need_gpus,
    positive,
    positives,
    prepare,
    run_child,
    tail,
    visible_gpus,
)
from gpu_watch import Watch, processes
from serve_report import PROFILED_STEPS, newest_traces, profiled_step, profiler

# The models made here, and into how many GPUs' shares they can be divided.
MADE = {"flash": 8, "v3.2": 16, "glm-5": 8}
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
BACKEND = "FLASHINFER_MLA_SPARSE_DSV4"
STOCK = {"attention_backend": "FLASHMLA_SPARSE_DSV4", "kv_cache_dtype": "fp8"}
RUNS = {
    "flashmla": STOCK,
    "drop_in": STOCK,
    "fp8": {"attention_backend": BACKEND, "kv_cache_dtype": "fp8_per_tensor"},
    "bf16": {"attention_backend": BACKEND, "kv_cache_dtype": "bfloat16"},
}
# It needs a series that is not applied by default.
ON_REQUEST = {
    "fp8_experts": STOCK | {"moe_backend": "marlin", "additional_config": {"dsv4_fp8_experts": 2048}}
}
FA3 = {"fa3_bf16": {"attention_backend": "FLASH_ATTN_MLA_SPARSE", "kv_cache_dtype": "bfloat16"}}
SPARSE_RUNS = SPARSE_MLA | FA3
BASE = SPARSE_MLA_BASE | {"fa3_bf16": "flashmla_bf16"}
ENVIRONMENT = {"flashmla": STOCK_KERNELS, **dict.fromkeys(("drop_in", *ON_REQUEST), DROP_IN),
               **SPARSE_MLA_ENVIRONMENT, **dict.fromkeys(FA3, STOCK_KERNELS)}  # fmt: skip
PREFILL_PROMPTS, PREFILL_REPEATS, PROFILED_PROMPTS = 8, 3, 2
WARM_STEPS, WINDOW_STEPS, WINDOWS = 16, 16, 4
DSPARK_DRAFTS = 5  # tokens that V4-Flash-0731 drafts a step
LEAST_CONTEXT = 2304
# Of the tokens that dummy weights write: experts are chosen by them, and a model of NaN writes one token alone.
LEAST_DISTINCT = 0.5
# Lines of vLLM's log that the results keep.
REPORTS = re.compile(
    r"GPU KV cache size|Maximum concurrency|Model loading took|init engine|Graph capturing finished|"
    r"Warm-up of the full-width|sparse_mla provider|FlashMLA's sparse calls|MoE backend|Using \S+ backend|"
    r"JIT compilation during inference|[Pp]reempt"
)


DUMMY_WEIGHTS = {"load_format": "dummy", "worker_extension_cls": "seeded_weights.SeededWeights"}


@contextlib.contextmanager
def locked(path: Path | str | None) -> Iterator[None]:
    """While the context is open, if there is a file to lock."""
    if path is None:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def kind(run: str) -> str:
    """`flashmla` of its second start, `flashmla-2`."""
    return run.split("-")[0]


def flash_shape(share_of: int = 1, experts: int = 256, dspark: bool = False) -> Any:
    """V4-Flash's sizes, or those of a GPU's share among `share_of`, routed by hash in all layers.

    dspark: with the three stages of V4-Flash-0731's draft in place of the next-token layer.
    """
    sys.path.insert(0, str(SCRIPTS))
    from make_mini_checkpoint import Shape

    stages = 3 if dspark else 1
    return Shape(
        layers=43,
        mtp_layers=stages,
        dspark=dspark,
        heads=64 // share_of,
        o_groups=8 // share_of,
        compress_ratios=(0, 0) + (4, 128) * 20 + (4,) + (0,) * stages,
        hash_layers=43,
        experts=experts,
        moe_intermediate=2048 // share_of,
        vocab=129280 // share_of,
        fp8_wo_b=True,
    )


def flash_config(share_of: int = 1, layout: str | None = None, dspark: bool = False) -> dict[str, Any]:
    """config.json of that. Experts are MXFP4 and the rest FP8 blocks, as DeepSeek's, or all as in `layout`."""
    shape = flash_shape(share_of, dspark=dspark)
    from make_mini_checkpoint import LAYOUTS, model_config

    if layout:
        return model_config(shape, LAYOUTS[layout]())
    drafts = {"dspark_block_size": DSPARK_DRAFTS} if dspark else {}
    return model_config(shape) | {"expert_dtype": "fp4"} | drafts


def write_model(args: argparse.Namespace) -> None:
    """config.json of a model that is made here; of a layout also the names of its tensors, by which vLLM knows
    what to make, with one expert for all."""
    args.model.mkdir(exist_ok=True)
    (args.model / "config.json").write_text(json.dumps(args.made, indent=1))
    from make_mini_checkpoint import LAYOUTS, Recipe
    from mini_checkpoint.writer import INDEX, write_names

    (args.model / INDEX).unlink(missing_ok=True)  # of another layout
    if args.layout:
        write_names(args.model, Recipe(flash_shape(experts=1), 0, LAYOUTS[args.layout]()))


def sparse_mla_config(model: str, layers: int, share_of: int = 1) -> dict[str, Any]:
    """config.json of V3.2's or GLM-5's shape with fewer layers; or of what one of `share_of` GPUs has."""
    sys.path.insert(0, str(SCRIPTS))
    from mini_checkpoint import deepseek_v32, glm_5

    v32 = model == "v3.2"
    module, hidden, intermediate, vocab = (
        (deepseek_v32, 7168, 18432, 129280) if v32 else (glm_5, 6144, 12288, 154880)
    )
    shape = module.Shape(
        hidden=hidden,
        layers=layers,
        dense_layers=3,
        heads=module.Shape.heads // share_of,
        intermediate=intermediate // share_of,
        experts=256,
        moe_intermediate=2048 // share_of,
        vocab=vocab // share_of,
        fp8_o_proj=True,
    )
    return module.model_config(shape) | ({"n_group": 8, "topk_group": 4} if v32 else {})


def engine_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `LLM`."""
    batches = job["batches"]
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted(batches)}
    weights = {"load_format": "auto"} if job["weights"] else DUMMY_WEIGHTS
    return dict(
        model=job["model"],
        skip_tokenizer_init=True,
        tensor_parallel_size=job["tp"],
        block_size=64 if kind(job["run"]) in SPARSE_RUNS else 256,
        max_model_len=job["max_model_len"],
        max_num_batched_tokens=job["batch_tokens"],
        max_num_seqs=max(*batches, PREFILL_PROMPTS),
        enable_prefix_caching=False,
        kv_cache_memory_bytes=job["kv_gib"] << 30,
        enable_flashinfer_autotune=False,
        compilation_config=graphs,
        seed=0,
        # Beside others: vLLM only checks that this share is free, as the cache's size is given.
        **({"gpu_memory_utilization": 0.05} if job["lock"] else {}),
        **({"profiler_config": profiler(Path(job["profile"]))} if job["profile"] else {}),
        **weights,
        **(RUNS | ON_REQUEST | SPARSE_RUNS)[kind(job["run"])],
    )


def child(job: dict[str, Any]) -> None:
    """One run; writes what it has to job["out"] after every measurement."""
    start = time.perf_counter()
    import_flashinfer()
    from vllm import LLM, SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    result: dict[str, Any] = {"prefill": {}, "decode": {}}

    def save(**more: Any) -> None:
        result.update(more)
        Path(job["out"]).write_text(json.dumps(result))

    arguments = engine_arguments(job) | compiled_when_used()
    log(f"LLM({arguments})")
    llm = LLM(**arguments)
    engine = llm.llm_engine
    cache = engine.vllm_config.cache_config
    save(seconds_start=round(time.perf_counter() - start, 1), gpu_blocks=cache.num_gpu_blocks)
    log(f"started in {result['seconds_start']} s")
    held = contextlib.ExitStack()
    held.enter_context(locked(job["lock"]))
    rng = np.random.default_rng(0)
    sent = 0

    def submit(count: int, length: int, max_tokens: int) -> list[str]:
        nonlocal sent
        names = [str(sent + i) for i in range(count)]
        sent += count
        for name in names:
            params = SamplingParams(
                temperature=1.0,
                max_tokens=max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            tokens = rng.integers(16, job["vocab"], length).tolist()
            engine.add_request(name, tokens_input(tokens), params)
        return names

    written: list[dict[str, list[int]]] = []  # of each step, looked at when nothing is timed

    def step() -> dict[str, int]:
        """New tokens by request; a request that ends too early would be missed by the timing."""
        new = {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.outputs}
        written.append(new)
        return {request: len(tokens) for request, tokens in new.items()}

    def too_small(what: str) -> RuntimeError:
        """Without room vLLM goes back and forth between the requests."""
        cache = f"the cache of {job['kv_gib']} GiB is too small; give more --kv-gib, or less --context"
        return RuntimeError(f"{what}: {cache}")

    def read(prompts: int) -> None:
        waiting = set(submit(prompts, job["prompt"], 1))
        while waiting:
            waiting -= step().keys()

    rates = []
    for repeat in range(1 + PREFILL_REPEATS):
        begin = time.perf_counter()
        read(PREFILL_PROMPTS)
        rate = PREFILL_PROMPTS * job["prompt"] / (time.perf_counter() - begin)
        log(f"prefill {repeat}: {rate:.0f} tokens/s")
        if repeat:
            rates.append(rate)
            save(prefill={"tokens_per_second": statistics.median(rates), "all": rates})
    if job["profile"]:
        llm.start_profile()
        read(PROFILED_PROMPTS)
        llm.stop_profile()

    most = max(job["batches"])
    context = job["context"]
    if not job["context_is_fixed"]:
        affordable = int(job["fill_seconds"] * result["prefill"]["tokens_per_second"] / most)
        context = min(context, max(LEAST_CONTEXT, affordable // 256 * 256))
    save(context=context)
    log(f"filling {most} x {context} tokens")
    begin = time.perf_counter()
    running = submit(most, context, job["decode_tokens"])
    waiting = set(running)
    for _ in range(job["fill_steps"]):
        waiting -= step().keys()
        if not waiting:
            break
    else:
        asked = f"{len(waiting)} of {most} requests of {context} tokens"
        raise too_small(f"{asked} did not begin in {job['fill_steps']} steps")
    save(seconds_fill=round(time.perf_counter() - begin, 1))
    log(f"filled in {result['seconds_fill']} s")
    for batch in sorted(job["batches"], reverse=True):
        engine.abort_request(running[batch:])
        running = running[:batch]

        def tokens_of(steps: int, batch: int = batch) -> int:
            done = 0
            while done < steps * batch:
                done += sum(step().values())
                if not engine.has_unfinished_requests():
                    raise RuntimeError(f"requests ended before batch {batch} was measured")
            return done

        tokens_of(WARM_STEPS)
        written.clear()
        rates = []
        for _ in range(WINDOWS):
            begin = time.perf_counter()
            tokens = tokens_of(WINDOW_STEPS)
            rates.append(tokens / (time.perf_counter() - begin))
        if engine.get_num_unfinished_requests() != batch:
            raise RuntimeError(f"{engine.get_num_unfinished_requests()} requests are left of {batch}")
        # They write in step, unless some wait, preempted, while the others write instead.
        counts = [sum(len(new.get(name, ())) for new in written) for name in running]
        if max(counts) > 1 + min(counts):
            raise too_small(f"not all of {batch} requests wrote in every step")
        rate = statistics.median(rates)
        all_written = [token for new in written for tokens in new.values() for token in tokens]
        distinct = len(set(all_written)) / len(all_written)
        if not job["weights"] and distinct < LEAST_DISTINCT:
            raise RuntimeError(f"{distinct:.0%} of the tokens written differ, so they went to too few experts")
        result["decode"][str(batch)] = {
            "tokens_per_second": rate, "all": rates, "ms_per_step": 1e3 * batch / rate,
            "distinct_tokens": round(distinct, 3),
        }  # fmt: skip
        save()
        log(f"decode {batch}: {rate:.0f} tokens/s, {1e3 * batch / rate:.2f} ms a step")
        if job["profile"]:
            llm.start_profile()
            tokens_of(PROFILED_STEPS)
            llm.stop_profile()
    engine.abort_request(running)
    save(done=True)
    held.close()


def collect(job: dict[str, Any], log_file: Path, status: Any, seconds: float) -> dict[str, Any]:
    """What a run left, whether it ended or not."""
    out = Path(job["out"])
    result = json.loads(out.read_text()) if out.exists() else {}
    result |= {"ok": status == 0 and result.get("done", False), "status": str(status), "seconds": seconds}
    lines = log_file.read_text(errors="replace").splitlines()
    result["vllm_reports"] = [re.sub(r"^.*?\] ", "", x)[:200] for x in lines if REPORTS.search(x)]
    size = re.search(r"GPU KV cache size: ([\d,]+) tokens", "\n".join(lines))
    if size:
        tokens = int(size[1].replace(",", ""))
        capacity = {"gib": job["kv_gib"], "tokens": tokens, "tokens_per_gib": tokens // job["kv_gib"]}
        result["kv_cache"] = capacity | {"max_model_len": job["max_model_len"]}
    return result


def report(runs: dict[str, Any], batches: list[int]) -> tuple[dict[str, Any], str]:
    """(medians of the starts over FlashMLA's, with the least and most ratio of any two starts; a table)."""
    head = ["prefill", *(f"decode {b}" for b in batches)]
    rates: dict[str, list[list[float]]] = {}
    for name, run in runs.items():
        counts = run if run.get("ok", True) else {}  # what a run measured before it failed does not
        found = [counts.get("prefill") or {}, *((counts.get("decode", {}).get(str(b)) or {}) for b in batches)]
        columns = rates.setdefault(kind(name), [[] for _ in head])
        for column, one in zip(columns, found, strict=True):
            column += [one["tokens_per_second"]] if one else []
    nothing: list[list[float]] = [[] for _ in head]
    ratios: dict[str, Any] = {}
    lines = [f"{'tokens/s':13s}" + "".join(f"{h:>24s}" for h in head) + f"{'KV tokens/GiB':>16s}"]
    for name, columns in rates.items():
        cells = []
        base = rates.get(BASE.get(name, "flashmla"), nothing)
        for title, values, others in zip(head, columns, base, strict=True):
            text = f"{statistics.median(values):.0f}" if values else "-"
            if values and others and not name.startswith("flashmla"):
                ratio = statistics.median(values) / statistics.median(others)
                spread = [min(values) / max(others), max(values) / min(others)]
                ratios.setdefault(name, {})[title] = {
                    "ratio": round(ratio, 3), "least_most": [round(value, 3) for value in spread],
                }  # fmt: skip
                text += f" ({ratio:.2f}, {spread[0]:.2f}-{spread[1]:.2f})"
            cells.append(f"{text:>24s}")
        kv = next((run["kv_cache"]["tokens_per_gib"] for other, run in runs.items()
                   if kind(other) == name and run.get("kv_cache")), "-")  # fmt: skip
        lines.append(f"{name:13s}" + "".join(cells) + f"{kv:>16}")
    return ratios, "\n".join(lines)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help=f"a checkpoint's folder, or: {', '.join(MADE)}")
    parser.add_argument("--layers", type=int, default=32, help="of v3.2 and glm-5 (default: %(default)s)")
    parser.add_argument("--share-of", type=int, choices=[1, 2, 4, 8, 16], default=1, help="GPUs, 16 of v3.2 alone")
    parser.add_argument("--layout", help="of flash, as make_mini_checkpoint.py names it")
    parser.add_argument("--out", type=Path, required=True, help="the results, JSON; runs already in it are kept")
    parser.add_argument("--work", type=Path, help="logs (default: OUT without suffix)")
    parser.add_argument("--runs", help="comma-separated; flashmla goes first (default: all that need no naming)")
    parser.add_argument("--repeat", type=positive, default=1, help="starts of every run (default: %(default)s)")
    parser.add_argument("--tp", type=positive, default=1, help="tensor-parallel ranks")
    parser.add_argument("--batches", type=positives, default=[1, 16, 64, 128])
    parser.add_argument("--prompt", type=positive, default=8192, help="tokens of a prompt in prefill")
    parser.add_argument("--context", type=positive, default=8192, help="tokens a decoding request starts from")
    parser.add_argument("--fill-seconds", type=float, default=30, help="prefill time that a context may cost")
    parser.add_argument("--batch-tokens", type=positive, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--kv-gib", type=positive, default=48, help="GiB of KV cache a GPU")
    parser.add_argument("--timeout", type=float, default=540, help="seconds a run")
    parser.add_argument("--profile", action="store_true", help="also the kernels of steps")
    parser.add_argument("--lock", type=Path, help="start beside others; measure with this file locked")
    args = parser.parse_args(argv)
    args.work = args.work or args.out.with_suffix("")
    if args.layers < 4:
        parser.error(f"--layers is {args.layers}; give 4 or more: 3 are dense.")
    if args.share_of > MADE.get(args.model, 1):
        parser.error("--share-of is of --model v3.2, and up to 8 of flash and glm-5.")
    sys.path.insert(0, str(SCRIPTS))
    from make_mini_checkpoint import LAYOUTS

    if args.layout and (args.model != "flash" or args.layout not in LAYOUTS):
        parser.error(f"--layout {args.layout}: --model flash has {', '.join(LAYOUTS)}.")
    args.batches = sorted(set(args.batches))
    args.made = None  # a config.json to be written
    if args.model == "flash":
        args.made = flash_config(args.share_of, args.layout)
    elif args.model in MADE:
        args.made = sparse_mla_config(args.model, args.layers, args.share_of)
    args.model = (args.work / args.model if args.made else Path(args.model)).resolve()
    if not args.made and not (args.model / "config.json").is_file():
        parser.error(f"{args.model} has no config.json; give a checkpoint's folder, or: {', '.join(MADE)}")
    args.config = args.made or model_settings(args.model)
    there = list(SPARSE_RUNS if has_sparse_mla(args.config) else RUNS | ON_REQUEST)
    by_default = [run for run in there if run not in ON_REQUEST | FA3]
    runs = [r for r in args.runs.split(",") if r] if args.runs else by_default
    unknown = [r for r in runs if r not in there]
    if unknown:
        parser.error(f"unknown runs {unknown}; there are {there}")
    runs = sorted(runs, key=there.index)
    # In turns, so that what a machine does over time meets all runs alike.
    args.runs = [run if n == 1 else f"{run}-{n}" for n in range(1, args.repeat + 1) for run in runs]
    return args


def make_job(args: argparse.Namespace, run: str, context: int | None) -> dict[str, Any]:
    """What the child needs to know. `context`: the one that another run settled on."""
    fill_steps = 2 * math.ceil(max(args.batches) * args.context / args.batch_tokens) + 64  # with a margin
    # The first request decodes while the others are filled in, and in every window.
    decode_tokens = fill_steps + len(args.batches) * (WARM_STEPS + (WINDOWS + 2) * WINDOW_STEPS)
    return {
        "run": run,
        "model": str(args.model),
        "weights": args.made is None and (args.model / "model.safetensors.index.json").is_file(),
        "vocab": args.config["vocab_size"],
        "tp": args.tp,
        "batches": args.batches,
        "batch_tokens": args.batch_tokens,
        "context": context or args.context,
        "context_is_fixed": context is not None or args.lock is not None,
        "prompt": args.prompt,
        "max_model_len": max(args.context + decode_tokens, args.prompt) + 256,
        "fill_seconds": args.fill_seconds,
        "fill_steps": fill_steps,
        "decode_tokens": decode_tokens,
        "kv_gib": args.kv_gib,
        "out": str(args.work / f"{run}.json"),
        "lock": args.lock and str(args.lock.absolute()),
        "profile": str((args.work / f"{run}-profile").absolute()) if args.profile else None,
    }


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    need_gpus(args.tp)
    if not args.lock and (others := processes(visible_gpus()[: args.tp])):
        numbers = ", ".join(map(str, sorted(others)))
        sys.exit(f"error: other processes ({numbers}) use the GPU, which would be measured too; end them first.")
    prepare(args)
    if args.made:
        write_model(args)
    settings = {
        "model_config": json.loads((args.model / "config.json").read_text()),
        "tp": args.tp,
        "batches": args.batches,
        "prompt": args.prompt,
        "context_asked": args.context,
        "max_num_batched_tokens": args.batch_tokens,
        "kv_gib": args.kv_gib,
        "weights": "real" if make_job(args, args.runs[0], None)["weights"] else "dummy, seeded",
    }
    where = machine()

    def results_so_far() -> dict[str, Any]:
        results = kept(args.out, where)
        if not results:
            return {"settings": settings, "runs": {}}
        theirs = results.get("settings", {})
        if others := [key for key in settings if theirs.get(key) != settings[key]]:
            sys.exit(f"error: {args.out} holds runs with another {', '.join(others)}; give another --out.")
        return results

    runs = results_so_far()["runs"]
    for name in args.runs:
        context = next((r["context"] for other, r in runs.items() if other != name and r.get("context")), None)
        job = make_job(args, name, context)
        Path(job["out"]).unlink(missing_ok=True)
        job_file, log_file = args.work / f"{name}.job.json", args.work / f"{name}.log"
        job_file.write_text(json.dumps(job))
        log(f"{name}: starting; log in {log_file}")
        command = [sys.executable, str(Path(__file__).resolve()), "--child", str(job_file)]
        env = child_environment(**ENVIRONMENT.get(kind(name), {}))
        with Watch() as watch:
            status, seconds = run_child(command, log_file, env, args.timeout)
            found = collect(job, log_file, status, seconds) | {"gpu_meanwhile": watch.summary()}
        missing = None
        if job["profile"] and found["ok"]:
            parts = [found["prefill"], *(found["decode"][str(batch)] for batch in reversed(args.batches))]
            try:
                for part, trace in zip(parts, newest_traces(Path(job["profile"]), len(parts)), strict=True):
                    part["step"] = profiled_step(trace)
            except SystemExit as error:  # once what was measured is written
                missing = error
        found["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        found["command"] = shlex.join(sys.argv)
        log(f"{name}: {'done' if found['ok'] else f'FAILED ({status})'} in {seconds} s")
        if not found["ok"]:
            print(tail(log_file), flush=True)
        with locked(args.lock):  # another command may have written meanwhile
            results = results_so_far()
            runs = results["runs"]
            runs[name] = found
            ratios, text = report(runs, args.batches)
            results |= {"machine": where, "ratio_to_flashmla": ratios}
            args.out.write_text(json.dumps(results, indent=1) + "\n")
        print(text, flush=True)
        if missing:
            raise missing
    print(f"results in {args.out}")
    return 0 if all(runs[name]["ok"] for name in args.runs) else 1


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--child":
        child(json.loads(Path(sys.argv[2]).read_text()))
        sys.exit(0)
    sys.exit(main())
