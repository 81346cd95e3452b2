"""The mini checkpoint: deterministic, named as vLLM's loader expects, numerically sane.

Nothing here needs a GPU. The tests that read vLLM's own mapper need an importable `vllm` of a
release that has DeepSeek V4 (or its source tree in VLLM_SOURCE) and are skipped without one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "benchmarks"))
import accuracy_e2e  # noqa: E402
import e2e  # noqa: E402
import make_mini_checkpoint as mini  # noqa: E402
import quantised_e2e  # noqa: E402
from features.run import engine_arguments  # noqa: E402
from features_e2e import parse_args  # noqa: E402
from mini_checkpoint import deepseek_v4, images, layouts, tokenizer  # noqa: E402
from mini_checkpoint.recipe import rng  # noqa: E402

TINY = mini.Shape(
    hidden=256,
    heads=4,
    q_lora=128,
    o_lora=128,
    o_groups=2,
    index_heads=4,
    experts=8,
    moe_intermediate=128,
    vocab=1024,
)
# Regular expressions for every parameter of a layer, written from the loader.
LAYER = r"(?:layers\.\d+|mtp\.\d+)"
SCALED = r"\.(?:weight|scale)"
ALLOWED = [
    r"(?:embed|head|norm)\.weight",
    r"(?:mtp\.\d+\.)?hc_head_(?:fn|base|scale)",
    rf"{LAYER}\.(?:attn_norm|ffn_norm)\.weight",
    rf"{LAYER}\.hc_(?:attn|ffn)_(?:fn|base|scale)",
    rf"{LAYER}\.attn\.(?:attn_sink|(?:q_norm|kv_norm)\.weight)",
    rf"{LAYER}\.attn\.(?:wq_a|wkv|wq_b|wo_a){SCALED}",
    rf"{LAYER}\.attn\.wo_b\.weight",
    r"layers\.\d+\.attn\.(?:indexer\.)?compressor\.(?:ape|(?:wkv|wgate|norm)\.weight)",
    rf"layers\.\d+\.attn\.indexer\.(?:wq_b{SCALED}|weights_proj\.weight)",
    rf"{LAYER}\.ffn\.gate\.(?:weight|bias|tid2eid)",
    rf"{LAYER}\.ffn\.(?:experts\.\d+|shared_experts)\.w[123]{SCALED}",
    rf"mtp\.\d+\.(?:(?:e_proj|h_proj){SCALED}|(?:enorm|hnorm|norm)\.weight)",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("mini")
    mini.write_checkpoint(out, mini.Recipe(TINY, 3), log=lambda _: None)
    return out


@pytest.fixture(scope="module")
def tensors(checkpoint):
    from safetensors import safe_open

    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for file in sorted(set(index.values())):
        with safe_open(checkpoint / file, "pt") as f:
            for name in f.keys():  # noqa: SIM118 (not a dict)
                assert index[name] == file
                found[name] = f.get_tensor(name)
    assert set(found) == set(index)
    return found


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_same_seed_same_bytes(checkpoint, tmp_path):
    mini.write_checkpoint(tmp_path, mini.Recipe(TINY, 3), threads=1, log=lambda _: None)
    assert digest(tmp_path) == digest(checkpoint)


def test_other_weights_are_left_alone(tmp_path):
    (tmp_path / "model-00001-of-00046.safetensors").write_bytes(b"precious")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for config in (None, "{}", '{"num_hidden_layers": 43, "vocab_size": 129280}'):
        if config:
            (tmp_path / "config.json").write_text(config)
            before["config.json"] = config.encode()
        with pytest.raises(ValueError, match="holds other weights"):
            mini.write_checkpoint(tmp_path, mini.Recipe(TINY, 3), log=lambda _: None)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_other_seed_other_weights(tensors):
    w = mini.Recipe(TINY, 4).embedding().bfloat16()
    assert not torch.equal(w, tensors["embed.weight"])


def test_names(tensors):
    allowed = re.compile("|".join(f"(?:{a})" for a in ALLOWED))
    assert [n for n in tensors if not allowed.fullmatch(n)] == []
    for n, t in tensors.items():
        scaled = n.removesuffix("weight") + "scale"
        assert (t.dtype == layouts.FP8) == (n.endswith(".weight") and scaled in tensors), n
    assert "layers.0.ffn.gate.tid2eid" in tensors and "layers.0.ffn.gate.bias" not in tensors
    assert "layers.1.ffn.gate.bias" in tensors and "mtp.0.ffn.gate.bias" in tensors
    has_indexer = {n.split(".")[1] for n in tensors if ".indexer." in n}
    assert has_indexer == {"2", "4"}


def test_shapes_and_dtypes(tensors):
    s = TINY
    for n, t in tensors.items():
        if n.endswith(".scale"):
            w = tensors[n.removesuffix("scale") + "weight"]
            assert t.dtype == torch.float32
            assert t.shape == (-(-w.shape[0] // 128), -(-w.shape[1] // 128)), n
            mantissa, _ = torch.frexp(t)
            assert (mantissa == 0.5).all(), f"{n}: not a power of two"
    assert tensors["layers.2.attn.compressor.wkv.weight"].shape == (2 * s.head_dim, s.hidden)
    assert tensors["layers.3.attn.compressor.wkv.weight"].shape == (s.head_dim, s.hidden)
    assert tensors["layers.2.attn.compressor.ape"].shape == (4, 2 * s.head_dim)
    assert tensors["layers.3.attn.compressor.ape"].shape == (128, s.head_dim)
    assert tensors["layers.2.attn.indexer.compressor.ape"].shape == (4, 2 * s.index_dim)
    assert tensors["layers.2.attn.indexer.compressor.norm.weight"].shape == (s.index_dim,)
    assert tensors["layers.1.attn.wo_a.weight"].shape == (
        s.o_groups * s.o_lora,
        s.heads * s.head_dim // s.o_groups,
    )
    assert tensors["layers.1.hc_attn_fn"].shape == (24, 4 * s.hidden)
    assert tensors["hc_head_fn"].shape == (4, 4 * s.hidden)
    assert tensors["layers.0.attn.attn_sink"].dtype == torch.float32
    experts = tensors["layers.0.ffn.gate.tid2eid"]
    assert experts.dtype == torch.int32 and experts.shape == (s.vocab, s.experts_per_token)
    assert experts.sort(1).values.diff(dim=1).min() > 0  # distinct experts a token
    assert experts.min() >= 0 and experts.max() < s.experts


def test_fp8_blocks_round_trip():
    w = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)) * 0.02
    w[0, 0] = 3.0
    values, scale = layouts.to_fp8_blocks(w)
    assert values.shape == w.shape and scale.shape == (2, 3)
    back = values.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    # Half a step of three mantissa bits, or half a subnormal step.
    big = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    assert ((back - w).abs() <= torch.maximum(w.abs() / 16, big * 2**-10)).all()
    zero_values, zero_scale = layouts.to_fp8_blocks(torch.zeros(128, 128))
    assert not zero_values.float().any() and zero_scale.item() == 1.0


def test_statistics(tensors):
    s = TINY
    half = s.hidden // 2

    def dense(name: str) -> torch.Tensor:
        w = tensors[name + ".weight"].float()
        scale = tensors[name + ".scale"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return w * scale[: w.shape[0], : w.shape[1]]

    wq_a = dense("layers.1.attn.wq_a")
    assert not wq_a[:, half:].any()  # readers see the token half only
    assert wq_a[:, :half].std().item() == pytest.approx(s.hidden**-0.5, rel=0.05)
    wo_b = tensors["layers.1.attn.wo_b.weight"].float()
    assert not wo_b[:half].any() and wo_b[half:].any()
    for name in ("attn.kv_norm", "attn.compressor.norm"):
        w = tensors[f"layers.2.{name}.weight"].float()
        assert w.square().mean().sqrt().item() == pytest.approx(deepseek_v4.KV_RMS, rel=0.02)
        assert w.max() > 2 * deepseek_v4.KV_RMS and (w > 0).all()
    assert tensors["layers.0.attn.attn_sink"].abs().max() < 10
    embed = tensors["embed.weight"].float()
    assert embed[:, :half].std().item() == pytest.approx(1, rel=0.05)
    for n, t in tensors.items():
        if t.is_floating_point():
            assert torch.isfinite(t.float()).all(), n


def test_router_margins(tensors):
    """For every cluster the chosen experts win clearly, on average over its tokens."""
    x = tensors["embed.weight"].float()
    x = x * torch.rsqrt(x.square().mean(1, keepdim=True))
    logits = x @ tensors["layers.1.ffn.gate.weight"].float().T
    ordered = torch.nn.functional.softplus(logits).sqrt().sort(1, descending=True).values
    margin = ordered[:, TINY.experts_per_token - 1] - ordered[:, TINY.experts_per_token]
    assert margin.median() > 0.1
    assert logits.std() > 0.3


def test_indexer_repeats_the_compressors_rows(tensors):
    main = tensors["layers.2.attn.compressor.wkv.weight"]
    index = tensors["layers.2.attn.indexer.compressor.wkv.weight"]
    channels = mini.Recipe(TINY, 3).index_channels("layers.2")
    assert len(set(channels.tolist())) == TINY.index_dim
    assert torch.equal(index[: TINY.index_dim], main[channels])
    assert torch.equal(index[TINY.index_dim :], main[channels + TINY.head_dim])


@pytest.mark.parametrize("rms", [64, 1 / 64])
def test_size_of_keys(rms):
    """Keys and values change, what attention weighs and adds does not; smaller keys only add less."""
    plain, sized = mini.Recipe(TINY, 3), mini.Recipe(dataclasses.replace(TINY, kv_rms=rms), 3)
    w = sized.kv_weight("layers.2.attn.kv_norm.weight")
    assert w.square().mean().sqrt().item() == pytest.approx(rms, rel=1e-4)
    x = rng(0, "x").standard_normal((100, TINY.q_lora), dtype=np.float32)

    def logits(recipe):
        q = torch.from_numpy(x) @ recipe.wq_b("layers.2").view(-1, 512, TINY.q_lora)[0].T
        q = q * torch.rsqrt(q.square().mean(1, keepdim=True))
        k = recipe.kv_weight("layers.2.attn.kv_norm.weight") * recipe.normal("k", 512)
        return (q @ k).std().item() * 512**-0.5

    assert logits(sized) == pytest.approx(logits(plain) * (1 if rms > 1 else rms / deepseek_v4.KV_RMS), rel=0.3)
    wo_b = [r.wo_b("layers.2.attn.wo_b.weight").std().item() for r in (plain, sized)]
    assert wo_b[0] / wo_b[1] == pytest.approx(rms / deepseek_v4.KV_RMS)


def test_bad_shapes_are_refused():
    with pytest.raises(ValueError, match="multiple"):
        dataclasses.replace(TINY, hidden=128)
    with pytest.raises(ValueError, match="kv_rms"):
        dataclasses.replace(TINY, kv_rms=0.0)
    with pytest.raises(ValueError, match="compress_ratios"):
        dataclasses.replace(TINY, layers=4)


def test_tokenizer(checkpoint):
    transformers = pytest.importorskip("transformers")
    tok = transformers.AutoTokenizer.from_pretrained(str(checkpoint), local_files_only=True)
    text = "Hello, wörld 🙂! It's 128 bytes\n\tround-trip <｜User｜>hi<｜Assistant｜></think>"
    ids = tok(text)["input_ids"]
    assert ids[0] == tok.bos_token_id == 0 and tok.eos_token_id == 1
    assert max(ids) < TINY.vocab
    assert tok.decode(ids, skip_special_tokens=True) == text
    every = sorted(tok.get_vocab().values())
    assert every == list(range(TINY.vocab))  # no id of the model is without a token
    assert tok.decode(list(range(TINY.vocab)))
    assert len(tok("the then there")["input_ids"]) < 12  # merges do something
    chat = tok.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == f"{tokenizer.BOS}<｜User｜>hi<｜Assistant｜></think>"


def test_full_size_config(tmp_path):
    config = mini.model_config(mini.Shape())
    assert config["hidden_size"] == 4096 and config["compress_ratios"] == [0, 0, 4, 128, 4, 0]
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert len(config["quantization_config"]["ignored_layers"]) == 6
    assert (
        "ignored_layers" not in mini.model_config(mini.Shape(fp8_wo_b=True))["quantization_config"]
    )
    mini.write_tokenizer(tmp_path, mini.Shape().vocab)


# ---------------------------------------------------------------- against vLLM itself
@pytest.fixture(scope="module")
def vllm_module():
    source = os.environ.get("VLLM_SOURCE")
    if source:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        sys.path.insert(0, source)
    try:
        try:
            return importlib.import_module("vllm.models.deepseek_v4.nvidia.model")
        except ModuleNotFoundError:  # up to 0.21.0
            return importlib.import_module("vllm.model_executor.models.deepseek_v4")
    except Exception as e:  # a missing vLLM fails in many ways
        pytest.skip(f"no vLLM with DeepSeek V4 ({type(e).__name__}: {e}); set VLLM_SOURCE")


def test_vllm_mapper(vllm_module, tensors):
    mapper = vllm_module._make_deepseek_v4_weights_mapper("fp8")
    whole_layer = hasattr(vllm_module, "_select_dsv4_attn_cls")  # from 0.23.0 on; it also leaves out the draft's
    names = [name for name in tensors if not (whole_layer and name.startswith("mtp."))]
    mapped = dict(zip(names, mapper.apply_list(list(tensors)), strict=True))
    assert len(set(mapped.values())) == len(mapped)
    assert mapped["embed.weight"] == "model.embed_tokens.weight"
    assert mapped["head.weight"] == "lm_head.weight"
    assert mapped["norm.weight"] == "model.norm.weight"
    assert mapped["hc_head_fn"] == "model.hc_head_fn"
    layer = "model.layers.2."
    for name, expected in {
        "attn.wq_a.scale": "attn.wq_a.weight_scale_inv",
        "attn.compressor.ape": "attn.compressor.ape" if whole_layer else "attn.mla_attn.compressor.ape",
        "attn.indexer.compressor.ape": "attn.indexer.compressor.ape",
        "ffn.gate.bias": "ffn.gate.e_score_correction_bias",
        "ffn.shared_experts.w2.weight": "ffn.shared_experts.down_proj.weight",
        "ffn.experts.7.w3.scale": "ffn.experts.7.w3.weight_scale_inv",
    }.items():
        assert mapped["layers.2." + name] == layer + expected
    ignored = mini.model_config(TINY)["quantization_config"]["ignored_layers"]
    assert mapper.apply_list(ignored) == ignored


DSPARK = dataclasses.replace(TINY, dspark=True, mtp_layers=2, compress_ratios=(*TINY.compress_ratios, 0))
# Beside its layers, from vLLM's module.
DSPARK_ENDS = {
    *("model.main_proj.weight", "model.main_proj.scale", "model.main_norm.weight", "model.norm.weight"),
    *("model.hc_head_fn", "model.hc_head_base", "model.hc_head_scale"),
    *("model.markov_head.markov_w1.weight", "model.markov_head.markov_w2.weight"),
}


def test_dspark(tmp_path):
    """A layer's names a stage, and a Markov head that knows the successor of each token by a wide margin."""
    from safetensors.torch import load_file

    mini.write_checkpoint(tmp_path, mini.Recipe(DSPARK, 3), log=lambda _: None)
    tensors = {name: w for file in tmp_path.glob("*.safetensors") for name, w in load_file(file).items()}
    drafts = {name: w for name, w in tensors.items() if name.startswith("mtp.")}
    layer = {name.split(".", 2)[2] for name in tensors if name.startswith("layers.1.")}
    stages = [{name.split(".", 2)[2] for name in drafts if name.startswith(f"mtp.{i}.")} for i in (0, 1)]
    ends = {name.removeprefix("model.") for name in DSPARK_ENDS}
    assert stages[0] & stages[1] == layer and (stages[0] | stages[1]) - layer == ends
    assert all(name.startswith("main_") for name in stages[0] - layer)
    assert drafts["mtp.0.main_proj.weight"].shape == (TINY.hidden, 3 * TINY.hidden)
    w1, w2 = (drafts[f"mtp.1.markov_head.markov_w{i}.weight"].float() for i in (1, 2))
    bias, successor = w1 @ w2.T, torch.from_numpy(mini.Recipe(DSPARK, 3).successor())
    assert torch.equal(bias.argmax(1), successor)
    assert (bias.topk(2).values.diff() < -8).all()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["n_mtp_layers"] == 2 and config["dspark_target_layer_ids"] == [0, 2, 4]
    assert config["quantization_config"]["ignored_layers"][-1] == "model.layers.6.attn.wo_b"
    assert "dspark_block_size" not in mini.model_config(TINY)


