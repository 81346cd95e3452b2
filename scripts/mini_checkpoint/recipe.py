"""Seeded draws, and what the weights of all models share.

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
* token embeddings fall into clusters and each router prefers a few experts a cluster by a margin;
* the output layer predicts a successor of the current token with a strength that varies from
  token to token, on top of a part that depends on the context: next-token probabilities lie
  between flat and certain, and far context moves them. The MTP layer passes the token on, so its
  drafts are accepted now and then.

Every tensor is drawn from its own counter-based generator, keyed by the seed and the tensor's
name: the same seed gives the same bytes (with the same numpy, on the same kind of machine),
whatever the order or the threads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch

from .layouts import Fp8Blocks

# Standard deviations are those of unit-RMS inputs.
CONTEXT_SCALE = 2.0**-12  # so small that it leaves the RMS norms' float32 sums alone
CLUSTERS = 8
CLUSTER_SHARE = 0.5  # of an embedding's norm
ROUTER_SIGNAL, ROUTER_NOISE = 0.25, 0.25
FFN_IN_GAIN, FFN_OUT_GAIN = 1.3, 0.7
CONTEXT_LOGIT = 1.05
BIGRAM_MIN, BIGRAM_MAX = 0.335, 0.45
LOGIT_SHIFT = 0.33  # moves all logits towards zero, where vLLM's BF16 logits are fine-grained
MTP_NOISE = 0.3


class Sizes(Protocol):
    """What every model's `Shape` has."""

    hidden: int
    layers: int
    vocab: int
    index_heads: int
    experts: int
    experts_per_token: int
    moe_intermediate: int


class Entry(NamedTuple):
    """A tensor of the checkpoint."""

    name: str
    kind: str  # `bf16`, `f32`, `i32`, or `fp8` of a linear layer that public checkpoints quantise
    make: Callable[[str], torch.Tensor]  # of its name


def rng(seed: int, name: str) -> np.random.Generator:
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(key[:16], dtype=np.uint64)))


class BaseRecipe:
    """Draws the tensors of one model; a model's own `Recipe` lists them and writes its config.json."""

    special_tokens: ClassVar[dict[int, str]] = {}  # of the tokenizer, by their ids, beside those that all have

    def __init__(self, shape: Sizes, seed: int, layout: Fp8Blocks):
        self.s = shape
        self.seed = seed
        self.layout = layout

    def config(self) -> dict:
        """config.json."""
        raise NotImplementedError

    def shards(self) -> Iterator[tuple[str, list[Entry]]]:
        """A title and the tensors of each file."""
        raise NotImplementedError

    # Draws ------------------------------------------------------------------
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

    # Tokens -----------------------------------------------------------------
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
        strength = rng(self.seed, "successor strength").uniform(BIGRAM_MIN, BIGRAM_MAX, (self.s.vocab, 1))
        directions = self.token_directions().div_(math.sqrt(self.s.hidden / 2))
        directions[:, context] = 0
        directions.mul_(torch.from_numpy(strength).float())
        w[torch.from_numpy(self.successor())] += directions
        # A token has about the same amount of its cluster's direction and of no other's.
        return w - LOGIT_SHIFT * self.cluster_directions().sum(0)

    # Feed-forward layers, drafts and indexers -------------------------------
    def router(self, name: str) -> torch.Tensor:
        """Each cluster prefers experts of its own."""
        s = self.s
        r = rng(self.seed, name + ":experts")
        chosen = torch.zeros(s.experts, CLUSTERS)
        for cluster in range(CLUSTERS):
            chosen[torch.from_numpy(r.permutation(s.experts)[: s.experts_per_token]), cluster] = 1
        w = self.reader(name, s.experts, ROUTER_NOISE)
        return w + ROUTER_SIGNAL * chosen @ self.cluster_directions()

    def ffn_in(self, name: str, intermediate: int | None = None) -> torch.Tensor:
        return self.reader(name, intermediate or self.s.moe_intermediate, FFN_IN_GAIN)

    def ffn_out(self, name: str, intermediate: int | None = None) -> torch.Tensor:
        w = self.linear(name, self.s.hidden, intermediate or self.s.moe_intermediate, FFN_OUT_GAIN)
        w[self.halves()[1]] = 0
        return w

    def draft_input(self, name: str, token: float, context: float) -> torch.Tensor:
        """A projection into the draft that keeps so much of both halves."""
        h = self.s.hidden
        w = self.reader(name, h, MTP_NOISE)
        w[self.halves()[1]] = 0
        diagonal = torch.full((h,), token)
        diagonal[self.halves()[1]] = context
        return w + torch.diag(diagonal)

    def index_weights(self, name: str) -> torch.Tensor:
        """Head weights: positive for every token, since every token has a cluster."""
        w = self.reader(name, self.s.index_heads, 0.3)
        # A unit-RMS token has about 0.3 * sqrt(hidden) along its cluster's direction.
        return w + self.cluster_directions().sum(0) * (5.0 / math.sqrt(self.s.hidden))
