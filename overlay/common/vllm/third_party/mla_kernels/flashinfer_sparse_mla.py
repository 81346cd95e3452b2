# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""The `flashinfer` provider: TRTLLM-gen's kernels on Blackwell, through the call that
`sparse_mla` takes after.

Has not run on a GPU. tests/glue/test_flashinfer.py drives FlashInfer's own checks up to
the launch and computes what the arguments of the launch mean. What FlashInfer wants
beyond `sparse_mla`, and who sees to it:

- 64 or 128 heads, from 0.6.14 on 8, 16, 32, 64 or 128: padded here.
- a contiguous output; it takes no strides of it and checks none: a copy here.
- a row for every key in range, none of them outside its pool, and at least one for
  each token, padding included. Tables of `build_sparse_index_table` are so where
  block tables and picks are good: tokens of padding name row 0. Their output is made
  zero here. Nothing bounds a stale entry: that would be a pass over the table in each
  layer.
- query in the pools' dtype, pages without a gap between them, scales as floats:
  refused here otherwise.
- decodes (`[batch, q_len, ...]`) and prefills (ragged, without padding) in a call each:
  the caller.
"""

import functools
import importlib.metadata
import inspect
import re
import sys

import torch
import triton
import triton.language as tl

from .interface import HEAD_DIM, SparseMLACall, remember

CAPABILITIES = ((10, 0), (10, 3))
WORKSPACE_BYTES = 128 << 20
_PACKAGES = ("flashinfer-python", "flashinfer-cubin")
_INSTALL = (
    "pip install flashinfer-python==0.6.13 flashinfer-cubin==0.6.13, or a later pair "
    "of one version"
)
_PARAMETERS = (
    "query",
    "swa_kv_cache",
    "workspace_buffer",
    "sparse_indices",
    "compressed_kv_cache",
    "sparse_topk_lens",
    "seq_lens",
    "out",
    "bmm1_scale",
    "bmm2_scale",
    "sinks",
    "kv_layout",
    "cum_seq_lens_q",
    "max_q_len",
)
_LAUNCHER = "trtllm_paged_attention_decode_sparse_mla_dsv4"
# Releases that take counters and remapped indices at launch, and the first whose launch
# is not known here.
_COUNTERS, _REMAPPING, _UNKNOWN = (0, 6, 15), (0, 7, 0), (0, 7, 3)
_COUNTER_BYTES = 8 << 20


def misfit(capability: tuple[int, int] | None) -> str | None:
    """Why FlashInfer cannot serve a GPU of this compute capability, and what to do;
    None if it can.

    Reads versions only: importing FlashInfer initialises CUDA. `prepare` checks the
    rest.
    """
    if capability not in CAPABILITIES:
        return (
            "it has kernels for this cache on compute capability 10.0 and 10.3 only; "
            "leave the provider out"
        )
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed; {_INSTALL}"
        if _numbers(found[package]) < (0, 6, 12):
            return (
                f"{package} is {found[package]}, and 0.6.12 is the first with this "
                f"call; {_INSTALL}"
            )
    if len(set(found.values())) > 1:
        return f"{' and '.join(map(' '.join, found.items()))} differ; {_INSTALL}"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def sparse_mla_flashinfer(call: SparseMLACall) -> None:
    """Write `call.out` for every token; see `sparse_mla` for the arguments and the
    formula.

    Raises ValueError for what the module docstring says is refused, RuntimeError
    without a FlashInfer that fits.
    """
    prepare(call.query.device).run(call)


@functools.cache
def prepare(device: torch.device) -> "_FlashInfer":
    """Import FlashInfer and allocate what it works in; call it before memory is
    measured and weights are loaded.

    Raises RuntimeError where FlashInfer has not got the call or has changed its
    parameters.
    """
    return _FlashInfer(device)


class _FlashInfer:
    def __init__(self, device: torch.device):
        name = importlib.metadata.version(_PACKAGES[0])
        try:
            from flashinfer.mla import trtllm_batch_decode_sparse_mla_dsv4

            inspect.signature(trtllm_batch_decode_sparse_mla_dsv4).bind(
                **dict.fromkeys(_PARAMETERS)
            )
        except (ImportError, TypeError) as error:
            raise RuntimeError(
                f"FlashInfer {name} lacks the DeepSeek V4 call ({error}); {_INSTALL}."
            ) from error
        self.validate_and_launch = trtllm_batch_decode_sparse_mla_dsv4
        self.version = _numbers(name)
        self.heads = (64, 128) if self.version < (0, 6, 14) else (8, 16, 32, 64, 128)
        # Kernels count on both being zero when they first see them, and leave the
        # counters so.
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.counters = torch.zeros(_COUNTER_BYTES, dtype=torch.uint8, device=device)
        self.internals = sys.modules[trtllm_batch_decode_sparse_mla_dsv4.__module__]
        self.valid: set[tuple] = set()

    def run(self, call: SparseMLACall) -> None:
        known = call.signature in self.valid
        tokens, heads, _ = call.query.shape
        served = next(count for count in self.heads if count >= heads)
        if not known:
            _validate(call, served)
        query, sinks, out, seq_lens = call.query, call.sinks, call.out, call.seq_lens
        if served > heads:
            query = query.new_zeros(tokens, served, HEAD_DIM)
            query[:, :heads] = call.query
            sinks = (
                None
                if sinks is None
                else torch.nn.functional.pad(sinks, (0, served - heads))
            )
        if served > heads or not out.is_contiguous():
            out = out.new_empty(tokens, served, HEAD_DIM)
        if call.cum_seq_lens_q is None:
            # Padding has a length of 0 here, which FlashInfer does not take.
            seq_lens = seq_lens.clamp(min=call.q_len)
        run = self.launch if known and self.version < _UNKNOWN else self.check
        shape = (
            query.shape
            if call.cum_seq_lens_q is not None
            else (-1, call.q_len, served, HEAD_DIM)
        )
        run(call, query.view(shape), out.view(shape), seq_lens, sinks)
        remember(self.valid, call.signature)
        if out is not call.out:
            call.out.copy_(out[:, :heads])
        if call.cum_seq_lens_q is None:
            _zero_padding[(tokens,)](
                call.out,
                call.out.stride(0),
                call.out.stride(1),
                call.visible,
                heads,
                HEAD_DIM=HEAD_DIM,
            )

    def check(self, call, query, out, seq_lens, sinks) -> None:
        """Through FlashInfer's function, whose checks take 40 to 60 us each time."""
        self.validate_and_launch(
            query=query,
            swa_kv_cache=call.swa_pool.unsqueeze(1),
            workspace_buffer=self.workspace,
            sparse_indices=call.indices,
            compressed_kv_cache=call.compressed_pool.unsqueeze(1),
            sparse_topk_lens=call.topk_lens,
            seq_lens=seq_lens,
            out=out,
            bmm1_scale=float(call.bmm1_scale),
            bmm2_scale=float(call.bmm2_scale),
            sinks=sinks,
            kv_layout="HND",
            cum_seq_lens_q=call.cum_seq_lens_q,
            max_q_len=call.q_len,
        )

    def launch(self, call, query, out, seq_lens, sinks) -> None:
        """What FlashInfer's function does after its checks, as its releases from 0.6.12
        to 0.7.2 do it."""
        device, indices = query.device, call.indices.contiguous()
        getattr(self.internals.get_trtllm_gen_fmha_module(), _LAUNCHER)(
            out,
            query.view(-1, *query.shape[-2:]),
            call.compressed_pool.unsqueeze(1),
            call.swa_pool.unsqueeze(1),
            self.workspace,
            *((self.counters,) if self.version >= _COUNTERS else ()),
            indices,
            *((indices, False) if self.version >= _REMAPPING else ()),
            seq_lens.contiguous(),
            call.topk_lens.contiguous(),
            float(call.bmm1_scale),
            float(call.bmm2_scale),
            seq_lens.numel(),
            call.q_len,
            self.internals.get_device_sm_count(device),
            self.internals.device_support_pdl(device),
            WORKSPACE_BYTES,
            sinks,
            None if call.cum_seq_lens_q is None else call.cum_seq_lens_q.contiguous(),
            *((None, None) if self.version >= _REMAPPING else ()),
        )


