#!/usr/bin/env python3
"""Serving benchmark: FlashMLA against FLASHINFER_MLA_SPARSE_DSV4 in BF16 and FP8, through `vllm bench serve`.

FlashMLA is the stock backend by stock kernels, DropIn the same backend and cache by ours where they serve.

    benchmarks/serve.sh --model DIR --tensor-parallel-size 4 --work /tmp/serve --out results.json
    benchmarks/serve.sh --dummy /tmp/v4-flash ...      the full V4-Flash shape, no download: dummy weights,
                                                       with seeded ones for what index scores come from
    benchmarks/serve.sh --dummy /tmp/v4-share --share-of 4 --tensor-parallel-size 1 ...
    benchmarks/serve.sh --model NAME --base-url http://HOST:8000 --tensor-parallel-size 8 ...      a running server
    benchmarks/serve.sh --load burst,steady --shapes 1k/8k,8k/1k,8k/8k --goodput ttft:2000 tpot:50 --repeat 3 ...
    benchmarks/serve.sh --run 'Humming=FlashMLA --moe-backend humming' ...      one more run, with further options
    benchmarks/serve.sh --dummy /tmp/v4-dspark --dspark ...      with DSpark, as V4-Flash-0731; vLLM 0.25.0 on

The public protocol: prompts of 8192 random tokens, 8192 tokens out, as many prompts as run at once
(16, 32, 64, 256), prefix cache off, full and piecewise CUDA graphs. That is a burst: all begin together, and
the time has a beginning without answers and an end without prompts. In a steady load, --times as many
prompts follow, each as another ends, so that most steps have both; with a number as --load, so many a second
arrive, at random. A user's tokens a second are those after the first (1 / median TPOT), a GPU's those of all
users by --tensor-parallel-size times --share-of. One server a run on the same GPUs:
one after the other or, with --together N, N of them at a time, which start together and are measured in
turns while the others idle. vLLM cannot measure its memory beside others, so --kv-gib then says what the
cache of each gets. (Of --share-of 4 a server takes 43 GiB beside its cache, 38 of them weights: two fit an
H200 with 20 GiB of cache each.) The result counts requests that were preempted because a cache was full.

Before the --repeat measurements of a number of prompts comes one that does not count, of as many prompts of the
same length with fewer tokens out: what is compiled depends on the tokens in a step, and its steps are the same.
What is compiled while the clock runs all the same (new libraries in the caches of Triton, TileLang, DeepGEMM
and FlashInfer), the result names. For the time before the clock it has the seconds of each server's start and
of its first requests, and what of that each library took to compile. Of the repetitions it has the median,
every figure, and meanwhile the GPUs' clocks and temperature, the part of the CPUs' time that was idle or, in a
virtual machine, given to others, and how long a fixed loop of Python took: in some machines the host's speed
changes, and with it that of prefill. What is in --work is not measured again, so an interrupted command can be
given once more; --output-len and --concurrency make it shorter, and the result says so. --profile adds, with
the first concurrency, the share of attention in the GPU time of decode steps, by torch's profiler on rank 0.
--share-of N, for a machine with fewer GPUs than the model needs, is a model of what one of N tensor-parallel
GPUs computes: all layers, its share of the heads, of the width of every expert and of the vocabulary, and
nothing sent between GPUs. Drafts of dummy weights are as good as random, so with --dspark vLLM draws how many
of them are accepted: a step writes 2.74 tokens on average, as a user of V4-Flash-0731 saw with five drafts
(vllm-project/vllm#41834).

The `vllm` on PATH serves, or without one the vLLM of this Python, which is the client. What makes the
start shorter, for all runs alike (the result has the environment and the options):

    VLLM_DEEP_GEMM_WARMUP=skip             the warm-up above compiles what is used, not every shape
    VLLM_USE_BREAKABLE_CUDAGRAPH=1         full and piecewise graphs without torch.compile
    -- --no-enable-flashinfer-autotune --cudagraph-capture-sizes 1 2 4 8 16 32 64

Sizes have to reach the largest concurrency. VLLM_ALLREDUCE_USE_SYMM_MEM=0 is for virtual machines
without NVLink multicast.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import http.client
import itertools
import json
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
BENCHMARKS = str(REPO / "benchmarks")
sys.path += [BENCHMARKS, str(REPO / "scripts")]

from e2e import DROP_IN, STOCK_KERNELS, check_out, end_by_sigterm, json_object, machine, positive  # noqa: E402
from gpu_watch import HostWatch, Watch  # noqa: E402
from serve_cases import Case, Run, add_options, add_runs, cases  # noqa: E402
from serve_report import PROFILED_STEPS, TRACE, attention_share, profiler, row_of, table  # noqa: E402

VLLM = [shutil.which("vllm")] if shutil.which("vllm") else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
FULL_CACHE = "FLASHINFER_MLA_SPARSE_DSV4"
STOCK = ["--attention-backend", "FLASHMLA_SPARSE_DSV4", "--kv-cache-dtype", "fp8_ds_mla"]
RUNS = {
    "FlashMLA": Run(STOCK, STOCK_KERNELS),
    "DropIn": Run(STOCK, DROP_IN),
    "BF16": Run(["--attention-backend", FULL_CACHE, "--kv-cache-dtype", "bfloat16"], {}),
    "FP8": Run(["--attention-backend", FULL_CACHE, "--kv-cache-dtype", "fp8_per_tensor"], {}),
}
SEEDED = ["--load-format", "dummy", "--worker-extension-cls", "seeded_weights.SeededWeights"]
# Of the memory, what has to be free when a server starts whose cache has a given size.
MEMORY_FREE = 0.05
RUNNING = "server"  # the run of --base-url
SHARES = (1, 2, 4, 8)
ACCEPTANCE = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.74}
CAPACITY = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
SERVED = re.compile(r"\] (.*FlashMLA(?:'s| has its) sparse calls.*)")  # the drop-in's line, of each worker
PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total\S* (\S+)", re.MULTILINE)


def stop(what: str) -> None:
    sys.exit(f"error: {what}")


def write(path: Path, value: Any) -> None:
    """As a whole or not at all: what is half written would not be measured again."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(value, indent=1) + "\n")
    draft.replace(path)


