"""A step while it runs, in a process of its own: its engine, its checks, and what it measures."""

from __future__ import annotations

import collections
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from e2e import (
    DROP_IN,
    SPARSE_MLA,
    SPARSE_MLA_BASE,
    SPARSE_MLA_ENVIRONMENT,
    STAND_INS,
    STOCK_KERNELS,
    compiled_when_used,
    has_sparse_mla,
    import_flashinfer,
    log,
    make_prompts,
    model_settings,
    positions,
    ranks_share_a_gpu,
    stand_in,
    version_of,
)
from packaging.version import Version

from .comparison import CONTROL_KL, allowed, difference

ENTRY = Path(__file__).resolve().parents[1] / "features_e2e.py"
Prompt = list[int] | dict[str, Any]  # tokens, or what vLLM takes for a prompt
OURS = "FLASHINFER_MLA_SPARSE_DSV4"
BACKENDS = {
    "bf16": {"attention_backend": OURS, "kv_cache_dtype": "bfloat16"},
    "fp8": {"attention_backend": OURS, "kv_cache_dtype": "fp8_per_tensor"},
    "flashmla": {"kv_cache_dtype": "fp8"},  # vLLM's choice for these rows
    "stock": {"kv_cache_dtype": "fp8"},
    **SPARSE_MLA,
    **STAND_INS,
}
OF_SPARSE_MLA = [*SPARSE_MLA, *STAND_INS]  # for DeepSeek V3.2 and GLM-5
# Without the drop-in FlashMLA is what it is in stock vLLM.
ENVIRONMENT = {
    "flashmla": STOCK_KERNELS,
    "stock": DROP_IN,
    **SPARSE_MLA_ENVIRONMENT,
    **dict.fromkeys(STAND_INS, STOCK_KERNELS),
}
# What a backend is measured against, if not its own plain run.
BASE = {"stock": "flashmla", **SPARSE_MLA_BASE}
# Over the rows of FlashMLA: it, and what is measured against it.
FLASHMLA = [*BASE.values(), *BASE]
LENGTHS = [5, 63, 64, 127, 128, 129, 255, 256, 300, 1000, 3000, 8192]
STEPS, TOP, PROMPT_TOP = 48, 20, 8
KV_GIB = 4
SIZES = [1, 2, 4, 8, 16, 32, 64]
MIXED_SIZES = [*SIZES, 128, 256, 512, 1024, 2048]
GRAPHS = {
    "enforce_eager": False,
    "async_scheduling": True,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES},
}


@dataclass(frozen=True)
class Step:
    gpus: int
    function: Callable[[Run], None]
    environment: dict[str, str]
    backends: list[str]
    shared: bool  # whether its ranks may share a GPU
    drafts: str | None  # of the checkpoint: "mtp" or "dspark"
    images: bool  # whether the checkpoint has to take them
    package: str | None
    since: str | None  # a release of vLLM

    def lacks(self, backend: str, config: dict[str, Any]) -> str | None:
        """Why it cannot run here, with this backend on a checkpoint of this configuration; None if it can."""
        drafts = "mtp" if config.get("num_nextn_predict_layers") else None
        if "dspark_block_size" in config:
            drafts = "dspark"
        if self.drafts not in (None, drafts):
            return f"needs a checkpoint with drafts of {self.drafts}"
        if self.images and not has_images(config):
            return "needs a checkpoint with images"
        if backend not in self.backends:
            of_the_model = [b for b in self.backends if (b in OF_SPARSE_MLA) == (backend in OF_SPARSE_MLA)]
            return f"is for --backend {' and '.join(of_the_model)}"
        if not self.shared and ranks_share_a_gpu():
            return "needs a GPU for every rank"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"needs the package {self.package}"
        if self.since and Version(version_of("vllm") or "0") < Version(self.since):
            return f"needs vLLM {self.since}"
        return None


STEP: dict[str, Step] = {}


def step(
    gpus: int = 1,
    *,
    backends: list[str] | None = None,
    shared: bool = True,
    drafts: str | None = None,
    images: bool = False,
    package: str | None = None,
    since: str | None = None,
    **env: str,
) -> Callable:
    """Register a step that needs all that and these environment variables; its docstring is its help."""

    def register(function: Callable[[Run], None]) -> Callable[[Run], None]:
        where = backends or list(BACKENDS)
        STEP[function.__name__] = Step(gpus, function, env, where, shared, drafts, images, package, since)
        return function

    return register


