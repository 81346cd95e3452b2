"""MLA_KERNELS_SPARSE: vLLM's own classes around it, from a batch and the indexer's picks to attention, against the
definition in float64; and what it refuses, before weights."""

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sparse_mla_series
import torch
from on_request import tree_with
from sparse_mla_series import tree_with_series  # noqa: F401
from test_real_config import LLAMA, V4, on_hopper
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.mla import sparse_utils
from vllm.v1.worker.utils import select_common_block_size

sparse_mla_series.needed()
from vllm.dsv4_overlay import sparse_mla, sparse_mla_attention, sparse_mla_backend  # noqa: E402
from vllm.third_party.mla_kernels import flash_mla, indexer  # noqa: E402

BACKEND = sparse_mla_backend.SparseMLABackend
NEWER = hasattr(sparse_utils, "flat_kv_row_view")  # 0.33.0: metadata, picks and slots are vLLM's
PAGE, HEADS, TOPK, SCALE = 64, 8, 128, 0.07
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
# (tokens before this step, tokens of it): decodes, one with two drafts, then chunks of prefill.
MIXED = ((70, 1), (0, 1), (200, 3), (129, 20), (0, 65))


def packed(keys):
    """656-byte rows of [rows, 576], and what they hold, written from the layout."""
    nope, rope = keys[:, :512].float().view(-1, 4, 128), keys[:, 512:].to(BF16)
    scales = nope.abs().amax(-1) / 448
    values = (nope / scales[..., None]).to(FP8)
    parts = values.flatten(1).view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)
    held = torch.cat([(values.double() * scales.double()[..., None]).flatten(1), rope.double()], 1)
    return torch.cat(parts, 1), held


