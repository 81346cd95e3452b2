# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""The scales of the FP8 cache, one for the rows and one for the queries of each layer:
read, checked, named.

They come from the file that `--additional-config '{"dsv4_scales":
"scales.safetensors"}'` names (calibrate.py writes it), else from the checkpoint if it
has any, else they are 1.0. Both hold one floating-point element under each name:
`layers.3.attn.k_scale` and `layers.3.attn.q_scale`, `mtp.0.…` for next-token layers. K
and V are the same row, so there is no v_scale; where there is no q_scale it is 1.0.
Stored value times scale gives the value.
"""

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError, safe_open
from vllm.dsv4_overlay.checkpoint_files import INDEX, download, read_index
from vllm.logger import init_logger

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

logger = init_logger(__name__)

OPTION = "dsv4_scales"
_CALIBRATE = "vllm.dsv4_overlay.calibrate"
COMMAND = f"python -m {_CALIBRATE}"
_NAME = re.compile(r"(layers|mtp)\.\d+\.attn\.[kq]_scale$")


class Scales(NamedTuple):
    """Scales by name; empty where every scale is 1.0. `source` says in words where they
    come from."""

    source: str
    values: dict[str, float]

    def of_layer(self, number: int, main_layers: int) -> tuple[float, float]:
        """(kv, q) of a layer, next-token layers numbered on from the model's
        `main_layers`."""
        if not self.values:
            return 1.0, 1.0
        prefix = layer_prefix(number, main_layers)
        if f"{prefix}.k_scale" not in self.values:
            raise ValueError(
                f"{self.source} has no {prefix}.k_scale; calibrate again ({COMMAND}) "
                "with the model and the "
                "--speculative-config that are served."
            )
        return self.values[f"{prefix}.k_scale"], self.values.get(
            f"{prefix}.q_scale", 1.0
        )


def layer_prefix(number: int, main_layers: int) -> str:
    """What the names of a layer's scales start with, as in the checkpoints."""
    return (
        f"layers.{number}.attn"
        if number < main_layers
        else f"mtp.{number - main_layers}.attn"
    )


def scales_file(vllm_config: "VllmConfig") -> str | None:
    """The file that --additional-config names."""
    options = vllm_config.additional_config
    return options.get(OPTION) if isinstance(options, dict) else None


def check_scales(vllm_config: "VllmConfig") -> None:
    """Refuse scales that do not fit the model, or log where they come from; before
    weights are loaded.

    Raises:
        ValueError: a layer has none, a value is not one finite positive number, or the
            file is not there or has other tensors. One sentence.
    """
    scales = load_scales(vllm_config)
    config, speculative = (
        vllm_config.model_config.hf_config,
        vllm_config.speculative_config,
    )
    layers = config.num_hidden_layers
    if scales.values and speculative and speculative.method == "dspark":
        other = OPTION if scales_file(vllm_config) else "use --kv-cache-dtype bfloat16"
        raise ValueError(
            f"{scales.source} is not for DSpark, whose layers have no scales; omit "
            f"--speculative-config, or {other}."
        )
    draft = speculative and speculative.draft_model_config
    # Not so with n-grams, whose draft is the model.
    if draft and draft.architecture == "DeepSeekV4MTPModel":
        layers += draft.hf_config.num_nextn_predict_layers
    pairs = [
        scales.of_layer(number, config.num_hidden_layers) for number in range(layers)
    ]
    if f"layers.{config.num_hidden_layers}.attn.k_scale" in scales.values:
        raise ValueError(
            f"{scales.source} has scales of more layers than this model; calibrate it "
            f"({COMMAND})."
        )
    kv, q = zip(*pairs, strict=True)
    logger.info_once(
        "FP8 scales (%s): kv %.3g to %.3g, q %.3g to %.3g.",
        scales.source,
        min(kv),
        max(kv),
        min(q),
        max(q),
    )


def layer_scales(
    vllm_config: "VllmConfig", layer: "torch.nn.Module"
) -> tuple[float, float]:
    """(kv, q) of a layer; `layer.dsv4_scales` has them by their names, for
    `without_scales`."""
    # Not at the top: config.py imports this module, and is itself imported for every
    # model.
    from vllm.model_executor.models.utils import extract_layer_index

    main_layers = vllm_config.model_config.hf_config.num_hidden_layers
    number = extract_layer_index(layer.prefix)
    kv, q = load_scales(vllm_config).of_layer(number, main_layers)
    prefix = layer_prefix(number, main_layers)
    # Those of a file win over any that weights bring.
    layer.dsv4_scales = (
        {}
        if scales_file(vllm_config)
        else {f"{prefix}.k_scale": kv, f"{prefix}.q_scale": q}
    )
    return kv, q


