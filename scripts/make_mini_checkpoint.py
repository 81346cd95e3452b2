#!/usr/bin/env python3
"""Write a small, seeded DeepSeek V4 checkpoint with healthy activations.

    python scripts/make_mini_checkpoint.py OUT_DIR [--seed 0]
    vllm serve OUT_DIR --block-size 256 --kv-cache-dtype fp8

The result has DeepSeek V4 Flash's attention dimensions (hidden 4096, 64 heads of 512, 8 output
groups, sliding window 128, index top-k 512), five layers that cover the three attention kinds
(sliding window, one row in 4, one row in 128), one next-token (MTP) layer, 16 routed experts, a
vocabulary of 8192 and FP8 weights in 128x128 blocks. Names, shapes and dtypes are those of the
public FP8-expert checkpoints, so stock vLLM loads it with its default loader.

vLLM's dummy weights are near zero and give flat logits, so they cannot tell a correct attention
backend from a broken one. These weights are built so that a comparison by logits means something:

* every linear layer keeps the scale of its input and every sublayer adds an amount comparable to
  what the residual streams hold, so nothing vanishes or explodes;
* the first half of the hidden channels carries the token (embeddings, feed-forward layers), the
  second half, `CONTEXT_SCALE` times smaller, what attention found. Projections, gates, routers and
  feed-forward layers read the first half only; the output layer reads both. Without this, the FP8
  rounding of activations in each linear layer, a step function, turns differences of 1e-6 between
  two backends into percents within five layers, and every comparison measures that chaos. With
  it, queries, keys and top-k choices are bit-identical between two runs with equal schedules, and
  each attention layer's own error reaches the logits straight. The price: an error in one token's
  attention output shows in that token's own logits, not in later tokens', so compare prompt
  logprobs too;
* `wo_b` is BF16 (`ignored_layers` in the configuration) for the same reason: of the two FP8
  roundings between attention and the residual streams one is left, the one in front of `wo_a`
  that vLLM's kernels require. `--fp8-wo-b` quantises it as the public checkpoints do;
* attention logits have a standard deviation near `KV_RMS`: neither uniform nor one-hot; sinks
  are moderate; keys and values have heavy-tailed channels, as trained models have;
* `--kv-rms` gives keys and values another size and `wo_b` the inverse. So that logits stay as they
  are, queries spend their norm on `Q_ONLY` channels that larger keys lack; smaller keys leave
  attention nearly uniform, since queries are normed and cannot grow;
* the compressors' gates are soft maxima over logits with a standard deviation above one;
* the indexer sees the channels of the compressed rows that dominate the attention logits, through
  the same projections as the attention itself, and heads share part of their query direction:
  what the top-k drops is what attention would weigh least;
* token embeddings fall into clusters and each router prefers six experts a cluster by a margin;
* the output layer predicts a successor of the current token with a strength that varies from
  token to token, on top of a part that depends on the context: next-token probabilities lie
  between flat and certain, and far context moves them. The MTP layer passes the token on, so its
  drafts are accepted now and then.

Every tensor is drawn from its own counter-based generator, keyed by the seed and the tensor's
name: the same seed gives the same bytes (with the same numpy, on the same kind of machine),
whatever the order or the threads. FP8 scales are powers of two: exact in float32 and in ue8m0.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the model. The defaults are V4 Flash's except where marked small."""

    hidden: int = 4096
    layers: int = 5  # small (43)
    compress_ratios: tuple[int, ...] = (0, 0, 4, 128, 4, 0)  # the last one: the MTP layer
    mtp_layers: int = 1
    hash_layers: int = 1  # small (3)
    heads: int = 64
    head_dim: int = 512
    rope_dim: int = 64
    q_lora: int = 1024
    o_lora: int = 1024
    o_groups: int = 8
    index_heads: int = 64
    index_dim: int = 128
    index_topk: int = 512
    window: int = 128
    experts: int = 16  # small (256)
    experts_per_token: int = 6
    moe_intermediate: int = 512  # small (2048)
    hc_mult: int = 4
    vocab: int = 8192  # small (129280)
    fp8_wo_b: bool = False
    kv_rms: float = 2.5  # of KV rows

    def __post_init__(self) -> None:
        if len(self.compress_ratios) != self.layers + self.mtp_layers:
            raise ValueError("compress_ratios needs one entry a layer, next-token layers included")
        if any(r not in (0, 1, 4, 128) for r in self.compress_ratios):
            raise ValueError(f"unknown compress ratio in {self.compress_ratios}")
        if not 0 < self.kv_rms < math.inf:
            raise ValueError(f"kv_rms must be positive and finite, not {self.kv_rms}")
        if self.hidden % (2 * BLOCK):
            raise ValueError(f"hidden must be a multiple of {2 * BLOCK}: two halves of FP8 blocks")
        for name in ("q_lora", "o_lora", "head_dim", "moe_intermediate"):
            if getattr(self, name) % BLOCK:
                raise ValueError(f"{name} must be a multiple of the FP8 block, {BLOCK}")
        if self.rope_dim >= self.index_dim or self.index_dim > self.head_dim:
            raise ValueError("the indexer's rows must hold the RoPE dimensions and some others")


