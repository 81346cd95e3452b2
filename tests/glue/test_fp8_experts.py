"""The series fp8-experts: conversion, the choice by tokens and refusals, through vLLM's classes on a CPU.

DeepGEMM's kernels do not run here; docs/choosing.md says what ran.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from on_request import ON_REQUEST, tree_with

NAME = "fp8-experts"
HERE = "dsv4_fp8_experts in --additional-config "
NUMBER = "; it may be the number of tokens, 1 or more, from which on experts run in FP8."
PARALLEL = "does not serve data parallelism, --enable-eplb, or all-to-all between experts; omit it."
DEEP_GEMM = "needs DeepGEMM, which this vLLM does not have or VLLM_USE_DEEP_GEMM switches off."
REFUSALS = {
    "True": f"is True{NUMBER}",
    "0": f"is 0{NUMBER}",
    "'512'": f"is '512'{NUMBER}",
    "1.5": f"is 1.5{NUMBER}",
    "seam": f"is 'all'{NUMBER}",
    "8193": "is 8193, but no step has more than 8192 tokens; lower it, or raise --max-num-batched-tokens.",
    **dict.fromkeys(["EPLB", "DP", "DP with EP"], PARALLEL),
    "Humming": "stands beside Marlin, not HUMMING; use --moe-backend marlin.",
    "bias": "is for experts like V4's, without a bias and with silu, and these have a bias; omit it.",
    "activation": "is for experts like V4's, without a bias and with silu, and these have swigluoai; omit it.",
    "other names": "is for MXFP4 experts as DeepSeek's checkpoints have them, and these are OtherMethod's; "
    "omit it.",
    "LoRA": "is not served here: DeepGEMM's kernel does not support LoRA.",
    "hidden": "needs a hidden size that 1024 divides, not 4608; omit it.",
    # 43 layers * 256 experts * 3 * 4096 * 1024 values.
    "one of two": "needs 129.0 GiB on each GPU for experts in FP8 beside 68.5 in 4 bits, and a GPU has 141.0; "
    "raise --tensor-parallel-size, or omit it.",
    **dict.fromkeys(["DeepGEMM", "DeepGEMM off"], DEEP_GEMM),
    "Blackwell": "is for Hopper (H100, H200); omit it.",
}
# By how many powers of two a scale is below its block's largest, and of which values it then is. 6 becomes 384,
# and the least that E4M3 has is 2 ** -9, or 3 * 2 ** -9 for what has a second bit.
EXACT = {
    **dict.fromkeys(["0", "1", "7", "13", "14", "17 of 4", "17 of -4", "15 of 3", "100 of 0"], True),
    **dict.fromkeys(["15", "16", "30", "100", "18 of 4", "16 of 3", "16 of 1.5", "NaN"], False),
    **{"0 far above": True, "least": True, "below": False, "greatest": True},  # 2 ** -126 is the least scale
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Of fp8_experts.py, in a tree with the series."""
    if NAME not in ON_REQUEST:
        pytest.skip("this release has no such series")
    tree = tree_with(tmp_path_factory.mktemp("tree"), NAME)
    env = os.environ | {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": "", "CAPABILITY": "9.0"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fp8_experts.py"))],
        capture_output=True,
        text=True,
        cwd=tree,
        env=env | {"TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", EXACT)
def test_a_conversion_is_exact_or_says_that_it_is_not(answers, case):
    """As it says, and by float64."""
    assert answers["conversions"][case] == [EXACT[case]] * 2


def test_nan_scales_are_not_converted(answers):
    said, _ = answers["conversions"]["NaN of 0"]
    assert not said


@pytest.mark.parametrize("tokens, products", [("1", 0), ("23", 0), ("24", 2), ("40", 2)])
def test_many_tokens_go_to_deepgemm_and_fewer_to_marlin(answers, tokens, products):
    found = answers["layer"]["calls"][tokens]
    assert found["products"] == products and found["sevens"] is (not products)  # which stand for Marlin


def test_deepgemms_layer_is_the_definition_with_the_swiglu_limit(answers):
    """Relative to float32 on the MXFP4 weights: what activations lose in E4M3, twice. Without the limit 3.3."""
    errors = [call["error"] for call in answers["layer"]["calls"].values() if call["products"]]
    assert len(errors) == 2 and max(errors) < 0.1


def test_a_limit_of_zero_is_none(answers):
    """As for Marlin; DeepGEMM's layer would make every value zero."""
    assert answers["layer"]["without_limit"] is None


def test_experts_of_other_gpus_add_nothing(answers):
    """--enable-expert-parallel with tensor parallelism."""
    assert answers["layer"]["EP"] < 0.1


def test_weights_loaded_anew_are_where_cuda_graphs_read_the_first(answers):
    same, error, refusal = answers["layer"]["anew"]
    assert same and error < 0.1
    assert refusal == (
        "E4M3 cannot hold these weights of ffn.experts exactly, as it could those before them; start the server "
        "anew with them."
    )


def test_products_are_warmed_up_to_the_largest_step(answers):
    """Two of each number of rows, up to 2048 * 2, the tokens of a step by experts a token, and 127 for each of 4
    experts: up to 36 tiles. From 0.23.0 on vLLM leaves out two numbers that differ in no kernel."""
    count, most = answers["layer"]["warmed_up"]
    assert most == 4608 and count in (2 * 34, 2 * 36)
    assert answers["layer"]["not_warmed_up"] == 0  # with VLLM_DEEP_GEMM_WARMUP=skip


def test_layers_that_are_not_exact_stay_with_marlin(answers):
    """With other weights of a running server too, whose caches have the memory by then."""
    marlin = answers["layer"]["off"]
    assert answers["layer"]["inexact"] == [marlin, marlin] and marlin == "FusedMoEKernelModularImpl"


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_before_weights_are_loaded(answers, case):
    assert answers["refusals"][case] == HERE + REFUSALS[case]


def test_asked_for_or_not(answers):
    cases = {"none": None, "one of four": 512, "EP": 512, "1": 1, "8192": 8192}  # the last as long as a step
    assert {case: answers["refusals"][case] for case in cases} == cases
