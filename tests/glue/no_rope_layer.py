"""Runs in a process of its own: vLLM makes GLM-5.3-Flash's attention layer, with its indexer and caches, for
MLA_KERNELS_SPARSE. The model's folder is the argument. Prints what the layer is and what it keeps of a token."""

import json
import sys
import tempfile
import types

import hopper
import torch
import vllm.models
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.mla.prefill import flash_attn


class Nothing(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()


# The package itself imports the model's vision tower, which needs torchvision.
package = types.ModuleType("vllm.models.glm5next")
package.__path__ = [f"{folder}/glm5next" for folder in vllm.models.__path__]
sys.modules[package.__name__] = package
config = hopper.EngineArgs(
    model=sys.argv[1], skip_tokenizer_init=True, max_model_len=4096, enforce_eager=True, block_size=128,
    attention_backend="MLA_KERNELS_SPARSE",
).create_engine_config()  # fmt: skip
hopper.platforms._current_platform.device_type = "cpu"
flash_attn.flash_attn_varlen_func = print
torch.cuda.Stream = Nothing
from vllm.models.glm5next.common import attention  # noqa: E402

attention.SparseAttnIndexerKpool = Nothing
hf = config.model_config.hf_text_config
with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
    init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/group", 0, "gloo")
    initialize_model_parallel(1)
    layer = attention.Glm5NextMLAAttention(
        config, hf, hf.hidden_size, hf.num_attention_heads, hf.qk_nope_head_dim, hf.qk_rope_head_dim,
        hf.v_head_dim, hf.q_lora_rank, hf.kv_lora_rank, cache_config=config.cache_config, prefix="layer",
        topk_indices_buffer=torch.empty(8, 2176, dtype=torch.int32), skip_rope=True,
    ).mla_attn.mla_attn  # fmt: skip
    spec = layer.attn_backend.customize_spec(layer.get_kv_cache_spec(config))
found = {
    "impl": f"{type(layer.impl).__module__}.{type(layer.impl).__name__}",
    "picks": layer.impl.topk_indices_buffer.shape[1],
    "row": spec.page_size_bytes // spec.block_size,
    "apart": spec.block_stride_alignment,
    "dtype": str(spec.dtype),
}
print("\n" + json.dumps(found))
