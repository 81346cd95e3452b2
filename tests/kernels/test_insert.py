"""The full-width insert operators, against their definition in float64 and bit for bit."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mla_kernels import insert, native

SCHEMAS = {
    "full_cache_bf16_insert": (
        "(Tensor! q, Tensor kv, Tensor! k_cache, Tensor slot_mapping, Tensor position_ids, "
        "Tensor cos_sin_cache, float eps, int cache_block_size) -> ()"
    ),
    "full_cache_fp8_insert": (
        "(Tensor q, Tensor kv, Tensor! q_fp8, Tensor! k_cache, Tensor slot_mapping, "
        "Tensor position_ids, Tensor cos_sin_cache, float fp8_scale, float q_fp8_scale_inv, "
        "float eps, int cache_block_size) -> ()"
    ),
    "full_cache_fp8_insert_bf16_q": (
        "(Tensor! q, Tensor kv, Tensor! k_cache, Tensor slot_mapping, Tensor position_ids, "
        "Tensor cos_sin_cache, float fp8_scale, float eps, int cache_block_size) -> ()"
    ),
}
OPERATORS = list(SCHEMAS)
MAX_POSITION = 64
EPS = 1e-6
SENTINEL = 0x5A
E4M3 = torch.float8_e4m3fn

# fp32 roundings, each at most 2**-24 of the result, that a value can go through. Q: 9 levels of the
# sum, the addition of eps and eps itself count half behind the square root; square root, reciprocal
# and product follow. RoPE: product and difference. E4M3: the scale.
ULP = 2.0**-24
Q_NORM, ROPE, SCALE = 9, 2, 1


@pytest.fixture(
    params=["triton", pytest.param("native", marks=pytest.mark.gpu)], autouse=True
)
def implementation(request, monkeypatch):
    """Every test here runs once for each implementation."""
    if request.param == "native" and not native.load():
        pytest.skip("there are no native kernels for this GPU: scripts/build-kernels.sh")
    monkeypatch.setattr(Case, "implementation", request.param)
    return request.param


class Case:
    """Arguments of one call, in poisoned buffers that are larger than the operators may touch."""

    implementation = "triton"

    def __init__(
        self,
        operator,
        device,
        *,
        seed=0,
        tokens=6,
        slots=None,
        heads=3,
        block_size=4,
        num_blocks=5,
        padding=0,
        cache_dims=3,
        uint8=False,
        kv_factor=3.0,
        fp8_scale=0.371935,
        q_scale_inv=2.9,
        index_dtypes=(torch.int64, torch.int64),
        cos_sin_dtype=torch.float32,
        extra_stride=0,
    ):
        self.operator, self.block_size, self.tokens, self.heads = (
            operator,
            block_size,
            tokens,
            heads,
        )
        self.fp8 = operator != "full_cache_bf16_insert"
        self.q_fp8_out = operator == "full_cache_fp8_insert"
        generator = torch.Generator().manual_seed(seed)
        pad = extra_stride
        slots = tokens if slots is None else slots

        # Rows from far below sqrt(eps) to far above, so that eps is seen and does not hide the
        # norm.
        size = torch.logspace(-4, 1, max(tokens, 1))[:tokens, None, None]
        q = torch.randn(tokens + pad, heads + pad, 512 + 8 * pad, generator=generator)
        q[:tokens] *= size
        self.q_buffer = q.bfloat16().to(device)
        self.q = self.q_buffer[:tokens, :heads, :512]
        kv = torch.randn(tokens + pad, 512 + 64 * pad, generator=generator) * kv_factor
        self.kv = kv.bfloat16().to(device)[:, :512]
        angle = torch.rand(MAX_POSITION, 32, generator=generator, dtype=torch.float64) * 6.3
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], -1).to(cos_sin_dtype).to(device)

        chosen = torch.randperm(num_blocks * block_size, generator=generator)[:slots]
        chosen[1::3] = -1
        self.slots = chosen.to(index_dtypes[0]).to(device)
        positions = torch.randint(0, MAX_POSITION, (tokens,), generator=generator)
        self.positions = positions.to(index_dtypes[1]).to(device)

        self.itemsize = 1 if self.fp8 else 2
        dtype = (torch.uint8 if uint8 else E4M3) if self.fp8 else torch.bfloat16
        self.block_stride = block_size * 512 + padding
        storage = torch.full(
            (num_blocks * self.block_stride * self.itemsize,), SENTINEL, dtype=torch.uint8
        )
        self.storage = storage.to(device)
        shape = {
            2: (num_blocks, block_size * 512),
            3: (num_blocks, block_size, 512),
            4: (num_blocks, block_size, 1, 512),
            -4: (num_blocks, 1, block_size, 512),
        }[cache_dims]
        strides = [1]
        for length in shape[:1:-1]:
            strides.insert(0, strides[0] * length)
        self.cache = self.storage.view(dtype).as_strided(shape, (self.block_stride, *strides))

        self.fp8_scale, self.q_scale_inv = fp8_scale, q_scale_inv
        q_fp8_shape = (tokens + pad, heads + pad, 512 + 16 * pad)
        self.q_fp8_buffer = torch.full(q_fp8_shape, SENTINEL, dtype=torch.uint8, device=device)
        self.q_fp8 = self.q_fp8_buffer.view(E4M3)[:tokens, :heads, :512]

    def args(self):
        index = (self.slots, self.positions, self.cos_sin)
        tail = (EPS, self.block_size)
        if self.operator == "full_cache_bf16_insert":
            return (self.q, self.kv, self.cache, *index, *tail)
        if self.q_fp8_out:
            return (
                self.q,
                self.kv,
                self.q_fp8,
                self.cache,
                *index,
                self.fp8_scale,
                self.q_scale_inv,
                *tail,
            )
        return (self.q, self.kv, self.cache, *index, self.fp8_scale, *tail)

    def run(self):
        self.q_before = self.q_buffer.cpu().clone()
        # torch calls the native operators wherever they are loaded, the module always Triton's.
        served = insert if self.implementation == "triton" else torch.ops.mla_kernels
        getattr(served, self.operator)(*self.args())
        return self

    def input_q(self):
        return self.q_before[: self.tokens, : self.heads, :512]

    def output_q(self):
        """The Q result, after checking that nothing around it was written."""
        buffer = (self.q_fp8_buffer if self.q_fp8_out else self.q_buffer).cpu()
        before = torch.full_like(buffer, SENTINEL) if self.q_fp8_out else self.q_before
        around = torch.ones(buffer.shape, dtype=torch.bool)
        around[: self.tokens, : self.heads, :512] = False
        assert torch.equal(buffer[around], before[around])
        if self.q_fp8_out:
            assert torch.equal(
                self.q_buffer.cpu().view(torch.int16), self.q_before.view(torch.int16)
            )
            buffer = buffer.view(E4M3)
        return buffer[: self.tokens, : self.heads, :512]

    def output_rows(self):
        """{token: its cache row}, after checking that no other byte of the cache was written."""
        storage = self.storage.cpu()
        untouched = torch.ones_like(storage, dtype=torch.bool)
        rows = {}
        for token, slot in enumerate(self.slots.tolist()):
            if not 0 <= slot < self.cache.shape[0] * self.block_size:
                continue
            start = slot // self.block_size * self.block_stride + slot % self.block_size * 512
            span = slice(start * self.itemsize, (start + 512) * self.itemsize)
            untouched[span] = False
            rows[token] = storage[span].view(E4M3 if self.fp8 else torch.bfloat16)
        assert (storage[untouched] == SENTINEL).all()
        return rows


def rotate(x, cos_sin):
    """Interleaved RoPE of the last 64 of 512 values, and the magnitudes that enter each value."""
    cos, sin = cos_sin[..., :32], cos_sin[..., 32:]
    even, odd = x[..., 448::2], x[..., 449::2]
    out, magnitude = x.clone(), x.abs()
    out[..., 448::2] = even * cos - odd * sin
    out[..., 449::2] = even * sin + odd * cos
    magnitude[..., 448::2] = (even * cos).abs() + (odd * sin).abs()
    magnitude[..., 449::2] = (even * sin).abs() + (odd * cos).abs()
    return out, magnitude


def assert_rounds_to(actual, exact, error):
    """`actual` is a value within `error` of `exact`, rounded once: unique but at a boundary."""
    error = torch.where(error.isfinite(), error, 0.0)
    if actual.dtype == E4M3:
        exact = exact.clamp(-448, 448)
        low, high = ((exact + sign * error).float().clamp(-448, 448) for sign in (-1, 1))
        low, high = low.to(E4M3).float(), high.to(E4M3).float()
    else:
        low, high = ((exact + sign * error).float().bfloat16().float() for sign in (-1, 1))
    actual = actual.float()
    assert torch.equal(actual.isnan(), exact.isnan())
    number = ~exact.isnan()
    assert ((low <= actual) & (actual <= high))[number].all()
    # The bounds mean something: they nearly always are one value.
    assert (low != high)[number].float().mean() < 0.005


def rounded(scale):
    """What the kernels take a scale for: the fp32 next to it."""
    return torch.tensor(scale, dtype=torch.float32).double()


def check_against_definition(case):
    case.run()
    cos_sin = case.cos_sin.cpu().double()[case.positions.cpu().long()]
    x = case.input_q().double()
    normed = x * (1 / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS))
    exact, magnitude = rotate(normed, cos_sin[:, None, :])
    error = magnitude * (Q_NORM + ROPE) * ULP
    if case.q_fp8_out:
        scale = rounded(case.q_scale_inv)
        exact, error = exact * scale, error * scale + (exact * scale).abs() * SCALE * ULP
    if exact.numel():
        assert_rounds_to(case.output_q(), exact, error)

    rows = case.output_rows()
    exact, magnitude = rotate(case.kv.cpu().double()[: case.tokens], cos_sin)
    error = magnitude * ROPE * ULP
    error[:, :448] = 0
    if case.fp8:
        scale = rounded(case.fp8_scale)
        exact, error = exact / scale, error / scale + (exact / scale).abs() * SCALE * ULP
    if rows:
        tokens = list(rows)
        stored = torch.stack([rows[token].float() for token in tokens]).to(rows[tokens[0]].dtype)
        assert_rounds_to(stored, exact[tokens], error[tokens])


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("heads", [1, 3, 8, 64, 128])
def test_heads(operator, heads, device):
    check_against_definition(Case(operator, device, seed=heads, heads=heads, tokens=2))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_index_dtypes(operator, slot_dtype, position_dtype, device):
    case = Case(operator, device, seed=1, heads=2, index_dtypes=(slot_dtype, position_dtype))
    check_against_definition(case)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("before", [-1, MAX_POSITION, 2**31 - 1])
def test_positions_written_just_before(operator, position_dtype, before, device):
    """What was there before the right positions may be looked at, as a hint, and may be anything."""
    case = Case(operator, device, seed=2, tokens=40, num_blocks=20, index_dtypes=(torch.int64, position_dtype))
    positions, args = case.positions.clone(), case.args
    case.positions.fill_(before)

    def written_now():
        case.positions.copy_(positions)
        return args()

    case.args = written_now
    check_against_definition(case)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("slots", [0, 1, 9])
def test_slot_mapping_shorter_than_q(operator, slots, device):
    check_against_definition(Case(operator, device, seed=slots, tokens=12, slots=slots))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_slots_outside_the_cache_write_nothing(operator, slot_dtype, device):
    """The block behind the cache is there, and is another's."""
    case = Case(operator, device, seed=5, index_dtypes=(slot_dtype, torch.int64))
    case.cache = case.cache[:-1]
    case.slots[:6] = torch.tensor([16, 3, 19, 15, 17, 18])
    check_against_definition(case)


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_gpu_that_is_not_the_current_one(operator, second_gpu):
    check_against_definition(Case(operator, second_gpu, seed=1, heads=2))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("cache_dims", [2, 3, 4, -4])
