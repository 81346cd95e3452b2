#!/usr/bin/env bash
set -euo pipefail
case ${1:-} in
-h | --help)
    cat <<'END'
usage: test.sh             the patch series, and all tests on vLLM 0.22.1
       test.sh --releases  also those of vLLM on each other release
       test.sh --all       also those of the image
       test.sh OPTIONS     pytest with these options, on 0.22.1 or $VLLM_RELEASE:
                           test.sh tests/kernels -k insert

Makes what it needs under ~/.cache/vllm-dsv4-overlay: Python packages, vLLM's
source with the overlay applied. Without a GPU kernels are interpreted. The image
is built by root with buildah, debootstrap and nvcc 13, else skipped.
END
    exit
    ;;
esac
source "$(dirname "$(readlink -f "$0")")/testenv.sh"
cd "$repo"
unset PYTHONDONTWRITEBYTECODE # the many processes of tests would each compile all of torch and vLLM
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    # vLLM keeps Triton without a GPU only if none is meant to be visible; kernels are interpreted.
    export CUDA_VISIBLE_DEVICES="" TRITON_INTERPRET=1
    export OMP_NUM_THREADS=1 # two processes of tests at a time, whose other threads would wait for each other, spinning
fi

beside() { # FOLDER PACKAGE...: packages that only some tests import
    [ ! -e "$1" ] || return 0
    echo "Installing ${*:2} into $1 (once)" >&2
    rm -rf "$1.part"
    install --quiet --target "$1.part" "${@:2}" ||
        stop "${*:2} were not installed; why is said above. Without a package index, add their wheels to the folder:
$bring"
    rm -rf "$1.part/flashinfer/data" # sources of its kernels, half a GB, which nothing here compiles
    mv "$1.part" "$1"
}

# For tests/glue/test_flashinfer.py, each in a folder of its own: the first release with the call, the first with
# few heads, the last before its launch took remapped indices, and the newest of 2026-11-20. 110 MB of downloads.
FLASHINFER_RELEASES=
for release in 0.6.12 0.6.14 0.6.18.post1 0.7.2.post1; do
    folder=$cache/flashinfer-$release
    beside "$folder" flashinfer-python==$release nvidia-ml-py==13.615.71 tabulate==0.10.0
    FLASHINFER_RELEASES+=${FLASHINFER_RELEASES:+:}$folder
done
export FLASHINFER_RELEASES

# For tests/glue/test_nodes.py; with it importable, vLLM would do more in every other test. 80 MB of downloads.
export RAY_PACKAGES=$cache/ray-2.60.0
beside "$RAY_PACKAGES" ray==2.60.0 click==8.5.1 filelock==4.2.11 msgpack==1.2.4 protobuf==7.36.2

# For tests/glue/test_humming_experts.py. 15 MB of downloads.
export HUMMING_PACKAGES=$cache/humming-kernels-0.1.2
beside "$HUMMING_PACKAGES" humming-kernels==0.1.2 cuda-bindings==13.5.0 cuda-pathfinder==1.9.0 nvidia-ml-py==13.615.71 \
    pyelftools==0.33 tabulate==0.10.0
# For tests/glue/test_cute_dsl.py: the compiler as vLLM 0.22.1 pins it, and the FlashInfer that images for Blackwell
# have. 87 MB of downloads.
compiler=$cache/nvidia-cutlass-dsl-4.5.2
beside "$compiler" nvidia-cutlass-dsl-libs-cu13==4.5.2 cuda-bindings==13.5.0 cuda-pathfinder==1.9.0
export CUTE_DSL_PACKAGES=$compiler:$compiler/nvidia_cutlass_dsl/python_packages:$cache/flashinfer-0.6.12
# For tests/glue/test_quantised_linears.py, as vLLM 0.22.1 pins it.
export COMPRESSED_TENSORS=$cache/compressed-tensors-0.15.0.1
beside "$COMPRESSED_TENSORS" compressed-tensors==0.15.0.1 loguru==0.7.3

exec 9>&- # everything is there

run() { # RELEASE, options of pytest
    # Not PYTHONPATH: the tests of --installed are about what another Python imports.
    local tree
    tree=$(applied "$1") || return
    VLLM_SOURCE=$tree "$python" -u -m pytest -n 2 --dist loadfile --no-loadscope-reorder -p no:cacheprovider -rs "${@:2}"
}

if [[ ! ${1---all} =~ ^--(all|releases)$ ]]; then
    run "${VLLM_RELEASE:-0.22.1}" "$@"
    exit