# ---------------------------------------------------------------- the recipe
# See the module's docstring. Standard deviations are those of unit-RMS inputs.
CONTEXT_SCALE = 2.0**-12  # so small that it leaves the RMS norms' float32 sums alone
CLUSTERS = 8
CLUSTER_SHARE = 0.5  # of an embedding's norm
KV_RMS = Shape.kv_rms  # about the standard deviation of the attention logits
Q_ONLY = 64  # channels before the RoPE dimensions that are zero in keys larger than KV_RMS
HEAVY_CHANNELS, HEAVY_FACTOR = 10, 3.5
Q_SHARED = 0.4  # variance that a layer's heads share in their queries
SINK_MEAN, SINK_STD = 1.0, 1.5
ATTN_GAIN = 1.0
GATE_STD, APE_STD = 1.2, 0.5
ROUTER_SIGNAL, ROUTER_NOISE = 0.25, 0.25
FFN_IN_GAIN, FFN_OUT_GAIN = 1.3, 0.7
HC_SCALE = 0.5
CONTEXT_LOGIT = 1.05
BIGRAM_MIN, BIGRAM_MAX = 0.335, 0.45
LOGIT_SHIFT = 0.33  # moves all logits towards zero, where vLLM's BF16 logits are fine-grained
MTP_NOISE = 0.3


def rng(seed: int, name: str) -> np.random.Generator:
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(key[:16], dtype=np.uint64)))


