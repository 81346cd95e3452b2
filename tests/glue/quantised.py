"""Runs in a process of its own: vLLM's real DeepSeek V4 and its next-token layers, on the CPU, with the weights of
small checkpoints in quantised layouts.

Reads a JSON object from standard input, of folders by name, beside which may be a folder NAME-bf16 with the values
that the weights stand for; writes a JSON object of what came of each. CAPABILITY is as in hopper.py. Kernels are
chosen, as for that GPU, and none runs: layers are looked at as they are when their weights have been loaded.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import sys
import tempfile
import types
from pathlib import Path
from unittest.mock import MagicMock

import hopper
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from rounded_inputs import Rounding  # noqa: E402
from safetensors import safe_open


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """In place of the packages `humming`, which vLLM asks whether a checkpoint is its, and `tilelang`, which it
    imports with the model up to 0.21.0."""

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("humming", "tilelang"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: None if name.startswith("__") else MagicMock()
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(StandIn())
torch.cuda.Stream = type("Stream", (), {})
hopper.NonNvmlCudaPlatform.device_type = "cpu"
hopper.NonNvmlCudaPlatform.num_compute_units = classmethod(lambda cls, device_id=0: 132)

import vllm.model_executor.layers.quantization.utils.nvfp4_utils as nvfp4_utils  # noqa: E402
import vllm.model_executor.layers.sparse_attn_indexer as indexer  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.dsv4_overlay import quantised_linears  # noqa: E402
from vllm.dsv4_overlay.weight_formats import dequantise  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.kernels.linear import _POSSIBLE_NVFP4_KERNELS  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.platforms import PlatformEnum  # noqa: E402

try:
    from vllm.models.deepseek_v4.nvidia.mtp import DeepSeekV4MTP
except ImportError:  # up to 0.21.0
    from vllm.model_executor.models.deepseek_v4_mtp import DeepSeekV4MTP

GPTQ = ("auto_gptq", "gptq_marlin")  # the latter up to 0.21.0
for name in ("compressed_tensors.compressed_tensors", "modelopt", "inc", *GPTQ, "moe_wna16", "fp8", "mxfp4"):
    if importlib.util.find_spec(name := f"vllm.model_executor.layers.quantization.{name}"):
        importlib.import_module(name)
operators = torch._ops._OpNamespace.__getattr__


def compiled(self, name):
    """vLLM's compiled operators are not there; layers name them when they are made."""
    try:
        return operators(self, name)
    except AttributeError:
        if name.startswith("__"):
            raise
        return MagicMock()


torch._ops._OpNamespace.__getattr__ = compiled  # after imports, which ask what is there
indexer.has_deep_gemm = lambda: True
nvfp4_utils.cutlass_scaled_mm_supports_fp4 = lambda capability: capability >= 100


class Log(logging.Handler):
    lines: list[str] = []

    def emit(self, record):
        Log.lines.append(record.getMessage())


LOG = Log()


