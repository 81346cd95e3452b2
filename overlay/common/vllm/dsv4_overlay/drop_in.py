# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""Under stock flags, over the stock cache: FlashMLA's sparse calls by our kernels on
Hopper, where they are at least as fast; FlashMLA has every other call.

`install` replaces the two functions where all of vLLM's callers import them from.
V4's layers offer their prefills to `prefill` before they gather rows for one of these.
Layers ask `padded_heads` for their width when they are made, which is in a worker, with
CUDA initialised and before any weight is loaded: that decides for the process. A call
before that, or without it, is FlashMLA's.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import torch
import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.config.cache import CacheDType
from vllm.logger import init_logger

logger = init_logger(__name__)

SETTING, VARIABLE = "dsv4_drop_in", "VLLM_DSV4_DROP_IN"
_WIDTHS_FOUND = "dsv4_drop_in_widths"
_FOUND = (_WIDTHS_FOUND, "dsv4_checkpoint_found")  # ours, and quantised_linears'
_SCALES, _FP8_EXPERTS = "dsv4_scales", "dsv4_fp8_experts"
_OPTIONS = (SETTING, _SCALES, _FP8_EXPERTS)
_PROVIDER = "sm90"
# The rows under the calls of a layer, by those of its cache: V4.1 decodes over 584-byte
# rows and prefills over BF16, V4 only where `prefill` declines; V3.2 pads either call
# by itself.
_ROWS_OF_CALLS = {
    "v4": ("v4",),
    "v41": ("v4", "bf16"),
    "v32": ("v32",),
    "bf16": ("bf16-576",),
}
# vLLM's fused insert of V4 writes a query of 8, 16, 32, 64 or 128 heads.
_WIDTHS = (8, 16, 32)
_CHECKED_HEADS = (8, 32, 128)
_CHECKED_ROWS = ("v4", "v32", "bf16", "bf16-576")
_MARK = "_dsv4_drop_in"
# Up to so many heads of q, `prefill` takes no longer than gathering rows, widening them
# to BF16 and attention over those: measured on an H200 as 1.6 to 1.7 times as fast with
# 8 and 16, 1.07 to 1.10 times with 32, and 0.83 to 0.87 times with more
# (benchmarks/results/stock_rows_h200.json).
_PREFILL_HEADS = 32
# Of one index table of `prefill`. Memory is measured as stock vLLM does it, without
# them, so that the cache keeps its size: a step holds up to three, for window-only,
# C128A and C4A layers. Up to 0.26.0 stock's own table of a prefill is not measured
# either, and takes 260 MiB for 8192 tokens of a million.
_TABLE_BYTES = 32 << 20

_installed = False
_asked_for: bool | None = None  # by the settings of the process's first model
_device: torch.device | None = None  # on which our kernels serve
_narrow = False  # some layer relies on fewer heads than FlashMLA takes
_warned: set[str] = set()  # about what


def install(namespace: dict[str, Any]) -> None:
    """Replace the two sparse calls of `vllm/v1/attention/ops/flashmla.py`.

    Does nothing where that was done, be it by this module under another name.
    """
    global _installed
    for name, attempt in (
        ("flash_mla_with_kvcache", _with_kvcache),
        ("flash_mla_sparse_fwd", _sparse_fwd),
    ):
        stock = namespace[name]
        if not hasattr(stock, _MARK):
            namespace[name] = _before(stock, attempt)
            _installed = True


def padded_heads(heads: int, stock: int, rows: str = "v4") -> int:
    """How many heads a layer should give q.

    Args:
        heads: that it has on this GPU.
        stock: that it would pad them to for FlashMLA.
        rows: of its cache: "v4", whose prefills are offered to `prefill`, "v41", "v32",
            or "bf16" for `flash_mla_sparse_fwd` over V3.2's alone.

    Returns:
        8, 16 or 32 if our kernels serve this GPU and so few heads for any number of
        tokens; `stock` otherwise.

    Raises:
        ValueError: the setting is not one that there is (`switched_on`), or not that of
            the process's first model. One sentence.
    """
    global _narrow
    if not _installed or not torch.cuda.is_initialized():
        return stock
    if (vllm_config := get_current_vllm_config_or_none()) is None:
        return stock
    config = vllm_config.additional_config
    _decide(config)
    # On another GPU of this process nothing was checked, and calls are FlashMLA's.
    elsewhere = _device is None or _device.index != torch.cuda.current_device()
    if elsewhere:
        return stock
    if not isinstance(config, dict):
        _warn_once(
            "heads",
            "Heads stay padded for FlashMLA: additional_config is a %s, not a dict.",
            type(config).__name__,
        )
        return stock
    for width in _WIDTHS:
        if heads <= width < stock and all(
            _kernels().serves(name, width) for name in _ROWS_OF_CALLS[rows]
        ):
            _narrow = True
            # vLLM hashes this: up to 0.22.1 it compiles V4's layers with their width,
            # and would load what was compiled for another.
            config.setdefault(_WIDTHS_FOUND, {})[rows] = width
            return width
    return stock


