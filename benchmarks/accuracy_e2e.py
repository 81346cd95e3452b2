#!/usr/bin/env python3
"""End-to-end accuracy of the attention backends of DeepSeek V4 or V3.2 on one model, by its logits.

    python scripts/make_mini_checkpoint.py /tmp/mini-v4
    python benchmarks/accuracy_e2e.py --model /tmp/mini-v4 --out results.json

Each configuration ("run") starts vLLM's offline `LLM` in a process of its own on the same prompts
of 1 to 8192 tokens, submitted together, so that chunked prefill mixes with decodes. The first run
(`truth`: the float32 torch reference on the BF16 cache) decodes greedily; every other run is fed
the same continuation, token by token through the decode path, by a logits processor that leaves
only that token. The log-probabilities reported are the raw ones, taken before it. Compared are,
against the truth: KL divergence, the largest difference of a log-probability and the agreement on
the most likely token, for decode steps (the token after the prefill included) and for prompts.

Runs:
    truth, truth_fp8          float32 torch reference on the bfloat16 / fp8_per_tensor cache, eager
    truth_rows                the same on the fp8_ds_mla cache, for models and releases without the others: how far
                              kernels are from exact attention over the same rows (not in the default list)
    flashmla                  vLLM's own backend and kernels: the fp8_ds_mla cache, eager
    drop_in                   the same backend and cache by our kernels, where they serve
    bf16, fp8                 FLASHINFER_MLA_SPARSE_DSV4 on the bfloat16 / fp8_per_tensor cache
    flashmla_graph, bf16_graph, fp8_graph    the same, decoding by replay of full CUDA graphs
    flashmla_compiled, bf16_compiled, fp8_compiled    with vLLM's defaults: torch.compile, full and
                              piecewise graphs; Inductor rounds elsewhere, so these differ from
                              eager runs whatever the attention backend
    fp8_calibrated, fp8_calibrated_graph    fp8 and fp8_graph with scales that the calibration command
                              measures first, on other prompts (not in the default list)
    marlin, humming, humming_fp8, fp8_experts    drop_in with experts by Marlin, by Humming, by it with FP8
                              activations, and all in FP8, by the series of that name; of a checkpoint with
                              MXFP4 experts (--layout mxfp4-experts; not in the default list)

Runs of DeepSeek V3.2 and GLM-5 (make_mini_checkpoint.py --model v3.2), all eager, with the drop-in off, on 0.33.0
with sparse_mla_force_mqa, which leaves no prompt to dense attention:
    truth, truth_fp8          MLA_KERNELS_SPARSE by the float32 torch reference on the BF16 cache (`auto`) /
                              the rows of 656 bytes (`fp8_ds_mla`)
    flashmla_bf16, flashmla_fp8    FLASHMLA_SPARSE on both caches
    sparse_bf16, sparse_fp8        MLA_KERNELS_SPARSE on both caches
    drop_in_bf16, drop_in_fp8      FLASHMLA_SPARSE with the drop-in
    truth_sm80, sm80_bf16, sm80_fp8    the same three, with the GPU standing in for one of compute capability 8.0:
                              vLLM chooses as it does there, the backend too; so for sm89 (not in the default list)
Each of these, flashmla and drop_in counts the calls that our kernels and the reference served, and fails if its
name says otherwise.

What calibrated scales keep shows on checkpoints with large or small keys, where the bar of `fp8` itself may fail:

    for rms in 64 1 0.015625; do
        python scripts/make_mini_checkpoint.py /tmp/mini-$rms --kv-rms $rms
        python benchmarks/accuracy_e2e.py --model /tmp/mini-$rms --out scales_$rms.json \\
            --runs truth,flashmla,bf16,fp8,fp8_calibrated,fp8_calibrated_graph
    done

Runs found in --work are not repeated, so the list may be spread over several commands:
`--runs truth,flashmla`, then `--runs bf16,fp8`. The exit status is 0 when every run and every
bar that could be evaluated passed.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import itertools
import json
import os
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from e2e import (
    CAPABILITIES,
    DROP_IN,
    MIN_PROB,
    SPARSE_MLA,
    SPARSE_MLA_BASE,
    SPARSE_MLA_CACHES,
    SPARSE_MLA_ENVIRONMENT,
    STOCK_KERNELS,
    at_once,
    child_environment,
    comparable,
    compare_full,
    compare_top,
    compiled_when_used,
    full_rows,
    has_sparse_mla,
    import_flashinfer,
    log,
    machine,
    make_prompts,
    model_settings,
    need_gpus,
    node_environment,
    positions,
    positive,
    positives,
    prepare,
    ranks_share_a_gpu,
    run_child,
    stand_in,
    start_nodes,
    summary,
    tail,
)
from features.run import is_v41

BACKEND = "FLASHINFER_MLA_SPARSE_DSV4"
# Without torch.compile, so that a difference from the eager run is the graphs' own.
GRAPHS_ONLY = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
REFERENCE_ENV = {"VLLM_DSV4_PROVIDER": "reference"}
# Workers that count the calls that our kernels, or the reference, serve.
COUNTING, REFERENCE = "features.drop_in_calls.DropInCalls", "reference_attention.ReferenceAttention"
RUNS: dict[str, dict[str, Any]] = {
    "truth": {"backend": BACKEND, "kv": "bfloat16", "env": REFERENCE_ENV},
    "truth_rows": {"backend": None, "kv": "fp8", "env": DROP_IN, "worker": REFERENCE, "served_by": "reference"},
    "flashmla": {
        "backend": None, "kv": "fp8", "env": STOCK_KERNELS, "worker": COUNTING, "served_by": "flashmla",
    },
    "drop_in": {"backend": None, "kv": "fp8", "env": DROP_IN, "worker": COUNTING, "served_by": "ours"},
    "bf16": {"backend": BACKEND, "kv": "bfloat16"},
    "fp8": {"backend": BACKEND, "kv": "fp8_per_tensor"},
    "truth_fp8": {"backend": BACKEND, "kv": "fp8_per_tensor", "env": REFERENCE_ENV},
    "bf16_graph": {"backend": BACKEND, "kv": "bfloat16", "compilation": GRAPHS_ONLY},
    "fp8_graph": {"backend": BACKEND, "kv": "fp8_per_tensor", "compilation": GRAPHS_ONLY},
    "fp8_calibrated": {"backend": BACKEND, "kv": "fp8_per_tensor", "scales": True},
    "fp8_calibrated_graph": {
        "backend": BACKEND, "kv": "fp8_per_tensor", "scales": True, "compilation": GRAPHS_ONLY,
    },
    "flashmla_graph": {"backend": None, "kv": "fp8", "env": STOCK_KERNELS, "compilation": GRAPHS_ONLY},
    "bf16_compiled": {"backend": BACKEND, "kv": "bfloat16", "compilation": {}},
    "fp8_compiled": {"backend": BACKEND, "kv": "fp8_per_tensor", "compilation": {}},
    "flashmla_compiled": {"backend": None, "kv": "fp8", "env": STOCK_KERNELS, "compilation": {}},
}


def experts_run(by: str, env: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
    return RUNS["drop_in"] | {"env": DROP_IN | (env or {}), "options": {"moe_backend": by, **options}}


EXPERTS = {
    "marlin": experts_run("marlin"),
    "humming": experts_run("humming"),
    "humming_fp8": experts_run("humming", {"VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "float8e4m3"}'}),
    "fp8_experts": experts_run("marlin", additional_config={"dsv4_fp8_experts": 1}),
}
DEFAULT_RUNS = [r for r in RUNS if "calibrated" not in r and r != "truth_rows"]
RUNS |= EXPERTS


def sparse_mla_run(name: str, served_by: str) -> dict[str, Any]:
    """One of `SPARSE_MLA`, with a worker that counts; served_by: "reference", "ours" or "flashmla"."""
    return {
        "backend": SPARSE_MLA[name]["attention_backend"],
        "kv": SPARSE_MLA[name]["kv_cache_dtype"],
        "env": SPARSE_MLA_ENVIRONMENT[name],
        "worker": REFERENCE if served_by == "reference" else COUNTING,
        "served_by": served_by,
        "block_size": 64,
        "own_prefill": True,
    }


SPARSE_MLA_RUNS = {
    "truth": sparse_mla_run("sparse_bf16", "reference"),
    **{name: sparse_mla_run(name, "flashmla") for name in SPARSE_MLA_BASE.values()},
    **{name: sparse_mla_run(name, "ours") for name in SPARSE_MLA_BASE},
    "truth_fp8": sparse_mla_run("sparse_fp8", "reference"),
}
SPARSE_MLA_DEFAULT_RUNS = list(SPARSE_MLA_RUNS)
for sm in CAPABILITIES:
    as_there = {"backend": None, "stand_in": sm}
    SPARSE_MLA_RUNS[f"truth_{sm}"] = sparse_mla_run("sparse_bf16", "reference") | as_there
    for cache in SPARSE_MLA_CACHES:
        SPARSE_MLA_RUNS[f"{sm}_{cache}"] = sparse_mla_run(f"sparse_{cache}", "ours") | as_there
# (reference, run) of GPUs that stand in, and whose distance from `truth` bounds theirs.
STAND_IN_BASE = {
    (f"truth_{sm}", f"{sm}_{cache}"): f"flashmla_{cache}" for sm in CAPABILITIES for cache in SPARSE_MLA_CACHES
}
# (reference, run): what is compared.
PAIRS = [
    ("truth", "flashmla"),
    ("truth", "drop_in"),
    ("truth", "bf16"),
    ("truth", "fp8"),
    ("truth", "fp8_calibrated"),
    ("truth", "truth_fp8"),
    ("truth_rows", "flashmla"),
    ("truth_rows", "drop_in"),
    ("truth_fp8", "fp8"),
    ("flashmla", "flashmla_graph"),
    ("bf16", "bf16_graph"),
    ("fp8", "fp8_graph"),
    ("fp8_calibrated", "fp8_calibrated_graph"),
    ("flashmla", "flashmla_compiled"),
    ("bf16", "bf16_compiled"),
    ("fp8", "fp8_compiled"),
    *(("truth", name) for name in EXPERTS),
    *(("marlin", name) for name in EXPERTS if name != "marlin"),
]
TRUTHS = ("truth", "truth_rows")  # a continuation is of the first of these that runs
SPARSE_MLA_PAIRS = [
    *(("truth", name) for name in SPARSE_MLA_DEFAULT_RUNS if name != "truth"),
    *(("truth_fp8", name) for name in ("flashmla_fp8", "sparse_fp8", "drop_in_fp8")),
    *(("truth", f"truth_{sm}") for sm in CAPABILITIES),
    *STAND_IN_BASE,
]
KV_BYTES, MEMORY_FREE = 4 << 30, 0.05  # the cache's size is given: vLLM only checks that this share is free
PROMPT_LENGTHS = [1, 7, 127, 128, 129, 300, 3000, 8192]
FULL_PROMPT_LOGPROBS = 512  # longer prompts report their PROMPT_TOP most likely tokens
PROMPT_TOP = 64


# ---------------------------------------------------------------- the run, in its own process
def check_served(served_by: str, calls: list[dict[str, int]]) -> None:
    """Raises RuntimeError unless each worker's `calls`, by function, are those of a run served by that."""
    for of_a_worker in calls:
        reference = of_a_worker.get("reference", 0)
        ours = sum(of_a_worker.values()) - reference
        found = "reference" if reference >= ours > 0 else "ours" if ours else "flashmla"
        if found != served_by:
            raise RuntimeError(f"attention was served by {found}, not by {served_by}: {calls}")


