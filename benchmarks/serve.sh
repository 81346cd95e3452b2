#!/bin/sh
# Serving throughput and latency, FlashMLA against this backend: serve.sh --help
exec python3 "$(dirname -- "$(readlink -f -- "$0")")/serve.py" "$@"
