#!/usr/bin/env bash
# Self-test on a machine that has nothing but Python and a package index: selftest.sh [DIR]
# DIR (default: under ~/.cache) gets the pinned vLLM source with the overlay applied.
source "$(dirname "$0")/testenv.sh"
cd "$repo" # away from any folder named vllm
PYTHONPATH=$tree exec "$python" -m vllm.dsv4_overlay.selftest
