"""A built library in the overlay, which git ignores, is applied and taken off like any other file."""

import json

import pytest
from smallworld import OVERLAY, RELEASE, Engine, git, make_repo, make_target, sha256, snapshot
from test_engine_wheel import check_listing

NAME = "common/vllm/dsv4/libkernels.so"
LIBRARY = b"\x7fELF\x00\r\n\xff" * 1000  # not text


@pytest.fixture
def repo(tmp_path):
    """A repository with everything committed, and then a library built in it."""
    main = OVERLAY["common/vllm/dsv4/main.py"] + b"LIBRARY = 'libkernels.so'\n"
    root = make_repo(tmp_path / "repo", overlay=OVERLAY | {"common/vllm/dsv4/main.py": main})
    (root / ".gitignore").write_text("*.so\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "all")
    place = root / "overlay" / NAME
    place.write_bytes(LIBRARY)
    place.chmod(0o755)
    return root


def test_a_built_library_is_applied_recorded_and_reverted(repo, target, kind):
    engine = Engine(repo)
    before = snapshot(target)
    engine.ok(target)
    assert (target / "vllm/dsv4/libkernels.so").read_bytes() == LIBRARY
    record = json.loads((target / "vllm/_dsv4_overlay/record.json").read_text())
    (entry,) = [entry for entry in record["files"] if entry["path"] == "vllm/dsv4/libkernels.so"]
    assert (entry["action"], entry["mode"], entry["size_after"]) == ("added", "0755", len(LIBRARY))
    assert record["overlay_dirty"] is False
    if kind == "installed":
        check_listing(target)
        assert b"vllm/dsv4/libkernels.so,sha256=" in (target / f"vllm-{RELEASE}.dist-info/RECORD").read_bytes()
    engine.ok(target, "--revert")
    assert snapshot(target) == before


def test_a_library_built_later_needs_a_revert_first(repo, tmp_path):
    engine = Engine(repo)
    target = make_target(tmp_path / "target", "source")
    place = repo / "overlay" / NAME
    place.unlink()
    engine.ok(target)
    place.write_bytes(LIBRARY)
    assert "libkernels.so" in engine.refused("patch-changed", target)["message"]
    engine.ok(target, "--revert")
    engine.ok(target)
    assert (target / "vllm/dsv4/libkernels.so").read_bytes() == LIBRARY


def test_a_library_of_other_sources_is_named(engine, tmp_path):
    place = engine.root / "overlay/common/vllm/third_party/dsv4_kernels/lib/libdsv4_kernels.so"
    place.parent.mkdir(parents=True)
    (engine.root / "csrc").mkdir()
    (engine.root / "csrc/b.cu").write_bytes(b"two")
    (engine.root / "csrc/a.cpp").write_bytes(b"one ")
    place.write_bytes(b'\x7fELF {"interface": 2, "sources": "%s"}' % sha256(b"one two").encode())
    target = make_target(tmp_path / "target", "source")
    assert engine.ok(target, "--check")["notes"] == []
    (engine.root / "csrc/b.cu").write_bytes(b"three")
    (note,) = engine.ok(target)["notes"]
    assert "was not built from csrc as it is; run scripts/build-kernels.sh" in note