class Batch:
    """A step, the cache it reads, and what each token picked."""

    def __init__(self, cache_dtype, width=576, between=0, padding=5):
        gen = torch.Generator().manual_seed(1)
        lengths = [before + tokens for before, tokens in MIXED]
        blocks = [-(-length // PAGE) for length in lengths]
        self.table = torch.full((len(MIXED), max(blocks) + 2), 10**6, dtype=torch.int32)  # stale past a request's
        order = torch.randperm(sum(blocks), generator=gen).int()
        for request, part in enumerate(order.split(blocks)):
            self.table[request, : len(part)] = part
        rows = torch.randn(sum(blocks) * PAGE, width, generator=gen)
        if cache_dtype == "fp8_ds_mla":
            stored, self.held = packed(rows)
        else:
            stored, self.held = rows.to(BF16), rows.to(BF16).double()
        nan = 255 if cache_dtype == "fp8_ds_mla" else torch.nan
        whole = torch.full((sum(blocks), PAGE + between, stored.shape[1]), nan, dtype=stored.dtype)
        whole[:, :PAGE] = stored.view(-1, PAGE, stored.shape[1])
        self.cache = whole[:, :PAGE]
        self.owner = [request for request, (_, tokens) in enumerate(MIXED) for _ in range(tokens)]
        self.position = [before + i for before, tokens in MIXED for i in range(tokens)]
        tokens = len(self.owner)
        self.picked = torch.full((tokens + padding + 7, TOPK), 12345, dtype=torch.int32)  # vLLM's buffer is longer
        for token, position in enumerate(self.position):
            some = torch.randperm(position + 1, generator=gen)[:TOPK]
            self.picked[token] = -1 if NEWER else 0  # 0.22.1 reads as many as the token has keys, whatever follows
            self.picked[token, : len(some)] = some.int()
        keys = [*(min(position + 1, TOPK) for position in self.position), *[-1] * padding]
        self.keys = torch.tensor(keys, dtype=torch.int32)
        self.q = torch.randn(tokens + padding, HEADS, width, generator=gen).to(BF16)
        self.parts = self.q.split((512, width - 512), -1)  # as vLLM has it
        starts = torch.tensor([0, *(tokens for _, tokens in MIXED)]).cumsum(0, dtype=torch.int32)
        arguments = dict(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(lengths, dtype=torch.int32),
            seq_lens_cpu_upper_bound=torch.tensor(lengths),
            num_reqs=len(MIXED), num_actual_tokens=tokens + padding, max_query_len=65, max_seq_len=max(lengths),
            block_table_tensor=self.table, slot_mapping=torch.zeros(tokens + padding, dtype=torch.int64),
        )  # fmt: skip
        known = inspect.signature(CommonAttentionMetadata).parameters
        self.common = CommonAttentionMetadata(**{k: v for k, v in arguments.items() if k in known})

    def expected(self):
        out = []
        for token, request in enumerate(self.owner):
            local = self.picked[token, : self.keys[token]].long()
            keys = self.held[self.table[request, local // PAGE].long() * PAGE + local % PAGE]
            weights = (self.q[token].double() @ keys.T * SCALE).softmax(-1)
            out.append(weights @ keys[:, :512])
        return torch.stack(out)

    def check(self, out):
        want = self.expected()
        assert out.shape == (len(self.q), HEADS, 512) and out.dtype == BF16
        error = (out[: len(want)].double() - want).norm() / want.norm()
        assert error < 2**-8, error  # the output's own rounding and that of weights


PREFILLS = pytest.mark.parametrize("prefill", ["in_place", "workspace"])
CACHES = pytest.mark.parametrize(
    "cache_dtype, width", [("auto", 576), ("fp8_ds_mla", 576), ("auto", 512)], ids=["bf16", "fp8", "no-rope"]
)


def settings(prefill):
    """Of a server; the workspace holds 200 rows."""
    attention, longest = SimpleNamespace(), 40  # five times as many
    if NEWER:
        attention.sparse_mla_prefill_workspace_factor, longest = 4, 50
    return SimpleNamespace(
        attention_config=attention,
        speculative_config=SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=128, max_num_seqs=16),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(
            max_model_len=longest, hf_text_config=SimpleNamespace(index_n_heads=32, index_head_dim=128)
        ),
        additional_config={"sparse_mla_prefill": prefill},
    )


@pytest.fixture
def workspace(monkeypatch):
    """How many rows were asked for, each time; they hold what others left there."""
    asked = []

    def get_simultaneous(shape_and_dtype):
        asked.append(shape_and_dtype[0])
        return [torch.full(shape_and_dtype[0], torch.nan, dtype=shape_and_dtype[1])]

    manager = SimpleNamespace(get_simultaneous=get_simultaneous)
    monkeypatch.setattr(sparse_mla_attention, "current_workspace_manager", lambda: manager)
    return asked


@CACHES
@pytest.mark.skipif(NEWER, reason="0.33.0 has metadata of its own")
@PREFILLS
def test_a_mixed_batch(cache_dtype, width, prefill, workspace, monkeypatch):
    batch = Batch(cache_dtype, width)
    config = settings(prefill)
    monkeypatch.setattr(sparse_mla_attention, "get_current_vllm_config", lambda: config)
    spec = SimpleNamespace(block_size=PAGE)
    builder = sparse_mla_backend.SparseMLAMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
    assert builder.reorder_batch_threshold == 3  # two drafts are decoded
    assert builder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    metadata = builder.build(0, batch.common)
    assert metadata.req_id_per_token[: len(batch.owner)].tolist() == batch.owner
    assert (metadata.req_id_per_token[len(batch.owner) :] == len(MIXED)).all()
    assert metadata.keys_per_token.clamp(-1, TOPK).tolist() == batch.keys.tolist()
    held = {name: value.clone() for name, value in vars(metadata).items() if torch.is_tensor(value)}
    for value in vars(builder).values():  # as sleep mode leaves them
        if torch.is_tensor(value):
            value.zero_()
    again = builder.build(0, batch.common)
    for name in ("req_id_per_token", "keys_per_token"):  # graphs keep their addresses
        assert getattr(again, name).data_ptr() == getattr(metadata, name).data_ptr()
        assert torch.equal(getattr(again, name), held[name])

    impl = sparse_mla_backend.SparseMLAImpl(
        HEADS, width, SCALE, 1, None, None, cache_dtype, None, "decoder", None,
        indexer=SimpleNamespace(topk_indices_buffer=batch.picked), kv_lora_rank=512,
    )  # fmt: skip
    assert BACKEND.get_kv_cache_shape(7, PAGE, 1, width, cache_dtype)[2] == batch.cache.shape[2]
    out, lse = impl.forward_mqa(batch.parts, batch.cache, metadata, None)
    assert lse is None and workspace == [(200, width)] * (2 if prefill == "workspace" else 0)
    batch.check(out)
    assert (out[len(batch.owner) :] == 0).all()  # padding sees nothing, whatever its picks are


@pytest.mark.skipif(not NEWER, reason="0.22.1 has no dense attention for prompts of a sparse model")
@pytest.mark.parametrize(
    ("width", "cache_dtype", "prefill", "capability", "dense"),
    [
        (576, "auto", "in_place", (9, 0), True),
        (576, "fp8_ds_mla", "in_place", (9, 0), True),
        (512, "auto", "in_place", (9, 0), True),
        (512, "fp8_ds_mla", "in_place", (9, 0), False),  # rows of 576 values
        (576, "auto", "workspace", (9, 0), False),  # whose prefills are compared
        (576, "auto", "in_place", (8, 0), False),  # did not run there
        (576, "auto", "in_place", (10, 0), False),
    ],
)
def test_where_short_prompts_have_dense_attention(width, cache_dtype, prefill, capability, dense, monkeypatch):
    def given(impl):
        impl.head_size, impl.kv_cache_dtype = width, cache_dtype
        impl.topk_indices_buffer = torch.empty(1, TOPK, dtype=torch.int32)

    monkeypatch.setattr(sparse_mla_backend.SparseMLACommonImpl, "__init__", given)
    monkeypatch.setattr(sparse_mla_backend, "get_current_vllm_config", lambda: settings(prefill))
    for name in ("reserve_workspace", "warm_up_scores"):
        monkeypatch.setattr(sparse_mla_backend, name, lambda *args, **kwargs: None)
    found = DeviceCapability(*capability)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *args, **kwargs: found)
    assert sparse_mla_backend.SparseMLAImpl().supports_dense_mha_prefill == dense


@CACHES
@PREFILLS
@pytest.mark.skipif(not NEWER, reason="0.22.1 has no rows of other layers between a layer's blocks")
def test_slots_over_packed_blocks(cache_dtype, width, prefill, workspace, monkeypatch):
    batch = Batch(cache_dtype, width, between=3 * PAGE, padding=0)
    tokens = len(batch.owner)
    _, stride = sparse_utils.flat_kv_row_view(batch.cache, PAGE)
    assert stride == 4 * PAGE
    owner = torch.tensor(batch.owner, dtype=torch.int32)
    impl = sparse_mla_backend.SparseMLAImpl.__new__(sparse_mla_backend.SparseMLAImpl)
    impl.scale, impl.topk_indices_buffer = SCALE, batch.picked
    impl.need_to_return_lse_for_decode = False
    assert not impl.supports_quant_query_input

    theirs = SimpleNamespace(req_id_per_token=owner, block_table=batch.table, block_size=PAGE)
    monkeypatch.setattr(sparse_mla_backend.SparseMLACommonMetadataBuilder, "build", lambda *given: theirs)
    builder = sparse_mla_backend.SparseMLAMetadataBuilder.__new__(sparse_mla_backend.SparseMLAMetadataBuilder)
    builder.vllm_config, builder.reorder_batch_threshold = settings(prefill), 3
    assert builder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    metadata = builder.build(0, batch.common)
    if prefill == "in_place":
        assert metadata.separate is None
        slots, keys = sparse_utils.triton_convert_req_index_to_global_index(
            owner, batch.table, batch.picked[:tokens], BLOCK_SIZE=PAGE, BLOCK_STRIDE_ROWS=stride,
            NUM_TOPK_TOKENS=TOPK, return_valid_counts=True,
        )  # fmt: skip
        assert torch.equal(keys, batch.keys)
        slots[slots < 0] = 0  # what follows the keys is not read
        given = dict(layer=None, block_size=PAGE, is_decode=False)
        out, lse = impl._forward_mqa_kernel(batch.parts, batch.cache, slots, keys, **given)
    else:
        out, lse = impl.forward_mqa(batch.parts, batch.cache, metadata, None)
    assert lse is None and workspace == [(200, width)] * (prefill == "workspace")
    batch.check(out)


@pytest.mark.skipif(not NEWER, reason="0.22.1 builds the metadata of every draft")
@pytest.mark.parametrize(
    "prefill, gpus, interleave, supported, decode",
    [("in_place", 1, 1, True, 3), ("in_place", 2, 1, False, 3), ("in_place", 2, 16, False, 1),
     ("workspace", 1, 1, False, 3)],
)  # fmt: skip
def test_drafts_in_a_graph(prefill, gpus, interleave, supported, decode, monkeypatch):
    """Two drafts are decoded, but where vLLM cannot say of each token which GPU has what it sees."""

    def init(self, spec, layers, config, device):
        self.vllm_config, self.dcp_world_size = config, gpus

    theirs = sparse_mla_backend.SparseMLACommonMetadataBuilder
    monkeypatch.setattr(theirs, "__init__", init)
    config = settings(prefill)
    config.attention_config = SimpleNamespace(hisparse_config=None)
    config.parallel_config.decode_context_parallel_size = gpus
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    builder = sparse_mla_backend.SparseMLAMetadataBuilder(None, ["layer"], config, torch.device("cpu"))
    assert builder.supports_draft_decode_metadata_update is supported
    assert builder.reorder_batch_threshold == decode
    # Captured while each of three requests had two tokens; replayed with one each, whose owners are found anew.
    for tokens, owners in ((3, [0, 1, 2, 1, 2, 2]), (1, [0, 9, 9, 1, 2, 2]), (0, [9, 9, 9, 1, 2, 2])):
        metadata = SimpleNamespace(
            query_start_loc=torch.arange(4, dtype=torch.int32),
            req_id_per_token=torch.tensor([9, 9, 9, 1, 2, 2], dtype=torch.int32),
            num_decode_tokens=tokens,
        )
        builder.update_draft_decode_metadata(metadata)
        assert metadata.req_id_per_token.tolist() == owners


class Share(Batch):
    """What one of `gpus` GPUs has of the batch's cache: after every `interleave` tokens the next GPU is at it."""

    def __init__(self, batch, gpus, rank, interleave):
        self.__dict__ |= batch.__dict__
        longest = max(batch.position) + 1
        mine = torch.arange(longest)[torch.arange(longest) // interleave % gpus == rank]
        blocks = -(-len(mine) // PAGE)
        self.table = torch.full((len(MIXED), blocks + 1), 10**6, dtype=torch.int32)
        self.cache = torch.full_like(batch.cache[:1], 255 if batch.cache.dtype == torch.uint8 else torch.nan)
        self.cache = self.cache.repeat(len(MIXED) * blocks, 1, 1)
        for request in range(len(MIXED)):
            self.table[request, :blocks] = torch.arange(blocks) * len(MIXED) + request
            length = max(p for owner, p in zip(batch.owner, batch.position, strict=True) if owner == request) + 1
            for local, position in enumerate(mine[mine < length].tolist()):
                there = batch.cache[batch.table[request, position // PAGE], position % PAGE]
                self.cache[self.table[request, local // PAGE], local % PAGE] = there


@CACHES
@pytest.mark.parametrize("gpus, interleave", [(2, 1), (4, 16)])
@pytest.mark.skipif(not NEWER, reason="0.22.1 has no decode context parallelism for sparse MLA")
def test_decode_context_parallelism(cache_dtype, width, gpus, interleave):
    """Each GPU's share by vLLM's own picks of it, merged by log-sum-exp, is attention over the whole."""
    batch, shares = Batch(cache_dtype, width, padding=0), []
    impl = sparse_mla_backend.SparseMLAImpl.__new__(sparse_mla_backend.SparseMLAImpl)
    impl.scale, impl.topk_indices_buffer, impl.index_group = SCALE, batch.picked, None
    impl.dcp_world_size, impl.need_to_return_lse_for_decode = gpus, True
    assert BACKEND.supports_dcp() and impl.can_return_lse_for_decode and impl.lse_base_on_e
    assert impl.supports_dcp and impl.supports_mtp_with_cp_non_trivial_interleave_size
    for impl.dcp_rank in range(gpus):
        share = Share(batch, gpus, impl.dcp_rank, interleave)
        metadata = SimpleNamespace(
            separate=None, req_id_per_token=torch.tensor(batch.owner, dtype=torch.int32), block_table=share.table,
            block_size=PAGE, num_decode_tokens=5, cp_kv_cache_interleave_size=interleave,
        )  # fmt: skip
        shares.append(impl.forward_mqa(batch.q, share.cache, metadata, None))
    outs, lses = (torch.stack(parts).double() for parts in zip(*shares, strict=True))
    # The first token of a sequence has a key on one GPU only.
    lonely = batch.position.index(0)
    assert (lses[:, lonely] == -torch.inf).all(1).sum() == gpus - 1 and not outs[1:, lonely].any()
    batch.check((outs * lses.softmax(0).unsqueeze(-1)).sum(0).to(BF16))


class Quantised:
    """A quantisation of vLLM's: weights in bytes, which its `apply` alone understands."""

    def apply(self, layer, x, bias=None):
        return x @ (layer.weight.to(BF16) * layer.scale).T


@CACHES
@pytest.mark.parametrize("quantised", [False, True])
def test_projections_are_absorbed_by_vllms_layer(cache_dtype, width, quantised, monkeypatch):
    """W_UK before and W_UV after this backend, out of kv_b_proj: the same as attention to each head's own keys."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    nope, rope, v, gen = 32, width - 512, 48, torch.Generator().manual_seed(3)
    batch = Batch(cache_dtype, width, padding=0)
    weight = (torch.randn(HEADS * (nope + v), 512, generator=gen) * 2).to(FP8 if quantised else BF16)
    scale = torch.tensor(2.0**-5, dtype=BF16)
    held = weight.to(BF16) * scale
    projection = SimpleNamespace(weight=weight if quantised else held, scale=scale, input_size_per_partition=512,
                                 quant_method=Quantised() if quantised else None)  # fmt: skip
    owner = torch.tensor(batch.owner, dtype=torch.int32)
    if NEWER:
        impl = sparse_mla_backend.SparseMLAImpl.__new__(sparse_mla_backend.SparseMLAImpl)
        impl.scale, impl.topk_indices_buffer, impl.index_group = SCALE, batch.picked, None
        impl.group_conversion_decode_only = True  # conversion by layer
        metadata = SimpleNamespace(
            separate=None, req_id_per_token=owner, block_table=batch.table, block_size=PAGE, prefill=None,
            num_actual_tokens=len(owner), num_decode_tokens=5, num_decodes=3, num_prefills=2,
        )  # fmt: skip
    else:
        config = settings("in_place")
        monkeypatch.setattr(sparse_mla_attention, "get_current_vllm_config", lambda: config)
        impl = sparse_mla_backend.SparseMLAImpl(
            HEADS, width, SCALE, 1, None, None, cache_dtype, None, "decoder", None,
            indexer=SimpleNamespace(topk_indices_buffer=batch.picked), kv_lora_rank=512,
        )  # fmt: skip
        spec = SimpleNamespace(block_size=PAGE)
        builder = sparse_mla_backend.SparseMLAMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
        metadata = builder.build(0, batch.common)
    layer = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(layer)
    layer.__dict__ |= dict(
        impl=impl, kv_b_proj=projection, kv_cache_dtype=cache_dtype, num_heads=HEADS, kv_lora_rank=512,
        qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v, q_pad_num_heads=None, quant_config=None,
        is_aiter_triton_fp4_bmm_enabled=False, is_aiter_triton_fp8_bmm_enabled=False, is_amx_bmm_enabled=False,
        use_pcp=False, hisparse_cache=None, dcp_q_replicate=False,
        **{f"_{name}_scale": torch.ones(()) for name in ("q", "k", "v", "prob")},
    )  # fmt: skip
    layer.process_weights_after_loading(BF16)
    q = torch.randn(len(owner), HEADS, nope + rope, generator=gen).to(BF16)
    out = torch.full((len(owner), HEADS * v), torch.nan, dtype=BF16)
    layer.forward_impl(q, *batch.q[:, 0].split((512, rope), -1), batch.cache, metadata, out)

    up_k, up_v = held.double().view(HEADS, nope + v, 512).split((nope, v), 1)
    keys, values = (torch.einsum("hpl,kl->khp", up, batch.held[:, :512]) for up in (up_k, up_v))
    want = []
    for token, request in enumerate(batch.owner):
        local = batch.picked[token, : batch.keys[token]].long()
        rows = batch.table[request, local // PAGE].long() * PAGE + local % PAGE
        scores = torch.einsum("hp,khp->hk", q[token, :, :nope].double(), keys[rows])
        scores += q[token, :, nope:].double() @ batch.held[rows, 512:].T
        want.append(torch.einsum("hk,khv->hv", (scores * SCALE).softmax(-1), values[rows]).flatten())
    want = torch.stack(want)
    error = (out.double() - want).norm() / want.norm()
    assert error < 2**-6, error  # q after W_UK, attention and its output are rounded to BF16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's operator is for GPUs")
@pytest.mark.parametrize("tokens", (1, 33))
def test_queries_are_joined(tokens):
    """As vLLM's layer has them: heads first in memory, and RoPE inside wider rows."""
    nope = torch.randn(HEADS, tokens, 512, device="cuda", dtype=BF16).transpose(0, 1)
    rope = torch.randn(tokens, HEADS, 192, device="cuda", dtype=BF16)[..., 128:]
    assert torch.equal(sparse_mla_attention._joined((nope, rope)), torch.cat((nope, rope), -1))


@CACHES
def test_what_benchmarks_count(cache_dtype, width, monkeypatch):
    """The calls of this backend, and those that the float32 reference serves in its place."""
    from vllm.third_party.mla_kernels import reference

    for module in (flash_mla, sparse_mla_attention):
        for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
            monkeypatch.setattr(module, name, getattr(module, name))  # put back at the end
    from vllm.dsv4_overlay import drop_in

    for module, name in ((flash_mla, "pick_provider"), (flash_mla, "serves"), (drop_in, "_PROVIDER")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    for name in ("features.drop_in_calls", "reference_attention"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    drop_in_calls = importlib.import_module("features.drop_in_calls")
    batch, counter = Batch(cache_dtype, width, padding=0), drop_in_calls.DropInCalls()
    slots = torch.zeros(len(batch.q), TOPK, dtype=torch.int32)
    name = "flash_mla_sparse_fwd" if cache_dtype == "auto" else "flash_mla_with_kvcache"
    sparse_mla_attention.attend_slots(batch.q, batch.cache, slots, batch.keys, SCALE)
    assert counter.drop_in_calls() == {name: 1}
    from reference_attention import ReferenceAttention

    served = []
    flash_mla._load_provider.cache_clear()
    monkeypatch.setattr(reference, "attend_reference", served.append)
    sparse_mla_attention.attend_slots(batch.q, batch.cache, slots, batch.keys, SCALE)
    flash_mla._load_provider.cache_clear()
    assert len(served) == 1 and ReferenceAttention().drop_in_calls() == {name: 2, "reference": 1}


@pytest.mark.skipif(NEWER, reason="0.33.0 has slots of its own")
def test_slots_are_compiled_before_requests_wait(monkeypatch):
    """What a layer launches when it is made is what a step launches: the same kernel, by what selects it."""
    launched = []

    def request_rows_to_slots(rows, request, table, block_size, prefill=None, starts=None):
        aligned = [x.data_ptr() % 16 == 0 for x in (rows, request, table)]
        launched.append((aligned, rows.stride(), rows.dtype, block_size % 16, prefill, starts))
        return slots(rows, request, table, block_size, prefill, starts)

    slots = sparse_mla_backend.request_rows_to_slots
    monkeypatch.setattr(sparse_mla_backend, "request_rows_to_slots", request_rows_to_slots)
    config, batch = settings("in_place"), Batch("auto")
    monkeypatch.setattr(sparse_mla_attention, "get_current_vllm_config", lambda: config)
    warmed = []
    monkeypatch.setattr(sparse_mla_backend, "warm_up_scores", warmed.append)
    impl = sparse_mla_backend.SparseMLAImpl(
        HEADS, 576, SCALE, 1, None, None, "auto", None, "decoder", None,
        indexer=SimpleNamespace(topk_indices_buffer=batch.picked), kv_lora_rank=512,
    )  # fmt: skip
    assert len(launched) == 1 and warmed == [torch.device("cpu")]
    spec = SimpleNamespace(block_size=PAGE)
    builder = sparse_mla_backend.SparseMLAMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
    impl.forward_mqa(batch.q, batch.cache, builder.build(0, batch.common), None)
    assert launched[1:] == launched[:1]


@CACHES
@pytest.mark.skipif(NEWER, reason="0.33.0 runs attention once itself before requests")
def test_attention_is_compiled_before_requests_wait(cache_dtype, width, launches, monkeypatch):
    """What a layer launches when it is made is all that batches launch, mixed or small, where Triton serves."""
    for module in (flash_mla, sparse_mla_attention):
        monkeypatch.setattr(module, "pick_provider", lambda device: "triton")
    config, batch = settings("in_place"), Batch(cache_dtype, width)
    monkeypatch.setattr(sparse_mla_attention, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(sparse_mla_backend, "warm_up_scores", lambda device: None)
    impl = sparse_mla_backend.SparseMLAImpl(
        HEADS, width, SCALE, 1, None, None, cache_dtype, None, "decoder", None,
        indexer=SimpleNamespace(topk_indices_buffer=batch.picked), kv_lora_rank=512,
    )  # fmt: skip
    compiled = set(launches)
    launches.clear()
    spec = SimpleNamespace(block_size=PAGE)
    builder = sparse_mla_backend.SparseMLAMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
    metadata = builder.build(0, batch.common)
    for tokens in (len(batch.q), 2):
        impl.forward_mqa(batch.q[:tokens], batch.cache, metadata, None)
    assert {"_attend_kernel", "_merge_kernel"} <= {name for name, *_ in launches}
    assert launches <= compiled


@pytest.mark.parametrize("width", [None, 1])
@pytest.mark.parametrize("deep_gemm", [False, True])
def test_scores_are_compiled_before_requests_wait(launches, monkeypatch, width, deep_gemm):
    """As 0.22.1 and 0.33.0 ask for them in a prefill and in a decode, where DeepGEMM does not serve."""
    monkeypatch.setattr(indexer, "_provider", lambda *given: "triton")
    q, weights = torch.zeros(37, 32, 128).to(FP8), torch.zeros(37, 32)
    keys, scales = torch.zeros(300, 128).to(FP8), torch.zeros(300)
    starts, ends = torch.zeros(2, 37, dtype=torch.int32)
    indexer.indexer_scores(q, keys, scales, weights, starts.clone(), ends.clone(), width and 300, clean=False)
    pages, table = torch.zeros(9, PAGE, 132, dtype=torch.uint8), torch.zeros(3, 7, dtype=torch.int32)
    decodes = q[:6].view(3, 2, 32, 128), pages, weights[:6], torch.ones(3, 2, dtype=torch.int32), table, 448
    indexer.paged_indexer_scores(*decodes, clean=False)
    needed = set(launches)
    launches.clear()

    monkeypatch.setattr(type(current_platform), "support_deep_gemm", lambda self: deep_gemm)
    monkeypatch.setattr(sparse_mla_attention, "get_current_vllm_config", lambda: settings("in_place"))
    sparse_mla_attention.warm_up_scores(torch.device("cpu"), width)
    assert len(needed) == 2 and launches == (set() if deep_gemm else needed)


@pytest.mark.skipif(not NEWER, reason="0.22.1 has a constructor of its own, which other tests call")
@pytest.mark.parametrize("width", [576, 512])
def test_a_layer_is_ready_before_requests_wait(workspace, monkeypatch, width):
    """The workspace is there when memory is measured, and scores are compiled."""

    def init(self, *args):
        self.head_size, self.kv_cache_dtype = width, "auto"
        self.topk_indices_buffer = torch.zeros(1, TOPK)

    monkeypatch.setattr(sparse_mla_backend.SparseMLACommonImpl, "__init__", init)
    for module in (sparse_mla_backend, sparse_mla_attention):
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: settings("workspace"))
    warmed = []
    monkeypatch.setattr(sparse_mla_backend, "warm_up_scores", lambda device, width: warmed.append(width))
    sparse_mla_backend.SparseMLAImpl()
    assert workspace == [(200, width)] and warmed == [1]


def test_chunks_of_prefills():
    """Prefills follow each other until the next does not fit; decodes have no part in it."""
    batch = Batch("auto")
    owner = torch.tensor(batch.owner + [len(MIXED)] * 5, dtype=torch.int32)
    decodes = sum(tokens for _, tokens in MIXED[:3])
    for rows, starts, chunks in (
        (200, [0, 0], [(slice(5, 25), [(3, 0, 149)]), (slice(25, 90), [(4, 0, 65)])]),
        (214, [0, 149], [(slice(5, 90), [(3, 0, 149), (4, 149, 214)])]),
    ):
        found = sparse_mla_attention.separate_prefills(batch.common, owner, 3, rows)
        assert (found.decode_tokens, found.starts.tolist(), found.chunks) == (decodes, starts, chunks)
        assert found.prefill_of_token.tolist() == [-1] * decodes + [0] * 20 + [1] * 65 + [-1] * 5
    assert sparse_mla_attention.separate_prefills(batch.common, owner, 3, 0) is None
    assert sparse_mla_attention.separate_prefills(batch.common, owner, 65, 200) is None


@CACHES
def test_prefills_of_a_chunk(cache_dtype, width, workspace):
    """Two of them, one behind the other in the workspace."""
    batch = Batch(cache_dtype, width, padding=0)
    plan = sparse_mla_attention.separate_prefills(batch.common, torch.tensor(batch.owner), 3, 214)
    assert len(plan.chunks) == 1
    slots = batch.picked[: len(batch.owner)].clone()
    for token, request in enumerate(batch.owner):
        picked = slots[token, : batch.keys[token]].clone()
        slots[token] = 0  # what follows the keys is not read
        in_cache = batch.table[request, picked // PAGE] * PAGE + picked % PAGE
        slots[token, : len(picked)] = in_cache if request < 3 else picked + plan.starts[request - 3]
    batch.check(sparse_mla_attention.attend_separately(
        batch.q, batch.cache, batch.cache, slots, batch.keys, batch.table, plan, SCALE
    ))  # fmt: skip
    assert workspace == [(214, width)]


@CACHES
def test_a_long_request_is_gathered_in_pieces(cache_dtype, width, monkeypatch):
    monkeypatch.setattr(sparse_mla_attention, "_BLOCKS_AT_ONCE", 2)
    batch = Batch(cache_dtype, width)
    out = torch.full((203, width), torch.nan, dtype=BF16)
    sparse_mla_attention._gather(batch.cache, batch.table[2], out)
    want = batch.held.view(-1, PAGE, width)[batch.table[2, :4].long()].flatten(0, 1)[:203]
    assert torch.equal(out, want.to(BF16))
    # The same memory in pages twice as long, as 0.33.0 may have them.
    out, table = torch.full((600, width), torch.nan, dtype=BF16), torch.tensor([5, 0, 3, 2, 4, 10**6])
    sparse_mla_attention._gather(batch.cache.reshape(6, 2 * PAGE, -1), table, out)
    want = batch.held.view(6, 2 * PAGE, width)[table[:5]].flatten(0, 1)[:600]
    assert torch.equal(out, want.to(BF16))


GLM = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16",
    "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "q_lora_rank": 2048, "kv_lora_rank": 512,
    "index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128, "max_position_embeddings": 8192,
}  # fmt: skip
V32 = GLM | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "num_attention_heads": 128}
# DeepSeek V3, whose MLA is dense.
DENSE = {key: value for key, value in V32.items() if not key.startswith("index_")}
DENSE |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
# GLM-5.3-Flash, which only 0.33.0 has; four layers, the last of them with attention.
FLASH = {
    "architectures": ["Glm5NextForCausalLM"], "model_type": "glm5_next_text", "dtype": "bfloat16",
    "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 64, "index_topk": 2048,
    "indexer_rope_interleave": True, "pad_token_id": 0,
}  # fmt: skip
MODELS = {"glm": GLM, "v32": V32, "flash": FLASH, "rotated": GLM | {"kv_lora_rank": 448},
          "wide": V32 | {"num_attention_heads": 256}, "rank": V32 | {"q_lora_rank": None},
          "sinks": V32 | {"learnable_sink": True}, "llama": LLAMA, "dense": DENSE,
          "v4": V4 | {"num_hidden_layers": 2, "compress_ratios": [0, 0]}}  # fmt: skip
SERVED = (
    " serves models with an indexer, without sinks, and with cache rows of 576 values (DeepSeek V3.2, GLM-5) or "
    "of 512 without RoPE (GLM-5.3-Flash), and "
)
CASES = [
    ("v32", {}, None),
    ("v32", {"kv_cache_dtype": "fp8"}, None),
    ("v32", {"kv_cache_dtype": "fp8_e4m3"}, None),
    ("glm", {"kv_cache_dtype": "bfloat16"}, None),
    ("glm", {"kv_cache_dtype": "fp8_ds_mla", "block_size": 128}, None),
    ("v32", {"kv_cache_dtype": "fp8_e5m2"}, " has the cache dtypes auto, bfloat16 and fp8_ds_mla (or fp8 or "
     "fp8_e4m3, the same), not fp8_e5m2; pass one of them as --kv-cache-dtype."),
    ("v32", {"block_size": 16}, " reads pages of 64 tokens, so --block-size must be a multiple of 64, and is 16."),
    ("rank", {}, " serves models whose indexer reads the compressed query, and this one's configuration has no "
     "q_lora_rank."),
    ("wide", {}, " has at most 128 heads on a GPU, and this model has 256; raise --tensor-parallel-size."),
    ("rotated", {}, f"{SERVED}GlmMoeDsaForCausalLM is none."),
    ("llama", {}, f"{SERVED}LlamaForCausalLM is none."),
    ("dense", {}, f"{SERVED}DeepseekV3ForCausalLM is none."),
    ("sinks", {}, f"{SERVED}DeepseekV32ForCausalLM is none."),
]  # fmt: skip
if NEWER:
    CASES[:0] = [
        ("flash", {}, None),
        ("flash", {"kv_cache_dtype": "bfloat16", "block_size": 128}, None),
        ("flash", {"kv_cache_dtype": "fp8"}, " serves rows without RoPE (GLM-5.3-Flash) in BF16 only, not in fp8; "
         "pass --kv-cache-dtype bfloat16."),
        ("flash", {"kv_cache_dtype": "fp8_ds_mla"}, " serves rows without RoPE (GLM-5.3-Flash) in BF16 only, not "
         "in fp8_ds_mla; pass --kv-cache-dtype bfloat16."),
    ]  # fmt: skip
OURS = "vllm.dsv4_overlay.sparse_mla_backend.SparseMLABackend"
BLOCK, SINKS = next(case for case in CASES if case[1] == {"block_size": 16}), CASES[-1]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def request(models, model, options):
    return {"model": str(models / model), "skip_tokenizer_init": True, "max_model_len": 4096} | options


def test_what_is_refused_when_the_configuration_is_made(tree_with_series, models):  # noqa: F811
    """By the member of the enum, in a process whose vLLM has the series, as on an H200."""
    named = {"attention_backend": "MLA_KERNELS_SPARSE"}
    requests = [request(models, model, named | options) for model, options, _ in CASES]
    answers = on_hopper(tree_with_series, models, requests)
    for (model, options, sentence), answer in zip(CASES, answers, strict=True):
        if sentence:
            assert f"MLA_KERNELS_SPARSE{sentence}" in answer["error"], (model, options)
        else:
            assert answer["backend"] == "MLA_KERNELS_SPARSE" and not answer["cuda_initialized"], answer
            assert answer["selected"] == OURS


def test_glm_by_name_on_blackwell(tree_with_series, models):  # noqa: F811
    """vLLM gives it an FP8 cache there, by another name than elsewhere, before we are asked."""
    asked = [request(models, "glm", {"attention_backend": "MLA_KERNELS_SPARSE"})]
    (answer,) = on_hopper(tree_with_series, models, asked, "10.0")
    assert answer["selected"] == OURS
    assert answer["cache_dtype"] == ("fp8_e4m3" if NEWER else "auto")


def test_the_series_alone(tmp_path, models):
    """As docs/releases.md applies it: 0.22.1 has none of the names that the other series add for V4."""
    tree = tree_with(tmp_path, sparse_mla_series.NAME, beside=())
    asked = [request(models, "v32", options) for options in ({}, {"attention_backend": "MLA_KERNELS_SPARSE"})]
    for answer in on_hopper(tree, models, asked, "8.0"):
        assert answer["selected"] == OURS


def test_other_models_need_no_triton(tree_with_series):  # noqa: F811
    """What vLLM imports for any model's configuration."""
    code = "import sys; sys.modules['triton'] = None; from vllm.dsv4_overlay import sparse_mla"
    env = os.environ | {"PYTHONPATH": str(tree_with_series), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"])
def test_what_vllm_chooses_by_itself(applied, tree_with_series, models, capability):  # noqa: F811
    """Ours where stock vLLM has none (without FlashInfer) and ours serves; all else is as without the series."""
    served = [("v32", {}), ("glm", {"kv_cache_dtype": "fp8"})] + [("flash", {})] * NEWER
    n = len(served)
    cases = [*served, ("dense", {}), BLOCK[:2], SINKS[:2]]
    if capability == "9.0":
        cases.append(("v4", {"kv_cache_dtype": "fp8", "block_size": 256}))
    requests = [request(models, model, options) for model, options in cases]
    stock = on_hopper(applied, models, requests, capability)
    ours = on_hopper(tree_with_series, models, requests, capability)
    assert not [one for one in (*stock, *ours) if "error" in one]
    assert ours[n] == stock[n] and ours[n]["selected"].startswith("vllm.v1.")
    if capability in ("9.0", "10.0"):
        assert ours[: n + 1] + ours[n + 2 :] == stock[: n + 1] + stock[n + 2 :]
        assert all(one["selected"].startswith("vllm.v1.") for one in ours[:n])
        if capability == "9.0":  # docs/serving.md: with a BF16 cache not the drop-in's, from 0.25.0 on
            of_bf16 = "FlashAttnMLASparseBackend" if NEWER else "FlashMLASparseBackend"
            taken = [one["selected"].rpartition(".")[2] for one in ours[:2]]
            assert taken == [of_bf16, "FlashMLASparseBackend"]
        return
    assert all("No valid attention backend" in one["selected"] for one in stock[:n])
    if NEWER and capability.startswith("8."):  # GLM-5.3-Flash
        assert "only where DeepGEMM computes the indexer's scores" in ours[n - 1]["selected"]
        served.pop()
    assert [one["selected"] for one in ours[: len(served)]] == [OURS] * len(served)
    for answer, sentence in zip(ours[n + 1 :], (BLOCK[2], SINKS[2]), strict=True):
        assert f"MLA_KERNELS_SPARSE{sentence}" in answer["selected"]


@pytest.mark.skipif(not NEWER, reason="0.22.1 has no GLM-5.3-Flash")
def test_a_layer_without_rope(tree_with_series, models):  # noqa: F811
    """vLLM's own of GLM-5.3-Flash: rows of 512 BF16, blocks a whole number of them apart, and picks of 2048 tokens
    and of those that are in no whole pool yet."""
    env = os.environ | {"PYTHONPATH": str(tree_with_series), "CAPABILITY": "9.0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, Path(__file__).with_name("no_rope_layer.py"), models / "flash"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "impl": "vllm.dsv4_overlay.sparse_mla_backend.SparseMLAImpl", "picks": 2176,
        "row": 1024, "apart": 1024, "dtype": "torch.bfloat16",
    }  # fmt: skip


WHERE = 'with sparse_mla_prefill "workspace"' if NEWER else "in this release of vLLM"
WHOLE = f"reads whole sequences on each GPU {WHERE}; leave --decode-context-parallel-size at 1."


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({}, None),
        ({"dcp": 2, "heads": 64}, None if NEWER else WHOLE),
        ({"dcp": 2, "heads": 64, "prefill": "workspace"}, WHOLE),
        ({"dcp": 4, "heads": 64}, "has at most 128 heads on a GPU, and --decode-context-parallel-size 4 gathers "
         "256; lower it or raise --tensor-parallel-size." if NEWER else WHOLE),
        ({"pcp": 2}, None),
        ({"dcp": 2, "heads": 64, "pcp": 2}, "does not serve both kinds of context parallelism at once; leave "
         "--decode-context-parallel-size or --prefill-context-parallel-size at 1."),
        ({"block": 128}, None),
        ({"block": 96}, "reads pages of 64 tokens, so --block-size must be a multiple of 64, and is 96."),
        ({"hisparse": "on"}, "reads rows in GPU memory only; leave HiSparse off."),
        ({"prefill": "chunks"}, "knows no sparse_mla_prefill 'chunks' in --additional-config; it may be "
         "in_place or workspace."),
    ],
)  # fmt: skip
def test_refusals_that_need_another_machine(monkeypatch, change, sentence):
    given = {"dcp": 1, "pcp": 1, "heads": 128, "hisparse": None, "prefill": "in_place", "block": None}
    given = SimpleNamespace(**given | change)
    config = SimpleNamespace(
        attention_config=SimpleNamespace(
            backend=SimpleNamespace(name="MLA_KERNELS_SPARSE"), hisparse_config=given.hisparse
        ),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(q_lora_rank=8, index_topk=8, qk_rope_head_dim=64),
            get_head_size=lambda: 576, get_num_attention_heads=lambda parallel: given.heads,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", user_specified_block_size=bool(given.block), block_size=given.block
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=given.dcp, prefill_context_parallel_size=given.pcp
        ),
        additional_config={"sparse_mla_prefill": given.prefill},
    )  # fmt: skip
    if sentence:
        with pytest.raises(ValueError) as error:
            sparse_mla.verify_config(config)
        assert str(error.value) == f"MLA_KERNELS_SPARSE {sentence}"
        config.attention_config.backend.name = "FLASHMLA_SPARSE"
    sparse_mla.verify_config(config)


@pytest.mark.parametrize(
    "options, rows", [({}, 0), (None, 0), ({"sparse_mla_prefill": "workspace"}, 5 * 40)], ids=str
)
def test_the_workspace_is_on_request(options, rows):
    config = settings("in_place")
    config.additional_config = options
    assert sparse_mla.workspace_rows(config) == rows


NO_ROPE = (
    "serves rows without RoPE (GLM-5.3-Flash) only where DeepGEMM computes the indexer's scores, and that does "
    "not serve this GPU (compute capability 8.6)."
)
NO_PICKS = (
    "cannot put the picks of several GPUs together on this one (compute capability 8.6), for which vLLM has no "
    "kernel; leave --decode-context-parallel-size at 1."
)


@pytest.mark.parametrize(
    "capability, deep_gemm, change, sentence",
    [
        ((7, 5), False, {}, "needs a GPU of compute capability 8.0 or newer, and this one has 7.5."),
        ((8, 0), False, {}, None),
        ((8, 6), False, {"refused": "of it"}, "of it"),
        ((8, 6), False, {"rotated": 0}, NO_ROPE),
        ((8, 6), False, {"dcp": 2}, NO_PICKS),
        ((9, 0), True, {}, None),
        ((9, 0), True, {"refused": "of it"}, "of it"),
        ((9, 0), True, {"rotated": 0, "dcp": 2}, None),
        ((12, 0), NEWER, {}, None),
    ],
)
def test_vllm_asks_when_it_makes_a_layer(monkeypatch, capability, deep_gemm, change, sentence):
    """About the GPU, and about the configuration again: a backend of some layers only is not checked there."""
    given = SimpleNamespace(**{"rotated": 64, "dcp": 1, "refused": None} | change)
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(qk_rope_head_dim=given.rotated)),
        parallel_config=SimpleNamespace(decode_context_parallel_size=given.dcp),
    )
    monkeypatch.setattr(sparse_mla, "current_platform", SimpleNamespace(support_deep_gemm=lambda: deep_gemm))
    monkeypatch.setattr(sparse_mla, "get_current_vllm_config", lambda: config)
    why = given.refused and f"MLA_KERNELS_SPARSE {given.refused}"
    monkeypatch.setattr(sparse_mla, "refusal", lambda asked: asked is config and why)
    arguments = dict(
        head_size=576, dtype=BF16, kv_cache_dtype="auto", block_size=64, use_mla=True, has_sink=False,
        use_sparse=True, use_mm_prefix=False, use_per_head_quant_scales=False,
        device_capability=DeviceCapability(*capability), attn_type="decoder",
    )  # fmt: skip
    said = BACKEND.validate_configuration(**arguments)
    if sentence:
        assert said[-1] == f"MLA_KERNELS_SPARSE {sentence}"
    else:
        assert said == []


def test_fp8_becomes_the_656_byte_rows():
    """vLLM turns `fp8` into `fp8_ds_mla` for a backend of this name only."""
    assert BACKEND.get_name() == "FLASHMLA_SPARSE"
    assert BACKEND.is_mla() and BACKEND.is_sparse()
    assert BACKEND.supports_dtype(BF16) and not BACKEND.supports_dtype(torch.float16)


def test_block_sizes():
    """vLLM's own default is none; a longer block is read whole from 0.33.0 on, before as pages of 64."""
    assert BACKEND.get_preferred_block_size(16) == PAGE
    assert select_common_block_size(2 * PAGE, [BACKEND]) == (2 * PAGE if NEWER else PAGE)
