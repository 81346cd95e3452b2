#!/bin/sh
# Write the patch series of a release anew from an edited tree; docs/patches.md.
exec "$(dirname -- "$(readlink -f -- "$0")")/tools.sh" export "$@"
