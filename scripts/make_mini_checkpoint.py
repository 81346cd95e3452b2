#!/usr/bin/env python3
"""Write a small, seeded checkpoint with healthy activations: DeepSeek V4, V4.1, V3.2 or GLM-5.

    python scripts/make_mini_checkpoint.py OUT_DIR [--seed 0]
    vllm serve OUT_DIR --block-size 256 --kv-cache-dtype fp8
    python scripts/make_mini_checkpoint.py OUT_DIR --images     # vLLM 0.30.0 or newer
    python scripts/make_mini_checkpoint.py OUT_DIR --model v4.1
    vllm serve OUT_DIR --kv-cache-dtype fp8 --language-model-only
    python scripts/make_mini_checkpoint.py OUT_DIR --model v3.2
    vllm serve OUT_DIR

Attention has the dimensions of the public model (V4: V4-Flash), heads and index top-k included.
Few layers cover its kinds (V4: sliding window, one row in 4, one row in 128), with one next-token
(MTP) layer (V4.1 has none), 16 routed experts, a vocabulary of 8192 and FP8 weights in 128x128 blocks
(V4.1: 32x32, experts MXFP4). With --images V4 has a small vision tower, and the public vocabulary.
Names, shapes and dtypes are those of the public FP8 checkpoints, so stock vLLM loads it with its default
loader. What its weights are like, and why: mini_checkpoint/recipe.py and a file for each model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mini_checkpoint import deepseek_v4, deepseek_v32, deepseek_v41, glm_5, images
from mini_checkpoint.deepseek_v4 import Recipe, Shape, model_config
from mini_checkpoint.layouts import Fp8Blocks
from mini_checkpoint.quantised import LAYOUTS, Dequantised, Mxfp4Experts
from mini_checkpoint.recipe import BaseRecipe
from mini_checkpoint.tokenizer import write_tokenizer
from mini_checkpoint.writer import write_checkpoint

__all__ = ["Recipe", "Shape", "model_config", "write_checkpoint", "write_tokenizer"]  # of V4

MODELS = {"v4": deepseek_v4, "v4.1": deepseek_v41, "v3.2": deepseek_v32, "glm-5": glm_5}


def recipe_of(args: argparse.Namespace) -> BaseRecipe:
    """Raises ValueError if the options do not fit the model."""
    model = MODELS[args.model]
    if args.images:
        if args.model != "v4":
            raise ValueError("--images is of --model v4")
        model = images
    layout = Fp8Blocks() if args.layout == "fp8" and args.model == "v4.1" else None
    if args.layout not in (None, "fp8"):
        if args.model != "v4":
            raise ValueError(f"--layout {args.layout} is of --model v4")
        layout = Mxfp4Experts() if args.layout == "mxfp4-experts" else LAYOUTS[args.layout]()
    if args.dequantised:
        if args.layout not in LAYOUTS:
            raise ValueError(f"--dequantised needs a --layout out of {', '.join(LAYOUTS)}")
        layout = Dequantised(layout)
    heads = args.heads if args.heads is not None else model.Shape.heads
    if heads % 8 or not 8 <= heads <= 128:
        raise ValueError(f"--heads must be a multiple of 8 up to 128, and is {heads}")
    sizes = {"heads": heads, "moe_intermediate": args.moe_intermediate_size}
    if args.kv_rms is not None:
        if args.model != "v4":
            raise ValueError("--kv-rms is of --model v4")
        sizes |= {"kv_rms": args.kv_rms}
    if args.model in ("v4", "v4.1"):
        sizes |= {"o_groups": heads // 8, "fp8_wo_b": args.fp8_wo_b}
        if args.dspark:  # two stages, which see the window only
            ratios = (*model.Shape.compress_ratios[: model.Shape.layers], 0, 0)
            sizes |= {"dspark": True, "mtp_layers": 2, "compress_ratios": ratios}
    elif args.dspark:
        raise ValueError("--dspark is of --model v4 and v4.1")
    else:
        sizes |= {"fp8_o_proj": args.fp8_wo_b}
    if args.two_stages:
        if args.model != "v4" or args.dspark:
            raise ValueError("--two-stages is of --model v4 without --dspark")
        sizes |= {"layers": 7, "compress_ratios": (0, 0, 4, 128, 4, 128, 4, 0)}
    return model.Recipe(model.Shape(**sizes), args.seed, layout)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--model", choices=list(MODELS), default="v4", help="(default: %(default)s)")
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
        help="quantise attention's last projection (wo_b, o_proj) too, as the public checkpoints do "
        "(comparisons get noisier)",
    )
    parser.add_argument(
        "--heads",
        type=int,
        help="of attention, a multiple of 8 up to 128: with 32 a rank of TP 4 has 8 heads (in V4 one output "
        "group), as one of V4-Flash or GLM-5 has at TP 8 (default: the public model's, V3.2 128, the others 64)",
    )
    parser.add_argument("--kv-rms", type=float, help=f"of V4's keys and values (default: {Shape.kv_rms})")
    parser.add_argument("--dspark", action="store_true", help="DSpark's draft, in V4 in place of its MTP layer")
    parser.add_argument(
        "--two-stages",
        action="store_true",
        help="7 layers of V4, so that both of two pipeline stages have layers of every group of caches, which "
        "vLLM 0.29.0 to 0.33.0 needs",
    )
    parser.add_argument(
        "--images",
        action="store_true",
        help="V4 with a vision tower and the public vocabulary of 129280, 2 GB more: mini_checkpoint/images.py",
    )
    parser.add_argument(
        "--layout",
        choices=["fp8", "mxfp4-experts", *LAYOUTS],
        help="how V4's linears are quantised and named: mini_checkpoint/quantised.py (default: fp8, as in "
        "V4-Flash-Base; V4-Flash has mxfp4-experts). V4.1 has MXFP8 as the public model does, or fp8",
    )
    parser.add_argument(
        "--dequantised",
        action="store_true",
        help="the values that --layout stands for, in BF16: what to compare it with",
    )
    parser.add_argument("--quiet", action="store_true", help="no line a tensor")
    args = parser.parse_args(argv)

    def log(line: str) -> None:
        if not args.quiet or not line.startswith("  "):
            print(line, flush=True)

    try:
        write_checkpoint(args.out_dir, recipe_of(args), log=log)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename or args.out_dir} cannot be written ({error.strerror}).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
