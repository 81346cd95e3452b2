"""What sparse_mla.py measures: rows in each format, who attends to which of them, and the calls over them.

A pool has 2^20 rows. Those of DeepSeek V4 (`e4m3`, `bf16`, `584`) hold the same values, 448 that E4M3 holds
exactly and 64 of RoPE, so that one call of FlashMLA is the truth of all three; `512` are the BF16 rows that
vLLM gathers of them before a prefill. A token of V4 attends to a window of 128 rows and to picks of its
indexer; one of V3.2 (`656`, `576`) to picks alone.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

try:
    from vllm.third_party import mla_kernels
except ImportError:  # the kernels of this checkout; FlashMLA may be that of sparse_mla.py --flashmla
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "overlay/common/vllm/third_party"))
    import mla_kernels
flash_mla, native = mla_kernels.flash_mla, mla_kernels.native

DEVICE = "cuda"
PAGE, VALUE_DIM, ROPE_DIM, WINDOW = 64, 512, 64, 128
PAGES = 1 << 14
CALLS, PREFILL_CALLS, PREFILL_TOKENS = 20, 3, 4096  # calls of one CUDA graph, each with rows of its own
PROMPT = 65536  # tokens of a long prompt
Call = Callable[[int], object]  # of the number of a call


@dataclasses.dataclass(frozen=True)
class Format:
    """Rows: the model's, bytes of one, dimensions of a key."""

    model: str
    row_bytes: int
    key_dim: int


FORMATS = {
    "e4m3": Format("V4", 512, 512),
    "bf16": Format("V4", 1024, 512),
    "584": Format("V4", 584, 512),
    "512": Format("V4", 1024, 512),
    "656": Format("V3.2", 656, 576),
    "576": Format("V3.2", 1152, 576),
}
HEADS = (8, 16, 32, 64, 128)


def top_k(model: str, heads: int) -> int:
    """Rows that an indexer picks for a token: V4-Flash's up to 64 heads, V4-Pro's at 128; V3.2's."""
    return 2048 if model == "V3.2" else 1024 if heads == 128 else 512


# ---------------------------------------------------------------- who attends to what
@dataclasses.dataclass
class Rows:
    """What the tokens of some calls attend to.

    window: int32 `[calls, tokens, 128 or 0]` rows of the pool, of which a token has the first `window_lens`.
    picked: int32 `[calls, tokens, top-k]`, of which it has the first `picked_lens`. Lengths: int32 `[tokens]`.
    gathered: for tokens of one prompt, the same rows by their places in what vLLM gathers before a prefill.
    own, compressed: the pages of a prompt's rows and compressed rows, int32 `[calls, pages]`.
    """

    window: torch.Tensor
    picked: torch.Tensor
    window_lens: torch.Tensor
    picked_lens: torch.Tensor
    gathered: Rows | None = None
    own: torch.Tensor | None = None
    compressed: torch.Tensor | None = None

    @property
    def lens(self) -> torch.Tensor:
        return self.window_lens + self.picked_lens

    def indices(self) -> torch.Tensor:
        """`[calls, tokens, window + top-k]`, as `sparse_mla` takes them."""
        return torch.cat((self.window, self.picked), -1)

    def packed(self) -> torch.Tensor:
        """The same with every token's keys first, as FlashMLA's prefill takes them."""
        width = self.window.shape[-1]
        column = torch.arange(width + self.picked.shape[-1], device=DEVICE)
        first = self.window_lens[:, None]
        source = torch.where(column < first, column, column + width - first).clamp_(max=len(column) - 1)
        return self.indices().gather(-1, source.expand(len(self.window), -1, -1))


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randint(0, PAGES * PAGE, shape, dtype=torch.int32, device=DEVICE)


def window_of(model: str) -> int:
    return WINDOW if model == "V4" else 0


