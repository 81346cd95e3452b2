# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""What `--attention-backend` and `--kv-cache-dtype` mean for DeepSeek V4, decided
before any weight is loaded."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import vllm
from vllm.dsv4_overlay.drop_in import switched_on
from vllm.dsv4_overlay.scales import OPTION, check_scales, scales_file
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.platforms.interface import DeviceCapability

logger = init_logger(__name__)

# Drafts of DeepSeek V4's own layers, by method.
_DRAFT_LAYERS = {"mtp": "DeepSeekV4MTPModel", "dspark": "DSparkDraftModel"}
_ARCHITECTURES = ("DeepseekV4ForCausalLM", _DRAFT_LAYERS["mtp"])
_WITH_IMAGES = "DeepseekV4ForConditionalGeneration"  # from 0.30.0 on
_FULL_CACHE = AttentionBackendEnum.FLASHINFER_MLA_SPARSE_DSV4
_FLASHMLA = AttentionBackendEnum.FLASHMLA_SPARSE_DSV4
# From 0.23.0 on the name is vLLM's own, for Blackwell and for more models; the overlay
# adds Hopper.
NAME_IS_OURS = _FULL_CACHE.value.startswith("vllm.dsv4_overlay.")
# What --kv-cache-dtype may say under the full-width backend, and the name it goes by
# from then on.
ACCEPTED_DTYPES = {
    "auto": "bfloat16",
    "bfloat16": "bfloat16",
    "fp8": "fp8_per_tensor",
    "fp8_e4m3": "fp8_per_tensor",
    "fp8_per_tensor": "fp8_per_tensor",
}
_STORAGE_DTYPES = {"bfloat16": torch.bfloat16, "fp8_per_tensor": torch.float8_e4m3fn}
# What vLLM's own backend reads on compute capability 12.x: FlashMLA's rows by any of
# these names.
_PACKED_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla")
# What the kernels are written for; all released checkpoints have these.
_DIMENSIONS = {"head_dim": 512, "qk_rope_head_dim": 64, "sliding_window": 128}
# Drafts that are DeepSeek V4's own layers, or need none; those of others would get this
# cache or backend.
_DRAFTS = ("mtp", "ngram", "ngram_gpu", "suffix")
if not NAME_IS_OURS:
    _DRAFTS += ("dspark",)
_HOPPER, _BLACKWELL = (9, 0), ((10, 0), (10, 3))
_PROVIDER_VARIABLE = "VLLM_DSV4_PROVIDER"
_SELF_TEST = "vllm.dsv4_overlay.selftest"


def is_full_cache(cache_dtype: str) -> bool:
    """Whether a DeepSeek V4 model with this (resolved) cache dtype runs on the
    full-width cache."""
    return cache_dtype in _STORAGE_DTYPES


def storage_dtype(cache_dtype: str) -> torch.dtype:
    """Element type of a full-width cache row: bfloat16 or float8_e4m3fn."""
    return _STORAGE_DTYPES[cache_dtype]


def is_full_width(vllm_config: "VllmConfig") -> bool:
    """Whether the resolved configuration has a DeepSeek V4 model on the full-width
    cache; of other models `bfloat16` is vLLM's own."""
    return vllm_config.model_config.architecture in _ARCHITECTURES and (
        is_full_cache(vllm_config.cache_config.cache_dtype)
        or full_width_fp8(vllm_config)
    )


def full_width_fp8(vllm_config: "VllmConfig") -> bool:
    """Whether the configuration, resolved or not, has a DeepSeek V4 model on the
    full-width cache in FP8."""
    cache_dtype, backend = (
        vllm_config.cache_config.cache_dtype,
        vllm_config.attention_config.backend,
    )
    return (
        vllm_config.model_config.architecture in _ARCHITECTURES
        and (backend is _FULL_CACHE or is_full_cache(cache_dtype))
        and ACCEPTED_DTYPES.get(cache_dtype) == "fp8_per_tensor"
        and not _packed()
    )


def provider() -> str | None:
    """The provider of `sparse_mla` that VLLM_DSV4_PROVIDER asks for; None lets
    `sparse_mla` pick."""
    return os.environ.get(_PROVIDER_VARIABLE) or None


