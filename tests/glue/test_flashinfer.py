"""Provider `flashinfer` without its GPU: contract_flashinfer.py with each release, and what is refused."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm.third_party.mla_kernels import flashinfer_sparse_mla, interface

# Folders with a release each, installed by scripts/test.sh.
RELEASES = [folder for folder in os.environ.get("FLASHINFER_RELEASES", "").split(":") if folder]


@pytest.mark.skipif(not RELEASES, reason="needs the FlashInfer releases that scripts/test.sh installs")
@pytest.mark.parametrize("folder", RELEASES or [""], ids=os.path.basename)
def test_contract(folder, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "contract_flashinfer.py"],
        env=os.environ
        | {"PYTHONPATH": folder, "FLASHINFER_WORKSPACE_BASE": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
        | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def installed(monkeypatch, versions):
    def version(package):
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(importlib.metadata, "version", version)


def pair(python, cubin):
    return {"flashinfer-python": python, "flashinfer-cubin": cubin}


@pytest.mark.parametrize(
    "versions, words",
    [
        ({}, "flashinfer-python is not installed; pip install"),
        ({"flashinfer-python": "0.6.13"}, "flashinfer-cubin is not installed; pip install"),
        (pair("0.6.11.post2", "0.6.11.post2"), "flashinfer-python is 0.6.11.post2, and 0.6.12 is the first"),
        (pair("0.6.12", "0.6.11"), "flashinfer-cubin is 0.6.11, and 0.6.12 is the first"),
        (pair("0.6.14", "0.6.13"), "flashinfer-python 0.6.14 and flashinfer-cubin 0.6.13 differ; pip install"),
    ],
)
def test_versions_that_are_refused(monkeypatch, versions, words):
    installed(monkeypatch, versions)
    assert words in flashinfer_sparse_mla.misfit((10, 0))


@pytest.mark.parametrize("version", ["0.6.12", "0.6.14", "0.7.2.post1", "0.10.0"])
def test_versions_that_fit(monkeypatch, version):
    installed(monkeypatch, pair(f"{version}+cu130", version))
    assert flashinfer_sparse_mla.misfit((10, 0)) is flashinfer_sparse_mla.misfit((10, 3)) is None


@pytest.mark.parametrize("capability", [(9, 0), (11, 0), (12, 0), (12, 1), None])
def test_gpus_that_do_not_fit(monkeypatch, capability):
    installed(monkeypatch, pair("0.6.14", "0.6.14"))
    assert "compute capability 10.0 and 10.3 only" in flashinfer_sparse_mla.misfit(capability)


def test_provider_on_blackwell(monkeypatch):
    pick = interface._pick_provider.__wrapped__
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (10, 3))
    installed(monkeypatch, pair("0.6.14", "0.6.14"))
    gpu = torch.device("cuda", 0)
    assert pick(gpu) == ("flashinfer", "FlashInfer has kernels for compute capability 10.3")
    installed(monkeypatch, {})
    name, why = pick(gpu)
    assert name == "triton" and "flashinfer-python is not installed" in why
