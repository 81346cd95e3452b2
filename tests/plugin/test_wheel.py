"""scripts/build-wheel.sh and what it builds: contents, name, metadata, refusals."""

import base64
import csv
import hashlib
import io
import json
import platform
import re
import shutil
import sys
import zipfile
from email.parser import Parser

import pytest
from building import LIBRARY, ROOT, install, run

sys.path.insert(0, str(ROOT / "scripts"))
from dsv4_overlay_tools.series import load_series, release_folders  # noqa: E402

VERSION = (ROOT / "VERSION").read_text().strip()
INFO = f"vllm_dsv4_overlay-{VERSION}.dist-info"


@pytest.fixture(scope="module")
def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


@pytest.fixture
def clone(repo, tmp_path):
    """A copy of the repository that a test may spoil."""
    return shutil.copytree(repo, tmp_path / "clone")


def test_it_has_the_drop_in_the_kernels_and_no_more(contents):
    code = {name for name in contents if not name.startswith(INFO)}
    package, kernels = "vllm_dsv4_overlay", "vllm_dsv4_overlay/third_party/mla_kernels"
    own = {f"{package}/{name}" for name in ("__init__.py", "plugin.py", "pins.json")}
    own |= {f"{package}/dsv4_overlay/{name}" for name in ("__init__.py", "drop_in.py", "index_table.py")}
    theirs = {path.name for path in (ROOT / "overlay/common/vllm/third_party/mla_kernels").glob("*.py")}
    assert code == own | {f"{kernels}/{name}" for name in theirs} | {f"{kernels}/lib/libmla_kernels.so"}
    assert not any("test" in name for name in code)


def test_its_files_are_those_of_the_overlay(contents, repo):
    for name, data in contents.items():
        path = name.removeprefix("vllm_dsv4_overlay/")
        if path.startswith(("dsv4_overlay/", "third_party/")):
            assert data == (repo / "overlay/common/vllm" / path).read_bytes(), name


def test_record_lists_every_file_as_it_is(contents):
    rows = {name: (pin, size) for name, pin, size in csv.reader(io.StringIO(contents[f"{INFO}/RECORD"].decode()))}
    assert rows.keys() == contents.keys() and rows.pop(f"{INFO}/RECORD") == ("", "")
    for name, (pin, size) in rows.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest()).rstrip(b"=").decode()
        assert (pin, int(size)) == (f"sha256={digest}", len(contents[name])), name


def test_pip_moves_no_package_for_it(contents):
    metadata = Parser().parsestr(contents[f"{INFO}/METADATA"].decode())
    assert (metadata["Name"], metadata["Version"]) == ("vllm-dsv4-overlay", VERSION)
    assert metadata["Requires-Python"] == ">=3.10" and metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("Requires-Dist") is None
    assert f"{INFO}/licenses/LICENSE" in contents


def test_one_wheel_for_every_python_and_every_system_that_its_library_runs_on(wheel, contents):
    """manylinux_2_N is the first whose glibc has the newest function that the library calls."""
    library = contents["vllm_dsv4_overlay/third_party/mla_kernels/lib/libmla_kernels.so"]
    newest = max(int(version) for version in re.findall(rb"GLIBC_2\.(\d+)", library))
    first = min(version for version in (5, 12, 17, 24, 26, 27, 28, 31, 34, 35, 36) if version >= newest)
    assert wheel.name == f"vllm_dsv4_overlay-{VERSION}-py3-none-manylinux_2_{first}_{platform.machine()}.whl"
    assert b"Root-Is-Purelib: false" in contents[f"{INFO}/WHEEL"]


@pytest.mark.parametrize(
    "name, touched, least",
    [("drop-in", {"flashmla.py", "flashmla_sparse.py"}, 17), ("mtp-padding", {"indexer.py"}, 11)],
)
def test_pins_are_those_of_the_patches(contents, name, touched, least):
    """Each release of the series, each file that it touches or relies on, as it is there."""
    pins = json.loads(contents["vllm_dsv4_overlay/pins.json"])[name]
    served = set()
    for folder in release_folders(ROOT, name):
        series = load_series(folder)
        for release in series.sdists:
            one = series.of(release)
            assert pins[release].keys() == (one.files | one.relied_on).keys()
            assert all(pin in pins[release][path] for path, pin in (one.files | one.relied_on).items())
            assert touched <= {path.rpartition("/")[2] for path in one.files}
            served.add(release)
    assert pins.keys() == served and len(served) >= least


