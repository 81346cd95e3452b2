# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""The indexer's picks of a decode: the overlay's kernel, where it is there."""

import torch
from vllm.third_party.mla_kernels import indexer_topk
from vllm.third_party.mla_kernels.sm90 import serves_topk


def decode_topk(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    k: int,
    max_seq_len: int,
) -> None:
    """As vLLM's `persistent_topk`, of the same arguments. Both write every column of
    every row of `out`, -1 behind a row's picks. vLLM's come in any order, and so do its
    choices among equal scores; the overlay's are those from the left, in ascending
    order."""
    # Of the width and not `max_seq_len`: a CUDA graph keeps the choice, and later steps
    # may have longer rows. Wide rows take eight blocks each, and many of them longer
    # than vLLM's kernel (measured with 16 and 64).
    rows, columns = logits.shape
    if serves_topk(logits, k) and (columns <= 16384 or rows <= 32):
        indexer_topk(logits, None, seq_lens.reshape(-1), k, out, provider="sm90")
    else:
        torch.ops._C.persistent_topk(logits, seq_lens, out, workspace, k, max_seq_len)
