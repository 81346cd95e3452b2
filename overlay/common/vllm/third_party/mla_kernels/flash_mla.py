# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""FlashMLA's two sparse calls, argument for argument, over the rows that vLLM's caches
already hold.

Both take what FlashMLA's functions of their names take (vLLM's build, which has `out`),
and more: 1 to 128 heads, not padded; any number of columns; no tokens; any index
outside the cache. What else FlashMLA refuses is refused. Dense MLA is not served.

lse and max_logits are as in FlashMLA's `tests/ref.py`: natural logarithms, without the
sink; a token without a key has an lse of +inf, max_logits of -inf and an output of 0.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from . import sm90
from .attention import VALUE_DIM, KeyPool, SparseAttention
from .interface import MAX_HEADS, remember
from .row_formats import BF16, V4, V32, RowFormat

PROVIDERS = ("reference", "triton", "sm90")
# Where the sm90 provider takes no longer than FlashMLA, which runs 64 or 128 heads
# whatever the model has: {row format: {up to heads: ((from, to) tokens, ...)}}, None
# for any number. Measured on an H200 and on an H100 against FlashMLA of vLLM 0.22.1:
# benchmarks/results/stock_rows_*.json, and small_batches_h200.txt. BF16 rows of 512
# were measured in prefill; in small calls they go by those of 576.
_Spans = tuple[tuple[int, int | None], ...]
_AS_FAST: dict[str, dict[int, _Spans]] = {
    V4.name: {32: ((0, None),), 128: ((0, 512),)},
    V32.name: {32: ((0, None),), 128: ((0, 512),)},
    BF16.name: {32: ((0, None),), 64: ((0, 64),), 128: ((0, 32),)},
    "bf16-576": {16: ((0, None),), 64: ((0, 64),), 128: ((0, 32),)},
}
# From so many tokens on, columns behind a token's last row are found where the caller
# has no lengths, and left out. vLLM has none for V3.2 with an FP8 cache, nor, up to
# 0.23.0, with a BF16 cache, and the first tokens of a prompt see few keys. Decodes with
# long contexts would take up to 12% longer (benchmarks/results/columns_h200.txt).
_BOUNDED_TOKENS = 1024
_ALIGNMENT = 4  # bytes: rows hold float32 and BF16
_valid: set[tuple] = set()


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    *,
    provider: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention over the 584-byte rows of V4, or the 656-byte rows of V3.2 and
    GLM-5 (row_formats.py).

    Args:
        q: BF16 `[batch, q_len, heads, d]`, last dimension contiguous; d is 512 for V4's
            rows, 576 for V3.2's.
        k_cache: `[blocks, block_size, 1, 584 or 656]` uint8, int8 or float8_e4m3fn; a
            block in one piece, blocks in any distance.
        block_table, cache_seqlens: without effect in sparse attention.
        head_dim_v: 512.
        tile_scheduler_metadata: FlashMLA's plan; not needed, and left as it is.
        num_splits: None.
        softmax_scale: multiplies q k; None is `d ** -0.5`.
        causal: False.
        is_fp8_kvcache: True.
        indices: int32 `[batch, q_len, topk]`, block * block_size + row, last dimension
            contiguous. An entry outside the cache (-1, or any other) is a missing row.
        attn_sink: float32 `[heads]`: out times `exp(lse) / (exp(lse) + exp(sink))`.
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length: a second cache of
            the same rows, whose keys join those of the first; its block size and
            columns may differ.
        topk_length: int32 `[batch]`: the leftmost columns that count. None, and more
            than there are, is all of them.
        out: BF16 `[batch, q_len, heads, 512]`, last dimension contiguous; allocated
            when None.
        enable_batch_invariant: False (from vLLM 0.33.0 on; FlashMLA has True on
            Blackwell alone).
        provider: "reference", "triton" or "sm90"; None picks.

    Returns:
        `out`, and lse, float32 `[batch, heads, q_len]`.

    Raises:
        NotImplementedError: without `indices`, which is dense MLA: call FlashMLA's
            function.
        ValueError: an argument does not fit; the message names it and says what fits.
    """
    if indices is None:
        raise NotImplementedError(
            "flash_mla_with_kvcache: dense MLA (indices is None) is not served here; "
            "call FlashMLA's own function."
        )
    tensors = {
        "q": q,
        "k_cache": k_cache,
        "indices": indices,
        "attn_sink": attn_sink,
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "topk_length": topk_length,
        "extra_topk_length": extra_topk_length,
        "out": out,
    }
    flags = (head_dim_v, num_splits, causal, is_fp8_kvcache, enable_batch_invariant)
    signature = ("flash_mla_with_kvcache", flags, *map(_shape, tensors.values()))
    if signature not in _valid:
        _validate_decode(tensors, *flags)
        remember(_valid, signature)
    batch, q_len, heads, head_dim = q.shape
    if out is None:
        out = q.new_empty(batch, q_len, heads, VALUE_DIM)
    lse = torch.empty(batch, q_len, heads, dtype=torch.float32, device=q.device)
    rows = V4 if head_dim == 512 else V32

    def pool(
        cache: torch.Tensor, indices: torch.Tensor, length: torch.Tensor | None
    ) -> KeyPool:
        return KeyPool(cache.squeeze(2), rows, indices.flatten(0, 1), length)

    pools = (pool(k_cache, indices, topk_length),)
    if extra_k_cache is not None:
        pools += (pool(extra_k_cache, extra_indices_in_kvcache, extra_topk_length),)
    _attend(
        SparseAttention(
            query=q.flatten(0, 1),
            pools=pools,
            out=out.flatten(0, 1),
            scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
            sinks=attn_sink,
            lse=lse.view(-1, heads),
        ),
        out,
        provider,
    )
    return out, lse.transpose(1, 2)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = VALUE_DIM,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    provider: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse attention over BF16 rows, 576 wide for V3.2 and GLM-5, 512 wide for V4.

    Args:
        q: BF16 `[tokens, heads, d]`, d 512 or 576, last dimension contiguous.
        kv: BF16 `[rows, 1, d]`, last dimension contiguous.
        indices: int32 `[tokens, 1, topk]`, rows of `kv`, last dimension contiguous. An
            entry outside `kv` (-1, or any other) is a missing row.
        sm_scale: multiplies q k.
        d_v: 512.
        attn_sink: float32 `[heads]`: out times `exp(lse) / (exp(lse) + exp(sink))`.
        topk_length: int32 `[tokens]`: the leftmost columns that count. None, and more
            than there are, is all of them.
        out: BF16 `[tokens, heads, 512]`, last dimension contiguous; allocated when
            None.
        provider: "reference", "triton" or "sm90"; None picks.

    Returns:
        `out`; max_logits and lse, float32 `[tokens, heads]`.

    Raises:
        ValueError: an argument does not fit; the message names it and says what fits.
    """
    tensors = {
        "q": q,
        "kv": kv,
        "indices": indices,
        "attn_sink": attn_sink,
        "topk_length": topk_length,
        "out": out,
    }
    signature = ("flash_mla_sparse_fwd", d_v, *map(_shape, tensors.values()))
    if signature not in _valid:
        _validate_prefill(tensors, d_v)
        remember(_valid, signature)
    tokens, heads, _ = q.shape
    if out is None:
        out = q.new_empty(tokens, heads, VALUE_DIM)
    max_logits, lse = (
        torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
        for _ in range(2)
    )
    _attend(
        SparseAttention(
            query=q,
            # Blocks of a row: the size of a block selects a Triton kernel, and there
            # may be no rows at all.
            pools=(KeyPool(kv, BF16, indices.squeeze(1), topk_length),),
            out=out,
            scale=sm_scale,
            sinks=attn_sink,
            max_logits=max_logits,
            lse=lse,
        ),
        out,
        provider,
    )
    return out, max_logits, lse