def prefill(
    layer: torch.nn.Module,
    q: torch.Tensor,
    output: torch.Tensor,
    compressed_metadata: Any,
    swa_metadata: Any,
) -> bool:
    """Attention of the prefills of a step over the 584-byte rows where they are.

    Args:
        layer: V4's attention layer.
        q, output: BF16 `[tokens, heads, 512]`, from the first token of the prefills on;
            graph padding behind the last is left as it is.
        compressed_metadata: vLLM's of the layer's compressed cache; None if it has
            none.
        swa_metadata: of its window.

    Returns:
        Whether `output` is written. If not, vLLM has to go on: gather rows, and call
        `flash_mla_sparse_fwd`.
    """
    if _device is None or not _is_query(q, 3) or q.shape[1] > _PREFILL_HEADS:
        return False
    from ..third_party.mla_kernels.interface import SWA_COLUMNS
    from . import index_table

    if (
        layer.window_size != SWA_COLUMNS
        # The tokens of an image, from 0.30.0 on, see those behind them too.
        or getattr(swa_metadata, "prefill_left_visible", None) is not None
        or (q.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return False
    first, tokens = swa_metadata.num_decode_tokens, swa_metadata.num_prefill_tokens
    columns = index_table.compressed_columns(layer, compressed_metadata)
    size = _TABLE_BYTES // (4 * (SWA_COLUMNS + columns))
    # One table can be shared by layers. Attention over so many rows that it takes more
    # is long, and to build them again is not.
    make = index_table.of_step if tokens <= size else index_table.build
    for start in range(0, tokens, size):
        part = slice(start, min(start + size, tokens))
        table = make(
            layer,
            swa_metadata,
            compressed_metadata,
            first + part.start,
            part.stop - part.start,
        )
        rest = {
            "k_cache": layer.swa_cache_layer.kv_cache.unsqueeze(-2),
            "block_table": None,
            "cache_seqlens": None,
            "head_dim_v": 512,
            "tile_scheduler_metadata": None,
            "softmax_scale": layer.scale,
            "is_fp8_kvcache": True,
            "indices": table.indices[:, None, :SWA_COLUMNS],
            "topk_length": table.visible,  # no more count than there are columns
        }
        if compressed_metadata is not None:
            rest |= {
                "extra_k_cache": layer.kv_cache.unsqueeze(-2),
                "extra_indices_in_kvcache": table.indices[:, None, SWA_COLUMNS:],
                "extra_topk_length": table.compressed,
            }
        function, out = _kernels().flash_mla_with_kvcache, output[part, None]
        if _served(function, q[part, None], layer.attn_sink, out, rest) is None:
            return False
    return True


def switched_on(additional_config: object) -> bool:
    """Whether neither VLLM_DSV4_DROP_IN (0 or 1) nor `dsv4_drop_in` in
    --additional-config (true or false) switches the drop-in off.

    Raises:
        ValueError: one of them says something else, or --additional-config has an
            option of the overlay that there is not, or whose series is not applied.
            One sentence.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"{VARIABLE} is {value!r}; it may be 1, or 0, which leaves sparse "
            "attention to FlashMLA."
        )
    options = additional_config if isinstance(additional_config, dict) else {}
    for name in options:
        if str(name).startswith("dsv4_") and name not in (*_OPTIONS, *_FOUND):
            raise ValueError(
                f"--additional-config has no option {name}; those of the overlay are "
                f"{', '.join(_OPTIONS[:-1])} and {_OPTIONS[-1]}."
            )
    for name, series, applied in (
        (_SCALES, "full-width", _has_full_width),
        (_FP8_EXPERTS, "fp8-experts", _has_fp8_experts),
    ):
        if name in options and not applied():
            raise ValueError(
                f"{name} in --additional-config needs the series {series}, which is "
                "not applied."
            )
    setting = options.get(SETTING)
    if not (setting is None or isinstance(setting, bool)):
        raise ValueError(
            f"{SETTING} in --additional-config is {setting!r}; it may be true, or "
            "false, which leaves sparse attention to FlashMLA."
        )
    return value != "0" and setting is not False


def _has_full_width() -> bool:
    return "fp8_per_tensor" in get_args(CacheDType)  # the name that it adds


def _has_fp8_experts() -> bool:
    # Not by this module's package, which the wheel has under another name.
    return (Path(vllm.__file__).parent / "dsv4_overlay/fp8_experts.py").is_file()


def _decide(additional_config: object) -> None:
    """Once a process: whether our kernels serve the current GPU; one line in the log
    says so, or why not.

    Raises:
        ValueError: they do not, and the variable is 1; or the settings are not those
            that decided. One sentence.
    """
    global _asked_for
    on = switched_on(additional_config)
    if _asked_for not in (None, on):
        raise ValueError(
            f"The drop-in was switched {'on' if _asked_for else 'off'} by an earlier "
            f"model of this process; run the one that has it {'on' if on else 'off'} "
            "in a process of its own."
        )
    if _asked_for is None:
        _settle(on)  # or raises, and then for another model of the process too
        _asked_for = on


def _settle(on: bool) -> None:
    """As `_decide`, for the first model."""
    global _device
    if not on:
        logger.info(
            "FlashMLA has its sparse calls: %s or %s in --additional-config "
            "switched the drop-in off.",
            VARIABLE,
            SETTING,
        )
        return
    from ..third_party.mla_kernels import checks, native, sm90
    from . import index_table

    device = torch.device("cuda", torch.cuda.current_device())
    if problem := sm90.misfit(torch.cuda.get_device_capability(device)):
        _refuse_if_asked_for(problem)
        logger.info(
            "FlashMLA has its sparse calls; the drop-in (%s) does not: %s.",
            native.LIBRARY,
            problem,
        )
        return
    try:
        for rows in _CHECKED_ROWS:
            for heads in _CHECKED_HEADS:
                what = f"check of {rows} rows with {heads} heads"
                checks.check_flash_mla(_PROVIDER, rows, heads)
        what = "warm-up"
        index_table.warm_up(device)
        _kernels().warm_up(device)
    except Exception as error:  # whatever it is, FlashMLA can serve
        _refuse_if_asked_for(f"its {what} failed ({error})")
        # Unless it is an error, as an illegal access, after which nothing runs on the
        # GPU: that is raised here, and not by what is loaded next.
        torch.cuda.synchronize()
        logger.warning(
            "FlashMLA has its sparse calls; the drop-in (%s) failed its %s: %s",
            native.LIBRARY,
            what,
            error,
        )
        return
    _device = device
    logger.info(
        "The drop-in (%s) has FlashMLA's sparse calls where it is at least as fast; "
        "its check passed. %s=0 gives them back.",
        native.LIBRARY,
        VARIABLE,
    )


def _refuse_if_asked_for(problem: str) -> None:
    if os.environ.get(VARIABLE) == "1":
        raise ValueError(
            f"{VARIABLE}=1 asks for the drop-in, which cannot serve here: {problem}; "
            "without the variable FlashMLA serves where the drop-in cannot."
        )


@functools.cache
def _kernels() -> ModuleType:
    # Not at the top: this module is imported where there may be no Triton.
    from ..third_party.mla_kernels import flash_mla

    return flash_mla


def _before(stock: Callable, attempt: Callable) -> Callable:
    """`stock`, but for the calls that `attempt` returns something for."""

    @functools.wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _device is not None:
            result = attempt(stock, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return stock(*args, **kwargs)

    setattr(call, _MARK, True)
    return call


def _with_kvcache(
    stock: Callable,
    q: torch.Tensor | None = None,
    k_cache: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    head_dim_v: int | None = None,
    tile_scheduler_metadata: object = None,
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
    *more: Any,
    **unknown: Any,
) -> Any:
    if more or indices is None or not _is_query(q, 4):
        return NotImplemented
    rest = {
        "k_cache": k_cache,
        "block_table": block_table,
        "cache_seqlens": cache_seqlens,
        "head_dim_v": head_dim_v,
        "tile_scheduler_metadata": tile_scheduler_metadata,
        "num_splits": num_splits,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "is_fp8_kvcache": is_fp8_kvcache,
        "indices": indices,
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "topk_length": topk_length,
        "extra_topk_length": extra_topk_length,
        **unknown,
    }
    flash_mla, heads = _kernels(), q.shape[2]
    rows = "v4" if q.shape[3] == 512 else "v32"
    if not unknown and flash_mla.serves(rows, heads, q.shape[0] * q.shape[1]):
        served = _served(flash_mla.flash_mla_with_kvcache, q, attn_sink, out, rest)
        if served is not None:
            return served
    if not _narrow or heads in (64, 128):
        return NotImplemented
    wide, lse = _padded(stock, q, 64 if heads <= 64 else 128, attn_sink, rest)
    return _cut(wide, heads, out), lse[:, :heads]


def _sparse_fwd(
    stock: Callable,
    q: torch.Tensor | None = None,
    kv: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    sm_scale: float | None = None,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *more: Any,
    **unknown: Any,
) -> Any:
    if more or not _is_query(q, 3):
        return NotImplemented
    rest = {
        "kv": kv,
        "indices": indices,
        "sm_scale": sm_scale,
        "d_v": d_v,
        "topk_length": topk_length,
        **unknown,
    }
    flash_mla, (tokens, heads, width) = _kernels(), q.shape
    rows = "bf16" if width == 512 else "bf16-576"
    if not unknown and flash_mla.serves(rows, heads, tokens):
        served = _served(flash_mla.flash_mla_sparse_fwd, q, attn_sink, out, rest)
        if served is not None:
            return served
    if not _narrow or heads % 64 == 0:
        return NotImplemented
    wide, *others = _padded(stock, q, -(-heads // 64) * 64, attn_sink, rest)
    return _cut(wide, heads, out), *(x[:, :heads] for x in others)


def _is_query(q: torch.Tensor | None, dims: int) -> bool:
    return (
        isinstance(q, torch.Tensor)
        and q.dim() == dims
        and q.shape[-1] in (512, 576)
        and q.dtype == torch.bfloat16
        and q.device == _device
    )


def _served(
    function: Callable,
    q: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor | None,
    rest: dict[str, Any],
) -> tuple | None:
    """What our `function` returns; None if the arguments are not for it."""
    if sink is not None and sink.shape[0] > q.shape[-2]:
        sink = sink[: q.shape[-2]]  # up to 0.22.1 it is 64 long in any case
    try:
        return function(q, attn_sink=sink, out=out, provider=_PROVIDER, **rest)
    except ValueError as error:  # it says so before it does anything
        _warn_once(
            function.__name__,
            "FlashMLA has the calls of %s that the drop-in refuses; the first: %s",
            function.__name__,
            error,
        )
        return None


def _warn_once(about: str, line: str, *args: object) -> None:
    """On every rank, and without keeping an error, which has the tensors of its call;
    vLLM's warning_once does neither."""
    if about not in _warned:
        _warned.add(about)
        logger.warning(line, *args)


def _padded(
    stock: Callable,
    q: torch.Tensor,
    width: int,
    sink: torch.Tensor | None,
    rest: dict[str, Any],
) -> tuple:
    """What FlashMLA returns for q of `width` heads, those behind its own zero."""
    wide = q.new_zeros(*q.shape[:-2], width, q.shape[-1])
    wide[..., : q.shape[-2], :] = q
    if sink is not None:
        missing = max(0, width - sink.shape[0])
        sink = torch.nn.functional.pad(sink[:width], (0, missing))
    return stock(q=wide, attn_sink=sink, **rest)


def _cut(wide: torch.Tensor, heads: int, out: torch.Tensor | None) -> torch.Tensor:
    return wide[..., :heads, :] if out is None else out.copy_(wide[..., :heads, :])
