"""benchmarks/sparse_mla.py: which rows are attended to, and what is made of the times. Times need a GPU.

Here torch in float64 stands in for FlashMLA, by this file's own reading of the rows.
"""

import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import sparse_mla as bench  # noqa: E402
import sparse_mla_inputs as inputs  # noqa: E402
from sparse_mla_inputs import Stock, flash_mla  # noqa: E402

PAGE = inputs.PAGE


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(inputs, "DEVICE", "cpu")
    monkeypatch.setattr(inputs, "PAGES", 64)
    monkeypatch.setattr(inputs, "CALLS", 2)
    torch.manual_seed(0)


def prompt_rows(model, first, tokens, top_k):
    """With the page tables that were drawn, so that rows can be taken back to places in the prompt."""
    drawn = []
    draw = torch.randperm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", lambda *args, **kwargs: drawn.append(draw(*args, **kwargs)) or drawn[-1])
        rows = inputs.of_a_prompt(first)(model, tokens, top_k)
    return rows, drawn


@pytest.mark.parametrize("model", ["V4", "V3.2"])
@pytest.mark.parametrize("first", [0, 320])
def test_rows_of_a_prompt_are_causal(first, model):
    tokens, top_k = 192, 40
    rows, tables = prompt_rows(model, first, tokens, top_k)
    pages = (first + tokens) // PAGE if model == "V4" else 0
    ratio = 4 if pages else 1
    for call, table in enumerate(tables):
        place = torch.empty(inputs.PAGES * PAGE, dtype=torch.int64)  # of a row, window and compressed apart
        for part in (table[:pages], table[pages:]):
            own = (part[:, None] * PAGE + torch.arange(PAGE)).flatten()
            place[own] = torch.arange(len(own))
        for token in range(tokens):
            position = first + token
            window = place[rows.window[call, token, : rows.window_lens[token]].long()]
            assert window.tolist() == (list(range(max(0, position - 127), position + 1)) if pages else [])
            picks = place[rows.picked[call, token, : rows.picked_lens[token]].long()].tolist()
            assert len(picks) == len(set(picks)) == min(top_k, (position + 1) // ratio)
            assert all(ratio * pick + ratio - 1 <= position for pick in picks)


def test_rows_of_decoding_requests():
    rows = inputs.full("V4", 5, 16)
    assert rows.lens.tolist() == [144] * 5 and rows.indices().shape == (2, 5, 144)
    run = rows.window.diff(dim=-1)
    assert ((run == 1).sum(-1) >= 125).all()  # but where one of its pages ends
    assert rows.indices().max() < inputs.PAGES * PAGE
    rows = inputs.full("V3.2", 5, 16)
    assert rows.lens.tolist() == [16] * 5 and rows.indices().shape == (2, 5, 16)
    lens = inputs.mixed("V4", 400, 16).lens
    assert lens.min() < 200 and lens.max() > 1080 and lens.max() <= 1152
    assert sorted(inputs.one_long("V4", 128, 16).lens.tolist()) == [130] * 127 + [640]


# ---------------------------------------------------------------- FlashMLA and vLLM's gather, in torch
def rows_of(cache, indices):
    """Rows of a packed cache in float64."""
    page, row = indices.long()[:, None] // PAGE, indices.long()[:, None] % PAGE
    if cache.shape[-1] == 656:
        data = cache[page, row, 0][:, 0]
        scales = data[:, 512:528].view(torch.float32).double().repeat_interleave(128, 1)
        values = data[:, :512].view(torch.float8_e4m3fn).double() * scales
        return torch.cat((values, data[:, 528:].view(torch.bfloat16)), 1)
    pages = cache.reshape(len(cache), -1)
    data, scales = (pages[page, first + torch.arange(count)]
                    for first, count in ((row * 576, 576), (PAGE * 576 + row * 8, 7)))  # fmt: skip
    scales = 2.0 ** (scales.double() - 127).repeat_interleave(64, 1)
    values = data[:, :448].view(torch.float8_e4m3fn).double() * scales
    return torch.cat((values, data[:, 448:].view(torch.bfloat16)), 1)


def attend(query, keys, scale, sinks):
    scores = scale * query.double() @ keys.double().T
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None]), 1)
    return scores.softmax(1)[:, : len(keys)] @ keys[:, :512].double()


