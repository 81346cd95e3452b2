# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""Plain torch for `slots.py` and `indexer.py`: slots in integers, scores in float32,
picks by a stable sort. Other providers are compared with it."""

import torch


def slots_reference(
    rows: torch.Tensor,
    request_of_token: torch.Tensor,
    block_table: torch.Tensor,
    prefill_of_token: torch.Tensor | None,
    workspace_starts: torch.Tensor | None,
    out: torch.Tensor,
    block_size: int,
) -> None:
    request = request_of_token[: len(rows), None].long()
    block = rows.long() // block_size
    requests, blocks = block_table.shape
    cached = (rows >= 0) & (block < blocks) & (request >= 0) & (request < requests)
    slot = torch.full(rows.shape, -1, dtype=torch.int64, device=rows.device)
    number = block_table[request.expand_as(rows)[cached], block[cached]].long()
    slot[cached] = torch.where(
        number >= 0, number * block_size + rows[cached] % block_size, -1
    )
    if prefill_of_token is not None:
        prefill = prefill_of_token[: len(rows), None].long()
        known = (prefill >= 0) & (prefill < len(workspace_starts))
        start = torch.full_like(prefill, -1)
        start[known] = workspace_starts[prefill[known]].long()
        gathered = torch.where((rows >= 0) & (start >= 0), start + rows, -1)
        slot = torch.where(prefill >= 0, gathered, slot)
    out.copy_(slot)


def _score(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim], [keys, dim] and [tokens, heads] to [tokens, keys]."""
    products = torch.einsum("thd,kd->thk", q.float(), keys).relu_()
    return torch.einsum("thk,th->tk", products, weights)


def scores_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    key_scales: torch.Tensor | None,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    width: int | None,
    out: torch.Tensor,
) -> None:
    values = keys.float()
    if key_scales is not None:
        values = values * key_scales[:, None]
    out.fill_(float("-inf"))
    for token in range(len(q)):
        start = max(int(starts[token]), 0)
        end = min(int(ends[token]), len(keys))
        first = 0 if width is None else int(starts[token])
        end = min(end, first + out.shape[1])
        if start < end:
            part = slice(token, token + 1)
            out[part, start - first : end - first] = _score(
                q[part], values[start:end], weights[part]
            )


def paged_scores_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
) -> None:
    _, q_len, _, dim = q.shape
    blocks, page, _ = cache.shape
    out.fill_(float("-inf"))
    for token, query in enumerate(q.flatten(0, 1)):
        length = max(0, min(int(context_lens[token]), out.shape[1]))
        position = torch.arange(length, device=q.device)
        position = position[position // page < block_table.shape[1]]
        number = block_table[token // q_len, position // page].long()
        known = (number >= 0) & (number < blocks)
        position, number = position[known], number[known]
        raw = cache.flatten(1)[number]
        row = torch.arange(len(number), device=q.device)[:, None]
        at = (position % page)[:, None]
        value = raw[row, at * dim + torch.arange(dim, device=q.device)]
        scale = raw[row, page * dim + at * 4 + torch.arange(4, device=q.device)]
        keys = value.contiguous().view(torch.float8_e4m3fn).float()
        keys = keys * scale.contiguous().view(torch.float32)
        out[token, position] = _score(query[None], keys, weights[token : token + 1])[0]


def topk_reference(
    scores: torch.Tensor,
    starts: torch.Tensor | None,
    ends: torch.Tensor,
    k: int,
    out: torch.Tensor,
) -> None:
    out.fill_(-1)
    for row in range(len(scores)):
        start = 0 if starts is None else max(int(starts[row]), 0)
        part = scores[row, start : max(int(ends[row]), start)]
        picked = part.sort(descending=True, stable=True).indices[:k].sort().values
        out[row, : len(picked)] = picked.int()
