"""The full-width compressor store, against its definition in float64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mla_kernels import compressor

MAX_POSITION = 1024
EPS = 1e-6
SENTINEL = 0x5A
STALE = (-1, -(2**31), 2**31 - 1)
E4M3 = torch.float8_e4m3fn
# Bound of the fp32 error, as roundings of the magnitudes that enter a value. Some 90 are done: for
# a weight of the softmax an exponential (2 ulp, and the rounding of an argument of up to about 10),
# again where the running maximum rises; the sums of 16 rows and of 8 steps in numerator and
# denominator; about 12 for norm, weight, RoPE and scale. They point both ways; 2 were measured.
ERROR = 24 * 2.0**-24


class Case:
    """A batch over several requests. Everything that must not be read is NaN or a wild index."""

    def __init__(
        self,
        ratio,
        fp8,
        device,
        *,
        seed=0,
        spans,
        kv_block_size=2,
        padding=0,
        cache_dims=3,
        uint8=False,
        index_dtype=torch.int64,
        weight_dtype=torch.bfloat16,
        cos_sin_dtype=torch.float32,
        fp8_scale=0.371935,
        factor=1.0,
    ):
        self.ratio, self.fp8, self.device, self.kv_block_size = ratio, fp8, device, kv_block_size
        generator = torch.Generator().manual_seed(seed)
        self.width = 1024 if ratio == 4 else 512
        self.window = 8 if ratio == 4 else 128
        self.state_block = 4 if ratio == 4 else 8

        # One token a row: request, position. `spans` are (first position, tokens).
        rows = [(r, first + i) for r, (first, n) in enumerate(spans) for i in range(n)]
        self.requests = torch.tensor([r for r, _ in rows], dtype=torch.int32)
        self.positions = torch.tensor([p for _, p in rows], dtype=index_dtype)
        self.slots = torch.randint(0, 1000, (len(rows),), generator=generator).to(index_dtype)

        # States of whole sequences; in the cache only those that a window of this batch holds.
        longest = max(first + n for first, n in spans)
        shape = (len(spans), longest, 2, self.width)
        self.states = torch.randn(shape, generator=generator) * torch.tensor([[factor], [2.0]])
        num_blocks = -(-longest // self.state_block)
        table = torch.randint(0, 3, (len(spans), num_blocks + 2), generator=generator)
        self.block_table = torch.tensor(STALE, dtype=torch.int32)[table]
        physical = torch.randperm(len(spans) * num_blocks + 3, generator=generator).tolist()
        row_stride = 2 * self.width + padding
        block_stride = self.state_block * row_stride + padding
        self.state_buffer = torch.full((len(physical), block_stride), float("nan"))
        layout = (len(physical), self.state_block, 2 * self.width), (block_stride, row_stride, 1)
        state_cache = self.state_buffer.as_strided(*layout)
        for request, position in rows:
            if (position + 1) % ratio:
                continue
            for p in range(max(0, position + 1 - self.window), position + 1):
                entry = self.block_table[request, p // self.state_block]
                if int(entry) in STALE:
                    entry.fill_(physical.pop())
                state = self.states[request, p].flatten()
                state_cache[int(entry), p % self.state_block] = state
        self.state_cache = self.state_buffer.to(device).as_strided(*layout)

        # A KV slot for every token, so that a store for a token inside a window would show.
        num_kv_blocks = len(rows) // kv_block_size + 2
        order = torch.randperm(num_kv_blocks * kv_block_size, generator=generator)
        self.kv_slots = order[: len(rows)].to(index_dtype)
        self.weight = (torch.rand(512, generator=generator) + 0.5).to(weight_dtype)
        angle = torch.rand(MAX_POSITION, 32, generator=generator, dtype=torch.float64) * 6.3
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], -1).to(cos_sin_dtype)
        self.fp8_scale = fp8_scale if fp8 else None

        self.itemsize = 1 if fp8 else 2
        dtype = (torch.uint8 if uint8 else E4M3) if fp8 else torch.bfloat16
        self.kv_stride = kv_block_size * 512 + padding
        size = num_kv_blocks * self.kv_stride * self.itemsize
        self.storage = torch.full((size,), SENTINEL, dtype=torch.uint8, device=device)
        shape = (num_kv_blocks, kv_block_size, 512)
        strides = (self.kv_stride, 512, 1)
        self.kv_cache = self.storage.view(dtype).as_strided(shape, strides)
        if cache_dims == 4:
            self.kv_cache = self.kv_cache.unsqueeze(2)

    def arguments(self):
        on_device = {
            "token_to_req_indices": self.requests,
            "positions": self.positions,
            "slot_mapping": self.slots,
            "block_table": self.block_table,
            "cos_sin_cache": self.cos_sin,
            "kv_slot_mapping": self.kv_slots,
            "rms_norm_weight": self.weight,
        }
        arguments = {name: tensor.to(self.device) for name, tensor in on_device.items()}
        arguments |= {"state_cache": self.state_cache, "kv_cache": self.kv_cache}
        return arguments | {"rms_norm_eps": EPS, "compress_ratio": self.ratio, "fp8_scale": self.fp8_scale}

    def run(self):
        compressor.compress_norm_rope_store(**self.arguments())
        return self

    def ends_window(self):
        """The tokens whose window has to be stored."""
        tokens = min(map(len, (self.requests, self.positions, self.slots, self.kv_slots)))
        ends = (self.positions[:tokens] + 1) % self.ratio == 0
        ends &= (self.slots[:tokens] >= 0) & (self.kv_slots[:tokens] >= 0)
        return ends.nonzero().flatten().tolist()

    def stored_rows(self):
        """{token: its row}, after checking that no other byte of the cache was written."""
        storage = self.storage.cpu()
        untouched = torch.ones_like(storage, dtype=torch.bool)
        rows = {}
        for token in self.ends_window():
            block, row = divmod(int(self.kv_slots[token]), self.kv_block_size)
            start = block * self.kv_stride + row * 512
            span = slice(start * self.itemsize, (start + 512) * self.itemsize)
            untouched[span] = False
            rows[token] = storage[span].view(E4M3 if self.fp8 else torch.bfloat16)
        assert (storage[untouched] == SENTINEL).all()
        return rows

    def exact_row(self, token):
        """The row before its rounding in float64, and the bound of its error."""
        end = int(self.positions[token]) + 1
        first = max(0, end - self.window)
        window = self.states[self.requests[token], first:end].double()
        if self.ratio == 4:  # the newer four use the second half of their channels
            newer = torch.arange(first, end) >= end - 4
            window = torch.where(newer[:, None, None], window[:, :, 512:], window[:, :, :512])
        values, weights = window[:, 0], window[:, 1].softmax(0)
        x = (values * weights).sum(0)
        norm = self.weight.double() / torch.sqrt((x * x).mean() + EPS)
        x, magnitude = x * norm, (values.abs() * weights).sum(0) * norm.abs()

        cos, sin = self.cos_sin[end - self.ratio].double().chunk(2)
        even, odd = x[448::2].clone(), x[449::2].clone()
        x[448::2], x[449::2] = even * cos - odd * sin, odd * cos + even * sin
        even, odd = magnitude[448::2].clone(), magnitude[449::2].clone()
        magnitude[448::2] = even * cos.abs() + odd * sin.abs()
        magnitude[449::2] = odd * cos.abs() + even * sin.abs()
        scale = torch.tensor(self.fp8_scale, dtype=torch.float32).double() if self.fp8 else 1.0
        return x / scale, magnitude * ERROR / scale

    def check(self):
        self.run()
        rows = self.stored_rows()
        differing = []
        for token, row in rows.items():
            exact, error = self.exact_row(token)
            low, nearest, high = (self.rounded(exact + sign * error) for sign in (-1, 0, 1))
            row = row.float()
            assert torch.equal(row.isnan(), exact.isnan())
            assert ((low <= row) & (row <= high) | exact.isnan()).all()
            differing.append((row != nearest)[~exact.isnan()])
        # An error of `ERROR` moves a value across a rounding boundary now and then, not often.
        assert not rows or torch.cat(differing).float().mean() < 0.005
        return rows

    def rounded(self, exact):
        if self.fp8:
            return exact.clamp(-448, 448).float().to(E4M3).float()
        return exact.float().bfloat16().float()


both_ratios = pytest.mark.parametrize("ratio", [4, 128])
both_formats = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])


@both_ratios
@both_formats
@pytest.mark.parametrize("seed", range(3))
def test_matches_definition(ratio, fp8, seed, device):
    """Prefills and decodes; windows over many blocks; windows that begin in earlier batches."""
    window = 2 * ratio
    spans = (
        (0, window + 9),
        (3 * window - 3, 7),
        (ratio - 1, 1),
        (window - 2, 1),
        (0, 3),
        (5, ratio),
    )
    rows = Case(ratio, fp8, device, seed=seed, spans=spans).check()
    assert len(rows) == sum((a + n) // ratio - a // ratio for a, n in spans)


@both_formats
def test_first_overlapping_window_has_four_tokens(fp8, device):
    case = Case(4, fp8, device, seed=1, spans=((0, 4), (3, 1), (0, 8), (0, 3)))
    assert list(case.check()) == [3, 4, 8, 12]


@both_ratios
@both_formats
def test_negative_slots_write_nothing(ratio, fp8, device):
    spans = [(n * ratio - 1, 1) for n in (1, 2, 3, 4)]
    case = Case(ratio, fp8, device, seed=2, spans=spans)
    case.slots[0] = -1
    case.kv_slots[2] = -1
    assert list(case.check()) == [1, 3]


@both_ratios
@both_formats
def test_slots_outside_the_cache_write_nothing(ratio, fp8, device):
    """The next block is there, and is another's."""
    case = Case(ratio, fp8, device, seed=2, spans=[(n * ratio - 1, 1) for n in (1, 2, 3, 4)])
    case.kv_cache = case.kv_cache[:-1]
    rows = case.kv_cache.shape[0] * case.kv_block_size
    case.kv_slots[:4] = torch.tensor([rows, 0, rows + 1, 2])
    arguments = case.arguments()
    case.kv_slots = case.kv_slots.clone()  # the call keeps its own
    case.kv_slots[[0, 2]] = -1  # what is to be as if
    case.arguments = lambda: arguments
    assert list(case.check()) == [1, 3]


