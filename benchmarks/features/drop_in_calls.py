"""Counts the calls that the drop-in serves in a worker: a `worker_extension_cls` of vLLM's."""

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
    for package in ("vllm", "vllm_dsv4_overlay"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"{package}.third_party.mla_kernels.flash_mla")
            for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
                setattr(module, name, counted(getattr(module, name)))


class DropInCalls:
    def drop_in_calls(self) -> dict[str, int]:
        return dict(calls)


watch()  # vLLM imports this before it makes layers and captures graphs