class Run:
    """A step while it runs: its engine, and what it has found so far, in a file."""

    def __init__(self, job: dict[str, Any]):
        self.job = job
        self.result: dict[str, Any] = {"checks": {}, "measured": {}}
        self.prompts = make_prompts(LENGTHS, job["vocab"], seed=0)

    def save(self, **measured: Any) -> None:
        self.result["measured"] |= measured
        for name, value in measured.items():
            log(f"{name}: {str(value)[:300]}")
        Path(self.job["out"]).write_text(json.dumps(self.result))

    def check(self, name: str, passed: Any, measured: Any = None) -> None:
        self.result["checks"][name] = {"passed": bool(passed), "measured": measured}
        log(f"{'pass' if passed else 'FAIL'}: {name} ({measured})")
        self.save()

    def start(self, **changes: Any) -> Any:
        """An `LLM`, by default as the reference's."""
        begin = time.perf_counter()
        import_flashinfer()
        if self.job["backend"] in STAND_INS:
            stand_in(self.job["backend"].split("_")[0])
        from vllm import LLM

        arguments = engine_arguments(self.job, **changes) | compiled_when_used()
        log(f"LLM({arguments})")
        self.llm = LLM(**arguments)
        config = self.llm.llm_engine.vllm_config
        if compiled_when_used() and not config.model_config.enforce_eager:  # eager runs compile after the start
            self.llm.collective_rpc("watch_compilation")
        self.save(
            seconds_start=round(time.perf_counter() - begin, 1),
            cudagraph_mode=str(config.compilation_config.cudagraph_mode),
            async_scheduling=config.scheduler_config.async_scheduling,
        )
        return self.llm

    @property
    def v41(self) -> bool:
        return is_v41(model_settings(Path(self.job["model"])))

    @property
    def block(self) -> int:
        """Tokens of a block, in V4 of its widest; V4.1 is taken for V4."""
        return engine_arguments(self.job).get("block_size", 256)

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def watch_schedule(self) -> list[dict[str, int]]:
        """How many tokens of each request every batch has, from now on."""
        scheduled: list[dict[str, int]] = []
        stock = self.scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            output = stock(*args, **kwargs)
            scheduled.append(dict(output.num_scheduled_tokens))
            return output

        self.scheduler.schedule = schedule
        return scheduled

    def blocks_in_use(self) -> int:
        for _ in range(3):  # with asynchronous scheduling the last batch is returned a step late
            self.llm.llm_engine.step()
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one block is vLLM's null block

    def finish(self) -> None:
        """Whether every worker's attention was served by whom the backend says."""
        if self.job["backend"] not in ENVIRONMENT or not hasattr(self, "llm"):
            return
        calls = self.llm.collective_rpc("drop_in_calls")
        served = [sum(of_a_worker.values()) for of_a_worker in calls]
        if self.job["backend"] in (*BASE, *STAND_INS):
            self.check("our kernels served every worker", min(served) > 0, calls)
        else:
            self.check("no kernel of ours served", max(served) == 0, calls)

    def outputs(
        self, prompts: list[Prompt], steps: int, prompt_logprobs: bool = False, extra_args: list | None = None
    ) -> list:
        """vLLM's outputs; `extra_args` are those of `SamplingParams`, of each prompt."""
        begin = time.perf_counter()
        parameters = [sampling(steps, prompt_logprobs) for _ in prompts]
        for own, extra in zip(parameters, extra_args or (), strict=bool(extra_args)):
            own.extra_args = extra
        given = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
        outputs = self.llm.generate(given, parameters, use_tqdm=False)
        log(f"generated {len(prompts)} x {steps} tokens in {time.perf_counter() - begin:.1f} s")
        return outputs

    def generate(self, prompts: list[Prompt], steps: int = STEPS, **options: Any) -> list[dict]:
        return [sequence(output) for output in self.outputs(prompts, steps, **options)]

    def reference(self) -> list[dict]:
        return kept(self.job["reference"])

    def compare(
        self, name: str, reference: list[dict], run: list[dict], other_arithmetic: bool = False
    ) -> dict[str, Any]:
        """Check `run` against `reference`, within what is `allowed`."""
        found = difference(reference, run)
        self.save(**{name: found})
        lengths = [[len(one["tokens"]) for one in of] for of in (reference, run)]
        same = lengths[0] == lengths[1]  # what is not there was not compared
        self.check(f"{name}: as many tokens as the reference", same, None if same else lengths)
        own = self.job["own"].get(name)
        kl, margin = allowed([self.job["noise"], own], other_arithmetic and not own)
        for part in (part for part in kl if part in found):
            measured = found[part]["kl_mean"]
            self.check(f"{name}, {part}: mean KL <= {kl[part]:.2g}", measured <= kl[part], measured)
            worst = found[part]["kl_worst_prompt"]  # few of all positions are its own
            what = f"{name}, {part}: no prompt as far as another context ({CONTROL_KL})"
            self.check(what, worst < CONTROL_KL, worst)
        worst = max((d["margin"] for d in found["diverged"]), default=0.0)
        self.check(f"{name}: margin where tokens part <= {margin:.2g}", worst <= margin, worst)
        return found


