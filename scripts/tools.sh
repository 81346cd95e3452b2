#!/bin/sh
# Run one of the tools (apply, export, check) in an environment of its own; called by the other scripts.
set -eu
here=$(dirname -- "$(readlink -f -- "$0")")
. "$here/python.sh" # also makes the tools' environment
[ -n "$python" ] || {
    echo "error: bootstrap-failed: there is no python3 on PATH; install Python 3.10 or newer." >&2
    exit 1
}
export DSV4_OVERLAY_PYTHON="$python"
# Until bootstrap.py can answer it, Ctrl-C would be a traceback of Python's own.
trap '' INT
exec "$python" -I -B "$here/bootstrap.py" "$@"
