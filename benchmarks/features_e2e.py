#!/usr/bin/env python3
"""vLLM's features with the attention backends of DeepSeek V4 and V3.2, each against a plain run of its own.

    python scripts/make_mini_checkpoint.py /tmp/mini-v4
    python benchmarks/features_e2e.py --model /tmp/mini-v4 --out features.json              # one GPU
    python benchmarks/features_e2e.py --model /tmp/mini-v4 --out features.json --gpus 2     # what needs two

Ranks may share a GPU, which says nothing about their speed: one that CUDA_VISIBLE_DEVICES names twice has two,
each a node of its own, with NCCL over TCP:

    CUDA_VISIBLE_DEVICES=0,0 python benchmarks/features_e2e.py --model /tmp/mini-v4 --out features.json --gpus 2

With 8 heads a GPU, as tensor parallel 8 has of 64:

    python scripts/make_mini_checkpoint.py /tmp/mini-v4-32 --heads 32
    python benchmarks/features_e2e.py --model /tmp/mini-v4-32 --out features-32.json --gpus 4 --steps tp4

DeepSeek V3.2 and GLM-5, with MLA_KERNELS_SPARSE over a BF16 cache or, as sparse_fp8, over rows of 656 bytes:

    python scripts/make_mini_checkpoint.py /tmp/mini-v32-16 --model v3.2 --heads 16
    python benchmarks/features_e2e.py --model /tmp/mini-v32-16 --out features-v32.json --backend sparse_bf16

With sm80_bf16, sm80_fp8, sm89_bf16 and sm89_fp8 the GPU stands in for one of compute capability 8.0 or 8.9: vLLM
and our kernels choose as they do there, the backend too. These are measured against their own plain run.

Images, which only `images` serves; vLLM takes them from 0.30.0 on. With more heads FlashMLA has their prefills:

    python scripts/make_mini_checkpoint.py /tmp/mini-images --images --heads 32
    python benchmarks/features_e2e.py --model /tmp/mini-images --out images.json --backend stock --steps images

DeepSeek V4.1 (make_mini_checkpoint.py --model v4.1) has the backends flashmla and stock, and is served without
images.

The plain run (`reference`) is eager, on one GPU, without prefix cache, speculation or asynchronous scheduling.
Every step is a process of its own and is merged into OUT as it ends; steps in OUT are kept, so the list may be
spread over several commands (`--steps prefix,chunked`) of the same software, with the same VLLM_* variables, on
the same kind of GPU. A step passes if all its checks pass: its own, that no kernel of ours was compiled by
Triton after warm-up (vLLM's JIT monitor), and that greedy tokens and their log-probabilities are the
reference's. They are compared up to the first token that differs; such a token counts as noise if the reference
gave both nearly the same log-probability. Noise, as mean KL and as that margin:

    same arithmetic     KL, of decode steps and of prompts, at most 1e-3 or 4 times, margin at most 0.2 or 2 times,
                        what the reference differs from itself when its prompts come one at a time, not together
    other arithmetic    KL at most 2e-2, margin at most 1.5: torch.compile and sums over GPUs round elsewhere, and
                        FP8 linear layers amplify it. Run the step with --backend flashmla too: its own difference
                        is what vLLM's other layers make

--backend flashmla is FlashMLA as stock vLLM has it. --backend stock is the same options with the drop-in,
measured against flashmla: the plain run is flashmla's, every step runs with flashmla first, unless OUT has that,
and what flashmla differed there counts as noise too, instead of the bounds for other arithmetic, if it is within
them. Each worker counts the calls that our kernels served: some with stock, none with flashmla. In the same way
drop_in_bf16, drop_in_fp8 and, without the drop-in, sparse_bf16 and sparse_fp8 are measured against flashmla_bf16
and flashmla_fp8, which are FLASHMLA_SPARSE over the same cache.

The reference also runs every prompt with another beginning and the same last 8 tokens: that control must be at
least 0.1 away, or the comparison could not see a broken cache. No single prompt of a step may be as far.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import Any

from e2e import (
    at_once,
    has_sparse_mla,
    kept,
    machine,
    model_settings,
    need_gpus,
    positive,
    prepare,
    visible_gpus,
)
from features import one_gpu, several_gpus  # noqa: F401  (steps register themselves)
from features.parent import run_step
from features.report import NOT_RUN, report
from features.run import BACKENDS, BASE, OF_SPARSE_MLA, STEP, Run


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    listing = "\n".join(f"    {n:18s} {s.gpus} GPU  {s.function.__doc__}" for n, s in STEP.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nSteps:\n{listing}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint of make_mini_checkpoint.py")
    parser.add_argument("--out", type=Path, required=True, help="the results, JSON; steps already in it are kept")
    parser.add_argument("--work", type=Path, help="logs and the reference's output (default: OUT without suffix)")
    parser.add_argument("--backend", default="bf16", choices=list(BACKENDS))
    parser.add_argument("--gpus", type=int, default=1, choices=[1, 2, 4], help="run the steps that need so many")
    parser.add_argument("--steps", help="comma-separated, instead of all for --gpus")
    parser.add_argument("--jobs", type=positive, default=1, help="steps at a time, over all GPUs; times suffer")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a step")
    args = parser.parse_args(argv)
    named = args.steps.split(",") if args.steps else []
    unknown = [s for s in named if s not in STEP]
    if unknown:
        parser.error(f"unknown steps {unknown}; there are {list(STEP)}")
    if not (args.model / "model.safetensors.index.json").is_file():
        parser.error(f"{args.model} holds no checkpoint; write one with scripts/make_mini_checkpoint.py")
    config = model_settings(args.model)
    if has_sparse_mla(config) != (args.backend in OF_SPARSE_MLA):
        fit = [b for b in BACKENDS if has_sparse_mla(config) == (b in OF_SPARSE_MLA)]
        parser.error(f"{args.model} has no --backend {args.backend}; it has {', '.join(fit)}")
    asked = named or [n for n, s in STEP.items() if s.gpus == args.gpus]
    args.left_out = [f"{n}: {why}" for n in asked if (why := STEP[n].lacks(args.backend, config))]
    if named and args.left_out:
        parser.error("; ".join(args.left_out))
    args.steps = [n for n in asked if not STEP[n].lacks(args.backend, config)]
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    need_gpus(1)
    prepare(args)
    where = machine()
    results = {"steps": {}} | kept(args.out, where)
    config = model_settings(args.model)
    if results.get("model_config", config) != config:
        sys.exit(f"error: {args.out} holds steps of another checkpoint; give another --out.")
    steps = results["steps"]
    results |= {"machine": where, "model_config": config, "not_run": NOT_RUN + args.left_out}
    base = BASE.get(args.backend, args.backend)
    for backend in (base, args.backend):
        steps.setdefault(backend, {})
    gpus, one_at_a_time = visible_gpus(), threading.Lock()
    if many := [n for n in args.steps if STEP[n].gpus > len(gpus)]:
        most = max(STEP[n].gpus for n in many)
        sys.exit(f"error: {', '.join(many)} need {most} GPUs; {len(gpus)} are visible.")
    steps_on = [0] * len(gpus)

    def run(backend: str, name: str, mine: list[str]) -> None:
        result = run_step(args, backend, name, mine, steps)
        with one_at_a_time:
            steps[backend][name] = result
            args.out.write_text(json.dumps(results, indent=1) + "\n")

    def run_with_base(name: str) -> None:
        with one_at_a_time:  # those with the fewest steps
            mine = sorted(range(len(gpus)), key=steps_on.__getitem__)[: STEP[name].gpus]
            for number in mine:
                steps_on[number] += 1
        try:
            named = [gpus[number] for number in mine]
            if base != args.backend and steps[base].get(name, {}).get("status") != "0":
                run(base, name, named)
            run(args.backend, name, named)
        finally:
            for number in mine:
                steps_on[number] -= 1

    have = (args.work / f"{base}.reference.npz").exists() and "reference" in steps[base]
    if not have or (base == args.backend and "reference" in args.steps):
        run(base, "reference", gpus[:1])
    if base == args.backend:
        args.steps = [n for n in args.steps if n != "reference"]
    at_once(args.jobs, run_with_base, args.steps)
    print(report(steps, results["not_run"]))
    print(f"results in {args.out}")
    ran = [steps[base]["reference"], *(steps[backend][n] for backend in {base, args.backend} for n in args.steps)]
    return 0 if all(step["ok"] for step in ran) else 1


def child(kind: str, job: dict[str, Any]) -> None:
    if kind == "--part":
        several_gpus.PART[job["part"]](job)
        return
    run = Run(job)
    STEP[job["step"]].function(run)
    run.finish()


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ("--child", "--part"):
        child(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
        sys.exit(0)
    sys.exit(main())
