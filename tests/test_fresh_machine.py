"""What a machine with Python and a package index, and nothing set up, gets: packages, scripts, what they say."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("signals_as_in_a_terminal")

ROOT = Path(__file__).resolve().parents[1]
# The places that this machine is told to install from, and what it is told to leave out.
PLAIN = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_"))}
PYTHONS = re.findall(r"3\.\d+", re.search(r"need Linux, Python ([^`\n]*)", (ROOT / "README.md").read_text())[1])
FOR_OTHERS = {"scripts/python.sh", "scripts/testenv.sh", "scripts/tools.sh"}  # those call or source these


def committed(*patterns):
    done = subprocess.run(["git", "-C", ROOT, "ls-files", *patterns], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


LISTED = committed("*requirements*.txt", "docker/*.txt")


def resolve(python, *arguments):
    """What a plain index gives for `arguments` on `python`, as names and versions; nothing is installed."""
    uv = [Path(sys.executable).with_name("uv"), "pip", "compile", "--no-config", "--no-cache", "--quiet"]
    on = ["--no-python-downloads", "--python-version", python, "--python-platform", "linux"]
    plain = ["--no-annotate", "--no-header"]
    done = subprocess.run([*uv, *on, *plain, *arguments], capture_output=True, text=True, env=PLAIN, cwd=ROOT)
    if re.search(r"dns error|client error \(Connect\)|timed out", done.stderr):
        pytest.skip("there is no package index: " + done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return pins(done.stdout)


def pins(text):
    return set(re.findall(r"^([\w.-]+==[^\s;]+)", text, re.M))


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", sorted(LISTED))
def test_requirements_resolve_on_a_plain_index(name, python):
    file = ROOT / name
    pinned = pins(file.read_text())
    if file.parent.name == "docker":  # installed so, into an image that has the rest
        assert resolve(python, name, "--no-deps") == pinned
        return
    asked = file.with_suffix(".in").relative_to(ROOT)
    if not (ROOT / asked).exists():  # names alone, without what they need
        assert pinned <= resolve(python, name)
        return
    found = resolve(python, asked, "--constraint", name)
    assert found, "nothing resolved"
    assert found <= pinned, f"{name} is not what {asked} asks for; its first lines say how it is written anew"


def test_pythons_are_those_that_are_tried():
    tried = re.search(r"^([\d. |]+)\) ;;$", (ROOT / "scripts/testenv.sh").read_text(), re.M)[1]
    assert tried.split(" | ") == PYTHONS and len(PYTHONS) >= 2
    assert {"requirements-test.txt", "scripts/requirements.txt"} <= LISTED


@pytest.mark.parametrize("script", sorted(committed("*.sh") - FOR_OTHERS))
def test_help(script, tmp_path):
    environment = dict(os.environ)
    if script.startswith("benchmarks/"):  # run by the Python that has vLLM, and so numpy
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run([ROOT / script, "--help"], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and done.stdout.lower().startswith("usage: "), done


@pytest.fixture
def clone(tmp_path):
    """The scripts on a repository that asks for one package."""
    shutil.copytree(ROOT / "scripts", tmp_path / "clone/scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "clone/requirements-test.txt").write_text("no-such-package==1\n")
    return tmp_path / "clone"


@pytest.mark.parametrize("script", ["selftest.sh", "test.sh"])
def test_without_an_index_it_says_what_to_bring(script, clone, tmp_path):
    env = PLAIN | {"PIP_NO_INDEX": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run([clone / "scripts" / script], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and not done.stdout
    assert "ERROR: No matching distribution found for no-such-package==1" in done.stderr
    assert "\nerror: the packages were not installed; " in done.stderr
    assert "pip download --no-deps -d FOLDER -r requirements-test.txt\n" in done.stderr
    assert "PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER" in done.stderr


@pytest.mark.parametrize("arguments", [("one", "two"), ("--unheard-of",), ("",)])
def test_wrong_arguments_of_the_self_test(arguments):
    done = subprocess.run([ROOT / "scripts/selftest.sh", *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: give one folder, or no argument.\n")


@pytest.mark.parametrize("asked, why", [
    ("0.22.1", "error: {tree} holds vLLM 0.33.0, not 0.22.1; set VLLM_RELEASE=0.33.0, or give another folder.\n"),
    ("0.33.0", "error: patch-changed\n"),
])  # fmt: skip
def test_of_a_folder_that_somebody_names_nothing_is_taken_off(tmp_path, asked, why):
    text = (ROOT / "scripts/testenv.sh").read_text()
    calls, tree = tmp_path / "calls", tmp_path / "tree"
    (tree / "vllm").mkdir(parents=True)
    (tree / "vllm/__init__.py").touch()
    (tmp_path / "scripts").mkdir()
    apply = tmp_path / "scripts/apply-patches.sh"
    apply.write_text(
        f"""#!/bin/sh
        echo "$1" >> {calls}
        [ "$1" != --status ] || exec echo '{{"release": "0.33.0"}}'
        echo error: patch-changed >&2; exit 1"""
    )
    apply.chmod(0o755)
    script = f"""set -euo pipefail; stop() {{ echo "error: $1" >&2; exit 1; }}
        repo={tmp_path} cache={tmp_path} python={sys.executable}
        {text[text.index("applied() {") :]}
        tree=$(applied {asked} {tree})"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, why.format(tree=tree))
    assert "--revert" not in calls.read_text()


