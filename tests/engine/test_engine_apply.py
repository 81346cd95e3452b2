"""Apply, status, check and revert on each kind of target."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dsv4_overlay_tools import cli
from smallworld import (
    EDITED,
    MODES,
    OVERLAY,
    PRISTINE,
    RELEASE,
    ROOT,
    SERIES,
    Engine,
    copy,
    git,
    make_target,
    sha256,
    snapshot,
)

STATE = "vllm/_dsv4_overlay"
ADDED = {path.partition("/")[2]: data for path, data in OVERLAY.items()}


def test_apply_writes_exactly_the_series_and_the_overlay(engine, target, kind):
    report = engine.ok(target)
    assert (report["release"], report["kind"], report["state"]) == (RELEASE, kind, "applied")
    for path, data in {**PRISTINE, **EDITED, **ADDED}.items():
        assert (target / path).read_bytes() == data, path
        assert (target / path).stat().st_mode & 0o777 == MODES.get(path, 0o644), path
    actions = {file["path"]: file["action"] for file in report["files"]}
    wheel = {f"vllm-{RELEASE}.dist-info/RECORD": "updated"} if kind == "installed" else {}
    assert actions == {
        **dict.fromkeys(EDITED, "patched"), **dict.fromkeys(ADDED, "added"), **wheel,
    }  # fmt: skip
    files = {name for name, what in snapshot(target).items() if what[0] == "file"}
    ours = {name for name in files if name.startswith(STATE + "/")}
    assert files - ours - {"PKG-INFO"} == {*PRISTINE, *ADDED} | {
        name for name in files if ".dist-info/" in name
    }


def test_revert_gives_every_byte_back(engine, target, kind):
    if kind == "installed":
        (target / f"vllm-{RELEASE}.dist-info/RECORD").chmod(0o640)
    before = snapshot(target)
    times = {path: (target / path).stat().st_mtime_ns for path in PRISTINE}
    engine.ok(target)
    assert snapshot(target) != before
    report = engine.ok(target, "--revert")
    assert report["state"] == "clean"
    assert snapshot(target) == before
    assert {path: (target / path).stat().st_mtime_ns for path in PRISTINE} == times
    if kind == "git":
        assert git(target, "status", "--porcelain") == ""


def test_revert_leaves_no_folder_of_what_python_compiled(engine, target):
    before = snapshot(target)
    engine.ok(target)
    for folder in ("vllm/dsv4", "vllm/dsv4/deep"):
        (target / folder / "__pycache__").mkdir()
        (target / folder / "__pycache__/__init__.cpython-311.pyc").touch()
    engine.ok(target, "--revert")
    assert snapshot(target) == before


def test_tags_and_files_of_ones_own(engine, tmp_path):
    target = make_target(tmp_path / "tree", "git")
    git(target, "commit", "-q", "--allow-empty", "-m", "mine")
    git(target, "tag", f"v{RELEASE}-mine")
    git(target, "tag", "v2024-backup")
    (engine.root / "overlay/common/vllm/dsv4/.main.py.swp").write_bytes(b"")
    (engine.root / "overlay/common/vllm/dsv4/.#main.py").symlink_to("me@here.1234")  # Emacs's lock
    report = engine.ok(target)
    assert report["release"] == RELEASE and {file["path"] for file in report["files"]} == {*EDITED, *ADDED}


def test_second_apply_changes_nothing_and_says_so(engine, target):
    engine.ok(target)
    before = snapshot(target)
    inodes = {path: path.stat().st_ino for path in target.rglob("*")}
    report = engine.ok(target)
    assert report["state"] == "applied"
    assert any("already applied" in note for note in report["notes"])
    assert snapshot(target) == before
    assert {path: path.stat().st_ino for path in target.rglob("*")} == inodes


def test_revert_of_a_clean_tree_is_nothing_to_do(engine, target):
    before = snapshot(target)
    report = engine.ok(target, "--revert")
    assert report["state"] == "clean"
    assert any("nothing to do" in note for note in report["notes"])
    assert snapshot(target) == before


def test_check_and_status_change_nothing(engine, target):
    before = snapshot(target)
    checked = engine.ok(target, "--check")
    assert checked["state"] == "clean"
    assert {file["action"] for file in checked["files"]} <= {
        "would-patch", "would-add", "would-update"
    }  # fmt: skip
    assert engine.ok(target, "--status")["state"] == "clean"
    assert snapshot(target) == before
    engine.ok(target)
    after = snapshot(target)
    assert engine.ok(target, "--status")["state"] == "applied"
    assert engine.ok(target, "--check")["state"] == "applied"
    assert snapshot(target) == after


def test_two_applies_record_the_same_bytes(engine, tmp_path, kind):
    records = []
    for name in ("one", "two"):
        place = make_target(tmp_path / name, kind)
        os.utime(place / "vllm/config.py", (10**9, 10**9))
        engine.ok(place)
        records.append((place / STATE / "record.json").read_bytes())
    assert records[0] == records[1]
    record = json.loads(records[0])
    assert (record["release"], record["overlay_version"]) == (RELEASE, "0.1.0")
    assert record["overlay_commit"] is None
    hashes = {entry["path"]: (entry["sha256_before"], entry["sha256_after"])
              for entry in record["files"] if entry["action"] != "updated"}  # fmt: skip
    assert hashes == {
        **{path: (sha256(PRISTINE[path]), sha256(data)) for path, data in EDITED.items()},
        **{path: (None, sha256(data)) for path, data in ADDED.items()},
    }


def test_record_names_the_commit_and_whether_it_was_changed(engine, tmp_path):
    git(engine.root, "init", "-q")
    git(engine.root, "add", "-A")
    git(engine.root, "commit", "-q", "-m", "x")
    (engine.root / "notes.txt").write_text("not part of what is applied")
    target = make_target(tmp_path / "one", "source")
    engine.ok(target)
    record = json.loads((target / STATE / "record.json").read_text())
    assert record["overlay_commit"] == git(engine.root, "rev-parse", "HEAD")
    assert record["overlay_dirty"] is False
    git(engine.root, "config", "status.showUntrackedFiles", "no")
    for path in ("VERSION", f"{SERIES}/series", "overlay/common/vllm/dsv4/main.py", "overlay/common/vllm/new.py"):
        with (engine.root / path).open("ab") as file:
            file.write(b"\n")
        engine.ok(other := make_target(tmp_path / Path(path).name, "source"))
        assert json.loads((other / STATE / "record.json").read_text())["overlay_dirty"] is True
        git(engine.root, "stash", "-q")


def test_apply_leaves_other_edits_alone(engine, target):
    (target / "vllm/sub/untouched.py").write_bytes(b"mine = 1\n")
    (target / "vllm/own.py").write_bytes(b"also mine\n")
    before = snapshot(target)
    engine.ok(target)
    assert (target / "vllm/sub/untouched.py").read_bytes() == b"mine = 1\n"
    (target / "vllm/dsv4/later.py").write_bytes(b"put into a folder of the overlay\n")
    notes = engine.ok(target, "--revert")["notes"]
    assert [note for note in notes if "left" in note] == [
        "not from this overlay, and left where it is: vllm/dsv4/later.py"
    ]
    after = snapshot(target)
    assert after.pop("vllm/dsv4/later.py")[2] == b"put into a folder of the overlay\n"
    assert after.pop("vllm/dsv4")[0] == "folder"
    assert after == before


@pytest.mark.parametrize("path", ["vllm/dsv4", "vllm/dsv4/deep/__pycache__"])
def test_a_file_where_a_folder_of_the_overlay_was(engine, target, path):
    engine.ok(target)
    if path == "vllm/dsv4":
        shutil.rmtree(target / path)
    (target / path).write_bytes(b"mine")
    notes = engine.ok(target, "--revert")["notes"]
    assert f"not from this overlay, and left where it is: {path}" in notes
    assert (target / path).read_bytes() == b"mine" and not (target / STATE).exists()


def test_hard_linked_files_keep_their_old_content_elsewhere(engine, tmp_path):
    """uv installs by linking into its cache: what is patched here must not change there."""
    target = make_target(tmp_path / "target", "installed")
    os.link(target / "vllm/config.py", tmp_path / "cached.py")
    engine.ok(target)
    assert (tmp_path / "cached.py").read_bytes() == PRISTINE["vllm/config.py"]


def test_a_strict_umask_does_not_hide_the_record(engine, tmp_path):
    target = make_target(tmp_path / "target", "source")
    old = os.umask(0o077)
    try:
        engine.ok(target)
    finally:
        os.umask(old)
    for path in [STATE, STATE + "/record.json", "vllm/dsv4", "vllm/dsv4/main.py"]:
        assert (target / path).stat().st_mode & 0o044 == 0o044, path


def test_new_folders_are_like_the_one_they_are_in(engine, tmp_path):
    """A tree that a group shares: setgid and the right to write go on."""
    target = make_target(tmp_path / "target", "source")
    (target / "vllm").chmod(0o2775)
    engine.ok(target)
    for path in (STATE, STATE + "/originals", "vllm/dsv4", "vllm/dsv4/deep"):
        assert oct((target / path).stat().st_mode) == oct((target / "vllm").stat().st_mode) == "0o42775", path


def test_extended_attributes_are_kept(engine, target):
    place = target / "vllm/config.py"
    try:
        os.setxattr(place, "user.note", b"mine")
    except OSError as error:
        pytest.skip(f"the file system has no extended attributes ({error.strerror})")
    for argv in ([], ["--revert"]):
        engine.ok(target, *argv)
        assert os.getxattr(place, "user.note") == b"mine"
    assert os.listxattr(target / "vllm/crlf.py") == []


def test_attributes_that_may_not_be_set(engine, target, monkeypatch):
    """As where SELinux keeps its labels to itself."""

    def copystat(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    before = snapshot(target)
    monkeypatch.setattr(shutil, "copystat", copystat)
    engine.ok(target)
    engine.ok(target, "--revert")
    assert snapshot(target) == before


def test_a_link_that_stays_inside_is_written_through(engine, tmp_path):
    target = make_target(tmp_path / "target", "source")
    (target / "vllm/crlf.py").rename(target / "vllm/elsewhere.py")
    (target / "vllm/crlf.py").symlink_to("elsewhere.py")
    before = snapshot(target)
    engine.ok(target)
    assert (target / "vllm/crlf.py").is_symlink()
    assert (target / "vllm/elsewhere.py").read_bytes() == EDITED["vllm/crlf.py"]
    engine.ok(target, "--revert")
    assert snapshot(target) == before


def test_a_served_release_gets_the_same_series(engine, tmp_path, kind):
    target = make_target(tmp_path / "target", kind, release="0.9.9")
    assert engine.ok(target)["release"] == "0.9.9"


def test_a_local_version_is_the_same_release(engine, tmp_path):
    target = make_target(tmp_path / "target", "installed", release="1.0.0+cu129")
    assert engine.ok(target)["release"] == "1.0.0"


# ---------------------------------------------------------------- git


def test_git_accepts_local_commits_on_top(engine, tmp_path):
    target = make_target(tmp_path / "target", "git")
    (target / "own.txt").write_text("mine")
    git(target, "add", "-A")
    git(target, "commit", "-q", "-m", "mine")
    report = engine.ok(target)
    assert report["release"] == RELEASE
    assert report["commit"] == git(target, "rev-parse", "v1.0.0")
    # The made-up pin is another commit: accepted, since the files are right, but told.
    assert any("is checked by sha256" in note for note in report["notes"])


def test_git_without_tags_is_known_by_the_pinned_commit(engine, tmp_path):
    target = make_target(tmp_path / "target", "git")
    git(target, "tag", "-d", "v1.0.0")
    pins = engine.root / f"{SERIES}/release.toml"
    pins.write_text(pins.read_text().replace("0" * 40, git(target, "rev-parse", "HEAD")))
    assert not [note for note in engine.ok(target)["notes"] if " tag " in note]


def test_commit_without_git(engine, tmp_path, monkeypatch):
    """An image is built without .git, and in a base without the git program."""
    record = "vllm/_dsv4_overlay/record.json"
    monkeypatch.setenv("DSV4_OVERLAY_COMMIT", "0123abcd")
    engine.ok(target := make_target(tmp_path / "a", "installed"))
    said = json.loads((target / record).read_text())
    assert (said["overlay_commit"], said["overlay_dirty"]) == ("0123abcd", None)
    (engine.root / ".git").mkdir()
    monkeypatch.setitem(sys.modules, "git", None)
    engine.ok(target := make_target(tmp_path / "b", "installed"))
    assert json.loads((target / record).read_text())["overlay_commit"] is None


@pytest.mark.parametrize("kind", ["source", "installed"])
def test_the_commit_of_a_vllm_that_has_no_git(engine, target):
    (target / "vllm/_version.py").write_text("__commit_id__ = commit_id = 'g0123abcde'\n")
    assert engine.ok(target)["commit"] == "0123abcde"


def test_git_worktree(engine, tmp_path):
    main = make_target(tmp_path / "main", "git")
    git(main, "worktree", "add", "-q", str(tmp_path / "tree"), "v1.0.0")
    assert engine.ok(tmp_path / "tree")["kind"] == "git"
    assert git(main, "status", "--porcelain") == ""


def test_a_source_archive_put_under_git_is_still_one(engine, tmp_path):
    target = make_target(tmp_path / "target", "source")
    git(target, "init", "-q")
    git(target, "add", "-A")
    git(target, "commit", "-q", "-m", "x")
    assert engine.ok(target)["kind"] == "source"


# ---------------------------------------------------------------- --installed


def run_cli(repo, *argv, **kwargs):
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
    code += "from pathlib import Path\nfrom dsv4_overlay_tools.cli import main\n"
    code += f"sys.exit(main(sys.argv[1:], Path({str(repo)!r})))"
    kwargs = {"stdout": subprocess.PIPE, **kwargs}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)], stderr=subprocess.PIPE, text=True, **kwargs
    )


def installed(repo, pythonpath, cwd):
    # The interpreter that asks is -I like the real one; the one asked keeps the user's PYTHONPATH.
    env = {**os.environ, "PYTHONPATH": str(pythonpath), "DSV4_OVERLAY_PYTHON": sys.executable}
    done = run_cli(repo, "--installed", "--json", env=env, cwd=cwd)
    return done.returncode, json.loads(done.stdout)


def test_installed_finds_a_folder_on_pythonpath_and_ignores_the_current_one(engine, tmp_path):
    place = make_target(tmp_path / "site", "installed")
    (place / "vllm/__init__.py").write_text("raise RuntimeError('vllm must not be imported')\n")
    here = make_target(tmp_path / "here", "source")
    status, report = installed(engine.root, place, here)
    assert status == 0, report
    assert (report["target"], report["kind"]) == (str(place), "installed")


def test_installed_refuses_an_editable_install_and_names_its_tree(engine, tmp_path):
    tree = make_target(tmp_path / "my tree", "git")
    site = tmp_path / "site"
    info = site / "vllm-1.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 1.0.0\n")
    url = tree.as_uri()
    (info / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {"editable": True}}))
    for pythonpath in (site, f"{site}:{tree}"):
        status, report = installed(engine.root, pythonpath, tmp_path)
        assert (status, report["error"]["code"]) == (1, "editable-install")
        assert str(tree) in report["error"]["message"]
    assert str(tree) in engine.refused("editable-install", site)["message"]
    # A source tree on the path, without any installation, is no installed wheel either.
    source = make_target(tmp_path / "source", "source")
    status, report = installed(engine.root, source, tmp_path)
    assert report["error"]["code"] == "editable-install"
    assert str(source) in report["error"]["message"]


def test_installed_asks_a_python_that_says_nothing(engine, monkeypatch):
    monkeypatch.setenv("DSV4_OVERLAY_PYTHON", "/bin/false")
    message = engine.refused("not-vllm", "--installed")["message"]
    assert message == "/bin/false could not look for vLLM (no output); give its folder."


def test_installed_without_vllm(engine, tmp_path):
    (tmp_path / "path/vllm").mkdir(parents=True)  # Python imports it, empty
    for pythonpath in ("", tmp_path / "path"):
        status, report = installed(engine.root, pythonpath, tmp_path)
        assert (status, report["error"]["code"]) == (1, "not-vllm")


# ---------------------------------------------------------------- usage and text


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["x", "--installed"],
        ["x", "--check", "--revert"],
        ["--fetch", "1.0.0"],
        ["x", "--fetch", "1.0.0", "--check"],
        ["x", "--fetch", "1.0.0", "--status"],
        ["--installed", "--fetch", "1.0.0"],
        ["x", "--unknown"],
        ["x", "y"],
        ["x", "--stat"],
    ],
)
def test_wrong_usage_is_2_in_text_and_json(engine, capsys, argv):
    status, report = engine(*argv)
    assert (status, report["error"]["code"]) == (2, "usage")
    assert cli.main(argv, engine.root) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize("argv", [[], ["--json"], ["--status"], ["--revert"]])
def test_a_report_that_cannot_be_written(engine, target, argv):
    """The exit status says what was done to the tree; Python would end with 120."""
    if "--revert" in argv:
        engine.ok(target)
    with open("/dev/full", "w") as full:
        done = run_cli(engine.root, target, *argv, stdout=full)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("note: the report could not be written (No space left on device)\n")
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert engine.ok(target, "--status")["state"] == ("applied" if argv in ([], ["--json"]) else "clean")


def test_text_report(engine, target, capsys):
    for mode in ("--status", "--check"):  # what is not there must not read as if it were
        assert cli.main([str(target), mode], engine.root) == 0
        assert capsys.readouterr().out.endswith(f"{target}: clean; apply would put on full-width\n")
    assert cli.main([str(target)], engine.root) == 0
    out, err = capsys.readouterr()
    for path in {**EDITED, **ADDED}:
        assert path in out
    assert f"vLLM {RELEASE}" in out and out.endswith(": applied (full-width)\n")
    (target / "vllm/crlf.py").write_bytes(b"a = 1\r\nb = 22\r\nc = 4\r\n")
    capsys.readouterr()
    assert cli.main([str(target)], engine.root) == 1
    out, err = capsys.readouterr()
    error = err.splitlines()[-1]
    assert error.startswith("error: edited-since-apply: vllm/crlf.py was edited")
    assert "first at line 3" in error


def test_the_report_keys_are_there_on_success_and_refusal(engine, tmp_path):
    keys = {"release", "target", "kind", "state", "files", "error"}
    assert keys <= engine.ok(make_target(tmp_path / "t", "source")).keys()
    assert keys <= engine(tmp_path / "absent")[1].keys()


def test_an_upgrade_is_revert_then_apply(engine, tmp_path):
    target = make_target(tmp_path / "target", "installed")
    before = snapshot(target)
    engine.ok(target)
    newer = Engine(copy(engine.root, tmp_path / "newer"))
    (newer.root / "overlay/common/vllm/dsv4/table.json").write_bytes(b"[]\n")
    assert "--revert" in newer.refused("patch-changed", target)["message"]
    assert newer.ok(target, "--status")["state"] == "applied"
    newer.ok(target, "--revert")  # needs only what the target itself holds
    assert snapshot(target) == before
    newer.ok(target)
    assert (target / "vllm/dsv4/table.json").read_bytes() == b"[]\n"


def test_an_overlay_file_stays_executable_and_has_no_other_mode_of_its_own(engine, target):
    source = engine.root / "overlay/common/vllm/dsv4"
    (source / "main.py").chmod(0o700)
    (source / "table.json").chmod(0o600)
    engine.ok(target)
    modes = [(target / "vllm/dsv4" / name).stat().st_mode & 0o777 for name in ("main.py", "table.json")]
    assert modes == [0o755, 0o644]
