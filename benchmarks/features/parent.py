"""The parent of steps: starts each in a process of its own, and collects what it and its log say."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from e2e import child_environment, log, model_settings, run_child, tail

from .comparison import OTHER_KL
from .run import BACKENDS, BASE, ENTRY, ENVIRONMENT, KV_GIB, OURS, STEP

WARM_UP_SECONDS = 20.0


def our_kernels() -> set[str]:
    folder = ENTRY.parents[1] / "overlay/common/vllm/third_party/mla_kernels"
    text = "\n".join(p.read_text() for p in folder.glob("*.py"))
    return set(re.findall(r"@triton\.jit(?:\((?:[^()]|\n)*\))?\s*\ndef (\w+)", text))


def collect(name: str, job: dict[str, Any], log_file: Path, status: Any, seconds: float) -> dict[str, Any]:
    out = Path(job["out"])
    result = json.loads(out.read_text()) if out.exists() else {"checks": {}, "measured": {}}
    text = log_file.read_text(errors="replace")
    compiled = set(re.findall(r"JIT compilation during inference: (\w+)", text))
    monitored = "Kernel JIT monitor activated" in text
    # Eager runs on 0.33.0 have none.
    if monitored or result["measured"].get("cudagraph_mode") != "NONE":
        result["checks"]["no kernel of ours compiled after warm-up"] = {
            "passed": monitored and not compiled & our_kernels(),
            "measured": sorted(compiled & our_kernels()) if monitored else "vLLM's JIT monitor did not start",
        }
    result["measured"]["compiled_by_vllm"] = sorted(compiled - our_kernels())
    warm = re.findall(r"Warm-up of the full-width attention kernels took ([\d.]+) s", text)
    full_width = BACKENDS[job["backend"]].get("attention_backend") == OURS
    if full_width and name != "reference":  # the first step fills the JIT caches
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


def is_noise(measured: Any) -> bool:
    """Whether what a base's step differed by may be what ours differs by; not if it is wrong itself."""
    parts = [measured.get(part) for part in ("decode", "prompt")] if isinstance(measured, dict) else []
    return any(parts) and all(part["kl_mean"] <= OTHER_KL for part in parts if part)


def run_step(
    args: argparse.Namespace, backend: str, name: str, gpus: list[str], steps: dict[str, Any]
) -> dict[str, Any]:
    """Run a step in a process of its own on those GPUs; its result.

    `steps` holds the results so far of every backend: the noise of the plain run, and how far a base is from it.
    """
    base = BASE.get(backend, backend)
    measured = [steps.get(base, {}).get(n, {}).get("measured", {}) for n in ("reference", name)]
    job = {
        "step": name,
        "backend": backend,
        "model": str(args.model.resolve()),
        "vocab": model_settings(args.model)["vocab_size"],
        "reference": str(args.work / f"{base}.reference.npz"),
        "noise": measured[0].get("noise"),
        "own": {k: m for k, m in measured[1].items() if is_noise(m)} if base != backend else {},
        "out": str(args.work / f"{backend}.{name}.json"),
    }
    Path(job["out"]).unlink(missing_ok=True)
    job_file, log_file = (args.work / f"{backend}.{name}.{x}" for x in ("job.json", "log"))
    job_file.write_text(json.dumps(job))
    log(f"{backend} {name}: starting on GPU {','.join(gpus)}; log in {log_file}")
    # In this process, so that a step sees the scheduler.
    environment = child_environment(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        CUDA_VISIBLE_DEVICES=",".join(gpus),
        **STEP[name].environment,
        **ENVIRONMENT.get(backend, {}),
    )
    command = [sys.executable, str(ENTRY), "--child", str(job_file)]
    status, seconds = run_child(command, log_file, environment, args.timeout)
    result = collect(name, job, log_file, status, seconds)
    log(f"{backend} {name}: {'pass' if result['ok'] else 'FAIL'} in {seconds} s {result['failed']}")
    if status != 0:
        print(tail(log_file), flush=True)
    return result | {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
    }
