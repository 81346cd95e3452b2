#!/usr/bin/env bash
# Everything that CI checks: the patch series, then all tests. Options are pytest's: test.sh -k name
source "$(dirname "$0")/testenv.sh" ""
cd "$repo"
"$python" -m ruff check --quiet .
scripts/check-series.sh 0.22.1
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    # vLLM keeps Triton without a GPU only if none is meant to be visible; kernels are interpreted.
    export CUDA_VISIBLE_DEVICES="" TRITON_INTERPRET=1
fi
# Not PYTHONPATH: the tests of --installed are about what another Python imports.
export VLLM_SOURCE=$tree
exec "$python" -m pytest -n 2 --dist loadfile -p no:cacheprovider -rs "$@"
