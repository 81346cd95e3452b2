"""Triton kernels compile for every GPU that they serve, and fit its memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mla_kernels import triton_sparse_mla

# KiB of shared memory that a program can have: CUDA C++ Programming Guide, table of compute capabilities.
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
arch = int(sys.argv[2])
from mla_kernels import triton_sparse_mla
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

kernel = triton_sparse_mla._attend_kernel

def type_of(name, rows, query):
    if name.isupper():
        return "constexpr"
    if name in ("scale", "out_scale"):
        return "fp32"
    if not name.endswith("_ptr"):
        return "i32"
    if name == "q_ptr":
        return "*" + query
    if name.startswith("cache"):
        return "*bf16" if rows == "bf16" else "*u8"
    if name == "out_ptr":
        return "*bf16"
    integers = ("indices", "lengths", "visible")
    return "*i32" if name.startswith(integers) else "*fp32"

# 512 BF16 are a part of what 576 are, and E4M3 q needs more than BF16 q does; 16 heads take the larger tiles.
# The first two need the most memory and decode E4M3; the others are left out on most GPUs, for time.
variants = [("bf16", 576, "bf16", 16), ("v32", 576, "bf16", 16), ("e4m3", 512, "u8", 16), ("v4", 512, "bf16", 16),
            ("v32", 576, "bf16", 64)]
for rows, head_dim, query, heads in variants if arch in (80, 90) else variants[:2]:
    block_h, block_n, warps = triton_sparse_mla._tile(heads, rows, head_dim)
    types = {name: type_of(name, rows, query) for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, (name, type) in enumerate(types.items())
               if type[0] == "*" or "stride" in name}
    constants = dict(FORMAT=rows, HEAD_DIM=head_dim, BASES=(0, 0), SCALE_TENSORS=(False, False),
                     HARDWARE_E4M3=arch >= 89, WHOLE=False, BLOCK_H=block_h, BLOCK_N=block_n)
    compiled = compile(ASTSource(kernel, types, constants, aligned), target=GPUTarget("cuda", arch, 32),
                       options=dict(num_warps=warps, num_stages=2))
    print(rows, head_dim, query, heads, compiled.metadata.shared)
"""


ARCHS = pytest.mark.parametrize(
    "arch", [arch if arch in (80, 90) else pytest.param(arch, marks=pytest.mark.slow) for arch in SHARED_MEMORY]
)


@ARCHS
def test_attention_compiles(arch, tmp_path):
    shared = compile_for(PROGRAM, arch, tmp_path)
    assert len(shared) == (5 if arch in (80, 90) else 2) and max(shared) <= SHARED_MEMORY[arch] * 1024


def compile_for(program, arch, tmp_path):
    """The bytes of shared memory of each kernel that the program compiles."""
    package = Path(triton_sparse_mla.__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(package), str(arch)], capture_output=True, text=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [int(line.split()[-1]) for line in done.stdout.splitlines()]


# The start of a program: compiles a kernel, whose arguments are int32 and pointers to it if nothing else is said.
CHECK = """
import sys
sys.path.insert(0, sys.argv[1])
arch = int(sys.argv[2])
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

def check(kernel, warps, constants, **types):
    kind = lambda name: types.get(name, "*i32" if name.endswith("_ptr") else "i32")
    types = {name: "constexpr" if name in constants else kind(name) for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(types.values()) if type[0] == "*"}
    compiled = compile(ASTSource(kernel, types, constants, aligned), target=GPUTarget("cuda", arch, 32),
                       options=dict(num_warps=warps, num_stages=3))
    print(kernel.fn.__name__, compiled.metadata.shared)
"""

# The indexer's kernels and slots, a variant a line.
INDEXER = """
from mla_kernels import indexer, slots

floats = dict(weights_ptr="*fp32", out_ptr="*fp32", scales_ptr="*fp32")
paged = dict(scales_ptr=None, starts_ptr=None, FROM_START=False)
for heads in indexer._SCORE_HEADS:
    tile = dict(DIM=128, CLEAN=False, HARDWARE_E4M3=arch >= 89, BLOCK_H=heads, BLOCK_N=indexer._SCORE_KEYS)
    check(indexer._scores_kernel, 4, tile | paged, q_ptr="*u8", keys_ptr="*u8", **floats)
    for from_start in (False, True):
        check(indexer._scores_kernel, 4, tile | dict(table_ptr=None, FROM_START=from_start), q_ptr="*u8",
              keys_ptr="*u8", **floats)
check(indexer._scores_kernel, 4, tile | dict(table_ptr=None, scales_ptr=None, FROM_START=False, CLEAN=True),
      q_ptr="*bf16", keys_ptr="*bf16", **floats)
check(indexer._topk_kernel, 8, dict(BLOCK=indexer._TOPK_BLOCK), scores_ptr="*fp32")
check(slots._slots_kernel, 2, dict(BLOCK=slots._BLOCK, prefill_ptr=None, starts_ptr=None))
check(slots._slots_kernel, 2, dict(BLOCK=slots._BLOCK))
check(slots._columns_kernel, 4, dict(BLOCK=4 * slots._BLOCK))
"""


