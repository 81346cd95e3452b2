"""Runs in a process of its own: V4-Flash's experts by Humming, through vLLM's classes and humming-kernels' own.

Prints what became of the weights of one rank, and what comes of the SwiGLU limit. Tensors have no storage while
weights are converted, so that no kernel runs; `is_cuda` is what Humming asks first.
"""

import inspect
import json
import os
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import hopper  # before vLLM is imported: a Hopper GPU, though there is none
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm.config import DeviceConfig, KernelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel

LIMIT, EXPERTS, TOP_K, HIDDEN, TOKENS = 10.0, 256, 6, 4096, 3


def made(ranks=4, ep=False):
    """The layer of one of `ranks` GPUs, before its weights are loaded."""
    from vllm.model_executor.layers.fused_moe import FusedMoE
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

    quantisation = SimpleNamespace(get_quant_method=lambda layer, prefix: Mxfp4MoEMethod(layer.moe_config))
    config = VllmConfig(
        kernel_config=KernelConfig(moe_backend="humming"), device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(enable_expert_parallel=ep),
    )  # fmt: skip
    with set_current_vllm_config(config):
        return FusedMoE(
            num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, intermediate_size=2048, tp_size=ranks,
            params_dtype=torch.bfloat16, quant_config=quantisation, swiglu_limit=LIMIT,
            scoring_func="sqrtsoftplus", e_score_correction_bias=torch.zeros(EXPERTS), prefix="ffn.experts",
        )  # fmt: skip


def converted(ranks, ep, a_dtype):
    """The layer after its weights were loaded, and words about it."""
    os.environ["VLLM_HUMMING_INPUT_QUANT_CONFIG"] = json.dumps({"dtype": a_dtype} if a_dtype else {})
    layer = made(ranks, ep)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        for name, value in list(layer.named_parameters()):
            setattr(layer, name, torch.nn.Parameter(fake.from_tensor(value.data), requires_grad=False))
        torch.Tensor.is_cuda = True
        layer.quant_method.process_weights_after_loading(layer)
        del torch.Tensor.is_cuda
    experts = layer.quant_method.moe_kernel.fused_experts
    weights = {name: list(value.shape) for name, value in layer.named_parameters() if name.endswith("weight")}
    types = [str(layer.humming_metas["w2"].a_dtype), str(layer.humming_metas["w2"].b_dtype)]
    return layer, {"weights": weights, "types": types, "limit": experts.quant_config.gemm1_clamp_limit}


def swiglu_error(layer):
    """Of what the second product gets of the first one's outputs, by the layer's `apply`: relative to float32."""
    from humming.layer import HummingMethod

    experts = layer.quant_method.moe_kernel.fused_experts
    module, products = sys.modules[type(experts).__module__], []
    signature = inspect.signature(HummingMethod.forward_layer)

    def forward_layer(**arguments):
        signature.bind(**arguments)
        given = arguments["inputs"].clone()
        products.append((given, arguments["outputs"].copy_(20 * torch.randn(arguments["outputs"].shape)).clone()))

    HummingMethod.forward_layer = forward_layer
    module.moe_align_block_size = lambda **_: (None, None, None)
    module.moe_fused_mul_sum = lambda inputs, outputs, **_: outputs.copy_(inputs.sum(1))
    module.get_forward_context = lambda: SimpleNamespace(dp_metadata=None)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    shapes = experts.workspace_shapes(TOKENS, 0, HIDDEN, TOP_K, EXPERTS, EXPERTS, None, layer.activation)
    spaces = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes[:2]]
    experts.apply(
        output=spaces[0][: x.numel()].view(x.shape), hidden_states=x, w1=layer.w13_weight, w2=layer.w2_weight,
        topk_weights=torch.ones(TOKENS, TOP_K), topk_ids=torch.zeros(TOKENS, TOP_K, dtype=torch.int32),
        activation=layer.activation, global_num_experts=EXPERTS, expert_map=None, a1q_scale=None, a2_scale=None,
        workspace13=spaces[0], workspace2=spaces[1], expert_tokens_meta=None, apply_router_weight_on_input=False,
    )  # fmt: skip
    (_, first), (found, _) = products
    gate, up = first.float().chunk(2, -1)
    expected = F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
    return float((found.float() - expected).norm() / expected.norm())


def refusal(version):
    from vllm.dsv4_overlay import experts

    def found(name):
        if version is None:
            raise PackageNotFoundError(name)
        return version

    experts.version = found
    try:
        made()
    except ValueError as error:
        return str(error)


def main():
    torch.manual_seed(0)
    torch.cuda.get_device_capability, torch.cuda.get_device_name = lambda *_: (9, 0), lambda *_: "NVIDIA H200"
    hopper.platforms._current_platform.device_type = "cpu"
    init_distributed_environment(1, 0, f"file://{os.getcwd()}/group", 0, "gloo")
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        initialize_model_parallel(1)
    import humming.ops  # which a kernel would be compiled for

    humming.ops.process_mxfp4_w4a8_weight = lambda weight, offsets, inplace: weight
    found = {name: converted(*case) for name, case in json.load(sys.stdin).items()}
    answers = {name: words for name, (_, words) in found.items()}
    answers |= {"error": swiglu_error(found["TP"][0]), "absent": refusal(None), "other": refusal("0.1.19")}
    print("\n" + json.dumps(answers))


main()