def speculation() -> dict[str, Any]:
    """vLLM's --speculative-config of --dspark."""
    import throughput

    return {"method": "dspark", "num_speculative_tokens": throughput.DSPARK_DRAFTS, **ACCEPTANCE}


def write_dummy(folder: Path, share_of: int, dspark: bool = False) -> None:
    """config.json of throughput.py, and the mini checkpoint's tokenizer: only its tokens have text."""
    import make_mini_checkpoint as mini
    import throughput

    place = folder / "config.json"
    ours = [throughput.flash_config(share, dspark=drafts) for share in SHARES for drafts in (False, True)]
    if any(folder.glob("*.safetensors")) or (place.exists() and json_object(place) not in ours):
        stop(f"{folder} holds another model, which --dummy would overwrite; give a new folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        stop(f"--dummy {folder} cannot be made ({error.strerror}); give a new folder.")
    mini.write_tokenizer(folder, mini.Shape().vocab)
    write(place, throughput.flash_config(share_of, dspark=dspark))


def profile_delay(args: argparse.Namespace) -> int:
    """Steps until only decoding is left, if at least 1024 tokens of the prompts are taken a step."""
    case = args.cases[0]
    return case.count * (case.input_len // 1024 + 1) if args.profile else 0


class Running:
    """A server that somebody else started."""

    log = "not known here"

    def __init__(self, url: str):
        self.url = url.rstrip("/")

    def check(self, patience: float = 0.0) -> None:
        pass

    def get(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return answer.read().decode(errors="replace")
        except (urllib.error.URLError, OSError, ValueError):  # ValueError: no such URL can be
            return None

    def healthy(self) -> bool:
        return self.get("/health") is not None

    def preemptions(self) -> float | None:
        """Requests so far whose rows were dropped, to be computed again, because the cache was full; None if the
        server does not say."""
        found = PREEMPTIONS.findall(self.get("/metrics") or "")
        return sum(map(float, found)) if found else None

    def version(self) -> str | None:
        """vLLM's, which may be another than this Python's; None if the server does not say."""
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return json.loads(self.get("/version") or "")["version"]
        return None

    def facts(self) -> dict[str, Any]:
        return {"base_url": self.url, "vllm": self.version()}


class Server(Running):
    """`vllm serve` in a process group of its own; a context that starts it, without waiting, and ends it."""

    def __init__(self, args: argparse.Namespace, name: str, port: int):
        super().__init__(f"http://127.0.0.1:{port}")
        self.log = args.work / f"{name}.log"
        # The graphs' mode not as JSON, which another -cc.OPTION would replace instead of adding to it.
        self.command = [
            *VLLM, "serve", args.model, "--port", str(port), *args.every_run[name].options,
            "--tensor-parallel-size", str(args.tensor_parallel_size), "--block-size", "256",
            "--max-model-len", str(args.max_model_len), "--max-num-seqs", str(args.max_num_seqs),
            "--no-enable-prefix-caching", "-cc.cudagraph_mode=FULL_AND_PIECEWISE",
            *(SEEDED if args.dummy else []), *args.serve_options,
        ]  # fmt: skip
        if args.dspark:
            self.command += ["--speculative-config", json.dumps(speculation())]
        if args.kv_gib:
            size = ["--kv-cache-memory-bytes", str(args.kv_gib << 30)]
            self.command += [*size, "--gpu-memory-utilization", str(MEMORY_FREE)]
        paths = (BENCHMARKS, os.environ.get("PYTHONPATH"))
        self.env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        self.env |= args.every_run[name].environment
        if args.profile:
            steps = {"delay_iterations": profile_delay(args), "max_iterations": PROFILED_STEPS}
            config = profiler(args.work / f"{name}-profile") | steps
            self.command += ["--profiler-config", json.dumps(config)]

    def __enter__(self) -> Server:
        if self.healthy():
            stop(f"something serves at {self.url} already; end it, or give another --port.")
        self.compiled_before, self.began = compiled(), time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=self.env, start_new_session=True
            )
        print("+", " ".join(self.command), f"> {self.log}", flush=True)
        return self

    def check(self, patience: float = 0.0) -> None:
        """Stops if the server has ended, or does within `patience` seconds: its connections close first."""
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return
        stop(f"the server ended with {self.process.returncode}; the end of {self.log} says why.")

    def facts(self) -> dict[str, Any]:
        log = self.log.read_text(errors="replace")
        found = CAPACITY.findall(log)
        tokens = int(found[-1].replace(",", "")) if found else 0
        start = {"seconds": round(self.seconds, 1), "compiled": self.costs}
        served = sorted(set(SERVED.findall(log)))
        return {"vllm": self.version(), "kv_cache_tokens": tokens, "sparse_calls": served, "start": start,
                "command": self.command}  # fmt: skip

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):  # SIGINT is ignored by what a shell started with &
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(timeout=60)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def wait_for(servers: Iterable[Server]) -> None:
    """Until all serve."""
    began, starting = time.monotonic(), list(servers)
    try:
        while starting:
            for server in [*starting]:
                server.check()
                if server.healthy():
                    server.seconds, server.costs = time.monotonic() - server.began, costs(server.compiled_before)
                    starting.remove(server)
            if starting:
                print(f"\rstarting, {time.monotonic() - began:.0f} s", end="", flush=True)
                time.sleep(2)
    except SystemExit:
        print()  # what is wrong has a line of its own
        raise
    print(f"\rserves after {time.monotonic() - began:.0f} s")


def compiled() -> dict[str, tuple[str, float]]:
    """Libraries in the caches of what compiles at run time: whose each is, and when it was written."""
    home, given = Path.home(), os.environ.get
    cache = Path(given("XDG_CACHE_HOME", home / ".cache"))
    vllm = Path(given("VLLM_CACHE_ROOT", cache / "vllm"))
    folders = {
        "Triton": given("TRITON_CACHE_DIR", home / ".triton"),
        "TileLang": given("TILELANG_CACHE_DIR", home / ".tilelang"),
        "vLLM": vllm,  # of torch.compile and, unless it has a place of its own, DeepGEMM, which comes after it
        "DeepGEMM": given("DG_JIT_CACHE_DIR", vllm / "deep_gemm"), "FlashInfer": cache / "flashinfer",
    }  # fmt: skip
    found = {}
    for library, folder in folders.items():
        for file in Path(folder).rglob("*"):
            if file.suffix in (".cubin", ".so"):
                with contextlib.suppress(FileNotFoundError):  # renamed meanwhile by who writes it
                    found["/".join(file.parts[-2:])] = library, file.stat().st_mtime
    return found


def costs(before: dict[str, tuple[str, float]]) -> dict[str, dict[str, float]]:
    """By library, what was compiled since `before`: files, and the seconds since the file before, of any library.

    So other work between two files counts too; what comes before the first does not.
    """
    new = sorted((when, library) for name, (library, when) in compiled().items() if name not in before)
    found: dict[str, dict[str, float]] = {}
    for (earlier, _), (when, library) in itertools.pairwise([*new[:1], *new]):
        of = found.setdefault(library, {"files": 0, "seconds": 0.0})
        of["files"], of["seconds"] = of["files"] + 1, round(of["seconds"] + when - earlier, 1)
    return found


def warm_up(args: argparse.Namespace, server: Running, case: Case) -> None:
    """As the measurement, but only as many tokens out as keep all decoding until the last prompt is read, if at
    least 4096 tokens of the prompts are taken a step."""
    output = min(case.output_len, 16 + case.count * case.input_len // 4096)
    rng = random.Random(str(case))  # else the prompts of fewer at once would come again

    def ask(tokens: list[int]) -> None:
        body = {"model": args.model, "prompt": tokens, "max_tokens": output, "ignore_eos": True, "temperature": 1}
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(), head)
        with urllib.request.urlopen(request) as answer:
            answer.read()

    prompts = [[rng.randrange(16, 4096) for _ in range(case.input_len)] for _ in range(case.count)]
    pool = concurrent.futures.ThreadPoolExecutor(case.count)
    try:
        list(pool.map(ask, prompts))
    except (OSError, http.client.HTTPException) as error:  # HTTPError is the first, an answer cut short the second
        server.check(patience=0 if isinstance(error, urllib.error.HTTPError) else 10)
        stop(f"the server answers a prompt with: {error}; its log is {server.log}.")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # if interrupted, the server ends before its answers


# Clients are forked from a process that has imported vLLM once: for each of them that takes ten seconds.
CLIENTS = multiprocessing.get_context("forkserver")
CLIENTS.set_forkserver_preload(["vllm.benchmarks.serve"])


def vllm_bench_serve(options: list[str]) -> None:
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args(options))


