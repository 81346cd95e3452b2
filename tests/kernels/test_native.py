"""The native kernels: their bits against Triton's, how they are built, and when they are refused."""

import hashlib
import importlib.metadata
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mla_kernels import flash_mla, insert, interface, native
from test_insert import BAD_ARGUMENTS, OPERATORS, Case

REPO = Path(__file__).parents[2]
CSRC = REPO / "csrc"

# ---------------------------------------------------------------- bits


@pytest.fixture
def native_kernels():
    if not native.load():
        pytest.skip("there are no native kernels for this GPU: scripts/build-kernels.sh")


def memory(tensor):
    """All bytes of a tensor's storage, what is around the tensor included."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def assert_same_bits(tensor, expected):
    found, wanted = memory(tensor), memory(expected)
    if tensor.dtype == torch.bfloat16:
        # Which NaN is not defined. E4M3 has one, but for its sign.
        found, wanted = (x.view(torch.bfloat16).float() for x in (found, wanted))
        found, wanted = (torch.where(x.isnan(), torch.nan, x).view(torch.int32) for x in (found, wanted))
    assert torch.equal(found, wanted)


def compare(operator, device, prepare=lambda case: None, **options):
    """Run Triton and the native kernel on the same fresh inputs; every byte has to be the same."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")  # pytest shows it if this fails
    cases = [Case(operator, device, seed=seed, **options) for _ in range(2)]
    for case in cases:
        torch.manual_seed(seed)
        prepare(case)
    triton, native_case = cases
    assert_same_bits(native_case.q, triton.q)
    getattr(insert, operator)(*triton.args())
    getattr(torch.ops.mla_kernels, operator)(*native_case.args())
    for name in ("q", "q_fp8", "kv", "cache"):
        assert_same_bits(getattr(native_case, name), getattr(triton, name))


def every_bf16(case):
    """All 65536 bf16 as KV and as Q: zeros, subnormals, infinities and NaNs of all kinds."""
    values = torch.arange(65536, dtype=torch.int32, device=case.kv.device).short().view(torch.bfloat16)
    case.kv.copy_(values.view(128, 512))
    # A NaN or an infinity takes its whole head along, so most heads are finite.
    case.q.copy_(values[torch.randperm(65536, device=values.device)].view(128, 1, 512).expand_as(case.q))
    case.q[::2] = torch.where(case.q[::2].isfinite(), case.q[::2], 1.0).clamp(-1e15, 1e15)


def specials(case):
    case.kv[:, 100], case.kv[:, 447], case.kv[:, 460] = -0.0, 1e-39, -0.0
    case.kv[0, 3], case.kv[2, 500], case.kv[3, 5], case.kv[3, 446] = torch.tensor(
        [torch.nan, torch.nan, torch.inf, -torch.inf], device=case.kv.device
    )
    case.q[1, 1, 7], case.q[2, 0, 7], case.q[3, 0, 450] = torch.tensor(
        [torch.nan, torch.inf, -torch.inf], device=case.q.device
    )
    case.q[4], case.q[5] = 0.0, 1e-39


def off_by_one(case):
    """Rows that begin where no vector load or store can."""
    for name in ("q", "q_fp8", "kv", "cos_sin"):
        tensor = getattr(case, name)
        wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=torch.float32, device=tensor.device).to(
            tensor.dtype
        )
        wide[..., 1:-2] = tensor
        setattr(case, name, wide[..., 1:-2])


