"""The accuracy table emulates FlashMLA's cache format; vLLM's own kernel must store the same values."""

import sys
from pathlib import Path

import pytest
import torch

try:
    from vllm.models.deepseek_v4.common.ops import quantize_and_insert_k_cache
except ModuleNotFoundError:  # up to 0.21.0
    from vllm.v1.attention.ops.deepseek_v4_ops import quantize_and_insert_k_cache

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import accuracy_attention as table  # noqa: E402


@pytest.mark.parametrize("size", [64.0, 1.0, 1 / 1024])
def test_fp8_ds_mla_is_what_vllm_stores(size):
    rows = (table.draw_rows("heavy", 8, torch.Generator().manual_seed(0)) * size).to(torch.bfloat16)
    cache = torch.zeros(1, 64 * 584, dtype=torch.uint8, device=table.DEVICE)
    quantize_and_insert_k_cache(rows.to(table.DEVICE), cache, torch.arange(8, device=table.DEVICE), 64)
    data, scales = cache[0].cpu().split((64 * 576, 64 * 8))
    data, scales = data.view(64, 576)[:8], scales.view(64, 8)[:8, :7]
    values = data[:, :448].view(torch.float8_e4m3fn).double().unflatten(1, (7, 64))
    values = (values * torch.exp2(scales.double() - 127)[:, :, None]).flatten(1)
    found = table.fp8_ds_mla(rows.double())
    assert torch.equal(found[:, :448].double(), values)
    assert torch.equal(found[:, 448:], data[:, 448:].contiguous().view(torch.bfloat16))
