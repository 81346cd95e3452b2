"""Several series of one release: each alone, all together, and what is refused."""

import json
import shutil

import pytest
from dsv4_overlay_tools import cli, maintain, porting
from smallworld import (
    EDITED,
    OVERLAY,
    PRISTINE,
    RELEASE,
    SERIES,
    Engine,
    copy,
    git,
    make_repo,
    make_target,
    sha256,
    snapshot,
    write,
)

DROP_IN = f"patches/drop-in/{RELEASE}"
CONFIG = "vllm/config.py"  # that both change
OWN = "vllm/sub/untouched.py"  # that only the drop-in changes
RELIED = "vllm/tool.sh"  # that the drop-in relies on, and full-width changes


def edit(data, line=b"line20 = 20\n"):
    return data.replace(line, line + b"from vllm.dropped import go\n")


def add_drop_in(root, line=b"line20 = 20\n"):
    make_repo(
        root,
        name="drop-in",
        patches={"seam.patch": [CONFIG, OWN]},
        edited={CONFIG: edit(PRISTINE[CONFIG], line), OWN: PRISTINE[OWN] + b"more = 1\n"},
        overlay=OVERLAY | {"common/vllm/dropped.py": b"def go(): ...\n"},
        served=["0.9.9", "1.1.0"],
    )
    with (root / DROP_IN / "release.toml").open("a") as pins:
        pins.write(f'"{RELIED}" = "{sha256(PRISTINE[RELIED])}"\n')
    return root


@pytest.fixture
def engine(tmp_path):
    return Engine(add_drop_in(make_repo(tmp_path / "repo")))


def expected(*names):
    changed = {}
    if "full-width" in names:
        changed |= EDITED | {path.partition("/")[2]: data for path, data in OVERLAY.items()}
    if "drop-in" in names:
        changed |= {OWN: PRISTINE[OWN] + b"more = 1\n", CONFIG: edit(changed.get(CONFIG, PRISTINE[CONFIG]))}
        changed["vllm/dropped.py"] = b"def go(): ...\n"
    return changed


@pytest.mark.parametrize("names", [["drop-in"], ["full-width"], ["drop-in", "full-width"]], ids="+".join)
def test_each_alone_and_both_together(engine, target, names):
    options = ["--series", names[0]] if len(names) == 1 else []
    before = snapshot(target)
    planned = engine.ok(target, "--check", *options)
    report = engine.ok(target, *options)
    wanted = expected(*names)
    for path, data in (PRISTINE | wanted).items():
        assert (target / path).read_bytes() == data, path
    ours = {file["path"] for file in report["files"] if file["action"] != "updated"}
    assert ours == {file["path"] for file in planned["files"] if file["action"] != "would-update"} == wanted.keys()
    record = json.loads((target / "vllm/_dsv4_overlay/record.json").read_text())
    assert record["series"] == dict.fromkeys(names, RELEASE) and report["series"] == names
    assert {patch["name"].partition("/")[0] for patch in record["patches"]} == set(names)
    assert engine.ok(target, "--status")["series"] == names
    assert engine.ok(target, *options)["notes"][-1] == "already applied; nothing to do"
    (target / RELIED).write_bytes(b"edited")
    code = "edited-since-apply" if "full-width" in names else "source-changed"
    assert engine.refused(code, target, "--status")["path"] == RELIED
    (target / RELIED).write_bytes((PRISTINE | wanted)[RELIED])
    engine.ok(target, "--revert")
    assert snapshot(target) == before


