"""Backend x cache dtype x model: what is resolved, what is refused in one sentence, what is left alone."""

import copy
import importlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from vllm.config.cache import CacheDType
from vllm.config.speculative import SpeculativeMethod
from vllm.dsv4_overlay import adapter, config
from vllm.platforms.interface import DeviceCapability
from vllm.third_party.mla_kernels import PROVIDERS
from vllm.v1.attention.backends.registry import AttentionBackendEnum

FULL = "FLASHINFER_MLA_SPARSE_DSV4"
FLASHMLA = "FLASHMLA_SPARSE_DSV4"
BACKENDS = {
    None: None,
    FULL: FULL,
    "V4_FLASHINFER_MLA_SPARSE": FULL,
    "FLASHINFER_MLA_SPARSE_V4": FULL,
    FLASHMLA: FLASHMLA,
    "V4_FLASHMLA_SPARSE": FLASHMLA,
    "FLASH_ATTN": "FLASH_ATTN",
}
BACKENDS = {name: BACKENDS[name] for name in BACKENDS if not name or name in AttentionBackendEnum.__members__}
OURS_ALONE = pytest.mark.skipif(not config.NAME_IS_OURS, reason="vLLM has this backend itself")
VLLMS_TOO = pytest.mark.skipif(config.NAME_IS_OURS, reason="vLLM has no such backend")
ACCEPTED = {"auto": "bfloat16", "bfloat16": "bfloat16", "fp8": "fp8_per_tensor", "fp8_e4m3": "fp8_per_tensor",
            "fp8_per_tensor": "fp8_per_tensor"}  # fmt: skip
V4 = ("DeepseekV4ForCausalLM", "DeepSeekV4MTPModel")
METHODS = {*get_args(SpeculativeMethod), "a method of the next release"}
NO_SCALES = str(Path(__file__).parent)  # a checkpoint without
HF_CONFIG = SimpleNamespace(
    num_hidden_layers=5, num_nextn_predict_layers=1, head_dim=512, qk_rope_head_dim=64, sliding_window=128
)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.delenv("VLLM_DSV4_PROVIDER", raising=False)
    on_gpu(monkeypatch, DeviceCapability(9, 0))


def on_gpu(monkeypatch, capability):
    platform = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda device_id=0: capability)
    monkeypatch.setattr(config, "current_platform", platform)


def make(cache_dtype="auto", backend=FULL, architecture=V4[0], heads=64):
    return SimpleNamespace(
        model_config=SimpleNamespace(
            architecture=architecture, heads=heads, model=NO_SCALES, revision=None, hf_config=HF_CONFIG,
            dtype=torch.bfloat16,
        ),
        attention_config=SimpleNamespace(backend=AttentionBackendEnum[backend] if backend else None),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, block_size=16, user_specified_block_size=False),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        load_config=SimpleNamespace(download_dir=None, load_format="auto"),
        speculative_config=None,
        kv_transfer_config=None,
        additional_config={},
    )


def verify(vllm_config):
    """The state after; the model's head count is a function only here, so that states compare."""
    model = vllm_config.model_config
    model.get_num_attention_heads = lambda parallel: model.heads // parallel.tensor_parallel_size
    try:
        config.verify_and_update_config(vllm_config)
    finally:
        del model.get_num_attention_heads
    return vllm_config


def refusal(vllm_config):
    before = copy.deepcopy(vllm_config)
    with pytest.raises(ValueError) as caught:
        verify(vllm_config)
    assert vllm_config == before
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text and ". " not in text
    return text


