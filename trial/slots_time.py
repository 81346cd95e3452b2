#!/usr/bin/env python3
"""request_rows_to_slots: sm90 (csrc/slots.cu) against Triton, equality first and then times. One GPU, about a minute.

    MLA_REPO=<worktree of w-slots> MLA_LIB=<libmla_kernels.so of its csrc> python slots_time.py [--out FILE.json]

The library: MLA_CUDA_ARCHS=90a scripts/build-kernels.sh FILE.so in that worktree (/tmp/slots.so is one of the commit
that added the operator). Exits with 1 if any slot differs.

Columns, microseconds of a call, triton / sm90 and their quotient (above 1: sm90 is faster):
  graph    20 calls in a graph, each with rows and slots of its own
  behind   the same, each behind a plain kernel of torch that writes its rows; less that kernel's own time
  eager    host time of a call, 200 calls one after another without waiting for the GPU
  need     what the bytes take at the bandwidth of a copy of 2 GiB (rows read, slots written, tables not counted)
`order` is that of a token's rows: sorted, as the indexer here leaves them, or random. `prefill`: half of the tokens
have their rows in a gathered workspace. Block tables have 2048 blocks of 64 (131072 tokens).
"""
import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

REPO = Path(os.environ.get("MLA_REPO", "."))
sys.path[:0] = [str(REPO / "overlay/common/vllm/third_party"), str(REPO / "benchmarks")]
import torch  # noqa: E402
from mla_kernels import native  # noqa: E402
from mla_kernels.slots import request_rows_to_slots  # noqa: E402
from timing import CALLS, captured, copy_tb_s, in_turns  # noqa: E402

if os.environ.get("MLA_LIB"):
    native.LIBRARY = Path(os.environ["MLA_LIB"]).resolve()
TOKENS, COLUMNS, BLOCKS, PAGE = (1, 2, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), 2048, 2048, 64
PROVIDERS = ("triton", "sm90")


class Case:
    def __init__(self, tokens, order, prefill):
        self.calls = max(2, min(CALLS, (1 << 31) // (tokens * COLUMNS * 8)))
        shape = (self.calls, tokens, COLUMNS)
        self.rows = torch.randint(0, BLOCKS * PAGE, shape, dtype=torch.int32, device="cuda")
        if order == "sorted":
            self.rows = self.rows.sort(-1).values
        self.rows[..., -3:] = -1
        self.source = self.rows.clone()
        self.out = torch.empty_like(self.rows)
        requests = min(tokens, 64)
        self.request = (torch.arange(tokens, device="cuda") * requests // tokens).int()
        self.table = torch.randperm(requests * BLOCKS, device="cuda").int().view(requests, BLOCKS)
        self.workspace = ()
        if prefill:
            of_token = torch.where(torch.arange(tokens, device="cuda") < tokens // 2, -1, 0).int()
            self.workspace = (of_token, torch.zeros(1, dtype=torch.int32, device="cuda"))

    def slots(self, i, provider, out=None):
        return request_rows_to_slots(
            self.rows[i], self.request, self.table, PAGE, *self.workspace, out=out, provider=provider
        )

    def behind(self, i, provider):
        torch.bitwise_or(self.source[i], 0, out=self.rows[i])
        self.slots(i, provider, self.out[i])


def eager(case, provider, n=200):
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n):
            case.slots(0, provider, case.out[0])
        times.append((time.perf_counter() - start) / n * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    assert native.load(torch.device("cuda")), "the library does not load"
    torch.manual_seed(0)
    bandwidth, results, wrong = copy_tb_s(), [], 0
    print(torch.cuda.get_device_name(), f"copy {bandwidth:.2f} TB/s")
    cases = [(t, o, False) for o in ("sorted", "random") for t in TOKENS] + [(t, "sorted", True) for t in (64, 4096)]
    print(f"{'tokens':>6} {'order':7} {'prefill':7} | graph triton  sm90  quot. | behind triton  sm90  quot. | "
          "eager triton  sm90  quot. | need")
    for tokens, order, prefill in cases:
        case = Case(tokens, order, prefill)
        expected = [case.slots(i, "reference" if tokens <= 256 else "triton").clone() for i in (0, 1)]
        for provider in PROVIDERS:
            for i in (0, 1):
                same = torch.equal(case.slots(i, provider, torch.empty_like(case.rows[i])), expected[i])
                place = case.rows[i].clone()
                here = request_rows_to_slots(place, case.request, case.table, PAGE, *case.workspace, out=place,
                                             provider=provider)
                if not (same and torch.equal(here, expected[i])):
                    wrong += 1
                    print("WRONG", tokens, order, prefill, provider, "call", i)
        graph = in_turns(*(captured(lambda i, p=p: case.slots(i % case.calls, p, case.out[i % case.calls]), case.calls)
                           for p in PROVIDERS))
        alone, *behind = in_turns(
            captured(lambda i: torch.bitwise_or(case.source[i], 0, out=case.rows[i]), case.calls),
            *(captured(lambda i, p=p: case.behind(i, p), case.calls) for p in PROVIDERS),
        )
        case.out.fill_(7)
        captured(lambda i: case.behind(i, "sm90"), case.calls)()
        for i in (0, 1):
            if not torch.equal(case.out[i], expected[i]):
                wrong += 1
                print("WRONG in a graph", tokens, order, prefill, "call", i)
        behind = [t - alone for t in behind]
        host = [eager(case, p) for p in PROVIDERS]
        need = tokens * COLUMNS * 8 / bandwidth / 1e6
        results.append(dict(tokens=tokens, columns=COLUMNS, order=order, prefill=prefill, need=need,
                            **{f"{w}_{p}": t for w, pair in (("graph", graph), ("behind", behind), ("eager", host))
                               for p, t in zip(PROVIDERS, pair)}))
        print(f"{tokens:6} {order:7} {prefill!s:7} | " + " | ".join(
            f"{a:12.2f} {b:6.2f} {a / b:5.2f}" for a, b in (graph, behind, host)) + f" | {need:.2f}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__,
                                            copy_tb_s=bandwidth, results=results), indent=1))
    print("WRONG results:", wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
