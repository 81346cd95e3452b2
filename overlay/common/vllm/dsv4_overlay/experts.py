# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""DeepSeek V4's MXFP4 experts by Humming (`--moe-backend humming`), on releases of
vLLM that have it and where it does not work."""

from importlib.metadata import PackageNotFoundError, version

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.utils import swiglu_limit_func

# What vLLM 0.22.0 and 0.22.1 pin, and whose calls were compared with theirs and with
# those of 0.21.0, which pins none.
HUMMING = "0.1.2"


def require_humming() -> None:
    """Before vLLM imports it, when a layer is made: no weight is loaded yet.

    Raises ValueError if humming-kernels is not installed, or not at `HUMMING`.
    """
    try:
        found = f"{version('humming-kernels')} is installed"
    except PackageNotFoundError:
        found = "it is not installed"
    if found != f"{HUMMING} is installed":
        raise ValueError(
            f"--moe-backend humming needs humming-kernels {HUMMING}, but {found}; run "
            f"pip install 'humming-kernels[cu13]=={HUMMING}' (cu12 for CUDA 12), or "
            "take another --moe-backend."
        )


class SwigluLimit:
    """For experts whose `activation` knows no limit: that of `gemm1_clamp_limit`."""

    def activation(
        self, activation: MoEActivation, output: torch.Tensor, input: torch.Tensor
    ) -> None:
        """SwiGLU of `input`, [tokens, 2 x width], into `output`, [tokens, width]; the
        gate is at most the limit, the other half at most and at least."""
        limit = self.quant_config.gemm1_clamp_limit
        if activation == MoEActivation.SILU and limit is not None:
            swiglu_limit_func(output, input, limit)
        else:
            super().activation(activation, output, input)
