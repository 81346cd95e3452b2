#!/bin/sh
# Would these settings serve? check.sh VARIANT, before kubectl apply -k; docs/deploy.md.
exec "$(dirname -- "$0")/../../scripts/tools.sh" deploy/kubernetes/check.py "$@"
