"""export-series.sh and check-series.sh."""

import subprocess

import pytest
from dsv4_overlay_tools import maintain
from dsv4_overlay_tools.series import Mismatch, parse_patch, pinned_files, split_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from smallworld import (
    EDITED,
    OVERLAY,
    PATCHES,
    PRISTINE,
    RELEASE,
    SERIES,
    copy,
    diff,
    header,
    make_repo,
    make_target,
    sha256,
    snapshot,
)


@pytest.fixture
def world(tmp_path):
    """A repository, the pristine tree and the edited one."""
    repo = make_repo(tmp_path / "own")
    pristine = make_target(tmp_path / "pristine", "source")
    tree = copy(pristine, tmp_path / "tree")
    for path, data in EDITED.items():
        (tree / path).write_bytes(data)
    return repo, pristine, tree


def run_export(world, capsys):
    repo, pristine, tree = world
    capsys.readouterr()
    status = maintain.export_main([RELEASE, str(tree), "--pristine", str(pristine)], repo)
    out, err = capsys.readouterr()
    return status, out, err


def run_check(world, capsys):
    repo, pristine, _ = world
    capsys.readouterr()
    status = maintain.check_main([RELEASE, "--pristine", str(pristine)], repo)
    out, err = capsys.readouterr()
    assert (status == 0) == (err == ""), err
    return status, out, err


# ---------------------------------------------------------------- export


def test_export_of_the_edited_tree_is_the_series(world, capsys):
    repo, _, _ = world
    before = snapshot(repo)
    status, out, err = run_export(world, capsys)
    assert (status, err) == (0, "") and "nothing to write" in out
    assert snapshot(repo) == before
    assert run_check(world, capsys)[0] == 0


def test_export_of_a_tree_without_the_patches(world, capsys):
    repo, pristine, tree = world
    for path in PATCHES["rest.patch"]:
        (tree / path).write_bytes(PRISTINE[path])
    before = snapshot(repo)
    status, _, err = run_export(world, capsys)
    assert status == 1 and err.startswith(f"error: nothing-applied: {tree} has nothing of rest.patch; apply the")
    assert snapshot(repo) == before


def test_export_writes_what_apply_then_gives(world, capsys, engine):
    repo, pristine, tree = world
    (tree / "vllm/odd.py").write_bytes(EDITED["vllm/odd.py"] + b"\x85\xff no newline")
    (tree / "vllm/crlf.py").write_bytes(PRISTINE["vllm/crlf.py"])  # no longer changed
    folder = repo / SERIES
    headers = {p.name: parse_patch(p.name, p.read_bytes()).header for p in folder.glob("*.patch")}
    (folder / "release.toml").write_text("# kept\n" + (folder / "release.toml").read_text())
    status, out, _ = run_export(world, capsys)
    assert status == 0
    assert sorted(out.split()) == sorted(
        ["wrote"] * 3 + [f"{SERIES}/{n}" for n in
                         ("config.patch", "rest.patch", "release.toml")])  # fmt: skip
    for name, text in headers.items():
        assert (folder / name).read_bytes().startswith(text)
    toml = (folder / "release.toml").read_text()
    assert toml.startswith("# kept\n") and "vllm/crlf.py" not in toml and "vllm/odd.py" in toml
    engine.root = repo
    engine.ok(pristine)
    for path in EDITED:
        assert (pristine / path).read_bytes() == (tree / path).read_bytes(), path


def test_export_pins_what_is_relied_on(world, capsys):
    """A path is listed by hand, with any text as its pin."""
    repo, pristine, tree = world
    pins = repo / f"{SERIES}/release.toml"
    good = pins.read_text()
    listed = "\n[relied_on]\n"
    listed += '"vllm/sub/untouched.py" = ""\n"vllm/sub/relied.py" = ""\n'
    pins.write_text(good.partition("\n[relied_on]\n")[0] + listed)
    assert run_export(world, capsys)[0] == 0
    path = "vllm/sub/untouched.py"
    assert pins.read_text() == good + f'"{path}" = "{sha256(PRISTINE[path])}"\n'
    assert run_check(world, capsys)[0] == 0
    edit(pins, path.encode(), b"vllm/sub/gone.py")
    status, _, err = run_export(world, capsys)
    assert status == 1 and f"vLLM {RELEASE} has no vllm/sub/gone.py; remove it from [relied_on]." in err
    edit(pins, b"vllm/sub/gone.py", b"vllm/config.py")
    status, _, err = run_export(world, capsys)
    assert status == 1 and "vllm/config.py is in [files], so it cannot be in [relied_on] too" in err


