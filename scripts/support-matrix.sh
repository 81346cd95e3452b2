#!/bin/sh
# Write the table of releases in README.md, or with --check see that it is not stale; docs/porting.md.
exec "$(dirname -- "$0")/tools.sh" benchmarks/support_matrix.py "$@"
