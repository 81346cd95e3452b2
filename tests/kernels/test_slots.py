"""Slots of picked rows, by each provider against a loop over the definition."""

import pytest
import torch
from mla_kernels.slots import PROVIDERS, columns_in_use, request_rows_to_slots
from test_sparse_mla import skip_unless_served

PAGE = 64
FAR = 2**31 - 1


@pytest.fixture(params=[pytest.param(p, marks=pytest.mark.gpu) if p == "sm90" else p for p in PROVIDERS])
def provider(request):
    skip_unless_served(request.param)
    return request.param


def expected(rows, requests, table, prefills=None, starts=None, page=PAGE):
    slots = []
    for token, picked in enumerate(rows.tolist()):
        request, prefill = int(requests[token]), -1 if prefills is None else int(prefills[token])
        line = []
        for row in picked:
            if row < 0:
                line.append(-1)
            elif prefill >= 0:
                line.append(int(starts[prefill]) + row if prefill < len(starts) else -1)
            elif not 0 <= request < len(table) or row // page >= table.shape[1]:
                line.append(-1)
            else:
                block = int(table[request, row // page])
                line.append(block * page + row % page if block >= 0 else -1)
        slots.append(line)
    return torch.tensor(slots, dtype=torch.int32).view(rows.shape)


def batch(columns, seed=0):
    gen = torch.Generator().manual_seed(seed)
    table = torch.randperm(60, generator=gen).int().view(4, 15)
    table[2, 11:] = -1  # of a shorter request
    rows = torch.randint(-1, 15 * PAGE + 70, (9, columns), generator=gen, dtype=torch.int32)
    rows[:, 0] = torch.tensor([-1, 0, 63, 64, 15 * PAGE - 1, 15 * PAGE, FAR, -FAR, 5])
    requests = torch.tensor([0, 0, 1, 2, 2, 3, 3, 7, -1, 99], dtype=torch.int32)  # two of no request, one to spare
    return rows, requests, table


@pytest.mark.parametrize("columns", [1, 100, 512, 2048])
def test_slots(device, provider, columns):
    rows, requests, table = batch(columns, columns)
    slots = request_rows_to_slots(rows.to(device), requests.to(device), table.to(device), PAGE, provider=provider)
    assert torch.equal(slots.cpu(), expected(rows, requests, table))


@pytest.mark.parametrize("page", [1, 3, 48, 256, FAR])
def test_blocks_of_any_size(device, provider, page):
    rows, requests, table = batch(200)
    if page == FAR:  # all rows but the last that there is are in the first block, and a slot has 31 bits
        table[:, 0], table[:, 1:] = 0, -1
    slots = request_rows_to_slots(rows.to(device), requests.to(device), table.to(device), page, provider=provider)
    assert torch.equal(slots.cpu(), expected(rows, requests, table, page=page))


@pytest.mark.parametrize("columns, wider, first", [(96, 5, 0), (96, 8, 3), (97, 4, 4)])
def test_rows_that_start_anywhere(device, provider, columns, wider, first):
    """Rows and slots with and without 16-byte accesses, a part of a block table, and nothing written beside it."""
    rows, requests, table = batch(columns)
    wide = torch.full((2, 9, first + columns + wider), 7, dtype=torch.int32, device=device)
    into = slice(first, first + columns)
    wide[0, :, into] = rows.to(device)
    tables = torch.full((4, 40), 8, dtype=torch.int32, device=device)
    tables[:, 1:16] = table.to(device)
    slots = request_rows_to_slots(
        wide[0, :, into], requests.to(device), tables[:, 1:16], PAGE, out=wide[1, :, into], provider=provider
    )
    assert torch.equal(slots.cpu(), expected(rows, requests, table))
    wide[..., into] = 7
    assert (wide == 7).all()


def test_rows_of_a_gathered_workspace(device, provider):
    rows, requests, table = batch(300)
    prefills = torch.tensor([-1, -1, 0, 0, 1, 1, 2, 5, -1], dtype=torch.int32)  # 5 is past the starts
    starts = torch.tensor([0, 1000, 70000], dtype=torch.int32)
    rows[rows > 10**6] = 3  # a workspace has no row of 2^31
    given = (x.to(device) for x in (prefills, starts))
    slots = request_rows_to_slots(
        rows.to(device), requests.to(device), table.to(device), PAGE, *given, provider=provider
    )
    assert torch.equal(slots.cpu(), expected(rows, requests, table, prefills, starts))


def test_in_place_and_in_a_wider_buffer(device, provider):
    """vLLM's buffers of picks are wider and longer than a step needs."""
    rows, requests, table = batch(96)
    wide = torch.full((20, 128), 7, dtype=torch.int32)
    wide[:9, :96] = rows
    wide, view = wide.to(device), slice(0, 9)
    part = wide[view, :96]
    out = request_rows_to_slots(part, requests.to(device), table.to(device), PAGE, out=part, provider=provider)
    assert out.data_ptr() == wide.data_ptr()
    assert torch.equal(wide[view, :96].cpu(), expected(rows, requests, table))
    assert (wide[:, 96:] == 7).all() and (wide[9:] == 7).all()


@pytest.mark.parametrize("shape", [(0, 2048), (3, 0)])
def test_no_tokens_or_columns(device, provider, shape):
    _, requests, table = batch(1)
    none = torch.empty(shape, dtype=torch.int32, device=device)
    slots = request_rows_to_slots(none, requests.to(device), table.to(device), PAGE, provider=provider)
    assert slots.shape == shape


@pytest.mark.gpu
def test_native_slots_in_a_graph_behind_what_writes_their_arguments(device):
    """Captured, not run; and a replay reads what the kernel in front of it has just written."""
    skip_unless_served("sm90")
    rows, requests, table = (x.to(device) for x in batch(2048))
    picked, out = torch.empty_like(rows), torch.full_like(rows, 7)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(rows, 0, out=picked)
        request_rows_to_slots(picked, requests, table, PAGE, out=out, provider="sm90")
    assert (out == 7).all()
    for seed in range(20):
        rows.copy_(batch(2048, seed)[0])
        graph.replay()
        assert torch.equal(out.cpu(), expected(rows.cpu(), requests.cpu(), table.cpu()))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(rows=torch.zeros(2, 3, dtype=torch.int64)), "rows must be int32 of 2 dimensions"),
        (dict(block_table=torch.zeros(4, 2, dtype=torch.int32).T), "block_table must be contiguous in its last"),
        (dict(request_of_token=torch.zeros(1, dtype=torch.int32)), "request_of_token has 1 elements for 2 tokens"),
        (dict(prefill_of_token=torch.zeros(2, dtype=torch.int32)), "prefill_of_token and workspace_starts go"),
        (dict(block_size=0), "block_size must be at least 1, and is 0"),
        (dict(out=torch.zeros(2, 4, dtype=torch.int32)), r"out must be \[2, 3\], got \[2, 4\]"),
        (dict(out=torch.zeros(3, dtype=torch.int32)), "out must be int32 of 2 dimensions"),
        (dict(rows=torch.zeros(3, 2, dtype=torch.int32).T), "rows must be contiguous in its last dimension"),
        (dict(block_table=torch.zeros(2, 4)), "block_table must be int32 of 2 dimensions"),
        (dict(block_table=torch.zeros(2, 4, device="meta").int()), "block_table must be on cpu, and is on meta"),
        (
            dict(prefill_of_token=torch.zeros(1).int(), workspace_starts=torch.zeros(1).int()),
            "prefill_of_token has 1 elements for 2 tokens",
        ),
        (dict(provider="cuda"), "slots have no provider 'cuda'; they have reference, triton, sm90"),
    ],
)
def test_refusals(change, words):
    """A right call before does not let the wrong one pass unchecked."""
    arguments = dict(
        rows=torch.zeros(2, 3, dtype=torch.int32), request_of_token=torch.zeros(2, dtype=torch.int32),
        block_table=torch.zeros(2, 4, dtype=torch.int32), block_size=PAGE,
    )  # fmt: skip
    request_rows_to_slots(**arguments)
    one_column = torch.zeros(1, 2, dtype=torch.int32).T  # whose stride leads nowhere
    request_rows_to_slots(**arguments | dict(block_table=one_column))
    with pytest.raises(ValueError, match=words):
        request_rows_to_slots(**arguments | change)


@pytest.mark.parametrize("columns", [1, 100, 1024, 1025, 2048])
def test_columns_in_use(device, columns):
    """Up to the last slot of each token, wherever there are none, and whatever lies beside its columns."""
    gen = torch.Generator().manual_seed(columns)
    wide = torch.randint(0, FAR, (9, columns + 5), generator=gen, dtype=torch.int32)
    slots, want = wide[:, 3 : columns + 3], torch.randint(0, columns + 1, (9,), generator=gen, dtype=torch.int32)
    want[:3] = torch.tensor([0, 1, columns])
    for token, used in enumerate(want):
        slots[token, torch.rand(columns, generator=gen) < 0.3] = -1
        slots[token, used:] = -1 - token
        slots[token, max(used - 1, 0) : used] = 0
    assert torch.equal(columns_in_use(wide.to(device)[:, 3 : columns + 3]).cpu(), want)
    assert not columns_in_use(slots[:, :0].to(device)).any()
