# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""MLA_KERNELS_SPARSE, the sparse MLA of DeepSeek V3.2 and GLM-5 over 576-wide rows and
of GLM-5.3-Flash over 512-wide ones, as far as every release has it alike: what it is
and refuses. `sparse_mla_attention` has its two ways to attend, `sparse_mla_backend` the
rest."""

from typing import ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend

SPARSE_MLA = "MLA_KERNELS_SPARSE"
PAGE = 64
# Values of a row, and those of them that are rotated. The others are 512 in both.
_ROWS = {576: 64, 512: 0}
_WIDE = ("auto", "bfloat16")
# Of GLM-5 vLLM takes `auto` for `fp8_e4m3` on compute capability 10.x (0.33.0).
CACHE_DTYPES = (*_WIDE, "fp8_ds_mla", "fp8", "fp8_e4m3")
# In --additional-config: prefills read their rows in place, or from a workspace.
PREFILL = "sparse_mla_prefill"
_PREFILLS = ("in_place", "workspace")
# Where backends can say that they serve decode context parallelism (0.33.0),
# FLASHMLA_SPARSE does, and so does this one.
_HAS_DCP = hasattr(AttentionBackend, "supports_dcp")


class SparseMLABackendMixin:
    """What it is and refuses, for a class of vLLM's `AttentionBackend`.

    Every token of a batch, decode or prefill, is one call over the rows in place, with
    as many heads as the GPU has: no padding to 64, and none of FLASHMLA_SPARSE's
    workspace of BF16 rows. PREFILL brings that back, to compare with. On 0.33.0 and
    Hopper short prompts have vLLM's dense attention instead.

    With the drop-in FLASHMLA_SPARSE has the same kernels on Hopper, in the calls where
    they are at least as fast. So vLLM's own backends come first, this one's series is
    applied on request only, and it is the last from which vLLM chooses.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        # vLLM asks for this very name before it takes `fp8`, or `fp8_e4m3`, to mean the
        # 656-byte rows.
        return "FLASHMLA_SPARSE"

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(_ROWS)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_combination(cls, *args: object) -> str | None:
        """vLLM asks when it makes a layer, before it reads weights."""
        capability = args[-1]
        assert isinstance(capability, DeviceCapability)
        found = capability.as_version_str()
        if not cls.supports_compute_capability(capability):
            return (
                f"{SPARSE_MLA} needs a GPU of compute capability 8.0 or newer, and "
                f"this one has {found}."
            )
        config = get_current_vllm_config()
        if (why := refusal(config)) or current_platform.support_deep_gemm():
            return why
        if not getattr(config.model_config.hf_text_config, "qk_rope_head_dim", None):
            return (
                f"{SPARSE_MLA} serves rows without RoPE (GLM-5.3-Flash) only where "
                "DeepGEMM computes the indexer's scores, and that does not serve this "
                f"GPU (compute capability {found})."
            )
        if config.parallel_config.decode_context_parallel_size > 1:
            return (
                f"{SPARSE_MLA} cannot put the picks of several GPUs together on this "
                f"one (compute capability {found}), for which vLLM has no kernel; "
                "leave --decode-context-parallel-size at 1."
            )
        return None


def verify_config(vllm_config: VllmConfig) -> None:
    """Refuse what MLA_KERNELS_SPARSE cannot serve when it is asked for, before a model
    that would fail in words of its own is made.

    Raises:
        ValueError: one sentence.
    """
    backend = vllm_config.attention_config.backend
    if backend and backend.name == SPARSE_MLA and (why := refusal(vllm_config)):
        raise ValueError(why)


