"""benchmarks/experts.py: dequantisation, routes, the reference and the table. Its times need a GPU and vLLM."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import experts as bench  # noqa: E402


def e2m1(code):
    """Sign, two exponent bits of bias 1, one mantissa bit: OCP MX 1.0, 5.3.3."""
    exponent, mantissa = code >> 1 & 3, (code & 1) / 2
    return (-1) ** (code >> 3) * (2.0 ** (exponent - 1) * (1 + mantissa) if exponent else mantissa)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"HIDDEN": 64, "WIDTH": 256, "EXPERTS": 8, "TOP_K": 3}.items():
        monkeypatch.setattr(bench, name, value)
    torch.manual_seed(0)


def test_dequantised():
    codes = torch.randint(0, 256, (3, 32), dtype=torch.uint8)
    scales = torch.tensor([[127, 120], [0, 130], [127, 250]], dtype=torch.uint8)
    found = bench.dequantised(codes, scales)
    for row, column in [(row, column) for row in range(3) for column in range(64)]:
        byte = int(codes[row, column // 2])
        value = e2m1(byte >> 4 if column % 2 else byte & 15) * 2.0 ** (int(scales[row, column // 32]) - 127)
        assert found[row, column].item() == pytest.approx(value, rel=1e-6)


def test_reference_is_the_sum_over_each_tokens_experts():
    weights = bench.weights(4, "cpu")
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        "w13_weight": (8, 128, 32), "w13_weight_scale": (8, 128, 2),
        "w2_weight": (8, 64, 32), "w2_weight_scale": (8, 64, 2),
    }  # fmt: skip
    x, route, chosen = bench.inputs(5, "cpu")
    assert all(len(set(row)) == 3 for row in chosen.tolist()) and route.sum(-1).tolist() == pytest.approx([1] * 5)
    x = x * 100  # the limit cuts off
    found, cut = bench.reference(weights, x, route, chosen), 0
    w13, w2 = (bench.dequantised(weights[f"{name}_weight"], weights[f"{name}_weight_scale"]).double()
               for name in ("w13", "w2"))  # fmt: skip
    for token in range(5):
        expected = torch.zeros(64, dtype=torch.float64)
        for weight, expert in zip(route[token].tolist(), chosen[token].tolist(), strict=True):
            gate, up = (part @ x[token].double() for part in (w13[expert, :64], w13[expert, 64:]))
            cut += int((gate > 10).sum() + (up.abs() > 10).sum())
            hidden = [
                min(g, 10) / (1 + math.exp(-min(g, 10))) * max(-10, min(u, 10))
                for g, u in zip(gate, up, strict=True)
            ]
            expected += weight * (w2[expert] @ torch.tensor(hidden, dtype=torch.float64))
        assert (found[token] - expected).norm() < 1e-5 * expected.norm()
    assert cut > 100


def test_rounds_and_table():
    def row(marlin, **more):
        us = {"marlin": marlin, **more}
        return {"share_of": 4, "tokens": 16, "us": us, "error": dict.fromkeys(us, marlin / 1e4),
                "not_told": {"flashinfer": "no such kernel"}}  # fmt: skip

    rounds = [[row(30.0, humming=20.0, triton=9.0)], [row(10.0, humming=5.0)], [row(20.0, humming=10.0)]]
    (found,) = bench.merged(rounds)
    assert found["us"] == {"marlin": 20.0, "humming": 10.0}  # what one round lacks is not told
    assert found["rounds"]["marlin"] == [30.0, 10.0, 20.0] and found["error"]["marlin"] == 0.003
    lines = bench.table([found]).splitlines()
    assert lines[0].split() == ["one", "of", "tokens", *bench.BACKENDS]
    assert lines[1].split() == ["4", "16", "20.0", "(1.00)", "10.0", "(2.00)", "-", "-", "-", "-"]
    assert lines[2:] == ["flashinfer: no such kernel"]
