"""What the benchmarks share: times of CUDA-graph replays, what the memory of this GPU can do, and what it is."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
import triton

REPLAYS = 7
CALLS = 20  # of a replay, at most


def captured(call: Callable[[int], object], calls: int) -> Callable[[], float]:
    """A graph of `call(i)`, i = 0 … calls - 1; what is returned replays it and gives the microseconds of one call.

    What the calls return stays alive meanwhile, so that no call gets the memory of the one before.
    """
    kept = [call(0)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept += [call(i) for i in range(calls)]
    graph.replay()

    def replay() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / (len(kept) - 1)

    return replay


def microseconds(call: Callable[[int], object], calls: int) -> float:
    """Median time of one call, over REPLAYS replays."""
    replay = captured(call, calls)
    return statistics.median(replay() for _ in range(REPLAYS))


def in_turns(*replays: Callable[[], float]) -> list[float]:
    """The medians of what several of captured() take in turns: a clock that heat has lowered is so for all."""
    times: list[list[float]] = [[] for _ in replays]
    for turn in range(REPLAYS):
        for place in range(len(replays)):  # each comes first as often as any other
            n = (turn + place) % len(replays)
            times[n].append(replays[n]())
    return [statistics.median(of_one) for of_one in times]


def copies() -> Callable[[int], float]:
    """How long a copy takes that reads and writes so many bytes together, in microseconds.

    By an elementwise kernel: a graph makes of a copy a memcpy node, and the copy engine is slower. CALLS calls, or
    fewer, have places of their own in 4 GiB, so that all but small ones are in memory and not in the L2 cache.
    """
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)

    def time(nbytes: int) -> float:
        values = min(nbytes // 4, len(source))  # for more than 4 GiB, in proportion
        places = min(CALLS, len(source) // values)
        step = len(source) // places // 1024 * 1024

        def call(i: int) -> None:
            part = slice(i % places * step, i % places * step + values)
            torch.neg(source[part], out=target[part])

        return microseconds(call, max(3, places)) * nbytes / (4 * values)

    return time


def copy_tb_s() -> float:
    """Bytes read and written a second by a copy of 2 GiB, in TB/s."""
    return 2**32 / copies()(2**32) / 1e6


def provenance() -> dict:
    """The command, the GPU with its driver, and the versions, for the head of a result file."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except OSError as error:
        gpu = f"{torch.cuda.get_device_name()}, driver unknown: {error}"
    return {
        "command": " ".join(sys.argv),
        "gpu": gpu,
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
    }
