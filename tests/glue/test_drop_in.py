"""The drop-in before FlashMLA: the release's own `ops/flashmla.py` over a stand-in for the compiled FlashMLA.

The stand-in takes what FlashMLA takes, 64 or 128 heads too, and computes by the float32 reference; where our
kernels serve, Triton's stand for those of sm90.
"""

import ast
import inspect
import json
import sys
import types
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from vllm.dsv4_overlay import drop_in, index_table
from vllm.platforms import current_platform
from vllm.third_party.mla_kernels import checks, flash_mla, sm90
from vllm.third_party.mla_kernels.attention import KeyPool

BF16 = torch.bfloat16
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
MISFIT = sm90.misfit
NAMES = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")


class FlashMLA(types.ModuleType):
    """What vLLM's build of FlashMLA has, by the names and defaults of its arguments."""

    class FlashMLASchedMeta:
        def __setattr__(self, name, value):
            raise AssertionError("the plan is FlashMLA's own")

    def __init__(self):
        super().__init__("vllm.third_party.flashmla.flash_mla_interface")
        self.calls = []
        for name in ("func", "kvpacked_func", "qkvpacked_func"):
            setattr(self, f"flash_attn_varlen_{name}", None)
        self.get_mla_metadata = lambda *_, **__: (self.FlashMLASchedMeta(), None)

    def flash_mla_with_kvcache(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self._with_kvcache(*args, **kwargs)

    def flash_mla_sparse_fwd(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self._sparse_fwd(*args, **kwargs)

    def _with_kvcache(self, q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata,
                      num_splits=None, softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None,
                      attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None,
                      extra_topk_length=None, out=None, **newer):  # fmt: skip
        if indices is None or q.dtype != BF16:
            return "not sparse", None
        assert isinstance(tile_scheduler_metadata, self.FlashMLASchedMeta)
        assert q.shape[2] in (64, 128) and (attn_sink is None or len(attn_sink) == q.shape[2])
        return flash_mla.flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale,
            causal, is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length,
            extra_topk_length, out, provider="reference",
        )  # fmt: skip

    def _sparse_fwd(self, q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, out=None, **newer):
        if q.dtype != BF16:
            return "not bf16", None, None
        assert q.shape[1] % 64 == 0 and (attn_sink is None or len(attn_sink) == q.shape[1])
        return flash_mla.flash_mla_sparse_fwd(
            q, kv, indices, sm_scale, d_v, attn_sink, topk_length, out, provider="reference"
        )


@pytest.fixture
def stock(monkeypatch):
    module = FlashMLA()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("vllm._flashmla_C", "vllm._flashmla_extension_C"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    return module


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    """As in a new process."""
    for name, value in (("_installed", False), ("_asked_for", None), ("_device", None), ("_narrow", False),
                        ("_warned", set())):  # fmt: skip
        monkeypatch.setattr(drop_in, name, value)
    monkeypatch.delenv(drop_in.VARIABLE, raising=False)


@pytest.fixture
def ops(applied, stock):
    """The release's module, with the drop-in before it, as its patch and its wheel leave it."""
    file = applied / "vllm/v1/attention/ops/flashmla.py"
    namespace = {"__name__": "ops_flashmla"}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    drop_in.install(namespace)
    return SimpleNamespace(**namespace)


@pytest.fixture
def served(monkeypatch, ops):
    """Our kernels serve this device."""
    monkeypatch.setattr(drop_in, "_asked_for", True)
    monkeypatch.setattr(drop_in, "_device", DEVICE)
    monkeypatch.setattr(drop_in, "_PROVIDER", "triton")


@pytest.fixture
def hopper(monkeypatch, ops):
    """Layers are made in a worker on a Hopper GPU; returns the configuration that they see."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(sm90, "misfit", lambda capability: None)
    monkeypatch.setattr(checks, "check_flash_mla", lambda *arguments: None)
    for module in (index_table, flash_mla):
        monkeypatch.setattr(module, "warm_up", lambda device: None)
    config = SimpleNamespace(additional_config={})
    monkeypatch.setattr(drop_in, "get_current_vllm_config_or_none", lambda: config)
    return config


@pytest.fixture
def log(monkeypatch):
    """(level, line) of all that is logged."""
    lines = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            drop_in.logger, level, lambda line, *args, _level=level: lines.append((_level, line % args))
        )
    return lines


def packed_cache(rows, gen, *, apart=0):
    """Blocks as vLLM's caches hold them, the more bytes `apart` where those of other layers are between."""
    cache = checks._packed(rows, gen)
    wide = torch.full((len(cache), cache[0].numel() + apart), 255, dtype=torch.uint8)
    wide[:, : cache[0].numel()] = cache.flatten(1)
    # As a layer has it: [blocks, rows, bytes], to which callers add the head by unsqueeze.
    return wide.as_strided(cache.squeeze(2).shape, (wide.shape[1], cache.shape[3], 1))


def on_device(x):
    """A tensor with the strides that it has."""
    if not isinstance(x, torch.Tensor) or DEVICE.type == "cpu":
        return x
    storage = x.untyped_storage().cuda()
    return torch.empty(0, dtype=x.dtype, device=DEVICE).set_(storage, x.storage_offset(), x.shape, x.stride())


def call_of(kind, heads, plan):
    """Name, positional and keyword arguments of a call as vLLM makes it; `heads` are q's."""
    name, args, kwargs = _call_of(kind, heads, plan)
    return name, tuple(map(on_device, args)), {key: on_device(value) for key, value in kwargs.items()}


def _call_of(kind, heads, plan):
    gen = torch.Generator().manual_seed(heads)
    rand = lambda *shape: torch.randn(*shape, generator=gen).to(BF16)  # noqa: E731
    picked = lambda *shape: torch.randint(-1, 64, shape, generator=gen).int()  # noqa: E731
    counts = lambda n: torch.randint(1, 30, (n,), generator=gen).int()  # noqa: E731
    sink = torch.randn(heads, generator=gen)
    tokens = 4
    if kind.startswith("v4 decode"):
        # deepseek_v4_attention.py (0.20.2, 0.21.0), nvidia/flashmla.py of deepseek_v4 and deepseek_v41
        window = packed_cache("v4", gen, apart=64)
        rows = packed_cache("v4", gen, apart=5000) if "two caches" in kind else None
        return NAMES[0], (), dict(
            q=rand(tokens, heads, 512).unsqueeze(1), k_cache=window.unsqueeze(-2), block_table=None,
            head_dim_v=512, tile_scheduler_metadata=plan, cache_seqlens=None, is_fp8_kvcache=True,
            indices=picked(tokens, 1, 128), topk_length=counts(tokens), softmax_scale=512**-0.5, attn_sink=sink,
            extra_k_cache=None if rows is None else rows.unsqueeze(-2),
            extra_indices_in_kvcache=None if rows is None else picked(tokens, 1, 64),
            extra_topk_length=None if rows is None else counts(tokens),
            out=torch.full((tokens, heads, 512), 7.0, dtype=BF16).unsqueeze(1),
        )  # fmt: skip
    if kind == "v4 prefill":
        return NAMES[1], (), dict(
            q=rand(tokens, heads, 512), kv=rand(8, 8, 512).view(-1, 1, 512),
            indices=picked(tokens, 128).unsqueeze(1), sm_scale=512**-0.5, attn_sink=sink,
            topk_length=counts(tokens), out=torch.full((tokens, heads, 512), 7.0, dtype=BF16),
        )  # fmt: skip
    if kind == "v4.1 prefill":  # 0.33.0: heads sliced out of q, sink and out
        wide, out = rand(tokens, heads + 8, 512), torch.full((tokens, heads + 8, 512), 7.0, dtype=BF16)
        return NAMES[1], (), dict(
            q=wide[:, :heads], kv=rand(64, 1, 512), indices=picked(tokens, 128).unsqueeze(1),
            sm_scale=512**-0.5, attn_sink=torch.randn(heads + 8, generator=gen)[:heads],
            topk_length=counts(tokens), out=out[:, :heads],
        )  # fmt: skip
    if kind.startswith("v3.2 decode"):  # flashmla_sparse.py; a mixed batch is one of as many queries
        batch, q_len = (1, tokens) if "mixed" in kind else (2, 2)
        sinks = {"attn_sink": sink} if "hy_v4" in kind else {}
        return NAMES[0], (), dict(
            q=rand(batch, q_len, heads, 576), k_cache=packed_cache("v32", gen).view(torch.uint8).unsqueeze(-2),
            block_table=torch.empty(batch, 1).int(), head_dim_v=512, cache_seqlens=counts(batch),
            tile_scheduler_metadata=plan, is_fp8_kvcache=True, indices=picked(batch, q_len, 64), softmax_scale=0.1,
            **sinks,
        )  # fmt: skip
    arguments = (rand(tokens, heads, 576), rand(64, 1, 576), picked(tokens, 64).view(tokens, 1, -1), 0.1)
    if kind == "v3.2 prefill":  # up to 0.28.0
        return NAMES[1], arguments, {}
    assert kind == "v3.2 prefill with lengths"  # from 0.29.0 on; hy_v4 has sinks
    out = torch.full((tokens, heads, 512), 7.0, dtype=BF16)
    return NAMES[1], arguments, dict(attn_sink=sink, topk_length=counts(tokens), out=out)


KINDS = ("v4 decode", "v4 decode, two caches", "v4 prefill", "v4.1 prefill", "v3.2 decode", "v3.2 decode, mixed",
         "v3.2 decode, hy_v4", "v3.2 prefill", "v3.2 prefill with lengths")  # fmt: skip


def expected(name, args, kwargs):
    """By the float32 reference."""
    kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    return getattr(flash_mla, name)(*args, **kwargs, provider="reference")


def assert_close(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        torch.testing.assert_close(one.float(), other.float(), rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_vllm_are_served(kind, heads, ops, stock, served):
    name, args, kwargs = call_of(kind, heads, stock.FlashMLASchedMeta())
    wanted = expected(name, args, kwargs)
    found = getattr(ops, name)(*args, **kwargs)
    assert not stock.calls
    assert_close(found, wanted)
    if "out" in kwargs:
        assert found[0].data_ptr() == kwargs["out"].data_ptr()


@pytest.mark.parametrize("heads", [8, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_narrowed_but_is_not_served_is_padded_for_flashmla(kind, heads, ops, stock, served, monkeypatch):
    """The layer gives few heads, and this call is FlashMLA's none the less."""
    monkeypatch.setattr(drop_in, "_narrow", True)
    monkeypatch.setattr(flash_mla, "serves", lambda *_: False)
    name, args, kwargs = call_of(kind, heads, stock.FlashMLASchedMeta())
    wanted, newer = expected(name, args, kwargs), object()
    found = getattr(ops, name)(*args, **kwargs, newer=newer)
    ((_, given),) = stock.calls
    assert given["newer"] is newer
    assert_close(found, wanted)
    if "out" in kwargs:
        assert found[0].data_ptr() == kwargs["out"].data_ptr()
        assert (kwargs["out"] != 7).any()


@pytest.mark.parametrize("serves", [True, False])
def test_a_sink_as_long_as_the_padding(serves, ops, stock, served, monkeypatch):
    """Up to 0.22.1 it is 64 long whatever q has."""
    monkeypatch.setattr(drop_in, "_narrow", True)
    monkeypatch.setattr(flash_mla, "serves", lambda *_: serves)
    name, args, kwargs = call_of("v4 decode", 8, stock.FlashMLASchedMeta())
    wanted = expected(name, args, kwargs)
    kwargs["attn_sink"] = torch.nn.functional.pad(kwargs["attn_sink"], (0, 56), value=float("-inf"))
    assert_close(getattr(ops, name)(*args, **kwargs), wanted)
    assert len(stock.calls) == (not serves)


def untouched(stock, args, kwargs):
    """The stand-in got these very objects."""
    (found_args, found_kwargs), *others = stock.calls
    assert not others and len(found_args) == len(args) and found_kwargs.keys() == kwargs.keys()
    assert all(one is other for one, other in zip(found_args, args, strict=True))
    return all(found_kwargs[key] is value for key, value in kwargs.items())


def dense(plan):
    return dict(
        q=torch.zeros(2, 1, 16, 576, dtype=BF16), k_cache=torch.zeros(4, 64, 1, 576, dtype=BF16),
        block_table=torch.zeros(2, 4).int(), cache_seqlens=torch.ones(2).int(), head_dim_v=512,
        tile_scheduler_metadata=plan, num_splits=torch.zeros(3).int(), softmax_scale=0.1, causal=True,
    )  # fmt: skip


@pytest.mark.parametrize("narrow", [False, True])
def test_dense_attention_is_flashmla_s(narrow, ops, stock, served, monkeypatch):
    monkeypatch.setattr(drop_in, "_narrow", narrow)
    kwargs = dense(stock.FlashMLASchedMeta())
    assert ops.flash_mla_with_kvcache(**kwargs)[0] == "not sparse"
    assert untouched(stock, (), kwargs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_other_dtypes_are_flashmla_s(kind, dtype, ops, stock, served):
    name, args, kwargs = call_of(kind, 8, stock.FlashMLASchedMeta())
    if args:
        args = (args[0].to(dtype), *args[1:])
    else:
        kwargs["q"] = kwargs["q"].to(dtype)
    assert getattr(ops, name)(*args, **kwargs)[0] in ("not sparse", "not bf16")
    assert untouched(stock, args, kwargs)


def refuse(*_):
    raise ValueError("too many rows")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("why", ["off", "another GPU", "a new argument", "slower", "refused"])
def test_what_is_not_served_goes_on_argument_for_argument(why, kind, ops, stock, served, monkeypatch, log):
    heads = 64
    name, args, kwargs = call_of(kind, heads, stock.FlashMLASchedMeta())
    if why == "a new argument":
        kwargs["newer"] = object()
    elif why == "off":
        monkeypatch.setattr(drop_in, "_device", None)
    elif why == "another GPU":
        monkeypatch.setattr(drop_in, "_device", torch.device("cuda", 1))
    monkeypatch.setattr(flash_mla, "serves", lambda *_: why != "slower")
    if why == "refused":
        # 2^31 rows and more, say, which the kernels count in 32 bits
        monkeypatch.setattr(flash_mla, "_attend", refuse)
        for function in ("_with_kvcache", "_sparse_fwd"):
            monkeypatch.setattr(stock, function, lambda *_, **__: "theirs")
    found = getattr(ops, name)(*args, **kwargs)
    assert untouched(stock, args, kwargs)
    if why == "refused":
        assert found == getattr(ops, name)(*args, **kwargs) == "theirs"
        ((level, line),) = log  # once, not for each of the two
        assert level == "warning" and name in line and "too many rows" in line


@pytest.fixture
def theirs(stock, monkeypatch):
    """FlashMLA takes any call, and returns this."""
    for function in ("_with_kvcache", "_sparse_fwd"):
        monkeypatch.setattr(stock, function, lambda *_, **__: "theirs")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("narrow, heads", [(False, 8), (True, 64), (True, 128)])
def test_only_what_a_layer_narrowed_is_padded(narrow, heads, kind, ops, stock, served, theirs, monkeypatch):
    """A copy of q takes time."""
    monkeypatch.setattr(drop_in, "_narrow", narrow)
    monkeypatch.setattr(flash_mla, "serves", lambda *_: False)
    name, args, kwargs = call_of(kind, heads, stock.FlashMLASchedMeta())
    assert getattr(ops, name)(*args, **kwargs) == "theirs"
    assert untouched(stock, args, kwargs)


@pytest.mark.parametrize("change", [dict(causal=True), dict(num_splits=torch.zeros(3).int()), dict(head_dim_v=576),
                                    dict(is_fp8_kvcache=False)])  # fmt: skip
def test_an_option_that_we_do_not_have_is_flashmla_s(change, ops, stock, served, theirs):
    name, args, kwargs = call_of("v4 decode", 64, stock.FlashMLASchedMeta())
    kwargs |= change
    assert getattr(ops, name)(*args, **kwargs) == "theirs"
    assert untouched(stock, args, kwargs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [False, True])
def test_positional_arguments(more, kind, ops, stock, served, theirs):
    """One more than are known is FlashMLA's, and not dropped."""
    name, args, kwargs = call_of(kind, 8, stock.FlashMLASchedMeta())
    parameters = list(inspect.signature(getattr(flash_mla, name)).parameters.values())
    order = [parameter for parameter in parameters if parameter.name not in ("enable_batch_invariant", "provider")]
    given = dict(zip([parameter.name for parameter in order], args, strict=False)) | kwargs
    args = tuple(given.get(parameter.name, parameter.default) for parameter in order) + (object(),) * more
    found = getattr(ops, name)(*args)
    assert untouched(stock, args, {}) and found == "theirs" if more else not stock.calls


@pytest.mark.parametrize("q", [None, torch.zeros(4, 576, dtype=BF16), torch.zeros(4, 1, 8, 1, 576, dtype=BF16)])
@pytest.mark.parametrize("kind", ["v3.2 decode", "v3.2 prefill with lengths"])
def test_what_is_no_query_is_flashmla_s_to_refuse(kind, q, ops, stock, served, theirs):
    name, args, kwargs = call_of(kind, 64, stock.FlashMLASchedMeta())
    args, kwargs = ((q, *args[1:]), kwargs) if args else (args, kwargs | {"q": q})
    assert getattr(ops, name)(*args, **kwargs) == "theirs"
    assert untouched(stock, args, kwargs)


@pytest.mark.parametrize("kind, rows", [("v4 decode", "v4"), ("v4 prefill", "bf16"), ("v4.1 prefill", "bf16"),
                                        ("v3.2 decode", "v32"), ("v3.2 prefill", "bf16-576")])  # fmt: skip
def test_a_call_goes_by_what_was_measured_of_its_rows(kind, rows, ops, stock, served, monkeypatch):
    name, args, kwargs = call_of(kind, 32, stock.FlashMLASchedMeta())
    asked = []
    monkeypatch.setattr(flash_mla, "serves", lambda *arguments: asked.append(arguments) or True)
    getattr(ops, name)(*args, **kwargs)
    assert asked == [(rows, 32, 4)] and not stock.calls


def test_positional_arguments_go_on_as_they_are(ops, stock):
    name, _, kwargs = call_of("v4 decode", 64, stock.FlashMLASchedMeta())
    order = list(inspect.signature(flash_mla.flash_mla_with_kvcache).parameters)
    order = order[: order.index("enable_batch_invariant")]  # which 0.33.0 alone has
    args = tuple(kwargs.get(key, False if key == "causal" else None) for key in order)
    getattr(ops, name)(*args)
    assert untouched(stock, args, {})


def test_installing_twice_is_installing_once(ops, stock, monkeypatch):
    """As when the patch and the wheel are there, whose modules have different names."""
    namespace = vars(ops)
    before = {name: namespace[name] for name in NAMES}
    monkeypatch.setattr(drop_in, "_installed", False)  # another copy of the module
    drop_in.install(namespace)
    assert {name: namespace[name] for name in NAMES} == before
    assert drop_in.padded_heads(8, 64) == 64


def test_callers_of_the_release(applied, ops):
    """Every call in vLLM's tree binds to what FlashMLA and the drop-in take, without an argument unknown to us."""
    signatures = {
        name: inspect.signature(attempt)
        for name, attempt in zip(NAMES, (drop_in._with_kvcache, drop_in._sparse_fwd), strict=True)
    }
    found = {}
    for file in (applied / "vllm").rglob("*.py"):
        text = file.read_text()
        if "v1.attention.ops.flashmla" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
                keys = {word.arg: None for word in node.keywords}
                bound = signatures[node.func.id].bind(None, *[None] * len(node.args), **keys)
                assert not {"more", "unknown"} & bound.arguments.keys(), (file, node.lineno)
                found.setdefault(file.parent.name + "/" + file.name, []).append(node.func.id)
    assert {"mla/flashmla_sparse.py", "mla/flashmla.py"} < found.keys()
    assert any(name.startswith("nvidia/flashmla") or "deepseek_v4_attention" in name for name in found)


@pytest.mark.parametrize("rows", ["v4", "v41", "v32", "bf16"])
def test_layers_are_narrow_where_our_kernels_serve_so_few_heads(rows, hopper):
    assert [drop_in.padded_heads(heads, 64, rows) for heads in (1, 4, 8, 12, 16)] == [8, 8, 8, 16, 16]
    assert drop_in._narrow  # so that a call which is not served is padded for FlashMLA
    assert drop_in.padded_heads(64, 64, rows) == 64
    assert drop_in.padded_heads(128, 128, rows) == 128
    assert drop_in.padded_heads(128, 64, rows) == 64  # prefill is padded to a multiple
    # vLLM hashes it, so that nothing is loaded that was compiled for another width.
    assert hopper.additional_config == {"dsv4_drop_in_widths": {rows: 16}}
    json.dumps(hopper.additional_config, sort_keys=True)


def test_a_layer_is_as_wide_as_all_its_calls_want(hopper, monkeypatch):
    """V4.1 prefills over BF16 rows, V4 over its own."""
    always = ((0, None),)
    few = {16: always, 32: ((0, 9),)}
    fast = {"v4": {32: always}, "v32": {32: always}, "bf16": few, "bf16-576": few}
    monkeypatch.setattr(flash_mla, "_AS_FAST", fast)
    assert [drop_in.padded_heads(32, 64, rows) for rows in ("v4", "v41", "v32", "bf16")] == [32, 64, 32, 64]
    assert drop_in.padded_heads(16, 64, "v41") == 16


@pytest.mark.parametrize("stock_heads", [64, 128])
@pytest.mark.parametrize("rows", ["v4", "v41", "v32", "bf16"])
def test_a_layer_that_is_narrow_is_served_whatever_comes(rows, stock_heads, hopper, monkeypatch):
    for heads in range(1, 129):
        monkeypatch.setattr(drop_in, "_narrow", False)
        width = drop_in.padded_heads(heads, stock_heads, rows)
        assert drop_in._narrow == (width != stock_heads)  # and what is not served is padded
        if width != stock_heads:
            assert heads <= width < stock_heads
            for name in drop_in._ROWS_OF_CALLS[rows]:
                assert all(flash_mla.serves(name, width, tokens) for tokens in (1, 17, 512, 1 << 20))


REASONS = {
    "variable": "switched the drop-in off",
    "config": "switched the drop-in off",
    "gpu": "compute capability 9.0",
    "library": "not built",
    "check": "failed its check of v32 rows with 8 heads: relative error 1",
    "warm-up": "failed its warm-up: no compiler",
    "not installed": None,
    "no CUDA": None,
    "no configuration": None,
    "config of another kind": "check passed",
}


def no_compiler(device):
    assert device == torch.device("cuda", 0)
    raise RuntimeError("no compiler")


@pytest.mark.parametrize("why", REASONS)
def test_layers_are_stock_where_flashmla_serves(why, hopper, monkeypatch, log):
    def failing(provider, rows, heads):
        if rows == "v32":
            raise checks.Failed("relative error 1")

    if why == "variable":
        monkeypatch.setenv(drop_in.VARIABLE, "0")
    elif why == "config":
        hopper.additional_config[drop_in.SETTING] = False
    elif why == "gpu":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
        monkeypatch.setattr(sm90, "misfit", MISFIT)
    elif why == "library":
        monkeypatch.setattr(sm90, "misfit", lambda capability: "it is not built")
    elif why == "check":
        monkeypatch.setattr(checks, "check_flash_mla", failing)
    elif why == "warm-up":
        monkeypatch.setattr(index_table, "warm_up", no_compiler)
    elif why == "not installed":
        monkeypatch.setattr(drop_in, "_installed", False)
    elif why == "no CUDA":
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    elif why == "no configuration":
        monkeypatch.setattr(drop_in, "get_current_vllm_config_or_none", lambda: None)
    else:
        hopper.additional_config = SimpleNamespace(compute_hash=lambda: "0")
    before = dict(vars(hopper))
    assert [drop_in.padded_heads(heads, 64) for heads in (8, 16, 64)] == [64] * 3
    assert vars(hopper) == before
    if REASONS[why] is None:
        assert not log and drop_in._asked_for is None
    else:
        (level, line), *more = log  # one a process
        assert REASONS[why] in line and level == ("warning" if why in ("check", "warm-up") else "info")
        padded = "Heads stay padded for FlashMLA: additional_config is a SimpleNamespace, not a dict."
        assert more == ([("warning", padded)] if why == "config of another kind" else [])
    assert (drop_in._device is None) == (why != "config of another kind")


def test_an_error_that_ends_the_use_of_the_gpu_ends_the_worker(hopper, monkeypatch, log):
    """Nothing says that FlashMLA serves."""

    def illegal_access(*arguments):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(checks, "check_flash_mla", illegal_access)
    monkeypatch.setattr(torch.cuda, "synchronize", illegal_access)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        drop_in.padded_heads(8, 64)
    assert not log and drop_in._asked_for is None


def test_warm_up_compiles_what_large_calls_without_lengths_need(launches):
    """As vLLM gives V3.2's picks, or those from some token on."""
    slots = torch.zeros(9, 2048, dtype=torch.int32)
    for some in (slots, slots[3:]):
        flash_mla._bounded(KeyPool(None, None, some))
    (needed,) = launches
    assert needed[0] == "_columns_kernel"
    launches.clear()
    flash_mla.warm_up(torch.device("cpu"))
    assert launches == {needed}


@pytest.mark.parametrize("why, problem", [
    ("library", "it is not built"), ("check", r"its check of v4 rows with 8 heads failed \(relative error 1\)"),
    ("warm-up", r"its warm-up failed \(no compiler\)"),
])  # fmt: skip
def test_a_drop_in_that_is_asked_for_serves_or_the_server_stops(why, problem, hopper, monkeypatch):
    def failing(*args):
        raise checks.Failed("relative error 1")

    if why == "library":
        monkeypatch.setattr(sm90, "misfit", lambda capability: "it is not built")
    elif why == "check":
        monkeypatch.setattr(checks, "check_flash_mla", failing)
    else:
        monkeypatch.setattr(index_table, "warm_up", no_compiler)
    monkeypatch.setenv(drop_in.VARIABLE, "1")
    sentence = rf"^VLLM_DSV4_DROP_IN=1 asks for the drop-in, which cannot serve here: {problem}; [^.]*\.$"
    for _ in range(2):  # a model that is tried again in this process
        with pytest.raises(ValueError, match=sentence):
            drop_in.padded_heads(8, 64)


@pytest.mark.parametrize("where", ["variable", "config", "number", "name"])
def test_a_setting_that_is_neither_is_refused_before_weights_load(where, hopper, monkeypatch):
    if where == "variable":
        monkeypatch.setenv(drop_in.VARIABLE, "off")
        sentence = r"^VLLM_DSV4_DROP_IN is 'off'; it may be 1, or 0, [^.]*\.$"
    elif where == "name":
        hopper.additional_config["dsv4_dropin"] = False
        options = "dsv4_drop_in, dsv4_scales and dsv4_fp8_experts"
        sentence = rf"^--additional-config has no option dsv4_dropin; .* are {options}\.$"
    else:
        value = hopper.additional_config[drop_in.SETTING] = 0 if where == "number" else "false"
        sentence = rf"^dsv4_drop_in in --additional-config is {value!r}; it may be true, or false, [^.]*\.$"
    for _ in range(2):
        with pytest.raises(ValueError, match=sentence):
            drop_in.padded_heads(8, 64)


@pytest.mark.parametrize("value, setting, on", [
    (None, None, True), ("", None, True), ("1", True, True),
    ("0", True, False), ("1", False, False), ("0", None, False),
])  # fmt: skip
def test_either_setting_switches_off(value, setting, on, monkeypatch):
    if value is not None:
        monkeypatch.setenv(drop_in.VARIABLE, value)
    options = {} if setting is None else {drop_in.SETTING: setting}
    assert drop_in.switched_on(options) is on


def test_fp8_experts_need_their_series(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"^dsv4_fp8_experts .* series fp8-experts, which is not applied\.$"):
        drop_in.switched_on({"dsv4_fp8_experts": 512})
    (tmp_path / "dsv4_overlay").mkdir()
    (tmp_path / "dsv4_overlay/fp8_experts.py").touch()
    monkeypatch.setattr(drop_in.vllm, "__file__", str(tmp_path / "__init__.py"))
    assert drop_in.switched_on({"dsv4_fp8_experts": 512})


def test_scales_need_their_series(monkeypatch):
    """As by the wheel, and on releases that have the drop-in only."""
    monkeypatch.setattr(drop_in, "CacheDType", Literal["auto", "fp8"])
    with pytest.raises(ValueError, match=r"^dsv4_scales .* series full-width, which is not applied\.$"):
        drop_in.switched_on({"dsv4_scales": "file"})


def test_scales_of_their_series_are_its_own(applied):
    """Which says more of them, if it is applied."""
    if "full-width" in json.loads((applied / "vllm/_dsv4_overlay/record.json").read_text())["series"]:
        assert drop_in.switched_on({"dsv4_scales": "file"})
    else:
        with pytest.raises(ValueError, match="series full-width"):
            drop_in.switched_on({"dsv4_scales": "file"})


def test_options_of_others_are_theirs():
    assert drop_in.switched_on({"torchair": 1, "dsv4_drop_in_widths": {"v4": 8}})


def test_the_decision_is_made_once(hopper, monkeypatch, log):
    ran = []
    monkeypatch.setattr(checks, "check_flash_mla", lambda *arguments: ran.append(arguments))
    assert drop_in.padded_heads(8, 64) == 8
    monkeypatch.setenv(drop_in.VARIABLE, "1")
    assert drop_in.padded_heads(8, 64) == 8
    assert len(ran) == len(set(ran)) == 12 and {provider for provider, *_ in ran} == {"sm90"}
    ((level, line),) = log
    assert level == "info" and "VLLM_DSV4_DROP_IN=0" in line
    assert drop_in._device == torch.device("cuda", 0)


def test_layers_on_another_gpu_of_the_process_are_stock(hopper, monkeypatch):
    """What serves was checked on the first, and calls on the other go to FlashMLA as they are."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert drop_in.padded_heads(8, 64) == 8 and drop_in._device == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert drop_in.padded_heads(8, 64) == 64


@pytest.mark.parametrize("first, then", [(True, False), (False, True)])
def test_another_setting_needs_another_process(first, then, hopper, monkeypatch):
    """The calls are the process's, so a second model of it would not have what it asks for."""
    monkeypatch.setattr(checks, "check_flash_mla", lambda *arguments: None)
    hopper.additional_config[drop_in.SETTING] = first
    assert drop_in.padded_heads(8, 64) == (8 if first else 64)
    hopper.additional_config[drop_in.SETTING] = then
    words = {True: "on", False: "off"}
    sentence = rf"^The drop-in was switched {words[first]} by .* has it {words[then]} in a process of its own\.$"
    with pytest.raises(ValueError, match=sentence):
        drop_in.padded_heads(8, 64)
