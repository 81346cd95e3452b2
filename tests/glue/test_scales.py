"""Scales of the FP8 cache: from the file or the checkpoint to the layers, and what is refused."""

import json
import math
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_config_contract import VLLMS_TOO, make, on_gpu, refusal, verify
from vllm.dsv4_overlay import attention, calibrate, checkpoint_files, scales
from vllm.model_executor.model_loader import weight_utils
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.import_utils import resolve_obj_by_qualname

MAIN = 5  # layers; one next-token layer more
AMAX = {layer: [10.0 * 2**layer, 5.0] for layer in range(MAIN + 1)}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.delenv("VLLM_DSV4_PROVIDER", raising=False)
    on_gpu(monkeypatch, DeviceCapability(9, 0))


@pytest.fixture
def file(tmp_path):
    """As the calibration command writes it."""
    path = tmp_path / "scales.safetensors"
    calibrate.write(path, AMAX, MAIN, {"model": "m"})
    return path


def asked(path=None, cache_dtype="fp8", backend="FLASHINFER_MLA_SPARSE_DSV4", mtp=True):
    config = make(cache_dtype, backend)
    if path:
        config.additional_config = {"dsv4_scales": str(path)}
    if mtp:
        draft = SimpleNamespace(architecture="DeepSeekV4MTPModel", hf_config=config.model_config.hf_config)
        config.speculative_config = SimpleNamespace(draft_model_config=draft, method="mtp")
    return config


def respell(path, changes):
    """A file with the scales in `path`, some replaced, and without those that are None."""
    changed = path.with_name("changed.safetensors")
    save_file({k: v for k, v in (load_file(path) | changes).items() if v is not None}, changed)
    return changed


def layer_of(config, number, monkeypatch):
    monkeypatch.setattr(attention, "get_current_vllm_config", lambda: config)
    layer = torch.nn.Module()
    layer.prefix = f"model.layers.{number}.attn"
    layer.attn_sink = torch.nn.Parameter(torch.zeros(64), requires_grad=False)
    attention.init_layer(layer)
    return layer


