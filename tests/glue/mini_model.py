"""For processes in which vLLM's own loader fills a model from a mini checkpoint.

What stands in for the model's experts and its draft's settings, how both are made, and what the checkpoint has.
"""

import types

import hopper  # noqa: F401  (vLLM is imported after it)
import torch
from mini_checkpoint.quantised import E2M1
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

NUMBERS = torch.cat([E2M1, -E2M1])


class Nothing(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()


class Experts(torch.nn.Module):
    """vLLM's own layer chooses kernels when it is made. Here weights are of `dtype`, bytes if two E2M1 numbers
    are in each, and `scale` is the name of their scales, one a `block`."""

    def __init__(self, shape, dtype, scale, scale_dtype, block):
        super().__init__()
        n, wide, h = shape.experts, shape.moe_intermediate, shape.hidden
        for name, rows, columns in (("w13", 2 * wide, h), ("w2", h, wide)):
            weight = torch.zeros(n, rows, columns // 2 if dtype == torch.uint8 else columns).to(dtype)
            scales = torch.zeros(n, rows // block[0], columns // block[1]).to(scale_dtype)
            for kind, value in (("weight", weight), (scale, scales)):
                parameter = torch.nn.Parameter(value, requires_grad=False)
                parameter.weight_loader = self.load
                self.register_parameter(f"{name}_{kind}", parameter)

    def load(self, parameter, weight, name, shard_id, expert_id, return_success):
        place = parameter.data[expert_id]
        if shard_id != "w2":
            half = len(place) // 2
            place = place[:half] if shard_id == "w1" else place[half:]
        assert place.shape == weight.shape and place.dtype == weight.dtype, (name, weight.shape, weight.dtype)
        place.copy_(weight)
        return return_success


class Speculative:
    """A draft of the target's own layers, of some kinds (`use_dspark`, say); whatever else is asked for is off."""

    def __init__(self, config, tokens, *kinds):
        self.num_speculative_tokens, self.kinds = tokens, kinds
        self.draft_model_config = types.SimpleNamespace(hf_config=config.model_config.hf_config)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda: True) if name in self.kinds else False


def made(config, folder):
    """The model, of one process, which meets itself in `folder`."""
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        initialize_model_parallel(1)
        return initialize_model(config)


def draft(config, model, tokens, *kinds):
    """The draft's model, made as vLLM does: with the same layers and the target's configuration."""
    config.speculative_config = Speculative(config, tokens, *kinds)
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        return model(vllm_config=config)


def left_out(model, config, heads):
    """Parameters that its loader does not fill, in whole or in part, from the checkpoint: all their bytes are 255
    before. Not those of images that a server of text has no memory for."""
    for parameter in model.parameters():
        parameter.data.view(torch.uint8).fill_(255)
    loader = get_model_loader(config.load_config)
    names, found = model.load_weights(loader.get_all_weights(config.model_config, model)), []
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        part = parameter[:heads] if name.endswith("attn_sink") else parameter  # padded
        rows = part.contiguous().view(torch.uint8).view(*part.shape, -1).flatten(-2)
        if name not in names or (rows == 255).all(-1).any():
            found.append(name)
    return found


def dense(values, scale):
    """Values as float32; scales are float32, or bytes of UE8M0, of blocks of 128, 32 or 1."""
    if values.dtype == torch.uint8:
        values = NUMBERS[torch.stack([values & 15, values >> 4], -1).flatten(-2).long()]
    if scale is None:
        return values.float()
    if scale.dtype != torch.float32:
        scale = torch.exp2(scale.view(torch.uint8).float() - 127)
    for dim, (size, blocks) in enumerate(zip(values.shape, scale.shape, strict=True)):
        block = next(b for b in (128, 32, 1) if -(-size // b) == blocks)
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return values.float() * scale


def drawn(recipe, name):
    """What the checkpoint has under a module's name."""
    entry = next(e for _, shard in recipe.shards() for e in shard if e.name == f"{name}.weight")
    stored = recipe.layout.store(*entry[:2], entry.make(entry.name))
    return dense(stored[f"{name}.weight"], stored.get(f"{name}.{recipe.layout.scale}"))


def differs(have, recipe, sources):
    """Whether a module has other values than these modules of the checkpoint, one after another."""
    return not torch.equal(have, torch.cat([drawn(recipe, source) for source in sources]))
