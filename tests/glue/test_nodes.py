"""Several hosts: the configuration that a worker on another host gets, from Ray's executor or vLLM's own."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from test_config_contract import OURS_ALONE
from test_real_config import HERE, OTHER_GPUS, models, on_hopper, reverted  # noqa: F401 (fixtures)

NEW = "FLASHINFER_MLA_SPARSE_DSV4"
PLAIN = {"skip_tokenizer_init": True, "block_size": 256, "max_model_len": 4096, "tensor_parallel_size": 2}
EXECUTORS = {
    "node 0": {"nnodes": 2, "node_rank": 0, "master_addr": "10.0.0.1"},
    "node 1": {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1"},
    "data parallel": {
        "data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_address": "10.0.0.1",
        "distributed_executor_backend": "mp",
    },
}  # fmt: skip
CACHES = {
    "bf16": {"attention_backend": NEW},
    "bf16 by its dtype": {"kv_cache_dtype": "bfloat16"},
    "fp8 by its dtype": {"kv_cache_dtype": "fp8_per_tensor"},
    "fp8 with scales": {
        "attention_backend": NEW,
        "kv_cache_dtype": "fp8",
        "additional_config": {"dsv4_scales": "mini.safetensors"},
    },
    "FlashMLA": {"attention_backend": "FLASHMLA_SPARSE_DSV4", "kv_cache_dtype": "fp8"},
}
CASES = [(executor, cache) for executor in EXECUTORS for cache in CACHES]


def arguments(models, executor, cache):  # noqa: F811
    return {"model": str(models / "mini")} | PLAIN | EXECUTORS[executor] | CACHES[cache]


@pytest.fixture(scope="module")
def pickles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pickles")
    return {case: str(folder / f"{number}.pickle") for number, case in enumerate(CASES)}


@pytest.fixture(scope="module")
def made(applied, models, pickles):  # noqa: F811
    """What the process that starts the executor has."""
    requests = [arguments(models, *case) | {"pickle": pickles[case]} for case in CASES]
    return dict(zip(CASES, on_hopper(applied, models, requests), strict=True))


@pytest.fixture
def worker(made, pickles, tmp_path):
    """Asks a process in another folder, as on another host, for what it makes of the configuration."""

    def ask(tree, cases, *rest, **env):
        return dict(zip(cases, on_hopper(tree, tmp_path, [pickles[c] for c in cases], *rest, **env), strict=True))

    return ask


def test_workers_find_what_was_made(made, worker, applied):
    """Backend, cache dtype, scales, cache pages and the whole configuration are those that were decided."""
    assert [answer.get("error") for answer in made.values()] == [None] * len(CASES)
    for (_, cache), answer in made.items():
        found = answer["backend"], answer["cache_dtype"], answer["layers"]["kv_scales"]
        if cache == "FlashMLA":
            assert found == ("FLASHMLA_SPARSE_DSV4", "fp8", [None] * 5)
        elif "scales" in cache:
            assert found == (NEW, "fp8_per_tensor", [1, 2, 4, 8, 16])
        else:
            assert found == (NEW, "bfloat16" if "bf16" in cache else "fp8_per_tensor", [1] * 5)
    assert worker(applied, CASES) == made


def test_executors_are_those_that_were_asked_for(made):
    for (executor, _), answer in made.items():
        assert ("nnodes=2" in answer["config"]) == ("node" in executor)
        assert ("node_rank=1" in answer["config"]) == (executor == "node 1")


@pytest.mark.parametrize("capability", OTHER_GPUS)
def test_another_gpu_on_the_other_host_is_refused(worker, applied, capability):
    """When layers are made: before weights are loaded."""
    for (_, cache), answer in worker(applied, CASES, capability).items():
        if cache == "FlashMLA":
            assert "error" not in answer
        else:
            assert f"this machine has compute capability {capability}" in answer["error"]


def test_kernels_that_the_other_host_lacks_are_refused(worker, applied):
    case = "node 1", "bf16"
    found = worker(applied, [case], VLLM_DSV4_PROVIDER="flashinfer")[case]["error"]
    assert found.startswith("VLLM_DSV4_PROVIDER=flashinfer needs FlashInfer, but ")


def test_scales_that_the_other_host_lacks_are_refused(worker, applied, models):  # noqa: F811
    case = "node 1", "fp8 with scales"
    file = models / "mini.safetensors"
    shutil.move(file, file.with_suffix(".away"))
    try:
        found = worker(applied, [case])[case]["error"]
    finally:
        shutil.move(file.with_suffix(".away"), file)
    assert found.startswith(f"{file}, which dsv4_scales names, cannot be read")


@OURS_ALONE
def test_a_host_without_the_overlay_is_refused(worker, reverted):  # noqa: F811
    """Else a worker of stock vLLM would keep its part of the cache in FlashMLA's format."""
    for (_, cache), answer in worker(reverted, CASES).items():
        error = answer["error"]
        named = error in ("FLASHINFER_MLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV4")  # all that Python 3.11.2 says
        assert "is not a valid AttentionBackendEnum" in error or named, cache


def node(applied, models, case, *packages, **env):  # noqa: F811
    """A process of nodes.py, which has read its arguments."""
    env |= {"CAPABILITY": "9.0", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [sys.executable, str(HERE / "nodes.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | env | {"PYTHONPATH": os.pathsep.join([str(applied), str(HERE), *packages])},
        cwd=models,
        start_new_session=True,
    )
    process.stdin.write(json.dumps(case))
    process.stdin.close()
    process.stdin = None
    return process


def end(process):
    """With all its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_two_nodes_of_vllms_own_executor(applied, models, made):  # noqa: F811
    """Two processes that are told to be two nodes; each makes its own configuration."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = {"master_addr": "127.0.0.1", "master_port": s.getsockname()[1]}
    cache = "fp8 with scales"
    nodes = [node(applied, models, arguments(models, f"node {rank}", cache) | address) for rank in (1, 0)]
    try:
        answers = json.loads(nodes[1].communicate(timeout=120)[0].splitlines()[-1])
    finally:
        for process in nodes:
            end(process)
    check_workers(answers, made["node 0", cache])


def check_workers(answers, expected):
    assert [answer["rank"] for answer in answers] == [0, 1]
    for answer in answers:
        assert (answer["cache_dtype"], answer["layers"]) == (expected["cache_dtype"], expected["layers"])


def with_ray(applied, models, cache, other):  # noqa: F811
    """What Ray's executor answers from two of Ray's nodes on this host, the second with `other` as capability."""
    packages = os.environ.get("RAY_PACKAGES")
    if not packages:
        pytest.skip("RAY_PACKAGES does not name a folder with Ray; scripts/test.sh makes one")
    case = {"model": str(models / "mini")} | PLAIN | CACHES[cache] | {"distributed_executor_backend": "ray"}
    process = node(applied, models, case, packages, OTHER_CAPABILITY=other)
    try:
        return json.loads(process.communicate(timeout=240)[0].splitlines()[-1])
    finally:
        end(process)


def test_two_nodes_of_ray(applied, models, made):  # noqa: F811
    cache = "fp8 with scales"
    check_workers(with_ray(applied, models, cache, other="9.0"), made["node 0", cache])


def test_another_gpu_on_rays_other_node_is_refused(applied, models):  # noqa: F811
    """Ray's workers do not make the configuration, so the check there is the layers' own."""
    found = with_ray(applied, models, "bf16", other="8.0")
    assert "and this machine has compute capability 8.0; use FLASHMLA_SPARSE_DSV4" in found["error"]