def refusal(config: VllmConfig) -> str | None:
    """Why MLA_KERNELS_SPARSE cannot serve this configuration on any GPU, a sentence, or
    None."""
    # Not at the top: this module is imported for every model, also where there is no
    # Triton.
    from vllm.third_party.mla_kernels import MAX_HEADS

    model, cache = config.model_config, config.cache_config
    hf_config = model.hf_text_config
    indexed = hasattr(hf_config, "index_topk")
    # HY V4 would be served with rows as wide, and without its sinks.
    sinks = getattr(hf_config, "learnable_sink", False)
    head_size = model.get_head_size()
    rotated = getattr(hf_config, "qk_rope_head_dim", None)
    if (head_size, rotated) not in _ROWS.items() or not indexed or sinks:
        return (
            f"{SPARSE_MLA} serves models with an indexer, without sinks, and with "
            "cache rows of 576 values (DeepSeek V3.2, GLM-5) or of 512 without RoPE "
            f"(GLM-5.3-Flash), and {model.architecture} is none."
        )
    if getattr(hf_config, "q_lora_rank", None) is None:
        return (
            f"{SPARSE_MLA} serves models whose indexer reads the compressed query, and "
            "this one's configuration has no q_lora_rank."
        )
    if cache.cache_dtype not in CACHE_DTYPES:
        return (
            f"{SPARSE_MLA} has the cache dtypes auto, bfloat16 and fp8_ds_mla (or fp8 "
            f"or fp8_e4m3, the same), not {cache.cache_dtype}; pass one of them as "
            "--kv-cache-dtype."
        )
    if not rotated and cache.cache_dtype not in _WIDE:
        return (
            f"{SPARSE_MLA} serves rows without RoPE (GLM-5.3-Flash) in BF16 only, not "
            f"in {cache.cache_dtype}; pass --kv-cache-dtype bfloat16."
        )
    if cache.user_specified_block_size and cache.block_size % PAGE:
        return (
            f"{SPARSE_MLA} reads pages of {PAGE} tokens, so --block-size must be a "
            f"multiple of {PAGE}, and is {cache.block_size}."
        )
    heads = model.get_num_attention_heads(config.parallel_config)
    if heads > MAX_HEADS:
        return (
            f"{SPARSE_MLA} has at most {MAX_HEADS} heads on a GPU, and this model has "
            f"{heads}; raise --tensor-parallel-size."
        )
    if getattr(config.attention_config, "hisparse_config", None):  # from 0.33.0 on
        return f"{SPARSE_MLA} reads rows in GPU memory only; leave HiSparse off."
    if (prefill := _prefill(config)) not in _PREFILLS:
        return (
            f"{SPARSE_MLA} knows no {PREFILL} {prefill!r} in --additional-config; it "
            f"may be {' or '.join(_PREFILLS)}."
        )
    parallel = config.parallel_config
    gpus = parallel.decode_context_parallel_size
    if gpus > 1 and parallel.prefill_context_parallel_size > 1:
        # vLLM merges what GPUs attended to for the same tokens. Here each would have
        # other tokens of a prefill, and but a share of its rows.
        return (
            f"{SPARSE_MLA} does not serve both kinds of context parallelism at once; "
            "leave --decode-context-parallel-size or --prefill-context-parallel-size "
            "at 1."
        )
    if gpus > 1 and not (_HAS_DCP and prefill == "in_place"):
        where = f'with {PREFILL} "{prefill}"' if _HAS_DCP else "in this release of vLLM"
        return (
            f"{SPARSE_MLA} reads whole sequences on each GPU {where}; leave "
            "--decode-context-parallel-size at 1."
        )
    if heads * gpus > MAX_HEADS:  # each GPU attends for all of the group
        return (
            f"{SPARSE_MLA} has at most {MAX_HEADS} heads on a GPU, and "
            f"--decode-context-parallel-size {gpus} gathers {heads * gpus}; lower it "
            "or raise --tensor-parallel-size."
        )
    return None


def _prefill(config: VllmConfig) -> object:
    options = config.additional_config
    return options.get(PREFILL, "in_place") if isinstance(options, dict) else "in_place"


def workspace_rows(config: VllmConfig) -> int:
    """Rows of the workspace for prefills, FLASHMLA_SPARSE's; 0 if they are read in
    place."""
    if _prefill(config) != "workspace":
        return 0
    # On 0.33.0 a setting, and smaller by itself for long contexts.
    attention = config.attention_config
    factor = getattr(attention, "sparse_mla_prefill_workspace_factor", None) or 5
    return factor * config.model_config.max_model_len