def keep(file: str | Path, sequences: list[dict]) -> None:
    np.savez(file, **{f"{k}_{i}": v for i, s in enumerate(sequences) for k, v in s.items() if k != "cached"})


def kept(file: str | Path) -> list[dict]:
    names = ("tokens", "ids", "values", "prompt_ids", "prompt_values")
    with np.load(file) as f:
        return [{k: f[f"{k}_{i}"] for k in names} for i in range(len(f.files) // len(names))]


def has_images(config: dict[str, Any]) -> bool:
    return config.get("vision_n_layers", 0) > 0


def is_v41(config: dict[str, Any]) -> bool:
    return config["model_type"].startswith("deepseek_v41")


def engine_arguments(job: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Keyword arguments of `LLM`; without changes those of the reference."""
    plain = dict(
        model=job["model"],
        skip_tokenizer_init=True,
        max_model_len=16384,
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        enable_prefix_caching=False,
        enforce_eager=True,
        async_scheduling=False,
        kv_cache_memory_bytes=KV_GIB << 30,
        gpu_memory_utilization=0.05,  # only what has to be free: the cache's size is given
        enable_flashinfer_autotune=False,
        max_logprobs=TOP,
        logprobs_mode="raw_logprobs",
        seed=0,
        worker_extension_cls="features.drop_in_calls.DropInCalls",
    )
    config = model_settings(Path(job["model"]))
    if is_v41(config) or has_images(config):
        plain["language_model_only"] = True
    if not is_v41(config):  # there blocks are of 64 tokens: vLLM's choice on Hopper
        plain["block_size"] = 64 if has_sparse_mla(config) else 256
    return plain | BACKENDS[job["backend"]] | changes


def sampling(steps: int, prompt_logprobs: bool = False) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=steps,
        ignore_eos=True,
        detokenize=False,
        logprobs=TOP,
        prompt_logprobs=PROMPT_TOP if prompt_logprobs else None,
        flat_logprobs=True,
    )


def sequence(output: Any) -> dict[str, Any]:
    """Tokens [n]; the most likely tokens' ids and log-probabilities [n, TOP]; the prompt's [m, PROMPT_TOP]."""
    completion = output.outputs[0]
    found = {"tokens": np.array(completion.token_ids), "cached": output.num_cached_tokens}
    # The sampled or given token comes first, then the most likely ones.
    entries = positions(completion.logprobs)
    found["ids"] = np.stack([e[0][-TOP:] for e in entries])
    found["values"] = np.stack([e[1][-TOP:] for e in entries])
    entries = positions(output.prompt_logprobs)[1:] if output.prompt_logprobs else []
    shape = (len(entries), PROMPT_TOP)
    found["prompt_ids"] = np.array([e[0][-PROMPT_TOP:] for e in entries], dtype=np.int64).reshape(shape)
    found["prompt_values"] = np.array([e[1][-PROMPT_TOP:] for e in entries], dtype=np.float32).reshape(shape)
    if not (np.isfinite(found["values"]).all() and np.isfinite(found["prompt_values"]).all()):
        raise RuntimeError("log-probabilities are not finite")
    return found


def count_graphs() -> collections.Counter:
    """How often each kind of CUDA graph is chosen from now on, in this process."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager  # model runner V2's

    counter: collections.Counter = collections.Counter()

    def watch(owner: Any) -> None:
        stock = owner.dispatch

        def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = stock(self, *args, **kwargs)
            counter[(chosen[0] if owner is CudagraphDispatcher else chosen.cg_mode).name] += 1
            return chosen

        owner.dispatch = dispatch

    watch(CudagraphDispatcher)
    watch(CudaGraphManager)
    return counter
