"""Writes a model's checkpoint: weights in shards, their index, the tokenizer and config.json."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from .files import write_json
from .layouts import Fp8Blocks
from .recipe import BaseRecipe, Entry
from .tokenizer import write_tokenizer

INDEX = "model.safetensors.index.json"


def store(entry: Entry, layout: Fp8Blocks) -> tuple[dict[str, torch.Tensor], str]:
    """The stored tensors, and a line about the values."""
    name, kind, make = entry
    w = make(name)
    line = f"{name:48s} {kind:4s} {str(tuple(w.shape)):18s}"
    if kind != "i32":
        line += f" std {w.float().std(correction=0):8.4f}  absmax {w.abs().max():8.3f}"
    return layout.store(name, kind, w), line


def write_names(out: Path, recipe: BaseRecipe) -> None:
    """The index of the tensors of a checkpoint that is not there, for a model with dummy weights."""
    entries = (entry for _, shard in recipe.shards() for entry in shard)
    block = torch.zeros(128, 128)
    names = (name for entry in entries for name in recipe.layout.store(entry.name, entry.kind, block))
    write_json(out / INDEX, {"weight_map": dict.fromkeys(names, "none")})


def refuse_other_weights(out: Path, config: dict) -> None:
    if not any(out.glob("*.safetensors")):
        return
    keys = ("model_type", "num_hidden_layers", "vocab_size")
    try:
        found = json.loads((out / "config.json").read_text())
        found, config = (c.get("text_config", c) for c in (found, config))
        ours = all(found[key] == config[key] for key in keys)
    except (OSError, ValueError, KeyError):
        ours = False
    if not ours:
        raise ValueError(f"{out} holds other weights, or a part of these; remove them, or give a new folder")


def write_checkpoint(
    out: Path,
    recipe: BaseRecipe,
    threads: int | None = None,
    log: Callable[[str], None] = print,
) -> int:
    """Write everything; the number of bytes of weights. Raises ValueError if `out` holds other weights, OSError if
    it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    config = recipe.config()
    out.mkdir(parents=True, exist_ok=True)
    refuse_other_weights(out, config)
    (out / "config.json").unlink(missing_ok=True)  # written last: marks a complete checkpoint
    for old in out.glob("model-*.safetensors"):
        old.unlink()
    shards = list(recipe.shards())
    index: dict[str, str] = {}
    total = 0
    start = time.perf_counter()
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # parallel over tensors instead
    try:
        with ThreadPoolExecutor(threads or min(16, os.cpu_count() or 1)) as pool:
            for i, (title, entries) in enumerate(shards, 1):
                file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
                tensors: dict[str, torch.Tensor] = {}
                log(f"{file}: {title}")
                for made, line in pool.map(lambda entry: store(entry, recipe.layout), entries):
                    if ".experts." not in line or ".experts.0." in line:
                        log("  " + line)
                    tensors.update(made)
                try:
                    save_file(tensors, str(out / file), metadata={"format": "pt"})
                except SafetensorError as error:  # a full disk, say
                    raise OSError(errno.EIO, str(error), str(out / file)) from error
                index.update(dict.fromkeys(tensors, file))
                total += sum(t.numel() * t.element_size() for t in tensors.values())
    finally:
        torch.set_num_threads(torch_threads)
    write_json(
        out / INDEX,
        {"metadata": {"total_size": total}, "weight_map": index},
    )
    write_tokenizer(out, recipe.s.vocab, recipe.special_tokens)
    write_json(
        out / "generation_config.json",
        {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_p": 1.0},
    )
    write_json(out / "config.json", config)
    seconds = time.perf_counter() - start
    log(f"{len(index)} tensors, {total / 1e9:.2f} GB in {seconds:.1f} s: {out} (seed {recipe.seed})")
    return total
