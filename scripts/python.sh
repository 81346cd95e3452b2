# Sourced: sets $python to the active Python, whose vLLM --installed means, or to nothing if there is none.
if [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ] &&
    [ "$(command -v python3)" != "${CONDA_PREFIX:-none}/bin/python3" ]; then # conda activate leaves VIRTUAL_ENV
    python=$VIRTUAL_ENV/bin/python
else
    python=$(command -v python3 || command -v python || true)
fi