def test_what_calibration_writes_reaches_the_layers(file, monkeypatch):
    lines = []
    logger = SimpleNamespace(info_once=lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(scales, "logger", logger)
    config = verify(asked(file))
    assert lines == [f"FP8 scales (dsv4_scales {file}): kv 0.0625 to 2, q 0.0312 to 0.0312."]
    for number, (kv, _) in AMAX.items():
        layer = layer_of(config, number, monkeypatch)
        assert layer.kv_scale == calibrate.scale(kv) and layer.q_scale == calibrate.scale(5.0)
        assert not list(layer.buffers())  # which sleep mode and new weights would lose
        # Two to four times the largest value fits.
        assert 2 * kv <= 448 * layer.kv_scale < 4 * kv


def test_a_layer_on_another_gpu_than_the_configuration_saw_is_refused(monkeypatch):
    """As of a Ray worker on another host."""
    config = verify(asked())
    on_gpu(monkeypatch, DeviceCapability(8, 0))
    with pytest.raises(ValueError, match=r"^FLASHINFER_MLA_SPARSE_DSV4 serves Hopper .* compute capability 8\.0;"):
        layer_of(config, 0, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_have_the_scales_of_their_checkpoint_in_any_precision(tmp_path, monkeypatch, dtype):
    tensors = {f"{scales.layer_prefix(number, MAIN)}.k_scale": torch.tensor(0.1, dtype=dtype) for number in AMAX}
    save_file(tensors, tmp_path / "model.safetensors")
    config = asked()
    config.model_config.model = str(tmp_path)
    model = torch.nn.ModuleList([layer_of(verify(config), number, monkeypatch) for number in range(MAIN)])
    assert not list(scales.without_scales(model, tensors.items()))


def test_a_file_that_is_measured_anew_is_read_anew(file):
    before = scales.load_scales(asked(file)).values
    calibrate.write(file, {layer: [4 * kv, q] for layer, (kv, q) in AMAX.items()}, MAIN, {"model": "m"})
    after = scales.load_scales(asked(file)).values
    assert all(after[name] == before[name] * (4 if name[-7] == "k" else 1) for name in before)


def test_metadata_says_what_was_measured(file):
    with safe_open(file, "pt") as written:
        metadata = {key: json.loads(value) for key, value in written.metadata().items()}
    assert metadata["model"] == "m" and metadata["amax"]["mtp.0.attn"] == AMAX[MAIN]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("cache_dtype, backend", [("fp8_per_tensor", None), ("fp8", "FLASHINFER_MLA_SPARSE_DSV4")])
def test_other_options_are_kept(file, monkeypatch, cache_dtype, backend):
    """By whichever name the cache goes; the file is named in full, for workers in other folders."""
    monkeypatch.chdir(file.parent)
    config = asked(file.name, cache_dtype, backend)
    config.additional_config["dsv4_drop_in"] = False
    assert verify(config).additional_config == {"dsv4_scales": str(file), "dsv4_drop_in": False}


def test_options_that_are_an_object():
    """vLLM takes any that has a hash."""
    config = asked()
    config.additional_config = SimpleNamespace(compute_hash=lambda: "")
    assert scales.load_scales(verify(config)).values == {}


def test_without_a_file_scales_are_one(monkeypatch):
    layer = layer_of(verify(asked()), 3, monkeypatch)
    assert layer.kv_scale == layer.q_scale == 1.0


def test_scales_are_asked_of_the_hub_that_has_the_weights(file, tmp_path, monkeypatch):
    """vLLM loads from ModelScope then; the Hugging Face hub may have another model by that name, or none."""
    repository = tmp_path / "modelscope"
    repository.mkdir()
    save_file(load_file(file), repository / "model-1.safetensors")
    (repository / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(load_file(file), "model-1.safetensors")})
    )
    fetched = []

    def fetch(model, revision, download_dir, allow_patterns):
        fetched.extend(allow_patterns)
        assert (model, revision, download_dir) == ("organisation/model-on-modelscope", "v2", "downloads")
        return str(repository)

    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "true")
    monkeypatch.setattr(weight_utils, "maybe_download_from_modelscope", fetch)
    for name in ("get_hf_file_to_dict", "hf_hub_download"):
        monkeypatch.setattr(checkpoint_files, name, lambda *_, **__: pytest.fail("asked of the Hugging Face hub"))
    config = asked()
    config.model_config.model, config.model_config.revision = "organisation/model-on-modelscope", "v2"
    config.load_config.download_dir = "downloads"
    assert layer_of(verify(config), 2, monkeypatch).kv_scale == calibrate.scale(AMAX[2][0])
    assert fetched == ["model.safetensors.index.json", "model-1.safetensors"]


def test_scales_are_of_the_revision_that_is_served(file, monkeypatch):
    """And are looked for where vLLM keeps what it downloads."""
    fetched = []

    def index(name, model, revision):
        fetched.append((model, name, revision))
        return {"weight_map": dict.fromkeys(load_file(file), "model-1.safetensors")}

    def download(model, name, revision, cache_dir):
        fetched.append((model, name, revision, cache_dir))
        return file

    monkeypatch.setattr(checkpoint_files, "get_hf_file_to_dict", index)
    monkeypatch.setattr(checkpoint_files, "hf_hub_download", download)
    config = asked()
    config.model_config.model, config.model_config.revision = "organisation/model-of-revisions", "v2"
    config.load_config.download_dir = "downloads"
    assert scales.load_scales(config).values == load_file(file)
    of = "organisation/model-of-revisions"
    assert fetched == [(of, "model.safetensors.index.json", "v2"), (of, "model-1.safetensors", "v2", "downloads")]