def flash_mla_with_kvcache(
    q, k_cache, indices, softmax_scale, out, topk_length=None, attn_sink=None, extra_k_cache=None,
    extra_indices_in_kvcache=None, extra_topk_length=None, is_fp8_kvcache=False, head_dim_v=0, **rest,
):  # fmt: skip
    assert is_fp8_kvcache and head_dim_v == 512 and rest["tile_scheduler_metadata"] == "plan"
    assert q.shape[2] in (64, 128) and (topk_length is None) == (q.shape[3] == 576)
    for token in range(len(q)):
        found = [k_cache, indices, topk_length], [extra_k_cache, extra_indices_in_kvcache, extra_topk_length]
        own = ((cache, slots[token, 0, : None if lens is None else lens[token]])
               for cache, slots, lens in found if cache is not None)  # fmt: skip
        keys = [rows_of(cache, rows[rows >= 0]) for cache, rows in own]
        out[token, 0] = attend(q[token, 0], torch.cat(keys), softmax_scale, attn_sink)


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, attn_sink, topk_length, out):
    assert q.shape[1] in (64, 128)
    for token, length in enumerate([None] * len(q) if topk_length is None else topk_length):
        out[token] = attend(q[token], kv[indices[token, 0, :length].long(), 0], sm_scale, attn_sink)


