"""What the overlay overrides or assigns in vLLM is there, and the files it is in are pinned."""

import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomllib
from sparse_mla_series import SERIES
from test_config_contract import VLLMS_TOO
from vllm.dsv4_overlay import adapter, backend

MODULES = [adapter, backend]
if SERIES:
    from vllm.dsv4_overlay import sparse_mla_backend

    MODULES.append(sparse_mla_backend)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pinned(applied):
    release = json.loads((applied / "vllm/_dsv4_overlay/record.json").read_text())["release"]
    folders = [path.parent for path in ROOT.glob("patches/*/*/release.toml")]
    pins = [tomllib.loads((folder / "release.toml").read_text()) for folder in folders]
    pins = [found for found in pins if release == found["release"] or release in found.get("serves", [])]
    return {applied / path for found in pins for path in found["files"] | found.get("relied_on", {})}


def ours():
    """Our classes that derive from vLLM's, and the vLLM class that each derives from."""
    builder = adapter.DeepseekV4FullCacheBackend.get_builder_cls()
    for cls in (*(found for module in MODULES for found in vars(module).values()), builder):
        if isinstance(cls, type) and cls.__module__.startswith("vllm.dsv4_overlay."):
            theirs = [base for base in cls.__mro__ if not base.__module__.startswith("vllm.dsv4_overlay.")]
            if theirs[0] is not object:
                yield cls, theirs[0]


def test_files_that_classes_derive_from_are_pinned(pinned):
    found = {inspect.getfile(theirs) for _, theirs in ours()}
    assert len(found) >= 2 and {Path(file) for file in found} <= pinned


@VLLMS_TOO
def test_files_that_are_assigned_to_are_pinned(pinned):
    for name in ("models/deepseek_v4/compressor", "model_executor/warmup/jit_warmup"):
        assert any(path.as_posix().endswith(f"vllm/{name}.py") for path in pinned)


def test_a_name_that_went_is_refused_when_the_class_is_made():
    """Each in turn; vLLM would call its own otherwise, and nobody ours."""
    checked = 0
    for cls, theirs in ours():
        for name in [name for name in vars(cls) if not name.startswith("__") and hasattr(theirs, name)]:
            # vLLM's class without this name: what it and its bases have under others.
            others = {key for base in theirs.__mro__ for key in vars(base) if not key.startswith("__")}
            base = type(theirs.__name__, (), dict.fromkeys(others - {name}))
            body = {key: vars(cls)[key] for key in vars(cls) if key in (name, "__module__")}
            with pytest.raises(RuntimeError, match=f"{theirs.__name__} of this vLLM has no {name}, which"):
                backend.overriding()(type("Ours", (base,), body))
            checked += 1
    assert checked >= 2


def test_a_name_that_is_only_declared_will_do():
    base = type("Base", (), {"__annotations__": {"backend_cls": type}})
    backend.require(base, "backend_cls")
    backend.require(base(), "backend_cls")


@VLLMS_TOO
def test_a_compressor_that_stores_by_another_name_is_refused():
    """When the layer is made, before weights are loaded: the stock compressor would write rows of its own."""
    stock = SimpleNamespace(_compress_norm_rope_store=None)
    layer = SimpleNamespace(compressor=stock)
    adapter.connect_compressor(layer)
    assert stock._compress_norm_rope_store.func is adapter._compress
    layer.compressor = SimpleNamespace(_compress_norm_rope_and_store=None)
    with pytest.raises(RuntimeError, match="has no _compress_norm_rope_store, which vllm-dsv4-overlay replaces;"):
        adapter.connect_compressor(layer)
