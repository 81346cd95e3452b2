"""Run by test_flashinfer.py in a process of its own for each FlashInfer release: pytest contract_flashinfer.py

Real: FlashInfer's function with all its checks, those of values included. Stood in for: the GPU's properties and
the compiled launcher. The stand-in asserts what the launcher and its kernels take for granted, then computes what
its arguments mean with the `reference` provider, so that what comes out can be compared.
"""

import importlib.metadata
import sys
from types import SimpleNamespace

import pytest
import torch
from flashinfer.mla import trtllm_batch_decode_sparse_mla_dsv4
from test_attention import BF16, E4M3, MIXED, Step
from vllm.dsv4_overlay import attention
from vllm.third_party.mla_kernels import flashinfer_sparse_mla, interface, sparse_mla

FLASHINFER = sys.modules[trtllm_batch_decode_sparse_mla_dsv4.__module__]
VERSION = tuple(map(int, importlib.metadata.version("flashinfer-python").split(".")[:3]))
SERVED_HEADS = (64, 128) if VERSION < (0, 6, 14) else (8, 16, 32, 64, 128)
SMS = 148
# The parameters of csrc/trtllm_fmha_kernel_launcher.cu in each release.
PARAMETERS = [
    "out", "query", "compressed", "swa", "workspace", *(["counters"] if VERSION >= (0, 6, 15) else []), "indices",
    *(["remapped", "remapped_already"] if VERSION >= (0, 7, 0) else []), "seq_lens", "topk_lens", "bmm1", "bmm2",
    "batch", "q_len", "sms", "pdl", "workspace_bytes", "sinks", "cum_seq_lens_q",
    *(["rope", "output_scale"] if VERSION >= (0, 7, 0) else []),
]  # fmt: skip


class Launcher:
    """Stands in for the compiled module: checks and computes each launch, and keeps its arguments."""

    def __init__(self):
        self.launches, self.checks = [], 0

    def trtllm_paged_attention_decode_sparse_mla_dsv4(self, *arguments):
        call = SimpleNamespace(**dict(zip(PARAMETERS, arguments, strict=True)))
        self.launches.append(call)
        tokens, heads, _ = call.query.shape
        assert heads in SERVED_HEADS and call.query.stride(2) == 1
        out = call.out.view(call.query.shape)
        assert out.dtype == BF16 and out.is_contiguous()
        for pool in (call.swa, call.compressed):
            assert pool.dtype == call.query.dtype and pool.shape[1] == 1 and pool.shape[3] == 512
            assert pool.is_contiguous() and pool.data_ptr() % 16 == 0
        assert call.workspace_bytes == call.workspace.nbytes == 128 << 20
        if hasattr(call, "counters"):
            assert call.counters.nbytes >= 4 * max(call.batch * heads, SMS) and not call.counters.any()
        if hasattr(call, "remapped"):
            assert call.remapped.data_ptr() == call.indices.data_ptr() and call.remapped_already is False
            assert call.rope is None and call.output_scale is None
        assert type(call.bmm1) is float and type(call.bmm2) is float
        assert (call.sms, call.pdl) == (SMS, True)
        assert call.sinks is None or (call.sinks.dtype == torch.float32 and call.sinks.shape == (heads,))

        cum = call.cum_seq_lens_q
        starts = list(range(0, tokens + 1, call.q_len)) if cum is None else cum.tolist()
        assert len(starts) == call.batch + 1 == len(call.seq_lens) + 1 and (starts[0], starts[-1]) == (0, tokens)
        assert call.indices.shape[0] == len(call.topk_lens) == tokens and call.indices.is_contiguous()
        rows = [pool.shape[0] * pool.shape[2] for pool in (call.swa, call.compressed)]
        for start, end, length in zip(starts[:-1], starts[1:], call.seq_lens.tolist(), strict=True):
            assert end - start <= call.q_len and end - start <= length
            for token in range(start, end):
                window = call.indices[token, : min(length - end + token + 1, 128)]
                picked = call.indices[token, 128 : call.topk_lens[token]]
                for keys, count in zip((window, picked), rows, strict=True):
                    assert ((keys >= 0) & (keys < count)).all(), "every key is a row"
        shape = (call.batch, call.q_len, heads, 512) if cum is None else (tokens, heads, 512)
        ragged = {} if cum is None else dict(cum_seq_lens_q=cum, max_q_len=call.q_len)
        sparse_mla(
            call.query.view(shape), call.swa, None, call.indices, call.compressed, call.topk_lens, call.seq_lens,
            out.view(shape), call.bmm1, call.bmm2, call.sinks, provider="reference", **ragged,
        )  # fmt: skip
        call.written = out.clone()


