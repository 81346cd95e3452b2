#!/usr/bin/env bash
# Self-test on a machine that has nothing but Python and a package index: selftest.sh [DIR]
# DIR (default: under ~/.cache) gets the pinned vLLM source with the overlay applied; VLLM_RELEASE says which.
[[ $# -le 1 && ${1:-} != -* ]] || { echo "error: give at most one argument, a folder." >&2; exit 1; }
source "$(dirname "$0")/testenv.sh"
exec 9>&- # the packages are there
tree=$(applied "${VLLM_RELEASE:-0.22.1}" "${1:-}")
cd "$repo" # away from any folder named vllm
PYTHONPATH=$tree exec "$python" -m vllm.dsv4_overlay.selftest
