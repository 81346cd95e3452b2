#!/usr/bin/env python3
"""End-to-end accuracy of quantised DeepSeek V4 checkpoints through vLLM's kernels, by their logits.

    python benchmarks/quantised_e2e.py --folder /tmp/quantised --out results.json

For each layout of scripts/make_mini_checkpoint.py three models of the same seed run on the same prompts, which are
those of accuracy_e2e.py, and on the continuation that the first one decodes greedily:

    truth   the weights before they were quantised, in BF16
    own     what the layout costs, in BF16: NAME-dequantised, the values that its tensors stand for; or, of layouts
            with FP8 linears, NAME-rounded: these values, and the inputs of those linears rounded to E4M3 in the
            groups in which vLLM's kernels round them (rounded_inputs.py)
    NAME    the layout itself, through the kernels that vLLM and the overlay choose

The bar is KL(truth | NAME) <= 1.05 KL(truth | own), for decode steps and for prompts: what kernels add is a
twentieth of what quantisation costs. KL(own | NAME) is reported too.

With --kv, --graphs or --tp, NAME is compared with a truth that has them as well; `own` has none of them.
Runs of the same checkpoints, software and GPUs that are in --work are not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import io
import json
import re
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

import accuracy_e2e
import numpy as np
from e2e import at_once, log, machine, make_prompts, model_settings, need_gpus, positive, prepare

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
WEIGHT_ONLY = ("nvfp4", "autoround")
LAYOUTS = (*WEIGHT_ONLY, "nvfp4-experts", "ct-nvfp4", "ct-fp8-tensor", "ct-w4a16")
MARGIN = 1.05
LENGTHS = [1, 7, 129, 300, 3000]


def write_models(folder: Path, layouts: list[str]) -> None:
    import make_mini_checkpoint

    for name, options in [("truth", ["--layout", "bf16"])] + [
        entry
        for layout in layouts
        for entry in (
            (layout, ["--layout", layout]),
            (f"{layout}-dequantised", ["--layout", layout, "--dequantised"]),
        )
    ]:
        if not (folder / name / "config.json").exists():
            log(f"writing {folder / name}")
            with contextlib.redirect_stdout(io.StringIO()):
                make_mini_checkpoint.main([str(folder / name), *options])


PLAIN: dict[str, Any] = {"backend": None, "kv": "fp8"}


def own_error(folder: Path, layout: str) -> tuple[str, dict[str, Any]]:
    """(the run, its spec)"""
    if layout in WEIGHT_ONLY:
        return f"{layout}-dequantised", PLAIN
    return f"{layout}-rounded", PLAIN | {"rounded_like": str(folder / layout)}


def run(
    name: str, model: str, spec: dict, tp: int, forced: list | None, prompts: list, args: argparse.Namespace
) -> dict[str, Any]:
    """One model; its tokens, memory and time, with the arrays beside."""
    folder = args.folder / model
    base = accuracy_e2e.base_key(folder, prompts, args.steps, tp, args.where)
    job = {
        "spec": spec,
        "model": str(folder),
        "vocab": model_settings(folder)["vocab_size"],
        "prompts": prompts,
        "forced": forced,
        "steps": args.steps,
        "batch": 2048,
        "tp": tp,
        "scales": "",
        "out": str(args.work / f"{name}.npz"),
        "key": accuracy_e2e.key_of(base, spec, forced),
    }
    if accuracy_e2e.read_result(Path(job["out"]), job["key"]):
        log(f"{name}: found in {args.work}")
        done: dict[str, Any] = {"ok": True, "reused": True}
    else:
        done = accuracy_e2e.start_run(name, job, args)
    if not done["ok"]:
        return done
    text = (args.work / f"{name}.log").read_text(errors="replace")
    memory = re.findall(r"Model loading took ([\d.]+) GiB", text)
    kernels = sorted(set(re.findall(r"(?:Using|run on) (\S*(?:LinearKernel|NvFp4 MoE backend|'MARLIN'))", text)))
    meta = json.loads((args.work / f"{name}.json").read_text())
    return done | meta | {"weights_gib": float(memory[0]) if memory else None, "kernels": kernels}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the models; those that lack are written")
    parser.add_argument("--out", type=Path, required=True, help="the results, JSON")
    parser.add_argument("--work", type=Path, help="arrays and logs (default: OUT without suffix)")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument(
        "--kv", choices=["fp8", "bfloat16", "fp8_per_tensor"], default="fp8",
        help="the cache: vLLM's is fp8, the others are the overlay's",
    )  # fmt: skip
    parser.add_argument("--graphs", action="store_true", help="decode by replay of CUDA graphs, not eagerly")
    parser.add_argument("--steps", type=positive, default=64, help="decode steps a prompt")
    parser.add_argument("--tp", type=positive, default=1, help="tensor-parallel ranks")
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time, on the same GPUs")
    parser.add_argument("--timeout", type=float, default=600, help="seconds a run")
    args = parser.parse_args(argv)
    layouts = args.layouts.split(",")
    if unknown := [name for name in layouts if name not in LAYOUTS]:
        parser.error(f"--layouts names {', '.join(unknown)}; there are {', '.join(LAYOUTS)}.")
    need_gpus(args.tp)
    prepare(args)
    args.provider, args.where = None, machine()
    write_models(args.folder, layouts)
    spec = PLAIN | {"backend": None if args.kv == "fp8" else accuracy_e2e.BACKEND, "kv": args.kv}
    if args.graphs:
        spec["compilation"] = accuracy_e2e.GRAPHS_ONLY
    options = [args.kv] * (args.kv != "fp8") + ["graphs"] * args.graphs + [f"tp{args.tp}"] * (args.tp > 1)
    here = "-".join(["", *options])  # of the runs that have them
    vocab = model_settings(args.folder / "truth")["vocab_size"]
    prompts = make_prompts(LENGTHS, vocab, 0)
    runs = {"truth": run("truth", "truth", PLAIN, 1, None, prompts, args)}
    if not runs["truth"]["ok"]:
        return 1
    forced = runs["truth"]["tokens"]
    wanted = {f"truth{here}": ("truth", spec, args.tp)} if here else {}
    for layout in layouts:
        name, of_own = own_error(args.folder, layout)
        wanted |= {name: (f"{layout}-dequantised", of_own, 1), f"{layout}{here}": (layout, spec, args.tp)}
    lock = threading.Lock()

    def run_and_report(name: str) -> None:
        found = run(name, *wanted[name], forced, prompts, args)
        with lock:  # a command that is ended early leaves what it found
            runs[name] = found
            report(runs, layouts, here, args)

    at_once(args.jobs, run_and_report, wanted)
    comparisons, rows = report(runs, layouts, here, args)
    for name, record in runs.items():
        state = "ok" if record["ok"] else "FAILED"
        print(f"{name:26s} {state:7s} weights {record.get('weights_gib')} GiB {record.get('kernels')}")
    print(accuracy_e2e.table(comparisons))
    print(accuracy_e2e.bar_table(rows))
    return int(any(row["passed"] is False for row in rows) or any(not record["ok"] for record in runs.values()))


def report(
    runs: dict[str, Any], layouts: list[str], here: str, args: argparse.Namespace
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(comparisons, bars) of what has run so far, which are also written."""
    arrays = functools.cache(lambda name: dict(np.load(args.work / f"{name}.npz")))
    comparisons: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for layout in layouts:
        own, name = own_error(args.folder, layout)[0], layout + here
        if not all((runs.get(x) or {"ok": False})["ok"] for x in ("truth", f"truth{here}", own, name)):
            continue
        for a, b in (("truth", own), (f"truth{here}", name), (own, name)):
            comparisons[f"{a}|{b}"] = accuracy_e2e.compare(arrays(a), arrays(b), LENGTHS)
        for part in ("decode", "prompt"):
            kl = comparisons[f"truth{here}|{name}"][part]["kl_mean"]
            limit = MARGIN * comparisons[f"truth|{own}"][part]["kl_mean"]
            bar = f"{part}: KL(truth|{name}) <= {MARGIN} KL(truth|{own})"
            rows.append({"bar": bar, "measured": kl, "limit": limit, "sign": "<=", "passed": kl <= limit})
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([sys.executable, *sys.argv]),
        "machine": args.where,
        "runs": {name: {k: v for k, v in record.items() if k != "tokens"} for name, record in runs.items()},
        "comparisons": comparisons,
        "bars": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return comparisons, rows


if __name__ == "__main__":
    sys.exit(main())
