"""The series of the release at hand, each alone and all together, and the drop-in's seams in vLLM's classes."""

import ast
import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from unittest.mock import MagicMock
from urllib.parse import quote

import pytest
import torch
from vllm.dsv4_overlay import drop_in

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/engine"))
from smallworld import Engine, metadata, snapshot, write  # noqa: E402

sys.path.insert(0, str(ROOT / "scripts"))
from dsv4_overlay_tools.series import Stack, find_series, series_of  # noqa: E402

CALLS = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")


@pytest.fixture(scope="module")
def record(applied):
    return json.loads((applied / "vllm/_dsv4_overlay/record.json").read_text())


@pytest.fixture(scope="module")
def stack(record):
    return find_series(ROOT, record["release"])


def test_all_series_of_the_release_are_applied(record, stack):
    assert record["series"] == stack.releases and "drop-in" in stack.releases


@pytest.mark.parametrize(
    "name",
    ["drop-in", "small-kernels", "fp8-experts", "full-width", "humming-experts", "quantised-linears"]
    + ["sparse-mla", None, "every"],
)
def test_each_series_alone_and_all_together(applied, record, stack, tmp_path, name):
    """Onto the files they touch or rely on, as released; what they make is Python, and every byte comes back."""
    every = Stack(series_of(ROOT, record["release"]))
    names = list(every.releases if name == "every" else [name] if name else stack.releases)
    if len(names) == 1 and name in (None, "every"):
        pytest.skip("this release has one series")
    options = [word for one in names for word in ("--series", one)] if name else []
    originals = applied / "vllm/_dsv4_overlay/originals"
    files = {path: (applied / path).read_bytes() for path in ["vllm/__init__.py", *every.files, *every.relied_on]}
    files |= {path: (originals / f"{quote(path, safe='')}.orig").read_bytes() for path in stack.files}
    write(tmp_path, files | {"PKG-INFO": metadata(record["release"])})
    before, engine = snapshot(tmp_path), Engine(ROOT)
    if not every.releases.keys() >= set(names):
        assert f"has no series '{name}'" in engine.refused("no-series", tmp_path, *options)["message"]
        assert snapshot(tmp_path) == before
        return
    report = engine.ok(tmp_path, *options)
    assert report["series"] == names
    for file in report["files"]:
        if file["path"].endswith(".py"):
            ast.parse((tmp_path / file["path"]).read_bytes())
    touched = find_series(ROOT, record["release"], names).files
    assert {file["path"] for file in report["files"] if file["action"] == "patched"} == touched.keys()
    added = {file["path"] for file in report["files"] if file["action"] == "added"}
    of_marlin = {"small-kernels"} if any(path.endswith("/marlin_moe.py") for path in touched) else set()
    for file, users in {
        "vllm/dsv4_overlay/backend.py": {"full-width"},
        "vllm/dsv4_overlay/experts.py": {"humming-experts"},
        "vllm/dsv4_overlay/fp8_experts.py": {"fp8-experts"},
        "vllm/dsv4_overlay/overriding.py": {"full-width", "sparse-mla"},
        "vllm/dsv4_overlay/quantised_linears.py": {"quantised-linears"},
        "vllm/dsv4_overlay/sparse_mla.py": {"sparse-mla"},
        "vllm/third_party/mla_kernels/native.py": {"drop-in", "full-width", "sparse-mla"} | of_marlin,
    }.items():
        assert (file in added) == bool(users & set(names))
    assert engine.ok(tmp_path, *options)["notes"][-1] == "already applied; nothing to do"
    if names != list(stack.releases):
        message = engine.refused("patch-changed", tmp_path)["message"]
        has, usual = ", ".join(names), ", ".join(stack.releases)
        assert message.startswith(f"{tmp_path} has {has} applied, and not {usual}; run with --revert")
    engine.ok(tmp_path, "--revert")
    assert snapshot(tmp_path) == before


