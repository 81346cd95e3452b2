#!/usr/bin/env python3
"""The MXFP4 experts of one layer of V4-Flash, through vLLM's own classes, on one GPU: how long each backend takes.

    python benchmarks/experts.py --out benchmarks/results/experts_h200.json

Needs a GPU and vLLM 0.21.0 to 0.23.0; Humming before 0.23.0 also the series `humming-experts`, and FP8 weights
(`fp8`, by DeepGEMM) the series `fp8-experts`.
For the share of one of four and one of eight tensor-parallel GPUs (every expert's width divided): random weights,
a router that takes six of 256 experts by chance, 1 to 8192 tokens; no shared experts, nothing sent between GPUs.
Every backend gets the same and has to agree with float32 on the dequantised weights, or its time is not told but
why. Times are medians of CUDA-graph replays, in turns, and of --rounds; a replay makes up to 20 calls, each with
tokens and routes of its own, since few tokens' experts fit the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from e2e import check_out
from timing import CALLS, captured, in_turns, provenance

HIDDEN, WIDTH, EXPERTS, TOP_K, LIMIT = 4096, 2048, 256, 6, 10.0
SHARES, TOKENS = (4, 8), (1, 4, 16, 64, 256, 1024, 4096, 8192)
# --moe-backend, and what Humming's activations are quantised to.
BACKENDS = {
    "marlin": ("marlin", None),
    "humming": ("humming", None),
    "humming_fp8": ("humming", "float8e4m3"),
    "triton": ("triton_unfused", None),
    "flashinfer": ("flashinfer_cutlass", None),
    "fp8": ("marlin", None),  # and dsv4_fp8_experts, from one token on
}
LARGEST_ERROR = 0.1  # relative, of an output: BF16 products have about 0.005, E4M3 ones 0.04
CHECKED = 64  # tokens
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Weights = dict[str, torch.Tensor]


def dequantised(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., n] in float32 of MXFP4 (OCP MX 1.0): two E2M1 codes a byte of [..., n / 2], the lower half first, and
    an E8M0 scale, as a byte of [..., n / 32], for 32 values."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return values[pairs.int()] * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)


def weights(share_of: int, device: str) -> Weights:
    """As a checkpoint has them, gate before up; of a size at which the SwiGLU limit cuts some values off."""
    found = {}
    for name, n, k in (("w13", 2 * WIDTH // share_of, HIDDEN), ("w2", HIDDEN, WIDTH // share_of)):
        for what, low, high, packed in (("weight", 0, 256, 2), ("weight_scale", 119, 123, 32)):
            shape = EXPERTS, n, k // packed
            found[f"{name}_{what}"] = torch.randint(low, high, shape, dtype=torch.uint8, device=device)
    return found


def inputs(tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations in BF16, and for each token the weights of six experts, which sum to 1, and which they are."""
    chosen = torch.rand(tokens, EXPERTS, device=device).topk(TOP_K)
    x = torch.randn(tokens, HIDDEN, device=device).bfloat16()
    return x, chosen.values / chosen.values.sum(-1, keepdim=True), chosen.indices.int()


