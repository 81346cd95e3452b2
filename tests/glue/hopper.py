"""Runs in a process of its own: real vLLM configurations and layers as on a machine with an H200.

CAPABILITY in the environment is the GPU's. Reads a JSON list from standard input, of command lines or of arguments
of `EngineArgs`, and writes a JSON list of what came of each. Arguments may have `pickle`, a file for the
configuration as a worker's process gets it; a file's name in the list is such a worker, which makes the layers.
Works on the pristine tree too, so it must not import anything of the overlay.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch

# What the CUDA platform imports, and asks, before any kernel runs.
for name in ("_C", "_C_stable_libtorch", "_moe_C"):
    sys.modules[f"vllm.{name}"] = types.ModuleType(name)
flash_attn = types.ModuleType("vllm_flash_attn")
for name in ("flash_attn_varlen_func", "get_scheduler_metadata", "compile_flash_attn_varlen_func_from_specs"):
    setattr(flash_attn, name, None)
flash_attn.is_fa_version_supported = lambda version: True
for name in ("vllm_flash_attn", "vllm_flash_attn.flash_attn_interface"):
    sys.modules[f"vllm.{name}"] = flash_attn
# It takes memory of a GPU when it is imported, and serves dense MLA only.
sys.modules["vllm.v1.attention.backends.mla.cutlass_mla"] = None
library = torch.library.Library("_C", "FRAGMENT")
for name in ("supports_fp8", "supports_block_fp8", "supports_fp4"):
    library.define(f"cutlass_scaled_mm_{name}(int capability) -> bool")
    library.impl(f"cutlass_scaled_mm_{name}", lambda capability: True, "CompositeExplicitAutograd")
torch.cuda.Event = object

import vllm.device_allocator.cumem as cumem  # noqa: E402
import vllm.platforms as platforms  # noqa: E402
from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402

CAPABILITY = DeviceCapability(*map(int, os.environ["CAPABILITY"].split(".")))
NonNvmlCudaPlatform.get_device_capability = classmethod(lambda cls, device_id=0: CAPABILITY)
NonNvmlCudaPlatform.get_device_total_memory = classmethod(lambda cls, device_id=0: 141 << 30)
NonNvmlCudaPlatform.get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H200")
platforms._current_platform = NonNvmlCudaPlatform()
cumem.cumem_available = True  # what sleep mode needs; in an extension of CUDA's

import vllm.model_executor.models.registry as models  # noqa: E402


def model_info(model):
    """What vLLM would find out by importing the model, which needs its compiled kernels."""
    info = {field.name: False for field in dataclasses.fields(models._ModelInfo)}
    info |= {"architecture": model.class_name, "is_text_generation_model": True, "attn_type": "decoder"}
    info["supports_pp"] = True
    info |= {"default_seq_pooling_type": "LAST", "default_tok_pooling_type": "ALL", "score_type": "bi-encoder"}
    return models._ModelInfo(**info)


models._LazyRegisteredModel.inspect_model_cls = model_info

from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402
from vllm.v1.attention import selector  # noqa: E402

try:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # 0.33.0
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups


class Projection(torch.nn.Module):
    """In place of a linear layer or a norm, which need a distributed group and weights."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        self.weight = torch.empty(0)


