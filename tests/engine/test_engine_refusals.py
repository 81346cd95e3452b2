"""Every refusal: its code, the place it names, and that nothing changed."""

import errno
import json
import os
import signal

import pytest
from dsv4_overlay_tools import target as detection
from dsv4_overlay_tools import transaction
from dsv4_overlay_tools.record import seal
from smallworld import (
    EDITED,
    KINDS,
    OVERLAY,
    PRISTINE,
    RELEASE,
    SERIES,
    Engine,
    diff,
    git,
    header,
    make_repo,
    make_target,
    snapshot,
)


def refused(engine, code, target, *argv):
    before = snapshot(target)
    error = engine.refused(code, target, *argv)
    assert snapshot(target) == before
    assert error["message"].endswith(".") and "\n" not in error["message"]
    return error


# ---------------------------------------------------------------- the target


def test_not_vllm(engine, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "; give the folder that has it" in refused(engine, "not-vllm", tmp_path / "empty")["message"]
    bare = make_target(tmp_path / "bare", "source")
    (bare / "PKG-INFO").unlink()
    assert "release is unknown" in refused(engine, "not-vllm", bare)["message"]
    (bare / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1.0.0\n")
    assert "its metadata names no version" in refused(engine, "wrong-release", bare)["message"]
    inside = make_target(tmp_path / "site", "installed") / "vllm"
    assert str(inside.parent) in refused(engine, "not-vllm", inside)["message"]


def test_two_installations_in_one_folder(engine, tmp_path):
    target = make_target(tmp_path / "t", "installed")
    make_target(target, "installed", release="0.9.9")
    assert "vllm-0.9.9.dist-info" in refused(engine, "not-vllm", target)["message"]


def test_wrong_release(engine, tmp_path, kind):
    target = make_target(tmp_path / "t", kind, release="2.0.0")
    message = refused(engine, "wrong-release", target)["message"]
    assert "2.0.0" in message and RELEASE in message
    assert engine(target, "--status")[1]["state"] == "unknown"


def test_a_release_candidate_is_another_release(engine, tmp_path, kind):
    refused(engine, "wrong-release", make_target(tmp_path / "t", kind, release="1.0.0rc1"))


def test_git_without_any_release(engine, tmp_path):
    target = make_target(tmp_path / "t", "git")
    git(target, "tag", "-d", "v1.0.0")
    assert "tag" in refused(engine, "wrong-release", target)["message"]


def test_git_index_at_another_release(engine, tmp_path):
    target = make_target(tmp_path / "t", "git", release="0.5.0", files={
        **PRISTINE, "vllm/config.py": b"old = 1\n"})  # fmt: skip
    (target / "vllm/config.py").write_bytes(PRISTINE["vllm/config.py"])
    git(target, "commit", "-q", "-a", "-m", "next")
    git(target, "tag", "v1.0.0")
    git(target, "read-tree", "v0.5.0")
    error = refused(engine, "wrong-release", target)
    assert "v0.5.0" in error["message"] and error["path"] == "vllm/config.py"
    git(target, "read-tree", "v1.0.0")
    git(target, "checkout", "-q", "v0.5.0", "--", "vllm")  # index and work tree
    refused(engine, "wrong-release", target, "--check")
    git(target, "checkout", "-q", "-f", "v0.5.0")  # HEAD as well
    assert "0.5.0" in refused(engine, "wrong-release", target)["message"]


def test_a_damaged_git_index(engine, tmp_path):
    target = make_target(tmp_path / "t", "git")
    (target / ".git/index").write_bytes(b"rubbish")
    assert "git cannot read the index" in refused(engine, "not-vllm", target, "--check")["message"]


@pytest.mark.parametrize("mode", [[], ["--check"], ["--status"]])
def test_source_changed_names_file_and_line(engine, target, mode):
    text = PRISTINE["vllm/config.py"]
    for edit, line in [
        (text.replace(b"line4 = 4", b"line4 = 5"), 5),
        (text.replace(b"line30 = 30\n", b""), 31),
        (b"extra = 1\n" + text, 2),  # nothing is ever applied at an offset
        (text.replace(b"line20 = 20", b"line20 = 21"), None),  # no hunk is near
        (text[: text.index(b"line20")], 21),  # cut off: it differs where it ends
    ]:
        (target / "vllm/config.py").write_bytes(edit)
        error = refused(engine, "source-changed", target, *mode)
        assert (error["path"], error["line"]) == ("vllm/config.py", line)
        assert "vllm/config.py" in error["message"]
    (target / "vllm/config.py").unlink()
    assert refused(engine, "source-changed", target)["path"] == "vllm/config.py"
    assert engine(target, "--status")[1]["state"] == "drifted"


@pytest.mark.parametrize("applied", [False, True])
def test_a_file_relied_on_and_not_patched(engine, target, applied):
    path = "vllm/sub/relied.py"
    before = snapshot(target)
    if applied:
        engine.ok(target)
    for damage in (lambda: (target / path).write_bytes(b"def renamed(): ...\n"), (target / path).unlink):
        damage()
        for mode in ([], ["--check"], ["--status"]):
            error = refused(engine, "source-changed", target, *mode)
            assert error["path"] == path
            assert f"{path}, on which the overlay relies, is not the one of vLLM {RELEASE}" in error["message"]
        assert engine(target, "--status")[1]["state"] == "drifted"
    (target / path).write_bytes(b"mine\n")
    engine.ok(target, "--revert")  # takes off what was applied, whatever else is there
    (target / path).write_bytes(PRISTINE[path])
    assert snapshot(target) == before


def test_a_file_relied_on_that_cannot_be_read(engine, target, monkeypatch):
    """Which does not mean that it was changed."""
    read = detection.read

    def readable(path):
        if path.name == "relied.py":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path)

    monkeypatch.setattr(detection, "read", readable)
    assert engine.refused("not-readable", target)["message"] == f"{target}/vllm/sub/relied.py: Permission denied."


def test_what_is_said_of_changed_sources_is_so(engine, tmp_path):
    """Only a sha256 is known of the released file, so not where another one begins to differ from it."""
    target = make_target(tmp_path / "t", "source")
    text = PRISTINE["vllm/config.py"]
    (target / "vllm/config.py").write_bytes(b"extra = 1\n" + text)
    message = refused(engine, "source-changed", target)["message"]
    assert "line 2 is not what the patch expects there" in message and "first" not in message
    (target / "vllm/config.py").write_bytes(text.replace(b"line20 = 20", b"line20 = 21"))
    assert "outside the lines the patch touches" in refused(engine, "source-changed", target)["message"]


@pytest.fixture
def no_waiting():
    """A call that never returns is an error within seconds."""
    def late(number, frame):
        raise AssertionError("it waits")  # not TimeoutError, which is an OSError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("path", ["vllm/config.py", "vllm/_version.py", "vllm/sub/glue.py", "vllm/sub/relied.py"])
def test_a_fifo_is_no_file_and_is_not_waited_for(engine, target, no_waiting, path):
    (target / path).unlink(missing_ok=True)
    os.mkfifo(target / path)
    if path == "vllm/_version.py":  # not touched
        engine.ok(target)
        engine.ok(target, "--revert")
        return
    code = "file-in-the-way" if "glue" in path else "source-changed"
    for mode in ([], ["--check"], ["--status"]):
        error = engine.refused(code, target, *mode)
        assert error["path"] == path
    assert engine.ok(target, "--revert")["state"] == "clean"  # looks for remains


@pytest.mark.parametrize("path", [
    "vllm/config.py", "vllm/_dsv4_overlay/record.json", "vllm/_dsv4_overlay/originals/vllm%2Fconfig.py.orig",
])  # fmt: skip
def test_a_fifo_after_apply(engine, target, no_waiting, path):
    engine.ok(target)
    (target / path).unlink()
    os.mkfifo(target / path)
    for mode in ([], ["--status"], ["--revert"]):
        status, report = engine(target, *mode)
        assert status == 1 and "plain file" in report["error"]["message"], report


def test_a_changed_line_end_is_a_change(engine, tmp_path):
    target = make_target(tmp_path / "t", "source")
    (target / "vllm/crlf.py").write_bytes(PRISTINE["vllm/crlf.py"].replace(b"\r\n", b"\n"))
    assert refused(engine, "source-changed", target)["line"] == 1
    (target / "vllm/crlf.py").write_bytes(PRISTINE["vllm/crlf.py"])
    (target / "vllm/noeol.py").write_bytes(PRISTINE["vllm/noeol.py"] + b"\n")
    assert refused(engine, "source-changed", target)["line"] == 2


@pytest.mark.parametrize("path", ["vllm/dsv4/main.py", "vllm/dsv4", "vllm/dsv4/deep"])
def test_file_in_the_way(engine, target, path):
    (target / path).parent.mkdir(exist_ok=True)
    (target / path).write_bytes(b"somebody else's\n")
    assert refused(engine, "file-in-the-way", target)["path"] == path


def test_a_file_of_the_overlay_without_its_record(engine, target):
    """As git stash leaves what git ignores."""
    (target / "vllm/dsv4").mkdir()
    (target / "vllm/dsv4/main.py").write_bytes(OVERLAY["common/vllm/dsv4/main.py"])
    message = refused(engine, "file-in-the-way", target)["message"]
    assert "as this overlay has it, but no record tells of it; move it away." in message


def test_a_dangling_link_is_in_the_way_too(engine, tmp_path):
    target = make_target(tmp_path / "t", "source")
    (target / "vllm/sub/glue.py").symlink_to("nowhere.py")
    assert refused(engine, "file-in-the-way", target)["path"] == "vllm/sub/glue.py"


@pytest.mark.parametrize("path", ["vllm/config.py", "vllm/empty", "vllm/sub", "vllm"])
def test_symlink_escape(engine, target, tmp_path, path):
    outside = tmp_path / "outside"
    (target / path).rename(outside)
    (target / path).symlink_to(outside)
    before = snapshot(outside) if outside.is_dir() else outside.read_bytes()
    error = refused(engine, "symlink-escape", target)
    assert error["path"].startswith(path)
    assert (snapshot(outside) if outside.is_dir() else outside.read_bytes()) == before


def test_a_wheel_s_listing_that_leads_out(engine, tmp_path):
    target = make_target(tmp_path / "t", "installed")
    listing = target / f"vllm-{RELEASE}.dist-info/RECORD"
    listing.rename(tmp_path / "outside")
    listing.symlink_to(tmp_path / "outside")
    before = snapshot(tmp_path)
    assert refused(engine, "symlink-escape", target)["path"] == f"vllm-{RELEASE}.dist-info/RECORD"
    assert snapshot(tmp_path) == before


def test_state_folder_that_leads_out(engine, target, tmp_path):
    (tmp_path / "outside").mkdir()
    (target / "vllm/_dsv4_overlay").symlink_to(tmp_path / "outside")
    refused(engine, "symlink-escape", target)
    refused(engine, "symlink-escape", target, "--revert")


def test_two_paths_that_are_one_file(tmp_path, engine):
    repo = make_repo(tmp_path / "r2", overlay={
        "common/vllm/dsv4/main.py": b"import vllm.one.a, vllm.two.a\n",
        "common/vllm/one/a.py": b"1\n", "common/vllm/two/a.py": b"2\n"})  # fmt: skip
    engine.root = repo
    target = make_target(tmp_path / "t", "source")
    (target / "vllm/one").mkdir()
    (target / "vllm/two").symlink_to("one")
    assert refused(engine, "symlink-escape", target)["path"] == "vllm/two/a.py"


# ---------------------------------------------------------------- after apply


@pytest.mark.parametrize("mode", [[], ["--revert"], ["--status"], ["--check"]])
def test_edited_since_apply(engine, target, mode):
    engine.ok(target)
    edits = {
        "vllm/config.py": (EDITED["vllm/config.py"].replace(b"line9 = 9", b"line9 = 8"), 10),
        "vllm/odd.py": (EDITED["vllm/odd.py"] + b"more = 1", 5),
        "vllm/dsv4/deep/inner.py": (b"def go():\n    return 'gone'\n", 2),
    }
    for path, (data, line) in edits.items():
        good = (target / path).read_bytes()
        (target / path).write_bytes(data)
        error = refused(engine, "edited-since-apply", target, *mode)
        assert (error["path"], error["line"]) == (path, line)
        assert ("or delete it and run --revert" in error["message"]) == (path not in PRISTINE)
        report = engine(target, "--status")[1]
        assert report["state"] == "drifted"
        assert {"path": path, "action": "edited"} in report["files"]
        (target / path).write_bytes(good)
    for path in ("vllm/sub/glue.py", "vllm/noeol.py"):
        good = (target / path).read_bytes()
        (target / path).unlink()
        if mode != ["--revert"] or path == "vllm/noeol.py":  # without the other, it is as before
            assert refused(engine, "edited-since-apply", target, *mode)["path"] == path
        (target / path).symlink_to("config.py")
        assert refused(engine, "edited-since-apply", target, *mode)["path"] == path
        (target / path).unlink()
        (target / path).write_bytes(good)
    # The same text by another way: what was written is no longer where the record says.
    (target / "vllm/sub").rename(target / "vllm/moved")
    (target / "vllm/sub").symlink_to("moved")
    assert refused(engine, "edited-since-apply", target, *mode)["path"].startswith("vllm/sub/")
    (target / "vllm/sub").unlink()
    (target / "vllm/moved").rename(target / "vllm/sub")
    engine.ok(target, "--revert")


@pytest.mark.parametrize("command", [["checkout", "--", "vllm/config.py"], ["reset", "--hard"]])
def test_what_git_put_back_is_taken_off_with_the_rest(engine, tmp_path, command):
    target = make_target(tmp_path / "t", "git")
    before = snapshot(target)
    engine.ok(target)
    git(target, *command)
    error = refused(engine, "edited-since-apply", target)
    assert error["path"] == "vllm/config.py" and "run --revert" in error["message"]
    assert engine.ok(target, "--revert")["state"] == "clean"
    # git keeps no more of a mode than whether it can be run.
    assert {path: found[2:] for path, found in snapshot(target).items()} == {
        path: found[2:] for path, found in before.items()
    }


def test_an_edited_wheel_listing(engine, tmp_path):
    target = make_target(tmp_path / "t", "installed")
    engine.ok(target)
    listing = target / f"vllm-{RELEASE}.dist-info/RECORD"
    listing.write_bytes(listing.read_bytes() + b"vllm/extra.py,,\n")
    error = refused(engine, "edited-since-apply", target, "--revert")
    assert error["path"].endswith("RECORD")
    assert error["line"] == listing.read_bytes().count(b"\n")


def test_patch_changed(engine, target):
    engine.ok(target)
    patch = engine.root / f"{SERIES}/rest.patch"
    good = patch.read_bytes()
    patch.write_bytes(good.replace(b"Origin: own", b"Origin: other"))
    assert refused(engine, "patch-changed", target)["path"] == "full-width/rest.patch"
    assert refused(engine, "patch-changed", target, "--check")["path"] == "full-width/rest.patch"
    patch.write_bytes(good)
    extra = engine.root / "overlay/common/vllm/dsv4/new.py"
    extra.write_bytes(b"")
    engine.ok(target)  # nothing leads to it
    main = engine.root / "overlay/common/vllm/dsv4/main.py"
    used = main.read_bytes()
    main.write_bytes(used.replace(b"import glue", b"import glue\nfrom . import new"))
    assert refused(engine, "patch-changed", target)["path"] == "vllm/dsv4/main.py"
    main.write_bytes(used)
    extra.unlink()
    engine.ok(target)


@pytest.mark.parametrize("whole", [True, False], ids=["applied", "interrupted"])
def test_another_release_checked_out_by_force(engine, tmp_path, whole):
    """What git has put there since is git's; the rest is taken off."""
    target = make_target(tmp_path / "t", "git")
    newer = {"vllm/config.py": b"newer = 1\n", "vllm/odd.py": b"newer = 2\n"}
    for path, data in newer.items():
        (target / path).write_bytes(data)
    (target / "vllm/noeol.py").unlink()
    git(target, "commit", "-q", "-a", "-m", "next")
    git(target, "tag", "v2.0.0")
    clean = snapshot(target)
    git(target, "checkout", "-q", "v1.0.0")
    engine.ok(target)
    if not whole:
        (target / "vllm/_dsv4_overlay/record.json").rename(target / "vllm/_dsv4_overlay/journal.json")
        (target / "vllm/_dsv4_overlay/staged").mkdir()
    git(target, "checkout", "-q", "-f", "v2.0.0")
    if whole:
        assert "run --revert" in engine.refused("edited-since-apply", target, "--status")["message"]
    note = engine.ok(target, "--revert")["notes"][0]
    assert note == "left as installed since then: vllm/config.py, vllm/noeol.py, vllm/odd.py"
    assert {path: found[2:] for path, found in snapshot(target).items()} == {
        path: found[2:] for path, found in clean.items()}  # fmt: skip


def test_an_edit_that_was_committed_is_not_left_behind(engine, tmp_path):
    """Its lines call what --revert would take away."""
    target = make_target(tmp_path / "t", "git")
    engine.ok(target)
    with (target / "vllm/config.py").open("ab") as file:
        file.write(b"mine = 1\n")
    git(target, "commit", "-q", "-a", "-m", "mine")
    before = snapshot(target)
    assert refused(engine, "edited-since-apply", target, "--revert")["path"] == "vllm/config.py"
    assert snapshot(target) == before


def test_vllm_upgraded_under_an_applied_overlay(engine, tmp_path):
    target = make_target(tmp_path / "t", "git")
    engine.ok(target)
    git(target, "commit", "-q", "--allow-empty", "-m", "next")
    git(target, "tag", "v0.9.9")
    assert "--revert" in refused(engine, "patch-changed", target)["message"]


def test_record_lost(engine, target):
    engine.ok(target)
    record = target / "vllm/_dsv4_overlay/record.json"
    good = record.read_bytes()
    for mode in ([], ["--revert"], ["--status"]):
        record.unlink()
        refused(engine, "record-lost", target, *mode)
        for bad in good[: len(good) // 2], b'{"files": [], "directories": []}', b"[]", b'"x"', b"\xff", b"":
            record.write_bytes(bad)
            refused(engine, "record-lost", target, *mode)
        record.write_bytes(good)
    engine.ok(target, "--revert")


def test_a_folder_where_the_record_was(engine, target):
    engine.ok(target)
    record = target / "vllm/_dsv4_overlay/record.json"
    record.unlink()
    record.mkdir()
    assert refused(engine, "not-readable", target)["message"] == f"{record}: Is a directory."


def test_patched_files_without_any_record(engine, tmp_path):
    target = make_target(tmp_path / "tree", "git")
    engine.ok(target)
    git(target, "clean", "-fdq")
    for mode in ([], ["--check"], ["--status"], ["--revert"]):
        error = refused(engine, "record-lost", target, *mode)
        assert all(path in error["message"] for path in EDITED) and error["path"] == "vllm/config.py"
    git(target, "checkout", "--", ".")
    (target / "vllm/config.py").write_bytes(b"mine\n")
    assert engine.ok(target, "--revert")["state"] == "clean"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("kind", ["source", "installed"])
def test_what_root_adds_belongs_to_the_owner_of_the_tree(engine, tmp_path, kind):
    target = make_target(tmp_path / "target", kind)
    for place in [target, *target.rglob("*")]:
        os.chown(place, 1234, 1235)
    engine.ok(target)
    owners = {place: (place.stat().st_uid, place.stat().st_gid) for place in (target / "vllm").rglob("*")}
    assert set(owners.values()) == {(1234, 1235)}, owners


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EPERM])
def test_an_owner_to_whom_no_file_can_be_given(engine, target, monkeypatch, number):
    """EINVAL: in a container without root, who is not known there. EPERM: in a tree that a group shares."""

    def chown(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "chown", chown)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    before = snapshot(target)
    engine.ok(target)
    engine.ok(target, "--revert")
    assert snapshot(target) == before


