"""What benchmarks/charts.py takes from the results; the drawing itself needs matplotlib."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import charts  # noqa: E402


def serving(weights, rates, compiled=(), share=4, release="0.9.0"):
    def row(value, count):
        return {"output_throughput": value, "mean_ttft_ms": 1000 / value, "mean_tpot_ms": 1000 / value,
                "compiled": ["x.so"] if count in compiled else []}  # fmt: skip

    runs = {name: {"concurrency": {str(count): row(value, count) for count, value in of_run.items()}}
            for name, of_run in rates.items()}  # fmt: skip
    machine = {"overlay": {"overlay_version": "1.2.3"}, "versions": {"vllm": release}}
    return {"share_of": share, "tensor_parallel_size": 1, "weights": weights, "machine": machine, "runs": runs,
            "input_len": 8192, "output_len": 256, "speculation": None}  # fmt: skip


def test_serving_ratios():
    tied = serving("dummy", {"FlashMLA": {16: 100.0, 256: 100.0}, "FP8": {16: 110.0, 256: 190.0}}, compiled=[256])
    bars = charts.serving_bars([tied])
    of_machine = bars["the share of one of 4 GPUs, index scores tied, 1.2.3 on vLLM 0.9.0"]
    for key, *_ in charts.SERVING:
        assert of_machine[key] == {"FP8": {16: pytest.approx((1.1, 1.1, 1.1))}}  # 256 was compiled meanwhile
    again = serving("dummy, seeded index scores", {"FlashMLA": {16: 100.0}, "FP8": {16: 120.0}})
    repeats = [{key: value * factor for key, value in again["runs"]["FP8"]["concurrency"]["16"].items()
                if key != "compiled"} for factor in (0.9, 1.0, 1.1)]  # fmt: skip
    again["runs"]["FP8"]["concurrency"]["16"]["repeats"] = repeats
    for run in again["runs"].values():  # another load, which is left out
        run["concurrency"]["steady 16"] = run["concurrency"]["16"]
    bars = charts.serving_bars([tied, again])
    (machine,) = bars  # tied scores are out once measured again
    assert machine == "the share of one of 4 GPUs, 1.2.3 on vLLM 0.9.0"
    of_machine = bars[machine]
    assert list(of_machine["output_throughput"]["FP8"]) == [16]
    assert of_machine["output_throughput"]["FP8"][16] == pytest.approx((1.2, 1.08, 1.32))
    assert of_machine["mean_ttft_ms"]["FP8"][16] == pytest.approx((1.2, 1.2 / 1.1, 1.2 / 0.9))


def test_servers_in_turns_are_compared_next_to_each_other():
    """A machine that gets faster meanwhile changes no ratio, and a measurement without another has none."""
    result = serving("dummy", {"FlashMLA": {16: 150.0}, "DropIn": {16: 220.0}}) | {"together": 2}
    for run, rates in {"FlashMLA": [100.0, 200.0], "DropIn": [110.0, 240.0, 900.0]}.items():
        repeats = serving("dummy", {run: dict(enumerate(rates))})["runs"][run]["concurrency"]
        result["runs"][run]["concurrency"]["16"]["repeats"] = list(repeats.values())
    (bars,) = charts.serving_bars([result]).values()
    for key, *_ in charts.SERVING:
        assert bars[key]["DropIn"][16] == pytest.approx((1.15, 1.1, 1.2) if key == "output_throughput" else
                                                        (2 / (1 / 1.1 + 1 / 1.2), 1.1, 1.2))  # fmt: skip
    again = serving("dummy", {"FlashMLA": {16: 100.0}, "DropIn": {16: 90.0}}) | {"together": 2}
    (bars,) = charts.serving_bars([result, again]).values()  # two machines
    assert bars["output_throughput"]["DropIn"][16] == pytest.approx((1.1, 0.9, 1.2))
    newer = serving("dummy", {"FlashMLA": {16: 100.0}, "DropIn": {16: 90.0}}, release="0.10.0") | {"together": 2}
    assert len(charts.serving_bars([result, newer])) == 2


@pytest.mark.parametrize("other", [{"output_len": 6144}, {"input_len": 1024}, {"speculation": {"method": "mtp"}}])
def test_serving_of_something_else_is_not_drawn(other):
    """Of the same machine and version, so its bars would be in the same places."""
    burst = serving("dummy", {"FlashMLA": {16: 100.0}, "DropIn": {16: 110.0}})
    longer = serving("dummy", {"FlashMLA": {4: 100.0, 16: 100.0}, "DropIn": {4: 150.0, 16: 150.0}}) | other
    assert charts.serving_bars([burst, longer]) == charts.serving_bars([burst])


def test_committed_serving_results_can_be_drawn():
    found = [json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob("serve_*.json")]
    bars = charts.serving_bars([result for result in found if "FlashMLA" in result.get("runs", {})])
    assert len(bars) >= 2
    for of_machine in bars.values():
        assert {key for key, *_ in charts.SERVING} == of_machine.keys()
        assert all(0.5 < ratio < 2 for of_key in of_machine.values() for of_run in of_key.values()
                   for ratio, *_ in of_run.values())  # fmt: skip


def test_kernels_of_a_step(tmp_path):
    files = {}
    for (name, run), times in zip(charts.STEPS.values(), ((3.0, 9.0), (8.0, 4.0)), strict=True):
        of = zip(("attention", "experts"), times, strict=True)
        kinds = {kind: {"us": us, "launches": 2.0} for kind, us in of}
        files.setdefault(name, {})[run] = {"decode_step": {"kinds": kinds}}
    for name, runs in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"runs": runs}))
    stock, ours = charts.step_kinds(tmp_path).values()
    assert list(stock.items()) == [("experts", (9, 2)), ("attention", (3, 2))]
    assert list(ours.items()) == [("experts", (4, 2)), ("attention", (8, 2))]


def test_attention_ratios():
    row = {"rows": "e4m3", "phase": "decode", "heads": 8, "tokens": 16, "speedup": 2.0,
           "rounds": {"speedup": [1.9, 2.0, 2.2]}}  # fmt: skip
    rows = [row, row | {"phase": "prompt", "tokens": 4096, "rows": "bf16"}, row | {"rows": "584"},
            row | {"phase": "mixed", "tokens": 128},
            row | {"heads": 64, "rows": "584", "speedup": 0.9}]  # fmt: skip
    assert charts.attention_bars({"results": rows}) == {
        "584": {"decode, 16 tokens": {8: (2.0, 1.9, 2.2)}},
        "fp8": {"decode, 16 tokens": {8: (2.0, 1.9, 2.2)}},
        "bf16": {"prefill, a prompt of 4096": {8: (2.0, 1.9, 2.2)}},
    }


def test_committed_results_have_one_row_of_a_call():
    """Each phase of a cache, of all that is drawn, and none of them twice."""
    rows = charts.kernel_results(ROOT / "benchmarks/results")["results"]
    calls = [tuple(row[key] for key in ("rows", "phase", "tokens", "heads")) for row in rows]
    assert len(calls) == len(set(calls))
    bars = charts.attention_bars({"results": rows})
    assert all(list(of) == [label for *_, label in charts.ATTENTION] for of in bars.values())
    assert all(len(by_heads) == 5 for of in bars.values() for phase, by_heads in of.items() if "decode" in phase)
    assert {len(by_heads) for cache in ("fp8", "bf16") for by_heads in bars[cache].values()} == {5}


def test_users_of_the_committed_results():
    """Both servers of each load that is drawn."""
    found = charts.users(ROOT / "benchmarks/results")
    assert list(found) == [label for label, *_ in charts.LOADS]
    assert all(len(points) == 2 and min(map(min, points)) > 0 for points in found.values())
