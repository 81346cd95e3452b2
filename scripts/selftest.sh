#!/usr/bin/env bash
set -euo pipefail
case ${1:-} in
-h | --help)
    cat <<'END'
usage: selftest.sh [DIR]

Self-test on a machine that has nothing but Python, git and a package index.
DIR (default: under ~/.cache) gets the pinned vLLM source with the overlay
applied; VLLM_RELEASE says which release, default 0.22.1.
END
    exit
    ;;
esac
[[ $# -le 1 && ${1-x} == [!-]* ]] || { echo "error: give one folder, or no argument." >&2; exit 1; }
source "$(dirname "$(readlink -f "$0")")/testenv.sh"
exec 9>&- # the packages are there
tree=$(applied "${VLLM_RELEASE:-0.22.1}" "${1:-}")
[ -e "$tree/vllm/dsv4_overlay/selftest.py" ] ||
    stop "the self-test comes with the full-width cache, which this release lacks; set VLLM_RELEASE to one such as 0.22.1."
cd "$repo" # away from any folder named vllm
PYTHONPATH=$tree exec "$python" -m vllm.dsv4_overlay.selftest
