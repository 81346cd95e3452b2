# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""Is the overlay on this vLLM whole, and do its kernels and layers compute what they
should on this machine?

    python -m vllm.dsv4_overlay.selftest

Runs on a GPU, or on the CPU through Triton's interpreter. Every expected value is
worked out in float64 from the definition. Exit status: 1 if a check failed, else 0; a
warning is about a GPU that is not served, or not well.
"""

import argparse
import hashlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import vllm


class Warned(Exception):
    """This machine could do better; the text says how."""

    result = "warning"


class Skipped(Exception):
    """There is nothing here to check; the text says why."""

    result = "skipped"


def check_files() -> str:
    from vllm.third_party.mla_kernels.checks import expect

    root = Path(vllm.__file__).parents[1]
    record = json.loads((root / "vllm/_dsv4_overlay/record.json").read_text())
    for entry in record["files"]:
        path = root / entry["path"]
        expect(path.is_file(), f"{path} is missing")
        # pip writes to its own file later; what it says about ours is checked when
        # patches are applied.
        if entry["action"] != "updated":
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            same = found == entry["sha256_after"]
            expect(same, f"{path} was edited since it was applied")
    commit = (record["overlay_commit"] or "")[:12] or "unknown commit"
    return (
        f"{len(record['files'])} files are as applied: overlay "
        f"{record['overlay_version']} ({commit}) on vLLM {record['release']}"
    )


def check_gpu() -> str:
    from vllm.dsv4_overlay import config
    from vllm.third_party.mla_kernels import pick_provider

    if not torch.cuda.is_available():
        raise Skipped("no GPU: kernels were interpreted on the CPU")
    major, minor = torch.cuda.get_device_capability()
    found = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    if config.vllm_serves_itself():
        return f"{found}; vLLM's own backend serves here"
    if not config.serves((major, minor)):
        raise Warned(f"{found}; the backend serves Hopper and Blackwell only")
    config.check_machine()
    if problem := config.falls_back("cuda"):
        raise Warned(f"{found}; {problem}")
    return "{}; attention by {}: {}".format(found, *pick_provider("cuda"))


def skip_e4m3(*_: object) -> str:
    raise Skipped("Triton does not write E4M3 on this GPU, and no such cache is served")


def all_checks() -> list[tuple[str, Callable[..., str], tuple]]:
    from vllm.dsv4_overlay.layer_check import check_layer
    from vllm.third_party.mla_kernels import pick_provider
    from vllm.third_party.mla_kernels.checks import (
        BF16,
        E4M3,
        check_sparse_mla,
        kernel_checks,
    )

    # What vLLM would use here, and the one that serves everywhere.
    providers = sorted(
        {"triton", pick_provider("cuda")[0] if torch.cuda.is_available() else "triton"}
    )
    checks = [("applied files", check_files, ()), *kernel_checks(providers)]
    for name, dtype in (("BF16", BF16), ("FP8", E4M3)):
        checks += [
            (f"vLLM's layer, ratio {r}, {name}", check_layer, (r, dtype))
            for r in (1, 4, 128)
        ]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        for n, (label, check, args) in enumerate(checks):
            if E4M3 in args and check != check_sparse_mla:  # which only reads it
                checks[n] = (label, skip_e4m3, args)
    return [*checks, ("GPU", check_gpu, ())]


def main() -> int:
    if not (Path(vllm.__file__).parent / "_dsv4_overlay/record.json").is_file():
        print(
            "The overlay is not applied to the vLLM in "
            f"{Path(vllm.__file__).parents[1]}.",
            file=sys.stderr,
        )
        return 1
    # Before Triton is imported. vLLM keeps it without a GPU only if none is meant to be
    # visible, and the glue would pick the reference, which is not what has to be
    # tested.
    interpreted = {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_DSV4_PROVIDER": "triton",
    }
    if not torch.cuda.is_available() and not interpreted.items() <= os.environ.items():
        os.execve(
            sys.executable,
            [sys.executable, "-m", "vllm.dsv4_overlay.selftest"],
            os.environ | interpreted,
        )
    from tqdm import tqdm

    logging.disable(logging.WARNING)
    start = time.perf_counter()
    checks, counts = all_checks(), {"ok": 0, "warning": 0, "skipped": 0, "FAILED": 0}
    width = max(len(label) for label, _, _ in checks)
    tqdm.write(f"{'check':{width}}  result   detail")
    for label, check, args in tqdm(checks, unit="check", leave=False, disable=None):
        try:
            result, detail = "ok", check(*args)
        except (Warned, Skipped) as error:
            result, detail = error.result, str(error)
        except Exception as error:  # whatever it is, it is the result of this check
            place = traceback.extract_tb(error.__traceback__)[-1]
            result, detail = "FAILED", str(error).partition("\n")[0]
            if type(error).__name__ != "Failed":
                at = f"{place.filename}:{place.lineno}"
                detail = f"{type(error).__name__} in {at} {detail}"
        counts[result] += 1
        tqdm.write(f"{label:{width}}  {result:7}  {detail}")
    took = time.perf_counter() - start
    rest = ", ".join(
        f"{count} {name}" for name, count in counts.items() if count and name != "ok"
    )
    print(
        f"\n{counts['ok']} of {len(checks)} checks "
        f"passed{', ' + rest if rest else ''}, in {took:.0f} s."
    )
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    argparse.ArgumentParser(
        "python -m vllm.dsv4_overlay.selftest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    sys.exit(main())
