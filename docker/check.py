#!/usr/bin/env python3
"""What the Dockerfile checks in the base and in the finished image; a failure is one sentence and ends the build.

    check.py base RELEASE                                               is this the vLLM to build on?
    check.py image RELEASE [NAME=VALUE...] --flashinfer V --record FILE is everything applied, and does it load?
"""

import argparse
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path


def stop(what):
    sys.exit(f"error: image: {what}")


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_base(release):
    found = version("vllm")
    if found is None:
        stop(f"the base image has no vLLM for its python3; build on vllm/vllm-openai:v{release}.")
    if found.partition("+")[0] != release:
        stop(f"the base image holds vLLM {found}, not {release}; build on vllm/vllm-openai:v{release}.")
    return found


def check_flashinfer(wanted):
    names = ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache")
    found = {name: version(name) for name in names}
    versions = {value.partition("+")[0] for value in found.values() if value}
    if len(versions) > 1 or (wanted and found["flashinfer-python"] != wanted):
        stop(f"FlashInfer's packages do not agree: {found}, wanted {wanted or 'one version of all'}.")
    return found


def check_native():
    """Load the native kernels, if a series has any, which needs no GPU, and compare what they were built for."""
    if importlib.util.find_spec("vllm.third_party.mla_kernels") is None:
        return None
    import torch
    from vllm.third_party.mla_kernels import native

    build = native.build_info(native.LIBRARY)
    capability = divmod(int(build["archs"].split()[0].rstrip("af")), 10)
    # A torch without CUDA (as on the stand-in base of the tests) has no version to compare.
    cuda = torch.version.cuda or build["cuda"]
    problem = native.refusal(build, torch_version=torch.__version__, cuda_version=cuda, capability=capability)
    if problem is None:
        torch.ops.load_library(str(native.LIBRARY))
        if not torch._C._dispatch_has_kernel_for_dispatch_key("mla_kernels::full_cache_bf16_insert", "CUDA"):
            problem = "it registers no operators"
    if problem:
        stop(f"the native kernels do not fit: {problem}.")
    return {**build, "torch": torch.__version__, "torch_cuda": torch.version.cuda}


def check_overlay(release):
    import vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    record = json.loads((Path(vllm.__file__).parent / "_dsv4_overlay/record.json").read_text())
    if record["release"] != release:
        stop(f"the overlay is applied to vLLM {record['release']}, not {release}.")
    if "full-width" in record["series"]:
        print(AttentionBackendEnum.FLASHINFER_MLA_SPARSE_DSV4.get_class())
    if "drop-in" in record["series"]:
        import vllm.v1.attention.ops.flashmla  # noqa: F401
    version, commit = record["overlay_version"], record["overlay_commit"]
    return {"version": version, "commit": commit, "series": list(record["series"])}


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("what", choices=("base", "image"))
    parser.add_argument("release")
    parser.add_argument("--flashinfer", default="")
    parser.add_argument("--record", type=Path)
    parser.add_argument("facts", nargs="*", metavar="NAME=VALUE", help="for FILE: what the image is made of")
    args = parser.parse_args()
    found = check_base(args.release)
    if args.what == "base":
        return
    flashinfer = check_flashinfer(args.flashinfer)
    record = {
        "vllm": found,
        "overlay": check_overlay(args.release),
        "native_kernels": check_native(),
        "flashinfer": flashinfer,
        **dict(fact.split("=", 1) for fact in args.facts),
    }
    args.record.parent.mkdir(parents=True, exist_ok=True)
    args.record.write_text(json.dumps(record, indent=1) + "\n")
    print(args.record.read_text(), end="")


if __name__ == "__main__":
    main()
