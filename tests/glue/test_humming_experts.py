"""The series humming-experts: V4-Flash's experts through vLLM's classes and humming-kernels' own, on a CPU.

The kernels do not run here; what ran on a GPU: docs/choosing.md.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from on_request import ON_REQUEST, tree_with

NAME = "humming-experts"
# Ranks, expert parallelism, and what the activations are quantised to.
CASES = {"TP": (8, False, None), "EP": (4, True, None), "FP8": (4, False, "float8e4m3")}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Of humming_experts.py, in a tree with the series."""
    if NAME not in ON_REQUEST:
        pytest.skip("this release has no such series")
    if not (packages := os.environ.get("HUMMING_PACKAGES")):
        pytest.skip("HUMMING_PACKAGES does not name a folder with humming-kernels; scripts/test.sh makes one")
    tree = tree_with(tmp_path_factory.mktemp("tree"), NAME)
    env = os.environ | {"PYTHONPATH": f"{tree}:{packages}", "CUDA_VISIBLE_DEVICES": "", "CAPABILITY": "9.0"}
    env |= {"TORCHDYNAMO_DISABLE": "1", "HUMMING_DISABLE_PARALLEL_BUILD": "1"}  # no compiler
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("humming_experts.py"))],
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        cwd=tree,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_weights_are_converted(answers, name):
    """By Humming's own code: 4-bit values, eight in an integer, in rows of 16 (BF16) or 32 (FP8) of the inputs."""
    ranks, ep, a_dtype = CASES[name]
    experts, width, rows = (256 // ranks, 2048, 16) if ep else (256, 2048 // ranks, 32 if a_dtype else 16)
    assert answers[name]["weights"] == {
        "w13_weight": [experts, 4096 // rows, 2 * width * rows // 8],
        "w2_weight": [experts, width // rows, 4096 * rows // 8],
    }
    assert answers[name]["types"] == [a_dtype or "bfloat16", "float4e2m1"]


def test_the_swiglu_limit_arrives(answers):
    assert {answers[name]["limit"] for name in CASES} == {10.0}
    assert answers["error"] < 0.01  # without the limit 4.7


def test_another_humming_is_refused_before_weights_are_loaded(answers):
    needs = "--moe-backend humming needs humming-kernels 0.1.2, but "
    install = "; run pip install 'humming-kernels[cu13]==0.1.2' (cu12 for CUDA 12), or take another --moe-backend."
    assert answers["absent"] == f"{needs}it is not installed{install}"
    assert answers["other"] == f"{needs}0.1.19 is installed{install}"