def test_on_request(engine, target):
    """Such a series is applied where it is named, alone or with others, and told from then on like any."""
    pins = engine.root / DROP_IN / "release.toml"
    pins.write_text("on_request = true\n" + pins.read_text())
    assert engine.ok(target)["series"] == ["full-width"]
    assert engine.ok(target, "--series", "default")["notes"][-1] == "already applied; nothing to do"
    both = engine.refused("patch-changed", target, "--series", "default", "--series", "drop-in")["message"]
    assert " has full-width applied, and not drop-in, full-width; run with --revert first" in both
    assert engine.refused("patch-changed", target, "--series", "drop-in")["message"].endswith("with --series.")
    engine.ok(target, "--revert")
    for names in (["drop-in"], ["full-width", "drop-in"], ["drop-in", "default"]):
        options = [word for name in names for word in ("--series", name)]
        names = ["full-width" if name == "default" else name for name in names]
        assert engine.ok(target, *options)["series"] == sorted(names)
        assert engine.ok(target, "--status")["series"] == sorted(names)
        shutil.rmtree(target / "vllm/_dsv4_overlay")
        assert engine.refused("record-lost", target, "--revert")["path"] in (CONFIG, OWN)
        write(target, PRISTINE)
        for path in expected(*names).keys() - PRISTINE.keys():
            (target / path).unlink()
        assert engine.ok(target, "--revert")["state"] == "clean"


def test_the_patches_of_a_file_are_named(engine, tmp_path):
    target = make_target(tmp_path / "t", "source")
    engine.ok(target)
    record = json.loads((target / "vllm/_dsv4_overlay/record.json").read_text())
    named = {entry["path"]: entry["patch"] for entry in record["files"]}
    assert named[CONFIG] == "drop-in/seam.patch, full-width/config.patch" and named[OWN] == "drop-in/seam.patch"


def test_a_release_takes_what_it_has(engine, tmp_path):
    """Another release that both serve, one that only the drop-in does, and one that none does."""
    for release, names in (("0.9.9", ["drop-in", "full-width"]), ("1.1.0", ["drop-in"])):
        target = make_target(tmp_path / release, "source", release=release)
        assert engine.ok(target)["series"] == names
    before = snapshot(target)
    message = engine.refused("no-series", target, "--check", "--series", "full-width")["message"]
    assert message == "vLLM 1.1.0 has no series 'full-width'; it has: drop-in." and snapshot(target) == before
    other = make_target(tmp_path / "other", "source", release="3.0.0")
    assert "; supported: 0.9.9, 1.0.0, 1.1.0." in engine.refused("wrong-release", other)["message"]


def test_a_series_that_there_is_not(engine, target, tmp_path):
    before = snapshot(target)
    for options in ([], ["--check"]):
        message = engine.refused("no-series", target, "--series", "dropin", *options)["message"]
        assert message == "vLLM 1.0.0 has no series 'dropin'; it has: drop-in, full-width."
    assert snapshot(target) == before
    new = tmp_path / "new"
    engine.refused("no-series", "--fetch", RELEASE, new, "--series", "dropin")
    assert not new.exists()


def test_series_goes_with_apply_and_check(engine, target, capsys):
    before = snapshot(target)
    for mode in ("--status", "--revert"):
        assert cli.main([str(target), mode, "--series", "drop-in"], engine.root) == 2
        assert "error: usage: --series goes with apply and --check" in capsys.readouterr().err
    assert snapshot(target) == before


def test_another_choice_needs_a_revert_first(engine, target):
    engine.ok(target, "--series", "drop-in")
    before = snapshot(target)
    for options, asked in (([], "drop-in, full-width"), (["--series", "full-width"], "full-width")):
        for mode in ([], ["--check"]):
            message = engine.refused("patch-changed", target, *options, *mode)["message"]
            assert f" has drop-in applied, and not {asked}; run with --revert first" in message
    assert snapshot(target) == before
    engine.ok(target, "--revert")
    engine.ok(target)


def test_what_is_applied_and_gone_from_the_repository(engine, target):
    engine.ok(target)
    for file in (engine.root / DROP_IN).iterdir():
        file.unlink()
    assert engine.ok(target, "--status")["series"] == ["drop-in", "full-width"]
    message = engine.refused("patch-changed", target)["message"]
    assert " has drop-in, full-width applied, and not full-width; run with --revert first" in message
    engine.ok(target, "--revert")


