"""Each call by which the engine looks at a tree or changes it fails, or is where a signal comes, one at a time.

Nothing may be lost, whatever happens: what is said of the tree is true, a second run completes it, and --revert
gives every byte back. Every day only the calls that lead from one state to the next; all of them, in about an
hour on two busy cores, with

    DSV4_OVERLAY_INJECT=all scripts/test.sh tests/engine/test_engine_injector.py
"""

import contextlib
import errno
import json
import os
import shutil
import signal
import sys
import traceback
from collections import Counter

import pytest
from dsv4_overlay_tools import cli
from smallworld import copy, make_repo, make_target, snapshot

EVERYTHING = os.environ.get("DSV4_OVERLAY_INJECT") == "all"
KINDS = ("installed",)
CALLS = ("fsync", "replace", "mkdir", "rmdir", "unlink")
FAULTS = ("error", "error after its effect", "SIGINT")
if EVERYTHING:
    CALLS += ("open", "write", "close", "chmod", "fchmod", "chown", "utime", "setxattr",
              "stat", "lstat", "fstat", "listdir", "scandir", "access", "listxattr", "getxattr")  # fmt: skip
    KINDS += ("source",)
    FAULTS += ("full disk", "SIGTERM", "SIGKILL")


def injected(step, fault, argv, repo, said):
    """Run in a child in which `fault` happens at the `step`-th call; return how it ended and whether it got there.

    What it prints is left in the file `said`.
    """
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        count = 0

        def failing(name, real):
            def call(*args, **kwargs):
                nonlocal count
                count += 1
                if count != step:
                    return real(*args, **kwargs)
                if fault.startswith("SIG"):
                    os.kill(os.getpid(), getattr(signal, fault))
                    return real(*args, **kwargs)
                if fault == "full disk" and name not in ("open", "write", "replace", "mkdir", "fsync", "setxattr"):
                    return real(*args, **kwargs)
                if fault == "error after its effect" or name == "close":
                    real(*args, **kwargs)
                number = errno.ENOSPC if fault == "full disk" else errno.EIO
                raise OSError(number, os.strerror(number), str(args[0]))

            return call

        status = 99
        try:
            sys.stdout = sys.stderr = open(said, "w")  # noqa: SIM115 - until the child ends
            for name in CALLS:
                setattr(os, name, failing(name, getattr(os, name)))
            status = cli.main([*map(str, argv), "--json"], repo)
        except KeyboardInterrupt:
            status = 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
            os._exit(status if count >= step else 50 + status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return (status - 50, False) if status >= 50 and status != 99 else (status, True)


class World:
    """A tree in each of the states from which something is run, and what it is when clean and when applied."""

    def __init__(self, engine, kind, folder):
        self.engine, self.folder = engine, folder
        engine.root = make_repo(
            folder / "small",
            patches={"one.patch": ["vllm/config.py", "vllm/tool.sh"]},
            overlay={"common/vllm/dsv4/main.py": b"import vllm.dsv4.deep.a\n",
                     "common/vllm/dsv4/deep/a.py": b"a = 1\n"},
        )  # fmt: skip
        self.clean = make_target(folder / "clean", kind)
        with contextlib.suppress(OSError):  # where the file system has them
            os.setxattr(self.clean / "vllm/config.py", "user.note", b"kept")
        (self.clean / "vllm/__pycache__").mkdir()
        (self.clean / "vllm/__pycache__/config.cpython-311.pyc").write_bytes(b"stale")
        self.applied = copy(self.clean, folder / "applied")
        engine.ok(self.applied)
        self.snapshots = {"clean": snapshot(self.clean), "applied": snapshot(self.applied)}
        del self.snapshots["clean"]["vllm/__pycache__/config.cpython-311.pyc"]
        self.mended = []  # trees from which the next runs have been seen to go well

    def cut(self, start, argv):
        """A copy of `start` in which `argv` was killed when it had changed or moved away the first file."""
        step = 1
        while True:
            tree = copy(start, self.folder / f"cut{step}")
            injected(step, "SIGKILL", [tree, *argv], self.engine.root, os.devnull)
            if self.seen(tree).get("vllm/config.py") != self.seen(start)["vllm/config.py"]:
                return tree
            shutil.rmtree(tree)
            step += 1

    def seen(self, tree):
        found = snapshot(tree)
        found.pop("vllm/__pycache__/config.cpython-311.pyc", None)
        return found


def of_vllm(found):
    """The files in a snapshot that are not the engine's own."""
    return {path: what for path, what in found.items() if what[0] == "file" and "/_dsv4_overlay/" not in path}


def examine(world, tree, status, said, goal, start):
    """Return what the tree was in: a state, or between."""
    now = world.seen(tree)
    state = next((name for name, found in world.snapshots.items() if found == now), "between")
    text = said.read_text()
    assert "Traceback" not in text, text
    if status == 0:
        assert state == goal, text
    if text:
        report = json.loads(text)
        assert (status == 0) == (report["error"] is None), report
        if report["state"] in ("clean", "applied") and report["error"]:
            assert report["state"] == state, report
        if report["error"]:
            message = report["error"]["message"]
            assert report["error"]["code"] != "record-lost", report
            assert ("put back" in message) <= (state == {"between": "clean"}.get(start, start)), report
            if "between two states" in message:
                assert all(of_vllm(now) != of_vllm(found) for found in world.snapshots.values()), report
    if now not in world.mended:
        world.mended.append(now)
        for argv, wanted in (([], "applied"), (["--revert"], "clean")):
            world.engine.ok(tree, *argv)
            assert world.seen(tree) == world.snapshots[wanted]
    return state


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", ["apply", "revert", "recover apply", "recover revert", "recover and apply"])
def test_each_call(engine, tmp_path, kind, run, fault):
    world = World(engine, kind, tmp_path)
    start, goal, argv = {
        "apply": ("clean", "applied", []),
        "revert": ("applied", "clean", ["--revert"]),
        "recover apply": ("between", "clean", ["--revert"]),
        "recover revert": ("between", "clean", ["--revert"]),
        "recover and apply": ("between", "applied", []),
    }[run]
    if start == "between":
        origin = world.cut(world.applied, ["--revert"]) if run == "recover revert" else world.cut(world.clean, [])
        assert engine(origin, "--status")[1]["error"]["code"] == "half-applied"
    else:
        origin = getattr(world, start)
    seen = Counter()
    said = tmp_path / "said"
    step = 1
    while True:
        said.write_text("")
        tree = copy(origin, tmp_path / "tree")
        status, there = injected(step, fault, [tree, *argv], engine.root, said)
        assert status in (0, 1, -signal.SIGTERM, -signal.SIGKILL), said.read_text()
        seen[examine(world, tree, status, said, goal, start)] += 1
        shutil.rmtree(tree)
        if not there:
            break
        step += 1
    print(f"{kind}, {run}, {fault}: {step - 1} calls, no loss; {dict(seen)}")
    assert seen[goal] and sum(seen.values()) > 4