@pytest.mark.parametrize("kind", ["file", "link", "link to nothing"])
def test_what_is_where_the_record_goes(engine, target, kind):
    place, inside = target / "vllm/_dsv4_overlay", target / "vllm/sub"
    if kind == "file":
        place.write_text("mine")
    else:
        place.symlink_to(inside if kind == "link" else target / "vllm/nothing")
    before = snapshot(target)
    for mode in ([], ["--check"], ["--status"], ["--revert"]):
        assert refused(engine, "file-in-the-way", target, *mode)["path"] == "vllm/_dsv4_overlay"
        assert snapshot(target) == before


@pytest.mark.parametrize("argv", [
    [""], ["--revert", ""], ["--fetch", "", "tree"], ["--fetch=", "."], ["--series=", "."],
])  # fmt: skip
def test_an_empty_argument(engine, target, argv, monkeypatch):
    """As of a variable that is not set: it would be the current folder."""
    monkeypatch.chdir(target)
    before = snapshot(target)
    status, report = engine(*argv)
    assert (status, report["error"]["code"]) == (2, "usage")
    assert report["error"]["message"] == "an argument is empty (is a variable unset?)"
    assert snapshot(target) == before


def resealed(data, change):
    """The record `data` with `change` done to it, and a checksum that fits."""
    record = json.loads(data)
    del record["sha256"]
    change(record)
    return seal(record)


