"""Glue tests need a vLLM with the overlay: VLLM_SOURCE names a tree (see scripts/test.sh), or one is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Before vLLM and Triton are imported. vLLM keeps Triton without a GPU only if none is meant to be visible.
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

if os.environ.get("VLLM_SOURCE"):
    sys.path.insert(0, os.environ["VLLM_SOURCE"])
spec = importlib.util.find_spec("vllm")
if spec is None or not spec.origin or not (Path(spec.origin).parent / "_dsv4_overlay/record.json").is_file():
    raise pytest.UsageError("tests/glue needs a vLLM with the overlay; run scripts/test.sh.")


@pytest.fixture(scope="session")
def applied() -> Path:
    """The folder that holds the applied vllm/."""
    return Path(spec.origin).parents[1]


@pytest.fixture
def on_0330(applied):
    """Runs a script of this folder, which makes a model as vLLM 0.33.0 makes it, as on Hopper: its last line."""
    release = json.loads((applied / "vllm/_dsv4_overlay/record.json").read_text())["release"]
    if release != "0.33.0":
        pytest.skip(f"the model is made as vLLM 0.33.0 makes it, and this is {release}")
    env = os.environ | {"PYTHONPATH": str(applied), "CAPABILITY": "9.0", "CUDA_VISIBLE_DEVICES": ""}

    def run(script, *arguments):
        command = [sys.executable, Path(__file__).parent / script, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def specialization(value, exact, plain):
    """What of an argument selects a compiled kernel; see `triton.jit`."""
    if exact or value is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if plain or isinstance(value, float):
        return type(value)
    return value == 1, value % 16 == 0, value < 2**31


@pytest.fixture
def launches(monkeypatch):
    """Every launch of our kernels from here on, as what would have to be compiled for it; nothing runs."""
    from triton.runtime.interpreter import InterpretedFunction

    found = set()

    def record(self, *args, grid, warmup, **options):
        if "mla_kernels" not in self.fn.__module__:  # vLLM's compressor has one before ours
            return
        arguments = dict(zip(self.arg_names, args, strict=False)) | options
        annotations, plain = self.fn.__annotations__, self.kwargs.get("do_not_specialize") or ()
        key = {
            name: specialization(value, name in annotations or name not in self.arg_names, name in plain)
            for name, value in arguments.items()
        }
        found.add((self.__name__, *sorted(key.items(), key=str)))

    monkeypatch.setattr(InterpretedFunction, "run", record)
    return found