@pytest.mark.parametrize("architecture", V4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cache_dtype", get_args(CacheDType))
def test_deepseek_v4(cache_dtype, backend, architecture):
    before = make(cache_dtype, backend, architecture)
    asked = copy.deepcopy(before)
    only_full = cache_dtype in ("bfloat16", "fp8_per_tensor")
    if BACKENDS[backend] == FULL or (backend is None and only_full):
        if cache_dtype in ACCEPTED:
            before.cache_config.cache_dtype = ACCEPTED[cache_dtype]
            before.attention_config.backend = AttentionBackendEnum[FULL]
            assert verify(asked) == before
        else:
            text = refusal(asked)
            assert ", ".join(ACCEPTED) in text and cache_dtype in text and FLASHMLA in text
    elif only_full:
        text = refusal(asked)
        assert cache_dtype in text and BACKENDS[backend] in text and FULL in text
    else:
        assert verify(asked) == before  # stock vLLM


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cache_dtype", get_args(CacheDType))
def test_other_models(cache_dtype, backend):
    before = make(cache_dtype, backend, "LlamaForCausalLM")
    asked = copy.deepcopy(before)
    if BACKENDS[backend] == FULL or (BACKENDS[backend] == FLASHMLA and config.NAME_IS_OURS):
        assert f"--attention-backend {BACKENDS[backend]} serves DeepSeek V4 only" in refusal(asked)
    elif cache_dtype == "fp8_per_tensor":
        assert "--kv-cache-dtype fp8_per_tensor serves DeepSeek V4 only" in refusal(asked)
    else:
        assert verify(asked) == before


@pytest.mark.parametrize("architecture", [*V4, "LlamaForCausalLM"])
def test_a_setting_of_the_drop_in_that_is_none(architecture):
    """Of any model, before its layers ask for it."""
    asked = make("fp8", None, architecture)
    asked.additional_config = {"dsv4_drop_in": "off"}
    assert "dsv4_drop_in in --additional-config is 'off';" in refusal(asked)


@pytest.mark.parametrize("cache_dtype", ACCEPTED)
def test_resolving_twice_changes_nothing(cache_dtype):
    """The configuration is rebuilt in workers and for the draft model, from what was resolved."""
    once = verify(make(cache_dtype))
    assert verify(copy.deepcopy(once)) == once
    unnamed = copy.deepcopy(once)
    unnamed.attention_config.backend = None
    assert verify(unnamed) == once


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (10, 7), (11, 0), (12, 0), (12, 1)])
def test_other_gpus_are_refused(monkeypatch, capability):
    on_gpu(monkeypatch, DeviceCapability(*capability))
    if not config.NAME_IS_OURS and capability[0] in (10, 12):
        pytest.skip("vLLM serves it itself")
    text = refusal(make())
    packed = ", where FlashInfer reads its packed 584-byte cache only" if capability[0] == 12 else ""
    assert f"compute capability {capability[0]}.{capability[1]}{packed};" in text and FLASHMLA in text
    stock = make("fp8", None)
    assert verify(copy.deepcopy(stock)) == stock


@OURS_ALONE
@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_blackwell_needs_flashinfer(monkeypatch, capability):
    from vllm.third_party.mla_kernels import flashinfer_sparse_mla

    assert capability in flashinfer_sparse_mla.CAPABILITIES
    on_gpu(monkeypatch, DeviceCapability(*capability))
    monkeypatch.setattr(flashinfer_sparse_mla, "misfit", lambda found: "it is old; install" if found else None)
    assert f"{FULL} on this GPU needs FlashInfer, but it is old; install." in refusal(make())
    for name in ("triton", "reference"):
        monkeypatch.setenv("VLLM_DSV4_PROVIDER", name)
        verify(make())
    monkeypatch.setenv("VLLM_DSV4_PROVIDER", "flashinfer")
    assert "VLLM_DSV4_PROVIDER=flashinfer needs FlashInfer, but it is old; install." in refusal(make())
    monkeypatch.setattr(flashinfer_sparse_mla, "misfit", lambda found: None if found == capability else "other")
    verify(make())
    monkeypatch.delenv("VLLM_DSV4_PROVIDER")
    verify(make())


@VLLMS_TOO
@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0), (12, 1)])
def test_blackwell_is_left_to_vllm(monkeypatch, capability):
    """But for what it would take for another cache, its provider and its scales nothing changes."""
    monkeypatch.setenv("VLLM_DSV4_PROVIDER", "reference")
    on_gpu(monkeypatch, DeviceCapability(*capability))
    packed = capability[0] == 12
    accepted = ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla") if packed else ACCEPTED
    for cache_dtype, backend in itertools.product(get_args(CacheDType), BACKENDS):
        before = make(cache_dtype, backend, heads=256)
        asked = copy.deepcopy(before)
        only_full = cache_dtype in ("bfloat16", "fp8_per_tensor")
        full = BACKENDS[backend] == FULL or (backend is None and only_full)
        if full and cache_dtype in accepted:
            before.attention_config.backend = AttentionBackendEnum[FULL]
            assert verify(asked) == before
            asked.additional_config = {"dsv4_scales": "missing"}
            fp8 = not packed and "fp8" in cache_dtype
            other = "which this GPU does not have; omit it." if packed else "only; omit it, or use "
            assert ("missing, which dsv4_scales" if fp8 else other) in refusal(asked)
        elif full:
            text = refusal(asked)
            assert ", ".join(accepted) in text and cache_dtype in text
            assert ("on this GPU" if packed else FLASHMLA) in text
        elif only_full:
            assert FULL in refusal(asked)
        else:
            assert verify(asked) == before