def without_scales(
    model: "torch.nn.Module", weights: Iterable[tuple[str, "torch.Tensor"]]
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """`weights` for the loader of `model`, whose layers have had the scales among them
    since they were made.

    Raises:
        ValueError: they are others, as those of weights for a running server may be;
            one sentence.
    """
    applied: dict[str, float] = {}
    for layer in model.modules():
        applied |= getattr(layer, "dsv4_scales", {})
    for name, weight in weights:
        found = _NAME.search(name)
        if found is None:
            yield name, weight
        elif found[0] in applied and (
            (value := float(weight.float())) != applied[found[0]]
        ):
            raise ValueError(
                f"{found[0]} of these weights is {value}, and this server has "
                "been started with "
                f"{applied[found[0]]}, which it keeps; start it with these weights, "
                "or name a file of scales for "
                f"them and others as {OPTION}."
            )


def load_scales(vllm_config: "VllmConfig") -> Scales:
    """The scales of this model's FP8 cache; ValueError where the file or the checkpoint
    has bad ones."""
    if (path := scales_file(vllm_config)) is not None:  # "" is no file either
        return _from_file(str(path))
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        return Scales("none given with dummy weights", {})
    return _from_checkpoint(model.model, model.revision, load.download_dir)


def _from_file(path: str) -> Scales:
    # Not cached: it may be measured anew between two models of one process.
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path or '(empty)'}, which {OPTION} names, cannot be read as safetensors "
            f"({error})."
        ) from None
    source = f"{OPTION} {path}"
    if unknown := [name for name in names if not _NAME.fullmatch(name)]:
        raise ValueError(
            f"{source} holds {unknown[0]}, which is not a scale; {COMMAND} writes "
            "such files."
        )
    if not names:
        raise ValueError(f"{source} holds no scale; {COMMAND} writes such files.")
    return Scales(source, _read(source, dict.fromkeys(names, path)))


@functools.cache
def _from_checkpoint(
    model: str, revision: str | None, download_dir: str | None
) -> Scales:
    folder, source = Path(model), f"checkpoint {model}"
    try:
        index = read_index(model, revision, download_dir)
    except json.JSONDecodeError as error:  # as of a download that was cut short
        raise ValueError(f"{INDEX} of {model} cannot be read ({error}).") from None
    if index is None and not folder.is_dir():
        raise ValueError(
            f"Whether {source} has scales is unknown, for {INDEX} cannot be had; "
            "download it and serve its "
            f"folder, or name a file of scales as {OPTION}."
        )
    shards = (index or {}).get("weight_map", {})
    try:
        if not shards and (single := folder / "model.safetensors").is_file():
            with safe_open(single, "pt") as file:
                shards = dict.fromkeys(file.keys(), single.name)
        shards = {
            name: shard for name, shard in shards.items() if _NAME.fullmatch(name)
        }
        if not shards:
            return Scales(f"none given; {COMMAND} measures them", {})
        paths = {
            shard: download(model, revision, download_dir, shard)
            for shard in set(shards.values())
        }
        return Scales(
            source,
            _read(source, {name: paths[shard] for name, shard in shards.items()}),
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(f"Scales of {source} cannot be read ({error}).") from None


def _read(source: str, paths: dict[str, str]) -> dict[str, float]:
    values = {}
    for path in set(paths.values()):
        with safe_open(path, "pt") as file:
            for name in (name for name in paths if paths[name] == path):
                tensor = file.get_tensor(name)
                if tensor.numel() != 1 or not tensor.is_floating_point():
                    raise ValueError(
                        f"{name} in {source} must be one floating-point element, and "
                        f"is {list(tensor.shape)} "
                        f"{tensor.dtype}."
                    )
                values[name] = float(tensor.float())  # as the kernels see it
                if not (values[name] > 0 and math.isfinite(values[name])):
                    raise ValueError(
                        f"{name} in {source} must be finite and positive, and is "
                        f"{values[name]}."
                    )
    rows = {name for name in values if name.endswith(".k_scale")}
    queries = {name.replace(".q_scale", ".k_scale") for name in values.keys() - rows}
    if queries and (odd := sorted(queries ^ rows)):
        raise ValueError(
            f"{source} must have a q_scale for every k_scale or none, and {odd[0]} "
            "stands alone."
        )
    return values
