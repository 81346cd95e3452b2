#!/usr/bin/env python3
"""The fused insert of DeepSeek V4: native and Triton kernels, and FlashMLA's in stock vLLM, in one run on one GPU.

    python benchmarks/insert.py --out benchmarks/results/insert.json

Times are medians of CUDA-graph replays. `copy` is what a plain copy of as many bytes takes in the same run, and
`need` what it would take at the bandwidth of a copy of 2 GiB, which a small one does not reach; `times` is how
often either went by. Four conditions:

- `slots`: `rows` puts every token into a row of its own anywhere in the cache, at any position, as tokens of as
  many sequences are; `blocks` fills blocks anywhere row by row, with consecutive positions, as prefills do, from
  1024 tokens up.
- `q`: `cold` has buffers for each of up to 20 calls of a replay, up to 8 GB: so Q of small batches comes from the
  L2 cache, and of large ones from memory. `hot` has as few buffers as half of the L2 cache holds, if it holds one:
  Q is there, as it is when the projection just wrote it. `need` and `copy` are then no bounds.

Stock vLLM's kernel, for cold Q, pads Q to the 64 or 128 heads that FlashMLA takes and stores rows of 584 bytes; it
is left out where there is no vLLM (an installed one, or its library with --vllm-library).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from e2e import check_out
from timing import CALLS, REPLAYS, copies, microseconds, provenance

try:
    from vllm.third_party.mla_kernels import insert, native
except ImportError:  # the kernels alone, out of this repository
    sys.path.insert(0, str(Path(__file__).parents[1] / "overlay/common/vllm/third_party"))
    from mla_kernels import insert, native

TOKENS = (1, 16, 128, 1024, 4096, 16384)
HEADS = (8, 16, 32, 64, 128)
OPERATORS = ("full_cache_bf16_insert", "full_cache_fp8_insert", "full_cache_fp8_insert_bf16_q")
MAX_BYTES = 8e9
PREFILL = 1024  # tokens from which on batches are measured with slots in blocks too
BLOCK, MAX_POSITION, EPS = 64, 1 << 16, 1e-6
BLOCKS = 1 << 14


class Inputs:
    """Buffers for several calls of one shape. Slots differ within a call."""

    def __init__(self, tokens: int, heads: int) -> None:
        self.tokens, self.heads = tokens, heads
        self.calls = int(min(CALLS, max(2, MAX_BYTES // (tokens * heads * 1024))))
        self.q = torch.randn(tokens, heads, 512, device="cuda").bfloat16().repeat(self.calls, 1, 1, 1)
        self.q_fp8: torch.Tensor | None = None
        self.kv = torch.randn(self.calls, tokens, 512, device="cuda").bfloat16()
        self.cos_sin = torch.randn(MAX_POSITION, 64, device="cuda")

    def place(self, slots: str) -> None:
        """Draw `slots` and `positions` of all calls: see the docstring of this file."""
        self.buffers = self.calls  # of Q and KV that calls go over
        blocks = slots == "blocks"
        run = torch.arange(BLOCK if blocks else 1, device="cuda")
        runs = self.tokens // len(run)
        self.slots = torch.stack(
            [
                (torch.randperm(BLOCKS * BLOCK // len(run), device="cuda")[:runs, None] * len(run) + run).flatten()
                for _ in range(self.calls)
            ]
        )
        run = torch.arange(PREFILL if blocks else 1, device="cuda")
        first = torch.randint(0, MAX_POSITION - PREFILL, (self.calls, self.tokens // len(run), 1), device="cuda")
        self.positions = (first + run).flatten(1)

    def heat(self, operator: str) -> bool:
        """Let the calls go over as few buffers as half of the L2 cache holds; whether it holds one."""
        of_a_call = self.tokens * (self.heads * (1536 if operator == "full_cache_fp8_insert" else 1024) + 1024)
        self.buffers = min(self.calls, torch.cuda.get_device_properties(0).L2_cache_size // 2 // of_a_call)
        return self.buffers > 0

    def call(self, functions: object, operator: str, cache: torch.Tensor) -> Callable[[int], object]:
        run = getattr(functions, operator)
        if operator == "full_cache_fp8_insert":
            self.q_fp8 = torch.empty(self.q.shape, dtype=torch.float8_e4m3fn, device="cuda")

        def call(i: int) -> None:
            index = (cache, self.slots[i], self.positions[i], self.cos_sin)
            j = i % self.buffers
            if operator == "full_cache_bf16_insert":
                run(self.q[j], self.kv[j], *index, EPS, BLOCK)
            elif operator == "full_cache_fp8_insert":
                run(self.q[j], self.kv[j], self.q_fp8[j], *index, 1.0, 1.0, EPS, BLOCK)
            else:
                run(self.q[j], self.kv[j], *index, 1.0, EPS, BLOCK)

        return call

    def stock(self, packed: torch.Tensor) -> Callable[[int], object]:
        run = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
        padded = max(64, self.heads)
        return lambda i: run(
            self.q[i], self.kv[i], packed, self.slots[i], self.positions[i], self.cos_sin, padded, EPS, BLOCK
        )


def bytes_of(operator: str, heads: int, tokens: int) -> int:
    """What the operator must read and write of `q`, `kv`, the cache, the cosines and the indices."""
    q = 1024 + (512 if operator == "full_cache_fp8_insert" else 1024)
    kv = 1024 + (1024 if operator == "full_cache_bf16_insert" else 512)
    return tokens * (heads * q + kv + 256 + 16)


def stock_is_there(library: Path | None) -> bool:
    if library:
        torch.ops.load_library(str(library))
    else:
        for module in ("vllm._C", "vllm._C_stable_libtorch"):  # the second since 0.33
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    return hasattr(torch.ops._C, "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON with every figure")
    parser.add_argument(
        "--vllm-library", type=Path, help="vllm/_C.abi3.so, or since 0.33 vllm/_C_stable_libtorch.abi3.so"
    )
    arguments = parser.parse_args()
    check_out(arguments.out)
    if not torch.cuda.is_available():
        print("error: this benchmark needs a CUDA GPU, and there is none.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    with_stock = stock_is_there(arguments.vllm_library)
    implementations = {"triton": insert}
    if native.load():
        implementations["native"] = torch.ops.mla_kernels
    else:
        print("without native kernels: scripts/build-kernels.sh builds them", file=sys.stderr)
    # Before anything else, so that nothing that was just measured weighs on them.
    copy_us = copies()
    copy = 2**32 / copy_us(2**32) / 1e6
    sizes = {bytes_of(*shape) for shape in itertools.product(OPERATORS, HEADS, TOKENS)}
    copied = {nbytes: copy_us(nbytes) for nbytes in sorted(sizes)}
    del copy_us
    torch.cuda.empty_cache()
    print(f"copy {copy:.2f} TB/s")
    caches = {
        "full_cache_bf16_insert": torch.empty(BLOCKS, BLOCK, 512, dtype=torch.bfloat16, device="cuda"),
        "full_cache_fp8_insert": torch.empty(BLOCKS, BLOCK, 512, dtype=torch.float8_e4m3fn, device="cuda"),
    }
    caches["full_cache_fp8_insert_bf16_q"] = caches["full_cache_fp8_insert"]
    packed = torch.empty(BLOCKS, BLOCK * 584, dtype=torch.uint8, device="cuda") if with_stock else None

    results = []
    print(
        f"{'operator':30}{'heads':>6}{'tokens':>7}  {'slots':7}{'q':5} {'by':8}{'us':>9}{'need':>9}{'times':>7}"
        f"{'copy':>9}{'times':>7}{'stock us':>10}{'speedup':>9}"
    )
    conditions = [(slots, q) for slots in ("blocks", "rows") for q in ("cold", "hot")]
    for heads in HEADS:
        for tokens in TOKENS:
            inputs = Inputs(tokens, heads)
            for slots, q in conditions if tokens >= PREFILL else [("rows", "cold")]:
                inputs.place(slots)
                stock = None
                if packed is not None and q == "cold":
                    stock = microseconds(inputs.stock(packed), inputs.calls)
                for operator, cache in caches.items():
                    if q == "hot" and not inputs.heat(operator):
                        continue
                    nbytes = bytes_of(operator, heads, tokens)
                    need, plain = nbytes / copy / 1e6, copied[nbytes]
                    for name, functions in implementations.items():
                        us = microseconds(inputs.call(functions, operator, cache), inputs.calls)
                        row = {
                            "operator": operator,
                            "heads": heads,
                            "tokens": tokens,
                            "slots": slots,
                            "q": q,
                            "implementation": name,
                            "us": round(us, 3),
                            "bytes": nbytes,
                            "need_us": round(need, 3),
                            "times_need": round(us / need, 3),
                            "copy_us": round(plain, 3),
                            "times_copy": round(us / plain, 3),
                            "stock_us": stock and round(stock, 3),
                            "speedup": stock and round(stock / us, 3),
                        }
                        results.append(row)
                        against = f"{stock:10.2f}{stock / us:9.2f}" if stock else ""
                        print(
                            f"{operator:30}{heads:6}{tokens:7}  {slots:7}{q:5} {name:8}{us:9.2f}{need:9.2f}"
                            f"{us / need:7.2f}{plain:9.2f}{us / plain:7.2f}{against}",
                            flush=True,
                        )
            del inputs
            torch.cuda.empty_cache()

    report = {
        **provenance(),
        "native_build": native.build_info(native.LIBRARY) if "native" in implementations else None,
        "method": {"calls_a_graph": CALLS, "max_bytes_of_q": MAX_BYTES, "replays": REPLAYS},
        "copy_tb_s": copy,
        "results": results,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
