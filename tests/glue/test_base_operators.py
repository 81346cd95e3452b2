"""vLLM's own operators of DeepSeek V4 that both backends stand on, each against its definition.

They belong to the base release and the overlay changes none of them; where one is wrong, no comparison of the two
backends means anything. The references are integers and float64 in plain torch, and share no code with vLLM.
Interpreted on the CPU; on a GPU also in the CuTe DSL, which vLLM prefers where cutlass is installed.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
import vllm.third_party.mla_kernels  # noqa: F401  makes Triton's interpreter round as the hardware does
from triton.runtime import interpreter
from vllm.utils.import_utils import has_cutedsl

try:
    from vllm.models.deepseek_v4.common import ops
    from vllm.models.deepseek_v4.common.ops import cache_utils, fused_indexer_q
except ModuleNotFoundError:  # up to 0.21.0
    from vllm.v1.attention.ops import deepseek_v4_ops as ops
    from vllm.v1.attention.ops.deepseek_v4_ops import cache_utils, fused_indexer_q

BF16 = torch.bfloat16
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
POSITIONS = 3000
# What the codes of a format mean, without the sign: E4M3 up to 448 (the code after it is NaN), E2M1 up to 6.
E4M3 = torch.tensor(
    [code * 2.0**-9 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 10) for code in range(127)]
).double()
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """What torch.empty returns is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["triton", "cutedsl"])
def implementation(request, monkeypatch):
    cutedsl = request.param == "cutedsl"
    if cutedsl and not (GPU and has_cutedsl()):
        pytest.skip("needs a GPU and cutlass")
    for module in (cache_utils, fused_indexer_q):  # in 0.21.0 cache_utils has Triton alone
        monkeypatch.setattr(module, "has_cutedsl", lambda: cutedsl, raising=module is fused_indexer_q)
    return request.param


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def sign_bit(values):
    return 1 << (len(values) - 1).bit_length()


def nearest(x, values):
    """Codes of the nearest values, ties to the even code, saturating."""
    middles = (values[1:] + values[:-1]) / 2
    low, high = torch.searchsorted(middles, x.abs()), torch.searchsorted(middles, x.abs(), right=True)
    return torch.where(low % 2 == 0, low, high) + x.signbit() * sign_bit(values)