def gather_656(cache, workspace, table, seq_lens, starts, batch):
    assert batch == 1 and starts.tolist() == [0] and len(workspace) == seq_lens.item()
    at = torch.arange(len(workspace))
    workspace[:] = rows_of(cache.unsqueeze(2), table[0, at // PAGE] * PAGE + at % PAGE)


def stand_in():
    try:
        from vllm.models.deepseek_v4.common.ops.cache_utils import dequantize_and_gather_k_cache as gather_584
    except ImportError:
        pytest.skip("vLLM's gather has another place up to 0.21.0")
    return Stock(flash_mla_with_kvcache, flash_mla_sparse_fwd, lambda: ("plan", None), gather_584, gather_656)


@pytest.fixture
def few(monkeypatch):
    """Fewer heads, tokens and keys; a prompt of 256 tokens."""
    monkeypatch.setattr(bench, "HEADS", (8, 32))
    monkeypatch.setattr(inputs, "top_k", lambda model, heads: 16)
    monkeypatch.setattr(inputs, "PROMPT", 256)
    small = {"decode": (2, inputs.full), "mixed": (1, inputs.mixed), "prefill": (8, inputs.of_a_prompt(248)),
             "prompt": (64, inputs.of_a_prompt(0)), "scattered": (2, inputs.scattered)}  # fmt: skip
    phases = {name: inputs.Phase(inputs.PHASES[name].kind, (tokens,), rows, inputs.PHASES[name].models, "")
              for name, (tokens, rows) in small.items()}  # fmt: skip
    monkeypatch.setattr(inputs, "PHASES", phases)
    monkeypatch.setattr(bench, "PHASES", {name: phase for name, phase in phases.items() if name != "mixed"})
    monkeypatch.setattr(bench, "captured", lambda call, calls: None)
    monkeypatch.setattr(bench, "in_turns", lambda flashmla, *ours: [20.0, 10.0, 40.0][: 1 + len(ours)])


def a_round(stock, formats=tuple(inputs.FORMATS), providers=("reference",), others=False):
    with bench.Watch() as watch:
        return list(bench.measure(formats, bench.HEADS, providers, inputs.Pools(), stock, watch, 0, others))


def test_a_round(few):
    """All of it but the times: every call of ours gives what FlashMLA's gives, gathers included."""
    found = a_round(stand_in())
    there = {(row["rows"], row["phase"], row["heads"]) for row in found}
    assert there == {
        (rows, phase, heads)
        for rows in inputs.FORMATS
        for phase in ("decode", "prefill", "prompt", "scattered")
        for heads in (8, 32)
    } - {("656", "scattered", 32),  # what vLLM would gather there is not said
         ("512", "decode", 8), ("512", "decode", 32)}  # fmt: skip
    assert len(found) == len(there)
    for row in found:
        assert row["difference"] < (0.06 if row["rows"] == "e4m3" else 0.01), row
        assert (row["us"], row["flashmla_us"]) == (10.0, 20.0)
    keys = {row["keys"] for row in found if row["phase"] == "decode"}
    assert keys == {144, 16}


def test_other_providers_have_times_of_their_own(few):
    found = a_round(stand_in(), ["576"], ["reference", "reference"])
    assert {(row["us"], row["reference_us"]) for row in found} == {(10.0, 40.0)}


class Wrapper:
    """FlashInfer's, by its documented arguments."""

    def __init__(self, workspace, backend):
        assert backend == "fa3"

    def plan(self, *arguments):
        names = ("q_starts", "starts", "pages", "lens", "heads", "value_dim", "rope_dim", "page_size", "causal",
                 "scale", "q_dtype", "kv_dtype")  # fmt: skip
        self.__dict__ |= dict(zip(names, arguments, strict=True))
        assert (self.page_size, self.causal, self.value_dim) == (1, False, 512)

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, *, ckv_scale=None, kpe_scale=None):
        assert ckv_cache.dtype == self.kv_dtype and q_pe.shape[-1] == kpe_cache.shape[-1] == self.rope_dim
        assert (ckv_scale is not None) == (self.kv_dtype == torch.float8_e4m3fn)
        query, keys = torch.cat((q_nope, q_pe), -1), torch.cat((ckv_cache.bfloat16(), kpe_cache.bfloat16()), -1)
        out = torch.empty_like(q_nope)
        for token, (start, length) in enumerate(zip(self.starts[:-1], self.lens, strict=True)):
            own = keys[self.pages[start : start + length].long(), 0]
            out[token] = attend(query[token], own, self.scale, None)
        return out


def flash_attn_varlen_func(
    q, k, v, q_v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, block_table, softmax_scale, causal,
    fa_version,
):  # fmt: skip
    assert (max_seqlen_q, causal, fa_version) == (1, True, 3) and cu_seqlens_q.tolist() == [*range(len(q) + 1)]
    assert k.shape[1:] == (1, 1, 64) and v.shape[1:] == (1, 1, 512) and max_seqlen_k == block_table.shape[1]
    query, keys = torch.cat((q_v, q), -1), torch.cat((v, k), -1)[:, 0, 0]
    rows = (keys[pages[:length].long()] for pages, length in zip(block_table, seqused_k, strict=True))
    return torch.stack([attend(*of_token, softmax_scale, None) for of_token in zip(query, rows, strict=True)])


def portable(q, kv, indices, sm_scale):
    """A kernel in Triton: a row that is missing is -1, and there are no lengths."""
    assert kv.shape[1:] == (1, 576) and indices.shape[1] == 1 and q.dtype == torch.bfloat16
    return torch.stack([attend(query, kv[own[own >= 0].long(), 0], sm_scale, None)
                        for query, own in zip(q, indices[:, 0], strict=True)])  # fmt: skip


@pytest.mark.parametrize("old", [False, True])
def test_others_have_times_where_they_serve(few, monkeypatch, capsys, old):
    monkeypatch.setattr(bench, "HEADS", (8,))
    phases = {name: inputs.PHASES[name] for name in ("mixed", "prefill")}
    monkeypatch.setattr(bench, "PHASES", phases)
    monkeypatch.setattr(bench, "in_turns", lambda *calls: [20.0, 10.0, 40.0, 50.0, 60.0, 70.0, 80.0][: len(calls)])
    monkeypatch.setattr("sparse_mla_others._missing", set())
    ours = flash_mla.flash_mla_with_kvcache, flash_mla.flash_mla_sparse_fwd
    port = dict(zip(("flash_mla_with_kvcache_triton", "flash_mla_sparse_fwd_triton"), ours, strict=True))
    ports = {"sm12x_sparse_mla_attn": port, "triton_sparse_mla_kernel": {"triton_sparse_mla_attention": portable},
             "vllm.v1.attention.ops.xpu_mla_sparse": {
                 "triton_bf16_mla_sparse_interface": lambda *call: (portable(*call), None, None)}}  # fmt: skip
    for name, content in ports.items():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[name].__dict__.update(content)
    wrapper = type("Old", (Wrapper,), {"run": lambda self, q_nope: None}) if old else Wrapper
    for name, content in (("flashinfer.mla", {"BatchMLAPagedAttentionWrapper": wrapper}),
                          ("vllm.vllm_flash_attn.flash_attn_interface", {
                              "flash_attn_varlen_func": flash_attn_varlen_func})):  # fmt: skip
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name.rpartition(".")[0], types.ModuleType(name.rpartition(".")[0]))
        monkeypatch.setitem(sys.modules, name, module)
    found = {(row["rows"], row["phase"]): {key for key in row if key.endswith("_us")} - {"flashmla_us"}
             for row in a_round(stand_in(), ["e4m3", "bf16", "584", "576", "656"], others=True)}  # fmt: skip
    fi = set() if old else {"flashinfer_us"}
    assert found == {
        ("e4m3", "mixed"): fi, ("bf16", "mixed"): fi, ("584", "mixed"): set(), ("e4m3", "prefill"): fi,
        ("bf16", "prefill"): fi, ("584", "prefill"): set(), ("656", "prefill"): {"pr54929_us"},
        ("576", "prefill"): {*fi, "fa3_us", "xpu_us", "pr38476_us", "pr54929_us"},
    }  # fmt: skip
    words = "flashinfer is left out: ImportError: FlashInfer is older than 0.6.18"
    assert capsys.readouterr().out.count(words) == old