def test_what_was_relied_on_is_patched_from_now_on(world, capsys):
    edit(patch_of(world, "rest.patch"), b" vllm/odd.py\n", b" vllm/odd.py\n vllm/sub/relied.py\n")
    (world[2] / "vllm/sub/relied.py").write_bytes(b"def called():\n    return 'edited'\n")
    assert run_export(world, capsys)[0] == 0
    assert run_check(world, capsys)[0] == 0


def test_a_new_patch_starts_as_a_header(world, capsys):
    repo, _, tree = world
    new = b"value = 1\nother = 2\n"
    (tree / "vllm/sub/untouched.py").write_bytes(new)
    before = snapshot(repo)
    status, _, err = run_export(world, capsys)
    assert status == 1 and snapshot(repo) == before
    assert "unowned-change" in err and "vllm/sub/untouched.py" in err and "header" in err
    folder = repo / SERIES
    (folder / "new.patch").write_bytes(header(["vllm/sub/untouched.py"]))
    (folder / "series").write_text("config.patch\nnew.patch\nrest.patch\n")
    assert run_export(world, capsys)[0] == 0
    patch = parse_patch("new.patch", (folder / "new.patch").read_bytes())
    assert patch.diffs[0].apply(PRISTINE["vllm/sub/untouched.py"]) == new
    assert run_check(world, capsys)[0] == 0


def test_export_says_what_it_leaves_out(world, capsys):
    repo, _, tree = world
    (tree / "vllm/brand_new.py").write_bytes(b"")
    (tree / "vllm/dsv4").mkdir()
    (tree / "vllm/dsv4/main.py").write_bytes(b"edited here\n")
    (tree / "vllm/dsv4/__init__.py").write_bytes(OVERLAY["common/vllm/dsv4/__init__.py"])
    (tree / "vllm/sub/untouched.py").unlink()
    (tree / "vllm/__pycache__").mkdir()
    (tree / "vllm/__pycache__/config.cpython-311.pyc").write_bytes(b"")
    (tree / "vllm/_C.abi3.so").write_bytes(b"")
    status, _, err = run_export(world, capsys)
    assert status == 0
    notes = err.strip().splitlines()
    assert len(notes) == 3
    assert any("vllm/brand_new.py is new" in note for note in notes)
    assert any("vllm/dsv4/main.py differs from" in note for note in notes)
    assert any("vllm/sub/untouched.py is missing" in note for note in notes)