def child(job: dict[str, Any]) -> None:
    """One run: generate, check the forced tokens, write the arrays."""
    start = time.perf_counter()
    spec, vocab, prompts = job["spec"], job["vocab"], job["prompts"]
    forced, steps = job["forced"], job["steps"]
    kwargs: dict[str, Any] = dict(
        model=job["model"],
        skip_tokenizer_init=True,
        tensor_parallel_size=job["tp"],
        kv_cache_dtype=spec["kv"],
        enforce_eager="compilation" not in spec,
        max_model_len=16384,
        max_num_batched_tokens=job["batch"],
        max_num_seqs=16,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=KV_BYTES,
        gpu_memory_utilization=MEMORY_FREE,
        async_scheduling=False,
        seed=0,
        max_logprobs=-1,
        logprobs_mode="raw_logprobs",
        logits_processors=["e2e:ForcedTokens"],
    )
    if job.get("v41"):  # its blocks are vLLM's choice
        kwargs["language_model_only"] = True
    else:
        kwargs["block_size"] = spec.get("block_size", 256)
    kwargs |= spec.get("options", {})
    if spec["backend"]:
        kwargs["attention_backend"] = spec["backend"]
    if "worker" in spec:
        kwargs["worker_extension_cls"] = spec["worker"]
    if "own_prefill" in spec:
        from vllm.config import AttentionConfig

        # 0.33.0 reads short prompts with dense attention, in which all runs would agree.
        if hasattr(AttentionConfig, "sparse_mla_force_mqa"):
            kwargs["attention_config"] = AttentionConfig(sparse_mla_force_mqa=True)
    if "scales" in spec:
        kwargs["additional_config"] = {"dsv4_scales": job["scales"]}
    if "compilation" in spec:
        kwargs["compilation_config"] = {
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
            **spec["compilation"],
        }
        kwargs |= compiled_when_used()
    if ranks_share_a_gpu():  # CUDA takes none that is named twice
        if job["tp"] > 1:
            kwargs |= start_nodes(kwargs)[0]
        else:
            os.environ.update(node_environment(0))
    import_flashinfer()
    if "stand_in" in spec:
        stand_in(spec["stand_in"])
    if "rounded_like" in spec:
        import rounded_inputs

        rounding = rounded_inputs.Rounding(Path(spec["rounded_like"]))
        rounding.install()
    import torch
    from vllm import LLM, SamplingParams

    log(f"LLM({kwargs})")
    llm = LLM(**kwargs)
    loaded = time.perf_counter()
    log(f"loaded in {loaded - start:.1f} s")

    def params(i: int) -> Any:
        n = len(prompts[i])
        prompt_logprobs = None if n == 1 else (-1 if n <= FULL_PROMPT_LOGPROBS else PROMPT_TOP)
        return SamplingParams(
            temperature=0.0,
            max_tokens=steps + 1,
            ignore_eos=True,
            detokenize=False,
            logprobs=-1,
            prompt_logprobs=prompt_logprobs,
            flat_logprobs=True,
            extra_args={"forced": forced[i]} if forced else None,
        )

    outputs = llm.generate(
        [{"prompt_token_ids": p} for p in prompts],
        [params(i) for i in range(len(prompts))],
        use_tqdm=False,
    )
    generated = time.perf_counter()
    log(f"generated in {generated - loaded:.1f} s")

    arrays: dict[str, np.ndarray] = {}
    tokens = []
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if list(output.prompt_token_ids) != list(prompt):
            raise RuntimeError(f"outputs out of order at prompt {i}")
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        if len(ids) != steps + 1:
            raise RuntimeError(f"prompt {i}: {len(ids)} tokens, not {steps + 1}")
        if forced and ids != forced[i]:
            raise RuntimeError(f"prompt {i}: the continuation was not followed: {ids[:8]} ...")
        tokens.append(ids)
        arrays[f"decode_{i}"] = full_rows(positions(completion.logprobs), vocab)
        if len(prompt) == 1:
            continue
        entries = positions(output.prompt_logprobs)[1:]  # nothing predicts the first token
        if len(entries) != len(prompt) - 1:
            raise RuntimeError(f"prompt {i}: {len(entries)} prompt positions")
        if len(prompt) <= FULL_PROMPT_LOGPROBS:
            arrays[f"prompt_{i}"] = full_rows(entries, vocab)
        else:  # the prompt's own next token comes first, then the most likely ones
            arrays[f"prompt_ids_{i}"] = np.stack([e[0][-PROMPT_TOP:] for e in entries])
            arrays[f"prompt_top_{i}"] = np.stack([e[1][-PROMPT_TOP:] for e in entries])
    for name, a in arrays.items():
        if not np.isfinite(a).all():
            raise RuntimeError(f"{name}: {int((~np.isfinite(a)).sum())} values are not finite")

    meta = {
        "seconds_load": round(loaded - start, 1),
        "seconds_generate": round(generated - loaded, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
    }
    if "served_by" in spec:
        meta["calls"] = llm.collective_rpc("drop_in_calls")
        check_served(spec["served_by"], meta["calls"])
    if "rounded_like" in spec and (missed := rounding.missed()):
        raise RuntimeError(f"inputs of {', '.join(missed)} were not rounded")
    try:
        config = llm.llm_engine.vllm_config
        meta["cache_dtype"] = str(config.cache_config.cache_dtype)
        meta["attention_backend"] = str(config.attention_config.backend)
        meta["cudagraph_mode"] = str(config.compilation_config.cudagraph_mode)
    except AttributeError as e:
        meta["config_error"] = str(e)
    out = Path(job["out"])
    partial = out.with_name(out.stem + ".partial.npz")
    np.savez(partial, tokens=np.array(tokens), **arrays)
    out.with_suffix(".json").write_text(json.dumps({"key": job["key"], "tokens": tokens, **meta}))
    os.replace(partial, out)
    log(f"wrote {out}; {meta}")


# ---------------------------------------------------------------- the parent
def key_of(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def base_key(model: Path, prompts: list[list[int]], steps: int, tp: int, where: dict[str, Any]) -> str:
    """What all runs of a model share: its checkpoint, the question, and the software and GPUs of machine()."""
    config = json.loads((model / "config.json").read_text())
    index = model / "model.safetensors.index.json"
    written = index.stat().st_mtime_ns if index.exists() else 0
    return key_of([config, written], prompts, steps, tp, comparable(where))


def read_result(path: Path, key: str) -> dict[str, Any] | None:
    """The run's meta data if `path` holds it for this key."""
    meta = path.with_suffix(".json")
    if not (path.exists() and meta.exists()):
        return None
    data = json.loads(meta.read_text())
    return data if data.get("key") == key else None


def start_run(name: str, job: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Run one configuration; {"ok", "seconds", ...}."""
    job_file = args.work / f"{name}.job.json"
    job_file.write_text(json.dumps(job))
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(job_file)]
    done = start(name, command, job["spec"], args)
    return done | {"ok": done["ok"] and bool(read_result(Path(job["out"]), job["key"]))}


def calibrate(prompts: list[list[int]], scales: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Write `scales`, as a user would; {"ok", "seconds", ...}."""
    prompt_file = args.work / "calibration.jsonl"
    prompt_file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    command = [sys.executable, "-m", "vllm.dsv4_overlay.calibrate", "--skip-tokenizer-init"]
    options = {
        "model": args.model,
        "prompts": prompt_file,
        "output": scales,
        "tensor-parallel-size": args.tp,
        "max-model-len": 16384,
        "max-num-batched-tokens": args.batch,
        "kv-cache-memory-bytes": KV_BYTES,
        "gpu-memory-utilization": MEMORY_FREE,
    }
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return start("calibration", command, {"backend": BACKEND}, args)


def start(name: str, command: list[str], spec: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Run a command with the environment of `spec`; {"ok", "seconds", ...}."""
    env = child_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0")  # requests arrive together: equal schedules
    if args.provider and spec["backend"]:
        env["VLLM_DSV4_PROVIDER"] = args.provider
    env.update(spec.get("env", {}))
    log_file = args.work / f"{name}.log"
    log(f"{name}: starting ({spec}); log in {log_file}")
    status, seconds = run_child(command, log_file, env, args.timeout)
    if status == 0:
        log(f"{name}: done in {seconds} s")
        return {"ok": True, "seconds": seconds}
    error = tail(log_file)
    log(f"{name}: FAILED ({status}) after {seconds} s; the log ends:\n{error}")
    return {"ok": False, "seconds": seconds, "status": str(status), "error": error}


def compare(ref: Any, run: Any, lengths: list[int]) -> dict[str, Any]:
    decode = [compare_full(ref[f"decode_{i}"], run[f"decode_{i}"]) for i in range(len(lengths))]
    full, coarse, by_prompt = [], [], []
    for i, n in enumerate(lengths):
        entry: dict[str, Any] = {
            "length": n,
            "first_token": summary([{k: v[:1] for k, v in decode[i].items()}]),
            "decode": summary([{k: v[1:] for k, v in decode[i].items()}]),
        }
        if f"prompt_{i}" in ref:
            full.append(compare_full(ref[f"prompt_{i}"], run[f"prompt_{i}"]))
            entry["prompt"] = summary(full[-1:])
        elif f"prompt_ids_{i}" in ref:
            names = (f"prompt_ids_{i}", f"prompt_top_{i}")
            coarse.append(compare_top(*(x[k] for x in (ref, run) for k in names)))
            entry["prompt_coarse"] = summary(coarse[-1:])
        by_prompt.append(entry)
    return {
        "decode": summary(decode),
        "prompt": summary(full),
        "prompt_coarse": summary(coarse),
        "by_prompt": by_prompt,
    }


def describe(data: Any, lengths: list[int]) -> dict[str, Any]:
    """How the reference's distributions look: a flat or a certain model proves nothing."""
    a = np.concatenate([data[f"decode_{i}"] for i in range(len(lengths))]).astype(np.float64)
    p = np.exp(a)
    top = np.sort(a, axis=-1)[:, -2:]
    entropy = -(p * a).sum(-1) / np.log(2)

    def quantiles(x: np.ndarray) -> list[float]:
        return [round(float(q), 4) for q in np.quantile(x, (0.05, 0.25, 0.5, 0.75, 0.95))]

    return {
        "top1_probability_quantiles": quantiles(p.max(-1)),
        "entropy_bits_quantiles": quantiles(entropy),
        "top1_top2_gap_quantiles": quantiles(top[:, 1] - top[:, 0]),
    }


def bars(comparisons: dict[str, Any], sparse_mla: bool = False) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    fp8_runs = ["fp8"] + ["fp8_calibrated"] * ("truth|fp8_calibrated" in comparisons)

    def value(pair: str, part: str, field: str) -> float | None:
        return ((comparisons.get(pair) or {}).get(part) or {}).get(field)

    def add(
        name: str, measured: float | None, limit: float | None, at_least: bool, stock: float | None = None
    ) -> None:
        passed = None
        # What is FlashMLA's to every bit is what both left to the same kernels.
        if measured is not None and limit is not None and measured != stock:
            passed = measured >= limit if at_least else measured <= limit
        sign = ">=" if at_least else "<="
        rows.append(
            {"bar": name, "measured": measured, "limit": limit, "sign": sign, "passed": passed}
        )

    if sparse_mla:
        runs = [(f"truth|{run}", base) for run, base in SPARSE_MLA_BASE.items()]
        stand_ins = {"|".join(pair): base for pair, base in STAND_IN_BASE.items()}
        runs += [(pair, base) for pair, base in stand_ins.items() if pair in comparisons]
        for part, (pair, base) in itertools.product(("decode", "prompt"), runs):
            stock = value(f"truth|{base}", part, "kl_mean")
            limit = None if stock is None else 1.05 * stock
            name = f"{part}: KL({pair}) <= 1.05 KL(truth|{base})"
            add(name, value(pair, part, "kl_mean"), limit, False, stock)
        return rows
    for part in ("decode", "prompt"):
        stock = value("truth|flashmla", part, "kl_mean")

        def limit(factor: float, stock: float | None = stock) -> float | None:
            return None if stock is None else stock * factor

        kl = value("truth|drop_in", part, "kl_mean")
        add(f"{part}: KL(truth|drop_in) <= 1.05 KL(truth|flashmla)", kl, limit(1.05), False, stock)
        if rows_of := value("truth_rows|flashmla", part, "kl_mean"):
            kl = value("truth_rows|drop_in", part, "kl_mean")
            what = f"{part}: KL(truth_rows|drop_in) <= 1.05 KL(truth_rows|flashmla)"
            add(what, kl, 1.05 * rows_of, False, rows_of)
        add(f"{part}: bf16 top-1", value("truth|bf16", part, "top1"), 0.995, True)
        kl = value("truth|bf16", part, "kl_mean")
        add(f"{part}: KL(truth|bf16) <= KL(truth|flashmla)/10", kl, limit(0.1), False)
        for run in fp8_runs:
            kl = value(f"truth|{run}", part, "kl_mean")
            add(f"{part}: KL(truth|{run}) <= 2 KL(truth|flashmla)", kl, limit(2.0), False)
        kl = value("truth_fp8|fp8", part, "kl_mean")
        add(f"{part}: KL(truth_fp8|fp8) <= KL(truth|flashmla)/10", kl, limit(0.1), False)
    for run in ("bf16", *fp8_runs):  # the graphs are of decode alone
        kl, stock = (value(pair, "decode", "kl_mean") for pair in (f"{run}|{run}_graph", "truth|flashmla"))
        add(f"decode: KL({run}|{run}_graph) <= KL(truth|flashmla)/10", kl, stock and stock / 10, False)
    return rows


def table(comparisons: dict[str, Any]) -> str:
    head = f"{'reference|run':28s} {'positions of':14s} {'n':>6s} {'mean KL':>10s} {'max KL':>10s}"
    lines = [head + f" {'max |dlogp|':>12s} {'top-1':>9s}"]
    for pair, c in comparisons.items():
        for part in ("decode", "prompt", "prompt_coarse"):
            s = c[part]
            if s:
                lines.append(
                    f"{pair:28s} {part:14s} {s['positions']:6d} {s['kl_mean']:10.3e} "
                    f"{s['kl_max']:10.3e} {s['logprob_diff_max']:12.4f} {s['top1']:9.3%}"
                )
    return "\n".join(lines)


def bar_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for r in rows:
        verdict = {True: "PASS", False: "FAIL", None: "n/a "}[r["passed"]]
        measured = "missing" if r["measured"] is None else f"{r['measured']:.4g}"
        limit = "missing" if r["limit"] is None else f"{r['limit']:.4g}"
        lines.append(f"{verdict}  {r['bar']:52s} {measured:>10s} {r['sign']} {limit}")
    return "\n".join(lines)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True, help="the results, JSON")
    parser.add_argument("--work", type=Path, help="arrays and logs (default: OUT without suffix)")
    parser.add_argument("--runs", help="comma-separated (default: those that need no more than the model)")
    parser.add_argument(
        "--lengths", type=positives, default=PROMPT_LENGTHS, help="prompt lengths in tokens"
    )
    parser.add_argument("--steps", type=positive, default=64, help="decode steps a prompt")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--batch", type=positive, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--tp", type=positive, default=1, help="tensor-parallel ranks")
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time, on the same GPUs")
    parser.add_argument("--provider", help="VLLM_DSV4_PROVIDER of the runs that are not a truth")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a run")
    args = parser.parse_args(argv)
    if not (Path(args.model) / "config.json").is_file():
        parser.error(f"{args.model} has no config.json; give a checkpoint's folder")
    args.config = model_settings(Path(args.model))
    args.specs, default = RUNS, DEFAULT_RUNS
    if has_sparse_mla(args.config):
        args.specs, default = SPARSE_MLA_RUNS, SPARSE_MLA_DEFAULT_RUNS
    args.runs = [r for r in args.runs.split(",") if r] if args.runs else list(default)
    unknown = [r for r in args.runs if r not in args.specs]
    if unknown:
        parser.error(f"unknown runs {unknown}; there are {list(args.specs)}")
    if max(args.lengths) + args.steps >= 16384:
        parser.error("prompt and decode steps must fit in 16384 tokens")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    need_gpus(args.tp)
    prepare(args)
    config, specs, sparse_mla = args.config, args.specs, args.specs is SPARSE_MLA_RUNS
    vocab = config["vocab_size"]
    prompts = make_prompts(args.lengths, vocab, args.seed)
    where = machine()
    base = base_key(Path(args.model), prompts, args.steps, args.tp, where)

    # The continuation: written by the first run that succeeds, `truth` where it can.
    chosen = args.work / "continuation.json"
    forced: list[list[int]] | None = None
    if chosen.exists():
        saved = json.loads(chosen.read_text())
        if saved["base"] == base:
            forced = saved["tokens"]
            log(f"continuation of run {saved['run']} from {chosen}")
    runs = list(args.runs)
    first = next((name for name in runs if name in TRUTHS), TRUTHS[0])
    if forced is None:
        if first in runs:
            runs.remove(first)
        else:
            log(f"no continuation yet: running {first} first")
        runs.insert(0, first)

    def key(name: str) -> str:
        spec = specs[name]
        extra: list[Any] = [spec, args.batch]
        if spec["backend"] and "env" not in spec:
            extra.append(args.provider)
        return key_of(base, forced, extra)

    pairs = SPARSE_MLA_PAIRS if sparse_mla else PAIRS
    record: dict[str, Any] = {}
    scales = args.work / f"scales-{base}.safetensors"
    if any("scales" in specs[name] for name in runs) and not scales.exists():
        record["calibration"] = calibrate(make_prompts(args.lengths, vocab, args.seed + 1), scales, args)

    def run(name: str) -> None:
        out = args.work / f"{name}.npz"
        if forced is not None and read_result(out, key(name)):
            log(f"{name}: found in {args.work}")
            record[name] = {"ok": True, "seconds": 0.0, "reused": True}
            return
        job = {
            "spec": specs[name],
            "model": str(args.model),
            "vocab": vocab,
            "prompts": prompts,
            "forced": forced,
            "steps": args.steps,
            "batch": args.batch,
            "tp": args.tp,
            "v41": is_v41(config),
            "scales": str(scales),
            "out": str(out),
            # The run that chooses the continuation is filed under the one it chose.
            "key": key(name) if forced is not None else f"choosing-{base}",
        }
        record[name] = start_run(name, job, args)

    while forced is None and runs:
        name = runs.pop(0)
        run(name)
        if record[name]["ok"]:
            meta_file = args.work / f"{name}.json"
            meta = json.loads(meta_file.read_text())
            forced = meta["tokens"]
            meta["key"] = key(name)
            meta_file.write_text(json.dumps(meta))
            chosen.write_text(json.dumps({"base": base, "run": name, "tokens": forced}))

    @functools.cache
    def arrays(name: str) -> dict[str, Any]:
        with np.load(args.work / f"{name}.npz") as f:
            return {k: f[k] for k in f.files}

    @functools.cache
    def compared(a: str, b: str) -> dict[str, Any]:
        return compare(arrays(a), arrays(b), args.lengths)

    def report() -> dict[str, Any]:
        """Compare what has run so far, and write it."""
        there = set()
        for name in specs:  # also those of earlier commands
            meta = read_result(args.work / f"{name}.npz", key(name)) if forced is not None else None
            if meta is None:
                continue
            there.add(name)
            record.setdefault(name, {"ok": True, "seconds": 0.0, "reused": True})
            record[name].update({k: v for k, v in meta.items() if k not in ("tokens", "key")})
        comparisons = {f"{a}|{b}": compared(a, b) for a, b in pairs if {a, b} <= there}
        rows = bars(comparisons, sparse_mla)
        truth = next((name for name in TRUTHS if name in there), None)
        results = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join([sys.executable, *sys.argv]),
            "model": str(args.model),
            "model_config": config,
            "seed": args.seed,
            "prompt_lengths": args.lengths,
            "decode_steps": args.steps,
            "max_num_batched_tokens": args.batch,
            "continuation_run": json.loads(chosen.read_text())["run"] if forced else None,
            "machine": where,
            "runs": dict(record),
            "reference_distributions": describe(arrays(truth), args.lengths) if truth else {},
            "notes": {
                "kl": "nats, over the full vocabulary, reference against run",
                "logprob_diff_max": f"over tokens with a reference probability above {MIN_PROB}",
                "prompt_coarse": f"prompts above {FULL_PROMPT_LOGPROBS} tokens: a lower bound of KL from the "
                f"{PROMPT_TOP} most likely tokens of each run",
            },
            "comparisons": comparisons,
            "bars": rows,
        }
        args.out.write_text(json.dumps(results, indent=1) + "\n")
        return results

    lock = threading.Lock()

    def run_and_report(name: str) -> None:
        run(name)
        with lock:  # a command that is ended early leaves what it found
            report()

    at_once(args.jobs, run_and_report, runs)
    results = report()

    for name, r in record.items():
        state = "reused" if r.get("reused") else "ok" if r["ok"] else "FAILED"
        parts = f"load {r.get('seconds_load')} s, generate {r.get('seconds_generate')} s"
        print(f"{name:18s} {state:7s} {r['seconds']:7.1f} s  ({parts})")
    print(f"reference: {results['reference_distributions']}")
    print(table(results["comparisons"]))
    print(bar_table(results["bars"]))
    print(f"results in {args.out}")
    failed = any(r["passed"] is False for r in results["bars"]) or any(not r["ok"] for r in record.values())
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--child":
        child(json.loads(Path(sys.argv[2]).read_text()))
        sys.exit(0)
    sys.exit(main())
