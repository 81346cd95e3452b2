"""DeepSeek V3.2: its attention (MLA over 2048 picked rows), four small layers, a next-token layer.

Names, shapes and dtypes are those of the public FP8 checkpoints. Beside what all models share:

* attention logits have a standard deviation near `LOGIT_STD`, and values that size; latent rows
  have heavy-tailed channels, as trained models have;
* heads share part of their queries and of their keys' projections. The indexer's rows are the
  RoPE dimensions and the heaviest channels of the latent rows, and its queries those of the heads,
  absorbed: what the top-k drops is what attention would weigh least;
* `o_proj`, which follows attention, is BF16 (`ignored_layers` in the configuration);
  `fp8_o_proj` quantises it as the public checkpoints do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from .layouts import BLOCK, Fp8Blocks
from .recipe import CONTEXT_SCALE, BaseRecipe, Entry, rng


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the model. The defaults are V3.2's except where marked small."""

    hidden: int = 4096  # small (7168)
    layers: int = 4  # small (61)
    dense_layers: int = 1  # small (3)
    mtp_layers: int = 1
    heads: int = 128
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    q_lora: int = 1536
    kv_lora: int = 512
    index_heads: int = 64
    index_dim: int = 128
    index_topk: int = 2048
    intermediate: int = 2048  # small (18432)
    experts: int = 16  # small (256)
    experts_per_token: int = 8
    moe_intermediate: int = 512  # small (2048)
    vocab: int = 8192  # small (129280)
    fp8_o_proj: bool = False

    def __post_init__(self) -> None:
        if self.hidden % (2 * BLOCK):
            raise ValueError(f"hidden must be a multiple of {2 * BLOCK}: two halves of FP8 blocks")
        for name in ("q_lora", "kv_lora", "intermediate", "moe_intermediate"):
            if (value := getattr(self, name)) < 1 or value % BLOCK:
                raise ValueError(f"{name} must be a multiple of the FP8 block, {BLOCK}")
        if self.rope_dim >= self.index_dim or self.index_dim > self.kv_lora:
            raise ValueError("the indexer's rows must hold the RoPE dimensions and some others")
        if not 0 <= self.dense_layers <= self.layers:
            raise ValueError(f"dense_layers must be 0 to {self.layers}, and is {self.dense_layers}")


LOGIT_STD = 2.5
HEAVY_CHANNELS, HEAVY_FACTOR = 10, 3.5
SHARED = 0.4  # variance that a layer's heads share in their queries, and in what makes their keys
INDEX_BIAS = 0.05  # of the indexer's key norm
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def model_config(s: Shape, layout: Fp8Blocks | None = None) -> dict:
    """config.json; `layout` is FP8 blocks unless given."""
    ignored = []
    if not s.fp8_o_proj:  # next-token layers continue the numbering
        ignored = [f"model.layers.{i}.self_attn.o_proj" for i in range(s.layers + s.mtp_layers)]
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_nextn_predict_layers": s.mtp_layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.heads,
        "qk_nope_head_dim": s.nope_dim,
        "qk_rope_head_dim": s.rope_dim,
        "v_head_dim": s.v_dim,
        "q_lora_rank": s.q_lora,
        "kv_lora_rank": s.kv_lora,
        "index_n_heads": s.index_heads,
        "index_head_dim": s.index_dim,
        "index_topk": s.index_topk,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "intermediate_size": s.intermediate,
        "first_k_dense_replace": s.dense_layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": s.moe_intermediate,
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": s.experts_per_token,
        "n_group": 1,  # public: 8 groups of 32 experts, of which 4 are used
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": YARN,
        "quantization_config": (layout or Fp8Blocks()).config(ignored),
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