def test_export_refuses_another_release_and_deleted_files(world, capsys):
    repo, pristine, tree = world
    (tree / "vllm/crlf.py").unlink()
    status, _, err = run_export(world, capsys)
    assert status == 1 and "vllm/crlf.py" in err
    (tree / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.9.9\n")
    status, _, err = run_export(world, capsys)
    assert status == 1 and "wrong-release" in err


def test_export_from_an_applied_git_checkout(world, capsys, engine, tmp_path):
    """The usual way: apply, edit, export. The tool's own folder is no change."""
    repo, pristine, _ = world
    tree = make_target(tmp_path / "git", "git")
    engine.root = repo
    engine.ok(tree)
    config = tree / "vllm/config.py"
    config.write_bytes(config.read_bytes().replace(b"line10 = 10\n", b"line10 = 11\n"))
    status, out, err = run_export((repo, pristine, tree), capsys)
    assert (status, err) == (0, "") and "config.patch" in out
    assert b"+line10 = 11\n" in (repo / f"{SERIES}/config.patch").read_bytes()


@pytest.mark.parametrize("name", ["journal.json", "staged"])
def test_export_of_a_tree_between_two_states(world, capsys, engine, name):
    repo, _, tree = world
    engine.root = repo
    engine.ok(copy(world[1], tree / "../applied"))
    state = (tree / "../applied/vllm/_dsv4_overlay").resolve()
    (state / "record.json").rename(state / "journal.json")
    if name == "staged":  # a run that died as it began
        (state / "journal.json").unlink()
        (state / name).mkdir()
    before = snapshot(repo)
    status, _, err = run_export((repo, world[1], state.parents[1]), capsys)
    assert status == 1 and "error: half-applied: " in err and snapshot(repo) == before


SAMPLES = [b"a\n", b"b\n", b"\n", b"c\r\n", b"\x0c\x85\xff\n", b"--- a\n", b"+++ b\n",
           b"@@ -1 +1 @@\n", b"\\ No\n"]  # fmt: skip
LINES = st.lists(st.sampled_from(SAMPLES), max_size=30)
TEXT = st.builds(lambda lines, tail: b"".join(lines) + tail, LINES, st.sampled_from([b"", b"x"]))


@settings(max_examples=300, deadline=None)
@given(TEXT, TEXT)
def test_diff_and_apply_are_inverse(before, after):
    data = header(["vllm/x.py"]) + b"\n" + maintain.unified("vllm/x.py", before, after)
    patch = parse_patch("x.patch", data)
    if before == after:
        assert patch.diffs == []
    else:
        assert patch.diffs[0].apply(before) == after
        assert maintain.export_patch(patch, {"vllm/x.py": before}, {"vllm/x.py": after}) == data


@settings(max_examples=40, deadline=None)
@given(before=TEXT, after=TEXT)
def test_git_reads_the_diff_the_same_way(tmp_path_factory, before, after):
    folder = tmp_path_factory.mktemp("git")
    (folder / "vllm").mkdir()
    (folder / "vllm/x.py").write_bytes(before)
    diff = maintain.unified("vllm/x.py", before, after)
    # Two edges git will not take without more words: files that become empty, or were.
    if not (before and after and diff):
        return
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run(
        ["git", "-C", str(folder), "apply", "--unidiff-zero", "--whitespace=nowarn", "-"],
        input=diff, check=True, capture_output=True,
    )  # fmt: skip
    assert (folder / "vllm/x.py").read_bytes() == after


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=8), max_size=8))
def test_lines_end_at_newline_only(parts):
    data = b"\n".join(parts)
    lines = split_lines(data)
    assert "".join(lines).encode("latin-1") == data
    assert len(lines) == data.count(b"\n") + (not data.endswith(b"\n") and data != b"")


def test_a_line_without_its_end_can_only_be_the_last():
    body = (
        b"--- a/vllm/x.py\n+++ b/vllm/x.py\n@@ -1 +1,2 @@\n-a\n\\ No newline at end of file\n"
        b"+b\n\\ No newline at end of file\n+c\n"
    )
    patch = parse_patch("x.patch", header(["vllm/x.py"]) + b"\n" + body)
    with pytest.raises(Mismatch) as caught:
        patch.diffs[0].apply(b"a")
    assert caught.value.line == 1


def test_hunks_are_small():
    """One changed line is one added and one removed line, two lines of context."""
    before = b"".join(b"line%d\n" % number for number in range(500))
    out = maintain.unified("vllm/x.py", before, before.replace(b"line20\n", b"other\n")).split(b"\n")[2:-1]
    assert out == [b"@@ -19,5 +19,5 @@", b" line18", b" line19", b"-line20", b"+other", b" line21", b" line22"]


# ---------------------------------------------------------------- check


def patch_of(world, name="config.patch"):
    return world[0] / SERIES / name


def edit(path, old, new):
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def bigger(world):
    config = EDITED["vllm/config.py"] + b"".join(b"more%d = 1\n" % i for i in range(200))
    (world[2] / "vllm/config.py").write_bytes(config)


