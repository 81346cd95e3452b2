"""Quantised checkpoints of DeepSeek V4: names, loading by vLLM's real classes, numerics against float32."""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm.dsv4_overlay
from on_request import ON_REQUEST, RELEASE, ROOT, tree_with
from safetensors.torch import save_file

if "quantised-linears" not in ON_REQUEST:
    pytest.skip(f"vLLM {RELEASE} has no series of quantised linears", allow_module_level=True)
# The tree of the tests has what is not on request.
vllm.dsv4_overlay.__path__.append(str(ROOT / "overlay/common/vllm/dsv4_overlay"))
import make_mini_checkpoint as mini  # noqa: E402
from mini_checkpoint.quantised import (  # noqa: E402
    LAYOUTS,
    Dequantised,
    Mxfp4Experts,
    compressed_tensors_int4,
    compressed_tensors_nvfp4,
    fp8_blocks,
    fp8_tensor,
    gptq_int4,
    modelopt_nvfp4,
)
from mini_checkpoint.writer import write_names  # noqa: E402
from vllm.dsv4_overlay import checkpoint_files, drop_in, quantised_linears, weight_formats  # noqa: E402
from vllm.model_executor.model_loader import reload  # noqa: E402
from vllm.model_executor.model_loader.weight_utils import default_weight_loader  # noqa: E402
from vllm.model_executor.models import utils  # noqa: E402

TINY = mini.Shape(
    hidden=256,
    layers=3,
    compress_ratios=(0, 4, 128, 0),
    heads=4,
    q_lora=128,
    o_lora=128,
    o_groups=2,
    experts=8,
    moe_intermediate=128,
    vocab=1024,
)
EVERY_LINEAR = ("attn.fused_wqa_wkv", "attn.wq_b", "attn.wo_a", "attn.wo_b", "ffn.shared_experts.gate_up_proj",
                "ffn.shared_experts.down_proj", "attn.indexer.wq_b", "attn.indexer.weights_proj",
                "attn.indexer.compressor.fused_wkv_wgate", "attn.compressor.fused_wkv_wgate")  # fmt: skip
QUANTISED = [name for name in LAYOUTS if name != "bf16"]
DEEPSEEKS = {"fp8": "Fp8MoEMethod", "mxfp4-experts": "Mxfp4MoEMethod"}
PLAIN = "UnquantizedLinearMethod"
CT = "CompressedTensorsLinearMethod"
# Of layer 1: the method of all linears, of those that have another, of the experts; of wq_b in the draft's layer.
EXPECTED = {
    "nvfp4": ("ModelOptNvFp4LinearMethod", {}, "ModelOptNvFp4FusedMoE", "ModelOptNvFp4LinearMethod"),
    "autoround": ("AutoGPTQLinearMethod", {}, "AutoGPTQMoEMethod", PLAIN),
    "ct-nvfp4": (CT, {"attn.wo_b": PLAIN}, "CompressedTensorsW4A4Nvfp4MoEMethod", PLAIN),
    "ct-fp8-tensor": (CT, {"attn.wo_b": PLAIN}, "CompressedTensorsW4A4Nvfp4MoEMethod", PLAIN),
    "ct-w4a16": (CT, {"attn.wo_b": PLAIN}, "CompressedTensorsWNA16MarlinMoEMethod", PLAIN),
    "nvfp4-experts": (
        "Fp8LinearMethod",
        dict.fromkeys(["attn.wo_b", *EVERY_LINEAR[-3:]], PLAIN),
        "ModelOptNvFp4FusedMoE",
        "Fp8LinearMethod",
    ),
}
UP_TO_0_21_0 = {"AutoGPTQLinearMethod": "GPTQMarlinLinearMethod", "AutoGPTQMoEMethod": "GPTQMarlinMoEMethod"}
RENAMED = {
    "0.20.2": UP_TO_0_21_0,
    "0.21.0": UP_TO_0_21_0,
    "0.33.0": {
        "ModelOptNvFp4LinearMethod": "ModelOptLinearMethod",
        "AutoGPTQLinearMethod": "INCLinearMethod",
        "CompressedTensorsWNA16MarlinMoEMethod": "CompressedTensorsWNA16MoEMethod",
    }
}
IN_A_LOADED_MODEL = ("embed_tokens.weight", "shared_head.head.weight")  # of drafts: the model's own are shared
# Without activation order; no biases; a norm of the indexer that runs nowhere (up to 0.21.0).
NOT_IN_FILES = ("g_idx", "g_idx_sort_indices", "w13_bias", "w2_bias", ".k_norm.weight", ".k_norm.bias")
# vLLM's choice of kernels for experts does not ask for their clamp, and Triton's have none.
UNAWARE = ("0.20.2", "0.21.0")


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """With all of the release's series."""
    return tree_with(tmp_path_factory.mktemp("patched"), *ON_REQUEST)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folders by the layouts' names; bf16 has no quantization_config."""
    folder = tmp_path_factory.mktemp("mini")
    layouts = {"fp8": None, "mxfp4-experts": Mxfp4Experts()}
    for name, make in LAYOUTS.items():
        layouts |= {name: make(), f"{name}-bf16": Dequantised(make())}
    for name, layout in layouts.items():
        mini.write_checkpoint(folder / name, mini.Recipe(TINY, 0, layout), threads=1, log=lambda line: None)
    return {name: folder / name for name in (*DEEPSEEKS, *LAYOUTS)}


def compressed_tensors():
    packages = os.environ.get("COMPRESSED_TENSORS")
    if not packages:
        pytest.skip("COMPRESSED_TENSORS does not name a folder with that package; scripts/test.sh makes one")
    return packages


def load(tree, folders, capability="9.0"):
    environment = os.environ | {"PYTHONPATH": f"{tree}:{compressed_tensors()}", "CAPABILITY": capability}
    script = [sys.executable, "-B", Path(__file__).with_name("quantised.py")]
    given = json.dumps({name: str(path) for name, path in folders.items()})
    done = subprocess.run(script, input=given, text=True, capture_output=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def edited(folder, new, more=(), without=r"(?!)"):
    """A copy of a checkpoint whose index has another tensor, or lacks some."""
    shutil.copytree(folder, new, copy_function=os.link)
    index = json.loads((new / "model.safetensors.index.json").read_text())
    files = {name: file for name, file in index["weight_map"].items() if not re.search(without, name)}
    (new / "model.safetensors.index.json").unlink()
    (new / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files | dict(more)}))
    return new


