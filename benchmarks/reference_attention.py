"""Has MLA_KERNELS_SPARSE, or the drop-in, served by the float32 reference, and counts: a `worker_extension_cls` of
vLLM's."""

from __future__ import annotations

import contextlib
from typing import Any

from features.drop_in_calls import DropInCalls, calls
from vllm.third_party.mla_kernels import flash_mla


def pick(device: Any) -> str:
    calls["reference"] += 1
    return "reference"


flash_mla.pick_provider = pick  # asked at each call that names no provider
with contextlib.suppress(ImportError):  # of the series drop-in
    from vllm.dsv4_overlay import drop_in

    drop_in._PROVIDER = None
    flash_mla.serves = lambda *call: True  # for any heads and tokens


class ReferenceAttention(DropInCalls):
    """Nothing more than a name that vLLM can import."""
