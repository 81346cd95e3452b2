# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""The `sm90` provider: CUDA kernels for Hopper (csrc/sparse_mla_sm90.cu, csrc/slots.cu,
csrc/topk.cu) in the library that native.py loads.

Attention: 1 to 128 heads, padded to the next 16, 32 or 64 in registers only; rows of
every format of `row_formats`. Up to 16 thread blocks share the keys of a token when the
batch is small.
Deterministic: the split follows from the shapes, the merge has one order.
"""

import functools

import torch

from . import native
from .attention import SparseAttention
from .interface import SparseMLACall

_SCHEMAS = (
    "indexer_topk_sm90(Tensor scores, Tensor lengths, Tensor(a!) out) -> ()",
    (
        "request_rows_to_slots_sm90(Tensor rows, Tensor request_of_token, "
        "Tensor block_table, int block_size, Tensor? prefill_of_token, "
        "Tensor? workspace_starts, Tensor(a!) out) -> ()"
    ),
    (
        "sparse_mla_sm90(Tensor q, Tensor swa, Tensor compressed, Tensor indices, "
        "Tensor topk_lens, Tensor visible, Tensor! out, Tensor? sinks, "
        "Tensor? bmm1_tensor, Tensor? bmm2_tensor, float bmm1, float bmm2) -> ()"
    ),
    (
        "sparse_mla_rows_sm90(Tensor q, Tensor cache, Tensor indices, "
        "Tensor? lengths, Tensor? extra_cache, Tensor? extra_indices, "
        "Tensor? extra_lengths, Tensor(a!) out, Tensor? sinks, "
        "Tensor(b!)? max_logits, Tensor(c!)? lse, int format, float scale) -> ()"
    ),
)
TOPK_COLUMNS, TOPK_MOST = 262144, 8191  # of csrc/topk.h
# RowFormat of csrc/sparse_mla_rows.h, by the name of a format and the dimensions of a
# key.
_FORMATS = {
    ("e4m3", 512): 0,
    ("bf16", 512): 1,
    ("v4", 512): 2,
    ("v32", 576): 3,
    ("bf16", 576): 4,
}
_library = torch.library.Library("mla_kernels", "FRAGMENT")
# The package may be imported under two names.
if not hasattr(torch.ops.mla_kernels, "sparse_mla_sm90"):
    for schema in _SCHEMAS:
        _library.define(schema)


def misfit(capability: tuple[int, int] | None) -> str | None:
    """Why the kernels cannot serve a GPU of this compute capability; None if they can.
    Loads nothing."""
    if capability != (9, 0):
        return (
            "its attention kernels are for compute capability 9.0; use another provider"
        )
    return native.misfit(capability)


def serves(capability: tuple[int, int] | None) -> bool:
    """Whether the kernels are there for a GPU of this compute capability; loads the
    library if need be."""
    return capability == (9, 0) and native.load_for(capability)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _require_library(device: torch.device) -> None:
    capability = _capability(device)
    if not serves(capability):
        problem = misfit(capability) or "it cannot be loaded"
        raise RuntimeError(
            f"The sm90 provider needs the native library, but {problem}."
        )


def sparse_mla_sm90(call: SparseMLACall) -> None:
    """Write `call.out` for every token; see `sparse_mla` for the arguments and the
    formula.

    Raises ValueError where rows do not start at multiples of 16 bytes, RuntimeError
    without the native library or on another GPU.
    """
    _require_library(call.query.device)
    scales = (call.bmm1_scale, call.bmm2_scale)
    tensors = [scale if isinstance(scale, torch.Tensor) else None for scale in scales]
    values = [
        0.0 if isinstance(scale, torch.Tensor) else float(scale) for scale in scales
    ]
    torch.ops.mla_kernels.sparse_mla_sm90(
        call.query,
        call.swa_pool,
        call.compressed_pool,
        call.indices,
        call.topk_lens,
        call.visible,
        call.out,
        call.sinks,
        *tensors,
        *values,
    )


def attend_sm90(call: SparseAttention) -> None:
    """Write `call.out`, and `call.max_logits` and `call.lse` where they are asked for,
    over rows of any format; for calls as FlashMLA's have them.

    Raises ValueError where rows or heads do not start at multiples of 16 bytes, and for
    what only `sparse_mla_sm90` takes: `visible`, `base` and `out_scale`. RuntimeError
    without the native library or on another GPU.
    """
    _require_library(call.query.device)
    # The operator has no such arguments: without this they would have no effect.
    if (
        call.visible is not None
        or not isinstance(call.out_scale, float)
        or call.out_scale != 1.0
        or any(pool.base for pool in call.pools)
    ):
        raise ValueError(
            "attend_sm90 takes no visible, out_scale or base; call sparse_mla_sm90."
        )
    sources = [
        part for pool in call.pools for part in (pool.cache, pool.indices, pool.lengths)
    ]
    torch.ops.mla_kernels.sparse_mla_rows_sm90(
        call.query,
        *sources,
        *[None] * (6 - len(sources)),
        call.out,
        call.sinks,
        call.max_logits,
        call.lse,
        _FORMATS[call.pools[0].format.name, call.query.shape[-1]],
        call.scale,
    )


def slots_sm90(
    rows: torch.Tensor,
    request_of_token: torch.Tensor,
    block_table: torch.Tensor,
    prefill_of_token: torch.Tensor | None,
    workspace_starts: torch.Tensor | None,
    out: torch.Tensor,
    block_size: int,
) -> None:
    """Write `out`; see `request_rows_to_slots` for the arguments.

    Raises ValueError where one does not fit, RuntimeError without the native library or
    on another GPU.
    """
    _require_library(rows.device)
    torch.ops.mla_kernels.request_rows_to_slots_sm90(
        rows,
        request_of_token,
        block_table,
        block_size,
        prefill_of_token,
        workspace_starts,
        out,
    )


def serves_topk(scores: torch.Tensor, k: int) -> bool:
    """Whether `topk_sm90` takes scores of this shape on this GPU; loads the library if
    need be."""
    fits = scores.shape[1] <= TOPK_COLUMNS and k <= TOPK_MOST
    return fits and serves(_capability(scores.device))


def topk_sm90(scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
    """Write `out`, from the first `lengths[r]` scores of row r; see `indexer_topk`.

    Raises ValueError where an argument does not fit, RuntimeError without the native
    library or on another GPU.
    """
    _require_library(scores.device)
    torch.ops.mla_kernels.indexer_topk_sm90(scores, lengths, out)