def serves(rows: str, heads: int, tokens: int | None = None) -> bool:
    """Whether the sm90 provider is at least as fast as FlashMLA.

    Args:
        rows: "v4" and "v32", over which `flash_mla_with_kvcache` decodes and prefills,
            or "bf16" (512 wide) and "bf16-576", those of `flash_mla_sparse_fwd`.
        heads: of q, as the caller has it.
        tokens: of the call (batch * q_len); None asks for any number.
    """
    for most_heads, spans in _AS_FAST[rows].items():
        if heads <= most_heads:
            if tokens is None:
                return (0, None) in spans
            return any(a <= tokens and (b is None or tokens <= b) for a, b in spans)
    return False


@functools.cache
def pick_provider(device: torch.device) -> str:
    """The provider of these calls for tensors on `device`."""
    if device.type != "cuda":
        return "reference"
    return "sm90" if sm90.serves(torch.cuda.get_device_capability(device)) else "triton"


def _attend(call: SparseAttention, out: torch.Tensor, provider: str | None) -> None:
    name = provider or pick_provider(call.query.device)
    if name not in PROVIDERS:
        raise ValueError(
            f"FlashMLA's calls have no provider {name!r}; they have "
            f"{', '.join(PROVIDERS)}."
        )
    if call.query.shape[0]:
        with torch.cuda.device_of(call.query):  # Triton launches on the current one
            large = name != "reference" and call.query.shape[0] >= _BOUNDED_TOKENS
            if large and any(pool.lengths is None for pool in call.pools):
                call = replace(call, pools=tuple(map(_bounded, call.pools)))
            _load_provider(name)(call)
    if call.out.data_ptr() != out.data_ptr():  # flattening copied it
        out.copy_(call.out.view(out.shape))


