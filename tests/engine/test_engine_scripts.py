"""The shell scripts: the environment they make for themselves, and where their output goes."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import bootstrap
import pytest
from smallworld import EDITED, PRISTINE, RELEASE, ROOT, make_repo, make_target, snapshot

TOOL = """import os, sys
print("tool", sys.argv[1:], os.environ["DSV4_OVERLAY_PYTHON"])
print(sys.flags.isolated, sys.prefix)
"""


@pytest.fixture
def scripts(tmp_path):
    """The scripts with no requirements and a tool that only prints, so that no index is needed."""
    folder = tmp_path / "scripts"
    (folder / "dsv4_overlay_tools").mkdir(parents=True)
    names = ("apply-patches.sh", "check-series.sh", "export-series.sh", "tools.sh", "python.sh", "bootstrap.py")
    for name in names:
        shutil.copy(ROOT / "scripts" / name, folder)
    (folder / "requirements.txt").write_text("")
    (folder / "dsv4_overlay_tools/__main__.py").write_text(TOOL)
    return folder


def environment(tmp_path, **more):
    env = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "DSV4_OVERLAY_PYTHON")}
    env["PATH"] = f"{os.path.dirname(sys.executable)}:{env['PATH']}"
    return {**env, "XDG_CACHE_HOME": str(tmp_path / "cache"), **more}


def start(script, *args, env, **kwargs):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs}
    return subprocess.Popen([str(script), *map(str, args)], text=True, env=env, **pipes)


def test_output_is_that_of_the_tool_only(scripts, tmp_path):
    env = environment(tmp_path, PYTHONPATH="/nowhere")
    python = shutil.which("python3", path=env["PATH"])
    expected_err = "Preparing the tools (first run)\n"
    for name, command in [("apply-patches.sh", "apply"), ("export-series.sh", "export"),
                          ("check-series.sh", "check")]:  # fmt: skip
        run = start(scripts / name, "--x", "a b", env=env, cwd="/")
        out, err = run.communicate()
        assert (run.returncode, err) == (0, expected_err)
        tool, where = out.splitlines()
        assert tool == f"tool ['{command}', '--x', 'a b'] {python}"
        flag, prefix = where.split(" ", 1)
        assert flag == "1" and prefix.startswith(str(tmp_path / "cache/vllm-dsv4-overlay/venv-"))
        expected_err = ""

    # An activated environment is the active Python; the tools still run in their own.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "v")], check=True)
    env["VIRTUAL_ENV"] = str(tmp_path / "v")
    out, _ = start(scripts / "apply-patches.sh", env=env).communicate()
    assert out.splitlines()[0].endswith(str(tmp_path / "v/bin/python"))
    assert out.splitlines()[1] == where
    # What conda activates after it comes first on PATH, and leaves VIRTUAL_ENV.
    conda = {"CONDA_PREFIX": os.path.dirname(os.path.dirname(python))}
    out, _ = start(scripts / "apply-patches.sh", env=env | conda).communicate()
    assert out.splitlines()[0].endswith(f" {python}")

    (scripts / "requirements.txt").write_text("# other ones make another environment\n")
    out, err = start(scripts / "apply-patches.sh", env=env).communicate()
    assert err.startswith("Preparing") and out.splitlines()[1] != where


def test_two_first_runs_make_one_environment(scripts, tmp_path):
    env = environment(tmp_path)
    runs = [start(scripts / "apply-patches.sh", env=env) for _ in range(2)]
    said = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert sorted(err for _, err in said) == ["", "Preparing the tools (first run)\n"]
    assert len(list((tmp_path / "cache/vllm-dsv4-overlay").iterdir())) == 1


def test_a_killed_first_run_is_made_good(scripts, tmp_path):
    env = environment(tmp_path)
    run = start(scripts / "apply-patches.sh", env=env, start_new_session=True)
    deadline = time.monotonic() + 30
    while not list((tmp_path / "cache").glob("*/venv-*/bin")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    again = start(scripts / "apply-patches.sh", env=env)
    out, err = again.communicate()
    assert again.returncode == 0 and out.startswith("tool"), err
    names = [path.name for path in (tmp_path / "cache/vllm-dsv4-overlay").iterdir()]
    assert len(names) == 1 and not names[0].endswith(".new")


def test_an_environment_that_cannot_be_made(scripts, tmp_path):
    (scripts / "requirements.txt").write_text("no-such-package==1 --hash=sha256:" + "0" * 64)
    env = environment(tmp_path, PIP_NO_INDEX="1", UV_NO_INDEX="1", UV_OFFLINE="1")
    run = start(scripts / "apply-patches.sh", "x", "--json", env=env)
    out, err = run.communicate()
    assert run.returncode == 1
    assert json.loads(out)["error"]["code"] == "bootstrap-failed"
    assert list((tmp_path / "cache/vllm-dsv4-overlay").iterdir()) == []
    (tmp_path / "file").write_text("")
    run = start(scripts / "apply-patches.sh", env={**env, "XDG_CACHE_HOME": str(tmp_path / "file")})
    out, err = run.communicate()
    assert out == "" and err.startswith("error: bootstrap-failed: ") and err.count("\n") == 1


def test_a_python_without_venv(tmp_path, monkeypatch):
    """Debian's words."""
    monkeypatch.setattr(bootstrap.shutil, "which", lambda _: None)
    words = "was not created successfully because ensurepip is not\navailable.\n\nFailing command: x\n"
    done = subprocess.CompletedProcess([], 1, words, "")
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *_, **__: done)
    said = bootstrap.build(tmp_path / "venv")
    assert said == f"{sys.executable} cannot make virtual environments; install python3-venv, or uv"