@pytest.mark.parametrize("padding", [0, 96])
def test_cache_layouts(operator, cache_dims, padding, device):
    case = Case(
        operator, device, seed=padding, cache_dims=cache_dims, padding=padding, uint8=padding == 0
    )
    check_against_definition(case)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("block_size", [1, 2, 64])
def test_block_sizes(operator, block_size, device):
    case = Case(
        operator, device, seed=block_size, block_size=block_size, num_blocks=12, padding=512
    )
    check_against_definition(case)


@pytest.mark.parametrize("operator", OPERATORS)
def test_strided_inputs(operator, device):
    case = Case(operator, device, seed=4, tokens=5, heads=5, extra_stride=3)
    assert not case.q.is_contiguous() and case.kv.stride(0) > 512
    check_against_definition(case)


@pytest.mark.parametrize("operator", OPERATORS)
def test_bf16_cos_sin(operator, device):
    check_against_definition(Case(operator, device, seed=5, cos_sin_dtype=torch.bfloat16))


@pytest.mark.parametrize("operator", OPERATORS[1:])
def test_saturation(operator, device):
    case = Case(operator, device, seed=6, kv_factor=1e4, q_scale_inv=1e4)
    check_against_definition(case)
    stored = torch.stack([row.float() for row in case.output_rows().values()])
    assert (stored.abs() == 448).float().mean() > 0.5


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("operator", OPERATORS)
def test_nonfinite_stays_where_it_belongs(operator, device):
    case = Case(operator, device, seed=7, tokens=7)
    case.kv[0, 3] = float("nan")
    case.kv[2, 500] = float("nan")  # and 501, through RoPE
    case.kv[3, 5] = float("inf")
    case.kv[3, 446] = float("-inf")
    case.q[1, 1, 7] = float("nan")
    case.q[2, 0, 7] = float("inf")  # the rest of the head becomes 0
    check_against_definition(case)
    rows = case.output_rows()
    assert rows[0].float().isnan().nonzero().flatten().tolist() == [3]
    assert rows[2].float().isnan().nonzero().flatten().tolist() == [500, 501]
    assert not rows[3].float().isnan().any()
    assert case.output_q().float().isnan().sum() == 512 + 1


