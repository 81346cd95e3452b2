#!/usr/bin/env python3
"""The arithmetic of the kernel with 64 heads on M over 656-byte rows, on a CPU: what its roundings add to outputs and lse.

    python m64_precision.py

Products are exact here and sums float64, so what remains is rounding of rows to fp16 (by one or two terms of the scale
over the row's power of two), of q to fp16 and of weights to fp16. One line a case: excess error (without the output's own
rounding to BF16) and the largest error of lse, for one term and for two; and the same of rows rounded to BF16.
"""
import math
import torch

E4M3, BF16, F16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16


def rows(count, gen, magnitude, spread):
    nope = torch.randn(count, 512, generator=gen).to(E4M3).double()
    scales = ((torch.rand(count, 4, generator=gen) + 0.1) * magnitude)
    if spread:
        scales = scales * torch.exp2(torch.randint(-spread, spread + 1, (count, 4), generator=gen).float())
    rope = (torch.randn(count, 64, generator=gen) * magnitude).to(BF16)
    return nope, scales.float(), rope


def fma16(a, b, c):
    """fp16, rounded once: a * b + c is exact in float64."""
    return (a.double() * b.double() + c.double()).to(F16)


def widened(nope, scales, terms):
    """Rows over their powers, fp16, and the powers."""
    power = torch.frexp(scales.amax(1))[1].double() - 1 + 1 + 9 - 15
    ratio = (scales.double() * torch.exp2(-power)[:, None]).float()
    high = ratio.to(F16)
    low = (ratio - high.float()).to(F16)
    v = nope.to(F16)
    high, low = (x.repeat_interleave(128, 1) for x in (high, low))
    if terms == 1:
        return (v.double() * high.double()).to(F16).double(), power
    return fma16(v, high, (v.double() * low.double()).to(F16)).double(), power


def attend(q, x, rope, power, scale, sink):
    """out, lse as the kernel has them."""
    e = torch.frexp(q.abs().amax(1).float())[1].double() - 1
    q16 = (q.double() * torch.exp2(-e)[:, None]).to(F16).double()
    tail = q.double()[:, 512:] * torch.exp2(-e)[:, None]
    s = q16[:, :512] @ x.T + tail @ (rope.double() * torch.exp2(-power)[:, None]).T
    s = (s * torch.exp2(power) * (torch.exp2(e)[:, None] * scale * math.log2(math.e)) + power)
    maximum = s[:, :64].amax(1)  # of the first tile, raised by 15
    top = s.amax(1)
    maximum = torch.where(top > maximum + 15, top, maximum)[:, None]
    w32 = torch.exp2(s - maximum)
    w = w32.to(F16).double()
    total = (w32 * torch.exp2(-power)).sum(1)
    lse = (maximum[:, 0] + total.log2()) * math.log(2)
    return w @ x / total[:, None] * torch.sigmoid(lse - sink)[:, None], lse


def excess(out, want):
    off = lambda x: float((x.double() - want).norm() / want.norm())  # noqa: E731
    return max(off(out.to(BF16)) ** 2 - off(want.to(BF16)) ** 2, 0.0) ** 0.5


def case(name, keys=2048, magnitude=1.0, scale=0.1, spread=0, q_size=1.0, heads=64, tokens=6, seed=0):
    gen = torch.Generator().manual_seed(seed)
    found = {}
    for _ in range(tokens):
        nope, scales, rope = rows(keys, gen, magnitude, spread)
        q = (torch.randn(heads, 576, generator=gen) * q_size).to(BF16)
        sink = torch.randn(heads, generator=gen).double()
        keys64 = torch.cat([nope * scales.double().repeat_interleave(128, 1), rope.double()], 1)
        s = scale * q.double() @ keys64.T
        lse = s.logsumexp(1)
        want = s.softmax(1) @ keys64[:, :512] * torch.sigmoid(lse - sink)[:, None]
        for terms in (1, 2):
            x, power = widened(nope, scales, terms)
            out, mine = attend(q, x, rope, power, scale, sink)
            found.setdefault(terms, []).append((out, mine, want, lse))
        k16 = keys64.to(BF16).double()
        t = scale * q.double() @ k16.T
        found.setdefault("bf16", []).append((t.softmax(1).to(BF16).double() @ k16[:, :512]
                                             * torch.sigmoid(t.logsumexp(1) - sink)[:, None], t.logsumexp(1), want, lse))
    line = f"{name:44}"
    for kind, parts in found.items():
        out, mine, want, lse = (torch.cat([p[i] for p in parts]) for i in range(4))
        gap = (mine - lse).abs()
        line += f" | {kind}: excess {excess(out, want):.1e} lse {float(gap.max()):.1e} rms {float(gap.pow(2).mean().sqrt()):.1e}"
    print(line, flush=True)


if __name__ == "__main__":
    for keys in (1, 17, 64, 200, 640, 2048):
        case(f"{keys} keys", keys)
    case("70 keys, seed 10, magnitude 2^-10, scale 200", 70, 2.0**-10, 200.0)
    case("70 keys, magnitude 2^10, scale 1e-4", 70, 2.0**10, 1e-4)
    case("2048 keys, scale 0.02", 2048, scale=0.02)
    case("70 keys, scale 3", 70, scale=3.0)
    case("2048 keys, scale 3", 2048, scale=3.0)
    case("2048 keys, q times 8", 2048, q_size=8.0)
    case("2048 keys, scales over 2^-3..2^3", 2048, spread=3, scale=0.05)
    case("2048 keys, scales over 2^-6..2^6", 2048, spread=6, scale=0.004)
    case("2048 keys, scales over 2^-12..2^12", 2048, spread=12, scale=1e-4)
