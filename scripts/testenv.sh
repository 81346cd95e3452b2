# Sourced by selftest.sh and test.sh: $python has the packages of requirements-test.txt, `applied RELEASE [TREE]`
# prints a folder that holds that vLLM with the overlay. shellcheck shell=bash
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=$(realpath -m "${XDG_CACHE_HOME:-${HOME:?is not set; set it, or XDG_CACHE_HOME}/.cache}")/vllm-dsv4-overlay

stop() {
    echo "error: $1" >&2
    exit 1
}
bring="Without a package index, bring a folder: on a machine with one, with the same Python, run
    python3 -m pip download --no-deps -d FOLDER -r requirements-test.txt
    python3 -m pip download --no-deps -d FOLDER -r scripts/requirements.txt
and add vllm-0.22.1.tar.gz of https://pypi.org/project/vllm/0.22.1/#files. Here, run it again with
PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER in the environment."

# vLLM's own requirements have wheels for these.
case $(python3 -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null) in
3.11 | 3.12) ;;
*) stop "python3 on PATH is not Python 3.11 or 3.12; put one of them first on PATH." ;;
esac
mkdir -p "$cache"
exec 9>"$cache/test.lock"
# Against another first run; gone with the process, however that ends.
flock --nonblock 9 || { echo "Another first run is at work in $cache; waiting for it." >&2; flock 9; }

install() { # options of pip, whose own account of a failure is shown; names of files and their progress are not
    "$python" -m pip install --disable-pip-version-check --progress-bar off --no-cache-dir --no-compile --no-deps "$@" |
        { grep --line-buffered -vE '^  (Downloading|Using cached|Link requires)|^Looking in ' || true; } >&2
}

install_packages() {
    local site libraries name pins=$repo/requirements-test.txt
    python3 -m venv --clear "$venv" || return
    install -r <(grep -vE '^(cuda|nvidia)-' "$pins") || return
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    if [ ! -e "$site/torch/lib/libtorch_cuda.so" ]; then # a build for CPUs
        return
    elif [ -n "$gpu" ]; then
        install -r <(grep -E '^(cuda|nvidia)-' "$pins")
        return
    fi
    # PyPI has no build of torch for CPUs. The one for CUDA is linked to 2.7 GB of libraries; without a GPU it needs of
    # three what they hold, and of the others that they load. So torch's own libc10 stands in for each of those, and
    # functions are looked up when they are first called: such a call ends the process and names the function.
    install -r <(grep -E '^nvidia-(cuda-runtime|cuda-cupti|nvshmem-cu13)=' "$pins") || return
    echo 'import os, sys; sys.setdlopenflags(os.RTLD_LAZY)' >"$site/lazy.pth"
    libraries=$site/nvidia/cu13/lib
    for name in cublas.so.13 cublasLt.so.13 cudnn.so.9 cufft.so.12 cufile.so.0 curand.so.10 cusparse.so.12 \
        cusparseLt.so.0 nccl.so.2 nvrtc.so.13; do
        ln -s ../../../torch/lib/libc10.so "$libraries/lib$name" || return
    done
}

gpu=
[ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ] || gpu=yes
key=$({ cat "$repo/requirements-test.txt" && declare -f install_packages && echo "$gpu" &&
    python3 -c 'import sys; print(sys.version, sys.base_prefix)'; } | sha256sum)
venv=$cache/test-${key:0:16}
python=$venv/bin/python
if [ ! -e "$venv/complete" ]; then
    echo "Installing the packages of requirements-test.txt into $venv (once: 2.5 GB, with a GPU over 5 GB)" >&2
    if ! install_packages || ! "$python" -c 'import torch'; then
        stop "the packages were not installed; why is said above. $bring"
    fi
    touch "$venv/complete"
fi

applied() { # `set -e` does not hold in $(applied)
    local tree=${2:-$cache/vllm-$1} apply=$repo/scripts/apply-patches.sh
    exec 8>"$cache/trees.lock" # closed with the subshell
    flock 8
    if [ -n "${2:-}" ] && [ -e "$tree/vllm/__init__.py" ]; then # the user's: nothing is taken off
        local found
        found=$("$apply" --status --json "$tree" | "$python" -c 'import json, sys; print(json.load(sys.stdin)["release"])') ||
            return
        [ "$found" = "$1" ] || stop "$tree holds vLLM $found, not $1; set VLLM_RELEASE=$found, or give another folder."
        "$apply" "$tree" | tail -n 1 >&2 || return
    elif [ -e "$tree/vllm/__init__.py" ] && ! "$apply" "$tree" >/dev/null 2>&1; then
        # Applied by another version of this repository, or edited.
        if "$apply" --revert "$tree" >/dev/null; then
            "$apply" "$tree" | tail -n 1 >&2 || return
        else # a record that this version does not read
            rm -rf "$tree"
        fi
    fi
    if [ ! -e "$tree/vllm/__init__.py" ]; then
        "$apply" --fetch "$1" "$tree" | tail -n 1 >&2 || return
    fi
    realpath "$tree"
}