BITS = {
    "one token": dict(tokens=1, heads=8),
    "one head": dict(tokens=40, heads=1, num_blocks=20),
    "odd heads": dict(tokens=37, heads=5, num_blocks=20),
    "128 heads": dict(tokens=33, heads=128, num_blocks=20),
    # From 32768 heads on a warp takes two.
    "heads in pairs": dict(tokens=4100, heads=8, num_blocks=1100),
    "heads in pairs of other sizes": dict(tokens=700, heads=54, num_blocks=200, extra_stride=1),
    "too odd for pairs": dict(tokens=1200, heads=29, num_blocks=400),
    "specials": dict(tokens=12, heads=3, prepare=specials),
    "specials in pairs": dict(tokens=600, heads=64, num_blocks=200, prepare=specials),
    "all bf16": dict(tokens=128, heads=4, num_blocks=64, prepare=every_bf16),
    "strides": dict(tokens=9, heads=5, extra_stride=3, padding=96),
    "rows off by one": dict(tokens=12, heads=3, prepare=off_by_one),
    "cache off by some": dict(tokens=12, heads=3, padding=3),
    "bf16 cosines": dict(tokens=12, heads=2, cos_sin_dtype=torch.bfloat16),
    "bf16 cosines off by one": dict(tokens=12, heads=2, cos_sin_dtype=torch.bfloat16, prepare=off_by_one),
    "int32": dict(tokens=12, heads=2, index_dtypes=(torch.int32, torch.int32)),
    "blocks of 3": dict(tokens=50, heads=2, block_size=3, num_blocks=30, uint8=True),
    "blocks of 1": dict(tokens=50, heads=2, block_size=1, num_blocks=70),
    "fewer slots": dict(tokens=50, heads=2, slots=7, num_blocks=30),
    "no slots": dict(tokens=50, heads=2, slots=0),
    "saturation": dict(tokens=12, heads=2, kv_factor=1e4, q_scale_inv=1e4),
    "ties": dict(tokens=128, heads=2, num_blocks=64, fp8_scale=7 / 64, prepare=every_bf16),
}
# Of every kind: negative, subnormal, huge, none.
SCALES = (1.0, -0.37, 3e-39, 2.0**-61, 2.0**-60, 1.1e-30, 1e18, 1.2e18, 3e38, 0.0, float("inf"), float("nan"))


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", BITS)
def test_native_gives_tritons_bits(operator, name, device, native_kernels):
    for _ in range(3):
        compare(operator, device, **BITS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS[1:])
@pytest.mark.parametrize("scale", SCALES)
def test_native_scales_as_triton(operator, scale, device, native_kernels):
    compare(operator, device, every_bf16, tokens=128, heads=2, num_blocks=64, fp8_scale=scale, q_scale_inv=scale)


@pytest.mark.gpu
def test_native_kernel_is_captured_in_a_graph(device, native_kernels):
    eager, graphed = (Case("full_cache_fp8_insert", device, seed=1, heads=8) for _ in range(2))
    torch.ops.mla_kernels.full_cache_fp8_insert(*eager.args())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.mla_kernels.full_cache_fp8_insert(*graphed.args())
    assert (graphed.storage == 0x5A).all()  # captured, not run
    graph.replay()
    assert_same_bits(graphed.cache, eager.cache)
    assert_same_bits(graphed.q_fp8, eager.q_fp8)


# ---------------------------------------------------------------- the loader

FITS = {"interface": native.INTERFACE, "torch": "2.11", "cuda": "13.0", "archs": "90a 100a", "sources": ""}
HERE = {"torch_version": "2.13.0+cu130", "cuda_version": "13.0", "capability": (9, 0)}


@pytest.mark.parametrize(
    "here",
    [
        {},
        {"torch_version": "2.11.0"},
        {"torch_version": "2.20.1"},
        {"cuda_version": "13.2"},
        {"capability": (10, 0)},
    ],
)
def test_a_build_that_fits_is_not_refused(here):
    assert native.refusal(FITS, **HERE | here) is None


@pytest.mark.parametrize(
    "build, here, words",
    [
        ({"interface": 0}, {}, "another version of this package"),
        ({"interface": None}, {}, "another version of this package"),
        ({}, {"torch_version": "2.9.1+cu130"}, "needs torch 2.11 or newer and this is 2.9.1"),
        ({}, {"torch_version": "2.10.0a0+git12"}, "update torch"),
        ({}, {"cuda_version": "12.9"}, "this torch with 12.9; install a torch built with CUDA 13"),
        ({}, {"cuda_version": "14.1"}, "14.1; rebuild it with scripts/build-kernels.sh and a CUDA 14 toolkit"),
        ({}, {"cuda_version": None}, "needs a CUDA GPU"),
        ({}, {"capability": None}, "needs a CUDA GPU"),
        ({}, {"capability": (12, 0)}, "this GPU is sm_120; rebuild it .* MLA_CUDA_ARCHS=120a"),
        ({}, {"capability": (8, 9)}, "MLA_CUDA_ARCHS=89$"),
        ({"archs": "100a 103a"}, {}, "code for sm 100a 103a and this GPU is sm_90; .*ARCHS=90a"),
        ({"archs": "90 100a"}, {}, "code for sm 90 100a and this GPU is sm_90; .*ARCHS=90a"),  # empty kernels
    ],
)
def test_a_build_that_does_not_fit_is_refused(build, here, words):

    reason = native.refusal(FITS | build, **HERE | here)
    assert re.search(words, reason) and "\n" not in reason