class Recipe:
    """Draws the tensors of one model."""

    def __init__(self, shape: Shape, seed: int):
        self.s = shape
        self.seed = seed
        self.kv_gain = shape.kv_rms / KV_RMS
        nope = shape.head_dim - shape.rope_dim
        self.q_only = slice(nope - Q_ONLY if self.kv_gain > 1 else nope, nope)

    def normal(self, name: str, *size: int, std: float = 1.0) -> torch.Tensor:
        x = rng(self.seed, name).standard_normal(size, dtype=np.float32)
        return torch.from_numpy(x).mul_(std)

    def linear(self, name: str, out: int, fan_in: int, gain: float = 1.0) -> torch.Tensor:
        return self.normal(name, out, fan_in, std=gain / math.sqrt(fan_in))

    def halves(self) -> tuple[slice, slice]:
        """The hidden channels of the token and of the context."""
        return slice(0, self.s.hidden // 2), slice(self.s.hidden // 2, self.s.hidden)

    def reader(self, name: str, out: int, gain: float = 1.0) -> torch.Tensor:
        """A projection of the token half."""
        w = self.linear(name, out, self.s.hidden, gain)
        w[:, self.halves()[1]] = 0
        return w

    def norm_weight(self, name: str, size: int) -> torch.Tensor:
        return (1 + self.normal(name, size, std=0.15)).clamp_(min=0.3)

    # Shared between tensors ------------------------------------------------
    def cluster_directions(self) -> torch.Tensor:
        """Orthonormal rows in the token half."""
        half = self.s.hidden // 2
        q, _ = np.linalg.qr(rng(self.seed, "clusters").standard_normal((half, CLUSTERS)))
        u = torch.zeros(CLUSTERS, self.s.hidden)
        u[:, :half] = torch.from_numpy(q.T).float()
        return u

    def cluster_of_token(self) -> np.ndarray:
        return rng(self.seed, "cluster of token").integers(0, CLUSTERS, self.s.vocab)

    def token_directions(self) -> torch.Tensor:
        d = self.normal("token directions", self.s.vocab, self.s.hidden)
        d[:, self.halves()[1]] *= CONTEXT_SCALE
        return d

    def successor(self) -> np.ndarray:
        return rng(self.seed, "successor").permutation(self.s.vocab)

    def embedding(self) -> torch.Tensor:
        u = self.cluster_directions()[torch.from_numpy(self.cluster_of_token())]
        own = self.token_directions().mul_(math.sqrt(1 - CLUSTER_SHARE**2))
        return own.add_(u, alpha=CLUSTER_SHARE * math.sqrt(self.s.hidden / 2))

    def lm_head(self) -> torch.Tensor:
        """Row v answers to the token whose successor is v, more or less strongly."""
        token, context = self.halves()
        w = self.linear("head.weight", self.s.vocab, self.s.hidden, CONTEXT_LOGIT / CONTEXT_SCALE)
        w[:, token] = 0
        strength = rng(self.seed, "successor strength").uniform(
            BIGRAM_MIN, BIGRAM_MAX, (self.s.vocab, 1)
        )
        directions = self.token_directions().div_(math.sqrt(self.s.hidden / 2))
        directions[:, context] = 0
        directions.mul_(torch.from_numpy(strength).float())
        w[torch.from_numpy(self.successor())] += directions
        # A token has about the same amount of its cluster's direction and of no other's.
        return w - LOGIT_SHIFT * self.cluster_directions().sum(0)

    def kv_weight(self, name: str, size: int) -> torch.Tensor:
        """Norm weight of KV rows: log-normal, a few heavy channels, RMS `kv_rms`."""
        w = torch.exp(self.normal(name, size, std=0.35))
        nope = size - self.s.rope_dim
        heavy = rng(self.seed, name + ":heavy").permutation(nope)[:HEAVY_CHANNELS]
        w[torch.from_numpy(heavy)] *= HEAVY_FACTOR
        w[self.q_only] = 0
        return w * (self.s.kv_rms / w.square().mean().sqrt())

    def index_channels(self, layer: str) -> torch.Tensor:
        """The compressed row's channels that the indexer sees: the heaviest, then RoPE's."""
        nope = self.s.head_dim - self.s.rope_dim
        w = self.kv_weight(f"{layer}.attn.compressor.norm.weight", self.s.head_dim)
        heaviest = w[:nope].topk(self.s.index_dim - self.s.rope_dim).indices.sort().values
        return torch.cat([heaviest, torch.arange(nope, self.s.head_dim)])

    def wq_b(self, layer: str) -> torch.Tensor:
        s = self.s
        name = f"{layer}.attn.wq_b.weight"
        w = self.linear(name, s.heads * s.head_dim, s.q_lora, math.sqrt(1 - Q_SHARED))
        shared = self.linear(name + ":shared", s.head_dim, s.q_lora, math.sqrt(Q_SHARED))
        w = w.view(s.heads, s.head_dim, s.q_lora).add_(shared)
        if self.kv_gain > 1:  # the other channels of a normed query get an RMS of 1 / kv_gain
            w[:, self.q_only] *= math.sqrt((s.head_dim * self.kv_gain**2 - s.head_dim + Q_ONLY) / Q_ONLY)
        return w.view(-1, s.q_lora)

    def compressor(self, layer: str, ratio: int, part: str) -> torch.Tensor:
        """`wkv`, `wgate` or `ape` of the compressor, halves of an overlapping one stacked."""
        rows = (2 if ratio == 4 else 1) * self.s.head_dim
        name = f"{layer}.attn.compressor.{part}"
        if part == "ape":
            return self.normal(name, ratio, rows, std=APE_STD)
        return self.reader(name, rows, GATE_STD if part == "wgate" else 1.0)

    def index_rows(self, layer: str) -> torch.Tensor:
        """Rows of the overlapping compressor's projections that the indexer repeats."""
        channels = self.index_channels(layer)
        return torch.cat([channels, channels + self.s.head_dim])

    def index_wq_b(self, layer: str) -> torch.Tensor:
        s = self.s
        w = self.wq_b(layer).view(s.heads, s.head_dim, s.q_lora)
        w = w[torch.arange(s.index_heads) % s.heads]
        return w[:, self.index_channels(layer)].reshape(-1, s.q_lora)

    def index_weights(self, layer: str) -> torch.Tensor:
        """Head weights: positive for every token, since every token has a cluster."""
        name = f"{layer}.attn.indexer.weights_proj.weight"
        w = self.reader(name, self.s.index_heads, 0.3)
        # A unit-RMS token has about 0.3 * sqrt(hidden) along its cluster's direction.
        return w + self.cluster_directions().sum(0) * (5.0 / math.sqrt(self.s.hidden))

    def router(self, layer: str) -> torch.Tensor:
        s = self.s
        name = f"{layer}.ffn.gate.weight"
        r = rng(self.seed, name + ":experts")
        chosen = torch.zeros(s.experts, CLUSTERS)
        for cluster in range(CLUSTERS):
            chosen[torch.from_numpy(r.permutation(s.experts)[: s.experts_per_token]), cluster] = 1
        w = self.reader(name, s.experts, ROUTER_NOISE)
        return w + ROUTER_SIGNAL * chosen @ self.cluster_directions()

    def hc_fn(self, name: str, rows: int) -> torch.Tensor:
        m, h = self.s.hc_mult, self.s.hidden
        w = self.linear(name, rows, m * h).view(rows, m, h)
        w[:, :, self.halves()[1]] = 0
        return w.view(rows, m * h)

    def ffn_out(self, name: str) -> torch.Tensor:
        w = self.linear(name, self.s.hidden, self.s.moe_intermediate, FFN_OUT_GAIN)
        w[self.halves()[1]] = 0
        return w

    def wo_b(self, name: str) -> torch.Tensor:
        gain = ATTN_GAIN * CONTEXT_SCALE / self.kv_gain
        w = self.linear(name, self.s.hidden, self.s.o_groups * self.s.o_lora, gain)
        w[self.halves()[0]] = 0
        return w

    def hc_base(self, name: str) -> torch.Tensor:
        """Of 24: 4 input gates, 4 output gates, 4x4 mixing logits (mostly the identity)."""
        m = self.s.hc_mult
        base = self.normal(name, (2 + m) * m)
        base[:m] = base[:m] * 0.7 - 0.5
        base[m : 2 * m] = base[m : 2 * m] * 0.7 - 0.3
        base[2 * m :] = base[2 * m :] * 0.3 + 2.0 * torch.eye(m).flatten()
        return base

    # The checkpoint --------------------------------------------------------
    def block(self, layer: str, ratio: int, hashed: bool = False) -> Iterator[tuple]:
        """(name, kind, maker) for a decoder layer, with checkpoint names."""
        s = self.s
        h = s.hidden
        for sub in ("attn", "ffn"):
            n = f"{layer}.hc_{sub}"
            mix = (2 + s.hc_mult) * s.hc_mult
            yield n + "_fn", "f32", lambda n=n, m=mix: self.hc_fn(n + "_fn", m)
            yield n + "_base", "f32", lambda n=n: self.hc_base(n + "_base")
            yield n + "_scale", "f32", lambda: torch.full((3,), HC_SCALE)
            n = f"{layer}.{sub}_norm.weight"
            yield n, "bf16", lambda n=n: self.norm_weight(n, h)

        a = f"{layer}.attn"
        yield (
            f"{a}.attn_sink",
            "f32",
            lambda: self.normal(f"{a}.attn_sink", s.heads, std=SINK_STD) + SINK_MEAN,
        )
        linears = {
            f"{a}.wq_a": lambda n: self.reader(n, s.q_lora),
            f"{a}.wkv": lambda n: self.reader(n, s.head_dim),
            f"{a}.wq_b": lambda n: self.wq_b(layer),
            f"{a}.wo_a": lambda n: self.linear(
                n, s.o_groups * s.o_lora, s.heads * s.head_dim // s.o_groups
            ),
            f"{a}.wo_b": self.wo_b,
        }
        for e in [f"experts.{i}" for i in range(s.experts)] + ["shared_experts"]:
            n = f"{layer}.ffn.{e}"
            linears[f"{n}.w1"] = linears[f"{n}.w3"] = lambda n: self.reader(
                n, s.moe_intermediate, FFN_IN_GAIN
            )
            linears[f"{n}.w2"] = self.ffn_out
        for n, make in linears.items():
            kind = "bf16" if n.endswith(".wo_b") and not s.fp8_wo_b else "fp8"
            n += ".weight"
            yield n, kind, lambda n=n, make=make: make(n)
        n = f"{a}.q_norm.weight"
        yield n, "bf16", lambda n=n: self.norm_weight(n, s.q_lora)
        n = f"{a}.kv_norm.weight"
        yield n, "bf16", lambda n=n: self.kv_weight(n, s.head_dim)

        if ratio > 1:
            c = f"{a}.compressor"
            for part in ("wkv", "wgate"):
                yield (
                    f"{c}.{part}.weight",
                    "bf16",
                    lambda part=part: self.compressor(layer, ratio, part),
                )
            yield f"{c}.ape", "f32", lambda: self.compressor(layer, ratio, "ape")
            n = f"{c}.norm.weight"
            yield n, "bf16", lambda n=n: self.kv_weight(n, s.head_dim)
        if ratio == 4:
            x = f"{a}.indexer"
            yield f"{x}.wq_b.weight", "fp8", lambda: self.index_wq_b(layer)
            yield f"{x}.weights_proj.weight", "bf16", lambda: self.index_weights(layer)
            for part in ("wkv", "wgate"):
                yield (
                    f"{x}.compressor.{part}.weight",
                    "bf16",
                    lambda part=part: self.compressor(layer, 4, part)[self.index_rows(layer)],
                )
            yield (
                f"{x}.compressor.ape",
                "f32",
                lambda: self.compressor(layer, 4, "ape")[:, self.index_rows(layer)],
            )
            yield (
                f"{x}.compressor.norm.weight",
                "bf16",
                lambda: self.kv_weight(f"{a}.compressor.norm.weight", s.head_dim)[
                    self.index_channels(layer)
                ],
            )

        yield f"{layer}.ffn.gate.weight", "bf16", lambda: self.router(layer)
        if hashed:
            n = f"{layer}.ffn.gate.tid2eid"
            yield n, "i32", lambda n=n: self.hash_table(n)
        else:
            n = f"{layer}.ffn.gate.bias"
            yield n, "f32", lambda n=n: self.normal(n, s.experts, std=0.05)

    def hash_table(self, name: str) -> torch.Tensor:
        keys = rng(self.seed, name).random((self.s.vocab, self.s.experts))
        return torch.from_numpy(keys.argsort(1)[:, : self.s.experts_per_token].astype(np.int32))

    def hc_head(self, prefix: str) -> Iterator[tuple]:
        m, h = self.s.hc_mult, self.s.hidden
        n = prefix + "hc_head"
        yield n + "_fn", "f32", lambda: self.hc_fn(n + "_fn", m)
        yield n + "_base", "f32", lambda: self.normal(n + "_base", m, std=0.5)
        yield n + "_scale", "f32", lambda: torch.full((1,), HC_SCALE)
        yield prefix + "norm.weight", "bf16", lambda: self.norm_weight(prefix + "norm.weight", h)

    def mtp(self, index: int) -> Iterator[tuple]:
        p, h = f"mtp.{index}.", self.s.hidden

        def project(n: str, token: float, context: float) -> torch.Tensor:
            w = self.reader(n, h, MTP_NOISE)
            w[self.halves()[1]] = 0
            diagonal = torch.full((h,), token)
            diagonal[self.halves()[1]] = context
            return w + torch.diag(diagonal)

        # The draft starts from the next token and the context found so far.
        n = p + "e_proj.weight"
        yield n, "fp8", lambda n=n: project(n, 1.0, 0.0)
        n = p + "h_proj.weight"
        yield n, "fp8", lambda n=n: project(n, 0.0, 1.0)
        for n in (p + "enorm.weight", p + "hnorm.weight"):
            yield n, "bf16", lambda n=n: self.norm_weight(n, h)
        yield from self.hc_head(p)
        ratio = self.s.compress_ratios[self.s.layers + index]
        yield from self.block(p.rstrip("."), ratio)

    def shards(self) -> Iterator[tuple[str, list[tuple]]]:
        yield (
            "top",
            [
                ("embed.weight", "bf16", self.embedding),
                ("head.weight", "bf16", self.lm_head),
                *self.hc_head(""),
            ],
        )
        for i in range(self.s.layers):
            ratio = self.s.compress_ratios[i]
            yield (
                f"layer {i} (compress ratio {max(1, ratio)})",
                list(self.block(f"layers.{i}", ratio, hashed=i < self.s.hash_layers)),
            )
        for i in range(self.s.mtp_layers):
            yield f"next-token layer {i}", list(self.mtp(i))


def to_fp8_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values and their float32 power-of-two scale a 128x128 block; w = values * scale."""
    out, fan_in = w.shape
    rows, cols = -(-out // BLOCK), -(-fan_in // BLOCK)
    padded = torch.nn.functional.pad(w, (0, cols * BLOCK - fan_in, 0, rows * BLOCK - out))
    blocks = padded.view(rows, BLOCK, cols, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3))
    amax[amax == 0] = FP8_MAX
    scale = torch.exp2(torch.ceil(torch.log2(amax / FP8_MAX)))
    values = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return values.view(rows * BLOCK, cols * BLOCK)[:out, :fan_in].contiguous(), scale


def store(name: str, kind: str, make: Callable[[], torch.Tensor]) -> tuple[dict, str]:
    w = make()
    line = f"{name:48s} {kind:4s} {str(tuple(w.shape)):18s}"
    if kind != "i32":
        line += f" std {w.float().std(correction=0):8.4f}  absmax {w.abs().max():8.3f}"
    if kind == "fp8":
        values, scale = to_fp8_blocks(w)
        return {name: values, name.removesuffix("weight") + "scale": scale}, line
    dtype = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32}[kind]
    return {name: w.to(dtype).contiguous()}, line


def model_config(s: Shape) -> dict:
    quantization: dict = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    if not s.fp8_wo_b:  # vLLM's module names; next-token layers continue the numbering
        quantization["ignored_layers"] = [
            f"model.layers.{i}.attn.wo_b" for i in range(s.layers + s.mtp_layers)
        ]
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_nextn_predict_layers": s.mtp_layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": 1,
        "head_dim": s.head_dim,
        "qk_rope_head_dim": s.rope_dim,
        "q_lora_rank": s.q_lora,
        "o_lora_rank": s.o_lora,
        "o_groups": s.o_groups,
        "sliding_window": s.window,
        "compress_ratios": list(s.compress_ratios),
        "index_n_heads": s.index_heads,
        "index_head_dim": s.index_dim,
        "index_topk": s.index_topk,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "moe_intermediate_size": s.moe_intermediate,
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": s.experts_per_token,
        "num_hash_layers": s.hash_layers,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "hc_mult": s.hc_mult,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "expert_dtype": "fp8",
        "quantization_config": quantization,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


# ---------------------------------------------------------------- tokenizer
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
CHAT_TOKENS = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜"]
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def byte_symbols() -> list[str]:
    """The printable stand-ins of byte-level BPE for bytes 0..255."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols, extra = {}, 256
    for b in range(256):
        if b in keep:
            symbols[b] = chr(b)
        else:
            symbols[b] = chr(extra)
            extra += 1
    return [symbols[b] for b in range(256)]


def bpe_vocabulary(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Bytes, letter pairs and triples in order of English letter frequency, with their merges."""
    symbols = byte_symbols()
    space = symbols[32]
    tokens = [BOS, EOS, PAD, *symbols]
    merges: list[tuple[str, str]] = []
    rank = {c: i for i, c in enumerate(LETTERS)}

    def by_rank(items: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        return sorted(items, key=lambda t: (sum(rank[c] + 1 for c in t), t))

    pairs = [a + b for a, b in by_rank([(a, b) for a in LETTERS for b in LETTERS])]
    triples = by_rank([(a, b, c) for a in LETTERS for b in LETTERS for c in LETTERS])
    wanted: list[tuple[str, str]] = [(p[0], p[1]) for p in pairs]
    wanted += [(space, c) for c in LETTERS]
    wanted += [(space, p) for p in pairs]
    for a, b, c in triples:
        wanted += [(a + b, c), (space, a + b + c)]
    for left, right in wanted:
        if len(tokens) == size:
            break
        tokens.append(left + right)
        merges.append((left, right))
    if len(tokens) != size:
        raise ValueError(f"cannot make {size} tokens")
    return {t: i for i, t in enumerate(tokens)}, merges


def write_tokenizer(out: Path, vocab_size: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocab, merges = bpe_vocabulary(vocab_size - len(CHAT_TOKENS))
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in (BOS, EOS, PAD)])
    tok.add_tokens([AddedToken(t, normalized=False, special=False) for t in CHAT_TOKENS])
    tok.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
            ),
        ]
    )
    if tok.get_vocab_size() != vocab_size:
        raise AssertionError(f"tokenizer has {tok.get_vocab_size()} tokens, not {vocab_size}")
    tok.save(str(out / "tokenizer.json"))
    chat = (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "<｜Assistant｜></think>{{ m['content'] }}{{ eos_token }}"
        "{% else %}<｜User｜>{{ m['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜></think>{% endif %}"
    )
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1048576,
            "chat_template": chat,
        },
    )


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _refuse_other_weights(out: Path, shape: Shape) -> None:
    if not any(out.glob("*.safetensors")):
        return
    try:
        config = json.loads((out / "config.json").read_text())
        ours = (config["num_hidden_layers"], config["vocab_size"]) == (shape.layers, shape.vocab)
    except (OSError, ValueError, KeyError):
        ours = False
    if not ours:
        raise ValueError(f"{out} holds other weights, or a part of these; remove them, or give a new folder")


def write_checkpoint(
    out: Path,
    shape: Shape,
    seed: int = 0,
    threads: int | None = None,
    log: Callable[[str], None] = print,
) -> int:
    """Write everything; the number of bytes of weights. Raises ValueError if `out` holds other weights."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    _refuse_other_weights(out, shape)
    (out / "config.json").unlink(missing_ok=True)  # written last: marks a complete checkpoint
    for old in out.glob("model-*.safetensors"):
        old.unlink()
    recipe = Recipe(shape, seed)
    shards = list(recipe.shards())
    index: dict[str, str] = {}
    total = 0
    start = time.perf_counter()
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # parallel over tensors instead
    try:
        with ThreadPoolExecutor(threads or min(16, os.cpu_count() or 1)) as pool:
            for i, (title, entries) in enumerate(shards, 1):
                file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
                tensors: dict[str, torch.Tensor] = {}
                log(f"{file}: {title}")
                for made, line in pool.map(lambda entry: store(*entry), entries):
                    if ".experts." not in line or ".experts.0." in line:
                        log("  " + line)
                    tensors.update(made)
                save_file(tensors, str(out / file), metadata={"format": "pt"})
                index.update(dict.fromkeys(tensors, file))
                total += sum(t.numel() * t.element_size() for t in tensors.values())
    finally:
        torch.set_num_threads(torch_threads)
    write_json(
        out / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": index},
    )
    write_tokenizer(out, shape.vocab)
    write_json(
        out / "generation_config.json",
        {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_p": 1.0},
    )
    write_json(out / "config.json", model_config(shape))
    seconds = time.perf_counter() - start
    log(f"{len(index)} tensors, {total / 1e9:.2f} GB in {seconds:.1f} s: {out} (seed {seed})")
    return total


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--moe-intermediate-size",
        type=int,
        default=Shape.moe_intermediate,
        help="128 a tensor-parallel rank is the least that FP8 blocks allow: the default serves "
        "TP 1, 2 and 4; give 1024 for TP 8 (0.6 GB more)",
    )
    parser.add_argument(
        "--fp8-wo-b",
        action="store_true",
        help="quantise wo_b too, as the public checkpoints do (comparisons get noisier, see above)",
    )
    parser.add_argument(
        "--heads",
        type=int,
        default=Shape.heads,
        help="of attention, a multiple of 8: with 32 a rank of TP 4 has 8 heads and one output group, as one of "
        "V4-Flash has at TP 8 (default: %(default)s)",
    )
    parser.add_argument("--kv-rms", type=float, default=KV_RMS, help="of keys and values (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no line a tensor")
    args = parser.parse_args(argv)
    if args.heads < 8 or args.heads % 8:
        parser.error(f"--heads must be a multiple of 8, for an output group is 8 heads, and is {args.heads}")

    def log(line: str) -> None:
        if not args.quiet or not line.startswith("  "):
            print(line, flush=True)

    try:
        shape = Shape(
            heads=args.heads,
            o_groups=args.heads // 8,
            moe_intermediate=args.moe_intermediate_size,
            fp8_wo_b=args.fp8_wo_b,
            kv_rms=args.kv_rms,
        )
        write_checkpoint(args.out_dir, shape, args.seed, log=log)
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
