"""What is particular about the wheel: the table of vLLM's files it relies on, written from patches/, and the
platform in its name, which is that of the native library in it. hatchling calls it, by pyproject.toml."""

import hashlib
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

from auditwheel.architecture import Architecture
from auditwheel.elfutils import elf_find_versioned_symbols
from auditwheel.libc import Libc
from auditwheel.policy import WheelPolicies
from elftools.elf.elffile import ELFFile
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "overlay/common/vllm/third_party/mla_kernels"


class Hook(BuildHookInterface):
    @property
    def table(self) -> Path:
        return Path(self.directory, ".pins.json")

    def initialize(self, version: str, build_data: dict) -> None:
        root = Path(self.root)
        library = root / KERNELS / "lib/libmla_kernels.so"
        check_library(root, library)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform(library)}"
        self.table.parent.mkdir(parents=True, exist_ok=True)
        table = {series: pins(root, series) for series in ("drop-in", "mtp-padding")}
        self.table.write_text(json.dumps(table, indent=1) + "\n")
        build_data["force_include"][str(self.table)] = "vllm_dsv4_overlay/pins.json"

    def finalize(self, version: str, build_data: dict, artifact_path: str) -> None:
        self.table.unlink()


def stop(sentence: str) -> None:
    sys.exit(f"error: {sentence}")


def check_library(root: Path, library: Path) -> None:
    """Stop unless `library` was built by build-kernels.sh of the sources that `root` has now."""
    build = "scripts/build-kernels.sh, or on a machine without nvcc build-kernels.sh --from FILE.so"
    if not library.is_file():
        stop(f"there is no native library, {library}; make it with {build}.")
    found = re.search(rb"mla_kernels_build (\{[^\0]*\})\0", library.read_bytes())
    if found is None:
        stop(f"{library} does not say how it was built; make it with {build}.")
    shown = sorted((root / "csrc").glob("[!.]*"))  # as build-kernels.sh
    sources = b"".join(path.read_bytes() for path in shown)
    interface = re.search(
        r"^INTERFACE = (\d+)$", (root / KERNELS / "native.py").read_text(), re.MULTILINE
    )
    here = hashlib.sha256(sources).hexdigest(), int(interface[1])
    built = json.loads(found[1])
    if (built["sources"], built["interface"]) != here:
        stop(
            f"{library} was built from another csrc/ than {root} has; make it anew with {build}."
        )


def platform(library: Path) -> str:
    """The oldest manylinux whose C and C++ libraries have what `library` takes of them."""
    needed = defaultdict(set)
    with library.open("rb") as file:
        for name, symbol in elf_find_versioned_symbols(ELFFile(file)):
            needed[name].add(symbol)
    return (
        WheelPolicies(libc=Libc.GLIBC, arch=Architecture.detect())
        .versioned_symbols_policy(needed)
        .name
    )


def pins(root: Path, series_name: str) -> dict[str, dict[str, list[str]]]:
    """`pinned_files` of the series, in order."""
    sys.path.insert(0, str(root / "scripts"))
    from dsv4_overlay_tools.errors import Refusal
    from dsv4_overlay_tools.series import pinned_files

    try:
        table = pinned_files(root, series_name)
    except Refusal as refusal:
        stop(refusal.message)
    in_order = sorted(
        table, key=lambda release: [int(number) for number in release.split(".")]
    )
    return {
        release: {path: sorted(table[release][path]) for path in sorted(table[release])}
        for release in in_order
    }
