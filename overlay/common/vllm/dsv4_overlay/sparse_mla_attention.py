# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""How MLA_KERNELS_SPARSE attends: all tokens in one call over the rows in place, or
prefills by themselves over a workspace of BF16 rows."""

from dataclasses import dataclass

import torch
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config
from vllm.dsv4_overlay.sparse_mla import PAGE, workspace_rows
from vllm.platforms import current_platform
from vllm.third_party.mla_kernels import (
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    indexer_scores,
    paged_indexer_scores,
)
from vllm.third_party.mla_kernels.flash_mla import pick_provider
from vllm.third_party.mla_kernels.row_formats import BF16, V32
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.worker.workspace import current_workspace_manager

_BLOCKS_AT_ONCE = 128  # bounds what is between packed rows and wide ones


def _joined(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """A query as one tensor."""
    if not isinstance(q, tuple):
        return q
    nope, rope = q
    if not (nope.is_cuda and rope.shape[-1]):  # vLLM's operator is for these alone
        return torch.cat(q, dim=-1)
    out = nope.new_empty(*nope.shape[:2], nope.shape[2] + rope.shape[2])
    ops.concat_mla_q(nope, rope, out)  # as FLASHMLA_SPARSE joins them
    return out


def attend_slots(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each token over its slots.

    Args:
        q: BF16 `[tokens, heads, 576]`, or its first 512 and its last 64 dimensions; or
            512 and none, where rows have no RoPE.
        rows: the cache, BF16 `[blocks, block_size, 576 or 512]`, or `[blocks,
            block_size, 656]` bytes for a q of 576.
        slots: int32 `[tokens, columns]`, block * block_size + row, -1 for none.
        keys: int32 `[tokens]`, the leftmost columns that count. Others are not read,
            which saves a short sequence most of the work.

    Returns:
        BF16 `[tokens, heads, 512]`, and natural log-sum-exp, float32 `[tokens, heads]`;
        zeros and +inf for a token without a key.
    """
    q = _joined(q)
    if rows.dtype == torch.bfloat16:
        flat = rows.view(-1, 1, rows.shape[-1])  # never a copy of the cache
        out, _, lse = flash_mla_sparse_fwd(
            q, flat, slots.unsqueeze(1), scale, topk_length=keys
        )
        return out, lse
    out, lse = flash_mla_with_kvcache(
        q.unsqueeze(1),
        rows.view(torch.uint8).unsqueeze(2),
        block_table=None,
        cache_seqlens=None,
        head_dim_v=512,
        tile_scheduler_metadata=None,
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=slots.unsqueeze(1),
        topk_length=keys,
    )
    return out.squeeze(1), lse.squeeze(2)


def warm_up_scores(device: torch.device, width: int | None = None) -> None:
    """Compile the indexer's scores now, and not while requests wait, where DeepGEMM
    does not compute them.

    Args:
        width: of a prefill's columns: 1 if vLLM counts them from a token's first key,
            None if from the chunk's.
    """
    if current_platform.support_deep_gemm():
        return
    config = get_current_vllm_config().model_config.hf_text_config
    heads, dim = config.index_n_heads, config.index_head_dim
    q = torch.zeros(1, heads, dim, device=device).to(torch.float8_e4m3fn)
    one = torch.ones(1, dtype=torch.int32, device=device)
    weights = torch.zeros(1, heads, device=device, dtype=torch.float32)
    rest = q[0, :1], one.float(), weights, torch.zeros_like(one), one, width
    indexer_scores(q, *rest, clean=False)
    page = torch.zeros(1, PAGE, dim + 4, dtype=torch.uint8, device=device)
    decode = q.unsqueeze(0), page, weights, one, torch.zeros_like(one).view(1, 1), 1
    paged_indexer_scores(*decode, clean=False)


def warm_up_attention(
    heads: int, width: int, cache_dtype: str, columns: int, device: torch.device
) -> None:
    """Compile attention over the cache now, and not while requests wait, where Triton
    computes it.

    Args:
        heads, width: of q.
        columns: of the slots.
    """
    if pick_provider(device) != "triton":
        return
    packed = cache_dtype == "fp8_ds_mla"
    row = (656, torch.uint8) if packed else (width, torch.bfloat16)
    page = torch.zeros(1, PAGE, row[0], dtype=row[1], device=device)
    for tokens in (1, 512):  # one is split over its keys, so many are not
        q = torch.zeros(tokens, heads, width, dtype=torch.bfloat16, device=device)
        keys = torch.zeros(tokens, dtype=torch.int32, device=device)
        slots = keys.new_full((tokens, columns), -1)
        attend_slots(q, page, slots, keys, 1.0)


