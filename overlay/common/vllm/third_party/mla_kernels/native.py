# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""Loads `libmla_kernels.so`: CUDA kernels that take the operators over from Triton
where they can.

`scripts/build-kernels.sh` puts the library into `lib/`. It registers its kernels with
torch for the dispatch key CUDA, which comes before the Triton implementations. Without
it, or with one that does not fit here, Triton serves, and a line in the log says why.
"""

import functools
import json
import logging
import re
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# In a folder of its own: here, whoever lists the modules of this package would take it
# for one.
LIBRARY = Path(__file__).parent / "lib" / "libmla_kernels.so"
# What the operators of the library are. Raise it when one is added, or a schema or its
# meaning changes, so that an older build is refused and not called for what it lacks.
# The build script reads this line.
INTERFACE = 6

_BUILD = re.compile(rb"mla_kernels_build (\{[^\0]*\})\0")
_REBUILD = "rebuild it with scripts/build-kernels.sh"


def load(device: torch.device | None = None) -> bool:
    """Whether the native operators serve `device`, by default the current GPU; loads
    the library if need be.

    Initialises CUDA. The operators call it when they are first used; a program that
    captures CUDA graphs or times its first call should do so earlier.
    """
    return load_for(
        torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
    )


@functools.cache
def load_for(capability: tuple[int, int] | None) -> bool:
    """`load` for GPUs of this compute capability, of which a process may see
    several."""
    # For GPUs of another kind, or by this package under its other name.
    registered = _registered()
    if not LIBRARY.exists():
        if not registered:
            logger.info("There are no native kernels (%s); Triton serves.", LIBRARY)
        return registered
    if registered and capability is None:
        return True
    problem = misfit(capability)
    if problem is None and not registered:
        try:
            torch.ops.load_library(str(LIBRARY))
            if not _registered():
                problem = f"it registers no operators; {_REBUILD}"
        except (OSError, RuntimeError) as error:
            problem = f"it cannot be loaded ({error}); {_REBUILD}"
    if problem is not None:
        logger.warning("%s is not used: %s. Triton serves.", LIBRARY, problem)
        return False
    if not registered and any(misfit(other) for other in _visible()):
        # torch asks the operators' CUDA kernels for every GPU, and on some of these
        # they have no code.
        from . import insert

        insert.keep_triton()
    build = build_info(LIBRARY)
    logger.info(
        "Native kernels serve (%s, CUDA %s, sm %s).",
        LIBRARY,
        build["cuda"],
        build["archs"],
    )
    return True


def misfit(capability: tuple[int, int] | None) -> str | None:
    """Why the library cannot serve a GPU of this compute capability; None if it can.

    Loads nothing and leaves CUDA alone, so that it can be asked before a server starts
    its workers.
    """
    if not LIBRARY.exists():
        return (
            "it is not built; run scripts/build-kernels.sh and apply the overlay again"
        )
    try:
        return refusal(
            build_info(LIBRARY),
            torch_version=torch.__version__,
            cuda_version=torch.version.cuda,
            capability=capability,
        )
    except (OSError, ValueError, KeyError) as error:
        return f"it cannot be loaded ({error}); {_REBUILD}"


def build_info(library: Path) -> dict:
    """How `library` was built, read from the file without loading it.

    Raises ValueError if it does not say.
    """
    found = _BUILD.search(library.read_bytes())
    if found is None:
        raise ValueError("it does not say how it was built")
    return json.loads(found[1])


def refusal(
    build: dict,
    *,
    torch_version: str,
    cuda_version: str | None,
    capability: tuple[int, int] | None,
) -> str | None:
    """Why a library with this `build_info` must not be loaded, and what to do; None if
    it may."""
    if build.get("interface") != INTERFACE:
        return (
            "it is of another version of this package (interface "
            f"{build.get('interface')}, "
            f"needed {INTERFACE}); {_REBUILD}"
        )
    if _numbers(torch_version) < _numbers(build["torch"]):
        return (
            f"it needs torch {build['torch']} or newer and this is {torch_version}; "
            "update torch"
        )
    if cuda_version is None or capability is None:
        return "it needs a CUDA GPU and a torch built with CUDA"
    ours, theirs = (_numbers(version)[0] for version in (build["cuda"], cuda_version))
    if ours != theirs:
        advice = f"{_REBUILD} and a CUDA {theirs} toolkit"
        if theirs < ours:  # csrc/ needs that toolkit
            advice = f"install a torch built with CUDA {ours}"
        return (
            f"it was built with CUDA {build['cuda']} and this torch with "
            f"{cuda_version}; {advice}"
        )
    # The very name: without the a, attention kernels are compiled without their bodies.
    needed = "{}{}{}".format(*capability, "a" if capability[0] >= 9 else "")
    if needed not in build["archs"].split():
        return (
            f"it has code for sm {build['archs']} and this GPU is "
            f"sm_{needed.rstrip('a')}; {_REBUILD} with "
            f"MLA_CUDA_ARCHS={needed}"
        )
    return None


def _visible() -> list[tuple[int, int]]:
    """Compute capabilities of the GPUs that this process sees."""
    return [
        torch.cuda.get_device_capability(index)
        for index in range(torch.cuda.device_count())
    ]


def _registered() -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel("mla_kernels::full_cache_bf16_insert", "CUDA")


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 11) of 2.11.0+cu130: major and minor."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
