# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""The rows that vLLM's caches hold, and what their bytes mean as keys: the definition
that providers follow.

    BF16   1024 or 1152 bytes: 512 or 576 BF16; V3.2 and GLM-5 have 576, of which the
           last 64 carry RoPE
    E4M3   512 bytes: 512 E4M3, one scale for the whole tensor, not in the row
    V4     584 bytes: 448 E4M3 with 7 UE8M0 scales of 64, 64 BF16 with RoPE
    V32    656 bytes: 512 E4M3 with 4 float32 scales of 128, 64 BF16 with RoPE

A key is a whole row (512 or 576 values), its value the first 512 of them. `V32` holds
these in the order of the table, in one piece. `V4` does not: a block first has the 576
bytes of values of each of its rows, then 8 bytes of each, its scales and one byte of
padding. Blocks may lie any distance apart.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowFormat:
    """How rows of `[blocks, block_size, width]` become keys.

    name: of the format, for providers.
    dtypes: what `cache` may be.
    widths: {key dimensions: width}, in elements of `cache`.
    keys: of (cache, rows): flat rows (block * block_size + row) of any shape, all in
        the cache, as float32 `[*rows.shape, key dimensions]`.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    widths: dict[int, int]
    keys: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _whole(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    page = cache.shape[1]
    # As bytes: torch does not pick rows of E4M3.
    return cache.view(torch.uint8)[rows // page, rows % page]


def _full_width(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return _whole(cache, rows).view(cache.dtype).float()


def _v4(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    page = cache.shape[1]
    block, row = (rows // page)[..., None], (rows % page)[..., None]
    blocks = cache.view(torch.uint8).flatten(1)
    values = blocks[block, row * 576 + torch.arange(576, device=rows.device)]
    scales = blocks[block, page * 576 + row * 8 + torch.arange(7, device=rows.device)]
    scales = (
        scales.contiguous().view(torch.float8_e8m0fnu).float().repeat_interleave(64, -1)
    )
    nope = values[..., :448].contiguous().view(torch.float8_e4m3fn).float() * scales
    return torch.cat(
        [nope, values[..., 448:].contiguous().view(torch.bfloat16).float()], -1
    )


def _v32(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    raw = _whole(cache, rows)
    nope, scales, rope = (part.contiguous() for part in raw.split((512, 16, 128), -1))
    scales = scales.view(torch.float32).repeat_interleave(128, -1)
    return torch.cat(
        [
            nope.view(torch.float8_e4m3fn).float() * scales,
            rope.view(torch.bfloat16).float(),
        ],
        -1,
    )


_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
BF16 = RowFormat("bf16", (torch.bfloat16,), {512: 512, 576: 576}, _full_width)
E4M3 = RowFormat("e4m3", (torch.float8_e4m3fn,), {512: 512}, _full_width)
V4 = RowFormat("v4", _BYTES, {512: 584}, _v4)
V32 = RowFormat("v32", _BYTES, {576: 656}, _v32)