@VLLMS_TOO
@pytest.mark.parametrize(
    "architecture", ["DeepseekV41ForCausalLM", "DeepseekV4ForConditionalGeneration", "DSparkDraftModel"]
)
def test_models_that_vllm_serves_by_the_same_name(monkeypatch, architecture):
    """On Blackwell; on Hopper it would fail only after the weights were loaded."""
    asked = make("fp8", FULL, architecture)
    assert f"serves DeepSeek V4 only, and this model is {architecture};" in refusal(asked)
    on_gpu(monkeypatch, DeviceCapability(10, 0))
    assert verify(copy.deepcopy(asked)) == asked and not config.full_width_fp8(asked)
    asked.additional_config = {"dsv4_scales": "a-file"}
    assert "dsv4_scales in --additional-config serves DeepSeek V4 only" in refusal(asked)
    asked.additional_config = {}
    asked.cache_config.cache_dtype = "fp8_per_tensor"  # which is not vLLM's
    assert f"fp8_per_tensor serves DeepSeek V4 only, and this model is {architecture};" in refusal(asked)


@VLLMS_TOO
def test_images_on_hopper(monkeypatch):
    """Their layers are chosen by the dtype alone."""
    asked = make("bfloat16", None, "DeepseekV4ForConditionalGeneration")
    assert "--kv-cache-dtype bfloat16 serves DeepSeek V4 only, and this model is DeepseekV4For" in refusal(asked)
    stock = make("fp8", None, "DeepseekV4ForConditionalGeneration")
    assert verify(copy.deepcopy(stock)) == stock
    on_gpu(monkeypatch, DeviceCapability(10, 0))
    assert verify(copy.deepcopy(asked)) == asked


@pytest.mark.parametrize(
    "asked, words",
    [
        *(
            (dict(method=method), f"serves no drafts of {method}, only DeepSeek V4's own layers, n-grams")
            for method in sorted(METHODS - {"mtp", "ngram", "ngram_gpu", "suffix", "dspark"})
        ),
        (dict(draft_model_config=SimpleNamespace(architecture="MiMoMTPModel")), "no drafts of MiMoMTPModel,"),
        (dict(attention_backend=AttentionBackendEnum[FLASHMLA]), f"--speculative-config is {FLASHMLA}, and"),
        (dict(attention_backend=AttentionBackendEnum.FLASH_ATTN), "--speculative-config is FLASH_ATTN, and"),
        (dict(kv_cache_dtype="bfloat16"), "kv_cache_dtype of --speculative-config is bfloat16, and drafts share"),
        (dict(kv_cache_dtype="fp8_ds_mla"), "kv_cache_dtype of --speculative-config is fp8_ds_mla, and drafts"),
    ],
)
def test_drafts_that_would_leave_the_cache(asked, words):
    config = make("fp8")
    config.speculative_config = SimpleNamespace(**{"method": "mtp", "draft_model_config": None} | asked)
    assert words in refusal(config)


@pytest.mark.parametrize("method", ["mtp", "ngram", "ngram_gpu", "suffix"])
def test_drafts_that_are_served(method):
    asked = make("fp8")
    asked.speculative_config = SimpleNamespace(method=method, draft_model_config=None)
    verify(asked)


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e4m3", "fp8_per_tensor"])
def test_drafts_of_the_same_cache(cache_dtype):
    asked = make("fp8")
    asked.speculative_config = SimpleNamespace(method="mtp", draft_model_config=None, kv_cache_dtype=cache_dtype,
                                               attention_backend=AttentionBackendEnum[FULL])  # fmt: skip
    assert verify(asked).speculative_config.kv_cache_dtype == "fp8_per_tensor" == asked.cache_config.cache_dtype


@pytest.mark.parametrize("dtype, words", [(torch.float16, "float16"), (torch.float32, "float32")])
def test_models_of_another_dtype(dtype, words):
    for cache_dtype in ("auto", "fp8"):
        asked = make(cache_dtype)
        asked.model_config.dtype = dtype
        assert f"serves models in bfloat16, and --dtype is {words}; omit it." in refusal(asked)


@pytest.mark.parametrize("name, value", [("sliding_window", 64), ("head_dim", 256), ("qk_rope_head_dim", 32)])
def test_models_of_other_dimensions(name, value):
    """A wider or narrower window would be read as one of 128 rows, which vLLM's cache does not keep."""
    asked = make()
    asked.model_config.hf_config = SimpleNamespace(**(vars(HF_CONFIG) | {name: value}))
    assert f"and this model's is {value}; use {FLASHMLA}" in refusal(asked)


