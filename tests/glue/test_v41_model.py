"""vLLM's own loader fills every parameter of V4.1, and of its draft, from a mini checkpoint, whose layers are of
every kind that FlashMLA's sparse calls serve on Hopper."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WINDOW = {"swa_cache": 584}
SOURCE = WINDOW | {"": 584, "indexer.k_cache": 132}
# Compress ratio, whose rows, by whose picks, and the bytes of a row in each cache of its own.
LAYERS = [
    [0, None, None, WINDOW],
    [2, 1, 1, SOURCE | {"compressor.state_cache": 4096}],
    [2, 1, 1, WINDOW],
    [1, 3, 3, SOURCE],
    [1, 3, 4, WINDOW],
    [1, 3, 4, WINDOW],
]


@pytest.mark.parametrize("layout, method", [("mxfp8", "ModelOptLinearMethod"), ("fp8", "Fp8LinearMethod")])
def test_vllm_loads_a_mini_checkpoint(applied, layout, method):
    release = json.loads((applied / "vllm/_dsv4_overlay/record.json").read_text())["release"]
    if release != "0.33.0":
        pytest.skip(f"V4.1's layers are made as vLLM 0.33.0 makes them, and this is {release}")
    env = os.environ | {"PYTHONPATH": str(applied), "CAPABILITY": "9.0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, HERE / "v41_model.py", layout]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["missing"] == found["differ"] == []
    assert found["layers"] == LAYERS and found["attention"] == ["DeepseekV4FlashMLAAttention"]
    assert found["candidates"] == 128 and found["methods"] == [method]
