import os, sys
sys.path[:0] = [os.environ["MLA_REPO"] + "/tests/kernels"]
import conftest, torch
from pathlib import Path
from mla_kernels import native
native.LIBRARY = Path(os.environ["MLA_LIB"])
import test_flash_mla
for rows in ("584", "656"):
    for batch, heads, columns in ((20, 50, 1100), (134, 64, 400)):
        case = test_flash_mla.Case(rows, torch.device("cuda"), batch=batch, heads=heads, columns=columns, extra=40)
        for cache, indices, lengths in case.pools:
            indices[::2, :, ::3] = len(cache.keys)
            lengths[1::4] = 0
        case.check("sm90")
torch.cuda.synchronize()
