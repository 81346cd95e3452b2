"""support-matrix.sh: the tables of releases in README.md and docs/, from release folders and committed results."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import tomlkit
from dsv4_overlay_tools.errors import Refusal
from dsv4_overlay_tools.series import load_series, release_folders
from packaging.version import Version

START, END = "<!-- written by scripts/support-matrix.sh -->\n", "<!-- end of the table -->\n"
GPUS = {"hopper": "Hopper (H100, H200)", "blackwell": "Blackwell (B200, B300)"}
# The results that are about a release, and what each of their parts is called.
RESULTS = {"accuracy_e2e_*.json": "bars", "features_*.json": "steps"}
# What a result calls the GPU, by the column it is evidence for.
MODELS = {"H200": "hopper"}
DETAILS = "docs/releases.md"


def evidence(root: Path) -> dict[tuple[str, str], list[tuple[str, int, int]]]:
    """(release, column) -> link from docs/, checks passed, checks run, of each result that names its overlay."""
    found: dict[tuple[str, str], list[tuple[str, int, int]]] = {}
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
                link = f"[{words}](../{path.relative_to(root).as_posix()}) on {model}"
                found.setdefault((machine["overlay"]["release"], column), []).append((link, sum(ran), len(ran)))
    return found


def tables(root: Path) -> dict[str, str]:
    """Page -> its table, one row a release: README.md in short, and what ran in full."""
    evident = evidence(root)
    short, full = {}, {}
    for folder in release_folders(root):
        series = load_series(folder)
        toml = tomlkit.parse((folder / "release.toml").read_text("utf-8")).unwrap()
        lines = sum(patch.added for patch in series.patches)
        for release in series.sdists:
            own = release == series.release
            short[release] = [release]
            full[release] = [release, f"{len(series.patches)}, {lines} lines" if own else f"of {series.release}"]
            for gpu in GPUS:
                links, passed, ran = zip(*evident.get((release, gpu), [("not run", 0, 0)]), strict=True)
                short[release].append(f"{sum(passed)} of {sum(ran)} checks passed" if any(ran) else "not run")
                full[release].append("; ".join([toml["gpus"][gpu], *links]))
    return {
        "README.md": markdown(["vLLM", *GPUS.values()], short),
        DETAILS: markdown(["vLLM", "patches", *GPUS.values()], full),
    }


def markdown(head: list[str], rows: dict[str, list[str]]) -> str:
    body = "".join(f"| {' | '.join(rows[release])} |\n" for release in sorted(rows, key=Version))
    return f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n{body}"


def main(argv: list[str], root: Path) -> int:
    """support-matrix.sh: returns 0, 1 if the table cannot be made or is stale (--check), 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="support-matrix.sh",
        description="Write the tables of releases in README.md and docs/releases.md from patches/*/release.toml "
        "and benchmarks/results.",
    )
    parser.add_argument("--check", action="store_true", help="only see whether it is up to date")
    args = parser.parse_args(argv)
    stale = {}
    try:
        for name, table in tables(root).items():
            text = (root / name).read_text("utf-8")
            before, _, rest = text.partition(START)
            _, end, after = rest.partition(END)
            if not end:
                raise Refusal("bad-series", f"{root / name} lacks the lines {START.strip()} and {END.strip()}.")
            if (new := before + START + table + end + after) != text:
                stale[name] = new
    except Refusal as refusal:
        print(f"error: {refusal.code}: {refusal.message}", file=sys.stderr)
        return 1
    except KeyError as error:
        print(f"error: bad-series: a release.toml or a result lacks {error}.", file=sys.stderr)
        return 1
    for name, new in stale.items():
        if args.check:
            print(f"error: {name}'s table of releases is stale; run scripts/support-matrix.sh.", file=sys.stderr)
        else:
            (root / name).write_text(new, "utf-8")
            print(f"wrote {name}")
    return int(args.check and bool(stale))
