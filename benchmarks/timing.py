"""What the benchmarks share: times of CUDA-graph replays, what the memory of this GPU can do, and what it is."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
import triton

REPLAYS = 7


def microseconds(call: Callable[[int], object], calls: int) -> float:
    """Median time of one of `call(i)`, i = 0 … calls - 1 in one graph, over REPLAYS replays.

    What the calls return stays alive meanwhile, so that no call gets the memory of the one before.
    """
    kept = [call(0)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept += [call(i) for i in range(calls)]
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def copy_tb_s() -> float:
    """Bytes read and written a second by an elementwise kernel over 2 GiB, in TB/s.

    Not by a copy: a graph makes that a memcpy node, and the copy engine is slower than a kernel.
    """
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds(lambda _: torch.neg(source, out=target), 3) / 1e6


def provenance() -> dict:
    """The command, the GPU with its driver, and the versions, for the head of a result file."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return {
        "command": " ".join(sys.argv),
        "gpu": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
    }
