#!/usr/bin/env python3
"""The fused insert of DeepSeek V4: native and Triton kernels, and FlashMLA's in stock vLLM, in one run on one GPU.

    python benchmarks/insert.py --out benchmarks/results/insert.json

Times are medians of CUDA-graph replays. A replay makes 20 calls, each with buffers of its own up to 8 GB in all:
so small batches come from the L2 cache, as they do after a projection, and large ones from memory. Stock vLLM's
kernel pads Q to the 64 or 128 heads that FlashMLA takes and stores rows of 584 bytes; it is left out where there
is no vLLM (an installed one, or its `_C` library with --vllm-library). `share` is how much of the bandwidth of a
copy, measured in the same run, the bytes of the operator make.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from timing import REPLAYS, copy_tb_s, microseconds, provenance

try:
    from vllm.third_party.dsv4_kernels import insert, native
except ImportError:  # the kernels alone, out of this repository
    sys.path.insert(0, str(Path(__file__).parents[1] / "overlay/common/vllm/third_party"))
    from dsv4_kernels import insert, native

TOKENS = (1, 16, 128, 1024, 4096, 16384)
HEADS = (8, 16, 32, 64, 128)
OPERATORS = ("full_cache_bf16_insert", "full_cache_fp8_insert", "full_cache_fp8_insert_bf16_q")
CALLS, MAX_BYTES = 20, 8e9
BLOCK, MAX_POSITION, EPS = 64, 1 << 16, 1e-6
BLOCKS = 1 << 14


class Inputs:
    """Buffers for several calls of one shape. Slots and positions are random, slots differ within a call."""

    def __init__(self, tokens: int, heads: int) -> None:
        self.tokens, self.heads = tokens, heads
        self.calls = int(min(CALLS, max(2, MAX_BYTES // (tokens * heads * 1024))))
        self.q = torch.randn(tokens, heads, 512, device="cuda").bfloat16().repeat(self.calls, 1, 1, 1)
        self.q_fp8: torch.Tensor | None = None
        self.kv = torch.randn(self.calls, tokens, 512, device="cuda").bfloat16()
        self.slots = torch.stack(
            [torch.randperm(BLOCKS * BLOCK, device="cuda")[:tokens] for _ in range(self.calls)]
        )
        self.positions = torch.randint(0, MAX_POSITION, (self.calls, tokens), device="cuda")
        self.cos_sin = torch.randn(MAX_POSITION, 64, device="cuda")
        self.scale = torch.ones(1, device="cuda")

    def call(self, functions: object, operator: str, cache: torch.Tensor) -> Callable[[int], object]:
        run = getattr(functions, operator)
        if operator == "full_cache_fp8_insert":
            self.q_fp8 = torch.empty(self.q.shape, dtype=torch.float8_e4m3fn, device="cuda")

        def call(i: int) -> None:
            index = (cache, self.slots[i], self.positions[i], self.cos_sin)
            if operator == "full_cache_bf16_insert":
                run(self.q[i], self.kv[i], *index, EPS, BLOCK)
            elif operator == "full_cache_fp8_insert":
                run(self.q[i], self.kv[i], self.q_fp8[i], *index, self.scale, self.scale, EPS, BLOCK)
            else:
                run(self.q[i], self.kv[i], *index, self.scale, EPS, BLOCK)

        return call

    def stock(self, packed: torch.Tensor) -> Callable[[int], object]:
        run = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
        padded = max(64, self.heads)
        return lambda i: run(
            self.q[i], self.kv[i], packed, self.slots[i], self.positions[i], self.cos_sin, padded, EPS, BLOCK
        )

    def bytes(self, operator: str) -> int:
        """What the operator must read and write of `q`, `kv`, the cache, the cosines and the indices."""
        q = 1024 + (512 if operator == "full_cache_fp8_insert" else 1024)
        kv = 1024 + (1024 if operator == "full_cache_bf16_insert" else 512)
        return self.tokens * (self.heads * q + kv + 256 + 16)


def stock_is_there(library: Path | None) -> bool:
    if library:
        torch.ops.load_library(str(library))
    else:
        try:
            import vllm._C  # noqa: F401
        except ImportError:
            return False
    return hasattr(torch.ops._C, "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON with every figure")
    parser.add_argument("--vllm-library", type=Path, help="vllm/_C.abi3.so, where vLLM is not installed")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: this benchmark needs a CUDA GPU, and there is none.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    with_stock = stock_is_there(arguments.vllm_library)
    implementations = {"triton": insert}
    if native.load():
        implementations["native"] = torch.ops.dsv4_kernels
    else:
        print("without native kernels: scripts/build-kernels.sh builds them", file=sys.stderr)
    copy = copy_tb_s()
    print(f"copy {copy:.2f} TB/s")
    caches = {
        "full_cache_bf16_insert": torch.empty(BLOCKS, BLOCK, 512, dtype=torch.bfloat16, device="cuda"),
        "full_cache_fp8_insert": torch.empty(BLOCKS, BLOCK, 512, dtype=torch.float8_e4m3fn, device="cuda"),
    }
    caches["full_cache_fp8_insert_bf16_q"] = caches["full_cache_fp8_insert"]
    packed = torch.empty(BLOCKS, BLOCK * 584, dtype=torch.uint8, device="cuda") if with_stock else None

    results = []
    print(f"{'operator':30}{'heads':>6}{'tokens':>7}  {'by':8}{'us':>9}{'share':>7}{'stock us':>10}{'speedup':>9}")
    for heads in HEADS:
        for tokens in TOKENS:
            inputs = Inputs(tokens, heads)
            stock = microseconds(inputs.stock(packed), inputs.calls) if packed is not None else None
            for operator, cache in caches.items():
                for name, functions in implementations.items():
                    us = microseconds(inputs.call(functions, operator, cache), inputs.calls)
                    row = {
                        "operator": operator,
                        "heads": heads,
                        "tokens": tokens,
                        "implementation": name,
                        "us": round(us, 3),
                        "bytes": inputs.bytes(operator),
                        "share_of_copy": round(inputs.bytes(operator) / us / 1e6 / copy, 3),
                        "stock_us": stock and round(stock, 3),
                        "speedup": stock and round(stock / us, 3),
                    }
                    results.append(row)
                    share = row["share_of_copy"]
                    against = f"{stock:10.2f}{stock / us:9.2f}" if stock else ""
                    print(f"{operator:30}{heads:6}{tokens:7}  {name:8}{us:9.2f}{share:7.2f}{against}", flush=True)
            del inputs
            torch.cuda.empty_cache()

    report = {
        **provenance(),
        "native_build": native.build_info(native.LIBRARY) if "native" in implementations else None,
        "method": {"calls_a_graph": CALLS, "max_bytes_of_q": MAX_BYTES, "replays": REPLAYS},
        "copy_tb_s": copy,
        "results": results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
