# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""Kernels for DeepSeek V4 over a full-width (512-wide, BF16 or per-tensor E4M3) KV
cache, and FlashMLA's sparse calls over the rows that vLLM's caches hold.

Needs torch and triton, not vLLM: imports inside the package are relative, so that it
can be tested alone and lands unchanged in `vllm/third_party/`.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from . import interpreter  # noqa: F401  (patches Triton's interpreter)

from . import insert, sm90  # noqa: E402, F401  (register torch.ops.mla_kernels.*)
from .compressor import compress_norm_rope_store  # noqa: E402
from .expert_sum import expert_sum  # noqa: E402
from .flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache  # noqa: E402
from .indexer import (  # noqa: E402
    indexer_scores,
    indexer_topk,
    paged_indexer_scores,
)
from .interface import MAX_HEADS, PROVIDERS, pick_provider, sparse_mla  # noqa: E402
from .packed_compressor import save_compress_store  # noqa: E402
from .slots import request_rows_to_slots  # noqa: E402
from .sparse_index import SparseIndexTable, build_sparse_index_table  # noqa: E402

__all__ = [
    "MAX_HEADS",
    "PROVIDERS",
    "SparseIndexTable",
    "build_sparse_index_table",
    "compress_norm_rope_store",
    "expert_sum",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "indexer_scores",
    "indexer_topk",
    "paged_indexer_scores",
    "pick_provider",
    "request_rows_to_slots",
    "save_compress_store",
    "sparse_mla",
]