def vllm_serves_itself() -> bool:
    """Whether on this GPU the full-width backend is vLLM's own, which is so on
    Blackwell from 0.23.0 on."""
    capability = _capability()
    return not NAME_IS_OURS and capability is not None and capability.major in (10, 12)


def _packed() -> bool:
    """Whether on this GPU the backend is vLLM's own, on FlashMLA's rows whatever the
    name of the cache dtype."""
    return vllm_serves_itself() and _capability().major == 12


def verify_and_update_config(vllm_config: "VllmConfig") -> None:
    """Resolve the backend and the cache dtype of a DeepSeek V4 model in place; leave
    every other model alone.

    The full-width backend is chosen by its name, or by a cache dtype that only it has
    (`bfloat16`, `fp8_per_tensor`). Afterwards `cache_config.cache_dtype` alone tells
    which cache is in use; the backend's name does not reach draft models.

    Raises:
        ValueError: the combination, the GPU, the model's dtype, dimensions or head
            count, the kind of parallelism or of speculation, the provider, the scales
            or the way rows are shared cannot be served, or the setting of the drop-in
            is neither on nor off. One sentence.
    """
    switched_on(vllm_config.additional_config)
    architecture = vllm_config.model_config.architecture
    backend = vllm_config.attention_config.backend
    cache_config = vllm_config.cache_config
    cache_dtype = cache_config.cache_dtype
    itself = vllm_serves_itself()
    if architecture not in _ARCHITECTURES:
        ours = (_FULL_CACHE, _FLASHMLA) if NAME_IS_OURS else (_FULL_CACHE,)
        for option, serves_only_v4 in (
            (
                f"--attention-backend {backend and backend.name}",
                backend in ours and not itself,
            ),
            ("--kv-cache-dtype fp8_per_tensor", cache_dtype == "fp8_per_tensor"),
            # Its layers would be ours by the dtype alone, and what an image sees is
            # wider than our windows.
            (
                "--kv-cache-dtype bfloat16",
                architecture == _WITH_IMAGES
                and cache_dtype == "bfloat16"
                and not itself,
            ),
            (
                f"{OPTION} in --additional-config",
                scales_file(vllm_config) is not None,
            ),
        ):
            if serves_only_v4:
                raise ValueError(
                    f"{option} serves DeepSeek V4 only, and this model is "
                    f"{architecture}; omit it."
                )
        return

    logger.info_once(provenance())
    full_cache = backend is _FULL_CACHE or is_full_cache(cache_dtype)
    packed, fp8 = _packed(), full_width_fp8(vllm_config)
    if scales_file(vllm_config) is not None and not fp8:
        rest = (
            f"; omit it, or use --attention-backend {_FULL_CACHE.name} "
            "--kv-cache-dtype fp8."
        )
        if packed:
            rest = ", which this GPU does not have; omit it."
        raise ValueError(
            f"{OPTION} in --additional-config is for the full-width FP8 cache "
            f"only{rest}"
        )
    if not full_cache:
        return  # stock vLLM, unchanged
    if backend not in (None, _FULL_CACHE):
        raise ValueError(
            f"--kv-cache-dtype {cache_dtype} is the full-width cache of DeepSeek V4, "
            f"which {backend.name} "
            f"cannot read; use --attention-backend {_FULL_CACHE.name}, or fp8_ds_mla "
            "for FlashMLA."
        )
    accepted = _PACKED_DTYPES if packed else tuple(ACCEPTED_DTYPES)
    if cache_dtype not in accepted:
        raise ValueError(
            f"--kv-cache-dtype {cache_dtype} is not served by --attention-backend "
            f"{_FULL_CACHE.name}"
            f"{' on this GPU' * packed}, which accepts {', '.join(accepted)}"
            + ("" if packed else f"; fp8_ds_mla belongs to {_FLASHMLA.name}")
            + "; with auto, the checkpoint's kv_cache_quant_algo is what was asked for."
        )
    if not itself:
        check_machine()
        _check_layers(vllm_config)
    if fp8:
        # Not at the top: it imports this module.
        from vllm.dsv4_overlay.transfer import check_connectors

        check_connectors(vllm_config)
        check_scales(vllm_config)
        if path := scales_file(vllm_config):  # a Ray worker is in another folder
            vllm_config.additional_config = vllm_config.additional_config | {
                OPTION: os.path.abspath(path)
            }
    # A Ray worker whose vLLM lacks the overlay fails at this name; it would take
    # fp8_per_tensor for FlashMLA's.
    vllm_config.attention_config.backend = _FULL_CACHE
    if itself:
        return
    cache_config.cache_dtype = ACCEPTED_DTYPES[cache_dtype]
    logger.info_once(
        "DeepSeek V4 runs on %s with a full-width %s KV cache and %d heads a GPU.",
        _FULL_CACHE.name,
        cache_config.cache_dtype,
        vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config),
    )