@pytest.fixture(scope="session")
def dummies(patched, tmp_path_factory):
    """Of each layout a folder that holds config.json alone, for throughput.py."""
    folder = tmp_path_factory.mktemp("dummy")
    for name in QUANTISED:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(mini.model_config(TINY, LAYOUTS[name]())))
        write_names(folder / name, mini.Recipe(replace(TINY, experts=1), 0, LAYOUTS[name]()))
    return load(patched, {name: folder / name for name in QUANTISED})


@pytest.fixture(scope="session")
def loaded(patched, checkpoints, tmp_path_factory):
    folder, nvfp4 = tmp_path_factory.mktemp("edited"), checkpoints["nvfp4"]
    more = {
        "strange": edited(nvfp4, folder / "1", {"layers.1.attn.compressor.wkv.zero_point": "x.safetensors"}),
        "strange expert": edited(nvfp4, folder / "2", {"layers.0.ffn.experts.3.w1.zero_point": "x.safetensors"}),
        "half": edited(nvfp4, folder / "3", without=r"layers\.0\.attn\.wkv\.(weight_|input)"),
    }
    return load(patched, checkpoints | more)


@pytest.mark.parametrize("layout", QUANTISED)
def test_each_layer_of_each_layout_holds_the_values_of_the_checkpoint(loaded, layout):
    result = loaded[layout]
    assert "error" not in result, result["error"]
    assert result["adapted"]
    errors = {name: layer["error"] for name, layer in result["layers"].items()}
    assert len(errors) == 35 and set(errors.values()) == {0.0}
    unloaded = [name for name in result["unloaded"] if not name.endswith((*IN_A_LOADED_MODEL, *NOT_IN_FILES))]
    assert unloaded == []


@pytest.mark.parametrize("layout", QUANTISED)
def test_linears_have_the_method_of_their_tensors(loaded, layout):
    renamed = RENAMED.get(RELEASE, {})
    linears, others, experts, drafts = (
        name if isinstance(name, dict) else renamed.get(name, name) for name in EXPECTED[layout]
    )
    layers = {name: layer["method"] for name, layer in loaded[layout]["layers"].items()}
    found = {name: layers[f"model.layers.1.{name}"] for name in EVERY_LINEAR}
    assert found == dict.fromkeys(EVERY_LINEAR, linears) | others
    assert layers["model.layers.1.ffn.experts"] == experts
    assert layers["model.layers.3.mtp_block.attn.wq_b"] == drafts


@pytest.mark.parametrize("layout", QUANTISED)
def test_dummy_weights_of_a_layout_are_seeded(dummies, layout):
    """Of benchmarks/seeded_weights.py: projections have the size of trained ones in every format."""
    assert "error" not in dummies[layout], dummies[layout]
    seeded = dummies[layout]["seeded"]
    names = ("attn.fused_wqa_wkv", "attn.wq_b", *EVERY_LINEAR[-4:])
    assert {name for name in seeded if ".layers.1." in name} == {f"model.layers.1.{name}" for name in names}
    assert all(0.6 < value < 1.5 for value in seeded.values()), seeded


@pytest.mark.parametrize("layout", QUANTISED)
def test_whose_inputs_the_reference_of_a_layout_rounds(loaded, layout):
    """Of benchmarks/rounded_inputs.py: those of all FP8 linears, by the names that vLLM's layers have."""
    found = loaded[layout]
    rounded = {name for name, layer in found["layers"].items() if layer.get("rounded")}
    none = {"nvfp4": set(EVERY_LINEAR), "autoround": set(EVERY_LINEAR)}
    plain = none.get(layout, {name for name, method in EXPECTED[layout][1].items() if method == PLAIN})
    if layout == "ct-fp8-tensor":
        plain |= {"attn.wo_a"}  # expanded to BF16
    assert rounded & {f"model.layers.1.{name}" for name in EVERY_LINEAR} == {
        f"model.layers.1.{name}" for name in EVERY_LINEAR if name not in plain
    }
    assert not found["missed"] and not any("experts" in name and "shared" not in name for name in rounded)


@pytest.mark.parametrize("layout", ["nvfp4", "autoround", "ct-fp8-tensor"])
def test_wo_a_that_no_grouped_product_takes_is_expanded(loaded, layout):
    for name in ("model.layers.0", "model.layers.1", "model.layers.2"):
        layer = loaded[layout]["layers"][f"{name}.attn.wo_a"]
        assert (layer["after"], layer["dtype"], layer["parameters"]) == (0.0, "torch.bfloat16", ["weight"])


def test_experts_run_on_marlin_on_hopper_and_linears_too_up_to_0_22_1(loaded):
    log = [line for result in loaded.values() for line in result.get("log", [])]  # each is said once
    assert any("Using 'MARLIN' NvFp4 MoE backend" in line for line in log)
    reason = "FlashInfer's CuTe DSL product needs SM100 or SM103"
    if RELEASE != "0.33.0":  # which chooses later, when weights are created
        assert f"NVFP4 linears run on MarlinNvFp4LinearKernel: {reason}." in log


def test_the_cute_dsl_product_is_tried_first(loaded):
    own = ["FlashInferCuteDslNvFp4LinearKernel"] if RELEASE == "0.33.0" else ["CuTeDSLNvFp4LinearKernel"]
    assert loaded["nvfp4"]["kernels"][:1] == own


@pytest.mark.parametrize("layout", QUANTISED)
def test_the_clamp_of_swiglu_reaches_experts_of_all_formats(loaded, layout):
    layers = loaded[layout]["layers"]
    # In the kernel's configuration. compressed-tensors' NVFP4 experts have one only when they are prepared.
    in_configuration = "later" if layout in ("ct-nvfp4", "ct-fp8-tensor") else 10.0
    assert layers["model.layers.1.ffn.experts"]["clamp"] == [in_configuration, 10.0]
    assert layers["model.layers.3.mtp_block.ffn.experts"]["clamp"] == [10.0, 10.0]


def swiglu(gate, up, limit=10.0):
    gate, up = min(gate, limit), max(-limit, min(up, limit))
    return gate / (1 + math.exp(-gate)) * up