@pytest.mark.parametrize("operator", OPERATORS)
def test_empty_batch(operator, device):
    check_against_definition(Case(operator, device, tokens=0))


def documented_q(x, cos_sin):
    """Step 1 and 2 of the module docstring, in its words."""
    squares = x.float() * x.float()
    u = (squares[..., :256] + squares[..., 256:]).unflatten(-1, (32, 8)).unbind(-1)
    r = ((u[0] + u[4]) + (u[2] + u[6])) + ((u[1] + u[5]) + (u[3] + u[7]))
    for half in (16, 8, 4, 2, 1):
        r = r[..., :half] + r[..., half:]
    eps = torch.tensor(EPS, dtype=torch.float32)
    # Of a float64, rounded: torch's fp32 square root on CPUs is an ulp off at times.
    root = torch.sqrt((r * 2.0**-9 + eps).double()).float()
    return rotate(x.float() * (1.0 / root), cos_sin)[0]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("seed", range(2))
def test_documented_order_of_operations_bit_for_bit(operator, seed, device):
    case = Case(operator, device, seed=seed, tokens=12, heads=5, fp8_scale=7 / 64)
    # All bf16 of seven binades: some of the quotients by 7 are ties between E4M3 values, where the
    # products with the reciprocal fall short.
    sweep = (1 + torch.arange(128) / 128) * 2.0 ** torch.arange(-12, -5)[:, None]
    case.kv[2:4, :448] = sweep.reshape(2, 448)
    case.kv[:, 100] = -0.0
    case.kv[:, 447] = 1e-39  # subnormal
    case.run()
    cos_sin = case.cos_sin.cpu()[case.positions.cpu()]
    q = documented_q(case.input_q(), cos_sin[:, None, :])
    kv = rotate(case.kv.cpu().float(), cos_sin)[0]
    if case.q_fp8_out:
        q = (q * rounded(case.q_scale_inv).float()).clamp(-448, 448).to(E4M3)
    if case.fp8:
        kv = (kv / rounded(case.fp8_scale).float()).clamp(-448, 448).to(E4M3)
    output_q = case.output_q().contiguous()
    assert torch.equal(output_q.view(torch.uint8), q.to(output_q.dtype).view(torch.uint8))
    for token, row in case.output_rows().items():
        assert torch.equal(row.view(torch.uint8), kv[token].to(row.dtype).view(torch.uint8))


