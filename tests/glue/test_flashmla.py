"""Under FLASHMLA_SPARSE_DSV4 a patched layer inserts, prefills and decodes by vLLM's own code, and is right.

Metadata comes from vLLM's builders. On the CPU torch stands in for the three operators that vLLM compiles; on a
GPU nothing is replaced. Compressed rows are written by the test: vLLM's compressor runs on a GPU only.
"""

from types import SimpleNamespace

import pytest
import torch
from test_attention import BF16, DEVICE, EPS, HEADS, Step
from test_base_operators import as_rows, packed_pages, quantized, unpacked, write_row
from test_config_contract import make
from vllm.forward_context import override_forward_context
from vllm.third_party.mla_kernels import checks
from vllm.v1.attention.backends.mla import sparse_swa
from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

pytest.importorskip("vllm.models.deepseek_v4", reason="written for the layer and the implementation class of 0.22")
from vllm.models.deepseek_v4 import attention  # noqa: E402
from vllm.models.deepseek_v4.common import ops  # noqa: E402
from vllm.models.deepseek_v4.nvidia import flashmla, model  # noqa: E402

WHOLE_LAYER = hasattr(attention, "DeepseekV4Attention")  # from 0.23.0 on
if WHOLE_LAYER:
    from vllm.models.deepseek_v4.sparse_mla import build_c128a_topk_metadata
else:
    from vllm.v1.attention.backends.mla.flashmla_sparse import build_c128a_topk_metadata

# (tokens before this step, tokens of it): two decodes, then more prefill chunks than FlashMLA's way takes at once.
MIXED = ((150, 1), (255, 1), (129, 3), (0, 5), (62, 2), (2, 2), (3, 2))
TOPK = 128  # FlashMLA takes multiples of 128


def whole(cache):
    """The pages of a cache as bytes, padding included."""
    return cache.as_strided((len(cache), cache.stride(0)), (cache.stride(0), 1))