def test_series_that_want_the_same_lines(tmp_path, capsys):
    """Each alone is fine; together it is refused, and check-series finds it."""
    engine = Engine(add_drop_in(make_repo(tmp_path / "repo"), line=b"line31 = 31\n"))
    target = make_target(tmp_path / "t", "source")
    before = snapshot(target)
    message = engine.refused("bad-series", target)["message"]
    assert message.startswith("drop-in/seam.patch, full-width/config.patch does not fit line 31")
    assert snapshot(target) == before
    for name in ("drop-in", "full-width"):
        engine.ok(target, "--series", name)
        engine.ok(target, "--revert")
    assert maintain.check_main([RELEASE, "--pristine", str(target)], engine.root) == 1
    said = f"drop-in/seam.patch, full-width/config.patch do not fit {CONFIG} of vLLM {RELEASE} together\n"
    assert said in capsys.readouterr().err
    pins = engine.root / DROP_IN / "release.toml"
    pins.write_text("on_request = true\n" + pins.read_text())
    assert maintain.check_main([RELEASE, "--pristine", str(target)], engine.root) == 1
    assert said in capsys.readouterr().err


def test_others_change_what_a_series_does_not_pin(engine, monkeypatch):
    """Of another release that it serves, check has the files it pins; for the rest, the others' check looks."""
    own = "vllm/__init__.py"
    folder = engine.root / f"patches/third/{RELEASE}"
    make_repo(engine.root, name="third", patches={"one.patch": [own]}, edited={own: b"more = 1\n"}, overlay={})
    monkeypatch.setattr(maintain.fetch, "archive", lambda series, release: release)
    monkeypatch.setattr(maintain, "pristine_from_archive", lambda release: PRISTINE)
    problems, _ = maintain.check(engine.root, folder, lambda series: PRISTINE, served=True)
    assert not [problem for problem in problems if "together" in problem]


@pytest.mark.parametrize("options", [[], ["--series", "drop-in"]])
def test_a_record_that_git_clean_took(engine, tmp_path, options):
    target = make_target(tmp_path / "t", "git")
    engine.ok(target, *options)
    git(target, "clean", "-q", "-f", "-d")
    message = engine.refused("record-lost", target, "--revert")["message"]
    assert CONFIG in message and OWN in message


def exported(engine, tree, pristine, capsys, *options):
    capsys.readouterr()
    status = maintain.export_main([RELEASE, str(tree), "--pristine", str(pristine), *options], engine.root)
    return status, capsys.readouterr()


def test_export_of_one_of_several(engine, tmp_path, capsys):
    pristine = make_target(tmp_path / "pristine", "source")
    tree = copy(pristine, tmp_path / "tree")
    engine.ok(tree)
    before = snapshot(engine.root)
    for options, said in (
        ([], "no-series: The series made for vLLM 1.0.0 are: drop-in, full-width; choose one with --series."),
        (["--series", "new"], "are: drop-in, full-width; none is called 'new'."),
        (["--series", "drop-in"], f"unowned-change: {tree} has the series drop-in and full-width applied, "),
    ):
        status, (_, err) = exported(engine, tree, pristine, capsys, *options)
        assert status == 1 and said in err
    engine.ok(tree, "--revert")
    engine.ok(tree, "--series", "drop-in")
    assert exported(engine, tree, pristine, capsys, "--series", "full-width")[0] == 1
    status, (out, err) = exported(engine, tree, pristine, capsys, "--series", "drop-in")
    assert (status, err) == (0, "") and "nothing to write" in out and snapshot(engine.root) == before
    (tree / OWN).write_bytes(b"value = 2\n")
    assert exported(engine, tree, pristine, capsys, "--series", "drop-in")[0] == 0
    assert b"+value = 2\n" in (engine.root / DROP_IN / "seam.patch").read_bytes()
    assert maintain.check_main([RELEASE, "--pristine", str(pristine)], engine.root) == 0


