"""support-matrix.sh: the tables of releases in README.md and docs/, from release folders and committed results."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import tomlkit
from dsv4_overlay_tools.errors import Refusal
from dsv4_overlay_tools.series import load_series, release_folders
from packaging.version import Version

START, END = "<!-- written by scripts/support-matrix.sh -->\n", "<!-- end of the table -->\n"
GPUS = {"hopper": "Hopper (H100, H200)", "blackwell": "Blackwell (B200, B300)"}
# The results that are about a release, and what each of their parts is called.
RESULTS = {"accuracy_e2e_*.json": "bars", "features_*.json": "steps", "quantised_e2e_*.json": "bars"}
# The series that a backend of features_e2e.py runs; none for FlashMLA alone.
BACKENDS = {"stock": "drop-in", "bf16": "full-width", "fp8": "full-width"}
# What a result calls the GPU, by the column it is evidence for.
MODELS = {"H200": "hopper"}
DETAILS = "docs/releases.md"


def evidence(root: Path) -> dict[tuple[str, str, str], list[tuple[str, int, int]]]:
    """(release, series, GPU) -> link from docs/, checks passed and run, of each result that names its overlay."""
    found: dict[tuple[str, str, str], list[tuple[str, int, int]]] = {}
    results = root / "benchmarks" / "results"
    for path, what in ((path, what) for name, what in RESULTS.items() for path in sorted(results.glob(name))):
        result = json.loads(path.read_text())
        overlay = result["machine"].get("overlay")
        for model, gpu in MODELS.items():
            if not overlay or not any(model in name for name in result["machine"]["gpus"]):
                continue
            for series, passed in checks(path.name, result[what]).items():
                ran = [p for p in passed if p is not None]
                words = f"{sum(ran)} of {len(ran)} {what}"
                if len(ran) < len(passed):
                    words += f", {len(passed) - len(ran)} not run"
                link = f"[{words}](../{path.relative_to(root).as_posix()}) on {model}"
                found.setdefault((overlay["release"], series, gpu), []).append((link, sum(ran), len(ran)))
    return found


def checks(name: str, parts: Any) -> dict[str, list[bool | None]]:
    """Series -> whether each check of it passed, None for one that was not run; `parts` are a list of bars, or the
    steps of each backend."""
    found: dict[str, list[bool | None]] = {}
    if isinstance(parts, dict):
        for backend, steps in parts.items():
            if backend in BACKENDS:
                found.setdefault(BACKENDS[backend], []).extend(step["ok"] for step in steps.values())
        return found
    for bar in parts:
        series = "drop-in" if "drop_in" in bar["bar"] else "full-width"
        found.setdefault("quantised-linears" if name.startswith("quantised") else series, []).append(bar["passed"])
    return found


def tables(root: Path) -> dict[str, str]:
    """Page -> its table, one row a release: README.md in short, and what ran in full."""
    evident = evidence(root)
    every = [load_series(folder) for folder in release_folders(root)]
    served = {series.folder: tomlkit.parse((series.folder / "release.toml").read_text("utf-8")).unwrap()["gpus"]
              for series in every}  # fmt: skip
    releases = sorted({release for series in every for release in series.sdists}, key=Version)
    columns = [(name, gpu) for name in sorted({series.name for series in every}) for gpu in GPUS
               if any(gpu in served[series.folder] for series in every if series.name == name)]  # fmt: skip
    on_request = {series.name for series in every if series.on_request}
    usual = [(name, gpu) for name, gpu in columns if name not in on_request]
    short, full = {}, {}
    for release in releases:
        mine = {series.name: series for series in every if release in series.sdists}
        patches = []
        for name, series in mine.items():
            lines = sum(patch.added for patch in series.patches)
            own = f"{len(series.patches)}, {lines} lines" if release == series.release else f"of {series.release}"
            patches.append(f"{name}{', on request' * series.on_request}: {own}")
        short[release], full[release] = [], ["; ".join(patches)]
        for name, gpu in columns:
            words = served[mine[name].folder].get(gpu) if name in mine else None
            links, passed, ran = zip(*evident.get((release, name, gpu), [("not run", 0, 0)]), strict=True)
            result = f"{sum(passed)} of {sum(ran)} checks passed" if any(ran) else "not run"
            if (name, gpu) in usual:
                short[release].append(result if words else "–")
            full[release].append("; ".join([words, *links]) if words else "–")
    head = {column: f"{column[0]}, {GPUS[column[1]]}" for column in columns}
    return {
        "README.md": markdown(["vLLM", *(head[column] for column in usual)], together(short)),
        DETAILS: markdown(["vLLM", "patches", *head.values()], full),
    }


def together(rows: dict[str, list[str]]) -> dict[str, list[str]]:
    """`rows` with those of releases that follow each other and say the same as one."""
    groups: list[list[str]] = []
    for release, row in rows.items():
        if groups and rows[groups[-1][0]] == row:
            groups[-1].append(release)
        else:
            groups.append([release])
    return {" to ".join(dict.fromkeys((group[0], group[-1]))): rows[group[0]] for group in groups}


def markdown(head: list[str], rows: dict[str, list[str]]) -> str:
    body = "".join(f"| {' | '.join([release, *row])} |\n" for release, row in rows.items())
    return f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n{body}"


def main(argv: list[str], root: Path) -> int:
    """support-matrix.sh: returns 0, 1 if the table cannot be made or is stale (--check), 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="support-matrix.sh",
        description="Write the tables of releases in README.md and docs/releases.md from patches/*/*/release.toml "
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
