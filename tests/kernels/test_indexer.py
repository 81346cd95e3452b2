"""The indexer's scores and picks against the definition in float64, and against torch's own top-k."""

import re
from pathlib import Path

import pytest
import torch
from mla_kernels import indexer, sm90
from test_sparse_mla import skip_unless_served

FP8 = torch.float8_e4m3fn
INF = float("inf")
PROVIDERS = pytest.mark.parametrize("provider", ["reference", "triton"])
TOPK_PROVIDERS = pytest.mark.parametrize(
    "provider", ["reference", "triton", pytest.param("sm90", marks=pytest.mark.gpu)]
)


def draw(gen, *shape, std=1.0):
    return torch.randn(*shape, generator=gen) * std


def query(gen, tokens, heads, dim, dtype):
    q = draw(gen, tokens, heads, dim, std=8.0 if dtype == FP8 else 1.0).to(dtype)
    return q, draw(gen, tokens, heads)


def definition(q, keys, weights):
    """[tokens, heads, dim], [keys, dim] and [tokens, heads] to [tokens, keys], in float64."""
    products = torch.einsum("thd,kd->thk", q.double(), keys.double()).relu()
    return torch.einsum("thk,th->tk", products, weights.double())


def apart(x, device):
    """Its rows in a wider tensor."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 16, dtype=x.dtype, device=device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def close(have, want, clean=True):
    have = have.cpu().double()
    seen = want != -INF
    assert not clean or torch.equal(have != -INF, seen)
    assert ((have - want)[seen].abs() <= 1e-5 * want[seen].abs().amax() + 1e-6).all()


@PROVIDERS
@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
@pytest.mark.parametrize("heads", [32, 64, 80])
@pytest.mark.parametrize("from_start, clean", [(False, True), (True, True), (False, False), (True, False)])
def test_scores(device, provider, dtype, heads, from_start, clean):
    gen = torch.Generator().manual_seed(heads)
    keys = draw(gen, 150, 128, std=8.0 if dtype == FP8 else 1.0).to(dtype)
    scales = None if dtype == torch.bfloat16 else torch.rand(150, generator=gen) + 0.1
    q, weights = query(gen, 8, heads, 128, dtype)
    # Two requests of a chunk, a token without a key, one that sees all, one past the end, one before the start.
    starts = torch.tensor([0, 0, 60, 60, 60, 0, 140, -5], dtype=torch.int32)
    ends = torch.tensor([1, 59, 61, 150, 60, 150, 170, 3], dtype=torch.int32)
    width = 100 if from_start else None
    values = keys.double() * (1 if scales is None else scales.double()[:, None])
    whole = definition(q, values, weights)
    want = torch.full((8, 150), -INF, dtype=torch.float64)
    for token, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        first = start if from_start else 0
        start, end = max(start, 0), min(end, 150)
        want[token, start - first : end - first] = whole[token, start:end]
    q, scales, starts, ends = (None if x is None else x.to(device) for x in (q, scales, starts, ends))
    keys, weights = apart(keys, device), apart(weights, device)
    scores = indexer.indexer_scores(q, keys, scales, weights, starts, ends, width, clean=clean, provider=provider)
    close(scores, want[:, :width], clean)


def test_a_grid_for_more_keys_than_its_second_dimension_has_programs(device, monkeypatch):
    """Those of a chunk's requests together; 65535 is the most that CUDA launches."""
    grids = []

    class Launch:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(indexer, "_scores_kernel", Launch())
    given = {name: x.to(device) for name, x in arguments().items()}
    given |= {"keys": given["keys"][:1].expand(65536 * 64, 16), "key_scales": None}
    indexer.indexer_scores(**given, provider="triton")
    ((first, *rest),) = grids
    assert first == 2 * 65536 and max(rest, default=1) <= 65535


def pages(gen, blocks, page, dim, padding=0):
    """The cache as vLLM has it (a block's values, then its scales), and its keys."""
    values, scales = draw(gen, blocks, page, dim, std=8.0).to(FP8), torch.rand(blocks, page, generator=gen) + 0.1
    raw = torch.cat([values.view(torch.uint8).flatten(1), scales.view(torch.uint8).flatten(1)], 1)
    store = torch.full((blocks, raw.shape[1] + padding), 255, dtype=torch.uint8)  # 255 is NaN
    store[:, : raw.shape[1]] = raw
    cache = store.as_strided((blocks, page, dim + 4), (store.shape[1], dim + 4, 1))
    return cache, values.double() * scales.double()[..., None]


