#!/usr/bin/env python3
"""Checks and times of the kernel with 64 heads on M over stock rows (MLA_TRIAL=new) against float64 and the old one.
`parts` groups divide the keys of all items (MLA_TRIAL=new2, new3, new8) and merge them.

    MLA_REPO=<worktree> MLA_LIB=<libmla_kernels.so> python m64_check.py [--flashmla DIR] [--only PREFIX] [--list]

Groups run in processes of their own with a time limit, so a deadlock or a CUDA error hides nothing else.
"""
import argparse
import math
import os
import subprocess
import sys
import time
import traceback
import types
from pathlib import Path

HERE = Path(__file__).resolve()
REPO = Path(os.environ.get("MLA_REPO", "."))
FORMATS = ("584", "656", "576", "512")
# Excess error (without the output's own rounding) that is called bad, by format.
LIMIT = {"584": 5e-4, "656": 1e-3, "576": 4e-4, "512": 4e-4}
LSE_LIMIT = {"584": 5e-5, "656": 2.5e-3, "576": 5e-5, "512": 5e-5}
TIMES = [int(t) for t in os.environ.get("TIMES", "16 32 64 96 128 133 160 200 264 512 4096").split()]
NEW = "new"  # MLA_TRIAL of the kernel that is tried


def load():
    global torch, T, excess_error, relative_error, native
    try:
        import pytest  # noqa: F401
    except ImportError:
        class Anything:
            def __getattr__(self, name): return self
            def __call__(self, *a, **k):
                return a[0] if len(a) == 1 and callable(a[0]) and not k else self
        stub = types.ModuleType("pytest")
        anything = Anything()
        stub.__getattr__ = lambda name: anything
        sys.modules["pytest"] = stub
    import torch as torch_
    torch = torch_
    sys.path[:0] = [str(REPO / "overlay/common/vllm/third_party"), str(REPO / "tests/kernels"), str(REPO / "benchmarks")]
    import importlib
    import pkgutil
    package = importlib.import_module("mla_kernels")
    from mla_kernels import native as native_
    native = native_
    if os.environ.get("MLA_LIB"):
        native.LIBRARY = Path(os.environ["MLA_LIB"]).resolve()
    import test_flash_mla as T_
    T = T_
    from test_sparse_mla import excess_error as e, relative_error as r
    excess_error, relative_error = e, r
    import logging
    logging.basicConfig(level=logging.WARNING)
    assert native.load(torch.device("cuda")), "the library does not load"


def diagnose(out, want, lse, want_lse):
    apart = (out.cpu().double() - want)
    tokens, heads = want.shape[0] * want.shape[1], want.shape[2]
    apart, want = apart.view(tokens, heads, 512), want.reshape(tokens, heads, 512)
    size = want.norm() / want.numel() ** 0.5
    def rms(x): return float(x.double().pow(2).mean().sqrt() / size)
    print("      by 64 dimensions:", " ".join(f"{rms(apart[..., d:d + 64]):.1e}" for d in range(0, 512, 64)))
    print("      by 16 heads:     ", " ".join(f"{rms(apart[:, h:h + 16]):.1e}" for h in range(0, heads, 16)))
    worst = apart.pow(2).mean((1, 2)).sqrt().nan_to_num(nan=1e30)
    order = worst.argsort(descending=True)[:8]
    print("      worst tokens:", " ".join(f"{int(t)}:{float(worst[t] / size):.1e}" for t in order),
          " bad tokens:", int((worst / size > 5e-3).sum()), "of", tokens, " NaN:", int(out.isnan().sum()))
    bad = (lse.cpu().double() - want_lse).abs().nan_to_num(nan=1e30, posinf=1e30).view(tokens, heads)
    print("      worst lse:", float(bad.max()), "token, head", divmod(int(bad.argmax()), heads))


