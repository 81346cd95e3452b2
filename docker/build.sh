#!/bin/sh
# Build the image of a vLLM release: build.sh --help; docs/deploy.md.
exec "$(dirname -- "$(readlink -f -- "$0")")/../scripts/tools.sh" docker/image.py "$@"