@PROVIDERS
@pytest.mark.parametrize("q_len, padding, clean", [(1, 0, True), (1, 448, True), (3, 0, True), (3, 0, False)])
def test_scores_of_pages(device, provider, q_len, padding, clean):
    gen = torch.Generator().manual_seed(q_len)
    cache, keys = pages(gen, 9, 64, 128, padding)
    table = torch.tensor([[4, 2, 7, 1000], [0, 8, -1, 5]], dtype=torch.int32)  # stale past what a request uses
    lengths = torch.tensor([[190 - q_len + i + 1 for i in range(q_len)], [65 + i for i in range(q_len)]])
    q, weights = query(gen, 2 * q_len, 64, 128, FP8)
    want = torch.full((2 * q_len, 200), -INF, dtype=torch.float64)
    for token in range(2 * q_len):
        length = int(lengths.view(-1)[token])
        request = keys[table[token // q_len, : -(-length // 64)].long()].flatten(0, 1)[:length]
        want[token, :length] = definition(q[token : token + 1], request, weights[token : token + 1])[0]
    store = cache if not padding else cache.as_strided((9, cache.stride(0)), (cache.stride(0), 1))
    store = store.to(device)
    cache = store if not padding else store.as_strided(cache.shape, cache.stride())
    given = q.view(2, q_len, 64, 128).to(device), cache.unsqueeze(2), weights.to(device), lengths.int().to(device)
    close(indexer.paged_indexer_scores(*given, table.to(device), 200, clean=clean, provider=provider), want, clean)


@PROVIDERS
def test_scores_of_pages_that_are_not_there(device, provider):
    """Numbers of no block, and positions behind a row of the table, which is a part of a wider one."""
    gen = torch.Generator().manual_seed(4)
    cache, keys = pages(gen, 9, 64, 128)
    wide = torch.tensor([[4, 9, 7, 3], [-1, 8, 2**31 - 1, 5]], dtype=torch.int32, device=device)
    q, weights = query(gen, 2, 64, 128, FP8)
    want = torch.full((2, 250), -INF, dtype=torch.float64)
    for token, column, block in ((0, 0, 4), (0, 2, 7), (1, 1, 8)):
        part = slice(token, token + 1)
        want[token, column * 64 : column * 64 + 64] = definition(q[part], keys[block], weights[part])[0]
    lengths = torch.tensor([250, 250], dtype=torch.int32, device=device)
    have = indexer.paged_indexer_scores(
        q.view(2, 1, 64, 128).to(device), cache.to(device), apart(weights, device), lengths, wide[:, :3], 250,
        provider=provider,
    )  # fmt: skip
    close(have, want)


@PROVIDERS
@pytest.mark.parametrize("how", ["a column", "expanded"])
def test_lengths_that_do_not_lie_side_by_side(device, provider, how):
    gen = torch.Generator().manual_seed(1)
    batch, q_len = (3, 1) if how == "a column" else (1, 3)
    cache, keys = pages(gen, 9, 64, 128)
    table = torch.tensor([[4, 2], [0, 8], [3, 5]], dtype=torch.int32)[:batch].to(device)
    q, weights = query(gen, 3, 64, 128, FP8)
    given = q.view(batch, q_len, 64, 128).to(device), cache.to(device), weights.to(device)
    wide = torch.tensor([[70, 1], [128, 2], [-9, 3]], dtype=torch.int32, device=device)
    lengths = wide[:, 0] if how == "a column" else wide[:1, :1].expand(1, 3)
    want = torch.full((3, 128), -INF, dtype=torch.float64)
    for token, length in enumerate(lengths.flatten().clamp(min=0).tolist()):
        request = keys[table[token // q_len].long().cpu()].flatten(0, 1)[:length]
        want[token, :length] = definition(q[token : token + 1], request, weights[token : token + 1])[0]
    close(indexer.paged_indexer_scores(*given, lengths, table, 128, provider=provider), want)


@pytest.mark.parametrize("hardware", [True, False])
def test_every_e4m3_byte_by_bits_and_by_hardware(device, monkeypatch, hardware):
    """The GPUs without E4M3 decode it by its bits: each finite byte as a key, against torch."""
    if hardware and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no E4M3")
    monkeypatch.setattr(indexer, "_converts_e4m3", lambda device: hardware)
    raw = torch.arange(256, dtype=torch.uint8)
    raw = raw[raw & 0x7F != 0x7F]  # NaN
    keys = torch.zeros(len(raw), 16, dtype=torch.uint8)
    keys[:, 0] = raw
    keys = keys.view(FP8)
    q = torch.zeros(1, 2, 16)
    q[0, 0, 0], q[0, 1, 0] = 1, -1
    weights = torch.tensor([[1.0, -1.0]])
    starts, ends = torch.tensor([0], dtype=torch.int32), torch.tensor([len(raw)], dtype=torch.int32)
    given = [x.to(device) for x in (q.to(FP8), keys, torch.ones(len(raw)), weights, starts, ends)]
    scores = indexer.indexer_scores(*given, provider="triton").cpu()
    assert torch.equal(scores[0], raw.view(FP8).float())


def topk_case(rows, columns, seed):
    gen = torch.Generator().manual_seed(seed)
    scores = draw(gen, rows, columns, std=3.0)
    starts = torch.randint(0, columns // 3, (rows,), generator=gen, dtype=torch.int32)
    ends = torch.randint(columns // 2, columns + 1, (rows,), generator=gen, dtype=torch.int32)
    ends[0] = starts[0]  # no score
    return scores, starts, ends


@PROVIDERS
@pytest.mark.parametrize("columns, k", [(40, 64), (700, 64), (5000, 512), (6000, 2048), (1500, 1)])
def test_topk_of_distinct_scores_is_torchs(device, provider, columns, k):
    scores, starts, ends = topk_case(5, columns, columns)
    given = (x.to(device) for x in (scores, starts, ends))
    picked = indexer.indexer_topk(*given, k, provider=provider).cpu()
    for row in range(5):
        part = scores[row, starts[row] : ends[row]]
        want = part.topk(min(k, len(part))).indices.sort().values.int().tolist()
        assert picked[row].tolist() == want + [-1] * (k - len(want))


@TOPK_PROVIDERS
def test_of_equal_scores_the_leftmost(device, provider):
    skip_unless_served(provider)
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, 1e-40, -1e-40, 3.0])
    gen = torch.Generator().manual_seed(3)
    scores = values[torch.randint(len(values), (6, 3000), generator=gen)]
    ends = torch.tensor([3000, 2999, 2100, 2048, 2000, 0], dtype=torch.int32)
    picked = indexer.indexer_topk(scores.to(device), None, ends.to(device), 2048, provider=provider).cpu()
    for row in range(6):
        part = [(-float(x), i) for i, x in enumerate(scores[row, : ends[row]])]
        want = sorted(i for _, i in sorted(part)[:2048])  # by falling score, then from the left
        assert picked[row].tolist() == want + [-1] * (2048 - len(want))


def test_topk_into_vllms_wider_buffer(device):
    scores, starts, ends = (x.to(device) for x in topk_case(4, 300, 1))
    buffer = torch.full((6, 128), 7, dtype=torch.int32, device=device)
    out = indexer.indexer_topk(scores, starts, ends, 64, buffer[1:5, :64], provider="triton")
    assert out.data_ptr() == buffer[1].data_ptr() and (buffer[:, 64:] == 7).all() and (buffer[5] == 7).all()
    assert torch.equal(out, indexer.indexer_topk(scores, starts, ends, 64, provider="reference"))


@PROVIDERS
def test_no_picks_write_nothing(device, provider):
    scores, starts, ends = (x.to(device) for x in topk_case(4, 300, 2))
    buffer = torch.full((4, 300), 7, dtype=torch.int32, device=device)
    indexer.indexer_topk(scores, starts, ends, 0, buffer[:, :0], provider=provider)
    assert (buffer == 7).all()


DRAWS = {
    "random": lambda x: x,
    "tied": lambda x: x.mul(2).round().div(2),
    "equal": torch.zeros_like,
    "close": lambda x: 100 + x * 1e-5,
    "zeros": lambda x: x.relu(),
    "far apart": lambda x: x.double().pow(31).float(),
}


@TOPK_PROVIDERS
@pytest.mark.parametrize("scores_are", DRAWS)
@pytest.mark.parametrize(
    "columns, k", [(600, 512), (2300, 512), (2301, 2048), (4096, 1), (4097, 512), (8192, 2048), (16384, 512)]
)
def test_topk_of_rows_of_any_length(device, provider, columns, k, scores_are):
    """What is behind a row's length, or beside its columns or its picks, is nothing to it."""
    skip_unless_served(provider)
    gen = torch.Generator().manual_seed(columns)
    lengths = [0, 1, k - 1, k, k + 1, columns // 2, columns - 1, columns, columns + 9, -1, -(2**31)]
    wide = torch.full((len(lengths), columns + 9), INF)
    for row, length in enumerate(lengths):
        length = min(max(length, 0), columns)
        wide[row, :length] = DRAWS[scores_are](draw(gen, length, std=3.0))
    lengths = torch.tensor(lengths).int()
    out = torch.full((len(lengths) + 2, k + 3), -7, dtype=torch.int32, device=device)
    picked = indexer.indexer_topk(
        wide.to(device)[:, :columns], None, lengths.to(device), k, out[1:-1, 1:-2], provider=provider
    ).cpu()
    for row, length in enumerate(lengths.clamp(0, columns).tolist()):
        best = wide[row, :length].sort(descending=True, stable=True).indices[:k].sort().values.int()
        assert torch.equal(picked[row, : len(best)], best) and bool((picked[row, len(best) :] == -1).all())
        values = wide[row, :length].topk(len(best)).values
        assert torch.equal(wide[row, best.long()].sort(descending=True).values, values)
    out[1:-1, 1:-2] = -7
    assert bool((out == -7).all())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "columns, offset", [(1, 0), (300, 0), (2300, 1), (16384, 0), (16385, 0), (33000, 3), (262144, 0)]
)
@pytest.mark.parametrize("k", [1, 512, 2048])
def test_topk_of_many_rows(device, columns, offset, k):
    """More rows than the GPU has at once, of 16-byte accesses and without, of a block and of a cluster of them."""
    skip_unless_served("sm90")
    gen = torch.Generator(device).manual_seed(columns)
    store = torch.randn(400, columns + offset + 1, generator=gen, device=device)
    scores = store[:, offset : offset + columns]
    lengths = torch.randint(-2, columns + 1, (400,), generator=gen, device=device, dtype=torch.int32)
    lengths[::3] = lengths[::3] * 2300 // columns  # few, though there is room for many
    scores[::2] = scores[::2].mul(8).round()  # with many equals
    given = scores, None, lengths, k
    want = indexer.indexer_topk(*given, provider="triton")
    for provider in ("sm90", "sm90", "sm90", None):
        assert torch.equal(indexer.indexer_topk(*given, provider=provider), want)


@pytest.mark.gpu
def test_topk_in_a_graph_follows_lengths_and_scores(device):
    skip_unless_served("sm90")
    scores, lengths = torch.empty(16, 2304, device=device), torch.zeros(16, dtype=torch.int32, device=device)
    out = torch.full((16, 512), -7, dtype=torch.int32, device=device)
    indexer.indexer_topk(scores, None, lengths, 512, out, provider="sm90")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores.mul_(-1)  # what the kernel begins before the end of
        indexer.indexer_topk(scores, None, lengths, 512, out, provider="sm90")
        picked = out.clone()
    for seed in range(20):
        gen = torch.Generator(device).manual_seed(seed)
        scores.copy_(torch.randn(16, 2304, generator=gen, device=device))
        lengths.copy_(torch.randint(-1, 2305, (16,), generator=gen, device=device))
        out.fill_(-7)
        graph.replay()
        assert torch.equal(picked, indexer.indexer_topk(scores, None, lengths, 512, provider="triton"))


def test_rows_that_the_kernel_for_hopper_takes(monkeypatch):
    """It refuses longer ones, as of a context of over a million tokens, which are Triton's."""
    source = (Path(__file__).parents[2] / "csrc/topk.h").read_text()
    columns, most = map(int, re.search(r"kTopKColumns = (\d+), kTopKMost = (\d+);", source).groups())
    monkeypatch.setattr(sm90, "serves", lambda capability: True)
    asked = ((columns, most), (columns + 1, 512), (512, most + 1))
    assert [sm90.serves_topk(torch.empty(1, some, device="meta"), k) for some, k in asked] == [True, False, False]


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(starts=torch.zeros(2, dtype=torch.int32)), ValueError, "sm90 takes no starts"),
        (dict(), RuntimeError, "needs the native library"),
    ],
)
def test_refusals_of_the_kernel_for_hopper(change, error, words):
    given = dict(scores=torch.zeros(2, 8), starts=None, ends=torch.ones(2, dtype=torch.int32), k=4)
    with pytest.raises(error, match=words):
        indexer.indexer_topk(**given | change, provider="sm90")


@pytest.mark.parametrize("columns, k, fits", [(262144, 8191, True), (262145, 1, False), (1, 8192, False)])
def test_what_the_kernel_for_hopper_picks_from(monkeypatch, columns, k, fits):
    """Up to csrc/topk.h's sizes, and never from `starts`."""
    picked = []
    monkeypatch.setattr(sm90, "serves", lambda capability: True)
    monkeypatch.setattr(indexer, "topk_sm90", lambda scores, ends, out: picked.append(scores))
    scores, ends = torch.zeros(1, columns), torch.zeros(1).int()
    indexer.indexer_topk(scores, None, ends, k)
    assert len(picked) == fits
    assert (indexer.indexer_topk(scores, torch.zeros(1).int(), ends, k) == -1).all() and len(picked) == fits


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(scores=torch.zeros(2, 8).double()), r"scores must be float32 \[rows, columns\]"),
        (dict(scores=torch.zeros(2, 8, 2)), r"scores must be float32 \[rows, columns\]"),
        (dict(scores=torch.zeros(8, 2).T), "scores must be contiguous in its last dimension"),
        (dict(starts=torch.zeros(2)), r"starts must be torch.int32 \[2\]"),
        (dict(ends=torch.ones(3).int()), r"ends must be torch.int32 \[2\]"),
        (dict(ends=torch.ones(4).int()[::2]), r"ends must be torch.int32 \[2\], contiguous"),
        (dict(out=torch.zeros(2, 4).long()), r"out must be int32 \[2, 4\]"),
        (dict(out=torch.zeros(2, 5).int()), r"out must be int32 \[2, 4\]"),
        (dict(out=torch.zeros(4, 2).int().T), "out must be contiguous in its last dimension"),
    ],
)
def test_refusals_of_picks(change, words):
    with pytest.raises(ValueError, match=words):
        indexer.indexer_topk(**dict(scores=torch.zeros(2, 8), starts=None, ends=torch.ones(2).int(), k=4) | change)


