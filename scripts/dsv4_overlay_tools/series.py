"""What this repository holds: the patch series of a release, its pins and its overlay files.

Everything works on bytes. Text is latin-1 inside: it maps every byte to one character and back, so
a file in any encoding survives, and lines end at \\n only (str.splitlines would also split at form
feeds and \\x85).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import tomlkit
import unidiff
from tomlkit.exceptions import TOMLKitError

from .errors import Refusal

STATE_DIR = "vllm/_dsv4_overlay"
DIFF_START = re.compile(rb"^(?:--- |diff )", re.MULTILINE)
FIELD = re.compile(r"([A-Z][A-Za-z-]*):[ \t]*(.*)")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def split_lines(data: bytes) -> list[str]:
    """The lines of `data` with their \\n; only the last may lack it."""
    lines = data.decode("latin-1").split("\n")
    last = lines.pop()
    return [line + "\n" for line in lines] + ([last] if last else [])


class Mismatch(Exception):
    """A hunk does not fit: `line` (1-based) of the file is not what the hunk expects there."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line} differs")
        self.line = line


@dataclass(frozen=True)
class Hunk:
    start: int  # index of the first line it replaces
    source: list[str]
    target: list[str]
    added: int


def places(hunk: Hunk, lines: list[str]) -> list[int]:
    """The indices in `lines` at which the lines that `hunk` replaces stand."""
    size = len(hunk.source)
    return [i for i in range(len(lines) - size + 1) if lines[i : i + size] == hunk.source]


@dataclass(frozen=True)
class FileDiff:
    path: str
    hunks: list[Hunk]
    moved: bool = False  # made for another release: each hunk goes to the one place that has its lines

    @property
    def added(self) -> int:
        return sum(hunk.added for hunk in self.hunks)

    def apply(self, data: bytes) -> bytes:
        """Return `data` with the hunks applied: exact lines at exact positions, nothing else.

        If `moved`, the position is where the lines are; they have to be in one place only.
        Raises Mismatch with the first line that is not as the diff expects.
        """
        lines = split_lines(data)
        out: list[str] = []
        done = 0
        for hunk in self.hunks:
            if self.moved:
                found = places(hunk, lines)
                if len(found) != 1 or found[0] < done:
                    raise Mismatch(hunk.start + 1)
                hunk = replace(hunk, start=found[0])
            found = lines[hunk.start : hunk.start + len(hunk.source)]
            if found != hunk.source:
                same = 0
                while same < len(found) and found[same] == hunk.source[same]:
                    same += 1
                raise Mismatch(min(hunk.start + same, len(lines)) + 1)
            out += lines[done : hunk.start]
            out += hunk.target
            done = hunk.start + len(hunk.source)
        out += lines[done:]
        # A line without \n is only possible at the end; elsewhere the diff itself is wrong.
        for number, line in enumerate(out[:-1], 1):
            if not line.endswith("\n"):
                raise Mismatch(number)
        return "".join(out).encode("latin-1")

    def undo(self, data: bytes) -> bytes:
        """What apply() has made `data` of. Raises Mismatch."""
        hunks, shift = [], 0
        for hunk in self.hunks:
            hunks.append(replace(hunk, start=hunk.start + shift, source=hunk.target, target=hunk.source))
            shift += len(hunk.target) - len(hunk.source)
        return replace(self, hunks=hunks).apply(data)


@dataclass(frozen=True)
class Patch:
    name: str
    data: bytes
    header: bytes
    fields: dict[str, str]
    diffs: list[FileDiff]

    @property
    def owned(self) -> list[str]:
        """The vLLM files this patch alone may touch: its `Files:` field."""
        return self.fields.get("Files", "").split()

    @property
    def added(self) -> int:
        return sum(diff.added for diff in self.diffs)


def _bad(where: str, what: str) -> Refusal:
    return Refusal("bad-series", f"{where}: {what}.", path=where)


def check_path(where: str, path: str) -> str:
    """Return `path` if it names a file below vllm/; raise Refusal(bad-series) otherwise."""
    pure = PurePosixPath(path)
    if str(pure) != path or pure.parts[:1] != ("vllm",) or ".." in pure.parts or path == "vllm":
        raise _bad(where, f"{path!r} is not a plain path below vllm/")
    if path.startswith(STATE_DIR + "/"):
        raise _bad(where, f"{path} lies in {STATE_DIR}/, which belongs to the tool")
    return path