def test_states_outside_the_cache_do_not_take_part(device):
    """A block table's stale entry: the block behind the cache, and no memory at all."""
    for fp8, stale in ((False, None), (True, 2**31 - 1), (True, -1)):
        case = Case(4, fp8, device, seed=6, spans=((4, 4),))
        if stale is None:  # the last block of the buffer, which is NaN
            case.state_cache = case.state_cache[:-1]
            assert int(case.block_table[0, 0]) != len(case.state_cache), "of this seed"
            stale = len(case.state_cache)
        assert case.block_table[0, 1] not in (stale, *STALE)
        case.block_table[0, 0] = stale
        case.states[0, :4, 1] = float("-inf")  # what is to be as if
        assert list(case.check()) == [3]


@pytest.mark.gpu
@both_ratios
def test_a_gpu_that_is_not_the_current_one(ratio, second_gpu):
    Case(ratio, True, second_gpu, seed=2, spans=[(n * ratio - 1, 1) for n in (1, 2, 3)]).check()


@both_ratios
@pytest.mark.parametrize(
    "shortest", ["requests", "positions", "slots", "kv_slots"], ids=lambda name: f"short_{name}"
)
def test_padding_of_different_lengths(ratio, shortest, device):
    spans = (ratio - 2, 4), (2 * ratio - 1, 1), (ratio - 1, 1)
    case = Case(ratio, True, device, seed=3, spans=spans)
    setattr(case, shortest, getattr(case, shortest)[:5])
    assert list(case.check()) == [1, 4]


