# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""Checkpoints of DeepSeek V4 with linears that are quantised otherwise than in
DeepSeek's own: NVFP4, 4-bit integers or FP8, in attention, compressors, indexers or
experts, mixed by layer.

The tensors in the files say whether a layer is quantised, `quantization_config` says
how. That configuration names layers as the tool that wrote it did, and vLLM fuses and
renames them, so each name of a layer is tried. Every layer then runs through its own
kernel, but for `wo_a`: that is one product for each group of heads, which no quantised
kernel of vLLM does but the one for FP8 in blocks of 128. Other formats of it are
expanded to BF16 at load (V4-Flash, without tensor parallelism: 67 MB a layer, where
NVFP4 has 19).

A checkpoint that vLLM loads itself is left to it: the model's layers are made, and run,
as without this module.
"""

import contextlib
import copy
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.dsv4_overlay.checkpoint_files import read_index
from vllm.dsv4_overlay.weight_formats import dequantise, nvfp4_shard_scales
from vllm.logger import init_logger

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

logger = init_logger(__name__)

# vLLM's fused layers, and what checkpoints have instead.
FUSED = {
    "fused_wqa_wkv": ["wq_a", "wkv"],
    "fused_wkv_wgate": ["wkv", "wgate"],
    "gate_up_proj": ["w1", "w3"],
    "down_proj": ["w2"],
}
# The same, as vLLM's loader renames tensors.
_STACKED = (
    (re.compile(r"\.shared_experts\.w[13]\."), ".shared_experts.gate_up_proj."),
    (re.compile(r"\.attn\.(wq_a|wkv)\."), ".attn.fused_wqa_wkv."),
    (re.compile(r"\.compressor\.(wkv|wgate)\."), ".compressor.fused_wkv_wgate."),
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_LINEAR = re.compile(
    r"\.(w[123]|wq_a|wq_b|wkv|wgate|wo_a|wo_b|weights_proj|e_proj|h_proj)$"
)
_ALWAYS_PLAIN = re.compile(r"\.(compressor\.(wkv|wgate)|weights_proj)$")  # to vLLM
_FOUND = "dsv4_checkpoint_found"  # drop_in.switched_on knows it
_OPTIONAL = re.compile(r"\.attn\.[kq]_scale$")  # of the FP8 cache: scales.py
# Kernels and methods of 0.20.2 and 0.21.0 that clamp SwiGLU, with the patches. Later
# releases tell such kernels apart themselves.
_CLAMPING = {
    "MarlinExperts",
    "BatchedMarlinExperts",
    "TritonExperts",
    "BatchedTritonExperts",
    "CompressedTensorsWNA16MarlinMoEMethod",
    "Mxfp4MoEMethod",  # DeepSeek's own format, whose clamp is vLLM's business
}


class Checkpoint(NamedTuple):
    """What the files of a checkpoint hold: `files` by tensor, and by module the last
    parts of its tensors' names."""

    files: Mapping[str, str]
    parts: Mapping[str, frozenset[str]]

    @classmethod
    def of_files(cls, files: Mapping[str, str]) -> "Checkpoint":
        parts: dict[str, set[str]] = {}
        for name in files:
            module, _, part = name.rpartition(".")
            parts.setdefault(module, set()).add(part)
        return cls(files, {name: frozenset(found) for name, found in parts.items()})

    def quantised(self, modules: list[str]) -> bool | None:
        """Whether these, which are one layer, are quantised; None if none is there.

        Raises:
            ValueError: some are and some are not; one sentence.
        """
        found = {
            name: self.parts[name] != {"weight"}
            for name in modules
            if name in self.parts
        }
        if len(set(found.values())) > 1:
            names = [
                next(n for n in found if found[n] is is_so) for is_so in (True, False)
            ]
            raise ValueError(
                f"This checkpoint has {names[0]} quantised and {names[1]} not; vLLM "
                "runs both as one layer and needs them alike."
            )
        return next(iter(found.values()), None)