def test_without_gathers_their_prefills_are_left_out(few):
    stock = stand_in()
    stock.gather_584 = stock.gather_656 = None
    found = {(row["rows"], row["phase"], row["heads"]) for row in a_round(stock, ["584", "656"])}
    assert found.isdisjoint({("584", "prefill", 8), ("656", "prefill", 32)})
    assert {("584", "decode", 8), ("656", "prefill", 8), ("584", "scattered", 32)} <= found


def test_wrong_outputs_are_not_compared(few, monkeypatch):
    monkeypatch.setattr(bench, "PHASES", {"prompt": inputs.PHASES["prompt"]})
    monkeypatch.setattr(inputs.Rows, "packed", lambda rows: rows.indices().roll(1, -1))
    with pytest.raises(SystemExit, match="prompt of bf16 rows, 8 heads, 64 tokens: outputs of reference are "):
        a_round(stand_in(), ["bf16"])


def test_rounds_are_shown_beside_their_median():
    row = {"rows": "e4m3", "phase": "decode", "heads": 64, "tokens": 2, "keys": 640.0, "difference": 0.01}
    row["gpu"] = []
    times = [(10.0, 20.0), (20.0, 20.0), (10.0, 30.0)]
    rounds = [[row | {"us": us, "flashmla_us": stock, "triton_us": 50.0}] for us, stock in times]
    (found,) = bench.merged(rounds, {"copy_tb_s": 4.0, "bf16_product_tflop_s": 800.0})
    assert (found["us"], found["flashmla_us"], found["speedup"], found["keys"]) == (10.0, 20.0, 2.0, 640)
    assert found["rounds"]["speedup"] == [2.0, 1.0, 3.0]
    named = ("rows", "phase", "heads", "tokens", "keys", "us", "flashmla_us", "speedup", "roofline_share")
    assert found.keys() >= {*named}
    moved = 1280 * 512 + 2 * 2 * 64 * 512 * 2
    assert found["roofline_share"] == pytest.approx(moved / 4e12 / 10e-6, abs=1e-3)
    line = "e4m3  decode        64      2     640      10.0       20.0     2.00   1.00   3.00   0.02       50.0"
    assert line in bench.table([found])


def test_flashmla_without_vllm(tmp_path, monkeypatch):
    """Only the wheel's library and its interface are loaded, and what was imported as vllm stays."""
    (tmp_path / "third_party/flashmla").mkdir(parents=True)
    (tmp_path / "third_party/flashmla/flash_mla_interface.py").write_text(
        "import dataclasses\nimport vllm._flashmla_C\n\n"
        "@dataclasses.dataclass\nclass Plan:\n    done: bool = False\n"
        "def flash_mla_with_kvcache(): ...\ndef flash_mla_sparse_fwd(): ...\n"
        "def get_mla_metadata():\n    return Plan(), None\n"
    )
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    before = sys.modules["vllm"]
    stock = inputs.of_library(tmp_path)
    assert loaded == [tmp_path / "_flashmla_C.abi3.so"] and sys.modules["vllm"] is before
    assert "vllm._flashmla_C" not in sys.modules or sys.modules["vllm._flashmla_C"].__file__
    assert stock.get_mla_metadata()[0].done is False and stock.gather_584 is None
