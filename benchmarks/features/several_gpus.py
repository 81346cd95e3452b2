"""The steps of several processes: on several GPUs of one host, or sharing one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from e2e import compiled_when_used, free_port, node_environment, ranks_share_a_gpu, start_nodes

from .run import ENTRY, GRAPHS, LENGTHS, STEPS, Run, engine_arguments, step


def parallel(run: Run, as_nodes: bool = False, **sizes: Any) -> None:
    others = []
    run.save(ranks_share_a_gpu=ranks_share_a_gpu())
    if as_nodes or ranks_share_a_gpu():
        nodes, others = start_nodes(engine_arguments(run.job, **GRAPHS, **sizes) | compiled_when_used())
        sizes |= nodes
    run.start(**GRAPHS, **sizes)
    run.generate(run.prompts)
    out = run.generate(run.prompts, prompt_logprobs=True)
    run.compare("output", run.reference(), out, other_arithmetic=True)
    if others:  # they stay when this one ends; run_child ends all
        ended = [other.poll() for other in others]
        run.check("the other nodes were there to the end", set(ended) == {None}, ended)


@step(gpus=2)
def tp2(run: Run) -> None:
    """Tensor parallel 2: half of the heads, 32 of 64."""
    parallel(run, tensor_parallel_size=2)


@step(gpus=2)
def pp2(run: Run) -> None:
    """Pipeline parallel 2."""
    parallel(run, pipeline_parallel_size=2)


@step(gpus=2, backends=["flashmla_fp8", "drop_in_fp8", "sparse_fp8"], since="0.33.0")
def dcp2(run: Run) -> None:
    """Tensor parallel 2 whose ranks divide each sequence's cache (decode context parallel)."""
    parallel(run, tensor_parallel_size=2, decode_context_parallel_size=2)


@step(gpus=4)
def tp4(run: Run) -> None:
    """Tensor parallel 4: a quarter of the heads, 16 of 64."""
    parallel(run, tensor_parallel_size=4)


@step(gpus=4)
def tp2_pp2(run: Run) -> None:
    """Tensor parallel 2 in pipeline parallel 2."""
    parallel(run, tensor_parallel_size=2, pipeline_parallel_size=2)


@step(gpus=2)
def nodes2(run: Run) -> None:
    """Tensor parallel 2 over two nodes, of one host: vLLM's multiprocessing executor, NCCL over TCP."""
    parallel(run, as_nodes=True, tensor_parallel_size=2)


def start_part(name: str, job: dict[str, Any], job_file: Path, environment: dict[str, str]) -> subprocess.Popen:
    """A process beside this one that runs a function of `PART`; it ends with this one at the latest."""
    job_file.write_text(json.dumps(job | {"part": name}))
    return subprocess.Popen([sys.executable, str(ENTRY), "--part", str(job_file)], env=environment)


def data_parallel(run: Run, ranks: int, tp: int) -> None:
    run.save(ranks_share_a_gpu=ranks_share_a_gpu())
    port, files = free_port(), [Path(f"{run.job['out']}.rank{rank}.npz") for rank in range(ranks)]
    children = []
    for rank, file in enumerate(files):
        file.unlink(missing_ok=True)
        env = os.environ | {
            "VLLM_DP_RANK": str(rank),
            "VLLM_DP_RANK_LOCAL": str(rank),
            "VLLM_DP_SIZE": str(ranks),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": str(port),
        }
        env.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # ranks keep step with each other in engine processes
        if ranks_share_a_gpu():
            env |= node_environment(rank) | {"VLLM_DP_RANK_LOCAL": "0"}
        job = run.job | {"rank": rank, "tp": tp, "files": [str(f) for f in files]}
        children.append(start_part("data_parallel_rank", job, Path(f"{run.job['out']}.rank{rank}.job.json"), env))
    statuses = [child.wait() for child in children]
    run.check("every rank ended well", not any(statuses), statuses)
    for rank in range(ranks):
        for name, check in json.loads(Path(f"{run.job['out']}.rank{rank}.json").read_text())["checks"].items():
            run.check(f"rank {rank}: {name}", check["passed"], check["measured"])
    out: list[Any] = [None] * len(LENGTHS)
    for rank, file in enumerate(files):
        with np.load(file) as f:
            for i in range(rank, len(LENGTHS), ranks):
                out[i] = {k: f[f"{k}_{i}"] for k in ("tokens", "ids", "values", "prompt_ids", "prompt_values")}
    run.compare("output", run.reference(), out, other_arithmetic=True)