def test_an_environment_where_pip_installs_for_the_user(scripts, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/uv").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin/uv").chmod(0o755)
    env = environment(tmp_path, PIP_USER="1")
    env["PATH"] = f"{tmp_path}/bin:{env['PATH']}"
    out, err = start(scripts / "apply-patches.sh", env=env).communicate()
    assert out.startswith("tool"), err


# ---------------------------------------------------------------- the scripts as they are


@pytest.fixture
def ready(tmp_path):
    """What the scripts need to find an environment that is made already: this one."""
    env = environment(tmp_path)
    key = (ROOT / "scripts/requirements.txt").read_bytes() + sys.version.encode() + sys.base_prefix.encode()
    python = tmp_path / f"cache/vllm-dsv4-overlay/venv-{hashlib.sha256(key).hexdigest()[:16]}/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return env


@pytest.fixture
def copied(tmp_path):
    """A repository with the scripts as they are."""
    repo = make_repo(tmp_path / "repo")
    shutil.copytree(ROOT / "scripts", repo / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    return repo


EVERY = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("scripts", "benchmarks", "docker", "deploy/kubernetes")
    for path in (ROOT / folder).glob("*.sh")
    if path.name not in ("python.sh", "testenv.sh")  # which others source
)


@pytest.mark.parametrize("script", EVERY)
def test_help(script, ready, tmp_path):
    """Of every script, also through a link, from anywhere, with nothing changed."""
    (tmp_path / "links").mkdir()
    (tmp_path / "links/one").symlink_to(ROOT / script)
    (tmp_path / "two").symlink_to("links/one")
    for call in ([ROOT / script, "--help"], [tmp_path / "two", "-h"]):
        out, err = (run := start(*call, env=ready, cwd="/")).communicate(timeout=60)
        assert (run.returncode, err) == (0, ""), err
        assert Path(script).name in out
    assert [path.name for path in (tmp_path / "cache/vllm-dsv4-overlay").iterdir()] == [
        path.name for path in (tmp_path / "cache/vllm-dsv4-overlay").glob("venv-*")]  # fmt: skip


@pytest.mark.parametrize("script", EVERY)
def test_what_is_beside_a_script_is_found_through_a_link(script):
    """What --help does not show: the path of the script is always resolved first."""
    assert not re.search(r'dirname (-- )?"?\$0', (ROOT / script).read_text())


@pytest.mark.parametrize("script", ["apply-patches.sh", "check-series.sh"])
def test_ctrl_c_at_any_moment_of_the_start(ready, copied, tmp_path, script):
    """Of the shell, of two Pythons and of their imports: one sentence, no traceback."""
    target = make_target(tmp_path / "target", "source")
    before = snapshot(target)
    said = set()
    for step in range(15):
        run = start(copied / "scripts" / script, target, "--check", env=ready, start_new_session=True)
        time.sleep(step * 0.03)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=60)
        assert "Traceback" not in err and "Error" not in err, err
        said.add(err.partition(": ")[2].partition(":")[0])
        assert snapshot(target) == before
    assert "interrupted" in said


