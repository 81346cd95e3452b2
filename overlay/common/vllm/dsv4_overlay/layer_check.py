# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""One layer and its compressor, run by vLLM's own classes and compared with attention
in float64."""

import importlib
from types import SimpleNamespace

import torch
from vllm.dsv4_overlay import adapter, attention, config
from vllm.forward_context import override_forward_context
from vllm.third_party.mla_kernels import checks

# Insert, compressor and attention round one after the other; E4M3 rows also differ in a
# few ties.
TOLERANCE = 4e-3


def check_layer(ratio: int, dtype: torch.dtype) -> str:
    """Insert, compressor and attention as vLLM's own classes call them, on one
    sequence."""
    layers = importlib.import_module(adapter.ATTENTION)
    heads, last, device = 4, 6, checks.DEVICE
    seq = checks.Sequence(length=300, heads=heads, ratio=ratio, dtype=dtype)
    ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    picked = None
    if ratio == 4:  # as an indexer that has room for 64 rows and likes any
        picked = torch.full((last, 64), -1, dtype=torch.int32)
        for number, row in enumerate(picked):
            count = (seq.length - last + number + 1) // 4
            row[: min(count, 64)] = torch.randperm(count, generator=seq.gen)[:64].int()
    rotary = SimpleNamespace(cos_sin_cache=seq.cos_sin.to(device))
    layer = SimpleNamespace(
        prefix="layer",
        full_cache=True,
        impl_cls=getattr(adapter, "DeepseekV4FullCacheImpl", None),
        compress_ratio=ratio,
        scale=checks.SCALE,
        kv_scale=checks.KV_SCALE if dtype == checks.E4M3 else 1.0,
        q_scale=1.0,
        attn_sink=torch.cat((seq.sink, torch.full((64 - heads,), float("-inf")))).to(
            device
        ),
        swa_cache_layer=SimpleNamespace(kv_cache=seq.window, prefix="window"),
        kv_cache=seq.rows,
        topk_indices_buffer=picked if picked is None else picked.to(device),
        max_model_len=1024,
        rotary_emb=rotary,
        eps=checks.EPS,
    )
    layer.mla_attn = layer
    if ratio > 1:
        compress(layer, seq)
    # Only the rows that the last tokens see: the interpreter is slow.
    seen = torch.arange(seq.length - last - 127, seq.length, device=device)
    window = SimpleNamespace(
        slot_mapping=seq.slots(seq.window_table, 64)[seen],
        block_size=64,
        block_table=seq.window_table,
        token_to_req_indices=ints(*[0] * last),
        is_valid_token=torch.ones(last, dtype=torch.bool, device=device),
        query_start_loc=ints(0, last),
        query_start_loc_cpu=torch.tensor([0, last]),
        seq_lens=ints(seq.length),
        num_decodes=0,
        num_prefills=1,
        num_decode_tokens=0,
        num_prefill_tokens=last,
    )
    rows = SimpleNamespace(
        block_table=seq.rows_table, block_size=256, max_seq_len=seq.length
    )
    metadata = {"window": window, "layer": rows}
    if config.NAME_IS_OURS:
        outer, attend = (
            layers.DeepseekV4MultiHeadLatentAttentionWrapper,
            layers.DeepseekV4MLAAttention.forward,
        )
    else:
        outer = adapter.DeepseekV4FullCacheAttention
        attend = outer.forward_mqa
    q, kv = seq.q.to(device)[seen], seq.kv.to(device)[seen]
    inserted = outer._fused_qnorm_rope_kv_insert(layer, q, kv, seen, metadata)
    # 0.21.0: in place, or kept for the inner layer.
    q = (q if inserted is None else inserted)[-last:]
    if inserted is None and config.NAME_IS_OURS:
        layer.query = layer.query[-last:]
    out = torch.empty(last, heads, 512, dtype=torch.bfloat16, device=device)
    with override_forward_context(
        SimpleNamespace(additional_kwargs={}, attn_metadata=metadata)
    ):
        attend(layer, q, kv, seen, out)
    q_dtype = attention.query_dtype(torch.empty(0, dtype=dtype, device=device))
    expected = checks.sequence_attention(seq, picked, seq.length - last, q_dtype)
    error = checks.relative_error(out, expected, TOLERANCE)
    return f"{seq.length} tokens, error {error:.1e}"


def compress(layer: SimpleNamespace, seq: checks.Sequence) -> None:
    """Fill the compressed rows of `seq` by vLLM's own compressor, from partial states
    that it writes itself."""
    cls = importlib.import_module(adapter.COMPRESSOR).DeepseekCompressor
    # Its constructor makes projections, which need a distributed group.
    layer.compressor = cls.__new__(cls)
    torch.nn.Module.__init__(layer.compressor)
    width, device = seq.states.shape[-1], seq.state_cache.device
    vars(layer.compressor).update(
        coff=width // 512,
        head_dim=512,
        compress_ratio=seq.ratio,
        ape=torch.zeros(seq.ratio, width, device=device),
        state_cache=SimpleNamespace(
            kv_cache=seq.state_cache.fill_(float("nan")), prefix="states"
        ),
        norm=SimpleNamespace(weight=seq.norm.to(device)),
        rms_norm_eps=layer.eps,
        k_cache_prefix="layer",
        _static_forward_context={"layer": layer},
    )
    if not config.NAME_IS_OURS:
        adapter.connect_compressor(layer)
    block = seq.state_cache.shape[1]
    states = SimpleNamespace(
        token_to_req_indices=torch.zeros(seq.length, dtype=torch.int32, device=device),
        slot_mapping=seq.slots(seq.state_table, block),
        block_table=seq.state_table,
        block_size=block,
        c128_boundary=None,
    )
    rows = SimpleNamespace(
        slot_mapping=seq.slots(seq.rows_table, 256 // seq.ratio, seq.ratio)
    )
    positions = torch.arange(seq.length, device=device)
    with override_forward_context(
        SimpleNamespace(attn_metadata={"states": states, "layer": rows})
    ):
        cls.forward(
            layer.compressor,
            seq.states.flatten(1).to(device),
            positions,
            layer.rotary_emb,
        )
