#!/bin/sh
# Build the docker/image.py of a vLLM release: build.sh --help; docs/deploy.md.
exec "$(dirname -- "$0")/../scripts/tools.sh" docker/image.py "$@"
