"""What this repository holds: the patch series of a release, its pins and its overlay files.

Everything works on bytes. Text is latin-1 inside: it maps every byte to one character and back, so
a file in any encoding survives, and lines end at \\n only (str.splitlines would also split at form
feeds and \\x85).
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import tomlkit
import unidiff
from packaging.version import Version
from tomlkit.exceptions import TOMLKitError

from .errors import Refusal
from .names import reached

STATE_DIR = "vllm/_dsv4_overlay"
DIFF_START = re.compile(rb"^(?:--- |diff )", re.MULTILINE)
IMPORT = re.compile(r"^\s*import\s+(.+)", re.MULTILINE)
FROM_IMPORT = re.compile(r"^\s*from\s+(vllm[\w.]*)\s+import\s+(\([^)]*\)|.+)", re.MULTILINE)
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
                if len(found) != 1:
                    raise Mismatch(hunk.start + 1)
                hunk = replace(hunk, start=found[0])
            if hunk.start < done:  # another series changes the same lines, or they have changed places
                raise Mismatch(hunk.start + 1)
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

    @property
    def uses(self) -> set[str]:
        """The modules of vLLM, dotted, that the lines it adds import or name: where our own code is entered."""
        lines = (line for diff in self.diffs for hunk in diff.hunks
                 for line in difflib.ndiff(hunk.source, hunk.target) if line.startswith("+ "))  # fmt: skip
        return named("".join(line[2:] for line in lines))


def named(text: str) -> set[str]:
    """The modules below vllm that `text`, lines of Python and not always a whole file, imports or has in a string.

    `from a import b` gives a and a.b, since b may be a module.
    """
    found = {name for names in IMPORT.findall(text) for name in re.findall(r"vllm(?:\.\w+)*", names)}
    for module, names in FROM_IMPORT.findall(text):
        found |= {module, *(f"{module}.{name}" for name in re.findall(r"(?:^|[(,])\s*(\w+)", names))}
    return found | set(re.findall(r"[\"'](vllm(?:\.\w+)+)[\"']", text))


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


def _parse_hunk(raw: unidiff.Hunk) -> Hunk:
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
        hunks = [_parse_hunk(raw) for raw in item]
        end = shift = 0
        for hunk, raw in zip(hunks, item, strict=True):
            expected = hunk.start + shift + (1 if hunk.target else 0)
            if hunk.start < end or raw.target_start != expected:
                raise _bad(name, f"the hunk at line {raw.source_start} of {path} is out of place")
            end = hunk.start + len(hunk.source)
            shift += len(hunk.target) - len(hunk.source)
        diffs.append(FileDiff(path, hunks))
    # unidiff drops what follows a hunk that is complete by its first line.
    if sum(line[0] in " +-\\" for line in split_lines(body)) != sum(2 + sum(map(len, item)) for item in parsed):
        raise _bad(name, "a hunk has more lines than its first line says")
    return Patch(name, data, header, fields, diffs)


@dataclass(frozen=True)
class Series:
    """`patches/<name>/<release>/`: what may be applied to which vLLM."""

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
    on_request: bool = False  # only applied where it is named

    @property
    def name(self) -> str:
        """What it adds."""
        return self.folder.parent.name

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

    def check_pins(self) -> None:
        """Raises Refusal(bad-series) unless the touched files are exactly those that release.toml pins, each
        with one patch."""
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


@dataclass(frozen=True)
class Stack:
    """The series of one release that are applied together, each as it applies to that release.

    Their order means nothing: all are made for the files as released. Where two change one file, the hunks of both
    go into it.
    """

    series: list[Series]

    @property
    def releases(self) -> dict[str, str]:
        """The name of each series -> the release that it was made for."""
        return {one.name: one.release for one in self.series}

    @property
    def files(self) -> dict[str, str]:
        """Touched vLLM file -> sha256 before."""
        return {path: pin for one in self.series for path, pin in one.files.items()}

    @property
    def relied_on(self) -> dict[str, str]:
        """vLLM file that the overlay calls, and that no series here changes -> sha256."""
        files = self.files
        return {path: pin for one in self.series for path, pin in one.relied_on.items() if path not in files}

    @property
    def patches(self) -> list[tuple[str, Patch]]:
        """Each patch with its name, <series>/<patch>."""
        return [(f"{one.name}/{patch.name}", patch) for one in self.series for patch in one.patches]

    def pairs(self) -> list[tuple[str, FileDiff]]:
        """Each touched file's diff with the names of its patches.

        Raises Refusal(bad-series) if pins are wrong, or two series do not have the same for one file.
        """
        pins: dict[str, str] = {}
        for one in self.series:
            one.check_pins()
            for path, pin in (one.files | one.relied_on).items():
                if pins.setdefault(path, pin) != pin:
                    raise _bad(str(one.folder / "release.toml"), f"another series has another sha256 for {path}")
        found: dict[str, tuple[str, FileDiff]] = {}
        for name, patch in self.patches:
            for diff in patch.diffs:
                if diff.path in found:
                    names, other = found[diff.path]
                    hunks = sorted(other.hunks + diff.hunks, key=lambda hunk: hunk.start)
                    diff = FileDiff(diff.path, hunks, other.moved or diff.moved)
                    name = f"{names}, {name}"
                found[diff.path] = (name, diff)
        return list(found.values())


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
            on_request=toml.get("on_request", False),
        )
    except OSError as error:
        raise _bad(str(error.filename), f"cannot be read ({error.strerror})") from None
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise _bad(str(pins), f"is not TOML ({error})") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
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


def release_folders(root: Path, name: str = "*", release: str = "*") -> list[Path]:
    """The folders of all series of the repository at `root`, or those with this name or release."""
    return sorted(path.parent for path in (root / "patches").glob(f"{name}/{release}/release.toml"))


def pinned_files(root: Path, name: str = "*") -> dict[str, dict[str, set[str]]]:
    """By release, for each file of vLLM that all series, or those with this name, change or need: the sha256 that
    it may have, more than one where a wheel was built again. Raises Refusal."""
    table: dict[str, dict[str, set[str]]] = {}
    for series in map(load_series, release_folders(root, name)):
        for build in (*series.sdists, *series.rebuilt):
            one = series.of(build)
            of_release = table.setdefault(build.partition("-")[0], {})
            for path, pin in (one.files | one.relied_on).items():
                of_release.setdefault(path, set()).add(pin)
    return table


def series_of(root: Path, release: str) -> list[Series]:
    """All series for vLLM `release`, each as it applies to it. Raises Refusal(wrong-release) if there is none."""
    every = [load_series(folder) for folder in release_folders(root)]
    found = [series.of(release) for series in every if release in series.sdists]
    if not found:
        supported = sorted({served for series in every for served in series.sdists}, key=Version)
        raise Refusal(
            "wrong-release",
            f"There is no patch series for vLLM {release}; supported: {', '.join(supported) or 'none'}.",
        )
    return found


DEFAULT = "default"


def find_series(root: Path, release: str, names: Iterable[str] = ()) -> Stack:
    """The series for vLLM `release` with these names; DEFAULT, or no name, is all that are not on request.

    Raises Refusal: wrong-release if there is none, no-series if one of `names` is missing.
    """
    found = series_of(root, release)
    has = [series.name for series in found]
    wanted = set(names) or {DEFAULT}
    for name in sorted(wanted - {DEFAULT}):
        if name not in has:
            raise Refusal("no-series", f"vLLM {release} has no series {name!r}; it has: {', '.join(has)}.")
    default = DEFAULT in wanted
    return Stack([series for series in found if series.name in wanted or default and not series.on_request])


@dataclass(frozen=True)
class OverlayFile:
    source: Path
    data: bytes
    mode: int


def overlay_files(root: Path, releases: Iterable[str]) -> dict[str, OverlayFile]:
    """The files of overlay/common and of overlay/<release> by their path in vLLM.

    Raises Refusal(bad-series) for a link, or a path that two folders hold.
    """
    found: dict[str, OverlayFile] = {}
    for base in [root / "overlay" / name for name in ("common", *sorted(set(releases)))]:
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
            # Only the executable bit counts: the rest is the umask of whoever cloned.
            mode = 0o755 if source.stat().st_mode & 0o100 else 0o644
            found[check_path(str(source), path)] = OverlayFile(source, source.read_bytes(), mode)
    return found


def load_overlay(root: Path, stack: Stack) -> dict[str, OverlayFile]:
    """The overlay files that the patches of `stack` lead to, by their path in vLLM.

    Raises Refusal(bad-series): see overlay_files; also for a file that is no Python, or that a patch changes.
    """
    files = overlay_files(root, stack.releases.values())
    for path in sorted(files.keys() & stack.files.keys()):
        raise _bad(str(files[path].source), "a patch of the series changes the same file")
    try:
        used = reached({path: file.data for path, file in files.items()},
                       {name for _, patch in stack.patches for name in patch.uses})  # fmt: skip
    except (SyntaxError, ValueError) as error:
        where = f"{error.filename}, line {error.lineno}" if isinstance(error, SyntaxError) else "overlay"
        raise _bad(where, f"invalid Python: {error.args[0]}") from None
    return {path: file for path, file in files.items() if path in used}