def check(name, case, **options):
    os.environ["MLA_TRIAL"] = NEW
    try:
        out, lse, top = case.run("sm90", **options)
        torch.cuda.synchronize()
        found = out.cpu()
        want, want_lse, want_top = case.expected()
        finite = torch.isfinite(want_lse)
        lse_off = float((lse.cpu().double() - want_lse)[finite].abs().max()) if finite.any() else 0.0
        infinite = bool((lse.cpu().double()[~finite] == want_lse[~finite]).all())
        top_off = 0.0
        if top is not None:
            some = torch.isfinite(want_top)
            top_off = float((top.cpu().double() - want_top)[some].abs().max()) if some.any() else 0.0
            infinite &= bool((top.cpu().double()[~some] == want_top[~some]).all())
        if want.any():
            total, excess = relative_error(found.double(), want), excess_error(found.double(), want)
        else:
            total = excess = float(found.double().abs().max())
        zeros = bool((found[~finite] == 0).all())  # tokens without keys
        good = (excess < LIMIT[case.rows] and lse_off < LSE_LIMIT[case.rows] and top_off < LSE_LIMIT[case.rows] * 5
                and infinite and zeros)
        os.environ["MLA_TRIAL"] = "old"
        old = case.run("sm90")[0].cpu() if "out" not in options else None
        old_error = f"{relative_error(old.double(), want):.3e}" if old is not None and want.any() else "-"
        print(f"   {'ok ' if good else 'BAD'} {name:44} error {total:.3e} (old {old_error}) excess {excess:.1e} "
              f"lse {lse_off:.1e} max {top_off:.1e}{'' if infinite else ' INFINITIES'}{'' if zeros else ' ZEROS'}", flush=True)
        if not good:
            diagnose(out, want, lse, want_lse)
        return good
    except Exception as error:
        print(f"   BAD {name:44} {type(error).__name__}: {str(error)[:300]}", flush=True)
        if "CUDA" in str(error) or "illegal" in str(error):
            raise
        traceback.print_exc()
        return False


# ---------------------------------------------------------------- groups
def basic(rows):
    """The smallest things first: one full tile, one token, 64 heads."""
    for columns, lens in ((64, 64), (128, 128), (1, 1), (17, 17), (70, 70), (200, 200)):
        case = T.Case(rows, torch.device("cuda"), batch=1, heads=64, columns=columns, seed=columns)
        case.pools[0][2][:] = lens
        check(f"1 token, 64 heads, {columns} keys", case)
    case = T.Case(rows, torch.device("cuda"), batch=1, heads=64, columns=640, block_size=64, sinks=False, seed=3)
    case.pools[0][2] = None
    check("1 token, 640 keys, no sinks, no lengths", case)


def shapes(rows):
    extra = 512 if rows == "584" else None
    for batch, heads, columns in ((2, 33, 70), (1, 64, 300), (3, 65, 130), (5, 100, 130), (2, 128, 500), (140, 64, 300),
                                  (140, 128, 200)):
        check(f"{batch} tokens, {heads} heads, {columns} columns",
              T.Case(rows, torch.device("cuda"), batch=batch, heads=heads, columns=columns, extra=extra, block_size=16,
                     seed=batch + heads))


def many(rows):
    extra = {"584": 512}.get(rows)
    for batch, heads in ((512, 64), (300, 128)):
        check(f"{batch} tokens, {heads} heads, wide",
              T.Case(rows, torch.device("cuda"), batch=batch, heads=heads, columns=128 if extra else 1024, extra=extra,
                     block_size=64, seed=batch))


def parts(rows):
    """Keys of every item in parts: fewer tiles than parts, lengths that leave parts empty, sinks, lse and max_logits."""
    global NEW
    for NEW in ("new2", "new3", "new8"):
        print(f"   -- MLA_TRIAL={NEW}", flush=True)
        basic(rows)
        shapes(rows)
    NEW = "new3"
    edges(rows)
    NEW = "new8"
    ranges(rows)
    NEW = "new"
    # What the division makes of them by itself: all in parts, whole items and parts, few and many parts.
    for batch, heads, columns in ((20, 64, 2048), (64, 64, 2048), (133, 64, 2048), (160, 64, 1000), (70, 128, 1000)):
        check(f"{batch} tokens, {heads} heads, {columns} columns",
              T.Case(rows, torch.device("cuda"), batch=batch, heads=heads, columns=columns, block_size=64, seed=batch))


