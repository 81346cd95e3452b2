#!/usr/bin/env bash
# usage: build-kernels.sh [FILE.so]
#
# Build the native kernels into the overlay, or into FILE.so; docs/native-kernels.md.
#   DSV4_CUDA_ARCHS   the GPUs to build for, default "90a 100a 103a 120a"; no GPU is needed to build
#   CUDA_HOME         where nvcc is, if not on PATH
# The headers come from the torch of the active Python, the oldest torch that the library serves is below.
set -euo pipefail
torch_target=2.11
read -ra archs <<<"${DSV4_CUDA_ARCHS-90a 100a 103a 120a}"

stop() {
    echo "error: $1" >&2
    exit 1
}

case ${1:-} in -h | --help) sed -n '2,7s/^# \?//p' "$0"; exit ;; esac
[[ $# -le 1 && ${1:-} != -* ]] || stop "give at most one argument, the file to build; build-kernels.sh --help says the rest."

repo=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
package=$repo/overlay/common/vllm/third_party/dsv4_kernels
out=${1:-$package/lib/libdsv4_kernels.so}

nvcc=${CUDA_HOME:+$CUDA_HOME/bin/nvcc}
nvcc=${nvcc:-$(command -v nvcc || true)}
[ -x "$nvcc" ] || stop "there is no nvcc on PATH or in \$CUDA_HOME/bin; install the CUDA 13 toolkit."
cuda=$("$nvcc" --version | sed -n 's/.* release \([0-9.]*\),.*/\1/p')
[ "${cuda%%.*}" -ge 13 ] || stop "$nvcc is of CUDA $cuda; install the CUDA 13 toolkit."
[[ "${archs[*]}" =~ ^[0-9]+a(\ [0-9]+a)*$ ]] ||
    stop "DSV4_CUDA_ARCHS is '${archs[*]}'; write names like 90a with a space between them."

if [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ]; then
    python=$VIRTUAL_ENV/bin/python
else
    python=$(command -v python3 || command -v python) || stop "there is no python3 on PATH; install Python 3.10 or newer."
fi
# Not imported: that takes seconds, and is not needed for headers.
find_torch='
import importlib.metadata, importlib.util, os
spec = importlib.util.find_spec("torch")
print(importlib.metadata.version("torch"), os.path.dirname(spec.origin))'
read -r torch_version torch < <(cd / && "$python" -c "$find_torch" 2>/dev/null) ||
    stop "$python has no torch, whose headers are needed; activate the environment that vLLM is or will be in."
oldest=$(printf '%s\n' "$torch_target" "$torch_version" | sort -V | head -n 1)
[ "$oldest" = "$torch_target" ] || stop "the headers of torch $torch_version are too old; install torch $torch_target or newer."

work=$(mktemp -d)
[[ $work != *\ * ]] || stop "\$TMPDIR has a space in it, which nvcc cannot do with; set it to another folder."
trap 'rm -rf "$work"' EXIT
# What the loader reads before it loads anything: see native.py.
interface=$(sed -n 's/^INTERFACE = \([0-9]*\)$/\1/p' "$package/native.py")
sources=$(export LC_ALL=C && cd "$repo/csrc" && cat -- * | sha256sum)
cat >"$work/build.cpp" <<EOF
extern "C" __attribute__((visibility("default"))) const char dsv4_kernels_build[];
const char dsv4_kernels_build[] = "dsv4_kernels_build {"
    "\"interface\": $interface, \"torch\": \"$torch_target\", \"cuda\": \"$cuda\", \"archs\": \"${archs[*]}\", "
    "\"built_with_torch\": \"$torch_version\", \"sources\": \"${sources%% *}\"}";
EOF
# Nothing but that is visible: other copies of the CUDA runtime are in the same process.
echo '{ global: dsv4_kernels_build; local: *; };' >"$work/exports"

targets=()
for arch in "${archs[@]}"; do
    targets+=(-gencode "arch=compute_$arch,code=sm_$arch")
done
IFS=. read -r major minor <<<"$torch_target"
# libtorch is there by the name it has in every torch, and pulls in the libraries that have the symbols.
# libstdc++ comes first: some builds of torch export parts of it without symbol versions.
# nvcc names temporary files by its process: those of builds in containers with one /tmp can meet.
TMPDIR=$work "$nvcc" "${targets[@]}" --threads 0 -std=c++20 -O3 -shared -cudart static -Werror all-warnings \
    -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wno-attributes \
    -Xlinker "--version-script=$work/exports,--no-as-needed" \
    -DTORCH_TARGET_VERSION="$(printf '0x%02x%02x000000000000ULL' "$major" "$minor")" \
    -isystem "$torch/include" -I "$repo/csrc" \
    "$repo"/csrc/*.cu "$repo"/csrc/*.cpp "$work/build.cpp" \
    -lstdc++ -L "$torch/lib" -ltorch -o "$work/out.so"
chmod 755 "$work/out.so"
mkdir -p "$(dirname "$out")"
draft=$(dirname "$out")/.$(basename "$out").new
mv -f "$work/out.so" "$draft"
mv -f "$draft" "$out"
echo "built $out for sm ${archs[*]} with CUDA $cuda, torch $torch_target and newer"