FAULTS = {
    "unlisted": (lambda w: patch_of(w, "stray.patch").write_bytes(b""), "stray.patch is not in"),
    "twice": (lambda w: patch_of(w, "series").write_text("config.patch\nrest.patch\nrest.patch\n"),
              "rest.patch is twice"),
    "missing": (lambda w: patch_of(w).unlink(), "config.patch: is in the series but cannot"),
    "field": (lambda w: edit(patch_of(w), b"Drop-When: never\n", b""), "Drop-When is missing"),
    "field twice": (lambda w: edit(patch_of(w), b"Origin: own\n", b"Origin: own\nOrigin: other\n"),
                    "the field Origin appears twice"),
    "empty field": (lambda w: edit(patch_of(w), b"Hooks: nothing", b"Hooks:"), "Hooks is missing"),
    "date": (lambda w: edit(patch_of(w), b"2026-01-31", b"January"), "Last-Update is not a date"),
    "no such date": (lambda w: edit(patch_of(w), b"2026-01-31", b"2026-13-45"), "Last-Update is not a date"),
    "other date": (lambda w: edit(patch_of(w), b"2026-01-31", b"20260131"), "Last-Update is not a date"),
    "files field": (lambda w: edit(patch_of(w), b" vllm/crlf.py\n", b""), "disagree about"),
    "more in the files field": (lambda w: edit(patch_of(w), b"Files:\n", b"Files:\n vllm/sub/relied.py\n"),
                                "disagree about vllm/sub/relied.py"),
    "context": (lambda w: edit(patch_of(w), b" line1 = 1\n", b" line1 = 0\n"), "does not fit"),
    "other form": (lambda w: edit(patch_of(w), b"@@ -2,5 +2,5 @@", b"@@ -2,5 +2,5 @@ def x():"),
                   "not what export-series.sh writes"),
    "trailing text": (lambda w: patch_of(w).write_bytes(patch_of(w).read_bytes() + b"-- \n2.39\n"),
                      "config.patch"),
    "hash": (lambda w: edit(patch_of(w, "release.toml"), b'crlf.py" = "', b'crlf.py" = "0'),
             "another sha256 for vllm/crlf.py"),
    "extra hash": (lambda w: edit(patch_of(w, "release.toml"), b"[files]\n", b"[files]\n'vllm/x.py' = '0'\n"),
                   "a pin of a file is not what export-series.sh writes"),
    "relied on": (lambda w: edit(patch_of(w, "release.toml"), b'relied.py" = "', b'relied.py" = "0'),
                  "[relied_on] has another sha256 for vllm/sub/relied.py"),
    "relied on, gone": (lambda w: (w[1] / "vllm/sub/relied.py").unlink(), "has no vllm/sub/relied.py"),
    "pristine": (lambda w: (w[1] / "vllm/config.py").write_bytes(b"other\n"), "config.py"),
    "unused": (lambda w: (w[0] / "overlay/common/vllm/dsv4/unused.py").write_bytes(b""),
               "overlay/common/vllm/dsv4/unused.py is used by nothing"),
    "unused data": (lambda w: (w[0] / "overlay/common/vllm/dsv4/x.json").write_bytes(b""),
                    "x.json is used by nothing"),
    "broken": (lambda w: (w[0] / "overlay/common/vllm/dsv4/main.py").write_bytes(b"def f(:\n"),
               "vllm/dsv4/main.py, line 1: invalid Python: invalid syntax"),
    "encoding": (lambda w: patch_of(w, "series").write_bytes(b"\xff.patch\n"), "series: is not UTF-8"),
    "sign": (lambda w: edit(patch_of(w), b"Drop-When: never\n", b"Drop-When: never\nUpstream-Sign: a(\n"),
             "Upstream-Sign is not a regular expression"),
    "no longer named": (lambda w: (w[0] / "overlay/common/vllm/dsv4/main.py").write_bytes(b""),
                        "deep/inner.py is used by nothing"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds(world, capsys, fault):
    assert run_check(world, capsys)[0] == 0
    damage, said = FAULTS[fault]
    damage(world)
    status, _, err = run_check(world, capsys)
    assert status == 1 and said in err, err


def test_check_finds_a_patch_without_effect(world, capsys):
    folder = world[0] / SERIES
    (folder / "none.patch").write_bytes(header([]))
    (folder / "same.patch").write_bytes(
        header(["vllm/sub/untouched.py"])
        + b"\n--- a/vllm/sub/untouched.py\n+++ b/vllm/sub/untouched.py\n@@ -1 +1 @@\n"
        + b"-value = 'as released'\n+value = 'as released'\n"
    )
    (folder / "series").write_text("config.patch\nrest.patch\nnone.patch\nsame.patch\n")
    _, _, err = run_check(world, capsys)
    assert "none.patch changes nothing" in err and "same.patch has no effect" in err


def test_check_counts_lines_and_has_a_limit(world, capsys):
    _, out, _ = run_check(world, capsys)
    assert f"{RELEASE}: config.patch: 4 lines added" in out
    assert f"{RELEASE}: rest.patch: 3 lines added" in out
    assert f"{RELEASE}: 7 of 200 lines" in out
    bigger(world)
    assert run_export(world, capsys)[0] == 0
    status, out, err = run_check(world, capsys)
    assert status == 1 and "adds 207 lines" in err and "207 of 200" in out


@pytest.mark.parametrize("more", [96, 97])
def test_the_limit_is_that_of_all_patches_together(world, capsys, more):
    for path, count in (("vllm/config.py", 97), ("vllm/odd.py", more)):
        (world[2] / path).write_bytes(EDITED[path] + b"more = 1\n" * count)
    assert run_export(world, capsys)[0] == 0
    assert run_check(world, capsys)[0] == int(more == 97)


@pytest.mark.parametrize(
    "line",
    [
        "import vllm.extra.one",
        "from vllm.extra import one",
        "from vllm.extra.one import thing",
        "from ..extra import one",
        "from ..extra.one import thing",
        "def f():\n    if f:\n        from vllm.extra.one import x",
        "import importlib\nm = importlib.import_module('vllm.extra.one')",
        "PATHS = {'x': 'vllm.extra.one.Class'}",
    ],
)
def test_the_ways_a_module_is_used(world, capsys, line):
    repo = world[0]
    folder = repo / "overlay/common/vllm/extra"
    folder.mkdir()
    (folder / "__init__.py").write_bytes(b"")
    (folder / "one.py").write_bytes(b"")
    _, _, err = run_check(world, capsys)
    assert err.count("is used by nothing") == 2
    with (repo / "overlay/common/vllm/dsv4/main.py").open("a") as file:
        file.write(line + "\n")
    assert run_check(world, capsys)[2] == ""
    # What is only talked about is not used.
    uses = "from .deep.inner import go\nfrom ..sub import glue\nT = 'table.json'\n"
    text = f'"""See vllm.extra.one."""\n# {line!r}\n{uses}'
    (repo / "overlay/common/vllm/dsv4/main.py").write_text(text)
    assert run_check(world, capsys)[2].count("is used by nothing") == 2


def test_only_added_lines_of_vllm_are_roots(world, capsys):
    """vLLM itself naming a module of the overlay is no hook of ours."""
    repo, pristine, tree = world
    for place, text in ((pristine, PRISTINE), (tree, EDITED)):
        data = text["vllm/config.py"].replace(b"line20 = 20\n", b"import vllm.extra\n")
        (place / "vllm/config.py").write_bytes(data)
    (repo / "overlay/common/vllm/extra.py").write_bytes(b"")
    assert run_export(world, capsys)[0] == 0
    assert "extra.py is used by nothing" in run_check(world, capsys)[2]


@pytest.mark.parametrize(
    ("source", "fine"),
    [
        ("import torch, triton.language as tl, math\nfrom __future__ import annotations\n", True),
        ("from . import other\nfrom .other import x\n", True),
        ("import vllm\n", False),
        ("def f():\n    from vllm.logger import init_logger\n", False),
        ("from .. import envs\n", False),
        ("from ...logger import init_logger\n", False),
        ("import numpy\n", False),
        ("import flashinfer\n", False),
        ("import importlib\nimportlib.import_module('vllm.logger')\n", False),
    ],
)
def test_the_kernels_stand_alone(world, capsys, source, fine):
    repo = world[0]
    folder = repo / "overlay/common/vllm/third_party/mla_kernels"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from . import ops\n")
    (folder / "ops.py").write_text(source)
    (folder / "other.py").write_text("x = 1\n")
    with (repo / "overlay/common/vllm/dsv4/main.py").open("a") as file:
        file.write("import vllm.third_party.mla_kernels.other\n")
    err = run_check(world, capsys)[2]
    assert ("the kernels may use" in err) == (not fine), err


def test_a_kernel_that_is_no_python_and_that_nothing_uses(world, capsys):
    place = world[0] / "overlay/common/vllm/third_party/mla_kernels/draft.py"
    place.parent.mkdir(parents=True)
    place.write_text("def half(:\n")
    assert "mla_kernels/draft.py is invalid Python: " in run_check(world, capsys)[2]


@pytest.fixture
def served(world, monkeypatch):
    """The source of 0.9.9, which the series claims to serve, without --pristine."""
    archives = {RELEASE: dict(PRISTINE), "0.9.9": dict(PRISTINE)}
    monkeypatch.setattr(maintain.fetch, "archive", lambda series, release: release)
    monkeypatch.setattr(maintain, "pristine_from_archive", archives.get)
    return archives["0.9.9"]


def export_and_check(world, capsys):
    assert maintain.export_main([RELEASE, str(world[2])], world[0]) == 0
    capsys.readouterr()
    status = maintain.check_main([], world[0])
    return status, capsys.readouterr().err


def test_a_served_release_with_the_same_files(world, served, capsys):
    assert maintain.check_main([], world[0]) == 0
    served["vllm/sub/untouched.py"] = b"differs, but is not touched\n"
    before = snapshot(world[0])
    assert export_and_check(world, capsys) == (0, "")
    assert snapshot(world[0]) == before


def test_a_served_release_that_has_a_file_relied_on_otherwise(world, served, capsys, engine, tmp_path):
    path = "vllm/sub/relied.py"
    served[path] = b"def called(): ...\n"
    assert maintain.check_main([], world[0]) == 1
    assert export_and_check(world, capsys) == (0, "")
    text = (world[0] / f"{SERIES}/release.toml").read_text()
    assert f'[also."0.9.9".files]\n"{path}" = "{sha256(served[path])}"\n\n[files]\n' in text
    engine.root = world[0]
    target = make_target(tmp_path / "served", "source", files=served, release="0.9.9")
    engine.ok(target)
    engine.ok(make_target(tmp_path / "own", "source"))
    (target / path).write_bytes(PRISTINE[path])
    assert engine.refused("source-changed", target)["path"] == path
    del served[path]
    status, err = export_and_check(world, capsys)
    assert status == 1 and f"for vLLM 0.9.9, {path} in [relied_on]: there is no such file" in err


def test_a_served_release_whose_lines_have_moved(world, served, capsys, engine, tmp_path):
    """Pinned by export, put where its lines are by apply; an edited file is refused as ever."""
    shift = b"# new\n"
    served["vllm/config.py"] = shift * 3 + PRISTINE["vllm/config.py"]
    assert maintain.check_main([], world[0]) == 1
    assert "release.toml: a pin of a file is not what export-series.sh writes" in capsys.readouterr().err
    assert export_and_check(world, capsys) == (0, "")
    engine.root = world[0]
    target = make_target(tmp_path / "served", "source", files=served, release="0.9.9")
    engine.ok(target)
    assert (target / "vllm/config.py").read_bytes() == shift * 3 + EDITED["vllm/config.py"]
    engine.ok(target, "--revert")
    assert (target / "vllm/config.py").read_bytes() == served["vllm/config.py"]
    (target / "vllm/config.py").write_bytes(shift + served["vllm/config.py"])
    engine.refused("source-changed", target)


def test_a_wheel_that_was_built_again(world, served, capsys, engine, tmp_path):
    """It has the release's number and other bytes; the archive and both wheels are served, nothing else."""
    changed = PRISTINE | {"vllm/config.py": b"# new\n" + PRISTINE["vllm/config.py"]}
    folder = world[0] / SERIES
    path = "vllm/config.py"
    (folder / "wheel-1.diff").write_bytes(b"Description: x\n\n" + diff(path, PRISTINE[path], changed[path]))
    with (folder / "release.toml").open("a") as pins:
        pins.write(f'\n[also."{RELEASE}-1"]\nchanges = "wheel-1.diff"\n')
    assert maintain.check_main([], world[0]) == 1
    assert "release.toml: a pin of a file is not what export-series.sh writes" in capsys.readouterr().err
    assert export_and_check(world, capsys) == (0, "")
    pinned = pinned_files(world[0])  # of which check-series.sh --wheels and the plugin take any
    assert pinned.keys() == {"0.9.9", RELEASE}
    assert pinned[RELEASE][path] == {sha256(PRISTINE[path]), sha256(changed[path])}

    engine.root = world[0]
    again = make_target(tmp_path / "again", "installed", files=changed)
    engine.ok(again)
    assert (again / path).read_bytes() == b"# new\n" + EDITED[path]
    assert engine.ok(again)["notes"] == ["already applied; nothing to do"]
    (again / path).write_bytes(b"# new\n" + EDITED[path] + b"more = 1\n")
    assert engine.refused("edited-since-apply", again)["line"] == EDITED[path].count(b"\n") + 2
    (again / path).write_bytes(b"# new\n" + EDITED[path])
    engine.ok(again, "--revert")
    assert (again / path).read_bytes() == changed[path]
    engine.ok(make_target(tmp_path / "first", "installed"))
    (again / path).write_bytes(b"# other\n" + PRISTINE[path])
    engine.refused("source-changed", again)

    (folder / "wheel-1.diff").write_bytes(b"Description: x\n\n" + diff(path, changed[path], PRISTINE[path]))
    assert maintain.check_main([], world[0]) == 1
    assert "wheel-1.diff does not fit the pinned files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "data", "words"),
    [
        ("vllm/crlf.py", b"differs\n", "no place, or several"),
        ("vllm/config.py", PRISTINE["vllm/config.py"] * 2, "no place, or several"),
        ("vllm/config.py", b"if 1:\n    x\n  y\n" + PRISTINE["vllm/config.py"], "invalid Python"),
        ("vllm/config.py", None, "there is no such file"),
    ],
)
def test_a_served_release_that_it_does_not_fit(world, served, capsys, path, data, words):
    if data is None:
        del served[path]
    else:
        served[path] = data
    status, err = export_and_check(world, capsys)
    assert status == 1 and f"for vLLM 0.9.9, {path}" in err and words in err


def test_a_patch_that_breaks_the_syntax(world, capsys):
    (world[2] / "vllm/config.py").write_bytes(EDITED["vllm/config.py"] + b"  def(\n")
    assert run_export(world, capsys)[0] == 0
    assert "config.patch makes vllm/config.py invalid Python" in run_check(world, capsys)[2]


def test_a_pristine_folder_of_another_release(world, capsys, tmp_path):
    other = make_target(tmp_path / "other", "source", release="1.0.1")
    said = f"wrong-release: {other} holds vLLM 1.0.1, not {RELEASE}.\n"
    for main, argv in ((maintain.check_main, [RELEASE]), (maintain.export_main, [RELEASE, str(world[2])])):
        assert main([*argv, "--pristine", str(other)], world[0]) == 1
        assert capsys.readouterr().err.endswith(said)


def test_usage(world, capsys):
    for main, argv in [(maintain.check_main, ["--pristine", "x"]), (maintain.export_main, [])]:
        with pytest.raises(SystemExit) as stopped:
            main(argv, world[0])
        assert stopped.value.code == 2