def test_check_series(engine, tmp_path, capsys):
    """Every series of the release; what one leads to is not unused; a name that nothing has is found."""
    pristine = make_target(tmp_path / "pristine", "source")
    assert maintain.check_main([RELEASE, "--pristine", str(pristine)], engine.root) == 0
    out = capsys.readouterr().out
    assert "drop-in 1.0.0: seam.patch: 2 lines added\n" in out and "full-width 1.0.0: 7 of 200 lines\n" in out
    (engine.root / "overlay/common/vllm/dropped.py").rename(engine.root / "overlay/common/vllm/other.py")
    assert maintain.check_main([RELEASE, "--pristine", str(pristine)], engine.root) == 1
    err = capsys.readouterr().err
    assert "drop-in 1.0.0: seam.patch uses vllm.dropped, which neither vLLM nor the overlay has\n" in err
    assert "error: overlay/common/vllm/other.py is used by nothing\n" in err
    assert maintain.check_main(["3.0.0"], engine.root) == 1
    assert "error: wrong-release: There is no patch series for vLLM 3.0.0; supported: " in capsys.readouterr().err
    assert maintain.check_main(["0.9.9"], engine.root) == 1
    said = "error: no-series: vLLM 0.9.9 takes series made for 1.0.0; give one of these.\n"
    assert said in capsys.readouterr().err


def test_check_series_fails_if_only_the_first_is_wrong(engine, tmp_path, capsys):
    pristine = make_target(tmp_path / "pristine", "source")
    patch = engine.root / "patches/drop-in/1.0.0/seam.patch"
    patch.write_bytes(patch.read_bytes().replace(b"2026-01-31", b"2026-01-32"))
    assert maintain.check_main([RELEASE, "--pristine", str(pristine)], engine.root) == 1
    error = "error: drop-in 1.0.0: seam.patch: Last-Update is not a date like 2026-01-31\n"
    assert capsys.readouterr().err == error


def test_check_release_says_what_is_supported(engine, tmp_path, capsys):
    tree = tmp_path / "vllm"
    write(tree, PRISTINE)

    def ask(release, *options):
        status = porting.check_release_main([release, "--pristine", str(tree), *options], engine.root)
        out, err = capsys.readouterr()
        return status, out.splitlines()[-3:], err

    status, lines, _ = ask(RELEASE)
    assert status == 0 and [line.partition(":")[0] for line in lines[:2]] == ["drop-in", "full-width"]
    assert all(line.endswith(": the series fits.") for line in lines[:2])
    assert lines[2] == "vLLM 1.0.0 is supported: drop-in, full-width."
    status, lines, _ = ask("1.1.0")  # it has the one, and is not asked for the other
    assert status == 0 and lines[1].startswith("drop-in: ") and lines[1].endswith(": the series fits.")
    assert lines[2] == "vLLM 1.1.0 is supported: drop-in, not full-width."
    status, lines, _ = ask("1.1.0", "--series", "full-width")
    assert status == 0 and lines[1].endswith("the series fits; name the release in `serves`.")
    assert lines[2] == "vLLM 1.1.0 has no series full-width."
    write(tree, {CONFIG: PRISTINE[CONFIG].replace(b"line3 = 3\n", b"line3 = 0\n")})
    status, lines, _ = ask("1.2.0")
    assert status == 1 and lines[0].endswith("the series fits; name the release in `serves`.")
    assert lines[1].startswith("full-width: ") and lines[1].endswith("a port is needed; docs/porting.md.")
    write(tree, {CONFIG: PRISTINE[CONFIG], OWN: b"value = 'otherwise'\n"})
    status, lines, _ = ask("1.2.0")  # now only the first does not fit
    assert status == 1 and lines[0].endswith("a port is needed; docs/porting.md.")
    assert lines[1].startswith("full-width: ") and lines[1].endswith("name the release in `serves`.")
    assert lines[2] == "vLLM 1.2.0 is not supported."
    status, _, err = ask("1.2.0", "--series", "dropin")
    assert status == 2 and err == "error: no-series: There is no series 'dropin'; there is: drop-in, full-width.\n"


def test_pins_that_two_series_have_otherwise(engine, target):
    pins = engine.root / SERIES / "release.toml"
    pins.write_text(pins.read_text().replace(sha256(PRISTINE[RELIED]), "0" * 64))
    before = snapshot(target)
    message = engine.refused("bad-series", target)["message"]
    assert f"another series has another sha256 for {RELIED}" in message and snapshot(target) == before
