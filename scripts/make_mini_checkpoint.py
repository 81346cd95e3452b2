#!/usr/bin/env python3
"""Write a small, seeded DeepSeek V4 checkpoint with healthy activations.

    python scripts/make_mini_checkpoint.py OUT_DIR [--seed 0]
    vllm serve OUT_DIR --block-size 256 --kv-cache-dtype fp8

The result has DeepSeek V4 Flash's attention dimensions (hidden 4096, 64 heads of 512, 8 output
groups, sliding window 128, index top-k 512), five layers that cover the three attention kinds
(sliding window, one row in 4, one row in 128), one next-token (MTP) layer, 16 routed experts, a
vocabulary of 8192 and FP8 weights in 128x128 blocks. Names, shapes and dtypes are those of the
public FP8-expert checkpoints, so stock vLLM loads it with its default loader. What its weights are
like, and why: mini_checkpoint/recipe.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mini_checkpoint.deepseek_v4 import Recipe, Shape, model_config
from mini_checkpoint.quantised import LAYOUTS, Dequantised
from mini_checkpoint.tokenizer import write_tokenizer
from mini_checkpoint.writer import write_checkpoint

__all__ = ["Recipe", "Shape", "model_config", "write_checkpoint", "write_tokenizer"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--moe-intermediate-size",
        type=int,
        default=Shape.moe_intermediate,
        help="128 a tensor-parallel rank is the least that FP8 blocks allow: the default serves "
        "TP 1, 2 and 4; give 1024 for TP 8 (0.6 GB more)",
    )
    parser.add_argument(
        "--fp8-wo-b",
        action="store_true",
        help="quantise wo_b too, as the public checkpoints do (comparisons get noisier, see above)",
    )
    parser.add_argument(
        "--heads",
        type=int,
        default=Shape.heads,
        help="of attention, a multiple of 8: with 32 a rank of TP 4 has 8 heads and one output group, as one of "
        "V4-Flash has at TP 8 (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-rms", type=float, default=Shape.kv_rms, help="of keys and values (default: %(default)s)"
    )
    parser.add_argument(
        "--layout",
        choices=["fp8", *LAYOUTS],
        default="fp8",
        help="how linears are quantised and named: mini_checkpoint/quantised.py (default: %(default)s)",
    )
    parser.add_argument(
        "--dequantised",
        action="store_true",
        help="the values that --layout stands for, in BF16: what to compare it with",
    )
    parser.add_argument("--quiet", action="store_true", help="no line a tensor")
    args = parser.parse_args(argv)
    if args.heads < 8 or args.heads % 8:
        parser.error(f"--heads must be a multiple of 8, for an output group is 8 heads, and is {args.heads}")

    if args.dequantised and args.layout == "fp8":
        parser.error("--dequantised needs a --layout other than fp8")
    layout = LAYOUTS[args.layout]() if args.layout != "fp8" else None
    if layout and args.dequantised:
        layout = Dequantised(layout)

    def log(line: str) -> None:
        if not args.quiet or not line.startswith("  "):
            print(line, flush=True)

    try:
        shape = Shape(
            heads=args.heads,
            o_groups=args.heads // 8,
            moe_intermediate=args.moe_intermediate_size,
            fp8_wo_b=args.fp8_wo_b,
            kv_rms=args.kv_rms,
        )
        write_checkpoint(args.out_dir, Recipe(shape, args.seed, layout), log=log)
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
