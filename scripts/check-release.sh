#!/bin/sh
# What would a release of vLLM need that is not supported yet? The first step of a port; docs/porting.md.
exec "$(dirname -- "$(readlink -f -- "$0")")/tools.sh" check-release "$@"