@pytest.mark.parametrize("index", [True, False])
def test_scales_of_a_checkpoint(file, tmp_path, monkeypatch, index):
    """In one file, or in one of several; the option wins over them; queries may have none."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    names = {f"{scales.layer_prefix(number, MAIN)}.k_scale": 0.5 + number for number in AMAX}
    tensors = {name: torch.tensor(value, dtype=torch.bfloat16) for name, value in names.items()}
    shard = "model-2.safetensors" if index else "model.safetensors"
    save_file(tensors | {"layers.0.attn.wo_b.weight": torch.ones(1)}, folder / shard)
    if index:
        weight_map = dict.fromkeys(names, shard) | {"embed.weight": "not-there.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        save_file({"embed.weight": torch.ones(1)}, folder / "model.safetensors")  # which the index does not name
    config = asked()
    config.model_config.model = str(folder)
    layer = layer_of(verify(config), 2, monkeypatch)
    assert (layer.kv_scale, layer.q_scale) == (2.5, 1.0)
    config.additional_config = {"dsv4_scales": str(file)}
    assert layer_of(verify(config), 2, monkeypatch).kv_scale == calibrate.scale(AMAX[2][0])
    save_file(tensors | {"layers.1.attn.k_scale": torch.tensor(-1.0)}, folder / shard)
    config.additional_config = {}
    config.cache_config.cache_dtype = "fp8"
    scales._from_checkpoint.cache_clear()
    assert f"layers.1.attn.k_scale in checkpoint {folder} must be finite and positive" in refusal(config)


def test_scales_that_cannot_be_looked_for(tmp_path, monkeypatch):
    """A hub that does not answer, or a part that is not there, is not a checkpoint without scales."""
    config = asked()
    config.model_config.model = "organisation/model"
    monkeypatch.setattr(checkpoint_files, "get_hf_file_to_dict", lambda *_: None)
    monkeypatch.setattr(checkpoint_files, "hf_hub_download", lambda *_, **__: tmp_path / "none")
    assert "Whether checkpoint organisation/model has scales is unknown" in refusal(config)
    config.load_config.download_dir = str(tmp_path)
    assert "Whether checkpoint organisation/model has scales is unknown" in refusal(config)
    config.load_config.load_format = "dummy"
    assert scales.load_scales(config).values == {}
    config.load_config.load_format = "auto"
    index = tmp_path / "index.json"
    monkeypatch.setattr(checkpoint_files, "hf_hub_download", lambda *_, **__: index)
    index.write_text('{"weight_map"')  # of a download that was cut short
    assert "Whether checkpoint organisation/model has scales is unknown" in refusal(config)
    index.write_text('{"weight_map": {"embed.weight": "not-there.safetensors"}}')
    monkeypatch.setattr(checkpoint_files, "hf_hub_download", lambda *_, cache_dir, **__: cache_dir and index)
    assert scales.load_scales(config).values == {}  # found where vLLM's loader put it
    config.model_config.model = str(tmp_path)
    broken = tmp_path / "model.safetensors"
    broken.write_bytes(b"not safetensors")
    assert f"Scales of checkpoint {tmp_path} cannot be read (" in refusal(config)
    broken.unlink()
    weight_map = {"layers.0.attn.k_scale": "not-there.safetensors"}
    monkeypatch.setattr(checkpoint_files, "get_hf_file_to_dict", lambda *_: {"weight_map": weight_map})
    assert f"Scales of checkpoint {tmp_path} cannot be read (" in refusal(config)


def reload(model):
    """Load the sinks of `model` anew, as vLLM does into a running server."""
    initialize_layerwise_reload(model)
    for parameter in list(model.parameters()):
        getattr(parameter, "weight_loader", weight_utils.default_weight_loader)(parameter, torch.full((64,), 7.0))
    finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.bfloat16))
    assert all((parameter == 7).all() for parameter in model.parameters())


def test_scales_survive_sleep_and_new_weights(file, monkeypatch):
    """vLLM zeroes what is neither a weight nor a buffer, and fills buffers next to weights with anything."""
    config = verify(asked(file))
    layer = layer_of(config, 2, monkeypatch)
    assert dict(layer.named_buffers()) == {}
    record_metadata_for_reloading(layer)
    reload(layer)
    assert float(layer.kv_scale) == calibrate.scale(AMAX[2][0]) and float(layer.q_scale) == calibrate.scale(5.0)


def test_what_flashinfer_works_in_survives_sleep_and_new_weights(monkeypatch):
    config = verify(asked())
    flashinfer = SimpleNamespace(workspace=torch.zeros(4), counters=torch.zeros(2))
    monkeypatch.setattr(attention, "check_machine", lambda: None)
    monkeypatch.setattr(attention, "_provider", lambda tensor: "flashinfer")
    monkeypatch.setattr(attention.flashinfer_sparse_mla, "prepare", lambda device: flashinfer)
    layer = layer_of(config, 0, monkeypatch)
    buffers = {id(buffer) for buffer in layer.buffers()}
    assert {id(flashinfer.workspace), id(flashinfer.counters)} == buffers
    assert layer.state_dict().keys() == {"attn_sink"}
    record_metadata_for_reloading(layer)
    reload(layer)
    assert buffers == {id(buffer) for buffer in layer.buffers()}
    assert not flashinfer.workspace.any() and not flashinfer.counters.any()


@pytest.mark.parametrize("by_file", [False, True])
def test_new_weights_with_other_scales_are_refused(file, tmp_path, monkeypatch, by_file):
    """A file of scales was asked for by name; what the checkpoint had was for its own weights."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    tensors = {f"{scales.layer_prefix(number, MAIN)}.k_scale": torch.tensor(0.5) for number in AMAX}
    save_file(tensors, folder / "model.safetensors")
    config = asked(file if by_file else None)
    config.model_config.model = str(folder)
    model = torch.nn.ModuleList([layer_of(verify(config), number, monkeypatch) for number in range(MAIN)])
    weights = {"embed.weight": torch.ones(2)} | tensors
    assert [name for name, _ in scales.without_scales(model, weights.items())] == ["embed.weight"]
    for name, value in (("layers.2.attn.k_scale", 0.25), ("layers.2.attn.q_scale", 2.0)):
        changed = weights | {name: torch.tensor([value])}
        if by_file:
            assert len(list(scales.without_scales(model, changed.items()))) == 1
        else:
            with pytest.raises(ValueError, match=f"{name} of these weights is {value}, and this server has been"):
                list(scales.without_scales(model, changed.items()))
    assert not list(scales.without_scales(model, [("model.layers.2.attn.k_scale", torch.tensor(0.5))]))
    # The other model's, main or draft.
    assert not list(scales.without_scales(model, [("mtp.0.attn.k_scale", torch.tensor(8.0))]))


