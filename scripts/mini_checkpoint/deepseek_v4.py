"""DeepSeek V4: V4-Flash's attention, five small layers that cover its three kinds, a next-token layer.

Names, shapes and dtypes are those of the public FP8-expert checkpoints. Beside what all models share:

* `wo_b` is BF16 (`ignored_layers` in the configuration): of the two FP8 roundings between attention
  and the residual streams one is left, the one in front of `wo_a` that vLLM's kernels require.
  `fp8_wo_b` quantises it as the public checkpoints do;
* attention logits have a standard deviation near `KV_RMS`: neither uniform nor one-hot; sinks
  are moderate; keys and values have heavy-tailed channels, as trained models have;
* `kv_rms` gives keys and values another size and `wo_b` the inverse. So that logits stay as they
  are, queries spend their norm on `Q_ONLY` channels that larger keys lack; smaller keys leave
  attention nearly uniform, since queries are normed and cannot grow;
* the compressors' gates are soft maxima over logits with a standard deviation above one;
* the indexer sees the channels of the compressed rows that dominate the attention logits, through
  the same projections as the attention itself, and heads share part of their query direction:
  what the top-k drops is what attention would weigh least;
* `dspark` puts the stages of DSpark's draft in the next-token layers' place, as DeepSeek-V4-Flash-0731
  has them: its Markov head alone knows each token's successor, so drafts are accepted now and then.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch

from .layouts import BLOCK, Fp8Blocks
from .recipe import CONTEXT_SCALE, BaseRecipe, Entry, rng


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
    dspark: bool = False  # the next-token layers are stages of DSpark's draft

    known_ratios: ClassVar[tuple[int, ...]] = (0, 1, 4, 128)
    module: ClassVar[str] = "model"  # vLLM's, of the layers

    def __post_init__(self) -> None:
        if len(self.compress_ratios) != self.layers + self.mtp_layers:
            raise ValueError("compress_ratios needs one entry a layer, next-token layers included")
        if any(r not in self.known_ratios for r in self.compress_ratios):
            raise ValueError(f"unknown compress ratio in {self.compress_ratios}")
        if not 0 < self.kv_rms < math.inf:
            raise ValueError(f"kv_rms must be positive and finite, not {self.kv_rms}")
        if self.hidden % (2 * BLOCK):
            raise ValueError(f"hidden must be a multiple of {2 * BLOCK}: two halves of FP8 blocks")
        for name in ("q_lora", "o_lora", "head_dim", "moe_intermediate"):
            if (value := getattr(self, name)) < 1 or value % BLOCK:
                raise ValueError(f"{name} must be a multiple of the FP8 block, {BLOCK}")
        if self.rope_dim >= self.index_dim or self.index_dim > self.head_dim:
            raise ValueError("the indexer's rows must hold the RoPE dimensions and some others")

    @property
    def dspark_targets(self) -> list[int]:
        """The layers whose output DSpark's draft sees: the first, the middle and the last."""
        return [0, self.layers // 2, self.layers - 1]


KV_RMS = Shape.kv_rms  # about the standard deviation of the attention logits
Q_ONLY = 64  # channels before the RoPE dimensions that are zero in keys larger than KV_RMS
HEAVY_CHANNELS, HEAVY_FACTOR = 10, 3.5
Q_SHARED = 0.4  # variance that a layer's heads share in their queries
SINK_MEAN, SINK_STD = 1.0, 1.5
ATTN_GAIN = 1.0
GATE_STD, APE_STD = 1.2, 0.5
HC_SCALE = 0.5
DSPARK_BLOCK, DSPARK_RANK = 3, 64  # drafts a step, channels of the Markov head
MARKOV_LOGIT = 32.0  # of the successor; no logit of the output layer comes near


def model_config(s: Shape, layout: Fp8Blocks | None = None) -> dict:
    """config.json; `layout` is FP8 blocks unless given."""
    layout = layout or Fp8Blocks()
    ignored = []
    if not s.fp8_wo_b:  # vLLM's module names; next-token layers continue the numbering
        layers = [f"{s.module}.layers.{i}" for i in range(s.layers)]
        layers += [f"model.layers.{s.layers + i}" for i in range(s.mtp_layers)]
        ignored = [f"{layer}.attn.wo_b" for layer in layers]
    drafts = {
        "dspark_block_size": DSPARK_BLOCK,
        "dspark_markov_rank": DSPARK_RANK,
        "dspark_target_layer_ids": s.dspark_targets,
        "dspark_noise_token_id": 2,
        "n_mtp_layers": s.mtp_layers,
        "enable_confidence_head": False,
    }
    config = {
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
        "expert_dtype": layout.expert_dtype,
        "quantization_config": layout.config(ignored),
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "use_cache": True,
        **(drafts if s.dspark else {}),
    }
    return {key: value for key, value in config.items() if value is not None}


class Recipe(BaseRecipe):
    s: Shape
    markov_factors = ("markov_w1", "markov_w2")  # names in the checkpoint

    def __init__(self, shape: Shape, seed: int, layout: Fp8Blocks | None = None):
        super().__init__(shape, seed, layout or Fp8Blocks())
        self.kv_gain = shape.kv_rms / KV_RMS
        nope = shape.head_dim - shape.rope_dim
        self.q_only = slice(nope - Q_ONLY if self.kv_gain > 1 else nope, nope)

    def config(self) -> dict:
        return model_config(self.s, self.layout)

    def shards(self) -> Iterator[tuple[str, list[Entry]]]:
        s = self.s
        top = [
            Entry("embed.weight", "bf16", lambda n: self.embedding()),
            Entry("head.weight", "bf16", lambda n: self.lm_head()),
            *self.stream_sum(""),
        ]
        yield "top", top
        for i in range(s.layers):
            ratio = s.compress_ratios[i]
            block = self.block(f"layers.{i}", ratio, hashed=i < s.hash_layers)
            yield f"layer {i} ({f'compress ratio {ratio}' if ratio else 'window only'})", list(block)
        for i in range(s.mtp_layers):
            layer, ratio = f"mtp.{i}", s.compress_ratios[s.layers + i]
            if s.dspark:
                yield f"DSpark's stage {i}", [*self.block(layer, ratio), *self.dspark_ends(i)]
            else:
                yield f"next-token layer {i}", list(self.next_token_layer(layer, ratio))

    # The tensors of a layer, by the names of the public checkpoints ----------
    def block(self, layer: str, ratio: int, hashed: bool = False) -> Iterator[Entry]:
        s, attn = self.s, f"{layer}.attn"
        yield from self.streams_and_norms(layer)
        yield Entry(f"{attn}.attn_sink", "f32", self.sink)
        yield Entry(f"{attn}.wq_a.weight", "fp8", lambda n: self.reader(n, s.q_lora))
        yield Entry(f"{attn}.wkv.weight", "fp8", lambda n: self.reader(n, s.head_dim))
        yield Entry(f"{attn}.wq_b.weight", "fp8", lambda n: self.wq_b(layer))
        yield Entry(f"{attn}.wo_a.weight", "fp8", self.wo_a)
        yield Entry(f"{attn}.wo_b.weight", "fp8" if s.fp8_wo_b else "bf16", self.wo_b)
        for expert in [f"experts.{i}" for i in range(s.experts)] + ["shared_experts"]:
            for part, make in (("w1", self.ffn_in), ("w3", self.ffn_in), ("w2", self.ffn_out)):
                yield Entry(f"{layer}.ffn.{expert}.{part}.weight", "fp8", make)
        yield Entry(f"{attn}.q_norm.weight", "bf16", lambda n: self.norm_weight(n, s.q_lora))
        yield Entry(f"{attn}.kv_norm.weight", "bf16", self.kv_weight)
        yield from self.compressed(layer, ratio)
        yield Entry(f"{layer}.ffn.gate.weight", "bf16", self.router)
        if hashed:
            yield Entry(f"{layer}.ffn.gate.tid2eid", "i32", self.hash_table)
        else:
            yield Entry(f"{layer}.ffn.gate.bias", "f32", self.router_bias)

    def streams_and_norms(self, layer: str) -> Iterator[Entry]:
        mix = (2 + self.s.hc_mult) * self.s.hc_mult
        for sub in ("attn", "ffn"):
            yield Entry(f"{layer}.hc_{sub}_fn", "f32", lambda n: self.hc_fn(n, mix))
            yield Entry(f"{layer}.hc_{sub}_base", "f32", self.hc_base)
            yield Entry(f"{layer}.hc_{sub}_scale", "f32", lambda n: torch.full((3,), HC_SCALE))
            yield Entry(f"{layer}.{sub}_norm.weight", "bf16", lambda n: self.norm_weight(n, self.s.hidden))

    def compressed(self, layer: str, ratio: int) -> Iterator[Entry]:
        """What makes and picks the rows that stand for several tokens."""
        if ratio > 1:
            yield from self.compressor(layer, ratio)
        if ratio == 4:
            yield from self.indexer(layer)

    def compressor(self, layer: str, ratio: int) -> Iterator[Entry]:
        c = f"{layer}.attn.compressor"
        for part in ("wkv", "wgate"):
            yield Entry(f"{c}.{part}.weight", "bf16", lambda n, part=part: self.compress(layer, ratio, part))
        yield Entry(f"{c}.ape", "f32", lambda n: self.compress(layer, ratio, "ape"))
        yield Entry(f"{c}.norm.weight", "bf16", self.kv_weight)

    def indexer(self, layer: str) -> Iterator[Entry]:
        x = f"{layer}.attn.indexer"

        def rows(part: str) -> torch.Tensor:
            return self.compress(layer, 4, part)[self.index_rows(layer)]

        def norm(name: str) -> torch.Tensor:
            return self.kv_weight(f"{layer}.attn.compressor.norm.weight")[self.index_channels(layer)]

        yield Entry(f"{x}.wq_b.weight", "fp8", lambda n: self.index_wq_b(layer))
        yield Entry(f"{x}.weights_proj.weight", "bf16", self.index_weights)
        for part in ("wkv", "wgate"):
            yield Entry(f"{x}.compressor.{part}.weight", "bf16", lambda n, part=part: rows(part))
        ape = f"{x}.compressor.ape"
        yield Entry(ape, "f32", lambda n: self.compress(layer, 4, "ape")[:, self.index_rows(layer)])
        yield Entry(f"{x}.compressor.norm.weight", "bf16", norm)

    def next_token_layer(self, layer: str, ratio: int) -> Iterator[Entry]:
        # The draft starts from the next token and the context found so far.
        yield Entry(f"{layer}.e_proj.weight", "fp8", lambda n: self.draft_input(n, token=1.0, context=0.0))
        yield Entry(f"{layer}.h_proj.weight", "fp8", lambda n: self.draft_input(n, token=0.0, context=1.0))
        for part in ("enorm", "hnorm"):
            yield Entry(f"{layer}.{part}.weight", "bf16", lambda n: self.norm_weight(n, self.s.hidden))
        yield from self.stream_sum(f"{layer}.")
        yield from self.block(layer, ratio)

    def dspark_ends(self, stage: int) -> Iterator[Entry]:
        """What the first stage has in front of its layer, and the last one behind it."""
        if stage == 0:
            yield Entry("mtp.0.main_proj.weight", "fp8", self.dspark_context)
            yield Entry("mtp.0.main_norm.weight", "bf16", lambda n: self.norm_weight(n, self.s.hidden))
        if stage == self.s.mtp_layers - 1:
            yield from self.stream_sum(f"mtp.{stage}.")
            token, successor = (f"mtp.{stage}.markov_head.{factor}.weight" for factor in self.markov_factors)
            yield Entry(token, "bf16", lambda n: self.markov_codes())
            yield Entry(successor, "bf16", self.markov_successors)

    def stream_sum(self, prefix: str) -> Iterator[Entry]:
        m = self.s.hc_mult
        yield Entry(f"{prefix}hc_head_fn", "f32", lambda n: self.hc_fn(n, m))
        yield Entry(f"{prefix}hc_head_base", "f32", lambda n: self.normal(n, m, std=0.5))
        yield Entry(f"{prefix}hc_head_scale", "f32", lambda n: torch.full((1,), HC_SCALE))
        yield Entry(f"{prefix}norm.weight", "bf16", lambda n: self.norm_weight(n, self.s.hidden))

    def dspark_context(self, name: str) -> torch.Tensor:
        """The mean of the target's layers, and some noise."""
        targets = self.s.dspark_targets
        parts = [self.draft_input(f"{name}:{i}", token=1.0, context=1.0) for i in targets]
        return torch.cat(parts, 1) / len(targets)

    def markov_codes(self) -> torch.Tensor:
        """A random sign vector for each token: two of them are nearly orthogonal."""
        return self.normal("markov codes", self.s.vocab, DSPARK_RANK).sign()

    def markov_successors(self, name: str) -> torch.Tensor:
        w = torch.empty(self.s.vocab, DSPARK_RANK)
        w[torch.from_numpy(self.successor())] = self.markov_codes() * (MARKOV_LOGIT / DSPARK_RANK)
        return w

    # Attention --------------------------------------------------------------
    def sink(self, name: str) -> torch.Tensor:
        return self.normal(name, self.s.heads, std=SINK_STD) + SINK_MEAN

    def kv_weight(self, name: str) -> torch.Tensor:
        """Norm weight of KV rows: log-normal, a few heavy channels, RMS `kv_rms`."""
        size = self.s.head_dim
        w = torch.exp(self.normal(name, size, std=0.35))
        nope = size - self.s.rope_dim
        heavy = rng(self.seed, name + ":heavy").permutation(nope)[:HEAVY_CHANNELS]
        w[torch.from_numpy(heavy)] *= HEAVY_FACTOR
        w[self.q_only] = 0
        return w * (self.s.kv_rms / w.square().mean().sqrt())

    def wq_b(self, layer: str) -> torch.Tensor:
        s = self.s
        name = f"{layer}.attn.wq_b.weight"
        w = self.linear(name, s.heads * s.head_dim, s.q_lora, math.sqrt(1 - Q_SHARED))
        shared = self.linear(name + ":shared", s.head_dim, s.q_lora, math.sqrt(Q_SHARED))
        w = w.view(s.heads, s.head_dim, s.q_lora).add_(shared)
        if self.kv_gain > 1:  # the other channels of a normed query get an RMS of 1 / kv_gain
            w[:, self.q_only] *= math.sqrt((s.head_dim * self.kv_gain**2 - s.head_dim + Q_ONLY) / Q_ONLY)
        return w.view(-1, s.q_lora)

    def wo_a(self, name: str) -> torch.Tensor:
        s = self.s
        return self.linear(name, s.o_groups * s.o_lora, s.heads * s.head_dim // s.o_groups)

    def wo_b(self, name: str) -> torch.Tensor:
        gain = ATTN_GAIN * CONTEXT_SCALE / self.kv_gain
        w = self.linear(name, self.s.hidden, self.s.o_groups * self.s.o_lora, gain)
        w[self.halves()[0]] = 0
        return w

    def compress(self, layer: str, ratio: int, part: str) -> torch.Tensor:
        """`wkv`, `wgate` or `ape` of the compressor, halves of an overlapping one stacked."""
        rows = (2 if ratio == 4 else 1) * self.s.head_dim
        name = f"{layer}.attn.compressor.{part}"
        if part == "ape":
            return self.normal(name, ratio, rows, std=APE_STD)
        return self.reader(name, rows, GATE_STD if part == "wgate" else 1.0)

    # Indexer ----------------------------------------------------------------
    def index_channels(self, layer: str) -> torch.Tensor:
        """The compressed row's channels that the indexer sees: the heaviest, then RoPE's."""
        nope = self.s.head_dim - self.s.rope_dim
        w = self.kv_weight(f"{layer}.attn.compressor.norm.weight")
        heaviest = w[:nope].topk(self.s.index_dim - self.s.rope_dim).indices.sort().values
        return torch.cat([heaviest, torch.arange(nope, self.s.head_dim)])

    def index_rows(self, layer: str) -> torch.Tensor:
        """Rows of the overlapping compressor's projections that the indexer repeats."""
        channels = self.index_channels(layer)
        return torch.cat([channels, channels + self.s.head_dim])

    def index_wq_b(self, layer: str) -> torch.Tensor:
        s = self.s
        w = self.wq_b(layer).view(s.heads, s.head_dim, s.q_lora)
        w = w[torch.arange(s.index_heads) % s.heads]
        return w[:, self.index_channels(layer)].reshape(-1, s.q_lora)

    # Streams and routers ----------------------------------------------------
    def hc_fn(self, name: str, rows: int) -> torch.Tensor:
        m, h = self.s.hc_mult, self.s.hidden
        w = self.linear(name, rows, m * h).view(rows, m, h)
        w[:, :, self.halves()[1]] = 0
        return w.view(rows, m * h)

    def hc_base(self, name: str) -> torch.Tensor:
        """Of 24: 4 input gates, 4 output gates, 4x4 mixing logits (mostly the identity)."""
        m = self.s.hc_mult
        base = self.normal(name, (2 + m) * m)
        base[:m] = base[:m] * 0.7 - 0.5
        base[m : 2 * m] = base[m : 2 * m] * 0.7 - 0.3
        base[2 * m :] = base[2 * m :] * 0.3 + 2.0 * torch.eye(m).flatten()
        return base

    def router_bias(self, name: str) -> torch.Tensor:
        return self.normal(name, self.s.experts, std=0.05)

    def hash_table(self, name: str) -> torch.Tensor:
        keys = rng(self.seed, name).random((self.s.vocab, self.s.experts))
        return torch.from_numpy(keys.argsort(1)[:, : self.s.experts_per_token].astype(np.int32))