def test_images(tmp_path):
    """Beside V4's tensors and settings: the tower, the aligner and the routers' biases. Each id has a token, those
    of images where vLLM looks for them."""
    shape = images.Shape(**dataclasses.asdict(TINY) | {"vocab": 129280})
    recipe = images.Recipe(shape, 3)
    entries = {entry.name: entry for _, shard in recipe.shards() for entry in shard}
    plain = {entry.name for _, shard in mini.Recipe(TINY, 3).shards() for entry in shard}
    assert not plain - entries.keys()
    own = {re.sub(r"\d+", "N", name) for name in entries.keys() - plain}
    linears = {f"{linear}.{part}" for part in ("weight", "bias") for linear in (
        "vision.patch_embed.proj", "vision.blocks.N.attn.wqkv", "vision.blocks.N.attn.wo", "aligner.wN",
    )}  # fmt: skip
    weights = {f"vision.{part}.weight" for part in ("norm", "blocks.N.normN", "blocks.N.mlp.wN")}
    vectors = {f"image_{part}" for part in ("start", "end", "newline", "pad")}
    biases = {"layers.N.ffn.gate.bias_vl", "mtp.N.ffn.gate.bias_vl", "layers.N.ffn.gate.bias"}
    assert own == linears | weights | vectors | biases
    config = recipe.config()
    ignored = config["quantization_config"]["ignored_layers"]
    assert ignored[0] == "language_model.model.layers.0.attn.wo_b" and ignored[-1] == "model.layers.5.attn.wo_b"
    mini.write_tokenizer(tmp_path, shape.vocab, recipe.special_tokens)
    tok = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert sorted(tok.get_vocab().values()) == list(range(shape.vocab))
    names = [f"<|place_holder_mm_span_{number}|>" for number in ("0431", "0435")]
    assert tok.convert_tokens_to_ids(names) == [129257, 129261]
    assert tok("a<｜deepseek_image｜>b")["input_ids"][2] == 129256
    with pytest.raises(ValueError, match="public vocabulary"):
        dataclasses.replace(shape, vocab=8192)


