"""support-matrix.sh: the tables of releases in README.md and docs/, from release folders and committed results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import tomlkit
from dsv4_overlay_tools.errors import Refusal
from dsv4_overlay_tools.series import load_series, release_folders
from packaging.version import Version

START, END = "<!-- written by scripts/support-matrix.sh -->\n", "<!-- end of the table -->\n"
GPUS = {"hopper": "Hopper (H100, H200)", "blackwell": "Blackwell (B200, B300)"}
# The series that a backend of features_e2e.py runs; none for FlashMLA alone.
BACKENDS = {"stock": "drop-in", "bf16": "full-width", "fp8": "full-width",
            "sparse_bf16": "sparse-mla", "sparse_fp8": "sparse-mla",
            "drop_in_bf16": "drop-in", "drop_in_fp8": "drop-in"}  # fmt: skip
RUNS = {"drop_in": "drop-in", "sparse_": "sparse-mla", "truth_sm": "sparse-mla"}  # of accuracy, by a word of a bar
# The series that a run of throughput.py measures.
THROUGHPUT = BACKENDS | {"drop_in": "drop-in", "fp8_experts": "fp8-experts"}
# Those of experts that accuracy_e2e.py compares.
EXPERTS = {"fp8_experts": "fp8-experts", "humming": "humming-experts", "humming_fp8": "humming-experts"}
# What a result calls the GPU, by the column it is evidence for.
MODELS = {"H100": "hopper", "H200": "hopper"}
DETAILS = "docs/releases.md"


# Of a kind of result: series and whether it passed, or None if it was not run, of each check.
Checks = Iterator[tuple[str, bool | None]]


def of_accuracy(result: dict[str, Any]) -> Checks:
    for bar in result["bars"]:
        named = [series for word, series in RUNS.items() if word in bar["bar"]]
        if bar["bar"].startswith("prompt: ") and "_graph)" in bar["bar"]:
            continue  # of results until 2026-11-28: prompts have no graphs
        # What is FlashMLA's to every bit is what both left to the same kernels.
        measured, limit = bar.get("measured"), bar.get("limit")
        own = measured is None or 1.05 * measured != limit
        yield (named or ["full-width"])[0], bar["passed"] if own else None


def of_features(result: dict[str, Any]) -> Checks:
    for backend, steps in result["steps"].items():
        for step in steps.values():
            if backend in BACKENDS:
                yield BACKENDS[backend], step["ok"]


def of_throughput(result: dict[str, Any]) -> Checks:
    # Further starts are `run-2` and so on. Those that failed have no speed, or one of a part.
    if not (runs := {run.split("-")[0] for run, of in result["runs"].items() if of["ok"]}):
        return
    series = {THROUGHPUT[run] for run in runs & THROUGHPUT.keys()}
    if "small-kernels" in result["machine"]["overlay"]["series"]:  # every run has it
        series.add("small-kernels")
    layout = result.get("settings", {}).get("model_config", {}).get("quantization_config", {})
    if layout.get("quant_method", "fp8") != "fp8" or "moe_quant_algo" in layout:
        series.add("quantised-linears")
    for name in series:
        yield name, True


def of_quantised(result: dict[str, Any]) -> Checks:
    for bar in result["bars"]:
        yield "quantised-linears", bar["passed"]


def of_experts(result: dict[str, Any]) -> Checks:
    for series in {EXPERTS[name] for name, run in result["runs"].items() if name in EXPERTS and run["ok"]}:
        yield series, True


# The results that are about a release, what their checks or, where there are none, they themselves are called, and
# the checks.
RESULTS = {
    "accuracy_e2e_*.json": ("bars", of_accuracy),
    "accuracy_e2e_*experts.json": ("accuracy", of_experts),
    "features_*.json": ("steps", of_features),
    "quantised_e2e_*.json": ("bars", of_quantised),
    "throughput_*.json": ("speed", of_throughput),
}
NO_CHECKS = ("accuracy", "speed")


# Of a GPU's model and a kind of result: link from docs/, checks passed, run and not run, of each result.
Evidence = dict[tuple[str, str], list[tuple[str, int, int, int]]]


def evidence(root: Path) -> dict[tuple[str, str, str], Evidence]:
    """By release, series and GPU: the results that name their overlay."""
    found: dict[tuple[str, str, str], Evidence] = {}
    results = root / "benchmarks" / "results"
    for path, (what, of) in ((path, of) for name, of in RESULTS.items() for path in sorted(results.glob(name))):
        result = json.loads(path.read_text())
        if not (overlay := result["machine"].get("overlay")):
            continue
        checks: dict[str, list[bool | None]] = {}
        for series, ok in of(result):
            checks.setdefault(series, []).append(ok)
        for model, gpu in MODELS.items():
            if not any(model in name for name in result["machine"]["gpus"]):
                continue
            for series, passed in checks.items():
                if not (ran := [p for p in passed if p is not None]):
                    continue
                counts = (0, 0, 0) if what in NO_CHECKS else (sum(ran), len(ran), len(passed) - len(ran))
                kinds = found.setdefault((overlay["release"], series, gpu), {})
                kinds.setdefault((model, what), []).append((f"../{path.relative_to(root).as_posix()}", *counts))
    return found


def summary(kinds: Evidence) -> str:
    """What ran on each model of GPU, with links to the results."""
    words: dict[str, list[str]] = {}
    for (model, what), results in kinds.items():
        links, *counts = zip(*results, strict=True)
        passed, ran, missing = map(sum, counts)
        text = f"{passed} of {ran} {what}" if ran else what
        text += f", {missing} not run" if missing else ""
        numbered = ", ".join(f"[{number}]({link})" for number, link in enumerate(links, 1))
        words.setdefault(model, []).append(f"[{text}]({links[0]})" if len(links) == 1 else f"{text} ({numbered})")
    return "; ".join(f"{model}: {', '.join(texts)}" for model, texts in words.items()) or "not run"


def tables(root: Path) -> dict[str, str]:
    """Page -> its tables: README.md has a row a release, in short, and docs/ one table a series, with what ran."""
    evident = evidence(root)
    every = [load_series(folder) for folder in release_folders(root)]
    served = {series.folder: tomlkit.parse((series.folder / "release.toml").read_text("utf-8")).unwrap()["gpus"]
              for series in every}  # fmt: skip
    releases = sorted({release for series in every for release in series.sdists}, key=Version)
    short: dict[str, list[str]] = {release: [] for release in releases}
    short_head, full = ["vLLM"], []
    # What is applied by itself comes first.
    for name, on_request in sorted({(s.name, s.on_request) for s in every}, key=lambda x: (x[1], x[0])):
        mine = {release: series for series in every if series.name == name for release in series.sdists}
        gpus = [gpu for gpu in GPUS if any(gpu in served[series.folder] for series in mine.values())]
        rows = {}
        for release in [r for r in releases if r in mine]:
            series = mine[release]
            lines = sum(patch.added for patch in series.patches)
            own = f"{len(series.patches)}, {lines}"
            rows[release] = [own if release == series.release else f"those of {series.release}"]
            for gpu in gpus:
                words = served[series.folder].get(gpu)
                rows[release].append(
                    f"{words}; {summary(evident.get((release, name, gpu), {}))}" if words else "–"
                )
        head = ["vLLM", "patches, lines", *(GPUS[gpu] for gpu in gpus)]
        full.append(f"### {name}{', on request' * on_request}\n\n{markdown(head, together(rows))}")
        for gpu in gpus if not on_request else ():
            short_head.append(f"{name}, {GPUS[gpu]}")
            for release in releases:
                results = list(chain.from_iterable(evident.get((release, name, gpu), {}).values()))
                passed, ran = (sum(counts[place] for counts in results) for place in (1, 2))
                result = f"{passed} of {ran} checks passed" if ran else "not run"
                has = release in mine and gpu in served[mine[release].folder]
                short[release].append(result if has else "–")
    return {"README.md": markdown(short_head, together(short)), DETAILS: "\n".join(full)}


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
