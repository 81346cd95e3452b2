"""Quantised layouts of public DeepSeek V4 checkpoints, by name for `--layout`.

nvfp4-experts   NVIDIA's: NVFP4 experts (ModelOpt), all else as DeepSeek has it, FP8 in blocks
ct-nvfp4        canada-quant's with NVFP4 experts: compressed-tensors, attention with compressors and
                indexers in FP8 blocks, next-token layers BF16
ct-fp8-tensor   as ct-nvfp4, with FP8 a tensor in place of FP8 in blocks (no public checkpoint has this)
ct-w4a16        canada-quant's with experts in 4-bit integers, otherwise the same
autoround       Intel's: 4-bit integers in GPTQ's packing everywhere but next-token layers
nvfp4           ModelOpt, every linear NVFP4 (no public checkpoint has this)
bf16            not quantised

and DeepSeek's own with MXFP4 experts: `Mxfp4Experts` of V4-Flash and V4-Pro, otherwise FP8 in blocks of
128 x 128, and `Mxfp8` of V4.1, with blocks of 32 x 32.

Names, dtypes and `quantization_config` are those of the tools; values are rounded to nearest. Scales of
4-bit formats are chosen so that each weight is exact in BF16: `Dequantised` writes those, and a model
that runs on them differs from the quantised one by its kernels alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from .layouts import BLOCK, FP8, Fp8Blocks, to_fp8_blocks

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LINEAR = re.compile(r"\.(wq_a|wq_b|wkv|wgate|wo_a|wo_b|w[123]|weights_proj|e_proj|h_proj)\.weight$")
EXPERT = re.compile(r"\.ffn\.experts\.")
INPUT_AMAX = 16.0  # of the inputs of all linears, which have an RMS near one
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]


def up_to_power_of_two(x: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(x)))


def fp8_blocks(w: torch.Tensor, scale_name: str, scale_dtype: torch.dtype) -> Stored:
    values, scale = to_fp8_blocks(w)
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    represented = values.float() * spread[: w.shape[0], : w.shape[1]]
    return {"weight": values, scale_name: scale.to(scale_dtype)}, represented


def fp8_tensor(w: torch.Tensor) -> Stored:
    scale = up_to_power_of_two(w.abs().max().clamp(min=1e-30) / 448)
    values = (w / scale).to(FP8)
    return {"weight": values, "weight_scale": scale.view(1)}, values.float() * scale


def to_e2m1(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1, two a byte, the first in the low bits, and the values they stand for, of which 6 is the largest."""
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    code = torch.bucketize(x.abs().contiguous(), middles)  # to the smaller of two that are as near
    # To the even one instead, which is the larger after an odd code.
    code += ((code < 7) & (code % 2 == 1) & (x.abs() == middles[code.clamp(max=6)])).long()
    values = E2M1[code] * x.sign()
    code = (code + 8 * (x < 0)).to(torch.uint8)
    return code[..., ::2] | code[..., 1::2] << 4, values


def to_mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed E2M1 [out, in / 2] and their power-of-two scale for 32, [out, in / 32], which leaves none above 6."""
    blocks = w.view(w.shape[0], -1, 32)
    amax = blocks.abs().amax(-1)
    scale = torch.where(amax > 0, up_to_power_of_two(amax / 6), 1)
    return to_e2m1((blocks / scale.unsqueeze(-1)).view(w.shape))[0], scale


def to_nvfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed E2M1 [out, in / 2], E4M3 scales [out, in / 16], a power of two for all, and the values."""
    whole = up_to_power_of_two(w.abs().max().clamp(min=1e-30) / (6 * 448))
    blocks = w.view(w.shape[0], -1, 16)
    scale = (blocks.abs().amax(-1) / 6 / whole).to(FP8)
    step = scale.float().unsqueeze(-1) * whole
    scaled = torch.where(step > 0, blocks / step.clamp(min=1e-38), 0)
    packed, represented = to_e2m1(scaled)
    return packed.flatten(1), scale, whole, (represented * step).view(w.shape)