@pytest.fixture(autouse=True)
def launcher(monkeypatch):
    stand_in = Launcher()

    inputs = FLASHINFER._check_dsv4_sparse_mla_inputs

    def counted_check(*arguments, **named):
        stand_in.checks += 1
        return inputs(*arguments, **named)

    monkeypatch.setenv("VLLM_DSV4_PROVIDER", "flashinfer")
    monkeypatch.setenv("FLASHINFER_VALIDATE_INPUTS", "1")
    monkeypatch.setattr(FLASHINFER, "get_trtllm_gen_fmha_module", lambda: stand_in)
    monkeypatch.setattr(FLASHINFER, "get_device_sm_count", lambda device: SMS)
    monkeypatch.setattr(FLASHINFER, "device_support_pdl", lambda device: True)
    monkeypatch.setattr(FLASHINFER, "get_compute_capability", lambda device: (10, 0))
    monkeypatch.setattr(FLASHINFER, "_check_dsv4_sparse_mla_inputs", counted_check)
    monkeypatch.setattr(interface, "_valid", set())
    flashinfer_sparse_mla.prepare.cache_clear()
    return stand_in


class Case:
    """A call as a layer makes it: random rows and tables, NaN in a page that nothing names."""

    def __init__(self, form, heads, dtype=BF16, page=64, compressed=64, scale=0.25):
        gen = torch.Generator().manual_seed(heads + compressed)
        # Lengths of requests that are padding are 0; a ragged batch has none.
        self.q_lens, self.seq_lens = {
            "decode": ([1] * 5, [1, 127, 0, 128, 900]),
            "speculative": ([2] * 4, [2, 0, 130, 900]),
            "prefill": ([3, 1, 5], [3, 128, 131]),
        }[form]
        tokens = sum(self.q_lens)
        random = lambda *shape: torch.randn(*shape, generator=gen).to(dtype)  # noqa: E731
        self.query = random(tokens, heads, 512)
        self.pools = [random(6, rows, 512) for rows in (64, page)]
        for pool in self.pools:
            pool[-1] = float("nan")
        self.sinks = torch.randn(heads, generator=gen)
        self.indices = torch.full((tokens, 128 + compressed), -1, dtype=torch.int32)
        self.topk_lens = torch.full((tokens,), 128, dtype=torch.int32)
        self.scales = dict(bmm1_scale=512**-0.5 * scale, bmm2_scale=scale)
        end = 0
        for q_len, length in zip(self.q_lens, self.seq_lens, strict=True):
            for token in range(end, end + q_len):
                if not length:
                    self.indices[token] = 0
                    continue
                seen = min(length - q_len + token - end + 1, 128)
                keys = int(torch.randint(0, compressed + 1, (), generator=gen))
                self.topk_lens[token] += keys
                self.indices[token, :seen] = torch.randint(0, 5 * 64, (seen,), generator=gen)
                self.indices[token, 128 : 128 + keys] = torch.randint(0, 5 * page, (keys,), generator=gen)
            end += q_len
        self.shape, self.ragged = (len(self.q_lens), self.q_lens[0]), {}
        if form == "prefill":
            starts = torch.tensor([0, *self.q_lens]).cumsum(0).int()
            self.shape, self.ragged = (tokens,), dict(cum_seq_lens_q=starts, max_q_len=max(self.q_lens))

    def run(self, provider, layout="NHD", window_only=False, sinks=True, strided=False, **changed):
        axis = 1 if layout == "HND" else 2
        swa, compressed = (pool.unsqueeze(axis) for pool in self.pools)
        query, out = self.query, torch.full_like(self.query, float("nan"), dtype=BF16)
        if strided:  # heads of a wider buffer
            query, out = (torch.cat((x, x), 1)[:, : query.shape[1]] for x in (query, out))
        arguments = dict(
            query=query.unflatten(0, self.shape) if len(self.shape) == 2 else query,
            swa_kv_cache=swa,
            workspace_buffer=None,
            sparse_indices=self.indices,
            compressed_kv_cache=None if window_only else compressed,
            sparse_topk_lens=torch.full_like(self.topk_lens, 128) if window_only else self.topk_lens,
            seq_lens=torch.tensor(self.seq_lens, dtype=torch.int32),
            out=out.unflatten(0, self.shape) if len(self.shape) == 2 else out,
            sinks=self.sinks if sinks else None,
            kv_layout=layout,
            **self.scales,
            **self.ragged,
        )
        sparse_mla(**(arguments | changed), provider=provider)
        return out