def test_the_features_benchmark_takes_images(tmp_path):
    """Only `images`, with a checkpoint that has them; the other steps are served text alone."""
    shape = images.Shape(**dataclasses.asdict(TINY) | {"vocab": 129280})
    for config, offered in ((images.model_config(shape), True), (mini.model_config(TINY), False)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors.index.json").touch()
        args = parse_args(["--model", str(tmp_path), "--out", str(tmp_path / "o.json"), "--backend", "stock"])
        assert ("images" in args.steps) == offered and "prefix" in args.steps
        arguments = engine_arguments({"model": str(tmp_path), "backend": "stock"})
        assert arguments.get("language_model_only", False) == offered and arguments["block_size"] == 256


def test_images_of_another_model_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        mini.main([str(tmp_path), "--model", "v4.1", "--images"])
    assert "--images is of --model v4" in capsys.readouterr().err


def test_dspark_in_vllm(vllm_module):
    """Each name of the draft has its place in vLLM's module."""
    dspark = pytest.importorskip("vllm.models.deepseek_v4.nvidia.dspark", reason="0.25.0 brought DSpark")
    rename = dspark.DSparkDeepseekV4ForCausalLM._remap_dspark_name
    names = [entry.name for _, entries in mini.Recipe(DSPARK, 3).shards() for entry in entries]
    found = {name: rename(SimpleNamespace(), name) for name in names}
    assert {name for name, place in found.items() if place} == {name for name in names if name.startswith("mtp.")}
    places = {place for place in found.values() if place}
    assert {place for place in places if ".layers." not in place} == DSPARK_ENDS - {"model.main_proj.scale"}
    assert found["mtp.1.attn.wkv.weight"] == "model.layers.1.attn.wkv.weight"


def test_vllm_config_class(vllm_module, checkpoint):
    from vllm.transformers_utils.config import get_config

    config = get_config(str(checkpoint), trust_remote_code=False)
    assert type(config).__name__ == "DeepseekV4Config"
    rope = config.rope_parameters.get("compress", config.rope_parameters)
    assert rope["rope_type"] == "yarn" and rope["factor"] == 16
    ratios = getattr(config, "compress_ratios", None)
    if ratios is None:  # transformers' own class, in 0.33.0
        ratios = [config.compress_rates.get(kind, 0) for kind in config.layer_types] + [0]
    assert ratios == list(TINY.compress_ratios)
    assert config.architectures == ["DeepseekV4ForCausalLM"]


def test_vllm_tokenizer(vllm_module, checkpoint):
    try:
        from vllm.tokenizers.deepseek_v4 import DeepseekV4Tokenizer
    except ModuleNotFoundError as e:
        pytest.skip(f"vLLM's tokenizer needs {e.name}")
    tok = DeepseekV4Tokenizer.from_pretrained(str(checkpoint))
    ids = tok.apply_chat_template([{"role": "user", "content": "hi"}])
    assert ids[0] == 0 and tok.decode(ids).startswith(tokenizer.BOS)


# ---------------------------------------------------------------- the comparison's arithmetic
def distributions(noise: float, n: int = 5, vocab: int = 300):
    r = np.random.default_rng(1)
    a = 3 * r.standard_normal((n, vocab))
    a = a + noise * r.standard_normal((n, vocab))
    return (a - np.log(np.exp(a).sum(-1, keepdims=True))).astype(np.float32)


def test_compare_full():
    a, b = distributions(0.0), distributions(0.1)
    same, other = e2e.compare_full(a, a), e2e.compare_full(a, b)
    assert not same["kl"].any() and same["top1"].all()
    expected = (np.exp(a) * (a - b)).sum(-1)
    np.testing.assert_allclose(other["kl"], expected, rtol=1e-3)
    assert (other["kl"] > 0).all() and other["diff"].max() < 1


def test_prompts():
    a = e2e.make_prompts([1, 7, 300], 1024, 0)
    assert [len(p) for p in a] == [1, 7, 300]
    assert a == e2e.make_prompts([1, 7, 300], 1024, 0)
    assert all(0 <= t < 1024 for p in a for t in p)
    assert len(set(a[2])) < 250  # repetition


def test_parent_with_a_stand_in_run(checkpoint, tmp_path, monkeypatch, capsys):
    """The parent's flow, with `start_run` replaced: forcing, resuming, a failing run, bars."""
    started = []

    def fake(name, job, args):
        started.append((name, job["forced"] is not None))
        if name == "bf16_graph":
            raise KeyboardInterrupt
        assert "calibrated" not in name or Path(job["scales"]).exists()
        if name == "fp8":
            return {"ok": False, "seconds": 1.0, "status": "1", "error": "boom"}
        noise = {"truth": 0.0, "flashmla": 0.1}.get(name, 0.01)
        arrays, tokens = {}, []
        for i, p in enumerate(job["prompts"]):
            arrays[f"decode_{i}"] = distributions(noise, job["steps"] + 1)
            arrays[f"prompt_{i}"] = distributions(noise, len(p) - 1)
            tokens.append(list(range(job["steps"] + 1)))
        out = Path(job["out"])
        np.savez(out, tokens=np.array(tokens), **arrays)
        out.with_suffix(".json").write_text(json.dumps({"key": job["key"], "tokens": tokens}))
        return {"ok": True, "seconds": 1.0}

    monkeypatch.setattr(accuracy_e2e, "start_run", fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    base = ["--model", str(checkpoint), "--out", str(tmp_path / "r.json"), "--lengths", "7,9"]
    base += ["--steps", "3"]
    assert accuracy_e2e.main([*base, "--runs", "flashmla,bf16"]) == 0
    assert started == [("truth", False), ("flashmla", True), ("bf16", True)]
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["continuation_run"] == "truth"
    passed = {r["bar"]: r["passed"] for r in result["bars"]}
    assert passed["decode: KL(truth|bf16) <= KL(truth|flashmla)/10"] is True
    assert passed["decode: KL(truth|fp8) <= 2 KL(truth|flashmla)"] is None

    (tmp_path / "r.json").unlink()
    with pytest.raises(KeyboardInterrupt):  # what had run by then is not lost
        accuracy_e2e.main([*base, "--runs", "bf16,bf16_graph"])
    assert "truth|bf16" in json.loads((tmp_path / "r.json").read_text())["comparisons"]

    def calibrate(prompts, scales, args):
        assert [len(p) for p in prompts] == [7, 9] and prompts != e2e.make_prompts([7, 9], TINY.vocab, 0)
        started.append(scales.write_text("scales"))
        return {"ok": True, "seconds": 1.0}

    started.clear()
    monkeypatch.setattr(accuracy_e2e, "calibrate", calibrate)
    runs = "fp8_calibrated,fp8_calibrated_graph"
    assert accuracy_e2e.main([*base, "--runs", runs]) == 0
    assert started == [6, ("fp8_calibrated", True), ("fp8_calibrated_graph", True)]
    result = json.loads((tmp_path / "r.json").read_text())
    passed = {r["bar"]: r["passed"] for r in result["bars"]}
    assert passed["decode: KL(truth|fp8_calibrated) <= 2 KL(truth|flashmla)"] is True

    started.clear()
    assert accuracy_e2e.main([*base, "--runs", "truth,flashmla,bf16,fp8"]) == 1
    assert started == [("fp8", True)]
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["runs"]["fp8"]["error"] == "boom"
    assert "truth|bf16" in result["comparisons"]
    assert "PASS" in capsys.readouterr().out


def test_teacher_forcing_in_vllms_sampler(vllm_module, monkeypatch):
    """Raw log-probabilities come from before the forcing, through vLLM's own sampler."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.delitem(vars(e2e), "ForcedTokens", raising=False)
    try:
        from vllm import SamplingParams
        from vllm.v1.sample.logits_processor import (
            BatchUpdate,
            LogitsProcessors,
            MoveDirectionality,
            _load_logitsprocs_by_fqcns,
        )
        from vllm.v1.sample.metadata import SamplingMetadata
        from vllm.v1.sample.sampler import Sampler
    except ModuleNotFoundError as e:
        pytest.skip(f"vLLM's sampler needs {e.name}")

    (cls,) = _load_logitsprocs_by_fqcns(["e2e:ForcedTokens"])
    processor = cls(None, torch.device("cpu"), False)
    assert not processor.is_argmax_invariant()
    vocab = 50
    outputs: list[list[int]] = [[], []]
    rows = [([7, 8], outputs[0]), (None, outputs[1])]
    added = [
        (i, SamplingParams(extra_args={"forced": f} if f else None), [1, 2], out)
        for i, (f, out) in enumerate(rows)
    ]
    processor.update_state(BatchUpdate(batch_size=2, removed=[], added=added, moved=[]))

    def step():
        logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(1))
        names = {f.name for f in dataclasses.fields(SamplingMetadata)}
        values = dict.fromkeys(names)
        values.update(
            all_greedy=True,
            all_random=False,
            no_penalties=True,
            max_num_logprobs=vocab,
            output_token_ids=outputs,
            generators={},
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors([processor]),
        )
        out = Sampler(logprobs_mode="raw_logprobs")(logits.clone(), SamplingMetadata(**values))
        got = torch.full((2, vocab), float("nan"))
        tensors = out.logprobs_tensors
        got.scatter_(1, tensors.logprob_token_ids.long(), tensors.logprobs)
        torch.testing.assert_close(got, logits.log_softmax(-1))
        return out.sampled_token_ids[:, 0].tolist(), logits.argmax(-1).tolist()

    sampled, greedy = step()
    assert sampled == [7, greedy[1]]
    outputs[0].append(7)
    swap = [(0, 1, MoveDirectionality.SWAP)]
    processor.update_state(BatchUpdate(batch_size=2, removed=[], added=[], moved=swap))
    sampled, greedy = step()
    assert sampled == [greedy[0], 8]


def test_teacher_forcing_in_model_runner_v2(vllm_module, monkeypatch):
    """Rows of two requests that are forced and one that is not, as 0.33.0 hands them over."""
    loader = pytest.importorskip("vllm.v1.worker.gpu.sample.logits_processor.loader", reason="0.33.0 has it")
    from vllm import SamplingParams

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.delitem(vars(e2e), "ForcedTokens", raising=False)
    (cls,) = loader._load_v2_logitsprocs_by_fqcns(["e2e:ForcedTokens"])
    prompt_len = SimpleNamespace(np=np.array([4, 0, 2, 3]))
    processor = cls(None, SimpleNamespace(prompt_len=prompt_len))
    for slot, forced in ((0, [7, 8]), (2, None), (3, [5, 6, 9])):
        params = SamplingParams(extra_args={"forced": forced} if forced else None)
        assert processor.add_request(slot, params) == bool(forced)
    before = torch.randn(4, 20)
    # The first token of slot 3, the second of slot 0, slot 2, and a chunk of slot 0's prompt.
    rows = SimpleNamespace(expanded_idx_mapping=torch.tensor([3, 0, 2, 0]), pos=torch.tensor([2, 4, 9, 1]))
    logits = processor.apply(before.clone(), rows)
    assert logits.argmax(-1)[:2].tolist() == [5, 8] and logits[3].isfinite().sum() == 1
    assert (logits[:2].isfinite().sum(-1) == 1).all() and torch.equal(logits[2], before[2])


def test_flat_logprobs_are_read(vllm_module):
    from vllm.logprobs import FlatLogprobs

    flat = FlatLogprobs()
    flat.append(None)
    flat.append_fast([2, 0, 1, 2], [-1.0, -0.5, -3.0, -1.0], [2, 1, 3, 2], [None] * 4)
    empty, entry = e2e.positions(flat)
    assert len(empty[0]) == 0
    rows = e2e.full_rows([entry], 3)
    np.testing.assert_array_equal(rows, [[-0.5, -3.0, -1.0]])


def test_options_of_the_command(tmp_path, monkeypatch, capsys):
    configs = []
    monkeypatch.setattr(mini, "write_checkpoint", lambda out, recipe, **_: configs.append(recipe.config()))
    assert mini.main([str(tmp_path)]) == mini.main([str(tmp_path), "--heads", "32"]) == 0
    assert [(c["num_attention_heads"], c["o_groups"]) for c in configs] == [(64, 8), (32, 4)]
    for heads in ("12", "136"):
        with pytest.raises(SystemExit):
            mini.main([str(tmp_path), "--heads", heads])
        assert f"--heads must be a multiple of 8 up to 128, and is {heads}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        mini.main([str(tmp_path), "--model", "glm-5", "--dspark"])
    assert "--dspark is of --model v4 and v4.1" in capsys.readouterr().err
    assert mini.main([str(tmp_path), "--dspark"]) == 0 and configs[-1]["dspark_block_size"] == 3
    with pytest.raises(SystemExit):
        mini.main([str(tmp_path), "--two-stages", "--dspark"])
    assert "--two-stages is of --model v4 without --dspark" in capsys.readouterr().err
    assert mini.main([str(tmp_path), "--two-stages"]) == 0
    layers, ratios = configs[-1]["num_hidden_layers"], configs[-1]["compress_ratios"]
    assert layers == 7 and {4, 128} <= set(ratios[:4]) & set(ratios[4:])
    assert mini.main([str(tmp_path), "--layout", "mxfp4-experts"]) == 0
    assert (configs[0]["expert_dtype"], configs[-1]["expert_dtype"]) == ("fp8", "fp4")
    assert configs[0]["quantization_config"] == configs[-1]["quantization_config"]


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").touch()
    for place in ("file", "file/deeper"):
        with pytest.raises(SystemExit) as ended:
            mini.main([str(tmp_path / place)])
        assert ended.value.code == 2 and "cannot be written" in capsys.readouterr().err


def test_a_quantised_run_is_repeated_by_other_software_and_on_other_gpus(checkpoint, tmp_path, monkeypatch):
    started = []

    def fake(name, job, args):
        started.append((args.where["versions"], *args.where["gpus"]))
        np.savez(job["out"])
        Path(job["out"]).with_suffix(".json").write_text(json.dumps({"key": job["key"]}))
        (args.work / f"{name}.log").touch()
        return {"ok": True}

    monkeypatch.setattr(accuracy_e2e, "start_run", fake)
    for version, *gpus in (("1", "A"), ("1", "A", "A"), ("2", "A"), ("2", "B")):
        where = {"versions": version, "gpus": gpus}
        args = SimpleNamespace(folder=checkpoint.parent, work=tmp_path, steps=3, tp=1, where=where)
        assert quantised_e2e.run("a", checkpoint.name, {}, 1, None, [[1]], args)["ok"]
    assert started == [("1", "A"), ("2", "A"), ("2", "B")]


def test_a_full_disk_is_said(tmp_path):
    command = f"ulimit -f 64; {sys.executable} {mini.__file__} {tmp_path}/mini --heads 8 --quiet"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "mini/config.json").exists()
    assert re.search(r"error: \S+-00001-of-\d+\.safetensors cannot be written \(.*File too large", done.stderr)
    assert "Traceback" not in done.stderr
