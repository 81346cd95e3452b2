"""States saved and packed rows stored in one launch, against their definition in float64."""

import pytest
import torch
from mla_kernels import save_compress_store

E4M3 = torch.float8_e4m3fn
EPS = 1e-6
SENTINEL = 0x5A
# Bound of the fp32 error before a row is rounded, as in test_compressor.py.
ERROR = 24 * 2.0**-24
KINDS = {"C4": (4, 512), "C128": (128, 512), "indexer": (4, 128)}
kinds = pytest.mark.parametrize("kind", KINDS)


class Case:
    """Sequences, of which `step` compresses a part. What must not be read is NaN, or far outside."""

    def __init__(self, kind, device, lengths, seed=0, weight_dtype=torch.bfloat16, padding=16):
        self.ratio, self.head_dim = KINDS[kind]
        self.device = device
        gen = torch.Generator().manual_seed(seed)
        self.width = self.head_dim * (2 if self.ratio == 4 else 1)
        self.window = 8 if self.ratio == 4 else 128
        self.block = 4 if self.ratio == 4 else 8
        longest = max(lengths)
        self.inputs = [torch.randn(n, 2, self.width, generator=gen) for n in lengths]
        self.ape = torch.randn(self.ratio, self.width, generator=gen) * 2
        self.weight = (torch.rand(self.head_dim, generator=gen) + 0.5).to(weight_dtype)
        angle = torch.rand(longest, 32, generator=gen) * 6.3
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], -1)

        blocks = -(-longest // self.block)
        pool = len(lengths) * blocks + 1
        self.table = torch.randperm(pool, generator=gen)[: pool - 1].view(len(lengths), blocks).int()
        stride = self.block * 2 * self.width + padding
        self.state_buffer = torch.full((pool * stride,), float("nan"), device=device)
        shape = (pool, self.block, 2 * self.width)
        self.states = self.state_buffer.as_strided(shape, (stride, 2 * self.width, 1))

        self.rows, self.row_bytes = (64 if self.ratio == 4 else 2), {512: 584, 128: 132}[self.head_dim]
        kv_blocks = sum(lengths) // self.rows + 2
        self.kv_stride = self.rows * self.row_bytes + padding
        self.storage = torch.full((kv_blocks * self.kv_stride,), SENTINEL, dtype=torch.uint8, device=device)
        self.kv_cache = self.storage.as_strided(
            (kv_blocks, self.rows, self.row_bytes), (self.kv_stride, self.row_bytes, 1)
        )
        # A KV slot for every token, so that a store for a token inside a window would show.
        slots = torch.randperm(kv_blocks * self.rows, generator=gen)[: sum(lengths)]
        self.kv_slots = list(slots.split(list(lengths)))

    def arguments(self, spans, pad=0):
        """Of a batch with the tokens [first, end) of each request in `spans`, and `pad` tokens of padding."""
        tokens = [(r, p) for r, first, end in spans for p in range(first, end)]
        slots = [int(self.table[r, p // self.block]) * self.block + p % self.block for r, p in tokens]
        scores = torch.stack([self.inputs[r][p].flatten() for r, p in tokens])
        scores = torch.cat([scores, torch.full((pad, 2 * self.width), float("nan"))])
        long = dict(dtype=torch.int64)
        arguments = {
            "kv_score": scores,
            "ape": self.ape,
            "positions": torch.tensor([p for _, p in tokens] + [2**20 - 1] * pad, **long),
            "slot_mapping": torch.tensor(slots + [-1] * pad, **long),
            "token_to_req_indices": torch.tensor([r for r, _ in tokens] + [2**30] * pad, dtype=torch.int32),
            "block_table": self.table,
            "cos_sin_cache": self.cos_sin,
            "kv_slot_mapping": torch.tensor([int(self.kv_slots[r][p]) for r, p in tokens] + [0] * pad, **long),
            "rms_norm_weight": self.weight,
        }
        arguments = {name: tensor.to(self.device) for name, tensor in arguments.items()}
        return arguments | {
            "state_cache": self.states,
            "kv_cache": self.kv_cache,
            "rms_norm_eps": EPS,
            "compress_ratio": self.ratio,
        }

    def step(self, *spans, pad=0):
        save_compress_store(**self.arguments(spans, pad))
        return self

    def saved(self, request, position):
        value, score = self.inputs[request][position]
        return torch.cat([value, score + self.ape[position % self.ratio]])

    def exact(self, request, end):
        """The row of the window that ends before `end` as it is before rounding, and the bound of its error."""
        first = max(0, end - self.window)
        states = torch.stack([self.saved(request, p) for p in range(first, end)]).double()
        states = states.view(-1, 2, self.width)
        if self.ratio == 4:  # the newer four use the second half of their channels
            newer = torch.arange(first, end) >= end - 4
            states = torch.where(newer[:, None, None], *states.chunk(2, -1)[::-1])
        values, weights = states[:, 0], states[:, 1].softmax(0)
        x = (values * weights).sum(0)
        norm = self.weight.double() / torch.sqrt((x * x).mean() + EPS)
        x, magnitude = x * norm, (values.abs() * weights).sum(0) * norm.abs()
        cos, sin = self.cos_sin[end - self.ratio].double().chunk(2)
        turned = []
        for row, c, s, sign in ((x, cos, sin, -1), (magnitude, cos.abs(), sin.abs(), 1)):
            even, odd = row[-64::2], row[-63::2]
            tail = torch.stack([even * c + sign * odd * s, odd * c + even * s], -1).flatten()
            turned.append(torch.cat([row[:-64], tail]))
        return turned[0], turned[1] * ERROR

    def bytes_of(self, row):
        """What the cache holds of a float64 row: values, scales."""
        rounded = row.float().bfloat16().float()
        if self.head_dim == 128:
            exponent = (rounded.abs().max().clamp(min=1e-4) / 448).log2().ceil()
            values = (rounded * torch.exp2(-exponent)).clamp(-448, 448).to(E4M3)
            return values.view(torch.uint8), torch.exp2(exponent).view(1).view(torch.uint8)
        groups = rounded[:448].view(7, 64)
        exponent = (groups.abs().amax(1) / 448).clamp(min=1e-4).log2().ceil()
        values = (groups * torch.exp2(-exponent)[:, None]).clamp(-448, 448).to(E4M3).flatten()
        values = torch.cat([values.view(torch.uint8), rounded[448:].bfloat16().view(torch.uint8)])
        return values, torch.cat([exponent + 127, torch.zeros(1)]).to(torch.uint8)

    def check(self, tokens):
        """That the states of `tokens` and the rows that end with them are stored, and no other byte."""
        states = self.state_buffer.cpu()
        expected = torch.full_like(states, float("nan"))
        layout = self.states.shape, self.states.stride()
        for request, position in tokens:
            block = int(self.table[request, position // self.block])
            expected.as_strided(*layout)[block, position % self.block] = self.saved(request, position)
        assert torch.equal(states.view(torch.int32), expected.view(torch.int32))

        storage = self.storage.cpu()
        untouched = torch.ones_like(storage, dtype=torch.bool)
        value_bytes = {512: 576, 128: 128}[self.head_dim]
        scale_bytes = self.row_bytes - value_bytes
        ends = [(r, p + 1) for r, p in tokens if (p + 1) % self.ratio == 0]
        differing = total = 0
        for request, end in ends:
            block, row = divmod(int(self.kv_slots[request][end - 1]), self.rows)
            values = block * self.kv_stride + row * value_bytes
            scales = block * self.kv_stride + self.rows * value_bytes + row * scale_bytes
            spans = slice(values, values + value_bytes), slice(scales, scales + scale_bytes)
            exact, error = self.exact(request, end)
            bounds = [self.bytes_of(exact + sign * error) for sign in (-1, 0, 1)]
            for part, span in enumerate(spans):
                untouched[span] = False
                found = storage[span]
                assert (torch.stack([b[part] for b in bounds]) == found).any(0).all()
                differing += int((found != bounds[1][part]).sum())
                total += len(found)
        assert (storage[untouched] == SENTINEL).all()
        assert differing <= 0.002 * total + 1
        return len(ends)


def tokens_of(*spans):
    return [(r, p) for r, first, end in spans for p in range(first, end)]


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matches_definition(kind, dtype, device):
    """A prefill, then decodes whose windows are in the cache but for their last tokens."""
    ratio, _ = KINDS[kind]
    lengths = [3 * ratio, 2 * ratio, ratio + 1, 2]
    case = Case(kind, device, lengths, seed=1, weight_dtype=dtype)
    first = [(0, 0, 3 * ratio - 1), (1, 0, 2 * ratio - 2), (2, 0, ratio)]
    case.step(*first)
    then = [(2, ratio, ratio + 1), (0, 3 * ratio - 1, 3 * ratio), (3, 0, 2), (1, 2 * ratio - 2, 2 * ratio)]
    case.step(*then, pad=3)
    assert case.check(tokens_of(*first, *then)) == 3 + 2 + 1


@kinds
@pytest.mark.parametrize("factor", [1e-6, 1e-8])
def test_eps_and_the_smallest_scale_rule_where_values_are_small(kind, factor, device):
    """vLLM's bound of attention's rows is of the scale, and the indexer's of the largest value."""
    ratio, _ = KINDS[kind]
    case = Case(kind, device, [2 * ratio], seed=9)
    case.inputs[0][:, 0] *= factor
    case.step((0, 0, 2 * ratio))
    assert case.check(tokens_of((0, 0, 2 * ratio))) == 2


@kinds
def test_batches_do_not_change_a_byte(kind, device):
    """One prefill, one token at a time, and three tokens at a time as with MTP."""
    ratio, _ = KINDS[kind]
    length = 3 * ratio
    found = []
    for size in (length, 1, 3):
        case = Case(kind, device, [length, length], seed=2)
        for first in range(0, length, size):
            end = min(first + size, length)
            case.step((1, first, end), (0, first, end))
        found.append(case)
    for other in found[1:]:
        assert torch.equal(found[0].storage, other.storage)
        assert torch.equal(found[0].state_buffer.view(torch.int32), other.state_buffer.view(torch.int32))
    assert found[0].check(tokens_of((0, 0, length), (1, 0, length))) == 6


@kinds
def test_rejected_drafts_are_overwritten(kind, device):
    """The states that a step left for tokens which were not accepted do not reach the next step's row."""
    ratio, _ = KINDS[kind]
    case = Case(kind, device, [2 * ratio], seed=3)
    case.step((0, 0, 2 * ratio - 2))
    right = case.inputs[0].clone()
    case.inputs[0][-2:] = 7.0
    case.step((0, 2 * ratio - 2, 2 * ratio))
    case.inputs[0] = right
    case.step((0, 2 * ratio - 2, 2 * ratio - 1))
    case.step((0, 2 * ratio - 1, 2 * ratio))
    assert case.check(tokens_of((0, 0, 2 * ratio))) == 2


def test_neighbours_in_the_batch_are_not_taken_for_the_window(device):
    """Other requests, at the positions that a window lacks; and the same request's tokens, of another place."""
    case = Case("C4", device, [8, 8, 8], seed=4)
    case.step((0, 0, 7), (1, 0, 5), (2, 0, 7))
    case.step((2, 7, 8), (1, 5, 7), (0, 3, 4), (0, 7, 8))
    assert case.check(tokens_of((0, 0, 8), (1, 0, 7), (2, 0, 8))) == 5


@kinds
def test_padding_of_different_lengths(kind, device):
    """States of tokens that have no request or KV slot are saved, as vLLM's kernels do."""
    ratio, _ = KINDS[kind]
    case = Case(kind, device, [ratio, ratio], seed=5)
    case.step((0, 0, ratio - 1), (1, 0, ratio - 1))
    for name in ("token_to_req_indices", "kv_slot_mapping"):
        arguments = case.arguments([(0, ratio - 1, ratio), (1, ratio - 1, ratio)])
        arguments[name] = arguments[name][:1]
        save_compress_store(**arguments)
    block, row = divmod(int(case.kv_slots[0][-1]), case.rows)
    values = {512: 576, 128: 128}[case.head_dim]
    scales = case.row_bytes - values
    start = block * case.kv_stride
    case.storage[start + row * values :][:values] = SENTINEL  # what was stored for the other request
    case.storage[start + case.rows * values + row * scales :][:scales] = SENTINEL
    assert (case.storage == SENTINEL).all()
    block, row = divmod(ratio - 1, case.block)
    assert torch.equal(case.states[int(case.table[1, block]), row].cpu(), case.saved(1, ratio - 1))


def test_negative_kv_slots_store_nothing(device):
    case = Case("C4", device, [4], seed=6)
    arguments = case.arguments([(0, 0, 4)])
    arguments["kv_slot_mapping"][:] = -1
    save_compress_store(**arguments)
    assert (case.storage == SENTINEL).all()


def test_int32_slots_of_blocks_beyond_32_bit_offsets(device):
    case = Case("C4", device, [4], seed=6)
    arguments = case.arguments([(0, 0, 4)])
    save_compress_store(**arguments)
    block, row = divmod(int(arguments["kv_slot_mapping"][3]), case.rows)
    # 4 * 2**30 is 0 in 32 bits. Only the pages that are written take memory.
    far = torch.empty(5 * 2**30, dtype=torch.uint8, device=device)
    arguments["kv_cache"] = far.as_strided((5, *case.kv_cache.shape[1:]), (2**30, case.row_bytes, 1))
    arguments["kv_slot_mapping"] = torch.full((4,), 4 * case.rows + row, dtype=torch.int32, device=device)
    arguments["slot_mapping"] = arguments["slot_mapping"].int()
    save_compress_store(**arguments)
    values = slice(row * 576, (row + 1) * 576)
    assert torch.equal(far[4 * 2**30 :][values], case.storage[block * case.kv_stride :][values])


def test_an_empty_batch(device):
    case = Case("C4", device, [4], seed=6)
    arguments = case.arguments([(0, 0, 4)])
    arguments["slot_mapping"] = arguments["slot_mapping"][:0]
    save_compress_store(**arguments)
    assert case.check([]) == 0


BAD_ARGUMENTS = {
    "ratio": ("compress_ratio", lambda ratio: 8, "compress_ratio"),
    "state of the other ratio": ("compress_ratio", lambda ratio: 128, "kv_score must be"),
    "states": ("state_cache", lambda states: states[..., :-4], "state_cache must be"),
    "score dtype": ("kv_score", lambda score: score.bfloat16(), "kv_score must be"),
    "ape": ("ape", lambda ape: ape.t().contiguous().t(), "ape must be"),
    "cache width": ("kv_cache", lambda cache: cache[..., :512], "kv_cache must be"),
    "cache dtype": ("kv_cache", lambda cache: cache.view(torch.int8), "kv_cache must be"),
    "table": ("block_table", lambda table: table.long(), "block_table must be"),
    "cos_sin": ("cos_sin_cache", lambda cache: cache.bfloat16(), "cos_sin_cache must be"),
    "positions": ("positions", lambda positions: positions.float(), "positions must be"),
    "weight dtype": ("rms_norm_weight", lambda weight: weight.half(), "rms_norm_weight must be"),
    "weight stride": ("rms_norm_weight", lambda w: w.repeat(2)[::2], "rms_norm_weight must be"),
    "device": ("kv_slot_mapping", lambda slots: slots.to("meta"), "kv_slot_mapping must be on"),
    "few positions": ("positions", lambda positions: positions[:3], "as many states"),
    "few states": ("kv_score", lambda score: score[:3], "as many states"),
    "channels": ("rms_norm_weight", lambda weight: weight[:448], "no rows of 448 channels"),
    "score stride": ("kv_score", lambda score: score.repeat(1, 2)[:, ::2], "kv_score must be"),
    "ape rows": ("ape", lambda ape: ape[:2], "ape must be"),
    "ape rows apart": ("ape", lambda ape: ape.repeat(1, 2)[:, : ape.shape[1]], "ape must be contiguous"),
    "cache dims": ("kv_cache", lambda cache: cache[0], "kv_cache must be"),
    "cache blocks at odd bytes": ("kv_cache", lambda cache: torch.zeros(2**20, dtype=torch.uint8).as_strided(
        cache.shape, (cache.stride(0) + 1, *cache.stride()[1:])), "kv_cache must be"),
    "cache rows apart": ("kv_cache", lambda cache: cache.repeat(1, 2, 1)[:, ::2], "kv_cache must be"),
    "cos_sin width": ("cos_sin_cache", lambda cache: cache[:, :32], "cos_sin_cache must be"),
    **{
        f"device of {name}": (name, lambda tensor: tensor.to("meta"), f"{name} must be on")
        for name in ("kv_score", "ape", "block_table", "cos_sin_cache", "kv_cache", "rms_norm_weight")
    },
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_argument_is_refused(name, device):
    argument, spoil, message = BAD_ARGUMENTS[name]
    arguments = Case("C4", device, [4], seed=7).arguments([(0, 0, 4)])
    arguments[argument] = spoil(arguments[argument])
    with pytest.raises(ValueError, match=message):
        save_compress_store(**arguments)


@pytest.mark.gpu
@kinds
def test_a_captured_step_follows_its_inputs(kind, device):
    """Replays of one CUDA graph, with other positions, slots and padding each time."""
    ratio, _ = KINDS[kind]
    case = Case(kind, device, [2 * ratio, 2 * ratio], seed=8)
    case.step((0, 0, ratio), (1, 0, ratio - 1))
    static = case.arguments([(0, ratio, ratio + 1)], pad=2)
    save_compress_store(**static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        save_compress_store(**static)
    done = tokens_of((0, 0, ratio + 1), (1, 0, ratio - 1))
    for position in range(ratio + 1, 2 * ratio):
        spans = [(0, position, position + 1)]
        if position <= 2 * ratio - 2:
            spans.append((1, position - 2, position - 1))
        now = case.arguments(spans, pad=3 - len(spans))
        for name in ("kv_score", "positions", "slot_mapping", "token_to_req_indices", "kv_slot_mapping"):
            static[name].copy_(now[name])
        graph.replay()
        done += tokens_of(*spans)
    torch.cuda.synchronize()
    assert case.check(done) == sum((p + 1) % ratio == 0 for _, p in set(done))
