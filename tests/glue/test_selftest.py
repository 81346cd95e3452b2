"""What the self-test says, and that it sees what went wrong."""

import hashlib
import importlib
import json
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


@pytest.mark.parametrize(
    "capability, provider, words",
    [
        ((8, 0), "", "warning  H200, compute capability 8.0; the backend serves Hopper and Blackwell only"),
        ((9, 0), "", "ok       H200, compute capability 9.0; attention by sm90: it serves"),
        ((9, 0), "cutlass", "FAILED   ValueError in "),
        pytest.param((10, 0), "", "ok       H200, compute capability 10.0; vLLM's own", marks=VLLMS_TOO),
    ],
)
def test_what_serves_on_a_gpu(hopper, monkeypatch, capsys, capability, provider, words):
    on_gpu(monkeypatch, DeviceCapability(*capability))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr("vllm.third_party.mla_kernels.pick_provider", lambda _: ("sm90", "it serves"))
    monkeypatch.setenv("VLLM_DSV4_PROVIDER", provider)
    assert words in run(monkeypatch, capsys, selftest.check_gpu)[1]


def test_files_that_are_not_as_applied(tmp_path, monkeypatch):
    """Edited, or gone; pip writes to a wheel's list of files later."""
    (tmp_path / "vllm/_dsv4_overlay").mkdir(parents=True)
    monkeypatch.setattr(selftest.vllm, "__file__", str(tmp_path / "vllm/__init__.py"))
    files = []
    for name, action in (("new", "added"), ("old", "patched"), ("RECORD", "updated")):
        (tmp_path / name).write_text("as applied")
        digest = hashlib.sha256(b"as applied").hexdigest()
        files.append({"path": name, "action": action, "sha256_after": digest})
    record = {"files": files, "overlay_version": "1", "overlay_commit": "0123456789abcdef", "release": "2"}
    (tmp_path / "vllm/_dsv4_overlay/record.json").write_text(json.dumps(record))
    (tmp_path / "RECORD").write_text("and more")
    assert selftest.check_files() == "3 files are as applied: overlay 1 (0123456789ab) on vLLM 2"
    (tmp_path / "vllm/_dsv4_overlay/record.json").write_text(json.dumps(record | {"overlay_commit": None}))
    assert "overlay 1 (unknown commit) on" in selftest.check_files()
    (tmp_path / "old").write_text("edited")
    with pytest.raises(checks.Failed, match="old was edited since it was applied"):
        selftest.check_files()
    (tmp_path / "old").unlink()
    with pytest.raises(checks.Failed, match="old is missing"):
        selftest.check_files()


@pytest.mark.parametrize("capability, skipped", [((8, 0), 7), ((8, 9), 0), ((9, 0), 0)])
def test_gpus_without_e4m3_skip_what_writes_it(hopper, monkeypatch, capability, skipped):
    """Attention reads it there all the same."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr("vllm.third_party.mla_kernels.pick_provider", lambda _: NO_LIBRARY)
    left_out = [label for label, check, _ in selftest.all_checks() if check is selftest.skip_e4m3]
    assert len(left_out) == skipped and not [label for label in left_out if "heads" in label]


def test_what_is_checked(hopper, monkeypatch):
    """Files, kernels by what serves here and by Triton, every kind of layer, the GPU."""
    monkeypatch.setattr("vllm.third_party.mla_kernels.pick_provider", lambda _: ("sm90", "it serves"))
    labels = [label for label, _, _ in selftest.all_checks()]
    assert labels[0] == "applied files" and labels[-1] == "GPU"
    for provider in ("sm90", "triton"):
        assert [label for label in labels if provider in label]
    layers = [f"vLLM's layer, ratio {ratio}, {dtype}" for dtype in ("BF16", "FP8") for ratio in (1, 4, 128)]
    assert [label for label in labels if label.startswith("vLLM")] == layers


def test_without_the_overlay_it_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(selftest.vllm, "__file__", str(tmp_path / "vllm/__init__.py"))
    assert selftest.main() == 1
    assert capsys.readouterr().err == f"The overlay is not applied to the vLLM in {tmp_path}.\n"


def test_it_starts_anew_without_a_gpu_only(hopper, monkeypatch, capsys):
    """Once: with what makes Triton interpret, and serve."""
    needed = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_DSV4_PROVIDER": "triton"}
    started = []
    for gpu, env in ((True, {}), (False, {}), (False, needed)):
        run(monkeypatch, capsys, lambda: "fine")
        for name in needed:
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
        selftest.main()
        assert len(started) == (not gpu)
    ((_, command, env),) = started
    assert command[1:] == ["-m", "vllm.dsv4_overlay.selftest"] and needed.items() <= env.items()


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