def _validate(call: SparseMLACall, heads: int) -> None:
    for name, pool in (("SWA", call.swa_pool), ("compressed", call.compressed_pool)):
        if pool.dtype != call.query.dtype:
            raise ValueError(
                "sparse_mla: flashinfer wants query and pools of one dtype, got "
                f"{call.query.dtype} and "
                f"{pool.dtype}."
            )
        if not pool.is_contiguous():
            raise ValueError(
                f"sparse_mla: flashinfer wants no gap between pages, and the {name} "
                f"pool {tuple(pool.shape)} has "
                f"strides {pool.stride()}."
            )
    if isinstance(call.bmm1_scale, torch.Tensor) or isinstance(
        call.bmm2_scale, torch.Tensor
    ):
        raise ValueError(
            "sparse_mla: flashinfer takes bmm1_scale and bmm2_scale as floats, not as "
            "tensors."
        )
    # One counter of four bytes for each; in 0.6.12 to 0.6.14 they are the first 8 MiB
    # of the workspace.
    batch, most = call.seq_lens.numel(), _COUNTER_BYTES // 4 // heads
    if batch > most:
        raise ValueError(
            f"sparse_mla: flashinfer serves {most} requests of {heads} heads a call, "
            f"not {batch}."
        )


@triton.jit
def _zero_padding(
    out_ptr, token_stride, head_stride, visible_ptr, heads, HEAD_DIM: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    if tl.load(visible_ptr + token) <= 0:
        row_ptr = out_ptr + token * token_stride + tl.arange(0, HEAD_DIM)
        for _ in range(heads):  # which may lie far apart
            tl.store(row_ptr, tl.zeros([HEAD_DIM], tl.bfloat16))
            row_ptr += head_stride
