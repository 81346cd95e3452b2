"""An installed wheel stays one that pip understands, with the real pip."""

import base64
import csv
import hashlib
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from dsv4_overlay_tools import cli
from smallworld import EDITED, PRISTINE, RELEASE, make_target, metadata, record_row, snapshot


def make_wheel(folder, release, files=None):
    files = dict(PRISTINE if files is None else files)
    info = f"vllm-{release}.dist-info"
    files[f"{info}/METADATA"] = metadata(release)
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    rows = "".join(record_row(path, data) for path, data in files.items())
    files[f"{info}/RECORD"] = (rows + f"{info}/RECORD,,\n").encode()
    folder.mkdir(exist_ok=True)
    wheel = folder / f"vllm-{release}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return wheel


def check_listing(site):
    """Every row of RECORD is right, and every file of vLLM is listed once."""
    listing = next(site.glob("vllm-*.dist-info")) / "RECORD"
    listed = []
    for path, digest, size in csv.reader(listing.read_text().splitlines()):
        listed.append(path)
        if not digest:
            assert path.endswith((".pyc", "/RECORD")), path
            continue
        data = (site / path).read_bytes()
        expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == ("sha256=" + expected, len(data)), path
    assert len(listed) == len(set(listed))
    files = {p.relative_to(site).as_posix() for p in (site / "vllm").rglob("*") if p.is_file()}
    assert {f for f in files if not f.endswith(".pyc")} <= set(listed)


def test_listing_with_every_kind_of_row(engine, tmp_path):
    target = make_target(tmp_path / "t", "installed")
    listing = target / f"vllm-{RELEASE}.dist-info/RECORD"
    odd = listing.read_bytes().replace(b"\n", b"\r\n") + b'"vllm/a,b.py",,\r\nvllm/\xe9.txt,,\r\nvllm/x.pyc,,'
    listing.write_bytes(odd)
    (target / "vllm/a,b.py").write_bytes(b"")
    engine.ok(target)
    lines = listing.read_bytes().split(b"\r\n")
    assert b"\n" not in b"".join(lines) and b'"vllm/a,b.py",,' in lines and b"vllm/x.pyc,," in lines
    assert sum(line.startswith(b"vllm/config.py,") for line in lines) == 1
    assert any(line.startswith(b"vllm/_dsv4_overlay/record.json,sha256=") for line in lines)
    assert b"vllm/\xe9.txt,," in lines  # no UTF-8
    engine.ok(target, "--revert")
    assert listing.read_bytes() == odd


def test_listing_is_right(engine, tmp_path):
    target = make_target(tmp_path / "t", "installed")
    check_listing(target)
    engine.ok(target)
    check_listing(target)


