# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""`sparse_mla`: FlashInfer's DeepSeek V4 call, served by whichever provider fits the
GPU.

The names, shapes and meaning of the arguments are those of
`flashinfer.mla.trtllm_batch_decode_sparse_mla_dsv4`, so that a caller can move between
the two.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .attention import KeyPool, SparseAttention
from .row_formats import BF16, E4M3

HEAD_DIM = 512
SWA_COLUMNS = 128
MAX_HEADS = 128
PROVIDERS = ("reference", "triton", "sm90", "flashinfer")
_POOL_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
_MOST_SIGNATURES = 4096  # about 2 KB each


@dataclass(frozen=True)
class SparseMLACall:
    """A validated call in the one form that providers see: flat tokens, `[pages, page,
    512]` pools.

    query: [tokens, heads, 512] BF16 or E4M3.
    swa_pool: [pages, page, 512] BF16 or E4M3, rows contiguous, any page and row stride.
    compressed_pool: the same; its page size may differ.
    indices: [tokens, columns] int32, flat rows: SWA in columns 0-127, compressed from
        128 on.
    topk_lens: [tokens] int32, 128 + how many columns from 128 on are keys.
    seq_lens: [batch] int32, as `sparse_mla` takes them.
    cum_seq_lens_q: [batch + 1] int32, or None, the same.
    q_len: query tokens of every request, or with `cum_seq_lens_q` the most of any.
    out: [tokens, heads, 512] BF16.
    bmm1_scale: float, or a one-element float32 tensor; multiplies q k before the
        softmax.
    bmm2_scale: the same; multiplies the output.
    sinks: [heads] float32, or None.
    signature: hashable; equal for two calls whose arguments differ in values and
        addresses only.
    """

    query: torch.Tensor
    swa_pool: torch.Tensor
    compressed_pool: torch.Tensor
    indices: torch.Tensor
    topk_lens: torch.Tensor
    seq_lens: torch.Tensor
    cum_seq_lens_q: torch.Tensor | None
    q_len: int
    out: torch.Tensor
    bmm1_scale: float | torch.Tensor
    bmm2_scale: float | torch.Tensor
    sinks: torch.Tensor | None
    signature: tuple

    @functools.cached_property
    def visible(self) -> torch.Tensor:
        """int32 [tokens], cached tokens that the query token sees: min(visible, 128)
        SWA columns are keys.

        <= 0 marks padding, which has no key at all whatever topk_lens says. On the
        device, without a sync.
        """
        return _visible_tokens(
            self.seq_lens, self.cum_seq_lens_q, self.query.shape[0], self.q_len
        )

    @property
    def attention(self) -> SparseAttention:
        """The call as providers of any rows take it."""
        rows = E4M3 if self.swa_pool.dtype == torch.float8_e4m3fn else BF16
        window, compressed = (
            self.indices[:, :SWA_COLUMNS],
            self.indices[:, SWA_COLUMNS:],
        )
        return SparseAttention(
            query=self.query,
            pools=(
                KeyPool(self.swa_pool, rows, window, self.visible),
                KeyPool(
                    self.compressed_pool, rows, compressed, self.topk_lens, SWA_COLUMNS
                ),
            ),
            out=self.out,
            scale=self.bmm1_scale,
            out_scale=self.bmm2_scale,
            sinks=self.sinks,
            visible=self.visible,
        )


_valid: set[tuple] = set()


def remember(known: set[tuple], signature: tuple) -> None:
    """Add a `SparseMLACall.signature` to `known`; long-running servers see ever new
    ones, so it starts over."""
    if len(known) >= _MOST_SIGNATURES:
        known.clear()
    known.add(signature)


