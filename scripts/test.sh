#!/usr/bin/env bash
# Everything that CI checks: the patch series, all tests on vLLM 0.22.1, and those that need a vLLM on each other
# release. With options, which are pytest's (test.sh -k name), only those tests, on 0.22.1 or $VLLM_RELEASE.
source "$(dirname "$0")/testenv.sh"
cd "$repo"
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    # vLLM keeps Triton without a GPU only if none is meant to be visible; kernels are interpreted.
    export CUDA_VISIBLE_DEVICES="" TRITON_INTERPRET=1
fi

# For tests/glue/test_flashinfer.py, each in a folder of its own: the first release with the call, the first with
# few heads, the last before its launch took remapped indices, and the newest of 2026-11-20. 110 MB of downloads.
FLASHINFER_RELEASES=
for release in 0.6.12 0.6.14 0.6.18.post1 0.7.2.post1; do
    folder=$cache/flashinfer-$release
    if [ ! -e "$folder" ]; then
        rm -rf "$folder.part"
        "$python" -m pip install --disable-pip-version-check --quiet --no-deps --no-compile --target "$folder.part" \
            flashinfer-python==$release nvidia-ml-py==13.615.71 tabulate==0.10.0
        mv "$folder.part" "$folder"
    fi
    FLASHINFER_RELEASES+=${FLASHINFER_RELEASES:+:}$folder
done
export FLASHINFER_RELEASES

# For tests/glue/test_nodes.py; with it importable, vLLM would do more in every other test. 80 MB of downloads.
export RAY_PACKAGES=$cache/ray-2.60.0
if [ ! -e "$RAY_PACKAGES" ]; then
    rm -rf "$RAY_PACKAGES.part"
    "$python" -m pip install --disable-pip-version-check --quiet --no-deps --no-compile --target "$RAY_PACKAGES.part" \
        ray==2.60.0 click==8.5.1 filelock==4.2.11 msgpack==1.2.4 protobuf==7.36.2
    mv "$RAY_PACKAGES.part" "$RAY_PACKAGES"
fi

exec 9>&- # everything is there

run() { # RELEASE, options of pytest
    # Not PYTHONPATH: the tests of --installed are about what another Python imports.
    local tree
    tree=$(applied "$1")
    VLLM_SOURCE=$tree "$python" -m pytest -n 2 --dist loadfile -p no:cacheprovider -rs "${@:2}"
}

if [ $# -gt 0 ]; then
    run "${VLLM_RELEASE:-0.22.1}" "$@"
    exit
fi
"$python" -m ruff check --quiet .
scripts/check-series.sh
scripts/support-matrix.sh --check
run 0.22.1
FLASHINFER_RELEASES=$folder run 0.21.0 tests/glue tests/test_mini_checkpoint.py
# The same files or the same lines as the release whose series they take.
for release in 0.20.2 0.22.0; do
    run "$release" tests/glue/test_real_config.py
done
# There FlashInfer's call is vLLM's own. Two nodes have been run with it, and are left out for time.
FLASHINFER_RELEASES='' run 0.33.0 tests/glue tests/test_mini_checkpoint.py --ignore=tests/glue/test_nodes.py
