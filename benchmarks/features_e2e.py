#!/usr/bin/env python3
"""vLLM's features with the DeepSeek V4 attention backends, each against a plain run of the same backend.

    python scripts/make_mini_checkpoint.py /tmp/mini-v4
    python benchmarks/features_e2e.py --model /tmp/mini-v4 --out features.json              # one GPU
    python benchmarks/features_e2e.py --model /tmp/mini-v4 --out features.json --gpus 2     # what needs two

With 8 heads a GPU, as tensor parallel 8 has of 64:

    python scripts/make_mini_checkpoint.py /tmp/mini-v4-32 --heads 32
    python benchmarks/features_e2e.py --model /tmp/mini-v4-32 --out features-32.json --gpus 4 --steps tp4

The plain run (`reference`) is eager, on one GPU, without prefix cache, speculation or asynchronous scheduling.
Every step is a process of its own and is merged into OUT as it ends; steps in OUT are kept, so the list may
be spread over several commands (`--steps prefix,chunked`) of the same software, with the same VLLM_*
variables. A step passes if all its checks pass: its own, that no kernel of ours was compiled by Triton after
warm-up (vLLM's JIT monitor), and that greedy tokens and their log-probabilities are the reference's. They are
compared up to the first token that differs; such a token counts as noise if the reference gave both nearly
the same log-probability. Noise, as mean KL and as that margin:

    same arithmetic     KL, of decode steps and of prompts, at most 1e-3 or 4 times, margin at most 0.2 or 2 times,
                        what the reference differs from itself when its prompts come one at a time, not together
    other arithmetic    KL at most 2e-2, margin at most 1.5: torch.compile and sums over GPUs round elsewhere, and
                        FP8 linear layers amplify it. Run the step with --backend flashmla too: its own difference
                        is what vLLM's other layers make

The reference also runs every prompt with another beginning and the same last 8 tokens: that control must be at
least 0.1 away, or the comparison could not see a broken cache.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import queue
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from e2e import (
    child_environment,
    compare_top,
    import_flashinfer,
    kept,
    log,
    machine,
    make_prompts,
    positions,
    run_child,
    summary,
    tail,
)

OURS = "FLASHINFER_MLA_SPARSE_DSV4"
BACKENDS = {
    "bf16": {"attention_backend": OURS, "kv_cache_dtype": "bfloat16"},
    "fp8": {"attention_backend": OURS, "kv_cache_dtype": "fp8_per_tensor"},
    "flashmla": {"attention_backend": "FLASHMLA_SPARSE_DSV4", "kv_cache_dtype": "fp8"},
}
LENGTHS = [5, 63, 64, 127, 128, 129, 255, 256, 300, 1000, 3000, 8192]
STEPS, TOP, PROMPT_TOP = 48, 20, 8
KV_GIB = 4
SIZES = [1, 2, 4, 8, 16, 32, 64]
MIXED_SIZES = [*SIZES, 128, 256, 512, 1024, 2048]
GRAPHS = {
    "enforce_eager": False,
    "async_scheduling": True,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES},
}
SPLITS = [63, 64, 65, 127, 128, 129, 255, 256, 257]
OTHER_KL, OTHER_MARGIN, CONTROL_KL, WARM_UP_SECONDS = 2e-2, 1.5, 0.1, 20.0
NOT_RUN = ["tensor parallel 8, and nodes that are several hosts: need more GPUs than 4 of one host"]

STEP: dict[str, tuple[int, Callable[[Run], None], dict[str, str]]] = {}


def step(gpus: int = 1, **env: str) -> Callable:
    """Register a step that needs that many GPUs and these environment variables; its docstring is its help."""

    def register(function: Callable[[Run], None]) -> Callable[[Run], None]:
        STEP[function.__name__] = (gpus, function, env)
        return function

    return register


# ---------------------------------------------------------------- in the child: one step
class Run:
    """A step while it runs: its engine, and what it has found so far, in a file."""

    def __init__(self, job: dict[str, Any]):
        self.job = job
        self.result: dict[str, Any] = {"checks": {}, "measured": {}}
        self.prompts = make_prompts(LENGTHS, job["vocab"], seed=0)

    def save(self, **measured: Any) -> None:
        self.result["measured"] |= measured
        for name, value in measured.items():
            log(f"{name}: {str(value)[:300]}")
        Path(self.job["out"]).write_text(json.dumps(self.result))

    def check(self, name: str, passed: Any, measured: Any = None) -> None:
        self.result["checks"][name] = {"passed": bool(passed), "measured": measured}
        log(f"{'pass' if passed else 'FAIL'}: {name} ({measured})")
        self.save()

    def start(self, **changes: Any) -> Any:
        """An `LLM`, by default as the reference's."""
        begin = time.perf_counter()
        import_flashinfer()
        from vllm import LLM

        arguments = engine_arguments(self.job, **changes)
        log(f"LLM({arguments})")
        self.llm = LLM(**arguments)
        config = self.llm.llm_engine.vllm_config
        self.save(
            seconds_start=round(time.perf_counter() - begin, 1),
            cudagraph_mode=str(config.compilation_config.cudagraph_mode),
            async_scheduling=config.scheduler_config.async_scheduling,
        )
        return self.llm

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def blocks_in_use(self) -> int:
        for _ in range(3):  # with asynchronous scheduling the last batch is returned a step late
            self.llm.llm_engine.step()
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one block is vLLM's null block

    def generate(self, prompts: list[list[int]], steps: int = STEPS, prompt_logprobs: bool = False) -> list[dict]:
        begin = time.perf_counter()
        outputs = self.llm.generate(
            [{"prompt_token_ids": p} for p in prompts],
            sampling(steps, prompt_logprobs),
            use_tqdm=False,
        )
        log(f"generated {len(prompts)} x {steps} tokens in {time.perf_counter() - begin:.1f} s")
        return [sequence(o) for o in outputs]

    def reference(self) -> list[dict]:
        with np.load(self.job["reference"]) as f:
            return [
                {k: f[f"{k}_{i}"] for k in ("tokens", "ids", "values", "prompt_ids", "prompt_values")}
                for i in range(len(LENGTHS))
            ]

    def compare(
        self, name: str, reference: list[dict], run: list[dict], other_arithmetic: bool = False
    ) -> dict[str, Any]:
        """Check `run` against `reference`; the noise allowed is the docstring's."""
        found, noise = difference(reference, run), self.job["noise"] or {}
        self.save(**{name: found})
        kl, margin = {"decode": 1e-3, "prompt": 1e-3}, 0.2
        for part in kl.keys() & noise.keys():
            kl[part] = max(kl[part], 4 * noise[part]["kl_mean"])
            margin = max(margin, 2 * noise[part]["logprob_diff_max"])
        if other_arithmetic:
            kl, margin = dict.fromkeys(kl, OTHER_KL), OTHER_MARGIN
        for part in (part for part in kl if part in found):
            measured = found[part]["kl_mean"]
            self.check(f"{name}, {part}: mean KL <= {kl[part]:.2g}", measured <= kl[part], measured)
        worst = max((d["margin"] for d in found["diverged"]), default=0.0)
        self.check(f"{name}: margin where tokens part <= {margin:.2g}", worst <= margin, worst)
        return found