@pytest.mark.skipif(RELEASE not in UNAWARE, reason="vLLM's kernels clamp")
@pytest.mark.parametrize("layout", ["ct-nvfp4", "ct-fp8-tensor", "ct-w4a16", "autoround"])
def test_tritons_kernel_clamps_experts_in_bf16(loaded, layout):
    experts = loaded[layout]["layers"]["model.layers.3.mtp_block.ffn.experts"]
    assert experts["activation"] == pytest.approx([swiglu(20, 30), swiglu(1, -30)], rel=2**-8)


@pytest.mark.skipif(RELEASE not in UNAWARE, reason="vLLM chooses kernels that clamp")
@pytest.mark.parametrize("capability", ["9.0", "10.0"])
def test_kernels_that_clamp_are_chosen(patched, checkpoints, loaded, capability):
    if capability != "9.0":
        loaded = load(patched, {name: checkpoints[name] for name in QUANTISED}, capability)
    kernels = {}
    for name in QUANTISED:
        layers = [loaded[name]["layers"][f"model.layers.{layer}.ffn.experts"] for layer in ("1", "3.mtp_block")]
        kernels[name] = [layer["kernel"] for layer in layers]
    assert kernels == {
        "nvfp4": ["MarlinExperts", "MarlinExperts"],
        "nvfp4-experts": ["MarlinExperts", "MarlinExperts"],
        "ct-nvfp4": ["MarlinExperts", "TritonExperts"],
        "ct-fp8-tensor": ["MarlinExperts", "TritonExperts"],
        "ct-w4a16": [None, "TritonExperts"],  # a method of Marlin's without a choice
        "autoround": ["MarlinExperts", "TritonExperts"],
    }  # fmt: skip


@pytest.mark.parametrize("layout", DEEPSEEKS)
def test_deepseeks_own_formats_are_left_to_vllm(loaded, layout):
    layers = {name: layer["method"] for name, layer in loaded[layout]["layers"].items()}
    methods = {"Fp8LinearMethod": EVERY_LINEAR[:7], PLAIN: EVERY_LINEAR[7:], DEEPSEEKS[layout]: ["ffn.experts"]}
    for method, names in methods.items():
        assert {layers[f"model.layers.1.{name}"] for name in names if name != "attn.wo_b"} == {method}
    assert not loaded[layout]["adapted"]


def test_a_checkpoint_without_quantisation_loads(loaded):
    result, layers = loaded["bf16"], loaded["bf16"]["layers"].values()
    assert {layer["method"] for layer in layers} == {PLAIN, "UnquantizedFusedMoEMethod"}
    assert {layer["error"] for layer in layers} == {0.0} and not result["adapted"]


def test_a_tensor_that_fits_nowhere_is_named(loaded):
    assert loaded["strange"]["error"].replace(".mla_attn.", ".") == (
        "ValueError: x.safetensors of this checkpoint holds layers.1.attn.compressor.wkv.zero_point, "
        "which is for no parameter of the model: model.layers.1.attn.compressor.fused_wkv_wgate takes "
        "input_scale, weight, weight_scale, weight_scale_2."
    )
    assert loaded["strange expert"]["error"].replace(".routed_experts.", ".") == (
        "ValueError: x.safetensors of this checkpoint holds layers.0.ffn.experts.3.w1.zero_point, "
        "which is for no parameter of the model: model.layers.0.ffn.experts.w13 takes input_scale, weight, "
        "weight_scale, weight_scale_2."
    )


def test_a_fused_layer_that_is_quantised_by_half_is_refused(loaded):
    assert loaded["half"]["error"] == (
        "ValueError: This checkpoint has layers.0.attn.wq_a quantised and layers.0.attn.wkv not; "
        "vLLM runs both as one layer and needs them alike."
    )


# ---------------------------------------------------------------- names


def test_modules_of_the_checkpoint_that_a_layer_holds():
    modules = {
        "model.layers.3.attn.fused_wqa_wkv": ["layers.3.attn.wq_a", "layers.3.attn.wkv"],
        "model.layers.3.attn.compressor.fused_wkv_wgate": [
            "layers.3.attn.compressor.wkv",
            "layers.3.attn.compressor.wgate",
        ],
        "model.layers.3.ffn.experts": [f"layers.3.ffn.experts.0.{part}" for part in ("w1", "w2", "w3")],
        "model.layers.43.ffn.shared_experts.down_proj": ["mtp.0.ffn.shared_experts.w2"],
        "model.layers.44.attn.wq_b": ["mtp.1.attn.wq_b"],
        "": ["mtp.0.e_proj", "mtp.0.h_proj"],
        "lm_head": [],
    }  # fmt: skip
    assert {prefix: quantised_linears.checkpoint_modules(prefix, 43) for prefix in modules} == modules


@pytest.mark.parametrize("names, needed", [
    ({"layers.0.attn.wq_a.weight", "layers.0.attn.wq_a.scale", "layers.2.attn.compressor.wkv.weight"}, False),
    ({"layers.2.attn.compressor.wkv.weight", "layers.2.attn.compressor.wkv.scale"}, True),
    ({"layers.2.attn.indexer.weights_proj.weight", "layers.2.attn.indexer.weights_proj.weight_scale"}, True),
    ({"layers.2.ffn.experts.0.w1.weight", "layers.2.ffn.experts.0.w1.scale"}, False),
])  # fmt: skip
def test_deepseeks_own_format_needs_nothing_unless_more_is_quantised(names, needed):
    config = SimpleNamespace(get_name=lambda: "deepseek_v4_fp8", weight_block_size=[128, 128])
    checkpoint = quantised_linears.Checkpoint.of_files(dict.fromkeys(names, "a file"))
    assert quantised_linears._needed(config, checkpoint) is needed


@pytest.mark.parametrize("name", ["deepseek_v4_fp8", "fp8"])
def test_what_vllm_cannot_know_is_decided_here(name):
    """FP8 with other scales than of blocks, and a checkpoint whose tensors are not known, of another tool."""
    config = SimpleNamespace(get_name=lambda: name, weight_block_size=None)
    assert quantised_linears._needed(config, None)
    config.weight_block_size = [128, 128]
    assert quantised_linears._needed(config, None) is (name == "fp8")


