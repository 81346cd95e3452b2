"""scripts/build-kernels.sh: the same bytes again, a library from another machine, and refusals."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "overlay/common/vllm/third_party/mla_kernels"
LIBRARY = f"{PACKAGE}/lib/libmla_kernels.so"
NVCC = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/nvcc")
needs_nvcc = pytest.mark.skipif(not NVCC.exists(), reason=f"there is no {NVCC}")


def run(root, *arguments, **env):
    env = {"CUDA_HOME": str(NVCC.parents[1]), "VIRTUAL_ENV": str(Path(sys.executable).parents[1]), **env}
    command = [root / "scripts/build-kernels.sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env)


@pytest.fixture
def repo(tmp_path):
    """What the script needs of this repository, and no more: so that no build here is touched."""
    root = tmp_path / "repo"
    shutil.copytree(ROOT / "csrc", root / "csrc")
    for path in ("scripts/build-kernels.sh", "scripts/python.sh", f"{PACKAGE}/native.py"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, root / path)
    return root


def test_help(repo):
    done = run(repo, "--help")
    assert done.returncode == 0 and "--from FILE.so" in done.stdout and "set -euo" not in done.stdout


@pytest.mark.slow
@needs_nvcc
def test_two_builds_are_the_same_bytes_and_one_can_be_carried(repo, tmp_path):
    builds = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "library.so"
        done = run(repo, file, MLA_CUDA_ARCHS="100a", TMPDIR=str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        builds.append(file)
    assert builds[0].read_bytes() == builds[1].read_bytes()

    done = run(repo, "--from", builds[0], CUDA_HOME="/nonexistent")
    assert (done.returncode, done.stderr) == (0, "")
    assert (repo / LIBRARY).read_bytes() == builds[0].read_bytes()
    assert (repo / LIBRARY).stat().st_mode & 0o777 == 0o755
    before = (repo / LIBRARY).stat()
    (repo / "csrc/insert.h").write_text((ROOT / "csrc/insert.h").read_text() + "\n")
    done = run(repo, "--from", builds[1])
    assert done.returncode == 1 and "was built from another csrc/ than " in done.stderr
    assert (repo / LIBRARY).stat() == before and os.listdir((repo / LIBRARY).parent) == [Path(LIBRARY).name]


@pytest.mark.parametrize("content", [None, b"\x7fELF\0", b'mla_kernels_build {"interface": 1, "sources": "0"}\0'])
def test_what_is_no_library_of_this_commit_is_not_taken(repo, tmp_path, content):
    file = tmp_path / "library.so"
    if content is not None:
        file.write_bytes(content)
    done = run(repo, "--from", file)
    assert done.returncode == 1 and not (repo / LIBRARY).parent.exists()
    assert done.stderr.startswith(f"error: {file} ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("other", ["interface", "sources", None])
def test_a_library_that_another_commit_built_is_not_taken(repo, tmp_path, other):
    interface = re.search(r"^INTERFACE = (\d+)$", (repo / PACKAGE / "native.py").read_text(), re.MULTILINE)[1]
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((repo / "csrc").iterdir()))).hexdigest()
    says = {"interface": int(interface), "torch": "2.11", "sources": sources}
    if other:
        says[other] = {"interface": int(f"{interface}0"), "sources": "0" * 64}[other]
    file = tmp_path / "library.so"
    file.write_bytes(b"mla_kernels_build " + json.dumps(says).encode() + b"\0")
    done = run(repo, "--from", file)
    assert (done.returncode, (repo / LIBRARY).exists()) == ((1, False) if other else (0, True)), done.stderr
    assert ("was built from another csrc/ than " in done.stderr) == bool(other)


@pytest.mark.parametrize("where", ["", "a file/library.so"])
def test_where_no_file_can_be_made(repo, tmp_path, where):
    (tmp_path / "a file").touch()
    done = run(repo, tmp_path / where, CUDA_HOME="/nonexistent")  # before the toolkit is looked for
    assert done.returncode == 1 and done.stderr.startswith(f"error: {tmp_path / where} ")
    assert done.stderr.endswith((" is to be built.\n", "; name another file.\n")) and done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [("one", "two"), ("--unheard-of",), ("",)])
def test_wrong_arguments(repo, arguments):
    done = run(repo, *arguments, CUDA_HOME="/nonexistent")
    assert done.returncode == 1 and done.stderr == "error: give one file to build, or no argument; see --help.\n"


def test_what_does_not_compile(repo, tmp_path):
    """As for a GPU that this toolkit does not know."""
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    version = "Cuda compilation tools, release 13.0, V13.0.88"
    answers = f"--version) echo {version};; *trial.cu*) ;; *) echo fatal >&2; exit 1;;"
    nvcc.write_text(f'#!/bin/sh\ncase "$*" in {answers} esac\n')
    nvcc.chmod(0o755)
    done = run(repo, CUDA_HOME=str(tmp_path), MLA_CUDA_ARCHS="999a")
    assert done.returncode == 1 and not (repo / LIBRARY).parent.exists()
    assert done.stderr == f"fatal\nerror: the library was not built; {nvcc} says above why.\n"


@pytest.mark.parametrize("version", ["12.9", "9.13"])
def test_a_toolkit_that_is_too_old(repo, tmp_path, version):
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {version}, V{version}.0\n")
    nvcc.chmod(0o755)
    done = run(repo, CUDA_HOME=str(tmp_path))
    assert done.returncode == 1 and not (repo / LIBRARY).parent.exists()
    assert done.stderr == f"error: {nvcc} is of CUDA {version}; install the CUDA 13 toolkit.\n"


def test_a_toolkit_that_says_no_version(repo, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").symlink_to("/bin/true")
    done = run(repo, CUDA_HOME=str(tmp_path))
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "is of CUDA unknown; install the CUDA 13 toolkit." in done.stderr


@needs_nvcc
def test_a_toolkit_without_the_static_runtime_is_refused_at_once(repo, tmp_path):
    """As in an image that has nvcc but not cuda-cudart-dev: not after minutes, when all is compiled."""
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    spoil = '[ "$1" = --version ] || set -- "$@" -lcudart_missing'
    nvcc.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{spoil}\nexec {NVCC} "$@"\n')
    nvcc.chmod(0o755)
    done = run(repo, tmp_path / "out.so", CUDA_HOME=str(tmp_path))
    assert done.returncode == 1 and "cannot find -lcudart_missing" in done.stderr
    assert "cannot build a library with the static CUDA runtime" in done.stderr
    calls = (tmp_path / "calls").read_text()
    assert "insert.cu" not in calls and not (tmp_path / "out.so").exists()


@pytest.mark.parametrize("name", ["MLA_CUDA_ARCHS", "DSV4_CUDA_ARCHS"])
def test_the_gpus_to_build_for_are_said_by_either_name(repo, tmp_path, name):
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    nvcc.chmod(0o755)
    done = run(repo, CUDA_HOME=str(tmp_path), **{name: "sm_90"})
    assert done.returncode == 1 and "MLA_CUDA_ARCHS is 'sm_90'; write names like 90a" in done.stderr
