"""The series small-kernels: what FP8 linears run beside their product, the sum of experts, compressors, picks."""

import json
import os
import subprocess
import sys

import pytest
from on_request import ON_REQUEST, TREE, tree_with

NAME = "small-kernels"
INDEXER = "vllm/model_executor/layers/sparse_attn_indexer.py"
COMPRESSOR = "vllm/models/deepseek_v4/compressor.py"
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


# The measure is vLLM's Triton kernels, of 512 channels those for AMD's GPUs. They store the bytes of its kernels
# for NVIDIA, but for the order of sums.
COMPRESSORS = """
import json
import types
import torch
from vllm.forward_context import ForwardContext
from vllm.models.deepseek_v4 import compressor as module

launches = []
module.get_forward_context = lambda: types.SimpleNamespace(attn_metadata=metadata)
def counted(name, function):
    def call(*args, **kwargs):
        launches.append(name)
        return function(*args, **kwargs)
    return call
for name in ("save_partial_states", "compress_norm_rope_store_triton"):
    setattr(module, name, counted("vllm", getattr(module, name)))
try:
    from vllm.dsv4_overlay import small_compressor
    small_compressor.current_platform = types.SimpleNamespace(is_device_capability=lambda of: of == 90)
    small_compressor.save_compress_store = counted("ours", small_compressor.save_compress_store)
except ImportError:
    pass

def compressor(ratio, head_dim, gen):
    width = head_dim * (2 if ratio == 4 else 1)
    pages = torch.randn(32, 4 if ratio == 4 else 8, 2 * width, generator=gen)
    row_bytes = 584 if head_dim == 512 else 132
    rows = torch.full((4, 64 if ratio == 4 else 2, row_bytes), 90, dtype=torch.uint8)
    self = types.SimpleNamespace(
        compress_ratio=ratio, head_dim=head_dim, coff=width // head_dim, overlap=ratio == 4, use_fp4_cache=False,
        ape=torch.randn(ratio, width, generator=gen), rms_norm_eps=1e-6, rope_head_dim=64,
        norm=types.SimpleNamespace(weight=torch.rand(head_dim, generator=gen).bfloat16()),
        state_cache=types.SimpleNamespace(kv_cache=pages, prefix="state"), k_cache_prefix="rows",
        _static_forward_context={"rows": types.SimpleNamespace(kv_cache=rows)},
        _quant_block=64 if head_dim == 512 else 128, _token_stride=576 if head_dim == 512 else 128,
        _scale_dim=8 if head_dim == 512 else 4)
    return self, pages, rows

out = []
for ratio, head_dim, tokens in ((4, 512, 6), (4, 128, 6), (128, 512, 16), (4, 128, 257), (128, 512, 17)):
    gen = torch.Generator().manual_seed(ratio + head_dim)
    self, pages, rows = compressor(ratio, head_dim, gen)
    positions = torch.arange(tokens) + ratio - 2  # windows that begin in the cache and end in the batch
    slots = 8 * pages.shape[1] + torch.arange(tokens) % pages.shape[1]
    slots[4:] = -1
    state = types.SimpleNamespace(
        slot_mapping=slots, block_size=pages.shape[1], token_to_req_indices=torch.zeros(tokens, dtype=torch.int32),
        block_table=torch.arange(32, dtype=torch.int32).roll(1)[None])
    slots[:4] = torch.tensor([int(state.block_table[0, p // pages.shape[1]]) * pages.shape[1] + p % pages.shape[1]
                              for p in positions[:4].tolist()])
    kv_slots = torch.arange(tokens) % rows.shape[1]
    metadata = {"state": state, "rows": types.SimpleNamespace(slot_mapping=kv_slots)}
    scores = torch.randn(tokens, pages.shape[2], generator=gen)
    rotary = types.SimpleNamespace(cos_sin_cache=torch.randn(ratio + tokens, 64, generator=gen))
    launches.clear()
    module.DeepseekCompressor.forward(self, scores, positions, rotary)
    out.append([list(launches), pages.view(torch.uint8).flatten().tolist()[::97], rows.flatten().tolist(),
                float(pages.double().abs().sum())])
print(json.dumps(out))
"""


