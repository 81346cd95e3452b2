"""Drafts of DSpark on the full-width cache: vLLM's metadata and insert of their context, the overlay's attention.

A token of a draft block sees the 128 tokens before the block, and the whole block.
"""

from types import SimpleNamespace

import pytest
import torch
from test_attention import BF16, DEVICE, E4M3, HEADS, SCALE, Step, kernels  # noqa: F401
from vllm.dsv4_overlay import adapter, attention
from vllm.forward_context import override_forward_context
from vllm.third_party.mla_kernels import checks
from vllm.v1.attention.backends.mla import sparse_swa
from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

dspark = pytest.importorskip("vllm.models.deepseek_v4.nvidia.dspark", reason="0.25.0 brought DSpark")
DRAFTS = 5


class DraftStep(Step):
    """Blocks of drafts after contexts of these lengths, and the metadata that vLLM makes for them."""

    def __init__(self, dtype, contexts):
        super().__init__(1, dtype, [(length, DRAFTS) for length in contexts], kv_scale=1.0)
        speculative = SimpleNamespace(
            use_dspark=lambda: True, num_speculative_tokens=DRAFTS, parallel_drafting=True, method="dspark"
        )
        config = SimpleNamespace(
            use_v2_model_runner=True,
            speculative_config=speculative,
            num_speculative_tokens=DRAFTS,
            model_config=SimpleNamespace(
                hf_config=SimpleNamespace(sliding_window=128, compress_ratios=[1]), max_model_len=512
            ),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=16),
        )
        spec = SlidingWindowMLASpec(block_size=64, num_kv_heads=1, head_size=512, dtype=dtype, sliding_window=128)
        builder = sparse_swa.DeepseekSparseSWAMetadataBuilder(spec, ["layer.swa"], config, DEVICE)
        common = self.common(self.metadata.block_table)
        common.causal = False
        self.metadata = self.context.attn_metadata["layer.swa"] = builder.build(0, common)
        assert self.metadata.num_prefills == 0 and self.metadata.decode_swa_width > 128

    def expected(self):
        out = []
        for token, (request, position) in enumerate(zip(self.owner, self.position, strict=True)):
            q = checks.rotate(checks.normed(self.q[token].double())[None], self.cos_sin[position][None])[0]
            keys = self.windows[request][max(0, self.requests[request][0] - 128) :]
            scores = torch.cat((q.to(BF16).double() @ keys.T * SCALE, self.sink.double()[:, None]), 1)
            out.append(scores.softmax(1)[:, :-1] @ keys)
        return torch.stack(out)


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(sparse_swa, "get_mla_metadata", lambda: (object(), None))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "fp8"])
@pytest.mark.parametrize("contexts", [(150, 3, 128, 300), (1,), (123, 124)])
def test_a_block_of_drafts(dtype, contexts):
    step = DraftStep(dtype, contexts)
    step.check()
    with override_forward_context(step.context):
        table = attention._index_table(step.layer, step.metadata, None, 1)
    assert (table.lens >= 128).all()  # of a short context too, as `sparse_mla` counts


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "fp8"])
def test_the_context_of_drafts(dtype, monkeypatch):
    """vLLM inserts it by its own operators, which read what the layer has for them."""
    taken = {}
    name = f"fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_{'bf16' if dtype == BF16 else 'fp8'}_insert"
    monkeypatch.setattr(torch.ops._C, name, lambda *args: taken.update(args=args), raising=False)
    layer = torch.nn.Module.__new__(adapter.DeepseekV4FullCacheAttention)
    torch.nn.Module.__init__(layer)
    adapter.add_dspark_scales(layer)
    cache = torch.zeros(4, 64, 512).to(dtype)
    vars(layer).update(
        swa_cache_layer=SimpleNamespace(kv_cache=cache, block_size=64),
        rotary_emb=SimpleNamespace(cos_sin_cache=None), n_local_heads=HEADS, head_dim=512, eps=1e-6,
    )  # fmt: skip
    kv = torch.zeros(3, 512, dtype=BF16)
    dspark._insert_context_kv(layer, kv, torch.arange(3), torch.arange(3))
    assert any(argument is kv for argument in taken["args"])
    scales = [x for x in taken["args"] if isinstance(x, torch.Tensor) and x.dtype == torch.float32]
    assert [float(scale) for scale in scales] == ([] if dtype == BF16 else [1.0, 1.0])
