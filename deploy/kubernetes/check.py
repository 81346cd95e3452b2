"""deploy/kubernetes/check.sh: what is wrong with the settings of a variant, before anything is applied."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

# What vLLM itself would refuse, but only in the cluster; tests compare these with vllm.dsv4_overlay.config.
FULL_CACHE, FLASHMLA = "FLASHINFER_MLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV4"
CACHE_DTYPES = {
    FULL_CACHE: ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_per_tensor"),
    FLASHMLA: ("fp8", "fp8_ds_mla"),
}
FULL_CACHE_RELEASES = ("0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.33.0")  # of vLLM, with the series full-width
NAMELESS = FULL_CACHE_RELEASES[:4]  # in which stock vLLM has no name for either backend
SCALES = "dsv4_scales"  # in --additional-config
MAX_CONTEXT = 1 << 20
GPUS = 8  # in one machine
HEADS_A_GPU = 128
# The share of a GPU's memory that vLLM takes, unless --gpu-memory-utilization says otherwise.
MEMORY_SHARE = 0.9
GIB = 1 << 30


class Model(NamedTuple):
    """Attention heads, and the bytes of the weights, which are about those of the checkpoint."""

    heads: int
    weights: int


# As published; what follows the name, such as a date, does not matter.
MODELS = {"DeepSeek-V4-Flash": Model(64, 160 * 10**9), "DeepSeek-V4-Pro": Model(128, 865 * 10**9)}
# GiB as nvidia-smi shows them, by parts of the product's name, which are between hyphens as in
# NVIDIA-H100-80GB-HBM3; the first that fits counts.
HOPPER = {"H20-3e|H200|GH200-144G": 140, "H20|GH200": 95, "H100-NVL": 93, "H100|H800": 79}
BLACKWELL = {"G?B300": 268, "GB200": 184, "B200": 179}
_PART = r"[a-z0-9]+([._-]+[a-z0-9]+)*"
IMAGE = re.compile(
    rf"{_PART}(:\d+(?=/))?(/{_PART})*(:(?P<tag>\w[\w.-]{{0,127}}))?(?P<digest>@sha256:[0-9a-f]{{64}})?"
)
EXAMPLE = "registry.example.com/"
KEYS = ("NAME", "IMAGE", "PULL_SECRET", "MODEL", "REVISION", "GPU", "TENSOR_PARALLEL_SIZE", "ATTENTION_BACKEND",
        "KV_CACHE_DTYPE", "MAX_MODEL_LEN")  # fmt: skip
# Options that the manifests give; the command line goes before the file, without a word.
TAKEN = ("model", "revision", "tensor-parallel-size", "pipeline-parallel-size", "nnodes", "node-rank", "headless",
         "master-addr", "distributed-executor-backend", "block-size", "attention-backend", "kv-cache-dtype",
         "max-model-len", "shutdown-timeout", "port")  # fmt: skip


class Wrong(Exception):
    """A setting is wrong; the text is one sentence that says what to write."""


class Variant(NamedTuple):
    """The files of a variant, read."""

    settings: dict[str, str]
    options: dict[str, Any]  # of vLLM
    kustomization: dict[str, Any]
    machines: int  # that one instance of the model is on


def load(path: Path) -> Any:
    """The YAML of `path`, None if it is empty. Raises Wrong, for a key that is there twice too."""
    try:
        text = path.read_text("utf-8")
        pending = [yaml.compose(text, yaml.SafeLoader)]
        while pending:
            node = pending.pop()
            if isinstance(node, yaml.SequenceNode):
                pending += node.value
            if isinstance(node, yaml.MappingNode):
                keys = [key.value for key, _ in node.value]
                if twice := [key for key in keys if keys.count(key) > 1]:
                    raise Wrong(f"{path}: {twice[0]} is there twice; remove one.")
                pending += [value for _, value in node.value]
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise Wrong(f"{path} is not YAML ({' '.join(str(error).split())}); mend it.") from None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise Wrong(f"{path} cannot be read ({why}); give the folder of a variant.") from None


def read(folder: Path) -> Variant:
    """The variant in `folder`. Raises Wrong."""
    path = folder / "settings.yaml"
    content = load(path)
    settings = content.get("data") if isinstance(content, dict) else None
    if not isinstance(settings, dict):
        raise Wrong(f"{path} has no settings; write them below data.")
    for key, value in settings.items():
        if not isinstance(value, str):
            raise Wrong(f"{path}: {key} is {value!r}, which is no text; write it in quotes.")
    options = load(folder / "vllm.yaml")
    if not isinstance(options, dict):
        raise Wrong(f"{folder / 'vllm.yaml'} has no options, which vLLM refuses; write one, such as seed: 0.")
    options = {str(name).replace("_", "-"): value for name, value in options.items()}  # vLLM takes both
    path = folder / "kustomization.yaml"
    kustomization = load(path)
    try:
        components = [str(name) for name in kustomization.get("components", [])]
        kustomization["labels"] = [{"pairs": {**label["pairs"]}} for label in kustomization.get("labels", [])]
    except (AttributeError, KeyError, TypeError):
        raise Wrong(f"{path} has no lists of components and labels, as one of kustomize; take h200x8's.") from None
    machines = 1
    for component in components:
        group = folder / component / "group" / "leaderworkerset.yaml"
        if group.is_file():
            machines = load(group)["spec"]["leaderWorkerTemplate"]["size"]
    return Variant(settings, options, kustomization, machines)


def _number(settings: dict[str, str], key: str, most: int) -> int:
    value = settings[key]
    if not re.fullmatch(r"[1-9]\d{0,8}", value) or int(value) > most:
        raise Wrong(f"{key} is {value!r}; write a whole number from 1 to {most}.")
    return int(value)


def _one_of(settings: dict[str, str], key: str, values: tuple[str, ...] | list[str], of: str = "") -> str:
    if settings[key] not in values:
        raise Wrong(f"{key} is {settings[key]!r}{of}; write one of {', '.join(values)}.")
    return settings[key]


def model(name: str) -> Model:
    """What is known of the model `name`: one of MODELS, or a folder with config.json and weights. Raises Wrong."""
    for known, facts in MODELS.items():
        if re.search(rf"(^|/){known}(-[\w.-]+)?/?$", name):
            return facts
    folder = Path(name)
    try:
        heads = int(json.loads((folder / "config.json").read_text("utf-8"))["num_attention_heads"])
        return Model(heads, sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    except (OSError, ValueError, KeyError, TypeError):
        raise Wrong(
            f"MODEL is {name!r}, whose number of attention heads is unknown; write a name such as "
            f"{' or '.join(MODELS)}, or a folder that is also here and has its config.json."
        ) from None


def gpu_memory(gpu: str, products: dict[str, int]) -> int | None:
    """GiB of a GPU with this label, if it is one of `products`."""
    sizes = (size for names, size in products.items() if re.search(rf"(^|-)({names})(-|$)", gpu))
    return next(sizes, None)


def check_image(image: str) -> None:
    """Raise Wrong unless `image` says one image for good."""
    match = IMAGE.fullmatch(image)
    if match is None or match["digest"] is None and match["tag"] in (None, "latest"):
        raise Wrong(f"IMAGE is {image!r}; write REPOSITORY:TAG with the tag that docker/build.sh gave, or "
                    "REPOSITORY@sha256:….")
    if image.startswith(EXAMPLE):
        raise Wrong(f"IMAGE is {image!r}, an example; write where the image of docker/build.sh is.")


def check_release(image: str, backend: str) -> None:
    """Raise Wrong if the tag, as docker/build.sh gives it, is of a release or of series without this backend for
    Hopper."""
    found = re.search(r":(\d+\.\d+\.\d+)-\d+\.\d+\.\d+-g[0-9a-f]+", image)
    if not found:
        return
    release, series = found[1], re.findall(r"_([a-z0-9-]+?)(?=_|-base-|@|$)", image[found.end() :])
    if backend == FULL_CACHE and release not in FULL_CACHE_RELEASES:
        raise Wrong(f"IMAGE is of vLLM {release}, which has no full-width cache ({FULL_CACHE}); write "
                    f'ATTENTION_BACKEND: "{FLASHMLA}" and KV_CACHE_DTYPE: "fp8", or take one of '
                    f"{', '.join(FULL_CACHE_RELEASES)}.")
    # The series brings the other name too, where vLLM does not have it.
    if (backend == FULL_CACHE or release in NAMELESS) and series and not {"default", "full-width"} & {*series}:
        raise Wrong(f"IMAGE has the series {', '.join(series)} alone, and {backend} needs full-width; build one "
                    "with --series default or --series full-width too.")


def check_memory(variant: Variant, weights: int, gpu: str, size: int, gpus: int) -> None:
    """Raise Wrong if the weights alone need more than vLLM takes of the GPUs."""
    share = variant.options.get("gpu-memory-utilization", MEMORY_SHARE)
    if not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise Wrong(f"gpu-memory-utilization in vllm.yaml is {share!r}; write a number up to 1.")
    need, have = weights / GIB / gpus, size * share
    if need > have:
        least = -(-weights // int(have * GIB))
        raise Wrong(
            f"{variant.settings['MODEL']} has {weights / GIB:.0f} GiB of weights, {need:.0f} for each of {gpus} "
            f"GPUs, and vLLM takes {have:.0f} of the {size} GiB of a {gpu}; use at least {least} of them."
        )


def check(variant: Variant) -> None:
    """Raise Wrong for the first setting that would not serve."""
    settings = variant.settings
    for key in KEYS:
        if not settings.get(key):
            raise Wrong(f"{key} is missing; write it below data.")
    for key in settings:
        if key not in KEYS:
            raise Wrong(f"{key} is no setting; the settings are {', '.join(KEYS)}, and vllm.yaml takes the rest.")
    name, kustomization = settings["NAME"], variant.kustomization
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?", name):
        raise Wrong(f"NAME is {name!r}; write up to 30 small letters, digits and hyphens.")
    labels = [label["pairs"].get("app.kubernetes.io/instance") for label in kustomization.get("labels", ())]
    if kustomization.get("namePrefix") != f"{name}-" or labels != [name]:
        raise Wrong(f"NAME is {name!r} and kustomization.yaml says another; write namePrefix: {name}- and the "
                    f"label app.kubernetes.io/instance: {name} there.")
    check_image(settings["IMAGE"])
    gpu = settings["GPU"]
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", gpu):
        raise Wrong(f"GPU is {gpu!r}; write the label nvidia.com/gpu.product of the nodes.")
    size = gpu_memory(gpu, HOPPER) or gpu_memory(gpu, BLACKWELL)
    if not size:
        raise Wrong(f"GPU is {gpu!r}, which the overlay does not serve; write a Hopper or Blackwell one.")
    components = [Path(component).name for component in kustomization.get("components", ())]
    if gpu_memory(gpu, BLACKWELL) and "blackwell" not in components:
        raise Wrong(f"GPU is {gpu!r}, on which FlashInfer compiles as root; add the component optional/blackwell.")
    for option in variant.options:
        if option.lower() in TAKEN:  # or the name of a setting
            raise Wrong(f"{option} in vllm.yaml would not count, for the manifests give it; remove it.")
    backend = _one_of(settings, "ATTENTION_BACKEND", list(CACHE_DTYPES))
    if gpu_memory(gpu, HOPPER):  # on Blackwell newer releases have a backend of this name
        check_release(settings["IMAGE"], backend)
    dtype = _one_of(settings, "KV_CACHE_DTYPE", CACHE_DTYPES[backend], f", which {backend} does not serve")
    more = variant.options.get("additional-config") or {}
    if not isinstance(more, dict):
        raise Wrong(f"additional-config in vllm.yaml is {more!r}; write options below it, as {SCALES}: FILE.")
    scaled = SCALES in more
    if backend == FULL_CACHE and dtype.startswith("fp8") and not scaled:
        raise Wrong(f"KV_CACHE_DTYPE is {dtype!r} without scales; calibrate and name them in vllm.yaml "
                    f"(additional-config: {{{SCALES}: FILE}}, or null for 1.0), or write bfloat16.")
    if scaled and not (backend == FULL_CACHE and dtype.startswith("fp8")):
        raise Wrong(f"{SCALES} in vllm.yaml is for an FP8 cache of {FULL_CACHE}; remove it.")
    parallel = _number(settings, "TENSOR_PARALLEL_SIZE", GPUS)
    facts = model(settings["MODEL"])
    if facts.heads % parallel:
        divisors = [str(number) for number in range(1, GPUS + 1) if facts.heads % number == 0]
        raise Wrong(f"TENSOR_PARALLEL_SIZE is {parallel}, which does not divide the {facts.heads} attention heads "
                    f"of {settings['MODEL']}; write one of {', '.join(divisors)}.")
    if facts.heads // parallel > HEADS_A_GPU:
        raise Wrong(f"TENSOR_PARALLEL_SIZE is {parallel}, which gives a GPU {facts.heads // parallel} attention "
                    f"heads of {settings['MODEL']}; write a larger one, for at most {HEADS_A_GPU}.")
    _number(settings, "MAX_MODEL_LEN", MAX_CONTEXT)
    check_memory(variant, facts.weights, gpu, size, parallel * variant.machines)


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
        check(read(folder))
    except Wrong as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 1
    print(f"The settings of {args.variant} are right: kubectl apply -k {folder}")
    return 0
