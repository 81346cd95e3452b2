"""Runs in a process of its own: a vLLM that believes to be on Hopper, with empty modules in place of its compiled
ones, loads its plugins. The first argument is a list of requests, the last line of the output that of the answers,
both JSON. A request has a process to itself, forked from one that has imported what all need, for time.

Works without the plugin too, so it must not import anything of it.
"""

import importlib
import inspect
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
import types
from pathlib import Path

import torch

LIBRARIES = []  # which end with the object
FUNCTIONS = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
OPS = "vllm.v1.attention.ops.flashmla"
FLASHMLA = "vllm.third_party.flashmla.flash_mla_interface"  # comes with the compiled modules
SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse"
INDEXER = "vllm.v1.attention.backends.mla.indexer"
FIRST_V4 = "vllm.model_executor.layers.deepseek_v4_attention"
CALLERS = (
    OPS,
    FLASHMLA,
    SPARSE,
    INDEXER,
    "vllm.v1.attention.backends.mla.flashmla",
    "vllm.models.deepseek_v4.nvidia.flashmla",
    "vllm.models.deepseek_v41.nvidia.flashmla",
    "vllm.models.hy_v4.nvidia.flashmla_sparse",
    FIRST_V4,
)


def stub(name, **names):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(names)


def function(name):
    def stock(*args, **more):
        return "stock"

    # As if that module defined it, for whoever asks.
    return types.FunctionType(stock.__code__, {"__name__": FLASHMLA}, name)


def pretend():
    for name in ("_C", "_C_stable_libtorch", "_moe_C", "_flashmla_C", "_flashmla_extension_C"):
        stub(f"vllm.{name}")
    attention = ("flash_attn_varlen_func", "get_scheduler_metadata", "compile_flash_attn_varlen_func_from_specs")
    stub("vllm.vllm_flash_attn", **dict.fromkeys(attention))
    functions = (*FUNCTIONS, "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
                 "flash_attn_varlen_qkvpacked_func", "get_mla_metadata")  # fmt: skip
    stub(FLASHMLA.rpartition(".")[0])
    stub(FLASHMLA, FlashMLASchedMeta=object, **{key: function(key) for key in functions})
    library = torch.library.Library("_C", "FRAGMENT")
    for name in ("supports_fp8", "supports_block_fp8", "supports_fp4"):
        library.define(f"cutlass_scaled_mm_{name}(int capability) -> bool")
        library.impl(f"cutlass_scaled_mm_{name}", lambda capability: True, "CompositeExplicitAutograd")
    LIBRARIES.append(library)
    import vllm.platforms as platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    NonNvmlCudaPlatform.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    platforms._current_platform = NonNvmlCudaPlatform()


def load(request):
    """The answer to a request, in the process that it is called in."""
    from vllm.plugins import load_general_plugins

    for name in request.get("before", []):
        importlib.import_module(name)
    if OPS in sys.modules:  # whoever else has imported from it
        vars(sys.modules["__main__"]).update({name: getattr(sys.modules[OPS], name) for name in FUNCTIONS})
    load_general_plugins()
    for name in request.get("after", []):
        importlib.import_module(name)
    return answer()


def answer():
    modules = {name: sys.modules[name] for name in ("__main__", *CALLERS) if name in sys.modules}
    return {
        "modules": {
            name: {key: vars(module)[key].__globals__["__name__"] for key in FUNCTIONS if key in vars(module)}
            for name, module in modules.items()
        },
        # Before heads, for which other classes take the place of 0.20.2's and 0.21.0's.
        "prefills": {name: prefills(module) for name, module in modules.items() if prefills(module)},
        "heads": {name: heads(module) for name, module in modules.items() if heads(module)},
        "lengths": lengths(modules[INDEXER]) if INDEXER in modules else None,
        "calls": [getattr(modules[OPS], name)(None, k_cache=None) for name in FUNCTIONS if OPS in modules],
        "imported": sorted(name for name in sys.modules if name.startswith("vllm_dsv4_overlay.")),
        "cuda": torch.cuda.is_initialized(),
    }


def heads(module):
    """What a layer with 16 heads pads them to, by the names of its attributes."""
    if module.__name__ == SPARSE:
        layer = object.__new__(module.FlashMLASparseImpl)
        layer.num_heads = 16
        layer.fp8_decode_padded_heads = layer._compute_fp8_decode_padded_heads(16)
        layer.prefill_padding = 64
        return {name: getattr(layer, name) for name in ("fp8_decode_padded_heads", "prefill_padding")}
    if module.__name__ == FIRST_V4:
        return {"padded_heads": first_v4(module).padded_heads}
    for name in ("DeepseekV4FlashMLAAttention", "DeepseekV4FlashMLASparseImpl"):
        if hasattr(module, name):
            return {"get_padded_num_q_heads": getattr(module, name).get_padded_num_q_heads(16)}
    return {}


