"""The installed wheel in vLLM's own plugin loader, on released files of vLLM that believe to be on Hopper."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from building import ROOT, run
from process import CALLERS, FIRST_V4, FLASHMLA, FUNCTIONS, OPS, SPARSE

sys.path.insert(0, str(ROOT / "scripts"))
from dsv4_overlay_tools.series import load_series, release_folders  # noqa: E402

HERE = Path(__file__).parent
VERSION = (ROOT / "VERSION").read_text().strip()
SERIES = [load_series(folder) for folder in release_folders(ROOT, "drop-in")]
RELEASES = sorted(release for series in SERIES for release in series.sdists)
RELEASE = "0.22.1"
OURS = "vllm_dsv4_overlay.dsv4_overlay.drop_in"
V4 = "vllm.models.deepseek_v4.nvidia.flashmla"
SET = f"vllm-dsv4-overlay {VERSION}, a plugin, has set its drop-in for FlashMLA in vLLM"
NOT_SET = f"vllm-dsv4-overlay {VERSION} is not in use, and stock vLLM runs: "


@pytest.fixture(scope="module")
def narrow(site, tmp_path_factory):
    """The installed wheel, whose drop-in lets heads be as they are without a GPU."""
    folder = shutil.copytree(site, tmp_path_factory.mktemp("narrow") / "site")
    with (folder / "vllm_dsv4_overlay/dsv4_overlay/drop_in.py").open("a") as file:
        file.write("\n\ndef padded_heads(heads, stock, rows='v4'):\n    return min(heads, stock)\n")
    return folder


def ask(tree, requests):
    """For each request its answer, None where the process ended with an error, and what the process wrote."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    env |= {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    done = run(sys.executable, HERE / "process.py", json.dumps(requests), env=env, cwd=tree.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def callers(tree):
    """The modules in which a release calls FlashMLA, or pads heads for it."""
    return [name for name in CALLERS if (tree / (name.replace(".", "/") + ".py")).is_file()]


def lines(log, text="vllm-dsv4-overlay"):
    return [line for line in log.splitlines() if text in line]


def is_set(answer):
    """Whether modules that have the two functions have ours, but for the one that defines FlashMLA's; all or none.

    Calls in a process without a GPU are FlashMLA's in any case.
    """
    found = {name: set(functions.values()) for name, functions in answer["modules"].items() if functions}
    assert found.pop(FLASHMLA) == {FLASHMLA}
    assert set(answer["modules"][OPS]) == set(FUNCTIONS) and answer["calls"] == ["stock", "stock"]
    assert {owner for owners in found.values() for owner in owners} in ({OURS}, {FLASHMLA})
    return found[OPS] == {OURS}


@pytest.mark.parametrize("release", RELEASES)
def test_it_is_set_in_each_release(trees, narrow, release):
    """From the released files, by real imports: functions wherever they are called from, heads wherever they are
    padded, CUDA left alone, one line in the log. In one release callers are there before the plugin."""
    tree = trees(release)
    request = {"site": str(narrow), "before" if release == RELEASE else "after": callers(tree)}
    ((answer, log),) = ask(tree, [request])
    here = answer["here"]
    assert is_set(here) and here["cuda"] is False
    assert SPARSE in here["modules"] and (V4 in here["modules"]) != (FIRST_V4 in here["modules"])
    assert ("vllm.models.deepseek_v41.nvidia.flashmla" in here["modules"]) == (release >= "0.30")
    padded = [heads for found in here["heads"].values() for heads in found.values()]
    assert len(padded) >= 3 and set(padded) == {16}
    (line,) = lines(log)
    assert f"{SET} {release};" in line and "INFO" in line


# VLLM_PLUGINS -> whether ours is loaded, as docs/plugin.md says, the space included.
NAMES = {"dsv4_overlay": True, "other,dsv4_overlay": True, "": False, "other": False, "other, dsv4_overlay": False}


def changed_file(tree, site):
    """One that no patch touches, but that says what a padded head is."""
    file = tree / "vllm/models/deepseek_v4/attention.py"
    file.write_text(file.read_text() + "\n")
    return f"{file} is not as vLLM {RELEASE} has it; install the released vLLM"


def missing_file(tree, site):
    file = tree / "vllm/models/deepseek_v4/attention.py"
    file.unlink()
    return f"{file} is missing, which vLLM {RELEASE} has"


def broken_glue(tree, site):
    (site / "vllm_dsv4_overlay/dsv4_overlay/drop_in.py").write_text("raise OSError('no such thing')\n")
    return "OSError: no such thing"


def broken_install(tree, site):
    """Not before vLLM imports the module."""
    with (site / "vllm_dsv4_overlay/dsv4_overlay/drop_in.py").open("a") as file:
        file.write("\n\ndef install(namespace):\n    raise OSError('no such thing')\n")
    return "OSError: no such thing"


def unknown_release(tree, site):
    return "this is vLLM 0.99.0, and it knows 0.20.2, "


SPOILED = (changed_file, missing_file, broken_glue, broken_install, unknown_release)
ASKED = {"VLLM_DSV4_DROP_IN": "1"}


