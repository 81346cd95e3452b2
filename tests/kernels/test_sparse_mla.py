"""Every provider of `sparse_mla` against a float64 loop over the definition.

Tolerance: the output is BF16, and rounding the exact output to it is a relative error of 1.66e-3 in the root mean
square. The bound is on what a provider adds to that, `excess_error`: softmax weights in fp16 add 2e-4, in BF16, as
FlashMLA has them, 1.3e-3. The sm90 kernel with 64 heads on M has BF16 weights over BF16 rows.
"""

import pytest
import torch
from mla_kernels import PROVIDERS, checks, interface, pick_provider, reference, sm90, sparse_mla

TOLERANCE = 4e-4
# A weight just above a power of two is off by up to 2^-8 of it, evenly spread.
OF_BF16_WEIGHTS = 2**-8 / 3**0.5
# FlashInfer's wants more of its arguments and has tests of its own, tests/glue/test_flashinfer.py.
OURS = [name for name in PROVIDERS if name != "flashinfer"]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
# Of the worst head of a token: eight wrong dimensions, which a lane writes, are more than a tenth of a head, and
# less than the bounds above of a call of thousands.
OF_ONE_HEAD = 2e-2


def skip_unless_served(name):
    if name == "sm90" and not (torch.cuda.is_available() and sm90.serves(torch.cuda.get_device_capability())):
        pytest.skip("needs a Hopper GPU and scripts/build-kernels.sh")


@pytest.fixture(params=OURS)
def provider(request):
    skip_unless_served(request.param)
    return request.param


@pytest.fixture(params=OURS[1:])
def fast_provider(request):
    skip_unless_served(request.param)
    return request.param


def exact(query, swa, compressed, indices, topk_lens, visible, bmm1, bmm2, sinks):
    """Float64, one token at a time. Pools are `[pages, page, 512]`."""
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    for token, (seen, length) in enumerate(zip(visible.tolist(), topk_lens.tolist(), strict=True)):
        if seen <= 0:
            continue
        window, picked = indices[token, : min(seen, 128)], indices[token, 128:length]
        keys = torch.cat([rows_of(swa, window), rows_of(compressed, picked)])
        scores = bmm1 * (query[token].double() @ keys.T)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
        if scores.shape[1]:
            out[token] = bmm2 * scores.softmax(dim=1)[:, : len(keys)] @ keys
    return out.cpu()


