#!/usr/bin/env python3
"""Error of one attention call by cache format, against float64 on rows that were never rounded.

    python benchmarks/accuracy_attention.py --out benchmarks/results/accuracy_attention_cpu.json

Needs a vLLM with the overlay (installed, or its tree in PYTHONPATH). Attention is the `reference` provider on a
CPU, and on a GPU the one that is picked there. Formats:

    bfloat16            BF16 rows
    fp8_per_tensor      E4M3 rows, scale 1.0; and with the scale that calibrate.py makes of other rows
    fp8_ds_mla          FlashMLA's, emulated: 448 E4M3 values with a power of two for each 64 of them, then the 64
                        RoPE dimensions in BF16; attention is the same as for the others, not FlashMLA's kernel

A token has 128 random window rows and 512 compressed ones, scaled to logits with a standard deviation of 2.5.
Channels of a row: `gaussian`; or `heavy`, Student's t with 4 degrees of freedom times log-normal weights (sigma
0.35), 10 channels of them 8 times larger, none of these in the RoPE dimensions.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from pathlib import Path

import torch
from e2e import check_out, positive

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEAD_DIM, NOPE, WINDOW, PAGE = 512, 448, 128, 64
LOGIT_STD = 2.5
SIZES = {"64": 64.0, "1": 1.0, "1/64": 1 / 64, "1/1024": 1 / 1024}  # RMS of the rows


def draw_rows(kind: str, count: int, gen: torch.Generator) -> torch.Tensor:
    """[count, 512] float64 with an RMS of 1; the channels' weights depend on the kind only."""
    normal = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)  # noqa: E731
    rows = normal(count, HEAD_DIM)
    if kind == "heavy":
        rows /= normal(4, count, HEAD_DIM).square().mean(0).sqrt()
        fixed = torch.Generator().manual_seed(0)
        weight = torch.randn(HEAD_DIM, generator=fixed, dtype=torch.float64).mul(0.35).exp()
        weight[torch.randperm(NOPE, generator=fixed)[:10]] *= 8
        rows *= weight
    return rows / rows.square().mean().sqrt()


def e4m3(rows: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Float64 `rows` after a trip through E4M3, still divided by `scale`."""
    return (rows / scale).clamp(-448, 448).float().to(E4M3)


def fp8_ds_mla(rows: torch.Tensor) -> torch.Tensor:
    """BF16 rows [count, 512] that FlashMLA's kernels compute with after they unpack the 584 bytes of each.

    Formula: vLLM 0.22.1, `quantize_and_insert_k_cache`; a scale is 2^ceil(log2(max(amax, 1e-4) / 448)).
    """
    blocks = rows[:, :NOPE].unflatten(1, (-1, 64))
    largest = blocks.abs().amax(2, keepdim=True).clamp(min=1e-4)
    scales = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    unpacked = (e4m3(blocks, scales).double() * scales).flatten(1)
    return torch.cat((unpacked, rows[:, NOPE:]), 1).to(BF16)


def measure(kind: str, size: float, tokens: int, heads: int, seed: int) -> dict[str, dict[str, float]]:
    """Relative errors of the output, root mean square over all, NoPE and RoPE dimensions, by format."""
    from vllm.dsv4_overlay.calibrate import scale
    from vllm.third_party.mla_kernels import sparse_mla

    gen = torch.Generator().manual_seed(seed)
    # As the layer hands them over: BF16 before insertion.
    rows = (draw_rows(kind, 64 * PAGE, gen) * size).to(BF16).double()
    calibrated = scale(float((draw_rows(kind, 64 * PAGE, gen) * size).abs().max()))
    query = torch.randn(tokens, heads, HEAD_DIM, generator=gen).to(BF16)
    indices = torch.randint(0, len(rows), (tokens, WINDOW + 512), generator=gen, dtype=torch.int32)
    sinks = torch.randn(heads, generator=gen)
    bmm1 = LOGIT_STD / (size * HEAD_DIM**0.5)

    keys = rows[indices.long()]
    scores = torch.einsum("thd,tkd->thk", query.double(), keys) * bmm1
    weights = torch.cat((scores, sinks.double()[:, None].expand(tokens, heads, 1)), 2).softmax(2)[..., :-1]
    exact = torch.einsum("thk,tkd->thd", weights, keys)

    def errors(pool: torch.Tensor, kv_scale: float = 1.0) -> dict[str, float]:
        pool = pool.view(-1, PAGE, 1, HEAD_DIM).to(DEVICE)
        length = torch.full((tokens,), indices.shape[1], dtype=torch.int32, device=DEVICE)
        out = sparse_mla(
            query[:, None].to(DEVICE), pool, None, indices.to(DEVICE), pool, length, length,
            bmm1_scale=bmm1 * kv_scale, bmm2_scale=kv_scale, sinks=sinks.to(DEVICE), kv_layout="NHD",
        )[:, 0].cpu().double()  # fmt: skip
        parts = {"all": slice(None), "nope": slice(NOPE), "rope": slice(NOPE, None)}
        wrong = lambda part: (out - exact)[..., part].norm() / exact[..., part].norm()  # noqa: E731
        return {name: float(wrong(part)) for name, part in parts.items()}

    return {
        "bfloat16": errors(rows.to(BF16)),
        "fp8_per_tensor, scale 1.0": errors(e4m3(rows, 1.0)),
        "fp8_per_tensor, calibrated": errors(e4m3(rows, calibrated), calibrated),
        "fp8_ds_mla (emulated)": errors(fp8_ds_mla(rows)),
    }


def machine() -> dict[str, str]:
    from vllm.third_party.mla_kernels import pick_provider

    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU ({names[0]}, {len(names)} cores)",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "provider": pick_provider(DEVICE)[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the results, JSON")
    parser.add_argument("--tokens", type=positive, default=64)
    parser.add_argument("--heads", type=positive, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        import vllm.dsv4_overlay.calibrate  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(f"error: this benchmark needs a vLLM with the full-width cache ({error}); apply the overlay to "
                 "the vLLM of this Python, or name its tree in PYTHONPATH.")  # fmt: skip
    check_out(args.out)
    results: dict[str, dict] = {}
    print(f"{'rows':9s} {'RMS':7s} {'cache':27s} {'all':>9s} {'NoPE':>9s} {'RoPE':>9s}")
    for kind in ("gaussian", "heavy"):
        for name, size in SIZES.items():
            errors = measure(kind, size, args.tokens, args.heads, args.seed)
            results.setdefault(kind, {})[name] = errors
            for cache, error in errors.items():
                values = " ".join(f"{error[part]:9.2e}" for part in ("all", "nope", "rope"))
                print(f"{kind:9s} {name:7s} {cache:27s} {values}", flush=True)
    head = {"command": shlex.join([Path(sys.executable).name, *sys.argv]), "machine": machine()}
    shape = {"tokens": args.tokens, "heads": args.heads, "keys": WINDOW + 512, "seed": args.seed}
    record = head | shape | {"relative_error_by_rows_rms_cache": results}
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
