#!/bin/sh
# Is the committed patch series what an export gives, and nothing else? docs/patches.md.
exec "$(dirname -- "$(readlink -f -- "$0")")/tools.sh" check "$@"