@pytest.fixture
def said(monkeypatch):
    """What was warned of."""
    said = []
    logger = SimpleNamespace(warning_once=lambda *words: said.append(words))
    monkeypatch.setattr(quantised_linears, "logger", logger)
    return said


def test_names_of_a_checkpoint_in_one_file(tmp_path, said):
    read = quantised_linears._read.__wrapped__
    save_file({"norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    assert read(str(tmp_path), None, None).files == {"norm.weight": "model.safetensors"} and not said
    (tmp_path / "model.safetensors.index.json").write_text("{")  # cut off: vLLM's loader is to say so
    assert read(str(tmp_path), None, None) is None and len(said) == 1


def test_names_of_a_checkpoint_where_vllm_keeps_its_downloads(tmp_path, monkeypatch, said):
    """With --download-dir and without a hub the usual cache has no index."""
    index = tmp_path / "index.json"
    index.write_text('{"weight_map": {"norm.weight": "model-1.safetensors"}}')
    monkeypatch.setattr(checkpoint_files, "get_hf_file_to_dict", lambda *_: None)
    monkeypatch.setattr(checkpoint_files, "hf_hub_download", lambda *_, cache_dir, **__: cache_dir and index)
    read = quantised_linears._read.__wrapped__
    assert read("organisation/model", None, "downloads").files == {"norm.weight": "model-1.safetensors"}
    assert not said
    assert read("organisation/model", None, None) is None and "no index" in said[0]


@pytest.mark.parametrize("needed", [False, True])
def test_dsparks_draft_is_refused_where_the_series_has_work(monkeypatch, needed):
    monkeypatch.setattr(quantised_linears, "_needed", lambda *_: needed)
    config = SimpleNamespace(
        quant_config=SimpleNamespace(), model_config=SimpleNamespace(model="none"),
        load_config=SimpleNamespace(load_format="dummy"), speculative_config=SimpleNamespace(method="dspark"),
    )  # fmt: skip
    if not needed:
        return quantised_linears.adapt(config)
    with pytest.raises(ValueError, match=r"^The series quantised-linears does not load DSpark's draft [^.]*\.$"):
        quantised_linears.adapt(config)


def test_what_is_compiled_for_other_tensors_is_not_found(monkeypatch):
    """By vLLM's hash of the configuration, which has nothing else of the files."""
    monkeypatch.setattr(quantised_linears, "_needed", lambda *_: True)
    hashed = []
    plain, parts = ("weight",), ("weight", "weight_scale")
    # A set has its parts in another order in each process.
    for modules in ({"a": plain}, {"a": plain, "b": parts}, {"b": parts[::-1], "a": plain}, {}):
        found = quantised_linears.Checkpoint({}, modules) if modules else None
        monkeypatch.setattr(quantised_linears, "_read", lambda *_, found=found: found)
        quant = SimpleNamespace(packed_modules_mapping={}, get_quant_method=print, get_name=lambda: "fp8")
        config = SimpleNamespace(
            quant_config=quant, speculative_config=None, additional_config={}, load_config=SimpleNamespace(
                load_format="auto", download_dir=None), model_config=SimpleNamespace(
                model="none", revision=None, hf_config=SimpleNamespace(num_hidden_layers=1)),
        )  # fmt: skip
        quantised_linears.adapt(config)
        assert drop_in.switched_on(config.additional_config)
        hashed.append(json.dumps(config.additional_config, sort_keys=True))
    assert hashed[1] == hashed[2] and len(set(hashed)) == 3


def test_weights_that_vllm_quantises_at_load_are_left_to_it():
    config = SimpleNamespace(get_name=lambda: "fp8")
    names = ["layers.0.attn.wq_a.weight", "layers.0.ffn.gate.weight", "layers.0.ffn.gate.bias", "norm.weight"]
    for more, needed in (([], False), (["layers.0.attn.wq_a.weight_scale"], True)):
        checkpoint = quantised_linears.Checkpoint.of_files(dict.fromkeys(names + more, "a file"))
        assert quantised_linears._needed(config, checkpoint) is needed


def test_experts_as_deepseek_has_them_beside_nvfp4_ones():
    class Config:
        _resolved_moe_quant_algo = "NVFP4"
        moe_quant_algo = property(lambda self: self._resolved_moe_quant_algo)

    config = Config()
    for parts, seen in (({"weight", "scale"}, ""), ({"weight", "weight_scale", "weight_scale_2"}, "NVFP4")):
        with quantised_linears._own_experts(config, frozenset(parts)):
            assert config.moe_quant_algo == seen
        assert config.moe_quant_algo == "NVFP4"


def test_layouts_are_seeded(checkpoints, tmp_path):
    def digest(folder):
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))]

    for seed, same in ((0, True), (1, False)):
        recipe = mini.Recipe(TINY, seed, LAYOUTS["ct-w4a16"]())
        mini.write_checkpoint(tmp_path / str(seed), recipe, threads=2, log=lambda line: None)
        assert (digest(tmp_path / str(seed)) == digest(checkpoints["ct-w4a16"])) is same


# ---------------------------------------------------------------- formats


def test_e2m1_and_four_bit_integers_by_hand():
    # OCP Microscaling Formats 1.0, table 7: 0 0.5 1 1.5 2 3 4 6, then with the sign; the low half first.
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert weight_formats.unpack_e2m1(codes).tolist() == [magnitudes + [-m for m in magnitudes]]
    packed = torch.tensor([[0x76543210], [-0x01234568]], dtype=torch.int32)  # the second: 0xFEDCBA98
    low, high = list(range(-8, 0)), list(range(0, 8))
    assert weight_formats.unpack_int4(packed, 1).tolist() == [low, high]
    assert weight_formats.unpack_int4(packed.T.contiguous(), 0).T.tolist() == [low, high]


@pytest.mark.parametrize("make", [
    modelopt_nvfp4, compressed_tensors_nvfp4, gptq_int4, compressed_tensors_int4,
    lambda w: fp8_blocks(w, "weight_scale_inv", torch.float8_e8m0fnu),
    lambda w: fp8_blocks(w, "weight_scale", torch.float32), fp8_tensor,
])  # fmt: skip
def test_formats_stand_for_what_was_stored_and_that_is_near_the_weight(make):
    torch.manual_seed(0)
    weight = torch.randn(192, 256) * torch.logspace(-2, 2, 192).unsqueeze(1)
    stored, represented = make(weight)
    expanded = weight_formats.dequantise(stored)
    assert torch.equal(expanded, represented.float())
    assert torch.equal(expanded, expanded.bfloat16().float())  # so BF16 references lose nothing
    error = (expanded - weight).norm() / weight.norm()
    assert 0.01 < error < 0.13


