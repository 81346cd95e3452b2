#!/usr/bin/env python3
"""Run FlashMLA's own tests of its two sparse calls against ours, from a checkout; none of their code is copied.

    python tests/kernels/flashmla_suite.py --checkout DIR                      64 and 128 heads, as they are
    python tests/kernels/flashmla_suite.py --checkout DIR --heads 8 16 32      the same cases with fewer heads
    python tests/kernels/flashmla_suite.py --checkout DIR --every 4 --shard 0/8

Needs a GPU, and of the checkout `tests/`, with the two files named below (deepseek-ai/FlashMLA from 2026 on). Our
module takes the place of `flash_mla`, which is not built. Cases that only measure time are left out. There are
thousands of decode: --every N takes each N-th, --shard I/N is for N processes beside each other. Says how many
passed; exit status 1 if one did not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import runpy
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

OVERLAY = Path(__file__).resolve().parents[2] / "overlay/common/vllm/third_party"
DECODE, PREFILL = "test_flash_mla_sparse_decoding", "test_flash_mla_sparse_prefill"


class CasesAreThere(Exception):
    """Carries the names of a script that has made its cases and would run them next."""


def stand_in(provider: str | None) -> types.ModuleType:
    """Our two calls as the module `flash_mla`."""
    import functools

    sys.path.insert(0, str(OVERLAY))
    import mla_kernels

    module = types.ModuleType("flash_mla")
    module.get_mla_metadata = lambda *args, **kwargs: (None, None)
    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        setattr(module, name, functools.partial(getattr(mla_kernels, name), provider=provider))
    return module


def decode_cases(tests: Path) -> tuple[list[Any], Callable[[Any], bool]]:
    sys.path.insert(0, str(tests))
    import importlib

    script = importlib.import_module(DECODE)
    cases = [raw.to_test_param() for raw in script.gen_testcase()]
    return cases, lambda case: script.test_flash_mla(case).is_correct


def prefill_cases(tests: Path) -> tuple[list[Any], Callable[[Any], bool]]:
    """The script makes them where it would run them: it is stopped in between."""
    sys.path.insert(0, str(tests))
    import lib

    def stop() -> None:
        raise CasesAreThere(sys._getframe(1).f_globals)

    asked = lib.is_no_cooldown
    lib.is_no_cooldown = stop
    try:
        runpy.run_path(str(tests / f"{PREFILL}.py"), run_name="__main__")
    except CasesAreThere as there:
        names = there.args[0]
        return names["testcases"], names["run_test"]
    finally:
        lib.is_no_cooldown = asked
    raise SystemExit(f"error: {PREFILL}.py has run to its end, so its cases are made elsewhere; see its main.")


def chosen(cases: list[Any], heads: list[int], every: int, shard: tuple[int, int]) -> Iterator[Any]:
    """Cases of correctness; with `heads`, of the first number of heads of the file, with each of these instead."""
    cases = [case for case in cases if case.check_correctness and not case.num_runs]
    if heads:
        first = cases[0].h_q
        cases = [dataclasses.replace(case, h_q=h) for case in cases if case.h_q == first for h in heads]
    return itertools.islice(cases, shard[0] * every, None, every * shard[1])


def run(case: Any, passes: Callable[[Any], bool]) -> tuple[bool, str]:
    """Whether it passed, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            return bool(passes(case)), printed.getvalue()
        except Exception:
            return False, printed.getvalue() + traceback.format_exc()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, metavar="DIR", help="of FlashMLA")
    parser.add_argument("--heads", type=int, nargs="+", default=[], help="instead of 64 and 128")
    parser.add_argument("--only", choices=("decode", "prefill"), help="one of the two files (default: both)")
    parser.add_argument("--provider", help="sm90, triton or reference (default: what serves)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th case (default: all)")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="this process of N, from 0")
    args = parser.parse_args(argv)
    tests = args.checkout / "tests"
    if missing := [name for name in (DECODE, PREFILL) if not (tests / f"{name}.py").is_file()]:
        parser.error(f"{tests} has no {missing[0]}.py; give a checkout of deepseek-ai/FlashMLA of 2026.")
    try:
        shard = tuple(map(int, args.shard.split("/")))
        ok = len(shard) == 2 and 0 <= shard[0] < shard[1] and args.every > 0
    except ValueError:
        ok = False
    if not ok:
        parser.error("--shard is I/N with I from 0 to N - 1, and --every 1 or more.")
    sys.modules["flash_mla"] = stand_in(args.provider)
    import torch

    if not torch.cuda.is_available():
        print("error: FlashMLA's tests need a GPU, and there is none.", file=sys.stderr)
        return 1
    # As the mains of both scripts do.
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda:0")
    torch.set_float32_matmul_precision("high")
    failed = 0
    for kind, cases_of in (("decode", decode_cases), ("prefill", prefill_cases)):
        if args.only not in (None, kind):
            continue
        cases, passes = cases_of(tests)
        if not any(case.check_correctness and not case.num_runs for case in cases):
            print(f"error: no case of {kind} compares outputs; see what marks them in lib.py.", file=sys.stderr)
            return 1
        passed = count = 0
        for case in chosen(cases, args.heads, args.every, shard):
            count += 1
            good, printed = run(case, passes)
            passed += good
            if not good:
                print(f"FAILED {case}\n{printed[-2000:]}", flush=True)
            elif count % 100 == 0:
                print(f"{kind}: {passed} of {count} so far", flush=True)
        print(f"{kind}: {passed} of {count} passed", flush=True)
        failed += count - passed
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