def data_parallel_rank(job: dict[str, Any]) -> None:
    run = Run(job | {"out": f"{job['out']}.rank{job['rank']}.json"})
    # As the reference has it: what vLLM picks here, FlashInfer's CUTLASS kernels, compiles for over 5 minutes.
    # V4.1's experts cannot be Triton's.
    experts = {} if run.v41 else {"moe_backend": "triton"}
    run.start(**GRAPHS, **experts, tensor_parallel_size=job["tp"], enable_expert_parallel=True)
    mine = range(job["rank"], len(LENGTHS), len(job["files"]))
    out = run.generate([run.prompts[i] for i in mine], prompt_logprobs=True)
    arrays = {f"{k}_{i}": v for i, s in zip(mine, out, strict=True) for k, v in s.items() if k != "cached"}
    run.finish()
    np.savez(job["files"][job["rank"]], **arrays)
    while not all(Path(file).exists() for file in job["files"]):  # a rank needs the others to the end
        time.sleep(0.2)
    time.sleep(1)  # vLLM's own example: engines pause their loops before the process ends


@step(gpus=2)
def dp2_ep(run: Run) -> None:
    """Data parallel 2 with experts spread over both."""
    data_parallel(run, ranks=2, tp=1)


@step(gpus=4, shared=False)
def dp2_tp2_ep(run: Run) -> None:
    """Data parallel 2 of tensor parallel 2, experts spread over all four."""
    data_parallel(run, ranks=2, tp=2)


# Reads in the GPU memory of the other instance; on one host by CUDA IPC, without a network card.
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def nixl_environment() -> dict[str, str]:
    return {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}


@step(package="nixl")
def disaggregated(run: Run) -> None:
    """Disaggregated: one instance prefills, another on the same GPU decodes, and NIXL brings the rows over."""
    handed = Path(f"{run.job['out']}.handed.json")
    handed.unlink(missing_ok=True)
    other = start_part(
        "prefill", run.job | {"handed": str(handed)}, Path(f"{run.job['out']}.prefill.job.json"),
        os.environ | nixl_environment(),
    )  # fmt: skip
    os.environ.update(nixl_environment())
    run.start(**GRAPHS, kv_transfer_config=NIXL)
    while not handed.exists():
        if other.poll() is not None:
            raise RuntimeError(f"the instance that prefills ended with {other.returncode}")
        time.sleep(0.2)
    scheduled = run.watch_schedule()
    parameters = [{"kv_transfer_params": params} for params in json.loads(handed.read_text())]
    out = run.generate(run.prompts, extra_args=parameters)
    computed = sum(sum(batch.values()) for batch in scheduled) - len(out) * (STEPS - 1)
    run.check("prompt tokens computed here: at most a block of each", computed <= run.block * len(out), computed)
    run.compare("output", [s | {"prompt_ids": []} for s in run.reference()], out)
    run.check("the other instance was there to the end", other.poll() is None, other.poll())
    # It stays when this one ends; run_child ends both.


def prefill(job: dict[str, Any]) -> None:
    run = Run(job | {"out": f"{job['out']}.prefill.json"})
    run.start(**GRAPHS, kv_transfer_config=NIXL)
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    asked |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    outputs = run.outputs(run.prompts, 1, extra_args=[{"kv_transfer_params": asked}] * len(run.prompts))
    handed = Path(job["handed"])
    draft = handed.with_suffix(".part")
    draft.write_text(json.dumps([output.kv_transfer_params for output in outputs]))
    draft.rename(handed)  # nobody meets half of it
    while True:  # the other instance reads this one's memory until run_child ends both
        time.sleep(1)


PART = {"data_parallel_rank": data_parallel_rank, "prefill": prefill}
