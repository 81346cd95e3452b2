#!/bin/sh
# Run one of the tools (apply, export, check) in an environment of its own; called by the other scripts.
set -eu
# The Python whose vLLM --installed means; also makes the tools' environment.
if [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ] &&
    [ "$(command -v python3)" != "${CONDA_PREFIX:-none}/bin/python3" ]; then # conda activate leaves VIRTUAL_ENV
    python=$VIRTUAL_ENV/bin/python
elif ! python=$(command -v python3 || command -v python); then
    echo "error: bootstrap-failed: there is no python3 on PATH; install Python 3.10 or newer." >&2
    exit 1
fi
here=$(dirname -- "$(readlink -f -- "$0")")
export DSV4_OVERLAY_PYTHON="$python"
# Until bootstrap.py can answer it, Ctrl-C would be a traceback of Python's own.
trap '' INT
exec "$python" -I -B "$here/bootstrap.py" "$@"
