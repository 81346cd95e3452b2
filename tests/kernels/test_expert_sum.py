"""The sum over a token's experts against float64."""

import pytest
import torch
from mla_kernels import expert_sum


@pytest.mark.parametrize(
    "tokens, experts, hidden", [(1, 6, 4096), (17, 8, 7168), (3, 1, 8), (5, 9, 1025), (0, 6, 64)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sum(device, tokens, experts, hidden, dtype):
    gen = torch.Generator().manual_seed(experts)
    outputs = torch.randn(tokens, experts, hidden, generator=gen).to(dtype)
    out = torch.full((tokens + 2, hidden), 7.0, dtype=dtype, device=device)
    expert_sum(outputs.to(device), out[1:-1])
    want = outputs.double().sum(1)
    step = torch.finfo(dtype).eps * want.abs() + 1e-6
    assert bool(((out[1:-1].cpu().double() - want).abs() <= 0.51 * step).all())
    assert bool((out[0] == 7).all() and (out[-1] == 7).all())


def test_one_rounding(device):
    """1 + 2^-9 is 1 in BF16: rounded after each expert, the sum of nine would stay 1."""
    outputs = torch.full((1, 9, 64), 2.0**-9, dtype=torch.bfloat16, device=device)
    outputs[:, 0] = 1
    out = torch.empty(1, 64, dtype=torch.bfloat16, device=device)
    expert_sum(outputs, out)
    assert bool((out == 1 + 2.0**-6).all())


def test_what_does_not_fit(device):
    outputs = torch.zeros(4, 6, 64, dtype=torch.bfloat16, device=device)
    out = torch.zeros(4, 64, dtype=torch.bfloat16, device=device)
    for arguments, word in (
        ((outputs.transpose(0, 1), out), "contiguous"),
        ((outputs[0], out), "tokens, experts, hidden"),
        ((outputs, out[:3]), r"out must be \[4, 64\]"),
        ((outputs, out.float()), "bfloat16"),
        ((outputs, out.to("meta")), "out must be .*, got .* on meta"),
        ((outputs, torch.zeros(64, 4, dtype=torch.bfloat16, device=device).T), "out must be .* contiguous"),
    ):
        with pytest.raises(ValueError, match=word):
            expert_sum(*arguments)
