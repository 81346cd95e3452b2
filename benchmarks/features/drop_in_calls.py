"""Counts the calls of FlashMLA's functions that our kernels serve in a worker, for the drop-in or for
MLA_KERNELS_SPARSE: a `worker_extension_cls` of vLLM's."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

calls: collections.Counter = collections.Counter()


def counted(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)  # raises where FlashMLA goes on
        calls[function.__name__] += 1
        return found

    return call


def watch() -> None:
    """Count from now on, in the patched vLLM and in the wheel."""
    # The drop-in looks its functions up where they are; MLA_KERNELS_SPARSE has them by names of its own.
    drop_in = [f"{package}.third_party.mla_kernels.flash_mla" for package in ("vllm", "vllm_dsv4_overlay")]
    for owner in (*drop_in, "vllm.dsv4_overlay.sparse_mla_attention"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(owner)
            for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
                setattr(module, name, counted(getattr(module, name)))


class DropInCalls:
    def drop_in_calls(self) -> dict[str, int]:
        return dict(calls)

    def watch_compilation(self) -> None:
        """Log what is compiled from now on. vLLM 0.33.0 does so itself, but only after a JIT warm-up."""
        from vllm.utils.jit_monitor import activate

        activate()


watch()  # vLLM imports this before it makes layers and captures graphs
