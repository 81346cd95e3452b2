"""deploy/kubernetes/check.sh: what is wrong with the settings of a variant, before anything is applied."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from .image import releases

# What vLLM itself would refuse, but only in the cluster; tests compare these with vllm.dsv4_overlay.config.
FULL_CACHE, FLASHMLA = "FLASHINFER_MLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV4"
CACHE_DTYPES = {
    FULL_CACHE: ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_per_tensor"),
    FLASHMLA: ("fp8", "fp8_ds_mla"),
}
HEADS = {"DeepSeek-V4-Flash": 64, "DeepSeek-V4-Pro": 128}
MAX_CONTEXT = 1 << 20
GPUS = 8  # in one machine
HEADS_A_GPU = 128
# Names of products have their parts between hyphens, as in NVIDIA-H100-80GB-HBM3.
HOPPER, BLACKWELL = (re.compile(rf"(^|-)G?{names}(-|$)") for names in ("H(20|100|200|800)", "B(200|300)"))
NAME = r"[a-z0-9]+([._-]+[a-z0-9]+)*"  # of a registry, or a part of a repository
EXAMPLE = "registry.example.com/"
KEYS = ("IMAGE", "RELEASE", "MODEL", "GPU", "TENSOR_PARALLEL_SIZE", "ATTENTION_BACKEND", "KV_CACHE_DTYPE",
        "MAX_MODEL_LEN")  # fmt: skip


class Wrong(Exception):
    """A setting is wrong; the text is one sentence that says what to write."""


def read(path: Path) -> dict[str, str]:
    """The settings: each a line `  KEY: "value"` below `data:`. Raises Wrong."""
    try:
        _, found, data = path.read_text("utf-8").partition("\ndata:\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "not UTF-8")
        raise Wrong(f"{path} cannot be read ({why}); give the folder of a variant.") from None
    settings: dict[str, str] = {}
    for line in data.splitlines() if found else ():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(r'  (\w+): "([^"\\]*)"\s*(?:#.*)?', line)
        if match is None:
            raise Wrong(f"{path}: {line.strip()!r} is not of the form KEY: \"value\".")
        if match[1] in settings:
            raise Wrong(f"{path}: {match[1]} is there twice; remove one.")
        settings[match[1]] = match[2]
    return settings


def _number(settings: dict[str, str], key: str, most: int) -> int:
    value = settings[key]
    if not re.fullmatch(r"[1-9]\d{0,8}", value) or int(value) > most:
        raise Wrong(f"{key} is {value!r}; write a whole number from 1 to {most}.")
    return int(value)


def _one_of(settings: dict[str, str], key: str, values: tuple[str, ...] | list[str], of: str = "") -> str:
    if settings[key] not in values:
        raise Wrong(f"{key} is {settings[key]!r}{of}; write one of {', '.join(values)}.")
    return settings[key]


def heads(model: str) -> int:
    """Attention heads of `model`: a known name, or a folder with config.json. Raises Wrong."""
    for name, count in HEADS.items():
        if model.rstrip("/").endswith(name):
            return count
    try:
        return int(json.loads((Path(model) / "config.json").read_text("utf-8"))["num_attention_heads"])
    except (OSError, ValueError, KeyError, TypeError):
        raise Wrong(
            f"MODEL is {model!r}, whose number of attention heads is unknown; write a name that ends in "
            f"{' or '.join(HEADS)}, or a folder that is also here and has its config.json."
        ) from None


def check(root: Path, settings: dict[str, str], variant: str = "") -> None:
    """Raise Wrong for the first setting that would not serve; `variant` is its kustomization.yaml."""
    for key in KEYS:
        if not settings.get(key):
            raise Wrong(f"{key} is missing; write it below data.")
    for key in settings:
        if key not in KEYS:
            raise Wrong(f"{key} is no setting; the settings are {', '.join(KEYS)}.")
    if not re.fullmatch(rf"{NAME}(:\d+(?=/))?(/{NAME})*", settings["IMAGE"]):
        raise Wrong(f"IMAGE is {settings['IMAGE']!r}; write a repository without a tag, which is RELEASE.")
    if settings["IMAGE"].startswith(EXAMPLE):
        raise Wrong(f"IMAGE is {settings['IMAGE']!r}, an example; write where the image of docker/build.sh is.")
    gpu = settings["GPU"]
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", gpu):
        raise Wrong(f"GPU is {gpu!r}; write the label nvidia.com/gpu.product of the nodes.")
    if not HOPPER.search(gpu) and not BLACKWELL.search(gpu):
        raise Wrong(f"GPU is {gpu!r}, which the overlay does not serve; write a Hopper or Blackwell one.")
    if variant and BLACKWELL.search(gpu) and "runAsUser, value: 0}" not in variant:
        raise Wrong(f"GPU is {gpu!r}, on which FlashInfer compiles as root; use the variant b200x8.")
    _one_of(settings, "RELEASE", releases(root))
    backend = _one_of(settings, "ATTENTION_BACKEND", list(CACHE_DTYPES))
    _one_of(settings, "KV_CACHE_DTYPE", CACHE_DTYPES[backend], f", which {backend} does not serve")
    parallel = _number(settings, "TENSOR_PARALLEL_SIZE", GPUS)
    count = heads(settings["MODEL"])
    if count % parallel:
        divisors = [str(number) for number in range(1, GPUS + 1) if count % number == 0]
        raise Wrong(f"TENSOR_PARALLEL_SIZE is {parallel}, which does not divide the {count} attention heads of "
                    f"{settings['MODEL']}; write one of {', '.join(divisors)}.")
    if count // parallel > HEADS_A_GPU:
        raise Wrong(f"TENSOR_PARALLEL_SIZE is {parallel}, which gives a GPU {count // parallel} attention heads "
                    f"of {settings['MODEL']}; write a larger one, for at most {HEADS_A_GPU}.")
    _number(settings, "MAX_MODEL_LEN", MAX_CONTEXT)


def main(argv: list[str], root: Path) -> int:
    """check.sh: returns 0, 1 if a setting is wrong or 2 for wrong usage."""
    variants = root / "deploy" / "kubernetes"
    parser = argparse.ArgumentParser(
        prog="check.sh", description="See that the settings of a variant would serve, before kubectl apply -k."
    )
    parser.add_argument("variant", metavar="VARIANT",
                        help=f"{', '.join(sorted(p.parent.name for p in variants.glob('*/settings.yaml')))}, or a "
                        "folder with settings.yaml")  # fmt: skip
    args = parser.parse_args(argv)
    folder = variants / args.variant
    if not folder.is_dir():
        folder = Path(args.variant)
    try:
        variant = folder / "kustomization.yaml"
        check(root, read(folder / "settings.yaml"), variant.read_text("utf-8") if variant.is_file() else "")
    except Wrong as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 1
    print(f"The settings of {args.variant} are right: kubectl apply -k {folder}")
    return 0