@pytest.mark.parametrize("operator", OPERATORS)
def test_schema(operator):
    expected = torch._C.parse_schema(f"mla_kernels::{operator}{SCHEMAS[operator]}")
    assert str(getattr(torch.ops.mla_kernels, operator).default._schema) == str(expected)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("tokens", [0, 4])
def test_opcheck(operator, tokens, device):
    case = Case(operator, device, tokens=tokens, heads=2, uint8=True, num_blocks=2)
    # torch cannot compare float8 tensors in test_schema; which arguments change is checked by all
    # tests above.
    skipped = "test_schema" if case.q_fp8_out else None
    utils = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    overload = getattr(torch.ops.mla_kernels, operator).default
    torch.library.opcheck(
        overload, case.args(), test_utils=[name for name in utils if name != skipped]
    )


def test_import_under_a_second_name(monkeypatch, device):
    overlay = Path(insert.__file__).parents[2]
    monkeypatch.syspath_prepend(str(overlay))
    again = importlib.import_module("third_party.mla_kernels.insert")
    assert again is not insert
    check_against_definition(Case("full_cache_bf16_insert", device))


@pytest.mark.parametrize("is_cuda, loaded", [(False, []), (True, ["the tensors' GPU"])])
def test_the_library_is_loaded_for_the_gpu_of_the_tensors(monkeypatch, is_cuda, loaded):
    asked, served = [], []
    monkeypatch.setattr(native, "load", lambda device=None: asked.append(device))
    insert._serve(served.append, SimpleNamespace(is_cuda=is_cuda, device="the tensors' GPU"))
    assert asked == loaded and len(served) == 1


