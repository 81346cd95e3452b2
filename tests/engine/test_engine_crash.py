"""Death at every step, errors in the middle, and two runs at once."""

import os
import signal
import subprocess
import sys
import time

import pytest
from dsv4_overlay_tools import cli, transaction
from smallworld import ROOT, copy, make_repo, make_target, snapshot

# Every system call by which the engine changes a tree or waits for the disk.
STEPS = ("open", "write", "fchmod", "chmod", "utime", "fsync", "replace", "mkdir", "unlink",
         "rmdir")  # fmt: skip
DIED = 9


def dies_at(step, argv, repo, *, torn=False):
    """Run in a child that dies before its `step`-th call; return whether it got that far.

    With `torn`, only writes count, and the one it dies at has written half of its bytes.
    """
    child = os.fork()
    if child == 0:
        count = 0

        def failing(name, real):
            def call(*args, **kwargs):
                nonlocal count
                count += 1
                if count == step:
                    if torn:
                        real(args[0], args[1][: len(args[1]) // 2])
                    os._exit(DIED)
                return real(*args, **kwargs)

            return call

        out = os.open(os.devnull, os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        for name in ["write"] if torn else STEPS:
            setattr(os, name, failing(name, getattr(os, name)))
        status = 1
        try:
            status = cli.main([str(arg) for arg in argv], repo)
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, DIED), status
    return status == DIED


def small_repo(tmp_path):
    return make_repo(
        tmp_path / "small",
        patches={"one.patch": ["vllm/config.py", "vllm/tool.sh"]},
        overlay={"common/vllm/dsv4/deep/a.py": b"a = 1\n"},
    )


def examine(engine, tree, pristine, applied, tmp_path):
    """A tree that a run died in: it is named, completed by a second run, reverted by --revert."""
    status, report = engine(tree, "--status")
    now = snapshot(tree)
    if report["state"] == "clean":
        assert (status, now) == (0, pristine)
    elif report["state"] == "applied":
        assert (status, now) == (0, applied)
    else:
        assert (status, report["state"]) == (1, "drifted")
        assert report["error"]["code"] == "half-applied"
        assert engine(tree, "--check")[1]["error"]["code"] == "half-applied"
        assert now not in (pristine, applied)
    other = copy(tree, tmp_path / "other")
    engine.ok(other)
    assert snapshot(other) == applied
    subprocess.run(["rm", "-rf", str(other)], check=True)
    engine.ok(tree, "--revert")
    assert snapshot(tree) == pristine
    return report["state"]


def before_and_after(engine, tmp_path):
    """A pristine tree and an applied one, each with its snapshot."""
    engine.root = small_repo(tmp_path)
    start = make_target(tmp_path / "start", "installed")
    pristine = snapshot(start)
    done = copy(start, tmp_path / "done")
    engine.ok(done)
    applied = snapshot(done)
    return start, pristine, done, applied


# Revert writes nothing: it only renames.
@pytest.mark.parametrize("mode, torn", [("apply", False), ("apply", True), ("revert", False)])
def test_death_at_every_step(engine, tmp_path, mode, torn):
    start, pristine, done, applied = before_and_after(engine, tmp_path)
    seen = []
    step = 1
    while True:
        tree = copy(start if mode == "apply" else done, tmp_path / f"tree{step}")
        argv = [tree] if mode == "apply" else [tree, "--revert"]
        if not dies_at(step, argv, engine.root, torn=torn):
            break
        seen.append(examine(engine, tree, pristine, applied, tmp_path))
        subprocess.run(["rm", "-rf", str(tree)], check=True)
        step += 1
    # The loop went through the whole change, and most of it is in between.
    assert step > (2 if torn else 20)
    assert seen.count("drifted") > step // 2
    assert torn or {"clean", "applied"} & set(seen)


@pytest.mark.parametrize("first", [30, 45, 60, 70])
def test_death_at_every_step_of_the_recovery(engine, tmp_path, first):
    start, pristine, _, applied = before_and_after(engine, tmp_path)
    assert dies_at(first, [start], engine.root)
    assert (start / transaction.STATE_DIR).exists()
    step = 1
    while True:
        tree = copy(start, tmp_path / f"tree{step}")
        if not dies_at(step, [tree, "--revert"], engine.root):
            break
        examine(engine, tree, pristine, applied, tmp_path)
        subprocess.run(["rm", "-rf", str(tree)], check=True)
        step += 1
    assert step > 5


def test_the_disk_is_told_before_each_step_that_counts(engine, tmp_path, monkeypatch):
    """A power cut keeps only what was synced: contents before the journal, renames before its end.

    Not to be seen by killing a process, so this looks at the order of the calls.
    """
    tree = make_target(tmp_path / "t", "source")
    calls = []
    real = {name: getattr(os, name) for name in ("open", "fsync", "replace")}
    names = {}

    def opened(path, *args, **kwargs):
        fd = real["open"](path, *args, **kwargs)
        names[fd] = str(path)
        return fd

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(("sync", names[fd])))
    monkeypatch.setattr(
        os, "replace", lambda *a: (calls.append(("rename", str(a[1]))), real["replace"](*a))
    )
    engine.ok(tree)
    begin = calls.index(("rename", str(tree / transaction.JOURNAL)))
    end = calls.index(("rename", str(tree / transaction.RECORD)))
    renamed = [path for what, path in calls[begin + 1 : end] if what == "rename"]
    before = {path for what, path in calls[:begin] if what == "sync"}
    between = {path for what, path in calls[begin:end] if what == "sync"}
    assert len(renamed) == 12
    for path in renamed:
        name = os.path.relpath(path, tree).replace("/", "%2F") + ".orig"
        assert str(tree / transaction.STAGED / name) in before
        assert os.path.dirname(path) in between
    assert {str(tree / transaction.STAGED), str(tree / transaction.ORIGINALS)} <= before
    assert calls[begin + 1] == ("sync", str(tree / transaction.STATE_DIR))
    assert calls[end + 1] == ("sync", str(tree / transaction.STATE_DIR))


def test_an_edit_after_the_crash_is_not_lost(engine, tmp_path):
    engine.root = small_repo(tmp_path)
    tree = make_target(tmp_path / "t", "source")
    step = 1
    while dies_at(step, [tree], engine.root) and not (tree / "vllm/dsv4/deep/a.py").exists():
        engine.ok(tree, "--revert")
        step += 1
    assert engine(tree, "--status")[1]["error"]["code"] == "half-applied"
    (tree / "vllm/dsv4/deep/a.py").write_bytes(b"edited = 1\n")
    before = snapshot(tree)
    for mode in ([], ["--revert"]):
        assert engine.refused("edited-since-apply", tree, *mode)["path"] == "vllm/dsv4/deep/a.py"
        assert snapshot(tree) == before


# A run in a process of its own that takes its time over each rename.
SLOW = """
import os, sys, time
sys.path.insert(0, {scripts!r})
from pathlib import Path
from dsv4_overlay_tools.cli import main
real = os.replace
def slow(*args):
    time.sleep({pause})
    real(*args)
os.replace = slow
sys.exit(main(sys.argv[1:], Path({repo!r})))
"""


def start_slow(repo, target, pause, *options):
    code = SLOW.format(scripts=str(ROOT / "scripts"), repo=str(repo), pause=pause)
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(target), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
        # Where a shell started the tests with &, Ctrl-C is ignored by all that they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not (target / transaction.STAGED).exists():
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.005)
    return run