def test_a_record_that_was_changed_is_not_believed(engine, target):
    engine.ok(target)
    record = target / "vllm/_dsv4_overlay/record.json"
    good = record.read_bytes()
    for old, new in [
        (b'"path": "vllm/sub/glue.py"', b'"path": "vllm/sub/gone.py"'),  # would leave glue.py behind
        (b'"mode": "0644"', b'"mode": "6755"'),
        (b'"patches": [', b'"patches": [1,'),
        (b'"release": "1.0.0"', b'"release": "1.0.1"'),
        (b"\n", b"\r\n"),
        (b'"directories"', b'"folders"'),
    ]:
        assert old in good
        record.write_bytes(good.replace(old, new, 1))
        for mode in ([], ["--revert"], ["--status"], ["--check"]):
            assert "checksum" in refused(engine, "record-lost", target, *mode)["message"]
    journal = record.with_name("journal.json")
    record.rename(journal)
    journal.write_bytes(good.replace(b"0644", b"6755", 1))
    assert "checksum" in refused(engine, "record-lost", target, "--revert")["message"]


@pytest.mark.parametrize("version", ["2", "4", None, 3])
def test_a_record_in_another_format(engine, target, version):
    """Its checksum, whatever it is there, is not looked at: the overlay that wrote it is named."""
    engine.ok(target)
    record = target / "vllm/_dsv4_overlay/record.json"
    good = record.read_bytes()
    record.write_bytes(resealed(good, lambda found: found.update(tool_version=version, overlay_commit="0123abcd")))
    for mode in ([], ["--revert"], ["--status"]):
        message = refused(engine, "record-format", target, *mode)["message"]
        assert "version 0.1.0, commit 0123abcd" in message and repr(version) in message
    record.write_bytes(good)
    engine.ok(target, "--revert")


