# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""The sum of what a token's experts give, for numbers of experts that vLLM leaves to
PyTorch's general reduction."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def expert_sum(expert_outputs: torch.Tensor, out: torch.Tensor) -> None:
    """`out[t] = sum of expert_outputs[t, i] over i`, added in float32 in the order of
    i and rounded once.

    Args:
        expert_outputs: `[tokens, experts, hidden]`, contiguous, of a floating dtype.
        out: `[tokens, hidden]`, contiguous, of that dtype, on the same GPU.

    Raises:
        ValueError: an argument does not fit. One sentence.
    """
    if expert_outputs.dim() != 3 or not expert_outputs.is_contiguous():
        raise ValueError(
            "expert_outputs must be [tokens, experts, hidden], contiguous, got "
            f"{list(expert_outputs.shape)} of strides {expert_outputs.stride()}."
        )
    tokens, experts, hidden = expert_outputs.shape
    if (
        out.shape != (tokens, hidden)
        or not out.is_contiguous()
        or out.dtype != expert_outputs.dtype
        or out.device != expert_outputs.device
    ):
        raise ValueError(
            f"out must be [{tokens}, {hidden}] {expert_outputs.dtype}, contiguous, on "
            f"{expert_outputs.device}, got {list(out.shape)} {out.dtype} on "
            f"{out.device}."
        )
    if out.numel():
        with torch.cuda.device_of(out):
            _expert_sum_kernel[(tokens, triton.cdiv(hidden, _BLOCK))](
                expert_outputs, out, hidden, EXPERTS=experts, BLOCK=_BLOCK, num_warps=4
            )


@triton.jit
def _expert_sum_kernel(
    expert_outputs_ptr,
    out_ptr,
    hidden,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    first = expert_outputs_ptr + token * EXPERTS * hidden + column
    total = tl.zeros([BLOCK], tl.float32)
    for expert in tl.static_range(EXPERTS):
        total += tl.load(first + expert * hidden, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * hidden + column, total, mask=inside)
