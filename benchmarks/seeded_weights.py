"""Dummy weights by which index scores differ, for `--load-format dummy`; vLLM's own are near zero (before 0.33.0).

With those every index score is the same, which is the worst case of vLLM's top-k: 3206 us a layer of 8192 tokens
where distinct scores take 84 (H200). Here the weights that decide queries, keys and index scores get the size that
they have in a trained model: embeddings, norms, and the projections of attention, compressors and indexers. MXFP4
and NVFP4 experts, whose bytes vLLM leaves as the memory had them, get random values of a like size. All else stays
as vLLM fills it. A tensor is drawn by a seed of its name, so every start, and every rank, has the same.

A worker of vLLM imports this as `worker_extension_cls` before it loads the model; this folder is on PYTHONPATH:

    vllm serve … --load-format dummy --worker-extension-cls seeded_weights.SeededWeights
"""

from __future__ import annotations

import hashlib
import math

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

# Kinds of weights that index scores come from, by their names: those of every model, of V4, and of V3.2 and GLM-5.
KINDS = ("wq_b", "weights_proj", "indexer", "norm", "embed_tokens")
V4, V32 = ("fused_wqa_wkv", "fused_wkv_wgate", "ape"), ("fused_qkv_a_proj", "wk_weights_proj")
PROJECTIONS = {"wq_b", "weights_proj", *V4[:2], *V32}
FP8_STD = 16.0  # of E4M3 values; their scale makes up for it
# Of random bits as two E2M1 numbers a byte, or as 4-bit integers from -8 on.
E2M1_STD, INT4_STD = 2.93, 4.61
EXPERT_SCALE = 127 - 8  # the byte of 2^-8; random FP4 values have a standard deviation of 2.9
# The same of NVFP4 experts, whose blocks have a scale of 1: ModelOpt's multiplier, compressed-tensors' divisor.
# vLLM's dummy weights have a divisor so near zero that weights are infinite.
NVFP4_EXPERTS = {
    "weight_scale_2": 2.0**-8, "weight_global_scale": 2.0**8, "input_scale": 1.0, "input_global_scale": 1.0,
}  # fmt: skip


def generator(name: str, device: torch.device) -> torch.Generator:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    return torch.Generator(device).manual_seed(seed)


def fill_four_bits(name: str, module: torch.nn.Module, tensor: torch.Tensor, std: float) -> None:
    """NVFP4 as ModelOpt has it, or integers in GPTQ's packing."""
    tensor.view(torch.uint8).random_(0, 256, generator=generator(name, tensor.device))
    if hasattr(module, "qzeros"):
        module.qzeros.data.fill_(0x77777777)  # 8, stored as one less
        module.scales.data.fill_(std / INT4_STD)
    else:
        module.weight_scale.data.copy_(torch.ones(module.weight_scale.shape))
        module.weight_scale_2.data.fill_(std / E2M1_STD)


@torch.no_grad()
def seed_weights(model: torch.nn.Module) -> list[str]:
    """Fill the weights named above, in place, as they are before vLLM processes them. Returns their names.

    Raises RuntimeError if a model has none of some kind: then the names are not those of DeepSeek V4 or V3.2.
    DSpark's draft, which is a model of its own, has no indexer.
    """
    done: list[str] = []

    def normal(name: str, tensor: torch.Tensor, std: float, mean: float = 0.0) -> None:
        values = tensor if tensor.dtype.itemsize > 1 else torch.empty(tensor.shape, device=tensor.device)
        values.normal_(mean, std, generator=generator(name, tensor.device))
        tensor.copy_(values)  # E4M3 has no normal_
        done.append(name)

    for path, module in model.named_modules():
        last = path.rsplit(".", 1)[-1]
        for key, parameter in module.named_parameters(recurse=False):
            name, tensor = f"{path}.{key}", parameter.data
            if last in PROJECTIONS and key in ("weight", "qweight"):
                std = 1 / math.sqrt(getattr(module, "input_size_per_partition", module.input_size))
                if not tensor.is_floating_point():
                    fill_four_bits(name, module, tensor, std)
                    done.append(name)
                    continue
                if tensor.dtype.itemsize == 1:
                    scale = getattr(module, "weight_scale_inv", None)
                    scale = module.weight_scale if scale is None else scale
                    scale.data.copy_(torch.full(scale.shape, 2.0 ** round(math.log2(std / FP8_STD))))
                    std = FP8_STD
                normal(name, tensor, std)
            elif key == "weight" and last.endswith("norm"):
                normal(name, tensor, 0.15, mean=1.0)
            elif key == "weight" and last == "embed_tokens":
                normal(name, tensor, 1.0)
            elif key == "ape":
                normal(name, tensor, 0.5)
            elif key.startswith(("w13_", "w2_")):
                what = key.partition("_")[2]
                if tensor.dtype == torch.uint8 and what in ("weight", "weight_packed"):
                    tensor.random_(0, 256, generator=generator(name, tensor.device))
                elif tensor.dtype == torch.uint8 and what == "weight_scale":
                    tensor.fill_(EXPERT_SCALE)
                elif tensor.dtype == torch.float8_e4m3fn and what == "weight_scale":
                    tensor.copy_(torch.ones(tensor.shape))
                elif what in NVFP4_EXPERTS:
                    tensor.fill_(NVFP4_EXPERTS[what])
    if type(model).__name__.startswith("DSpark"):
        return done
    for kind in (*KINDS, *(V32 if any(V32[0] in name for name in done) else V4)):
        if not any(kind in name for name in done):
            raise RuntimeError(f"the model has no weights named {kind}, so index scores would be equal")
    return done


@register_model_loader("dummy")
class SeededDummyLoader(DummyModelLoader):
    """vLLM's dummy loader, and `seed_weights` after it."""

    def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
        super().load_weights(model, model_config)
        seed_weights(model)


class SeededWeights:
    """Nothing but a name that vLLM can import (`worker_extension_cls`)."""
