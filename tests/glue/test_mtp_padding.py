"""Lengths that the indexer gives the padding of a CUDA graph, with MTP: the series mtp-padding mends them up to
0.27.1, vLLM itself from 0.28.0 on."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder


@pytest.mark.parametrize("native", [True, False], ids=["drafts by request", "drafts by token"])
def test_padding_sees_no_keys(native):
    method = DeepseekV32IndexerMetadataBuilder._prepare_decode_tensors
    # Up to 0.21.0 the buffer has a row a request where drafts stay with theirs.
    rows = native and "decode_seq_lens_buffer.dim() == 2" in inspect.getsource(method)
    builder = SimpleNamespace(
        decode_seq_lens_buffer=torch.full((4, 2) if rows else (8,), 99, dtype=torch.int32),
        decode_lens_buffer=torch.zeros(8, dtype=torch.int32),
        expanded_block_table_buffer=torch.zeros(8, 1, dtype=torch.int32),
        offsets_buffer=torch.arange(2, dtype=torch.int32),
        supports_varlen=False,
        vllm_config=SimpleNamespace(speculative_config=None),
    )
    lens = torch.tensor([10, 7, 0, 0], dtype=torch.int32)  # the last two are padding
    new = torch.full((4,), 2, dtype=torch.int32)
    found, *_ = method(
        builder, lens, block_table=torch.zeros(4, 1, dtype=torch.int32), decode_lens=new, decode_lens_cpu=new,
        query_start_loc=torch.arange(0, 8, 2), num_decodes=4, num_decode_tokens=8, use_native=native, next_n=2,
        max_decode_len=2,
    )  # fmt: skip
    assert found.view(4, 2).tolist() == [[9, 10], [6, 7], [0, 0], [0, 0]]