def edges(rows):
    cuda = torch.device("cuda")
    case = T.Case(rows, cuda, batch=7, heads=64, columns=70, extra=50 if rows in T.PACKED else None, seed=3)
    for number, (cache, indices, lengths) in enumerate(case.pools):
        width = indices.shape[2]
        lengths[:] = torch.tensor([0, 1, width - 1, width, -5, width + 9, 0])
        if number:
            lengths[:2] = torch.tensor([width, 0])
        indices[~case.active(number)] = len(cache.keys)
    check("lengths 0, 1, all, -5, too many", case)
    for batch, heads in ((5, 64), (140, 64), (140, 128)):
        case = T.Case(rows, cuda, batch=batch, heads=heads, columns=300, extra=20 if rows in T.PACKED else None, seed=2)
        for cache, indices, _ in case.pools:
            stale = torch.tensor([*T.GARBAGE, len(cache.keys), len(cache.keys) + 3], dtype=torch.int32)
            places = torch.rand(indices.shape, generator=case.gen) < 0.4
            indices[places] = stale[torch.randint(0, len(stale), (int(places.sum()),), generator=case.gen)]
            indices[1:2] = len(cache.keys)
            indices[2:3, :, :64] = 2**31 - 1
        check(f"garbage indices, {batch} tokens, {heads} heads", case)
    for sink in (5.0, -math.inf, math.inf):
        case = T.Case(rows, cuda, heads=64, seed=5)
        case.sinks[::2] = sink
        case.pools[0][2][0] = 0
        check(f"sinks {sink}", case)
    check("several queries a request", T.Case(rows, cuda, batch=30, q_len=5, heads=64,
                                              extra=20 if rows in T.PACKED else None, seed=6))
    for batch, heads in ((3, 64), (140, 40), (140, 100)):
        case = T.Case(rows, cuda, batch=batch, heads=heads, seed=7)
        padded = torch.full((batch, 1, heads + 5, case.dim + 8), math.nan, dtype=T.BF16, device=cuda)
        padded[:, :, :heads, : case.dim] = case.query.to(cuda)
        out = torch.full((batch, 1, heads + 5, 520), 7.0, dtype=T.BF16, device=cuda)
        check(f"strided q and out, {batch} tokens, {heads} heads", case, query=padded[:, :, :heads, : case.dim],
              out=out[:, :, :heads, :512])
        beside = bool((out[:, :, heads:] == 7).all() and (out[..., 512:] == 7).all())
        print(f"   {'ok ' if beside else 'BAD'} nothing written beside", flush=True)
        # Strides that a tensor map cannot have: heads outside, tokens inside.
        turned = case.query.to(cuda)[:, 0].transpose(0, 1).contiguous().transpose(0, 1)[:, None]
        check(f"q with tokens inside heads, {batch} tokens, {heads} heads", case, query=turned)
    for magnitude, scale in ((2.0**-10, 200.0), (2.0**10, 1e-4), (1.0, 0.02), (1.0, 3.0)):
        check(f"magnitude {magnitude}, scale {scale}" + (" (656: may be BAD)" if scale == 3 else ""),
              T.Case(rows, cuda, heads=64, magnitude=magnitude, scale=scale, seed=10))


