"""A line for each step."""

from __future__ import annotations

from typing import Any

NOT_RUN = ["tensor parallel 8, and nodes that are several hosts: need more GPUs than 4 of one host"]


def report(steps: dict[str, Any], not_run: list[str]) -> str:
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
    return "\n".join(lines + [f"not run: {n}" for n in not_run])