def sparse_mla(
    query: torch.Tensor,
    swa_kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor | None,
    sparse_indices: torch.Tensor,
    compressed_kv_cache: torch.Tensor | None,
    sparse_topk_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "HND",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    enable_pdl: bool | None = None,
    *,
    provider: str | None = None,
) -> torch.Tensor:
    """Attention of each query token over the cache rows that its index table names.

    With K = V = the rows, for every token and head h:

        s_j   = bmm1_scale * <q, row_j>
        out   = bmm2_scale * sum_j exp(s_j) row_j / (sum_j exp(s_j) + exp(sink_h))

    in float32, where `<q, row_j>` and `s_j` have to stay below 2^128 in magnitude:
    beyond it, a score that overflows is infinite, and the head's output 0 or NaN. A NaN
    in q makes the head's output NaN.

    Args:
        query: `[batch, q_len, heads, 512]`, or `[sum_q, heads, 512]` together with
            `cum_seq_lens_q` and `max_q_len`. BF16 or E4M3 (over E4M3 pools), 1 to 128
            heads, last dimension contiguous.
        swa_kv_cache: sliding-window pool, `[pages, 1, page, 512]` (HND) or `[pages,
            page, 1, 512]` (NHD), BF16 or E4M3; rows contiguous, any stride between
            pages.
        workspace_buffer: FlashInfer's scratch; every provider here, FlashInfer's too,
        allocates its own: None.
        sparse_indices: int32 `[sum_q, width]`, `width >= 128` and a multiple of 4, flat
            rows of the pools: columns 0-127 index the SWA pool, columns from 128 on the
            compressed pool. An entry outside its pool (negative, or `>= pages * page`)
            is a missing row: no key, never read. Entries past the lengths may be stale.
            "flashinfer" alone has no missing rows: within the lengths, its entries must
            be in the pool.
        compressed_kv_cache: pool of the columns from 128 on, same dtype as the SWA
            pool; its page size may differ. None (or the SWA pool) for a layer that has
            the window only.
        sparse_topk_lens: int32 `[sum_q]`, **including the fixed 128**: `128 +
            compressed keys`.
        seq_lens: int32 `[batch]`, tokens in the cache of each request, its query tokens
            included. Query token i of q_len sees `min(seq_len - q_len + i + 1, 128)`
            SWA columns; a request with `seq_len <= 0` is padding and its output is
            zero.
        out: BF16, `query`'s shape; allocated when None.
        bmm1_scale: softmax scale times q and kv scales. A float, or a one-element
            float32 tensor on the GPU.
        bmm2_scale: kv scale, the same.
        sinks: float32 `[heads]`.
        kv_layout: "HND" or "NHD".
        cum_seq_lens_q: int32 `[batch + 1]`, first query token of each request, for
            ragged queries.
        max_q_len: longest query of a ragged batch.
        enable_pdl: accepted for FlashInfer's sake, without effect here.
        provider: "reference", "triton", "sm90" or "flashinfer"; None picks
            (`pick_provider` says why).

    Returns:
        `out`.

    Raises:
        ValueError: an argument does not fit; the message names it and says what fits.
            What depends on shapes, strides and dtypes is checked at the first call that
            has them.
    """
    if compressed_kv_cache is None:
        compressed_kv_cache = swa_kv_cache
    if out is None:
        out = torch.empty(query.shape, dtype=torch.bfloat16, device=query.device)
    tensors = (
        query,
        swa_kv_cache,
        sparse_indices,
        compressed_kv_cache,
        sparse_topk_lens,
        seq_lens,
        out,
        sinks,
        cum_seq_lens_q,
    )
    scales = (bmm1_scale, bmm2_scale)
    signature = (kv_layout, max_q_len)
    signature += tuple(
        (t.shape, t.stride(), t.dtype, t.device)
        if isinstance(t, torch.Tensor)
        else type(t)
        for t in tensors + scales
    )
    if signature not in _valid:
        _validate(*tensors, kv_layout, max_q_len)
        _validate_scales(scales, query.device)
        remember(_valid, signature)
    name = provider or pick_provider(query.device)[0]
    if name not in PROVIDERS:
        raise ValueError(
            f"sparse_mla has no provider {name!r}; it has {', '.join(PROVIDERS)}."
        )
    heads = query.shape[-2]
    head_axis = 1 if kv_layout == "HND" else 2
    call = SparseMLACall(
        query=query.view(-1, heads, HEAD_DIM),
        swa_pool=swa_kv_cache.squeeze(head_axis),
        compressed_pool=compressed_kv_cache.squeeze(head_axis),
        indices=sparse_indices,
        topk_lens=sparse_topk_lens,
        seq_lens=seq_lens,
        cum_seq_lens_q=cum_seq_lens_q,
        q_len=query.shape[1] if max_q_len is None else max_q_len,
        out=out.view(-1, heads, HEAD_DIM),
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=sinks,
        signature=signature,
    )
    if call.query.shape[0]:
        with torch.cuda.device_of(query):  # Triton launches on the current one
            _load_provider(name)(call)
    return out