def test_fp8_a_tensor_and_a_row():
    weight = torch.randn(6, 8).to(torch.float8_e4m3fn)
    scales = torch.tensor([2.0, 3.0])
    expanded = weight_formats.dequantise({"weight": weight, "weight_scale": scales}, [4, 2])
    rows = torch.tensor([2.0] * 4 + [3.0] * 2).unsqueeze(1)
    assert torch.equal(expanded, weight.float() * rows)
    for each in (rows, rows.flatten()):
        expanded = weight_formats.dequantise({"weight": weight, "weight_scale": each})
        assert torch.equal(expanded, weight.float() * rows)


def test_an_unknown_format_is_named():
    parameters = {"weight": torch.zeros(1, dtype=torch.int8), "zeros": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"^Weights stored as weight \(int8\), zeros \(float32\) cannot be"):
        weight_formats.dequantise(parameters)


# ---------------------------------------------------------------- products


def linear(outputs, held):
    class Layer(torch.nn.Module):
        weight = held
        asked = 0

        def forward(self, x):
            Layer.asked += 1
            return outputs

    return Layer()


def test_an_unquantised_product_is_vllms_own_call(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: calls.append((args, kwargs)) or "product")
    layer, x = linear(None, torch.randn(8, 16).bfloat16()), torch.randn(3, 16).bfloat16()
    assert quantised_linears.project_float32(layer, x) == "product"
    ((left, right), options) = calls[0]
    assert left is x and right.data_ptr() == layer.weight.data_ptr() and right.shape == (16, 8)
    assert options == {"out_dtype": torch.float32} and len(calls) == 1 and layer.asked == 0


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.int32, None])
def test_a_quantised_product_runs_through_the_layer(as_tuple, dtype):
    out = torch.randn(3, 8, dtype=torch.bfloat16)
    layer = linear((out, None) if as_tuple else out, None if dtype is None else torch.zeros(8, 16).to(dtype))
    result = quantised_linears.project_float32(layer, torch.randn(3, 16).bfloat16())
    assert layer.asked == 1 and result.dtype == torch.float32 and torch.equal(result, out.float())


@pytest.mark.parametrize("dtype, is_stock", [(torch.bfloat16, True), (torch.uint8, False), (torch.int32, False)])
def test_a_compressors_product_is_vllms_own_unless_it_is_quantised(dtype, is_stock):
    out, x = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(3, 16, dtype=torch.bfloat16)
    compressor = SimpleNamespace(fused_wkv_wgate=linear(out, torch.zeros(8, 16).to(dtype)))

    def stock():
        return "stock"

    product = quantised_linears.kv_score(compressor, x, stock)
    assert (product is stock) is is_stock
    assert is_stock or torch.equal(product(), out.float())


def test_the_output_is_of_the_heads_without_padding(monkeypatch):
    seen = []
    product = torch.ones(5, 2, 24)
    monkeypatch.setattr(quantised_linears, "grouped_product", lambda *args: seen.append(args) or product)
    attention = SimpleNamespace(n_local_heads=8, wo_b=lambda z: z.shape)
    o, positions = torch.randn(5, 64, 512), torch.arange(5)
    assert quantised_linears.output(attention, o, positions) == (5, 48)
    assert seen[0][0] is attention and torch.equal(seen[0][1], o[:, :8]) and seen[0][2] is positions