class PackedStep(Step):
    """A layer and a step as in `test_attention`, over FlashMLA's cache."""

    def __init__(self, ratio):
        super().__init__(ratio, BF16, MIXED)
        self.picked = torch.full((len(self.owner), TOPK), -1, dtype=torch.int32)
        for token, position in enumerate(self.position):
            rows = torch.randperm((position + 1) // ratio, generator=self.gen)[:TOPK]
            self.picked[token, : len(rows)] = rows.int()
        common = self.common(self.metadata.block_table)
        hf_config = SimpleNamespace(sliding_window=128, compress_ratios=[ratio])
        config = SimpleNamespace(
            speculative_config=None,
            model_config=SimpleNamespace(hf_config=hf_config, max_model_len=512),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=16),
        )
        spec = SlidingWindowMLASpec(
            block_size=64, num_kv_heads=1, head_size=512, dtype=torch.uint8, sliding_window=128
        )
        builder = sparse_swa.DeepseekSparseSWAMetadataBuilder(spec, ["layer.swa"], config, DEVICE)
        self.metadata = self.context.attn_metadata["layer.swa"] = builder.build(0, common)
        vars(self.layer).update(
            full_cache=False,
            window_size=128,
            max_num_batched_tokens=64,
            topk_indices_buffer=self.picked.to(DEVICE),
        )
        if ratio > 1:
            compressed = self.context.attn_metadata["layer"]
            for table, filled in zip(compressed.block_table.tolist(), self.rows, strict=True):
                self.fill(self.layer.kv_cache, table, 256 // ratio, filled)
        if ratio == 128:
            shapes = (64, TOPK), 64, (64, TOPK)
            buffers = [torch.empty(shape, dtype=torch.int32, device=DEVICE) for shape in shapes]
            indices, lens, local = build_c128a_topk_metadata(
                common.positions, ratio, self.metadata.num_decode_tokens, compressed.req_id_per_token,
                compressed.block_table, 256 // ratio, common.slot_mapping, *buffers, max_compressed_tokens=TOPK,
            )  # fmt: skip
            compressed.c128a_global_decode_topk_indices = indices[:, None]
            compressed.c128a_decode_topk_lens = lens
            compressed.c128a_prefill_topk_indices = local

    def stored(self, rows):
        return unpacked(*quantized(rows.to(BF16)))

    def pages(self, tokens, rows, width, dtype):
        cache, tables = super().pages(tokens, rows, width, dtype)
        if dtype == BF16:  # else a compressor's states
            cache = as_rows(packed_pages(len(cache), rows).to(DEVICE), rows)
        return cache, tables

    def fill(self, cache, table, rows, filled):
        for row, packed in enumerate(zip(*quantized(filled.to(BF16)), strict=True)):
            slot = table[row // rows] * rows + row % rows
            write_row(whole(cache), rows, slot, *(part.to(DEVICE) for part in packed))

    def run(self):
        positions = torch.tensor(self.position, device=DEVICE)
        kv = torch.stack([self.kv[r][p] for r, p in zip(self.owner, self.position, strict=True)]).to(DEVICE)
        layer = self.layer
        if WHOLE_LAYER:
            chosen = model._select_dsv4_attn_cls(make("fp8_ds_mla", None))
            assert chosen is flashmla.DeepseekV4FlashMLAAttention
            wrapper = layer = torch.nn.Module.__new__(chosen)
            torch.nn.Module.__init__(layer)
            vars(layer).update(vars(self.layer), n_local_heads=HEADS, max_image_tokens=0)
            insert, attend = chosen._fused_qnorm_rope_kv_insert, chosen.forward_mqa
        else:
            chosen = layer.impl_cls = attention._select_v4_sparse_impl()
            assert chosen is flashmla.DeepseekV4FlashMLASparseImpl
            wrapper = SimpleNamespace(mla_attn=layer, swa_cache_layer=layer.swa_cache_layer)
            insert = attention.DeepseekV4MultiHeadLatentAttentionWrapper._fused_qnorm_rope_kv_insert
            attend = attention.DeepseekV4MLAAttention.forward
        vars(wrapper).update(
            rotary_emb=SimpleNamespace(cos_sin_cache=self.cos_sin.to(DEVICE)),
            padded_heads=chosen.get_padded_num_q_heads(HEADS),
            eps=EPS,
        )
        q = insert(wrapper, self.q.to(DEVICE), kv, positions, self.context.attn_metadata)
        out = torch.full_like(q, float("nan"))
        with override_forward_context(self.context):
            attend(layer, q, kv, positions, out)
        return out[:, :HEADS].cpu()


def qnorm_rope_insert(q, kv, cache, slots, positions, cos_sin, padded_heads, eps, page):
    q = checks.rotate(checks.normed(q.double()), cos_sin[positions]).to(BF16)
    kv = checks.rotate(kv.double(), cos_sin[positions]).to(BF16)
    ops.quantize_and_insert_k_cache(kv, cache, slots, page)
    return torch.nn.functional.pad(q, (0, 0, 0, padded_heads - q.shape[1]))


def attend(q, keys, sink, scale):
    scores = torch.cat((q.double() @ keys.T * scale, sink.double()[:, None]), 1)
    return scores.softmax(1)[:, :-1] @ keys


def flash_mla_with_kvcache(q, k_cache, indices, topk_length, softmax_scale, attn_sink, out, **rest):
    pools = [(k_cache, indices, topk_length)]
    if rest["extra_k_cache"] is not None:
        pools.append((rest["extra_k_cache"], rest["extra_indices_in_kvcache"], rest["extra_topk_length"]))
    for token in range(len(q)):
        keys = []
        for cache, slots, lengths in pools:
            rows, slots = cache.shape[1], slots[token, 0, : lengths[token]]
            parts = whole(cache)[:, : rows * 584].split((rows * 576, rows * 8), 1)
            parts = (part.unflatten(1, (rows, -1))[slots // rows, slots % rows] for part in parts)
            keys.append(unpacked(*parts))
        out[token, 0] = attend(q[token, 0], torch.cat(keys), attn_sink, softmax_scale)
    return out, None


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, attn_sink, topk_length, out):
    for token, length in enumerate(topk_length):
        out[token] = attend(q[token], kv[indices[token, 0, :length], 0].double(), attn_sink, sm_scale)


def poisoned(*shapes):
    """NaN, or a row that there is not."""
    poison = lambda dtype: float("nan") if dtype.is_floating_point else 10**9  # noqa: E731
    return [torch.full(shape, poison(dtype), dtype=dtype, device=DEVICE) for shape, dtype in shapes]


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_flashmla_implementation(ratio, monkeypatch):
    config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="fp8_ds_mla"))
    monkeypatch.setattr(attention, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(flashmla, "current_workspace_manager", lambda: SimpleNamespace(get_simultaneous=poisoned))
    if DEVICE.type == "cpu":
        monkeypatch.setattr(flashmla, "flash_mla_with_kvcache", flash_mla_with_kvcache)
        monkeypatch.setattr(flashmla, "flash_mla_sparse_fwd", flash_mla_sparse_fwd)
        monkeypatch.setattr(sparse_swa, "get_mla_metadata", lambda: (object(), None))
        name = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
        monkeypatch.setattr(torch.ops._C, name, qnorm_rope_insert, raising=False)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    out = PackedStep(ratio).check()
    assert not out.isnan().any()