def reference(of: Weights, x: torch.Tensor, route: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """[tokens, HIDDEN] in float32: the sum of w2(silu(min(gate, LIMIT)) * clamp(up, -LIMIT, LIMIT)) by `route`."""
    out = torch.zeros(x.shape, device=x.device)
    for expert in experts.unique().tolist():
        tokens, place = (experts == expert).nonzero(as_tuple=True)
        w13, w2 = (dequantised(of[f"{name}_weight"][expert], of[f"{name}_weight_scale"][expert])
                   for name in ("w13", "w2"))  # fmt: skip
        gate, up = (x[tokens].float() @ w13.T).chunk(2, -1)
        hidden = F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
        out.index_add_(0, tokens, hidden @ w2.T * route[tokens, place, None])
    return out


def backend(name: str, share_of: int, of: Weights) -> Callable[..., torch.Tensor]:
    """vLLM's layer with `of` as its weights; what is returned takes inputs()."""
    from vllm.config import KernelConfig, VllmConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe import FusedMoE
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

    of_v4 = SimpleNamespace(get_quant_method=lambda layer, prefix: Mxfp4MoEMethod(layer.moe_config))
    moe_backend, a_dtype = BACKENDS[name]
    os.environ["VLLM_HUMMING_INPUT_QUANT_CONFIG"] = json.dumps({"dtype": a_dtype} if a_dtype else {})
    options = {"dsv4_fp8_experts": 1} if name == "fp8" else {}
    config = VllmConfig(kernel_config=KernelConfig(moe_backend=moe_backend), additional_config=options)
    with set_current_vllm_config(config), torch.device("cuda"):
        layer = FusedMoE(
            num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, intermediate_size=WIDTH // share_of,
            params_dtype=torch.bfloat16, quant_config=of_v4, swiglu_limit=LIMIT, prefix="experts",
            scoring_func="sqrtsoftplus", e_score_correction_bias=torch.zeros(EXPERTS),
        )  # fmt: skip
        for key, value in of.items():
            getattr(layer, key).data.copy_(value)
        layer.moe_config.disable_inplace = True  # as with shared experts
        layer.quant_method.process_weights_after_loading(layer)
    if options and not getattr(layer.quant_method, "fp8_from", None):
        raise RuntimeError("needs the series fp8-experts, which is not applied")

    def call(x: torch.Tensor, route: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        with set_current_vllm_config(config), set_forward_context(None, config):
            return layer.quant_method.moe_kernel.apply(
                hidden_states=x, w1=layer.w13_weight, w2=layer.w2_weight, topk_weights=route, topk_ids=experts,
                activation=layer.activation, global_num_experts=EXPERTS, expert_map=None,
                apply_router_weight_on_input=False,
            )  # fmt: skip

    return call


def measure(share_of: int, calls: dict[str, Any], of: Weights) -> Iterator[dict[str, Any]]:
    """A row for each number of tokens; `calls` has words for a backend that did not start."""
    for tokens in TOKENS:
        several = [inputs(tokens, "cuda") for _ in range(max(3, min(CALLS, 16384 // tokens)))]
        expected = reference(of, *(tensor[:CHECKED] for tensor in several[0]))
        error, not_told, serves = {}, {}, {}
        for name, call in calls.items():  # all before one is captured: they share a workspace, which may grow
            try:
                if isinstance(call, str):
                    raise RuntimeError(call)
                found = call(*several[0])[:CHECKED].float()
                error[name] = float((found - expected).norm() / expected.norm())
                if not error[name] < LARGEST_ERROR:
                    raise RuntimeError(f"{error[name]:.2g} away from float32")
                serves[name] = call
            except Exception as reason:  # a backend's own, whatever it is
                not_told[name] = f"{reason}".partition("\n")[0][:200]
        of_each = (partial(lambda call, every, i: call(*every[i]), call, several) for call in serves.values())
        us = dict(zip(serves, in_turns(*(captured(one, len(several)) for one in of_each)), strict=True))
        yield {"share_of": share_of, "tokens": tokens, "us": us, "error": error, "not_told": not_told}


def merged(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Medians of the times that every round has, the largest errors, and the times of each."""
    results = []
    for found in zip(*rounds, strict=True):
        told = set.intersection(*(set(row["us"]) for row in found))
        every = {name: [row["us"][name] for row in found] for name in BACKENDS if name in told}
        us = {name: round(statistics.median(times), 2) for name, times in every.items()}
        error = {name: round(max(row["error"][name] for row in found), 5) for name in every}
        words = {name: why for row in found for name, why in row["not_told"].items()}
        results.append(found[0] | {"us": us, "error": error, "not_told": words, "rounds": every})
    return results


def table(results: list[dict[str, Any]]) -> str:
    """Microseconds of a layer, and in brackets Marlin's time over it."""
    lines = ["one of  tokens" + "".join(f"{name:>18}" for name in BACKENDS)]
    for row in results:
        us, marlin = row["us"], row["us"].get("marlin", float("nan"))
        cells = [f"{us[name]:.1f} ({marlin / us[name]:.2f})" if name in us else "-" for name in BACKENDS]
        lines.append(f"{row['share_of']:6}{row['tokens']:8}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(
        lines + sorted({f"{name}: {why}" for row in results for name, why in row["not_told"].items()})
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON with every figure")
    parser.add_argument("--rounds", type=int, choices=range(1, 10), default=3, help="default: %(default)s")
    arguments = parser.parse_args()
    check_out(arguments.out)
    if not torch.cuda.is_available():
        sys.exit("error: this benchmark needs a GPU, and there is none.")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.v1.worker.workspace import init_workspace_manager

    init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/group", 0, "gloo")
    with set_current_vllm_config(VllmConfig()):
        initialize_model_parallel(1)
    init_workspace_manager(torch.device("cuda"))
    found: list[list[dict[str, Any]]] = [[] for _ in range(arguments.rounds)]
    for share_of in SHARES:
        torch.manual_seed(0)
        of, calls = weights(share_of, "cuda"), {}
        for name in BACKENDS:
            try:
                calls[name] = backend(name, share_of, of)
            except Exception as reason:
                calls[name] = f"{type(reason).__name__}: {reason}"
        for rows in found:
            rows += measure(share_of, calls, of)
    report = provenance() | {"results": merged(found)}
    installed = {one.name: one.version for one in distributions()}
    report["versions"] |= {name: installed.get(name) for name in ("vllm", "humming-kernels", "flashinfer-python")}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report["results"]))


if __name__ == "__main__":
    main()