def adapt(vllm_config: "VllmConfig") -> None:
    """Make `vllm_config.quant_config` fit this checkpoint, before the model's layers
    are made with it. Nothing happens if vLLM loads the checkpoint itself.

    Raises:
        ValueError: it would be served with DSpark. One sentence.
    """
    quant_config = vllm_config.quant_config
    if quant_config is None or hasattr(quant_config, "dsv4_checkpoint"):
        return
    model, load = vllm_config.model_config, vllm_config.load_config
    checkpoint = None
    if load.load_format != "dummy" or Path(model.model).is_dir():
        checkpoint = _read(model.model, model.revision, load.download_dir)
    if not _needed(quant_config, checkpoint):
        return
    speculative = vllm_config.speculative_config
    if speculative and speculative.method == "dspark":
        # The draft gets a configuration of its own, to which nothing here is done.
        raise ValueError(
            "The series quantised-linears does not load DSpark's draft of a checkpoint "
            "that needs the series; omit --speculative-config."
        )
    quant_config.dsv4_checkpoint = checkpoint
    if isinstance(vllm_config.additional_config, dict):
        # vLLM hashes this: up to 0.22.1 it compiles the layers as they are quantised,
        # and would load what was compiled for other files.
        parts = checkpoint and {
            module: sorted(found) for module, found in checkpoint.parts.items()
        }
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
        vllm_config.additional_config[_FOUND] = digest.hexdigest()
    quant_config.packed_modules_mapping = {
        **quant_config.packed_modules_mapping,
        **FUSED,
    }
    if checkpoint and getattr(quant_config, "block_name_to_quantize", None):
        quant_config.block_name_to_quantize = None  # AutoRound's; the files say it
    quant_config.get_quant_method = functools.partial(
        _quant_method,
        quant_config,
        quant_config.get_quant_method,
        model.hf_config.num_hidden_layers,
    )
    logger.info_once(
        "vllm-dsv4-overlay decides by this checkpoint's tensors which linears are "
        "quantised (quantization %s).",
        quant_config.get_name(),
    )


def quant_config_of(
    vllm_config: "VllmConfig",
) -> "QuantizationConfig | None":
    """For a layer that vLLM makes unquantised always: the configuration if `adapt` was
    needed, else None as in vLLM."""
    quant_config = vllm_config.quant_config
    return quant_config if hasattr(quant_config, "dsv4_checkpoint") else None


def scale_format(config: "PretrainedConfig") -> str | None:
    """That of the scales of FP8 weights, which DeepSeek's own checkpoints name."""
    return (getattr(config, "quantization_config", None) or {}).get("scale_fmt")


def project_float32(linear: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, in] through `linear`, float32 [tokens, out]: accumulated and kept so
    where the weight is not quantised, as vLLM does, else the layer's result."""
    if _is_plain(linear, x):
        return torch.mm(x, linear.weight.T, out_dtype=torch.float32)
    out = linear(x)
    return (out[0] if isinstance(out, tuple) else out).float()


