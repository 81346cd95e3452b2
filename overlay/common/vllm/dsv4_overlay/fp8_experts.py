# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""DeepSeek V4's MXFP4 experts on Hopper: calls of many tokens by FP8 products.

Asked for by `--additional-config '{"dsv4_fp8_experts": N}'`. When a layer's weights are
loaded, they are kept a second time, in E4M3 with a power of two as the scale of 128x128
values, which loses nothing (`to_e4m3`). Calls of at least N tokens then go to DeepGEMM,
through vLLM's own DeepGemmExperts; fewer tokens, and layers whose weights E4M3 cannot
hold, stay with Marlin. N is compared with a tensor's shape inside vLLM's operator, so
what was compiled or captured for a number of tokens has the kernels for that number.
"""

import copy
from typing import TYPE_CHECKING

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.platforms import current_platform
from vllm.utils.import_utils import has_deep_gemm

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe import FusedMoE, FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

logger = init_logger(__name__)

OPTION = "dsv4_fp8_experts"
_BLOCK = 128  # DeepGEMM's, each way
_GROUP = 32  # MXFP4's
# A block's largest MXFP4 scale is put here among E4M3's: its 6 becomes 384 of 448.
_ROOM = 6
# Below this factor 0.5 to 6 become zero in E4M3; only a block that is refused has one.
_LEAST = -20
_GIB = 1 << 30

Converted = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def offer(method: "Mxfp4MoEMethod") -> None:
    """If FP8 products are asked for, have a layer's weights converted when they are
    loaded. Called when the layer is made, after vLLM chose a backend: no weight is
    loaded yet.

    Raises:
        ValueError: as `least_tokens`.
    """
    least = least_tokens(method.moe, method.mxfp4_backend)
    if least is None:
        return
    if (kind := type(method).__name__) != "Mxfp4MoEMethod":  # weights by other names
        raise ValueError(
            f"{OPTION} in --additional-config is for MXFP4 experts as DeepSeek's "
            f"checkpoints have them, and these are {kind}'s; omit it."
        )
    # Now, since up to 0.26.0 vLLM loads weights anew without a configuration.
    most = get_current_vllm_config().scheduler_config.max_num_batched_tokens
    process = method.process_weights_after_loading
    before: Converted | None = None
    stays = False  # with Marlin: once loaded, the caches have the memory

    def process_and_join(layer: "FusedMoE") -> None:
        nonlocal before, stays
        # Before Marlin rearranges what was loaded.
        converted = None if stays else convert(layer)
        process(layer)
        if before is not None:  # weights loaded anew, and CUDA graphs read the first
            if converted is None:
                raise ValueError(
                    f"E4M3 cannot hold these weights of {layer.layer_name} exactly, as "
                    "it could those before them; start the server anew with them."
                )
            for kept, new in zip(before, converted, strict=True):
                kept.copy_(new)
            converted = before
        if converted is None:
            stays = True
        else:
            before = converted
            join(method, converted, least, most)

    method.process_weights_after_loading = process_and_join


def least_tokens(moe: "FusedMoEConfig", backend: "Mxfp4MoeBackend") -> int | None:
    """N, or None if FP8 products are not asked for.

    Raises:
        ValueError: the option is not a number of tokens that a step can have, or this
            GPU, its memory, DeepGEMM, the experts, their backend or their parallelism
            do not allow it. One sentence.
    """
    config = get_current_vllm_config()
    options = config.additional_config
    least = options.get(OPTION) if isinstance(options, dict) else None
    if least is None:
        return None
    if problem := _misfit(least, moe, backend, config):
        raise ValueError(f"{OPTION} in --additional-config {problem}.")
    return least


def _misfit(
    least: object,
    moe: "FusedMoEConfig",
    backend: "Mxfp4MoeBackend",
    config: "VllmConfig",
) -> str | None:
    if not isinstance(least, int) or isinstance(least, bool) or least < 1:
        return (
            f"is {least!r}; it may be the number of tokens, 1 or more, from which on "
            "experts run in FP8"
        )
    if least > (most := config.scheduler_config.max_num_batched_tokens):
        return (
            f"is {least}, but no step has more than {most} tokens; lower it, or raise "
            "--max-num-batched-tokens"
        )
    if not current_platform.is_device_capability(90):
        return "is for Hopper (H100, H200); omit it"
    if not (envs.VLLM_USE_DEEP_GEMM and has_deep_gemm()):
        return (
            "needs DeepGEMM, which this vLLM does not have or VLLM_USE_DEEP_GEMM "
            "switches off"
        )
    if backend.value != "MARLIN":
        return f"stands beside Marlin, not {backend.value}; use --moe-backend marlin"
    parallel = moe.moe_parallel_config
    if parallel.dp_size > 1 or parallel.use_all2all_kernels or parallel.enable_eplb:
        return (
            "does not serve data parallelism, --enable-eplb, or all-to-all between "
            "experts; omit it"
        )
    if moe.has_bias or moe.activation.value != "silu":
        return (
            "is for experts like V4's, without a bias and with silu, and these have "
            f"{'a bias' if moe.has_bias else moe.activation.value}; omit it"
        )
    if problem := _unsupported(moe):
        return f"is not served here: DeepGEMM's {problem}"
    if moe.hidden_dim % 1024:
        return f"needs a hidden size that 1024 divides, not {moe.hidden_dim}; omit it"
    layers = 1
    if config.model_config is not None:
        layers = config.model_config.get_num_layers(config.parallel_config)
    values = layers * moe.num_local_experts * 3 * moe.hidden_dim
    values *= moe.intermediate_size_per_partition
    fp4, fp8 = values * (1 / 2 + 1 / _GROUP) / _GIB, values / _GIB
    if fp4 + fp8 > (total := current_platform.get_device_total_memory() / _GIB):
        return (
            f"needs {fp8:.1f} GiB on each GPU for experts in FP8 beside {fp4:.1f} in 4 "
            f"bits, and a GPU has {total:.1f}; raise --tensor-parallel-size, or omit it"
        )
    return None


def _unsupported(moe: "FusedMoEConfig") -> str | None:
    from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import (
        DeepGemmExperts,
    )
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kFp8Dynamic128Sym,
        kFp8Static128BlockSym,
    )

    standard = mk.FusedMoEActivationFormat.Standard
    return DeepGemmExperts.is_supported_config(
        DeepGemmExperts, moe, kFp8Static128BlockSym, kFp8Dynamic128Sym, standard
    )[1]


def to_e4m3(
    codes: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """MXFP4 weights in E4M3, with the very same values.

    That works if the MXFP4 scales in a block of 128x128 values are at most 14 powers of
    two apart (not counting those of zeros), or further if its values leave room.

    Args:
        codes: uint8 [experts, n, k / 2], two E2M1 codes a byte, the lower half first;
            128 divides n and k.
        scales: uint8 [experts, n, k / 32], E8M0.

    Returns:
        float8_e4m3fn [experts, n, k]; float32 [experts, n / 128, k / 128], powers of
        two; and bool [experts], whether the two are exactly the weights of an expert.
        One expert is converted at a time, for memory.
    """
    experts, n, k = codes.shape[0], codes.shape[1], 2 * codes.shape[2]
    new = codes.new_empty
    weight = new((experts, n, k), dtype=torch.float8_e4m3fn)
    scale = new((experts, n // _BLOCK, k // _BLOCK), dtype=torch.float32)
    exact = new(experts, dtype=torch.bool)
    for one in zip(codes, scales, weight, scale, exact, strict=True):
        _convert(*one)
    return weight, scale, exact


def _convert(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    exact: torch.Tensor,
) -> None:
    """`to_e4m3` of one expert, into the last three."""
    n, k = weight.shape
    e2m1 = codes.new_tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32)
    pairs = torch.stack([codes & 15, codes >> 4], -1).view(n, -1, _GROUP)
    values = torch.cat([e2m1, -e2m1])[pairs.int()]
    exponents = scales.int()
    in_use = torch.where((values != 0).any(-1), exponents, -1)
    blocks = n // _BLOCK, _BLOCK, k // _BLOCK, _BLOCK // _GROUP
    top = in_use.view(blocks).amax((1, 3))
    top = torch.where(top < 0, 127 + _ROOM, top)  # all zero: any scale would do
    biased = top - _ROOM  # of the new scale, in float32
    lower = exponents.view(blocks) - biased[:, None, :, None]
    lower = lower.view(n, -1, 1).clamp(_LEAST, _ROOM)
    values *= _power_of_two(lower + 127)
    weight.copy_(values.view(n, k))
    same = weight.view(n, -1, _GROUP).float() == values
    # 255 is NaN; below 1 float32 would have a subnormal, which kernels may flush.
    exact.copy_(same.all() & (biased >= 1).all() & (exponents != 255).all())
    scale.copy_(_power_of_two(biased.clamp(min=1)))


def _power_of_two(biased: torch.Tensor) -> torch.Tensor:
    """2 ** (biased - 127) for int32 of 1 to 254, exactly."""
    return (biased << 23).view(torch.float32)


def convert(layer: "FusedMoE") -> Converted | None:
    """A layer's weights and scales in FP8, w13's and w2's, from what was loaded; None,
    with a line in the log, if they are not exact."""
    found, inexact = [], 0
    for name in ("w13_weight", "w2_weight"):
        *both, exact = to_e4m3(
            getattr(layer, name).data, getattr(layer, f"{name}_scale").data
        )
        found += both
        inexact += int((~exact).sum())
    if not inexact:
        return tuple(found)
    logger.warning(
        "%s stays with Marlin for any number of tokens: E4M3 cannot hold %d of its "
        "%d MXFP4 matrices exactly.",
        layer.layer_name,
        inexact,
        2 * len(exact),
    )
    return None


def join(
    method: "Mxfp4MoEMethod", converted: Converted, least: int, most: int
) -> None:
    """Give calls of at least `least` tokens to DeepGEMM, in the kernel that `method`
    has made for Marlin; no step has more than `most`."""
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import (
        DeepGemmExperts,
    )

    w13, w13_scale, w2, w2_scale = converted
    quant_config = fp8_w8a8_moe_quant_config(
        w1_scale=w13_scale,
        w2_scale=w2_scale,
        block_shape=[_BLOCK, _BLOCK],
        # Marlin takes 0 for none, DeepGemmExperts for a limit.
        gemm1_clamp_limit=method.moe_quant_config.gemm1_clamp_limit or None,
    )
    experts = DeepGemmExperts(moe_config=method.moe, quant_config=quant_config)
    kernel = method.moe_kernel
    kernel.impl = _ByTokens(kernel.impl, experts, w13, w2, least)
    logger.info_once(
        "Experts: DeepGEMM in FP8 from %d tokens on, which takes %.2f GiB more a layer;"
        " Marlin below.",
        least,
        sum(x.nbytes for x in converted) / _GIB,
    )
    if envs.VLLM_DEEP_GEMM_WARMUP != "skip":
        from vllm.model_executor.warmup import deep_gemm_warmup

        # vLLM's own warm-up looks for layers whose only kernel is DeepGEMM's.
        deep_gemm_warmup._deepgemm_grouped_fp8_gemm_nt_contiguous_warmup(
            w13,
            w2,
            w13_scale,
            w2_scale,
            method.moe.experts_per_token,
            most,
        )


class _ByTokens(mk.FusedMoEKernelModularImpl):
    """Marlin's, but for calls of at least `least` tokens."""

    def __init__(self, marlin, experts, w13, w2, least):
        vars(self).update(vars(marlin))
        self._experts, self._w13, self._w2, self._least = experts, w13, w2, least

    def apply(self, hidden_states, w1, w2, **rest):
        mine = self
        if hidden_states.shape[0] >= self._least:
            mine = copy.copy(self)  # now, since vLLM sets attributes of it later
            mine.fused_experts, w1, w2 = self._experts, self._w13, self._w2
        return super(_ByTokens, mine).apply(
            hidden_states=hidden_states, w1=w1, w2=w2, **rest
        )
