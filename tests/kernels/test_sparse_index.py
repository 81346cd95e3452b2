"""The index table against a loop over positions, written from the meaning of the columns."""

import pytest
import torch
from mla_kernels import build_sparse_index_table, sparse_index

STALE = 7_777_777


class Batch:
    """A decode-first batch with block tables of shuffled blocks, stale past what a request uses."""

    def __init__(self, device, query_lens, seq_lens, ratio, topk=None, padding=0, seed=0):
        gen = torch.Generator().manual_seed(seed)
        self.device, self.ratio, self.topk = device, ratio, topk
        self.query_lens, self.seq_lens, self.padding = query_lens, seq_lens, padding
        requests, tokens = len(query_lens), sum(query_lens)
        self.tokens = tokens + padding
        self.block = {1: 0, 4: 64, 128: 2}[ratio]
        self.swa_table = self.block_table(gen, 64, max(seq_lens))
        self.compressed_table = self.block_table(gen, self.block, max(seq_lens) // ratio) if self.block else None
        self.token_to_request = torch.full((self.tokens,), STALE, dtype=torch.int32)
        self.token_to_request[:tokens] = torch.repeat_interleave(
            torch.arange(requests, dtype=torch.int32), torch.tensor(query_lens)
        )
        self.valid = torch.arange(self.tokens) < tokens
        self.picked = None
        if topk:
            self.picked = torch.full((self.tokens, topk), STALE, dtype=torch.int32)
            for token, (_, position) in enumerate(self.positions()):
                rows = torch.randperm((position + 1) // ratio, generator=gen)[:topk]
                self.picked[token] = -1
                self.picked[token, : len(rows)] = rows

    def block_table(self, gen, block, rows):
        blocks = -(-max(rows, 1) // block)
        table = torch.full((len(self.seq_lens), blocks + 3), STALE, dtype=torch.int32)
        order = torch.randperm(len(self.seq_lens) * blocks, generator=gen).int()
        table[:, :blocks] = order.view(len(self.seq_lens), blocks)
        return table

    def positions(self):
        for request, (queries, length) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            for i in range(queries):
                yield request, length - queries + i

    def width(self):
        longest = max(self.seq_lens) // self.ratio
        return 0 if self.ratio == 1 else self.topk or longest

    def build(self, first=0, tokens=None):
        to = lambda x: None if x is None else x.to(self.device)  # noqa: E731
        starts = torch.tensor([0, *self.query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return build_sparse_index_table(
            to(self.token_to_request), to(self.valid), to(starts),
            torch.tensor(self.seq_lens, dtype=torch.int32, device=self.device), to(self.swa_table), 64,
            self.tokens if tokens is None else tokens, self.ratio, to(self.compressed_table), self.block or 1,
            self.width(), to(self.picked), first,
        )  # fmt: skip


CASES = [
    ([1, 1, 1], [1, 128, 129]),
    ([1, 2, 5, 300], [4, 127, 133, 300]),
    ([1, 1, 130], [3000, 700, 900]),
    ([256, 64], [256, 8192]),
]


@pytest.mark.parametrize("query_lens, seq_lens", CASES)
@pytest.mark.parametrize("ratio, topk", [(1, None), (4, 512), (4, 64), (128, None)])
def test_table(device, query_lens, seq_lens, ratio, topk):
    batch = Batch(device, query_lens, seq_lens, ratio, topk, padding=3, seed=sum(seq_lens))
    table = batch.build()
    indices, lens, visible = (x.cpu() for x in (table.indices, table.lens, table.visible))
    assert indices.shape[1] % 16 == 0 and indices.shape[1] >= 128 + batch.width()
    for token, (request, position) in enumerate(batch.positions()):
        window = range(max(0, position - 127), position + 1)
        expected = [int(batch.swa_table[request, p // 64]) * 64 + p % 64 for p in window]
        assert indices[token, : len(expected)].tolist() == expected
        assert (indices[token, len(expected) : 128] == -1).all()
        assert visible[token] == position + 1
        count = 0 if ratio == 1 else (position + 1) // ratio
        rows = range(count) if topk is None else batch.picked[token, : min(count, topk)].tolist()
        block = batch.block or 1
        expected = [int(batch.compressed_table[request, r // block]) * block + r % block for r in rows]
        assert lens[token] == 128 + len(expected)
        assert indices[token, 128 : 128 + len(expected)].tolist() == expected
    padding = slice(len(list(batch.positions())), None)
    assert (visible[padding] == 0).all() and (lens[padding] == 128).all() and (indices[padding] == 0).all()


@pytest.mark.parametrize("ratio, topk", [(1, None), (4, 64), (128, None)])
def test_some_of_the_tokens(device, ratio, topk):
    """As those of a whole table: the end of a request, others, and padding."""
    batch = Batch(device, *CASES[1], ratio, topk, padding=3)
    whole, part = batch.build(), batch.build(5, batch.tokens - 6)
    for name in ("indices", "lens", "visible"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[5:-1])


def test_picks_that_are_no_rows_are_missing(device):
    """Stale picks among good ones, negative and beyond the rows that the token sees."""
    batch = Batch(device, [1, 2], [300, 400], 4, 64)
    garbage = torch.tensor([75, 100, 2**31 - 1, -(2**31), -2], dtype=torch.int32)  # position 299 sees rows 0 to 74
    want = batch.build().indices.cpu()
    batch.picked[0, 3:8] = garbage
    want[0, 128 + 3 : 128 + 8] = -1
    assert torch.equal(batch.build().indices.cpu(), want)


def test_nothing_is_written_behind_the_table(device, monkeypatch):
    """Its last rows are of a token, then of padding; widths are no multiple of what a program writes."""
    empty, behind = torch.empty, []

    def guarded(*shape, **options):
        size = torch.Size(shape).numel()
        store = empty(size + 256, **options).fill_(7)
        behind.append(store[size:])
        return store[:size].view(shape)

    for padding in (0, 3):
        batch = Batch(device, [1, 2], [300, 400], 4, 64, padding=padding)
        with monkeypatch.context() as patch:
            patch.setattr(sparse_index.torch, "empty", guarded)
            batch.build()
    assert len(behind) >= 6 and all((store == 7).all() for store in behind)


@pytest.mark.gpu
def test_a_gpu_that_is_not_the_current_one(second_gpu):
    test_table(second_gpu, *CASES[1], 4, 64)


def test_no_tokens(device):
    batch = Batch(device, [1], [5], 1)
    batch.tokens = 0
    assert batch.build().indices.shape == (0, 128)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(seq_lens=torch.zeros(3, 2, dtype=torch.int32)[:, 0]), "seq_lens must be contiguous in its last"),
        (dict(swa_block_table=torch.zeros(4, 3, dtype=torch.int32).T), "swa_block_table must be contiguous"),
        (dict(token_to_request=torch.zeros(6, dtype=torch.int32)[::2]), "token_to_request must be contiguous"),
        (dict(is_valid_token=torch.ones(6, dtype=torch.bool)[::2]), "is_valid_token must be contiguous"),
        (dict(query_start_loc=torch.zeros(8, dtype=torch.int32)[::2]), "query_start_loc must be contiguous"),
        (dict(compressed_block_table=torch.zeros(4, 3, dtype=torch.int32).T), "compressed_block_table must be"),
        (dict(topk_indices=torch.zeros(64, 3, dtype=torch.int32).T), "topk_indices must be contiguous"),
        (dict(compressed_block_table=None, topk_indices=None), "compressed_width is 64, and there is no"),
        (dict(topk_indices=torch.zeros(3, 32, dtype=torch.int32)), "topk_indices has 32 columns, and"),
    ],
)
def test_refusals(change, words):
    table = torch.zeros(3, 4, dtype=torch.int32)
    arguments = dict(
        token_to_request=torch.arange(3, dtype=torch.int32), is_valid_token=torch.ones(3, dtype=torch.bool),
        query_start_loc=torch.arange(4, dtype=torch.int32), seq_lens=torch.ones(3, dtype=torch.int32),
        swa_block_table=table, swa_block_size=64, num_tokens=3, compress_ratio=4, compressed_block_table=table,
        compressed_block_size=64, compressed_width=64, topk_indices=torch.zeros(3, 64, dtype=torch.int32),
    )  # fmt: skip
    one_column = torch.zeros(1, 3, dtype=torch.int32).T  # whose stride leads nowhere
    build_sparse_index_table(**arguments | dict(swa_block_table=one_column, num_tokens=0))
    with pytest.raises(ValueError, match=words):
        build_sparse_index_table(**arguments | change)
