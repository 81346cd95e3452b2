"""Runs in a process of its own: MXFP4 experts in FP8 through vLLM's classes, its Triton kernels interpreted.

In place of what needs a GPU, or of BF16 products that the interpreter gets wrong: DeepGEMM's product, SwiGLU and
the quantisation of activations are their definitions, and Marlin leaves 7s. Prints what came of a layer, of
conversions and of refusals.
"""

import copy
import importlib.machinery
import inspect
import json
import os
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import hopper  # before vLLM is imported: a Hopper GPU, though there is none
import torch
import torch.nn.functional as F
from vllm.config import DeviceConfig, KernelConfig, ParallelConfig, VllmConfig, set_current_vllm_config

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import experts as bench

# 128 values of each expert's width on the GPU; some tokens for each expert, and tiles of 128 rows nearly empty.
bench.HIDDEN, bench.WIDTH, bench.EXPERTS, bench.TOP_K = 1024, 128, 4, 2
LEAST, TOKENS = 24, 40
BLOCK = 128


def blocks(scales):
    return scales.repeat_interleave(BLOCK, -1)


class DeepGemm(types.ModuleType):
    rows = []
    warm = False  # of products before that, only the rows are counted
    fp8_gemm_nt = print  # vLLM asks whether there is one

    def get_mk_alignment_for_contiguous_layout(self):
        return BLOCK

    def set_mk_alignment_for_contiguous_layout(self, rows):
        assert rows == BLOCK

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, out, layout, disable_ue8m0_cast, use_psum_layout=False):
        """`layout` has each row's expert, or where the rows of each end; those of the next begin at a tile."""
        self.rows.append(out.shape[0])
        assert b[1].shape == (len(b[0]), b[0].shape[1] // BLOCK, b[0].shape[2] // BLOCK)
        if not self.warm:
            return
        row, begin = torch.arange(out.shape[0]), 0
        for expert in range(len(b[0])):
            rows = layout == expert
            if use_psum_layout:
                end = int(layout[expert])
                rows, begin = (begin <= row) & (row < end), -(-end // BLOCK) * BLOCK
            weight = b[0][expert].float() * blocks(blocks(b[1][expert]).T).T
            out[rows] = ((a[0][rows].float() * blocks(a[1][rows])) @ weight.T).to(out.dtype)


def quantised(x, values, scales, group, least, low, high, power_of_two, *_):
    """What torch.ops._C.per_token_group_fp8_quant is for."""
    grouped = x.float().view(*scales.shape, group)
    scale = grouped.abs().amax(-1).clamp(min=least) / high
    scales.copy_(torch.exp2(scale.log2().ceil()) if power_of_two else scale)
    values.copy_((grouped / scales[..., None]).clamp(low, high).view(x.shape))


def swiglu_quantised(input, output, use_ue8m0, clamp_limit, **_):
    """What vLLM's silu_mul_per_token_group_quant_fp8_colmajor is for."""
    gate, up = input.float().chunk(2, -1)
    if clamp_limit is not None:
        gate, up = gate.clamp(max=clamp_limit), up.clamp(-clamp_limit, clamp_limit)
    scales = torch.empty(len(gate), gate.shape[1] // BLOCK)
    quantised(F.silu(gate) * up, output, scales, BLOCK, 1e-10, -448.0, 448.0, use_ue8m0)
    return output, scales


sys.modules["deep_gemm"] = DEEP_GEMM = DeepGemm("deep_gemm")
DEEP_GEMM.__spec__ = importlib.machinery.ModuleSpec("deep_gemm", None)
hopper.library.define(
    "per_token_group_fp8_quant(Tensor x, Tensor(a!) q, Tensor(b!) s, int group, float least, float low, "
    "float high, bool ue8m0, bool column_major, bool tma_aligned) -> ()"
)
hopper.library.impl("per_token_group_fp8_quant", quantised, "CPU")


def settings(least=None):
    options = {} if least is None else {"dsv4_fp8_experts": least}
    return VllmConfig(
        device_config=DeviceConfig("cpu"),
        kernel_config=KernelConfig(moe_backend="marlin"),
        additional_config=options,
    )


def made(config, **changes):
    """The layer, before its weights are loaded; `changes` of the class by which vLLM loads them."""
    from vllm.model_executor.layers import fused_moe
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

    method = type("OtherMethod", (Mxfp4MoEMethod,), changes) if changes else Mxfp4MoEMethod
    quantisation = SimpleNamespace(
        get_quant_method=lambda layer, prefix: method(layer.moe_config), online_quantization_config=None
    )
    # From 0.24.0 on what runs the layer is made with it.
    make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    with set_current_vllm_config(config):
        layer = make(
            num_experts=bench.EXPERTS, top_k=bench.TOP_K, hidden_size=bench.HIDDEN, intermediate_size=bench.WIDTH,
            tp_size=1, params_dtype=torch.bfloat16, quant_config=quantisation, swiglu_limit=bench.LIMIT,
            scoring_func="sqrtsoftplus", e_score_correction_bias=torch.zeros(bench.EXPERTS), prefix="ffn.experts",
        )  # fmt: skip
    return getattr(layer, "routed_experts", layer)


def loaded(config, weights):
    layer = made(config)
    fill(layer, weights, config)
    return layer


def fill(layer, weights, config):
    put(layer, weights)
    with set_current_vllm_config(config):
        layer.quant_method.process_weights_after_loading(layer)


def put(layer, weights):
    for name, value in weights.items():
        getattr(layer, name).data.copy_(value)


def rearranged(layer, *tensors):
    """In place of Marlin's order: what was loaded is no longer there."""
    return tuple(x if x is None else torch.zeros_like(x) for x in tensors)


def of_layer():
    from vllm.model_executor.layers.fused_moe.experts import deep_gemm_moe
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4
    from vllm.v1.worker import workspace

    MarlinExperts.apply = lambda self, output, **_: output.fill_(7)
    MarlinExperts.workspace_shapes = lambda self, m, n, k, *_: ((1,), (1,), (m, k))
    MarlinExperts.moe_problem_size = lambda self, a, *_: (bench.EXPERTS, *a.shape, a.shape[1], bench.TOP_K)
    marlin_utils_fp4.prepare_moe_mxfp4_layer_for_marlin = rearranged
    deep_gemm_moe.silu_mul_per_token_group_quant_fp8_colmajor = swiglu_quantised
    torch.accelerator.empty_cache = lambda: None
    workspace.init_workspace_manager(torch.device("cpu"))
    weights = bench.weights(1, "cpu")
    os.environ["VLLM_DEEP_GEMM_WARMUP"] = "skip"
    loaded(settings(LEAST), weights)
    answers = {"not_warmed_up": len(DEEP_GEMM.rows)}
    del os.environ["VLLM_DEEP_GEMM_WARMUP"]
    layer = loaded(settings(LEAST), weights)
    answers |= {"warmed_up": [len(DEEP_GEMM.rows), max(DEEP_GEMM.rows)]}
    limit, bench.LIMIT = bench.LIMIT, 0.0
    kernel = loaded(settings(LEAST), weights).quant_method.moe_kernel
    answers["without_limit"], bench.LIMIT = kernel.impl._experts.gemm1_clamp_limit, limit
    DEEP_GEMM.warm = True
    found = {}
    for tokens in (1, LEAST, TOKENS, LEAST - 1):  # the last after calls of many
        x, route, chosen = bench.inputs(tokens, "cpu")
        x = x * 10  # so that the limit cuts off
        DEEP_GEMM.rows.clear()
        shared = [None] * (len(inspect.signature(layer.quant_method.apply).parameters) - 4)  # experts
        result = layer.quant_method.apply(layer, x, route, chosen, *shared).float()
        expected = bench.reference(weights, x, route, chosen)
        error = float((result - expected).norm() / expected.norm())
        found[tokens] = {"products": len(DEEP_GEMM.rows), "sevens": bool((result == 7).all()), "error": error}
    answers["calls"] = found
    answers["EP"] = with_expert_parallelism(layer, weights)
    answers["anew"] = with_other_weights(layer)
    weights["w2_weight_scale"][1, 5, 0] = 90  # 29 binades below the others of its block
    inexact = loaded(settings(LEAST), weights)
    kept = [type(inexact.quant_method.moe_kernel.impl).__name__]
    fill(inexact, bench.weights(1, "cpu"), settings(LEAST))
    kept.append(type(inexact.quant_method.moe_kernel.impl).__name__)
    off = loaded(settings(), weights).quant_method.moe_kernel.impl
    return answers | {"inexact": kept, "off": type(off).__name__}


def with_other_weights(layer):
    """Whether they are where the first are, their error, and what is said of some that are not exact."""
    weights = bench.weights(1, "cpu")
    first = layer.quant_method.moe_kernel.impl._w13.data_ptr()
    put(layer, weights)
    layer.quant_method.process_weights_after_loading(layer)  # up to 0.26.0 vLLM reloads without a configuration
    same = layer.quant_method.moe_kernel.impl._w13.data_ptr() == first
    error = with_expert_parallelism(layer, weights)
    weights["w2_weight_scale"][1, 5, 0] = 90
    try:
        fill(layer, weights, settings(LEAST))
    except ValueError as refused:
        return same, error, str(refused)


def with_expert_parallelism(layer, weights):
    """The error on a GPU that has the last four of eight experts: each token has one there, and one elsewhere."""
    x, route, chosen = bench.inputs(TOKENS, "cpu")
    here = torch.tensor([1, 0])
    where = torch.cat([torch.full((bench.EXPERTS,), -1), torch.arange(bench.EXPERTS)]).int()
    result = layer.quant_method.moe_kernel.apply(
        x, layer.w13_weight, layer.w2_weight, route, chosen + (bench.EXPERTS * here).to(chosen.dtype),
        layer.activation, 2 * bench.EXPERTS, where, False,
    ).float()  # fmt: skip
    expected = bench.reference(weights, x, route * here, chosen)
    return float((result - expected).norm() / expected.norm())


def refusals():
    from vllm.dsv4_overlay import fp8_experts

    def refusal(least=512, moe=None, backend="MARLIN", **config):
        fp8_experts.get_current_vllm_config = lambda: SimpleNamespace(
            additional_config={"dsv4_fp8_experts": least},
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
            parallel_config=None,
            model_config=SimpleNamespace(get_num_layers=lambda parallel: 43),
        )
        try:
            return fp8_experts.least_tokens(moe or flash, SimpleNamespace(value=backend))
        except ValueError as error:
            return str(error)

    def changed(moe, **values):
        moe = copy.copy(moe)  # `replace` would have newer releases compute the width anew
        vars(moe).update(values)
        return moe

    stock = fp8_experts.get_current_vllm_config
    moe = made(settings()).moe_config
    flash = changed(
        moe, num_experts=256, num_local_experts=256, hidden_dim=4096, intermediate_size_per_partition=512
    )
    parallel = moe.moe_parallel_config
    found = {"none": refusal(None), "one of four": refusal()}
    found |= {f"{least!r}": refusal(least) for least in (True, 0, 1, "512", 1.5, 8192, 8193)}
    for name, divided in {
        "EP": {"use_ep": True}, "EPLB": {"use_ep": True, "enable_eplb": True},
        "DP": {"dp_size": 2}, "DP with EP": {"use_ep": True, "dp_size": 2},
    }.items():  # fmt: skip
        found[name] = refusal(moe=changed(flash, moe_parallel_config=replace(parallel, **divided)))
    found["Humming"] = refusal(backend="HUMMING")
    found["LoRA"] = refusal(moe=changed(flash, is_lora_enabled=True))
    found["bias"] = refusal(moe=changed(flash, has_bias=True))
    found["activation"] = refusal(moe=changed(flash, activation=SimpleNamespace(value="swigluoai")))
    found["hidden"] = refusal(moe=changed(flash, hidden_dim=4608))
    found["one of two"] = refusal(moe=changed(flash, intermediate_size_per_partition=1024))
    has, fp8_experts.has_deep_gemm = fp8_experts.has_deep_gemm, lambda: False
    found["DeepGEMM"] = refusal()
    fp8_experts.has_deep_gemm = has
    os.environ["VLLM_USE_DEEP_GEMM"] = "0"
    found["DeepGEMM off"] = refusal()
    del os.environ["VLLM_USE_DEEP_GEMM"]
    fp8_experts.has_deep_gemm, hopper.CAPABILITY = has, hopper.DeviceCapability(10, 0)
    found["Blackwell"] = refusal()
    hopper.CAPABILITY, fp8_experts.get_current_vllm_config = hopper.DeviceCapability(9, 0), stock
    for name, least, changes in ("seam", "all", {}), ("other names", 512, {"renames": True}):
        try:
            made(settings(least), **changes)
        except ValueError as error:
            found[name] = str(error)
    return found


def conversions():
    """(exact as it says, exact) of an expert of 256 x 256 values; a quarter has scales so far apart."""
    from vllm.dsv4_overlay.fp8_experts import to_e4m3

    def case(span=0, code=None, top=130, other=None):
        codes = torch.randint(0, 256, (2, 256, 128), dtype=torch.uint8)
        scales = torch.full((2, 256, 8), 130, dtype=torch.uint8)
        scales[1] = top
        scales[1, :128, 5] = top - span if other is None else other
        if code is not None:
            codes[1, :128, 80:96] = code
        weight, scale, exact = to_e4m3(codes, scales)
        values = torch.tensor([*bench.E2M1, *(-value for value in bench.E2M1)], dtype=torch.float64)
        values = values[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()]
        values = values * torch.exp2(scales.double() - 127).repeat_interleave(32, -1)
        same = weight.double() * blocks(blocks(scale.double()).transpose(1, 2)).transpose(1, 2) == values
        assert exact[0] and same[0].all() and weight.dtype == torch.float8_e4m3fn
        return bool(exact[1]), bool(same[1].all())

    return {
        **{f"{span}": case(span) for span in (0, 1, 7, 13, 14, 15, 16, 30, 100)},
        "17 of 4": case(17, 0x66), "17 of -4": case(17, 0xEE), "18 of 4": case(18, 0x66),
        "15 of 3": case(15, 0x55), "16 of 3": case(16, 0x55), "16 of 1.5": case(16, 0x33),
        "100 of 0": case(100, 0x80), "0 far above": case(0, 0x00, other=254), "NaN": case(other=255),
        "NaN of 0": case(0, 0x00, other=255), "least": case(top=7), "below": case(top=6),
        "greatest": case(top=254),
    }  # fmt: skip


def main():
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    torch.manual_seed(0)
    torch.cuda.get_device_capability, torch.cuda.get_device_name = lambda *_: (9, 0), lambda *_: "NVIDIA H200"
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)
    hopper.platforms._current_platform.device_type = "cpu"
    init_distributed_environment(1, 0, f"file://{os.getcwd()}/group", 0, "gloo")
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"), parallel_config=ParallelConfig())):
        initialize_model_parallel(1)
    print("\n" + json.dumps({"layer": of_layer(), "refusals": refusals(), "conversions": conversions()}))


main()