def test_an_original_that_is_gone_or_damaged(engine, target):
    engine.ok(target)
    kept = target / "vllm/_dsv4_overlay/originals/vllm%2Fconfig.py.orig"
    good = kept.read_bytes()
    kept.write_bytes(good[:-1])
    assert refused(engine, "record-lost", target, "--revert")["path"] == "vllm/config.py"
    kept.unlink()
    for mode in ([], ["--check"], ["--status"], ["--revert"]):  # what cannot be taken off is not "applied"
        assert refused(engine, "record-lost", target, *mode)["path"] == "vllm/config.py"
        assert engine(target, *mode)[1]["state"] == "drifted"


def test_the_original_of_a_wheel_s_listing_is_gone(engine, tmp_path):
    """Then what the listing should be is not known either."""
    target = make_target(tmp_path / "t", "installed")
    engine.ok(target)
    listing = f"vllm-{RELEASE}.dist-info/RECORD"
    (target / f"vllm/_dsv4_overlay/originals/{listing.replace('/', '%2F')}.orig").unlink()
    for mode in ([], ["--check"], ["--status"], ["--revert"]):
        assert refused(engine, "record-lost", target, *mode)["path"] == listing


@pytest.mark.parametrize("name", ["originals/notes.txt", "staged/notes.txt"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_file_of_somebody_else_beside_what_we_keep(engine, target, name, whole):
    """Of an apply that is whole, or was interrupted."""
    engine.ok(target)
    stranger = target / "vllm/_dsv4_overlay" / name
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("mine")
    if not whole:
        (target / "vllm/_dsv4_overlay/record.json").rename(target / "vllm/_dsv4_overlay/journal.json")
    before = snapshot(target)
    assert refused(engine, "file-in-the-way", target, "--revert")["path"] == f"vllm/_dsv4_overlay/{name}"
    assert snapshot(target) == before


def test_an_original_that_is_damaged_is_not_put_back(engine, target):
    """By a run that was interrupted."""
    engine.ok(target)
    (target / "vllm/_dsv4_overlay/record.json").rename(target / "vllm/_dsv4_overlay/journal.json")
    (target / "vllm/_dsv4_overlay/originals/vllm%2Fconfig.py.orig").write_bytes(b"")
    before = snapshot(target)
    for mode in ([], ["--revert"]):
        assert refused(engine, "record-lost", target, *mode)["path"] == "vllm/config.py"
        assert snapshot(target) == before


def test_a_file_of_somebody_else_in_our_folder(engine, target):
    before = snapshot(target)
    engine.ok(target)
    stranger = target / "vllm/_dsv4_overlay/.DS_Store"
    stranger.touch()
    assert refused(engine, "file-in-the-way", target, "--revert")["path"] == "vllm/_dsv4_overlay/.DS_Store"
    stranger.unlink()
    engine.ok(target, "--revert")
    stranger.parent.mkdir()
    stranger.touch()
    refused(engine, "file-in-the-way", target)
    stranger.unlink()
    stranger.parent.rmdir()
    assert snapshot(target) == before


# ---------------------------------------------------------------- the system says no


def as_nobody(function):
    """Run `function` in a child that is not root; return its result (a short string)."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            os.write(into, function().encode())
        finally:
            os._exit(0)
    os.close(into)
    os.waitpid(child, 0)
    with os.fdopen(out) as file:
        return file.read()


@pytest.mark.parametrize("mode", [[], ["--check"]])
@pytest.mark.parametrize("kind", KINDS)
def test_not_writable(engine, tmp_path, kind, mode):
    target = make_target(tmp_path / "t", kind, modes={})
    for folder in tmp_path.parents:  # let the other user in
        if folder.stat().st_uid == os.geteuid() and folder != folder.parent:
            folder.chmod(folder.stat().st_mode | 0o011)
    tmp_path.chmod(0o755)
    engine.ok(target, "--check")  # every import is done before the change of user
    (target / "vllm").chmod(0o555)
    before = snapshot(target)

    def attempt():
        from dsv4_overlay_tools.cli import Report, _parse, _run
        from dsv4_overlay_tools.errors import Refusal

        try:
            _run(_parse([str(target), *mode]), engine.root, Report())
        except Refusal as refusal:
            return f"{refusal.code} {refusal.message}"
        return "applied"

    if kind == "git":
        os.environ["GIT_CONFIG_COUNT"] = "1"
        os.environ["GIT_CONFIG_KEY_0"] = "safe.directory"
        os.environ["GIT_CONFIG_VALUE_0"] = "*"
    try:
        said = as_nobody(attempt)
    finally:
        for name in ("GIT_CONFIG_COUNT", "GIT_CONFIG_KEY_0", "GIT_CONFIG_VALUE_0"):
            os.environ.pop(name, None)
    assert said.startswith("not-writable ") and str(target / "vllm") in said
    assert snapshot(target) == before
    if os.geteuid() == 0:
        (target / "vllm/config.py").chmod(0)
        said = as_nobody(attempt)
        # git itself looks at the owner first; the environment above silenced it.
        expected = "not-vllm git distrusts" if kind == "git" else "not-readable vllm/config.py"
        assert said.startswith(expected)


def test_check_needs_what_apply_needs(tmp_path, monkeypatch):
    path = "vllm/sub/untouched.py"
    engine = Engine(make_repo(tmp_path / "repo", {"one.patch": [path]}, {}, edited={path: b"value = 1\n"}))
    target = make_target(tmp_path / "t", "source")
    monkeypatch.setattr(os, "access", lambda folder, _: folder != target / "vllm")
    for mode in ([], ["--check"]):
        assert refused(engine, "not-writable", target, *mode)["path"] == str(target / "vllm")


def test_bytecode_that_cannot_be_removed(engine, target, monkeypatch):
    """It would be used further on, so this is found before anything is changed."""
    cache = target / "vllm/__pycache__"
    cache.mkdir()
    monkeypatch.setattr(os, "access", lambda folder, _: folder != cache)
    before = snapshot(target)
    for mode in ([], ["--check"]):
        assert refused(engine, "not-writable", target, *mode)["path"] == str(cache)
    assert snapshot(target) == before


def test_a_state_folder_that_is_not_writable(engine, tmp_path):
    target = make_target(tmp_path / "t", "source", modes={})
    engine.ok(target)
    for path in [*tmp_path.parents[:2], tmp_path, target, *target.rglob("*")]:
        if path.is_dir():
            path.chmod(0o777)
    (target / "vllm/_dsv4_overlay").chmod(0o555)
    before = snapshot(target)

    def attempt():
        return json.dumps(engine(target, "--revert")[1]["error"])

    error = json.loads(as_nobody(attempt))
    assert error["code"] == "not-writable" and error["path"] == str(target / "vllm/_dsv4_overlay")
    assert error["message"].endswith("(nothing was changed).")
    assert snapshot(target) == before


@pytest.mark.parametrize("name", ["replace", "write", "fsync", "mkdir", "rmdir"])
@pytest.mark.parametrize("after", [0, 1, 4])
def test_an_error_on_the_way_puts_everything_back(engine, tmp_path, monkeypatch, name, after):
    target = make_target(tmp_path / "t", "installed")
    before = snapshot(target)
    real = getattr(os, name)
    calls = []

    def full(*args, **kwargs):
        calls.append(args)
        if len(calls) == after + 1:
            raise OSError(28, "No space left on device", str(args[0]))
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(transaction.os, name, full)
        status, report = engine(target)
    if len(calls) <= after:
        assert status == 0
        return
    assert report["error"]["code"] == "not-writable", report
    assert "No space left" in report["error"]["message"]
    assert snapshot(target) == before


# ---------------------------------------------------------------- the series itself

OTHER = PRISTINE["vllm/crlf.py"]
# What is bad -> a patch that is so, and what is said of it.
BAD = {
    "new file": (b"--- /dev/null\n+++ b/vllm/new.py\n@@ -0,0 +1 @@\n+x\n", "is created or deleted"),
    "deleted": (b"--- a/vllm/crlf.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n", "is created or deleted"),
    "renamed": (
        b"--- a/vllm/crlf.py\n+++ b/vllm/other.py\n@@ -1 +1 @@\n-x\n+y\n",
        "are not a/PATH and b/PATH of one file",
    ),
    "mode": (b"diff --git a/vllm/tool.sh b/vllm/tool.sh\nold mode 100755\nnew mode 100644\n", "a change of mode"),
    "mode and lines": (
        b"diff --git a/vllm/crlf.py b/vllm/crlf.py\nold mode 100644\nnew mode 100755\n"
        + diff("vllm/crlf.py", b"a\n", b"b\n"),
        "a change of mode",
    ),
    "outside vllm": (b"--- a/setup.py\n+++ b/setup.py\n@@ -1 +1 @@\n-x\n+y\n", "is not a plain path below vllm/"),
    "climbing": (
        b"--- a/vllm/../x.py\n+++ b/vllm/../x.py\n@@ -1 +1 @@\n-x\n+y\n",
        "is not a plain path below vllm/",
    ),
    "state folder": (diff("vllm/_dsv4_overlay/x", b"x\n", b"y\n"), "belongs to the tool"),
    "short": (b"--- a/vllm/crlf.py\n+++ b/vllm/crlf.py\n@@ -1,3 +1,3 @@\n-a = 1\r\n+b\n", "not a unified diff"),
    "garbage": (b"--- a/vllm/crlf.py\n+++ b/vllm/crlf.py\n@@ -1 +1 @@\nwhat\n", "not a unified diff"),
    "wrong place": (b"--- a/vllm/crlf.py\n+++ b/vllm/crlf.py\n@@ -1 +2 @@\n-a = 1\r\n+b\r\n", "is out of place"),
    "doubled": (diff("vllm/noeol.py", b"a\n", b"b\n"), "is already touched by config.patch"),
    "unpinned": (diff("vllm/sub/__init__.py", b"", b"b\n"), "disagree about vllm/sub/__init__.py"),
    "trailing": (
        diff("vllm/crlf.py", OTHER, OTHER + b"d = 4\r\n") + b"\n\n",
        "a hunk has more lines than its first line says",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_series(engine, tmp_path, what):
    folder = engine.root / SERIES
    patch, words = BAD[what]
    (folder / "bad.patch").write_bytes(header(["vllm/crlf.py"]) + b"\n" + patch)
    (folder / "series").write_text("config.patch\nrest.patch\nbad.patch\n")
    target = make_target(tmp_path / "t", "source")
    before = snapshot(target)
    message = engine.refused("bad-series", target)["message"]
    assert words in message and ("bad.patch" in message or "sub/__init__" in message)
    assert snapshot(target) == before


def test_a_patch_that_does_not_fit_its_own_pristine_file(engine, tmp_path):
    patch = engine.root / f"{SERIES}/config.patch"
    patch.write_bytes(patch.read_bytes().replace(b" line2 = 2\n", b" line2 = 0\n"))
    error = engine.refused("bad-series", make_target(tmp_path / "t", "source"))
    assert (error["path"], error["line"]) == ("vllm/config.py", 3)


def edit_pins(folder, old, new):
    text = (folder / "release.toml").read_text()
    assert old in text
    (folder / "release.toml").write_text(text.replace(old, new))


@pytest.mark.parametrize(
    "edit",
    [
        lambda folder: (folder / "rest.patch").unlink(),
        lambda folder: (folder / "series").unlink(),
        lambda folder: (folder / "release.toml").write_text("release = "),
        lambda folder: (folder / "release.toml").write_text('release = "1.0.0"\n'),
        lambda folder: edit_pins(folder, "[files]", "files = 'none'\n[other]"),
        lambda folder: edit_pins(folder, "[files]", "[files]\n'vllm/sub/__init__.py' = ''"),
        lambda folder: edit_pins(folder, 'release = "1.0.0"', 'release = "0.9.9"'),
        lambda folder: edit_pins(folder, "[relied_on]", "[[relied_on]]"),
        lambda folder: edit_pins(folder, '[also."0.9.9"]', "also = 1\n[other]"),
        lambda folder: edit_pins(folder, "[relied_on]", "[relied_on]\n'vllm/config.py' = ''"),
        lambda folder: edit_pins(folder, "[relied_on]", "[relied_on]\n'../config.py' = ''"),
        lambda folder: (folder / "rest.patch").write_bytes(b"not a header\n"),
        lambda folder: (folder / "rest.patch").write_bytes(header([]) + b"Hooks: again\n"),
    ],
)
def test_broken_release_folder(engine, tmp_path, edit):
    target = make_target(tmp_path / "t", "source")
    edit(engine.root / SERIES)
    refused(engine, "bad-series", target)


@pytest.mark.parametrize(
    "path", ["common/vllm/sub/glue.py", "common/vllm/config.py", "common/vllm/_dsv4_overlay/x.py"]
)
def test_overlay_files_that_cannot_be(engine, tmp_path, path):
    place = engine.root / "overlay" / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"")
    refused(engine, "bad-series", make_target(tmp_path / "t", "source"))


def test_a_link_in_the_overlay(engine, tmp_path):
    (engine.root / "overlay/common/vllm/dsv4/link.py").symlink_to("/etc/hostname")
    refused(engine, "bad-series", make_target(tmp_path / "t", "source"))


def test_a_release_this_repository_no_longer_knows_can_be_taken_off(engine, target):
    before = snapshot(target)
    engine.ok(target)
    for file in (engine.root / SERIES).glob("*.patch"):
        file.write_text("not a patch\n")
    assert engine.ok(target, "--status")["state"] == "applied"
    for file in (engine.root / SERIES).iterdir():
        file.unlink()
    assert engine.ok(target, "--status")["state"] == "applied"
    engine.ok(target, "--revert")
    assert snapshot(target) == before


@pytest.mark.parametrize("old, new, words", [
    (b"@@ -2,5 +2,5 @@", b"@@ -2,5 +3,5 @@", "the hunk at line 2 of vllm/config.py is out of place"),
    (b"@@ -2,5 +2,5 @@", b"@@ -2,5 +2,6 @@", "not a unified diff"),
    (b"@@ -2,5 +2,5 @@", b"@@ -2,4 +2,4 @@", "not a unified diff"),
])  # fmt: skip
def test_a_hunk_that_is_not_what_its_first_line_says(engine, target, old, new, words):
    patch = engine.root / SERIES / "config.patch"
    assert patch.read_bytes().count(old) == 1
    patch.write_bytes(patch.read_bytes().replace(old, new))
    assert words in refused(engine, "bad-series", target)["message"]


@pytest.mark.parametrize("more", [b"+lost = 1\n", b" lost\n", b"-- \n2.39\n"])
def test_lines_behind_the_last_hunk_are_not_dropped(engine, target, more):
    patch = engine.root / SERIES / "rest.patch"
    patch.write_bytes(patch.read_bytes() + more)
    assert "more lines than its first line says" in refused(engine, "bad-series", target)["message"]


def test_tags_of_one_s_own_are_no_releases(engine, tmp_path):
    target = make_target(tmp_path / "t", "git")
    git(target, "commit", "--allow-empty", "-m", "own work")
    git(target, "tag", "v2.0.0-mine")
    assert engine.ok(target, "--check")["release"] == RELEASE