def _bounded(pool: KeyPool) -> KeyPool:
    """The pool with a length for each token: no column behind its last row is gone
    through. (The sm90 provider takes no other number of lengths in the other pool.)"""
    # Not at the top: slots.py imports this module, and Triton.
    from .slots import columns_in_use

    lengths = pool.token_lengths()
    if lengths is None:
        lengths = columns_in_use(pool.indices)
    return replace(pool, lengths=lengths)


def warm_up(device: torch.device) -> None:
    """Compile what Triton compiles for large calls without lengths."""
    from .slots import columns_in_use

    columns_in_use(torch.full((1, 1), -1, dtype=torch.int32, device=device))


@functools.cache
def _load_provider(name: str) -> Callable[[SparseAttention], None]:
    # Imported on first use: a provider may need more than torch.
    if name == "reference":
        from .reference import attend_reference as run
    elif name == "sm90":
        from .sm90 import attend_sm90 as run
    else:
        from .triton_sparse_mla import attend_triton as run
    return run


def _shape(x: torch.Tensor | None) -> tuple | None:
    return (
        None
        if x is None
        else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % _ALIGNMENT)
    )


class _Arguments:
    """The tensors of a call, and what is asked of them; `ValueError` where it is not
    so."""

    def __init__(self, function: str, tensors: dict[str, torch.Tensor | None]):
        self.function, self.tensors = function, tensors

    def require(self, condition: bool, sentence: str) -> None:
        if not condition:
            raise ValueError(f"{self.function}: {sentence}")

    def tensor(self, name: str, dtype: torch.dtype, *shape: int) -> None:
        """The tensor `name`, if there is one."""
        x = self.tensors[name]
        if x is None:
            return
        self.require(
            x.dtype == dtype and x.shape == shape,
            f"{name} must be {dtype} {list(shape)}, got {x.dtype} {list(x.shape)}.",
        )
        self.require(
            x.stride(-1) == 1 or x.shape[-1] <= 1,
            f"the last dimension of {name} must be contiguous, strides are "
            f"{x.stride()}.",
        )

    def query(self, dims: int) -> tuple[int, ...]:
        q = self.tensors["q"]
        form = (
            "[batch, q_len, heads, 512 or 576]"
            if dims == 4
            else "[tokens, heads, 512 or 576]"
        )
        self.require(
            q.dim() == dims and q.shape[-1] in (512, 576),
            f"q must be {form}, got {list(q.shape)}.",
        )
        self.require(
            1 <= q.shape[-2] <= MAX_HEADS,
            f"1 to {MAX_HEADS} heads are served, q has {q.shape[-2]}.",
        )
        self.tensor("q", torch.bfloat16, *q.shape)
        return q.shape

    def cache(self, name: str, rows: RowFormat, head_dim: int) -> None:
        x, width = self.tensors[name], rows.widths[head_dim]
        self.require(
            x.dim() == 4 and x.shape[2:] == (1, width) and x.dtype in rows.dtypes,
            f"{name} must be [blocks, block_size, 1, {width}] of bytes (uint8, int8 "
            "or float8_e4m3fn) with a q of "
            f"{head_dim} dimensions, got {x.dtype} {list(x.shape)}.",
        )
        whole = x.stride(3) == 1 and (x.stride(1) == width or x.shape[1] == 1)
        aligned = x.stride(0) % _ALIGNMENT == 0 and x.data_ptr() % _ALIGNMENT == 0
        self.require(
            whole and aligned,
            f"a block of {name} must be in one piece and start at a multiple of "
            f"{_ALIGNMENT} bytes, strides are "
            f"{x.stride()}.",
        )

    def one_device(self) -> None:
        device = self.tensors["q"].device
        for name, x in self.tensors.items():
            if x is not None:
                self.require(
                    x.device == device,
                    f"every tensor must be on q's device {device}, {name} is on "
                    f"{x.device}.",
                )


