# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""Measure the scales of the FP8 cache by running prompts through the model on the BF16
cache.

    python -m vllm.dsv4_overlay.calibrate --model DIR --prompts prompts.txt \\
        --output scales.safetensors
    vllm serve DIR --attention-backend FLASHINFER_MLA_SPARSE_DSV4 \\
        --kv-cache-dtype fp8 \\
        --additional-config '{"dsv4_scales": "scales.safetensors"}'

Takes vLLM's engine options too (--tensor-parallel-size, --speculative-config, …); the
cache dtype and the backend are fixed. Prompts are the lines of a text file, or of a
.jsonl file: {"prompt": "text" or [token ids]}. Each layer gets the power of two that is
at least HEADROOM times its largest value over E4M3's largest, 448.
"""

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
import vllm
from safetensors.torch import save_file
from vllm.dsv4_overlay import attention
from vllm.dsv4_overlay.config import vllm_serves_itself
from vllm.dsv4_overlay.scales import layer_prefix
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

# Other text may reach further than the prompts did. E4M3 is floating point: room at the
# top costs nothing until values 2^14 times smaller than the largest one matter, and a
# power of two rounds as 1.0 would.
HEADROOM = 2.0
E4M3_MAX = 448.0


class AmaxObserver:
    """Methods that vLLM adds to its workers (`worker_extension_cls`): largest |kv| and
    |q| that each layer saw.

    Read where attention is called: q is normed and rotated by then, and the new rows,
    rotated, are in the caches.
    """

    def dsv4_observe(self) -> None:
        self.dsv4_amax = {
            extract_layer_index(layer.prefix): torch.zeros(
                2, device=layer.attn_sink.device
            )
            for layer in attention.layers(self.vllm_config)
        }
        forward = attention.forward

        def observed(
            layer: torch.nn.Module, q: torch.Tensor, output: torch.Tensor
        ) -> None:
            observe(layer, q, self.dsv4_amax[extract_layer_index(layer.prefix)])
            forward(layer, q, output)

        attention.forward = observed  # what the layers of every release call

    def dsv4_observed(self) -> dict[str, list[float]]:
        """[kv, q] by the layer's number, which is text so that vLLM can send it."""
        return {str(layer): amax.tolist() for layer, amax in self.dsv4_amax.items()}


def observe(layer: torch.nn.Module, q: torch.Tensor, amax: torch.Tensor) -> None:
    """Raise `amax` [kv, q], float32, to what the tokens of this step hold; NaN stays.
    No host synchronisation."""
    metadata = get_forward_context().attn_metadata
    if metadata is None:  # memory profiling
        return
    slots = metadata[layer.swa_cache_layer.prefix].slot_mapping
    kv = largest(layer.swa_cache_layer.kv_cache, slots)
    if layer.compress_ratio > 1:  # the slot is -1 where a token ends no window
        kv = torch.maximum(
            kv, largest(layer.kv_cache, metadata[layer.prefix].slot_mapping)
        )
    queries = q[: len(slots)].float().abs().amax((1, 2)).where(slots >= 0, 0).amax()
    amax.copy_(torch.maximum(amax, torch.stack((kv, queries))))


