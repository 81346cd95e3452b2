"""vLLM's own loader fills every parameter of V4 with images from a mini checkpoint, and its processor and vision
tower take the prompts of the step `images` of features_e2e.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OF_THE_TARGET = ["model.embed_tokens.weight", "model.layers.5.shared_head.head.weight"]


def loaded(applied, takes):
    release = json.loads((applied / "vllm/_dsv4_overlay/record.json").read_text())["release"]
    if release != "0.33.0":
        pytest.skip(f"the model is made as vLLM 0.33.0 makes it, and this is {release}")
    env = os.environ | {"PYTHONPATH": str(applied), "CAPABILITY": "9.0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, HERE / "image_model.py", takes]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["architecture"] == "DeepseekV4ForConditionalGeneration"
    assert found["missing"] == found["differ"] == [] and sorted(found["draft"]) == OF_THE_TARGET
    assert found["wo_b"] == ["UnquantizedLinearMethod"]
    return found


def test_a_server_of_images(applied):
    found = loaded(applied, "images")
    assert found["written"] == 1
    assert [len(prompt["pictures"]) for prompt in found["prompts"]] == [1, 1, 1, 2, 2]
    lengths = [length for prompt in found["prompts"] for _, length in prompt["pictures"]]
    assert min(lengths) >= 109 and 128 < max(lengths) <= 384
    for prompt in found["prompts"]:
        assert prompt["kinds"] == [0, 1, 2, 3, 4] and all(start % 4 == 3 for start in prompt["starts"])
        assert prompt["text is the same"] and prompt["alike"] < 0.3
        for least, most, context in (prompt["features"], prompt["marks"]):  # an embedding has about 1
            assert 0.5 < least < most < 1.5 and 0.5 < context < 1.5


def test_a_server_of_text(applied):
    loaded(applied, "text")
