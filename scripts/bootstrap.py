"""Runs one of the tools in its own virtual environment, which it makes on first use.

Standard library only: this runs in whatever Python is active, and installs nothing into it.
Nothing goes to standard output, which belongs to the report.
"""

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"


def stop(code, message):
    # A refusal by the tool has the same look; but here is no library yet to print a report with.
    if "--json" in sys.argv:
        import json

        error = {"code": code, "message": message, "path": None, "line": None}
        report = {"release": None, "target": None, "kind": None, "commit": None, "series": [], "overlay": None,
                  "state": "unknown", "files": [], "notes": []}
        print(json.dumps({**report, "error": error}, indent=1))
    else:
        print(f"error: {code}: {message}", file=sys.stderr)
    sys.exit(1)


def build(folder):
    """Make the environment in `folder`; return None, or what went wrong."""
    python = folder / "bin" / "python"
    ways = [
        (
            # -I: in this folder or on PYTHONPATH may be a module with the name of one that this needs.
            [sys.executable, "-I", "-m", "venv", str(folder)],
            # -I: what is on the user's PYTHONPATH would count as installed already.
            [str(python), "-I", "-m", "pip", "install", "--quiet", "--require-hashes", "-r",
             str(REQUIREMENTS)],
        )
    ]
    if shutil.which("uv"):  # Debian's Python has no ensurepip unless python3-venv is installed
        ways.append((
            ["uv", "venv", "--quiet", "--seed", "--python", sys.executable, str(folder)],
            ["uv", "pip", "install", "--quiet", "--require-hashes", "--python", str(python), "-r",
             str(REQUIREMENTS)],
        ))
    # With these of the user's set, pip would install elsewhere, or not at all.
    env = {**os.environ, "PIP_USER": "0"}
    for name in ("PIP_CONSTRAINT", "PIP_PREFIX", "PIP_ROOT", "PIP_TARGET"):
        env.pop(name, None)
    problem = ""
    for way in ways:
        shutil.rmtree(folder, ignore_errors=True)
        for command in way:
            done = subprocess.run(command, capture_output=True, text=True, env=env)
            if done.returncode:
                lines = (done.stderr + done.stdout).strip().splitlines() or ["no output"]
                errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
                what = "making a virtual environment" if command is way[0] else "installing into it"
                problem = f"{what} failed: {errors[-1]}; check pip's index configuration"
                if any("ensurepip" in line for line in lines):  # Debian's says so in many lines
                    problem = f"{sys.executable} cannot make virtual environments; install python3-venv, or uv"
                break
        else:
            return None
    return problem


def main():
    if sys.version_info < (3, 10):  # noqa: UP036 - this file alone runs under any Python 3
        stop("bootstrap-failed", f"{sys.executable} is older than Python 3.10; activate a newer one.")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if base.startswith("~"):
        stop("bootstrap-failed", "there is no home folder; set HOME or XDG_CACHE_HOME.")
    cache = Path(base) / "vllm-dsv4-overlay"
    key = REQUIREMENTS.read_bytes() + sys.version.encode() + sys.base_prefix.encode()
    folder = cache / f"venv-{hashlib.sha256(key).hexdigest()[:16]}"
    python = folder / "bin" / "python"
    if not python.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            lock = os.open(cache, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)  # gone with the process, however that ends
        except OSError as error:
            stop("bootstrap-failed", f"{cache} is not usable ({error.strerror}); set "
                                     "XDG_CACHE_HOME to a folder you can write to.")
        if not python.exists():  # or another first run made it while we waited
            print("Preparing the tools (first run)", file=sys.stderr)
            # Under another name until complete: a killed first run must not look like a good one.
            # Moving it is fine, since only bin/python of it is ever run.
            new = Path(f"{folder}.new")
            problem = build(new)
            if problem:
                shutil.rmtree(new, ignore_errors=True)
                stop("bootstrap-failed", f"{problem}.")
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(new, folder)
        os.close(lock)
    tool = str(HERE / "dsv4_overlay_tools" / "__main__.py")
    # -I: the user's PYTHONPATH may hold other versions of our libraries, and the vLLM to patch.
    # Ctrl-C waits until the tool is far enough to answer it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        os.execv(python, [str(python), "-I", "-B", tool, *sys.argv[1:]])
    except OSError as error:
        stop("bootstrap-failed", f"{python} cannot be run ({error.strerror}); remove {folder}, and the next run "
                                 "makes it anew.")


if __name__ == "__main__":
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tools.sh has it ignored
        main()
    except KeyboardInterrupt:
        stop("interrupted", "Interrupted; run again.")
