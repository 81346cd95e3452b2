"""benchmarks/sparse_mla.py: which rows are attended to, and what is made of the times. Times need a GPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import sparse_mla as bench  # noqa: E402
from vllm.third_party.mla_kernels import sparse_mla  # noqa: E402


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "PAGES", 64)
    monkeypatch.setattr(bench, "CALLS", 2)
    torch.manual_seed(0)


def prompt_rows(first, tokens, top_k):
    """With the page tables that were drawn, so that rows can be taken back to places in the prompt."""
    drawn = []
    draw = torch.randperm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", lambda *args, **kwargs: drawn.append(draw(*args, **kwargs)) or drawn[-1])
        rows = bench.of_a_prompt(first)(tokens, top_k)
    return rows, drawn


@pytest.mark.parametrize("first", [0, 320])
def test_rows_of_a_prompt_are_causal(first):
    tokens, top_k = 192, 40
    rows, tables = prompt_rows(first, tokens, top_k)
    pages = (first + tokens) // bench.PAGE
    for call, table in enumerate(tables):
        place = torch.empty(bench.PAGES * bench.PAGE, dtype=torch.int64)  # of a row, window and compressed apart
        for part in (table[:pages], table[pages:]):
            own = (part[:, None] * bench.PAGE + torch.arange(bench.PAGE)).flatten()
            place[own] = torch.arange(len(own))
        for token in range(tokens):
            position = first + token
            window = place[rows.window[call, token, : rows.window_lens[token]].long()]
            assert window.tolist() == list(range(max(0, position - 127), position + 1))
            picks = place[rows.picked[call, token, : rows.picked_lens[token]].long()].tolist()
            assert len(picks) == len(set(picks)) == min(top_k, (position + 1) // 4)
            assert all(4 * pick + 3 <= position for pick in picks)


def test_both_attend_to_the_same_keys():
    """`packed` is what FlashMLA gets, `indices` and lengths what the providers do."""
    rows, _ = prompt_rows(0, 192, 40)
    pool = torch.randn(bench.PAGES, bench.PAGE, 1, 512).bfloat16()
    query = torch.randn(192, 1, 8, 512).bfloat16()
    out = sparse_mla(
        query, pool, None, rows.indices()[1], pool, rows.picked_lens + 128, rows.window_lens,
        bmm1_scale=bench.SCALE, kv_layout="NHD", provider="reference", sinks=torch.zeros(8),
    )  # fmt: skip
    for token in (0, 3, 100, 127, 128, 191):
        keys = pool.view(-1, 512)[rows.packed()[1, token, : rows.lens[token]].long()].float()
        scores = torch.cat((query[token, 0].float() @ keys.T * bench.SCALE, torch.zeros(8, 1)), 1)
        expected = scores.softmax(1)[:, :-1] @ keys
        torch.testing.assert_close(out[token, 0].float(), expected, rtol=1e-2, atol=1e-2)


def test_rows_of_decoding_requests():
    rows = bench.full(5, 16)
    assert rows.lens.tolist() == [144] * 5 and rows.indices().shape == (2, 5, 144)
    run = rows.window.diff(dim=-1)
    assert ((run == 1).sum(-1) >= 125).all()  # but where one of its pages ends
    assert rows.indices().max() < bench.PAGES * bench.PAGE
    lens = bench.mixed(400, 16).lens
    assert lens.min() < 200 and lens.max() > 1080 and lens.max() <= 1152
    assert sorted(bench.one_long(128, 16).lens.tolist()) == [130] * 127 + [640]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_round(monkeypatch, wrong):
    """All of it but the times; torch stands in for FlashMLA's operators."""
    import test_flashmla  # skips itself up to 0.21.0

    monkeypatch.setattr(bench, "TOP_K", {8: 16})
    monkeypatch.setattr(bench, "PROVIDERS", ["reference"])
    phases = {name: [*bench.CASES[name]] for name in ("mixed", "prompt")}
    phases["mixed"][1], phases["prompt"][1] = (2,), (64,)
    monkeypatch.setattr(bench, "CASES", phases)
    monkeypatch.setattr(bench, "captured", lambda call, calls: call(calls - 1))
    monkeypatch.setattr(bench, "in_turns", lambda flashmla, ours: (20.0, 10.0))
    monkeypatch.setattr(bench, "get_mla_metadata", lambda: (object(), None))
    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        monkeypatch.setattr(bench, name, getattr(test_flashmla, name))
    if wrong:
        monkeypatch.setattr(bench.Rows, "packed", lambda rows: rows.indices().roll(1, -1))
        with (pytest.raises(SystemExit, match="prompt, 8 heads, 64 tokens: outputs of reference on fp8 are "),
              bench.Watch() as watch):  # fmt: skip
            list(bench.measure(bench.Pools(), watch, 0))
        return
    with bench.Watch() as watch:
        rows = list(bench.measure(bench.Pools(), watch, 0))
    assert [(row["case"], row["cache"]) for row in rows] == [(n, c) for n in phases for c in ("fp8", "bf16")]
    assert all(row["difference"] < 0.01 for row in rows if row["cache"] == "bf16")
    assert all(0.001 < row["difference"] < 0.06 for row in rows if row["cache"] == "fp8")


def test_rounds_are_shown_beside_their_median():
    row = {"phase": "decode", "case": "full", "heads": 64, "tokens": 2, "cache": "fp8", "provider": "sm90",
           "keys": 1280, "difference": 0.01, "gpu": []}  # fmt: skip
    times = [(10.0, 20.0), (20.0, 20.0), (10.0, 30.0)]
    rounds = [[row | {"us": us, "flashmla_us": stock}] for us, stock in times]
    (found,) = bench.merged(rounds, {"copy_tb_s": 4.0, "bf16_product_tflop_s": 800.0})
    assert (found["us"], found["flashmla_us"], found["speedup"]) == (10.0, 20.0, 2.0)
    assert found["rounds"]["speedup"] == [2.0, 1.0, 3.0] and found["keys_a_token"] == 640
    moved = 1280 * 512 + 2 * 2 * 64 * 512 * 2
    assert found["roofline_share"] == pytest.approx(moved / 4e12 / 10e-6, abs=1e-3)
    assert "full       fp8       64      2     640  sm90          10.0       20.0     2.00   1.00   3.00" in (
        bench.table([found])
    )