def test_the_same_release_put_over_it_by_another_installer(engine, tmp_path):
    """Whose RECORD has other rows."""
    target = make_target(tmp_path / "t", "installed")
    engine.ok(target)
    make_target(target, "installed")
    listing = target / f"vllm-{RELEASE}.dist-info/RECORD"
    listing.write_bytes(f"vllm-{RELEASE}.dist-info/REQUESTED,,\n".encode() + listing.read_bytes())
    other = listing.read_bytes()
    notes = engine.ok(target, "--revert")["notes"]
    assert f"left as installed since then: vllm-{RELEASE}.dist-info/RECORD" in notes
    assert listing.read_bytes() == other and not (target / "vllm/_dsv4_overlay").exists()


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("venv") / "venv"
    venv.create(folder, with_pip=True, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    return folder / "bin/python", site


def run(python, *args):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run([python, *args], capture_output=True, text=True, env=env, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def pip(python, *args):
    return run(python, "-m", "pip", "--quiet", *args)


def ours(site):
    return sorted(
        path.relative_to(site).as_posix() for path in site.rglob("*")
        if "vllm" in path.relative_to(site).parts[0] or "dsv4" in path.name
    )


def install(python, site, wheel):
    pip(python, "install", "--no-index", "--no-deps", str(wheel))
    assert (site / "vllm/config.py").exists()


def test_uninstall_leaves_nothing(engine, tmp_path, environment):
    python, site = environment
    empty = snapshot(site).keys()
    install(python, site, make_wheel(tmp_path / "w", RELEASE))
    before = snapshot(site)
    engine.ok(site)
    engine.ok(site, "--revert")
    gone = before.keys() - snapshot(site).keys()
    assert all(name.endswith(".pyc") for name in gone)  # made anew when next imported
    assert {k: v for k, v in snapshot(site).items()} == {
        k: v for k, v in before.items() if k not in gone
    }

    report = engine.ok(site)
    assert report["kind"] == "installed"
    assert run(python, "-c", "import vllm.dsv4.main as m; print(m.run())").strip() == "went"
    run(python, "-c", "import vllm.sub.glue, vllm.noeol, vllm.empty")
    assert list((site / "vllm/dsv4/deep/__pycache__").iterdir())
    check_listing(site)
    shown = run(python, "-m", "pip", "show", "--files", "vllm")
    assert "vllm/dsv4/main.py" in shown and "vllm/_dsv4_overlay/record.json" in shown
    pip(python, "uninstall", "-y", "vllm")
    assert ours(site) == []
    assert snapshot(site).keys() == empty


def test_upgrade_takes_the_overlay_with_it(engine, tmp_path, environment):
    python, site = environment
    install(python, site, make_wheel(tmp_path / "w", RELEASE))
    engine.ok(site)
    run(python, "-c", "import vllm.dsv4.main")
    newer = make_wheel(tmp_path / "w", "1.0.1", {**PRISTINE, "vllm/config.py": b"newer = 1\n"})
    install(python, site, newer)
    assert (site / "vllm/config.py").read_bytes() == b"newer = 1\n"
    assert not (site / "vllm/_dsv4_overlay").exists() and not (site / "vllm/dsv4").exists()
    engine.refused("wrong-release", site)
    pip(python, "uninstall", "-y", "vllm")
    assert ours(site) == []


def killed(engine, site, place):
    """An apply that is killed when it is about to take `place`."""
    child = os.fork()
    if child == 0:
        real = os.replace
        os.replace = lambda a, b: os._exit(9) if str(b) == str(site / place) else real(a, b)
        cli.main([str(site), "--json"], engine.root)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("argv, release, place", [
    ([], RELEASE, "vllm/odd.py"),
    ([], "0.9.9", f"vllm-{RELEASE}.dist-info/RECORD"),
    ([], "1.0.1", "vllm/odd.py"),
    (["--revert"], "1.0.1", f"vllm-{RELEASE}.dist-info/RECORD"),
])  # fmt: skip
def test_another_install_over_an_interrupted_apply(engine, tmp_path, environment, release, argv, place):
    """pip replaces what its own list names. What it does not know is removed, what it installed is not touched."""
    python, site = environment
    install(python, site, make_wheel(tmp_path / "w", RELEASE))
    killed(engine, site, place)
    other = PRISTINE if release != "1.0.1" else {
        **PRISTINE, "vllm/config.py": b"newer = 1\n", "vllm/new.py": b""}  # fmt: skip
    if release == "1.0.1":
        del other["vllm/noeol.py"]
    wheel = make_wheel(tmp_path / "w", release, other)
    pip(python, "install", "--no-index", "--no-deps", "--force-reinstall", str(wheel))
    if release == RELEASE:  # each installer lists other files of its own
        with open(site / f"vllm-{RELEASE}.dist-info/RECORD", "a") as listing:
            listing.write(f"vllm-{RELEASE}.dist-info/other.pyc,,\n")
    if release == "1.0.1" and not argv:
        engine.refused("wrong-release", site)  # it has no series
    elif not argv:
        engine.ok(site)
    engine.ok(site, "--revert")
    files = {path: (site / path).read_bytes() for path in ours(site) if (site / path).is_file()}
    assert {path: data for path, data in files.items() if path.startswith("vllm/") and ".pyc" not in path} == other
    check_listing(site)
    pip(python, "uninstall", "-y", "vllm")
    assert ours(site) == []


def test_an_edit_of_what_was_installed_since_is_refused_with_a_way_out(engine, tmp_path, environment):
    python, site = environment
    install(python, site, make_wheel(tmp_path / "w", RELEASE))
    killed(engine, site, "vllm/odd.py")
    (site / "vllm/config.py").write_bytes(b"mine = 1\n")
    message = engine.refused("edited-since-apply", site, "--revert")["message"]
    kept = message.split("copy ")[1].split(" there")[0]
    (site / "vllm/config.py").write_bytes(Path(kept).read_bytes())
    engine.ok(site, "--revert")
    assert (site / "vllm/config.py").read_bytes() == PRISTINE["vllm/config.py"]
    pip(python, "uninstall", "-y", "vllm")
    assert ours(site) == []


def test_installed_means_the_active_python(engine, tmp_path, environment, monkeypatch):
    python, site = environment
    install(python, site, make_wheel(tmp_path / "w", RELEASE))
    monkeypatch.setenv("DSV4_OVERLAY_PYTHON", str(python))
    assert engine.ok("--installed")["target"] == str(site)
    assert (site / "vllm/config.py").read_bytes() == EDITED["vllm/config.py"]
    engine.ok("--installed", "--revert")
    pip(python, "uninstall", "-y", "vllm")


def test_a_target_folder_on_pythonpath(engine, tmp_path, monkeypatch):
    """pip install --target: several such folders, the first that has vLLM counts."""
    site = tmp_path / "unpacked"
    pip(sys.executable, "install", "--no-index", "--no-deps", "--target", str(site),
        str(make_wheel(tmp_path / "w", RELEASE)))  # fmt: skip
    other = make_target(tmp_path / "other", "installed", release="0.9.9")
    monkeypatch.setenv("DSV4_OVERLAY_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/none:{site}:{other}")
    report = engine.ok("--installed")
    assert (report["target"], report["release"]) == (str(site), RELEASE)
    check_listing(site)