def test_ctrl_c_while_the_tool_is_imported(ready, copied, tmp_path):
    slow = copied / "scripts/dsv4_overlay_tools/cli.py"
    slow.write_text(f"import time, pathlib\npathlib.Path({str(tmp_path / 'there')!r}).touch()\ntime.sleep(60)\n")
    run = start(copied / "scripts/apply-patches.sh", "x", "--json", env=ready, start_new_session=True)
    deadline = time.monotonic() + 30
    while not (tmp_path / "there").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=30)
    assert (run.returncode, err, json.loads(out)["error"]["code"]) == (1, "", "interrupted")


def test_ctrl_c_where_python_drops_exceptions(ready, copied):
    """It ends the run all the same, with the one sentence."""
    (copied / "scripts/dsv4_overlay_tools/cli.py").write_text(
        "import signal, time, weakref\n"
        "gone = set()\n"
        "there = weakref.ref(gone, lambda _: signal.raise_signal(signal.SIGINT))\n"
        "del gone\n"
        "time.sleep(60)\n"
    )
    for argv, error in ([["--json"], ""], [[], "error: interrupted: Interrupted; run again.\n"]):
        run = start(copied / "scripts/apply-patches.sh", "x", *argv, env=ready)
        out, err = run.communicate(timeout=30)
        assert (run.returncode, err) == (1, error)
        assert not argv or json.loads(out)["error"]["code"] == "interrupted"


@pytest.mark.parametrize("damage", ["python", "module", "text"])
def test_a_damaged_environment(ready, copied, tmp_path, damage):
    """It is named, in JSON where that was asked for; the report has the keys that it always has."""
    target = make_target(tmp_path / "target", "source")
    (python,) = tmp_path.glob("cache/vllm-dsv4-overlay/venv-*/bin/python")
    out, _ = start(copied / "scripts/apply-patches.sh", target, "--status", "--json", env=ready).communicate()
    keys = list(json.loads(out))
    if damage == "python":
        python.write_bytes(b"\x7fELF")
    else:  # as if a library were gone, or half written
        text = b"import gone_since\n" if damage == "module" else b"def half(:\n"
        (copied / "scripts/dsv4_overlay_tools/series.py").write_bytes(text)
    run = start(copied / "scripts/apply-patches.sh", target, "--json", env=ready)
    out, err = run.communicate()
    report = json.loads(out)
    assert (run.returncode, err, list(report), report["error"]["code"]) == (1, "", keys, "bootstrap-failed")
    assert "remove " in report["error"]["message"] and "the next run makes it anew." in report["error"]["message"]
    run = start(copied / "scripts/check-series.sh", env=ready)
    out, err = run.communicate()
    assert (run.returncode, out, err.count("\n")) == (1, "", 1) and err.startswith("error: bootstrap-failed: ")


def test_a_path_that_is_no_text(copied, tmp_path):
    """Where the locale's encoding does not write it."""
    target = make_target(Path(os.fsdecode(os.fsencode(tmp_path) + b"/v\xff")), "source")
    main = str(copied / "scripts/dsv4_overlay_tools/__main__.py")
    program = (
        "import io, runpy, sys; sys.stdout = io.TextIOWrapper(sys.stdout.detach(), 'utf-8'); "
        f"sys.argv[0] = {main!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-B", "-c", program, "apply", target], capture_output=True, text=True)
    assert done.returncode == 0 and "/v\\udcff: applied" in done.stdout, done.stderr


def test_standard_output_that_is_full(ready, copied, tmp_path):
    """What was done is done, and the exit status says so; Python's own for this, 120, is never seen."""
    target = make_target(tmp_path / "target", "source")
    before = snapshot(target)
    with open("/dev/full", "w") as full:

        def run(*args):
            done = start(*args, env=ready, stdout=full)
            return done.wait(), done.stderr.read()

        for options in ([], ["--status"], ["--revert"], ["--check", "--json"]):
            status, err = run(copied / "scripts/apply-patches.sh", target, *options)
            assert status == 0 and "the report could not be written (No space left on device)" in err, err
            assert (snapshot(target) == before) == ("--revert" in options or "--check" in options)
        status, err = run(copied / "scripts/check-release.sh", RELEASE, "--pristine", target)
        assert (status, err) == (1, "error: not-readable: standard output: No space left on device.\n")


def test_the_command_of_the_other_scripts(ready, copied):
    for argument, status in (("", 2), ("--help", 0), ("matrix", 2)):
        run = start(copied / "scripts/tools.sh", *argument.split(), env=ready)
        out, err = run.communicate()
        assert run.returncode == status and "usage: tools.sh {apply," in (err if status else out)


