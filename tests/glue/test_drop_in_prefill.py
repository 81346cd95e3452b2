"""V4's prefills over rows in place: the release's own layer on metadata of its own builders.

What is right is what the layer makes by its own path: vLLM's kernels that gather rows, interpreted, and the
float32 reference over these.
"""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm.dsv4_overlay import drop_in, index_table
from vllm.forward_context import override_forward_context
from vllm.third_party.mla_kernels import flash_mla
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import sparse_swa
from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's gather is interpreted")


def first(*names):
    """The first of these modules that the release has."""
    root = Path(vllm.__file__).parents[1]
    found = (name for name in names if (root / name.replace(".", "/")).with_suffix(".py").is_file())
    return importlib.import_module(next(found))


layers = first("vllm.models.deepseek_v4.nvidia.flashmla", "vllm.model_executor.layers.deepseek_v4_attention")
compressed = first("vllm.models.deepseek_v4.sparse_mla", "vllm.v1.attention.backends.mla.flashmla_sparse")
LAYER = next(
    getattr(layers, name)
    for name in ("DeepseekV4FlashMLAAttention", "DeepseekV4FlashMLASparseImpl", "DeepseekV4MLAAttention")
    if hasattr(layers, name)
)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CPU = torch.device("cpu")
HEADS, PADDING, SCALE, TOPK = 8, 2, 0.06, 32  # not the scale of a call without one
# (tokens before this step, tokens of this step): two decodes, a chunk with a prefix that is longer than the window
# and whose end is a compressed row of either ratio, one like it at the first such row, a first chunk.
MIXED = ((150, 1), (7, 1), (252, 4), (125, 3), (0, 9))
FEW = ((7, 1), (30, 2))  # vLLM's gather takes long where it is interpreted
CASES = {"mixed": MIXED, "prefills only": MIXED[3:], "one": ((0, 2),)}


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


