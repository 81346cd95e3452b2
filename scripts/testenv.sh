# Sourced by selftest.sh and test.sh: $python has the packages of requirements-test.txt, `applied RELEASE [TREE]`
# prints a folder that holds that vLLM with the overlay. shellcheck shell=bash
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=$(realpath -m "${XDG_CACHE_HOME:-${HOME:?is not set; set it, or XDG_CACHE_HOME}/.cache}")/vllm-dsv4-overlay

# vLLM's own requirements have wheels for these.
case $(python3 -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null) in
3.11 | 3.12) ;;
*) echo "error: python3 on PATH is not Python 3.11 or 3.12; put one of them first on PATH." >&2; exit 1 ;;
esac
mkdir -p "$cache"
exec 9>"$cache/test.lock"
# Against another first run; gone with the process, however that ends.
flock --nonblock 9 || { echo "Another first run is at work in $cache; waiting for it." >&2; flock 9; }
key=$({ cat "$repo/requirements-test.txt"; python3 -c 'import sys; print(sys.version, sys.base_prefix)'; } | sha256sum)
venv=$cache/test-${key:0:16}
if [ ! -e "$venv/complete" ]; then
    echo "Installing the packages of requirements-test.txt into $venv (first run: about 2 GB)" >&2
    python3 -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off -r "$repo/requirements-test.txt" |
        grep --line-buffered -E '^(Collecting|Installing|ERROR)' >&2
    touch "$venv/complete"
fi
python=$venv/bin/python

applied() { # `set -e` does not hold in $(applied)
    local tree=${2:-$cache/vllm-$1} apply=$repo/scripts/apply-patches.sh
    exec 8>"$cache/trees.lock" # closed with the subshell
    flock 8
    if [ ! -e "$tree/vllm/__init__.py" ]; then
        "$apply" --fetch "$1" "$tree" | tail -n 1 >&2 || return
    elif ! "$apply" "$tree" >/dev/null 2>&1; then # applied by another version of this repository, or edited
        "$apply" --revert "$tree" >/dev/null || return
        "$apply" "$tree" | tail -n 1 >&2 || return
    fi
    realpath "$tree"
}
