#!/bin/sh
# Write the tables of releases in README.md and docs/releases.md, or with --check see that they are not stale.
exec "$(dirname -- "$0")/tools.sh" matrix "$@"
