"""Is the overlay on this vLLM whole, and do its kernels compute what they should on this machine?

    python -m vllm.dsv4_overlay.selftest

Runs on a GPU, or on the CPU through Triton's interpreter. Every expected value is worked out here, in float64
from the definition. Exit status: 0 all checks passed, 1 one failed.
"""

import hashlib
import importlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import torch

GPU = torch.cuda.is_available()
if not GPU:
    # Before Triton is imported. vLLM keeps Triton without a GPU only if none is meant to be visible.
    # The glue would pick the reference, which is not what has to be tested.
    late = os.environ.get("TRITON_INTERPRET") != "1" and "triton" in sys.modules
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_DSV4_PROVIDER": "triton"}
    if late and __name__ == "__main__":  # vLLM 0.33.0 imports it first
        os.execv(sys.executable, [sys.executable, "-m", "vllm.dsv4_overlay.selftest"])
logging.disable(logging.WARNING)

import vllm  # noqa: E402
from tqdm import tqdm  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
FORMATS = (("bfloat16", BF16), ("fp8_per_tensor", E4M3))
EPS, SCALE, KV_SCALE = 1e-6, 512**-0.5, 0.0625
# Relative error of a whole result. Rounding the output to BF16 costs 1.1e-3, and softmax weights may round too.
TOLERANCE = 2e-3
# A sequence passes through insert and attention, both of which round; E4M3 rows also differ in a few ties.
LAYER_TOLERANCE = 4e-3


class Failed(Exception):
    """A check found something wrong; the text is for the table."""


def expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Failed(otherwise)


def relative_error(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    error = float((found.cpu().double() - expected).norm() / expected.norm())
    expect(error <= tolerance, f"relative error {error:.1e}, more than {tolerance:.0e}")
    return error


def check_files() -> str:
    root = Path(vllm.__file__).parents[1]
    record = json.loads((root / "vllm/_dsv4_overlay/record.json").read_text())
    for entry in record["files"]:
        path = root / entry["path"]
        expect(path.is_file(), f"{path} is missing")
        # pip writes to its own file later; what it says about ours is checked when patches are applied.
        if entry["action"] != "updated":
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            expect(found == entry["sha256_after"], f"{path} was edited since it was applied")
    version = f"{record['overlay_version']} ({(record['overlay_commit'] or 'unknown commit')[:12]})"
    return f"{len(record['files'])} files are as applied: overlay {version} on vLLM {record['release']}"


def check_names() -> str:
    from vllm.dsv4_overlay.config import NAME_IS_OURS
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    full, flashmla = "DeepseekV4FullCacheBackend", "DeepseekV4FlashMLASparseBackend"
    if not NAME_IS_OURS:
        full, flashmla = "DeepseekV4FlashInferMLASparseBackend", "DeepseekV4FlashMLABackend"
    names = {"FLASHINFER_MLA_SPARSE_DSV4": full, "FLASHMLA_SPARSE_DSV4": flashmla}
    if NAME_IS_OURS:
        names |= {"V4_FLASHINFER_MLA_SPARSE": full, "FLASHINFER_MLA_SPARSE_V4": full}
        names |= {"V4_FLASHMLA_SPARSE": flashmla}
    for name, expected in names.items():
        found = AttentionBackendEnum[name].get_class().__name__
        expect(found == expected, f"{name} is {found}, not {expected}")
    return f"{len(names)} names lead to the classes they should"


def configured(cache_dtype: str, platform: object) -> str:
    """The cache dtype that a V4 configuration ends with under the full-width backend on `platform`."""
    from vllm.dsv4_overlay import config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            architecture="DeepseekV4ForCausalLM",
            get_num_attention_heads=lambda parallel: 64,
            model=str(Path(__file__).parent),  # a checkpoint without scales
            revision=None,
            dtype=torch.bfloat16,
            hf_config=SimpleNamespace(num_hidden_layers=1, head_dim=512, qk_rope_head_dim=64, sliding_window=128),
        ),
        attention_config=SimpleNamespace(backend=AttentionBackendEnum.FLASHINFER_MLA_SPARSE_DSV4),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, user_specified_block_size=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        load_config=SimpleNamespace(download_dir=None, load_format="auto"),
        speculative_config=None,
        kv_transfer_config=None,
        additional_config={},
    )
    here = config.current_platform, config.provider
    config.current_platform = platform
    if platform is not here[0]:
        config.provider = lambda: None  # what is asked for is for this GPU
    try:
        config.verify_and_update_config(vllm_config)
    finally:
        config.current_platform, config.provider = here
    return vllm_config.cache_config.cache_dtype


