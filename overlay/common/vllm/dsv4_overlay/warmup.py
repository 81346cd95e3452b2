# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""Every kernel of the full-width backend, compiled before the first request."""

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from vllm.dsv4_overlay import attention
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

logger = init_logger(__name__)


def warm_up(worker: "Worker") -> None:
    """Run one layer of each kind on batches that hold padding only; nothing where no
    layer is the overlay's."""
    layers = {x.compress_ratio: x for x in attention.layers(worker.vllm_config)}
    if not layers:
        return
    from vllm.dsv4_overlay import adapter  # not at the top: every model is warmed up

    start = time.perf_counter()
    context = worker.vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        # One token is split over keys, a thousand are not.
        for tokens in (1, 1024):
            with set_forward_context(None, worker.vllm_config):
                _warm_up_layer(layer, adapter.outer_layer(layer, context), tokens)
    torch.cuda.synchronize()
    logger.info(
        "Warm-up of the full-width attention kernels took %.1f s.",
        time.perf_counter() - start,
    )


def _warm_up_layer(layer: torch.nn.Module, outer: torch.nn.Module, tokens: int) -> None:
    device = layer.attn_sink.device
    ints = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device)  # noqa: E731
    nowhere = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    window = SimpleNamespace(
        slot_mapping=nowhere,
        # More than its own where vLLM has one group of layers.
        block_size=layer.swa_cache_layer.kv_cache.shape[1],
        token_to_req_indices=ints(tokens),
        is_valid_token=torch.zeros(tokens, dtype=torch.bool, device=device),
        query_start_loc=ints(2),
        seq_lens=ints(1),
        block_table=ints(1, 16),
        num_decode_tokens=tokens,
        num_prefill_tokens=0,
    )
    compressed = None
    positions = torch.zeros(tokens, dtype=torch.int64, device=device)
    cos_sin_cache = outer.rotary_emb.cos_sin_cache
    if outer.compressor is not None:
        compressed = SimpleNamespace(
            block_table=ints(1, 16),
            block_size=256,
            max_seq_len=layer.max_model_len,
            slot_mapping=nowhere,
        )
        metadata = {
            outer.compressor.state_cache.prefix: window,
            layer.prefix: compressed,
        }
        attention.compress(outer.compressor, layer, positions, cos_sin_cache, metadata)
    q = torch.zeros(
        tokens, layer.num_heads, layer.head_dim, dtype=torch.bfloat16, device=device
    )
    out = torch.empty_like(q)
    q = attention.insert(
        layer, q, q[:, 0].contiguous(), window, positions, cos_sin_cache, outer.eps
    )
    attention.attend(layer, q, out, window, compressed)