def _check_layers(vllm_config: "VllmConfig") -> None:
    """Refuse what the overlay's own layers do not serve."""
    # Not at the top: this module is imported for every model, also where there is no
    # Triton.
    from vllm.third_party.mla_kernels import MAX_HEADS

    model_config = vllm_config.model_config
    if model_config.dtype != torch.bfloat16:
        dtype = str(model_config.dtype).removeprefix("torch.")
        raise ValueError(
            f"{_FULL_CACHE.name} serves models in bfloat16, and --dtype is {dtype}; "
            "omit it."
        )
    for name, value in _DIMENSIONS.items():
        if (found := getattr(model_config.hf_config, name)) != value:
            raise ValueError(
                f"{_FULL_CACHE.name} serves DeepSeek V4 with {name} {value}, and this "
                f"model's is {found}; use "
                f"{_FLASHMLA.name} with --kv-cache-dtype fp8_ds_mla."
            )
    heads = model_config.get_num_attention_heads(vllm_config.parallel_config)
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(
            f"{_FULL_CACHE.name} serves 1 to {MAX_HEADS} attention heads a GPU, and "
            f"this model has {heads}; "
            "raise --tensor-parallel-size."
        )
    cache_config, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if cache_config.user_specified_block_size and cache_config.block_size != 256:
        raise ValueError(
            f"{_FULL_CACHE.name} needs blocks of 256 tokens, and --block-size is "
            f"{cache_config.block_size}; "
            "omit it."
        )
    if (
        parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
        > 1
    ):
        raise ValueError(
            f"{_FULL_CACHE.name} does not serve context parallelism; omit "
            "--decode-context-parallel-size and "
            "--prefill-context-parallel-size, and use --tensor-parallel-size or "
            "--data-parallel-size."
        )
    # vLLM's V4 layers would read neither.
    for option in ("calculate_kv_scales", "kv_cache_dtype_skip_layers"):
        if (
            getattr(cache_config, option, None)
            and ACCEPTED_DTYPES[cache_config.cache_dtype] == "fp8_per_tensor"
        ):
            raise ValueError(
                f"{_FULL_CACHE.name} does not serve --{option.replace('_', '-')}; "
                "omit it: scales come from "
                f"{OPTION} in --additional-config, and python -m "
                "vllm.dsv4_overlay.calibrate measures them."
            )
    if speculative := vllm_config.speculative_config:
        _check_speculation(speculative, cache_config.cache_dtype)


def _check_speculation(speculative: "SpeculativeConfig", cache_dtype: str) -> None:
    """Refuse drafts that would fail, or leave this cache, only after the model is
    loaded."""
    layers = _DRAFT_LAYERS.get(speculative.method)
    draft = speculative.draft_model_config if layers else None
    if speculative.method not in _DRAFTS or (draft and draft.architecture != layers):
        what = draft.architecture if draft else speculative.method
        raise ValueError(
            f"{_FULL_CACHE.name} serves no drafts of {what}, only DeepSeek V4's own "
            "layers, n-grams and suffixes; "
            f"use one of {', '.join(_DRAFTS)}."
        )
    backend = getattr(speculative, "attention_backend", None)
    if backend not in (None, _FULL_CACHE):
        raise ValueError(
            f"attention_backend of --speculative-config is {backend.name}, and drafts "
            "share the model's; omit it."
        )
    dtype = getattr(speculative, "kv_cache_dtype", None)  # from 0.23.0 on
    if dtype is not None:
        resolved = ACCEPTED_DTYPES[cache_dtype]
        if ACCEPTED_DTYPES.get(dtype) != resolved:
            raise ValueError(
                f"kv_cache_dtype of --speculative-config is {dtype}, and drafts share "
                "the model's; omit it."
            )
        # By another name vLLM would choose other layers.
        speculative.kv_cache_dtype = resolved


