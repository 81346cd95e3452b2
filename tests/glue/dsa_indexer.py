"""For dsa_model.py: vLLM's `sparse_attn_indexer` on a GPU that DeepGEMM does not serve, with compiled operators
written out in torch. Its picks against the definition in float64."""

import inspect
import itertools
import types

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers import sparse_attn_indexer as layer
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import indexer

HEADS, DIM, PAGE, TOPK, FP8 = 2, 128, 64, 512, torch.float8_e4m3fn
# Of each request: keys, and the tokens of this step, which are its last. Not in one step: vLLM's picks for the
# padding of ragged drafts overwrite those of the prefills behind them.
STEPS = {
    "decodes": ((900, 1), (640, 1), (20, 1)),
    "drafts": ((900, 1), (640, 3), (20, 2)),
    "prefills": ((700, 5), (600, 3)),
}
NEWER = hasattr(layer, "get_indexer_topk")  # 0.33.0
# What 0.33.0's has and 0.22.1's has not.
MORE = {"use_pcp": False, "pcp_shard_decode_requests": False, "dense_mha_metadata_layer_name": ""}


def take(scores, starts, ends, picks):
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        best = scores[row, start:end].topk(min(TOPK, end - start)).indices
        picks[row] = -1
        picks[row, : len(best)] = best.int()


def take_first(scores, lengths, picks):
    take(scores, torch.zeros_like(lengths.view(-1)), lengths.view(-1), picks)