def check_cache_dtypes() -> str:
    from vllm.config.cache import CacheDType
    from vllm.platforms.interface import DeviceCapability

    hopper = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: DeviceCapability(9, 0))
    canonical = {"auto": "bfloat16", "bfloat16": "bfloat16"}
    canonical |= dict.fromkeys(("fp8", "fp8_e4m3", "fp8_per_tensor"), "fp8_per_tensor")
    missing = canonical.keys() - set(get_args(CacheDType))
    expect(not missing, f"vLLM does not know {', '.join(missing)}")
    refused = [name for name in get_args(CacheDType) if name not in canonical]
    for name, expected in canonical.items():
        found = configured(name, hopper)
        expect(found == expected, f"{name} becomes {found}, not {expected}")
    for name in refused:
        try:
            found = configured(name, hopper)
        except ValueError as error:
            listed = all(accepted in str(error) for accepted in canonical)
            expect(listed, f"the refusal of {name} does not list what is accepted: {error}")
        else:
            expect(False, f"{name} is accepted as {found}")
    return f"{len(canonical)} accepted, {len(refused)} refused with the list"


def check_gpu() -> str:
    from vllm.dsv4_overlay.config import serves, vllm_serves_itself
    from vllm.platforms import current_platform
    from vllm.third_party.dsv4_kernels import pick_provider

    if not GPU:
        found = "no GPU: kernels interpreted on the CPU"
    else:
        major, minor = torch.cuda.get_device_capability()
        found = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
        if vllm_serves_itself():
            return f"{found}; vLLM's own backend serves here"
        if serves((major, minor)):
            expect(configured("auto", current_platform) == "bfloat16", "the backend refuses this GPU")
            provider, reason = pick_provider("cuda")
            return f"{found}; attention by {provider}: {reason}"
    try:
        configured("auto", current_platform)
    except ValueError:
        return f"{found}; the backend itself refuses to serve here"
    raise Failed(f"{found}; the backend does not refuse to serve here")


def cache_specs(cache_dtype: str, ratios: list[int]) -> dict[str, object]:
    """Cache specs by layer name, as the patched classes of vLLM give them."""
    from vllm.dsv4_overlay import adapter
    from vllm.dsv4_overlay.backend import swa_cache_class

    attention = importlib.import_module(adapter.ATTENTION)
    CompressorStateCache = importlib.import_module(adapter.COMPRESSOR).CompressorStateCache
    cache = SimpleNamespace(cache_dtype=cache_dtype, block_size=256)
    config = SimpleNamespace(cache_config=cache)
    specs = {}

    def add(name: str, cls: type, **fields: object) -> None:
        specs[name] = cls.get_kv_cache_spec(SimpleNamespace(cache_config=cache, **fields), config)

    for number, ratio in enumerate(ratios):
        add(f"{number}.window", swa_cache_class(cache), head_dim=512, window_size=128, block_size=64)
        if ratio == 1:
            continue
        add(f"{number}.main", attention.DeepseekV4MLAAttention, head_dim=512, compress_ratio=ratio,
            kv_cache_dtype=cache_dtype, full_cache=True)  # fmt: skip
        overlap = 2 if ratio == 4 else 1
        states = dict(dtype=torch.float32, sliding_window=ratio * overlap, block_size=4 if ratio == 4 else 8)
        add(f"{number}.states", CompressorStateCache, state_dim=2 * overlap * 512, **states)
        if ratio == 4:
            add(f"{number}.indexer", attention.DeepseekV4IndexerCache, head_dim=132, dtype=torch.uint8,
                compress_ratio=4)  # fmt: skip
            add(f"{number}.indexer_states", CompressorStateCache, state_dim=2 * overlap * 128, **states)
    return specs


