"""compute-sanitizer on the native attention kernels: a shape for each way of dividing a call."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# One process, since starting torch under the sanitizer takes most of the time. Other kernels are not looked at.
PROGRAM = """
import conftest, torch
from test_sparse_mla import BATCHES, BF16, E4M3, TOLERANCE, Case, relative_error
for tokens, heads in BATCHES:
    for kv_dtype in (BF16, E4M3):
        case = Case(torch.device("cuda"), tokens=tokens, heads=heads, kv_dtype=kv_dtype, width=128 + 200, seed=1)
        assert relative_error(case.run("sm90"), case.expected()) < TOLERANCE, (tokens, heads, kv_dtype)
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