def engine_arguments(job: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Keyword arguments of `LLM`; without changes those of the reference."""
    plain = dict(
        model=job["model"],
        skip_tokenizer_init=True,
        block_size=256,
        max_model_len=16384,
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        enable_prefix_caching=False,
        enforce_eager=True,
        async_scheduling=False,
        kv_cache_memory_bytes=KV_GIB << 30,
        gpu_memory_utilization=0.05,  # only what has to be free: the cache's size is given
        enable_flashinfer_autotune=False,
        max_logprobs=TOP,
        logprobs_mode="raw_logprobs",
        seed=0,
    )
    return plain | BACKENDS[job["backend"]] | changes


def sampling(steps: int, prompt_logprobs: bool = False) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=steps,
        ignore_eos=True,
        detokenize=False,
        logprobs=TOP,
        prompt_logprobs=PROMPT_TOP if prompt_logprobs else None,
        flat_logprobs=True,
    )


def sequence(output: Any) -> dict[str, Any]:
    """Tokens [n]; the most likely tokens' ids and log-probabilities [n, TOP]; the prompt's [m, PROMPT_TOP]."""
    completion = output.outputs[0]
    found = {"tokens": np.array(completion.token_ids), "cached": output.num_cached_tokens}
    # The sampled or given token comes first, then the most likely ones.
    entries = positions(completion.logprobs)
    found["ids"] = np.stack([e[0][-TOP:] for e in entries])
    found["values"] = np.stack([e[1][-TOP:] for e in entries])
    entries = positions(output.prompt_logprobs)[1:] if output.prompt_logprobs else []
    shape = (len(entries), PROMPT_TOP)
    found["prompt_ids"] = np.array([e[0][-PROMPT_TOP:] for e in entries], dtype=np.int64).reshape(shape)
    found["prompt_values"] = np.array([e[1][-PROMPT_TOP:] for e in entries], dtype=np.float32).reshape(shape)
    if not (np.isfinite(found["values"]).all() and np.isfinite(found["prompt_values"]).all()):
        raise RuntimeError("log-probabilities are not finite")
    return found


def difference(reference: list[dict], run: list[dict]) -> dict[str, Any]:
    """Mean KL and the like over equal contexts, of decode steps and of prompts, and where greedy tokens part."""
    parts: dict[str, list] = {"decode": [], "prompt": []}
    diverged = []
    for i, (a, b) in enumerate(zip(reference, run, strict=True)):
        n = min(len(a["tokens"]), len(b["tokens"]))
        differ = np.flatnonzero(a["tokens"][:n] != b["tokens"][:n])
        if len(differ):
            at = int(differ[0])
            given = dict(zip(a["ids"][at].tolist(), a["values"][at].tolist(), strict=True))
            least = min(given.values())  # a token that is not among the most likely is no likelier than this
            margin = given[int(a["tokens"][at])] - given.get(int(b["tokens"][at]), least)
            diverged.append({"prompt": i, "at": at, "margin": margin})
            n = at + 1  # the context is still the same
        parts["decode"].append(compare_top(a["ids"][:n], a["values"][:n], b["ids"][:n], b["values"][:n]))
        if len(a["prompt_ids"]) and len(b["prompt_ids"]):
            arrays = (x[k] for x in (a, b) for k in ("prompt_ids", "prompt_values"))
            parts["prompt"].append(compare_top(*arrays))
    return {name: summary(found) for name, found in parts.items() if found} | {"diverged": diverged}


def count_graphs() -> collections.Counter:
    """How often each kind of CUDA graph is chosen from now on, in this process."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager  # model runner V2's

    counter: collections.Counter = collections.Counter()

    def watch(owner: Any) -> None:
        stock = owner.dispatch

        def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = stock(self, *args, **kwargs)
            counter[(chosen[0] if owner is CudagraphDispatcher else chosen.cg_mode).name] += 1
            return chosen

        owner.dispatch = dispatch

    watch(CudagraphDispatcher)
    watch(CudaGraphManager)
    return counter


@step()
def reference(run: Run) -> None:
    """The plain run; its noise and the control."""
    run.start()
    run.generate(run.prompts)  # compiles what is vLLM's own
    together = run.generate(run.prompts, prompt_logprobs=True)
    arrays = {f"{k}_{i}": v for i, s in enumerate(together) for k, v in s.items() if k != "cached"}
    np.savez(run.job["reference"], **arrays)
    alone = [run.generate([p], prompt_logprobs=True)[0] for p in run.prompts]
    run.save(noise=difference(together, alone))
    long = [i for i, p in enumerate(run.prompts) if len(p) > 60]
    others = make_prompts([len(run.prompts[i]) for i in long], run.job["vocab"], seed=1)
    others = [o[:-8] + run.prompts[i][-8:] for i, o in zip(long, others, strict=True)]
    control = difference([together[i] | {"prompt_ids": []} for i in long], run.generate(others))
    run.save(control=control)
    kl = control["decode"]["kl_mean"]
    run.check(f"control: mean KL >= {CONTROL_KL}", kl >= CONTROL_KL, kl)
    run.check("no block in use at the end", run.blocks_in_use() == 0, run.blocks_in_use())


def graphs_with(run: Run, other_arithmetic: bool, **changes: Any) -> None:
    run.start(enforce_eager=False, async_scheduling=None, **changes)
    used = count_graphs()
    run.generate(run.prompts)
    out = run.generate(run.prompts, prompt_logprobs=True)
    run.save(graphs=dict(used))
    run.check("full graphs were replayed", used["FULL"], used["FULL"])
    run.check("piecewise graphs were replayed", used["PIECEWISE"], used["PIECEWISE"])
    run.check("asynchronous scheduling", run.result["measured"]["async_scheduling"])
    run.compare("output", run.reference(), out, other_arithmetic)


@step()
def graphs(run: Run) -> None:
    """vLLM's defaults: torch.compile, full graphs for decodes, piecewise for mixed batches, async scheduling."""
    graphs_with(run, True, compilation_config={"cudagraph_capture_sizes": MIXED_SIZES})


@step(VLLM_USE_BREAKABLE_CUDAGRAPH="1")
def graphs_uncompiled(run: Run) -> None:
    """The same graphs without torch.compile, so that any difference is the graphs' own."""
    config = {"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": MIXED_SIZES}
    graphs_with(run, False, compilation_config=config)


@step()
def prefix(run: Run) -> None:
    """Prefix caching: a later request hits the cache in every KV cache group, and gives a cold run's tokens."""
    run.start(enable_prefix_caching=True)
    coordinator = run.scheduler.kv_cache_manager.coordinator
    groups = run.scheduler.kv_cache_config.kv_cache_groups
    names = [f"{type(g.kv_cache_spec).__name__} of {g.kv_cache_spec.block_size}: {g.layer_names}" for g in groups]
    stock, hits = coordinator.find_longest_cache_hit, []

    def find(*args: Any, **kwargs: Any) -> Any:
        found = stock(*args, **kwargs)
        hits.append([sum(not b.is_null for b in blocks) for blocks in found[0]])
        return found

    coordinator.find_longest_cache_hit = find
    # Windows' blocks are kept every 256 tokens; on 0.33.0 (prefix_cache_retention_interval, by default 0) only
    # before a prompt's last such place, its last token not counted, and where a second prompt was seen to part.
    sparse = getattr(coordinator, "retention_interval", None) is not None
    for length in (300, 1500, 8000):
        shared, tail_a, tail_b, tail_c = make_prompts([length, 70, 90, 110], run.job["vocab"], seed=length)
        expected = length // 256 * 256
        run.llm.reset_prefix_cache()
        cold = run.generate([shared + tail_b])
        run.llm.reset_prefix_cache()
        run.generate([shared + tail_a])
        if sparse and (len(shared + tail_a) - 1) // 256 * 256 > expected:
            run.generate([shared + tail_c])
        warm = run.generate([shared + tail_b])
        found = dict(zip(names, hits[-1], strict=True))
        run.save(**{f"blocks hit, {length} shared tokens": found})
        run.check(f"{length}: the cold run hits nothing", cold[0]["cached"] == 0, cold[0]["cached"])
        run.check(f"{length}: {expected} tokens hit", warm[0]["cached"] == expected, warm[0]["cached"])
        run.check(f"{length}: every group hits", min(hits[-1]) > 0, hits[-1])
        run.compare(f"{length}", cold, warm)


@step()
def chunked(run: Run) -> None:
    """Chunked prefill with chunks around block, window and compression boundaries."""
    run.start()
    longest: list[int] = []
    schedule = run.scheduler.schedule

    def watch(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        longest.append(max(output.num_scheduled_tokens.values(), default=0))
        return output

    run.scheduler.schedule = watch
    chosen = [i for i, p in enumerate(run.prompts) if 127 <= len(p) <= 3000]
    plain = run.reference()
    for size in SPLITS:
        run.scheduler.scheduler_config.long_prefill_token_threshold = size
        longest.clear()
        out = run.generate([run.prompts[i] for i in chosen], prompt_logprobs=True)
        run.check(f"{size}: the longest chunk", max(longest) == size, max(longest))
        run.compare(f"{size}", [plain[i] for i in chosen], out)


def mtp(run: Run, drafts: int) -> None:
    graphs = GRAPHS["compilation_config"] | {"cudagraph_capture_sizes": [s * (1 + drafts) for s in SIZES]}
    speculation = {"method": "mtp", "num_speculative_tokens": drafts}
    settings = GRAPHS | {"compilation_config": graphs}
    run.start(**settings, speculative_config=speculation, disable_log_stats=False)
    used = count_graphs()
    out = run.generate(run.prompts)
    counts = {m.name: m.value for m in run.llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
    run.save(graphs=dict(used), speculation=counts)
    for name in ("num_drafts", "num_accepted_tokens"):
        value = counts.get(f"vllm:spec_decode_{name}")
        run.check(f"{name} > 0", value, value)
    run.check("full graphs were replayed", used["FULL"], used["FULL"])
    run.compare("output", run.reference(), out)
    run.check("no block in use at the end", run.blocks_in_use() == 0, run.blocks_in_use())


@step()
def mtp1(run: Run) -> None:
    """Speculation with one draft token of the MTP layer, on full graphs."""
    mtp(run, 1)


@step()
def mtp2(run: Run) -> None:
    """Speculation with two draft tokens."""
    mtp(run, 2)


@step()
def preemption(run: Run) -> None:
    """Preemption and recomputation: 24 requests that start small and outgrow 264 blocks."""
    run.start(**GRAPHS, max_model_len=2048, max_num_batched_tokens=512, num_gpu_blocks_override=264)
    preempted: list[str] = []
    stock = run.scheduler._preempt_request

    def preempt(request: Any, *args: Any) -> None:
        preempted.append(request.request_id)
        stock(request, *args)

    run.scheduler._preempt_request = preempt
    prompts = make_prompts(list(range(5, 53, 2)), run.job["vocab"], seed=2)
    few = [s for i in range(0, len(prompts), 4) for s in run.generate(prompts[i : i + 4], 160)]
    run.check("four at a time are not preempted", not preempted, len(preempted))
    preempted.clear()
    many = run.generate(prompts, 160)
    run.check("all at a time are preempted", preempted, len(preempted))
    run.compare("output", few, many)
    run.check("no block in use at the end", run.blocks_in_use() == 0, run.blocks_in_use())


@step()
def aborts(run: Run) -> None:
    """Requests aborted in prefill and decode beside others, which must not notice."""
    run.start(**GRAPHS)
    from vllm.inputs.engine import tokens_input

    engine = run.llm.llm_engine
    rng = np.random.default_rng(0)
    victims = make_prompts(rng.integers(50, 6000, 24).tolist(), run.job["vocab"], seed=3)
    end: dict[int, list[str]] = collections.defaultdict(list)
    for i in range(max(len(victims), len(run.prompts))):
        if i < len(run.prompts):
            engine.add_request(f"kept-{i}", tokens_input(run.prompts[i]), sampling(STEPS))
        if i < len(victims):
            engine.add_request(f"victim-{i}", tokens_input(victims[i]), sampling(2000))
            end[int(rng.integers(1, 60))].append(f"victim-{i}")
    done: dict[str, Any] = {}
    steps = 0
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step() if o.finished}
        steps += 1
        engine.abort_request(end.pop(steps, []))
        if steps > 5000:
            raise RuntimeError(f"{engine.get_num_unfinished_requests()} requests never ended")
    run.check("aborted requests return nothing", all(n.startswith("kept") for n in done), sorted(done))
    out = [sequence(done[f"kept-{i}"]) for i in range(len(run.prompts))]
    run.compare("output", [s | {"prompt_ids": []} for s in run.reference()], out)
    run.check("no block in use at the end", run.blocks_in_use() == 0, run.blocks_in_use())


@step()
def thousand(run: Run) -> None:
    """1,000 requests of random lengths: no block and no GPU memory is left behind."""
    run.start(**GRAPHS, enable_prefix_caching=True)
    import torch
    from vllm import SamplingParams

    rng = np.random.default_rng(0)

    def serve(count: int, seed: int) -> None:
        lengths = np.exp(rng.uniform(0, np.log(4000), count)).astype(int).tolist()
        wanted = rng.integers(1, 65, count).tolist()
        outputs = run.llm.generate(
            [{"prompt_token_ids": p} for p in make_prompts(lengths, run.job["vocab"], seed)],
            [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in wanted],
            use_tqdm=False,
        )
        if [len(o.outputs[0].token_ids) for o in outputs] != wanted:
            raise RuntimeError("an output has the wrong length")

    def memory() -> tuple[int, int]:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]

    serve(200, seed=4)
    before = memory()
    begin = time.perf_counter()
    serve(1000, seed=5)
    after = memory()
    run.save(seconds=round(time.perf_counter() - begin, 1))
    run.check("no block in use at the end", run.blocks_in_use() == 0, run.blocks_in_use())
    grown = after[0] - before[0]
    run.check("allocated GPU memory grows by at most 1 MiB", grown <= 1 << 20, grown)
    lost = before[1] - after[1]
    run.check("free GPU memory shrinks by at most 64 MiB", lost <= 64 << 20, lost)


@step()
def long_context(run: Run) -> None:
    """A prompt of 128K tokens: time, memory, and that other chunks give the same output."""
    room = dict(max_model_len=(128 << 10) + 512, max_num_batched_tokens=8192, kv_cache_memory_bytes=8 << 30)
    run.start(**GRAPHS, **room)
    import torch

    prompts = dict(zip((8192, 128 << 10), make_prompts([8192, 128 << 10], run.job["vocab"], seed=6), strict=True))
    run.generate([prompts[8192]])
    out = {}
    for length, prompt in prompts.items():
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        out[length] = run.generate([prompt], 1)
        seconds = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated() - base
        measured = {"seconds": round(seconds, 2), "tokens_per_second": round(length / seconds), "peak_bytes": peak}
        run.save(**{f"{length} tokens": measured})
    prompt = prompts[128 << 10]
    plain = run.generate([prompt])
    run.scheduler.scheduler_config.long_prefill_token_threshold = 4000
    run.compare("chunks of 4000", plain, run.generate([prompt]))
    run.check("no block in use at the end", run.blocks_in_use() == 0, run.blocks_in_use())


def parallel(run: Run, **sizes: int) -> None:
    run.start(**GRAPHS, **sizes)
    run.generate(run.prompts)
    out = run.generate(run.prompts, prompt_logprobs=True)
    run.compare("output", run.reference(), out, other_arithmetic=True)


@step(gpus=2)
def tp2(run: Run) -> None:
    """Tensor parallel 2: 32 heads a GPU."""
    parallel(run, tensor_parallel_size=2)


@step(gpus=2)
def pp2(run: Run) -> None:
    """Pipeline parallel 2."""
    parallel(run, pipeline_parallel_size=2)


@step(gpus=4)
def tp4(run: Run) -> None:
    """Tensor parallel 4: a quarter of the heads, 16 of 64."""
    parallel(run, tensor_parallel_size=4)


@step(gpus=4)
def tp2_pp2(run: Run) -> None:
    """Tensor parallel 2 in pipeline parallel 2."""
    parallel(run, tensor_parallel_size=2, pipeline_parallel_size=2)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# What `vllm serve --headless` runs once it has parsed its options.
HEADLESS = """
import argparse, json, sys
from vllm.entrypoints.cli.serve import run_headless
run_headless(argparse.Namespace(api_server_count=0, **json.loads(sys.argv[1])))
"""


@step(gpus=2, VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket")
def nodes2(run: Run) -> None:
    """Tensor parallel 2 over two nodes, of one host: vLLM's multiprocessing executor, NCCL over TCP."""
    nodes = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port(), "tensor_parallel_size": 2}
    # NCCL takes processes of one host for those of two.
    gpus = visible_gpus()
    here, there = ({"CUDA_VISIBLE_DEVICES": gpu, "NCCL_HOSTID": f"node of GPU {gpu}"} for gpu in gpus[:2])
    arguments = json.dumps(engine_arguments(run.job, **GRAPHS, **nodes, node_rank=1))
    other = subprocess.Popen([sys.executable, "-c", HEADLESS, arguments], env=os.environ | there)
    os.environ.update(here)
    parallel(run, **nodes)
    # It stays when this one ends; run_child ends both.
    run.check("the other node was there to the end", other.poll() is None, other.poll())


def data_parallel(run: Run, ranks: int, tp: int) -> None:
    port, files = free_port(), [Path(f"{run.job['out']}.rank{rank}.npz") for rank in range(ranks)]
    children = []
    for rank, file in enumerate(files):
        file.unlink(missing_ok=True)
        env = os.environ | {
            "VLLM_DP_RANK": str(rank),
            "VLLM_DP_RANK_LOCAL": str(rank),
            "VLLM_DP_SIZE": str(ranks),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": str(port),
        }
        env.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # ranks keep step with each other in engine processes
        job = run.job | {"rank": rank, "tp": tp, "files": [str(f) for f in files]}
        job_file = Path(f"{run.job['out']}.rank{rank}.job.json")
        job_file.write_text(json.dumps(job))
        command = [sys.executable, str(Path(__file__).resolve()), "--rank", str(job_file)]
        children.append(subprocess.Popen(command, env=env))
    statuses = [child.wait() for child in children]
    run.check("every rank ended well", not any(statuses), statuses)
    out: list[Any] = [None] * len(LENGTHS)
    for rank, file in enumerate(files):
        with np.load(file) as f:
            for i in range(rank, len(LENGTHS), ranks):
                out[i] = {k: f[f"{k}_{i}"] for k in ("tokens", "ids", "values", "prompt_ids", "prompt_values")}
    run.compare("output", run.reference(), out, other_arithmetic=True)


def data_parallel_rank(job: dict[str, Any]) -> None:
    run = Run(job | {"out": f"{job['out']}.rank{job['rank']}.json"})
    # As the reference has it: what vLLM picks here, FlashInfer's CUTLASS kernels, compiles for over 5 minutes.
    parallel = {"tensor_parallel_size": job["tp"], "enable_expert_parallel": True, "moe_backend": "triton"}
    run.start(**GRAPHS, **parallel)
    mine = range(job["rank"], len(LENGTHS), len(job["files"]))
    out = run.generate([run.prompts[i] for i in mine], prompt_logprobs=True)
    arrays = {f"{k}_{i}": v for i, s in zip(mine, out, strict=True) for k, v in s.items() if k != "cached"}
    np.savez(job["files"][job["rank"]], **arrays)
    while not all(Path(file).exists() for file in job["files"]):  # a rank needs the others to the end
        time.sleep(0.2)
    time.sleep(1)  # vLLM's own example: engines pause their loops before the process ends


@step(gpus=2)
def dp2_ep(run: Run) -> None:
    """Data parallel 2 with experts spread over both."""
    data_parallel(run, ranks=2, tp=1)


@step(gpus=4)
def dp2_tp2_ep(run: Run) -> None:
    """Data parallel 2 of tensor parallel 2, experts spread over all four."""
    data_parallel(run, ranks=2, tp=2)


# ---------------------------------------------------------------- the parent
def our_kernels() -> set[str]:
    folder = Path(__file__).resolve().parents[1] / "overlay/common/vllm/third_party/mla_kernels"
    text = "\n".join(p.read_text() for p in folder.glob("*.py"))
    return set(re.findall(r"@triton\.jit(?:\((?:[^()]|\n)*\))?\s*\ndef (\w+)", text))


def collect(name: str, job: dict[str, Any], log_file: Path, status: Any, seconds: float) -> dict[str, Any]:
    out = Path(job["out"])
    result = json.loads(out.read_text()) if out.exists() else {"checks": {}, "measured": {}}
    text = log_file.read_text(errors="replace")
    compiled = set(re.findall(r"JIT compilation during inference: (\w+)", text))
    monitored = "Kernel JIT monitor activated" in text
    # 0.33.0 starts it in eager runs no longer.
    if monitored or result["measured"].get("cudagraph_mode") != "NONE":
        result["checks"]["no kernel of ours compiled after warm-up"] = {
            "passed": monitored and not compiled & our_kernels(),
            "measured": sorted(compiled & our_kernels()) if monitored else "vLLM's JIT monitor did not start",
        }
    result["measured"]["compiled_by_vllm"] = sorted(compiled - our_kernels())
    warm = re.findall(r"Warm-up of the full-width attention kernels took ([\d.]+) s", text)
    if job["backend"] != "flashmla" and name != "reference":  # the first step fills the JIT caches
        longest = max(map(float, warm), default=None)
        passed = longest is not None and longest < WARM_UP_SECONDS
        result["checks"][f"warm-up < {WARM_UP_SECONDS:.0f} s"] = {"passed": passed, "measured": longest}
    result["measured"]["warm_up_seconds"] = [float(w) for w in warm]
    size = re.search(r"GPU KV cache size: ([\d,]+) tokens", text)
    if size and name == "reference":
        result["measured"]["kv_tokens_per_gib"] = int(size[1].replace(",", "")) // KV_GIB
    failed = [n for n, c in result["checks"].items() if not c["passed"]]
    result |= {"ok": status == 0 and not failed, "failed": failed, "status": str(status), "seconds": seconds}
    if status != 0:
        result["log_end"] = tail(log_file, 30)
    return result


def report(steps: dict[str, Any]) -> str:
    lines = []
    for backend, found in steps.items():
        for name, r in found.items():
            compared = [m for k, m in r["measured"].items() if k != "control" and isinstance(m, dict)]
            kl = [m[part]["kl_mean"] for m in compared for part in ("decode", "prompt") if part in m]
            text = f"KL {max(kl):.2e}" if kl else ""
            line = f"{'pass' if r['ok'] else 'FAIL'}  {backend:9s} {name:18s} {r['seconds']:6.0f} s  {text:12s}"
            lines.append(f"{line}  {'; '.join(r['failed'])}")
    capacity = {b: f.get("reference", {}).get("measured", {}).get("kv_tokens_per_gib") for b, f in steps.items()}
    lines.append(f"KV cache, tokens per GiB as vLLM reports (16K context, 2048 batched tokens): {capacity}")
    return "\n".join(lines + [f"not run: {n}" for n in NOT_RUN])


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    listing = "\n".join(f"    {n:18s} {gpus} GPU  {f.__doc__}" for n, (gpus, f, _) in STEP.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nSteps:\n{listing}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint of make_mini_checkpoint.py")
    parser.add_argument("--out", type=Path, required=True, help="the results, JSON; steps already in it are kept")
    parser.add_argument("--work", type=Path, help="logs and the reference's output (default: OUT without suffix)")
    parser.add_argument("--backend", default="bf16", choices=list(BACKENDS))
    parser.add_argument("--gpus", type=int, default=1, choices=[1, 2, 4], help="run the steps that need so many")
    parser.add_argument("--steps", help="comma-separated, instead of all for --gpus")
    parser.add_argument("--jobs", type=int, default=1, help="steps at a time, spread over the GPUs; times suffer")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a step")
    args = parser.parse_args(argv)
    args.work = args.work or args.out.with_suffix("")
    args.steps = args.steps.split(",") if args.steps else [n for n, s in STEP.items() if s[0] == args.gpus]
    unknown = [s for s in args.steps if s not in STEP]
    if unknown:
        parser.error(f"unknown steps {unknown}; there are {list(STEP)}")
    if not (args.model / "model.safetensors.index.json").is_file():
        parser.error(f"{args.model} holds no checkpoint; write one with scripts/make_mini_checkpoint.py")
    return args


def visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [g for g in named.split(",") if g]
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return [str(i) for i in range(len(listed.splitlines()))]


def run_step(args: argparse.Namespace, name: str, gpus: list[str], reference: dict[str, Any]) -> dict[str, Any]:
    """Run a step in a process of its own on those GPUs; its result."""
    job = {
        "step": name,
        "backend": args.backend,
        "model": str(args.model.resolve()),
        "vocab": json.loads((args.model / "config.json").read_text())["vocab_size"],
        "reference": str(args.work / f"{args.backend}.reference.npz"),
        "noise": reference.get("measured", {}).get("noise"),
        "out": str(args.work / f"{args.backend}.{name}.json"),
    }
    Path(job["out"]).unlink(missing_ok=True)
    job_file, log_file = (args.work / f"{args.backend}.{name}.{x}" for x in ("job.json", "log"))
    job_file.write_text(json.dumps(job))
    log(f"{name}: starting on GPU {','.join(gpus)}; log in {log_file}")
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(job_file)]
    # In this process, so that a step sees the scheduler.
    environment = child_environment(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", CUDA_VISIBLE_DEVICES=",".join(gpus), **STEP[name][2]
    )
    status, seconds = run_child(command, log_file, environment, args.timeout)
    result = collect(name, job, log_file, status, seconds)
    log(f"{name}: {'pass' if result['ok'] else 'FAIL'} in {seconds} s {result['failed']}")
    if status != 0:
        print(tail(log_file), flush=True)
    return result | {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
    }


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    where = machine()
    results = {"steps": {}} | kept(args.out, where)
    steps = results["steps"].setdefault(args.backend, {})
    results |= {"machine": where, "not_run": NOT_RUN}
    gpus, writing = visible_gpus(), threading.Lock()

    def finish(name: str, result: dict[str, Any]) -> None:
        with writing:
            steps[name] = result
            args.out.write_text(json.dumps(results, indent=1) + "\n")

    def run(name: str) -> None:
        mine = places.get()
        try:
            finish(name, run_step(args, name, mine, steps.get("reference", {})))
        finally:
            places.put(mine)

    have = (args.work / f"{args.backend}.reference.npz").exists() and "reference" in steps
    if "reference" in args.steps or not have:
        finish("reference", run_step(args, "reference", gpus[:1], {}))
        args.steps = [n for n in args.steps if n != "reference"]
    for count in sorted({STEP[n][0] for n in args.steps}):
        chosen = [n for n in args.steps if STEP[n][0] == count]
        if count > len(gpus):
            sys.exit(f"error: {', '.join(chosen)} need {count} GPUs; {len(gpus)} are visible.")
        sets = [gpus[i : i + count] for i in range(0, len(gpus) - count + 1, count)]
        places: queue.Queue[list[str]] = queue.Queue()
        for i in range(args.jobs):
            places.put(sets[i % len(sets)])
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(run, chosen))
    print(report(results["steps"]))
    print(f"results in {args.out}")
    return 0 if all(steps[n]["ok"] for n in ["reference", *args.steps]) else 1


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ("--child", "--rank"):
        job = json.loads(Path(sys.argv[2]).read_text())
        data_parallel_rank(job) if sys.argv[1] == "--rank" else STEP[job["step"]][1](Run(job))
        sys.exit(0)
    sys.exit(main())
