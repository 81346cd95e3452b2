"""flashmla_suite.py over a checkout that only has its shape: what is run, counted and said."""

import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parent / "flashmla_suite.py"
LIB = """
import dataclasses
import flash_mla
@dataclasses.dataclass
class TestParam:
    number: int
    h_q: int
    num_runs: int = 0
    check_correctness: bool = True
    def to_test_param(self):
        return self
CASES = [TestParam(n, h) for h in (64, 128) for n in range(4)]
CASES += [TestParam(9, 64, num_runs=10), TestParam(9, 64, check_correctness=False)]
def is_no_cooldown():
    return False
def check(case):
    assert flash_mla.flash_mla_sparse_fwd.keywords == {"provider": "triton"}
    assert flash_mla.get_mla_metadata() == (None, None)
    print("case", case.number)
    if case.number == 2:
        raise RuntimeError("no such heads") if case.h_q < 64 else AssertionError
    return case.number != 3
"""
DECODE = """
import types, lib
def gen_testcase():
    return lib.CASES
def test_flash_mla(case):
    return types.SimpleNamespace(is_correct=lib.check(case))
"""
PREFILL = """
import lib
def run_test(case):
    return lib.check(case)
if __name__ == "__main__":
    testcases = lib.CASES
    quiet = lib.is_no_cooldown()
    raise SystemExit("the cases were run by the script")
"""
START = """
import sys, torch
torch.cuda.is_available = lambda: True
torch.set_default_device = lambda device: None
sys.path.insert(0, {folder!r})
import flashmla_suite
sys.exit(flashmla_suite.main({arguments!r}))
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "tests").mkdir()
    files = {"lib": LIB, "test_flash_mla_sparse_decoding": DECODE, "test_flash_mla_sparse_prefill": PREFILL}
    for name, text in files.items():
        (tmp_path / f"tests/{name}.py").write_text(text)
    return tmp_path


def suite(checkout, *options):
    arguments = ["--checkout", str(checkout), "--provider", "triton", *options]
    program = START.format(folder=str(SUITE.parent), arguments=arguments)
    return subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)


def test_all_are_counted(checkout):
    done = suite(checkout)
    assert done.returncode == 1, done.stderr
    assert "decode: 4 of 8 passed" in done.stdout and "prefill: 4 of 8 passed" in done.stdout
    assert all(done.stdout.count(f"FAILED TestParam(number={number},") == 4 for number in (2, 3))
    assert "case 3\n" in done.stdout and "AssertionError" in done.stdout and "number=9" not in done.stdout


def test_other_heads_and_parts(checkout):
    done = suite(checkout, "--heads", "8", "16", "--only", "decode")
    assert done.stdout.endswith("decode: 4 of 8 passed\n") and "h_q=128" not in done.stdout
    assert "RuntimeError: no such heads" in done.stdout
    done = suite(checkout, "--every", "2", "--shard", "0/2", "--only", "prefill")
    assert (done.returncode, done.stdout) == (0, "prefill: 2 of 2 passed\n"), done.stderr  # number 0 of both
    done = suite(checkout, "--every", "2", "--shard", "1/2", "--only", "prefill")
    assert done.stdout.endswith("prefill: 0 of 2 passed\n")  # number 2 of both


def test_a_file_without_cases_is_no_success(checkout):
    lib = checkout / "tests/lib.py"
    lib.write_text(LIB.replace("CASES = [TestParam(n, h) for h in (64, 128) for n in range(4)]", "CASES = []"))
    done = suite(checkout)
    assert done.returncode == 1 and "error: no case of decode compares outputs" in done.stderr


@pytest.mark.parametrize("options", [["--shard", "2/2"], ["--shard", "x"], ["--every", "0"]])
def test_bad_arguments(checkout, options):
    command = [sys.executable, SUITE, "--checkout", checkout, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "--shard is I/N with I from 0 to N - 1" in done.stderr


def test_another_checkout_is_refused(tmp_path):
    done = subprocess.run([sys.executable, SUITE, "--checkout", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2 and "has no test_flash_mla_sparse_decoding.py; give a checkout" in done.stderr
