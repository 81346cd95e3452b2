"""The plugin on the files of 0.22.1 as released, or of the releases in PLUGIN_RELEASES (scripts/test.sh)."""

import json
import os
import shutil
import sys

import pytest
from asking import HERE, SET, ask, is_set, lines
from building import run
from process import CALLERS, FIRST_V4, SPARSE

V4 = "vllm.models.deepseek_v4.nvidia.flashmla"
V41 = "vllm.models.deepseek_v41.nvidia.flashmla"
LESS = {"v4": 0, "v41": 1, "v32": 2, "bf16": 3}  # heads that `narrow` takes away, to tell who asked
SMALL = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "vocab_size": 8192,
    "hidden_size": 4096,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "compress_ratios": [0, 4, 0],
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 65536,
}


@pytest.fixture(scope="module", params=os.environ.get("PLUGIN_RELEASES", "0.22.1").split())
def release(request):
    return request.param


@pytest.fixture(scope="module")
def narrow(site, tmp_path_factory):
    """The installed wheel, whose drop-in lets heads be as they are, and takes prefills, without a GPU."""
    folder = shutil.copytree(site, tmp_path_factory.mktemp("narrow") / "site")
    with (folder / "vllm_dsv4_overlay/dsv4_overlay/drop_in.py").open("a") as file:
        file.write("\n\ndef padded_heads(heads, stock, rows='v4'):\n"
            f"    return min(heads, stock) - {LESS}[rows]\n")
        file.write("\nASKED = []\n\n\ndef prefill(*given):\n    ASKED.extend(given)\n    return given[1] == 'q'\n")
    return folder


def callers(tree):
    """The modules in which a release calls FlashMLA, or pads heads for it."""
    return [name for name in CALLERS if (tree / (name.replace(".", "/") + ".py")).is_file()]


def test_it_is_set(trees, narrow, release):
    """From the released files, by real imports: functions wherever they are called from, heads wherever they are
    padded, prefills of V4, CUDA left alone, one line in the log. In one release callers are there before the
    plugin."""
    tree = trees(release)
    request = {"site": str(narrow), "before" if release == "0.22.1" else "after": callers(tree)}
    ((answer, log),) = ask(tree, [request])
    here = answer["here"]
    assert is_set(here) and here["cuda"] is False
    assert SPARSE in here["modules"] and (V4 in here["modules"]) != (FIRST_V4 in here["modules"])
    assert (V41 in here["modules"]) == (release >= "0.30")
    assert here["heads"].pop(SPARSE) == {"fp8_decode_padded_heads": 14, "prefill_padding": 13}
    of_v4 = "padded_heads" if FIRST_V4 in here["modules"] else "get_padded_num_q_heads"
    v41 = {V41: {of_v4: 15}} if release >= "0.30" else {}
    assert here["heads"] == {FIRST_V4 if FIRST_V4 in here["modules"] else V4: {of_v4: 16}} | v41
    offered = ["layer", "q", "output", "attn_metadata", "swa_metadata"]
    taken = here["prefills"].pop(V4 if V4 in here["modules"] else FIRST_V4)
    assert taken == [["drop-in", *offered], ["vLLM", "layer", "left", *offered[2:]]]
    assert all(found == [["vLLM"], ["vLLM"]] for found in here["prefills"].values())  # of V4.1
    assert here["lengths"] == [[9, 10], [6, 7], [0, 0]]  # vLLM's own from 0.28.0 on
    (line,) = lines(log)
    assert f"{SET} {release};" in line and "INFO" in line


def test_a_server_s_own_configuration_and_layers(trees, narrow, release, tmp_path):
    """EngineArgs loads the plugin; backend, cache and configuration stay stock's, and layers have their heads."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))

    def answer(*site):
        paths = os.pathsep.join(map(str, (trees(release), *site)))
        env = {"PYTHONPATH": paths, "CAPABILITY": "9.0", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        request = json.dumps([[f"--model={tmp_path}", "--kv-cache-dtype=fp8"]])
        hopper = HERE.parent / "glue/hopper.py"
        done = run(sys.executable, hopper, input=request, env=os.environ | env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])[0]

    stock, ours = answer(), answer(narrow)
    assert (stock["layers"].pop("padded_heads"), ours["layers"].pop("padded_heads")) == (64, 16)
    assert ours == stock and not ours["cuda_initialized"]