fi
[ $# -le 1 ] || stop "$1 takes no other options."

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
trap 'for job in $(jobs -p); do kill -- "-$job" || true; done 2>/dev/null; echo "interrupted" >&2; exit 130' INT TERM
steps=0

step() { # NAME COMMAND...: a check, which counts as one, or tests that write their report
    local status=0 p f s report now=$SECONDS
    steps=$((steps + 1))
    report=$(mktemp -p "$results")
    printf '\n=== %s\n' "$1"
    "${@:2}" || status=$?
    read -r p f s < <("$python" - "$report" "$status" <<'END'
import os, sys
from xml.etree import ElementTree

path, status = sys.argv[1], int(sys.argv[2])
count = ElementTree.parse(path).getroot()[0].attrib if os.path.getsize(path) else {"tests": 1}
tests, errors, failures, skipped = (int(count.get(key, 0)) for key in ("tests", "errors", "failures", "skipped"))
failed = max(errors + failures, int(status != 0))
print(max(tests - failed - skipped, 0), failed, skipped)
END
    )
    printf '%-45s %5d passed %3d failed %5d skipped %5d s\n' "$1" "$p" "$f" "$s" $((SECONDS - now)) \
        >>"$results/summary"
}

tests() { # RELEASE, what of it, options of pytest
    step "tests on vLLM $1$2" reported "$1" "${@:3}"
}

reported() {
    run "$@" --junitxml "$report"
}

supported() { # RELEASE...
    local release
    for release; do scripts/check-release.sh "$release" | grep "^vLLM $release is supported: " || return; done
}

beside_another() { # like tests, of two releases at a time: in one process each, for a second has vLLM to import too
    while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n || true; done
    set -m # a group of processes each, to be ended together
    tests "$@" -n 0 2>&1 | sed -u "s/^/$1: /" &
    set +m
    steps=$((steps + 1))
}

step "Python's style (ruff)" "$python" -m ruff check --quiet .
step "patch series (check-series.sh)" scripts/check-series.sh
step "README's table (support-matrix.sh)" scripts/support-matrix.sh --check
tests 0.22.1 "" -m "not image"
if [ "${1-}" = --all ]; then
    tests 0.22.1 ": the image" -m image -n 0 tests/deploy
fi
if [ $# -gt 0 ]; then
    # The longest first. There FlashInfer's call is vLLM's own. Two nodes have been run with it, and are left out for
    # time.
    FLASHINFER_RELEASES='' beside_another 0.33.0 "" tests/glue tests/test_mini_checkpoint.py \
        --ignore=tests/glue/test_nodes.py
    # Two nodes and the scripts that measure have been run with it, and are left out for time, as is a second GPU's
    # machine code of FlashInfer's product, which is the same one.
    FLASHINFER_RELEASES=$folder beside_another 0.21.0 "" tests/glue tests/test_mini_checkpoint.py \
        --ignore=tests/glue/test_nodes.py --ignore=tests/glue/test_bench_serve.py \
        --ignore=tests/glue/test_seeded_weights.py --deselect="tests/glue/test_cute_dsl.py::test_a_linear_is_compiled[103]"
    # The same files or the same lines as the release whose series they take.
    for release in 0.20.2 0.22.0; do
        beside_another "$release" "" tests/glue/test_real_config.py tests/glue/test_drop_in_seams.py \
            tests/glue/test_mtp_padding.py tests/glue/test_quantised_linears.py tests/glue/test_fp8_experts.py \
            -k "not other_gpus"
    done
    # They have no full-width cache, and of ops/flashmla.py what 0.22.1, 0.28.0 or 0.33.0 has.
    beside_another 0.28.0 "" tests/glue/test_drop_in*.py tests/glue/test_mtp_padding.py tests/glue/test_fp8_experts.py
    rest="0.23.0 0.24.0 0.25.0 0.25.1 0.26.0 0.27.0 0.27.1 0.29.0 0.30.0 0.31.0 0.32.0"
    for release in $rest; do
        beside_another "$release" "" tests/glue/test_drop_in*.py tests/glue/test_mtp_padding.py \
            tests/glue/test_fp8_experts.py
    done
    wait
    others="0.20.2 0.21.0 0.22.0 $rest 0.28.0 0.33.0"
    PLUGIN_RELEASES=$others tests 0.22.1 ": the plugin on the others" --dist load tests/plugin/test_release.py
    step "each release is supported (check-release.sh)" supported 0.22.1 $others
fi
read -r passed failed skipped < <(awk -v steps=$steps '{ p += $(NF - 7); f += $(NF - 5); s += $(NF - 3) }
    END { print p, f + steps - NR, s }' "$results/summary") # a step without its line has failed
printf '\n%s\n%s\n%s\n' "$(cat "$results/summary")" "On disk: $(du -sh "$cache" | tr '\t' ' '), which may be removed." \
    "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
