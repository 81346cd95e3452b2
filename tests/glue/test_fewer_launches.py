"""The series fewer-launches: what vLLM's FP8 linears run beside their product, with it and without."""

import json
import os
import subprocess
import sys

import pytest
from on_request import ON_REQUEST, TREE, tree_with

NAME = "fewer-launches"
if NAME not in ON_REQUEST:
    pytest.skip(f"this release has no series {NAME}", allow_module_level=True)

PROGRAM = """
import json
import types
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.kernels.linear.scaled_mm import BlockScaledMMLinearKernel as module

class Product(module.Fp8BlockScaledMMLinearKernel):  # as FlashInfer's: it quantises activations itself
    apply_input_quant = False
    def __init__(self):
        self.config = types.SimpleNamespace(out_dtype=torch.bfloat16)
    @classmethod
    def is_supported(cls, *args):
        return True, None
    def apply_block_scaled_mm(self, A, B, As, Bs):
        assert isinstance(As, torch.Tensor) and As.shape == (1,)
        return A @ B.T

class Operators(TorchDispatchMode):
    seen = []
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen.append(operator.overloadpacket.__name__)
        return operator(*args, **kwargs or {})

layer = torch.nn.Module()
layer.weight, layer.weight_scale_inv = torch.randn(4, 8).bfloat16(), torch.ones(1, 1)
layer.input_scale = layer.input_scale_ub = None
x = torch.randn(3, 8).bfloat16()
with Operators():
    out = Product().apply_weights(layer, x)
assert torch.equal(out, x @ layer.weight.T)
print(json.dumps(Operators.seen))
"""


def operators(tree):
    env = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_fp8_linear_fills_nothing(tmp_path):
    ours, stock = operators(tree_with(tmp_path, NAME)), operators(TREE)
    fills = {"new_ones", "fill_"}
    assert fills & set(stock)
    assert [name for name in ours if name != "new_empty"] == [name for name in stock if name not in fills]