def bench(args: argparse.Namespace, server: Running, case: Case, *options: str, seed: int = 0) -> dict[str, Any]:
    """What `vllm bench serve` measures of prompts, each of which has to be answered."""
    draft = args.work / "bench.json"
    draft.unlink(missing_ok=True)
    command = [
        "--base-url", server.url, "--model", args.model, "--dataset-name", "random",
        "--random-input-len", str(case.input_len), "--random-output-len", str(case.output_len), "--ignore-eos",
        *case.client_options(), "--seed", str(seed), "--temperature", "1",
        "--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99",
        "--save-result", "--result-dir", str(args.work), "--result-filename", draft.name,
        *(["--goodput", *args.goodput] if args.goodput else []), *options,
    ]  # fmt: skip
    client = CLIENTS.Process(target=vllm_bench_serve, args=(command,), daemon=True)  # ends with this process
    client.start()
    client.join()
    server.check()
    if client.exitcode or not draft.exists():
        ended = f"vllm bench serve ended with {client.exitcode}"
        stop(f"{ended} and its output says why; the server's log is {server.log}.")
    found = json.loads(draft.read_text())
    if found["completed"] != case.prompts:
        stop(f"the server answered {found['completed']} prompts of {case.prompts}; {server.log} says why.")
    return found


def seed_of(case: Case, repeat: int) -> int:
    """Of its prompts, which every run has, but no other measurement: by one seed those of few are among those of
    more, and a server that ran already may have its prefix cache on."""
    return random.Random(f"{case}, {repeat}").getrandbits(32)


