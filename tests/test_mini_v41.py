"""Mini checkpoints of DeepSeek V4.1: the same bytes for the same seed, names, FP8 and FP4 blocks, and keys of the
indexer that follow attention's. tests/glue/test_v41_model.py loads them with vLLM's loader."""

import hashlib
import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]
import make_mini_checkpoint as mini  # noqa: E402
from features.run import STEP, engine_arguments  # noqa: E402
from features_e2e import parse_args  # noqa: E402
from mini_checkpoint import deepseek_v4, quantised  # noqa: E402
from mini_checkpoint.recipe import rng  # noqa: E402
from mini_v41_forward import Model  # noqa: E402

MODULE = mini.MODELS["v4.1"]
SMALL = dict(hidden=256, heads=8, q_lora=128, o_lora=128, o_groups=1, index_heads=8, experts=8, vocab=1024,
             moe_intermediate=128,
             dspark=True, mtp_layers=2, compress_ratios=(0, 2, 2, 1, 1, 1, 0, 0))  # fmt: skip
NO_DRAFT = dict(dspark=False, mtp_layers=0, compress_ratios=(0, 2, 2, 1, 1, 1))
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def recipe(**sizes):
    return MODULE.Recipe(MODULE.Shape(**SMALL | sizes), 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v41")
    mini.write_checkpoint(folder, recipe(), threads=1, log=lambda _: None)
    return folder


@pytest.fixture(scope="module")
def tensors(checkpoint):
    from safetensors.torch import load_file

    return {name: w for file in checkpoint.glob("*.safetensors") for name, w in load_file(file).items()}


def test_same_seed_same_bytes_and_a_folder_of_its_own_is_written_again(checkpoint):
    before = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in checkpoint.iterdir()}
    mini.write_checkpoint(checkpoint, recipe(), threads=4, log=lambda _: None)
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in checkpoint.iterdir()} == before
    with pytest.raises(ValueError, match="holds other weights"):
        mini.write_checkpoint(checkpoint, recipe(vocab=2048), log=lambda _: None)


def test_names(tensors):
    """What a layer has beside the rest, by its place among the sources; nothing that only V4 has."""
    own = {}
    for name in tensors:
        if found := re.fullmatch(r"layers\.(\d)\.attn\.((?:indexer|compressor)\..*)\.weight", name):
            own.setdefault(int(found[1]), set()).add(found[2])
    rows, keys = {"compressor.wkv", "compressor.norm"}, {"indexer.wk", "indexer.k_norm"}
    picks = {"indexer.wq_b", "indexer.weights_proj"}
    assert own == {1: rows | keys | picks | {"compressor.wgate"}, 3: rows | keys | picks, 4: picks}
    assert not [name for name in tensors if re.search(r"hc_head|\.ape|tid2eid|enorm|e_proj|engram|vision", name)]
    draft = {name for name in tensors if name.startswith("mtp.") and ".attn." not in name and ".ffn" not in name}
    ends = {name.split(".", 2)[2] for name in draft if "hc_" not in name and "attn_norm" not in name}
    assert ends == {"main_proj.weight", "main_proj.scale", "main_norm.weight", "norm.weight",
                    "markov_head.embed.weight", "markov_head.head.weight"}  # fmt: skip


