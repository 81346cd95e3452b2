"""Mini checkpoints of DeepSeek V3.2 and GLM-5, read by transformers' own models in float32: an independent account
of names, shapes and healthy activations. tests/glue/test_dsa_model.py loads them with vLLM's loader."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import make_mini_checkpoint as mini  # noqa: E402
from mini_checkpoint import layouts  # noqa: E402

SMALL = dict(hidden=512, layers=3, heads=8, q_lora=256, index_heads=8, index_topk=64, intermediate=256,
             moe_intermediate=128, vocab=1024)  # fmt: skip
TOKENS, PICKED = 240, 48


class Plain(layouts.Fp8Blocks):
    """Unquantised: transformers has no FP8 on a CPU."""

    def store(self, name, kind, w):
        return {name: w}


def recipe(name, layout=None, **sizes):
    module = mini.MODELS[name]
    return module.Recipe(module.Shape(**SMALL | sizes), 0, layout)


@pytest.fixture(scope="module", params=["v3.2", "glm-5"])
def model(request, tmp_path_factory):
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip("this transformers has no DeepSeek V3.2")
    folder = tmp_path_factory.mktemp("dsa")
    mini.write_checkpoint(folder, recipe(request.param, Plain()), log=lambda _: None)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    return model.eval(), found


def test_names_and_shapes_are_those_of_transformers(model):
    model, found = model
    assert not found["missing_keys"] and not found["mismatched_keys"]
    next_token = f"model.layers.{SMALL['layers']}."  # transformers leaves it out
    assert found["unexpected_keys"] and all(name.startswith(next_token) for name in found["unexpected_keys"])


@torch.no_grad()
def test_activations_are_healthy_and_the_indexer_picks_what_attention_weighs(model, monkeypatch):
    model, _ = model
    tokens = torch.randint(3, SMALL["vocab"], (1, TOKENS), generator=torch.Generator().manual_seed(1))

    def run(picked, at_random=False):
        for layer in model.model.layers:
            indexer = layer.self_attn.indexer
            monkeypatch.setattr(indexer, "index_topk", picked)
            if at_random:
                generator = torch.Generator().manual_seed(2)
                scores = torch.rand(TOKENS, TOKENS, generator=generator)
                picks = scores.tril().topk(picked).indices.int()[None]
                monkeypatch.setattr(indexer, "forward", lambda *a, picks=picks, **k: picks)
        return model(tokens, output_hidden_states=True, output_attentions=True)

    whole = run(TOKENS)
    token, context = (slice(0, SMALL["hidden"] // 2), slice(SMALL["hidden"] // 2, None))
    for hidden in whole.hidden_states:
        assert 0.7 < hidden[..., token].square().mean().sqrt() < 3
        assert 0.4 < hidden[..., context].square().mean().sqrt() * 2**12 < 5
    logprobs = whole.logits[0].log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    assert 3 < entropy.mean() < 0.95 * torch.tensor(SMALL["vocab"]).log()
    for weights in whole.attentions:  # neither uniform nor one-hot
        assert 0.05 < weights[0, :, -1].max(-1).values.mean() < 0.6

    def divergence(other):
        late = slice(PICKED, None)  # where something is dropped
        return (logprobs.exp() * (logprobs - other.logits[0].log_softmax(-1))).sum(-1)[late].mean()

    by_indexer, at_random = divergence(run(PICKED)), divergence(run(PICKED, at_random=True))
    assert 0 < by_indexer < at_random / 2


@pytest.mark.parametrize("name", ["v3.2", "glm-5"])
def test_same_seed_same_bytes_in_fp8(name, tmp_path):
    sizes = dict(hidden=256, layers=1, heads=2, vocab=1024)
    digests = []
    for threads in (1, 4):
        folder = tmp_path / str(threads)
        mini.write_checkpoint(folder, recipe(name, **sizes), threads=threads, log=lambda _: None)
        digests.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()})
    assert digests[0] == digests[1]
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    scaled = {key.removesuffix("_scale_inv") for key in index if key.endswith(".weight_scale_inv")}
    attention = {key.split("self_attn.")[1] for key in scaled if "layers.0.self_attn" in key}
    assert attention == {f"{part}.weight" for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
                                                       "indexer.wq_b", "indexer.wk")}  # fmt: skip


def test_sizes_of_the_public_models():
    names = ("num_attention_heads", "qk_nope_head_dim", "v_head_dim", "q_lora_rank", "index_n_heads")
    for name, *sizes in (("v3.2", 128, 128, 128, 1536, 64), ("glm-5", 64, 192, 256, 2048, 32)):
        module = mini.MODELS[name]
        config = module.model_config(module.Shape())
        assert [config[field] for field in names] == sizes
        names_of_both = ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "index_topk")
        assert [config[field] for field in names_of_both] == [512, 64, 128, 2048]


def test_options_that_are_of_another_model(tmp_path, capsys):
    with pytest.raises(SystemExit):
        mini.main([str(tmp_path), "--model", "v3.2", "--kv-rms", "64"])
    assert "--kv-rms is of --model v4" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_model_is_left_alone(tmp_path):
    sizes = dict(hidden=256, layers=1, heads=2, vocab=1024)
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"precious")
    (tmp_path / "config.json").write_text(json.dumps(recipe("v3.2", **sizes).config()))
    with pytest.raises(ValueError, match="holds other weights"):
        mini.write_checkpoint(tmp_path, recipe("glm-5", **sizes), log=lambda _: None)
    assert (tmp_path / "model-00001-of-00001.safetensors").read_bytes() == b"precious"
