# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""From rows counted within a request, as an indexer picks them, to slots of the paged
cache; and how many columns of slots are in use."""

import torch
import triton
import triton.language as tl

from .flash_mla import PROVIDERS, pick_provider
from .interface import remember

_BLOCK = 256
_valid: set[tuple] = set()


def request_rows_to_slots(
    rows: torch.Tensor,
    request_of_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    prefill_of_token: torch.Tensor | None = None,
    workspace_starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    provider: str | None = None,
) -> torch.Tensor:
    """Slots of the rows that each token attends to.

    `slot = block_table[request, row // block_size] * block_size + row % block_size`,
    and -1 where there is none: for a negative row, a row past the block table, and a
    token of no request (negative or past the table, as in the padding of CUDA graphs).
    Tokens of a prefill whose rows lie in a gathered workspace get
    `workspace_starts[prefill] + row` instead.

    Args:
        rows: int32 `[tokens, columns]`.
        request_of_token: int32 `[>= tokens]`.
        block_table: int32 `[requests, blocks]`.
        block_size: rows of a block.
        prefill_of_token: int32 `[>= tokens]`, the prefill of each token, negative for
            tokens whose rows are in the cache; None is all of them.
        workspace_starts: int32 `[prefills]`, with `prefill_of_token`.
        out: int32 `[tokens, columns]`, rows contiguous, may be `rows`; allocated when
            None.
        provider: "reference", "triton" or "sm90" (csrc/slots.cu); None picks by the
            device.

    Returns:
        `out`.

    Raises:
        ValueError: an argument does not fit. One sentence.
        RuntimeError: "sm90" without the native library or on another GPU.
    """
    if out is None:
        out = torch.empty(rows.shape, dtype=torch.int32, device=rows.device)
    tensors = {
        "rows": rows,
        "request_of_token": request_of_token,
        "block_table": block_table,
        "prefill_of_token": prefill_of_token,
        "workspace_starts": workspace_starts,
        "out": out,
    }
    signature = (
        block_size,
        *(None if x is None else (x.shape, x.stride(), x.dtype, x.device)
          for x in tensors.values()),
    )  # fmt: skip
    if signature not in _valid:
        _validate(tensors, block_size)
        remember(_valid, signature)
    provider = provider or pick_provider(rows.device)
    if provider not in PROVIDERS:
        raise ValueError(
            f"slots have no provider {provider!r}; they have {', '.join(PROVIDERS)}."
        )
    if provider == "reference":
        from .indexer_reference import slots_reference

        slots_reference(**tensors, block_size=block_size)
    elif provider == "sm90":
        from .sm90 import slots_sm90

        slots_sm90(**tensors, block_size=block_size)
    elif rows.numel():
        tokens, columns = rows.shape
        with torch.cuda.device_of(rows):
            _slots_kernel[(tokens, triton.cdiv(columns, _BLOCK))](
                rows,
                request_of_token,
                block_table,
                prefill_of_token,
                workspace_starts,
                out,
                rows.stride(0),
                block_table.stride(0),
                out.stride(0),
                columns,
                *block_table.shape,
                0 if workspace_starts is None else len(workspace_starts),
                block_size,
                BLOCK=_BLOCK,
                num_warps=2,
            )
    return out


def columns_in_use(slots: torch.Tensor) -> torch.Tensor:
    """How many of its leftmost columns each token needs: up to its last that is not
    negative.

    Args:
        slots: int32 `[tokens, columns]`, rows contiguous, at least one token.

    Returns:
        int32 `[tokens]`.
    """
    tokens, columns = slots.shape
    used = torch.empty(tokens, dtype=torch.int32, device=slots.device)
    with torch.cuda.device_of(slots):
        _columns_kernel[(tokens,)](
            slots, used, slots.stride(0), columns, BLOCK=4 * _BLOCK, num_warps=4
        )
    return used


def _validate(tensors: dict[str, torch.Tensor | None], block_size: int) -> None:
    rows = tensors["rows"]
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, and is {block_size}.")
    if (tensors["prefill_of_token"] is None) != (tensors["workspace_starts"] is None):
        raise ValueError("prefill_of_token and workspace_starts go together.")
    for name, x in tensors.items():
        if x is None:
            continue
        dims = 2 if name in ("rows", "block_table", "out") else 1
        if x.dtype != torch.int32 or x.dim() != dims:
            raise ValueError(
                f"{name} must be int32 of {dims} dimensions, got {x.dtype} "
                f"{list(x.shape)}."
            )
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, not stride "
                f"{x.stride(-1)}."
            )
        if x.device != rows.device:
            raise ValueError(f"{name} must be on {rows.device}, and is on {x.device}.")
        if name.endswith("_of_token") and len(x) < len(rows):
            raise ValueError(
                f"{name} has {len(x)} elements for {len(rows)} tokens of rows."
            )
    if tensors["out"].shape != rows.shape:
        raise ValueError(
            f"out must be {list(rows.shape)}, got {list(tensors['out'].shape)}."
        )


# None may select a new kernel while requests wait.
@triton.jit(
    do_not_specialize=["columns", "requests", "blocks", "prefills", "table_stride"]
)
def _slots_kernel(
    rows_ptr,
    request_ptr,
    table_ptr,
    prefill_ptr,
    starts_ptr,
    out_ptr,
    rows_stride,
    table_stride,
    out_stride,
    columns,
    requests,
    blocks,
    prefills,
    block_size,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    row = tl.load(rows_ptr + token * rows_stride + column, mask=inside, other=-1)
    request = tl.load(request_ptr + token).to(tl.int64)
    block = row // block_size
    cached = (row >= 0) & (block < blocks) & (request >= 0) & (request < requests)
    number = tl.load(table_ptr + request * table_stride + block, mask=cached, other=-1)
    slot = tl.where(cached & (number >= 0), number * block_size + row % block_size, -1)
    if prefill_ptr is not None:
        prefill = tl.load(prefill_ptr + token).to(tl.int64)
        start = tl.load(
            starts_ptr + prefill, mask=(prefill >= 0) & (prefill < prefills), other=-1
        )
        gathered = tl.where((row >= 0) & (start >= 0), start + row, -1)
        slot = tl.where(prefill >= 0, gathered, slot)
    tl.store(out_ptr + token * out_stride + column, slot, mask=inside)


@triton.jit(do_not_specialize=["stride", "columns"])
def _columns_kernel(slots_ptr, used_ptr, stride, columns, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    used = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, columns, BLOCK):
        column = start + lane
        slot = tl.load(
            slots_ptr + token * stride + column, mask=column < columns, other=-1
        )
        used = tl.where(slot >= 0, column + 1, used)  # columns ascend
    tl.store(used_ptr + token, tl.max(used, 0))
