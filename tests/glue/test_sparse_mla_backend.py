"""MLA_KERNELS_SPARSE: vLLM's own classes around it, from a batch and the indexer's picks to attention, against the
definition in float64; and what it refuses, before weights."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.mla import sparse_utils

sparse_mla_backend = pytest.importorskip("vllm.dsv4_overlay.sparse_mla_backend", reason="only in 0.22 and 0.33.0")
from vllm.dsv4_overlay import backend  # noqa: E402

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

    def __init__(self, cache_dtype, between=0, padding=5):
        gen = torch.Generator().manual_seed(1)
        lengths = [before + tokens for before, tokens in MIXED]
        blocks = [-(-length // PAGE) for length in lengths]
        self.table = torch.full((len(MIXED), max(blocks) + 2), 10**6, dtype=torch.int32)  # stale past a request's
        order = torch.randperm(sum(blocks), generator=gen).int()
        for request, part in enumerate(order.split(blocks)):
            self.table[request, : len(part)] = part
        rows = torch.randn(sum(blocks) * PAGE, 576, generator=gen)
        if cache_dtype == "fp8_ds_mla":
            stored, self.held = packed(rows)
        else:
            stored, self.held = rows.to(BF16), rows.to(BF16).double()
        width = stored.shape[1]
        nan = 255 if width == 656 else torch.nan
        whole = torch.full((sum(blocks), PAGE + between, width), nan, dtype=stored.dtype)
        whole[:, :PAGE] = stored.view(-1, PAGE, width)
        self.cache = whole[:, :PAGE]
        self.owner = [request for request, (_, tokens) in enumerate(MIXED) for _ in range(tokens)]
        self.position = [before + i for before, tokens in MIXED for i in range(tokens)]
        tokens = len(self.owner)
        self.picked = torch.full((tokens + padding + 7, TOPK), 12345, dtype=torch.int32)  # vLLM's buffer is longer
        for token, position in enumerate(self.position):
            some = torch.randperm(position + 1, generator=gen)[:TOPK]
            self.picked[token] = -1
            self.picked[token, : len(some)] = some.int()
        self.q = torch.randn(tokens + padding, HEADS, 576, generator=gen).to(BF16)
        starts = torch.tensor([0, *(tokens for _, tokens in MIXED)]).cumsum(0, dtype=torch.int32)
        arguments = dict(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(lengths, dtype=torch.int32),
            num_reqs=len(MIXED), num_actual_tokens=tokens + padding, max_query_len=65, max_seq_len=max(lengths),
            block_table_tensor=self.table, slot_mapping=torch.zeros(tokens + padding, dtype=torch.int64),
        )  # fmt: skip
        known = inspect.signature(CommonAttentionMetadata).parameters
        self.common = CommonAttentionMetadata(**{k: v for k, v in arguments.items() if k in known})

    def expected(self):
        out = []
        for token, request in enumerate(self.owner):
            local = self.picked[token][self.picked[token] >= 0].long()
            keys = self.held[self.table[request, local // PAGE].long() * PAGE + local % PAGE]
            weights = (self.q[token].double() @ keys.T * SCALE).softmax(-1)
            out.append(weights @ keys[:, :512])
        return torch.stack(out)

    def check(self, out):
        want = self.expected()
        assert out.shape == (len(self.q), HEADS, 512) and out.dtype == BF16
        error = (out[: len(want)].double() - want).norm() / want.norm()
        assert error < 2**-8, error  # the output's own rounding and that of weights


CACHES = pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])


def implementation(cache_dtype, picked):
    impl = torch.nn.Module.__new__(sparse_mla_backend.SparseMLAImpl)
    vars(impl).update(scale=SCALE, kv_cache_dtype=cache_dtype, num_heads=HEADS, topk_indices_buffer=picked)
    return impl


@CACHES
@pytest.mark.skipif(NEWER, reason="0.33.0 has metadata of its own")
def test_a_mixed_batch_is_one_call(cache_dtype):
    batch = Batch(cache_dtype)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=128, max_num_seqs=16),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    spec = SimpleNamespace(block_size=PAGE)
    builder = sparse_mla_backend.SparseMLAMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
    assert builder.reorder_batch_threshold == 3  # two drafts are decoded
    assert builder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    metadata = builder.build(0, batch.common)
    assert metadata.req_id_per_token[: len(batch.owner)].tolist() == batch.owner
    assert (metadata.req_id_per_token[len(batch.owner) :] == len(MIXED)).all()
    again = builder.build(0, batch.common)
    assert again.req_id_per_token.data_ptr() == metadata.req_id_per_token.data_ptr()

    impl = sparse_mla_backend.SparseMLAImpl(
        HEADS, 576, SCALE, 1, None, None, cache_dtype, None, "decoder", None,
        indexer=SimpleNamespace(topk_indices_buffer=batch.picked), kv_lora_rank=512,
    )  # fmt: skip
    assert BACKEND.get_kv_cache_shape(7, PAGE, 1, 576, cache_dtype)[2] == batch.cache.shape[2]
    q = batch.q.split((512, 64), -1)
    out, lse = impl.forward_mqa(q, batch.cache, metadata, None)
    assert lse is None
    batch.check(out)
    assert (out[len(batch.owner) :] == 0).all()  # padding sees nothing, whatever its picks are


@CACHES
@pytest.mark.skipif(not NEWER, reason="0.22.1 has no rows of other layers between a layer's blocks")
def test_slots_over_packed_blocks(cache_dtype):
    batch = Batch(cache_dtype, between=3 * PAGE, padding=0)
    tokens = len(batch.owner)
    _, stride = sparse_utils.flat_kv_row_view(batch.cache, PAGE)
    assert stride == 4 * PAGE
    slots = sparse_utils.triton_convert_req_index_to_global_index(
        torch.tensor(batch.owner, dtype=torch.int32), batch.table, batch.picked[:tokens],
        BLOCK_SIZE=PAGE, BLOCK_STRIDE_ROWS=stride, NUM_TOPK_TOKENS=TOPK,
    )  # fmt: skip
    impl = sparse_mla_backend.SparseMLAImpl.__new__(sparse_mla_backend.SparseMLAImpl)
    impl.scale = SCALE
    assert not impl.supports_dense_mha_prefill and not impl.supports_quant_query_input
    q = batch.q.split((512, 64), -1)
    given = dict(layer=None, block_size=PAGE, is_decode=False)
    out, lse = impl._forward_mqa_kernel(q, batch.cache, slots, None, **given)
    assert lse is None
    batch.check(out)
    assert sparse_mla_backend.SparseMLAMetadataBuilder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH


def reasons(monkeypatch, capability=(9, 0), heads=16, rank=1536, **change):
    config = SimpleNamespace(
        parallel_config=None,
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(q_lora_rank=rank), get_num_attention_heads=lambda parallel: heads
        ),
    )
    monkeypatch.setattr(backend, "get_current_vllm_config", lambda: config)
    arguments = dict(
        head_size=576, dtype=BF16, kv_cache_dtype="auto", block_size=64, use_mla=True, has_sink=False,
        use_sparse=True, use_mm_prefix=False, use_per_head_quant_scales=False,
        device_capability=DeviceCapability(*capability), attn_type="decoder",
    )  # fmt: skip
    known = inspect.signature(BACKEND.validate_configuration).parameters
    return BACKEND.validate_configuration(**{k: v for k, v in (arguments | change).items() if k in known})


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "fp8_ds_mla", "fp8"])
def test_what_it_serves(monkeypatch, capability, cache_dtype):
    assert reasons(monkeypatch, capability, kv_cache_dtype=cache_dtype) == []


@pytest.mark.parametrize(
    "change, sentence",
    [
        (dict(capability=(7, 5)), "needs a GPU of compute capability 8.0 or newer, and this one has 7.5."),
        (dict(head_size=512), "reads rows of 576 values (DeepSeek V3.2, GLM-5), and this model has 512."),
        (dict(kv_cache_dtype="fp8_e5m2"), "not fp8_e5m2; pass one of them as --kv-cache-dtype."),
        (dict(block_size=16), "reads pages of 64 tokens, so --block-size must be a multiple of 64, and is 16."),
        (dict(rank=None), "this one's configuration has no q_lora_rank."),
        (dict(heads=129), "has at most 128 heads on a GPU, and this model has 129; raise --tensor-parallel-size."),
    ],
)
def test_refusals(monkeypatch, change, sentence):
    said = reasons(monkeypatch, **change)[-1]
    assert said.startswith("MLA_KERNELS_SPARSE ") and said.endswith(sentence)


def test_fp8_becomes_the_656_byte_rows():
    """vLLM turns `fp8` into `fp8_ds_mla` for a backend of this name only."""
    assert BACKEND.get_name() == "FLASHMLA_SPARSE"
    assert BACKEND.is_mla() and BACKEND.is_sparse()
