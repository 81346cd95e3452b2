"""compute-sanitizer on the native attention kernels: each way of dividing a call, and rows of every format."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# One process, since starting torch under the sanitizer takes most of the time. Other kernels are not looked at.
PROGRAM = """
import conftest, torch
import test_flash_mla
from test_sparse_mla import BATCHES, BF16, E4M3, Case, excess_error

EVERY_KERNEL = [(5, 40), (16, 64), (90, 8), (100, 32), (140, 64), (270, 16)]

def check(shapes, *dtypes, prepare=lambda case: None, **options):
    for tokens, heads in shapes:
        for q_dtype, kv_dtype in dtypes:
            case = Case(torch.device("cuda"), tokens=tokens, heads=heads, q_dtype=q_dtype, kv_dtype=kv_dtype,
                        **{"width": 128 + 200, "seed": 1} | options)
            prepare(case)
            out, expected = case.run("sm90"), case.expected()
            fits = excess_error(out, expected) < case.tolerance("sm90") if expected.any() else not out.any()
            assert fits, (tokens, heads, q_dtype, kv_dtype, options)

def no_keys(case):
    case.visible[::2] = 0
    case.indices.fill_(-1)

def one_query(case):  # strides of 0, which a tensor map cannot have
    case.query = case.query[:1, :1].expand_as(case.query)

def heads_first(case):  # nor a token stride below the head's
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)

bf16, mixed, e4m3 = (BF16, BF16), (BF16, E4M3), (E4M3, E4M3)
check(BATCHES, bf16, mixed)
check(EVERY_KERNEL, e4m3)
check(EVERY_KERNEL, bf16, mixed, prepare=no_keys)
check(EVERY_KERNEL, bf16, mixed, width=1152)
check([(16, 64), (140, 64)], bf16, mixed, prepare=one_query)
check([(16, 64), (140, 64)], bf16, mixed, prepare=heads_first)
check([(600, 64), (1100, 32), (2100, 16)], bf16, mixed, width=128 + 64)  # outputs larger than half the L2 cache

for rows in test_flash_mla.FORMATS:
    for batch, heads, columns, spread in (
        (1, 64, 200, 0), (5, 40, 200, 0), (40, 128, 200, 0), (140, 16, 200, 0), (20, 50, 2048, 0),
        (140, 64, 400, 0), (2, 16, 640, 0), (1, 30, 2048, 0), (100, 16, 200, 0),
        (20, 30, 2048, 0), (140, 20, 200, 60),  # heads on N over packed rows, keys split or not
        (140, 64, 200, 60),  # rows of one tile have powers of their own, and q is no tensor map
        (520, 64, 50, 0),  # outputs larger than half the L2 cache
    ):
        extra = 40 if rows in test_flash_mla.PACKED else None
        case = test_flash_mla.Case(
            rows, torch.device("cuda"), batch=batch, heads=heads, columns=columns, extra=extra, spread=spread)
        for cache, indices, lengths in case.pools:
            indices[::2, :, ::3] = len(cache.keys)  # rows outside the cache
            lengths[1::4] = 0
        query = case.query.cuda()
        if spread:
            query = query.transpose(0, 2).contiguous().transpose(0, 2)
        case.check("sm90", query=query)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer_is_silent(tool):
    from test_sparse_mla import skip_unless_served

    skip_unless_served("sm90")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--kernel-name", "kns=sparse_mla", "--error-exitcode", "9",
         "--print-limit", "5", sys.executable, "-c", PROGRAM],
        cwd=HERE, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " SUMMARY: 0 " in done.stdout, done.stdout[-2000:]