@pytest.mark.parametrize("name", ["starts", "ends", "out"])
def test_picks_of_one_gpu(name):
    given = dict(scores=torch.zeros(2, 8), starts=torch.zeros(2).int(), ends=torch.ones(2).int(), k=4)
    given[name] = torch.zeros((2, 4) if name == "out" else 2, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=f"{name} must be on cpu, got meta"):
        indexer.indexer_topk(**given)


def arguments():
    return dict(
        q=torch.zeros(2, 4, 16).to(FP8), keys=torch.zeros(5, 16).to(FP8), key_scales=torch.ones(5),
        weights=torch.ones(2, 4), starts=torch.zeros(2, dtype=torch.int32), ends=torch.ones(2, dtype=torch.int32),
    )  # fmt: skip


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(q=torch.zeros(2, 4, 16)), "q must be E4M3 or BF16"),
        (dict(q=torch.zeros(2, 4, 24).to(FP8)), "its last dimension a power of two"),
        (dict(q=torch.zeros(2, 4, 8).to(FP8)), "a power of two from 16 on"),
        (dict(q=torch.zeros(2, 1, 4, 16).to(FP8)), "q must be E4M3 or BF16"),
        (dict(q=torch.zeros(4, 2, 16).to(FP8).transpose(0, 1)), "q must be E4M3 or BF16, contiguous"),
        (dict(keys=torch.zeros(5, 16, 16).to(FP8)), r"keys must be torch.float8_e4m3fn \[keys, 16\]"),
        (dict(keys=torch.zeros(5, 32).to(FP8)), r"keys must be torch.float8_e4m3fn \[keys, 16\]"),
        (dict(keys=torch.zeros(16, 5).to(FP8).T), "keys must be contiguous in its last dimension"),
        (dict(weights=torch.ones(4, 2).T), "weights must be contiguous in its last dimension"),
        (dict(weights=torch.ones(2, 4, device="meta")), "weights must be on cpu, got meta"),
        (dict(starts=torch.zeros(2)), r"starts must be torch.int32 \[2\]"),
        (dict(ends=torch.ones(4, dtype=torch.int32)[::2]), r"ends must be torch.int32 \[2\], contiguous"),
        (dict(keys=torch.zeros(5, 16).bfloat16()), r"keys must be torch.float8_e4m3fn \[keys, 16\]"),
        (dict(weights=torch.ones(2, 5)), r"weights must be float32 \[2, 4\]"),
        (dict(key_scales=torch.ones(4)), r"key_scales must be torch.float32 \[5\]"),
        (dict(ends=torch.ones(3, dtype=torch.int32)), r"ends must be torch.int32 \[2\]"),
        (dict(keys=torch.zeros(5, 16).to(FP8).to("meta")), "keys must be on cpu, got meta"),
        (dict(key_scales=torch.ones(5, device="meta")), "key_scales must be on cpu, got meta"),
        (dict(starts=torch.zeros(2, dtype=torch.int32, device="meta")), "starts must be on cpu, got meta"),
        (dict(provider="cuda"), "the indexer has no provider 'cuda'"),
    ],
)
def test_refusals(change, words):
    with pytest.raises(ValueError, match=words):
        indexer.indexer_scores(**arguments() | change)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(cache=torch.zeros(3, 64, 20)), r"q must be E4M3 and cache uint8 \[blocks, block_size, 20\]"),
        (dict(q=torch.zeros(2, 1, 4, 16).bfloat16()), "q must be E4M3"),
        (dict(cache=torch.zeros(3, 64, 16, dtype=torch.uint8)), r"cache uint8 \[blocks, block_size, 20\]"),
        (dict(cache=torch.zeros(3, 1282, dtype=torch.uint8)[:, :1280].view(3, 64, 20)), "a multiple of 4 bytes"),
        (dict(context_lens=torch.ones(2)), r"context_lens must be int32 \[2, 1\]"),
        (dict(context_lens=torch.ones(2, device="meta").int()), "context_lens must be on cpu"),
        (dict(block_table=torch.zeros(2, 3)), "block_table must be int32 of 2 rows"),
        (dict(block_table=torch.zeros(3, 2, dtype=torch.int32).T), "block_table must be contiguous in its last"),
        (dict(context_lens=torch.ones(3, dtype=torch.int32)), r"context_lens must be int32 \[2, 1\]"),
        (dict(block_table=torch.zeros(1, 3, dtype=torch.int32)), "block_table must be int32 of 2 rows"),
        (dict(cache=torch.zeros(3, 64, 40, dtype=torch.uint8)[..., :20]), "a block of cache must be in one piece"),
        (dict(cache=torch.zeros(3842, dtype=torch.uint8)[2:].view(3, 64, 20)), "start at a multiple of 4 bytes"),
        (dict(block_table=torch.zeros(2, 3, dtype=torch.int32, device="meta")), "block_table must be on cpu"),
    ],
)
def test_refusals_of_pages(change, words):
    given = dict(
        q=torch.zeros(2, 1, 4, 16).to(FP8), weights=torch.ones(2, 4),
        cache=torch.zeros(3, 64, 20, dtype=torch.uint8),
        context_lens=torch.ones(2, dtype=torch.int32), block_table=torch.zeros(2, 3, dtype=torch.int32), width=64,
    )  # fmt: skip
    with pytest.raises(ValueError, match=words):
        indexer.paged_indexer_scores(**given | change)