def _parse_hunk(where: str, raw: unidiff.Hunk) -> Hunk:
    source: list[str] = []
    target: list[str] = []
    ends: list[list[str]] = []
    for line in raw:
        if line.line_type == "\\":  # "\ No newline at end of file": about the line before it
            for side in ends:
                side[-1] = side[-1].removesuffix("\n")
            continue
        ends = [side for side, kinds in ((source, " -"), (target, " +")) if line.line_type in kinds]
        for side in ends:
            side.append(line.value)
    if (len(source), len(target)) != (raw.source_length, raw.target_length):
        raise _bad(where, f"the hunk at line {raw.source_start} has trailing lines")
    # A hunk without source lines names the line it follows, any other one its first line.
    start = raw.source_start - 1 if source else raw.source_start
    return Hunk(start, source, target, raw.added)


def parse_patch(name: str, data: bytes) -> Patch:
    """Parse one patch file: DEP-3 fields, then a unified diff that only changes existing files.

    Raises Refusal(bad-series) if it does anything else or cannot be parsed.
    """
    start = DIFF_START.search(data)
    header = data[: start.start()] if start else data
    body = data[start.start() :] if start else b""
    fields: dict[str, str] = {}
    current = ""
    for line in header.decode("utf-8", "surrogateescape").split("\n"):
        match = FIELD.match(line)
        if match:
            current = match[1]
            if current in fields:
                raise _bad(name, f"the field {current} appears twice")
            fields[current] = match[2].strip()
        elif line[:1] in (" ", "\t") and current:
            fields[current] += "\n" + line.strip()
        elif line.strip():
            raise _bad(name, f"{line!r} is neither a header field nor the continuation of one")
    try:
        parsed = unidiff.PatchSet(split_lines(body))
    except unidiff.UnidiffParseError as error:
        raise _bad(name, f"not a unified diff: {str(error).strip()}") from None

    diffs: list[FileDiff] = []
    for item in parsed:
        old, new = item.source_file, item.target_file
        # Not unidiff's is_added_file: it also holds for lines added to an empty file.
        if "/dev/null" in (old, new):
            raise _bad(name, f"{new if old == '/dev/null' else old} is created or deleted by it; "
                             "new files belong in overlay/")
        if not (old.startswith("a/") and new.startswith("b/") and old[2:] == new[2:]):
            raise _bad(name, f"{old} and {new} are not a/PATH and b/PATH of one file")
        if item.is_binary_file or item.source_mode or item.target_mode or not item:
            raise _bad(name, f"{old[2:]} has no text hunks, or a change of mode")
        path = check_path(name, old[2:])
        hunks = [_parse_hunk(name, raw) for raw in item]
        end = shift = 0
        for hunk, raw in zip(hunks, item, strict=True):
            expected = hunk.start + shift + (1 if hunk.target else 0)
            if hunk.start < end or raw.target_start != expected:
                raise _bad(name, f"the hunk at line {raw.source_start} of {path} is out of place")
            end = hunk.start + len(hunk.source)
            shift += len(hunk.target) - len(hunk.source)
        diffs.append(FileDiff(path, hunks))
    return Patch(name, data, header, fields, diffs)


@dataclass(frozen=True)
class Series:
    """`patches/<release>/`: what may be applied to which vLLM."""

    folder: Path
    release: str
    git_tag: str
    git_commit: str
    sdists: dict[str, str]  # release -> sha256 of its source archive; this release and `serves`
    files: dict[str, str]  # touched vLLM file -> sha256 before the series
    relied_on: dict[str, str] = field(default_factory=dict)  # vLLM file that the overlay calls -> sha256
    patches: list[Patch] = field(default_factory=list)
    # release in `serves`, or rebuilt wheel -> pinned file whose bytes are others there -> its sha256
    moved: dict[str, dict[str, str]] = field(default_factory=dict)
    # rebuilt wheel of this release, as release-build -> its changes to the archive's touched files
    rebuilt: dict[str, Patch] = field(default_factory=dict)

    def of(self, release: str) -> Series:
        """This series as it applies to `release`, one of `sdists` or of `rebuilt`."""
        moved = self.moved.get(release, {})
        patches = [
            replace(patch, diffs=[replace(diff, moved=diff.path in moved) for diff in patch.diffs])
            for patch in self.patches
        ]
        files, relied_on = ({path: moved.get(path, pin) for path, pin in pins.items()}
                            for pins in (self.files, self.relied_on))
        return replace(self, files=files, relied_on=relied_on, patches=patches)

    def pairs(self) -> list[tuple[Patch, FileDiff]]:
        """Each touched file's diff with its patch. Raises Refusal(bad-series) unless every file
        has one patch and the files are exactly those that release.toml pins."""
        owner: dict[str, str] = {}
        for patch in self.patches:
            for diff in patch.diffs:
                if diff.path in owner:
                    raise _bad(patch.name, f"{diff.path} is already touched by {owner[diff.path]}")
                owner[diff.path] = patch.name
        for path in sorted(owner.keys() ^ self.files.keys()):
            raise _bad(
                str(self.folder / "release.toml"),
                f"[files] and the patches disagree about {path}; run scripts/export-series.sh",
            )
        return [(patch, diff) for patch in self.patches for diff in patch.diffs]


