"""Processes of a vLLM with the wheel installed (process.py), and what to read in their answers."""

import json
import os
import sys
from pathlib import Path

from building import ROOT, run
from process import FLASHMLA, FUNCTIONS, OPS

HERE = Path(__file__).parent
VERSION = (ROOT / "VERSION").read_text().strip()
OURS = "vllm_dsv4_overlay.dsv4_overlay.drop_in"
SET = f"vllm-dsv4-overlay {VERSION}, a plugin, has set its drop-in for FlashMLA in vLLM"


def ask(tree, requests):
    """For each request its answer, None where the process ended with an error, and what the process wrote."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    env |= {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    done = run(sys.executable, HERE / "process.py", json.dumps(requests), env=env, cwd=tree.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


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
