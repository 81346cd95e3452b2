# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""Make Triton's CPU interpreter round like the hardware (Triton 3.6 to 3.9).

The stock interpreter truncates fp32 -> bf16, loses carries in fp32 -> e4m3 and
multiplies the raw bits of bf16 operands in `tl.dot`. Kernels of this package are
checked on machines without a GPU, so the three are replaced by torch's casts, which
round to nearest even; narrow floats saturate, as `cvt.satfinite` does.

Importing this module patches the interpreter of the running process; the package does
so by itself when `TRITON_INTERPRET=1` is set.
"""

import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

# Triton's interpreter needs NumPy itself; this package does not.
np = interpreter.np

_TORCH_DTYPE = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}
_NARROW = (tl.float8e4nv, tl.float8e5)
# The interpreter stores a float it has no NumPy type for as an unsigned integer of the
# same width.
_BITS = {
    1: (torch.uint8, np.uint8),
    2: (torch.int16, np.uint16),
    4: (torch.int32, np.uint32),
}

_stock_convert = interpreter._convert_float
_stock_dot = interpreter.InterpreterBuilder.create_dot


def _to_torch(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    carrier = np.ascontiguousarray(bits).view(np.dtype(f"i{dtype.itemsize}")).copy()
    return torch.from_numpy(carrier).view(dtype)


def _convert_float(data, src, dst, rounding_mode):
    toward_zero = interpreter._ir.ROUNDING_MODE.RTZ
    if (
        src not in _TORCH_DTYPE
        or dst not in _TORCH_DTYPE
        or rounding_mode == toward_zero
    ):
        return _stock_convert(data, src, dst, rounding_mode)
    values = _to_torch(data, _TORCH_DTYPE[src]).float()
    if dst in _NARROW:
        limit = torch.finfo(_TORCH_DTYPE[dst]).max
        values = torch.where(values.isnan(), values, values.clamp(-limit, limit))
    torch_bits, numpy_bits = _BITS[_TORCH_DTYPE[dst].itemsize]
    rounded = values.to(_TORCH_DTYPE[dst]).view(torch_bits)
    return rounded.numpy().view(numpy_bits).reshape(data.shape)


def _as_float32(handle) -> np.ndarray:
    dtype = handle.dtype.scalar
    if dtype not in _TORCH_DTYPE or handle.data.dtype.kind == "f":
        return handle.data.astype(np.float32)
    return (
        _to_torch(handle.data, _TORCH_DTYPE[dtype])
        .float()
        .numpy()
        .reshape(handle.data.shape)
    )


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    raw_bits = (tl.bfloat16, *_NARROW)
    if a.dtype.scalar not in raw_bits and b.dtype.scalar not in raw_bits:
        return _stock_dot(self, a, b, d, input_precision, max_num_imprecise_acc)
    product = np.matmul(_as_float32(a), _as_float32(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


interpreter._convert_float = _convert_float
interpreter.InterpreterBuilder.create_dot = _create_dot