def lengths(module):
    """Of three requests with a draft token, the last one padding: what each of their tokens sees."""
    method = module.DeepseekV32IndexerMetadataBuilder._prepare_decode_tensors
    rows = "decode_seq_lens_buffer.dim() == 2" in inspect.getsource(method)  # a request each, up to 0.21.0
    builder = types.SimpleNamespace(
        decode_seq_lens_buffer=torch.zeros((3, 2) if rows else 6, dtype=torch.int32),
        offsets_buffer=torch.arange(2, dtype=torch.int32),
        supports_varlen=False,
        vllm_config=types.SimpleNamespace(speculative_config=None),
    )
    lens, new = torch.tensor([10, 7, 0], dtype=torch.int32), torch.full((3,), 2, dtype=torch.int32)
    found, *_ = method(
        builder, seq_lens=lens, block_table=torch.zeros(3, 1, dtype=torch.int32), decode_lens=new,
        decode_lens_cpu=new, query_start_loc=torch.arange(0, 6, 2), num_decodes=3, num_decode_tokens=6,
        use_native=True, next_n=2, max_decode_len=2,
    )  # fmt: skip
    return found.view(3, 2).tolist()


def prefills(module):
    """What the drop-in is given of two prefills, and who computes them: it takes q, and leaves another to vLLM."""
    names = ("DeepseekV4FlashMLAAttention", "DeepseekV4FlashMLASparseImpl", "DeepseekV4MLAAttention")
    cls = next((vars(module)[name] for name in names if hasattr(module, name)), None)
    if cls is None:
        return []
    given = ("q", "positions", "compressed_k_cache", "swa_k_cache", "output", "attn_metadata", "swa_metadata")
    by_class = isinstance(vars(cls)["_forward_prefill"], classmethod)
    asked = vars(sys.modules.get("vllm_dsv4_overlay.dsv4_overlay.drop_in", module)).get("ASKED", [])
    found = []
    for q in ("q", "left"):
        more = {name: name for name in given} | {"q": q} | ({"layer": "layer"} if by_class else {})
        try:
            cls._forward_prefill(*([] if by_class else ["layer"]), **more)
            who = "drop-in"
        except AttributeError:  # of metadata that is a string
            who = "vLLM"
        found.append([who, *asked])
        asked.clear()
    return found


class Anything:
    """In place of whatever a layer is made of."""

    def __init__(self, *args, **more):
        pass

    def __getattr__(self, name):
        return {"static_forward_context": {}, "o_groups": 8, "qk_rope_head_dim": 64}.get(name, Anything())


def first_v4(module):
    """The outer layer of 0.20.2 and 0.21.0, by its own `__init__`."""
    for name in ("QuantFP8", "RMSNorm", "DeepseekV4SWACache", "DeepseekV4MLAAttention"):
        setattr(module, name, Anything)
    module.get_tensor_model_parallel_world_size = lambda: 1
    torch.cuda.Event = object
    layer = module.DeepseekV4MultiHeadLatentAttentionWrapper
    sizes = dict.fromkeys(inspect.signature(layer).parameters, 1)
    return layer(**sizes | {"num_heads": 16, "prefix": "", "mla_modules": Anything(), "cache_config": Anything()})


def move(tree):
    """Take what is not imported yet from another tree."""
    vllm = sys.modules["vllm"]
    before = str(Path(vllm.__file__).parents[1])
    vllm.__file__ = vllm.__file__.replace(before, tree)
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm")]:
        if hasattr(module, "__path__"):
            module.__path__ = [path.replace(before, tree) for path in module.__path__]


def serve(request):
    """One process of a server: what it was asked is in its environment by then."""
    if "version" in request:
        sys.modules["vllm"].__version__ = request["version"]
    if "tree" in request:
        move(request["tree"])
    if request.get("platform") == "cpu":
        from vllm.platforms.cpu import CpuPlatform

        sys.modules["vllm.platforms"]._current_platform = CpuPlatform()
    result = {"here": load(request)}
    if "worker" in request:
        result["width"] = worker()
    if "start" in request:
        context = multiprocessing.get_context(request["start"])
        queue = context.Queue()
        process = context.Process(target=child, args=(request, queue))
        process.start()
        result["child"] = queue.get(timeout=600)
        process.join()
    return result


def worker():
    """The width of a layer of 16 heads in a process that has its GPU, as far as it is asked about it."""
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.version.cuda = None  # so that no library is loaded, whatever torch this is
    drop_in = sys.modules["vllm_dsv4_overlay.dsv4_overlay.drop_in"]
    drop_in.get_current_vllm_config_or_none = lambda: types.SimpleNamespace(additional_config={})
    return drop_in.padded_heads(16, 64)


def child(request, queue):
    queue.put(load(request))


def forked(request):
    """What `serve` returns, or None, and what it wrote, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        log, found = Path(folder, "log"), Path(folder, "found")
        if (pid := os.fork()) == 0:
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            try:
                os.environ.update(request.get("env", {}))
                sys.path.append(request["site"])
                found.write_text(json.dumps(serve(request)))
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        return json.loads(found.read_text()) if found.exists() else None, log.read_text()


if __name__ in ("__main__", "__mp_main__"):  # the second in a child that is spawned
    pretend()

if __name__ == "__main__":
    import vllm.config  # noqa: F401  (as in a process that loads plugins)
    import vllm.logger
    import vllm.plugins  # noqa: F401

    if hasattr(vllm.logger, "configure_logging"):  # from 0.31.0 on: engine and workers, before plugins
        from vllm.config.logging import LoggingConfig

        vllm.logger.configure_logging(LoggingConfig())
    print("\n" + json.dumps([forked(request) for request in json.loads(sys.argv[1])]))