def test_what_only_a_download_needs_is_not_imported_at_every_start():
    program = "import sys; sys.path.insert(0, 'scripts'); import dsv4_overlay_tools.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-B", "-c", program], cwd=ROOT, capture_output=True, check=True)
    assert not {"rich", "unearth", "ssl", "git"} & set(done.stdout.decode().split())


@pytest.mark.skipif(bool(os.environ.get("PIP_NO_INDEX")), reason="needs a package index")
def test_the_real_thing(tmp_path):
    """The scripts as they are, with their pinned requirements, on a repository of their own."""
    repo = make_repo(tmp_path / "repo")
    shutil.copytree(ROOT / "scripts", repo / "scripts",
                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    target = make_target(tmp_path / "target", "git")
    before = snapshot(target)
    # The user's PYTHONPATH may hold anything; the tools must not import it.
    poison = tmp_path / "poison"
    poison.mkdir()
    for name in ("rich", "unidiff", "tomlkit", "git"):
        (poison / f"{name}.py").write_text("raise RuntimeError('imported')\n")
    # ... and pip must not take it for what the tools need.
    pinned = re.search(r"^rich==(\S+)", (ROOT / "scripts/requirements.txt").read_text(), re.M)[1]
    info = poison / f"rich-{pinned}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rich\nVersion: {pinned}\n")
    # ... and what tells pip to install elsewhere, or something else, is not about the tools; nor is a module of
    # the folder that they are run in.
    (tmp_path / "constraints.txt").write_text("rich==1.0.0\n")
    (tmp_path / "logging.py").write_text("raise RuntimeError('imported')\n")
    pip = {"PIP_PREFIX": str(tmp_path / "elsewhere"), "PIP_CONSTRAINT": str(tmp_path / "constraints.txt")}
    env = environment(tmp_path, PYTHONPATH=str(poison), **pip)

    def run(*args, script="apply-patches.sh"):
        done = start(repo / "scripts" / script, *map(str, args), env=env, cwd=tmp_path)
        out, err = done.communicate()
        return done.returncode, out, err

    status, out, err = run(target, "--json")
    assert status == 0, err
    assert json.loads(out)["state"] == "applied"
    assert (target / "vllm/config.py").read_bytes() == EDITED["vllm/config.py"]
    assert run(target)[0] == 0
    assert run(target, "--status", "--check")[0] == 2
    assert run(target / "vllm")[0] == 1
    assert run(target, "--revert")[0] == 0
    assert snapshot(target) == before
    pristine = make_target(tmp_path / "pristine", "source")
    status, out, err = run("1.0.0", "--pristine", pristine, script="check-series.sh")
    assert (status, err) == (0, ""), err
    for path in EDITED:
        (pristine / path).write_bytes(EDITED[path])
    other = make_target(tmp_path / "other", "source", files=PRISTINE)
    status, out, _ = run("1.0.0", pristine, "--pristine", other, script="export-series.sh")
    assert status == 0 and "nothing to write" in out
    assert not list((repo / "scripts").rglob("__pycache__"))


@pytest.mark.parametrize("given", [False, True], ids=["in the cache", "given"])
def test_a_tree_that_this_version_cannot_take_off(tmp_path, given):
    """One in the cache, applied by a version with other records, is fetched anew; one that is a user's is left."""
    repo = tmp_path / "repo"
    (repo / "scripts").mkdir(parents=True)
    apply = repo / "scripts/apply-patches.sh"
    apply.write_text(
        '#!/bin/sh\n[ "$1" != --fetch ] || { mkdir -p "$3/vllm" && exec touch "$3/vllm/__init__.py" "$3/new"; }\n'
        'echo "error: record-format" >&2\n[ -e "$1/new" ]\n'
    )
    apply.chmod(0o755)
    tree = tmp_path / "vllm-1.0.0"
    (tree / "vllm").mkdir(parents=True)
    (tree / "vllm/__init__.py").touch()
    _, start, rest = (ROOT / "scripts/testenv.sh").read_text().partition("applied() {")
    call = f"applied 1.0.0 {tree if given else ''}"
    script = f"set -euo pipefail; repo={repo} cache={tmp_path}\n{start}{rest}\n{call}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode == 0, (tree / "new").exists()) == (not given, not given)
    assert "record-format" in done.stderr and done.stdout == ("" if given else f"{tree}\n")
