# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""What differs in vLLM 0.33.0: a layer is one class, from which a backend derives its
own."""

from functools import partial
from typing import Any

import torch
from vllm.dsv4_overlay import attention
from vllm.dsv4_overlay.backend import FullCacheBackend
from vllm.dsv4_overlay.overriding import overriding, require
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention
from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLABackend

ATTENTION = "vllm.models.deepseek_v4.attention"
COMPRESSOR = "vllm.models.deepseek_v4.compressor"
# Under vllm.models.deepseek_v4: kernels that vLLM compiles for its own insert,
# compressor and attention.
_NEVER_RUN = (
    "common.ops.cache_utils",
    "sparse_mla",
    "nvidia.ops.sparse_attn_compress_cutedsl",
)


@overriding()
class DeepseekV4FullCacheBackend(FullCacheBackend, DeepseekV4FlashMLABackend):
    """Metadata, block sizes and graph support are those of the V4 FlashMLA backend."""


@overriding("full_cache")
class DeepseekV4FullCacheAttention(DeepseekV4FlashMLAAttention):
    """vLLM's layer for Hopper on vLLM's full-width caches, with the overlay's insert,
    compressor and attention.

    A block holds rows of several layers, so the blocks of one cache lie further apart
    than its own rows need. Every kernel takes that stride from the tensor, and refuses
    one that it cannot address.
    """

    backend_cls = DeepseekV4FullCacheBackend
    use_fp8_ds_mla_layout = False
    full_cache = True

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        return num_heads

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _cancel_warm_up()
        self.num_heads = self.n_local_heads
        attention.init_layer(self)
        add_dspark_scales(self)
        if self.compressor is not None:
            connect_compressor(self)

    def _fused_qnorm_rope_kv_insert(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        positions: torch.Tensor,
        attn_metadata: Any,
    ) -> torch.Tensor:
        if not isinstance(attn_metadata, dict):  # memory profiling
            return q
        swa_metadata = attn_metadata[self.swa_cache_layer.prefix]
        return attention.insert(
            self,
            q,
            kv,
            swa_metadata,
            positions,
            self.rotary_emb.cos_sin_cache,
            self.eps,
        )

    def forward_mqa(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        positions: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        attention.forward(self, q, output)


def add_dspark_scales(layer: torch.nn.Module) -> None:
    """What vLLM divides by where it inserts the context of DSpark's drafts, with which
    config.py refuses scales other than 1."""
    for name in ("_flashinfer_fp8_kv_scale", "_flashinfer_fp8_q_scale_inv"):
        one = torch.ones(1, dtype=torch.float32)
        layer.register_buffer(name, one, persistent=False)


def _cancel_warm_up() -> None:
    registry = JitWarmupRegistry._active.get()
    for kernel in list(registry._registrations) if registry else ():
        if (
            type(kernel).__module__.removeprefix("vllm.models.deepseek_v4.")
            in _NEVER_RUN
        ):
            del registry._registrations[kernel]


def connect_compressor(layer: torch.nn.Module) -> None:
    """Let `layer.compressor` store its rows by the overlay; vLLM has a class to choose
    for the indexer's only."""
    require(layer.compressor, "_compress_norm_rope_store")
    layer.compressor._compress_norm_rope_store = partial(_compress, layer)


def _compress(
    layer: DeepseekV4FullCacheAttention,
    state_metadata: Any,
    state_cache: torch.Tensor,
    state_width: int,
    positions: torch.Tensor,
    rotary_emb: torch.nn.Module,
    attn_metadata: dict[str, Any],
    pdl_kwargs: dict[str, Any],
) -> None:
    attention.compress(
        layer.compressor, layer, positions, rotary_emb.cos_sin_cache, attn_metadata
    )


def outer_layer(layer: torch.nn.Module, context: dict[str, Any]) -> torch.nn.Module:
    """In this release the layer is one."""
    return layer
