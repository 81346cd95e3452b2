"""check-release.sh: what became of each seam in a release that has no series."""

from pathlib import Path

import pytest
from dsv4_overlay_tools import porting
from smallworld import OVERLAY, PRISTINE, RELEASE, make_repo, sha256, write

CONFIG = PRISTINE["vllm/config.py"]


@pytest.fixture
def ask(tmp_path, capsys):
    repo = make_repo(tmp_path / "repo")

    def run(files, release="1.0.1", *options):
        write(tmp_path / "new", files)
        status = porting.check_release_main([release, "--pristine", str(tmp_path / "new"), *options], repo)
        return status, capsys.readouterr().out

    run.repo = repo
    return run


def seams(out, path):
    return [line.split()[0] for line in out.splitlines() if f" {path}:" in line and not line.startswith(" ")]


def test_the_release_itself(ask):
    status, out = ask(PRISTINE)
    assert status == 0 and "8 applies, 0 moved, 0 changed, 0 upstream: the series fits" in out


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


@pytest.mark.parametrize("where", ["vllm/config.py", "vllm/sub/elsewhere.py"])
def test_already_upstream(ask, where):
    patch = ask.repo / f"patches/{RELEASE}/config.patch"
    patch.write_bytes(patch.read_bytes().replace(b"Files:", b"Upstream-Sign: ^line30 = 31$\nFiles:"))
    assert ask(PRISTINE)[0] == 0
    status, out = ask(PRISTINE | {where: CONFIG.replace(b"line30 = 30", b"line30 = 31")})
    assert status == 1 and f"upstream  config.patch: {where}:31\n" in out


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("from vllm.sub.untouched import value\n", None),
        ("from vllm.sub import untouched\nfrom vllm.dsv4.deep import inner\nimport os\n", None),
        ("def f():\n    from vllm.sub.untouched import gone\n", "from vllm.sub.untouched import gone"),
        ("from vllm.sub.gone import value\n", "from vllm.sub.gone import value"),
    ],
)
def test_what_the_overlay_imports(ask, source, missing):
    write(ask.repo / "overlay", OVERLAY | {"common/vllm/dsv4/main.py": source.encode()})
    status, out = ask(PRISTINE)
    assert status == bool(missing)
    assert ("changed   overlay: vllm/dsv4/main.py:" in out) == bool(missing)
    assert missing is None or f"- {missing}\n" in out


def test_what_is_relied_on_and_not_patched(ask):
    path = "vllm/sub/relied.py"
    status, out = ask(PRISTINE | {path: b"def renamed(): ...\n"})
    assert status == 1 and f"changed   relied on: {path}: other bytes; read them\n" in out
    (ask.repo / "../new" / path).unlink()
    status, out = ask({})
    assert status == 1 and f"changed   relied on: {path}: there is no such file\n" in out


def test_a_release_that_is_served_has_its_own_pins(ask):
    path, data = "vllm/sub/relied.py", b"value = 1\n"
    pins = ask.repo / f"patches/{RELEASE}/release.toml"
    with pins.open("a") as file:
        file.write(f'\n[also."0.9.9".files]\n"{path}" = "{sha256(data)}"\n')
    assert ask(PRISTINE | {path: data}, "0.9.9")[0] == 0
    assert ask(PRISTINE | {path: data}, "1.0.0")[0] == 1


def test_the_nearest_series_below_is_the_base(ask):
    make_repo(ask.repo, release="1.2.0")
    for release, base in (("0.5.0", "1.0.0"), ("0.9.9", "1.0.0"), ("1.1.0", "1.0.0"), ("2.0.0", "1.2.0")):
        assert f"vLLM {release} (" in (out := ask(PRISTINE, release)[1]) and f"the series of {base}\n" in out
    assert "the series of 1.0.0\n" in ask(PRISTINE, "2.0.0", "--base", "1.0.0")[1]


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
