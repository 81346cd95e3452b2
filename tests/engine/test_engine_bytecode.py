"""No run of Python may use what it compiled from the other version of a file."""

import os
import subprocess
import sys

import pytest
from smallworld import PRISTINE, make_repo, make_target

# Same size before and after, so that only its time or its absence can make a .pyc stale.
BEFORE = {**PRISTINE, "vllm/config.py": b"value = 'before'; uses = 'vllm.other.one'\n"}
AFTER = {"vllm/config.py": b"value = 'behind'; uses = 'vllm.extra.one'\n"}


@pytest.fixture
def world(tmp_path, engine):
    engine.root = make_repo(
        tmp_path / "r",
        patches={"one.patch": ["vllm/config.py"]},
        overlay={"common/vllm/extra/one.py": b"value = 1\n"},
        pristine=BEFORE,
        edited=AFTER,
    )
    return engine, make_target(tmp_path / "t", "source", files=BEFORE)


def value(target, module="vllm.config", cache=None):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    env["PYTHONPATH"] = str(target)
    if cache:
        env["PYTHONPYCACHEPREFIX"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-c", f"import {module} as m; print(m.value)"],
        env=env, capture_output=True, text=True, cwd="/",
    )  # fmt: skip
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def compiled(folder):
    return sorted(path.name.split(".")[0] for path in folder.rglob("*.pyc"))


def test_before_and_after_within_a_second(world):
    engine, target = world
    assert value(target) == "before"
    assert "config" in compiled(target)
    engine.ok(target)
    assert "config" not in compiled(target)
    assert value(target) == "behind"
    assert value(target, "vllm.extra.one") == "1"
    engine.ok(target, "--revert")
    assert "config" not in compiled(target) and "one" not in compiled(target)
    assert not (target / "vllm/extra").exists()
    assert value(target) == "before"
    assert "ModuleNotFoundError" in value(target, "vllm.extra.one")


def test_a_cache_that_the_tool_does_not_know_goes_stale(world, tmp_path):
    engine, target = world
    # As after a fresh install or checkout: the file is of this very second.
    os.utime(target / "vllm/config.py")
    assert value(target, cache=tmp_path / "cache") == "before"
    engine.ok(target)
    assert value(target, cache=tmp_path / "cache") == "behind"
    engine.ok(target, "--revert")
    assert value(target, cache=tmp_path / "cache") == "before"


def test_pycache_prefix(world, tmp_path, monkeypatch):
    engine, target = world
    cache = tmp_path / "cache"
    value(target, cache=cache)
    assert "config" in compiled(cache)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(cache))
    engine.ok(target)
    assert "config" not in compiled(cache)
    value(target, "vllm.extra.one", cache=cache)
    assert "one" in compiled(cache)
    engine.ok(target, "--revert")
    assert "one" not in compiled(cache)
    assert "__init__" in compiled(cache)  # not touched, so not deleted


def test_other_pythons_and_the_old_place(world):
    engine, target = world
    cache = target / "vllm/__pycache__"
    cache.mkdir()
    gone = [cache / "config.cpython-38.pyc", cache / "config.cpython-312.opt-2.pyc",
            target / "vllm/config.pyc"]  # fmt: skip
    kept = [cache / "configs.cpython-38.pyc", target / "vllm/configs.pyc"]
    for path in gone + kept:
        path.write_bytes(b"")
    engine.ok(target)
    assert [path.exists() for path in gone] == [False] * 3
    assert [path.exists() for path in kept] == [True] * 2


def test_a_file_that_is_a_link(world):
    """Python compiles it under the name by which it is imported."""
    engine, target = world
    (target / "vllm/config.py").rename(target / "vllm/sub/elsewhere.py")
    (target / "vllm/config.py").symlink_to("sub/elsewhere.py")
    names = ("__pycache__/config.cpython-38.pyc", "sub/__pycache__/elsewhere.cpython-38.pyc")
    gone = [target / "vllm" / name for name in names]
    for path in gone:
        path.parent.mkdir()
        path.write_bytes(b"")
    engine.ok(target)
    assert [path.exists() for path in gone] == [False] * 2


def test_unchecked_bytecode_does_not_survive(world):
    """Hash-based .pyc files that Python never checks, as some images are built with."""
    engine, target = world
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash",
         str(target)], check=True,
    )  # fmt: skip
    engine.ok(target)
    assert value(target) == "behind"
    engine.ok(target, "--revert")
    assert value(target) == "before"