def reserve_workspace(width: int) -> None:
    """Have vLLM's workspace ready for prefills while memory is measured; `width` is
    that of q."""
    if rows := workspace_rows(get_current_vllm_config()):
        _workspace(rows, width)


def _workspace(rows: int, width: int) -> torch.Tensor:
    """BF16 `[rows, width]`, the same memory for all layers."""
    shape = (rows, width), torch.bfloat16
    return current_workspace_manager().get_simultaneous(shape)[0]


@dataclass
class SeparatePrefills:
    """The prefills of a step when they read from a workspace, in chunks that fit it."""

    rows: int  # of the workspace
    decode_tokens: int
    prefill_of_token: torch.Tensor  # int32 [tokens], -1 where rows are in the cache
    starts: torch.Tensor  # int32 [prefills], the first row of each in the workspace
    # Tokens of each chunk, and request, first and last row of its prefills.
    chunks: list[tuple[slice, list[tuple[int, int, int]]]]


def separate_prefills(
    common: CommonAttentionMetadata,
    request_of_token: torch.Tensor,
    threshold: int,
    rows: int,
) -> SeparatePrefills | None:
    """Put the prefills of a step, those of more than `threshold` tokens, into chunks of
    at most `rows` cache rows; None if there is none, or no workspace.

    Args:
        request_of_token: int32 `[tokens]`.
    """
    if not rows:
        return None
    decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(common, threshold)
    if not prefills:
        return None
    ends = common.query_start_loc_cpu.tolist()
    lengths = common.seq_lens_cpu_upper_bound.tolist()  # exact where it is a prefill
    starts, chunks, used = [], [], rows
    for request in range(decodes, decodes + prefills):
        if used + lengths[request] > rows:
            chunks.append([])
            used = 0
        starts.append(used)
        used += lengths[request]
        chunks[-1].append((request, starts[-1], used))
    prefill = request_of_token - decodes
    inside = (prefill >= 0) & (prefill < prefills)
    return SeparatePrefills(
        rows,
        decode_tokens,
        prefill.masked_fill(~inside, -1),
        torch.tensor(starts, dtype=torch.int32).to(prefill.device, non_blocking=True),
        [(slice(ends[part[0][0]], ends[part[-1][0] + 1]), part) for part in chunks],
    )


def attend_separately(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    cache: torch.Tensor,
    decode_rows: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    block_table: torch.Tensor,
    plan: SeparatePrefills,
    scale: float,
) -> torch.Tensor:
    """As `attend_slots`, with the rows of prefills from the workspace.

    Args:
        q, keys, scale: as there.
        cache: `[blocks, block_size, 576, 512 or 656]`.
        decode_rows: the cache as slots of decodes count it.
        slots: int32 `[tokens, columns]`, those of prefills into the workspace.
        block_table: int32 `[requests, blocks]`.
    """
    q = _joined(q)
    out = q.new_zeros(*q.shape[:2], 512)
    if n := plan.decode_tokens:
        out[:n], _ = attend_slots(q[:n], decode_rows, slots[:n], keys[:n], scale)
    workspace = _workspace(plan.rows, q.shape[-1])
    for tokens, prefills in plan.chunks:
        for request, start, end in prefills:
            _gather(cache, block_table[request], workspace[start:end])
        out[tokens], _ = attend_slots(
            q[tokens], workspace.unsqueeze(0), slots[tokens], keys[tokens], scale
        )
    return out


def _gather(cache: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the first rows of a request, as many as BF16 `out` `[rows, 576 or 512]`
    has."""
    page = cache.shape[1]
    keys = (BF16 if cache.dtype == torch.bfloat16 else V32).keys
    in_block = torch.arange(page, device=cache.device)
    step = _BLOCKS_AT_ONCE * page
    for part, some in zip(out.split(step), blocks.split(_BLOCKS_AT_ONCE), strict=False):
        rows = some.long().unsqueeze(1) * page + in_block
        part.copy_(keys(cache, rows.flatten()[: len(part)]))
