"""The installed wheel in vLLM's own plugin loader: when it is set, when not, and what is said."""

import shutil

import pytest
from asking import OURS, SET, VERSION, ask, is_set, lines
from building import run
from process import INDEXER, OPS

RELEASE = "0.22.1"
WITHOUT_DROP_IN = ("full-width", "mtp-padding")  # series, the second without a module
KERNELS = "vllm_dsv4_overlay/third_party/mla_kernels"
NOT_SET = f"vllm-dsv4-overlay {VERSION} is not in use, and stock vLLM runs: "
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
    bare = shutil.copytree(site, folder / "bare")
    shutil.rmtree(bare / KERNELS / "lib")
    worker = plain | {"worker": True}
    requests |= {"no GPU": worker, "no library": worker | {"site": str(bare)}}
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
    mended = shutil.copytree(tree, folder / "mended")
    indexer = mended / f"{INDEXER.replace('.', '/')}.py"
    indexer.write_text(indexer.read_text() + "\n")
    requests["mended"] = {"site": str(site), "after": [OPS, INDEXER], "tree": str(mended)}
    for version, *options in ((VERSION,), ("9.9.9",), *((VERSION, "--series", name) for name in WITHOUT_DROP_IN)):
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


def test_another_s_mending_of_mtp_is_left(told):
    """The drop-in is set all the same."""
    answer, log = told[0]["mended"]
    assert is_set(answer["here"]) and answer["here"]["lengths"] == [[9, 10], [6, 7], [-1, 0]]
    (line,) = lines(log, "leaves MTP as stock vLLM has it, which may hang: ")
    assert "WARNING" in line and f"indexer.py is not as vLLM {RELEASE} has it" in line


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_children(told, method):
    answer, log = told[0][method]
    assert is_set(answer["here"]) and is_set(answer["child"])
    assert len(lines(log, SET)) == {"spawn": 2, "fork": 1}[method]


DOES_NOT = f"/{KERNELS}/lib/libmla_kernels.so) does not: "


@pytest.mark.parametrize("case, why", [
    ("no GPU", DOES_NOT + "it needs a CUDA GPU and "),
    ("no library", DOES_NOT + "it is not built"),
])  # fmt: skip
def test_a_worker_logs_why_flashmla_serves(told, case, why):
    """Before weights are loaded, in vLLM's log: here by a torch without CUDA, by a wheel that lost its library."""
    answer, log = told[0][case]
    assert is_set(answer["here"]) and answer["width"] == 64
    (line,) = lines(log, "FlashMLA has its sparse calls")
    assert line.startswith("INFO ") and why in line


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


@pytest.mark.parametrize("series", WITHOUT_DROP_IN)
def test_other_patches_alone_are_no_drop_in(told, series):
    answer, log = told[0]["patched", VERSION, "--series", series]
    assert not is_set(answer["here"])
    (line,) = lines(log, NOT_SET)
    assert f"vllm-dsv4-overlay {VERSION} is patched into this vLLM without its drop-in; " in line