@functools.cache
def _load_provider(name: str) -> Callable[[SparseMLACall], None]:
    # Imported on first use: a provider may need more than torch (Triton, FlashInfer or
    # our CUDA).
    if name == "reference":
        from .reference import sparse_mla_reference as run
    elif name == "sm90":
        from .sm90 import sparse_mla_sm90 as run
    elif name == "flashinfer":
        from .flashinfer_sparse_mla import sparse_mla_flashinfer as run
    else:
        from .triton_sparse_mla import sparse_mla_triton as run
    return run


def pick_provider(device: torch.device | str) -> tuple[str, str]:
    """The provider for tensors on `device`, and the reason in words for the log; "cuda"
    is the current GPU."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _pick_provider(device)


@functools.cache
def _pick_provider(device: torch.device) -> tuple[str, str]:
    if device.type == "cuda":
        from . import flashinfer_sparse_mla, sm90

        capability = torch.cuda.get_device_capability(device)
        if sm90.serves(capability):
            return "sm90", "the native library has kernels for compute capability 9.0"
        if capability in flashinfer_sparse_mla.CAPABILITIES:
            problem = flashinfer_sparse_mla.misfit(capability)
            if problem is None:
                return (
                    "flashinfer",
                    "FlashInfer has kernels for compute capability {}.{}".format(
                        *capability
                    ),
                )
            return "triton", f"FlashInfer cannot serve: {problem}"
        problem = sm90.misfit(capability) or "it cannot be loaded"
        return "triton", f"the native library does not serve: {problem}"
    return (
        "reference",
        f"the Triton kernels need a GPU and the tensors are on {device.type}",
    )


def _validate(
    query,
    swa_kv_cache,
    sparse_indices,
    compressed_kv_cache,
    sparse_topk_lens,
    seq_lens,
    out,
    sinks,
    cum_seq_lens_q,
    kv_layout,
    max_q_len,
) -> None:
    ragged = cum_seq_lens_q is not None
    if ragged != (max_q_len is not None):
        raise ValueError(
            "sparse_mla: cum_seq_lens_q and max_q_len go together; pass both or "
            "neither."
        )
    if query.dim() != (3 if ragged else 4) or query.shape[-1] != HEAD_DIM:
        form = (
            "[sum_q, heads, 512] with cum_seq_lens_q"
            if ragged
            else "[batch, q_len, heads, 512]"
        )
        raise ValueError(f"sparse_mla: query must be {form}, got {tuple(query.shape)}.")
    heads = query.shape[-2]
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(
            f"sparse_mla: 1 to {MAX_HEADS} heads are served, query has {heads}."
        )
    if query.dtype not in _POOL_DTYPES:
        raise ValueError(
            f"sparse_mla: query must be bfloat16 or float8_e4m3fn, got {query.dtype}."
        )
    _validate_pool(swa_kv_cache, "swa_kv_cache", kv_layout)
    _validate_pool(compressed_kv_cache, "compressed_kv_cache", kv_layout)
    if swa_kv_cache.dtype != compressed_kv_cache.dtype:
        raise ValueError(
            f"sparse_mla: both pools must have one dtype, got {swa_kv_cache.dtype} and "
            f"{compressed_kv_cache.dtype}."
        )
    if query.dtype == torch.float8_e4m3fn and swa_kv_cache.dtype != query.dtype:
        raise ValueError(
            "sparse_mla: an E4M3 query needs E4M3 pools, these are bfloat16."
        )
    if out.shape != query.shape or out.dtype != torch.bfloat16 or out.stride(-1) != 1:
        raise ValueError(
            f"sparse_mla: out must be bfloat16 of query's shape {tuple(query.shape)} "
            "with contiguous rows, "
            f"got {out.dtype} {tuple(out.shape)}."
        )
    try:  # Flattening must not copy: providers write through `out`.
        tokens = query.view(-1, heads, HEAD_DIM).shape[0]
        out.view(-1, heads, HEAD_DIM)
    except RuntimeError:
        raise ValueError(
            "sparse_mla: the batch and q_len dimensions of query and out must merge "
            "without a copy."
        ) from None
    width = sparse_indices.shape[-1]
    if sparse_indices.shape != (tokens, width) or width < SWA_COLUMNS or width % 4:
        raise ValueError(
            f"sparse_mla: sparse_indices must be [{tokens}, width] with width >= 128 "
            "and a multiple of 4, "
            f"got {tuple(sparse_indices.shape)}."
        )
    requests = cum_seq_lens_q.numel() - 1 if ragged else query.shape[0]
    for name, tensor, length in (
        ("sparse_topk_lens", sparse_topk_lens, tokens),
        ("seq_lens", seq_lens, requests),
    ):
        if tensor.shape != (length,):
            raise ValueError(
                f"sparse_mla: {name} must be [{length}], got {tuple(tensor.shape)}."
            )
    for name, tensor in (
        ("sparse_indices", sparse_indices),
        ("sparse_topk_lens", sparse_topk_lens),
        ("seq_lens", seq_lens),
        ("cum_seq_lens_q", cum_seq_lens_q),
    ):
        if tensor is not None and tensor.dtype != torch.int32:
            raise ValueError(f"sparse_mla: {name} must be int32, got {tensor.dtype}.")
    if sparse_indices.stride(-1) != 1 or query.stride(-1) != 1:
        raise ValueError(
            "sparse_mla: the last dimension of query and sparse_indices must be "
            "contiguous."
        )
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype != torch.float32):
        raise ValueError(
            f"sparse_mla: sinks must be float32 [{heads}], got {sinks.dtype} "
            f"{tuple(sinks.shape)}."
        )
    for name, tensor in (
        ("sparse_topk_lens", sparse_topk_lens),
        ("seq_lens", seq_lens),
        ("cum_seq_lens_q", cum_seq_lens_q),
        ("sinks", sinks),
    ):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"sparse_mla: {name} must be contiguous, its stride is "
                f"{tensor.stride(0)}."
            )
    tensors = (
        swa_kv_cache,
        sparse_indices,
        compressed_kv_cache,
        sparse_topk_lens,
        seq_lens,
        out,
        sinks,
        cum_seq_lens_q,
    )
    for tensor in tensors:
        if tensor is not None and tensor.device != query.device:
            raise ValueError(
                f"sparse_mla: every tensor must be on query's device {query.device}, "
                f"one is on {tensor.device}."
            )


def _validate_scales(
    scales: tuple[float | torch.Tensor, ...], device: torch.device
) -> None:
    for name, scale in zip(("bmm1_scale", "bmm2_scale"), scales, strict=True):
        if isinstance(scale, torch.Tensor) and (
            scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != device
        ):
            raise ValueError(
                f"sparse_mla: {name} must be a float, or one float32 element on "
                f"{device}, got {scale.dtype} "
                f"{tuple(scale.shape)} on {scale.device}."
            )


def _validate_pool(cache: torch.Tensor, name: str, kv_layout: str) -> None:
    if kv_layout not in ("HND", "NHD"):
        raise ValueError(
            f'sparse_mla: kv_layout must be "HND" or "NHD", got {kv_layout!r}.'
        )
    head_axis = 1 if kv_layout == "HND" else 2
    fits = (
        cache.dim() == 4 and cache.shape[head_axis] == 1 and cache.shape[-1] == HEAD_DIM
    )
    if not fits or cache.shape[3 - head_axis] == 0:
        form = (
            "[pages, 1, page, 512]" if kv_layout == "HND" else "[pages, page, 1, 512]"
        )
        raise ValueError(
            f"sparse_mla: {name} must be {form} ({kv_layout}), got "
            f"{tuple(cache.shape)}."
        )
    if cache.dtype not in _POOL_DTYPES or cache.stride(-1) != 1:
        raise ValueError(
            f"sparse_mla: {name} must hold contiguous rows of bfloat16 or "
            f"float8_e4m3fn, got {cache.dtype}."
        )


def _visible_tokens(
    seq_lens: torch.Tensor, cum_seq_lens_q: torch.Tensor | None, tokens: int, q_len: int
) -> torch.Tensor:
    """Cached tokens that each query token sees, <= 0 for padding, int32 `[tokens]`, on
    the device and without a sync."""
    if cum_seq_lens_q is None:
        if q_len == 1:
            return seq_lens
        offset = torch.arange(1 - q_len, 1, dtype=torch.int32, device=seq_lens.device)
        return (seq_lens[:, None] + offset).view(tokens)
    token = torch.arange(tokens, dtype=torch.int32, device=seq_lens.device)
    request = torch.searchsorted(cum_seq_lens_q, token, right=True, out_int32=True) - 1
    request = request.clamp(0, seq_lens.numel() - 1)
    visible = seq_lens[request] - (cum_seq_lens_q[request + 1] - 1 - token)
    return visible.where(token < cum_seq_lens_q[-1], 0)