def modelopt_nvfp4(w: torch.Tensor) -> Stored:
    packed, scale, whole, represented = to_nvfp4(w)
    return {
        "weight": packed,
        "weight_scale": scale,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(INPUT_AMAX / (6 * 448)),
    }, represented


def compressed_tensors_nvfp4(w: torch.Tensor) -> Stored:
    packed, scale, whole, represented = to_nvfp4(w)
    return {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_global_scale": 1 / whole.view(1),
        "input_global_scale": torch.tensor([6 * 448 / INPUT_AMAX]),
    }, represented


def to_int4(w: torch.Tensor, group: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned numbers [out, in] with 8 for zero, BF16 scales [out, groups], and the values they stand for."""
    groups = w.view(w.shape[0], -1, group)
    scale = (groups.abs().amax(-1) / 7.5).clamp(min=2.0**-100)
    power = up_to_power_of_two(scale) / 16
    scale = torch.ceil(scale / power) * power  # four bits, so that products with four are exact in BF16
    code = torch.round(groups / scale.unsqueeze(-1)).clamp(-8, 7)
    represented = (code * scale.unsqueeze(-1)).view(w.shape)
    return (code + 8).to(torch.int64).view(w.shape), scale.to(torch.bfloat16), represented


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """int32 [rows, columns / 8], the first number in the lowest bits."""
    packed = (numbers.view(numbers.shape[0], -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def compressed_tensors_int4(w: torch.Tensor) -> Stored:
    numbers, scale, represented = to_int4(w)
    shape = torch.tensor(w.shape, dtype=torch.int64)
    return {"weight_packed": pack_int4(numbers), "weight_scale": scale, "weight_shape": shape}, represented


def gptq_int4(w: torch.Tensor) -> Stored:
    numbers, scale, represented = to_int4(w)
    zeros = torch.full(scale.shape[::-1], 7, dtype=torch.int64)  # 8, stored as one less
    return {
        "qweight": pack_int4(numbers).T.contiguous(),
        "qzeros": pack_int4(zeros),
        "scales": scale.T.contiguous(),
    }, represented


class Mxfp4Experts(Fp8Blocks):
    expert_dtype = "fp4"
    block = BLOCK

    def store(self, name: str, kind: str, w: torch.Tensor) -> dict[str, torch.Tensor]:
        if kind != "fp8":
            return super().store(name, kind, w)
        values, scale = to_mxfp4(w) if EXPERT.search(name) else to_fp8_blocks(w, self.block)
        return {name: values, name.removesuffix("weight") + self.scale: scale.to(torch.float8_e8m0fnu)}

    def config(self, ignored: list[str]) -> dict:
        return super().config(ignored) | {"weight_block_size": [self.block, self.block]}


class Mxfp8(Mxfp4Experts):
    block = 32


class Quantised(Fp8Blocks):
    """A layout that has a format for each linear, by its name."""

    def format(self, name: str, kind: str) -> Callable[[torch.Tensor], Stored] | None:
        raise NotImplementedError

    def values(self, name: str, kind: str, w: torch.Tensor) -> Stored:
        """What is stored, by the last part of the name, and the values it stands for."""
        make = self.format(name, kind) if LINEAR.search(name) else None
        if make is None:
            stored = super().store(name, "bf16" if kind == "fp8" else kind, w)[name]
            return {"weight": stored}, stored
        return make(w)

    def store(self, name: str, kind: str, w: torch.Tensor) -> dict[str, torch.Tensor]:
        if not LINEAR.search(name):
            return super().store(name, kind, w)
        return {name.removesuffix("weight") + part: t for part, t in self.values(name, kind, w)[0].items()}


class NvidiaNvfp4Experts(Quantised):
    expert_dtype = "fp4"

    def format(self, name: str, kind: str) -> Callable[[torch.Tensor], Stored] | None:
        if EXPERT.search(name):
            return modelopt_nvfp4
        return (lambda w: fp8_blocks(w, "scale", torch.float8_e8m0fnu)) if kind == "fp8" else None

    def config(self, ignored: list[str]) -> dict:
        return super().config(ignored) | {"moe_quant_algo": "NVFP4"}


class CompressedTensors(Quantised):
    def __init__(self, experts: Callable[[torch.Tensor], Stored], blocks: bool = True):
        super().__init__()
        self.experts = experts
        self.blocks = blocks  # FP8 in blocks, or a tensor

    def format(self, name: str, kind: str) -> Callable[[torch.Tensor], Stored] | None:
        if name.startswith("mtp.") or name.endswith(".wo_b.weight") and kind == "bf16":
            return None
        if EXPERT.search(name):
            return self.experts
        return (lambda w: fp8_blocks(w, "weight_scale", torch.float32)) if self.blocks else fp8_tensor

    def config(self, ignored: list[str]) -> dict:
        nvfp4 = self.experts is compressed_tensors_nvfp4
        four_bits = {"num_bits": 4, "symmetric": True, "dynamic": False}
        if nvfp4:
            weights = four_bits | {"type": "float", "strategy": "tensor_group", "group_size": 16}
            inputs = weights | {"dynamic": "local"}
        else:
            weights, inputs = four_bits | {"type": "int", "strategy": "group", "group_size": 128}, None
        eight_bits = {"num_bits": 8, "type": "float", "symmetric": True}
        if self.blocks:
            linears = eight_bits | {"strategy": "block", "block_structure": [BLOCK, BLOCK], "dynamic": False}
            activations = eight_bits | {"strategy": "group", "group_size": BLOCK, "dynamic": True}
        else:
            linears = eight_bits | {"strategy": "tensor", "dynamic": False}
            activations = eight_bits | {"strategy": "token", "dynamic": True}
        return {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "format": "nvfp4-pack-quantized" if nvfp4 else "pack-quantized",
                    "targets": [r"re:.*ffn\.experts\.\d+\.w[123]$"],
                    "weights": weights,
                    "input_activations": inputs,
                },
                "group_1": {
                    "format": "float-quantized",
                    "targets": [
                        r"re:.*attn\..*(wq_a|wq_b|wkv|wgate|wo_a|wo_b|weights_proj)$",
                        r"re:.*shared_experts\.w[123]$",
                    ],
                    "weights": linears,
                    "input_activations": activations,
                },
            },
            "ignore": ["head", r"re:.*ffn\.gate$", r"re:mtp\..*"],
        }


class AutoRound(Quantised):
    def format(self, name: str, kind: str) -> Callable[[torch.Tensor], Stored] | None:
        return None if name.startswith("mtp.") else gptq_int4

    def config(self, ignored: list[str]) -> dict:
        return {
            "quant_method": "auto-round",
            "bits": 4,
            "data_type": "int",
            "group_size": 128,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
            "block_name_to_quantize": "layers",
        }


class ModelOptNvfp4(Quantised):
    expert_dtype = "fp4"

    def format(self, name: str, kind: str) -> Callable[[torch.Tensor], Stored] | None:
        return modelopt_nvfp4

    def config(self, ignored: list[str]) -> dict:
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "ignore": ["head", "embed", "*ffn.gate"],
        }


class Plain(Quantised):
    def format(self, name: str, kind: str) -> None:
        return None

    def config(self, ignored: list[str]) -> None:
        return None


class Dequantised(Fp8Blocks):
    """The values that another layout stands for, in BF16, and no `quantization_config`."""

    def __init__(self, layout: Quantised):
        super().__init__()
        self.layout = layout

    def store(self, name: str, kind: str, w: torch.Tensor) -> dict[str, torch.Tensor]:
        if not LINEAR.search(name):
            return super().store(name, kind, w)
        return {name: self.layout.values(name, kind, w)[1].to(torch.bfloat16)}

    def config(self, ignored: list[str]) -> None:
        return None


LAYOUTS: dict[str, Callable[[], Quantised]] = {
    "nvfp4-experts": NvidiaNvfp4Experts,
    "ct-nvfp4": lambda: CompressedTensors(compressed_tensors_nvfp4),
    "ct-fp8-tensor": lambda: CompressedTensors(compressed_tensors_nvfp4, blocks=False),
    "ct-w4a16": lambda: CompressedTensors(compressed_tensors_int4),
    "autoround": AutoRound,
    "nvfp4": ModelOptNvfp4,
    "bf16": Plain,
}