def ranges(rows):
    """Rows of very different scales beside each other, zero rows, RoPE values far above or below the rest."""
    cuda = torch.device("cuda")
    for name, nope, rope in (("rope large", 1.0, 2.0**12), ("rope small", 1.0, 2.0**-12), ("nope tiny", 2.0**-20, 1.0),
                             ("nope zero", 0.0, 1.0), ("rope zero", 1.0, 0.0)):
        case = T.Case(rows, cuda, heads=64, batch=4, columns=100, scale=(0.1 if nope < 1 else 0.004) / max(1.0, rope / 16), seed=20)
        cache = case.pools[0][0]
        if rows not in T.PACKED:
            continue
        gen = torch.Generator().manual_seed(1)
        count = cache.blocks * cache.block_size
        ropes = (torch.randn(count, 64, generator=gen) * rope).to(T.BF16)
        width = 448 if rows == "584" else 512
        nopes = torch.randn(count, width, generator=gen).to(T.E4M3)
        if nope == 0.0:
            nopes = torch.zeros(count, width).to(T.E4M3)
        spread = torch.randint(-6, 7, (count, 7 if rows == "584" else 4), generator=gen)
        if rows == "584":
            scales = (127 + spread + (round(math.log2(nope)) if nope else -22)).clamp(1, 254)
            keys = nopes.double() * torch.exp2(scales.double() - 127).repeat_interleave(64, 1)
            values = torch.cat([nopes.view(torch.uint8), ropes.view(torch.uint8)], 1)
            packed = torch.cat([values.view(cache.blocks, -1), torch.nn.functional.pad(
                scales.to(torch.uint8), (0, 1), value=255).view(cache.blocks, -1)], 1)
        else:
            scales = torch.exp2(spread.float()) * (torch.rand(count, 4, generator=gen) + 0.5) * (nope or 2.0**-22)
            keys = nopes.double() * scales.double().repeat_interleave(128, 1)
            packed = torch.cat([x.view(torch.uint8) for x in (nopes, scales, ropes)], 1).view(cache.blocks, -1)
        cache.storage[: cache.blocks, : packed.shape[1]] = packed
        cache.keys = torch.cat([keys, ropes.double()], 1)
        check(name, case)
    # A NaN in one row is seen by its token alone.
    case = T.Case(rows, cuda, heads=64, seed=13)
    cache, indices, lengths = case.pools[0]
    lengths[:] = 70
    indices[1:][indices[1:] == indices[0, 0, 0]] = -1
    on, row = cache.on, int(indices[0, 0, 0])

    def spoiled(*args):
        tensor = on(*args)
        if rows in T.PACKED:
            at = row // 8 * tensor.stride(0) + row % 8 * (576 if rows == "584" else 656) + 5
            tensor.view(torch.uint8).as_strided((1,), (1,), at).fill_(127)
        else:
            tensor[row, 0, 5] = math.nan
        return tensor

    cache.on = spoiled
    os.environ["MLA_TRIAL"] = NEW
    out, lse, _ = case.run("sm90")
    good = bool(out[0].isnan().all() and lse[0].isnan().all() and not out[1:].isnan().any())
    print(f"   {'ok ' if good else 'BAD'} a NaN in a row", flush=True)


def repeat(rows):
    """The same bits, 200 launches one after another; lengths that end items at every tile count. Also in parts."""
    global NEW
    for NEW in ("new", "new3"):
        repeated(rows)
    NEW = "new"


def repeated(rows):
    case = T.Case(rows, torch.device("cuda"), batch=300, heads=128, columns=400, block_size=32, seed=14)
    os.environ["MLA_TRIAL"] = NEW
    first = [x.clone() for x in case.run("sm90") if x is not None]
    cuda = torch.device("cuda")
    cache, indices, lengths = case.pools[0]
    on, ind, lens, q, sinks = cache.on(cuda), indices.to(cuda), lengths.to(cuda), case.query.to(cuda), case.sinks.to(cuda)
    from mla_kernels import flash_mla_sparse_fwd, flash_mla_with_kvcache
    outs = []
    same = True
    for _ in range(200):
        out = torch.full((300, 1, 128, 512), math.nan, dtype=T.BF16, device=cuda)
        if rows in T.PACKED:
            lse = flash_mla_with_kvcache(q, on, None, None, 512, object(), softmax_scale=0.1, is_fp8_kvcache=True,
                                         indices=ind, topk_length=lens, attn_sink=sinks, out=out, provider="sm90")[1]
            lse = lse.transpose(1, 2)
        else:
            lse = flash_mla_sparse_fwd(q[:, 0], on, ind, 0.1, attn_sink=sinks, topk_length=lens, out=out[:, 0],
                                       provider="sm90")[2][:, None]
        outs.append((out, lse))
        if len(outs) == 20:
            torch.cuda.synchronize()
            same = all(torch.equal(o, first[0]) and torch.equal(l, first[1]) for o, l in outs)
            if not same:
                break
            outs = []
    print(f"   {'ok ' if same else 'BAD'} same bits in 200 launches", flush=True)
    check("300 tokens, 128 heads, ragged", case)