class Cache:
    """A paged cache of 584-byte rows: blocks in any order with those of others between, NaN where no row is."""

    def __init__(self, gen, counts, rows):
        blocks = max(-(-count // rows) for count in counts) or 1
        order = torch.randperm(blocks * len(counts) + 1, generator=gen)[:-1].int()
        self.table, self.rows = order.view(len(counts), blocks), rows
        stride = -(-rows * 584 // 576) * 576 + 1152
        raw = torch.full((len(order) + 1, stride), 255, dtype=torch.uint8)
        for request, count in enumerate(counts):
            for row in range(count):
                block, place = raw[self.table[request, row // rows]], row % rows
                block[place * 576 :][:448] = torch.randn(448, generator=gen).to(E4M3).view(torch.uint8)
                block[place * 576 + 448 :][:128] = torch.randn(64, generator=gen).to(BF16).view(torch.uint8)
                scales = torch.randint(124, 130, (8,), generator=gen)
                block[rows * 576 + place * 8 :][:8] = scales.to(torch.uint8)
        self.blocks = raw.as_strided((len(raw), rows, 584), (stride, 584, 1))

    def slot(self, request, row):
        return int(self.table[request, row // self.rows]) * self.rows + row % self.rows


class Step:
    """A layer with its caches and one step, whose graph has more tokens than the requests."""

    def __init__(self, monkeypatch, ratio, requests, heads=HEADS):
        self.monkeypatch, gen = monkeypatch, torch.Generator().manual_seed(ratio)
        self.made_of = ratio, requests, heads
        self.decodes = sum(new == 1 for _, new in requests)
        self.tokens = sum(new for _, new in requests)
        lengths = [old + new for old, new in requests]
        window, rows = Cache(gen, lengths, 64), Cache(gen, [length // ratio for length in lengths], 256 // ratio)
        place = [(r, old + i) for r, (old, new) in enumerate(requests) for i in range(new)]
        starts = [sum(new for _, new in requests[:number]) for number in range(len(requests) + 1)]
        self.q = torch.randn(self.tokens + PADDING, heads, 512, generator=gen).to(BF16)
        topk = torch.full((64, TOPK), -1, dtype=torch.int32)
        for token, (_, position) in enumerate(place):
            picked = torch.randperm((position + 1) // 4, generator=gen)[:TOPK]
            topk[token, : len(picked)] = picked.int()
        known = dict(
            prefix="layer", compress_ratio=ratio, scale=SCALE, window_size=128, max_model_len=512,
            max_num_batched_tokens=64, max_image_tokens=0, topk_indices_buffer=topk, PREFILL_CHUNK_SIZE=2,
            # Up to 0.22.1 it is 64 long whatever q has.
            attn_sink=torch.cat((torch.randn(heads, generator=gen), torch.full((64 - heads,), float("-inf")))),
            swa_cache_layer=SimpleNamespace(kv_cache=window.blocks, prefix="layer.swa"),
            kv_cache=rows.blocks if ratio > 1 else torch.tensor([]),
            full_cache=False,  # of the series full-width, up to 0.22.1
        )  # fmt: skip
        # In 0.22.0 and 0.22.1 the layer is given to class methods.
        by_class = isinstance(vars(LAYER)["_forward_prefill"], classmethod)
        self.layer = SimpleNamespace() if by_class else object.__new__(LAYER)
        vars(self.layer).update(known)

        def common(cache, slots):
            found = CommonAttentionMetadata(
                query_start_loc=ints(starts),
                query_start_loc_cpu=ints(starts),
                seq_lens=ints(lengths),
                num_reqs=len(requests),
                num_actual_tokens=self.tokens,
                max_query_len=max(new for _, new in requests),
                max_seq_len=max(lengths),
                block_table_tensor=cache.table,
                slot_mapping=torch.tensor(slots + [-1] * PADDING),
                positions=torch.tensor([position for _, position in place] + [10**6] * PADDING),
            )
            found.seq_lens_cpu_upper_bound = found.seq_lens  # read from 0.23.0 on
            return found

        config = self.config(ratio)
        spec = SlidingWindowMLASpec(
            block_size=64, num_kv_heads=1, head_size=512, dtype=torch.uint8, sliding_window=128
        )  # fmt: skip
        builder = sparse_swa.DeepseekSparseSWAMetadataBuilder(spec, ["layer.swa"], config, CPU)
        self.window = builder.build(0, common(window, [window.slot(*one) for one in place]))
        self.metadata = {"layer.swa": self.window}
        if ratio > 1:
            spec = SimpleNamespace(block_size=256, compress_ratio=ratio, storage_block_size=256 // ratio,
                                   tokens_per_state=ratio, num_states=256 // ratio)  # fmt: skip
            builders = [cls for name, cls in vars(compressed).items() if name.endswith("MLAMetadataBuilder")
                        or name == "FlashMLASparseMetadataBuilder"]  # fmt: skip
            slots = [window.slot(*one) for one in place]
            self.metadata["layer"] = builders[-1](spec, ["layer"], config, CPU).build(0, common(rows, slots))

    def config(self, ratio):
        for name in ("num_compute_units", "get_mla_dims"):
            self.monkeypatch.setattr(compressed, name, lambda *_: 132, raising=False)
        self.monkeypatch.setattr(sparse_swa, "get_mla_metadata", lambda: (None, None))
        self.monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
        return SimpleNamespace(
            model_config=SimpleNamespace(
                hf_config=SimpleNamespace(compress_ratios=[ratio], index_topk=TOPK, sliding_window=128),
                max_model_len=512, get_num_attention_heads=lambda _: HEADS,
            ),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=16),
            cache_config=SimpleNamespace(cache_dtype="fp8_ds_mla", block_size=256), speculative_config=None,
        )  # fmt: skip

    def run(self, kept=None):
        """Output of the prefills, and what of stock's path made it; `kept` is what layers of a step share."""
        calls, monkeypatch = [], self.monkeypatch

        def workspace(*wanted):
            calls.append("gather")
            return [torch.full(shape, -1, dtype=dtype) for shape, dtype in wanted]

        def attention(q, kv, indices, sm_scale, attn_sink, topk_length, out):
            calls.append("attention")
            sink = attn_sink[: q.shape[1]]
            return flash_mla.flash_mla_sparse_fwd(
                q, kv, indices, sm_scale, 512, sink, topk_length, out, provider="reference"
            )

        decoded = []
        manager = SimpleNamespace(get_simultaneous=workspace)
        monkeypatch.setattr(layers, "current_workspace_manager", lambda: manager)
        monkeypatch.setattr(layers, "flash_mla_sparse_fwd", attention)
        monkeypatch.setattr(LAYER, "_forward_decode", lambda *_, **given: decoded.append(given["output"].shape[0]))
        out = torch.full_like(self.q, 7.0)
        forward = getattr(LAYER, "forward_mqa", None) or LAYER.forward
        context = SimpleNamespace(attn_metadata=self.metadata, additional_kwargs={} if kept is None else kept)
        with override_forward_context(context):
            forward(self.layer, self.q, self.q[:, 0], torch.zeros(len(self.q)), out)
        assert decoded == ([self.decodes] if self.decodes else [])
        assert (out[: self.decodes] == 7).all() and (out[self.tokens :] == 7).all()
        return out[self.decodes : self.tokens].float(), calls


@pytest.fixture
def served(monkeypatch):
    """Our kernels serve the CPU."""
    monkeypatch.setattr(drop_in, "_asked_for", True)
    monkeypatch.setattr(drop_in, "_device", CPU)
    monkeypatch.setattr(drop_in, "_PROVIDER", "triton")


GATHERED = {}


def gathered(step):
    """By vLLM alone; once for all tests of such a step, as its gather takes long."""
    key = *step.made_of, step.layer.window_size
    if key not in GATHERED:
        device, drop_in._device = drop_in._device, None
        try:
            GATHERED[key], calls = step.run()
        finally:
            drop_in._device = device
        assert set(calls) == {"gather", "attention"} and not GATHERED[key].isnan().any()
    return GATHERED[key]


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize("requests", CASES)
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_prefills_over_rows_in_place(ratio, requests, served, monkeypatch):
    step = Step(monkeypatch, ratio, CASES[requests])
    found, calls = step.run()
    assert not calls
    assert_close(found, gathered(step))


def tables_built(monkeypatch):
    """Tokens of each table from here on."""
    built, build = [], index_table.build_sparse_index_table
    counted = lambda *args, **more: built.append(args[6]) or build(*args, **more)  # noqa: E731
    monkeypatch.setattr(index_table, "build_sparse_index_table", counted)
    return built


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_tables_that_would_be_large_are_built_in_parts(ratio, served, monkeypatch):
    """As for a million tokens: one for five tokens at most, none of which stays."""
    step = Step(monkeypatch, ratio, MIXED)
    columns = 128 + index_table.compressed_columns(step.layer, step.metadata.get("layer"))
    monkeypatch.setattr(drop_in, "_TABLE_BYTES", 5 * 4 * columns)
    built, kept = tables_built(monkeypatch), {}
    found, calls = step.run(kept)
    assert not calls and built == [5, 5, 5, 1] and not kept.get("dsv4_tables")
    assert_close(found, gathered(step))


@pytest.mark.parametrize("ratio, tables", [(1, 1), (4, 2), (128, 1)])
def test_tables_are_shared_within_a_step_only(ratio, tables, served, monkeypatch):
    step, built = Step(monkeypatch, ratio, MIXED), tables_built(monkeypatch)
    for number in (1, 2):
        context = {}
        for _ in range(2):  # layers
            step.run(context)
        assert len(built) == number * tables


@pytest.mark.parametrize("why", ["off", "heads", "window", "image", "refused", "another GPU", "slower"])
def test_vllm_goes_on_where_rows_are_not_read_in_place(why, served, monkeypatch):
    heads = 64 if why == "heads" else 16
    step = Step(monkeypatch, 4, FEW, heads)
    wanted = gathered(step)
    if why == "off":
        monkeypatch.setattr(drop_in, "_device", None)
    elif why == "window":
        step.layer.window_size = 64
        wanted = gathered(step)
    elif why == "image":
        nothing = torch.zeros(step.tokens, dtype=torch.int32)
        step.window.prefill_left_visible = step.window.prefill_right_visible = nothing
    elif why == "refused":
        monkeypatch.setattr(flash_mla, "_validate_decode", refuse)
        monkeypatch.setattr(flash_mla, "_valid", set())
    elif why == "another GPU":
        monkeypatch.setattr(drop_in, "_device", torch.device("cuda", 1))
    elif why == "slower":
        monkeypatch.setattr(drop_in, "_PREFILL_HEADS", 8)
    found, calls = step.run()
    assert set(calls) == {"gather", "attention"}
    assert torch.equal(found, wanted)


def refuse(*_):
    raise ValueError("too many rows")


@pytest.mark.parametrize("captured", [False, True])
def test_a_step_that_is_captured_is_vllm_s(captured, served, monkeypatch):
    """The graph would attend to this step's rows for ever."""

    class OnGPU(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    step = Step(monkeypatch, 1, CASES["one"])
    with override_forward_context(SimpleNamespace(attn_metadata=step.metadata, additional_kwargs={})):
        given = step.layer, step.q.as_subclass(OnGPU), torch.empty_like(step.q), None, step.window
        assert drop_in.prefill(*given) is not captured


@pytest.mark.parametrize("heads", [16, 32])
def test_more_heads_are_read_in_place(heads, served, monkeypatch):
    step = Step(monkeypatch, 4, FEW, heads)
    found, calls = step.run()
    assert not calls
    assert_close(found, gathered(step))


def test_warm_up_compiles_the_tables(served, monkeypatch, launches):
    for ratio in (1, 4, 128):
        for requests in CASES.values():
            Step(monkeypatch, ratio, requests).run()
    needed = {launch for launch in launches if launch[0] == "_build_kernel"}
    assert len(needed) == 3
    launches.clear()
    index_table.warm_up(CPU)
    assert needed <= launches