def decode_rows(model: str, picked_lens: torch.Tensor, top_k: int) -> Rows:
    """A request a token: its window is a run of rows in pages of its own; its picks lie anywhere in the pool."""
    tokens, width = len(picked_lens), window_of(model)
    pages = torch.randint(0, PAGES, (CALLS, tokens, width // PAGE + 1), device=DEVICE)
    place = torch.randint(0, PAGE, (CALLS, tokens, 1), device=DEVICE) + torch.arange(width, device=DEVICE)
    window = pages.gather(-1, place // PAGE) * PAGE + place % PAGE
    return Rows(window.int(), drawn(CALLS, tokens, top_k), torch.full_like(picked_lens, width), picked_lens)


def full(model: str, tokens: int, top_k: int) -> Rows:
    return decode_rows(model, lengths(top_k).repeat(tokens), top_k)


def mixed(model: str, tokens: int, top_k: int) -> Rows:
    """Every token has its own number of picks, from none to 1024."""
    del top_k
    return decode_rows(model, torch.randint(0, 1025, (tokens,), dtype=torch.int32, device=DEVICE), 1024)


def one_long(model: str, tokens: int, top_k: int) -> Rows:
    """As in a layer with one row in 128: the one of 65,536 tokens has 512 compressed rows, those of 256 two."""
    del top_k
    picked = lengths(2).repeat(tokens)
    picked[tokens // 3] = PROMPT // 128
    return decode_rows(model, picked, 512)


def scattered(model: str, tokens: int, top_k: int) -> Rows:
    widths = (window_of(model), top_k)
    rows = [drawn(PREFILL_CALLS, tokens, width) for width in widths]
    return Rows(*rows, *(lengths(width).repeat(tokens) for width in widths))


def of_a_prompt(first: int) -> Callable[[str, int, int], Rows]:
    """Tokens `first`, `first` + 1, … of one prompt.

    In V4, in a layer with one row in 4: the window is the run of the last 128 rows up to the token's own; the
    picks are drawn, without repetition, from the compressed rows that are complete by then. In V3.2 they are drawn
    from the rows up to the token's own.
    """

    def rows(model: str, tokens: int, top_k: int) -> Rows:
        last, width = first + tokens, window_of(model)
        ratio = 4 if width else 1
        position = torch.arange(first, last, device=DEVICE)
        complete = (position + 1) // ratio
        window_lens, picked_lens = (position + 1).clamp(max=width), complete.clamp(max=top_k)
        # vLLM gathers all compressed rows, and behind them of the others those in some token's window.
        gathered = max(0, first - width + 1)
        window_at = (position - window_lens + 1)[:, None] + torch.arange(width, device=DEVICE)
        window_at.clamp_(max=last - 1)  # behind the lengths
        parts: list[list[torch.Tensor]] = [[] for _ in range(5)]
        for _ in range(PREFILL_CALLS):
            pages = torch.randperm(PAGES, device=DEVICE)
            own, compressed = pages[: last // PAGE if width else 0], pages[last // PAGE if width else 0 :]
            order = torch.rand(tokens, last // ratio, device=DEVICE)
            order.masked_fill_(torch.arange(last // ratio, device=DEVICE) >= complete[:, None], -1)
            picks_at = order.topk(min(top_k, last // ratio), -1).indices
            picks_at = torch.nn.functional.pad(picks_at, (0, top_k - picks_at.shape[-1]))
            window = own[window_at // PAGE] * PAGE + window_at % PAGE if width else window_at
            picks = compressed[picks_at // PAGE] * PAGE + picks_at % PAGE
            needed = compressed[: -(-(last // ratio) // PAGE)]
            for part, values in zip(parts, (window, picks, picks_at, own, needed), strict=True):
                part.append(values)
        window, picks, picks_at, own, needed = (torch.stack(part).int() for part in parts)
        lens = window_lens.int(), picked_lens.int()
        window_at = (window_at - gathered + last // ratio).int().expand(PREFILL_CALLS, -1, -1)
        return Rows(window, picks, *lens, Rows(window_at, picks_at, *lens), own, needed)

    return rows


@dataclasses.dataclass(frozen=True)
class Phase:
    kind: str  # "decode" or "prefill"
    tokens: tuple[int, ...]
    rows: Callable[[str, int, int], Rows]
    models: tuple[str, ...]
    words: str


BOTH = ("V4", "V3.2")
PHASES = {
    "decode": Phase("decode", (1, 16, 128, 512), full, BOTH,
                    "a request a token, all with all keys; windows are runs of rows, picks lie anywhere"),
    "small": Phase("decode", (2, 4, 8, 12, 24, 32, 64), full, BOTH,
                   "as decode; sizes between, for which graphs are captured"),
    "mixed": Phase("decode", (128, 512), mixed, ("V4",),
                   "a request a token, each with its own number of keys, drawn from 128 to 1152"),
    "one_long": Phase("decode", (128,), one_long, ("V4",),
                      "C128A layer: one request of 65,536 tokens (640 keys) among 127 of 256 (130 keys)"),
    "prefill": Phase("prefill", (PREFILL_TOKENS,), of_a_prompt(PROMPT - PREFILL_TOKENS), BOTH,
                     "the last tokens of one prompt of 65,536 (V4: C4A layer); keys are causal"),
    "prompt": Phase("prefill", (PREFILL_TOKENS,), of_a_prompt(0), BOTH,
                    "one prompt from its first token on (V4: C4A layer); keys are causal"),
    "scattered": Phase("prefill", (PREFILL_TOKENS,), scattered, BOTH,
                       "all rows drawn over a pool of 2^20, which no prompt does: none is in the L2 cache; "
                       "FlashMLA's gather is not counted"),
}  # fmt: skip


# ---------------------------------------------------------------- the rows
class Pools:
    """The rows, made when first asked for."""

    @functools.cached_property
    def _v4(self) -> tuple[torch.Tensor, torch.Tensor]:
        nope = torch.randn(PAGES // 16, PAGE, VALUE_DIM - ROPE_DIM, device=DEVICE).to(torch.float8_e4m3fn)
        return nope, torch.randn(PAGES // 16, PAGE, ROPE_DIM, device=DEVICE).bfloat16()

    @functools.cached_property
    def bf16(self) -> torch.Tensor:
        """`[pages, page, 1, 512]`"""
        nope, rope = self._v4
        return torch.cat((nope.bfloat16(), rope), -1).repeat(16, 1, 1).unsqueeze(2)

    @functools.cached_property
    def e4m3(self) -> torch.Tensor:
        return self.bf16.to(torch.float8_e4m3fn)

    @functools.cached_property
    def rows_584(self) -> torch.Tensor:
        """448 E4M3 and 64 BF16 a row; behind a page's rows 8 scale bytes (2^0) of each."""
        nope, rope = self._v4
        pages = torch.empty(PAGES, PAGE * 584, dtype=torch.uint8, device=DEVICE)
        values = pages[:, : PAGE * 576].unflatten(1, (PAGE, 576))
        values[..., :448] = nope.view(torch.uint8).repeat(16, 1, 1)
        values[..., 448:] = rope.view(torch.uint8).repeat(16, 1, 1)
        pages[:, PAGE * 576 :] = 127
        return pages.view(PAGES, PAGE, 1, 584)

    @functools.cached_property
    def rows_656(self) -> torch.Tensor:
        """512 E4M3 a row, a float32 scale for each 128, 64 BF16."""
        nope = torch.randn(PAGES // 16, PAGE, VALUE_DIM, device=DEVICE).mul_(64).clamp_(-448, 448)
        nope = nope.to(torch.float8_e4m3fn).view(torch.uint8).repeat(16, 1, 1)
        scales = torch.rand(PAGES, PAGE, 4, device=DEVICE) / 64
        rope = torch.randn(PAGES, PAGE, ROPE_DIM, device=DEVICE).bfloat16()
        return torch.cat((nope, scales.view(torch.uint8), rope.view(torch.uint8)), -1).unsqueeze(2)

    @functools.cached_property
    def rows_576(self) -> torch.Tensor:
        """`[rows, 1, 576]`"""
        return torch.randn(PAGES * PAGE // 16, 1, 576, device=DEVICE).bfloat16().repeat(16, 1, 1)


# ---------------------------------------------------------------- FlashMLA and what vLLM does around it
@dataclasses.dataclass
class Stock:
    """FlashMLA's own functions, and vLLM's gathers of rows into BF16, which are None without vLLM."""

    flash_mla_with_kvcache: Callable[..., Any]
    flash_mla_sparse_fwd: Callable[..., Any]
    get_mla_metadata: Callable[..., Any]
    gather_584: Callable[..., None] | None = None
    gather_656: Callable[..., None] | None = None


def of_vllm() -> Stock:
    # Not from v1/attention/ops/flashmla.py: there ours may stand in for them.
    from vllm.third_party.flashmla import flash_mla_interface as stock

    calls = (stock.flash_mla_with_kvcache, stock.flash_mla_sparse_fwd, stock.get_mla_metadata)
    try:
        from vllm import _custom_ops
        from vllm.models.deepseek_v4.common.ops.cache_utils import dequantize_and_gather_k_cache
    except ImportError:  # a release before 0.22.0
        return Stock(*calls)
    return Stock(*calls, dequantize_and_gather_k_cache, _custom_ops.cp_gather_and_upconvert_fp8_kv_cache)


def of_library(folder: Path) -> Stock:
    """FlashMLA out of `folder`, the vllm/ of an unpacked wheel: its library and interface, no other file."""
    torch.ops.load_library(folder / "_flashmla_C.abi3.so")
    stubs = {name: types.ModuleType(name) for name in ("vllm", "vllm._flashmla_C")}  # what the interface imports
    place = folder / "third_party/flashmla/flash_mla_interface.py"
    spec = importlib.util.spec_from_file_location("flash_mla_interface", place)
    stock = importlib.util.module_from_spec(spec)
    kept = {name: sys.modules.get(name) for name in stubs}
    sys.modules |= stubs | {spec.name: stock}  # its dataclasses look their module up
    try:
        spec.loader.exec_module(stock)
    finally:
        for name, module in kept.items():
            sys.modules.pop(name)
            if module:
                sys.modules[name] = module
    return Stock(stock.flash_mla_with_kvcache, stock.flash_mla_sparse_fwd, stock.get_mla_metadata)


# ---------------------------------------------------------------- the calls
class Inputs:
    """Queries of one shape, and the calls over its rows: `ours` and FlashMLA's, each into an output of its own."""

    def __init__(self, phase: str, rows: Rows, model: str, heads: int, pools: Pools, stock: Stock) -> None:
        self.phase, self.kind = phase, PHASES[phase].kind
        self.rows, self.model, self.heads, self.pools, self.stock = rows, model, heads, pools, stock
        self.tokens, self.keys = len(rows.window_lens), int(rows.lens.sum())
        self.calls = CALLS if self.kind == "decode" else PREFILL_CALLS
        self.key_dim = 512 if model == "V4" else 576
        self.scale = self.key_dim**-0.5
        padded = max(64, heads)  # FlashMLA's own kernels take no other number
        self.padded = torch.randn(self.tokens, padded, self.key_dim, device=DEVICE).bfloat16()
        self.query = self.padded[:, :heads].contiguous()
        # V3.2 has no sinks.
        self.padded_sinks = torch.randn(padded, device=DEVICE) if model == "V4" else None
        self.sinks = None if self.padded_sinks is None else self.padded_sinks[:heads].contiguous()
        self.padded_out = torch.empty(self.tokens, padded, VALUE_DIM, device=DEVICE).bfloat16()
        self.out = torch.empty(self.tokens, heads, VALUE_DIM, device=DEVICE).bfloat16()

    def ours(self, rows: str, provider: str) -> Call:
        if rows in ("e4m3", "bf16"):
            pool, indices = getattr(self.pools, rows), self.rows.indices()
            lens, seen = self.rows.picked_lens + WINDOW, self.rows.window_lens
            return lambda i: mla_kernels.sparse_mla(
                self.query[:, None], pool, None, indices[i], pool, lens, seen, out=self.out[:, None],
                bmm1_scale=self.scale, sinks=self.sinks, kv_layout="NHD", provider=provider,
            )  # fmt: skip
        with_kvcache = functools.partial(flash_mla.flash_mla_with_kvcache, provider=provider)
        sparse_fwd = functools.partial(flash_mla.flash_mla_sparse_fwd, provider=provider)
        calls = with_kvcache, sparse_fwd, lambda: (None, None)
        return self.over(rows, Stock(*calls), self.query, self.sinks, self.out)

    def flashmla(self, rows: str) -> Call | None:
        """What vLLM calls for such rows; None where it needs a gather that is not there, or has no such rows.

        For full-width rows, which vLLM does not have: decode on the same values as 584-byte rows, prefill on BF16
        rows that were gathered before. Of vLLM's own rows, a prefill's gather is counted.
        """
        if rows == "512" and self.kind == "decode":
            return None
        arguments = self.stock, self.padded, self.padded_sinks, self.padded_out
        if rows in ("576", "512") or (rows == "656" and (self.kind == "decode" or self.heads < 32)):
            return self.over(rows, *arguments)
        if self.kind == "decode":
            return self.over("584", *arguments)
        if rows in ("e4m3", "bf16") or (rows == "584" and self.rows.gathered is None):
            return self._sparse_fwd(self.pools.bf16.view(-1, 1, 512), self.rows, *arguments)
        gather = {"584": self._gather_584, "656": self._gather_656}[rows]
        if self.rows.gathered is None or getattr(self.stock, f"gather_{rows}") is None:
            return None
        space = torch.empty(PROMPT // (4 if rows == "584" else 1) + PREFILL_TOKENS + 2 * WINDOW, self.key_dim,
                            dtype=torch.bfloat16, device=DEVICE)  # fmt: skip
        prepare = gather(space)
        attend = self._sparse_fwd(space[:, None], self.rows.gathered, *arguments)
        return lambda i: (prepare(i), attend(i))

    def over(
        self, rows: str, module: Stock, query: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor
    ) -> Call:
        """Of FlashMLA's two calls the one that reads these rows in place."""
        if rows == "576":
            return self._sparse_fwd(self.pools.rows_576, self.rows, module, query, sinks, out)
        if rows == "512":
            return self._sparse_fwd(
                self.pools.bf16.view(-1, 1, 512), self.rows.gathered or self.rows, module, query, sinks, out
            )
        plan = module.get_mla_metadata()[0]  # made by the first call, shared by the others, as vLLM does in a step
        pool, of = getattr(self.pools, f"rows_{rows}"), self.rows
        common = dict(
            q=query[:, None], k_cache=pool, block_table=None, cache_seqlens=None, head_dim_v=VALUE_DIM,
            tile_scheduler_metadata=plan, softmax_scale=self.scale, is_fp8_kvcache=True, out=out[:, None],
        )  # fmt: skip
        window, picked = of.window[:, :, None].contiguous(), of.picked[:, :, None].contiguous()
        if rows == "656":  # FlashMLA takes no lengths there: rows that are missing are -1
            column = torch.arange(picked.shape[-1], device=DEVICE)
            picked = picked.masked_fill((column >= of.picked_lens[:, None])[:, None], -1)
            return lambda i: module.flash_mla_with_kvcache(**common, indices=picked[i])
        return lambda i: module.flash_mla_with_kvcache(
            **common, indices=window[i], topk_length=of.window_lens, attn_sink=sinks, extra_k_cache=pool,
            extra_indices_in_kvcache=picked[i], extra_topk_length=of.picked_lens,
        )  # fmt: skip

    def _sparse_fwd(
        self, kv: torch.Tensor, rows: Rows, module: Stock, query: torch.Tensor, sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> Call:  # fmt: skip
        indices = rows.packed()
        lens = None if int(rows.lens.min()) == indices.shape[-1] else rows.lens
        return lambda i: module.flash_mla_sparse_fwd(
            q=query, kv=kv, indices=indices[i, :, None], sm_scale=self.scale, attn_sink=sinks, topk_length=lens,
            out=out,
        )  # fmt: skip

    def _gather_584(self, space: torch.Tensor) -> Call:
        """As vLLM's layer: compressed rows first, behind them those of the windows."""
        rows, pool, out = self.rows, self.pools.rows_584.squeeze(2), space[None]
        last = rows.own.shape[1] * PAGE
        compressed, own = lengths(last // 4), lengths(last)
        windows = lengths(min(last, self.tokens + WINDOW - 1))

        def gather(i: int) -> None:
            for lens, last_of, table, offset in ((compressed, None, rows.compressed, 0),
                                                 (own, windows, rows.own, last // 4)):  # fmt: skip
                self.stock.gather_584(out, pool, seq_lens=lens, gather_lens=last_of, block_table=table[i : i + 1],
                                      block_size=PAGE, offset=offset)  # fmt: skip

        return gather

    def _gather_656(self, space: torch.Tensor) -> Call:
        table, pool = self.rows.compressed, self.pools.rows_656.squeeze(2)
        last, start = table.shape[1] * PAGE, lengths(0)
        space, lens = space[:last], lengths(last)
        return lambda i: self.stock.gather_656(pool, space, table[i : i + 1], lens, start, 1)

    def without_sinks(self, rows: str) -> Callable[[], torch.Tensor]:
        """What our kernels make of the first call's rows if there are no sinks."""

        def output() -> torch.Tensor:
            same = copy.copy(self)
            same.sinks, same.out = None, torch.empty_like(self.out)
            same.ours(rows, flash_mla.pick_provider(self.query.device))(0)
            return same.out

        return output

    def difference(self, ours: Call, flashmla: Call) -> float:
        """Of the outputs of both, relative; outputs of tokens of different lengths count alike."""
        self.out.fill_(float("nan"))
        ours(0), flashmla(0)
        truth = self.padded_out[:, : self.heads].float()
        apart = (self.out.float() - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
        return float(apart.max())