def test_the_grouped_product_is_its_definition():
    """In float64: each pair of a head's last 64 values turned back by its position's angle, then the product."""
    torch.manual_seed(0)
    tokens, heads, groups, rank = 5, 8, 2, 24
    angles = torch.arange(32).unsqueeze(1) * torch.logspace(0, -4, 32)
    attention = SimpleNamespace(
        rope_head_dim=64,
        rotary_emb=SimpleNamespace(cos_sin_cache=torch.cat((angles.cos(), angles.sin()), -1)),
        n_local_groups=groups,
        o_lora_rank=rank,
        wo_a=SimpleNamespace(weight=torch.randn(groups * rank, heads // groups * 512, dtype=torch.bfloat16) / 45),
    )
    o, positions = torch.randn(tokens, heads, 512, dtype=torch.bfloat16), torch.tensor([0, 3, 31, 7, 7])

    def definition(positions):
        exact = o.double()
        pairs = torch.view_as_complex(exact[..., -64:].unflatten(-1, (32, 2)))
        back = -angles[positions].double().unsqueeze(1)
        turn = torch.polar(torch.ones_like(back), back)
        exact = torch.cat((exact[..., :-64], torch.view_as_real(pairs * turn).flatten(-2)), -1)
        weight = attention.wo_a.weight.double().view(groups, rank, -1)
        return torch.stack([exact.view(tokens, groups, -1)[:, g] @ weight[g].T for g in range(groups)], 1)

    out = quantised_linears.grouped_product(attention, o, positions)
    assert out.shape == (tokens, groups, rank) and out.dtype == torch.bfloat16
    expected = definition(positions)
    assert (out - expected).abs().max() < 2**-7 * expected.abs().max()
    assert (out - definition(positions.flip(0))).abs().max() > 0.1 * expected.abs().max()  # positions matter


class Exact:
    """A kernel that multiplies by the weight that the layer's one scale stands for."""

    def process_weights_after_loading(self, layer):
        pass

    def apply_weights(self, layer, x, bias=None):
        weight = weight_formats.unpack_e2m1(layer.weight) * layer.weight_scale.float().repeat_interleave(16, 1)
        return (x.float() @ (weight * layer.weight_global_scale).T).to(x.dtype)


def nvfp4_layer(make, weights):
    """A fused layer as it is loaded, of tensors with scales of their own, and the weight that it stands for."""
    stored = [make(weight)[0] for weight in weights]
    layer = torch.nn.Module()
    for name in stored[0]:
        parts = [part[name].reshape(1) if part[name].dim() < 2 else part[name] for part in stored]
        layer.register_parameter(name, torch.nn.Parameter(torch.cat(parts), requires_grad=False))
    layer.logical_widths = [weight.shape[0] for weight in weights]
    return layer, torch.cat([make(weight)[1] for weight in weights])


def weights_of(sizes):
    weights = [torch.randn(32, 64).clamp(-3, 3) * size for size in sizes]
    for weight in weights:
        weight[0, 0] = 4 * weight.abs().max()
    weights[1][0, 0] = weights[0][0, 0] * sizes[1]
    return weights


def modelopt_method():
    from vllm.model_executor.layers.quantization import modelopt

    if hasattr(modelopt, "ModelOptNvFp4LinearMethod"):
        return object.__new__(modelopt.ModelOptNvFp4LinearMethod)
    return modelopt.ModelOptLinearMethod(*modelopt.resolve("NVFP4", SimpleNamespace(group_size=16), ""))


@pytest.mark.parametrize("make", [modelopt_nvfp4, compressed_tensors_nvfp4])
@pytest.mark.parametrize("sizes", [(1.0, 37.0), (1.0, 1.0)])
def test_tensors_with_scales_of_their_own_keep_them_in_a_fused_layer(monkeypatch, make, sizes):
    torch.manual_seed(1)
    layer, represented = nvfp4_layer(make, weights_of(sizes))
    if make is modelopt_nvfp4:
        method = modelopt_method()
    else:
        monkeypatch.syspath_prepend(compressed_tensors())
        from vllm.model_executor.layers.quantization.compressed_tensors import schemes

        method = object.__new__(schemes.CompressedTensorsW4A4Fp4)
        method.apply, method.use_a16 = method.apply_weights, False
    method.kernel = Exact()
    quantised_linears._after_loading(method, quantised_linears._keep_shard_scales)
    method.process_weights_after_loading(layer)
    x = torch.randn(3, 64, dtype=torch.bfloat16)

    def is_right():
        expected = x.float() @ represented.T
        out = method.apply(layer, x).float()
        return ((out - expected).norm(dim=0) / expected.norm(dim=0)).max() < 2**-7

    assert is_right()
    assert hasattr(layer, "dsv4_rest_of_scale") is (sizes[0] != sizes[1])  # else nothing more runs
    # New weights, as vLLM loads them into a running server: its graphs have the kernels of the first.
    for new in (sizes, (1.0, 1.0), sizes):
        layer, represented = nvfp4_layer(make, weights_of(new))
        method.process_weights_after_loading(layer)
        assert is_right()
    if sizes[0] == sizes[1]:
        layer, represented = nvfp4_layer(make, weights_of((1.0, 37.0)))
        with pytest.raises(ValueError, match="start the server anew with them"):
            method.process_weights_after_loading(layer)


def test_vllm_keeps_the_scales_of_tensors_of_new_weights():
    """It copies what it made of them to where a running server reads."""
    torch.manual_seed(1)
    layer, _ = nvfp4_layer(modelopt_nvfp4, weights_of((1.0, 37.0)))
    layer.quant_method = method = modelopt_method()
    method.kernel = Exact()
    quantised_linears._after_loading(method, quantised_linears._keep_shard_scales)
    reload.record_metadata_for_reloading(layer)
    method.process_weights_after_loading(layer)
    read = layer.dsv4_rest_of_scale
    new, represented = nvfp4_layer(modelopt_nvfp4, weights_of((5.0, 2.0)))
    reload.initialize_layerwise_reload(layer)
    for name, parameter in list(layer.named_parameters()):
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, new.get_parameter(name).data)
    reload.finalize_layerwise_reload(layer, SimpleNamespace(dtype=torch.bfloat16))
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    expected = x.float() @ represented.T
    error = (method.apply(layer, x).float() - expected).norm(dim=0) / expected.norm(dim=0)
    assert error.max() < 2**-7
    assert layer.dsv4_rest_of_scale is read  # which CUDA graphs have


def test_a_bias_is_not_multiplied_by_the_rest_of_a_scale():
    layer = SimpleNamespace(dsv4_rest_of_scale=torch.tensor([1.0, 0.5]))
    stock = lambda layer, x, bias: x.clone() if bias is None else x + bias  # noqa: E731
    x, bias = torch.full((3, 2), 4.0), torch.tensor([1.0, 2.0])
    assert quantised_linears._apply_rest_of_scale(stock, layer, x, bias).tolist() == [[5.0, 4.0]] * 3


def test_wo_a_in_blocks_needs_deepgemm():
    for shape in ((2, 4, 8), (8, 8)):
        layer, seen = SimpleNamespace(weight_block_size=[128, 128], weight=torch.zeros(shape)), []
        if len(shape) == 3:
            quantised_linears._expand_wo_a(None, seen.append, layer)
        else:
            with pytest.raises(ValueError, match=r"^wo_a is FP8 in blocks here, and .* needs DeepGEMM; do not"):
                quantised_linears._expand_wo_a(None, seen.append, layer)
        assert seen == [layer]


def test_the_weight_of_wo_a_and_its_scales():
    wo_a = SimpleNamespace(weight=torch.zeros(2, 2), weight_scale="compressed-tensors'")
    assert quantised_linears.is_dense(wo_a)
    wo_a.weight = wo_a.weight.to(torch.float8_e4m3fn)
    assert not quantised_linears.is_dense(wo_a)
    assert quantised_linears.block_scale(wo_a) == "compressed-tensors'"
    wo_a.weight_scale_inv = "DeepSeek's"
    assert quantised_linears.block_scale(wo_a) == "DeepSeek's"


def test_a_layer_whose_format_nothing_says_is_refused():
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    layer = LinearBase.__new__(LinearBase)
    names = [f"layers.0.attn.wq_b.{part}" for part in ("weight", "weight_scale")]
    checkpoint = quantised_linears.Checkpoint.of_files(dict.fromkeys(names, "a file"))
    config = SimpleNamespace(get_name=lambda: "modelopt", dsv4_checkpoint=checkpoint)
    sentence = r"^layers.0.attn.wq_b .* \(weight, weight_scale\), and its .* \(modelopt\) does not say how"
    for stock in (lambda *_: None, lambda *_: UnquantizedLinearMethod()):
        with pytest.raises(ValueError, match=sentence):
            quantised_linears._quant_method(config, stock, 1, layer, "model.layers.0.attn.wq_b")


def test_a_limit_that_a_kernel_has_already_is_kept():
    config = SimpleNamespace(gemm1_clamp_limit=7.0)
    assert quantised_linears._clamped(config, 10.0) is config and config.gemm1_clamp_limit == 7.0


@pytest.mark.parametrize("name, inverse", [("w13_weight_scale_2", False), ("w13_weight_global_scale", True)])
def test_experts_whose_w1_and_w3_have_scales_of_their_own(name, inverse):
    layer = torch.nn.Module()
    scales = torch.tensor([[2.0, 2.0], [1.0, 8.0], [3.0, 1.0]])
    blocks = torch.rand(3, 8, 4).add(0.5).to(torch.float8_e4m3fn)
    setattr(layer, name, torch.nn.Parameter(1 / scales if inverse else scales.clone(), requires_grad=False))
    layer.w13_weight_scale = torch.nn.Parameter(blocks.clone(), requires_grad=False)
    seen = []
    quantised_linears._share_expert_scales(None, seen.append, layer)
    shared = 1 / getattr(layer, name) if inverse else getattr(layer, name)
    assert seen == [layer] and torch.equal(shared[:, 0], shared[:, 1])
    before = blocks.float().unflatten(1, (2, 4)) * scales[..., None, None]
    after = layer.w13_weight_scale.float().unflatten(1, (2, 4)) * shared[..., None, None]
    assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])  # equal, and a power of two
    assert torch.allclose(after[2], before[2], rtol=2**-4, atol=0) and not torch.equal(after[2], before[2])