def test_a_release_without_a_self_test(clone, tmp_path):
    """0.23.0 to 0.32.0 have the drop-in only."""
    (clone / "scripts/testenv.sh").write_text(
        f"""stop() {{ echo "error: $1" >&2; exit 1; }}
        repo={clone} python=false; applied() {{ echo {tmp_path}; }}"""
    )
    done = subprocess.run([clone / "scripts/selftest.sh"], capture_output=True, text=True)
    said = "error: the self-test comes with the full-width cache, which this release lacks; "
    assert done.returncode == 1 and done.stderr.startswith(said)


@pytest.fixture
def everyday(clone, tmp_path):
    """test.sh with nothing to install, a patch series that fails, and the tests that it is called with."""
    scripts = clone / "scripts"
    (scripts / "testenv.sh").write_text(
        f"""repo={clone} cache={tmp_path}/cache python={sys.executable}
        mkdir -p $cache; exec 9>$cache/lock
        install() {{ :; }}; mv() {{ :; }}; applied() {{ echo /nowhere; }}"""
    )
    (scripts / "check-series.sh").write_text("#!/bin/sh\necho this one fails; exit 1")
    (scripts / "support-matrix.sh").write_text("#!/bin/sh\n")
    shutil.copy(ROOT / "pyproject.toml", clone)
    (clone / "tests").mkdir()

    def start(tests):
        (clone / "tests/test_it.py").write_text(tests)
        return subprocess.Popen(
            [scripts / "test.sh"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=PLAIN,
            start_new_session=True,
        )  # fmt: skip

    return start


def test_steps_have_names_and_a_total(everyday, tmp_path):
    """What follows a failure runs, too."""
    run = everyday(
        "import pytest\n\n\n"
        "def test_passes():\n    pass\n\n\n"
        "def test_fails():\n    raise ValueError\n\n\n"
        "@pytest.fixture\ndef broken():\n    raise ValueError\n\n\n"
        "def test_errs(broken):\n    pass\n\n\n"
        "@pytest.mark.image\ndef test_image():\n    pass\n\n\n"
        "def test_skips():\n    pytest.skip('a reason')\n"
    )
    said, _ = run.communicate()
    assert run.returncode == 1, said
    headings = re.findall("^=== (.*)$", said, re.M)
    assert headings[1] == "patch series (check-series.sh)" and headings[-1] == "tests on vLLM 0.22.1"
    # Passed: style, table and a test. Failed: series, a test and a fixture.
    assert said.splitlines()[-1] == "3 passed, 3 failed, 1 skipped"
    assert f"{tmp_path}/cache, which may be removed." in said
    assert "a reason" in said


def test_interrupted(everyday):
    run = everyday(
        "import os, signal, time\n\n\n"
        "def test():\n    os.killpg(0, signal.SIGINT)\n    time.sleep(200)\n"
    )
    said, _ = run.communicate(timeout=150)
    assert run.returncode == 130 and said.endswith("interrupted\n"), said


def test_no_silence(tmp_path):
    watch = (ROOT / "tests/conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(watch.replace("seconds=60", "seconds=1"))
    (tmp_path / "test_it.py").write_text("import time\n\n\ndef test():\n    time.sleep(3)\n")
    command = [sys.executable, "-m", "pytest", "-n", "1", "test_it.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search("^running for [12] s: test_it.py::test$", done.stdout, re.M), done.stdout