def library(build):
    """A file that says it was built so."""
    build = build if isinstance(build, bytes) else json.dumps(build).encode()
    return b"\x7fELF\0mla_kernels_build\0mla_kernels_build " + build + b"\0more"


@pytest.mark.parametrize(
    "content, level, words",
    [
        (None, "INFO", "There are no native kernels"),
        (b"", "WARNING", "it does not say how it was built); rebuild it with scripts/build-kernels.sh"),
        (library(b"{"), "WARNING", "it does not say how it was built"),
        (library(b"{]}"), "WARNING", "it cannot be loaded"),
        (library({"interface": native.INTERFACE}), "WARNING", "it cannot be loaded ('torch')"),
        (library(FITS | {"torch": "99.0"}), "WARNING", "needs torch 99.0 or newer"),
        (library(FITS | {"interface": 99}), "WARNING", "another version"),
        (library(FITS), "WARNING", "it cannot be loaded"),  # fits, but is no library
    ],
)
def test_triton_serves_and_one_line_says_why(content, level, words, tmp_path, monkeypatch, caplog):
    path = tmp_path / "libmla_kernels.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(native, "LIBRARY", path)
    monkeypatch.setattr(native, "_registered", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    native.load_for.cache_clear()
    try:
        with caplog.at_level(logging.INFO, native.logger.name):
            assert not native.load() and not native.load()
    finally:
        native.load_for.cache_clear()
    (record,) = caplog.records
    assert record.levelname == level and words in record.getMessage()
    assert "Triton serves" in record.getMessage() and str(path) in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize("content", [None, library(FITS)], ids=["gone", "there"])
def test_what_is_registered_serves(content, tmp_path, monkeypatch):
    """By this package under its other name; a process that sees no GPU keeps it too."""
    path = tmp_path / "libmla_kernels.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(native, "LIBRARY", path)
    monkeypatch.setattr(native, "_registered", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    native.load_for.cache_clear()
    try:
        assert native.load()
    finally:
        native.load_for.cache_clear()


def test_a_library_that_registers_nothing(tmp_path, monkeypatch, caplog):
    path = tmp_path / "libmla_kernels.so"
    path.write_bytes(library(FITS))
    monkeypatch.setattr(native, "LIBRARY", path)
    monkeypatch.setattr(native, "_registered", lambda: False)
    monkeypatch.setattr(torch.ops, "load_library", lambda name: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    native.load_for.cache_clear()
    try:
        assert not native.load_for((9, 0)) and "it registers no operators" in caplog.text
    finally:
        native.load_for.cache_clear()


def test_each_kind_of_gpu_in_a_process_has_its_own_answer(tmp_path, monkeypatch, caplog):
    """A library for Hopper, beside a GPU of another kind: what runs where, and no operator without its code."""
    path = tmp_path / "libmla_kernels.so"
    path.write_bytes(library(FITS))
    kinds = {"cuda:0": (8, 9), "cuda:1": (9, 0), "cuda:2": (10, 0)}
    loaded, kept = [], []
    monkeypatch.setattr(native, "LIBRARY", path)
    monkeypatch.setattr(native, "_registered", lambda: bool(loaded))
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(insert, "keep_triton", lambda: kept.append("insert"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability",
        lambda device: kinds[f"cuda:{device}" if isinstance(device, int) else str(device)],
    )  # fmt: skip
    caches = native.load_for, interface._pick_provider, flash_mla.pick_provider
    for cache in caches:
        cache.cache_clear()
    try:
        assert [native.load(torch.device(gpu)) for gpu in kinds] == [False, True, True]
        assert [interface.pick_provider(gpu)[0] for gpu in kinds] == ["triton", "sm90", "triton"]
        assert interface.pick_provider("cuda")[0] == "sm90"  # the current one
        assert "are for compute capability 9.0" in interface.pick_provider("cuda:0")[1]
        assert [flash_mla.pick_provider(torch.device(gpu)) for gpu in kinds] == ["triton", "sm90", "triton"]
    finally:
        for cache in caches:
            cache.cache_clear()
    assert loaded == [str(path)] and kept == ["insert"]
    assert "this GPU is sm_89" in caplog.text


def test_the_library_at_hand_is_of_these_sources():
    if not native.LIBRARY.exists():
        pytest.skip("there are no native kernels: scripts/build-kernels.sh")
    assert native.build_info(native.LIBRARY)["sources"] == sources(), "run scripts/build-kernels.sh"


def sources():
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(CSRC.iterdir()))).hexdigest()


# ---------------------------------------------------------------- the build


def build(out, **env):
    script = [str(REPO / "scripts/build-kernels.sh"), str(out)]
    return subprocess.run(script, capture_output=True, text=True, env={**os.environ, **env})


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    nvcc = Path(os.environ.get("CUDA_HOME", "/nonexistent"), "bin/nvcc")
    if not nvcc.exists() and not shutil.which("nvcc"):
        pytest.skip("there is no nvcc on PATH or in $CUDA_HOME")
    out = tmp_path_factory.mktemp("native") / "libmla_kernels.so"
    done = build(out, MLA_CUDA_ARCHS="90a", VIRTUAL_ENV=python_home())
    assert done.returncode == 0, done.stderr
    return out


def python_home():
    """The environment of this Python, for scripts that look at VIRTUAL_ENV and PATH."""
    return str(Path(sys.executable).parents[1])


LOAD = """
import importlib, json, sys
import torch
order, path, overlay = sys.argv[1:]
sys.path[:0] = [overlay, overlay + "/third_party"]
if order == "library first":
    torch.ops.load_library(path)
import mla_kernels
if order == "package first":
    torch.ops.load_library(path)
again = importlib.import_module("third_party.mla_kernels")
assert again.insert is not mla_kernels.insert
import mla_kernels.native, third_party.mla_kernels.native as other
print(mla_kernels.native.load(), other.load())
print([torch._C._dispatch_has_kernel_for_dispatch_key("mla_kernels::" + name, "CUDA") for name in %r])
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["library first", "package first"])
def test_registers_in_any_order_and_under_both_names(built, order):
    overlay = REPO / "overlay/common/vllm"
    done = subprocess.run(
        [sys.executable, "-c", LOAD % OPERATORS, order, str(built), str(overlay)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["True True", "[True, True, True]"]


REFUSE = """
import sys
sys.path[:0] = sys.argv[2:]
import conftest, torch
torch.ops.load_library(sys.argv[1])
import test_insert
from test_insert import BAD_ARGUMENTS, OPERATORS, Case, native_kernel
kernel = native_kernel("full_cache_fp8_insert")
for name, (attribute, spoil, message) in BAD_ARGUMENTS.items():
    case = Case("full_cache_fp8_insert", torch.device("cpu"))
    setattr(case, attribute, spoil(getattr(case, attribute)))
    try:
        kernel(*case.args())
    except ValueError as error:
        assert message in str(error), (name, str(error))
    else:
        raise AssertionError(name)
for operator in OPERATORS:
    native_kernel(operator)(*Case(operator, torch.device("cpu"), tokens=0).args())
    try:
        native_kernel(operator)(*Case(operator, torch.device("cpu")).args())
    except ValueError as error:
        assert "must be on a CUDA GPU" in str(error)
    else:
        raise AssertionError(operator)
from mla_kernels import sm90

def refuse(kernel, good, cases):
    for place, bad, message in cases:
        try:
            kernel(*good[:place], bad, *good[place + 1 :])
        except ValueError as error:
            assert message in str(error), (message, str(error))
        else:
            raise AssertionError(message)

none = (None, None, None)
rows = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)
ints = lambda *shape: torch.zeros(shape, dtype=torch.int32)
pool, heads = rows(4, 64, 512), rows(2, 8, 512)
good = [heads, pool, pool, ints(2, 192), ints(2), ints(2), heads, *none, 1.0, 1.0]
e4m3, elsewhere = torch.float8_e4m3fn, lambda x: x.to("meta")
refuse(native_kernel("sparse_mla_sm90"), good, (
    (0, rows(2, 129, 512), "q must have 1 to 128 heads, got 129."),
    (0, rows(2, 8, 513)[..., :512], "q and out must have heads that start at multiples of 16 bytes"),
    (1, rows(4 * 64 * 512 + 1)[1:].view(4, 64, 512), "the SWA pool must have rows that start at multiples of 16"),
    (2, rows(4, 64, 516)[..., :512], "the compressed pool must have rows"),
    (6, rows(2, 8, 516)[..., :512], "q and out must have heads"),
    (8, torch.ones(2), "bmm1_scale must be"),
    (9, torch.ones(1).bfloat16(), "bmm2_scale must be"),
    (0, rows(2, 512), "q must be [tokens, heads, 512]"),
    (0, rows(2, 8, 256), "q must be [tokens, heads, 512]"),
    (0, heads.float(), "q must be [tokens, heads, 512] bf16 or float8_e4m3fn"),
    (0, rows(2, 512, 8).mT, "q must be [tokens, heads, 512]"),
    (0, heads.to(e4m3), "a float8_e4m3fn q needs float8_e4m3fn pools"),
    (1, rows(256, 512), "the SWA pool must be [pages, page, 512]"),
    (1, rows(4, 64, 256), "the SWA pool must be [pages, page, 512]"),
    (1, rows(4, 0, 512), "the SWA pool must be [pages, page, 512]"),
    (1, pool.half(), "the SWA pool must be [pages, page, 512] bf16 or float8_e4m3fn"),
    (2, pool.to(e4m3), "the compressed pool must be"),
    (2, rows(4, 512, 64).mT, "the compressed pool must be"),
    (3, ints(3, 192), "indices must be [2, 128 to 2^29"),
    (3, ints(2, 64), "indices must be [2, 128 to 2^29"),
    (3, ints(2, 130), "indices must be [2, 128 to 2^29, a multiple of 4]"),
    (3, ints(2, 192).long(), "indices must be [2, 128 to 2^29, a multiple of 4] int32"),
    (3, ints(192, 2).T, "indices must be [2, 128 to 2^29"),
    (4, ints(3), "topk_lens must be [2] int32"),
    (4, ints(4)[::2], "topk_lens must be [2] int32, contiguous, got [2] Int of strides [2]."),
    (5, ints(2).long(), "visible must be [2] int32"),
    (6, rows(2, 7, 512), "out must be [2, 8, 512] bf16"),
    (6, heads.float(), "out must be [2, 8, 512] bf16"),
    (7, torch.zeros(7), "sinks must be [8] fp32"),
    (7, torch.zeros(8).bfloat16(), "sinks must be [8] fp32"),
    (7, torch.zeros(16)[::2], "sinks must be [8] fp32, contiguous"),
    (1, elsewhere(pool), "swa must be on the device of q"),
    (2, elsewhere(pool), "compressed must be on the device of q"),
    (3, elsewhere(ints(2, 192)), "indices must be on the device of q"),
    (4, elsewhere(ints(2)), "topk_lens must be on the device of q"),
    (5, elsewhere(ints(2)), "visible must be on the device of q"),
    (6, elsewhere(heads), "out must be on the device of q"),
    (7, elsewhere(torch.zeros(8)), "sinks must be on the device of q"),
    (8, elsewhere(torch.ones(1)), "bmm1_scale must be on the device of q"),
    (9, elsewhere(torch.ones(1)), "bmm2_scale must be on the device of q"),
    (0, good[0], "q must be on a CUDA GPU"),
))
packed, many = torch.zeros(4, 64, 656, dtype=torch.uint8), torch.empty(1, (1 << 29) + 4, dtype=torch.int32)
few = (heads[:1], pool, pool, many, ints(1), ints(1), heads[:1], *none, 1.0, 1.0)
refuse(native_kernel("sparse_mla_sm90"), few, ((3, many, "indices must be [1, 128 to 2^29, a multiple of 4]"),))
attend = native_kernel("sparse_mla_rows_sm90")
q, floats = rows(2, 8, 576), torch.zeros
good = [q, packed, ints(2, 70), ints(2), packed, ints(2, 9), ints(2), heads, floats(8), None, floats(2, 8), 3, 1.0]
refuse(attend, good, (
    (11, 5, "there is no row format 5."),
    (11, -1, "there is no row format -1."),
    (11, 2, "q must be [tokens, heads, 512] bf16, got [2, 8, 576]"),
    (11, 4, "a cache must be [blocks, block_size, 1152 bytes], got [4, 64, 656]"),
    (0, q.half(), "q must be [tokens, heads, 576] bf16"),
    (0, rows(2, 576, 8).mT, "q must be [tokens, heads, 576] bf16"),
    (0, rows(2, 129, 576), "q must have 1 to 128 heads, got 129."),
    (0, rows(2, 8, 580)[..., :576], "q and out must have heads that start at multiples of 16 bytes"),
    (0, rows(1, 8, 576).expand(1 << 24, 8, 576), "q has too many tokens: 16777216."),
    (1, packed[..., :640], "a cache must be [blocks, block_size, 656 bytes], got [4, 64, 640]"),
    (1, packed.half(), "a cache must be [blocks, block_size, 656 bytes]"),
    (1, packed[:, :0], "a cache must be [blocks, block_size, 656 bytes], got [4, 0, 656]"),
    (1, packed.view(2, 128, 656)[:, ::2], "a block of packed rows must be in one piece."),
    (1, packed.view(-1)[8 : 8 + 656].view(1, 1, 656), "a cache must have blocks and rows that start at"),
    (2, ints(3, 70), "indices must be [2, columns, up to 2^29] int32, got [3, 70]"),
    (2, ints(2, 70).long(), "indices must be [2, columns, up to 2^29] int32"),
    (2, ints(70, 2).T, "indices must be [2, columns, up to 2^29] int32"),
    (3, ints(3), "lengths must be [2] int32"),
    (3, ints(4)[::2], "lengths must be [2] int32, contiguous"),
    (4, None, "a second cache and its indices go together."),
    (5, None, "a second cache and its indices go together."),
    (6, ints(0), "there are lengths for 0 of 2 tokens."),
    (6, ints(3), "there are lengths for 3 of 2 tokens."),
    (7, rows(2, 8, 576), "out must be [2, 8, 512] bf16, got [2, 8, 576]"),
    (7, rows(2, 8, 516)[..., :512], "q and out must have heads that start at multiples of 16 bytes"),
    (8, floats(7), "sinks must be contiguous fp32 for each head."),
    (8, floats(16)[::2], "sinks must be contiguous fp32 for each head."),
    (9, floats(2, 7), "max_logits must be contiguous fp32 for each head."),
    (10, floats(16), "lse must be contiguous fp32 for each head."),
    (1, elsewhere(packed), "cache must be on the device of q"),
    (2, elsewhere(good[2]), "indices must be on the device of q"),
    (3, elsewhere(ints(2)), "lengths must be on the device of q"),
    (4, elsewhere(packed), "extra_cache must be on the device of q"),
    (5, elsewhere(good[5]), "extra_indices must be on the device of q"),
    (6, elsewhere(ints(2)), "extra_lengths must be on the device of q"),
    (7, elsewhere(heads), "out must be on the device of q"),
    (8, elsewhere(floats(8)), "sinks must be on the device of q"),
    (10, elsewhere(floats(2, 8)), "lse must be on the device of q"),
    (0, q, "q must be on a CUDA GPU"),
))
refuse(attend, [*good[:9], floats(2, 8), floats(2, 8), *good[11:]], ((10, None, "max_logits come with lse."),))
one = [q[:1], packed, many, *none, None, heads[:1], *none, 3, 1.0]
served = "must be on a CUDA GPU"  # if there were one
refuse(attend, one, ((2, many, "indices must be [1, columns, up to 2^29] int32"), (2, many[:, :-4], served)))
block = torch.empty(1, 1 << 22, 584, dtype=torch.uint8)
one[:3], one[11] = [heads[:1], block, ints(1, 70)], 2
refuse(attend, one, ((1, block, "a block has too many rows: 4194304."), (1, block[:, :-1], served)))
slots = native_kernel("request_rows_to_slots_sm90")
good = [ints(2, 96), ints(3), ints(4, 8), 64, ints(2), ints(5), ints(2, 96)]
refuse(slots, good, (
    (0, ints(2, 96).long(), "rows must be int32 of 2 dimensions, the last contiguous, got [2, 96] Long of"),
    (0, ints(96), "rows must be int32 of 2 dimensions"),
    (0, ints(96, 2).T, "rows must be int32 of 2 dimensions, the last contiguous"),
    (0, ints(1, 1 << 24), "rows are too many: [1, 16777216]."),
    (1, ints(1), "request_of_token has 1 elements for 2 tokens of rows."),
    (1, ints(6)[::2], "request_of_token must be int32 of 1 dimensions"),
    (2, ints(8, 4).T, "block_table must be int32 of 2 dimensions"),
    (2, elsewhere(ints(4, 8)), "block_table must be on the device of rows."),
    (3, 0, "block_size must be 1 to 2^31 - 1, and is 0."),
    (3, 1 << 31, "block_size must be 1 to 2^31 - 1, and is 2147483648."),
    (4, None, "prefill_of_token and workspace_starts go together."),
    (4, ints(1), "prefill_of_token has 1 elements for 2 tokens of rows."),
    (5, rows(5), "workspace_starts must be int32 of 1 dimensions"),
    (6, ints(2, 95), "out must be [2, 96], got [2, 95]."),
    (0, good[0], "rows must be on a CUDA GPU."),
))
slots(ints(0, 96), *good[1:6], ints(0, 96))
topk = native_kernel("indexer_topk_sm90")
good = [floats(2, 96), ints(2), ints(2, 512)]
refuse(topk, good, (
    (0, rows(2, 96), "scores must be fp32 of 2 dimensions, the last contiguous, got [2, 96] BFloat16"),
    (0, floats(96, 2).T, "scores must be fp32 of 2 dimensions, the last contiguous"),
    (0, floats(2, 262145), "scores have 262145 columns, and must have 262144 at most."),
    (0, floats(3, 96), "out must be [3, 8191 at most], got [2, 512]."),
    (2, ints(2, 8192), "out must be [2, 8191 at most], got [2, 8192]."),
    (1, ints(2, 1), "lengths must be [2] int32, contiguous"),
    (1, ints(2).long(), "lengths must be [2] int32, contiguous"),
    (1, elsewhere(ints(2)), "lengths and out must be on the device of scores."),
    (2, ints(512, 2).T, "out must be int32 of 2 dimensions, the last contiguous"),
    (0, good[0], "scores must be on a CUDA GPU."),
))
topk(floats(0, 96), ints(0), ints(0, 512))
topk(floats(2, 96), ints(2), ints(2, 0))
print(len(BAD_ARGUMENTS), "refused")
"""


@pytest.mark.slow
def test_bad_arguments_are_refused_without_a_gpu_too(built):
    done = subprocess.run(
        [sys.executable, "-c", REFUSE, str(built), str(Path(__file__).parent)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(BAD_ARGUMENTS)} refused\n"


KEEP = """
import sys
sys.path[:0] = sys.argv[2:]
import conftest, torch
torch.ops.load_library(sys.argv[1])
from mla_kernels import insert
from test_insert import OPERATORS, Case, native_kernel
insert.keep_triton()
for operator in OPERATORS:
    case = Case(operator, torch.device("cpu"))
    native_kernel(operator)(*case.args())  # the library's refuses a tensor on the CPU
    assert (case.storage != 0x5A).any()
print("kept")
"""


@pytest.mark.slow
def test_triton_keeps_the_operators_where_a_gpu_has_no_code(built):
    done = subprocess.run(
        [sys.executable, "-c", KEEP, str(built), str(Path(__file__).parent)], capture_output=True, text=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.stdout == "kept\n", done.stderr


@pytest.mark.slow
def test_says_how_it_was_built(built):
    info = native.build_info(built)
    # torch.__version__ may say more than the package does (+cu130).
    assert info.pop("built_with_torch") == importlib.metadata.version("torch")
    assert info["cuda"] and info | {"cuda": ""} == {
        "interface": native.INTERFACE,
        "torch": "2.11",
        "cuda": "",
        "archs": "90a",
        "sources": sources(),
    }


HASH = """
import hashlib, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import conftest, torch
from mla_kernels import native
native.LIBRARY = Path(sys.argv[1])
import test_flash_mla
from test_sparse_mla import BATCHES, BF16, E4M3, Case
for tokens, heads in [(1, 8), *BATCHES, (600, 64), (1100, 32), (2100, 16)]:
    for q_dtype, kv_dtype in ((BF16, BF16), (BF16, E4M3), (E4M3, E4M3)):
        dtypes = dict(q_dtype=q_dtype, kv_dtype=kv_dtype)
        case = Case(torch.device("cuda"), tokens=tokens, heads=heads, width=640, **dtypes)
        out = case.run("sm90").cpu()
        assert out.isfinite().all() and out.any()
        print(tokens, heads, q_dtype, kv_dtype, hashlib.sha256(out.view(torch.uint8).numpy()).hexdigest())
for rows in test_flash_mla.FORMATS:
    for batch, heads, columns in test_flash_mla.BLOCKS_OF_64:
        case = test_flash_mla.Case(rows, torch.device("cuda"), batch=batch, heads=heads, columns=columns)
        out = case.run("sm90")[0].cpu()
        assert out.isfinite().all() and out.any()
        print(rows, batch, heads, hashlib.sha256(out.view(torch.uint8).numpy()).hexdigest())
"""


@pytest.mark.gpu
@pytest.mark.slow
def test_waiting_for_all_products_changes_no_bit(built, tmp_path):
    """MLA_STRICT_WAIT: all warps wait for all `wgmma` that read operands before any is stored over."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    assert any(b"ifdef MLA_STRICT_WAIT" in path.read_bytes() for path in CSRC.iterdir())
    strict = tmp_path / "libmla_kernels.so"
    done = build(strict, MLA_CUDA_ARCHS="90a", VIRTUAL_ENV=python_home(), NVCC_APPEND_FLAGS="-DMLA_STRICT_WAIT")
    assert done.returncode == 0, done.stderr

    def bits(path):
        program = [sys.executable, "-c", HASH, str(path), str(Path(__file__).parent)]
        done = subprocess.run(program, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert bits(strict) == bits(built)


@pytest.mark.slow
def test_depends_on_nothing_that_differs_between_machines(built):
    if not shutil.which("readelf"):
        pytest.skip("there is no readelf")
    needed = subprocess.run(["readelf", "-dW", str(built)], capture_output=True, text=True, check=True)
    libraries = {line.split("[")[1].split("]")[0] for line in needed.stdout.split("\n") if "(NEEDED)" in line}
    assert "libtorch.so" in libraries
    assert not [name for name in libraries if any(word in name for word in ("python", "cuda", "c10"))]
    symbols = subprocess.run(
        ["readelf", "--dyn-syms", "-W", str(built)], capture_output=True, text=True, check=True
    )
    names = [line.split()[6:8] for line in symbols.stdout.split("\n") if len(line.split()) >= 8]
    foreign = {name for where, name in names if where == "UND" and "@" not in name} - {
        "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__",
    }  # fmt: skip
    assert foreign and all(name.startswith(("aoti_torch_", "torch_")) for name in foreign), foreign
    assert [name for where, name in names if where.isdigit()] == ["mla_kernels_build"]


def test_the_build_without_what_it_needs_says_so(tmp_path):
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name in ("bash", "dirname", "env", "sed", "sort", "head", "readlink"):
        (bin_folder / name).symlink_to(shutil.which(name))
    env = {"PATH": str(bin_folder), "CUDA_HOME": "", "VIRTUAL_ENV": ""}
    out = tmp_path / "out.so"

    def stopped():
        done = build(out, **env)
        assert done.returncode == 1 and not out.exists()
        (line,) = done.stderr.strip().split("\n")
        return line

    assert "there is no nvcc on PATH" in stopped()
    nvcc = bin_folder / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    assert "there is no python3 on PATH" in stopped()
    python = bin_folder / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert "has no torch, whose headers are needed" in stopped()
    python.write_text("#!/bin/sh\necho 2.9.0+cu130 /nowhere\n")
    assert "the headers of torch 2.9.0+cu130 are too old; install torch 2.11 or newer" in stopped()
