"""For test_mini_v41.py: a forward pass of a mini DeepSeek V4.1 in float32, without RoPE, which turns queries and
keys alike."""

import torch


def normed(x, weight=1.0):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-20) * weight


class Model:
    """`choose(scores, count)` picks rows, [tokens, count]; of scores that are -inf none."""

    def __init__(self, recipe, choose):
        self.s, self.choose = recipe.s, choose
        self.w = {e.name: e.make(e.name) for _, entries in recipe.shards() for e in entries}
        self.attention, self.hidden = [], []

    def linear(self, name, x):
        return x @ self.w[f"{name}.weight"].float().T

    def gates(self, name, streams):
        """Of a sublayer, by the streams before it: how much of each goes in, how much of its output comes to each,
        and how the streams mix."""
        m = self.s.hc_mult
        fn, base, scale = (self.w[f"{name}_{part}"] for part in ("fn", "base", "scale"))
        mix = normed(streams.flatten(1)) @ fn.T
        into = torch.sigmoid(mix[:, :m] * scale[0] + base[:m]) + 1e-6
        out = 2 * torch.sigmoid(mix[:, m : 2 * m] * scale[1] + base[m : 2 * m])
        among = (mix[:, 2 * m :] * scale[2] + base[2 * m :]).view(-1, m, m).softmax(-1) + 1e-6
        for _ in range(20):
            among = among / among.sum(1, keepdim=True)
            among = among / among.sum(2, keepdim=True)
        return into, out, among

    def compress(self, layer, ratio, x):
        """A row for `ratio` tokens, which those after the last of them see."""
        rows = self.linear(f"{layer}.compressor.wkv", x).view(len(x) // ratio, ratio, -1)
        if ratio > 1:
            rows = rows * self.linear(f"{layer}.compressor.wgate", x).view(rows.shape).softmax(1)
        return normed(rows.sum(1), self.w[f"{layer}.compressor.norm.weight"])

    def attend(self, number, x):
        s, layer, ratio = self.s, f"layers.{number}.attn", self.s.compress_ratios[number]
        tokens = torch.arange(len(x))
        low = normed(self.linear(f"{layer}.wq_a", x), self.w[f"{layer}.q_norm.weight"])
        q = self.linear(f"{layer}.wq_b", low).view(len(x), s.heads, -1)
        keys = normed(self.linear(f"{layer}.wkv", x), self.w[f"{layer}.kv_norm.weight"])
        seen = (tokens <= tokens[:, None]) & (tokens > tokens[:, None] - s.window)
        if number in s.kv_sources:
            self.rows = self.compress(layer, ratio, x)
            index_keys = self.linear(f"{layer}.indexer.wk", self.rows)
            self.index_keys = normed(index_keys, self.w[f"{layer}.indexer.k_norm.weight"])
        if number in s.index_sources:
            self.picked = self.pick(number, low, x, (tokens + 1) // ratio)
        if ratio:
            keys, seen = torch.cat([keys, self.rows]), torch.cat([seen, self.picked], 1)
        logits = torch.einsum("thd,kd->thk", q, keys) * s.head_dim**-0.5
        sink = self.w[f"{layer}.attn_sink"][None, :, None].expand(len(x), -1, 1)
        weights = torch.cat([logits.where(seen[:, None], -torch.inf), sink], -1).softmax(-1)[..., :-1]
        self.attention.append(weights)
        out = torch.einsum("thk,kd->thd", weights, keys).reshape(len(x), s.o_groups, -1)
        wo_a = self.w[f"{layer}.wo_a.weight"].view(s.o_groups, s.o_lora, -1)
        return self.linear(f"{layer}.wo_b", torch.einsum("tgi,goi->tgo", out, wo_a).flatten(1))

    def pick(self, number, low, x, count):
        s, layer = self.s, f"layers.{number}.attn.indexer"
        q = self.linear(f"{layer}.wq_b", low).view(len(x), s.index_heads, -1)
        scores = torch.einsum("thd,kd->thk", q, self.index_keys).relu()
        scores = (scores * self.linear(f"{layer}.weights_proj", x)[..., None]).sum(1)
        scores = scores.where(torch.arange(len(self.rows)) < count[:, None], -torch.inf)
        if 0 <= s.candidate_source <= number:
            if number == s.candidate_source:
                blocks = scores.view(len(x), -1, s.candidate_block).amax(-1)
                newest = (count[:, None] - 1) // s.candidate_block
                blocks = blocks.scatter(1, newest.clamp(min=0), torch.inf)
                best = blocks.topk(min(s.candidate_blocks, blocks.shape[1])).indices
                chosen = torch.zeros_like(blocks).scatter(1, best, 1)
                self.candidates = chosen.repeat_interleave(s.candidate_block, 1)
            else:
                scores = scores.where(self.candidates > 0, -torch.inf)
        rows = self.choose(scores, min(s.index_topk, scores.shape[1]))
        picked = torch.zeros_like(scores, dtype=torch.bool).scatter(1, rows, True)
        return picked & scores.isfinite()

    def feed_forward(self, number, x):
        s, layer = self.s, f"layers.{number}.ffn"

        def expert(name, x):
            gate, up = (self.linear(f"{name}.{part}", x) for part in ("w1", "w3"))
            gated = torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
            return self.linear(f"{name}.w2", gated)

        scores = torch.nn.functional.softplus(self.linear(f"{layer}.gate", x)).sqrt()
        best = (scores + self.w[f"{layer}.gate.bias"]).topk(s.experts_per_token).indices
        share = torch.zeros_like(scores).scatter(1, best, scores.gather(1, best))
        share = 1.5 * share / share.sum(-1, keepdim=True)
        routed = sum(share[:, i, None] * expert(f"{layer}.experts.{i}", x) for i in range(s.experts))
        return routed + expert(f"{layer}.shared_experts", x)

    def __call__(self, tokens):
        """Log-probabilities of the next token, [tokens, vocabulary]."""
        s = self.s
        streams = self.w["embed.weight"][tokens][:, None].expand(-1, s.hc_mult, -1)
        into = torch.zeros(len(tokens), s.hc_mult)
        into[:, 0] = 1
        for number in range(s.layers):
            for part, run in (("attn", self.attend), ("ffn", self.feed_forward)):
                name = f"layers.{number}"
                next_into, out, among = self.gates(f"{name}.hc_{part}", streams)
                x = normed((into[..., None] * streams).sum(1), self.w[f"{name}.{part}_norm.weight"])
                streams = out[..., None] * run(number, x)[:, None] + among @ streams
                into = next_into
            self.hidden.append(streams)
        x = normed((into[..., None] * streams).sum(1), self.w["norm.weight"])
        return self.linear("head", x).log_softmax(-1)