def place(args: argparse.Namespace, name: str, case: Case, repeat: int) -> Path:
    return args.work / f"{name}-{case.label.replace(' ', '-').replace('/', '-')}-{repeat}.json"


@contextlib.contextmanager
def serving(args: argparse.Namespace, names: list[str]) -> Iterator[dict[str, Running]]:
    if args.base_url:
        yield {RUNNING: Running(args.base_url)}
        return
    with contextlib.ExitStack() as ends:
        servers = {name: ends.enter_context(Server(args, name, args.port + n)) for n, name in enumerate(names)}
        wait_for(servers.values())
        yield servers


def measure(args: argparse.Namespace, names: list[str]) -> None:
    """Whatever of the runs `names` is not in --work yet, by servers that start together, in turns."""
    missing = {
        case: [
            (n, name)
            for n in range(1, case.repeat + 1)
            for name in (names if n % 2 else names[::-1])  # each after the other as often as before it
            if not place(args, name, case, n).exists()
        ]
        for case in args.cases
    }
    profiles = [name for name in names if args.profile and not any((args.work / f"{name}-profile").glob(TRACE))]
    wanted = {*profiles, *(name for turns in missing.values() for _, name in turns)}
    if not wanted:
        return
    with serving(args, [name for name in names if name in wanted]) as servers:
        facts = {name: server.facts() for name, server in servers.items()}
        warm = set()
        for case, turns in missing.items():
            for name in dict.fromkeys(name for _, name in turns):
                steps = (name, case.count, case.input_len, case.output_len)
                if steps not in warm:
                    began, before = time.monotonic(), compiled()
                    warm_up(args, servers[name], case)
                    seconds = round(time.monotonic() - began, 1)
                    facts[name].setdefault("first_requests", {"seconds": seconds, "compiled": costs(before)})
                    write(args.work / f"{name}.json", facts[name])
                warm.add(steps)
            for n, name in turns:
                print(f"{name}: {case.label} at once, {n} of {case.repeat}", flush=True)
                before, preempted = compiled(), servers[name].preemptions()
                with Watch() as watch, HostWatch() as host:
                    found = bench(args, servers[name], case, seed=seed_of(case, n))
                    found["gpu_meanwhile"] = watch.summary()
                found["host_meanwhile"] = host.summary()
                found["compiled"] = sorted(compiled().keys() - before.keys())
                now = servers[name].preemptions()
                found["preemptions"] = None if None in (preempted, now) else round(now - preempted)
                write(place(args, name, case, n), found)
        for name in profiles:
            profiled = replace(args.cases[0], load="burst", output_len=profile_delay(args) + 4 * PROFILED_STEPS)
            bench(args, servers[name], profiled, "--profile")


