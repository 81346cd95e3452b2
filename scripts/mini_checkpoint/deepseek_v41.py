"""DeepSeek V4.1: V4.1-Flash's attention, six small layers that cover its kinds; vLLM has it from 0.30.0 on.

The weights are V4's but for what follows. In a V4.1 checkpoint that V4's has not:

* compress ratios are 0 (window only), 1 and 2. The compressor pools without overlap or `ape`; at ratio 1 it
  has no gate either, and its rows are one a token;
* compressors, and the caches of their rows, are in the layers of `kv_source_layer_ids` alone, indexers in
  those of `index_source_layer_ids`; a layer between them reads the rows, or the picks, of the last one below
  it. Public: two layers of the window only, 18 of ratio 2 with sources 2, 8 and 14, then 20 of ratio 1 with
  the source 20, which index again in 24, 28, 32 and 36;
* an indexer's keys are made of the source's compressed rows, by `wk` and `k_norm` in place of a compressor of
  its own. Here `wk` takes the channels that V4's indexer sees;
* two levels of picks: the indexer of `candidate_source_layer_id` also picks blocks of rows, and those of later
  layers choose from these. Public: 2048 blocks of 8, which is all of 16384 tokens; here 128;
* queries are not normed after `wq_b`, no layer routes by hash, and the streams are summed at the end by the
  last layer's gates, without an `hc_head` of their own;
* linears are FP8 in blocks of 32 x 32 with UE8M0 scales, experts MXFP4. vLLM also takes V4's 128 x 128 with
  FP8 experts (`--layout fp8`);
* the draft is DSpark's only; its targets are named by the layer they enter, and its experts may be fewer
  (public: 128, of which 3, to 384, of which 6; here as many as the layers have);
* config.json has these in `text_config`.

Left out, since no attention depends on it: the n-gram tables of `engram_layer_ids` (200 GB in the public
model; the list is empty here), and the vision tower, so vLLM needs `--language-model-only`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import torch

from . import deepseek_v4
from .layouts import Fp8Blocks
from .quantised import Mxfp8
from .recipe import Entry


@dataclasses.dataclass(frozen=True)
class Shape(deepseek_v4.Shape):
    """Sizes of the model. The defaults are V4.1 Flash's except where marked small."""

    hidden: int = 5120
    layers: int = 6  # small (40)
    compress_ratios: tuple[int, ...] = (0, 2, 2, 1, 1, 1)
    mtp_layers: int = 0
    hash_layers: int = 0
    q_lora: int = 1280
    index_heads: int = 32
    kv_sources: tuple[int, ...] = (1, 3)
    index_sources: tuple[int, ...] = (1, 3, 4)
    candidate_source: int = 3
    candidate_blocks: int = 128  # small (2048)
    candidate_block: int = 8

    known_ratios: ClassVar[tuple[int, ...]] = (0, 1, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        compressed = [i for i in range(self.layers) if self.compress_ratios[i]]
        if not set(self.kv_sources) <= set(self.index_sources) <= set(compressed):
            raise ValueError("every source of rows must be one of picks, and each of these a compressed layer")
        for i in compressed:
            source = self.kv_source(i)
            if source is None or self.compress_ratios[source] != self.compress_ratios[i]:
                raise ValueError(f"layer {i} has no source of rows of its compress ratio")

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed rows a layer reads."""
        return max((source for source in self.kv_sources if source <= layer), default=None)

    @property
    def dspark_targets(self) -> list[int]:
        """The layers whose input DSpark's draft sees: the last ones, as in the public model."""
        return [self.layers - 3, self.layers - 2, self.layers - 1]


def layer_number(layer: str) -> int:
    return int(layer.removeprefix("layers."))


def model_config(s: Shape, layout: Fp8Blocks | None = None) -> dict:
    """config.json; `layout` is the public checkpoints' unless given."""
    layout = layout or Mxfp8()
    text = deepseek_v4.model_config(s, layout)
    for key in ("architectures", "expert_dtype", "num_hash_layers", "quantization_config"):
        text.pop(key)
    shared = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    top = {key: text.pop(key) for key in shared}
    ignored = []
    if not s.fp8_wo_b:  # vLLM's module names; the draft's layers continue the numbering, without the prefix
        layers = [f"language_model.model.layers.{i}" for i in range(s.layers)]
        layers += [f"model.layers.{s.layers + i}" for i in range(s.mtp_layers)]
        ignored = [f"{layer}.attn.wo_b" for layer in layers]
    text["rope_scaling"]["rope_type"] = text["rope_scaling"].pop("type")
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        **top,
        "quantization_config": layout.config(ignored) | {"expert_dtype": layout.expert_dtype},
        "text_config": text
        | {
            "model_type": "deepseek_v41_text",
            "rms_norm_eps": 1e-20,
            "kv_source_layer_ids": list(s.kv_sources),
            "index_source_layer_ids": list(s.index_sources),
            "candidate_source_layer_id": s.candidate_source,
            "candidate_topk_blocks": s.candidate_blocks,
            "candidate_block_size": s.candidate_block,
            "engram_layer_ids": [],
        },
    }


class Recipe(deepseek_v4.Recipe):
    s: Shape
    markov_factors = ("embed", "head")

    def __init__(self, shape: Shape, seed: int, layout: Fp8Blocks | None = None):
        super().__init__(shape, seed, layout or Mxfp8())

    def config(self) -> dict:
        return model_config(self.s, self.layout)

    def compressed(self, layer: str, ratio: int) -> Iterator[Entry]:
        if not ratio:
            return
        number = layer_number(layer)
        if number in self.s.kv_sources:
            yield from self.compressor(layer, ratio)
        if number in self.s.index_sources:
            yield from self.indexer(layer)

    def compressor(self, layer: str, ratio: int) -> Iterator[Entry]:
        c = f"{layer}.attn.compressor"
        for part in ("wkv", "wgate") if ratio > 1 else ("wkv",):
            yield Entry(f"{c}.{part}.weight", "bf16", lambda n, part=part: self.compress(layer, ratio, part))
        yield Entry(f"{c}.norm.weight", "bf16", self.kv_weight)

    def indexer(self, layer: str) -> Iterator[Entry]:
        x = f"{layer}.attn.indexer"
        yield Entry(f"{x}.wq_b.weight", "fp8", lambda n: self.index_wq_b(layer))
        yield Entry(f"{x}.weights_proj.weight", "bf16", self.index_weights)
        if layer_number(layer) in self.s.kv_sources:
            yield Entry(f"{x}.wk.weight", "bf16", lambda n: torch.eye(self.s.head_dim)[self.index_channels(layer)])
            yield Entry(f"{x}.k_norm.weight", "bf16", lambda n: self.index_norm(layer))

    def stream_sum(self, prefix: str) -> Iterator[Entry]:
        yield Entry(f"{prefix}norm.weight", "bf16", lambda n: self.norm_weight(n, self.s.hidden))

    def index_channels(self, layer: str) -> torch.Tensor:
        return super().index_channels(f"layers.{self.s.kv_source(layer_number(layer))}")

    def index_norm(self, layer: str) -> torch.Tensor:
        """One weight for all, so that the keys keep the rows' size and proportions."""
        w = self.kv_weight(f"{layer}.attn.compressor.norm.weight")[self.index_channels(layer)]
        return w.square().mean().sqrt().expand(self.s.index_dim)
