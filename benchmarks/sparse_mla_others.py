"""Who else reads such rows on Hopper (sparse_mla.py --others): FlashInfer's SM90 MLA, vLLM's FlashAttention 3, and
kernels in Triton, which run on other GPUs too.

The first two read rows as pages of one, so that the indices of a token are its page table, as vLLM 0.33.0 calls
them (`FLASHINFER_MLA_SPARSE_SM90`, `FLASH_ATTN_MLA_SPARSE`). Neither has sinks, so of V4's rows they compute a
little less. FlashInfer plans on the host, which is not in its time.

Those in Triton are of V3.2's rows: vLLM's own, of its backend for XPUs, and two ports that are not in vLLM. Of
vllm-project/vllm#38476 `triton_sparse_mla_kernel.py` is taken from PYTHONPATH; of #54929 (as in
CosmicRaisins/glm-5.2-gb10) `sm12x_sparse_mla_attn.py`, beside which `sparse_mla_kernels.py` and
`sparse_mla_env.py` have to be in vLLM's folder `v1/attention/backends/mla`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from sparse_mla_inputs import VALUE_DIM, Call, Inputs, Stock


def flashinfer(case: Inputs, rows: str) -> Call | None:
    """FlashInfer's FA3 kernel, 0.6.18 and later: E4M3 and BF16 rows of 512, BF16 rows of 576."""
    if rows not in ("e4m3", "bf16", "576"):
        return None
    from flashinfer.mla import BatchMLAPagedAttentionWrapper as Wrapper

    if "ckv_scale" not in inspect.signature(Wrapper.run).parameters:
        raise ImportError("FlashInfer is older than 0.6.18")
    indices, lens, device = case.rows.packed(), case.rows.lens, case.query.device
    pool = (case.pools.rows_576 if rows == "576" else getattr(case.pools, rows)).view(-1, 1, case.key_dim)
    tokens, width = indices.shape[1:]
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    exists = torch.arange(width, device=device) < lens[:, None]
    key_starts = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    wrappers = [Wrapper(workspace, backend="fa3") for _ in range(case.calls)]  # each has one call's indices
    for wrapper, of_call in zip(wrappers, indices, strict=False):
        wrapper.plan(
            starts, key_starts, of_call[exists], lens, case.heads, VALUE_DIM, case.key_dim - VALUE_DIM,
            1, False, case.scale, torch.bfloat16, pool.dtype,
        )  # fmt: skip
    query = [part.contiguous() for part in case.query.split((VALUE_DIM, case.key_dim - VALUE_DIM), -1)]
    keys = pool.split((VALUE_DIM, case.key_dim - VALUE_DIM), -1)
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if rows == "e4m3" else {}
    return lambda i: wrappers[i].run(*query, *keys, **scales)


def flash_attention_3(case: Inputs, rows: str) -> Call | None:
    """vLLM's build of FlashAttention 3: BF16 rows of 576."""
    if rows != "576":
        return None
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    indices, lens = case.rows.packed(), case.rows.lens
    nope, rope = (part.contiguous() for part in case.query.split((VALUE_DIM, 64), -1))
    values, keys = case.pools.rows_576[:, None].split((VALUE_DIM, 64), -1)
    starts = torch.arange(case.tokens + 1, dtype=torch.int32, device=case.query.device)
    return lambda i: flash_attn_varlen_func(
        q=rope, k=keys, v=values, q_v=nope, max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=indices.shape[-1],
        seqused_k=lens, block_table=indices[i], softmax_scale=case.scale, causal=True, fa_version=3,
    )  # fmt: skip


def over_576(case: Inputs, attend: Callable[..., torch.Tensor]) -> Call:
    """A kernel of queries, rows, indices and the scale; missing rows are -1."""
    indices, lens = case.rows.packed(), case.rows.lens
    column = torch.arange(indices.shape[-1], device=lens.device)
    indices = indices.masked_fill(column >= lens[:, None], -1)[:, :, None]
    keys = case.pools.rows_576.view(-1, 1, 576)
    return lambda i: attend(case.query, keys, indices[i], case.scale)


def triton_of_vllm(case: Inputs, rows: str) -> Call | None:
    if rows != "576":
        return None
    from vllm.v1.attention.ops.xpu_mla_sparse import triton_bf16_mla_sparse_interface

    return over_576(case, lambda *call: triton_bf16_mla_sparse_interface(*call)[0])


def triton_38476(case: Inputs, rows: str) -> Call | None:
    if rows != "576":
        return None
    from triton_sparse_mla_kernel import triton_sparse_mla_attention

    return over_576(case, triton_sparse_mla_attention)


def triton_54929(case: Inputs, rows: str) -> Call | None:
    """It has FlashMLA's two calls."""
    if rows not in ("576", "656"):
        return None
    from sm12x_sparse_mla_attn import flash_mla_sparse_fwd_triton, flash_mla_with_kvcache_triton

    calls = Stock(flash_mla_with_kvcache_triton, flash_mla_sparse_fwd_triton, lambda: (None, None))
    call = case.over(rows, calls, case.query, None, case.out)
    return lambda i: (call(i), case.out)[1]


OTHERS: dict[str, Callable[[Inputs, str], Call | None]] = {
    "flashinfer": flashinfer, "fa3": flash_attention_3, "xpu": triton_of_vllm, "pr38476": triton_38476,
    "pr54929": triton_54929,
}  # fmt: skip
_missing: set[str] = set()


def others(
    case: Inputs, rows: str, expected: Callable[[], torch.Tensor], largest: float
) -> dict[str, Call]:
    """Those that serve this case and agree with what `expected` returns; once is said why the rest does not."""
    found = {}
    for name, make in OTHERS.items():
        if name in _missing:
            continue
        try:
            if (call := make(case, rows)) is None:
                continue
            truth = expected().float()
            apart = float((call(0).float() - truth).norm() / truth.norm())
            if not apart < largest:
                raise ValueError(f"outputs are {apart:.2g} away from what they should be")
            found[name] = call
        except Exception as error:  # not installed, too old, or not for this shape: ours and FlashMLA's go on
            _missing.add(name)
            print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    return found
