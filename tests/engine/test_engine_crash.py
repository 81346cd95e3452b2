"""Death at every step, errors in the middle, and two runs at once."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
from dsv4_overlay_tools import cli, transaction
from dsv4_overlay_tools.errors import Refusal
from dsv4_overlay_tools.target import Target
from smallworld import EDITED, RELEASE, ROOT, Engine, copy, make_repo, make_target, snapshot

pytestmark = pytest.mark.usefixtures("signals_as_in_a_terminal")

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
        overlay={"common/vllm/dsv4/main.py": b"import vllm.dsv4.deep.a\n",
                 "common/vllm/dsv4/deep/a.py": b"a = 1\n"},
    )  # fmt: skip


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


@pytest.fixture
def calls(monkeypatch):
    """What is synced, renamed, made and removed, in this order, each with its path."""
    calls, names, real_open = [], {}, os.open

    def opened(path, *args, **kwargs):
        fd = real_open(path, *args, **kwargs)
        names[fd] = str(path)
        return fd

    def noted(real, what, at):
        return lambda *args, **kwargs: (calls.append((what, str(args[at]))), real(*args, **kwargs))

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(("sync", names[fd])))
    for name, what, at in (("replace", "rename", 1), ("unlink", "unlink", 0), ("mkdir", "mkdir", 0)):
        monkeypatch.setattr(os, name, noted(getattr(os, name), what, at))
    return calls


def test_the_disk_is_told_before_each_step_that_counts(engine, tmp_path, calls):
    """A power cut keeps only what was synced: contents before the journal, renames before its end.

    Not to be seen by killing a process, so this looks at the order of the calls.
    """
    tree = make_target(tmp_path / "t", "source")
    calls.clear()
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

    calls.clear()
    engine.ok(tree, "--revert")
    assert calls[:2] == [("rename", str(tree / transaction.JOURNAL)), ("sync", str(tree / transaction.STATE_DIR))]
    end = next(number for number, (what, _) in enumerate(calls) if what == "unlink")  # of what was in place
    back = {path for what, path in calls[2:end] if what == "rename" and "/_dsv4_overlay/" not in path}
    assert back == {str(tree / path) for path in EDITED}
    assert {os.path.dirname(path) for path in renamed} <= {path for what, path in calls[:end] if what == "sync"}
    assert calls[-1] == ("sync", str(tree / "vllm"))


def test_new_folders_are_synced_where_they_are_listed(tmp_path, calls):
    """Else a power cut could leave the record of an overlay without them."""
    overlay = {"main.py": b"import vllm.dsv4.deep.er.a\n", "deep/er/a.py": b""}
    overlay = {f"common/vllm/dsv4/{path}": data for path, data in overlay.items()}
    repo = make_repo(tmp_path / "r", patches={"one.patch": ["vllm/config.py", "vllm/tool.sh"]}, overlay=overlay)
    tree = make_target(tmp_path / "t", "source")
    Engine(repo).ok(tree)
    made = [(at, path) for at, (what, path) in enumerate(calls) if what == "mkdir"]
    made = [(at, path) for at, path in made if path.startswith(f"{tree}/vllm/dsv4")]
    assert len(made) == 3
    for at, path in made:
        assert ("sync", os.path.dirname(path)) in calls[at:]


@pytest.mark.parametrize("state, recovered, reverted", [
    ("clean", "clean", "clean"),
    ("begun", "clean", "clean"),
    ("changing", "clean", "clean"),
    ("applied", "applied", "clean"),
    ("lost", "record-lost", "record-lost"),
])  # fmt: skip
def test_the_table_of_states(engine, tmp_path, state, recovered, reverted):
    """The one in transaction.py, made here from an applied tree by hand."""
    root = make_target(tmp_path / "t", "source")
    pristine = snapshot(root)
    engine.ok(root)
    applied = snapshot(root)
    if state not in ("applied", "changing"):
        engine.ok(root, "--revert")
    if state in ("begun", "lost"):
        (root / transaction.ORIGINALS).mkdir(parents=True)
        if state == "begun":
            (root / transaction.STAGED).mkdir()
    if state == "changing":
        (root / transaction.RECORD).rename(root / transaction.JOURNAL)
    for function, reached in ((transaction.recover, recovered), (transaction.revert, reverted)):
        tree = copy(root, tmp_path / function.__name__)
        target = Target(tree, "source", RELEASE)
        if state == "lost":
            with pytest.raises(Refusal) as refusal:
                function(target)
            assert refusal.value.code == reached
            continue
        assert transaction.state_of(tree) == state
        function(target)
        assert transaction.state_of(tree) == reached
        assert snapshot(tree) == (applied if reached == "applied" else pristine)


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


def when(monkeypatch, name, place, act):
    """Have `act` done before the first call of os.`name` whose last argument is `place`."""
    real, done = getattr(os, name), []

    def call(*args, **kwargs):
        if str(args[-1]) == str(place) and not done:
            done.append(act())
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, call)


def fail(code):
    raise OSError(code, os.strerror(code))


@pytest.mark.parametrize("path", ["vllm/config.py", "vllm/tool.sh", "vllm/sub/glue.py"])
def test_an_edit_while_apply_runs_is_kept(engine, target, monkeypatch, path):
    """Made when the originals have been copied; what was changed before it was noticed is put back."""
    before = snapshot(target)
    code = "source-changed" if path in before else "file-in-the-way"
    with monkeypatch.context() as patch:
        when(patch, "replace", target / transaction.JOURNAL, lambda: (target / path).write_bytes(b"mine\n"))
        status, report = engine(target)
    assert (status, report["error"]["code"], report["error"]["path"]) == (1, code, path)
    assert "while this ran; everything was put back" in report["error"]["message"]
    assert report["state"] == "clean"
    after = snapshot(target)
    assert after.pop(path)[2] == b"mine\n"
    before.pop(path, None)
    assert after == before


def test_an_edit_while_an_apply_that_failed_is_put_back(engine, target, monkeypatch):
    """Neither is lost, and the state says what is left to do."""
    real, calls = os.replace, []
    places = [target / path for path in ("vllm/config.py", "vllm/noeol.py")]

    def replace(source, place):
        if place in places and "staged" in str(source):
            calls.append(place)
            if len(calls) == 2:
                fail(errno.ENOSPC)
        if calls and source == calls[0]:  # on its way back
            source.write_bytes(b"mine\n")
        return real(source, place)

    before = snapshot(target)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        status, report = engine(target)
    assert (status, report["error"]["code"]) == (1, "half-applied") and calls[0].read_bytes() == b"mine\n"
    path = str(calls[0].relative_to(target))
    assert engine.refused("edited-since-apply", target, "--revert")["path"] == path
    calls[0].write_bytes(before[path][2])
    engine.ok(target, "--revert")
    assert snapshot(target).keys() == before.keys()


def test_an_edit_while_revert_runs_is_kept(engine, target, monkeypatch):
    engine.ok(target)
    before = snapshot(target)
    path = "vllm/noeol.py"
    with monkeypatch.context() as patch:
        when(patch, "replace", target / transaction.JOURNAL, lambda: (target / path).write_bytes(b"mine\n"))
        status, report = engine(target, "--revert")
    assert (status, report["error"]["code"], report["error"]["path"]) == (1, "edited-since-apply", path)
    assert "everything was put back, so the overlay is applied" in report["error"]["message"]
    assert report["state"] == "applied"
    assert snapshot(target) == {**before, path: (*before[path][:2], b"mine\n")}
    (target / path).write_bytes(before[path][2])
    engine.ok(target, "--revert")


def test_an_edit_before_the_crash_is_left_alone(engine, target, monkeypatch):
    """Killed before the place of the edited file was taken: nothing of ours is in it, so nothing is refused."""
    before = snapshot(target)
    with monkeypatch.context() as patch:
        when(patch, "replace", target / "vllm/noeol.py", lambda: os.kill(os.getpid(), signal.SIGKILL))
        child = os.fork()
        if child == 0:
            cli.main([str(target), "--json"], engine.root)
        os.waitpid(child, 0)
    (target / "vllm/noeol.py").write_bytes(b"mine\n")
    report = engine.ok(target, "--revert")
    assert any("vllm/noeol.py was edited" in note for note in report["notes"])
    assert snapshot(target) == {**before, "vllm/noeol.py": (*before["vllm/noeol.py"][:2], b"mine\n")}


def test_revert_writes_no_file(engine, target, monkeypatch):
    before = snapshot(target)
    engine.ok(target)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *args: fail(errno.ENOSPC))
        engine.ok(target, "--revert")
    assert snapshot(target) == before


@pytest.mark.parametrize("name", ["mkdir", "replace", "fsync"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_revert_that_cannot_be_finished_is_put_back(engine, target, monkeypatch, name, after):
    engine.ok(target)
    before = snapshot(target)
    real, calls = getattr(os, name), []

    def call(*args):
        calls.append(args)
        return fail(errno.ENOSPC) if len(calls) == after + 1 else real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, call)
        status, report = engine(target, "--revert")
    if len(calls) <= after:
        assert (name, status) == ("mkdir", 0)
        return
    assert (status, report["error"]["code"], report["state"]) == (1, "not-writable", "applied")
    assert report["error"]["message"].endswith("; everything was put back, so the overlay is applied.")
    assert snapshot(target) == before
    engine.ok(target, "--revert")


@pytest.mark.parametrize("argv, state, said", [([], "applied", "applied"), (["--revert"], "clean", "off")])
def test_when_only_the_last_sync_fails_the_change_stands(engine, target, monkeypatch, argv, state, said):
    if argv:
        engine.ok(target)
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", calls.append)
        engine.ok(copied := copy(target, target.with_name("copied")), *argv)
        last = len(calls)
        patch.setattr(os, "fsync", lambda fd: calls.append(fd) or len(calls) == 2 * last and fail(errno.EIO))
        status, report = engine(target, *argv)
    assert (status, report["error"]["code"], report["state"]) == (1, "not-synced", state)
    assert f"the overlay is {said}, but the disk may not have it yet" in report["error"]["message"]
    assert snapshot(target) == snapshot(copied)
    engine.ok(target, "--revert")


@pytest.mark.parametrize("place, state, said", [
    (transaction.JOURNAL, "clean", "everything was put back"),
    (transaction.RECORD, "applied", "the overlay is applied"),
])  # fmt: skip
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_the_two_renames_that_count(engine, target, monkeypatch, place, state, said, number):
    with monkeypatch.context() as patch:
        when(patch, "replace", target / place, lambda: os.kill(os.getpid(), number))
        status, report = engine(target)
    assert (status, report["error"]["code"], report["state"]) == (1, "interrupted", state)
    assert report["error"]["message"] == f"Interrupted ({number.name}); {said}."
    engine.ok(target)
    engine.ok(target, "--revert")


def test_what_apply_prepared_is_not_called_between_two_states(engine, target, monkeypatch):
    before = snapshot(target)
    with monkeypatch.context() as patch:
        when(patch, "mkdir", target / transaction.ORIGINALS, lambda: os.kill(os.getpid(), signal.SIGKILL))
        child = os.fork()
        if child == 0:
            cli.main([str(target), "--json"], engine.root)
        os.waitpid(child, 0)
    message = engine.refused("half-applied", target, "--status")["message"]
    assert "between" not in message and "vLLM as it was" in message
    engine.ok(target, "--revert")
    assert snapshot(target) == before


def test_a_change_that_can_neither_be_finished_nor_put_back(engine, target, monkeypatch):
    before = snapshot(target)
    real, calls = os.replace, []

    def replace(source, place):
        calls.append(place)
        return real(source, place) if len(calls) < 4 else fail(errno.EIO)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        status, report = engine(target)
    assert (status, report["error"]["code"]) == (1, "half-applied")
    assert (report["state"], report["files"]) == ("drifted", [])
    assert "the tree is between two states" in report["error"]["message"]
    engine.ok(target, "--revert")
    assert snapshot(target) == before


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