def times(rows, flashmla):
    kept = sys.modules.get("vllm.third_party")
    sys.modules["vllm.third_party"] = None  # the kernels of the worktree, whatever vLLM is there
    import sparse_mla_inputs as inputs
    sys.modules.pop("vllm.third_party")
    if kept:
        sys.modules["vllm.third_party"] = kept
    from timing import captured, in_turns

    stock = inputs.of_library(Path(flashmla)) if flashmla else None
    pools = inputs.Pools()
    model = inputs.FORMATS[rows].model
    print(f"   {'':30}{'new us':>9}{'old us':>9}{'old/new':>9}{'FlashMLA':>10}{'ratio':>7}  difference", flush=True)
    for tokens in TIMES:
        for heads in (64, 128):
            try:
                torch.manual_seed(0)
                top_k = inputs.top_k(model, heads)
                phase = "scattered" if tokens == 4096 else "decode"
                drawn = (inputs.scattered if tokens == 4096 else inputs.full)(model, tokens, top_k)
                case = inputs.Inputs(phase, drawn, model, heads, pools, stock)
                call = case.ours(rows, "sm90")
                os.environ["MLA_TRIAL"] = "old"
                call(0)
                want = case.out.float().clone()
                replays = [captured(call, case.calls)]
                os.environ["MLA_TRIAL"] = NEW
                case.out.fill_(math.nan)
                call(0)
                torch.cuda.synchronize()
                apart = float((case.out.float() - want).norm() / want.norm())
                replays.insert(0, captured(call, case.calls))
                theirs = None
                if stock:
                    theirs = case.flashmla("576" if rows == "656" and tokens == 4096 else rows)
                if theirs:
                    theirs(0)
                    replays.append(captured(theirs, case.calls))
                us = in_turns(*replays)
                flash = f"{us[2]:10.1f}{us[2] / us[0]:7.2f}" if theirs else f"{'-':>10}{'-':>7}"
                print(f"   {rows} {heads:4} heads {tokens:5} tokens {drawn.lens.float().mean().item():5.0f}"
                      f"{us[0]:9.1f}{us[1]:9.1f}{us[1] / us[0]:9.2f}{flash}  {apart:.1e}", flush=True)
            except Exception as error:
                print(f"   BAD {rows} {heads} heads {tokens} tokens: {type(error).__name__}: {str(error)[:300]}", flush=True)
                if "CUDA error" in str(error):
                    raise


def cal(rows, flashmla):
    kept = sys.modules.get("vllm.third_party")
    sys.modules["vllm.third_party"] = None
    import sparse_mla_inputs as inputs
    sys.modules.pop("vllm.third_party")
    if kept:
        sys.modules["vllm.third_party"] = kept
    from timing import captured, in_turns
    stock = inputs.of_library(Path(flashmla)) if flashmla else None
    pools = inputs.Pools()
    model = inputs.FORMATS[rows].model
    for tokens, heads in ((1, 64), (2, 64), (4, 64), (8, 64), (16, 64), (24, 64), (32, 64), (48, 64), (64, 64), (96, 64), (133, 64), (160, 64), (200, 64), (8, 128), (16, 128)):
        torch.manual_seed(0)
        case = inputs.Inputs("decode", inputs.full(model, tokens, inputs.top_k(model, heads)), model, heads, pools, stock)
        call = case.ours(rows, "sm90")
        ways = ("old", "new1", "new2", "new3", "new4", "new5", "new6", "new8")
        replays = []
        for way in ways:
            os.environ["MLA_TRIAL"] = way
            call(0)
            replays.append(captured(call, case.calls))
        theirs = case.flashmla(rows) if stock else None
        if theirs:
            theirs(0)
            replays.append(captured(theirs, case.calls))
        us = in_turns(*replays)
        print(f"   cal {rows} {heads} heads {tokens} tokens " + " ".join(f"{w} {u:.1f}" for w, u in zip((*ways, "flashmla"), us)), flush=True)


