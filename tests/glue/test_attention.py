"""One layer over mixed batches with vLLM's own metadata classes, against attention in float64.

Interpreted on the CPU. The definitions (RoPE, norm, compression) are those of the kernels' checks.
"""

import copy
import importlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_config_contract import VLLMS_TOO
from vllm.dsv4_overlay import adapter, attention, calibrate, index_table, warmup
from vllm.forward_context import override_forward_context
from vllm.third_party.mla_kernels import checks
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata

compressor = importlib.import_module(adapter.COMPRESSOR)
layers = importlib.import_module(adapter.ATTENTION)
if hasattr(layers, "DeepseekV4Attention"):  # from 0.23.0 on one class is the whole layer
    from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadata

    CompressedMetadata = partial(DeepseekV4FlashMLAMetadata, topk_tokens=0)
    Wrapper = adapter.DeepseekV4FullCacheAttention
    attend = Wrapper.forward_mqa
else:
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseMetadata as CompressedMetadata

    Wrapper = layers.DeepseekV4MultiHeadLatentAttentionWrapper
    attend = layers.DeepseekV4MLAAttention.forward
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEADS, EPS, SCALE, KV_SCALE, Q_SCALE = 2, 1e-6, 512**-0.5, 0.0625, 0.125
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Output and rows are rounded, and a few E4M3 rows round the other way in a tie.
TOLERANCE = 4e-3
# (tokens before this step, tokens of this step): two decodes, then two prefill chunks, the second a first one.
MIXED = ((150, 1), (255, 1), (126, 3), (0, 5))


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setenv("VLLM_DSV4_PROVIDER", "triton")


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Step:
    """A layer, its caches and one step; requests have blocks anywhere, and unused rows are NaN.

    `kv_weight` multiplies the channels of kv, in the window and compressed.
    """

    window_rows = 64  # in a block

    def __init__(
        self, ratio, dtype, requests, padding=0, padding_is_decode=False, alignment=0, kv_scale=KV_SCALE,
        kv_weight=1.0, scale=SCALE,
    ):  # fmt: skip
        self.gen = torch.Generator().manual_seed(ratio + len(requests))
        self.ratio, self.dtype, self.requests, self.padding = ratio, dtype, requests, padding
        self.alignment = alignment
        self.kv_scale = kv_scale if dtype == E4M3 else 1.0
        self.kv_weight, self.scale = kv_weight, scale
        self.query_dtype = attention.query_dtype(torch.empty(0, dtype=dtype))
        self.q_scale = Q_SCALE if self.query_dtype == E4M3 else 1.0
        self.lengths = [old + new for old, new in requests]
        tokens = sum(new for _, new in requests)
        self.q = self.random(tokens + padding, HEADS, 512).to(BF16)
        self.kv = [(self.random(length, 512) * kv_weight).to(BF16) for length in self.lengths]
        self.sink = self.random(HEADS)
        angle = torch.rand(max(self.lengths), 32, generator=self.gen) * 6.28
        self.cos_sin = torch.cat((angle.cos(), angle.sin()), -1)
        self.owner = [r for r, (_, new) in enumerate(requests) for _ in range(new)]
        self.position = [old + i for old, new in requests for i in range(new)]

        window, window_tables = self.pages(self.window_rows, self.window_rows, 512, dtype)
        # Rows of earlier steps are in the cache.
        self.windows = [self.stored(checks.rotate(kv.double(), self.cos_sin[: len(kv)])) for kv in self.kv]
        for request, (old, _) in enumerate(requests):
            self.fill(window, window_tables[request], self.window_rows, self.windows[request][:old])
        tokens_at = zip(self.owner, self.position, strict=True)
        slots = [self.slot(window_tables, self.window_rows, r, p) for r, p in tokens_at]
        # Padding has no slot; what else it has is left over from other steps.
        slots += [-1] * padding
        stale = [10**6] * padding
        starts = [0]
        for _, new in requests:
            starts.append(starts[-1] + new)
        decodes = sum(new == 1 for _, new in requests)
        self.metadata = DeepseekSparseSWAMetadata(
            block_table=ints(window_tables),
            slot_mapping=torch.tensor(slots, device=DEVICE),
            block_size=self.window_rows,
            seq_lens=ints(self.lengths),
            query_start_loc=ints(starts),
            query_start_loc_cpu=torch.tensor(starts),
            is_valid_token=torch.tensor([slot >= 0 for slot in slots], device=DEVICE),
            token_to_req_indices=ints(self.owner + stale),
            num_decodes=decodes,
            num_prefills=len(requests) - decodes,
            num_decode_tokens=decodes + padding_is_decode * padding,
            num_prefill_tokens=tokens - decodes,
        )
        self.layer = SimpleNamespace(
            prefix="layer",
            full_cache=True,
            impl_cls=getattr(adapter, "DeepseekV4FullCacheImpl", None),
            compress_ratio=ratio,
            scale=self.scale,
            kv_scale=self.kv_scale,
            q_scale=self.q_scale,
            attn_sink=torch.cat((self.sink, torch.full((64 - HEADS,), float("nan")))).to(DEVICE),
            swa_cache_layer=SimpleNamespace(kv_cache=window, prefix="layer.swa"),
            kv_cache=torch.tensor([]),
            topk_indices_buffer=None,
            max_model_len=512,
            kv_cache_dtype="bfloat16" if dtype == BF16 else "fp8_per_tensor",
        )
        self.context = SimpleNamespace(additional_kwargs={}, attn_metadata={"layer.swa": self.metadata})
        if ratio > 1:
            self.add_compressed(slots, stale)

    def common(self, block_table):
        """What vLLM's builders of metadata are given."""
        starts, lengths = self.metadata.query_start_loc, self.metadata.seq_lens
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.cpu(),
            seq_lens=lengths,
            num_reqs=len(self.requests),
            num_actual_tokens=len(self.owner),
            max_query_len=max(new for _, new in self.requests),
            max_seq_len=max(self.lengths),
            block_table_tensor=block_table,
            slot_mapping=self.metadata.slot_mapping,
            positions=torch.tensor(self.position, device=DEVICE),
        )
        common.seq_lens_cpu_upper_bound = lengths.cpu()  # read from 0.23.0 on
        return common

    def random(self, *shape):
        return torch.randn(*shape, generator=self.gen)

    def stored(self, rows):
        if self.dtype == BF16:
            return rows.to(BF16).double()
        return (rows / self.kv_scale).clamp(-448, 448).float().to(E4M3).double() * self.kv_scale

    def pages(self, tokens, rows, width, dtype):
        """A cache with blocks of `rows` rows for `tokens` tokens, and a table of blocks for each request."""
        blocks = max(-(-length // tokens) for length in self.lengths)
        count = blocks * len(self.requests) + 1
        order = torch.randperm(count, generator=self.gen).tolist()
        tables = [order[r * blocks : (r + 1) * blocks] for r in range(len(self.requests))]
        stride = rows * width + self.alignment
        raw = torch.full((count, stride), float("nan")).to(dtype).to(DEVICE)
        cache = raw[:, : rows * width].unflatten(1, (rows, width))
        return (cache.view(torch.uint8) if dtype == E4M3 else cache), tables

    def slot(self, tables, rows, request, row):
        return tables[request][row // rows] * rows + row % rows

    def fill(self, cache, table, rows, values):
        for row, value in enumerate(values):
            value = (value / self.kv_scale).to(self.dtype)
            cache[table[row // rows], row % rows] = value.view(cache.dtype).to(DEVICE)

    def add_compressed(self, slots, stale):
        ratio, rows = self.ratio, 256 // self.ratio
        width, block = (1024, 4) if ratio == 4 else (512, 8)
        norm = (torch.rand(512, generator=self.gen) + 0.5) * self.kv_weight
        states = self.states = [self.random(length, 2, width) for length in self.lengths]
        self.rows = [
            self.stored(checks.compressed_rows(state, norm, self.cos_sin, ratio)) if len(state) >= ratio
            else torch.zeros(0, 512, dtype=torch.float64)
            for state in states
        ]  # fmt: skip
        cache, tables = self.pages(256, rows, 512, self.dtype)
        state_cache, state_tables = self.pages(block, block, 2 * width, torch.float32)
        for request, (old, _) in enumerate(self.requests):
            self.fill(cache, tables[request], rows, self.rows[request][: old // ratio])
            for position, state in enumerate(states[request]):
                place = state_tables[request][position // block], position % block
                state_cache[place] = state.flatten().to(DEVICE)
        tokens = list(zip(self.owner, self.position, strict=True))
        row_slots = [
            self.slot(tables, rows, r, p // ratio) if (p + 1) % ratio == 0 else -1 for r, p in tokens
        ] + [-1] * self.padding
        state_slots = [self.slot(state_tables, block, r, p) for r, p in tokens]
        metadata = CompressedMetadata(
            num_reqs=len(self.requests),
            max_query_len=max(new for _, new in self.requests),
            max_seq_len=max(self.lengths),
            num_actual_tokens=len(self.owner),
            query_start_loc=self.metadata.query_start_loc,
            slot_mapping=torch.tensor(row_slots, device=DEVICE),
            block_table=ints(tables),
            req_id_per_token=ints(self.owner),
            block_size=256,
        )
        self.context.attn_metadata["layer"] = metadata
        self.layer.kv_cache = cache
        self.context.attn_metadata["state"] = compressor.CompressorMetadata(
            block_table=ints(state_tables),
            slot_mapping=torch.tensor(state_slots + [-1] * self.padding, device=DEVICE),
            block_size=block,
            token_to_req_indices=ints(self.owner + stale),
        )
        self.compressor = SimpleNamespace(
            state_cache=SimpleNamespace(kv_cache=state_cache, prefix="state"),
            norm=SimpleNamespace(weight=norm.to(DEVICE)),
            rms_norm_eps=EPS,
        )
        if ratio == 4:  # as the indexer fills it: valid rows first, in no order
            self.layer.topk_indices_buffer = torch.full((len(slots), 32), -1, dtype=torch.int32)
            for token, position in enumerate(self.position):
                picked = torch.randperm((position + 1) // 4, generator=self.gen)[:32]
                self.layer.topk_indices_buffer[token, : len(picked)] = picked.int()
            self.picked = self.layer.topk_indices_buffer
            self.layer.topk_indices_buffer = self.picked.to(DEVICE)

    def run(self, amax=None):
        """Insert, compress and attend as the patched wrapper does; the output starts as NaN."""
        positions = torch.tensor(self.position + [10**6] * self.padding, device=DEVICE)
        kv = torch.stack([self.kv[r][p] for r, p in zip(self.owner, self.position, strict=True)])
        kv = torch.cat((kv, torch.full((self.padding, 512), float("nan"), dtype=BF16))).to(DEVICE)
        cos_sin = self.cos_sin.to(DEVICE)
        in_range = positions.clamp(max=len(cos_sin) - 1)
        q = self.q.clone().to(DEVICE)  # normed in place
        wrapper = SimpleNamespace(
            **vars(self.layer),
            mla_attn=self.layer,
            rotary_emb=SimpleNamespace(cos_sin_cache=cos_sin),
            eps=EPS,
        )
        inserted = Wrapper._fused_qnorm_rope_kv_insert(wrapper, q, kv, in_range, self.context.attn_metadata)
        q = q if inserted is None else inserted  # 0.21.0: in place, or kept for the inner layer
        if self.ratio > 1:
            self.compress(positions, wrapper.rotary_emb)
        out = torch.full_like(q, float("nan"), dtype=BF16)
        with override_forward_context(self.context):
            if amax is not None:
                calibrate.observe(self.layer, q, amax)
            attend(self.layer, q, kv, positions, out)
        return out.cpu()

    def compress(self, positions, rotary_emb):
        metadata = self.context.attn_metadata
        if hasattr(layers, "DeepseekV4Attention"):  # through vLLM's, which also writes the states of this step
            width = 1024 if self.ratio == 4 else 512
            states = torch.full((len(positions), 2 * width), float("nan"))
            for token, (request, position) in enumerate(zip(self.owner, self.position, strict=True)):
                states[token] = self.states[request][position].flatten()
            self.layer.compressor = self.compressor
            vars(self.compressor).update(
                coff=width // 512,
                head_dim=512,
                compress_ratio=self.ratio,
                ape=torch.zeros(self.ratio, width, device=DEVICE),
                _compress_norm_rope_store=partial(adapter._compress, self.layer),
            )
            with override_forward_context(self.context):
                compressor.DeepseekCompressor.forward(self.compressor, states.to(DEVICE), positions, rotary_emb)
        else:
            assert attention.compress(self.compressor, self.layer, positions, rotary_emb.cos_sin_cache, metadata)

    def expected(self):
        out = []
        for token, (request, position) in enumerate(zip(self.owner, self.position, strict=True)):
            q = checks.normed(self.q[token].double())[None]
            q = checks.rotate(q, self.cos_sin[position][None])[0]
            q = (q / self.q_scale).to(self.query_dtype).double() * self.q_scale
            keys = self.windows[request][max(0, position - 127) : position + 1]
            if self.ratio > 1:
                rows = self.rows[request][: (position + 1) // self.ratio]
                if self.ratio == 4:
                    rows = rows[[row for row in self.picked[token].tolist() if row >= 0]]
                keys = torch.cat((keys, rows))
            scores = torch.cat((q @ keys.T * self.scale, self.sink.double()[:, None]), 1)
            out.append(scores.softmax(1)[:, :-1] @ keys)
        return torch.stack(out)

    def check(self):
        out = self.run()
        expected = self.expected()
        for token, (found, right) in enumerate(zip(out.double(), expected, strict=False)):
            error = float((found - right).norm() / right.norm())
            assert error < TOLERANCE, f"token {token}"
        return out


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "fp8"])
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_mixed_batch(ratio, dtype):
    """Decodes, then prefill chunks, then padding that no request owns, which stays as it is."""
    step = Step(ratio, dtype, MIXED, padding=2)
    out = step.check()
    assert out[-2:].isnan().all() and not out[:-2].isnan().any()


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_graph_padding_among_decodes(ratio):
    """A captured graph is replayed with fewer requests: the rest of its tokens are decodes without a slot."""
    step = Step(ratio, E4M3, ((150, 1), (127, 1)), padding=2, padding_is_decode=True)
    out = step.check()
    assert (out[-2:] == 0).all()


@pytest.mark.parametrize("ratio", [1, 128])
def test_pages_with_padding_between_them(ratio):
    """Pages may lie further apart than their rows need, as where caches of several kinds share a page size."""
    Step(ratio, BF16, ((150, 1), (253, 3)), alignment=64).check()


class OneGroupStep(Step):
    """As without vLLM's hybrid cache manager: blocks of the window have the rows of a scheduler's block."""

    window_rows = 256


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "fp8"])
@pytest.mark.parametrize("ratio", [1, 128])
def test_one_group_of_layers(ratio, dtype):
    OneGroupStep(ratio, dtype, MIXED, padding=2).check()


class SharedBlocksStep(Step):
    """With caches that vLLM itself allocates, in blocks that hold the pages of three layers."""

    def pages(self, tokens, rows, width, dtype):
        from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
        from vllm.v1.kv_cache_interface import (
            KVCacheGroupSpec,
            KVCacheLayout,
            MLAAttentionSpec,
            UniformTypeKVCacheSpecs,
            create_kv_cache_views,
        )

        cache, tables = super().pages(tokens, rows, width, dtype)
        layout = KVCacheLayout.BLHNC
        common = dict(block_size=tokens, num_kv_heads=1, alignment=512, tokens_per_state=tokens // rows)
        spec = MLAAttentionSpec(head_size=width, dtype=dtype, **common)
        odd = MLAAttentionSpec(head_size=132, dtype=torch.uint8, **common)
        specs = {"before": odd, "this": spec, "after": spec}
        cache_config = SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=len(cache),
            prefix_cache_retention_interval=None,
        )
        attention_config = SimpleNamespace(hisparse_config=None)
        config = SimpleNamespace(cache_config=cache_config, attention_config=attention_config)
        group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs.from_specs(specs))
        plan = get_kv_cache_config_from_groups(config, [group], 0)
        place = plan.kv_cache_tensors[1]
        assert place.layers == ["this", "after"]
        raw = torch.full((place.size,), -1, dtype=torch.int8, device=DEVICE)  # NaN in every dtype
        view = create_kv_cache_views(raw, spec, len(cache), layout, place)[0]
        inside = torch.zeros_like(raw)
        create_kv_cache_views(inside, spec, len(cache), layout, place)[0].view(torch.int8).fill_(1)
        self.outside = [*getattr(self, "outside", []), (raw, inside == 0)]
        return view.squeeze(1), tables  # as vLLM binds it


@VLLMS_TOO
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "fp8"])
@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_blocks_shared_with_other_layers(ratio, dtype):
    """A block is larger than a page, by no whole number of BF16 rows; the other layers' pages stay as they are."""
    step = SharedBlocksStep(ratio, dtype, MIXED)
    cache = step.layer.swa_cache_layer.kv_cache
    assert cache.dtype == dtype and cache.stride(0) > 64 * 512 and cache.storage_offset()
    assert dtype == E4M3 or cache.stride(0) % 512
    step.check()
    assert all((raw[others] == -1).all() and others.any() for raw, others in step.outside)


def profile(layer, tokens):
    """What a layer does while vLLM measures memory, before there is a cache or metadata; the tables it holds."""
    out = torch.full((tokens, HEADS, 512), float("nan"), dtype=BF16)
    context = SimpleNamespace(attn_metadata=None, additional_kwargs={})
    with override_forward_context(context):
        attention.forward(layer, out, out)
    assert (out == 0).all()
    return context.additional_kwargs.get("dsv4_tables", {})


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_memory_is_measured_with_the_tables_of_the_widest_step(ratio):
    """vLLM gives all that the profiled step leaves to the caches."""
    step = Step(ratio, BF16, ((511, 1), (0, 5)))
    held = profile(step.layer, 6)
    step.run()
    used = step.context.additional_kwargs["dsv4_tables"]
    assert [table.shape for table in held.values()] == [table.indices.shape for table in used.values()]
    assert len(held) == (ratio != 4)


def test_memory_measured_at_a_million_tokens():
    layer = SimpleNamespace(compress_ratio=128, max_model_len=1 << 20, kv_cache_dtype="bfloat16")
    (table,) = profile(layer, 64).values()
    assert table.shape == (64, 128 + (1 << 20) // 128) and table.dtype == torch.int32


def test_compressors_of_other_caches_are_left_alone():
    for layer in (SimpleNamespace(), SimpleNamespace(full_cache=False)):  # the indexer's, and FlashMLA's
        assert not attention.compress(None, layer, None, None, {})


@pytest.mark.parametrize("ratio, tables", [(1, 1), (4, 2), (128, 1)])
def test_tables_are_shared_within_a_step_only(ratio, tables, monkeypatch):
    """Two layers of one kind share a table unless an indexer picked; the next step builds anew."""
    step = Step(ratio, BF16, ((130, 1),))
    built = []
    build = index_table.build_sparse_index_table
    monkeypatch.setattr(index_table, "build_sparse_index_table", lambda *a, **k: built.append(1) or build(*a, **k))
    compressed = step.context.attn_metadata.get("layer")
    q = step.q.to(DEVICE)
    for number in (1, 2):
        with override_forward_context(SimpleNamespace(additional_kwargs={})):
            for _ in range(2):
                attention.attend(step.layer, q, torch.empty_like(q), step.metadata, compressed)
        assert len(built) == number * tables
    # Windows of two groups have block tables of their own, and so have compressed caches.
    with override_forward_context(SimpleNamespace(additional_kwargs={})):
        for of_group in (step.metadata, copy.copy(step.metadata)):
            attention.attend(step.layer, q, torch.empty_like(q), of_group, compressed)
    assert len(built) == 2 * tables + 2
    if compressed is None:
        return
    with override_forward_context(SimpleNamespace(additional_kwargs={})):
        for of_group in (compressed, copy.copy(compressed)):
            attention.attend(step.layer, q, torch.empty_like(q), step.metadata, of_group)
    assert len(built) == 2 * tables + 4


@pytest.mark.parametrize("captured, length, columns", [(False, 300, 2), (True, 300, 8), (False, 5000, 8)])
def test_columns_of_compressed_rows(captured, length, columns, monkeypatch):
    """A graph is captured with short sequences, and replayed with all that the model may have."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    layer = SimpleNamespace(compress_ratio=128, max_model_len=1024)
    metadata = SimpleNamespace(block_table=SimpleNamespace(is_cuda=True), max_seq_len=length)
    assert index_table.compressed_columns(layer, metadata) == columns
    assert index_table.compressed_columns(layer, None) == 0


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_warm_up_stores_nothing(ratio):
    step = Step(ratio, BF16, ((130, 1),))
    layer, compressor = step.layer, getattr(step, "compressor", None)
    layer.num_heads, layer.head_dim = HEADS, 512
    if ratio == 4:
        layer.topk_indices_buffer = torch.full((1024, 32), -1, dtype=torch.int32, device=DEVICE)
    caches = [layer.swa_cache_layer.kv_cache, layer.kv_cache]
    before = [cache.clone() for cache in caches]
    rotary = SimpleNamespace(cos_sin_cache=step.cos_sin.to(DEVICE))
    outer = SimpleNamespace(rotary_emb=rotary, compressor=compressor, eps=EPS)
    with override_forward_context(SimpleNamespace(additional_kwargs={})):
        warmup._warm_up_layer(layer, outer, 1)
    assert all(map(torch.equal, (c.view(torch.int16) for c in caches), (b.view(torch.int16) for b in before)))


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_calibration_sees_what_this_step_writes(ratio):
    """Rotated rows of the window, compressed rows that end in this step, normed and rotated queries."""
    step = Step(ratio, BF16, MIXED, padding=2)
    new = list(zip(step.owner, step.position, strict=True))
    rows = [step.windows[r][p] for r, p in new]
    if ratio > 1:
        rows += [step.rows[r][p // ratio] for r, p in new if (p + 1) % ratio == 0]
    largest = max(row.abs().max().item() for row in rows)
    amax = torch.tensor([0.0, 0.0], device=DEVICE)
    step.run(amax)
    assert amax[0].item() == pytest.approx(largest, rel=2**-8)
    q = checks.normed(step.q[:-2].double())
    q = checks.rotate(q, step.cos_sin[step.position])
    assert amax[1].item() == pytest.approx(q.abs().max().item(), rel=2**-8)


def test_e4m3_queries_have_a_scale_of_their_own():
    step = Step(1, E4M3, ((0, 4),))
    step.run()
    q = checks.rotate(checks.normed(step.q.double()), step.cos_sin[step.position])
    step.layer.q_scale = 2.0**-5
    out = torch.empty(4, HEADS, 512, dtype=BF16, device=DEVICE)
    with override_forward_context(step.context):
        attention.attend(step.layer, (q * 2**5).float().to(E4M3).to(DEVICE), out, step.metadata, None)
    expected = step.expected()
    assert float((out.cpu().double() - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("gain, loss", [(64, 5), (1, 0.99), (1 / 64, 1.2), (1 / 1024, 5)])
def test_calibrated_scale_keeps_what_scale_one_loses(gain, loss, monkeypatch):
    """Error of the output against float64 on rows that were not rounded to E4M3, of which 8 channels are heavy."""
    monkeypatch.setenv("VLLM_DSV4_PROVIDER", "reference")
    weight = torch.where(torch.arange(512) % 64 == 0, 8.0 * gain, gain)
    steps = lambda dtype, kv_scale: Step(  # noqa: E731
        4, dtype, ((0, 12),), kv_scale=kv_scale, kv_weight=weight, scale=SCALE / gain
    )
    bf16, amax = steps(BF16, 1.0), torch.zeros(2, device=DEVICE)
    bf16.run(amax)
    exact = bf16.expected()
    calibrated, one = (
        float((steps(E4M3, scale).run().double() - exact).norm() / exact.norm())
        for scale in (calibrate.scale(amax[0].item()), 1.0)
    )
    assert calibrated < 0.04 and one > loss * calibrated


def make_builders(monkeypatch, ratio, classes, max_model_len=512, max_num_batched_tokens=64):
    hf_config = SimpleNamespace(compress_ratios=[ratio], index_topk=512)
    model_config = SimpleNamespace(
        hf_config=hf_config, max_model_len=max_model_len, get_num_attention_heads=lambda _: HEADS
    )
    config = SimpleNamespace(
        model_config=model_config, parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=16),
        speculative_config=None, cache_config=SimpleNamespace(cache_dtype="bfloat16", block_size=256),
    )  # fmt: skip
    module = importlib.import_module(adapter.DeepseekV4FullCacheBackend.get_builder_cls().__base__.__module__)
    for name in ("num_compute_units", "get_mla_dims"):
        monkeypatch.setattr(module, name, lambda *_: 132, raising=False)
    spec = SimpleNamespace(block_size=256, compress_ratio=ratio, storage_block_size=256 // ratio,
                           tokens_per_state=ratio, num_states=256 // ratio)  # fmt: skip
    return config, [cls(spec, ["layer"], config, DEVICE) for cls in classes]


@pytest.mark.parametrize("ratio", [4, 128])
def test_metadata_of_compressed_rows(ratio, monkeypatch):
    """What vLLM's builder gives, without the tables that only FlashMLA reads."""
    step = Step(ratio, BF16, MIXED)
    expected = step.context.attn_metadata["layer"]
    common = step.common(expected.block_table)
    lean = adapter.DeepseekV4FullCacheBackend.get_builder_cls()
    assert lean is adapter.DeepseekV4FullCacheBackend.get_builder_cls()
    config, (builder, theirs) = make_builders(monkeypatch, ratio, (lean, lean.__base__))
    assert builder.model_config is config.model_config and builder.vllm_config is config
    assert ("c128a_prefill_buffer" in vars(theirs)) == (ratio == 128)
    assert not any(name.endswith("_buffer") and "c128a" in name for name in vars(builder))
    found = builder.build(0, common)
    assert torch.equal(found.slot_mapping, expected.slot_mapping)
    assert torch.equal(found.block_table, expected.block_table)
    assert torch.equal(found.req_id_per_token, expected.req_id_per_token)
    assert not any(value is not None for name, value in vars(found).items() if "c128a" in name)
    assert any(value is not None for name, value in vars(theirs.build(0, common)).items() if "c128a" in name) == (
        ratio == 128
    )


@pytest.mark.parametrize("which, columns", [("ours", 128), ("stock", 8192)])
def test_builder_allocates_no_table(which, columns, monkeypatch):
    """Not even one that is dropped: once the caches are there, there may be no room for it."""
    lean = adapter.DeepseekV4FullCacheBackend.get_builder_cls()
    sizes, empty = [], torch.empty

    def spy(*shape, **options):
        made = empty(*shape, **options)
        sizes.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", spy)
    cls = lean if which == "ours" else lean.__base__
    make_builders(monkeypatch, 128, (cls,), max_model_len=1 << 20, max_num_batched_tokens=512)
    assert max(sizes) == 512 * columns * 4