def test_vllm_leaves_scales_of_a_checkpoint_alone(monkeypatch):
    try:
        from vllm.models.deepseek_v4.nvidia import model, mtp
    except ModuleNotFoundError:  # up to 0.21.0
        from vllm.model_executor.models import deepseek_v4 as model
        from vllm.model_executor.models import deepseek_v4_mtp as mtp

    names = [f"layers.0.attn.{name}" for name in ("k_scale", "q_scale", "attn_sink")]
    loaded = []
    loader = SimpleNamespace(load_weights=lambda weights, mapper: loaded.extend(name for name, _ in weights))
    monkeypatch.setattr(model, "AutoWeightsLoader", lambda *_, **__: loader)
    main = MagicMock(modules=list)
    model.DeepseekV4ForCausalLM.load_weights(main, [(name, torch.ones(1)) for name in names])
    assert loaded == ["layers.0.attn.attn_sink"]

    for name, value in (("world_size", 1), ("rank", 0)):  # not asked for from 0.23.0 on
        monkeypatch.setattr(mtp, f"get_tensor_model_parallel_{name}", lambda value=value: value, raising=False)
    ffn = SimpleNamespace(use_mega_moe=True, use_native_mega_moe=True)
    block = SimpleNamespace(mtp_block=SimpleNamespace(ffn=ffn))
    draft = SimpleNamespace(
        named_parameters=dict,
        modules=list,
        config=SimpleNamespace(
            num_attention_heads=4, n_routed_experts=1, num_hidden_layers=MAIN, num_nextn_predict_layers=1
        ),
        model=SimpleNamespace(layers={"5": block}, mtp_start_layer_idx=MAIN, num_mtp_layers=1),
    )
    weights = [(f"mtp.0.attn.{name}", torch.ones(1)) for name in ("k_scale", "q_scale")]
    with pytest.raises(ValueError, match="weights missing"):  # no parameter was looked for
        mtp.DeepSeekV4MTP.load_weights(draft, weights)


