"""check-release.sh: what became of each seam in a release that has no series."""

import shutil
from pathlib import Path

import pytest
from dsv4_overlay_tools import porting
from smallworld import EDITED, OVERLAY, PRISTINE, RELEASE, SERIES, make_repo, sha256, write

CONFIG = PRISTINE["vllm/config.py"]


@pytest.fixture
def ask(tmp_path, capsys):
    repo = make_repo(tmp_path / "repo")

    def run(files, release="1.0.1", *options):
        write(tmp_path / "new", files)
        status = porting.check_release_main([release, "--pristine", str(tmp_path / "new"), *options], repo)
        return status, "".join(capsys.readouterr())

    run.repo = repo
    return run


def seams(out, path):
    return [line.split()[0] for line in out.splitlines() if f" {path}:" in line and not line.startswith(" ")]


def test_the_release_itself(ask):
    status, out = ask(PRISTINE)
    assert status == 0 and "8 applies, 0 moved, 0 changed, 0 upstream: the series fits" in out


@pytest.mark.parametrize("path, text, why", [
    ("PKG-INFO", b"Name: vllm\nVersion: 1.0.0\n", "wrong-release: {new} holds vLLM 1.0.0, not 1.0.1."),
    ("vllm/_dsv4_overlay/x", b"", "source-changed: {new} has the overlay applied; give an unmodified vLLM."),
])  # fmt: skip
def test_a_folder_that_is_not_what_was_asked_about(ask, tmp_path, path, text, why):
    assert ask(PRISTINE | {path: text}) == (2, f"error: {why.format(new=tmp_path / 'new')}\n")


def test_a_file_of_a_newer_python(ask):
    with (ask.repo / "overlay/common/vllm/dsv4/main.py").open("a") as main:
        main.write("from vllm.sub.untouched import value\n")
    status, out = ask(PRISTINE | {"vllm/sub/untouched.py": b"value = 1\nsyntax of tomorrow\n"})
    assert status == 2 and " cannot read vllm/sub/untouched.py, line 2; activate one that vLLM 1.0.1 " in out


def test_moved_lines_still_fit(ask):
    status, out = ask(PRISTINE | {"vllm/config.py": b"new = 1\n" * 5 + CONFIG})
    assert status == 0 and seams(out, "vllm/config.py") == ["moved", "moved"]
    assert "vllm/config.py:2 to line 7" in out


def test_moved_to_another_file(ask):
    files = {path: data for path, data in PRISTINE.items() if path != "vllm/config.py"}
    status, out = ask(files | {"vllm/sub/settings.py": b"new = 1\n" + CONFIG})
    assert status == 1 and seams(out, "vllm/config.py") == ["moved", "moved"]
    assert "vllm/config.py:2 to vllm/sub/settings.py:3" in out


def test_changed_lines_are_shown(ask):
    status, out = ask(PRISTINE | {"vllm/config.py": CONFIG.replace(b"line3 = 3\n", b"line3 = 'other'\n")})
    assert status == 1 and seams(out, "vllm/config.py") == ["changed", "applies"]
    assert "    - line3 = 3\n" in out and "    + line3 = 'other'\n" in out
    assert "1 changed" in out and "docs/porting.md" in out


def test_lines_that_are_gone(ask):
    status, out = ask(PRISTINE | {"vllm/config.py": b"nothing = 'left'\n"})
    assert status == 1 and "vllm/config.py:2: none of its lines are left" in out


def test_lines_in_several_places(ask):
    status, out = ask(PRISTINE | {"vllm/config.py": CONFIG + CONFIG})
    assert status == 1 and "vllm/config.py:2: its lines are in 2 places" in out


def test_lines_in_several_places_of_the_pinned_file(ask):
    """There the hunk goes to its own line, so that they are elsewhere too is no matter."""
    pristine = PRISTINE | {"vllm/config.py": b"same = 1\n" * 9}
    edited = EDITED | {"vllm/config.py": b"same = 1\n" * 4 + b"other = 1\n" + b"same = 1\n" * 4}
    shutil.rmtree(ask.repo)
    make_repo(ask.repo, pristine=pristine, edited=edited)
    status, out = ask(pristine)
    assert status == 0 and "applies   config.patch: vllm/config.py:3\n" in out
    assert ask(pristine | {"vllm/config.py": b"new = 1\n" + pristine["vllm/config.py"]})[0] == 1