@ARCHS
def test_indexer_and_slots_compile(arch, tmp_path):
    shared = compile_for(CHECK + INDEXER, arch, tmp_path)
    assert len(shared) == 11 and max(shared) <= SHARED_MEMORY[arch] * 1024


# A variant a line; those that write E4M3 are for GPUs that have it, the others for all.
OTHERS = """
import importlib
from mla_kernels import compressor, insert, sparse_index, triton_sparse_mla

floats = "partial_out_ptr", "partial_max_sum_ptr", "sinks_ptr", "max_logits_ptr", "lse_ptr"
floats = dict.fromkeys(floats, "*fp32")
check(triton_sparse_mla._merge_kernel, 4, dict(SCALE_TENSOR=False), out_ptr="*bf16", out_scale="fp32", **floats)
check(sparse_index._build_kernel, 1, dict(COMPRESS_RATIO=4, BLOCK=128), is_valid_ptr="*i1")
expert_sum = importlib.import_module("mla_kernels.expert_sum")  # the package has the function by this name
check(expert_sum._expert_sum_kernel, 4, dict(EXPERTS=6, BLOCK=1024), expert_outputs_ptr="*bf16", out_ptr="*bf16")
tokens = dict(slot_mapping="*i64", position_ids="*i64", cos_sin_cache="*fp32", eps="fp32", q="*bf16", kv="*bf16")
heads = dict(NUM_HEADS=64, HEADS=4)
no_scales = dict(fp8_scale=None, q_fp8_scale_inv=None)
check(insert._insert_kernel, 4, heads | no_scales, q_out="*bf16", k_cache="*bf16", **tokens)
windows = dict(state_cache="*fp32", token_to_req_indices="*i32", positions="*i64", slot_mapping="*i64",
               kv_slot_mapping="*i64", block_table="*i32", cos_sin_cache="*fp32", rms_norm_weight="*bf16",
               rms_norm_eps="fp32")
ratio = dict(RATIO=4, OVERLAP=True, STATE_BLOCK_SIZE=4, ROWS=8)
check(compressor._compress_kernel, 4, ratio | dict(fp8_scale=None), kv_cache="*bf16", **windows)
if arch >= 89:
    scales = dict(fp8_scale="fp32", q_fp8_scale_inv="fp32")
    check(insert._insert_kernel, 4, heads, q_out="*fp8e4nv", k_cache="*fp8e4nv", **tokens, **scales)
    check(compressor._compress_kernel, 4, ratio, kv_cache="*fp8e4nv", fp8_scale="fp32", **windows)
"""


@ARCHS
def test_the_others_compile(arch, tmp_path):
    shared = compile_for(CHECK + OTHERS, arch, tmp_path)
    assert len(shared) == (7 if arch >= 89 else 5) and max(shared) <= 48 * 1024


COMPRESSOR = """
import sys
sys.path.insert(0, sys.argv[1])
from mla_kernels import packed_compressor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

kernel = packed_compressor._save_compress_kernel
kinds = dict(positions="*i64", slot_mapping="*i64", kv_slot_mapping="*i64", token_to_req_indices="*i32",
             block_table="*i32", kv_cache="*u8", rms_norm_weight="*bf16", rms_norm_eps="fp32", batch="*fp32",
             ape="*fp32", state_cache="*fp32", cos_sin_cache="*fp32")
for head_dim, ratio in ((512, 4), (512, 128), (128, 4)):
    constants = dict(HEAD_DIM=head_dim, RATIO=ratio, STATE_BLOCK_SIZE=4 if ratio == 4 else 8, KV_BLOCK_SIZE=64)
    types = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, (name, type) in enumerate(types.items())
               if type[0] == "*" or name.endswith("_stride") and name != "block_table_stride"}
    target = GPUTarget("cuda", int(sys.argv[2]), 32)
    source = ASTSource(kernel, types, constants, aligned)
    compiled = compile(source, target=target, options=packed_compressor._OPTIONS[head_dim, ratio])
    print(head_dim, ratio, compiled.metadata.shared)
"""


@pytest.mark.parametrize("arch", [90, pytest.param(100, marks=pytest.mark.slow)])
def test_the_packed_compressor_compiles(arch, tmp_path):
    shared = compile_for(COMPRESSOR, arch, tmp_path)
    assert len(shared) == 3 and max(shared) <= 48 * 1024
