#!/bin/sh
# Put the overlay onto a vLLM, or take it off: apply-patches.sh --help; docs/patches.md.
exec "$(dirname -- "$(readlink -f -- "$0")")/tools.sh" apply "$@"