def test_two_builds_are_the_same_bytes(clone, wheel, tmp_path):
    assert run(clone / "scripts/build-wheel.sh").returncode == 0
    (other,) = (clone / "dist").iterdir()
    assert other.name == wheel.name and other.read_bytes() == wheel.read_bytes()


def test_installed_and_uninstalled_by_pip(wheel, tmp_path):
    """Nothing of it stays, and `pip check` has nothing to say of it."""
    python = tmp_path / "venv/bin/python"
    assert run(sys.executable, "-m", "venv", tmp_path / "venv").returncode == 0
    site = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    before = {path for path in site.rglob("*") if "__pycache__" not in path.parts}
    assert run(python, "-m", "pip", "install", "--no-index", wheel).returncode == 0
    assert run(python, "-m", "pip", "check").returncode == 0
    listed = "from importlib.metadata import entry_points as e; print(list(e(group='vllm.general_plugins')))"
    said = run(python, "-c", listed).stdout
    assert "name='dsv4_overlay', value='vllm_dsv4_overlay.plugin:register'" in said
    assert run(python, "-c", "import vllm_dsv4_overlay.plugin").returncode == 0  # with the standard library alone
    assert run(python, "-m", "pip", "uninstall", "--yes", "vllm-dsv4-overlay").returncode == 0
    assert {path for path in site.rglob("*") if "__pycache__" not in path.parts} == before
    assert run(python, "-c", listed).stdout == "[]\n"


def test_help(repo):
    done = run(repo / "scripts/build-wheel.sh", "--help")
    assert done.returncode == 0 and "dist/" in done.stdout and "set -euo" not in done.stdout


def no_library(clone):
    (clone / LIBRARY).unlink()


def other_sources(clone):
    (clone / "csrc/insert.h").write_text("// edited\n")


def other_interface(clone):
    native = clone / LIBRARY.replace("lib/libmla_kernels.so", "native.py")
    native.write_text(native.read_text().replace("\nINTERFACE = ", "\nINTERFACE = 9"))


def no_build(clone):
    (clone / LIBRARY).write_bytes(b"\x7fELF\0")


def broken_pins(clone):
    next((clone / "patches/drop-in").glob("*/release.toml")).write_text("release = \n")


@pytest.mark.parametrize(
    "spoil, said",
    [
        (no_library, "there is no native library, "),
        (other_sources, "was built from another csrc/ than "),
        (other_interface, "was built from another csrc/ than "),
        (no_build, "does not say how it was built"),
        (broken_pins, "is not TOML"),
    ],
)
def test_what_is_missing_is_said_in_a_sentence(clone, tmp_path, spoil, said):
    spoil(clone)
    done = run(clone / "scripts/build-wheel.sh", tmp_path / "out")
    assert done.returncode == 1 and done.stdout == "" and not (tmp_path / "out").exists()
    assert done.stderr.startswith("error: ") and said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [("one", "two"), ("--unheard-of",), ("",)])
def test_wrong_arguments(repo, arguments):
    done = run(repo / "scripts/build-wheel.sh", *arguments)
    assert (done.returncode, done.stdout) == (1, "") and "see --help" in done.stderr


@pytest.mark.parametrize("place", ["file", "file/out"])
def test_a_folder_that_cannot_be_made(clone, tmp_path, place):
    (tmp_path / "file").write_text("")
    (clone / LIBRARY).unlink()  # which is looked for later
    done = run(clone / "scripts/build-wheel.sh", tmp_path / place)
    said = f"{tmp_path / place} cannot be made, since {tmp_path}/file is no folder that can be written"
    assert done.returncode == 1 and done.stderr == f"error: {said}; name another one.\n"


def test_a_file_beside_the_kernels_does_not_get_in(clone, tmp_path):
    """What an editor or a build leaves, or another library."""
    for name in ("notes.txt", "lib/other.so", "lib/.libmla_kernels.so.new", "__pycache__/x.pyc"):
        path = clone / LIBRARY.replace("lib/libmla_kernels.so", name)
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    assert run(clone / "scripts/build-wheel.sh", tmp_path).returncode == 0
    site = install(next(tmp_path.glob("*.whl")), tmp_path / "site")
    kernels = site / "vllm_dsv4_overlay/third_party/mla_kernels"
    assert not (kernels / "notes.txt").exists()
    assert [path.name for path in (kernels / "lib").iterdir()] == ["libmla_kernels.so"]


def test_pip_alone_needs_the_library_too(clone, tmp_path):
    no_library(clone)
    done = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, clone)
    assert done.returncode == 1 and "error: there is no native library" in done.stderr