def order(folder: Path) -> list[str]:
    """The patch names in `series`, in order. Raises Refusal(bad-series) without such a file."""
    try:
        text = (folder / "series").read_text("utf-8")
    except OSError as error:
        raise _bad(str(folder / "series"), f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise _bad(str(folder / "series"), f"is not UTF-8 ({error})") from None
    lines = (line.partition("#")[0].strip() for line in text.split("\n"))
    return [line for line in lines if line]


def load_series(folder: Path) -> Series:
    """Read `release.toml`, `series` and every patch in it.

    Raises Refusal(bad-series) for anything missing or malformed.
    """
    pins = folder / "release.toml"
    try:
        toml = tomlkit.parse(pins.read_text("utf-8")).unwrap()
        sdists = {toml["release"]: toml["sdist_sha256"]}
        moved = {}
        for served in toml.get("serves", []):
            if "sdist_sha256" not in toml.get("also", {}).get(served, {}):
                raise _bad(str(pins), f"[also.\"{served}\"] needs sdist_sha256, the one of its source archive")
            sdists[served] = toml["also"][served]["sdist_sha256"]
            moved[served] = dict(toml["also"][served].get("files", {}))
        rebuilt = {}
        for build, also in toml.get("also", {}).items():
            if name := also.get("changes"):
                rebuilt[build] = parse_patch(name, (folder / name).read_bytes())
                moved[build] = dict(also.get("files", {}))
        series = Series(
            folder=folder,
            release=toml["release"],
            git_tag=toml["git_tag"],
            git_commit=toml["git_commit"],
            sdists=sdists,
            files=dict(toml.get("files", {})),
            relied_on=dict(toml.get("relied_on", {})),
            moved=moved,
            rebuilt=rebuilt,
        )
    except OSError as error:
        raise _bad(str(error.filename), f"cannot be read ({error.strerror})") from None
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise _bad(str(pins), f"is not TOML ({error})") from None
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(str(pins), f"lacks or misuses the key {error}") from None
    for path in series.relied_on:
        if check_path(str(pins), path) in series.files:
            raise _bad(str(pins), f"{path} is in [files], so it cannot be in [relied_on] too")
    if series.release != folder.name:
        raise _bad(str(pins), f"release is {series.release} but the folder is {folder.name}")
    for name in order(folder):
        try:
            data = (folder / name).read_bytes()
        except OSError as error:
            raise _bad(name, f"is in the series but cannot be read ({error.strerror})") from None
        series.patches.append(parse_patch(name, data))
    return series


def release_folders(root: Path) -> list[Path]:
    """The release folders of the repository at `root`, by name."""
    return sorted(path.parent for path in (root / "patches").glob("*/release.toml"))


def find_series(root: Path, release: str) -> Series:
    """The series for vLLM `release`. Raises Refusal(wrong-release) if no series serves it."""
    supported: list[str] = []
    for folder in release_folders(root):
        series = load_series(folder)
        if release in series.sdists:
            return series.of(release)
        supported += series.sdists
    raise Refusal(
        "wrong-release",
        f"There is no patch series for vLLM {release}; supported: "
        f"{', '.join(sorted(supported)) or 'none'}.",
    )


@dataclass(frozen=True)
class OverlayFile:
    source: Path
    data: bytes
    mode: int


def load_overlay(root: Path, series: Series) -> dict[str, OverlayFile]:
    """The files of overlay/common and overlay/<release> by their path in vLLM.

    Raises Refusal(bad-series) for a link, or a path that both folders hold.
    """
    found: dict[str, OverlayFile] = {}
    for base in (root / "overlay" / "common", root / "overlay" / series.release):
        for source in sorted((base / "vllm").rglob("*")):
            path = source.relative_to(base).as_posix()
            if "__pycache__" in source.parts or source.suffix == ".pyc" or "/." in path:  # an editor's, a build's
                continue
            if source.is_symlink():
                raise _bad(str(source), "is a symbolic link; the overlay holds plain files only")
            if source.is_dir():
                continue
            if path in found:
                raise _bad(str(source), f"{found[path].source} has the same place in vLLM")
            if path in series.files:
                raise _bad(str(source), "a patch of the series changes the same file")
            # Only the executable bit counts: the rest is the umask of whoever cloned.
            mode = 0o755 if source.stat().st_mode & 0o100 else 0o644
            found[check_path(str(source), path)] = OverlayFile(source, source.read_bytes(), mode)
    return found
