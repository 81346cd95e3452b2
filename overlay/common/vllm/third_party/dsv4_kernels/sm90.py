"""The `sm90` provider: CUDA kernels for Hopper (csrc/sparse_mla_sm90.cu), in the library that native.py loads.

1 to 128 heads, padded to the next 16, 32 or 64 in registers only; E4M3 or BF16 rows. Up to 8 thread blocks share
the keys of a token when the batch is small. Deterministic: the split follows from the shapes, the merge has one
order.
"""

import functools

import torch

from . import native
from .interface import SparseMLACall

_SCHEMA = (
    "sparse_mla_sm90(Tensor q, Tensor swa, Tensor compressed, Tensor indices, Tensor topk_lens, Tensor visible, "
    "Tensor! out, Tensor? sinks, Tensor? bmm1_tensor, Tensor? bmm2_tensor, float bmm1, float bmm2) -> ()"
)
_library = torch.library.Library("dsv4_kernels", "FRAGMENT")
if not hasattr(torch.ops.dsv4_kernels, "sparse_mla_sm90"):  # the package may be imported under two names
    _library.define(_SCHEMA)


def misfit(capability: tuple[int, int] | None) -> str | None:
    """Why the kernels cannot serve a GPU of this compute capability; None if they can. Loads nothing."""
    if capability != (9, 0):
        return "its attention kernels are for compute capability 9.0; use another provider"
    return native.misfit(capability)


def serves(capability: tuple[int, int] | None) -> bool:
    """Whether the kernels are there for a GPU of this compute capability; loads the library if need be."""
    return capability == (9, 0) and native.load_for(capability)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def sparse_mla_sm90(call: SparseMLACall) -> None:
    """Write `call.out` for every token; see `sparse_mla` for the arguments and the formula.

    Raises ValueError where rows do not start at multiples of 16 bytes, RuntimeError without the native library or
    on another GPU.
    """
    capability = _capability(call.query.device)
    if not serves(capability):
        problem = misfit(capability) or "it cannot be loaded"
        raise RuntimeError(f"The sm90 provider needs the native library, but {problem}.")
    scales = (call.bmm1_scale, call.bmm2_scale)
    tensors = [scale if isinstance(scale, torch.Tensor) else None for scale in scales]
    values = [0.0 if isinstance(scale, torch.Tensor) else float(scale) for scale in scales]
    torch.ops.dsv4_kernels.sparse_mla_sm90(
        call.query,
        call.swa_pool,
        call.compressed_pool,
        call.indices,
        call.topk_lens,
        call.visible,
        call.out,
        call.sinks,
        *tensors,
        *values,
    )