def test_hunks_in_another_order(ask):
    parts = CONFIG.partition(b"line20 = 20\n")
    status, out = ask(PRISTINE | {"vllm/config.py": b"".join(reversed(parts))})
    assert status == 1 and "its hunks are no longer in this order" in out


def test_a_place_where_the_patch_is_no_python(ask):
    status, out = ask(PRISTINE | {"vllm/config.py": b"if 1:\n    x\n  y\n" + CONFIG})
    assert status == 1 and "vllm/config.py: with the patch invalid Python" in out


@pytest.mark.parametrize("where", ["vllm/config.py", "vllm/sub/elsewhere.py"])
def test_already_upstream(ask, where):
    patch = ask.repo / f"{SERIES}/config.patch"
    patch.write_bytes(patch.read_bytes().replace(b"Files:", b"Upstream-Sign: ^line30 = 31$\nFiles:"))
    assert ask(PRISTINE)[0] == 0
    status, out = ask(PRISTINE | {where: CONFIG.replace(b"line30 = 30", b"line30 = 31")})
    assert status == 1 and f"upstream  config.patch: {where}:31\n" in out and "a port is needed" in out


def test_all_is_upstream(ask):
    for folder in ("patches", "overlay"):
        shutil.rmtree(ask.repo / folder)
    make_repo(ask.repo, patches={"config.patch": ["vllm/config.py"]}, overlay={})
    patch = ask.repo / f"{SERIES}/config.patch"
    patch.write_bytes(patch.read_bytes().replace(b"Files:", b"Upstream-Sign: ^line30 = 31$\nFiles:"))
    pins = ask.repo / f"{SERIES}/release.toml"
    pins.write_text(pins.read_text().partition("[relied_on]")[0])
    status, out = ask(PRISTINE | {"vllm/config.py": CONFIG.replace(b"line30 = 30", b"line30 = 31")})
    assert status == 1 and "upstream: vLLM does this itself by now, so the series is not needed; " in out


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("from vllm.sub.untouched import value\n", None),
        ("from vllm.sub import untouched\nfrom vllm.dsv4.deep import inner\nimport os\n", None),
        ("def f():\n    from vllm.sub.untouched import gone\n", "from vllm.sub.untouched import gone"),
        ("from vllm.sub.gone import value\n", "from vllm.sub.gone import value"),
        ("import vllm.sub.untouched, vllm.dsv4.deep\n", None),
        ("import vllm.sub.gone as gone\n", "import vllm.sub.gone"),
        ("from vllm.sub.untouched import *\n", None),
        ("from vllm.sub.gone import *\n", "from vllm.sub.gone import *"),
        ("def f():\n    import vllm.gone.module\n", "import vllm.gone.module"),
        ("from ..sub import untouched\n", None),
        ("from ..sub.untouched import gone\n", "from vllm.sub.untouched import gone"),
        ("HERE = 'vllm.sub.untouched', 'vllm.sub.untouched.value'\n", None),
        ("HERE = 'vllm.sub.gone'\n", "'vllm.sub.gone'"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm.gone import x\n", None),
        ("if 'x':\n    from vllm.sub.untouched import gone\n", "from vllm.sub.untouched import gone"),
    ],
)
def test_what_the_overlay_imports(ask, source, missing):
    write(ask.repo / "overlay", OVERLAY | {"common/vllm/dsv4/main.py": source.encode()})
    status, out = ask(PRISTINE)
    assert status == bool(missing)
    assert ("changed   overlay: vllm/dsv4/main.py:" in out) == bool(missing)
    assert missing is None or f"- {missing}\n" in out


