"""What the scripts share that start vLLM: prompts, child processes, forced continuations, comparison, provenance.

The parent process imports neither torch nor vLLM, so that the GPU is free and its memory is the child's.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

# Whether our kernels stand in for FlashMLA's over the stock cache, where they serve; by default they do.
STOCK_KERNELS, DROP_IN = {"VLLM_DSV4_DROP_IN": "0"}, {"VLLM_DSV4_DROP_IN": "1"}
# Of DeepSeek V3.2 and GLM-5, over either of their caches: FlashMLA as stock vLLM has it, our backend, and the
# drop-in. Only the last runs with DROP_IN: what our kernels serve in the second is then MLA_KERNELS_SPARSE's.
SPARSE_MLA_CACHES = {"bf16": "auto", "fp8": "fp8_ds_mla"}
SPARSE_MLA = {
    f"{name}_{cache}": {"attention_backend": backend, "kv_cache_dtype": dtype}
    for cache, dtype in SPARSE_MLA_CACHES.items()
    for name, backend in {
        "flashmla": "FLASHMLA_SPARSE", "sparse": "MLA_KERNELS_SPARSE", "drop_in": "FLASHMLA_SPARSE"
    }.items()
}  # fmt: skip
SPARSE_MLA_BASE = {
    f"{name}_{cache}": f"flashmla_{cache}" for name in ("sparse", "drop_in") for cache in SPARSE_MLA_CACHES
}
SPARSE_MLA_ENVIRONMENT = {
    name: DROP_IN if name.startswith("drop_in") else STOCK_KERNELS for name in SPARSE_MLA
}
# What vLLM chooses by itself on GPUs of these compute capabilities, with the series sparse-mla; see `stand_in`.
CAPABILITIES = {"sm80": (8, 0), "sm89": (8, 9)}
STAND_INS = {
    f"{sm}_{cache}": {"kv_cache_dtype": dtype} for sm in CAPABILITIES for cache, dtype in SPARSE_MLA_CACHES.items()
}
# For nodes of one host: NCCL over TCP, and no all-reduce that asks for the GPUs of others.
NODES = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
# What `vllm serve --headless` runs once it has parsed its options.
HEADLESS = """
import argparse, json, sys
from vllm.entrypoints.cli.serve import run_headless
run_headless(argparse.Namespace(api_server_count=0, reasoning_parser_plugin=None, **json.loads(sys.argv[1])))
"""
MIN_PROB = 1e-6  # log-probability differences count tokens the reference gives at least this
LOG_PREFIX = f"[{Path(sys.argv[0]).stem} "


def log(message: str) -> None:
    print(f"{LOG_PREFIX}{time.strftime('%H:%M:%S')}] {message}", flush=True)


def tail(path: Path, lines: int = 60) -> str:
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def positive(text: str) -> int:
    """The whole number in an option, for argparse."""
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def positives(text: str) -> list[int]:
    """Several, with commas between them."""
    return [positive(part) for part in text.split(",")]


def prepare(args: argparse.Namespace) -> None:
    """Make the folders of --out and --work, by default OUT without suffix; end the script now, not after hours, if
    they cannot be written, or if another command is at work in the second."""
    args.work = args.work or args.out.with_suffix("")
    try:
        for folder in (args.out.parent, args.work):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"error: {folder} cannot be made ({error.strerror}); give another --out or --work.")
    check_out(args.out)
    # On the folder, not on a file in it (as filelock would have it): a refusal leaves nothing behind.
    fd = os.open(args.work, os.O_RDONLY)
    weakref.finalize(args, os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"error: another command is at work in {args.work}; wait for its end, or give another --work.")
    end_by_sigterm()


def end_by_sigterm() -> None:
    """As by Ctrl-C: what the script has started ends too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: terminated; the same command goes on."))


def check_out(out: Path) -> None:
    """Ends the script if `out` cannot be written."""
    if out.is_dir() or not os.access(out if out.exists() else out.absolute().parent, os.W_OK):
        sys.exit(f"error: --out {out} cannot be written; give a file like results.json in a folder that is there.")


def visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return list(itertools.takewhile(lambda gpu: gpu not in ("", "-1"), named.split(",")))  # as CUDA reads it
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(i) for i in range(len(listed.splitlines()))]


def need_gpus(count: int) -> None:
    """Ends the script if so many are not visible."""
    if count > (there := len(visible_gpus())):
        sys.exit(f"error: this needs {count} GPU{'s' * (count > 1)}; {there} are visible.")


