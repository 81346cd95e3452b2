"""What the self-test says, and that it sees what went wrong."""

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from test_config_contract import VLLMS_TOO, on_gpu
from vllm.dsv4_overlay import adapter, attention, layer_check, selftest
from vllm.platforms.interface import DeviceCapability
from vllm.third_party.mla_kernels import checks

NO_LIBRARY = ("triton", "the native library does not serve: it is not built; run scripts/build-kernels.sh")


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.delenv("VLLM_DSV4_PROVIDER", raising=False)
    on_gpu(monkeypatch, DeviceCapability(9, 0))
    for name, value in (("is_available", True), ("get_device_name", "H200"), ("get_device_capability", (9, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)


def run(monkeypatch, capsys, *found):
    """The exit status and the text of the self-test with these results."""
    monkeypatch.setattr(selftest, "all_checks", lambda: [(f"check {n}", f, ()) for n, f in enumerate(found)])
    monkeypatch.setattr(os, "execve", lambda *_: None)
    monkeypatch.setattr(selftest.logging, "disable", lambda _: None)
    return selftest.main(), capsys.readouterr().out


def test_a_gpu_that_triton_serves_for_want_of_the_library_is_not_ok(hopper, monkeypatch, capsys):
    monkeypatch.setattr("vllm.third_party.mla_kernels.pick_provider", lambda _: NO_LIBRARY)
    status, text = run(monkeypatch, capsys, selftest.check_gpu)
    assert status == 0 and "warning" in text and "0 of 1 checks passed, 1 warning" in text
    assert "attention by Triton, mostly slower than FlashMLA" in text and "run scripts/build-kernels.sh" in text
    monkeypatch.setenv("VLLM_DSV4_PROVIDER", "triton")  # asked for
    assert "1 of 1 checks passed, in" in run(monkeypatch, capsys, selftest.check_gpu)[1]


def test_no_gpu_is_skipped(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, text = run(monkeypatch, capsys, selftest.check_gpu)
    assert status == 0 and "skipped  no GPU" in text and "0 of 1 checks passed, 1 skipped" in text


def test_what_fails_is_told_apart(monkeypatch, capsys):
    def wrong():
        raise checks.Failed("relative error 1")

    status, text = run(monkeypatch, capsys, lambda: "fine", wrong, lambda: 1 / 0)
    assert status == 1 and "1 of 3 checks passed, 2 FAILED" in text
    assert "FAILED   relative error 1\n" in text and "ZeroDivisionError in " in text


def test_a_server_warns_once(hopper, monkeypatch):
    """In vLLM's log, where layers are made: each host has its own GPUs and its own library."""
    lines = []
    levels = {f"{level}_once": lambda text, *rest, level=level: lines.append((level, text % rest))
              for level in ("info", "warning")}  # fmt: skip
    monkeypatch.setattr(attention, "logger", SimpleNamespace(**levels))
    monkeypatch.setattr(attention, "get_current_vllm_config", lambda: SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="bfloat16")))  # fmt: skip
    monkeypatch.setattr("vllm.third_party.mla_kernels.pick_provider", lambda _: NO_LIBRARY)
    monkeypatch.setattr(attention, "pick_provider", lambda _: NO_LIBRARY)
    layer = torch.nn.Module()
    layer.attn_sink = torch.zeros(64)
    attention.init_layer(layer)
    ((level, text),) = lines
    assert level == "warning" and "run scripts/build-kernels.sh" in text
    monkeypatch.setenv("VLLM_DSV4_PROVIDER", "triton")
    attention.init_layer(layer)
    assert lines[1:] == [("info", "sparse_mla provider: triton, as VLLM_DSV4_PROVIDER says.")]


def test_importing_it_changes_nothing(applied):
    code = "import os; before = dict(os.environ); import vllm.dsv4_overlay.selftest; print(before == os.environ)"
    env = dict(os.environ)
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=env | {"PYTHONPATH": str(applied)}, cwd=applied)  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr[-1000:]


def test_options_that_it_has_not(applied):
    for option, status, words in (("--help", 0, "Is the overlay"), ("--quick", 2, "arguments: --quick")):
        done = subprocess.run([sys.executable, "-m", "vllm.dsv4_overlay.selftest", option], capture_output=True,
                              text=True, env=os.environ | {"PYTHONPATH": str(applied)}, cwd=applied)  # fmt: skip
        assert done.returncode == status and words in done.stdout + done.stderr, done.stderr[-1000:]


@VLLMS_TOO
def test_a_compressor_that_stores_by_another_name_is_found(monkeypatch):
    """As where vLLM renames the method that the overlay replaces."""
    monkeypatch.setenv("VLLM_DSV4_PROVIDER", "triton")
    cls = importlib.import_module(adapter.COMPRESSOR).DeepseekCompressor
    monkeypatch.setattr(cls, "_store", cls._compress_norm_rope_store, raising=False)
    monkeypatch.delattr(cls, "_compress_norm_rope_store")
    with pytest.raises(RuntimeError, match="has no _compress_norm_rope_store, which vllm-dsv4-overlay replaces;"):
        layer_check.check_layer(128, torch.bfloat16)


def test_a_compressor_that_no_longer_calls_is_found(monkeypatch):
    """Whatever the release calls it by."""
    monkeypatch.setenv("VLLM_DSV4_PROVIDER", "triton")
    cls = importlib.import_module(adapter.COMPRESSOR).DeepseekCompressor
    monkeypatch.setattr(cls, "forward", lambda *_: None)
    with pytest.raises(checks.Failed, match="relative error"):
        layer_check.check_layer(128, torch.bfloat16)
