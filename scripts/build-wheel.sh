#!/usr/bin/env bash
# usage: build-wheel.sh [FOLDER]   the wheel of the drop-in, into FOLDER (by default dist/), with the native library
#                                  that build-kernels.sh has put into the overlay
#
# Needs the active Python's pip, or uv, and a package index for the build's own tools (pyproject.toml names them).
# What the wheel is and how to install it: docs/plugin.md.
set -euo pipefail

stop() {
    echo "error: $1" >&2
    exit 1
}

repo=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "$0")")/.." && pwd)
case ${1:-} in
--help | -h)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
[[ $# -le 1 && ${1-x} == [!-]* ]] || stop "give one folder for the wheel, or no argument; see --help."
out=$(realpath -m -- "${1:-$repo/dist}")
folder=$out
while [ ! -e "$folder" ]; do folder=$(dirname "$folder"); done
[ -d "$folder" ] && [ -w "$folder" ] ||
    stop "$out cannot be made, since $folder is no folder that can be written; name another one."
source "$repo/scripts/python.sh"
[ -n "$python" ] || stop "there is no python3 on PATH; install Python 3.10 or newer."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if "$python" -m pip --version >/dev/null 2>&1; then
    build=("$python" -m pip --disable-pip-version-check wheel --no-deps --no-cache-dir --wheel-dir "$work" "$repo")
elif command -v uv >/dev/null; then
    build=(uv build --wheel --python "$python" --out-dir "$work" "$repo")
else
    stop "$python has no pip, and there is no uv on PATH; install one of them."
fi
if ! "${build[@]}" >"$work/log" 2>&1; then
    # A sentence of scripts/hatch_build.py stands between many lines of the frontend's.
    sed -n 's/^[ │]*\(error: .*\.\)$/\1/p' "$work/log" | head -n 1 >"$work/said"
    [ -s "$work/said" ] || { cat "$work/log" >&2; stop "the wheel was not built; why is said above."; }
    cat "$work/said" >&2
    exit 1
fi
mkdir -p "$out"
for wheel in "$work"/*.whl; do
    mv -f "$wheel" "$out/"
    echo "built $out/${wheel##*/}"
done