def same_launch(first, second):
    for name in PARAMETERS:
        a, b = getattr(first, name), getattr(second, name)
        if name == "out":  # written by each
            assert a.shape == b.shape
        elif not isinstance(a, torch.Tensor):
            assert type(a) is type(b) and a == b, name
        elif name != "counters":  # FlashInfer's function makes new ones for every call
            assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype, name
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), name


def check(launcher, case, **options):
    """Twice: through FlashInfer's function, then past it; both launches are the same and give the right result."""
    expected = case.run("reference", **options)
    for _ in range(2):
        found = case.run("flashinfer", **options)
        # Not bit by bit: the reference sums over other widths.
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)
    first, second = launcher.launches[-2:]
    same_launch(first, second)
    assert launcher.checks == 1
    return first


FORMS = ("decode", "speculative", "prefill")


@pytest.mark.parametrize(
    "heads, dtype",
    [(1, BF16), (8, E4M3), (12, E4M3), (16, BF16), (32, E4M3), (64, BF16), (64, E4M3), (96, BF16), (128, E4M3)],
    ids=str,
)
@pytest.mark.parametrize("form", FORMS)
def test_heads(launcher, form, heads, dtype):
    launch = check(launcher, Case(form, heads, dtype))
    assert launch.query.shape[1] == min(count for count in SERVED_HEADS if count >= heads)
    assert not launch.query[:, heads:].float().any() and not launch.sinks[heads:].any()


@pytest.mark.parametrize("options", [dict(layout="HND"), dict(sinks=False), dict(strided=True)], ids=str)
@pytest.mark.parametrize("page, compressed", [(64, 512), (2, 1024), (64, 4)])
@pytest.mark.parametrize("form", FORMS)
def test_pools_and_widths(launcher, form, page, compressed, options):
    """C4A with 64 rows a page, C128A with 2 and a table for 128K tokens."""
    check(launcher, Case(form, 8, page=page, compressed=compressed), **options)


@pytest.mark.parametrize("form", FORMS)
def test_window_only(launcher, form):
    launch = check(launcher, Case(form, 64, compressed=0), window_only=True)
    assert launch.compressed.data_ptr() == launch.swa.data_ptr() and launch.indices.shape[1] == 128


def test_padding_is_zero_and_a_finite_key_for_flashinfer(launcher):
    case = Case("decode", 64)
    launch = check(launcher, case)
    assert launch.seq_lens.tolist() == [1, 127, 1, 128, 900]
    assert not case.run("flashinfer")[2].any() and launcher.launches[-1].written[2].any()


def test_checks_run_once_for_each_signature(launcher, monkeypatch):
    case = Case("prefill", 64)
    validations = []
    validate = interface._validate
    monkeypatch.setattr(interface, "_validate", lambda *arguments: validations.append(1) or validate(*arguments))
    for _ in range(5):
        case.run("flashinfer")
    # Twice ours, since the stand-in calls it for another provider.
    assert (launcher.checks, len(validations), len(launcher.launches)) == (1, 2, 5)
    case.indices = torch.nn.functional.pad(case.indices, (0, 16), value=-1)
    for _ in range(5):
        case.run("flashinfer")
    assert (launcher.checks, len(validations), len(launcher.launches)) == (2, 4, 10)
    with pytest.raises(ValueError, match="max_q_len"):
        case.run("flashinfer", max_q_len=None)


def test_a_release_that_is_not_known_is_checked_every_time(launcher):
    flashinfer_sparse_mla.prepare(torch.device("cpu")).version = flashinfer_sparse_mla._UNKNOWN
    case = Case("decode", 64)
    for _ in range(3):
        case.run("flashinfer")
    assert launcher.checks == 3