class Recipe(BaseRecipe):
    s: Shape
    # With YaRN vLLM's softmax scale has the square of this factor.
    mscale = 0.1 * YARN["mscale_all_dim"] * math.log(YARN["factor"]) + 1
    index_rope_halves = True  # the indexer's RoPE turns dimensions i and i + 32, attention's 2i and 2i + 1

    def __init__(self, shape: Shape, seed: int, layout: Fp8Blocks | None = None):
        super().__init__(shape, seed, layout or Fp8Blocks("weight_scale_inv"))

    def config(self) -> dict:
        return model_config(self.s, self.layout)

    def shards(self) -> Iterator[tuple[str, list[Entry]]]:
        s = self.s
        top = [
            Entry("model.embed_tokens.weight", "bf16", lambda n: self.embedding()),
            Entry("lm_head.weight", "bf16", lambda n: self.lm_head()),
            Entry("model.norm.weight", "bf16", lambda n: self.norm_weight(n, s.hidden)),
        ]
        yield "top", top
        for i in range(s.layers):
            dense = i < s.dense_layers
            title = f"layer {i} ({'dense' if dense else 'experts'})"
            yield title, list(self.block(f"model.layers.{i}", dense))
        for i in range(s.mtp_layers):
            yield f"next-token layer {i}", list(self.next_token_layer(f"model.layers.{s.layers + i}"))

    # The tensors of a layer, by the names of the public checkpoints ----------
    def block(self, layer: str, dense: bool) -> Iterator[Entry]:
        s, attn = self.s, f"{layer}.self_attn"
        for part in ("input_layernorm", "post_attention_layernorm"):
            yield Entry(f"{layer}.{part}.weight", "bf16", lambda n: self.norm_weight(n, s.hidden))
        yield Entry(f"{attn}.q_a_proj.weight", "fp8", lambda n: self.reader(n, s.q_lora))
        yield Entry(f"{attn}.q_a_layernorm.weight", "bf16", lambda n: self.norm_weight(n, s.q_lora))
        yield Entry(f"{attn}.q_b_proj.weight", "fp8", lambda n: self.q_b(layer).flatten(0, 1))
        yield Entry(f"{attn}.kv_a_proj_with_mqa.weight", "fp8", lambda n: self.kv_a(layer))
        yield Entry(f"{attn}.kv_a_layernorm.weight", "bf16", lambda n: self.kv_weight(layer))
        yield Entry(f"{attn}.kv_b_proj.weight", "fp8", lambda n: self.kv_b(layer))
        yield Entry(f"{attn}.o_proj.weight", "fp8" if s.fp8_o_proj else "bf16", self.o_proj)
        yield Entry(f"{attn}.indexer.wq_b.weight", "fp8", lambda n: self.index_q(layer))
        yield Entry(f"{attn}.indexer.wk.weight", "fp8", lambda n: self.index_k(layer))
        yield Entry(f"{attn}.indexer.k_norm.weight", "f32", lambda n: self.index_norm(layer))
        yield Entry(f"{attn}.indexer.k_norm.bias", "f32", lambda n: self.normal(n, s.index_dim, std=INDEX_BIAS))
        yield Entry(f"{attn}.indexer.weights_proj.weight", "bf16", self.index_weights)
        if dense:
            yield from self.feed_forward(f"{layer}.mlp", s.intermediate)
            return
        yield Entry(f"{layer}.mlp.gate.weight", "bf16", self.router)
        bias = f"{layer}.mlp.gate.e_score_correction_bias"
        yield Entry(bias, "f32", lambda n: self.normal(n, s.experts, std=0.05))
        for expert in [f"experts.{i}" for i in range(s.experts)] + ["shared_experts"]:
            yield from self.feed_forward(f"{layer}.mlp.{expert}", s.moe_intermediate)

    def feed_forward(self, name: str, intermediate: int) -> Iterator[Entry]:
        for part in ("gate_proj", "up_proj"):
            yield Entry(f"{name}.{part}.weight", "fp8", lambda n: self.ffn_in(n, intermediate))
        yield Entry(f"{name}.down_proj.weight", "fp8", lambda n: self.ffn_out(n, intermediate))

    def next_token_layer(self, layer: str) -> Iterator[Entry]:
        h = self.s.hidden

        def inputs(name: str) -> torch.Tensor:
            """Of the next token and of the context found so far, side by side."""
            token = self.draft_input(name + ":token", token=1.0, context=0.0)
            return torch.cat([token, self.draft_input(name + ":context", token=0.0, context=1.0)], dim=1)

        yield Entry(f"{layer}.embed_tokens.weight", "bf16", lambda n: self.embedding())
        for part in ("enorm", "hnorm", "shared_head.norm"):
            yield Entry(f"{layer}.{part}.weight", "bf16", lambda n: self.norm_weight(n, h))
        yield Entry(f"{layer}.eh_proj.weight", "bf16", inputs)
        yield Entry(f"{layer}.shared_head.head.weight", "bf16", lambda n: self.lm_head())
        yield from self.block(layer, dense=False)

    # Attention --------------------------------------------------------------
    def q_b(self, layer: str) -> torch.Tensor:
        """[heads, nope_dim + rope_dim, q_lora]"""
        s = self.s
        name, gain = f"{layer}.self_attn.q_b_proj.weight", LOGIT_STD / self.mscale**2
        dims = s.nope_dim + s.rope_dim
        w = self.linear(name, s.heads * dims, s.q_lora, gain * math.sqrt(1 - SHARED))
        shared = self.linear(name + ":shared", dims, s.q_lora, gain * math.sqrt(SHARED))
        return w.view(s.heads, dims, s.q_lora).add_(shared)

    def kv_a(self, layer: str) -> torch.Tensor:
        return self.reader(f"{layer}.self_attn.kv_a_proj_with_mqa.weight", self.s.kv_lora + self.s.rope_dim)

    def kv_weight(self, layer: str) -> torch.Tensor:
        """Norm weight of the latent rows: log-normal, a few heavy channels, RMS 1."""
        name, size = f"{layer}.self_attn.kv_a_layernorm.weight", self.s.kv_lora
        w = torch.exp(self.normal(name, size, std=0.35))
        heavy = rng(self.seed, name + ":heavy").permutation(size)[:HEAVY_CHANNELS]
        w[torch.from_numpy(heavy)] *= HEAVY_FACTOR
        return w / w.square().mean().sqrt()

    def w_uk(self, layer: str) -> torch.Tensor:
        """[heads, nope_dim, kv_lora]: keys from the latent row."""
        s, name = self.s, f"{layer}.self_attn.kv_b_proj.weight:k"
        w = self.linear(name, s.heads * s.nope_dim, s.kv_lora, math.sqrt(1 - SHARED))
        shared = self.linear(name + ":shared", s.nope_dim, s.kv_lora, math.sqrt(SHARED))
        return w.view(s.heads, s.nope_dim, s.kv_lora).add_(shared)

    def kv_b(self, layer: str) -> torch.Tensor:
        s, name = self.s, f"{layer}.self_attn.kv_b_proj.weight:v"
        w_uv = self.linear(name, s.heads * s.v_dim, s.kv_lora, LOGIT_STD).view(s.heads, s.v_dim, s.kv_lora)
        return torch.cat([self.w_uk(layer), w_uv], dim=1).flatten(0, 1)

    def o_proj(self, name: str) -> torch.Tensor:
        w = self.linear(name, self.s.hidden, self.s.heads * self.s.v_dim, CONTEXT_SCALE)
        w[self.halves()[0]] = 0
        return w

    # Indexer ----------------------------------------------------------------
    def index_channels(self, layer: str) -> torch.Tensor:
        """The latent row's channels that the indexer sees beside RoPE's: the heaviest."""
        count = self.s.index_dim - self.s.rope_dim
        return self.kv_weight(layer).topk(count).indices.sort().values

    def index_rope(self) -> torch.Tensor:
        """Attention's RoPE dimensions in the order of the indexer's."""
        dims = torch.arange(self.s.rope_dim)
        return dims.view(-1, 2).T.flatten() if self.index_rope_halves else dims

    def index_q(self, layer: str) -> torch.Tensor:
        """Queries of the heads: RoPE dimensions, then the absorbed ones of the channels."""
        s = self.s
        heads = torch.arange(s.index_heads) % s.heads
        nope, rope = self.q_b(layer)[heads].split([s.nope_dim, s.rope_dim], dim=1)
        absorbed = self.w_uk(layer)[heads][:, :, self.index_channels(layer)].transpose(1, 2) @ nope
        return torch.cat([rope[:, self.index_rope()], absorbed], dim=1).flatten(0, 1)

    def index_k(self, layer: str) -> torch.Tensor:
        kv_a = self.kv_a(layer)
        return torch.cat([kv_a[self.s.kv_lora + self.index_rope()], kv_a[self.index_channels(layer)]])

    def index_norm(self, layer: str) -> torch.Tensor:
        return torch.cat([torch.ones(self.s.rope_dim), self.kv_weight(layer)[self.index_channels(layer)]])