def largest(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Largest magnitude in these rows of a `[blocks, rows, 512]` cache; a negative slot
    has none."""
    row = slots.clamp(min=0)
    values = cache[row // cache.shape[1], row % cache.shape[1]].float().abs().amax(1)
    return values.where(slots >= 0, 0).amax()


def scale(amax: float) -> float:
    """The scale of values up to `amax`."""
    return 2.0 ** math.ceil(math.log2(HEADROOM * amax / E4M3_MAX))


def merge(workers: list[dict[str, list[float]]]) -> dict[int, list[float]]:
    """Tensor-parallel ranks have heads of their own, pipeline ranks layers of their
    own.

    Raises ValueError where a layer saw nothing, or something that is not finite.
    """
    merged: dict[int, list[float]] = {}
    for worker in workers:
        for layer, amax in worker.items():
            # torch's maximum keeps NaN, Python's may not.
            both = torch.tensor(
                [amax, merged.get(int(layer), amax)], dtype=torch.float64
            )
            merged[int(layer)] = both.amax(0).tolist()
    for layer, amax in merged.items():
        if not all(0 < value < math.inf for value in amax):
            raise ValueError(
                f"Layer {layer} saw a largest |kv| and |q| of {amax}, which gives no "
                "scale."
            )
    if not merged:
        raise ValueError(
            "The model has no layer on the full-width cache of DeepSeek V4."
        )
    return dict(sorted(merged.items()))


def write(
    path: Path, amax: dict[int, list[float]], main_layers: int, metadata: dict[str, Any]
) -> None:
    """Write the scales that follow from {layer: [kv, q]}, or nothing."""
    tensors = {}
    for layer, values in amax.items():
        for kind, value in zip("kq", values, strict=True):
            tensors[f"{layer_prefix(layer, main_layers)}.{kind}_scale"] = torch.tensor(
                [scale(value)]
            )
    partial = path.with_name(f".{path.name}.partial")
    metadata = metadata | {
        "amax": {
            layer_prefix(layer, main_layers): values for layer, values in amax.items()
        }
    }
    save_file(
        tensors, partial, {key: json.dumps(value) for key, value in metadata.items()}
    )
    os.replace(partial, path)


def read_prompts(path: Path) -> list[Any]:
    """Prompts as `LLM.generate` takes them. Raises ValueError, in one sentence, where a
    line is none."""
    prompts: list[Any] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"] if path.suffix == ".jsonl" else line
        except (ValueError, KeyError, TypeError):
            prompt = None
        if isinstance(prompt, list) and prompt and all(type(x) is int for x in prompt):
            prompt = {"prompt_token_ids": prompt}
        elif not isinstance(prompt, str):
            raise ValueError(
                f'{path}:{number} is not {{"prompt": …}} with text or token ids.'
            )
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompt.")
    return prompts


def main(argv: list[str] | None = None) -> int:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if not current_platform.device_type:  # without which vLLM cannot list its options
        raise SystemExit(
            "vLLM finds no GPU here; calibrate on the machine that serves the model."
        )
    parser = FlexibleArgumentParser(
        prog="python -m vllm.dsv4_overlay.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        help="text file, a prompt a line, or .jsonl",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="the scales, safetensors"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=64, help="tokens to generate for each prompt"
    )
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(block_size=256)
    options = vars(parser.parse_args(argv))
    prompt_file, output, tokens = (
        options.pop(name) for name in ("prompts", "output", "max_tokens")
    )
    try:
        prompts = read_prompts(prompt_file)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if vllm_serves_itself():
        parser.error(
            "on this GPU the layers are vLLM's own, which cannot be watched; "
            "calibrate on Hopper."
        )
    if not os.access(output.parent, os.W_OK):
        parser.error(f"{output.parent} is no folder that can be written to.")
    if output.is_dir():  # before prompts are run for nothing
        parser.error(f"{output} is a folder; name a file.")
    options |= dict(
        kv_cache_dtype="bfloat16",
        attention_backend="FLASHINFER_MLA_SPARSE_DSV4",
        enforce_eager=True,  # a captured graph would skip the observer
        enable_prefix_caching=False,
        worker_extension_cls=f"{__spec__.name}.{AmaxObserver.__name__}",
    )
    llm = vllm.LLM(**options)
    llm.collective_rpc("dsv4_observe")
    text = not options.get("skip_tokenizer_init")
    llm.generate(
        prompts,
        vllm.SamplingParams(temperature=0.0, max_tokens=tokens, detokenize=text),
    )
    config = llm.llm_engine.vllm_config.model_config
    main_layers = config.hf_config.num_hidden_layers
    try:
        amax = merge(llm.collective_rpc("dsv4_observed"))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    write(
        output,
        amax,
        main_layers,
        {"model": config.model, "prompts": len(prompts), "vllm": vllm.__version__},
    )
    print(
        f"{'layer':16s} {'amax kv':>10s} {'scale':>10s} {'amax q':>10s} {'scale':>10s}"
    )
    for layer, (kv, q) in amax.items():
        name = layer_prefix(layer, main_layers)
        print(f"{name:16s} {kv:10.4g} {scale(kv):10.4g} {q:10.4g} {scale(q):10.4g}")
    print(f"Wrote {output}.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