def decode(codes, values):
    sign = sign_bit(values)
    return values[codes.long() % sign] * (1 - 2 * (codes.long() // sign))


def exponent(amax, limit):
    """The least e with amax <= limit * 2**e."""
    mantissa, power = torch.frexp(amax / limit)
    return power - (mantissa == 0.5).int()


def rotate(x, cos_sin, inverse=False):
    """RoPE over pairs of neighbours of the last 64; with it, how far float32 may be from that."""
    cos, sin = cos_sin.double().unsqueeze(1).chunk(2, -1)
    sin = -sin if inverse else sin
    even, odd = x[..., -64::2], x[..., -63::2]
    out, error = x.clone(), torch.zeros_like(x)
    out[..., -64::2], out[..., -63::2] = even * cos - odd * sin, odd * cos + even * sin
    error[..., -64::2] = ((even * cos).abs() + (odd * sin).abs()) * 2.0**-23
    error[..., -63::2] = ((odd * cos).abs() + (even * sin).abs()) * 2.0**-23
    return out, error


def check_codes(codes, x, error, scale, values, rounded=lambda x: x):
    """`codes` are those of `x / scale`, or of a neighbour of x within `error`; `rounded` comes in between."""
    found = decode(codes, values)
    least, most = (decode(nearest(rounded(x + d) / scale, values), values) for d in (-error, error))
    assert ((least <= found) & (found <= most)).all()
    exact = error == 0
    assert torch.equal(codes.long()[exact], nearest(x / scale, values)[exact])  # the sign of zero too


def rows(gen, *shape, limit, group):
    """BF16 in groups of unlike size, some at the edge of a scale, zero, or below the least scale."""
    x = torch.randn(*shape, generator=gen).unflatten(-1, (-1, group))
    x *= 10 ** (torch.rand(x.shape[:-1], generator=gen)[..., None] * 12 - 7)
    groups = x.view(-1, group)
    for number, value in enumerate((limit, -limit, limit * 1.01, limit / 1.01, 0.0, -0.0, 1e-30, limit * 2.0**20)):
        chosen = groups[number * 3 :: 29]
        chosen *= abs(value) / chosen.abs().amax(-1, keepdim=True)
        chosen[:, number] = value
    return x.flatten(-2).to(BF16)


def angles(gen):
    angle = torch.rand(POSITIONS, 32, generator=gen) * 6.28
    return torch.cat((angle.cos(), angle.sin()), -1)


def test_the_references_round_to_nearest_even():
    x = torch.randn(10000, generator=torch.Generator().manual_seed(0)) * 100
    x = torch.cat((x, E4M3.float(), (E4M3[1:] + E4M3[:-1]).float() / 2, x / 1e4, x * 100))
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(nearest(x.double(), E4M3), expected.view(torch.uint8).long())
    assert torch.equal(decode(expected.view(torch.uint8), E4M3), expected.double())
    ties = torch.tensor([0.25, 0.75, -1.25, 1.75, 2.5, 3.5, -5, 5.01, 99]).double()
    assert nearest(ties, E2M1).tolist() == [0, 2, 10, 4, 4, 6, 14, 7, 7]
    assert exponent(torch.tensor([447, 448, 449, 896]).double(), 448).tolist() == [0, 0, 1, 1]


def packed_pages(count, rows, gap=0):
    """Pages of `fp8_ds_mla`: 448 E4M3 and 64 BF16 of every row, 7 scales and a zero of every row, padding.

    Filled with 0xFF, which is NaN in all three formats.
    """
    return torch.full((count, math.ceil(rows * 584 / 576) * 576 + gap), 0xFF, dtype=torch.uint8)


def as_rows(pages, rows):
    """The shape and strides in which vLLM has them."""
    return pages.as_strided((len(pages), rows, 584), (pages.stride(0), 584, 1), pages.storage_offset())


def write_row(pages, rows, slot, data, scales):
    page, row = pages[slot // rows], slot % rows
    page[row * 576 :][:576] = data
    page[rows * 576 + row * 8 :][:8] = scales


def quantized(k):
    """Data and scale bytes of BF16 rows [n, 512]."""
    x = k[:, :448].double().unflatten(1, (7, 64))
    # DeepSeek's kernels keep the largest value of a group from being less than 1e-4.
    e = exponent(x.abs().amax(-1).clamp(min=1e-4), 448)
    codes = nearest(x / 2.0 ** e[..., None], E4M3).to(torch.uint8).flatten(1)
    scales = torch.nn.functional.pad(e + 127, (0, 1)).to(torch.uint8)
    return torch.cat((codes, k[:, 448:].contiguous().view(torch.uint8)), 1), scales


def unpacked(data, scales):
    """What rows of those bytes mean, [n, 512] in float64."""
    values = decode(data[:, :448], E4M3) * 2.0 ** (scales[:, :7].double() - 127).repeat_interleave(64, 1)
    return torch.cat((values, data[:, 448:].contiguous().view(BF16).double()), 1)


@pytest.mark.parametrize("page, gap", [(64, 0), (64, 640), (2, 0)], ids=["64", "64-gap", "2"])
def test_quantize_and_insert_k_cache(page, gap):
    """Every byte of the cache; k has rows that have no slot, as with data parallelism."""
    gen = torch.Generator().manual_seed(page + gap)
    pages = packed_pages(4, page, gap)
    edges = [3 * page - 1, 0, page - 1, page, page + 1, 2 * page - 1, 2 * page]
    slots = [-1, *dict.fromkeys(edges + torch.randperm(4 * page, generator=gen).tolist()[:40]), -1]  # each once
    # On a GPU Triton's division may be a bit off, and 448 then gets the next scale: stay on this side of it.
    k = rows(gen, len(slots) + 3, 512, limit=446 if GPU else 448, group=64)
    found = pages.to(DEVICE, copy=True)
    k_cache = found[:, : pages.shape[1] - gap]
    ops.quantize_and_insert_k_cache(k.to(DEVICE), k_cache, torch.tensor(slots, device=DEVICE), page)
    for slot, data, scales in zip(slots, *quantized(k), strict=False):
        if slot >= 0:
            write_row(pages, page, slot, data, scales)
    assert torch.equal(found.cpu(), pages)


GATHERS = [
    (64, 0, [0, 1, 63, 64, 65], None),
    (64, 37, [200, 127, 66, 128, 0], [129, 1, 65, 2, 0]),
    (2, 5, [0, 1, 2, 3, 65], None),
]


@pytest.mark.parametrize("page, offset, lengths, gathers", GATHERS, ids=["whole", "window", "2"])
def test_dequantize_and_gather_k_cache(page, offset, lengths, gathers, implementation):
    """The last `gathers` rows of each request, at `offset`; all else stays as it was."""
    gen = torch.Generator().manual_seed(page)
    width = math.ceil(max(lengths) / page) + 1
    blocks = torch.randperm(len(lengths) * width, generator=gen).view(-1, width)
    pages = packed_pages(blocks.numel(), page)
    count = max(gathers or lengths)
    expected = torch.full((len(lengths), offset + count + 2, 512), float("nan"), dtype=BF16)
    out = expected.clone().to(DEVICE)
    for request, length in enumerate(lengths):
        first = length - (gathers[request] if gathers else length)
        for position in range(first, length):
            codes = torch.randint(0, 127, (448,), generator=gen) + 128 * torch.randint(0, 2, (448,), generator=gen)
            rope = torch.randn(64, generator=gen).to(BF16)
            data = torch.cat((codes.to(torch.uint8), rope.view(torch.uint8)))
            scales = torch.randint(100, 150, (8,), generator=gen).to(torch.uint8)
            slot = int(blocks[request, position // page]) * page + position % page
            write_row(pages, page, slot, data, scales)
            expected[request, offset + position - first] = unpacked(data[None], scales[None])[0].to(BF16)
    k_cache = as_rows(pages.to(DEVICE), page)
    ops.dequantize_and_gather_k_cache(
        out, k_cache, ints(lengths), gathers and ints(gathers), ints(blocks.tolist()), page, offset
    )
    assert torch.equal(out.cpu().view(torch.int16), expected.view(torch.int16))


def test_a_page_beyond_2_to_the_31_bytes(implementation, monkeypatch):
    """As many bytes lie before the cache: an offset that wraps reads or writes there, and not outside."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # nor touch all of it
    expected = packed_pages(1, 64)
    stride = expected.shape[1]
    page = 2**31 // stride + 1
    storage = torch.empty(2**31 + (page + 1) * stride, dtype=torch.uint8, device=DEVICE)
    storage[-stride:] = 0xFF
    k_cache = as_rows(storage[2**31 :].view(page + 1, stride), 64)
    k = rows(torch.Generator().manual_seed(0), 1, 512, limit=448, group=64)
    data, scales = quantized(k)
    write_row(expected, 64, 5, data[0], scales[0])
    ops.quantize_and_insert_k_cache(k.to(DEVICE), k_cache, torch.tensor([page * 64 + 5], device=DEVICE))
    assert torch.equal(storage[-stride:].cpu(), expected[0])
    out = torch.full((1, 1, 512), float("nan"), dtype=BF16, device=DEVICE)
    ops.dequantize_and_gather_k_cache(out, k_cache, ints([6]), ints([1]), ints([[page]]), 64, 0)
    assert torch.equal(out[0].cpu(), unpacked(data, scales).to(BF16))


@pytest.mark.parametrize("page, topk", [(64, 512), (64, 1025), (2, 640)])
def test_compute_global_topk_indices_and_lens(page, topk):
    """Indices of padding tokens may be anything, and so may their request."""
    gen = torch.Generator().manual_seed(topk)
    tokens, requests, blocks = 12, 4, 40
    local = torch.randint(0, blocks * page, (tokens, topk + 3), generator=gen, dtype=torch.int32)
    local[:, :3] = torch.tensor([page - 1, page, blocks * page - 1])
    local[torch.rand(local.shape, generator=gen) < torch.linspace(0, 1, tokens)[:, None]] = -1
    owner = torch.randint(0, requests, (tokens,), generator=gen, dtype=torch.int32)
    valid = torch.arange(tokens) % 5 != 3
    table = torch.randint(0, 10**6, (requests, blocks + 5), generator=gen, dtype=torch.int32)
    indices, lens = ops.compute_global_topk_indices_and_lens(
        local.to(DEVICE)[:, :topk], owner.to(DEVICE), table.to(DEVICE)[:, :blocks], page, valid.to(DEVICE)
    )
    local = local[:, :topk]
    expected = table[owner[:, None], local.clamp(min=0) // page] * page + local % page
    expected[local < 0] = -1
    assert torch.equal(indices.cpu()[valid], expected[valid])
    assert lens.tolist() == [int(ok * (row >= 0).sum()) for ok, row in zip(valid, local, strict=True)]


# (tokens before this chunk, tokens in it)
CHUNKS = ((0, 1), (0, 130), (60, 6), (126, 3), (500, 0), (127, 1), (2046, 4))


@pytest.mark.parametrize("ratio, topk, width", [(1, 0, 512), (4, 512, 512), (4, 20, 24), (128, 17, 17)])
def test_combine_topk_swa_indices(ratio, topk, width):
    """Rows of the gathered buffer: what was picked, then the window, then -1; each request has `most` rows."""
    gen = torch.Generator().manual_seed(topk)
    window, most, offset, before = 128, 3000, 700, 9
    starts = [before]
    for _, new in CHUNKS:
        starts.append(starts[-1] + new)
    tokens = starts[-1] - before
    picked = torch.randint(0, offset, (tokens, width + 8), generator=gen, dtype=torch.int32)
    gathers = [new + min(old, window - 1) for old, new in CHUNKS]
    indices, lens = ops.combine_topk_swa_indices(
        picked.to(DEVICE)[:, :width], ints(starts), ints([old + new for old, new in CHUNKS]), ints(gathers),
        window, ratio, topk, most, offset,
    )  # fmt: skip
    expected = torch.full((tokens, math.ceil((topk + window) / 128) * 128), -1, dtype=torch.int32)
    expected_lens = []
    for request, (old, new) in enumerate(CHUNKS):
        for position in range(old, old + new):
            chosen = picked[len(expected_lens)][: min((position + 1) // ratio, topk)].tolist()
            first = old + new - gathers[request]
            chosen += [offset + p - first for p in range(max(0, position - window + 1), position + 1)]
            expected[len(expected_lens), : len(chosen)] = torch.tensor(chosen) + most * request
            expected_lens.append(len(chosen))
    assert torch.equal(indices.cpu(), expected)
    assert lens.tolist() == expected_lens


@pytest.mark.parametrize("packed", [False, True], ids=["float32", "ue8m0"])
@pytest.mark.parametrize("tokens, groups, heads", [(1, 1, 8), (4, 2, 4), (7, 8, 1)])
def test_fused_inv_rope_fp8_quant(tokens, groups, heads, packed):
    """Values, scales, the strides that DeepGEMM reads them with, and zeros where it reads past the last token."""
    gen = torch.Generator().manual_seed(tokens)
    o = rows(gen, tokens, groups * heads, 512, limit=448, group=128)
    padded = torch.full((tokens, 64, 512), float("nan"), dtype=BF16)  # FlashMLA's heads, of which there are 64
    padded[:, : groups * heads] = o
    positions, cos_sin = torch.randint(0, POSITIONS, (tokens,), generator=gen), angles(gen)
    codes, scales = ops.fused_inv_rope_fp8_quant(
        padded.to(DEVICE)[:, : groups * heads], positions.to(DEVICE), cos_sin.to(DEVICE), groups, heads,
        tma_aligned_scales=packed,
    )  # fmt: skip
    x, error = rotate(o.double(), cos_sin[positions], inverse=True)
    x, error = (part.unflatten(-1, (4, 128)) for part in (x, error))
    e = exponent(x.abs().amax(-1).clamp(min=1e-10), 448)

    assert codes.stride() == (heads * 512, tokens * heads * 512, 1)
    found = codes.contiguous().cpu().view(torch.uint8).view(tokens, groups * heads, 4, 128)
    check_codes(found, x, error, 2.0 ** e[..., None], E4M3)

    aligned, blocks = math.ceil(tokens / 4) * 4, heads if packed else heads * 4
    assert scales.shape == (tokens, groups, blocks) and scales.stride() == (1, blocks * aligned, aligned)
    everything = scales.as_strided((aligned, groups, blocks), scales.stride()).cpu().contiguous()
    assert (everything[tokens:] == 0).all()
    if packed:
        found = everything[:tokens].view(torch.uint8).view(e.shape)
        assert torch.equal(found.int(), e + 127)
    else:
        assert torch.equal(everything[:tokens].view(e.shape), 2.0 ** e.float())


def indexer(implementation, tokens, use_fp4):
    """One call, with what it was made of: q [tokens, heads, 128] in float64 with RoPE, and its error."""
    gen = torch.Generator().manual_seed(0)
    heads = 64 if GPU else 8
    q = rows(gen, tokens, heads + 2, 128, limit=6 if use_fp4 else 448, group=32 if use_fp4 else 128)
    q = q[:, :heads].contiguous() if implementation == "cutedsl" else q[:, :heads]
    weights = torch.randn(tokens, heads, generator=gen).to(BF16)
    positions, cos_sin = torch.randint(0, POSITIONS, (tokens,), generator=gen), angles(gen)
    found, weights_out = ops.fused_indexer_q_rope_quant(
        positions.to(DEVICE), q.to(DEVICE), cos_sin.to(DEVICE), weights.to(DEVICE), 128**-0.5, 64**-0.5, use_fp4
    )
    x, error = rotate(q.double(), cos_sin[positions])
    return found, weights_out.cpu().double(), x, error, weights.double() * 128**-0.5 * 64**-0.5


TOKENS = [9, 530] if GPU else [9]  # the CuTe DSL kernels take four heads at once from 512 tokens


def to_bf16(x):
    return x.to(BF16).double()


@pytest.mark.parametrize("tokens", TOKENS)
def test_fused_indexer_q_rope_quant_fp8(tokens, implementation):
    """One scale a head, which goes into the weight; RoPE rounds to BF16 first."""
    codes, weights, x, error, expected = indexer(implementation, tokens, use_fp4=False)
    e = exponent(to_bf16(x).abs().amax(-1).clamp(min=1e-4), 448)
    check_codes(codes.cpu().view(torch.uint8), x, error, 2.0 ** e[..., None], E4M3, rounded=to_bf16)
    torch.testing.assert_close(weights, expected * 2.0**e, rtol=2.0**-21, atol=0)


def e2m1x2(self, asm, constraints, values, *rest):
    """The instruction in the CPU's stead; its first operand becomes the high four bits (PTX ISA)."""
    assert "cvt.rn.satfinite.e2m1x2.f32 tmp, $1, $2;" in asm
    high, low = (nearest(torch.from_numpy(value.data).double(), E2M1) for value in values)
    packed = interpreter.TensorHandle((high * 16 + low).numpy().astype("uint32"), tl.uint32)
    return SimpleNamespace(get_result=lambda _: packed)


@pytest.mark.parametrize("tokens", TOKENS)
def test_fused_indexer_q_rope_quant_mxfp4(tokens, implementation, monkeypatch):
    """A scale for 32 values, four of them in an int32; the first of two values is the low nibble."""
    if GPU and torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("E2M1 conversion needs a Blackwell GPU")
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", e2m1x2)
    (packed, scales), weights, x, error, expected = indexer(implementation, tokens, use_fp4=True)
    x, error = (part.unflatten(-1, (4, 32)) for part in (x, error))
    e = exponent(to_bf16(x).abs().amax(-1).clamp(min=6 * 2.0**-126), 6)
    codes = torch.stack((packed.cpu() % 16, packed.cpu() // 16), -1).view(x.shape)
    check_codes(codes, x, error, 2.0 ** e[..., None], E2M1, rounded=to_bf16)
    assert scales.shape == expected.shape and scales.dtype == torch.int32
    assert torch.equal(scales.cpu().contiguous().view(torch.uint8).view(e.shape).int(), e + 127)
    torch.testing.assert_close(weights, expected, rtol=2.0**-21, atol=0)