def test_sigkill(engine, target):
    pristine = snapshot(target)
    run = start_slow(engine.root, target, 0.1)
    deadline = time.monotonic() + 30
    while (target / "vllm/config.py").read_bytes() == pristine["vllm/config.py"][2]:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert engine(target, "--status")[1]["error"]["code"] == "half-applied"
    assert engine.ok(target)["state"] == "applied"  # and so nothing holds the lock
    engine.ok(target, "--revert")
    assert snapshot(target) == pristine


def test_ctrl_c_puts_everything_back(engine, target):
    pristine = snapshot(target)
    run = start_slow(engine.root, target, 0.1)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 1 and "interrupted" in err
    assert snapshot(target) == pristine

    engine.ok(target)
    run = start_slow(engine.root, target, 0.1, "--revert")
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 1 and "interrupted" in err
    assert snapshot(target) == pristine


def test_two_runs_at_once(engine, target, capsys):
    run = start_slow(engine.root, target, 0.05)
    # Not engine(): its output must be looked at, and a second process is the point.
    assert cli.main([str(target)], engine.root) == 0
    out, err = capsys.readouterr()
    assert "waiting" in err and "already applied" in err
    first, _ = run.communicate(timeout=30)
    assert run.returncode == 0 and "applied" in first
    assert engine.ok(target, "--status")["state"] == "applied"
