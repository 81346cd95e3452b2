#!/bin/sh
# Write the tables of releases in README.md and docs/releases.md, or with --check see that they are not stale; docs/porting.md.
exec "$(dirname -- "$(readlink -f -- "$0")")/tools.sh" benchmarks/support_matrix.py "$@"
