# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""NVFP4 linears on SM100 and SM103 through FlashInfer's CuTe DSL product. Not run on
Blackwell: its preparation of weights and its padding have been compared with a float32
definition on the CPU, and FlashInfer's kernel has only been compiled."""

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear.nvfp4.base import (
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
)
from vllm.platforms import current_platform

GROUP = 16  # values a block scale
ALIGNMENT = 32  # of rows and columns: TMA reads 16 bytes of FP4


class CuTeDSLNvFp4LinearKernel(NvFp4LinearKernel):
    """For DeepSeek V4 only: other models keep the kernel that vLLM chooses for them."""

    @classmethod
    def is_supported(
        cls, compute_capability: int | None = None
    ) -> tuple[bool, str | None]:
        if compute_capability is None:
            capability = current_platform.get_device_capability()
            compute_capability = capability.to_int() if capability else 0
        if not current_platform.is_cuda() or compute_capability not in (100, 103):
            return False, "FlashInfer's CuTe DSL product needs SM100 or SM103"
        try:
            from flashinfer import mm_fp4  # noqa: F401
            from flashinfer.cute_dsl.utils import is_cute_dsl_available
        except ImportError:
            return False, "FlashInfer is not installed, or has no CuTe DSL product"
        if not is_cute_dsl_available():
            return False, "nvidia-cutlass-dsl is not installed"
        if not _serves_deepseek_v4():
            return False, "only DeepSeek V4 has it from vllm-dsv4-overlay"
        return True, None

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pad the weight (uint8 [out, in / 2]) and put its scales (E4M3 [out, in / 16])
        into the order in which the product reads them; once."""
        weight, scale = pad_weight(layer.weight.data, layer.weight_scale.data)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(
            interleave_scales(scale), requires_grad=False
        )

    def apply_weights(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`x` BF16 or FP16 [..., in] to [..., out]."""
        from vllm.utils.flashinfer import flashinfer_scaled_fp4_mm

        rows = x.reshape(-1, x.shape[-1])
        if missing := 2 * layer.weight.shape[1] - rows.shape[1]:
            rows = torch.nn.functional.pad(rows, (0, missing))
        values, scale = ops.scaled_fp4_quant(rows, layer.input_global_scale_inv)
        out = flashinfer_scaled_fp4_mm(
            values,
            layer.weight,
            scale,
            layer.weight_scale,
            layer.alpha,
            x.dtype,
            backend="cute-dsl",
        )
        out = out[:, : layer.output_size_per_partition]
        if bias is not None:
            out = out + bias
        return out.reshape(*x.shape[:-1], layer.output_size_per_partition)


def pad_weight(
    weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero rows and columns up to multiples of ALIGNMENT: uint8 [out, in / 2] and E4M3
    [out, in / 16].

    Raises:
        ValueError: `in` is not a multiple of GROUP, so the last block has no scale.
    """
    if 2 * weight.shape[1] != GROUP * scale.shape[1]:
        raise ValueError(
            f"An NVFP4 weight of {2 * weight.shape[1]} columns needs one scale for "
            f"each {GROUP} of them, and has {scale.shape[1]}."
        )
    rows = -weight.shape[0] % ALIGNMENT
    columns = -2 * weight.shape[1] % ALIGNMENT
    pad = torch.nn.functional.pad
    weight = pad(weight, (0, columns // 2, 0, rows))
    scale = pad(scale.view(torch.uint8), (0, columns // GROUP, 0, rows))
    return weight, scale.view(torch.float8_e4m3fn)


def interleave_scales(scale: torch.Tensor) -> torch.Tensor:
    """Block scales [rows, groups] as tcgen05 reads them: tiles of 128 rows and four
    groups, 512 bytes each, in which those of row r are the four bytes from
    r % 32 * 16 + r // 32 * 4 on. Padded with zeros to multiples of 128 and 4.

    Source: PTX ISA, "tcgen05-mma-scale-factor-b-layout-4x".
    """
    rows, groups = scale.shape
    bytes_ = torch.nn.functional.pad(
        scale.view(torch.uint8), (0, -groups % 4, 0, -rows % 128)
    )
    tiles = bytes_.view(bytes_.shape[0] // 128, 4, 32, bytes_.shape[1] // 4, 4)
    tiles = tiles.permute(0, 3, 2, 1, 4).contiguous()
    return tiles.view(bytes_.shape).view(scale.dtype)


def _serves_deepseek_v4() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    model = config and config.model_config
    return bool(model) and model.hf_config.model_type == "deepseek_v4"