def kv_score(
    compressor: torch.nn.Module, x: torch.Tensor, stock: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """The compressor's product: `stock`, on the raw weight as vLLM has it, or what runs
    `x` through the layer where that is quantised."""
    linear = compressor.fused_wkv_wgate
    if _is_plain(linear, x):
        return stock
    return functools.partial(project_float32, linear, x)


def _is_plain(linear: torch.nn.Module, x: torch.Tensor) -> bool:
    weight = getattr(linear, "weight", None)
    return weight is not None and weight.dtype == x.dtype


def is_dense(wo_a: torch.nn.Module) -> bool:
    """Whether the grouped product has no FP8 weight to run on."""
    return wo_a.weight.dtype != torch.float8_e4m3fn


def block_scale(wo_a: torch.nn.Module) -> torch.Tensor:
    """The scales of an FP8 weight by their name in vLLM's own format or in
    compressed-tensors."""
    scale = getattr(wo_a, "weight_scale_inv", None)
    return wo_a.weight_scale if scale is None else scale


def without_rope(
    attention: torch.nn.Module, o: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The heads `o` [tokens, heads, head_dim] with their RoPE undone, of o's dtype."""
    rope = attention.rope_head_dim
    cos, sin = (
        attention.rotary_emb.cos_sin_cache[positions].float().unsqueeze(1).chunk(2, -1)
    )
    even, odd = o[..., -rope:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1)
    return torch.cat((o[..., :-rope], turned.flatten(-2).to(o.dtype)), -1)


def grouped_product(
    attention: torch.nn.Module, o: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """What `wo_a` makes of the heads `o` [tokens, heads, head_dim], their RoPE undone,
    with a weight that is not quantised: [tokens, groups, o_lora_rank], of o's dtype."""
    o = without_rope(attention, o, positions)
    groups = attention.n_local_groups
    weight = attention.wo_a.weight.view(groups, attention.o_lora_rank, -1)
    return torch.einsum("tgd,grd->tgr", o.reshape(o.shape[0], groups, -1), weight)


def output(
    attention: torch.nn.Module, o_padded: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The layer's output [tokens, hidden] with a `wo_a` that `is_dense`, from the heads
    [tokens, padded heads, head_dim]."""
    o = o_padded[:, : attention.n_local_heads]
    return attention.wo_b(grouped_product(attention, o, positions).flatten(1))


def clamped_swiglu(
    experts: Any, activation: Any, output: torch.Tensor, input: torch.Tensor
) -> bool:
    """Whether this has written the activation of `experts`, a kernel whose own has no
    clamp: that of SiLU, if the configuration has a limit."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.utils import swiglu_limit_func

    limit = experts.quant_config.gemm1_clamp_limit
    if limit is None or activation != MoEActivation.SILU:
        return False
    swiglu_limit_func(output, input, float(limit))
    return True


def with_clamp(
    limit: float | None, make: Callable[..., "FusedMoEQuantConfig"], **arguments: Any
) -> "FusedMoEQuantConfig":
    """`make(**arguments)`, with the clamp of SwiGLU that the function has no argument
    for."""
    return _clamped(make(**arguments), limit)


def check_names(model: torch.nn.Module, vllm_config: "VllmConfig") -> None:
    """Refuse a checkpoint with a tensor that none of the model's parameters is for,
    before weights are loaded.

    Raises:
        ValueError: one sentence: the file, the tensor, what its layer takes.
    """
    checkpoint = getattr(vllm_config.quant_config, "dsv4_checkpoint", None)
    if checkpoint is None:
        return
    from vllm.model_executor.models.utils import is_pp_missing_parameter

    parameters = dict(model.named_parameters())
    with_experts = not any(".shared_experts." in name for name in parameters)
    # 0.33.0 has the experts in a module of theirs.
    inner = any(".experts.routed_experts." in name for name in parameters)
    experts = ".experts.routed_experts." if inner else ".experts."
    for name, file in checkpoint.files.items():
        parameter = _parameter(model, name, experts)
        if parameter is None or parameter in parameters:
            continue
        if with_experts and ".shared_experts." in parameter:
            continue  # 0.33.0 can hold them as one more expert
        if is_pp_missing_parameter(parameter, model) or _OPTIONAL.search(name):
            continue
        # Experts are one module: their parameters' names go on after an underscore.
        owner = re.sub(r"(experts\.w(13|2)_|\.)[^.]*$", r"\1", parameter)
        takes = sorted(n.removeprefix(owner) for n in parameters if n.startswith(owner))
        takes = [part for part in takes if "." not in part]
        raise ValueError(
            f"{file} of this checkpoint holds {name}, which is for no parameter of the "
            f"model: {owner.rstrip('._')} "
            + (f"takes {', '.join(takes)}." if takes else "is no layer of it.")
        )


def check_names_later(model: torch.nn.Module, vllm_config: "VllmConfig") -> None:
    """`check_names` when weights are loaded first, for a constructor whose last lines
    are not the same in all releases that share a patch."""
    stock = model.load_weights

    @functools.wraps(stock)
    def load_weights(*args: Any, **kwargs: Any) -> set[str]:
        model.load_weights = stock  # loaded anew, parameters have other names
        check_names(model, vllm_config)
        return stock(*args, **kwargs)

    model.load_weights = load_weights


# ---------------------------------------------------------------- the checkpoint


@functools.cache
def _read(
    model: str, revision: str | None, download_dir: str | None
) -> Checkpoint | None:
    """None where the names of the tensors cannot be had before the weights are."""
    from safetensors import safe_open

    files, problem = {}, "no index"
    try:
        index = read_index(model, revision, download_dir)
        files = (index or {}).get("weight_map", {})
        if not files and (single := Path(model) / "model.safetensors").is_file():
            with safe_open(single, "pt") as file:
                files = dict.fromkeys(file.keys(), single.name)
    except (OSError, json.JSONDecodeError) as error:
        problem = str(error)
    if not files:
        logger.warning_once(
            "The names of %s's tensors cannot be read (%s); its quantization_config "
            "alone says which layers are quantised.",
            model,
            problem,
        )
        return None
    return Checkpoint.of_files(files)


def _needed(quant_config: "QuantizationConfig", checkpoint: Checkpoint | None) -> bool:
    """Whether vLLM itself would not load the checkpoint everywhere: quantised ones but
    DeepSeek's own formats, and those where layers that it leaves as they are have
    scales."""
    quantised = {
        module: parts
        for module, parts in (checkpoint.parts if checkpoint else {}).items()
        if _LINEAR.search(module) and parts != {"weight"}
    }
    if quant_config.get_name() != "deepseek_v4_fp8":
        return bool(quantised) or checkpoint is None  # else vLLM quantises it at load
    return quant_config.weight_block_size is None or any(
        _ALWAYS_PLAIN.search(module) or "weight_scale_2" in parts
        for module, parts in quantised.items()
    )


def checkpoint_modules(prefix: str, main_layers: int) -> list[str]:
    """The modules of the checkpoint that vLLM's layer `prefix` holds; of the experts
    the first one's."""
    if not prefix:  # the two layers that vLLM makes without a name
        return ["mtp.0.e_proj", "mtp.0.h_proj"]
    found = _LAYER.fullmatch(prefix.removesuffix(".routed_experts"))
    if found is None:
        return []
    number, rest = int(found[1]), found[2]
    layer = (
        f"layers.{number}" if number < main_layers else f"mtp.{number - main_layers}"
    )
    parent, _, last = f"{layer}.{rest}".rpartition(".")
    if last == "experts":
        return [f"{parent}.experts.0.{part}" for part in ("w1", "w2", "w3")]
    return [f"{parent}.{part}" for part in FUSED.get(last, [last])]


def _parameter(model: torch.nn.Module, name: str, experts: str) -> str | None:
    """The parameter that vLLM's loader gives a tensor of the checkpoint to, with
    `experts` for the module of experts; None if it skips the tensor, or if another
    model has it."""
    drafts = getattr(model, "_rewrite_spec_layer_name", None)
    if drafts is None:
        if "mtp." in name:
            return None
        name = model.hf_to_vllm_mapper._map_name(name)
    else:
        found = re.match(r"mtp\.(\d+)\.", name)
        if found is None:
            return None
        layer = model.config.num_hidden_layers + int(found[1])
        name = f"model.layers.{layer}.{name[found.end() :]}"
        for old, new in (
            (".emb.tok_emb.weight", ".embed_tokens.weight"),
            (".head.weight", ".shared_head.head.weight"),
            (".norm.weight", ".shared_head.norm.weight"),
            (".ffn.gate.bias", ".ffn.gate.e_score_correction_bias"),
            (".shared_experts.w2", ".shared_experts.down_proj"),
        ):
            name = name.replace(old, new)
        name = drafts(layer, name)
        if name.endswith(".scale"):
            expert = ".experts." in name and (
                getattr(model.config, "expert_dtype", "fp4") == "fp4"
            )
            name = name.removesuffix("scale") + (
                "weight_scale" if expert else "weight_scale_inv"
            )
    if ".experts." in name:
        name = re.sub(r"\.experts\.\d+\.w[13]\.", f"{experts}w13_", name)
        return re.sub(r"\.experts\.\d+\.w2\.", f"{experts}w2_", name)
    for parts, fused in _STACKED:
        name = parts.sub(fused, name)
    return name


# ---------------------------------------------------------------- layers


def _quant_method(
    quant_config: "QuantizationConfig",
    stock: Callable[..., "QuantizeMethodBase | None"],
    main_layers: int,
    layer: torch.nn.Module,
    prefix: str,
) -> "QuantizeMethodBase | None":
    """In place of `quant_config.get_quant_method`."""
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    experts_class = _experts_class()
    plain = (UnquantizedLinearMethod, UnquantizedFusedMoEMethod)
    if not isinstance(layer, (LinearBase, experts_class)):
        return stock(layer, prefix)
    checkpoint: Checkpoint | None = quant_config.dsv4_checkpoint
    modules = checkpoint_modules(prefix, main_layers)
    quantised = checkpoint.quantised(modules) if checkpoint else None
    parts = checkpoint.parts[modules[0]] if quantised else frozenset()
    if isinstance(layer, experts_class) and quantised is not None:
        _prefer_clamping(layer, parts)
    if quantised is None:
        method = stock(layer, prefix)
    elif not quantised:
        if isinstance(layer, experts_class):
            method = UnquantizedFusedMoEMethod(layer.moe_config)
        else:
            method = UnquantizedLinearMethod()
    else:
        _name_experts(quant_config, layer, prefix, modules)
        method = _nvfp4_experts(quant_config, layer, parts)
        with _own_experts(quant_config, parts):
            for name in _names(prefix, modules):
                if method is None or isinstance(method, plain):
                    method = stock(layer, name)
        if method is None or isinstance(method, plain):
            has = ", ".join(sorted(parts))
            raise ValueError(
                f"{modules[0]} of this checkpoint is quantised ({has}), and its "
                f"quantization_config ({quant_config.get_name()}) does not say how; "
                "add the module to the layers that it names."
            )
    if method is None:
        return None
    if isinstance(layer, experts_class):
        _prepare_experts(method, layer)
    elif isinstance(method, plain):
        pass
    elif prefix.endswith(".attn.wo_a"):
        _after_loading(method, _expand_wo_a)
    else:
        _log_nvfp4_kernel(method, layer)
        _after_loading(method, _keep_shard_scales)
    return method


def _experts_class() -> type[torch.nn.Module]:
    from vllm.model_executor.layers import fused_moe

    # Up to 0.21.0 the experts are no class of their own; 0.33.0 has no FusedMoE.
    return getattr(fused_moe, "RoutedExperts", None) or fused_moe.FusedMoE


def _names(prefix: str, modules: list[str]) -> list[str]:
    """A layer's names: the module's, its parameters' (what vLLM makes of names in
    `quantization_config`), and the checkpoint's."""
    names = [prefix, prefix.replace(".attn.compressor.", ".attn.mla_attn.compressor.")]
    return list(dict.fromkeys([*names, *(f"model.{m}" for m in modules), *modules]))


def _name_experts(
    quant_config: "QuantizationConfig",
    layer: torch.nn.Module,
    prefix: str,
    modules: list[str],
) -> None:
    """Name the experts as vLLM asks for them in compressed-tensors, which is as other
    models have them."""
    if quant_config.get_name() != "compressed-tensors" or "experts" not in modules[0]:
        return
    for name in [*modules, *(f"model.{module}" for module in modules)]:
        scheme = quant_config.get_scheme_dict(layer, name)
        if scheme is not None:
            names = [f"{prefix}.0.{part}_proj" for part in ("gate", "up", "down")]
            quant_config.target_scheme_map = {
                **dict.fromkeys(names, scheme),
                **quant_config.target_scheme_map,
            }
            return


@contextlib.contextmanager
def _own_experts(
    quant_config: "QuantizationConfig", parts: frozenset[str]
) -> Iterator[None]:
    """In a checkpoint whose experts are NVFP4, as `moe_quant_algo` says, let those that
    are as DeepSeek has them (of next-token layers, say) be made so."""
    algorithm = getattr(quant_config, "moe_quant_algo", None)
    if not algorithm or parts != {"weight", "scale"}:
        yield
        return
    quant_config._resolved_moe_quant_algo = ""
    try:
        yield
    finally:
        quant_config._resolved_moe_quant_algo = algorithm


def _nvfp4_experts(
    quant_config: "QuantizationConfig",
    layer: torch.nn.Module,
    parts: frozenset[str],
) -> "QuantizeMethodBase | None":
    """Those of a checkpoint that is otherwise as DeepSeek has it, where vLLM does not
    read `moe_quant_algo` (up to 0.21.0)."""
    if (
        quant_config.get_name() != "deepseek_v4_fp8"
        or hasattr(quant_config, "moe_quant_algo")
        or "weight_scale_2" not in parts
        or not hasattr(layer, "moe_config")
    ):
        return None
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.quantization.modelopt import (
        ModelOptNvFp4Config,
        ModelOptNvFp4FusedMoE,
    )

    hf_config = get_current_vllm_config().model_config.hf_config
    algorithm = hf_config.quantization_config.get("moe_quant_algo") or ""
    if algorithm.upper() != "NVFP4":
        return None  # the tensors do not fit what vLLM makes, which `check_names` says
    config = ModelOptNvFp4Config(
        is_checkpoint_nvfp4_serialized=True,
        kv_cache_quant_algo=None,
        exclude_modules=[],
    )
    return ModelOptNvFp4FusedMoE(quant_config=config, moe_config=layer.moe_config)


def _drops_clamp(layer: torch.nn.Module) -> bool:
    """Whether vLLM would choose a kernel that has no clamp for experts that need it (up
    to 0.21.0)."""
    has_limit = getattr(layer, "swiglu_limit", None) is not None
    return has_limit and not hasattr(layer.moe_config, "swiglu_limit")


def _prefer_clamping(layer: torch.nn.Module, parts: frozenset[str]) -> None:
    """Choose a kernel of which `_refuse_unclamped` has nothing to say, unless
    --moe-backend names one."""
    if not _drops_clamp(layer) or layer.moe_config.moe_backend != "auto":
        return
    if not parts:
        layer.moe_config.moe_backend = "triton"
    elif parts & {"weight_scale_2", "weight_global_scale"}:  # NVFP4
        layer.moe_config.moe_backend = "marlin"


def _refuse_unclamped(method: "QuantizeMethodBase", layer: torch.nn.Module) -> None:
    experts = getattr(method, "experts_cls", None)
    found = {cls.__name__ for cls in (experts, type(method)) if cls is not None}
    if _drops_clamp(layer) and not found & _CLAMPING:
        raise ValueError(
            "DeepSeek V4's experts need a clamp of SwiGLU, which the kernel that this "
            f"vLLM has chosen for them drops ({(experts or type(method)).__name__}); "
            "take --moe-backend marlin, or triton for FP8."
        )


def _after_loading(
    method: "QuantizeMethodBase",
    prepare: Callable[..., None],
) -> None:
    """Let `prepare(method, stock, layer)` run in place of the method's own
    `process_weights_after_loading`, which it is given as `stock`. The method is the
    layer's own, and keeps its class, by whose name vLLM picks a loader."""
    method.process_weights_after_loading = functools.partial(
        prepare, method, method.process_weights_after_loading
    )


def _expand_wo_a(
    method: "QuantizeMethodBase",
    stock: Callable[[torch.nn.Module], None],
    layer: torch.nn.Module,
) -> None:
    """FP8 in blocks goes on to vLLM's grouped product; the others are expanded."""
    if getattr(layer, "weight_block_size", None) is not None:
        stock(layer)
        if layer.weight.dim() != 3:  # what the grouped product of DeepGEMM needs
            raise ValueError(
                "wo_a is FP8 in blocks here, and vLLM's grouped product for it needs "
                "DeepGEMM; do not turn that off."
            )
        return
    parameters = dict(layer.named_parameters(recurse=False))
    widths = getattr(layer, "logical_widths", None)
    weight = dequantise(parameters, widths).to(torch.bfloat16)
    for name in parameters:
        delattr(layer, name)
    # Its method stays, for weights that are loaded anew. Nobody calls the layer.
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    logger.info_once(
        "wo_a has been expanded to BF16: the grouped product runs on FP8 in blocks of "
        "128 or on this."
    )


def _keep_shard_scales(
    method: "QuantizeMethodBase",
    stock: Callable[[torch.nn.Module], None],
    layer: torch.nn.Module,
) -> None:
    """vLLM takes one scale for all tensors of a fused NVFP4 layer, the largest factor
    or divisor, also where they differ; what is left of the others' scales multiplies
    their outputs, which is one more launch."""
    if not (hasattr(layer, "weight_scale_2") or hasattr(layer, "weight_global_scale")):
        return stock(layer)
    scales = nvfp4_shard_scales(dict(layer.named_parameters(recurse=False)))
    taken = scales.max() if hasattr(layer, "weight_scale_2") else scales.min()
    widths = torch.tensor(layer.logical_widths, device=scales.device)
    rest = (scales / taken).repeat_interleave(widths)
    stock(layer)
    # Where weights are loaded anew, the method has the wrapper already, or CUDA graphs
    # were captured without it.
    loaded_before, method.dsv4_loaded = hasattr(method, "dsv4_loaded"), True
    is_wrapped = getattr(method.apply, "func", None) is _apply_rest_of_scale
    if not is_wrapped and (rest == 1).all():
        return
    if not is_wrapped and loaded_before:
        raise ValueError(
            "The tensors of a fused NVFP4 layer have scales that differ, and in the "
            "weights before these they did not; start the server anew with them."
        )
    # Persistent: from new weights vLLM copies no other buffers to the first ones.
    layer.register_buffer("dsv4_rest_of_scale", rest)
    if not is_wrapped:
        method.apply = functools.partial(_apply_rest_of_scale, method.apply)


def _apply_rest_of_scale(
    stock: Callable[..., torch.Tensor],
    layer: torch.nn.Module,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    out = stock(layer, x, None).mul_(layer.dsv4_rest_of_scale)
    return out if bias is None else out + bias


def _prepare_experts(method: "QuantizeMethodBase", layer: torch.nn.Module) -> None:
    """The clamp of SwiGLU reaches the kernels of all formats, and w1 and w3 with scales
    that differ are brought to one."""
    _refuse_unclamped(method, layer)
    limit = layer.dsv4_clamp = layer.swiglu_limit
    make = method.get_fused_moe_quant_config
    method.get_fused_moe_quant_config = lambda layer: _clamped(make(layer), limit)
    _after_loading(method, _share_expert_scales)


def _clamped(
    config: "FusedMoEQuantConfig | None", limit: float | None
) -> "FusedMoEQuantConfig | None":
    if config is None or limit is None or config.gemm1_clamp_limit is not None:
        return config
    config = copy.copy(config)  # some are one for all models
    config.gemm1_clamp_limit = limit
    return config


def _share_expert_scales(
    method: "QuantizeMethodBase",
    stock: Callable[[torch.nn.Module], None],
    layer: torch.nn.Module,
) -> None:
    """vLLM takes w1's scale for w3 too. Where they differ, the larger one is taken and
    the other's block scales are made smaller, rounded to E4M3."""
    for name, inverse in (
        ("w13_weight_scale_2", False),
        ("w13_weight_global_scale", True),
    ):
        stored = getattr(layer, name, None)
        if (
            stored is None
            or stored.dim() != 2
            or torch.equal(stored[:, 0], stored[:, 1])
        ):
            continue
        scales = 1 / stored.data if inverse else stored.data
        taken = scales.amax(1, keepdim=True)
        blocks = layer.w13_weight_scale.data
        split = blocks.float().unflatten(1, (2, -1)) * (scales / taken)[..., None, None]
        blocks.copy_(split.flatten(1, 2).to(blocks.dtype))
        taken = taken.expand_as(scales)
        stored.data.copy_(1 / taken if inverse else taken)
        logger.warning_once(
            "w1 and w3 of experts have scales that differ, and vLLM's kernels take "
            "one: block scales of one of them have been rounded anew."
        )
    stock(layer)


def _log_nvfp4_kernel(method: "QuantizeMethodBase", layer: torch.nn.Module) -> None:
    from vllm.dsv4_overlay.nvfp4_linear import CuTeDSLNvFp4LinearKernel
    from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearKernel

    kernel = getattr(method, "kernel", getattr(layer, "scheme", None))
    kernel = getattr(kernel, "kernel", kernel)
    if isinstance(kernel, NvFp4LinearKernel):
        if isinstance(kernel, CuTeDSLNvFp4LinearKernel):
            reason = (
                "FlashInfer's CuTe DSL product, which vllm-dsv4-overlay has not run on "
                "a GPU yet; VLLM_DISABLED_KERNELS=CuTeDSLNvFp4LinearKernel turns it off"
            )
        else:
            reason = CuTeDSLNvFp4LinearKernel.is_supported()[1] or "as vLLM prefers"
        logger.info_once("NVFP4 linears run on %s: %s.", type(kernel).__name__, reason)