@pytest.mark.parametrize("option, value", [("calculate_kv_scales", True), ("kv_cache_dtype_skip_layers", ["0"])])
def test_options_of_scales_that_nothing_reads(option, value):
    asked = make("fp8")
    setattr(asked.cache_config, option, value)
    assert f"does not serve --{option.replace('_', '-')}; omit it: scales come from dsv4_scales" in refusal(asked)
    asked.cache_config.cache_dtype = "bfloat16"
    verify(asked)


@pytest.mark.parametrize("architecture", ["DSparkDraftModel", "Qwen3DSparkModel"])
def test_dspark(monkeypatch, architecture):
    """Its drafts are DeepSeek V4's layers, or those of another model."""
    asked = make("fp8")
    draft = SimpleNamespace(architecture=architecture)
    asked.speculative_config = SimpleNamespace(method="dspark", draft_model_config=draft)
    if architecture == "DSparkDraftModel" and not config.NAME_IS_OURS:
        assert verify(copy.deepcopy(asked)).cache_config.cache_dtype == "fp8_per_tensor"
    else:
        assert f"serves no drafts of {architecture}, only" in refusal(asked)
    if not config.NAME_IS_OURS:
        on_gpu(monkeypatch, DeviceCapability(10, 0))
        assert verify(copy.deepcopy(asked)) == asked


@pytest.mark.parametrize("block_size", [64, 128, 256, 512])
def test_block_sizes(block_size):
    asked = make()
    vars(asked.cache_config).update(block_size=block_size, user_specified_block_size=True)
    if block_size == 256:
        assert verify(asked).cache_config.cache_dtype == "bfloat16"
    else:
        assert f"needs blocks of 256 tokens, and --block-size is {block_size};" in refusal(asked)


def test_a_worker_checks_its_own_gpu(monkeypatch):
    """Of a host with several kinds; before there is a worker, the first."""
    kinds = [DeviceCapability(9, 0), DeviceCapability(8, 0)]
    platform = SimpleNamespace(is_cuda=lambda: True, get_device_capability=kinds.__getitem__)
    monkeypatch.setattr(config, "current_platform", platform)
    config.check_machine()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(ValueError, match="compute capability 8.0"):
        config.check_machine()


def test_no_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(config, "current_platform", SimpleNamespace(is_cuda=lambda: False))
    assert "this machine has no CUDA GPU;" in refusal(make())


@pytest.mark.parametrize("heads", [1, 8, 64, 128])
def test_head_counts(heads):
    assert verify(make(heads=heads)).cache_config.cache_dtype == "bfloat16"


@pytest.mark.parametrize("heads", [0, 129, 256])
def test_head_counts_that_are_refused(heads):
    assert f"this model has {heads}; raise --tensor-parallel-size." in refusal(make(heads=heads))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_context_parallelism_is_refused(kind):
    """vLLM's own check skips layers without an `impl`, as DeepSeek V4's are: it would fail after loading."""
    asked = make()
    setattr(asked.parallel_config, f"{kind}_context_parallel_size", 2)
    assert "does not serve context parallelism; omit --decode-context-parallel-size" in refusal(asked)
    asked.attention_config.backend = None
    asked.cache_config.cache_dtype = "fp8"
    assert verify(copy.deepcopy(asked)) == asked  # stock vLLM


def test_provider_variable(monkeypatch):
    from vllm.third_party.mla_kernels import native

    monkeypatch.setattr(native, "misfit", lambda capability: None if capability == (9, 0) else "of the GPU")
    for name in ("", *PROVIDERS):
        monkeypatch.setenv("VLLM_DSV4_PROVIDER", name)
        if name != "flashinfer":
            verify(make())
    monkeypatch.setenv("VLLM_DSV4_PROVIDER", "flashinfer")
    assert "kernels for this cache on compute capability 10.0 and 10.3 only" in refusal(make())
    on_gpu(monkeypatch, DeviceCapability(10, 0))
    if not config.vllm_serves_itself():  # the library has inserts for it, and no attention
        monkeypatch.setattr(native, "misfit", lambda capability: None)
        monkeypatch.setenv("VLLM_DSV4_PROVIDER", "sm90")
        assert "but its attention kernels are for compute capability 9.0; use another provider." in refusal(make())
    on_gpu(monkeypatch, DeviceCapability(9, 0))
    monkeypatch.setattr(native, "misfit", lambda capability: "it is not built; build it")
    monkeypatch.setenv("VLLM_DSV4_PROVIDER", "sm90")
    assert "VLLM_DSV4_PROVIDER=sm90 needs the native library" in (found := refusal(make()))
    assert "it is not built; build it." in found
    monkeypatch.setenv("VLLM_DSV4_PROVIDER", "cutlass")
    assert "VLLM_DSV4_PROVIDER=cutlass is unknown; it may be " in refusal(make())
    stock = make("fp8", None)
    assert verify(copy.deepcopy(stock)) == stock