@pytest.mark.parametrize(
    ("module", "there"),
    [
        ("try:\n    name = 1\nexcept ImportError:\n    pass\n", True),
        ("def name(): ...\n", True),
        ("class name: ...\n", True),
        ("name: int = 1\n", True),
        ("from os import (\n    path,\n    sep as name,\n)\n", True),
        ("from .untouched import *\n", False),
        ("from vllm.sub.star import *\nfrom vllm.sub.untouched import *\n", True),
        ("def __getattr__(x):\n    return TABLE[x]\nTABLE = {'name': 1}\n", True),
        ("def __getattr__(x):\n    return TABLE[x]\nTABLE = {'names': 1}\n", False),
        ("# name = 1\nother(name=1)\ndef f():\n    name = 1\n", False),
        ("class A:\n    name = 1\n", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    name = 1\n", False),
    ],
)
def test_what_a_module_defines(ask, module, there):
    write(ask.repo / "overlay", OVERLAY | {"common/vllm/dsv4/main.py": b"from vllm.sub.asked import name\n"})
    files = {"vllm/sub/asked.py": module.encode(), "vllm/sub/star.py": b"name = 1\n"}
    assert ask(PRISTINE | files)[0] == (not there)


WITH, WITHOUT = b"old = 1\n", b"value = 1\n"


@pytest.mark.parametrize(
    ("indent", "of_base", "of_other", "status"),
    [
        ("def f():\n    ", WITHOUT, WITH, 0),
        ("def f():\n    ", WITHOUT, WITHOUT, 1),  # a name that none has
        ("def f():\n    ", WITH, WITH, 1),  # the base needs it
        ("def f():\n    ", None, WITH, 1),  # not to be had without a network
        ("def f():\n    ", WITHOUT, None, 1),
        ("", WITHOUT, WITH, 1),  # the file cannot be imported
    ],
)
def test_what_other_releases_import_is_not_missing(ask, monkeypatch, indent, of_base, of_other, status):
    """As in a check of the self-test that runs on some releases only."""
    make_repo(ask.repo, release="0.5.0", overlay={})
    source = f"{indent}from vllm.sub.untouched import old\n".encode()
    write(ask.repo / "overlay", OVERLAY | {"common/vllm/dsv4/main.py": source})
    sources = {RELEASE: of_base, "0.5.0": of_other}

    def archive(series, release, *, download):
        assert not download
        if sources[release] is None:
            raise porting.Refusal("download-failed", "It is not here.")
        return release

    monkeypatch.setattr(porting.fetch, "archive", archive)
    monkeypatch.setattr(porting, "pristine_from_archive", lambda name: {"vllm/sub/untouched.py": sources[name]})
    assert ask(PRISTINE)[0] == status
    if of_base == WITHOUT:  # asked of the base itself
        assert ask(PRISTINE, RELEASE)[0] == status


MIXIN = """
from vllm.dsv4.marks import overriding
class Mixin:
    def from_mixin(self): ...
"""
CLASSES = """
from vllm.dsv4.marks import overriding, require
from vllm.dsv4.mixin import Mixin
from vllm.sub import Layer

@overriding("new")
class Ours(Mixin, Layer[int]):
    field = 1
    def __init__(self):
        require(self.other, "assigned")
        for name in ("first", "second"):
            require(self, name)
    def called(self): ...
    def new(self): ...

def made(base):
    @overriding()
    class Later(base):
        def late(self): ...
    return Later

class Unmarked(Layer):
    def whatever(self): ...
"""
LAYERS = """
class Root:
    def from_mixin(self): ...
class Layer(Root):
    field: int
    def called(self): ...
"""
OTHERS = """
class Other:
    late = None
    def __init__(self):
        self.first = self.second = 1
        self.assigned = 1
"""


@pytest.mark.parametrize(
    ("renamed", "said"),
    [
        ("nothing", None),
        ("from_mixin", "Ours overrides from_mixin, which Layer does not have"),
        ("field", "Ours overrides field, which Layer does not have"),
        ("called", "Ours overrides called, which Layer does not have"),
        ("assigned", "assigned is replaced, which no class of vLLM has"),
        ("late", "late is replaced, which no class of vLLM has"),
        ("first", "first is replaced, which no class of vLLM has"),
    ],
)
def test_what_the_overlay_overrides(ask, renamed, said):
    marks = "def overriding(*a): ...\ndef require(a, b): ...\n"
    overlay = {"main.py": CLASSES, "mixin.py": MIXIN, "marks.py": marks}
    write(ask.repo / "overlay", {f"common/vllm/dsv4/{name}": text.encode() for name, text in overlay.items()})
    sources = {"__init__.py": "from .layers import Layer\n", "layers.py": LAYERS, "others.py": OTHERS}
    files = {f"vllm/sub/{name}": text.replace(renamed, "renamed").encode() for name, text in sources.items()}
    status, out = ask(PRISTINE | files)
    assert status == (said is not None), out
    assert ("applies   overlay: vllm/dsv4/main.py: what it overrides in vLLM" in out) == (said is None)
    assert said is None or f"- {said}\n" in out


def test_a_base_class_that_is_gone(ask):
    """The names that its class replaces say nothing then, be they in some other class of vLLM."""
    source = "from vllm.dsv4.marks import overriding\nfrom vllm.sub import Layer\n"
    source += "@overriding()\nclass Ours(Layer):\n    def called(self): ...\n"
    overlay = {"main.py": source, "marks.py": "def overriding(*a): ...\n"}
    write(ask.repo / "overlay", {f"common/vllm/dsv4/{name}": text.encode() for name, text in overlay.items()})
    files = {"vllm/sub/__init__.py": b"", "vllm/sub/others.py": LAYERS.encode()}
    status, out = ask(PRISTINE | files)
    assert status == 1 and "- Ours derives from Layer, which is gone\n" in out
    assert "what it overrides in vLLM" not in out


def test_what_is_relied_on_and_not_patched(ask):
    path = "vllm/sub/relied.py"
    status, out = ask(PRISTINE | {path: b"def renamed(): ...\n"})
    assert status == 1 and f"changed   relied on: {path}: other bytes; read them\n" in out
    (ask.repo / "../new" / path).unlink()
    status, out = ask({})
    assert status == 1 and f"changed   relied on: {path}: there is no such file\n" in out


def test_a_release_that_is_served_has_its_own_pins(ask):
    path, data = "vllm/sub/relied.py", b"value = 1\n"
    pins = ask.repo / f"{SERIES}/release.toml"
    with pins.open("a") as file:
        file.write(f'\n[also."0.9.9".files]\n"{path}" = "{sha256(data)}"\n')
    assert ask(PRISTINE | {path: data}, "0.9.9")[0] == 0
    assert ask(PRISTINE | {path: data}, "1.0.0")[0] == 1


def test_the_nearest_series_below_is_the_base(ask):
    make_repo(ask.repo, release="1.2.0")
    for release, base in (("0.5.0", "1.0.0"), ("0.9.9", "1.0.0"), ("1.1.0", "1.0.0"), ("2.0.0", "1.2.0")):
        assert f"vLLM {release} (" in (out := ask(PRISTINE, release)[1])
        assert f"the series full-width of {base}\n" in out
    assert "the series full-width of 1.0.0\n" in ask(PRISTINE, "2.0.0", "--base", "1.0.0")[1]


def test_what_cannot_be_told(ask, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        ask(PRISTINE, "latest")
    assert stopped.value.code == 2 and "latest is not a release" in capsys.readouterr().err
    assert ask(PRISTINE, "1.0.1", "--base", "0.1.0")[0] == 2

    def fail(release):
        raise porting.Refusal("download-failed", "No network.")

    assert porting.check_release_main(["1.0.0", "--pristine", "/nowhere"], ask.repo) == 2
    assert "error: not-vllm: /nowhere holds no vLLM; give " in capsys.readouterr().err
    monkeypatch.setattr(porting.fetch, "archive", lambda base, release: Path(__file__))
    for release in ("1.0.0", "v1.0.0"):  # the series' own, so its pin counts
        assert porting.check_release_main([release], ask.repo) == 2
        assert f"error: archive-mismatch: {__file__} is damaged; remove it" in capsys.readouterr().err
    monkeypatch.setattr(porting.fetch, "unpinned", fail)
    assert porting.check_release_main(["7.0.0"], ask.repo) == 2
    assert "error: download-failed: No network." in capsys.readouterr().err