def test_the_clamp_of_experts_reaches_their_kernel():
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

    made = []

    def make(**arguments):
        made.append(arguments)
        return FUSED_MOE_UNQUANTIZED_CONFIG

    config = quantised_linears.with_clamp(10.0, make, w1_scale=1)
    assert config.gemm1_clamp_limit == 10.0 and made == [{"w1_scale": 1}]
    assert FUSED_MOE_UNQUANTIZED_CONFIG.gemm1_clamp_limit is None  # one object for all models
    assert quantised_linears.with_clamp(None, make) is FUSED_MOE_UNQUANTIZED_CONFIG


def experts_layer(backend="auto", limit=10.0, **config):
    return SimpleNamespace(swiglu_limit=limit, moe_config=SimpleNamespace(moe_backend=backend, **config))


@pytest.mark.parametrize("layer, parts, backend", [
    (experts_layer(), {"weight", "weight_scale", "weight_scale_2"}, "marlin"),
    (experts_layer(), {"weight_packed", "weight_scale", "weight_global_scale"}, "marlin"),
    (experts_layer(), {}, "triton"),  # not quantised
    (experts_layer(), {"weight", "scale"}, "auto"),
    (experts_layer("flashinfer_cutlass"), {"weight_scale_2"}, "flashinfer_cutlass"),
    (experts_layer(limit=None), {"weight_scale_2"}, "auto"),
    (experts_layer(swiglu_limit=10.0), {"weight_scale_2"}, "auto"),  # from 0.22.0 on
])  # fmt: skip
def test_a_kernel_that_clamps_is_preferred_where_vllm_does_not_ask(layer, parts, backend):
    quantised_linears._prefer_clamping(layer, frozenset(parts))
    assert layer.moe_config.moe_backend == backend


@pytest.mark.parametrize("layer, kernel, is_refused", [
    (experts_layer(), "FlashInferExperts", True),
    (experts_layer(), None, True),
    (experts_layer(), "MarlinExperts", False),
    (experts_layer(limit=None), "FlashInferExperts", False),
    (experts_layer(swiglu_limit=10.0), "FlashInferExperts", False),
])  # fmt: skip
def test_a_kernel_that_drops_the_clamp_is_refused_where_vllm_does_not_ask(layer, kernel, is_refused):
    method = SimpleNamespace(experts_cls=kernel and type(kernel, (), {}))
    if not is_refused:
        return quantised_linears._refuse_unclamped(method, layer)
    named = kernel or "SimpleNamespace"
    with pytest.raises(ValueError, match=rf"the kernel that this vLLM has chosen .* drops \({named}\); take"):
        quantised_linears._refuse_unclamped(method, layer)


def test_names_are_checked_when_weights_are_loaded_first(monkeypatch):
    calls = []
    monkeypatch.setattr(quantised_linears, "check_names", lambda *args: calls.append(args))

    class Model(torch.nn.Module):
        def load_weights(self, weights):
            return {*weights, len(calls)}

    model, config = Model(), object()
    quantised_linears.check_names_later(model, config)
    assert calls == [] and model.load_weights(["a"]) == {"a", 1}
    assert model.load_weights(weights=["b"]) == {"b", 1} and calls == [(model, config)]


def test_tensors_of_another_pipeline_stage_are_its_own(monkeypatch):
    monkeypatch.setattr(utils, "_model_to_pp_missing_layer_names", {})
    model = torch.nn.Module()
    model.hf_to_vllm_mapper = utils.WeightsMapper(orig_to_new_prefix={"layers.": "model.layers."})
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList([utils.PPMissingLayer(), torch.nn.Linear(1, 1)])
    for layer in range(2):
        found = quantised_linears.Checkpoint.of_files({f"layers.{layer}.attn.wq_b.weight_scale": "a file"})
        config = SimpleNamespace(quant_config=SimpleNamespace(dsv4_checkpoint=found))
        if layer == 0:
            quantised_linears.check_names(model, config)
        else:
            with pytest.raises(ValueError, match=r"holds layers\.1\.attn\.wq_b\.weight_scale, which is for no"):
                quantised_linears.check_names(model, config)


# ---------------------------------------------------------------- FlashInfer's CuTe DSL product


def scale_at(interleaved, row, group):
    """A block scale where tcgen05 reads it, byte by byte: tiles of 128 rows x 4 groups, 512 bytes each."""
    tiles_across = interleaved.shape[1] // 4
    tile = row // 128 * tiles_across + group // 4
    return interleaved.flatten()[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4]


