"""Runs in a process of its own: an NVFP4 linear by FlashInfer's CuTe DSL product, with no GPU in the machine.

Real: the linear, vLLM's and FlashInfer's functions, the compiler, and the compiled launcher's checks of its
arguments. Stood in for: the GPU's properties (CAPABILITY is as in hopper.py) and the quantisation of activations.
Reads a JSON list of [tokens, outputs, inputs], and prints for each what was compiled and what the launcher said.
"""

import ctypes
import json
import multiprocessing
import struct
import sys
import traceback
from types import SimpleNamespace

import hopper  # before vLLM is imported
import torch

B200 = SimpleNamespace(multi_processor_count=148, name="NVIDIA B200")
torch.cuda.get_device_properties = lambda device=None: B200
torch.cuda.get_device_capability = lambda device=None: tuple(hopper.CAPABILITY)

import cutlass.cute as cute  # noqa: E402
import flashinfer.cute_dsl.utils  # noqa: E402
import flashinfer.gemm.gemm_base as gemm  # noqa: E402
import flashinfer.utils  # noqa: E402
import tvm_ffi  # noqa: E402
import vllm.dsv4_overlay  # noqa: E402
import vllm.utils.flashinfer  # noqa: E402
from cutlass.base_dsl.compiler import Compiler  # noqa: E402

# The tree of the tests has what is not on request.
vllm.dsv4_overlay.__path__.append(sys.argv[1])
from vllm.dsv4_overlay import nvfp4_linear  # noqa: E402

capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype, capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class OnGpu:
    """A tensor of the CPU that says of itself that it is in a GPU's memory."""

    CUDA = 2  # DLPack's DLDeviceType

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.CUDA, 0

    def __dlpack__(self, **options):
        capsule = torch.utils.dlpack.to_dlpack(self.tensor)
        device_type = capsule_pointer(capsule, b"dltensor") + 8  # after the address of the values
        ctypes.c_int32.from_address(device_type).value = self.CUDA
        return capsule


def error_of(launcher, arguments):
    """What the compiled launcher says, which stops at last for want of a driver."""
    given = [tvm_ffi.from_dlpack(OnGpu(x)) if isinstance(x, torch.Tensor) else x for x in arguments]
    try:
        launcher(*given)
    except (RuntimeError, ValueError) as error:
        return str(error)


compile_ = cute.compile
found = []


def compiled(*arguments, **options):
    launcher = compile_(*arguments, **options)
    ptx, cubin = launcher.__ptx__, launcher.__cubin__

    def launch(*given):
        found.append({
            "target": next(line.split()[1] for line in ptx.splitlines() if line.startswith(".target")),
            "products": ptx.count("kind::mxf4nvf4.block_scale.scale_vec::4X"),
            "machine": struct.unpack_from("<H", cubin, 18)[0],  # ELF's e_machine
            "architecture": struct.unpack_from("<I", cubin, 48)[0] >> 8 & 0xFF,  # in e_flags
            "error": error_of(launcher, given),
            "two alphas": error_of(launcher, [*given[:-1], torch.ones(2)]),
        })  # fmt: skip

    return launch


def quantised(x, inverse_scale):
    scale = torch.ones(x.shape[0], x.shape[1] // nvfp4_linear.GROUP).to(torch.float8_e4m3fn)
    return torch.zeros(x.shape[0], x.shape[1] // 2, dtype=torch.uint8), nvfp4_linear.interleave_scales(scale)


cute.compile = compiled
# What vLLM 0.21.0 pins, FlashInfer 0.6.8 and nvidia-cutlass-dsl 4.4.2, asks the driver; later ones do without.
Compiler._check_cuda_dependencies_once = lambda compiler, libraries: None
flashinfer.cute_dsl.utils.get_max_active_clusters = lambda size: B200.multi_processor_count // size
flashinfer.utils.get_compute_capability = gemm.get_compute_capability = torch.cuda.get_device_capability
operator = vllm.utils.flashinfer.flashinfer_mm_fp4
operator.register_kernel("cpu")(operator._init_fn)
nvfp4_linear.ops.scaled_fp4_quant = quantised
nvfp4_linear._serves_deepseek_v4 = lambda: True


def found_for(shape):
    tokens, outputs, inputs = shape
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(outputs, inputs // 2, dtype=torch.uint8), requires_grad=False)
    scale = torch.ones(outputs, inputs // nvfp4_linear.GROUP).to(torch.float8_e4m3fn)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    layer.input_global_scale_inv, layer.alpha = torch.ones(()), torch.ones(())
    layer.output_size_per_partition = outputs
    kernel = object.__new__(nvfp4_linear.CuTeDSLNvFp4LinearKernel)
    kernel.process_weights_after_loading(layer)
    kernel.apply_weights(layer, torch.zeros(tokens, inputs, dtype=torch.bfloat16))
    return found.pop()


def answer(shape):
    try:
        return found_for(shape)
    except Exception:  # the compiler's own cannot be sent between processes
        raise RuntimeError(traceback.format_exc()) from None


supported = nvfp4_linear.CuTeDSLNvFp4LinearKernel.is_supported()
# A process for each: without a driver the launchers' library starts once, and waits for ever when it starts again.
with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    answers = pool.map_async(answer, json.load(sys.stdin), chunksize=1).get(timeout=240)
print(json.dumps({"supported": supported, "found": answers}))
