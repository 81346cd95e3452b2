"""The `sm90` provider: CUDA kernels for Hopper (csrc/sparse_mla_sm90.cu), in the library that native.py loads.

1 to 128 heads, padded to the next 16, 32 or 64 in registers only; E4M3 or BF16 rows. Up to 8 thread blocks share
the keys of a token when the batch is small. Deterministic: the split follows from the shapes, the merge has one
order.
"""

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


def serves(capability: tuple[int, int]) -> bool:
    """Whether the kernels are there for a GPU of this compute capability; loads the library if need be."""
    return capability == (9, 0) and native.load()


def sparse_mla_sm90(call: SparseMLACall) -> None:
    """Write `call.out` for every token; see `sparse_mla` for the arguments and the formula.

    Raises ValueError where rows do not start at multiples of 16 bytes, RuntimeError without the native library.
    """
    if not native.load():
        raise RuntimeError("The sm90 provider needs the native library; build it with scripts/build-kernels.sh.")
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