def check_pages(cache_dtype: str) -> str:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

    ratios = [1, 1] + [4, 128] * 20 + [4]  # V4-Flash
    specs = cache_specs(cache_dtype, ratios)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        speculative_config=None,
        cache_config=SimpleNamespace(num_gpu_blocks_override=None),
    )
    groups = get_kv_cache_groups(config, specs)
    row = 1024 if cache_dtype == "bfloat16" else 512
    for name, spec in specs.items():
        number, kind = name.split(".")
        # Indexer rows are FlashMLA's; states are padded to the page they share.
        rows = 2 if kind == "main" and ratios[int(number)] == 128 else 64
        expected = 8640 if kind.startswith("indexer") else rows * row
        found = spec.page_size_bytes
        expect(found == expected, f"a page of {name} has {found} bytes, not {expected}")
    grouped = sorted(name for group in groups for name in group.layer_names)
    expect(grouped == sorted(specs), "not every cache is in exactly one group")
    plan = get_kv_cache_config_from_groups(config, groups, 1 << 32)
    for tensor in plan.kv_cache_tensors:
        for name in tensor.shared_by:
            size = specs[name].page_size_bytes * plan.num_blocks
            expect(tensor.size == size, f"{name} needs {size} bytes and gets {tensor.size}")
    return f"{len(specs)} caches of {len(ratios)} layers in {len(groups)} groups; window page {64 * row} bytes"


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Interleaved RoPE on the last 64 columns of `x` [tokens, ..., 512] by `cos_sin` [tokens, 64], float64."""
    cos, sin = cos_sin.double().view(len(x), *[1] * (x.dim() - 2), 64).chunk(2, -1)
    even, odd = x[..., 448::2], x[..., 449::2]
    tail = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., :448], tail), -1)


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS)


def stored(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What float64 rows are after a trip through the cache."""
    if dtype == BF16:
        return rows.to(BF16).double()
    return (rows / KV_SCALE).clamp(-448, 448).float().to(E4M3).double() * KV_SCALE


def compressed_rows(states: torch.Tensor, norm: torch.Tensor, cos_sin: torch.Tensor, ratio: int) -> torch.Tensor:
    """What a compressor makes of the states [tokens, value or score, width] of a sequence, before it is stored."""
    out = []
    for start in range(0, len(states) - ratio + 1, ratio):
        window = states[start : start + ratio].double()
        if ratio == 4:  # the four tokens before give the first 512 channels, these the second
            before = states[max(0, start - 4) : start].double()
            window = torch.cat((before[..., :512], window[..., 512:]))
        out.append((window[:, 0] * window[:, 1].softmax(0)).sum(0))
    first = torch.arange(len(out)) * ratio
    return rotate(normed(torch.stack(out)) * norm.double(), cos_sin[first])