def test_one_module_has_flashmlas_calls(applied):
    """All callers import them from there, so that one seam serves all."""
    imports = re.compile(rb"^\s*(?:from|import) vllm\.third_party\.flashmla", re.MULTILINE)
    found = [path.relative_to(applied).as_posix() for path in (applied / "vllm").rglob("*.py")
             if imports.search(path.read_bytes())]  # fmt: skip
    assert found == ["vllm/v1/attention/ops/flashmla.py"]


@pytest.fixture
def module(applied):
    """Imports a module of vLLM, if this release has it."""

    def load(name):
        if not (applied / f"{name.replace('.', '/')}.py").is_file():
            pytest.skip(f"this vLLM has no {name}")
        return importlib.import_module(name)

    return load


def test_callers_have_what_was_installed(module):
    ops = module("vllm.v1.attention.ops.flashmla")
    for name in CALLS:
        ours = getattr(ops, name)
        assert ours.__wrapped__ is not ours
        assert getattr(module("vllm.v1.attention.backends.mla.flashmla_sparse"), name) is ours
        # Nothing of ours serves here, so stock has the call: without FlashMLA that is an error of its own.
        with pytest.raises(RuntimeError, match="_flashmla_C is not available|FlashMLA is not available"):
            ours()


@pytest.mark.parametrize("model", ["deepseek_v4", "deepseek_v41"])
def test_v4_asks_how_many_heads(model, module, monkeypatch):
    found = module(f"vllm.models.{model}.nvidia.flashmla")
    asked = []
    monkeypatch.setattr(drop_in, "padded_heads", lambda *args: asked.append(args) or 16)
    classes = [cls for cls in vars(found).values() if isinstance(cls, type) and cls.__module__ == found.__name__
               and not getattr(vars(cls).get("get_padded_num_q_heads"), "__isabstractmethod__", True)]  # fmt: skip
    assert len(classes) == 1 and classes[0].get_padded_num_q_heads(12) == 16
    assert classes[0].get_padded_num_q_heads(100) == 16
    more = ("v41",) if model == "deepseek_v41" else ()
    assert asked == [(12, 64, *more), (100, 128, *more)]
    with pytest.raises(ValueError, match="does not support 129 heads"):
        classes[0].get_padded_num_q_heads(129)


class Asked(Exception):
    """Raised where a constructor has asked all it should."""


def first_heads(monkeypatch, times):
    """What drop_in.padded_heads is asked; it raises Asked at the last of `times`."""
    asked = []

    def padded_heads(*args):
        asked.append(args)
        if len(asked) == times:
            raise Asked
        return 16

    monkeypatch.setattr(drop_in, "padded_heads", padded_heads)
    return asked


def arguments(cls):
    """A stand-in for each argument of its constructor but the heads, of which there are 16."""
    known = inspect.signature(cls.__init__).parameters.values()
    names = [arg.name for arg in known if arg.name != "self" and arg.kind != arg.VAR_KEYWORD]
    return {name: MagicMock() for name in names} | {"num_heads": 16}


def test_v32_asks_how_many_heads(module, monkeypatch):
    cls = module("vllm.v1.attention.backends.mla.flashmla_sparse").FlashMLASparseImpl
    for base in cls.__mro__[1:-1]:  # which need a whole model
        monkeypatch.setattr(base, "__init__", lambda self, *_, **__: None)
    asked = first_heads(monkeypatch, 2)
    layer = object.__new__(cls)
    with pytest.raises(Asked):
        layer.__init__(**arguments(cls) | {"scale": 1.0, "kv_lora_rank": 512})
    assert asked == [(16, 64, "v32"), (16, 64, "bf16")] and layer.fp8_decode_padded_heads == 16


@pytest.mark.parametrize("name", ["DeepseekV4MultiHeadLatentAttentionWrapper", "DeepseekV4MLAAttention"])
def test_v4_up_to_0_21_asks_how_many_heads(name, module, monkeypatch):
    cls = getattr(module("vllm.model_executor.layers.deepseek_v4_attention"), name)
    monkeypatch.setattr(torch.cuda, "Event", MagicMock())
    asked = first_heads(monkeypatch, 1)
    with pytest.raises(Asked):
        cls(**arguments(cls))
    assert asked == [(16, 64)]
