"""Entry point of the shell scripts, which run it as `python -I -B __main__.py COMMAND ...`."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    # -I keeps the user's PYTHONPATH away (it may hold the very vLLM to patch); so add ourselves.
    scripts = Path(__file__).resolve().parent.parent
    sys.path.insert(0, str(scripts))
    command, *arguments = sys.argv[1:]
    if command == "apply":
        from dsv4_overlay_tools.cli import main
    elif command == "export":
        from dsv4_overlay_tools.maintain import export_main as main
    elif command == "check-release":
        from dsv4_overlay_tools.porting import check_release_main as main
    elif command.endswith(".py"):  # not of the patch engine: it lives beside what it checks
        main = runpy.run_path(str(scripts.parent / command))["main"]
    else:
        from dsv4_overlay_tools.maintain import check_main as main
    try:
        sys.exit(main(arguments, scripts.parent))
    except OSError as error:
        sys.exit(f"error: not-readable: {error.filename}: {error.strerror}.")
    except KeyboardInterrupt:
        sys.exit("error: interrupted: Interrupted; run again.")