def test_linears_are_mxfp8_and_experts_mxfp4(tensors):
    kinds = {}
    for name, scale in tensors.items():
        if not name.endswith(".scale"):
            continue
        w = tensors[name.removesuffix("scale") + "weight"]
        expert = ".experts." in name
        rows = len(w) if expert else len(w) // 32
        assert scale.dtype == E8M0 and scale.shape == (rows, w.shape[1] * (2 if expert else 1) // 32), name
        assert w.dtype == (torch.uint8 if expert else E4M3), name
        assert scale.view(torch.uint8).max() < 255, f"{name}: not a number"
        kinds[re.sub(r"experts\.\d+", "experts.N", name.split(".", 2)[2])] = expert
    assert sum(kinds.values()) == 3 and not kinds.keys() & {"attn.wo_b.scale", "attn.indexer.wk.scale"}
    assert len(kinds) == 3 + 3 + 5 + 1  # experts; shared experts; attention and its indexer; the draft


def test_mxfp4_round_trip():
    w = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * 0.02
    w[3, 32:64] = 0
    packed, scale = quantised.to_mxfp4(w)
    assert packed.shape == (64, 48) and scale.shape == (64, 3) and scale[3, 1] == 1
    numbers = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
    steps = scale.repeat_interleave(32, 1)
    error = (torch.where(numbers < 8, 1, -1) * quantised.E2M1[numbers % 8] * steps - w).abs()
    largest = w.view(64, 3, 32).abs().amax(-1)
    assert (largest <= 6 * scale).all() and (largest[largest > 0] > 3 * scale[largest > 0]).all()
    assert (error <= torch.maximum(w.abs() / 4, steps / 4)).all()


def test_the_indexer_scores_rows_as_attention_does():
    """In the layer that has the rows and in the next one that picks from them: a quarter of the rows has far more
    than a quarter of attention's weight."""
    r = recipe()
    s, half = r.s, r.s.hidden // 2
    x = torch.from_numpy(rng(0, "x").standard_normal((512, half), dtype="float32"))
    x /= x.square().mean(1, keepdim=True).sqrt() * 2**0.5  # half of a normed row
    rows = x @ r.compress("layers.3", 1, "wkv")[:, :half].T
    rows = rows * rows.square().mean(1, keepdim=True).rsqrt() * r.kv_weight("layers.3.attn.compressor.norm.weight")
    keys = rows @ torch.eye(s.head_dim)[r.index_channels("layers.3")].T
    keys = keys * keys.square().mean(1, keepdim=True).rsqrt() * r.index_norm("layers.3")
    assert torch.allclose(keys, rows[:, r.index_channels("layers.3")], rtol=0.5)
    for layer in ("layers.3", "layers.4"):
        low = x[-64:] @ r.reader(f"{layer}.attn.wq_a.weight", s.q_lora)[:, :half].T
        low = low * low.square().mean(1, keepdim=True).rsqrt()
        logits = (low @ r.wq_b(layer).T).view(64, s.heads, -1) @ rows.T * s.head_dim**-0.5
        assert 0.7 < logits.std() / deepseek_v4.KV_RMS < 1.4  # though vLLM does not norm queries
        scores = ((low @ r.index_wq_b(layer).T).view(64, s.index_heads, -1) @ keys.T).relu().sum(1)
        picked = scores.topk(128).indices[:, None].expand(-1, s.heads, -1)
        share = logits.softmax(-1).gather(-1, picked).sum(-1).mean()
        assert share > 0.5


@torch.no_grad()
def test_activations_are_healthy_and_picks_matter():
    tokens = torch.randint(3, SMALL["vocab"], (192,), generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)

    def best(scores, count):
        return scores.topk(count).indices

    def at_random(scores, count):
        return best(torch.rand(scores.shape, generator=generator).where(scores.isfinite(), -1), count)

    def run(choose=best, **sizes):
        model = Model(recipe(**NO_DRAFT, hidden=512, window=16, **sizes), choose)
        return model, model(tokens)

    picks = dict(index_topk=48, candidate_blocks=24)  # of 192 rows and 24 blocks
    whole, logprobs = run(index_topk=192, candidate_blocks=24)
    for hidden in whole.hidden:
        assert 0.7 < hidden[..., :256].square().mean().sqrt() < 3
        assert 0.4 < hidden[..., 256:].square().mean().sqrt() * 2**12 < 5
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    assert 3 < entropy.mean() < 0.95 * torch.tensor(SMALL["vocab"]).log()
    for weights in whole.attention:  # neither uniform nor one-hot
        assert 0.05 < weights[-32:].amax(-1).mean() < 0.6

    def divergence(one, other):
        return (one.exp() * (one - other)).sum(-1)[96:].mean()

    picked, randomly = run(**picks)[1], run(at_random, **picks)[1]
    assert 0 < divergence(logprobs, picked) < 0.65 * divergence(logprobs, randomly)
    filtered = run(index_topk=48, candidate_blocks=10)[1]
    assert divergence(picked, filtered) > 0.01


def test_sizes_are_the_public_models():
    config = MODULE.model_config(MODULE.Shape())
    text = config["text_config"]
    names = ("hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_lora_rank",
             "o_groups", "index_n_heads", "index_head_dim", "index_topk", "sliding_window",
             "candidate_block_size")  # fmt: skip
    assert [text[name] for name in names] == [5120, 64, 512, 64, 1280, 1024, 8, 32, 128, 512, 128, 8]
    assert config["quantization_config"]["weight_block_size"] == [32, 32]
    assert config["quantization_config"]["expert_dtype"] == "fp4" and text["rope_scaling"]["rope_type"] == "yarn"
    assert "dspark_block_size" not in text
    draft = MODULE.model_config(MODULE.Shape(**SMALL))
    assert draft["text_config"]["dspark_target_layer_ids"] == [3, 4, 5]  # by the layer that they enter
    assert draft["quantization_config"]["ignored_layers"][5:] == [
        f"{layer}.attn.wo_b" for layer in ("language_model.model.layers.5", "model.layers.6", "model.layers.7")
    ]


def test_the_features_benchmark_takes_it(checkpoint, tmp_path):
    args = parse_args(["--model", str(checkpoint), "--out", str(tmp_path / "out.json"), "--backend", "stock"])
    assert {"reference", "dspark", "kv_cache"} <= set(args.steps) and not {"mtp1", "mtp2"} & set(args.steps)
    arguments = engine_arguments({"model": str(checkpoint), "backend": "stock"})
    assert arguments["language_model_only"] and "block_size" not in arguments
    mini.write_checkpoint(tmp_path, MODULE.Recipe(MODULE.Shape(**SMALL | NO_DRAFT), 0), log=lambda _: None)
    args = parse_args(["--model", str(tmp_path), "--out", str(tmp_path / "out.json"), "--backend", "stock"])
    assert set(STEP) - set(args.steps) >= {"mtp1", "mtp2", "dspark"}


@pytest.mark.parametrize(
    "sizes, match",
    [
        (dict(kv_sources=(1,)), "layer 3 has no source of rows of its compress ratio"),
        (dict(kv_sources=(2, 3), index_sources=(2, 3)), "layer 1 has no source of rows"),
        (dict(index_sources=(1, 4)), "every source of rows must be one of picks"),
        (dict(compress_ratios=(0, 4, 4, 1, 1, 1, 0, 0)), "unknown compress ratio"),
    ],
)
def test_layers_that_vllm_would_not_take_are_refused(sizes, match):
    with pytest.raises(ValueError, match=match):
        recipe(**sizes)


def test_layouts_of_the_command(tmp_path, monkeypatch, capsys):
    configs = []
    monkeypatch.setattr(mini, "write_checkpoint", lambda out, recipe, **_: configs.append(recipe.config()))
    for options in ([], ["--layout", "fp8", "--heads", "32", "--dspark"]):
        assert mini.main([str(tmp_path), "--model", "v4.1", *options]) == 0
    found = [(c["quantization_config"]["expert_dtype"], c["text_config"]["o_groups"]) for c in configs]
    assert found == [("fp4", 8), ("fp8", 4)] and configs[1]["text_config"]["dspark_block_size"] == 3
    for options, message in (
        (["--layout", "nvfp4"], "--layout nvfp4 is of --model v4"),
        (["--layout", "fp8", "--dequantised"], "--dequantised needs a --layout out of nvfp4-experts, ct-nvfp4, "),
    ):
        with pytest.raises(SystemExit):
            mini.main([str(tmp_path), "--model", "v4.1", *options])
        assert message in capsys.readouterr().err