@pytest.mark.parametrize("rows, groups", [(128, 4), (256, 16), (64, 64), (200, 6)])
def test_scales_lie_where_the_tensor_core_reads_them(rows, groups):
    from vllm.dsv4_overlay.nvfp4_linear import interleave_scales

    scale = (torch.rand(rows, groups) * 400).to(torch.float8_e4m3fn)
    interleaved = interleave_scales(scale)
    assert interleaved.shape == (-(-rows // 128) * 128, -(-groups // 4) * 4) and interleaved.dtype == scale.dtype
    numbers = interleaved.float()
    found = torch.tensor([[scale_at(numbers, row, group) for group in range(groups)] for row in range(rows)])
    assert torch.equal(found, scale.float())
    assert numbers.count_nonzero() == scale.float().count_nonzero()  # the rest is zero


def define_quantisation(x, inverse_scale):
    """NVFP4 of activations by definition (float32): packed E2M1, E4M3 scales in the tensor core's order."""
    from vllm.dsv4_overlay.nvfp4_linear import interleave_scales

    blocks = x.float().view(x.shape[0], -1, 16)
    scale = (blocks.abs().amax(-1) / 6 * inverse_scale).clamp(max=448).to(torch.float8_e4m3fn)
    step = scale.float().unsqueeze(-1) / inverse_scale
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = torch.where(step > 0, blocks / step, 0)
    code = (scaled.abs().unsqueeze(-1) - magnitudes).abs().argmin(-1)
    code = (code + 8 * (scaled < 0)).to(torch.uint8).view(x.shape)
    return code[:, ::2] | code[:, 1::2] << 4, interleave_scales(scale)


def define_product(a, b, a_scale, b_scale, alpha, dtype, backend):
    """What the tensor core computes, from the same bytes."""
    assert backend == "cute-dsl" and b.shape[0] % 32 == 0 and b.shape[1] * 2 % 32 == 0
    whole = []
    for packed, scale in ((a, a_scale), (b, b_scale)):
        values, numbers = weight_formats.unpack_e2m1(packed), scale.float()
        groups = range(values.shape[1] // 16)
        found = [[scale_at(numbers, row, group) for group in groups] for row in range(values.shape[0])]
        whole.append(values * torch.tensor(found).repeat_interleave(16, 1))
    return (whole[0] @ whole[1].T * alpha).to(dtype)


@pytest.mark.parametrize("out, fan_in, bias", [(64, 128, False), (40, 144, True), (96, 16, False)])
def test_a_linear_by_the_cute_dsl_product_is_its_definition(monkeypatch, out, fan_in, bias):
    import vllm.utils.flashinfer
    from vllm.dsv4_overlay import nvfp4_linear

    torch.manual_seed(2)
    monkeypatch.setattr(nvfp4_linear.ops, "scaled_fp4_quant", define_quantisation)
    monkeypatch.setattr(vllm.utils.flashinfer, "flashinfer_scaled_fp4_mm", define_product, raising=False)
    layer, weight = nvfp4_layer(modelopt_nvfp4, [torch.randn(out, fan_in)])
    layer.output_size_per_partition = out
    method = modelopt_method()
    method.kernel = object.__new__(nvfp4_linear.CuTeDSLNvFp4LinearKernel)
    input_scale = float(layer.input_scale)
    method.process_weights_after_loading(layer)
    x = torch.randn(2, 3, fan_in, dtype=torch.bfloat16)
    offset = torch.randn(out, dtype=torch.bfloat16) if bias else None
    result = method.apply(layer, x, offset)
    rows = x.view(-1, fan_in)
    packed, scale = define_quantisation(rows, 1 / input_scale)
    numbers = [[scale_at(scale.float(), row, group) for group in range(fan_in // 16)] for row in range(6)]
    represented = weight_formats.unpack_e2m1(packed) * torch.tensor(numbers).repeat_interleave(16, 1) * input_scale
    expected = (represented @ weight.T).bfloat16()
    expected = (expected if offset is None else expected + offset).view(2, 3, out)
    assert result.shape == (2, 3, out) and result.dtype == torch.bfloat16
    assert torch.allclose(result.float(), expected.float(), rtol=2**-7, atol=1e-3)
    own = (represented - rows.float()).norm() / rows.float().norm()
    assert 0.03 < own < 0.13  # the activations' own error: the definition is one of quantisation


def test_a_weight_without_a_scale_for_its_last_columns_is_refused():
    from vllm.dsv4_overlay.nvfp4_linear import pad_weight

    sentence = "^An NVFP4 weight of 40 columns needs one scale for each 16 of them, and has 2.$"
    with pytest.raises(ValueError, match=sentence):
        pad_weight(torch.zeros(8, 20, dtype=torch.uint8), torch.zeros(8, 2).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("capability, model, packages, reason", [
    ((10, 0), "deepseek_v4", True, None),
    ((10, 3), "deepseek_v4", True, None),
    ((9, 0), "deepseek_v4", True, "FlashInfer's CuTe DSL product needs SM100 or SM103"),
    ((12, 0), "deepseek_v4", True, "FlashInfer's CuTe DSL product needs SM100 or SM103"),
    ((10, 0), "llama", True, "only DeepSeek V4 has it from vllm-dsv4-overlay"),
    ((10, 0), None, True, "only DeepSeek V4 has it from vllm-dsv4-overlay"),
    ((10, 0), "deepseek_v4", False, "FlashInfer is not installed, or has no CuTe DSL product"),
    ((10, 0), "deepseek_v4", "no compiler", "nvidia-cutlass-dsl is not installed"),
    (None, "deepseek_v4", True, "FlashInfer's CuTe DSL product needs SM100 or SM103"),
])  # fmt: skip
def test_who_gets_the_cute_dsl_product(monkeypatch, capability, model, packages, reason):
    import vllm.config
    from vllm.dsv4_overlay import nvfp4_linear
    from vllm.platforms.interface import DeviceCapability

    here = DeviceCapability(*capability) if capability else None
    platform = SimpleNamespace(get_device_capability=lambda: here, is_cuda=lambda: True)
    monkeypatch.setattr(nvfp4_linear, "current_platform", platform)
    utils = SimpleNamespace(is_cute_dsl_available=lambda: packages is True)
    found = {
        "flashinfer": SimpleNamespace(mm_fp4=None, __path__=[]),
        "flashinfer.cute_dsl": SimpleNamespace(utils=utils, __path__=[]),
        "flashinfer.cute_dsl.utils": utils,
    }
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module if packages else None)
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type=model)))
    monkeypatch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: config if model else None)
    assert nvfp4_linear.CuTeDSLNvFp4LinearKernel.is_supported() == (reason is None, reason)