def check_machine() -> None:
    """Refuse this machine's GPU, or a provider that it cannot run.

    Layers ask again when they are made: a Ray worker gets a configuration that was
    checked on another host.

    Raises:
        ValueError: one sentence.
    """
    from vllm.third_party.mla_kernels import (
        PROVIDERS,
        flashinfer_sparse_mla,
        native,
        sm90,
    )

    capability = _served_capability()
    if provider() not in (None, *PROVIDERS):
        raise ValueError(
            f"{_PROVIDER_VARIABLE}={provider()} is unknown; it may be "
            f"{' or '.join(PROVIDERS)}."
        )
    if provider() == "sm90" and (problem := sm90.misfit(capability)):
        raise ValueError(
            f"{_PROVIDER_VARIABLE}=sm90 needs the native library ({native.LIBRARY}), "
            f"but {problem}."
        )
    chosen = provider() or ("flashinfer" if capability in _BLACKWELL else None)
    if chosen == "flashinfer" and (problem := flashinfer_sparse_mla.misfit(capability)):
        who = (
            f"{_PROVIDER_VARIABLE}=flashinfer"
            if provider()
            else f"{_FULL_CACHE.name} on this GPU"
        )
        raise ValueError(f"{who} needs FlashInfer, but {problem}.")


def falls_back(device: torch.device | str) -> str | None:
    """Why Triton, unasked, serves tensors on `device`, and what to do; None where it
    does not."""
    from vllm.third_party.mla_kernels import pick_provider

    name, reason = pick_provider(device)
    if provider() or name != "triton":
        return None
    return f"attention by Triton, mostly slower than FlashMLA, for {reason}."


def serves(capability: tuple[int, int] | None) -> bool:
    """Whether the full-width cache is served on GPUs of this compute capability."""
    return capability in (_HOPPER, *_BLACKWELL)


def _capability() -> "DeviceCapability | None":
    if not current_platform.is_cuda():
        return None
    # A worker's own GPU, as a host may have several kinds.
    own = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return current_platform.get_device_capability(own)


def _served_capability() -> tuple[int, int]:
    capability = _capability()
    if serves(capability):
        return tuple(capability)
    found = (
        f"compute capability {capability.as_version_str()}"
        if capability
        else "no CUDA GPU"
    )
    if capability and capability.major == 12:
        found += ", where FlashInfer reads its packed 584-byte cache only"
    raise ValueError(
        f"{_FULL_CACHE.name} serves Hopper (compute capability 9.0) and Blackwell "
        "(10.0 and 10.3) GPUs, and this "
        f"machine has {found}; use {_FLASHMLA.name} with --kv-cache-dtype fp8_ds_mla "
        "where vLLM supports it."
    )


def provenance() -> str:
    """One line that names what was applied to this vLLM, from the record that
    apply-patches.sh leaves."""
    file = Path(vllm.__file__).parent / "_dsv4_overlay" / "record.json"
    if not file.is_file():
        return (
            "vllm-dsv4-overlay without its record and its native kernels, as in a "
            "wheel built from a patched "
            "source tree; apply it to the installed wheel instead."
        )
    record = json.loads(file.read_text())
    return (
        f"vllm-dsv4-overlay {record['overlay_version']} (commit "
        f"{record['overlay_commit'] or 'unknown'}) "
        f"applied to vLLM {record['release']}: {len(record['files'])} files; python "
        f"-m {_SELF_TEST} checks it."
    )