OTHERS = """
import json
import types
import torch
from vllm.dsv4_overlay import small_compressor

def asked(tokens=1, dtype=torch.uint8, row=584, head_dim=512, ratio=4, fp4=False, scores=torch.float32, cuda=True):
    small_compressor.current_platform = types.SimpleNamespace(is_device_capability=lambda of: cuda and of == 90)
    rows = types.SimpleNamespace(kv_cache=torch.empty(2, 64, row, dtype=dtype))
    self = types.SimpleNamespace(
        compress_ratio=ratio, head_dim=head_dim, use_fp4_cache=fp4, k_cache_prefix="rows",
        state_cache=types.SimpleNamespace(prefix="state"), _static_forward_context={"rows": rows})
    metadata = {"state": types.SimpleNamespace(slot_mapping=torch.empty(tokens))}
    return small_compressor.save_and_compress(self, torch.empty(tokens, 8, dtype=scores), None, None, metadata)

print(json.dumps([asked(tokens=4096), asked(dtype=torch.bfloat16, row=512), asked(row=512),
                  asked(head_dim=128, row=68, fp4=True), asked(scores=torch.bfloat16), asked(cuda=False)]))
"""


# vLLM's indexer, with scores that are given and its top-k in torch, over what an earlier step left.
PICKS = """
import json
import sys
import types
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers import sparse_attn_indexer as layer
from vllm.v1.attention.backends.mla import indexer

K, WIDTH = 512, 700
taken, fills = [], []

def take(name, scores, lengths, picks):
    taken.append(name)
    picks.fill_(-7)
    for row, length in enumerate(lengths.flatten().tolist()):
        best = scores[row, : max(length, 0)].topk(min(K, max(length, 0))).indices.sort().values
        picks[row] = -1
        picks[row, : len(best)] = best.int()

library = torch.library.Library("_C", "FRAGMENT")
library.define("persistent_topk(Tensor logits, Tensor lengths, Tensor(a!) output, Tensor workspace, int k, "
               "int max_seq_len) -> ()")
library.impl("persistent_topk", lambda scores, lengths, picks, *rest: take("vllm", scores, lengths, picks), "CPU")
if sys.argv[1] == "ours":
    from vllm.dsv4_overlay import decode_topk
    def served(scores, starts, lengths, k, out, provider):
        assert starts is None and k == K and provider == "sm90" and lengths.shape == (len(scores),)
        take("ours", scores, lengths, out)
    decode_topk.indexer_topk, decode_topk.serves_topk = served, lambda scores, k: True

class Fills(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        rows = args[0].shape[0] if args and isinstance(args[0], torch.Tensor) and args[0].dim() else 0
        if operator.overloadpacket.__name__ == "fill_" and rows and args[1] == -1 and args[0].shape == (rows, K):
            fills.append(rows)
        return operator(*args, **kwargs or {})

def step(lengths, tokens, decode_lens=None, prefills=0, padding=0):
    lengths = torch.tensor(lengths, dtype=torch.int32)
    batch, next_n = lengths.shape
    gen = torch.Generator().manual_seed(batch)
    scores = torch.randn(batch * next_n, WIDTH, generator=gen)
    layer.fp8_fp4_paged_mqa_logits = lambda *args, **kwargs: scores
    metadata = indexer.DeepseekV32IndexerMetadata(None, WIDTH, torch.zeros(tokens + prefills), batch, tokens,
                                                  int(prefills > 0), prefills)
    metadata.decode = indexer.DeepSeekV32IndexerDecodeMetadata(
        None, lengths, torch.tensor(decode_lens or [next_n] * batch, dtype=torch.int32),
        requires_padding=decode_lens is not None, schedule_metadata=None)
    if prefills:  # of which none sees a row yet
        metadata.prefill = indexer.DeepseekV32IndexerPrefillMetadata([])
    layer.get_forward_context = lambda: types.SimpleNamespace(attn_metadata={"layer": metadata})
    rows = tokens + prefills + padding
    picks = torch.full((20, K), -9, dtype=torch.int32)
    taken.clear(), fills.clear()
    with Fills():
        layer.sparse_attn_indexer(
            torch.zeros(rows, 1), "layer", torch.zeros(1, 64, 132, dtype=torch.uint8), torch.zeros(rows, 2, 128),
            None, None, torch.zeros(rows, 2), 128, "ue8m0", K, 128, WIDTH, 4096, picks, True)
    return [list(taken), list(fills), picks.tolist()]

class Workspaces:
    @staticmethod
    def get_simultaneous(*shapes_and_dtypes):
        return [torch.empty(shape, dtype=dtype) for shape, dtype in shapes_and_dtypes]

layer.current_workspace_manager = Workspaces
layer.current_platform = types.SimpleNamespace(
    is_cuda=lambda: True, is_xpu=lambda: False, support_deep_gemm=lambda: True,
    fp8_dtype=lambda: torch.float8_e4m3fn)
out = [
    step([[700], [3], [0]], 3),
    step([[700], [3], [0]], 3, padding=2),
    step([[699, 700], [511, 512], [-1, 0]], 6),
    step([[699, 700], [20, 0]], 3, decode_lens=[2, 1]),
    step([[700], [3]], 2, prefills=3, padding=1),
]
print(json.dumps(out))
"""