def test_refusals(launcher):
    case = Case("decode", 64, E4M3)
    for words, changed in (
        ("floats", dict(bmm1_scale=torch.ones(1))),
        ("one dtype", dict(query=Case("decode", 64).query[:, None])),
        ("no gap between pages", dict(swa_kv_cache=torch.cat((case.pools[0],) * 2, 1)[:, :64, None])),
    ):
        with pytest.raises(ValueError, match=words):
            case.run("flashinfer", **changed)
    many = 2**21 // 64 + 1
    with pytest.raises(ValueError, match="32768 requests of 64 heads"):
        flashinfer_sparse_mla._validate(
            SimpleNamespace(
                query=case.query, swa_pool=case.pools[0], compressed_pool=case.pools[0],
                bmm1_scale=1.0, bmm2_scale=1.0, seq_lens=torch.empty(many),
            ), 64,
        )  # fmt: skip
    assert not launcher.launches


def test_a_call_that_lacks_a_parameter(monkeypatch):
    monkeypatch.setattr("flashinfer.mla.trtllm_batch_decode_sparse_mla_dsv4", lambda query, workspace_buffer: None)
    with pytest.raises(RuntimeError, match=r"lacks the DeepSeek V4 call \(.*\); pip install"):
        flashinfer_sparse_mla.prepare(torch.device("cpu"))
    monkeypatch.delattr("flashinfer.mla.trtllm_batch_decode_sparse_mla_dsv4")
    with pytest.raises(RuntimeError, match=r"lacks the DeepSeek V4 call \(.*\); pip install"):
        flashinfer_sparse_mla.prepare(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "fp8"])
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_layer_with_a_mixed_batch(launcher, ratio, dtype):
    """Insert, compressor, table and both calls, against float64."""
    step = Step(ratio, dtype, MIXED, padding=2)
    out = step.check()
    assert out[-2:].isnan().all()
    decode, prefill = launcher.launches
    assert decode.cum_seq_lens_q is None and (decode.batch, decode.q_len) == (2, 1)
    assert prefill.cum_seq_lens_q.tolist() == [0, 3, 8] and (prefill.batch, prefill.q_len) == (2, 5)
    assert decode.query.dtype == prefill.query.dtype == dtype
    assert decode.bmm2 == step.kv_scale and decode.bmm1 == pytest.approx(512**-0.5 * step.q_scale * step.kv_scale)


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_layer_with_graph_padding(launcher, ratio):
    out = Step(ratio, E4M3, ((150, 1), (127, 1)), padding=2, padding_is_decode=True).check()
    assert (out[-2:] == 0).all() and launcher.launches[0].batch == 4


def test_layer_with_draft_tokens(launcher):
    """Decodes of three tokens each, as verification of two draft tokens: a launch of single tokens."""
    step = Step(128, BF16, ((150, 3), (124, 3)))
    step.metadata.num_decodes, step.metadata.num_decode_tokens = 2, 6
    step.metadata.num_prefills = step.metadata.num_prefill_tokens = 0
    step.check()
    (launch,) = launcher.launches
    assert launch.seq_lens.tolist() == [151, 152, 153, 125, 126, 127]


def test_layer_with_draft_tokens_and_prefills(launcher):
    step = Step(128, BF16, ((150, 3), (124, 3), (125, 5), (0, 7)))
    step.metadata.num_decodes, step.metadata.num_decode_tokens = 2, 6
    step.metadata.num_prefills, step.metadata.num_prefill_tokens = 2, 12
    step.check()
    decode, prefill = launcher.launches
    assert decode.seq_lens.tolist() == [151, 152, 153, 125, 126, 127]
    assert prefill.cum_seq_lens_q.tolist() == [0, 5, 12] and prefill.q_len == 7


def test_layer_with_prefills_only(launcher):
    Step(4, BF16, ((0, 7), (125, 5))).check()
    (launch,) = launcher.launches
    assert launch.cum_seq_lens_q.tolist() == [0, 7, 12] and launch.q_len == 7


def test_second_layer_of_a_step_is_not_checked_again(launcher):
    for _ in range(2):
        Step(1, BF16, MIXED).run()
    assert launcher.checks == 2 and len(launcher.launches) == 4  # one a form


def test_workspace_is_made_with_the_layer(launcher, monkeypatch):
    config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="bfloat16"))
    monkeypatch.setattr(attention, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(attention, "check_machine", lambda: None)
    layer = torch.nn.Module()
    layer.attn_sink = torch.empty(64)
    attention.init_layer(layer)
    assert flashinfer_sparse_mla.prepare.cache_info().currsize == 1
    prepared = flashinfer_sparse_mla.prepare(layer.attn_sink.device)
    assert prepared.workspace.nbytes == 128 << 20 and not prepared.workspace.any() and not prepared.counters.any()
    assert prepared is flashinfer_sparse_mla.prepare(torch.device("cpu"))