def rows_of(pool, flat):
    pages, page = pool.shape[:2]
    flat = flat[(flat >= 0) & (flat < pages * page)]
    raw = pool.view(torch.uint8)[flat // page, flat % page]  # torch does not pick rows of E4M3
    return raw.view(pool.dtype).double()


def relative_error(out, expected):
    return float((out.cpu().double() - expected).norm() / expected.norm())


def excess_error(out, expected):
    """Relative error without the part that rounding to BF16 makes; the two are independent, so squares add up."""
    rounding = relative_error(expected.to(BF16), expected)
    return max(relative_error(out, expected) ** 2 - rounding**2, 0.0) ** 0.5


def worst_head(out, expected):
    """The largest relative error of one head of a token; infinite if it is to be 0 and is not."""
    off, size = (out.cpu().double() - expected).norm(dim=-1), expected.norm(dim=-1)
    return float(torch.where(off == 0, 0.0, off / size).max()) if len(off) else 0.0


class Case:
    """Random pools, tables and lengths; everything that is not a key is poison."""

    def __init__(self, device, *, tokens, heads, q_dtype=BF16, kv_dtype=BF16, swa_page=64, page=64,
                 width=128 + 64, pages=12, padded=False, scale=None, seed=0, kv_scale=1.0):  # fmt: skip
        gen = torch.Generator().manual_seed(seed)
        self.gen, self.device, self.width = gen, device, width
        self.swa = self.pool(pages, swa_page, kv_dtype, padded)
        self.compressed = self.pool(pages, page, kv_dtype, padded)
        self.query = torch.randn(tokens, heads, 512, generator=gen).to(q_dtype).to(device)
        self.bmm1 = scale or 512**-0.5 * 2.0
        self.bmm2 = kv_scale
        self.sinks = torch.randn(heads, generator=gen).to(device)
        self.visible = torch.randint(1, 400, (tokens,), generator=gen)
        self.visible[torch.rand(tokens, generator=gen) < 0.3] = 128
        compressed_lens = torch.randint(0, width - 128 + 1, (tokens,), generator=gen)
        compressed_lens[::3] = 0
        self.topk_lens = (128 + compressed_lens).int()
        self.visible = self.visible.int()
        self.indices = self.table(pages * swa_page, pages * page)

    def pool(self, pages, page, dtype, padded):
        # The last page belongs to nobody and is NaN; padding leaves NaN between pages, or between rows too.
        row = 576 if padded == "rows" else 512
        raw = torch.full((pages + 1, page * row + (576 if padded else 0)), float("nan")).to(dtype).to(self.device)
        pool = raw[:, : page * row].unflatten(1, (page, row))[..., :512]
        pool[:pages] = torch.randn(pages, page, 512, generator=self.gen).to(dtype).to(self.device)
        return pool

    def table(self, swa_rows, rows):
        """Flat rows; past the lengths -1 on even tokens and stale rows (the NaN page) on odd ones."""
        tokens = self.query.shape[0]
        indices = torch.empty(tokens, self.width, dtype=torch.int32)
        for token in range(tokens):
            indices[token, :128] = -1 if token % 2 == 0 else swa_rows
            indices[token, 128:] = -1 if token % 2 == 0 else rows
            n = max(0, min(int(self.visible[token]), 128))
            indices[token, :n] = torch.randint(0, swa_rows, (n,), generator=self.gen)
            n = int(self.topk_lens[token]) - 128
            indices[token, 128 : 128 + n] = torch.randint(0, rows, (n,), generator=self.gen)
        return indices.to(self.device)

    def expected(self, sinks=True):
        return exact(
            self.query, self.swa, self.compressed, self.indices, self.topk_lens, self.visible,
            self.bmm1, self.bmm2, self.sinks if sinks else None,
        )  # fmt: skip

    def tolerance(self, provider):
        """csrc/sparse_mla_sm90.cu says which calls are the kernel's with 64 heads on M."""
        tokens, heads = self.query.shape[:2]
        if provider != "sm90" or self.swa.dtype != BF16 or heads <= 32:
            return TOLERANCE
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        return OF_BF16_WEIGHTS if 2 * tokens * -(-heads // 32) > sms else TOLERANCE

    def scales_as_tensors(self):
        scales = {"bmm1_scale": self.bmm1, "bmm2_scale": self.bmm2}
        return {name: torch.tensor([x], dtype=torch.float32, device=self.device) for name, x in scales.items()}

    def run(self, provider, *, layout="HND", sinks=True, query=None, out=None, seq_lens=None, **more):
        head_axis = 1 if layout == "HND" else 2
        query = self.query[:, None] if query is None else query
        if out is None:
            out = torch.full(query.shape, float("nan"), dtype=BF16, device=self.device)
        arguments = dict(bmm1_scale=self.bmm1, bmm2_scale=self.bmm2, kv_layout=layout)
        result = sparse_mla(
            query,
            self.swa.unsqueeze(head_axis),
            None,
            self.indices,
            self.compressed.unsqueeze(head_axis),
            self.topk_lens.to(self.device),
            (self.visible if seq_lens is None else seq_lens).to(self.device),
            out=out,
            sinks=self.sinks if sinks else None,
            provider=provider,
            **(arguments | more),
        )
        assert result is out
        return out.view(self.query.shape)


def test_the_bound_sees_weights_in_bf16(device):
    """FlashMLA's precision: exact but for softmax weights of 8 bits."""
    case = Case(device, tokens=3, heads=16, width=128 + 512, seed=1)
    case.visible[:], case.topk_lens[:] = 128, 640
    case.indices = case.table(12 * 64, 12 * 64)
    keys = torch.stack(
        [torch.cat([rows_of(case.swa, row[:128]), rows_of(case.compressed, row[128:])]) for row in case.indices]
    )
    scores = case.bmm1 * case.query.double() @ keys.mT
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    out = (weights.to(BF16).double() @ keys / weights.sum(-1, keepdim=True)).to(BF16)
    error = excess_error(out, case.expected(sinks=False))
    assert 2 * TOLERANCE < error < 2e-3, error


@pytest.mark.parametrize("q_dtype, kv_dtype", [(BF16, BF16), (BF16, E4M3), (E4M3, E4M3)])
@pytest.mark.parametrize("heads", [1, 3, 8, 16, 32, 64, 128])
def test_heads_and_dtypes(device, provider, heads, q_dtype, kv_dtype):
    case = Case(device, tokens=3, heads=heads, q_dtype=q_dtype, kv_dtype=kv_dtype, seed=heads)
    out, expected = case.run(provider), case.expected()
    assert excess_error(out, expected) < case.tolerance(provider) and worst_head(out, expected) < OF_ONE_HEAD


# Batches that between them reach every kernel and division of the sm90 provider on 132 SMs: 16, 32 or 64 heads a
# block, keys shared or not, blocks with one token and with several.
BATCHES = [
    (5, 40), (16, 64), (40, 32), (90, 8), (100, 32), (140, 64), (140, 128), (160, 100), (270, 20), (270, 16),
    (300, 33),
]  # fmt: skip
ON_GPU = [pytest.param(*shape, marks=pytest.mark.gpu) for shape in BATCHES]
REPEATED = [(3, 16), (16, 64), (100, 32), (140, 64), (160, 100), (270, 16)]  # very often


@pytest.mark.gpu
@pytest.mark.parametrize("q_dtype, kv_dtype", [(BF16, BF16), (BF16, E4M3), (E4M3, E4M3)])
@pytest.mark.parametrize("tokens, heads", BATCHES)
def test_batches(device, fast_provider, tokens, heads, q_dtype, kv_dtype):
    case = Case(device, tokens=tokens, heads=heads, q_dtype=q_dtype, kv_dtype=kv_dtype, width=640, seed=tokens)
    case.visible[1], case.visible[-1] = 0, -3
    out, expected = case.run(fast_provider), case.expected()
    assert excess_error(out, expected) < case.tolerance(fast_provider) and worst_head(out, expected) < OF_ONE_HEAD


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("tokens, heads", [(2100, 16), (1100, 32), (600, 64)])
def test_outputs_larger_than_half_the_l2_cache(device, fast_provider, tokens, heads, kv_dtype):
    """The sm90 provider reads rows in another way then; in all other tests outputs are smaller."""
    case = Case(device, tokens=tokens, heads=heads, kv_dtype=kv_dtype, width=640, seed=17)
    assert tokens * heads * 1024 > torch.cuda.get_device_properties(device).L2_cache_size / 2
    assert excess_error(case.run(fast_provider), case.expected()) < case.tolerance(fast_provider)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("scale", [0.05, 2.0])
@pytest.mark.parametrize("tokens, heads", BATCHES)
def test_flat_and_steep_softmax(device, fast_provider, tokens, heads, scale, kv_dtype):
    """Scores that hardly differ, and scores hundreds apart, whose maximum rises again and again."""
    case = Case(device, tokens=tokens, heads=heads, kv_dtype=kv_dtype, width=640, scale=scale, seed=heads)
    assert excess_error(case.run(fast_provider), case.expected()) < case.tolerance(fast_provider)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_missing_rows(device, provider, kv_dtype, tokens=7, heads=8):
    """No row, whatever the negative number: single ones, whole tiles of keys, the whole window, everything."""
    case = Case(device, tokens=tokens, heads=heads, kv_dtype=kv_dtype, width=640, seed=21)
    case.visible[:5], case.topk_lens[:5] = 300, 640
    case.indices = case.table(12 * 64, 12 * 64)
    case.indices[0, [0, 8, 77, 639]] = torch.tensor([-1, -2, -3, -(2**31)], dtype=torch.int32, device=device)
    case.indices[1, :64] = -2
    case.indices[2, :128] = -1
    case.indices[3, :] = -1
    case.indices[4, 256:512] = -1
    assert excess_error(case.run(provider), case.expected()) < case.tolerance(provider)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("tokens, heads", [(7, 8), *ON_GPU])
def test_rows_outside_the_pool(device, provider, kv_dtype, tokens, heads):
    """They are missing, in each pool by its own size: the next page there is NaN, and far away is no memory."""
    case = Case(device, tokens=tokens, heads=heads, kv_dtype=kv_dtype, page=4, pages=16, width=640, seed=22)
    case.swa, case.compressed = case.swa[:-1], case.compressed[:-1]
    case.visible[:5], case.topk_lens[:5] = 300, 640
    swa_rows, rows = 16 * 64, 16 * 4
    case.indices = case.table(swa_rows, rows)
    garbage = [swa_rows, swa_rows + 63, 2**31 - 1, -(2**31), 2**30]
    case.indices[0, [0, 8, 77, 100, 127]] = torch.tensor(garbage, dtype=torch.int32, device=device)
    garbage = [rows, rows + 3, swa_rows - 1, 2**31 - 1, -(2**31)]  # the third is a row of the other pool
    case.indices[1, [128, 136, 205, 500, 639]] = torch.tensor(garbage, dtype=torch.int32, device=device)
    case.indices[2, :64] = swa_rows
    case.indices[3, :] = 2**31 - 1
    case.indices[4, 256:512] = rows
    assert excess_error(case.run(provider), case.expected()) < case.tolerance(provider)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("tokens, heads", BATCHES)
def test_missing_rows_in_batches(device, fast_provider, tokens, heads, kv_dtype):
    test_missing_rows(device, fast_provider, kv_dtype, tokens, heads)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("padded", [False, "pages", "rows"])
def test_pages_strides_and_layouts(device, provider, kv_dtype, layout, padded):
    """Page sizes that differ between the pools, as in C128A layers, and padded pages and rows."""
    case = Case(device, tokens=5, heads=8, kv_dtype=kv_dtype, page=2, pages=40, padded=padded, seed=7)
    assert excess_error(case.run(provider, layout=layout), case.expected()) < case.tolerance(provider)


@pytest.mark.parametrize("sinks", [False, True])
def test_sinks(device, provider, sinks):
    """A sink of +5 takes most of the weight, so forgetting it (or adding it once a split) shows."""
    case = Case(device, tokens=4, heads=4, seed=11)
    case.sinks += 5.0
    assert excess_error(case.run(provider, sinks=sinks), case.expected(sinks)) < case.tolerance(provider)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_minimum_and_maximum_lengths(device, provider, kv_dtype):
    for visible, compressed in [(1, 0), (127, 0), (128, 0), (129, 1), (10_000, 64), (1, 64)]:
        case = Case(device, tokens=2, heads=8, kv_dtype=kv_dtype, seed=visible)
        case.visible[:], case.topk_lens[:] = visible, 128 + compressed
        case.indices = case.table(12 * 64, 12 * 64)
        assert excess_error(case.run(provider), case.expected()) < case.tolerance(provider)


def test_lengths_below_the_window(device, provider):
    """As stale memory may hold: no compressed row counts, also where a length less 128 wraps."""
    case = Case(device, tokens=3, heads=8, seed=4)
    case.visible[:] = 10_000
    case.topk_lens[:] = torch.tensor([0, -(2**31), 127 - 2**31], dtype=torch.int32)
    out = case.run(provider)
    case.topk_lens[:] = 128
    assert excess_error(out, case.expected()) < case.tolerance(provider)


def test_padding_tokens_are_zero(device, provider):
    """Rows of CUDA-graph padding: nothing visible, stale lengths and indices."""
    case = Case(device, tokens=6, heads=8, seed=3)
    case.visible[1::2] = torch.tensor([0, -5, 0], dtype=torch.int32)
    out = case.run(provider)
    assert torch.equal(out[1::2], torch.zeros_like(out[1::2]))
    assert excess_error(out, case.expected()) < case.tolerance(provider)


def test_dense_queries_of_several_tokens(device, provider):
    """[batch, q_len]: token i of q_len sees q_len - 1 - i tokens less than the last. Two requests are padding."""
    case = Case(device, tokens=10, heads=8, seed=5)
    seq_lens = torch.tensor([70, 1000, 2, 0, -1], dtype=torch.int32)
    case.visible = torch.tensor([69, 70, 999, 1000, 1, 2, 0, 0, 0, 0], dtype=torch.int32)
    case.indices = case.table(12 * 64, 12 * 64)
    out = case.run(provider, query=case.query.view(5, 2, 8, 512), seq_lens=seq_lens)
    assert excess_error(out, case.expected()) < case.tolerance(provider)
    assert not out[6:].any()


def test_ragged_queries(device, provider):
    """Queries of 1, 0, 4 and 2 tokens, one of 2 that is padding, then two such tokens behind the last request."""
    case = Case(device, tokens=11, heads=8, seed=6)
    cum = torch.tensor([0, 1, 1, 5, 7, 9], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([300, 9, 4, 128, 0], dtype=torch.int32)
    case.visible = torch.tensor([300, 1, 2, 3, 4, 127, 128, 0, 0, 0, 0], dtype=torch.int32)
    case.indices = case.table(12 * 64, 12 * 64)
    out = case.run(provider, query=case.query, seq_lens=seq_lens, cum_seq_lens_q=cum, max_q_len=4)
    assert excess_error(out, case.expected()) < case.tolerance(provider)
    assert not out[7:].any()


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_scales_as_tensors(device, provider, kv_dtype):
    case = Case(device, tokens=3, heads=8, kv_dtype=kv_dtype, kv_scale=0.25, seed=8)
    out = case.run(provider, **case.scales_as_tensors())
    assert excess_error(out, case.expected()) < case.tolerance(provider)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("tokens, heads", [(20, 8), *ON_GPU, pytest.param(1200, 64, marks=pytest.mark.gpu)])
def test_tokens_with_few_or_no_keys_between_others(device, fast_provider, tokens, heads, kv_dtype):
    """In a block, tokens with no, one and several tiles follow each other. No sinks, scales as tensors."""
    case = Case(device, tokens=tokens, heads=heads, kv_dtype=kv_dtype, kv_scale=0.25, width=128 + 132, seed=15)
    few = torch.tensor([0, -3, 0, 1, 64, 65, 128])
    case.visible = few[torch.randint(0, len(few), (tokens,), generator=case.gen)].int()
    case.topk_lens[::2] = 128
    case.indices = case.table(12 * 64, 12 * 64)
    out = case.run(fast_provider, sinks=False, **case.scales_as_tensors())
    assert excess_error(out, case.expected(sinks=False)) < case.tolerance(fast_provider)
    assert not out[case.visible <= 0].any()


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("tokens, heads", [(9, 8), *ON_GPU, pytest.param(600, 64, marks=pytest.mark.gpu)])
def test_strongly_mixed_lengths(device, provider, tokens, heads, kv_dtype):
    """A few tokens with 1152 keys between others with hardly any, the last of them too."""
    case = Case(device, tokens=tokens, heads=heads, kv_dtype=kv_dtype, width=1152, seed=24)
    case.visible = torch.randint(0, 20, (tokens,), generator=case.gen).int()
    case.topk_lens = 128 + torch.randint(0, 9, (tokens,), generator=case.gen).int()
    long = torch.arange(tokens) % 4 == 0
    case.visible[long], case.topk_lens[long] = 100_000, 1152
    case.indices = case.table(12 * 64, 12 * 64)
    assert excess_error(case.run(provider), case.expected()) < case.tolerance(provider)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("tokens, heads", [(3, 16), (16, 64), (140, 64), (270, 16)])
def test_two_streams_at_once(device, fast_provider, tokens, heads, kv_dtype):
    """Launches on two streams share nothing: each has the bits that it has alone."""
    cases = [Case(device, tokens=tokens, heads=heads, kv_dtype=kv_dtype, width=640, seed=s) for s in (25, 26)]
    alone = [case.run(fast_provider).clone() for case in cases]
    lengths = [(case.topk_lens.to(device), case.visible.to(device)) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    outs = [[torch.full_like(want, float("nan")) for _ in range(50)] for want in alone]
    torch.cuda.synchronize()
    for i in range(50):
        for case, stream, (case.topk_lens, case.visible), out in zip(cases, streams, lengths, outs, strict=True):
            with torch.cuda.stream(stream):
                case.run(fast_provider, out=out[i][:, None])
    torch.cuda.synchronize()
    for want, found in zip(alone, outs, strict=True):
        assert all(torch.equal(out, want) for out in found)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("tokens, heads", [(3, 16), (140, 64), (270, 16)])
def test_a_gpu_that_is_not_the_current_one(second_gpu, fast_provider, tokens, heads, kv_dtype):
    case = Case(second_gpu, tokens=tokens, heads=heads, kv_dtype=kv_dtype, width=640, seed=27)
    assert excess_error(case.run(fast_provider), case.expected()) < case.tolerance(fast_provider)
    assert case.run(None).device == second_gpu
    assert torch.cuda.current_device() != second_gpu.index


@pytest.mark.parametrize("tokens, heads", [(3, 8), pytest.param(140, 64, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("magnitude", [1e-36, 1e-6, 1e6, 1e36])
def test_queries_outside_the_range_of_fp16(device, provider, magnitude, tokens, heads):
    case = Case(device, tokens=tokens, heads=heads, kv_dtype=E4M3, scale=0.1 / magnitude, seed=9)
    case.query = (case.query.float() * magnitude).to(BF16)
    assert excess_error(case.run(provider), case.expected()) < case.tolerance(provider)


@pytest.mark.parametrize("tokens, heads", [(3, 8), *ON_GPU])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_queries_of_2_127(device, provider, kv_dtype, tokens, heads):
    """The largest numbers of BF16, in four dimensions and over small rows, so that products are below 2^128."""
    case = Case(device, tokens=tokens, heads=heads, kv_dtype=kv_dtype, scale=2.0**-122, seed=19)
    for pool in (case.swa, case.compressed):
        pool.copy_((pool.float() / 32).to(kv_dtype))
    case.query[..., 4:] = 0
    case.query = (case.query.double() * 2.0**127).clamp(-3.3e38, 3.3e38).to(BF16)
    assert case.query.isfinite().all() and (case.query.abs() >= 2.0**127).any()
    assert excess_error(case.run(provider), case.expected()) < case.tolerance(provider)


@pytest.mark.parametrize("tokens, heads", [(3, 8), *ON_GPU])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_queries_below_normal_numbers(device, provider, kv_dtype, tokens, heads):
    case = Case(device, tokens=tokens, heads=heads, kv_dtype=kv_dtype, scale=2.0**126, seed=20)
    case.query = (case.query.double() * 2.0**-130).to(BF16)
    assert case.query.any() and (case.query.abs() < 2.0**-126).all()
    assert excess_error(case.run(provider), case.expected()) < case.tolerance(provider)


@pytest.mark.parametrize("tokens, heads", [(3, 8), *ON_GPU])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_scores_of_minus_1e31(device, provider, kv_dtype, tokens, heads):
    """A token's only key is one however low its score, and the larger of two wins."""
    case = Case(device, tokens=tokens, heads=heads, kv_dtype=kv_dtype, seed=23)
    case.visible[:], case.topk_lens[:] = 1, 128
    case.visible[1] = 2
    case.indices = case.table(12 * 64, 12 * 64)
    row = torch.stack([rows_of(case.swa, row[:1])[0] for row in case.indices])
    case.query = (row * -(2.0**102)).to(BF16)[:, None].repeat(1, heads, 1)
    expected = case.expected(sinks=False)
    assert expected.abs().sum(-1).all() and (case.bmm1 * (row * row).sum(-1) * 2.0**102 > 1e31).all()
    assert excess_error(case.run(provider, sinks=False), expected) < case.tolerance(provider)


@pytest.mark.gpu
@pytest.mark.parametrize("dimension", [3, 300, 500])
@pytest.mark.parametrize("tokens, heads", BATCHES)
def test_a_head_that_is_not_a_number(device, fast_provider, tokens, heads, dimension):
    """Its output is NaN, and no bit of another head's changes."""
    case = Case(device, tokens=tokens, heads=heads, kv_dtype=E4M3, seed=16)
    want = case.run(fast_provider).clone()
    case.query[1, 2, dimension] = float("nan")
    out = case.run(fast_provider)
    assert out[1, 2].isnan().all()
    out[1, 2] = want[1, 2]
    assert torch.equal(out, want)


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_splits_agree_with_the_definition(device, monkeypatch, splits, kv_dtype):
    """More splits than key blocks leaves empty splits, whose maximum is -inf."""
    from mla_kernels import triton_sparse_mla

    monkeypatch.setattr(triton_sparse_mla, "_num_splits", lambda *_: splits)
    case = Case(device, tokens=4, heads=8, kv_dtype=kv_dtype, width=128 + 256, seed=splits)
    case.visible[0], case.topk_lens[0] = 1, 128
    case.visible[1] = 0
    case.indices = case.table(12 * 64, 12 * 64)
    assert excess_error(case.run("triton"), case.expected()) < TOLERANCE


def test_scales_that_the_operator_for_hopper_is_given(monkeypatch):
    given = []
    monkeypatch.setattr(sm90, "_require_library", lambda device: None)
    monkeypatch.setattr(torch.ops.mla_kernels, "sparse_mla_sm90", lambda *args: given.append(args[-4:]))
    case = Case(torch.device("cpu"), tokens=2, heads=8, kv_scale=0.25)
    tensors = case.scales_as_tensors()
    case.run("sm90")
    case.run("sm90", **tensors)
    assert given[0] == (None, None, case.bmm1, 0.25)
    assert given[1][0] is tensors["bmm1_scale"] and given[1][1] is tensors["bmm2_scale"]


def test_the_reference_takes_a_few_tokens_at_a_time(monkeypatch):
    """Other calls here are not large enough for it to take them in parts."""
    case = Case(torch.device("cpu"), tokens=5, heads=8, seed=32)
    case.visible[[1, 4]] = 0
    attend, parts = reference._attend, []
    monkeypatch.setattr(reference, "_GATHERED_FLOATS", 2 * case.width * 512)
    monkeypatch.setattr(reference, "_attend", lambda call, part: parts.append(part) or attend(call, part))
    assert excess_error(case.run("reference"), case.expected()) < TOLERANCE and len(parts) == 3


@pytest.mark.parametrize("q_dtype, kv_dtype", [(BF16, BF16), (BF16, E4M3), (E4M3, E4M3)])
@pytest.mark.parametrize("tokens, heads", [(3, 8), *ON_GPU])
def test_strided_query_and_out(device, provider, tokens, heads, q_dtype, kv_dtype):
    """Heads sliced out of a padded buffer, as vLLM hands them over."""
    case = Case(device, tokens=tokens, heads=heads, q_dtype=q_dtype, kv_dtype=kv_dtype, seed=10)
    padded = torch.full((tokens, 1, heads + 56, 512), float("nan"), device=device).to(q_dtype)
    padded[:, 0, :heads] = case.query
    out = torch.full_like(padded, 7.0, dtype=BF16)
    case.run(provider)  # the contiguous path must not be what is compared
    case.run(provider, query=padded[:, :, :heads], out=out[:, :, :heads])
    assert excess_error(out[:, 0, :heads], case.expected()) < case.tolerance(provider)
    assert torch.all(out[:, 0, heads:] == 7.0)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_one_query_for_all_tokens(device, fast_provider, kv_dtype):
    """Strides of 0, which a tensor copy cannot have."""
    case = Case(device, tokens=140, heads=64, kv_dtype=kv_dtype, seed=14)
    case.query = case.query[:1, :1].expand_as(case.query)
    out = case.run(fast_provider)
    assert excess_error(out, case.expected()) < case.tolerance(fast_provider)


@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_window_only_layer(device, provider, dtype):
    case = Case(device, tokens=3, heads=8, q_dtype=dtype, kv_dtype=dtype, width=128, seed=12)
    out = sparse_mla(
        case.query[:, None], case.swa[:, None], None, case.indices, None, case.topk_lens.to(device),
        case.visible.to(device), bmm1_scale=case.bmm1, sinks=case.sinks, provider=provider,
    )  # fmt: skip
    assert out.dtype == BF16 and excess_error(out[:, 0], case.expected()) < case.tolerance(provider)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("tokens, heads", [(3, 16), *ON_GPU])
def test_same_bits_every_time(device, fast_provider, tokens, heads, kv_dtype):
    """Few tokens share keys between thread blocks, many do not."""
    case = Case(device, tokens=tokens, heads=heads, kv_dtype=kv_dtype, width=128 + 256, seed=13)
    first = case.run(fast_provider).clone()
    differs = torch.zeros((), dtype=torch.bool, device=device)
    many = device.type == "cuda" and (tokens, heads) in REPEATED
    for _ in range(10_000 if many else 3):
        differs |= (case.run(fast_provider) != first).any()
    assert not differs


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("tokens, heads", BATCHES)
def test_query_from_the_call_before(device, tokens, heads, kv_dtype):
    """The native kernels are launched before the one in front of them has ended, and wait for what it writes."""
    skip_unless_served("sm90")
    case = Case(device, tokens=tokens, heads=heads, kv_dtype=kv_dtype, width=640, seed=31)
    lens, visible = case.topk_lens.to(device), case.visible.to(device)

    def chain(pause=False):
        queries = torch.full((9, *case.query.shape), float("nan"), dtype=BF16, device=device)
        queries[0].copy_(case.query)
        for query, out in zip(queries, queries[1:], strict=False):
            sparse_mla(
                query[:, None], case.swa[:, None], None, case.indices, case.compressed[:, None], lens, visible,
                out=out[:, None], bmm1_scale=case.bmm1, sinks=case.sinks, provider="sm90",
            )  # fmt: skip
            if pause:
                torch.cuda.synchronize()
        return queries

    expected = chain(pause=True)
    assert expected.isfinite().all() and not torch.equal(expected[1], expected[2])
    assert torch.equal(chain(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain()
    graph.replay()
    assert torch.equal(replayed, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("q_dtype, kv_dtype", [(BF16, BF16), (BF16, E4M3), (E4M3, E4M3)])
@pytest.mark.parametrize("tokens, heads", BATCHES)
def test_no_more_error_than_triton(device, tokens, heads, q_dtype, kv_dtype):
    skip_unless_served("sm90")
    case = Case(device, tokens=tokens, heads=heads, q_dtype=q_dtype, kv_dtype=kv_dtype, width=640, seed=17)
    expected = case.expected()
    triton, native = (relative_error(case.run(name), expected) for name in ("triton", "sm90"))
    assert native <= (1.2 if case.tolerance("sm90") == TOLERANCE else 1.3) * triton


def test_no_tokens(device, provider):
    case = Case(device, tokens=1, heads=8)
    out = sparse_mla(
        case.query[:0, None], case.swa[:, None], None, case.indices[:0], case.compressed[:, None],
        case.topk_lens[:0].to(device), case.visible[:0].to(device), provider=provider,
    )  # fmt: skip
    assert out.shape == (0, 1, 8, 512)


@pytest.mark.parametrize("few", [True, False])
def test_the_self_test_finds_a_wrong_output(fast_provider, few, monkeypatch):
    """In any of its calls, of which the larger ones have other kernels of the sm90 provider."""
    load, copies = interface._load_provider, None if fast_provider == "sm90" else (1, 2)
    checks.check_sparse_mla(fast_provider, 8, BF16, E4M3, copies)

    def wrong(name):
        def run(call):
            load(name)(call)
            if name == fast_provider and few == (len(call.query) == 2):
                call.out[-1, -1] += 0.25

        return run

    monkeypatch.setattr(interface, "_load_provider", wrong)
    with pytest.raises(checks.Failed):
        checks.check_sparse_mla(fast_provider, 8, BF16, E4M3, copies)


def test_pick_says_why():
    name, why = pick_provider("cpu")
    assert name == "reference" and "cpu" in why


@pytest.mark.parametrize("name", PROVIDERS)
def test_who_serves_is_who_was_asked(name):
    """All are right, so no result of theirs tells one from another."""
    assert interface._load_provider(name).__name__ == f"sparse_mla_{name}"


def test_signatures_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(interface, "_MOST_SIGNATURES", 3)
    known = set()
    for length in range(9):
        interface.remember(known, (length,))
        assert (length,) in known and len(known) <= 3


def bf16(*shape):
    return torch.zeros(shape, dtype=BF16)


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


RAGGED = dict(query=bf16(2, 8, 512), cum_seq_lens_q=ints(3), max_q_len=1)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(query=torch.zeros(2, 1, 8, 256, dtype=BF16)), "query must be"),
        (dict(query=torch.zeros(2, 1, 129, 512, dtype=BF16)), "1 to 128 heads"),
        (dict(query=torch.zeros(2, 1, 8, 512)), "bfloat16 or float8_e4m3fn"),
        (dict(query=torch.zeros(2, 1, 8, 512).to(E4M3)), "needs E4M3 pools"),
        (dict(swa_kv_cache=torch.zeros(4, 64, 1, 512, dtype=BF16)), "swa_kv_cache must be"),
        (dict(compressed_kv_cache=torch.zeros(4, 1, 64, 512).to(E4M3)), "one dtype"),
        (dict(sparse_indices=torch.zeros(2, 130, dtype=torch.int32)), "multiple of 4"),
        (dict(sparse_indices=torch.zeros(2, 192, dtype=torch.int64)), "int32"),
        (dict(sparse_topk_lens=torch.zeros(3, dtype=torch.int32)), "sparse_topk_lens must be [2]"),
        (dict(seq_lens=torch.zeros(3, dtype=torch.int32)), "seq_lens must be [2]"),
        (dict(out=torch.zeros(2, 1, 8, 512)), "out must be bfloat16"),
        (dict(sinks=torch.zeros(64)), "sinks must be float32 [8]"),
        (dict(kv_layout="NDH"), "kv_layout"),
        (dict(max_q_len=3), "go together"),
        (dict(swa_kv_cache=torch.zeros(4, 1, 0, 512, dtype=BF16)), "swa_kv_cache must be"),
        (dict(sparse_topk_lens=torch.zeros(2, 3, dtype=torch.int32)[:, 0]), "sparse_topk_lens must be contiguous"),
        (dict(seq_lens=torch.zeros(1, dtype=torch.int32).expand(2)), "seq_lens must be contiguous"),
        (dict(sinks=torch.zeros(16)[::2]), "sinks must be contiguous"),
        (dict(sinks=torch.zeros(8, device="meta")), "on query's device cpu, one is on meta"),
        (dict(bmm1_scale=torch.ones(2)), "bmm1_scale must be a float, or one float32 element"),
        (dict(bmm2_scale=torch.ones(1, dtype=BF16)), "bmm2_scale must be a float, or one float32 element"),
        (dict(bmm2_scale=torch.ones(1, device="meta")), "bmm2_scale must be a float, or one float32 element"),
        (dict(provider="fastest"), "no provider 'fastest'"),
        (dict(query=bf16(2, 8, 512)), "query must be [batch, q_len, heads, 512]"),
        (dict(query=bf16(2, 1, 0, 512)), "1 to 128 heads"),
        (dict(query=bf16(2, 3, 8, 512)[:, :2]), "must merge without a copy"),
        (dict(query=bf16(2, 2, 8, 512), out=bf16(2, 3, 8, 512)[:, :2]), "must merge without a copy"),
        (dict(query=bf16(2, 1, 8, 1024)[..., ::2]), "of query and sparse_indices must be contiguous"),
        (dict(sparse_indices=ints(2, 384)[:, ::2]), "of query and sparse_indices must be contiguous"),
        (dict(sparse_indices=ints(3, 192)), "sparse_indices must be [2, width]"),
        (dict(sparse_indices=ints(2, 124)), "width >= 128"),
        (dict(sparse_topk_lens=ints(2).long()), "sparse_topk_lens must be int32"),
        (dict(seq_lens=ints(2).long()), "seq_lens must be int32"),
        (dict(out=bf16(1, 2, 8, 512)), "out must be bfloat16 of query's shape"),
        (dict(out=bf16(2, 1, 8, 1024)[..., ::2]), "out must be bfloat16 of query's shape"),
        (dict(sinks=torch.zeros(8, dtype=torch.float64)), "sinks must be float32 [8]"),
        (dict(swa_kv_cache=bf16(4, 1, 64, 256)), "swa_kv_cache must be"),
        (dict(compressed_kv_cache=bf16(4, 64, 1, 512)), "compressed_kv_cache must be"),
        (dict(swa_kv_cache=bf16(4, 0, 1, 512), kv_layout="NHD"), "swa_kv_cache must be [pages, page, 1, 512]"),
        (dict(swa_kv_cache=bf16(4, 1, 64, 1024)[..., ::2]), "swa_kv_cache must hold contiguous rows"),
        (dict(swa_kv_cache=torch.zeros(4, 1, 64, 512)), "swa_kv_cache must hold contiguous rows of bfloat16"),
        (dict(swa_kv_cache=bf16(4, 1, 64, 512).to("meta")), "on query's device cpu, one is on meta"),
        (dict(out=bf16(2, 1, 8, 512).to("meta")), "on query's device cpu, one is on meta"),
        (RAGGED | dict(max_q_len=None), "go together"),
        (RAGGED | dict(cum_seq_lens_q=ints(3).long()), "cum_seq_lens_q must be int32"),
        (RAGGED | dict(cum_seq_lens_q=ints(6)[::2]), "cum_seq_lens_q must be contiguous"),
        (RAGGED | dict(cum_seq_lens_q=ints(3).to("meta")), "on query's device cpu, one is on meta"),
    ],
)
def test_refusals(change, message):
    """A right call before does not let the wrong one pass unchecked."""
    arguments = dict(
        query=torch.zeros(2, 1, 8, 512, dtype=BF16),
        swa_kv_cache=torch.zeros(4, 1, 64, 512, dtype=BF16),
        workspace_buffer=None,
        sparse_indices=torch.zeros(2, 192, dtype=torch.int32),
        compressed_kv_cache=torch.zeros(4, 1, 64, 512, dtype=BF16),
        sparse_topk_lens=torch.zeros(2, dtype=torch.int32),
        seq_lens=torch.zeros(2, dtype=torch.int32),
    )
    sparse_mla(**arguments)
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("]", r"\]")):
        sparse_mla(**(arguments | change))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("tokens, heads", [(3, 8), (140, 32), (140, 64)])
def test_pools_of_more_than_2_31_elements(device, provider, tokens, heads, kv_dtype):
    pages = (2**31 // (64 * 512)) + 8
    case = Case(device, tokens=tokens, heads=heads, kv_dtype=kv_dtype, seed=14)
    for name, columns in (("swa", slice(128)), ("compressed", slice(128, None))):
        large = torch.empty(pages, 64, 512, dtype=kv_dtype, device=device)
        large[-13:] = getattr(case, name)
        setattr(case, name, large)
        shifted = case.indices[:, columns]
        case.indices[:, columns] = torch.where(shifted >= 0, shifted + (pages - 13) * 64, -1)
    assert excess_error(case.run(provider), case.expected()) < case.tolerance(provider)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens, heads, kv_dtype", [(3, 8, E4M3), (140, 32, BF16), (140, 64, BF16), (140, 64, E4M3)]
)
def test_heads_more_than_2_31_elements_apart(device, provider, tokens, heads, kv_dtype):
    """Heads come before tokens in memory, in the query and in the output."""
    case = Case(device, tokens=tokens, heads=heads, kv_dtype=kv_dtype, seed=16)
    apart = 2**31 // (heads - 1) // 8 * 8 + 8
    query, out = (
        torch.empty(heads * apart, dtype=BF16, device=device).as_strided(
            (tokens, 1, heads, 512), (512, 512, apart, 1)
        )
        for _ in range(2)
    )
    query[:, 0] = case.query
    out.fill_(float("nan"))
    assert excess_error(case.run(provider, query=query, out=out), case.expected()) < case.tolerance(provider)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("tokens, heads", [(8, 16), (16, 64), (150, 16), (150, 64)])
def test_graph_replay_with_changed_lengths(device, fast_provider, kv_dtype, tokens, heads):
    case = Case(device, tokens=tokens, heads=heads, kv_dtype=kv_dtype, width=640, seed=15)
    lens, visible = case.topk_lens.to(device), case.visible.to(device)
    out = torch.empty(tokens, 1, heads, 512, dtype=BF16, device=device)

    def step():
        sparse_mla(
            case.query[:, None], case.swa[:, None], None, case.indices, case.compressed[:, None], lens,
            visible, out=out, bmm1_scale=case.bmm1, sinks=case.sinks, provider=fast_provider,
        )  # fmt: skip

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(3):
        other = Case(device, tokens=tokens, heads=heads, kv_dtype=kv_dtype, width=640, seed=100 + seed)
        for mine, new in [(case.swa, other.swa), (case.compressed, other.compressed),
                          (case.query, other.query), (case.indices, other.indices), (lens, other.topk_lens),
                          (visible, other.visible), (case.sinks, other.sinks)]:  # fmt: skip
            mine.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        assert excess_error(out[:, 0], other.expected()) < other.tolerance(fast_provider)
