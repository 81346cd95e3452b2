"""Lengths that the indexer gives the padding of a CUDA graph, with one draft of MTP: the series mtp-padding mends
them up to 0.27.1, vLLM itself from 0.28.0 on."""

import inspect
from types import SimpleNamespace

import torch
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder


def test_padding_sees_no_keys():
    method = DeepseekV32IndexerMetadataBuilder._prepare_decode_tensors
    stale = torch.full((4, 2), 99, dtype=torch.int32)
    flat = "decode_seq_lens_buffer.dim() == 1" in inspect.getsource(method).partition("# Native path")[2]
    builder = SimpleNamespace(
        decode_seq_lens_buffer=stale.view(-1) if flat else stale,
        offsets_buffer=torch.arange(2, dtype=torch.int32),
        vllm_config=SimpleNamespace(speculative_config=None),
    )
    lens = torch.tensor([10, 7, 0, 0], dtype=torch.int32)  # the last two are padding
    new = torch.full((4,), 2, dtype=torch.int32)
    found, *_ = method(
        builder, lens, block_table=torch.zeros(4, 1), decode_lens=new, decode_lens_cpu=new,
        query_start_loc=torch.arange(0, 8, 2), num_decodes=4, num_decode_tokens=8, use_native=True, next_n=2,
        max_decode_len=2,
    )  # fmt: skip
    assert found.tolist() == [[9, 10], [6, 7], [0, 0], [0, 0]]
