"""What `warm_up` launches is all that a step launches: nothing is left to compile while requests wait."""

from types import SimpleNamespace

import pytest
import torch
from test_attention import BF16, E4M3, EPS, HEADS, MIXED, OneGroupStep, Step
from vllm.dsv4_overlay import adapter, warmup
from vllm.forward_context import override_forward_context

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="looks into Triton's interpreter")


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("ratio", "kind"), [(1, Step), (4, Step), (128, Step), (128, OneGroupStep)])
def test_warm_up_compiles_all(ratio, kind, dtype, launches, monkeypatch):
    for requests, padding in ((MIXED, 2), (((150, 1), (255, 1)), 0), (((300, 1),), 1)):
        step = kind(ratio, dtype, requests, padding)
        step.run()
    needed = set(launches)
    launches.clear()

    layer = step.layer
    vars(layer).update(num_heads=HEADS, head_dim=512)
    rotary = SimpleNamespace(cos_sin_cache=step.cos_sin)
    outer = SimpleNamespace(compressor=getattr(step, "compressor", None), rotary_emb=rotary, eps=EPS)
    monkeypatch.setattr(adapter, "outer_layer", lambda layer, context: outer)
    compilation = SimpleNamespace(static_forward_context={"layer": layer, "indexer": None})
    config = SimpleNamespace(compilation_config=compilation)
    monkeypatch.setattr(
        warmup, "set_forward_context",
        lambda *_: override_forward_context(SimpleNamespace(additional_kwargs={})),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    warmup.warm_up(SimpleNamespace(vllm_config=config))
    assert needed <= launches
