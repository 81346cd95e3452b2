"""Inputs of linears rounded as vLLM's FP8 kernels round them, in a model whose weights are BF16.

So a checkpoint's values, dequantised, give what its layout costs in all: an FP8 linear of vLLM rounds its input
to E4M3 too, with one scale for 128 values of a token where the weight has blocks, and one for a token where it has
one scale. Here scales are powers of two, by which E4M3 values are exact in BF16, and products are those of BF16
linears.

For vLLM 0.22.1 or later with the series quantised-linears, in the process that runs the model, without
torch.compile.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

E4M3, E4M3_MAX, GROUP = torch.float8_e4m3fn, 448.0, 128


def rounded(x: torch.Tensor, group: int | None) -> torch.Tensor:
    """`x` [..., n] with a scale for `group` values, or for n; the same dtype."""
    groups = x.float().unflatten(-1, (-1, group or x.shape[-1]))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scale = torch.exp2(torch.ceil(torch.log2(largest / E4M3_MAX)))
    return ((groups / scale).to(E4M3).float() * scale).flatten(-2).to(x.dtype)


def fp8_linears(folder: Path) -> dict[str, int | None]:
    """The group of each FP8 linear's input, by the linear's name in the checkpoint; next-token layers left out."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, int | None] = {}
    for file in sorted(set(index.values())):
        with safe_open(folder / file, "pt") as tensors:
            shapes = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        for name, tensor in shapes.items():
            linear, _, part = name.rpartition(".")
            if part == "weight" and tensor.get_dtype() == "F8_E4M3" and linear.startswith("layers."):
                scale = shapes.get(f"{linear}.weight_scale")
                found[linear] = None if scale and scale.get_shape() == [1] else GROUP
    return found


class Rounding:
    """Rounds what goes into the linears that are FP8 in the checkpoint `folder`, once `install` was called."""

    def __init__(self, folder: Path):
        found = fp8_linears(folder)
        # wo_a is a grouped product; with one scale it is expanded to BF16 at load, and nothing is rounded.
        self.linears = {name: group for name, group in found.items() if group or not name.endswith(".wo_a")}
        self.done: set[str] = set()  # linears that were met

    def input_of(self, linear: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        from vllm.dsv4_overlay.quantised_linears import checkpoint_modules

        prefix = getattr(linear, "prefix", "")
        names = self.linears.keys() & set(checkpoint_modules(prefix, 1 << 30) if prefix else ())
        if not names:
            return x
        self.done |= names
        return rounded(x, self.linears[names.pop()])

    def of_groups(self, x: torch.Tensor) -> torch.Tensor:
        """The input of wo_a, [..., n]: in all layers alike."""
        names = {name for name in self.linears if name.endswith(".wo_a")}
        self.done |= names
        return rounded(x, GROUP) if names else x

    def install(self) -> None:
        from vllm.dsv4_overlay import quantised_linears
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        apply, project = UnquantizedLinearMethod.apply, quantised_linears.project_float32

        @functools.wraps(apply)
        def rounded_apply(method: Any, layer: torch.nn.Module, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            return apply(method, layer, self.input_of(layer, x), *rest)

        UnquantizedLinearMethod.apply = rounded_apply
        quantised_linears.project_float32 = lambda linear, x: project(linear, self.input_of(linear, x))
        try:  # where vLLM has a path for a wo_a in BF16
            from vllm.models.deepseek_v4.nvidia.ops import o_proj
        except ImportError:
            turned = quantised_linears.without_rope
            quantised_linears.without_rope = lambda *given: self.of_groups(turned(*given))
            return
        turn = o_proj.fused_inv_rope_fp8_quant

        @functools.wraps(turn)
        def turned_and_rounded(*given: Any, **named: Any) -> Any:
            o, scale = turn(*given, **named)
            return self.of_groups(o), scale

        o_proj.fused_inv_rope_fp8_quant = turned_and_rounded

    def missed(self) -> list[str]:
        """FP8 linears of the checkpoint that ran without this, if all have run."""
        return sorted(self.linears.keys() - self.done)
