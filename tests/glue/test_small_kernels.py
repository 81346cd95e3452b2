"""The series small-kernels: what FP8 linears run beside their product, and how experts are added."""

import json
import os
import subprocess
import sys

import pytest
from on_request import ON_REQUEST, TREE, tree_with

NAME = "small-kernels"
MARLIN = "vllm/model_executor/layers/fused_moe/experts/marlin_moe.py"
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


EXPERTS = """
import torch
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts

outputs, out = torch.randn(5, 6, 128).bfloat16(), torch.empty(5, 128, dtype=torch.bfloat16)
MarlinExperts.moe_sum(None, outputs, out)
print(float((out.double() - outputs.double().sum(1)).norm() / out.double().norm()))
"""


def run(tree, program, **env):
    env = os.environ | {"PYTHONPATH": str(tree)} | env
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return tree_with(tmp_path_factory.mktemp("tree"), NAME)


def test_an_fp8_linear_fills_nothing(tree):
    ours, stock = run(tree, PROGRAM), run(TREE, PROGRAM)
    fills = {"new_ones", "fill_"}
    assert fills & set(stock)
    assert [name for name in ours if name != "new_empty"] == [name for name in stock if name not in fills]


@pytest.mark.skipif(MARLIN not in ON_REQUEST[NAME].files, reason="this release's series leaves Marlin as it is")
def test_experts_are_added_by_the_kernel(tree):
    """On a CPU, where vLLM's own operator is not there."""
    assert run(tree, EXPERTS, TRITON_INTERPRET="1") < 3e-3