def test_graph_padding_is_not_looked_up(device):
    """Padded tokens have slot -1; their request and position are left over from another batch."""
    case = Case(4, True, device, seed=4, spans=((0, 12),))
    case.slots[8:] = -1
    case.requests[8:] = 2**30
    case.positions[8:] = 2**20 - 1
    assert list(case.check()) == [3, 7]


@both_ratios
@both_formats
@pytest.mark.parametrize("kv_block_size", [1, 2, 64])
@pytest.mark.parametrize("padding", [0, 64])
def test_strides(ratio, fp8, kv_block_size, padding, device):
    case = Case(
        ratio,
        fp8,
        device,
        seed=kv_block_size,
        spans=((ratio - 2, 4), (2 * ratio - 1, 1)),
        kv_block_size=kv_block_size,
        padding=padding,
        cache_dims=4 if padding else 3,
        uint8=not padding,
    )
    assert len(case.check()) == 2


@both_ratios
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(ratio, index_dtype, dtype, device):
    case = Case(
        ratio,
        True,
        device,
        seed=5,
        spans=((ratio - 2, 3),),
        index_dtype=index_dtype,
        weight_dtype=dtype,
        cos_sin_dtype=dtype,
    )
    assert len(case.check()) == 1


@both_ratios
def test_saturation(ratio, device):
    case = Case(ratio, True, device, seed=6, spans=((ratio - 1, 1),), fp8_scale=1e-4)
    row = case.check()[0].float()
    assert (row.abs() == 448).float().mean() > 0.9 and (row < 0).any()