def json_object(path: Path) -> dict[str, Any]:
    """What the file holds; ends the script if that is not a JSON object."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        sys.exit(f"error: {path} cannot be read ({error.strerror}).")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        sys.exit(f"error: {path} is no JSON object; restore it, or give another.")
    return found


def model_settings(model: Path) -> dict[str, Any]:
    """A checkpoint's config.json, with the fields of its language model, which V4.1 has apart, at the top."""
    config = json_object(model / "config.json")
    config |= config.get("text_config", {})
    if not isinstance(config.get("vocab_size"), int):
        sys.exit(f"error: {model / 'config.json'} has no vocab_size; give a language model's checkpoint.")
    return config


def has_sparse_mla(config: dict[str, Any]) -> bool:
    """Whether a model of this config.json has the backends of `SPARSE_MLA`, and no others here."""
    return config.get("model_type") in ("deepseek_v32", "glm_moe_dsa")


def child_environment(**changes: str) -> dict[str, str]:
    """The environment of a process that runs vLLM on behalf of a script in this folder."""
    env = dict(os.environ)
    env.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")  # else it compiles a thousand GEMM shapes
    # Sums of ranks by NVLink multicast: not there on every virtual machine. vLLM 0.33.0's by FlashInfer (mnnvl)
    # hung with two of these scripts on the same GPUs; what takes its place (trtllm) is compiled once, for minutes.
    env.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    env.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
    env.setdefault("VLLM_FLASHINFER_ALLREDUCE_BACKEND", "trtllm")
    env.pop("VLLM_DSV4_PROVIDER", None)
    here = str(Path(__file__).resolve().parent)
    env["PYTHONPATH"] = os.pathsep.join(p for p in (here, env.get("PYTHONPATH")) if p)
    return env | changes


def compiled_when_used() -> dict[str, Any]:
    """For `LLM`: vLLM 0.33.0 compiles 213 kernels before it starts, unless told not to, and some take 15 s."""
    vllm = importlib.util.find_spec("vllm")
    assert vllm and vllm.origin
    has_it = "enable_jit_warmup" in (Path(vllm.origin).parent / "config/kernel.py").read_text()
    return {"kernel_config": {"enable_jit_warmup": False}} if has_it else {}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ranks_share_a_gpu() -> bool:
    """Whether CUDA_VISIBLE_DEVICES names a GPU more than once, each time for another rank."""
    gpus = visible_gpus()
    return len(set(gpus)) < len(gpus)


def node_environment(rank: int) -> dict[str, str]:
    """For one rank on its GPU. NCCL takes ranks of one host for those of several, and so lets them share a GPU."""
    return NODES | {"CUDA_VISIBLE_DEVICES": visible_gpus()[rank], "NCCL_HOSTID": f"rank {rank}"}


def end_with(node: subprocess.Popen, rank: int) -> None:
    """Ends this process if a node ends by an error, which it would wait for without a word."""
    if (status := node.wait()) > 0:
        log(f"error: the node of rank {rank} ended with {status}; what it said is above.")
        os._exit(1)


def start_nodes(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[subprocess.Popen]]:
    """Start vLLM on every visible GPU but the first, a node each; this process is then the first.

    Returns what to add to `arguments`, which are those of `LLM`, and the nodes, which stay until they are killed.
    """
    ranks = range(len(visible_gpus()))
    nodes = {"nnodes": len(ranks), "master_addr": "127.0.0.1", "master_port": free_port()}
    if ranks_share_a_gpu():
        nodes["disable_custom_all_reduce"] = True  # it looks for as many GPUs as ranks
    environments = [node_environment(rank) for rank in ranks]
    others = []
    for rank in ranks[1:]:
        options = json.dumps(arguments | nodes | {"node_rank": rank})
        environment = os.environ | environments[rank]
        others.append(subprocess.Popen([sys.executable, "-c", HEADLESS, options], env=environment))
        threading.Thread(target=end_with, args=(others[-1], rank), daemon=True).start()
    os.environ.update(environments[0])
    return nodes, others


def stand_in(name: str) -> None:
    """Have vLLM and our kernels take this process's GPU for one of `CAPABILITIES` from now on.

    They choose as they would there. What they choose is compiled for the GPU that is there and runs on it. To be
    called before vLLM makes its configuration, in the process of its workers.
    """
    import torch
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    capability = CAPABILITIES[name]
    # FlashInfer, Inductor and Triton compile for the GPU that is there.
    major, minor = torch.cuda.get_device_capability()
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = f"{major}.{minor}a"
    CudaInterface.get_compute_capability = staticmethod(lambda device=None: 10 * major + minor)
    triton.runtime.driver.active.get_current_target()  # which keeps torch's own function from here on
    torch.cuda.get_device_capability = lambda device=None: capability
    found = DeviceCapability(*capability)
    type(current_platform).get_device_capability = classmethod(lambda cls, device_id=0: found)


INTERRUPTED = threading.Event()


