"""Entry point of the shell scripts, which run it as `python -I -B __main__.py COMMAND ...`."""

import signal
import sys

COMMANDS = {
    "apply": ("cli", "main"),
    "check": ("maintain", "check_main"),
    "check-release": ("porting", "check_release_main"),
    "export": ("maintain", "export_main"),
}


def tool(command, scripts):
    """The function that runs `command`: one of COMMANDS, or the path of a file that has a main() of its own."""
    import importlib
    import runpy

    if command.endswith(".py"):
        return runpy.run_path(str(scripts.parent / command))["main"]
    module, function = COMMANDS[command]
    return getattr(importlib.import_module(f"dsv4_overlay_tools.{module}"), function)


def main(command="", *arguments):
    import os
    from pathlib import Path

    # -I keeps the user's PYTHONPATH away (it may hold the very vLLM to patch); so add ourselves.
    scripts = Path(__file__).resolve().parent.parent
    sys.path.insert(0, str(scripts))
    from bootstrap import stop

    def unraisable(ignored):
        # Ctrl-C in a callback of the import system's, say, whose exceptions Python prints and drops.
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            return sys.__unraisablehook__(ignored)
        try:
            stop("interrupted", "Interrupted; run again.")
        finally:
            sys.stdout.flush()
            os._exit(1)

    sys.unraisablehook = unraisable
    sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be text
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # bootstrap.py has it wait
        if command not in COMMANDS and not command.endswith(".py"):
            print(f"usage: tools.sh {{{','.join(COMMANDS)}}} ...; the other scripts run it.",
                  file=sys.stdout if command in ("-h", "--help") else sys.stderr)  # fmt: skip
            return 0 if command in ("-h", "--help") else 2
        status = tool(command, scripts)(list(arguments), scripts.parent)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        stop("interrupted", "Interrupted; run again.")
    except (ImportError, SyntaxError, ValueError) as error:
        if isinstance(error, ValueError) and "null bytes" not in str(error):
            raise
        environment = Path(sys.executable).parent.parent
        stop("bootstrap-failed", f"{environment} is damaged ({error}); remove it, and the next run makes it anew.")
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python fails again when it ends
        stop("not-readable", f"{error.filename or 'standard output'}: {error.strerror}.")
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # all is said; the rest is Python's own end


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