@pytest.fixture(scope="module")
def told(trees, site, repo, tmp_path_factory):
    """What each kind of process says; `why` is what it has to say."""
    folder, tree = tmp_path_factory.mktemp("spoiled"), trees(RELEASE)
    plain = {"site": str(site), "after": [OPS]}
    requests = {names: plain | {"env": {"VLLM_PLUGINS": names}} for names in NAMES}
    requests |= {
        "before": {"site": str(site), "before": [OPS]},
        "spawn": plain | {"start": "spawn"},
        "fork": plain | {"start": "fork"},
        "off": plain | {"env": {"VLLM_DSV4_DROP_IN": "0"}},
        "maybe": plain | {"env": {"VLLM_DSV4_DROP_IN": "maybe"}},
        "local version": plain | {"version": f"{RELEASE}+cu129"},
        "cpu": {"site": str(site), "platform": "cpu", "env": ASKED},
    }
    why = {}
    for spoil in SPOILED:
        place = folder / spoil.__name__
        request = {"site": str(shutil.copytree(site, place / "site")), "after": [OPS]}
        if spoil in (changed_file, missing_file):
            request["tree"] = str(shutil.copytree(tree, place / "tree"))
        if spoil is unknown_release:
            request["version"] = "0.99.0"
        why[spoil] = spoil(place / "tree", place / "site")
        requests |= {spoil: request, (spoil, "asked"): request | {"env": ASKED}}
    for version, *options in ((VERSION,), ("9.9.9",), (VERSION, "--series", "full-width")):
        place = folder / "-".join(("patched", version, *options))
        other = shutil.copytree(repo, place / "repo")
        (other / "VERSION").write_text(version + "\n")
        patched = shutil.copytree(tree, place / "tree")
        done = run(other / "scripts/apply-patches.sh", patched, *options)
        assert done.returncode == 0, done.stderr
        requests[("patched", version, *options)] = plain | {"tree": str(patched)}
    return dict(zip(requests, ask(tree, list(requests.values())), strict=True)), why


@pytest.mark.parametrize("names", NAMES)
def test_names_of_plugins(told, names):
    answer, log = told[0][names]
    assert is_set(answer["here"]) is NAMES[names] and len(lines(log)) == NAMES[names]


def test_who_imported_the_functions_before_has_ours(told):
    answer, _ = told[0]["before"]
    assert is_set(answer["here"]) and set(answer["here"]["modules"]["__main__"].values()) == {OURS}


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_children(told, method):
    answer, log = told[0][method]
    assert is_set(answer["here"]) and is_set(answer["child"])
    assert len(lines(log, SET)) == {"spawn": 2, "fork": 1}[method]


def test_switched_off(told):
    answer, log = told[0]["off"]
    assert not is_set(answer["here"]) and answer["here"]["imported"] == ["vllm_dsv4_overlay.plugin"]
    (line,) = lines(log)
    assert f"vllm-dsv4-overlay {VERSION} is off: VLLM_DSV4_DROP_IN=0." in line


def test_a_setting_that_means_nothing_stops_the_server(told):
    answer, log = told[0]["maybe"]
    assert answer is None and "Refused: VLLM_DSV4_DROP_IN is 'maybe'; it may be 1, or 0" in log.splitlines()[-1]


def test_a_local_version_is_the_release(told):
    assert is_set(told[0]["local version"][0]["here"])


def test_other_platforms_are_left_alone(told):
    """Even where the drop-in is asked for, which would stop `vllm --help`."""
    answer, log = told[0]["cpu"]
    assert answer["here"]["imported"] == ["vllm_dsv4_overlay.plugin"] and lines(log) == []


@pytest.mark.parametrize("spoil", SPOILED)
def test_what_does_not_fit_is_said_and_stock_runs(told, spoil):
    """In one line; a server that asked for the drop-in stops."""
    answer, log = told[0][spoil]
    assert not is_set(answer["here"])
    (line,) = lines(log, NOT_SET)
    assert "WARNING" in line and told[1][spoil] in line
    answer, log = told[0][spoil, "asked"]
    assert answer is None and f"VLLM_DSV4_DROP_IN=1 asks for vllm-dsv4-overlay, but {told[1][spoil]}" in log


@pytest.mark.parametrize("version", [VERSION, "9.9.9"])
def test_patches_count_where_both_are(told, version):
    answer, log = told[0]["patched", version]
    assert set(answer["here"]["modules"][OPS].values()) == {"vllm.dsv4_overlay.drop_in"}
    assert answer["here"]["imported"] == ["vllm_dsv4_overlay.plugin"]
    (line,) = lines(log)
    said = f"is both patched into this vLLM ({version}) and installed as a plugin ({VERSION}): the patches count"
    assert said in line and ("WARNING" if version != VERSION else "INFO") in line


def test_other_patches_alone_are_no_drop_in(told):
    answer, log = told[0]["patched", VERSION, "--series", "full-width"]
    assert not is_set(answer["here"])
    (line,) = lines(log, NOT_SET)
    assert f"vllm-dsv4-overlay {VERSION} is patched into this vLLM without its drop-in; " in line


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


@pytest.mark.parametrize("release", ["0.20.2", "0.33.0"])
def test_a_server_s_own_configuration_and_layers(trees, narrow, tmp_path, release):
    """EngineArgs loads the plugin; backend, cache and configuration stay stock's, and layers have their heads."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))

    options = ["--kv-cache-dtype=fp8", "--tensor-parallel-size=4"]

    def answer(*site):
        paths = os.pathsep.join(map(str, (trees(release), *site)))
        env = {"PYTHONPATH": paths, "CAPABILITY": "9.0", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        request = json.dumps([[f"--model={tmp_path}", *options]])
        hopper = HERE.parent / "glue/hopper.py"
        done = run(sys.executable, hopper, input=request, env=os.environ | env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])[0]

    stock, ours = answer(), answer(narrow)
    assert (stock["layers"].pop("padded_heads"), ours["layers"].pop("padded_heads")) == (64, 16)
    assert ours == stock and not ours["cuda_initialized"]