def run(tree, program, *arguments, **env):
    env = os.environ | {"PYTHONPATH": str(tree)} | env
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
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


@pytest.mark.skipif(
    COMPRESSOR not in ON_REQUEST[NAME].files, reason="this release's series leaves compressors as they are"
)
def test_compressors_of_few_tokens_take_one_launch(tree):
    ours, stock = (run(where, COMPRESSORS, TRITON_INTERPRET="1") for where in (tree, TREE))
    assert [launches for launches, *_ in stock] == [["vllm", "vllm"]] * 5
    assert [launches for launches, *_ in ours] == [["ours"]] * 3 + [["vllm", "vllm"]] * 2
    for (_, states, rows, total), (_, expected_states, expected_rows, expected_total) in zip(
        ours, stock, strict=True
    ):
        assert (states, total) == (expected_states, expected_total)
        written = [(a, b) for a, b in zip(rows, expected_rows, strict=True) if b != 90]
        assert len(written) > 100
        assert sum(a != b for a, b in zip(rows, expected_rows, strict=True)) <= len(written) / 200


@pytest.mark.skipif(
    COMPRESSOR not in ON_REQUEST[NAME].files, reason="this release's series leaves compressors as they are"
)
def test_other_rows_and_kinds_are_left_to_vllm(tree):
    assert run(tree, OTHERS) == [False] * 6


@pytest.mark.skipif(INDEXER not in ON_REQUEST[NAME].files, reason="this release's series leaves picks as they are")
def test_a_decode_fills_no_picks_that_its_topk_writes(tree):
    ours, others, stock = (
        run(where, PICKS, which, TRITON_INTERPRET="1")
        for where, which in ((tree, "ours"), (tree, "vllm"), (TREE, "vllm"))
    )
    assert [taken for taken, *_ in ours] == [["ours"]] * 5
    assert [taken for taken, *_ in others] == [taken for taken, *_ in stock] == [["vllm"]] * 5
    assert [fills for _, fills, _ in stock] == [[3], [5], [6], [3], [6]]
    assert [fills for _, fills, _ in ours] == [fills for _, fills, _ in others] == [[], [2], [], [], [6]]
    for (*_, picks), (*_, fallen_back), (*_, expected) in zip(ours, others, stock, strict=True):
        assert picks == fallen_back == expected