def native_kernel(operator):
    """What the library registered, callable with tensors of any device."""
    overload = getattr(torch.ops.mla_kernels, operator).default
    return lambda *args: overload._op_dk(torch._C.DispatchKey.CUDA, *args)


BAD_ARGUMENTS = {
    "q width": ("q", lambda q: q[:, :, :256], "q must be"),
    "q dtype": ("q", lambda q: q.float(), "q must be"),
    "q last stride": ("q", lambda q: q.transpose(1, 2).contiguous().transpose(1, 2), "q must be"),
    "no heads": ("q", lambda q: q[:, :0], "heads"),
    "129 heads": ("q", lambda q: q.repeat(1, 43, 1), "heads"),
    "kv width": ("kv", lambda kv: kv[:, :448], "kv must be"),
    "kv dtype": ("kv", lambda kv: kv.half(), "kv must be"),
    "kv rows": ("kv", lambda kv: kv[:2], "rows of kv"),
    "slots": ("slots", lambda slots: slots.repeat(2), "rows of kv"),
    "slot dtype": ("slots", lambda slots: slots.short(), "slot_mapping must be"),
    "position dtype": ("positions", lambda positions: positions.float(), "position_ids must be"),
    "positions": ("positions", lambda positions: positions[:2], "positions"),
    "position stride": (
        "positions",
        lambda positions: positions.repeat(2)[::2],
        "position_ids must be",
    ),
    "cos_sin width": ("cos_sin", lambda cos_sin: cos_sin[:, :32], "cos_sin_cache must be"),
    "cos_sin dtype": ("cos_sin", lambda cos_sin: cos_sin.double(), "cos_sin_cache must be"),
    "cache dtype": ("cache", lambda cache: cache.to(torch.float16), "cannot be"),
    "cache width": ("cache", lambda cache: cache[:, :, :256], "does not hold blocks"),
    "cache row stride": (
        "cache",
        lambda cache: cache.transpose(0, 1).contiguous().transpose(0, 1),
        "contiguous",
    ),
    "cache rows apart": ("cache", lambda cache: cache.repeat(1, 2, 1)[:, ::2], "contiguous"),
    "cache last stride": ("cache", lambda cache: cache.repeat(1, 1, 2)[:, :, ::2], "contiguous"),
    "cache block stride": ("cache", lambda cache: cache[:1].expand(5, -1, -1), "contiguous"),
    "block size": ("block_size", lambda size: size * 2, "does not hold blocks"),
    "no block size": ("block_size", lambda size: 0, "does not hold blocks"),
    "q_fp8 shape": ("q_fp8", lambda q: q[:, :2], "q_fp8 must be"),
    "q_fp8 dtype": ("q_fp8", lambda q: q.view(torch.uint8), "q_fp8 must be"),
    "device": ("slots", lambda slots: slots.to("meta"), "slot_mapping must be on"),
    "q dims": ("q", lambda q: q[0], "q must be"),
    "q rows": ("q", lambda q: q[:2], "rows of kv"),
    "kv dims": ("kv", lambda kv: kv[0], "kv must be"),
    "kv last stride": ("kv", lambda kv: kv.repeat(1, 2)[:, ::2], "kv must be"),
    "kv device": ("kv", lambda kv: kv.to("meta"), "kv must be on"),
    "slot dims": ("slots", lambda slots: slots[:, None], "slot_mapping must be"),
    "cos_sin dims": ("cos_sin", lambda cos_sin: cos_sin[0], "cos_sin_cache must be"),
    "cos_sin last stride": ("cos_sin", lambda c: c.repeat(1, 2)[:, ::2], "cos_sin_cache must be"),
    "cos_sin device": ("cos_sin", lambda cos_sin: cos_sin.to("meta"), "cos_sin_cache must be on"),
    "cache device": ("cache", lambda cache: cache.to("meta"), "k_cache must be on"),
    "q_fp8 last stride": ("q_fp8", lambda q: q.mT.contiguous().mT, "q_fp8 must be"),
    "q_fp8 device": ("q_fp8", lambda q: q.to("meta"), "q_fp8 must be on"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_argument_is_refused(name, device, implementation):
    attribute, spoil, message = BAD_ARGUMENTS[name]
    case = Case("full_cache_fp8_insert", device)
    setattr(case, attribute, spoil(getattr(case, attribute)))
    refuse = insert.full_cache_fp8_insert
    if implementation == "native":
        # Not by way of the dispatcher, which sends any call with a meta tensor elsewhere.
        refuse = native_kernel("full_cache_fp8_insert")
    with pytest.raises(ValueError, match=message):
        refuse(*case.args())


@pytest.mark.parametrize("name", ["fp8_scale", "q_fp8_scale_inv"])
def test_a_scale_is_a_float(name, device):
    """Of Triton's alone: an operator's schema says it."""
    case = Case("full_cache_fp8_insert", device)
    attribute = name.replace("q_fp8", "q")
    setattr(case, attribute, torch.tensor(getattr(case, attribute)))
    with pytest.raises(ValueError, match=f"^{name} must be a float, got Tensor"):
        insert.full_cache_fp8_insert(*case.args())


def test_cache_of_the_other_format_is_refused(device):
    bf16, fp8 = (Case(operator, device) for operator in OPERATORS[:2])
    bf16.cache, fp8.cache = fp8.cache, bf16.cache
    for case in (bf16, fp8):
        with pytest.raises(ValueError, match="cannot be"):
            case.run()


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_heads_beyond_32_bit_offsets(operator, device):
    near, far = (Case(operator, device, heads=8) for _ in range(2))
    apart = 2**31 // 7 // 16 * 16 + 16
    for name in ("q", "q_fp8"):
        tensor = getattr(near, name)
        large = torch.empty(8 * apart, dtype=tensor.dtype, device=device)
        setattr(far, name, large.as_strided(tensor.shape, (512, apart, 1)))
    far.q.copy_(near.q)
    far.run()
    check_against_definition(near)
    written = (far.q_fp8 if far.q_fp8_out else far.q).contiguous().view(torch.uint8)
    assert torch.equal(written.cpu(), near.output_q().contiguous().view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_pool_beyond_32_bit_offsets(slot_dtype, device):
    case = Case(
        "full_cache_fp8_insert_bf16_q", device, tokens=4, heads=8, block_size=64, num_blocks=1
    )
    block_stride = 64 * 512 + 4096
    num_blocks = 2**32 // block_stride + 4
    pool = torch.empty(num_blocks * block_stride, dtype=torch.uint8, device=device)
    tail = 3 * block_stride
    pool[-tail:] = SENTINEL
    case.cache = pool.as_strided((num_blocks, 64, 512), (block_stride, 512, 1))
    last = num_blocks - 3
    case.slots = torch.tensor(
        [last * 64, -1, (last + 1) * 64 + 7, (last + 2) * 64 + 63], dtype=slot_dtype
    )
    case.slots = case.slots.to(device)
    case.run()
    # What was written there is the same as in a small pool.
    case.storage, case.block_stride = pool[-tail:], block_stride
    case.slots = torch.where(case.slots < 0, -1, case.slots - last * 64)
    written = case.output_rows()
    case.cache = torch.empty(3, 64, 512, dtype=E4M3, device=device)
    case.run()
    for token, row in written.items():
        expected = case.cache.view(-1, 512)[int(case.slots[token])].cpu()
        assert torch.equal(row.view(torch.uint8), expected.view(torch.uint8))