BAD = {
    "layers.2.attn.k_scale": [
        (torch.tensor([0.0]), "must be finite and positive, and is 0.0"),
        (torch.tensor([-1.0]), "must be finite and positive, and is -1.0"),
        (torch.tensor([math.nan]), "must be finite and positive, and is nan"),
        (torch.tensor([math.inf]), "must be finite and positive, and is inf"),
        (torch.tensor([1e-300], dtype=torch.float64), "must be finite and positive, and is 0.0"),
        (torch.ones(2), "one floating-point element, and is [2] torch.float32"),
        (torch.ones(1, dtype=torch.int32), "one floating-point element, and is [1] torch.int32"),
        (None, "a q_scale for every k_scale or none, and layers.2.attn.k_scale stands alone"),
    ],
    "layers.2.attn.q_scale": [
        (torch.tensor([math.inf]), "layers.2.attn.q_scale in"),
        (None, "layers.2.attn.k_scale stands alone"),
    ],
    "model.layers.0.attn.k_scale": [(torch.ones(1), "holds model.layers.0.attn.k_scale, which is not a scale")],
    "layers.0.attn.v_scale": [(torch.ones(1), "holds layers.0.attn.v_scale, which is not a scale")],
}


@pytest.mark.parametrize("name, value, words", [(name, *case) for name, cases in BAD.items() for case in cases])
def test_bad_scales_are_refused(file, name, value, words):
    assert words in refusal(asked(respell(file, {name: value})))


def test_an_index_that_is_cut_short_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map"')
    config = asked()
    config.model_config.model = str(tmp_path)
    assert f"model.safetensors.index.json of {tmp_path} cannot be read (Expecting" in refusal(config)


@pytest.mark.parametrize("layer", ["layers.4", "mtp.0"])
def test_a_layer_without_a_scale_is_refused(file, layer):
    path = respell(file, {f"{layer}.attn.k_scale": None, f"{layer}.attn.q_scale": None})
    assert f"has no {layer}.attn.k_scale; calibrate again" in refusal(asked(path))
    if layer == "mtp.0":  # not needed then; n-grams have the model itself for a draft
        verify(asked(path, mtp=False))
        config = asked(path)
        config.speculative_config.method = "ngram"
        config.speculative_config.draft_model_config.architecture = "DeepseekV4ForCausalLM"
        verify(config)


def test_every_next_token_layer_needs_a_scale(file):
    config = asked(file)
    draft = config.speculative_config.draft_model_config
    draft.hf_config = SimpleNamespace(**(vars(draft.hf_config) | {"num_nextn_predict_layers": 2}))
    assert "has no mtp.1.attn.k_scale; calibrate again" in refusal(config)


@VLLMS_TOO
def test_dspark_takes_no_scales(file, monkeypatch):
    """On Blackwell, where vLLM serves it; the draft's layers would fail, after the model was loaded."""
    on_gpu(monkeypatch, DeviceCapability(10, 0))
    config = asked(file)
    config.speculative_config.method = "dspark"
    text = refusal(config)
    assert "is not for DSpark, whose layers have no scales; omit --speculative-config, or dsv4_scales." in text


def test_scales_of_a_larger_model_are_refused(file):
    more = {f"layers.{MAIN}.attn.{kind}_scale": torch.ones(1) for kind in "kq"}
    assert "has scales of more layers than this model;" in refusal(asked(respell(file, more)))


def test_files_that_are_none_are_refused(tmp_path):
    assert "missing, which dsv4_scales names, cannot be read" in refusal(asked(tmp_path / "missing"))
    config = asked()
    config.additional_config = {"dsv4_scales": ""}  # of a variable that is not set
    assert "(empty), which dsv4_scales names, cannot be read" in refusal(config)
    (tmp_path / "text").write_text("kv: 1.0")
    assert "cannot be read as safetensors" in refusal(asked(tmp_path / "text"))
    save_file({}, tmp_path / "empty")
    assert "holds no scale" in refusal(asked(tmp_path / "empty"))


