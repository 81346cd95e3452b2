"""README.md and docs/: links lead somewhere, figures are those of the results, README stays short."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "scripts")]
import tables  # noqa: E402
from dsv4_overlay_tools.series import find_series, load_series, release_folders  # noqa: E402

README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, ROOT / "CHANGELOG.md", *DOCS, ROOT / "benchmarks/results/README.md"]
LINK = re.compile(r"""(?:\]\(|\bsrc=")(?!\w+:)([^)"\s]+)""")


def links(page):
    return LINK.findall(page.read_text("utf-8"))


def anchors(page):
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def problem(page, link):
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        return f"{page.relative_to(ROOT)}: there is no {link}"
    if anchor and anchor not in anchors(target):
        return f"{page.relative_to(ROOT)}: {link} has no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert [found for link in links(page) if (found := problem(page, link))] == []


def test_a_broken_link_is_found(monkeypatch, tmp_path):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text('# One two\n[a](gone.md) [b](#one-two) [c](#three) [d](https://x.y) <img src="gone.svg">\n')
    assert [bool(problem(page, link)) for link in links(page)] == [True, False, True, True]


def test_every_page_is_found_from_readme_and_says_for_whom_it_is():
    named = {(README.parent / link.partition("#")[0]).resolve() for link in links(README)}
    assert {page.resolve() for page in DOCS} - named == set()
    first = {page.name: page.read_text("utf-8").split("\n\n")[1] for page in DOCS}
    assert [name for name, text in first.items() if not text.startswith("For those who ")] == []


def test_readme_is_short_and_plain():
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= 140
    assert re.findall(r"\b(?=\w*\d)(?=\w*[a-f])[0-9a-f]{7,40}\b", text) == []  # no commits


@pytest.mark.parametrize("command", ["scripts/selftest.sh", "scripts/test.sh"])
def test_readme_has_the_commands_for_a_fresh_machine(command):
    assert f"\n    {command} " in README.read_text("utf-8")
    assert os.access(ROOT / command, os.X_OK)


def test_what_the_patches_touch_is_as_readme_says():
    """All series of a release together, which is what is applied if nothing else is asked for."""
    releases = {release for folder in release_folders(ROOT) for release in load_series(folder).sdists}
    stacks = [find_series(ROOT, release) for release in releases]
    lines = max(sum(patch.added for _, patch in stack.patches) for stack in stacks)
    files = max(len(stack.files) for stack in stacks)
    said = re.search(r"fewer than (\d+) added lines in at most (\d+) files of vLLM", README.read_text("utf-8"))
    assert said and lines < int(said[1]) and files <= int(said[2])


def test_every_code_of_a_refusal_is_told():
    tools = [*ROOT.glob("scripts/dsv4_overlay_tools/*.py"), *ROOT.glob("docker/*.py")]
    raised = {code for tool in tools for code in re.findall(r'Refusal\(\s*"([a-z-]+)"', tool.read_text("utf-8"))}
    page = (ROOT / "docs/patches.md").read_text("utf-8").partition("## Refusals")[2]
    told = set(re.findall(r"`([a-z-]+)`", page))
    assert len(raised) > 20 and raised - told == set()


def test_figures_are_those_of_the_results():
    done = subprocess.run([sys.executable, tables.__file__, "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_stale_figure_is_found_and_mended():
    text = README.read_text("utf-8")
    stale = text.replace("| FP8, decode", "| FP9, decode", 1)
    assert stale != text and tables.written(stale) == text
    assert len(tables.BLOCK.findall(text)) == text.count("<!-- figures: ")
    with pytest.raises(KeyError, match="unheard_of"):
        tables.written("<!-- figures: unheard_of -->\n<!-- end of figures -->\n")


def test_speed_ups_are_of_these_rows_and_of_valid_runs(monkeypatch):
    measured = {"rows": "e4m3", "phase": "decode", "heads": 8, "tokens": 1, "speedup": 2.0}
    rows = [measured, measured | {"rows": "584", "speedup": 9}, measured | {"phase": "prefill", "speedup": 9}]
    rows.append(measured | {"phase": "mixed", "tokens": 128, "speedup": 3.0})
    monkeypatch.setattr(tables, "kernel_results", lambda folder, gpu: {"results": rows})
    run = {"output_throughput": 1.0, "compiled": []}
    invalid = {"16": run, "64": run | {"compiled": ["kernel"]}}
    results = {
        "a": {"runs": {"FlashMLA": {"concurrency": {"16": run, "64": run}}, "FP8": {"concurrency": invalid}}},
        "b": {"runs": {"FlashMLA": {"concurrency": {"256": run}}, "FP8": {"concurrency": {"256": run}}}},
    }
    monkeypatch.setattr(tables, "load", results.get)
    assert tables.by_call("fp8", "decode") == {("decode", 1, 8): 2.0, ("mixed", 128, 8): 3.0}
    assert list(tables.served(["a", "b"])) == [16, 256]


def test_servers_in_turns_on_two_machines_count_together(monkeypatch):
    def server(*speeds):
        repeats = [{"output_throughput": x, "mean_ttft_ms": 1e5 / x, "mean_tpot_ms": 9.0} for x in speeds]
        return {"concurrency": {"16": {"compiled": [], "repeats": repeats}}}

    runs = {"a": {"FlashMLA": server(100.0), "DropIn": server(110.0, 900.0)},  # the last has none next to it
            "b": {"FlashMLA": server(200.0, 200.0), "DropIn": server(180.0, 240.0)}}  # fmt: skip
    results = {name: {"weights": "dummy", "together": 2, "runs": of} for name, of in runs.items()}
    monkeypatch.setattr(tables, "load", results.get)
    _, _, stock, ours, *_ = tables.serving(["a", "b"]).splitlines()
    assert stock == "| 16 | FlashMLA | 200 | 1.00 | 0.50 | 9.0 |"
    assert ours == "| 16 | FlashMLA's cache, drop-in | 180 | 1.10 | 0.56 | 9.0 |"


def test_servers_that_compiled_meanwhile_are_marked(monkeypatch):
    row = {"output_throughput": 2.0, "mean_ttft_ms": 1e3, "mean_tpot_ms": 9.0, "compiled": []}
    rows = {"4": row, "16": row}
    late = {"4": row | {"compiled": ["late.cubin"]}, "16": row}
    servers = {"a": ("FlashMLA", rows), "b": ("DropIn", late)}
    results = {name: {"runs": {run: {"concurrency": of}}} for name, (run, of) in servers.items()}
    monkeypatch.setattr(tables, "load", results.get)
    _, _, _, marked, *others, _, words = tables.of_servers(["a", "b"]).splitlines()
    assert marked.startswith("| 4 | FlashMLA's cache, drop-in\\* | 2 |") and "compiled during some of" in words
    assert len(others) == 2 and not any("*" in line for line in others)


def test_several_starts_of_a_model_count_by_their_median(monkeypatch):
    def start(speed):
        rate = {"tokens_per_second": speed}
        return {"prefill": rate, "decode": {"16": rate, "1": rate}, "kv_cache": {"tokens_per_gib": 7}}

    speeds = {"flashmla": 100.0, "fp8": 90.0, "bf16": 100.0, "fp8-2": 200.0, "fp8-3": 300.0}
    runs = {name: start(speed) for name, speed in speeds.items()}
    monkeypatch.setattr(tables, "MODELS", {"a model": "a"})
    monkeypatch.setattr(tables, "load", {"a": {"runs": runs}}.get)
    head, _, stock, fp8, _ = tables.models().splitlines()
    assert head == "|  | prefill | decode, 1 | decode, 16 | tokens in 1 GiB |"
    assert stock == "| a model, FlashMLA | 100 | 100 | 100 | 7 |" and "| 2.00 | 2.00 | 2.00 | 7 |" in fp8


def test_the_changelog_begins_with_this_version_or_what_comes_after_it():
    version = (ROOT / "VERSION").read_text().strip()
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[headings[0] == "Unreleased"] == version
