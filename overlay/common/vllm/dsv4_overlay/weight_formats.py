# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""What the parameters of a quantised linear layer stand for, in float32, as vLLM holds
them between loading and their preparation for a kernel. torch only."""

from collections.abc import Mapping

import torch

# Values of E2M1 without its sign bit (OCP Microscaling Formats 1.0, 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP8_BLOCK = 128


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] to float32 [..., 2n]; the low half of a byte comes first."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    values = torch.tensor(_E2M1, device=packed.device)[(codes & 7).long()]
    return torch.where(codes > 7, -values, values)


def unpack_int4(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """int32 [n, m] with eight unsigned 4-bit numbers along `dim`, the lowest bits
    first, to float32 less 8: symmetric weights of GPTQ and of compressed-tensors."""
    shifts = torch.arange(0, 32, 4, device=packed.device)
    numbers = (packed.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (1 - dim))) & 15
    return numbers.flatten(dim, dim + 1).float() - 8


def dequantise(
    parameters: Mapping[str, torch.Tensor], widths: list[int] | None = None
) -> torch.Tensor:
    """The weight [out, in] of a layer, float32.

    Args:
        parameters: by the names under which vLLM loads them. NVFP4: `weight` (uint8
            [out, in / 2]), `weight_scale` (E4M3 [out, in / 16]) and `weight_scale_2`
            (factor, ModelOpt), or `weight_packed`, `weight_scale` and
            `weight_global_scale` (divisor, compressed-tensors). 4-bit integers:
            `qweight` (int32 [in / 8, out]) and `scales` ([groups, out], GPTQ), or
            `weight_packed` (int32 [out, in / 8]) and `weight_scale` ([out, groups],
            compressed-tensors). FP8: `weight` (E4M3) and `weight_scale` or
            `weight_scale_inv`, one number a tensor, a row, or a block.
        widths: rows of each tensor of the checkpoint that the layer holds, where there
            is a scale for each.

    Raises:
        ValueError: none of these; one sentence.
    """
    if "qweight" in parameters:
        weight, scales = unpack_int4(parameters["qweight"], 0), parameters["scales"]
        return (weight * _spread(scales, weight.shape)).T.contiguous()
    weight = parameters.get("weight_packed", parameters.get("weight"))
    scale = parameters.get("weight_scale", parameters.get("weight_scale_inv"))
    if weight is not None and scale is not None:
        if weight.dtype == torch.int32:
            weight = unpack_int4(weight, 1)
            return weight * _spread(scale, weight.shape)
        if weight.dtype == torch.uint8:
            weight = unpack_e2m1(weight)
            whole = nvfp4_shard_scales(parameters)
            rows = _of_rows(whole, widths, weight.shape[0])
            return weight * _spread(scale, weight.shape) * rows
        if weight.dtype == torch.float8_e4m3fn and scale.dim() == 2:
            return weight.float() * _spread(scale, weight.shape)
        if weight.dtype == torch.float8_e4m3fn:
            return weight.float() * _of_rows(scale.float(), widths, weight.shape[0])
    found = ", ".join(
        f"{name} ({str(value.dtype).removeprefix('torch.')})"
        for name, value in parameters.items()
    )
    raise ValueError(
        f"Weights stored as {found} cannot be expanded; NVFP4, symmetric 4-bit "
        "integers and FP8 can."
    )


def nvfp4_shard_scales(parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The factor of each tensor of the checkpoint in an NVFP4 layer, float32 [tensors]:
    ModelOpt stores it, compressed-tensors its inverse."""
    if "weight_scale_2" in parameters:
        return parameters["weight_scale_2"].float().flatten()
    return 1 / parameters["weight_global_scale"].float().flatten()


def _of_rows(scale: torch.Tensor, widths: list[int] | None, rows: int) -> torch.Tensor:
    """One number a tensor, a group of rows, or a row, as [rows, 1]."""
    if scale.numel() not in (1, rows):
        scale = scale.repeat_interleave(torch.tensor(widths, device=scale.device))
    return scale.reshape(-1, 1).expand(rows, 1)


def _spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A scale a group of values, or a block of 128x128 with the last ones cut, as one a
    value."""
    scale = scale.float()
    for dim, (size, groups) in enumerate(zip(shape, scale.shape, strict=True)):
        is_block = groups == -(-size // _FP8_BLOCK)
        each = _FP8_BLOCK if is_block else size // groups
        scale = scale.repeat_interleave(each, dim).narrow(dim, 0, size)
    return scale