class CuteDSL(types.ModuleType):
    """In place of vLLM's kernels of CuTe DSL, which is not there: whatever is asked for can be warmed up."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

        kernel = type(name, (), {"__module__": self.__name__})()
        kernel.register_warmup = lambda *args, **kwargs: JitWarmupRegistry.register(kernel, *args, **kwargs)
        return kernel


CUTEDSL = CuteDSL("vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl")


def whole_layers(config, attention, compressor):
    """The attention layers of the model, and of its next-token layers, of the class that the model chooses."""
    from vllm.models.deepseek_v4.nvidia import flashinfer_sparse, flashmla, model

    for module in (attention, compressor):
        for name in ("MergedColumnParallelLinear", "ColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear",
                     "RMSNorm", "SparseAttnIndexer"):  # fmt: skip
            setattr(module, name, Projection)
    sys.modules[CUTEDSL.__name__] = CUTEDSL
    compressor.current_platform.device_type = "cpu"
    attention.get_tensor_model_parallel_world_size = lambda: 4
    attention.build_deepseek_v4_rope = lambda *args, **kwargs: None
    flashmla.compute_fp8_einsum_recipe = flashinfer_sparse.compute_fp8_einsum_recipe = lambda: (None, None)
    layer = model._select_dsv4_attn_cls(config)
    numbers = range(config.model_config.hf_config.num_hidden_layers)
    try:
        from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
    except ImportError:  # up to 0.28.0 nothing registers
        warm_up = contextlib.nullcontext()
    else:
        config.warmed_up = JitWarmupRegistry(config)
        warm_up = config.warmed_up.activate()
    with warm_up:
        return [layer(config, f"model.layers.{number}.attn") for number in numbers]


def build_layers(config):
    """The attention and cache layers of the model, constructed as its wrapper does, without projections."""
    try:
        from vllm.models.deepseek_v4 import attention, compressor
    except ModuleNotFoundError:  # up to 0.21.0
        import vllm.model_executor.layers.deepseek_compressor as compressor
        import vllm.model_executor.layers.deepseek_v4_attention as attention

    if hasattr(attention, "DeepseekV4Attention"):  # from 0.23.0 on
        return whole_layers(config, attention, compressor)
    # Only there since the overlay; the pristine wrapper uses DeepseekV4SWACache.
    swa_cache_class = getattr(attention, "swa_cache_class", lambda cache: attention.DeepseekV4SWACache)
    cache = config.cache_config
    hf = config.model_config.hf_config
    layers = []
    for number, ratio in enumerate(hf.compress_ratios[: hf.num_hidden_layers]):
        ratio, prefix = max(1, ratio), f"model.layers.{number}.attn"
        window = swa_cache_class(cache)(512, 128, torch.uint8, f"{prefix}.swa_cache", cache)
        layers.append(
            attention.DeepseekV4MLAAttention(
                16, 512, 512**-0.5, 448, 64, 1024, None, ratio, 128, 584, window, torch.zeros(64), cache,
                prefix=prefix,
            )
        )  # fmt: skip
        if ratio > 1:
            state_dim = 4 * 512 if ratio == 4 else 2 * 512
            compressor.CompressorStateCache(state_dim, torch.float32, ratio, f"{prefix}.compressor.state_cache")
        if ratio == 4:
            attention.DeepseekV4IndexerCache(132, torch.uint8, f"{prefix}.indexer.k_cache", cache, 4)
            compressor.CompressorStateCache(4 * 128, torch.float32, 4, f"{prefix}.indexer.compressor.state_cache")
    return layers


def stores_of(layers):
    """The modules of what the layers' compressors write rows with; in 0.33.0, elsewhere none."""
    compressors = [getattr(layer, "compressor", None) for layer in layers]
    stores = [getattr(compressor, "_compress_norm_rope_store", None) for compressor in compressors]
    return sorted({getattr(store, "func", store).__module__ for store in stores if store})


