# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-dsv4-overlay project
"""Files of a checkpoint that are read before vLLM loads its weights."""

import contextlib
import json
from pathlib import Path

from huggingface_hub import hf_hub_download
from vllm import envs
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

INDEX = "model.safetensors.index.json"


def read_index(
    model: str, revision: str | None, download_dir: str | None
) -> dict | None:
    """What the checkpoint's index has, which says where each tensor is; None where it
    has none, or it cannot be had.

    Raises:
        json.JSONDecodeError: it is cut off.
    """
    index = None
    if not envs.VLLM_USE_MODELSCOPE:
        index = get_hf_file_to_dict(INDEX, model, revision)
    if index is None and (download_dir or envs.VLLM_USE_MODELSCOPE):
        with contextlib.suppress(OSError, ValueError):
            path = download(model, revision, download_dir, INDEX)
            index = json.loads(Path(path).read_text())
    return index


def download(
    model: str, revision: str | None, download_dir: str | None, name: str
) -> str:
    """The path of a file of `model`, a folder or, on the hub that vLLM takes weights
    from, a repository."""
    if Path(model).is_dir():
        return str(Path(model) / name)
    if envs.VLLM_USE_MODELSCOPE:
        # Not at the top: this module is imported for every model.
        from vllm.model_executor.model_loader.weight_utils import (
            maybe_download_from_modelscope,
        )

        folder = maybe_download_from_modelscope(
            model, revision, download_dir, allow_patterns=[name]
        )
        return str(Path(folder) / name)
    return hf_hub_download(model, name, revision=revision, cache_dir=download_dir)