def collect(args: argparse.Namespace, where: dict[str, Any]) -> dict[str, Any]:
    first = args.cases[0]
    result: dict[str, Any] = {
        "command": shlex.join(sys.argv),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": where,
        "weights": "dummy, seeded index scores" if args.dummy else "the server's" if args.base_url else "real",
        "together": args.together,
        "kv_gib": args.kv_gib,
        "share_of": args.share_of,
        "speculation": speculation() if args.dspark else None,
        "tensor_parallel_size": args.tensor_parallel_size,
        "input_len": first.input_len,
        "output_len": first.output_len,
        "goodput": args.goodput,
        "runs": {},
    }
    for name in args.runs:
        run = json.loads((args.work / f"{name}.json").read_text()) | {"concurrency": {}}
        for case in args.cases:
            every = [json.loads(place(args, name, case, n).read_text()) for n in range(1, case.repeat + 1)]
            row = row_of(every, args.tensor_parallel_size * args.share_of)
            run["concurrency"][case.label] = {"case": asdict(case)} | row
        if args.profile:
            run["decode_step"] = attention_share(args.work / f"{name}-profile")
        result["runs"][name] = run
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="checkpoint folder or name")
    what.add_argument("--dummy", type=Path, metavar="DIR", help="make this folder, and serve dummy weights")
    parser.add_argument(
        "--share-of", type=int, choices=SHARES, default=1, help="GPUs whose share is served, with --dummy"
    )
    parser.add_argument("--dspark", action="store_true", help="drafts of DSpark, with --dummy")
    parser.add_argument("--base-url", metavar="URL", help="measure the server that runs there, by --model's name")
    parser.add_argument("--tensor-parallel-size", type=positive, help="default: 4; no default with --base-url")
    parser.add_argument("--runs", default=",".join(RUNS), help="default: %(default)s, and those of --run")
    parser.add_argument(
        "--run", action="append", default=[], metavar="NAME=RUN …", help="as RUN, with VARIABLE=VALUE and options"
    )
    parser.add_argument("--together", type=int, default=1, metavar="N", help="servers at a time, with --kv-gib")
    parser.add_argument("--kv-gib", type=int, metavar="G", help="GiB of each server's cache (default: all left)")
    add_options(parser)
    parser.add_argument("--profile", action="store_true", help="also the share of attention in a decode step")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--work", type=Path, default=Path("serve-work"), help="what was measured so far")
    parser.add_argument("--out", type=Path, default=Path("serve.json"))
    parser.add_argument("serve_options", nargs="*", metavar="-- OPTION", help="for vllm serve, after --")
    args = parser.parse_args()
    if not (args.tensor_parallel_size or args.base_url):
        args.tensor_parallel_size = 4
    if args.share_of > 1:
        if not args.dummy:
            stop("--share-of is for --dummy: a real checkpoint is of a whole model.")
        if args.share_of * args.tensor_parallel_size > 8:
            stop("V4-Flash can be divided by 8 at most; give a smaller --share-of or --tensor-parallel-size.")
    if args.dspark and not args.dummy:
        stop("--dspark is for --dummy; with a real checkpoint give vLLM's --speculative-config after --.")
    if args.base_url:
        given = [name for name in ("dummy", "profile", "kv_gib", "serve_options", "run") if getattr(args, name)]
        if given or args.together > 1:
            stop("--base-url is of a server that runs already; --dummy, --profile, --together, --kv-gib, "
                 "--run and options for vllm serve are for those that are started.")  # fmt: skip
        if not Running(args.base_url).healthy():
            stop(f"nothing at {args.base_url} answers /health; give the URL of a vLLM server, without /v1.")
        if not args.tensor_parallel_size:
            stop("with --base-url say by --tensor-parallel-size on how many GPUs that server runs.")
        args.runs = RUNNING
    if args.together < 1 or (args.together > 1 and not args.kv_gib):
        stop(f"--together is {args.together}; give 1 or more, and --kv-gib with more than one: "
             "vLLM cannot measure its memory beside others.")  # fmt: skip
    if args.kv_gib is not None and args.kv_gib < 1:
        stop(f"--kv-gib is {args.kv_gib}; give 1 or more.")
    try:
        args.cases, args.every_run = cases(args), add_runs(RUNS, args.run)
    except ValueError as error:
        stop(str(error))
    if args.runs == parser.get_default("runs"):
        args.runs = ",".join(args.every_run)
    args.runs = args.runs.split(",")
    if unknown := set(args.runs) - {*args.every_run, *([RUNNING] if args.base_url else [])}:
        stop(f"--runs names {', '.join(unknown)}; there are {', '.join(args.every_run)}.")
    if not 1 <= args.port <= 65536 - args.together:
        stop(f"--port is {args.port}; give 1 to {65536 - args.together}: servers take it and those after it.")
    check_out(args.out)
    try:
        args.work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        stop(f"--work {args.work} cannot be made ({error.strerror}); give another folder.")
    if args.dummy:
        write_dummy(args.dummy, args.share_of, args.dspark)
        args.model = str(args.dummy)
    # What is in the folder is only good for the same question.
    args.max_num_seqs = max(case.count for case in args.cases)
    args.max_model_len = 8 + max(case.input_len + case.output_len for case in args.cases)
    if args.profile:
        profiled = args.cases[0].input_len + profile_delay(args) + 4 * PROFILED_STEPS + 8
        args.max_model_len = max(args.max_model_len, profiled)
    args.shapes = sorted({f"{case.input_len}/{case.output_len}" for case in args.cases})
    keys = ("model", "base_url", "share_of", "dspark", "tensor_parallel_size", "together", "kv_gib", "shapes",
            "times", "goodput", "run", "serve_options", "max_num_seqs", "max_model_len")  # fmt: skip
    question = {key: getattr(args, key) for key in keys} | {"dummy": args.dummy and SEEDED, "machine": machine()}
    asked = args.work / "question.json"
    measured = any(args.work.glob("*-[0-9]*.json"))
    if measured and asked.exists() and json.loads(asked.read_text()) != question:
        stop(f"{args.work} holds measurements of something else ({asked}); give another --work.")
    write(asked, question)
    end_by_sigterm()
    for first in range(0, len(args.runs), args.together):
        measure(args, args.runs[first : first + args.together])
    result = collect(args, question["machine"])
    write(args.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
