"""support-matrix.sh: the tables of releases in README.md and docs."""

import json
import sys

import pytest
from smallworld import RELEASE, ROOT, SERIES, make_repo

sys.path.insert(0, str(ROOT / "benchmarks"))
import support_matrix  # noqa: E402
from support_matrix import END, START, main  # noqa: E402

DROP_IN = "patches/drop-in/1.2.0"
PAGES = ("README.md", "docs/releases.md")


@pytest.fixture
def repo(tmp_path):
    repo = make_repo(tmp_path)
    make_repo(tmp_path, release="1.2.0", name="drop-in", served=["1.0.0", "1.1.0", "1.1.1"])
    for folder, gpus in ((SERIES, 'hopper = "served"\nblackwell = "refused"'), (DROP_IN, 'hopper = "faster"')):
        with (repo / folder / "release.toml").open("a") as file:
            file.write(f"\n[gpus]\n{gpus}\n")
    (repo / "docs").mkdir()
    for page in PAGES:
        (repo / page).write_text(f"before\n{START}old\n{END}after\n")
    (repo / "benchmarks/results").mkdir(parents=True)
    return repo


def add_result(repo, name, **changes):
    result = {"machine": {"gpus": ["NVIDIA H200, 1"], "overlay": {"release": RELEASE}},
              "bars": [{"bar": "", "passed": True}],
              "steps": {"fp8": {"prefix": {"ok": True}}, "bf16": {"prefix": {"ok": False}}}}  # fmt: skip
    (repo / f"benchmarks/results/{name}.json").write_text(json.dumps(result | changes))


def test_rows_of_every_release_served(repo):
    assert main([], repo) == 0
    text = (repo / "README.md").read_text()
    assert text.startswith(f"before\n{START}| vLLM |") and text.endswith(f"|\n{END}after\n")
    assert "| vLLM | drop-in, Hopper (H100, H200) | full-width, Hopper (H100, H200) | full-width, Bl" in text
    rows = ["0.9.9 | – | not run | not run", "1.0.0 | not run | not run | not run"]
    rows.append("1.1.0 to 1.2.0 | not run | – | –")
    assert "|---|---|---|---|\n" + "".join(f"| {row} |\n" for row in rows) + END in text
    full = (repo / PAGES[1]).read_text()
    assert full == (
        f"before\n{START}### drop-in\n\n| vLLM | patches, lines | Hopper (H100, H200) |\n|---|---|---|\n"
        "| 1.0.0 to 1.1.1 | those of 1.2.0 | faster; not run |\n| 1.2.0 | 2, 7 | faster; not run |\n\n"
        "### full-width\n\n| vLLM | patches, lines | Hopper (H100, H200) | Blackwell (B200, B300) |\n"
        "|---|---|---|---|\n"
        "| 0.9.9 | those of 1.0.0 | served; not run | refused; not run |\n"
        f"| 1.0.0 | 2, 7 | served; not run | refused; not run |\n{END}after\n"
    )


def test_stale_with_every_new_fact(repo, capsys):
    for change in (
        lambda: None,
        lambda: add_result(repo, "accuracy_e2e_a"),
        lambda: add_result(repo, "features_c"),
        lambda: add_result(repo, "accuracy_e2e_b", bars=[{"bar": "", "passed": p} for p in (True, False, None)]),
        lambda: (repo / f"{SERIES}/series").write_text("config.patch\n"),
    ):
        change()
        before = (repo / "README.md").read_bytes()
        assert main(["--check"], repo) == 1 and "is stale; run" in capsys.readouterr().err
        assert (repo / "README.md").read_bytes() == before
        assert main([], repo) == 0 and main(["--check"], repo) == 0
    a, b, c = (f"../benchmarks/results/{name}.json" for name in ("accuracy_e2e_a", "accuracy_e2e_b", "features_c"))
    words = f"H200: 2 of 3 bars, 1 not run ([1]({a}), [2]({b})), [1 of 2 steps]({c})"
    assert f"| served; {words} |" in (repo / PAGES[1]).read_text()
    assert f"| {RELEASE} | not run | 3 of 5 checks passed | not run |" in (repo / PAGES[0]).read_text()


def test_what_a_check_is_about(repo):
    """What FlashMLA does by itself is about no series."""
    bars = [{"bar": "KL(truth|drop_in)", "passed": True}, {"bar": "KL(truth|bf16)", "passed": False}]
    bars.append({"bar": "KL(truth|sparse_bf16)", "passed": True})  # of sparse-mla, which is no series here
    add_result(repo, "accuracy_e2e_a", bars=bars)
    backends = ("flashmla", "stock", "bf16", "flashmla_fp8", "sparse_fp8")
    steps = {backend: {"prefix": {"ok": True}} for backend in backends}
    add_result(repo, "features_a", steps=steps)
    assert main([], repo) == 0
    row = "2 of 2 checks passed | 1 of 2 checks passed | not run |"
    assert f"| {RELEASE} | {row}" in (repo / PAGES[0]).read_text()


def test_a_speed_is_no_check(repo):
    overlay = {"release": RELEASE, "series": {"full-width": RELEASE, "small-kernels": RELEASE}}
    where = {"gpus": ["NVIDIA H200, 1"], "overlay": overlay}
    add_result(repo, "throughput_a", runs=dict.fromkeys(("flashmla", "fp8", "fp8-2"), {"ok": True}), machine=where)
    for name, runs in {"throughput_b": ("flashmla", "fp8"), "throughput_c": ("drop_in",)}.items():
        every = {run: {"ok": run == "flashmla"} for run in runs}  # ours failed there
        add_result(repo, name, runs=every, machine=where | {"overlay": {"release": RELEASE, "series": {}}})
    assert main([], repo) == 0
    assert "served; H200: [speed](../benchmarks/results/throughput_a.json) |" in (repo / PAGES[1]).read_text()
    assert f"| {RELEASE} | not run | not run | not run |" in (repo / PAGES[0]).read_text()


def test_accuracy_of_experts_is_no_check(repo):
    runs = {"marlin": {"ok": True}, "fp8_experts": {"ok": True}, "humming": {"ok": False}}
    add_result(repo, "accuracy_e2e_a_experts", bars=[{"bar": "", "passed": None}], runs=runs)
    found = {("H200", "accuracy"): [("../benchmarks/results/accuracy_e2e_a_experts.json", 0, 0, 0)]}
    assert support_matrix.evidence(repo) == {(RELEASE, "fp8-experts", "hopper"): found}


def test_results_that_are_no_evidence(repo):
    assert main([], repo) == 0
    (repo / "benchmarks/results/list.json").write_text("[]")
    add_result(repo, "scales")
    for kind in ("accuracy_e2e", "throughput"):
        add_result(repo, f"{kind}_stock", runs={"fp8": {}}, machine={"gpus": ["NVIDIA H200"], "overlay": None})
    for gpu, release in (("B200", RELEASE), ("H200", "0.1.0")):
        add_result(repo, f"accuracy_e2e_{gpu}", machine={"gpus": [gpu], "overlay": {"release": release}})
    assert main(["--check"], repo) == 0


@pytest.mark.parametrize("what", ["markers", "gpus"])
def test_what_is_missing_is_named(repo, capsys, what):
    if what == "markers":
        (repo / PAGES[1]).write_text("no table\n")
    else:
        pins = repo / f"{SERIES}/release.toml"
        pins.write_text(pins.read_text().partition("[gpus]")[0])
    assert main([], repo) == 1
    assert {"markers": "lacks the lines", "gpus": "lacks 'gpus'"}[what] in capsys.readouterr().err
