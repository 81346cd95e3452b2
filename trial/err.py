"""Whole and excess error of providers over BF16 rows, with 64 and 128 heads, and FlashMLA's; REPO and LIB from env."""
import os, sys
from pathlib import Path
REPO = Path(os.environ["MLA_REPO"])
sys.path[:0] = [str(REPO / "overlay/common/vllm/third_party"), str(REPO / "tests/kernels")]
import torch
from mla_kernels import native
native.LIBRARY = Path(os.environ["MLA_LIB"]).resolve()
import test_flash_mla as F, test_sparse_mla as S
dev = torch.device("cuda")
assert native.load(dev)
def say(name, out, want):
    r = S.relative_error(want.to(S.BF16), want)
    e = S.relative_error(out, want)
    print(f"{name:44s} whole {e:.3e} x{e/r:.3f} of rounding, excess {S.excess_error(out, want):.2e}", flush=True)
providers = sys.argv[1:] or ["sm90"]
for heads, tokens, width in ((64, 140, 640), (128, 140, 1152), (64, 300, 640)):
    c = S.Case(dev, tokens=tokens, heads=heads, width=width, seed=heads)
    want = c.expected()
    for p in providers: say(f"full-width {heads} heads {tokens} tokens {p}", c.run(p), want)
for rows in ("576", "512"):
    for heads, batch, columns in ((64, 140, 640), (128, 140, 2048)):
        for scale in (0.1, 0.02):
            c = F.Case(rows, dev, batch=batch, heads=heads, columns=columns, scale=scale, block_size=64, seed=3)
            out, want = None, c.expected()[0]
            for p in providers: say(f"{rows} {heads} heads {columns} keys scale {scale} {p}", c.run(p)[0], want)