def describe_layers(config):
    with set_current_vllm_config(config):
        layers = build_layers(config)
    registry = vars(config).pop("warmed_up", None)
    context = config.compilation_config.static_forward_context
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in context.items()}
    specs = {name: spec for name, spec in specs.items() if spec is not None}
    before = {name: repr(spec) for name, spec in specs.items()}
    packed = hasattr(config.cache_config, "kv_cache_layout")  # 0.33.0
    if packed:
        config.cache_config.kv_cache_layout = "BLHNC"  # the first that DeepseekV4IndexerBackend has
    groups = get_kv_cache_groups(config, specs)
    plan = get_kv_cache_config_from_groups(config, groups, 8 << 30)
    shapes = {}
    for name, spec in specs.items():
        if packed:
            shape = [1, spec.num_states, spec.state_content_size_bytes // spec.dtype.itemsize]
        else:
            shape = context[name].get_attn_backend().get_kv_cache_shape(
                1, spec.storage_block_size, 1, spec.head_size, config.cache_config.cache_dtype
            )
        shapes[name] = [list(shape), str(spec.dtype)]
    tensors = [vars(tensor) if packed else [tensor.size, tensor.shared_by] for tensor in plan.kv_cache_tensors]
    return {
        "backend": layers[0].get_attn_backend().__name__,
        "padded_heads": layers[0].padded_heads,
        "kv_scales": [
            getattr(layer, "kv_scale", None) or getattr(layer, "_flashinfer_fp8_bmm2_scale", None)
            for layer in layers
        ],
        "warmed_up": sorted(type(kernel).__name__ for kernel in registry._registrations) if registry else [],
        "compressors": stores_of(layers),
        "ours": sum(hasattr(layer, "kv_scale") for layer in layers),
        "heads": [getattr(layer, "num_heads", None) for layer in layers if hasattr(layer, "kv_scale")],
        "specs": before,
        "pages": {name: spec.page_size_bytes for name, spec in specs.items()},
        "shapes": shapes,
        "groups": [group.layer_names for group in groups],
        "tensors": tensors,
        "num_blocks": plan.num_blocks,
    }


def selected(config):
    """The class that vLLM's selector takes for a layer of MLA other than DeepSeek V4's, or why it takes none."""
    model, cache = config.model_config, config.cache_config
    selector._cached_get_attn_backend.cache_clear()  # another model may have asked alike
    try:
        with set_current_vllm_config(config):
            backend = selector.get_attn_backend(
                model.get_head_size(), model.dtype, cache.cache_dtype, use_mla=True,
                use_sparse=hasattr(model.hf_text_config, "index_topk"),
                num_heads=model.get_num_attention_heads(config.parallel_config),
            )  # fmt: skip
    except ValueError as error:
        return str(error)
    return f"{backend.__module__}.{backend.__qualname__}"


def run(arguments):
    if isinstance(arguments, str):
        try:
            return describe(pickle.loads(Path(arguments).read_bytes()))
        except (AttributeError, ValueError) as error:  # Python 3.11.2 has the first for a name that an enum lacks
            return {"error": str(error)}
    file = None
    if isinstance(arguments, dict):
        file = arguments.pop("pickle", None)
        engine_args = EngineArgs(**arguments)
    else:
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        arguments += ["--skip-tokenizer-init", "--block-size=256", "--max-model-len=4096"]
        engine_args = EngineArgs.from_cli_args(parser.parse_args(arguments))
    try:
        config = engine_args.create_engine_config()
    except ValueError as error:
        return {"error": str(error)}
    config.instance_id = ""  # random
    if file:
        Path(file).write_bytes(ForkingPickler.dumps(config))
    return describe(config)


def describe(config):
    backend = config.attention_config.backend
    result = {
        "cache_dtype": config.cache_config.cache_dtype,
        "backend": backend.name if backend else None,
        "config": repr(config),
        # Without compilation it would ask for vLLM's compiled kernels.
        "hash": config.compute_hash() if config.compilation_config.mode else None,
        "cuda_initialized": torch.cuda.is_initialized(),
        "graphs": config.compilation_config.cudagraph_mode.name,
    }
    if config.model_config.architecture == "DeepseekV4ForCausalLM":
        result["layers"] = describe_layers(config)
    elif config.model_config.use_mla:
        result["selected"] = selected(config)
    return result


if __name__ == "__main__":
    answers = [run(arguments) for arguments in json.load(sys.stdin)]
    print("\n" + json.dumps(answers))
