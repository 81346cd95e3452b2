# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""One DeepSeek V4 attention layer over the full-width cache: insert, compress, index
table, attention."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.dsv4_overlay import index_table
from vllm.dsv4_overlay.config import check_machine, falls_back, provider, storage_dtype
from vllm.dsv4_overlay.scales import layer_scales
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.third_party.mla_kernels import (
    SparseIndexTable,
    compress_norm_rope_store,
    flashinfer_sparse_mla,
    pick_provider,
    sparse_mla,
)
from vllm.third_party.mla_kernels.interface import SWA_COLUMNS
from vllm.third_party.mla_kernels.sparse_index import table_width

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

# What the kernels were called up to 0.2.0. Nothing here imports it; users may, and only
# what is named is applied.
OLD_KERNELS = "vllm.third_party.dsv4_kernels"


def layers(vllm_config: "VllmConfig") -> list[torch.nn.Module]:
    """The inner layers of an engine on the full-width cache. A process may have another
    engine too, asleep, without the memory that its layers name."""
    context = vllm_config.compilation_config.static_forward_context
    return [x for x in context.values() if getattr(x, "full_cache", False)]


def init_layer(layer: torch.nn.Module) -> None:
    """Give an inner attention layer the scales of its rows and queries, floats that do
    not change from here on.

    None of them is a tensor of the layer: those are lost in sleep mode, or when weights
    are loaded anew.
    """
    check_machine()
    vllm_config = get_current_vllm_config()
    layer.kv_scale, layer.q_scale = 1.0, 1.0
    if storage_dtype(vllm_config.cache_config.cache_dtype) == torch.float8_e4m3fn:
        layer.kv_scale, layer.q_scale = layer_scales(vllm_config, layer)
    if _provider(layer.attn_sink) == "flashinfer":
        flashinfer = flashinfer_sparse_mla.prepare(layer.attn_sink.device)
        # Its kernels count on zeros. After sleep level 2 vLLM brings back weights and
        # buffers only, and after weights were loaded anew, of buffers only those of
        # modules without weights.
        layer.flashinfer = torch.nn.Module()
        layer.flashinfer.register_buffer(
            "workspace", flashinfer.workspace, persistent=False
        )
        layer.flashinfer.register_buffer(
            "counters", flashinfer.counters, persistent=False
        )
    if provider():
        logger.info_once(
            "sparse_mla provider: %s, as VLLM_DSV4_PROVIDER says.", provider()
        )
    elif problem := falls_back(layer.attn_sink.device):
        logger.warning_once("DeepSeek V4: %s", problem)
    else:
        logger.info_once(
            "sparse_mla provider: %s; %s.", *pick_provider(layer.attn_sink.device)
        )


def _provider(tensor: torch.Tensor) -> str:
    return provider() or pick_provider(tensor.device)[0]


def query_dtype(cache: torch.Tensor) -> torch.dtype:
    """What attention over this cache takes: BF16, but E4M3 where FlashInfer reads E4M3
    rows."""
    fp8 = cache.dtype != torch.bfloat16 and _provider(cache) == "flashinfer"
    return torch.float8_e4m3fn if fp8 else torch.bfloat16