def test_names_lead_to_the_classes_they_should():
    full = "DeepseekV4FullCacheBackend" if config.NAME_IS_OURS else "DeepseekV4FlashInferMLASparseBackend"
    flashmla = "DeepseekV4FlashMLASparseBackend" if config.NAME_IS_OURS else "DeepseekV4FlashMLABackend"
    for name, member in BACKENDS.items():
        if member in (FULL, FLASHMLA):
            found = AttentionBackendEnum[name].get_class().__name__
            assert found == (full if member == FULL else flashmla), name


def test_the_backend_says_what_it_serves():
    backend = adapter.DeepseekV4FullCacheBackend
    assert {name for name in get_args(CacheDType) if backend.supports_kv_cache_dtype(name)} == set(ACCEPTED)


def test_class_choice(monkeypatch):
    attention = importlib.import_module(adapter.ATTENTION)
    chosen, ours = {}, {"bfloat16", "fp8_per_tensor"}
    for name in get_args(CacheDType):
        current = make(name, None)
        if hasattr(attention, "DeepseekV4Attention"):  # from 0.23.0 on
            model = importlib.import_module("vllm.models.deepseek_v4.nvidia.model")
            backend = model._select_dsv4_attn_cls(current).backend_cls
        elif hasattr(attention, "_select_v4_sparse_impl"):
            monkeypatch.setattr(attention, "get_current_vllm_config", lambda current=current: current)
            backend = attention._select_v4_sparse_impl().backend_cls
        else:  # 0.21.0: the layer itself is the implementation
            layer = SimpleNamespace(full_cache=config.is_full_cache(name))
            backend = attention.DeepseekV4MLAAttention.get_attn_backend(layer)
        chosen.setdefault(backend.__name__, set()).add(name)
    assert chosen == {
        "DeepseekV4FullCacheBackend": ours,
        AttentionBackendEnum[FLASHMLA].get_class().__name__: set(get_args(CacheDType)) - ours,
    }


@VLLMS_TOO
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "fp8_per_tensor", "fp8"])
def test_vllms_own_class_on_blackwell(monkeypatch, cache_dtype):
    model = importlib.import_module("vllm.models.deepseek_v4.nvidia.model")
    for capability, name in (((10, 0), "DeepseekV4FlashInferMLAAttention"),
                             ((12, 0), "DeepseekV4FlashInferSM120Attention")):  # fmt: skip
        on_gpu(monkeypatch, DeviceCapability(*capability))
        monkeypatch.setattr(model, "current_platform", config.current_platform)
        assert model._select_dsv4_attn_cls(make(cache_dtype, FULL)).__name__ == name


def test_provenance_is_logged_once_a_model_is_ours(applied, monkeypatch):
    record = json.loads((applied / "vllm/_dsv4_overlay/record.json").read_text())
    lines = []
    logger = SimpleNamespace(info_once=lambda text, *values: lines.append(text % values if values else text))
    monkeypatch.setattr(config, "logger", logger)
    verify(make("auto", None, "LlamaForCausalLM"))
    assert lines == []
    verify(make("fp8", None))
    (line,) = lines
    for part in (record["overlay_version"], record["overlay_commit"] or "unknown", f"vLLM {record['release']}"):
        assert part in line
    assert f"{len(record['files'])} files" in line and "python -m vllm.dsv4_overlay.selftest" in line


def test_a_vllm_without_the_record_still_starts(tmp_path, monkeypatch):
    """vLLM's own build packs no record: whoever asks for FlashMLA must not notice."""
    monkeypatch.setattr(config, "vllm", SimpleNamespace(__file__=str(tmp_path / "__init__.py")))
    assert "without its record" in config.provenance()
    assert verify(make("fp8", None)) == make("fp8", None)


def test_the_kernels_keep_the_name_that_they_had():
    import vllm.third_party.dsv4_kernels as old
    import vllm.third_party.mla_kernels as new

    assert old.sparse_mla is new.sparse_mla and old.PROVIDERS is new.PROVIDERS
    assert torch.ops.dsv4_kernels.full_cache_bf16_insert is torch.ops.mla_kernels.full_cache_bf16_insert