def tensors(folder):
    files = json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
    for file in sorted(set(files.values())):
        with safe_open(Path(folder) / file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118  (not a dict)
                yield name, weights.get_tensor(name)


def expected(reference, modules):
    return torch.cat([reference[f"{module}.weight"].float() for module in modules])


def expert(layer, part, widths):
    """The weight of the first expert's `part`."""
    found = {}
    for name, value in layer.named_parameters(recurse=False):
        if name.startswith(part):
            found[name.removeprefix(part)] = value.data[0]
    packed = found.get("weight_packed")
    if packed is not None and packed.dtype == torch.int32 and packed.shape[0] != found["weight_scale"].shape[0]:
        # Transposed, for Marlin
        found = {"qweight": found["weight_packed"], "scales": found["weight_scale"]}
    return found["weight"].float() if set(found) == {"weight"} else dequantise(found, widths)


def activation_of(kernel, layer):
    """SwiGLU of 20 and 30, and of 1 and -30, by this kernel of the experts."""
    experts, out = object.__new__(kernel), torch.empty(2, 1)
    experts.quant_config = layer.quant_method.get_fused_moe_quant_config(layer)
    with torch.compiler.set_stance("force_eager"):
        experts.activation(layer.activation, out, torch.tensor([[20.0, 30.0], [1.0, -30.0]]))
    return out.flatten().tolist()


def error_of(weight, reference):
    """The largest difference of any value, over the largest value."""
    return float((weight - reference).abs().max() / reference.abs().max())


def look(name, layer, layers, reference):
    """What a layer is, and how far its weight is from the values that the checkpoint stands for."""
    path = name.replace(".mla_attn.", ".").replace(".mtp_block.", ".").removesuffix(".routed_experts")
    result = {"method": type(layer.quant_method).__name__, "scheme": type(getattr(layer, "scheme", None)).__name__}
    if path.endswith((".e_proj", ".h_proj")):
        modules = [f"mtp.0.{path.rpartition('.')[2]}"]
    else:
        modules = quantised_linears.checkpoint_modules(path, layers)
    if path.endswith(".experts"):
        try:
            limit = layer.quant_method.get_fused_moe_quant_config(layer).gemm1_clamp_limit
        except AttributeError:
            limit = "later"
        result["clamp"] = [limit, getattr(layer, "dsv4_clamp", None)]
        kernel = getattr(layer.quant_method, "experts_cls", None)
        result["kernel"] = getattr(kernel, "__name__", None)
        if result["kernel"] == "TritonExperts" and not hasattr(layer.moe_config, "swiglu_limit"):  # up to 0.21.0
            result["activation"] = activation_of(kernel, layer)
    if reference is None:
        return result
    if path.endswith(".experts"):
        w1, w2, w3 = modules
        i = expected(reference, [w1]).shape[0]
        errors = [
            error_of(expert(layer, "w13_", [i, i]), expected(reference, [w1, w3])),
            error_of(expert(layer, "w2_", [1]), expected(reference, [w2])),
        ]
        return result | {"error": max(errors)}
    parameters = dict(layer.named_parameters(recurse=False))
    if set(parameters) == {"weight"}:
        weight = parameters["weight"].float()
    else:
        weight = dequantise(parameters, getattr(layer, "logical_widths", None))
    result["error"] = error_of(weight, expected(reference, modules))
    if path.endswith(".wo_a") and getattr(layer, "weight_block_size", None) is None:
        layer.quant_method.process_weights_after_loading(layer)
        result |= {"after": error_of(layer.weight.float(), expected(reference, modules))}
        result |= {"dtype": str(layer.weight.dtype), "parameters": sorted(dict(layer.named_parameters()))}
    return result


def spread(layer):
    """The standard deviation of a weight times the root of its inputs, which is one in the seeded weights."""
    parameters = dict(layer.named_parameters(recurse=False))
    if set(parameters) == {"weight"}:
        weight = parameters["weight"].float()
    else:
        weight = dequantise(parameters, getattr(layer, "logical_widths", None))
    return float(weight.std() * weight.shape[1] ** 0.5)


def run(folder):
    Log.lines.clear()
    has_weights = any(Path(folder).glob("*.safetensors"))
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        block_size=256,
        max_model_len=4096,
        kv_cache_dtype="fp8",
        enforce_eager=True,
        load_format="auto" if has_weights else "dummy",
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    ).create_engine_config()
    logging.getLogger("vllm").addHandler(LOG)  # vLLM has configured its log by now, which removes handlers
    reference = Path(f"{folder}-bf16")
    reference = dict(tensors(reference)) if reference.is_dir() else None
    layers = config.model_config.hf_config.num_hidden_layers
    rounding = Rounding(Path(folder)) if reference else None
    result = {"layers": {}, "unloaded": []}
    for model_class in (None, DeepSeekV4MTP):
        with set_current_vllm_config(config):
            config.compilation_config.static_forward_context.clear()
            model = initialize_model(vllm_config=config, model_class=model_class)
            if not has_weights:
                import seeded_weights  # registers a loader in place of vLLM's

                get_model_loader(config.load_config).load_weights(model, config.model_config)
                named = [(name.replace(".mla_attn.", "."), layer) for name, layer in model.named_modules()]
                projections = [pair for pair in named if pair[0].rpartition(".")[2] in seeded_weights.PROJECTIONS]
                result["seeded"] = {name: spread(layer) for name, layer in projections}
                break
            loaded = model.load_weights(tensors(folder))
        result["unloaded"] += sorted(set(dict(model.named_parameters())) - loaded)
        for name, layer in model.named_modules():
            if hasattr(layer, "quant_method") and ".layers." in name and not name.endswith((".gate", ".head")):
                # By the same names in all releases.
                shown = name.replace(".mla_attn.", ".").removesuffix(".routed_experts")
                result["layers"][shown] = look(name, layer, layers, reference)
                if rounding:
                    x = torch.ones(1, 128)
                    result["layers"][shown]["rounded"] = rounding.input_of(layer, x) is not x
    result["missed"] = rounding.missed() if rounding else None
    result["adapted"] = hasattr(config.quant_config, "dsv4_checkpoint")
    result["kernels"] = [kernel.__name__ for kernel in _POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA]]
    return result | {"log": list(Log.lines)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.set_default_dtype(torch.bfloat16)
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        with set_current_vllm_config(VllmConfig()):
            parallel_state.ensure_model_parallel_initialized(1, 1)
        answers = {}
        for name, path in json.load(sys.stdin).items():
            try:
                answers[name] = run(path)
            except Exception as error:
                answers[name] = {"error": f"{type(error).__name__}: {error}"}
        print("\n" + json.dumps(answers))