class Sequence:
    """One request of `length` tokens in paged caches whose blocks lie in any order; NaN where nothing is."""

    def __init__(self, length: int, heads: int, ratio: int, dtype: torch.dtype):
        gen = torch.Generator().manual_seed(ratio)
        self.length, self.ratio, self.dtype, self.gen = length, ratio, dtype, gen
        self.q = torch.randn(length, heads, 512, generator=gen).to(BF16)
        self.kv = torch.randn(length, 512, generator=gen).to(BF16)
        self.sink = torch.randn(heads, generator=gen)
        angle = torch.rand(length, 32, generator=gen) * 6.28
        self.cos_sin = torch.cat((angle.cos(), angle.sin()), -1)
        self.window, self.window_table = self.pages(64, 64, 512, dtype)
        self.rows = self.rows_table = None
        if ratio > 1:
            self.rows, self.rows_table = self.pages(256, 256 // ratio, 512, dtype)
            # Partial states: [values | scores], twice as wide where windows overlap.
            width = 1024 if ratio == 4 else 512
            self.states = torch.randn(length, 2, width, generator=gen)
            block = 4 if ratio == 4 else 8
            self.state_cache, self.state_table = self.pages(block, block, 2 * width, torch.float32)
            position = torch.arange(length)
            blocks = self.state_table.cpu()[0].long()[position // block]
            self.state_cache[blocks.to(DEVICE), (position % block).to(DEVICE)] = self.states.flatten(1).to(DEVICE)
            self.norm = torch.rand(512, generator=gen) + 0.5

    def pages(self, tokens: int, rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = -(-self.length // tokens)
        table = torch.randperm(blocks + 2, generator=self.gen)[None, :blocks].int().to(DEVICE)
        cache = torch.full((blocks + 2, rows, width), float("nan")).to(dtype).to(DEVICE)
        return (cache.view(torch.uint8) if dtype == E4M3 else cache), table

    def slots(self, table: torch.Tensor, rows: int, ratio: int = 1) -> torch.Tensor:
        row = torch.arange(self.length) // ratio
        return (table.cpu()[0].long()[row // rows] * rows + row % rows).to(DEVICE)

    def compressed(self) -> torch.Tensor:
        return compressed_rows(self.states, self.norm, self.cos_sin, self.ratio)


def sequence_attention(seq: Sequence, picked: torch.Tensor | None, first: int) -> torch.Tensor:
    """Attention of the tokens from `first` on over the last 128 tokens and compressed rows, in float64."""
    from vllm.dsv4_overlay.attention import query_dtype

    query = rotate(normed(seq.q.double()), seq.cos_sin).to(query_dtype(seq.window)).double()
    window = stored(rotate(seq.kv.double(), seq.cos_sin), seq.dtype)
    rows = stored(seq.compressed(), seq.dtype) if seq.ratio > 1 else None
    out = []
    for position in range(first, seq.length):
        keys = window[max(0, position - 127) : position + 1]
        if rows is not None:
            count = (position + 1) // seq.ratio
            chosen = torch.arange(count) if picked is None else picked[position - first]
            keys = torch.cat((keys, rows[chosen[chosen >= 0].long()]))
        scores = query[position] @ keys.T * SCALE
        # The sink is one more key that has no value.
        weights = torch.cat((scores, seq.sink.double()[:, None]), 1).softmax(1)[:, :-1]
        out.append(weights @ keys)
    return torch.stack(out)


def check_insert(op: str, dtype: torch.dtype) -> str:
    seq = Sequence(length=12, heads=6, ratio=1, dtype=dtype)
    slots = seq.slots(seq.window_table, 64)
    slots[5] = -1  # padding: no row is stored
    q = seq.q.clone().to(DEVICE)
    q_out, q_scale = q, 1.0
    before, scales = [q, seq.kv.to(DEVICE)], [torch.tensor([KV_SCALE], device=DEVICE)]
    if op == "full_cache_fp8_insert":
        q_scale = 4.0
        q_out = torch.empty(q.shape, dtype=E4M3, device=DEVICE)
        before.append(q_out)
        scales.append(torch.tensor([q_scale], device=DEVICE))
    run = getattr(torch.ops.dsv4_kernels, op)
    positions = torch.arange(seq.length, device=DEVICE)
    scales = scales if dtype == E4M3 else []
    run(*before, seq.window, slots, positions, seq.cos_sin.to(DEVICE), *scales, EPS, 64)

    query = rotate(normed(seq.q.double()), seq.cos_sin)
    # Rounding to E4M3 costs 2^-4 at most, 2.7% in the mean; to BF16 a sixteenth of that.
    q_error = relative_error(q_out.float() / q_scale, query, 3e-2 if q_out.dtype == E4M3 else TOLERANCE)
    cache = seq.window.view(dtype).flatten(0, 1).cpu().double() * (KV_SCALE if dtype == E4M3 else 1)
    written = torch.zeros(len(cache), dtype=torch.bool)
    written[slots[slots >= 0].cpu()] = True
    right = not cache[written].isnan().any() and bool(cache[~written].isnan().all())
    expect(right, "other rows of the cache are written than the slots say")
    expected = stored(rotate(seq.kv.double(), seq.cos_sin), dtype)[slots.cpu() >= 0]
    row_error = relative_error(cache[slots[slots >= 0].cpu()], expected, TOLERANCE)
    return f"error of q {q_error:.1e}, of rows {row_error:.1e}"


def compress(seq: Sequence) -> None:
    from vllm.dsv4_overlay import attention

    state = SimpleNamespace(
        token_to_req_indices=torch.zeros(seq.length, dtype=torch.int32, device=DEVICE),
        slot_mapping=torch.zeros(seq.length, dtype=torch.int64, device=DEVICE),
        block_table=seq.state_table,
    )
    rows = SimpleNamespace(slot_mapping=seq.slots(seq.rows_table, 256 // seq.ratio, seq.ratio))
    compressor = SimpleNamespace(
        state_cache=SimpleNamespace(kv_cache=seq.state_cache, prefix="states"),
        norm=SimpleNamespace(weight=seq.norm.to(DEVICE)),
        rms_norm_eps=EPS,
    )
    layer = SimpleNamespace(
        full_cache=True,
        prefix="rows",
        kv_cache=seq.rows,
        kv_scale=KV_SCALE,
        compress_ratio=seq.ratio,
    )
    positions = torch.arange(seq.length, device=DEVICE)
    attention.compress(compressor, layer, positions, seq.cos_sin.to(DEVICE), {"states": state, "rows": rows})


def check_compressor(ratio: int, dtype: torch.dtype) -> str:
    seq = Sequence(length=ratio * 3 + 1, heads=1, ratio=ratio, dtype=dtype)
    compress(seq)
    slots = seq.slots(seq.rows_table, 256 // ratio, ratio)[ratio - 1 :: ratio][:3].cpu()
    rows = seq.rows.view(dtype).flatten(0, 1).cpu().double() * (KV_SCALE if dtype == E4M3 else 1)
    return f"3 rows, error {relative_error(rows[slots], stored(seq.compressed(), dtype), TOLERANCE):.1e}"


def check_sparse_mla(provider: str, heads: int, q_dtype: torch.dtype, dtype: torch.dtype) -> str:
    from vllm.third_party.dsv4_kernels import sparse_mla

    gen = torch.Generator().manual_seed(heads)
    tokens, width = 2, 128 + 64
    query = torch.randn(tokens, 1, heads, 512, generator=gen).to(q_dtype).to(DEVICE)
    pools = [torch.randn(6, 1, page, 512, generator=gen).to(dtype).to(DEVICE) for page in (64, 32)]
    indices = torch.randint(0, 192, (tokens, width), generator=gen, dtype=torch.int32).to(DEVICE)
    lens = torch.tensor([width, 128 + 7], dtype=torch.int32, device=DEVICE)
    seen = torch.tensor([1000, 60], dtype=torch.int32, device=DEVICE)
    sinks = torch.randn(heads, generator=gen).to(DEVICE)
    arguments = (query, pools[0], None, indices, pools[1], lens, seen, None, SCALE, 1.0, sinks)
    expected = sparse_mla(*arguments, provider="reference").cpu().double()
    found = sparse_mla(*arguments, provider=provider)
    # Both results are rounded to BF16.
    return f"error to the reference {relative_error(found, expected, TOLERANCE):.1e}"


def check_layer(ratio: int, dtype: torch.dtype) -> str:
    from vllm.dsv4_overlay import attention
    from vllm.forward_context import override_forward_context

    heads, last = 4, 6
    seq = Sequence(length=300, heads=heads, ratio=ratio, dtype=dtype)
    picked = None
    if ratio == 4:  # as an indexer that has room for 64 rows and likes any
        picked = torch.full((last, 64), -1, dtype=torch.int32)
        for number, row in enumerate(picked):
            count = (seq.length - last + number + 1) // 4
            row[: min(count, 64)] = torch.randperm(count, generator=seq.gen)[:64].int()
    layer = SimpleNamespace(
        compress_ratio=ratio,
        scale=SCALE,
        kv_scale=KV_SCALE if dtype == E4M3 else 1.0,
        q_scale=1.0,
        attn_sink=torch.cat((seq.sink, torch.full((64 - heads,), float("-inf")))).to(DEVICE),
        swa_cache_layer=SimpleNamespace(kv_cache=seq.window),
        kv_cache=seq.rows,
        topk_indices_buffer=picked if picked is None else picked.to(DEVICE),
        max_model_len=1024,
    )
    ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=DEVICE)  # noqa: E731
    # Only the rows that the last tokens see: the interpreter is slow.
    seen = torch.arange(seq.length - last - 127, seq.length, device=DEVICE)
    window = SimpleNamespace(
        slot_mapping=seq.slots(seq.window_table, 64)[seen],
        block_size=64,
        block_table=seq.window_table,
        token_to_req_indices=ints(*[0] * last),
        is_valid_token=torch.ones(last, dtype=torch.bool, device=DEVICE),
        query_start_loc=ints(0, last),
        query_start_loc_cpu=torch.tensor([0, last]),
        seq_lens=ints(seq.length),
        num_decodes=0,
        num_prefills=1,
        num_decode_tokens=0,
        num_prefill_tokens=last,
    )
    q, kv = seq.q.to(DEVICE)[seen], seq.kv.to(DEVICE)[seen]
    q = attention.insert(layer, q, kv, window, seen, seq.cos_sin.to(DEVICE), EPS)
    rows = None
    if ratio > 1:
        compress(seq)
        rows = SimpleNamespace(block_table=seq.rows_table, block_size=256, max_seq_len=seq.length)
    out = torch.empty(last, heads, 512, dtype=BF16, device=DEVICE)
    with override_forward_context(SimpleNamespace(additional_kwargs={})):
        attention.attend(layer, q[-last:], out, window, rows)
    expected = sequence_attention(seq, picked, seq.length - last)
    return f"{seq.length} tokens, error {relative_error(out, expected, LAYER_TOLERANCE):.1e}"


def all_checks() -> list[tuple[str, Callable[..., str], tuple]]:
    from vllm.dsv4_overlay.config import NAME_IS_OURS
    from vllm.third_party.dsv4_kernels import pick_provider

    checks: list[tuple[str, Callable[..., str], tuple]] = [
        ("applied files", check_files, ()),
        ("backend names", check_names, ()),
        ("cache dtypes", check_cache_dtypes, ()),
    ]
    if NAME_IS_OURS:  # else the caches are vLLM's own
        checks += [(f"cache pages, {name}", check_pages, (name,)) for name, _ in FORMATS]
    for op in ("full_cache_bf16_insert", "full_cache_fp8_insert_bf16_q", "full_cache_fp8_insert"):
        checks.append((op, check_insert, (op, BF16 if "bf16_insert" in op else E4M3)))
    for name, dtype in FORMATS:
        checks += [(f"compressor, ratio {r}, {name}", check_compressor, (r, dtype)) for r in (4, 128)]
    # What vLLM would use here, and the one that serves everywhere.
    formats = (("BF16", BF16, BF16), ("FP8 cache", BF16, E4M3), ("FP8 cache and q", E4M3, E4M3))
    for provider in sorted({"triton", pick_provider("cuda")[0] if GPU else "triton"}):
        for heads in (8, 64, 128):
            # FlashInfer takes query and rows of one dtype.
            for kind, q, dtype in (f for f in formats if provider != "flashinfer" or f[1] == f[2]):
                label = f"{provider}, {heads} heads, {kind}"
                checks.append((label, check_sparse_mla, (provider, heads, q, dtype)))
    for name, dtype in FORMATS:
        checks += [(f"whole layer, ratio {r}, {name}", check_layer, (r, dtype)) for r in (1, 4, 128)]
    return [*checks, ("GPU", check_gpu, ())]


def main() -> int:
    if not (Path(vllm.__file__).parent / "_dsv4_overlay/record.json").is_file():
        print(f"The overlay is not applied to the vLLM in {Path(vllm.__file__).parents[1]}.", file=sys.stderr)
        return 1
    start = time.perf_counter()
    checks, failed = all_checks(), 0
    width = max(len(label) for label, _, _ in checks)
    tqdm.write(f"{'check':{width}}  result  detail")
    for label, check, arguments in tqdm(checks, unit="check", leave=False, disable=None):
        try:
            result, detail = "ok", check(*arguments)
        except Exception as error:  # whatever it is, it is the result of this check
            result, detail = "FAILED", str(error).partition("\n")[0]
            failed += 1
            if not isinstance(error, Failed):
                place = traceback.extract_tb(error.__traceback__)[-1]
                detail = f"{type(error).__name__} in {place.filename}:{place.lineno} {detail}"
        tqdm.write(f"{label:{width}}  {result:6}  {detail}")
    took = time.perf_counter() - start
    print(f"\n{len(checks) - failed} of {len(checks)} checks passed, {failed} failed, in {took:.0f} s.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