class Operators:
    """Of vLLM's, those that have no kernel here."""

    @staticmethod
    def cp_gather_indexer_k_quant_cache(cache, values, scales, table, cu_seq_lens):
        bounds = cu_seq_lens.tolist()
        for request, (start, end) in enumerate(itertools.pairwise(bounds)):
            pages = cache[table[request, : -(-(end - start) // PAGE)].long()].flatten(1)
            values.view(torch.uint8)[start:end] = pages[:, : PAGE * DIM].reshape(-1, DIM)[: end - start]
            scales.view(torch.uint8)[start:end] = pages[:, PAGE * DIM :].reshape(-1, 4)[: end - start]

    @staticmethod
    def top_k_per_row_prefill(scores, starts, ends, picks, *strides_and_k):
        take(scores, starts, ends, picks)

    @staticmethod
    def top_k_per_row_decode(scores, next_n, lengths, picks, *strides_and_k):
        take_first(scores, lengths, picks)


def pack(rows, lengths, pad_value):
    """As vLLM's Triton kernel, which knows E4M3 only where the GPU does."""
    assert rows.dtype == torch.uint8
    packed = torch.full((len(lengths), int(lengths.max()), *rows.shape[1:]), pad_value, dtype=rows.dtype)
    for to, part in zip(packed, rows.split(lengths.tolist()), strict=True):
        to[: len(part)] = part
    return packed


def unpack(packed, lengths):
    return torch.cat([part[:n] for part, n in zip(packed, lengths.tolist(), strict=True)])


class Workspaces:
    @staticmethod
    def get_simultaneous(*shapes_and_dtypes):
        return [torch.empty(shape, dtype=dtype) for shape, dtype in shapes_and_dtypes]


def known(owner, **given):
    """What of it this release's class or function has."""
    return {name: value for name, value in given.items() if name in inspect.signature(owner).parameters}


def built(table, lengths, config):
    """The metadata of single tokens, by vLLM's builder, which finds DeepGEMM installed."""
    indexer.has_deep_gemm, indexer.num_compute_units = lambda: True, int
    indexer.get_total_cp_world_size = lambda: 1
    spec = types.SimpleNamespace(block_size=PAGE, storage_block_size=PAGE, num_states=PAGE)
    builder = indexer.DeepseekV32IndexerMetadataBuilder(
        spec, ["layer"], config, torch.device("cpu", 0),
        **known(indexer.DeepseekV32IndexerMetadataBuilder.__init__, block_table_width=table.shape[1]),
    )  # fmt: skip
    n = len(lengths)
    starts = torch.arange(n + 1, dtype=torch.int32)
    return builder.build(0, CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=n, num_actual_tokens=n,
        max_query_len=1, max_seq_len=int(lengths.max()), block_table_tensor=table, slot_mapping=torch.zeros(n),
    ))  # fmt: skip


def compiled_with_e4m3(config):
    """What vLLM's indexer has compiled at start-up (0.33.0) and Triton cannot compile below capability 8.9."""
    try:
        from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
    except ImportError:
        return []
    registry, layer.has_deep_gemm = JitWarmupRegistry(config), lambda: True
    config.kernel_config.enable_jit_warmup = True
    with set_current_vllm_config(config), registry.activate():
        layer.SparseAttnIndexer(None, 128, "ue8m0", TOPK, DIM, 1024, 4096, None)
    asked = [(kernel, kwargs) for kernel, calls in registry._registrations.items() for _, kwargs in calls]
    assert asked
    return [type(kernel).__name__ for kernel, kwargs in asked if kwargs.get("dtype") == FP8]


def wrong_tokens(step, config):
    """Which tokens of a step got other keys than they should."""
    gen = torch.Generator().manual_seed(0)
    requests = STEPS[step]
    tokens = sum(new for _, new in requests)
    blocks = [-(-keys // PAGE) for keys, _ in requests]
    keys = torch.randn(sum(blocks), PAGE, DIM, generator=gen).mul(8).to(FP8)
    scales = torch.rand(sum(blocks), PAGE, generator=gen) + 0.1
    cache = torch.cat([keys.view(torch.uint8).flatten(1), scales.view(torch.uint8).flatten(1)], 1)
    table = torch.zeros(len(requests), max(blocks), dtype=torch.int32)
    for request, part in enumerate(torch.randperm(sum(blocks), generator=gen).int().split(blocks)):
        table[request, : len(part)] = part
    q = torch.randn(tokens, HEADS, DIM, generator=gen).mul(8).to(FP8)
    weights = torch.randn(1, HEADS, generator=gen).expand(16, HEADS).contiguous()

    metadata = indexer.DeepseekV32IndexerMetadata(None, 900, torch.zeros(tokens), 0, 0, 0, 0)
    sees = [[keys - new + i + 1 for i in range(new)] for keys, new in requests]
    cu = torch.tensor([0, *(keys for keys, _ in requests)]).cumsum(0).int()
    if step == "decodes":
        metadata = built(table, torch.tensor([keys for keys, _ in requests]).int(), config)
    elif step == "drafts":
        most = max(map(len, sees))
        metadata.num_decodes, metadata.num_decode_tokens = len(requests), tokens
        metadata.decode = indexer.DeepSeekV32IndexerDecodeMetadata(
            table, torch.tensor([row + [0] * (most - len(row)) for row in sees]).int(),
            torch.tensor([new for _, new in requests]).int(), requires_padding=True, schedule_metadata=None,
        )  # fmt: skip
    else:
        starts = torch.tensor([int(cu[r]) for r, row in enumerate(sees) for _ in row]).int()
        ends = starts + torch.tensor(sum(sees, [])).int()
        metadata.num_prefills, metadata.num_prefill_tokens = len(requests), tokens
        chunk = indexer.DeepseekV32IndexerPrefillChunkMetadata
        total = int(cu[-1])
        metadata.prefill = indexer.DeepseekV32IndexerPrefillMetadata([chunk(
            block_table=table, cu_seqlen_ks=starts, cu_seqlen_ke=ends, cu_seq_lens=cu, token_to_seq=None,
            total_seq_lens=total, token_start=0, token_end=tokens, num_reqs=len(requests),
            **known(chunk, max_seqlen_k=int((ends - starts).max()), local_cu_seq_lens=cu,
                    local_total_seq_lens=total, max_local_total_seq_lens=total),
        )])  # fmt: skip
    layer.ops, layer.current_workspace_manager = Operators, Workspaces
    if NEWER:  # whose launcher takes no interpreted kernel
        layer.pack_seq_triton, layer.unpack_seq_triton = pack, unpack
    layer.get_indexer_topk = lambda backend: lambda scores, lengths, _, picks, *sizes: take_first(
        scores, lengths, picks
    )
    # Full graphs: no dense attention.
    mode = getattr(layer, "CUDAGraphMode", types.SimpleNamespace(FULL=None)).FULL
    layer.get_forward_context = lambda: types.SimpleNamespace(
        attn_metadata={"layer": metadata}, cudagraph_runtime_mode=mode
    )
    picks = torch.full((16, TOPK), -7, dtype=torch.int32)
    layer.sparse_attn_indexer(
        torch.zeros(tokens, 1), "layer", cache.view(-1, PAGE, DIM + 4), q, None, None, weights, 128, "ue8m0",
        TOPK, DIM, 1024, int(cu[-1]), picks, True, **known(layer.sparse_attn_indexer, **MORE),
    )  # fmt: skip

    wrong, token = [], 0
    for request, (length, new) in enumerate(requests):
        rows = table[request, : blocks[request]].long()
        values = (keys[rows].double() * scales[rows].double()[..., None]).flatten(0, 1)
        for i in range(new):
            scores = (values[: length - new + i + 1] @ q[token].double().T).relu() @ weights[token].double()
            want = scores.topk(min(TOPK, len(scores))).indices.sort().values
            have = picks[token][picks[token] >= 0].sort().values
            wrong += [] if torch.equal(have.long(), want) else [f"{step}: {token}"]
            token += 1
    return wrong
