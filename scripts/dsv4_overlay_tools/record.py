"""What was, or is being, changed: record.json or journal.json, and how the tree compares with it.

A record is believed only if its format is the one of this tool and its checksum fits.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from . import TOOL_VERSION
from .errors import Refusal
from .files import read, resolve
from .series import STATE_DIR, Mismatch, Stack, load_overlay, sha256, split_lines
from .target import Target, as_installed

STAGED = f"{STATE_DIR}/staged"
ORIGINALS = f"{STATE_DIR}/originals"
JOURNAL = f"{STATE_DIR}/journal.json"
RECORD = f"{STATE_DIR}/record.json"


def kept(folder: str, path: str) -> str:
    """Where STAGED or ORIGINALS has the file that belongs at `path`."""
    # A flat name that does not end in .py: nothing may import or compile what is kept there.
    return f"{folder}/{quote(path, safe='')}.orig"


# ---------------------------------------------------------------- the file


def seal(record: dict) -> bytes:
    """The file that holds `record`, with its checksum: the sha256 of the same file without it."""

    def encoded(content: dict) -> bytes:
        return (json.dumps(content, indent=1) + "\n").encode()

    return encoded({**record, "sha256": sha256(encoded(record))})


def read_record(root: Path) -> tuple[dict, bytes]:
    """The record, or the journal while there is one, and its bytes.

    Raises OSError, and Refusal: record-format if it was written by another version of this tool, record-lost if it
    is not as it was written.
    """
    path = JOURNAL
    try:
        data = read(root / path)
    except FileNotFoundError:
        path = RECORD
        data = read(root / path)
    try:
        record = json.loads(data)
        written, sealed = record["tool_version"], seal({k: v for k, v in record.items() if k != "sha256"})
    except (ValueError, LookupError, TypeError, AttributeError):
        written, sealed = TOOL_VERSION, None
    if written != TOOL_VERSION:
        raise Refusal(
            "record-format",
            f"{path} in {root} has format {written!r}, and this tool reads {TOOL_VERSION!r}: run --revert with "
            f"the overlay that was applied (version {record.get('overlay_version')}, commit "
            f"{record.get('overlay_commit') or 'unknown'}), or install vLLM afresh.",
            path=path,
        )
    if sealed != data:
        raise Refusal(
            "record-lost",
            f"{path} in {root} is damaged: its checksum does not fit; install vLLM afresh.",
            path=path,
        )
    return record, data


# ---------------------------------------------------------------- the wheel's own list of files


def wheel_record(before: bytes, files: dict[str, tuple[str, int]]) -> bytes:
    """RECORD of a wheel with the rows of `files` (path -> sha256, size) replaced or added."""
    left = dict(files)
    end = b"\r\n" if b"\r\n" in before else b"\n"

    def row(path: str, digest: str, size: int) -> bytes:
        encoded = base64.urlsafe_b64encode(bytes.fromhex(digest)).rstrip(b"=").decode()
        out = io.StringIO()
        csv.writer(out, lineterminator="").writerow([path, f"sha256={encoded}", size])
        return out.getvalue().encode() + end

    rows = []
    for line in before.splitlines(keepends=True):
        name = next(csv.reader([line.decode("utf-8", "surrogateescape")]), [""])[0]
        rows.append(row(name, *left.pop(name)) if name in left else line)
    if rows and not rows[-1].endswith(b"\n"):
        rows[-1] += end
    return b"".join(rows + [row(path, *left[path]) for path in sorted(left)])


def record_rows(record: dict, data: bytes) -> dict[str, tuple[str, int]]:
    """What the wheel's RECORD must say of everything this tool changed, itself excepted."""
    rows = {RECORD: (sha256(data), len(data))}
    for entry in record["files"]:
        if entry["sha256_before"]:
            rows[kept(ORIGINALS, entry["path"])] = (entry["sha256_before"], entry["size_before"])
        if entry["action"] != "updated":
            rows[entry["path"]] = (entry["sha256_after"], entry["size_after"])
    return rows


def _wheel_after(root: Path, entry: dict, record: dict, data: bytes) -> bytes | None:
    """What the wheel's RECORD holds after apply; None if its original is gone."""
    try:
        before = read(root / kept(ORIGINALS, entry["path"]))
    except FileNotFoundError:
        return None
    return wheel_record(before, record_rows(record, data))


# ---------------------------------------------------------------- how the tree compares


