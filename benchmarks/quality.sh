#!/usr/bin/env bash
# usage: quality.sh http://localhost:8000 OUT_DIR [lm-eval options, such as --limit 20]
#
# GSM8K (5-shot) and GPQA diamond (zero-shot, chain of thought) of a running server, through lm-eval.
# For owners of trained weights: serve FlashMLA, then this backend with a BF16 and an FP8 cache, and compare the
# three OUT_DIRs. It has not been run on such weights; the mini checkpoint's are random and its scores mean nothing.
# GPQA is gated: ask for access on huggingface.co/datasets/Idavidrein/gpqa and set HF_TOKEN. QUALITY_CONCURRENCY
# (32) requests run at once. lm-eval is installed beside the other downloads of this project.
set -euo pipefail
usage=$(sed -n '2,8s/^# \?//p' "$0")
case ${1:-} in
-h | --help) echo "$usage"; exit ;;
http*://*) [ $# -ge 2 ] || { echo "$usage" >&2; exit 2; } ;;
*) echo "$usage" >&2; exit 2 ;;
esac
url=${1%/} out=$2
shift 2
version=0.4.13
venv=${XDG_CACHE_HOME:-$HOME/.cache}/vllm-dsv4-overlay/lm-eval-$version
name='import json, sys, urllib.request as r; print(json.load(r.urlopen(sys.argv[1] + "/v1/models"))["data"][0]["id"])'
model=$(python3 -c "$name" "$url" 2>/dev/null) || {
    echo "No OpenAI server answers at $url/v1/models; start one with vllm serve." >&2
    exit 1
}
mkdir -p "$out" 2>/dev/null && [ -w "$out" ] || { echo "$out cannot be written; give a folder." >&2; exit 1; }
if [ ! -e "$venv/complete" ]; then
    python3 -m venv --clear "$venv"
    "$venv/bin/pip" install -q "lm-eval[api]==$version"
    touch "$venv/complete"
fi
server=model=$model,base_url=$url/v1/completions,tokenizer_backend=none,max_retries=3
server+=,num_concurrent=${QUALITY_CONCURRENCY:-32}
run() { # task, longest answer in tokens, lm-eval options
    "$venv/bin/lm_eval" --model local-completions --model_args "$server,max_gen_toks=$2" --tasks "$1" \
        --output_path "$out/$1" --log_samples "${@:3}"
}
run gsm8k 512 "$@"
run gpqa_diamond_cot_zeroshot 4096 "$@"
