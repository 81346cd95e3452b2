"""support-matrix.sh: the README's table of releases, from the release folders and the committed results."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import tomlkit
from packaging.version import Version

from dsv4_overlay_tools.errors import Refusal
from dsv4_overlay_tools.series import load_series, release_folders

START, END = "<!-- written by scripts/support-matrix.sh -->\n", "<!-- end of the table -->\n"
GPUS = {"hopper": "Hopper (9.0)", "blackwell": "Blackwell (10.0, 10.3)"}
# The results that are about a release, and what each of their parts is called.
RESULTS = {"accuracy_e2e_*.json": "bars", "features_*.json": "steps"}
# What a result calls the GPU, by the column it is evidence for.
MODELS = {"H200": "hopper"}


def evidence(root: Path) -> dict[tuple[str, str], list[str]]:
    """(release, column) -> what ran there, from each result that names the overlay it ran with."""
    found: dict[tuple[str, str], list[str]] = {}
    results = root / "benchmarks" / "results"
    for path, what in ((path, what) for name, what in RESULTS.items() for path in sorted(results.glob(name))):
        result = json.loads(path.read_text())
        if what == "bars":
            passed = [bar["passed"] for bar in result["bars"]]
        else:
            passed = [step["ok"] for steps in result["steps"].values() for step in steps.values()]
        machine = result["machine"]
        ran = [p for p in passed if p is not None]
        words = f"{sum(ran)} of {len(ran)} {what}"
        if len(ran) < len(passed):
            words += f", {len(passed) - len(ran)} not run"
        for model, column in MODELS.items():
            if machine.get("overlay") and any(model in gpu for gpu in machine["gpus"]):
                link = f"[{words}]({path.relative_to(root).as_posix()}) on {model}"
                found.setdefault((machine["overlay"]["release"], column), []).append(link)
    return found


def table(root: Path) -> str:
    """One row a release: its series, and for each kind of GPU what serves and what ran."""
    ran = evidence(root)
    rows = {}
    for folder in release_folders(root):
        series = load_series(folder)
        toml = tomlkit.parse((folder / "release.toml").read_text("utf-8")).unwrap()
        lines = sum(patch.added for patch in series.patches)
        for release in series.sdists:
            own = release == series.release
            cells = [release, f"{len(series.patches)}, {lines} lines" if own else f"of {series.release}"]
            for gpu in GPUS:
                cells.append("; ".join([toml["gpus"][gpu], *(ran.get((release, gpu)) or ["not run"])]))
            rows[release] = cells
    head = ["vLLM", "patches", *GPUS.values()]
    body = "".join(f"| {' | '.join(rows[release])} |\n" for release in sorted(rows, key=Version))
    return f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n{body}"


def main(argv: list[str], root: Path) -> int:
    """support-matrix.sh: returns 0, 1 if the table cannot be made or is stale (--check), 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="support-matrix.sh",
        description="Write the table of releases in README.md from patches/*/release.toml and benchmarks/results.",
    )
    parser.add_argument("--check", action="store_true", help="only see whether it is up to date")
    args = parser.parse_args(argv)
    readme = root / "README.md"
    text = readme.read_text("utf-8")
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    try:
        if not end:
            raise Refusal("bad-series", f"{readme} lacks the lines {START.strip()} and {END.strip()}.")
        new = before + start + table(root) + end + after
    except Refusal as refusal:
        print(f"error: {refusal.code}: {refusal.message}", file=sys.stderr)
        return 1
    except KeyError as error:
        print(f"error: bad-series: a release.toml or a result lacks {error}.", file=sys.stderr)
        return 1
    if new == text:
        return 0
    if args.check:
        print("error: README.md's table of releases is stale; run scripts/support-matrix.sh.", file=sys.stderr)
        return 1
    readme.write_text(new, "utf-8")
    print("wrote README.md")
    return 0