def at_once(jobs: int, run: Callable[[str], None], names: Iterable[str]) -> None:
    """`run` of each name, so many at a time; when interrupted, `run_child` ends what runs."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(run, names))
        except (KeyboardInterrupt, SystemExit):
            INTERRUPTED.set()
            raise


def run_child(command: list[str], log_file: Path, env: dict[str, str], timeout: float) -> tuple[Any, float]:
    """Run to the end or to the timeout, with all its processes, showing its `log` lines meanwhile.

    Returns the exit status (or words) and the seconds.
    """
    start = time.perf_counter()
    with log_file.open("w") as f, log_file.open(errors="replace") as lines:
        process = subprocess.Popen(
            command, stdout=f, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        status: Any = None
        try:
            while status is None:
                if INTERRUPTED.is_set():
                    sys.exit(1)
                if time.perf_counter() - start > timeout:
                    status = f"timeout after {timeout} s"
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(timeout=2)
                for line in lines:
                    if line.startswith(LOG_PREFIX):
                        print("   ", line, end="", flush=True)
        finally:  # also the workers that a crashed engine leaves behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, round(time.perf_counter() - start, 1)


def make_prompts(lengths: list[int], vocab: int, seed: int) -> list[list[int]]:
    """Zipf-distributed tokens; a third of the text repeats earlier spans."""
    prompts = []
    for n in lengths:
        r = np.random.Generator(np.random.Philox(key=[seed, n]))
        names = np.arange(16, vocab)
        weights = 1.0 / (np.arange(len(names)) + 10.0)
        names = r.permutation(names)
        text: list[int] = []
        while len(text) < n:
            if len(text) >= 32 and r.random() < 1 / 3:
                length = int(r.integers(8, 65))
                at = int(r.integers(0, len(text) - 8))
                text += text[at : at + length]
            else:
                text += r.choice(names, size=36, p=weights / weights.sum()).tolist()
        prompts.append([int(t) for t in text[:n]])
    return prompts


# ---------------------------------------------------------------- in the child
def import_flashinfer() -> None:
    """Before vLLM: FlashInfer 0.6.8 (0.20.2, 0.21.0) takes TileLang's stub for the CUDA runtime if it came first.

    With several GPUs, vLLM imports FlashInfer first itself.
    """
    with contextlib.suppress(ImportError):
        import flashinfer.comm  # noqa: F401


def __getattr__(name: str) -> Any:
    """`ForcedTokens`, made when vLLM asks for it: the parent process never imports vLLM."""
    if name != "ForcedTokens":
        raise AttributeError(name)

    def force(forced: list[int], done: int, logits: Any) -> Any:
        token = forced[min(max(done, 0), len(forced) - 1)]
        logits.fill_(float("-inf"))
        logits[token] = 0.0
        return logits

    try:  # for model runner V2, the default in 0.33.0
        if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
            raise ImportError
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

        class ForcedTokens(LogitsProcessor):
            """Leaves only the next token of `SamplingParams.extra_args["forced"]`.

            A request keeps its slot, and rows come in any order.
            """

            def __init__(self, vllm_config: Any, req_states: Any) -> None:
                self.prompt_lens, self.forced = req_states.prompt_len.np, {}

            def add_request(self, req_idx: int, sampling_params: Any) -> bool:
                self.forced[req_idx] = (sampling_params.extra_args or {}).get("forced")
                return bool(self.forced[req_idx])

            def apply(self, logits: Any, ctx: Any) -> Any:
                for row, slot, position in zip(logits, ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist()):  # noqa: B905
                    if self.forced.get(slot):
                        force(self.forced[slot], position + 1 - int(self.prompt_lens[slot]), row)
                return logits

    except ImportError:
        from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

        class ForcedTokens(AdapterLogitsProcessor):
            """Leaves only the next token of `SamplingParams.extra_args["forced"]`."""

            def is_argmax_invariant(self) -> bool:
                return False

            def new_req_logits_processor(self, params: Any) -> Any:
                forced = (params.extra_args or {}).get("forced")
                return (lambda output_ids, logits: force(forced, len(output_ids), logits)) if forced else None

    globals()["ForcedTokens"] = ForcedTokens
    return ForcedTokens


def positions(logprobs: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """(token ids, log-probabilities) of each position, from either of vLLM's containers."""
    if hasattr(logprobs, "start_indices"):
        ids = np.asarray(logprobs.token_ids, dtype=np.int64)
        values = np.asarray(logprobs.logprobs, dtype=np.float32)
        spans = zip(logprobs.start_indices, logprobs.end_indices, strict=True)
        return [(ids[a:b], values[a:b]) for a, b in spans]
    out = []
    for one in logprobs:
        one = one or {}
        ids = np.fromiter(one.keys(), dtype=np.int64, count=len(one))
        out.append((ids, np.array([v.logprob for v in one.values()], dtype=np.float32)))
    return out