@pytest.mark.parametrize(
    "cache_dtype, backend",
    [("auto", "FLASHINFER_MLA_SPARSE_DSV4"), ("bfloat16", None), ("fp8", None), ("fp8", "FLASHMLA_SPARSE_DSV4")],
)
def test_other_caches_take_no_scales(file, cache_dtype, backend):
    config = asked(file, cache_dtype, backend)
    assert "dsv4_scales in --additional-config is for" in refusal(config)
    config.additional_config = {"dsv4_scales": ""}
    assert "dsv4_scales in --additional-config is for" in refusal(config)


def test_resolving_twice(file):
    assert verify(verify(asked(file))).cache_config.cache_dtype == "fp8_per_tensor"


def test_ranks_are_merged():
    """Two tensor-parallel ranks for each of two pipeline stages."""
    workers = [{"0": [1.0, 2.0]}, {"0": [1.5, 1.0]}, {"1": [3.0, 3.0]}, {"1": [3.0, 4.0]}]
    assert calibrate.merge(workers) == {0: [1.5, 2.0], 1: [3.0, 4.0]}
    for bad in (0.0, math.inf, math.nan):
        for worker in ([bad, 1.0], [1.0, bad]):
            with pytest.raises(ValueError, match="Layer 0 saw"):
                calibrate.merge([{"0": worker}, {"0": [0.0, 0.0]}])
            with pytest.raises(ValueError, match="Layer 0 saw"):
                calibrate.merge([{"0": [0.0, 0.0]}, {"0": worker}])
    with pytest.raises(ValueError, match="no layer"):
        calibrate.merge([{}])


def test_observer_in_a_worker(monkeypatch):
    """Every layer of ours in this engine is watched by its number, and each keeps its own maximum."""
    prefixes = {number: f"model.layers.{number}.attn" for number in (0, 5)}
    layers = {p: SimpleNamespace(prefix=p, attn_sink=torch.ones(1), full_cache=True) for p in prefixes.values()}
    layer_of(verify(asked()), 1, monkeypatch)  # made for another engine of the process
    seen, attended = [], []
    monkeypatch.setattr(calibrate, "observe", lambda layer, q, amax: seen.append((layer, amax.copy_(q))))
    monkeypatch.setattr(attention, "forward", lambda *arguments: attended.append(arguments))
    worker = calibrate.AmaxObserver()
    context = layers | {"indexer": SimpleNamespace()}
    worker.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    worker.dsv4_observe()
    for number, layer in enumerate(layers.values()):
        attention.forward(layer, torch.tensor([1.0 + number, 2.0]), "output")
    assert [layer for layer, _ in seen] == list(layers.values()) == [layer for layer, _, _ in attended]
    assert worker.dsv4_observed() == {"0": [1.0, 2.0], "5": [2.0, 2.0]}


def test_the_observer_keeps_the_largest_of_all_steps(monkeypatch):
    """Slot 0 is a row like any; a token without a slot, and what q has past the slots, are padding."""
    cache, amax = torch.zeros(2, 2, 512), torch.zeros(2)
    cache[0, 0, 0], cache[1, 1, 511] = -8.0, 3.0
    layer = SimpleNamespace(swa_cache_layer=SimpleNamespace(prefix="swa", kv_cache=cache), compress_ratio=1)
    for slot, largest in ((0, 2.0), (3, 1.0), (None, 100.0)):
        window = SimpleNamespace(slot_mapping=torch.tensor([slot or 0, -1]))
        # None while vLLM measures memory.
        context = SimpleNamespace(attn_metadata=None if slot is None else {"swa": window})
        monkeypatch.setattr(calibrate, "get_forward_context", lambda context=context: context)
        calibrate.observe(layer, torch.tensor([-largest, 100.0, 100.0]).view(3, 1, 1), amax)
        assert amax.tolist() == [8.0, 2.0]


