# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""The scales of the FP8 cache in what vLLM compares before one server reads rows that
another has written.

A row read under other scales than it was stored with is garbage. NIXL's peers compare a
hash of the configuration, which holds `cache_identity`; stores that find rows by vLLM's
block hashes find none of another identity, since `separate_block_hashes` starts their
chain from it. What has neither is refused.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.dsv4_overlay.config import full_width_fp8, is_full_width
from vllm.dsv4_overlay.scales import load_scales

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_HANDSHAKE = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
_BLOCK_HASHES = (
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
    "MooncakeStoreConnector",
)
_KEEPS_TO_ITSELF = ("DecodeBenchConnector",)
_STRICT = "enforce_handshake_compat"


def check_connectors(vllm_config: "VllmConfig") -> None:
    """Refuse to share rows of the FP8 cache with servers whose scales nothing compares
    with these.

    Raises:
        ValueError: one sentence.
    """
    instead = "or use --kv-cache-dtype bfloat16, whose rows have no scales."
    served = _HANDSHAKE + _BLOCK_HASHES + _KEEPS_TO_ITSELF
    for name, extra in _connectors(vllm_config):
        if name not in served:
            raise ValueError(
                f"{name} compares no scales of the FP8 cache with those of other "
                "servers, whose rows would be "
                f"read as garbage; use {', '.join((*_HANDSHAKE, *_BLOCK_HASHES))}, "
                f"{instead}"
            )
        if name in _HANDSHAKE and not extra.get(_STRICT, True):
            raise ValueError(
                f"{_STRICT} false in --kv-transfer-config leaves the scales of the "
                "FP8 cache uncompared; omit it, "
                f"{instead}"
            )


def _connectors(vllm_config: "VllmConfig") -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and extra configuration of each connector; a name of another module is no
    name of vLLM's."""
    cache_config, transfer = vllm_config.cache_config, vllm_config.kv_transfer_config
    # It replaces what transfer names, later.
    if getattr(cache_config, "kv_offloading_size", None) is not None:
        if cache_config.kv_offloading_backend != "native":
            yield f"--kv-offloading-backend {cache_config.kv_offloading_backend}", {}
        return
    if transfer is None or transfer.kv_connector is None:
        return
    rest = transfer.kv_connector_extra_config
    pending = [(transfer.kv_connector, transfer.kv_connector_module_path, rest)]
    while pending:
        name, module, extra = pending.pop()
        if name == "MultiConnector" and not module:
            for child in extra.get("connectors", []):
                rest = child.get("kv_connector_extra_config", {})
                pending.append(
                    (child["kv_connector"], child.get("kv_connector_module_path"), rest)
                )
        else:
            yield f"{module}.{name}" if module else name, extra


def cache_identity(vllm_config: "VllmConfig") -> str:
    """The cache dtype, with a digest of the layers' scales where one of them is not
    1.0."""
    dtype = str(vllm_config.cache_config.cache_dtype)
    if not full_width_fp8(vllm_config):
        return dtype
    # Not of queries: no row depends on these.
    scales = {
        name: scale
        for name, scale in load_scales(vllm_config).values.items()
        if name.endswith(".k_scale") and scale != 1.0
    }
    if not scales:
        return dtype
    as_bytes = json.dumps(scales, sort_keys=True).encode()
    return f"{dtype}:{hashlib.sha256(as_bytes).hexdigest()}"


def separate_block_hashes(
    vllm_config: "VllmConfig", hash_function: Callable[[Any], bytes]
) -> None:
    """Start the chain of block hashes from this cache's identity, where blocks may
    leave this server."""
    if vllm_config.kv_transfer_config is None or not is_full_width(vllm_config):
        return
    from vllm.v1.core import kv_cache_utils  # what is here is imported for every model

    start = (kv_cache_utils.NONE_HASH, cache_identity(vllm_config))
    kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(hash_function(start))
