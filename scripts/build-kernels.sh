#!/usr/bin/env bash
# usage: build-kernels.sh                 build the native kernels into the overlay; apply-patches.sh takes them along
#        build-kernels.sh FILE.so         into FILE.so, to be carried to a machine without nvcc
#        build-kernels.sh --from FILE.so  build nothing: take FILE.so, built elsewhere of the same csrc/, into the overlay
#
#   MLA_CUDA_ARCHS   the GPUs to build for, default "90a 100a 103a 120a"; no GPU is needed to build
#   CUDA_HOME        where nvcc is, if not on PATH
#
# The headers come from the torch of the active Python. More: docs/native-kernels.md.
set -euo pipefail
torch_target=2.11 # the oldest that the library serves
# Its name up to 0.2.0 keeps working.
read -ra archs <<<"${MLA_CUDA_ARCHS-${DSV4_CUDA_ARCHS-90a 100a 103a 120a}}"

stop() {
    echo "error: $1" >&2
    exit 1
}

repo=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "$0")")/.." && pwd)
package=$repo/overlay/common/vllm/third_party/mla_kernels
out=$package/lib/libmla_kernels.so

identify() { # what the loader reads before it loads anything: see native.py
    interface=$(sed -n 's/^INTERFACE = \([0-9]*\)$/\1/p' "$package/native.py")
    sources=$(export LC_ALL=C && cd "$repo/csrc" && cat -- * | sha256sum)
    sources=${sources%% *}
}

put() { # FILE, to $out: by a rename beside it, so that nobody meets half of it
    mkdir -p "$(dirname "$out")"
    local draft
    draft=$(dirname "$out")/.$(basename "$out").new
    cp -- "$1" "$draft"
    chmod 755 "$draft"
    mv -f "$draft" "$out"
}

case ${1:-} in
--help | -h)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit
    ;;
--from)
    [ $# -eq 2 ] || stop "give one file after --from."
    [ -f "$2" ] && [ -r "$2" ] || stop "$2 cannot be read; give a library that build-kernels.sh made."
    identify
    build=$(grep -aoE 'mla_kernels_build \{[^}]*\}' "$2") || stop "$2 is no library that build-kernels.sh made."
    [[ $build == *"\"interface\": $interface,"* && $build == *"\"sources\": \"$sources\""* ]] ||
        stop "$2 was built from another csrc/ than $repo has; check out the same commit on both machines."
    put "$2"
    echo "took $2 into the overlay; apply-patches.sh takes it along"
    exit
    ;;
esac
[[ $# -le 1 && ${1-x} == [!-]* ]] || stop "give one file to build, or no argument; see --help."
out=${1:-$out}
[ ! -d "$out" ] || stop "$out is a folder; name the file that is to be built."
folder=$(dirname "$out")
while [ ! -e "$folder" ]; do folder=$(dirname "$folder"); done
[ -d "$folder" ] && [ -w "$folder" ] ||
    stop "$out cannot be made, since $folder is no folder that can be written; name another file."

nvcc=${CUDA_HOME:+$CUDA_HOME/bin/nvcc}
nvcc=${nvcc:-$(command -v nvcc || true)}
[ -x "$nvcc" ] || stop "there is no nvcc on PATH or in \$CUDA_HOME/bin; install the CUDA 13 toolkit, or build \
elsewhere and use --from."
cuda=$("$nvcc" --version | sed -n 's/.* release \([0-9.]*\),.*/\1/p')
[[ $cuda =~ ^(1[3-9]|[2-9][0-9])\. ]] || stop "$nvcc is of CUDA ${cuda:-unknown}; install the CUDA 13 toolkit."
[[ "${archs[*]}" =~ ^[0-9]+a(\ [0-9]+a)*$ ]] ||
    stop "MLA_CUDA_ARCHS is '${archs[*]}'; write names like 90a with a space between them."

source "$repo/scripts/python.sh"
[ -n "$python" ] || stop "there is no python3 on PATH; install Python 3.10 or newer."
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
identify
cat >"$work/build.cpp" <<EOF
extern "C" __attribute__((visibility("default"))) const char mla_kernels_build[];
const char mla_kernels_build[] = "mla_kernels_build {"
    "\"interface\": $interface, \"torch\": \"$torch_target\", \"cuda\": \"$cuda\", \"archs\": \"${archs[*]}\", "
    "\"built_with_torch\": \"$torch_version\", \"sources\": \"$sources\"}";
EOF
# Nothing but that is visible: other copies of the CUDA runtime are in the same process.
echo '{ global: mla_kernels_build; local: *; };' >"$work/exports"

IFS=. read -r major minor <<<"$torch_target"
# libtorch is there by the name it has in every torch, and pulls in the libraries that have the symbols.
# libstdc++ comes first: some builds of torch export parts of it without symbol versions.
# nvcc names temporary files by its process: those of builds in containers with one /tmp can meet, and the symbol table
# has these names. Without it (-s), the same sources, toolkit and torch at the same paths give the same bytes.
compile() { # FILE.so, sources and options
    TMPDIR=$work "$nvcc" --threads 0 -std=c++20 -O3 -shared -cudart static -Werror all-warnings \
        -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wno-attributes \
        -Xlinker "--version-script=$work/exports,-s,--no-as-needed" \
        -DTORCH_TARGET_VERSION="$(printf '0x%02x%02x000000000000ULL' "$major" "$minor")" \
        -isystem "$torch/include" -I "$repo/csrc" \
        "${@:2}" -lstdc++ -L "$torch/lib" -ltorch -o "$1"
}

# The kernels take minutes, and are linked after that. What a toolkit in parts may lack is found before.
cat >"$work/trial.cu" <<EOF
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
extern "C" int trial() { return cudaDeviceSynchronize(); }
EOF
compile "$work/trial.so" "$work/trial.cu" >"$work/log" 2>&1 || {
    cat "$work/log" >&2
    stop "$nvcc cannot build a library with the static CUDA runtime, as it says above; install what is missing."
}

targets=()
for arch in "${archs[@]}"; do
    targets+=(-gencode "arch=compute_$arch,code=sm_$arch")
done
compile "$work/out.so" "${targets[@]}" "$repo"/csrc/*.cu "$repo"/csrc/*.cpp "$work/build.cpp" ||
    stop "the library was not built; $nvcc says above why."
put "$work/out.so"
echo "built $out for sm ${archs[*]} with CUDA $cuda, torch $torch_target and newer"