def insert(
    layer: torch.nn.Module,
    q: torch.Tensor,
    kv: torch.Tensor,
    swa_metadata: Any,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Norm and rotate `q` [tokens, heads, 512] BF16 in place, store rotated `kv`
    [tokens, 512]; returns `q`.

    Where attention takes E4M3, the `q` returned is another tensor, divided by the
    layer's scale of queries.
    """
    cache = layer.swa_cache_layer.kv_cache
    rest = (swa_metadata.slot_mapping, positions, cos_sin_cache)
    if cache.dtype == torch.bfloat16:
        torch.ops.mla_kernels.full_cache_bf16_insert(
            q, kv, cache, *rest, eps, swa_metadata.block_size
        )
        return q
    if query_dtype(cache) == torch.float8_e4m3fn:
        q_fp8 = torch.empty_like(q, dtype=torch.float8_e4m3fn)
        torch.ops.mla_kernels.full_cache_fp8_insert(
            q,
            kv,
            q_fp8,
            cache,
            *rest,
            layer.kv_scale,
            1 / layer.q_scale,
            eps,
            swa_metadata.block_size,
        )
        return q_fp8
    torch.ops.mla_kernels.full_cache_fp8_insert_bf16_q(
        q, kv, cache, *rest, layer.kv_scale, eps, swa_metadata.block_size
    )
    return q


def compress(
    compressor: torch.nn.Module,
    layer: torch.nn.Module,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    metadata: dict[str, Any],
) -> bool:
    """Store what `compressor` makes of its states if `layer`, which it feeds, has
    full-width rows; else False."""
    if not getattr(layer, "full_cache", False):
        return False
    state = metadata[compressor.state_cache.prefix]
    compress_norm_rope_store(
        compressor.state_cache.kv_cache,
        state.token_to_req_indices,
        positions,
        state.slot_mapping,
        state.block_table,
        cos_sin_cache,
        layer.kv_cache,
        metadata[layer.prefix].slot_mapping,
        compressor.norm.weight,
        compressor.rms_norm_eps,
        layer.compress_ratio,
        None if layer.kv_cache.dtype == torch.bfloat16 else layer.kv_scale,
    )
    return True


def forward(layer: torch.nn.Module, q: torch.Tensor, output: torch.Tensor) -> None:
    """Run the inner attention layer on the metadata of this forward pass; zeros while
    memory is measured."""
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        _reserve(layer, q)
        output.zero_()
        return
    compressed = None if layer.compress_ratio <= 1 else metadata[layer.prefix]
    attend(layer, q, output, metadata[layer.swa_cache_layer.prefix], compressed)


def _reserve(layer: torch.nn.Module, q: torch.Tensor) -> None:
    """Hold what the widest step takes, while vLLM measures memory: what is left it
    gives to the caches.

    A C128A layer's table is [tokens, 128 + max_model_len / 128] int32: 260 MiB for 8192
    tokens of a million.
    """
    if layer.kv_cache_dtype != "bfloat16" and _provider(q) == "flashinfer":
        q = torch.empty_like(q, dtype=torch.float8_e4m3fn)
    width = table_width(index_table.compressed_width(layer, layer.max_model_len))
    table = torch.empty(len(q), width, dtype=torch.int32, device=q.device)
    if layer.compress_ratio != 4:  # the others live until the step ends, as here
        index_table.tables()[layer.compress_ratio] = table


def attend(
    layer: torch.nn.Module,
    q: torch.Tensor,
    output: torch.Tensor,
    swa_metadata: Any,
    compressed_metadata: Any,
) -> None:
    """Write `output` [tokens, heads, 512] for the decodes and the prefills of this
    step.

    One call does, except that FlashInfer gets the prefills in a second one: it was
    reported less accurate on a mixed batch. Tokens behind them (graph padding that no
    request owns) are left as they are, as FlashMLA's path does.
    """
    tokens = swa_metadata.num_decode_tokens + swa_metadata.num_prefill_tokens
    table = _index_table(layer, swa_metadata, compressed_metadata, tokens)
    name = _provider(q)
    q_scale = layer.q_scale if q.dtype == torch.float8_e4m3fn else 1.0
    first = slice(swa_metadata.num_decode_tokens if name == "flashinfer" else tokens)
    parts: list[tuple] = [
        (first, q[first, None], output[first, None], table.visible[first], {})
    ]
    if first.stop < tokens:
        rest = slice(first.stop, tokens)
        parts.append((rest, q[rest], output[rest], *_prefills(swa_metadata)))
    for part, query, out, seq_lens, ragged in parts:
        sparse_mla(
            query,
            _pool(layer.swa_cache_layer.kv_cache),
            None,
            table.indices[part],
            _pool(layer.kv_cache) if compressed_metadata is not None else None,
            table.lens[part],
            seq_lens,
            out=out,
            bmm1_scale=layer.scale * q_scale * layer.kv_scale,
            bmm2_scale=layer.kv_scale,
            # The parameter is padded to 64 heads for FlashMLA.
            sinks=layer.attn_sink[: q.shape[1]],
            kv_layout="NHD",
            provider=name,
            **ragged,
        )


def _prefills(metadata: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Lengths of the prefills of a step and, counted from the first of them, where each
    starts; once a step."""
    cache = get_forward_context().additional_kwargs.setdefault("dsv4_prefills", {})
    if id(metadata) not in cache:
        first, end = metadata.num_decodes, metadata.num_decodes + metadata.num_prefills
        cache[id(metadata)] = (
            metadata.seq_lens[first:end],
            dict(
                cum_seq_lens_q=metadata.query_start_loc[first : end + 1]
                - metadata.num_decode_tokens,
                max_q_len=int(
                    metadata.query_start_loc_cpu[first : end + 1].diff().max()
                ),
            ),
        )
    return cache[id(metadata)]


def _pool(cache: torch.Tensor) -> torch.Tensor:
    """vLLM's `[blocks, rows, 512]` cache, E4M3 kept as bytes, as an NHD pool."""
    if cache.dtype == torch.uint8:
        cache = cache.view(torch.float8_e4m3fn)
    return cache.unsqueeze(2)


def _index_table(
    layer: torch.nn.Module, swa_metadata: Any, compressed_metadata: Any, tokens: int
) -> SparseIndexTable:
    if getattr(swa_metadata, "decode_swa_width", 0) <= SWA_COLUMNS:
        return index_table.of_step(layer, swa_metadata, compressed_metadata, 0, tokens)
    tables, key = index_table.tables(), (id(swa_metadata), layer.compress_ratio)
    if key not in tables:
        # A block of DSpark's drafts, each of which sees the window before the block and
        # the whole block. vLLM has made the list; what is over 128 columns is looked up
        # in the second pool, which is the first one where there is no compressed cache.
        length = swa_metadata.decode_swa_lens[:tokens]
        tables[key] = SparseIndexTable(
            indices=swa_metadata.decode_swa_indices[:tokens].squeeze(1),
            lens=length.clamp(min=SWA_COLUMNS),
            visible=length,
        )
    return tables[key]
