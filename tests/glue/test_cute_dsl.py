"""NVFP4 linears of the series quantised-linears, compiled by FlashInfer's CuTe DSL for Blackwell without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from on_request import ON_REQUEST, RELEASE, ROOT, TREE

# Tokens, outputs, inputs: V4-Flash's wq_b on one of eight GPUs, where the tokens decide the tile, the cluster and
# which operand is the first; and outputs and inputs that are padded.
SHAPES = [(1, 4096, 1024), (8, 4096, 1024), (4096, 4096, 1024), (5, 40, 144)]
EM_CUDA = 190


@pytest.mark.parametrize("number", [100, 103])
def test_a_linear_is_compiled(number, tmp_path):
    if "quantised-linears" not in ON_REQUEST or RELEASE == "0.33.0":
        pytest.skip("this release has no such series, or a CuTe DSL product of its own")
    if not (packages := os.environ.get("CUTE_DSL_PACKAGES")):
        pytest.skip("CUTE_DSL_PACKAGES does not name folders with nvidia-cutlass-dsl; scripts/test.sh makes them")
    architecture = f"sm_{number}a"
    environment = os.environ | {
        "PYTHONPATH": f"{TREE}:{packages}",
        "CUDA_VISIBLE_DEVICES": "",
        "CAPABILITY": f"10.{number % 10}",
        "CUTE_DSL_ARCH": architecture,
        "CUTE_DSL_KEEP": "ptx,cubin",
        "CUTE_DSL_KEEP_PTX": "1",  # these two up to 4.4.2
        "CUTE_DSL_KEEP_CUBIN": "1",
        "CUTE_DSL_DUMP_DIR": str(tmp_path),
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "VLLM_HAS_FLASHINFER_CUBIN": "1",
    }
    done = subprocess.run(
        [sys.executable, "-B", Path(__file__).with_name("cute_dsl.py"), ROOT / "overlay/common/vllm/dsv4_overlay"],
        input=json.dumps(SHAPES),
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["supported"] == [True, None]
    assert len(answer["found"]) == len(SHAPES)
    for found in answer["found"]:
        assert found["target"] == architecture and found["products"] > 0
        assert (found["machine"], found["architecture"]) == (EM_CUDA, number)
        # The launcher accepts what the linear passes on, and checks it: nothing but a driver is missing.
        assert "Cuda Runtime Error" in found["error"]
        assert "Mismatched" in found["two alphas"]
