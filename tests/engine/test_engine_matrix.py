"""support-matrix.sh: the README's table of releases."""

import json
import sys

import pytest
from smallworld import RELEASE, ROOT, make_repo

sys.path.insert(0, str(ROOT / "benchmarks"))
from support_matrix import END, START, main  # noqa: E402


@pytest.fixture
def repo(tmp_path):
    repo = make_repo(tmp_path)
    with (repo / f"patches/{RELEASE}/release.toml").open("a") as file:
        file.write('\n[gpus]\nhopper = "served"\nblackwell = "refused"\n')
    (repo / "README.md").write_text(f"before\n{START}old\n{END}after\n")
    (repo / "benchmarks/results").mkdir(parents=True)
    return repo


def add_result(repo, name, **changes):
    result = {"machine": {"gpus": ["NVIDIA H200, 1"], "overlay": {"release": RELEASE}}, "bars": [{"passed": True}],
              "steps": {"fp8": {"prefix": {"ok": True}}, "bf16": {"prefix": {"ok": False}}}}  # fmt: skip
    (repo / f"benchmarks/results/{name}.json").write_text(json.dumps(result | changes))


def test_rows_of_every_release_served(repo):
    assert main([], repo) == 0
    text = (repo / "README.md").read_text()
    assert text.startswith(f"before\n{START}| vLLM |") and text.endswith(f"|\n{END}after\n")
    assert "| 0.9.9 | of 1.0.0 | served; not run | refused; not run |\n| 1.0.0 | 2, 7 lines |" in text


def test_stale_with_every_new_fact(repo, capsys):
    for change in (
        lambda: None,
        lambda: add_result(repo, "accuracy_e2e_a"),
        lambda: add_result(repo, "features_c"),
        lambda: add_result(repo, "accuracy_e2e_b", bars=[{"passed": True}, {"passed": False}, {"passed": None}]),
        lambda: (repo / f"patches/{RELEASE}/series").write_text("config.patch\n"),
    ):
        change()
        before = (repo / "README.md").read_bytes()
        assert main(["--check"], repo) == 1 and "is stale; run" in capsys.readouterr().err
        assert (repo / "README.md").read_bytes() == before
        assert main([], repo) == 0 and main(["--check"], repo) == 0
    bars = {"accuracy_e2e_a": "1 of 1 bars", "accuracy_e2e_b": "1 of 2 bars, 1 not run"}
    ran = bars | {"features_c": "1 of 2 steps"}
    links = (f"[{words}](benchmarks/results/{name}.json) on H200" for name, words in ran.items())
    assert f"| served; {'; '.join(links)} |" in (repo / "README.md").read_text()


def test_results_that_are_no_evidence(repo):
    assert main([], repo) == 0
    (repo / "benchmarks/results/list.json").write_text("[]")
    add_result(repo, "scales")
    add_result(repo, "accuracy_e2e_stock", machine={"gpus": ["NVIDIA H200"], "overlay": None})
    for gpu, release in (("B200", RELEASE), ("H200", "0.1.0")):
        add_result(repo, f"accuracy_e2e_{gpu}", machine={"gpus": [gpu], "overlay": {"release": release}})
    assert main(["--check"], repo) == 0


@pytest.mark.parametrize("what", ["markers", "gpus"])
def test_what_is_missing_is_named(repo, capsys, what):
    if what == "markers":
        (repo / "README.md").write_text("no table\n")
    else:
        pins = repo / f"patches/{RELEASE}/release.toml"
        pins.write_text(pins.read_text().partition("[gpus]")[0])
    assert main([], repo) == 1
    assert {"markers": "lacks the lines", "gpus": "lacks 'gpus'"}[what] in capsys.readouterr().err
