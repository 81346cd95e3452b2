"""A built library in the overlay, which git ignores, is applied and taken off like any other file."""

import json

import pytest
from dsv4_overlay_tools import cli
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


def recorded(target):
    record = json.loads((target / "vllm/_dsv4_overlay/record.json").read_text())
    return {key: record[f"overlay_{key}"] for key in ("version", "commit", "dirty")}


def test_what_is_applied_is_named(repo, tmp_path, capsys):
    """By version and commit: in the record, after apply and by --status, also when the repository moved on."""
    engine, target = Engine(repo), make_target(tmp_path / "target", "source")
    assert engine.ok(target, "--status")["overlay"] is None
    known = {"version": "0.1.0", "commit": git(repo, "rev-parse", "HEAD"), "dirty": False}
    assert engine.ok(target)["overlay"] == recorded(target) == known
    (repo / "VERSION").write_text("0.2.0\n")
    git(repo, "commit", "-q", "-a", "-m", "next")
    assert engine.ok(target, "--status")["overlay"] == known
    cli.main([str(target), "--status"], repo)
    assert f"\noverlay 0.1.0, commit {known['commit']}\n" in capsys.readouterr().out
    assert engine.ok(target, "--revert")["overlay"] is None


@pytest.mark.parametrize(
    "setting", [("status.showUntrackedFiles", "no"), ("core.excludesFile", "ignored"), ("status.branch", "true")]
)
def test_settings_of_git_hide_no_change(repo, tmp_path, setting, monkeypatch):
    (tmp_path / "ignored").write_text("*.py\n")
    git(repo, "config", setting[0], setting[1].replace("ignored", str(tmp_path / "ignored")))
    engine, target = Engine(repo), make_target(tmp_path / "target", "source")
    engine.ok(target)
    assert recorded(target)["dirty"] is False
    engine.ok(target, "--revert")
    (repo / "overlay/common/vllm/dsv4/new.py").write_bytes(b"")
    assert engine.ok(target)["overlay"]["dirty"] is True and recorded(target)["dirty"] is True


def test_why_no_commit_is_recorded(repo, tmp_path, monkeypatch, capsys):
    engine, target = Engine(repo), make_target(tmp_path / "target", "source")

    def note():
        report = engine.ok(target)
        assert recorded(target)["commit"] is None and report["overlay"]["commit"] is None
        engine.ok(target, "--revert")
        (found,) = [note for note in report["notes"] if "is unknown and not recorded: " in note]
        assert str(repo) in found
        return found

    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own way to say so
    assert "run git config --global --add safe.directory " in note()
    monkeypatch.delenv("GIT_TEST_ASSUME_DIFFERENT_OWNER")
    assert engine.ok(target, "--check")["notes"] == []
    (repo / ".git").rename(tmp_path / "git")
    assert "it is no git checkout; use a clone, or set DSV4_OVERLAY_COMMIT" in note()
    monkeypatch.setenv("DSV4_OVERLAY_COMMIT", "abc")
    assert engine.ok(target)["notes"] == [] and recorded(target)["commit"] == "abc"
    engine.ok(target, "--revert")
    git(repo, "init", "-q")  # no commit yet
    assert "git finds no commit in it; use a clone" in note()


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
    place.unlink()
    assert "libkernels.so" in engine.refused("patch-changed", target)["message"]


def test_a_library_of_other_sources_is_refused(engine, tmp_path):
    """And named where it was applied before the sources changed."""
    place = engine.root / "overlay/common/vllm/third_party/mla_kernels/lib/libmla_kernels.so"
    place.parent.mkdir(parents=True)
    (engine.root / "csrc").mkdir()
    (engine.root / "csrc/b.cu").write_bytes(b"two")
    (engine.root / "csrc/a.cpp").write_bytes(b"one ")
    place.write_bytes(b'\x7fELF {"interface": 2, "sources": "%s"}' % sha256(b"one two").encode())
    target = make_target(tmp_path / "target", "source")
    add_loader(engine.root)
    assert kernel_notes(engine.ok(target, "--check")) == []
    (engine.root / "csrc/.b.cu.swp").write_bytes(b"an editor's")
    (engine.root / "csrc/.cache").mkdir()
    assert kernel_notes(engine.ok(target, "--check")) == []
    (engine.root / "csrc/b.cu").write_bytes(b"three")
    before = snapshot(target)
    for mode in (["--check"], []):
        message = engine.refused("other-sources", target, *mode)["message"]
        assert "was not built from csrc as it is; run scripts/build-kernels.sh, or delete the file" in message
        assert snapshot(target) == before
    engine.refused("other-sources", "--fetch", RELEASE, tmp_path / "fetched/tree")
    assert not (tmp_path / "fetched").exists()
    (engine.root / "csrc/b.cu").write_bytes(b"two")
    engine.ok(target)
    (engine.root / "csrc/b.cu").write_bytes(b"three")
    for mode in (["--check"], [], ["--status"]):
        (note,) = kernel_notes(engine.ok(target, *mode))
        assert "was not built from csrc as it is; run scripts/build-kernels.sh" in note


def add_loader(root):
    """The kernels' loader, which the overlay imports and which names the library."""
    loader = root / "overlay/common/vllm/third_party/mla_kernels/native.py"
    loader.parent.mkdir(parents=True, exist_ok=True)
    loader.write_bytes(b"LIBRARY = 'libmla_kernels.so'\n")
    with (root / "overlay/common/vllm/dsv4/main.py").open("a") as main:
        main.write("import vllm.third_party.mla_kernels.native\n")
    return loader


def kernel_notes(report):
    return [note for note in report["notes"] if "build-kernels.sh" in note]


def test_missing_native_kernels_are_named(engine, target, capsys):
    """When applied and ever after, but not of an overlay without kernels, or of a vLLM without the overlay."""
    assert kernel_notes(engine.ok(target)) == kernel_notes(engine.ok(target, "--status")) == []
    engine.ok(target, "--revert")
    loader = add_loader(engine.root)
    assert kernel_notes(engine.ok(target, "--status")) == []
    for mode in (["--check"], [], [], ["--check"], ["--status"]):
        (note,) = kernel_notes(engine.ok(target, *mode))
        assert note.startswith("the native kernels are missing, so Triton's (full-width) or FlashMLA's ")
        assert note.endswith("; run scripts/build-kernels.sh, then --revert and apply again")
    cli.main([str(target), "--status"], engine.root)
    assert f"note: {note}\n" in capsys.readouterr().err
    engine.ok(target, "--revert")
    place = loader.parent / "lib/libmla_kernels.so"
    place.parent.mkdir()
    (engine.root / "csrc").mkdir()
    place.write_bytes(b'"sources": "%s"' % sha256(b"").encode())
    assert kernel_notes(engine.ok(target)) == []
    place.unlink()
    assert kernel_notes(engine.ok(target, "--status")) == []  # in vLLM it is there