def test_prompts(tmp_path):
    text, lines = tmp_path / "p", tmp_path / "p.jsonl"
    text.write_text("one\n\n \ntwo\n")
    lines.write_text('{"prompt": "one"}\n{"prompt": [1, 2]}\n')
    assert calibrate.read_prompts(text) == ["one", "two"]
    assert calibrate.read_prompts(lines) == ["one", {"prompt_token_ids": [1, 2]}]
    for bad in ("1", '["one"]', "[true]", "[]"):
        lines.write_text(f'{{"prompt": {bad}}}')
        with pytest.raises(ValueError, match="p.jsonl:1 is not"):
            calibrate.read_prompts(lines)
    for bad in ('{"text": "one"}', "[]", "one"):
        lines.write_text(bad)
        with pytest.raises(ValueError, match="p.jsonl:1 is not"):
            calibrate.read_prompts(lines)
    text.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        calibrate.read_prompts(text)


def test_command_line(tmp_path, monkeypatch, capsys):
    """The whole command with a stand-in engine: what it is started with, and what is written."""
    calls = []

    class Engine:
        def __init__(self, **options):
            calls.append(options)
            config = SimpleNamespace(model=options["model"], hf_config=SimpleNamespace(num_hidden_layers=1))
            self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=config))

        def collective_rpc(self, name):
            calls.append(name)
            return [{"0": [100.0, 4.0], "1": [7.0, 4.0]}] if name == "dsv4_observed" else [None]

        def generate(self, prompts, params):
            calls.append((prompts, params.max_tokens, params.temperature, params.detokenize))

    monkeypatch.setitem(vars(calibrate.vllm), "LLM", Engine)
    monkeypatch.setattr(current_platform, "device_type", "cuda")  # vLLM's options need one
    prompts, output = tmp_path / "p.txt", tmp_path / "s.safetensors"
    prompts.write_text("hello\n")
    command = ["--model", "m", "--prompts", str(prompts), "--output", str(output), "--max-tokens", "3"]
    assert calibrate.main([*command, "--tensor-parallel-size", "2"]) == 0
    options, *rest = calls
    assert rest == ["dsv4_observe", (["hello"], 3, 0, True), "dsv4_observed"] and "prompts" not in options
    wanted = dict(model="m", tensor_parallel_size=2, kv_cache_dtype="bfloat16", enforce_eager=True, block_size=256,
                  attention_backend="FLASHINFER_MLA_SPARSE_DSV4", enable_prefix_caching=False)  # fmt: skip
    assert wanted.items() <= options.items()
    assert resolve_obj_by_qualname(options["worker_extension_cls"]) is calibrate.AmaxObserver
    assert scales.load_scales(asked(output)).values == {
        "layers.0.attn.k_scale": 0.5, "layers.0.attn.q_scale": 2**-5,
        "mtp.0.attn.k_scale": 2**-5, "mtp.0.attn.q_scale": 2**-5,
    }  # fmt: skip
    assert "Wrote" in capsys.readouterr().out
    calibrate.main([*command, "--skip-tokenizer-init"])  # which has nothing to make text with
    assert calls[-2] == (["hello"], 3, 0, False)
    monkeypatch.setattr(Engine, "collective_rpc", lambda *_: [{"0": [0.0, 4.0]}])
    with pytest.raises(SystemExit, match="^Layer 0 saw"):
        calibrate.main(command)
    monkeypatch.setattr(calibrate, "vllm_serves_itself", lambda: True)
    with pytest.raises(SystemExit):
        calibrate.main(command)
    assert "vLLM's own, which cannot be watched; calibrate on Hopper." in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(current_platform, "device_type", "cuda")
    (tmp_path / "empty").touch()
    bad = [["--prompts", str(tmp_path / name)] for name in ("none", "empty")]
    bad += [["--output", str(path)] for path in (tmp_path / "no/s", tmp_path)]
    for spoiled in bad:
        with pytest.raises(SystemExit) as stopped:
            calibrate.main([*command, *spoiled])
        assert stopped.value.code == 2 and len(calls) == 10
    monkeypatch.setattr(current_platform, "device_type", "")
    with pytest.raises(SystemExit, match="^vLLM finds no GPU here; "):
        calibrate.main(["--help"])