def full_rows(entries: list[tuple[np.ndarray, np.ndarray]], vocab: int) -> np.ndarray:
    rows = np.full((len(entries), vocab), np.nan, dtype=np.float32)
    for row, (ids, values) in zip(rows, entries, strict=True):
        row[ids] = values
    missing = int(np.isnan(rows).sum())
    if missing:
        raise RuntimeError(f"{missing} log-probabilities missing: not the full vocabulary")
    return rows


# ---------------------------------------------------------------- comparison
def compare_full(ref: np.ndarray, run: np.ndarray) -> dict[str, np.ndarray]:
    a, b = ref.astype(np.float64), run.astype(np.float64)
    p = np.exp(a)
    diff = np.abs(a - b)
    return {
        "kl": (p * (a - b)).sum(-1),
        "diff": np.where(p > MIN_PROB, diff, 0).max(-1),
        "top1": a.argmax(-1) == b.argmax(-1),
    }


def compare_top(
    ref_ids: np.ndarray, ref: np.ndarray, run_ids: np.ndarray, run: np.ndarray
) -> dict[str, np.ndarray]:
    """As compare_full where each side reports its most likely tokens only: lower bounds.

    Tokens that both report are classes of their own. The run gave those that only the reference reports at
    most its least reported probability each; of what it may have given them, the bound takes the best fit.
    """
    kl, diff, top1 = [], [], []
    for ia, a, ib, b in zip(ref_ids, ref, run_ids, run, strict=True):
        a, b = a.astype(np.float64), b.astype(np.float64)
        _, at_a, at_b = np.intersect1d(ia, ib, return_indices=True)
        x, y, missing = a[at_a], b[at_b], np.delete(a, at_a)
        p_missing = np.exp(missing).sum()
        p_rest = max(1.0 - np.exp(x).sum() - p_missing, 1e-12)
        left = max(1.0 - np.exp(y).sum(), 1e-12)
        q_missing = min(len(missing) * np.exp(b.min()), left * p_missing / (p_missing + p_rest))
        bound = (np.exp(x) * (x - y)).sum() + p_rest * np.log(p_rest / max(left - q_missing, 1e-12))
        kl.append(bound + (p_missing * np.log(p_missing / q_missing) if len(missing) else 0.0))
        differences = np.concatenate([np.abs(x - y), np.maximum(missing - b.min(), 0.0)])
        diff.append(differences[np.exp(np.concatenate([x, missing])) > MIN_PROB].max(initial=0.0))
        top1.append(ia[a.argmax()] == ib[b.argmax()])
    return {"kl": np.array(kl), "diff": np.array(diff), "top1": np.array(top1)}


def summary(parts: list[dict[str, np.ndarray]]) -> dict[str, Any] | None:
    if not parts:
        return None
    kl, diff, top1 = (np.concatenate([p[k] for p in parts]) for k in ("kl", "diff", "top1"))
    return {
        "positions": len(kl),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "logprob_diff_max": float(diff.max()),
        "top1": float(top1.mean()),
        "top1_misses": int((~top1).sum()),
    }


def version_of(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
        found["gpus"] = done.stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError) as e:
        found["gpus"] = f"unknown: {e}"
    packages = ("torch", "triton", "vllm", "transformers", "flashinfer-python", "numpy")
    found["versions"] = {package: version_of(package) for package in packages}
    if wheel := version_of("vllm-dsv4-overlay"):
        found["wheel"] = wheel
    spec = importlib.util.find_spec("vllm")
    if spec and spec.submodule_search_locations:
        record = Path(list(spec.submodule_search_locations)[0]) / "_dsv4_overlay" / "record.json"
        found["overlay"] = json.loads(record.read_text()) if record.exists() else None
    secret = re.compile("KEY|TOKEN|SECRET|PASSWORD")
    found["environment"] = {name: value for name, value in sorted(os.environ.items())
                            if name.startswith("VLLM_") and not secret.search(name)}  # fmt: skip
    return found


def comparable(where: dict[str, Any]) -> dict[str, Any]:
    """Of `machine()`, what has to be the same for results to be of one comparison: not how many GPUs there are."""
    gpus = sorted(set(where.get("gpus", ())))  # names and drivers
    return {key: where.get(key) for key in ("versions", "overlay", "wheel", "environment")} | {"gpus": gpus}


def kept(out: Path, where: dict[str, Any]) -> dict[str, Any]:
    """The results that `out` holds already; ends the script if they are of other software or GPUs."""
    results = json_object(out) if out.exists() else {}
    if results and comparable(results.get("machine", {})) != comparable(where):
        what = "vLLM, overlay, environment, GPU or driver"
        sys.exit(f"error: {out} holds results of another {what}; give another --out.")
    return results
