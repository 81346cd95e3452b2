"""How tensors are stored: plain types, and FP8 in blocks as the public checkpoints have it."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32}


def to_fp8_blocks(w: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values and their float32 power-of-two scale a block, of 128x128 by default; w = values * scale.

    Powers of two are exact in float32 and in UE8M0.
    """
    out, fan_in = w.shape
    rows, cols = -(-out // block), -(-fan_in // block)
    padded = torch.nn.functional.pad(w, (0, cols * block - fan_in, 0, rows * block - out))
    blocks = padded.view(rows, block, cols, block)
    amax = blocks.abs().amax(dim=(1, 3))
    amax[amax == 0] = FP8_MAX
    scale = torch.exp2(torch.ceil(torch.log2(amax / FP8_MAX)))
    values = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return values.view(rows * block, cols * block)[:out, :fan_in].contiguous(), scale


class Fp8Blocks:
    """Tensors of kind `fp8` in blocks of 128 x 128, the others as they are.

    A subclass stores tensors otherwise, by their names if need be; `store` sees each of them.
    """

    expert_dtype = "fp8"  # the field of config.json

    def __init__(self, scale: str = "scale"):
        self.scale = scale  # the name of a weight's scales

    def store(self, name: str, kind: str, w: torch.Tensor) -> dict[str, torch.Tensor]:
        """The stored tensors of one of the model's, by their names in the file."""
        if kind == "fp8":
            values, scale = to_fp8_blocks(w)
            return {name: values, name.removesuffix("weight") + self.scale: scale}
        return {name: w.to(DTYPES[kind]).contiguous()}

    def config(self, ignored: list[str]) -> dict | None:
        """`quantization_config` of config.json, None for no such field; `ignored` modules are left."""
        config: dict = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
        return config | {"ignored_layers": ignored} if ignored else config