@both_ratios
def test_eps_rules_where_values_are_small(ratio, device):
    case = Case(ratio, False, device, seed=7, spans=((ratio - 1, 1),), factor=1e-4)
    assert len(case.check()) == 1


@both_ratios
@both_formats
def test_nan_reaches_the_row(ratio, fp8, device):
    case = Case(ratio, fp8, device, seed=8, spans=((ratio - 1, 1), (ratio - 1, 1)))
    case.states[0, -2] = float("nan")
    case.state_cache[case.block_table[0, (ratio - 2) // case.state_block], -2] = float("nan")
    rows = case.check()
    assert rows[0].float().isnan().all()
    assert not rows[1].float().isnan().any()


@both_ratios
def test_scores_far_apart(ratio, device):
    """Exponentials must not overflow, and a step of minus infinities must not give NaN."""
    case = Case(ratio, False, device, seed=9, spans=((ratio - 1, 1),))
    scores = torch.full((ratio, case.width), float("-inf"))
    scores[-2:] = torch.tensor([[3e4], [3e4 - 1]])
    case.states[0, :, 1] = scores
    for position in range(ratio):
        entry = case.block_table[0, position // case.state_block]
        row = case.state_cache[entry, position % case.state_block]
        row[case.width :] = scores[position]
    assert len(case.check()) == 1


@both_ratios
def test_empty_batch(ratio, device):
    case = Case(ratio, True, device, spans=((ratio - 1, 1),))
    case.slots = case.slots[:0]
    assert case.check() == {}


BAD_ARGUMENTS = {
    "ratio": ("compress_ratio", lambda ratio: 8, "compress_ratio must be"),
    "state of the other ratio": ("compress_ratio", lambda ratio: 128, "state_cache must be"),
    "state dtype": ("state_cache", lambda state: state.half(), "state_cache must be fp32"),
    "table dtype": ("block_table", lambda table: table.long(), "block_table must be"),
    "table stride": ("block_table", lambda table: table.t(), "block_table must be"),
    "weight width": ("rms_norm_weight", lambda weight: weight[:448], "rms_norm_weight must be"),
    "weight stride": ("rms_norm_weight", lambda w: w.repeat(2)[::2], "rms_norm_weight must be"),
    "weight dtype": ("rms_norm_weight", lambda weight: weight.half(), "rms_norm_weight must be"),
    "position dtype": ("positions", lambda positions: positions.float(), "positions must be"),
    "request stride": ("token_to_req_indices", lambda r: r[::2], "token_to_req_indices must be"),
    "cos_sin width": ("cos_sin_cache", lambda cache: cache[:, :32], "cos_sin_cache must be"),
    "cache dtype": ("kv_cache", lambda cache: cache.view(torch.int8), "cannot be"),
    "cache width": ("kv_cache", lambda cache: cache[:, :, :448], "does not hold blocks"),
    "cache stride": ("kv_cache", lambda cache: cache[:, ::2], "contiguous"),
    "scale dtype": ("fp8_scale", lambda scale: torch.tensor([scale]), "fp8_scale must be a float"),
    "no scale": ("fp8_scale", lambda scale: None, "cannot be"),
    "device": ("kv_slot_mapping", lambda slots: slots.to("meta"), "kv_slot_mapping must be on"),
    "state dims": ("state_cache", lambda state: state[0], "state_cache must be"),
    "state stride": ("state_cache", lambda s: s.repeat(1, 1, 2)[..., ::2], "state_cache must be"),
    "table dims": ("block_table", lambda table: table[0], "block_table must be"),
    "table device": ("block_table", lambda table: table.to("meta"), "block_table must be on"),
    "weight device": ("rms_norm_weight", lambda w: w.to("meta"), "rms_norm_weight must be on"),
    "cos_sin device": ("cos_sin_cache", lambda c: c.to("meta"), "cos_sin_cache must be on"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_argument_is_refused(name, device):
    argument, spoil, message = BAD_ARGUMENTS[name]
    arguments = Case(4, True, device, spans=((0, 8), (0, 4)), kv_block_size=4).arguments()
    arguments[argument] = spoil(arguments[argument])
    with pytest.raises(ValueError, match=message):
        compressor.compress_norm_rope_store(**arguments)


@pytest.mark.gpu
@both_ratios
def test_pools_beyond_32_bit_offsets(ratio, device):
    case = Case(ratio, True, device, seed=10, spans=((0, 3 * ratio),))
    # The same blocks at the end of a state cache and of a KV cache of more than 2**31 elements.
    small = case.state_cache
    first_state = 2**31 // small[0].numel() + 1
    large = torch.empty(first_state + len(small), *small.shape[1:], device=device)
    large[first_state:] = small
    case.state_cache = large
    case.block_table = torch.where(case.block_table >= 0, case.block_table + first_state, -1)
    blocks, rows = case.kv_cache.shape[:2]
    first_kv = 2**32 // (rows * 512) + 1
    pool = torch.empty(first_kv + blocks, rows, 512, dtype=torch.uint8, device=device)
    pool[first_kv:] = SENTINEL
    case.kv_cache = pool
    kv_slots = case.kv_slots
    case.kv_slots = kv_slots + first_kv * rows
    case.run()
    case.storage, case.kv_slots = pool[first_kv:].flatten(), kv_slots
    case.run = lambda: None
    assert len(case.check()) == 3


def test_no_block_table_stride_selects_a_kernel_of_its_own():
    """It follows from --max-model-len, and warm-up must compile the kernel that serving uses."""
    code = (
        "import mla_kernels.compressor, mla_kernels.packed_compressor, mla_kernels.sparse_index, sys, triton\n"
        "for module in [m for n, m in sys.modules.items() if n.startswith('mla_kernels.')]:\n"
        "    for kernel in vars(module).values():\n"
        "        if isinstance(kernel, triton.JITFunction):\n"
        "            for p in kernel.params:\n"
        "                if p.name.endswith('block_table_stride'):\n"
        "                    print(kernel.__name__, p.do_not_specialize)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(Path(compressor.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    found = set(done.stdout.splitlines())
    kernels = "_compress_kernel True", "_save_compress_kernel True", "_build_kernel True"
    assert found == set(kernels), done.stderr[-1000:]