def survey(target: Target) -> list[tuple[dict, str, bytes | None]]:
    """Each entry of the record (or journal) with its state in the tree, and the bytes found.

        before     as before apply; not there, if the overlay adds it
        after      as apply writes it
        replaced   neither, and exactly what pip or uv installed, or git checked out, over it since then
        missing    not there
        edited     anything else
    """
    record, data = read_record(target.root)
    installed = as_installed(target, record["release"])
    return [(entry, *_entry_state(target.root, entry, record, data, installed)) for entry in record["files"]]


def _entry_state(
    root: Path, entry: dict, record: dict, data: bytes, installed: Callable[[str, bytes | None], bool]
) -> tuple[str, bytes | None]:
    path = entry["path"]
    real = resolve(root, path)
    expected = Path(os.path.realpath(root)) / entry.get("real", path)
    try:
        if real != expected or not stat.S_ISREG(os.lstat(expected).st_mode):
            return "edited", None
        found = read(real)
    except (FileNotFoundError, NotADirectoryError):
        if entry["sha256_before"] is None:
            return "before", None
        return ("replaced" if installed(path, None) else "missing"), None
    after = entry["sha256_after"]
    if entry["action"] == "updated":
        listing = _wheel_after(root, entry, record, data)
        after = None if listing is None else sha256(listing)
    digest = sha256(found)
    if digest in (entry["sha256_before"], after):
        return ("after" if digest == after else "before"), found
    return ("replaced" if installed(path, found) else "edited"), found


def original_lost(root: Path, entry: dict) -> Refusal | None:
    """The refusal for an entry whose original is not there as it was, or None."""
    if not entry["sha256_before"]:
        return None
    place = root / kept(ORIGINALS, entry["path"])
    with contextlib.suppress(FileNotFoundError):
        if sha256(read(place)) == entry["sha256_before"]:
            return None
    return Refusal(
        "record-lost",
        f"{place} is gone or damaged, so the overlay cannot be taken off; install vLLM afresh.",
        path=entry["path"],
    )


def edited(
    root: Path, entry: dict, state: str, found: bytes | None, repo_root: Path, stack: Stack | None
) -> Refusal:
    """The refusal for an entry that is no longer as applied, with the line if it can be told."""
    path = entry["path"]
    line = None
    if state in ("before", "replaced"):
        what = "as before the overlay was applied (git reset?)"
        if state == "replaced":
            what = "that of a vLLM which was installed since"
        return Refusal(
            "edited-since-apply", f"{path} is {what}; run --revert, which takes off the rest.", path=path
        )
    if found is None:
        what = "is gone" if state == "missing" else "is no longer a plain file"
    else:
        what = "was edited since the overlay was applied"
        applied = _applied_bytes(root, entry, repo_root, stack)
        if applied is not None:
            line = _differs_at(applied, found)
            what += f", first at line {line}"
    way = f"copy {root / kept(ORIGINALS, path)} there" if entry["sha256_before"] else "delete it"
    return Refusal(
        "edited-since-apply",
        f"{path} {what}; undo that, or {way} and run --revert.",
        path=path,
        line=line,
    )


def _differs_at(expected: bytes, found: bytes) -> int:
    old, new = split_lines(expected), split_lines(found)
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    return same + 1


def _applied_bytes(
    root: Path, entry: dict, repo_root: Path, stack: Stack | None
) -> bytes | None:
    """What was applied at `entry`, if the files at hand still produce it."""
    data = None
    with contextlib.suppress(OSError, Mismatch, Refusal):
        if entry["action"] == "updated":
            return _wheel_after(root, entry, *read_record(root))
        if stack and entry["action"] == "added":
            data = load_overlay(repo_root, stack)[entry["path"]].data
        elif stack:
            before = read(root / kept(ORIGINALS, entry["path"]))
            diffs = {diff.path: diff for _, diff in stack.pairs()}
            data = diffs[entry["path"]].apply(before) if entry["path"] in diffs else None
    return data if data is not None and sha256(data) == entry["sha256_after"] else None


def changed_since(repo_root: Path, stack: Stack, record: dict) -> str | None:
    """The first patch or overlay file that is not the one in the record, or None."""
    applied = {item["name"]: item["sha256"] for item in record["patches"]}
    at_hand = {name: sha256(patch.data) for name, patch in stack.patches}
    applied |= {
        entry["path"]: entry["sha256_after"]
        for entry in record["files"]
        if entry["action"] == "added"
    }
    at_hand |= {path: sha256(file.data) for path, file in load_overlay(repo_root, stack).items()}
    return min((name for name in applied.keys() | at_hand.keys()
                if applied.get(name) != at_hand.get(name)), default=None)