def inputs_():
    kept = sys.modules.get("vllm.third_party")
    sys.modules["vllm.third_party"] = None
    import sparse_mla_inputs as inputs
    sys.modules.pop("vllm.third_party")
    if kept:
        sys.modules["vllm.third_party"] = kept
    return inputs


def small(rows, flashmla):
    """Old and new with few tiles."""
    inputs = inputs_()
    from timing import captured, in_turns
    pools = inputs.Pools()
    model = inputs.FORMATS[rows].model
    v4 = model == "V4"
    cases = [(t, 64, k) for k in ((64, 128, 256) if v4 else (64, 128, 256, 512, 1024)) for t in (8, 16, 24, 33, 48, 66, 100, 132, 200, 512)]
    cases += [(t, 128, 1024 if v4 else 2048) for t in (2, 4, 6)] + [(t, 64, 512 if v4 else 2048) for t in (4, 5, 6, 12, 20, 28, 36, 40, 44)]
    for tokens, heads, k in cases:
        torch.manual_seed(0)
        case = inputs.Inputs("decode", inputs.full(model, tokens, k), model, heads, pools, None)
        call = case.ours(rows, "sm90")
        replays = []
        for way in ("old", "new"):
            os.environ["MLA_TRIAL"] = way
            call(0)
            replays.append(captured(call, case.calls))
        us = in_turns(*replays)
        print(f"   small {rows} {heads} heads {tokens} tokens {(k + (128 if v4 else 0)) // 64} tiles old {us[0]:.1f} new {us[1]:.1f} {us[0] / us[1]:.2f}", flush=True)


def stamps(rows, flashmla):
    import numpy
    inputs = inputs_()
    pools = inputs.Pools()
    model = inputs.FORMATS[rows].model
    os.environ["MLA_TRIAL"] = "new"
    for heads, tokens in ((64, 512), (128, 512), (64, 128)):
        torch.manual_seed(0)
        case = inputs.Inputs("decode", inputs.full(model, tokens, inputs.top_k(model, heads)), model, heads, pools, None)
        call = case.ours(rows, "sm90")
        buffer = torch.zeros(4 * 4 * 8192 * 2, dtype=torch.int32, device="cuda")
        for i in range(6):
            call(i % case.calls)
        os.environ["MLA_STAMPS"] = str(buffer.data_ptr())
        call(7)
        torch.cuda.synchronize()
        del os.environ["MLA_STAMPS"]
        numpy.save(f"{os.environ.get('OUT_STAMPS', '/tmp')}/stamps_{rows}_{heads}_{tokens}.npy", buffer.cpu().numpy())


GROUPS = {f"{name}:{rows}": (kind, rows) for name, kind in
          (("basic", basic), ("shapes", shapes), ("edges", edges), ("ranges", ranges), ("parts", parts), ("many", many), ("repeat", repeat),
           ("times", times), ("cal", cal), ("small", small), ("stamps", stamps)) for rows in FORMATS if not (name in ("times", "cal", "small", "stamps") and rows == "512")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flashmla")
    parser.add_argument("--only", nargs="+", default=[""], help="prefixes of groups, or :FORMAT")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        print(*GROUPS, sep="\n")
        return
    if arguments.group:
        load()
        kind, rows = GROUPS[arguments.group]
        kind(rows, arguments.flashmla) if kind in (times, cal, small, stamps) else kind(rows)
        return
    for group, (kind, rows) in GROUPS.items():
        if not any(group.startswith(o) or (o.startswith(":") and group.endswith(o)) for o in arguments.only):
            continue
        began = time.monotonic()
        print(f"== {group}", flush=True)
        command = [sys.executable, str(HERE), "--group", group]
        if arguments.flashmla:
            command += ["--flashmla", arguments.flashmla]
        limit = 200 if kind in (times, parts, cal, small) else 60
        with subprocess.Popen(command) as process:
            try:
                code = process.wait(timeout=limit)
                if code:
                    print(f"   BAD {group}: exit code {code}", flush=True)
            except subprocess.TimeoutExpired:
                process.kill()
                print(f"   BAD {group}: not done after {limit} s (a deadlock?)", flush=True)
        print(f"   {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