def _validate_decode(
    tensors: dict,
    head_dim_v: int,
    num_splits: None,
    causal: bool,
    is_fp8_kvcache: bool,
    enable_batch_invariant: bool,
) -> None:
    check = _Arguments("flash_mla_with_kvcache", tensors)
    check.require(head_dim_v == VALUE_DIM, f"head_dim_v must be 512, got {head_dim_v}.")
    check.require(num_splits is None, "num_splits must be None.")
    check.require(
        not causal, "causal must be False with indices, which say what a token sees."
    )
    check.require(
        is_fp8_kvcache,
        "is_fp8_kvcache must be True with indices; flash_mla_sparse_fwd takes BF16 "
        "rows.",
    )
    check.require(
        not enable_batch_invariant,
        "enable_batch_invariant must be False: how many tokens a call has says how "
        "their keys are divided.",
    )
    batch, q_len, heads, head_dim = check.query(dims=4)
    rows = V4 if head_dim == 512 else V32
    check.tensor("attn_sink", torch.float32, heads)
    check.tensor("out", torch.bfloat16, batch, q_len, heads, VALUE_DIM)
    pools = [("k_cache", "indices", "topk_length")]
    extra = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
    if tensors[extra[0]] is None:
        for name in extra[1:]:
            check.require(
                tensors[name] is None,
                f"{name} is of an extra_k_cache, and there is none.",
            )
    else:
        check.require(
            tensors[extra[1]] is not None,
            "extra_k_cache needs extra_indices_in_kvcache.",
        )
        pools.append(extra)
    for cache, indices, length in pools:
        check.cache(cache, rows, head_dim)
        check.tensor(indices, torch.int32, batch, q_len, tensors[indices].shape[-1])
        check.tensor(length, torch.int32, batch)
    check.one_device()


def _validate_prefill(tensors: dict, d_v: int) -> None:
    check = _Arguments("flash_mla_sparse_fwd", tensors)
    check.require(d_v == VALUE_DIM, f"d_v must be 512, got {d_v}.")
    tokens, heads, head_dim = check.query(dims=3)
    check.tensor("kv", torch.bfloat16, tensors["kv"].shape[0], 1, head_dim)
    check.tensor("indices", torch.int32, tokens, 1, tensors["indices"].shape[-1])
    check.tensor("topk_length", torch.int32, tokens)
    check.tensor("attn_sink", torch.float32, heads)
    check.tensor("out", torch.bfloat16, tokens, heads, VALUE_DIM)
    check.one_device()
