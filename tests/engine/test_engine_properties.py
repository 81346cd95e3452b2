"""Whatever the files are: apply writes the edit, revert is the identity, an edit is refused."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from smallworld import KINDS, Engine, make_repo, make_target, snapshot

PATHS = ["vllm/a.py", "vllm/b.py", "vllm/deep/c.py", "vllm/deep/er/d.cu", "vllm/deep/e.json"]
NEW = ["vllm/new.cu", "vllm/deep/new.json", "vllm/own/x.json", "vllm/own/two/y.txt"]
# Leads to all that is new, whatever it is.
SEAM, OURS = "vllm/seam.py", {"vllm/ours.py": f"NAMES = {[Path(path).name for path in NEW]}\n".encode()}
LINE = st.one_of(
    st.sampled_from([b"", b" ", b"x = 1", b"--- a/x", b"+++ b/x", b"@@ -1 +1 @@", b"\\ No"]),
    st.binary(max_size=6).map(lambda data: data.replace(b"\n", b"")),
)
END = st.sampled_from([b"\n", b"\r\n"])
LINES = st.lists(st.builds(bytes.__add__, LINE, END), max_size=12)
CONTENT = st.builds(lambda lines, tail: b"".join(lines) + tail, LINES, st.sampled_from([b"", b"z"]))
MODE = st.sampled_from([0o644, 0o755, 0o600, 0o664, 0o444, 0o640])


@st.composite
def worlds(draw):
    """A made-up release, an edit of some of its files, and an overlay."""
    pristine = {path: draw(CONTENT) for path in PATHS}
    edited = {}
    for path in draw(st.sets(st.sampled_from(PATHS), min_size=1)):
        after = draw(CONTENT)
        if after != pristine[path]:
            edited[path] = after
    assume(edited)
    names = sorted(edited)
    cut = draw(st.integers(0, len(names)))
    return {
        "pristine": {**pristine, "vllm/__init__.py": b"", SEAM: b""},
        "edited": {**edited, SEAM: b"import vllm.ours\n"},
        "patches": {part[0].replace("/", "-"): part for part in (names[:cut], names[cut:], [SEAM]) if part},
        "overlay": OURS | {path: draw(CONTENT) for path in draw(st.sets(st.sampled_from(NEW)))},
        "modes": {path: draw(MODE) for path in PATHS},
        "kind": draw(st.sampled_from(KINDS)),
    }


def build(world, folder):
    repo = make_repo(
        folder / "repo",
        patches=world["patches"],
        pristine=world["pristine"],
        edited=world["edited"],
        overlay={"common/" + path: data for path, data in world["overlay"].items()},
    )
    target = make_target(
        folder / "target", world["kind"], files=world["pristine"], modes=world["modes"]
    )
    return Engine(repo), target


@pytest.fixture(scope="module", autouse=True)
def no_disk_in_module():
    """The fixture of that purpose ends with each test; Hypothesis looks at it, so not used here."""
    real, os.fsync = os.fsync, lambda fd: None
    yield
    os.fsync = real


SETTINGS = settings(
    max_examples=40, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@SETTINGS
@given(worlds(), st.data())
def test_apply_and_revert(world, data):
    with tempfile.TemporaryDirectory() as name:
        engine, target = build(world, Path(name))
        inside = data.draw(st.sampled_from(["deep", "a.py", "nowhere", "../PKG-INFO", "/etc"]))
        (target / "vllm/link").symlink_to(inside)  # not touched, so none of our business
        (target / "vllm/empty").mkdir()
        (target / "vllm/own_notes.py").write_bytes(data.draw(CONTENT))
        before = snapshot(target)
        engine.ok(target)
        wanted = {**world["pristine"], **world["edited"], **world["overlay"]}
        for path, content in wanted.items():
            assert (target / path).read_bytes() == content, path
        for path in PATHS:
            assert (target / path).stat().st_mode & 0o7777 == world["modes"][path], path
        assert {p: w for p, w in snapshot(target).items() if p in before and p not in wanted
                and not p.endswith("/RECORD")} == {
            p: w for p, w in before.items() if p not in wanted and not p.endswith("/RECORD")
        }  # fmt: skip
        # The user goes on working in files that the overlay does not touch.
        free = sorted(set(PATHS) - world["edited"].keys())
        if free and data.draw(st.booleans()):
            path = data.draw(st.sampled_from(free))
            (target / path).write_bytes(data.draw(CONTENT))
            before[path] = (*before[path][:2], (target / path).read_bytes())
        engine.ok(target)
        engine.ok(target, "--revert")
        assert snapshot(target) == before


def change(data, content):
    """Any other content: one byte inserted, deleted or replaced."""
    at = data.draw(st.integers(0, len(content)))
    byte = bytes([data.draw(st.integers(0, 255))])
    kind = data.draw(st.sampled_from(["insert", "delete", "replace"]))
    if kind == "insert" or at == len(content):
        return content[:at] + byte + content[at:]
    return content[:at] + (b"" if kind == "delete" else byte) + content[at + 1 :]


@SETTINGS
@given(worlds(), st.data())
def test_any_edit_of_a_touched_file_is_refused(world, data):
    with tempfile.TemporaryDirectory() as name:
        engine, target = build(world, Path(name))
        path = data.draw(st.sampled_from(sorted(world["edited"])))
        pristine = (target / path).read_bytes()
        mine = change(data, pristine)
        assume(mine != pristine)
        (target / path).write_bytes(mine)
        before = snapshot(target)
        for mode in ([], ["--check"], ["--status"]):
            assert engine.refused("source-changed", target, *mode)["path"] == path
        assert snapshot(target) == before
        (target / path).write_bytes(pristine)
        clean = snapshot(target)

        engine.ok(target)
        path = data.draw(st.sampled_from(sorted({*world["edited"], *world["overlay"]})))
        applied = (target / path).read_bytes()
        mine = change(data, applied)
        assume(mine != applied)
        (target / path).write_bytes(mine)
        before = snapshot(target)
        # The first line that differs, found in another way than the tool does.
        same = len(os.path.commonprefix([mine, applied]))
        old, new = mine.split(b"\n"), applied.split(b"\n")
        line = mine[:same].count(b"\n") + 1
        assert old[: line - 1] == new[: line - 1]
        for mode in ([], ["--revert"]):
            error = engine.refused("edited-since-apply", target, *mode)
            assert (error["path"], error["line"]) == (path, line)
        assert snapshot(target) == before
        (target / path).write_bytes(applied)
        engine.ok(target, "--revert")
        assert snapshot(target) == clean


@SETTINGS
@given(worlds(), st.data())
def test_links_on_the_way_to_a_touched_file(world, data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine, target = build(world, folder)
        path = Path(data.draw(st.sampled_from(sorted(world["edited"]))))
        part = data.draw(st.sampled_from([path, *[p for p in path.parents if len(p.parts) > 1]]))
        inside = data.draw(st.booleans())
        place = target / "vllm/moved" if inside else folder / "moved"
        (target / part).rename(place)
        (target / part).symlink_to(place if data.draw(st.booleans()) else os.path.relpath(
            place, (target / part).parent))  # fmt: skip
        before, outside = snapshot(target), snapshot(folder)
        if inside:
            engine.ok(target)
            assert (target / path).read_bytes() == world["edited"][path.as_posix()]
            assert (target / part).is_symlink()
            engine.ok(target, "--revert")
            assert snapshot(target) == before
        else:
            error = engine.refused("symlink-escape", target)
            assert Path(error["path"]).is_relative_to(part)
            assert snapshot(folder) == outside
