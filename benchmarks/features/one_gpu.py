"""The steps that need one GPU."""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from e2e import SPARSE_MLA, make_prompts, model_settings, visible_gpus
from gpu_watch import processes

from .comparison import CONTROL_KL, difference
from .run import (
    BASE,
    FLASHMLA,
    GRAPHS,
    MIXED_SIZES,
    SIZES,
    STEPS,
    Run,
    count_graphs,
    keep,
    kept,
    sampling,
    sequence,
    step,
)

SPLITS = [63, 64, 65, 127, 128, 129, 255, 256, 257]


@step()
def reference(run: Run) -> None:
    """The plain run; its noise and the control. Of stock and sparse_*, against that of FlashMLA."""
    run.start()
    run.generate(run.prompts)  # compiles what is vLLM's own
    together = run.generate(run.prompts, prompt_logprobs=True)
    if run.job["backend"] in BASE:
        run.compare("output", run.reference(), together)
    else:
        keep(run.job["reference"], together)
    alone = [run.generate([p], prompt_logprobs=True)[0] for p in run.prompts]
    run.save(noise=difference(together, alone))
    long = [i for i, p in enumerate(run.prompts) if len(p) > 60]
    others = make_prompts([len(run.prompts[i]) for i in long], run.job["vocab"], seed=1)
    others = [o[:-8] + run.prompts[i][-8:] for i, o in zip(long, others, strict=True)]
    control = difference([together[i] | {"prompt_ids": []} for i in long], run.generate(others))
    run.save(control=control)
    kl = control["decode"]["kl_mean"]
    run.check(f"control: mean KL >= {CONTROL_KL}", kl >= CONTROL_KL, kl)
    run.check("no block in use at the end", run.blocks_in_use() == 0, run.blocks_in_use())


def graphs_with(run: Run, other_arithmetic: bool, **changes: Any) -> None:
    run.start(enforce_eager=False, async_scheduling=None, **changes)
    used = count_graphs()
    run.generate(run.prompts)
    out = run.generate(run.prompts, prompt_logprobs=True)
    run.save(graphs=dict(used))
    run.check("full graphs were replayed", used["FULL"], used["FULL"])
    run.check("piecewise graphs were replayed", used["PIECEWISE"], used["PIECEWISE"])
    run.check("asynchronous scheduling", run.result["measured"]["async_scheduling"])
    run.compare("output", run.reference(), out, other_arithmetic)


@step()
def graphs(run: Run) -> None:
    """vLLM's defaults: torch.compile, full graphs for decodes, piecewise for mixed batches, async scheduling."""
    graphs_with(run, True, compilation_config={"cudagraph_capture_sizes": MIXED_SIZES})


@step(VLLM_USE_BREAKABLE_CUDAGRAPH="1")
def graphs_uncompiled(run: Run) -> None:
    """The same graphs without torch.compile, so that any difference is the graphs' own."""
    config = {"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": MIXED_SIZES}
    graphs_with(run, False, compilation_config=config)


@step()
def prefix(run: Run) -> None:
    """Prefix caching: a later request hits the cache in every KV cache group, and gives a cold run's tokens."""
    run.start(enable_prefix_caching=True)
    coordinator = run.scheduler.kv_cache_manager.coordinator
    groups = run.scheduler.kv_cache_config.kv_cache_groups
    kinds = [type(g.kv_cache_spec).__name__ for g in groups]
    names = [f"{k} of {g.kv_cache_spec.block_size}: {g.layer_names}" for k, g in zip(kinds, groups, strict=True)]
    # V4.1 computes its windows again, so only compressed rows are hit, in blocks of 64 tokens.
    page, hit_kinds = (64, {"MLAAttentionSpec"}) if run.v41 else (run.block, set(kinds))
    stock, hits = coordinator.find_longest_cache_hit, []

    def find(*args: Any, **kwargs: Any) -> Any:
        found = stock(*args, **kwargs)
        hits.append([sum(not b.is_null for b in blocks) for blocks in found[0]])
        return found

    coordinator.find_longest_cache_hit = find
    # Windows' blocks are kept every 256 tokens; on 0.33.0 (prefix_cache_retention_interval, by default 0) only
    # before a prompt's last such place, its last token not counted, and where a second prompt was seen to part.
    sparse = getattr(coordinator, "retention_interval", None) is not None
    for length in (300, 1500, 8000):
        shared, tail_a, tail_b, tail_c = make_prompts([length, 70, 90, 110], run.job["vocab"], seed=length)
        expected = length // page * page
        run.llm.reset_prefix_cache()
        cold = run.generate([shared + tail_b])
        run.llm.reset_prefix_cache()
        run.generate([shared + tail_a])
        if sparse and (len(shared + tail_a) - 1) // page * page > expected:
            run.generate([shared + tail_c])
        warm = run.generate([shared + tail_b])
        found = dict(zip(names, hits[-1], strict=True))
        run.save(**{f"blocks hit, {length} shared tokens": found})
        run.check(f"{length}: the cold run hits nothing", cold[0]["cached"] == 0, cold[0]["cached"])
        run.check(f"{length}: {expected} tokens hit", warm[0]["cached"] == expected, warm[0]["cached"])
        hit = [blocks for blocks, kind in zip(hits[-1], kinds, strict=True) if kind in hit_kinds]
        run.check(f"{length}: every group hits", min(hit, default=0) > 0, hits[-1])
        run.compare(f"{length}", cold, warm)


@step()
def chunked(run: Run) -> None:
    """Chunked prefill with chunks around block, window and compression boundaries."""
    run.start()
    scheduled = run.watch_schedule()
    chosen = [i for i, p in enumerate(run.prompts) if 127 <= len(p) <= 3000]
    plain = run.reference()
    for size in SPLITS:
        run.scheduler.scheduler_config.long_prefill_token_threshold = size
        scheduled.clear()
        out = run.generate([run.prompts[i] for i in chosen], prompt_logprobs=True)
        longest = max(tokens for batch in scheduled for tokens in batch.values())
        run.check(f"{size}: the longest chunk", longest == size, longest)
        run.compare(f"{size}", [plain[i] for i in chosen], out)


def speculation(run: Run, drafts: int, **settings: Any) -> None:
    graphs = GRAPHS["compilation_config"] | {"cudagraph_capture_sizes": [s * (1 + drafts) for s in SIZES]}
    speculative = {"num_speculative_tokens": drafts, **settings}
    if run.job["backend"] in SPARSE_MLA:  # else vLLM chooses for the draft by itself
        speculative["attention_backend"] = SPARSE_MLA[run.job["backend"]]["attention_backend"]
    run.start(**GRAPHS | {"compilation_config": graphs}, speculative_config=speculative, disable_log_stats=False)
    used = count_graphs()
    out = run.generate(run.prompts)
    counts = {m.name: m.value for m in run.llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
    run.save(graphs=dict(used), speculation=counts)
    for name in ("num_drafts", "num_accepted_tokens"):
        value = counts.get(f"vllm:spec_decode_{name}")
        run.check(f"{name} > 0", value, value)
    run.check("full graphs were replayed", used["FULL"], used["FULL"])
    run.compare("output", run.reference(), out)
    run.check("no block in use at the end", run.blocks_in_use() == 0, run.blocks_in_use())


@step(backends=["flashmla_bf16", "sparse_bf16", "flashmla_fp8", "sparse_fp8"])
def workspace(run: Run) -> None:
    """MLA_KERNELS_SPARSE with prefills in chunks of gathered BF16 rows, instead of over rows in place."""
    run.start(additional_config={"sparse_mla_prefill": "workspace"})
    run.compare("output", run.reference(), run.generate(run.prompts, prompt_logprobs=True))


@step(drafts="mtp")
def mtp1(run: Run) -> None:
    """Speculation with one draft token of the MTP layer, on full graphs."""
    speculation(run, 1, method="mtp")


@step(drafts="mtp")
def mtp2(run: Run) -> None:
    """Speculation with two draft tokens."""
    speculation(run, 2, method="mtp")


@step(drafts="dspark")
def dspark(run: Run) -> None:
    """Speculation with the blocks of DSpark's draft, on full graphs."""
    speculation(run, model_settings(Path(run.job["model"]))["dspark_block_size"], method="dspark")


def offloaded(run: Run, connector: str) -> None:
    transfer = {"kv_connector": connector, "kv_role": "kv_both"}
    transfer["kv_connector_extra_config"] = {"cpu_bytes_to_use": 4 << 30}
    run.start(**GRAPHS, enable_prefix_caching=True, kv_transfer_config=transfer)
    chosen = [p for p in run.prompts if len(p) >= 1000]
    cold = run.generate(chosen)
    run.generate(make_prompts([20], run.job["vocab"], seed=7))  # batches in which the last blocks are stored
    deadline = time.monotonic() + 60
    time.sleep(2)
    while not run.llm.reset_prefix_cache():  # of the GPU's blocks alone
        if time.monotonic() > deadline:
            raise RuntimeError("blocks are still in use, 60 s after the last request")
        time.sleep(0.2)
        run.llm.llm_engine.step()
    scheduled = run.watch_schedule()
    warm = run.generate(chosen)
    computed = sum(sum(batch.values()) for batch in scheduled) - len(chosen) * (STEPS - 1)
    # As in `prefix`: windows' blocks may have been kept in fewer places than a prompt has blocks.
    run.check("at most half of the prompts computed again", computed <= sum(map(len, chosen)) // 2, computed)
    run.check("every prompt's blocks came back", all(w["cached"] for w in warm), [w["cached"] for w in warm])
    run.compare("output", cold, warm)


@step()
def offload(run: Run) -> None:
    """KV offloading to the CPU and back, by OffloadingConnector."""
    offloaded(run, "OffloadingConnector")


@step()
def offload_simple(run: Run) -> None:
    """KV offloading to the CPU and back, by SimpleCPUOffloadConnector."""
    offloaded(run, "SimpleCPUOffloadConnector")


@step()
def preemption(run: Run) -> None:
    """Preemption and recomputation: 24 requests that start small and outgrow the cache."""
    blocks = 264 if run.block == 256 else 40  # V4 has several groups of them
    run.start(**GRAPHS, max_model_len=512, max_num_batched_tokens=512, num_gpu_blocks_override=blocks)
    preempted: list[str] = []
    stock = run.scheduler._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        stock(request, *args, **kwargs)

    run.scheduler._preempt_request = preempt
    prompts = make_prompts(list(range(5, 53, 2)), run.job["vocab"], seed=2)
    few = [s for i in range(0, len(prompts), 4) for s in run.generate(prompts[i : i + 4], 160)]
    run.check("four at a time are not preempted", not preempted, len(preempted))
    preempted.clear()
    many = run.generate(prompts, 160)
    run.check("all at a time are preempted", preempted, len(preempted))
    run.compare("output", few, many)
    run.check("no block in use at the end", run.blocks_in_use() == 0, run.blocks_in_use())


@step()
def sleep(run: Run) -> None:
    """Sleep mode, level 1: weights come back, and what else is needed is made anew."""
    run.start(enable_sleep_mode=True)
    run.generate(run.prompts)
    run.llm.sleep(level=1)
    run.llm.wake_up()
    run.compare("output", run.reference(), run.generate(run.prompts, prompt_logprobs=True))


@step()
def aborts(run: Run) -> None:
    """Requests aborted in prefill and decode beside others, which must not notice."""
    run.start(**GRAPHS)
    from vllm.inputs.engine import tokens_input

    engine = run.llm.llm_engine
    rng = np.random.default_rng(0)
    victims = make_prompts(rng.integers(50, 6000, 24).tolist(), run.job["vocab"], seed=3)
    end: dict[int, list[str]] = collections.defaultdict(list)
    for i in range(max(len(victims), len(run.prompts))):
        if i < len(run.prompts):
            engine.add_request(f"kept-{i}", tokens_input(run.prompts[i]), sampling(STEPS))
        if i < len(victims):
            engine.add_request(f"victim-{i}", tokens_input(victims[i]), sampling(2000))
            end[int(rng.integers(1, 60))].append(f"victim-{i}")
    done: dict[str, Any] = {}
    steps = 0
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step() if o.finished}
        steps += 1
        engine.abort_request(end.pop(steps, []))
        if steps > 5000:
            raise RuntimeError(f"{engine.get_num_unfinished_requests()} requests never ended")
    run.check("aborted requests return nothing", all(n.startswith("kept") for n in done), sorted(done))
    out = [sequence(done[f"kept-{i}"]) for i in range(len(run.prompts))]
    run.compare("output", [s | {"prompt_ids": []} for s in run.reference()], out)
    run.check("no block in use at the end", run.blocks_in_use() == 0, run.blocks_in_use())


@step()
def thousand(run: Run) -> None:
    """1,000 requests of random lengths: no block and no GPU memory is left behind."""
    run.start(**GRAPHS, enable_prefix_caching=True)
    import torch
    from vllm import SamplingParams

    rng = np.random.default_rng(0)

    def serve(count: int, seed: int) -> None:
        lengths = np.exp(rng.uniform(0, np.log(4000), count)).astype(int).tolist()
        wanted = rng.integers(1, 65, count).tolist()
        outputs = run.llm.generate(
            [{"prompt_token_ids": p} for p in make_prompts(lengths, run.job["vocab"], seed)],
            [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in wanted],
            use_tqdm=False,
        )
        if [len(o.outputs[0].token_ids) for o in outputs] != wanted:
            raise RuntimeError("an output has the wrong length")

    def memory() -> tuple[int, int]:
        """What torch has allocated, and what this process has of the GPU or, if nobody says that, all have."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), processes(visible_gpus()[:1]).get(os.getpid()) or total - free

    serve(200, seed=4)
    before = memory()
    begin = time.perf_counter()
    serve(1000, seed=5)
    after = memory()
    run.save(seconds=round(time.perf_counter() - begin, 1))
    run.check("no block in use at the end", run.blocks_in_use() == 0, run.blocks_in_use())
    grown = after[0] - before[0]
    run.check("allocated GPU memory grows by at most 1 MiB", grown <= 1 << 20, grown)
    grown = after[1] - before[1]
    run.check("GPU memory of the process grows by at most 64 MiB", grown <= 64 << 20, grown)


@step()
def long_context(run: Run) -> None:
    """A prompt of 128K tokens: time, memory, and that other chunks give the same output."""
    room = dict(max_model_len=(128 << 10) + 512, max_num_batched_tokens=8192, kv_cache_memory_bytes=8 << 30)
    run.start(**GRAPHS, **room)
    import torch

    prompts = dict(zip((8192, 128 << 10), make_prompts([8192, 128 << 10], run.job["vocab"], seed=6), strict=True))
    run.generate([prompts[8192]])
    out = {}
    for length, prompt in prompts.items():
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        out[length] = run.generate([prompt], 1)
        seconds = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated() - base
        measured = {"seconds": round(seconds, 2), "tokens_per_second": round(length / seconds), "peak_bytes": peak}
        run.save(**{f"{length} tokens": measured})
    prompt = prompts[128 << 10]
    plain = run.generate([prompt])
    run.scheduler.scheduler_config.long_prefill_token_threshold = 4000
    run.compare("chunks of 4000", plain, run.generate([prompt]))
    run.check("no block in use at the end", run.blocks_in_use() == 0, run.blocks_in_use())


# Width and height of each prompt's pictures, which make 109 to 363 tokens; the window has 128. vLLM would blur
# the noise of other sizes, as it does that of 300 x 200.
PICTURES = [[(392, 392)], [(1008, 588)], [(300, 200)], [(560, 336), (588, 1008)], [(840, 504), (392, 392)]]


def with_pictures(number: int, place: int, noise: int) -> dict[str, Any]:
    """The prompt of that number: text, with pictures of noise where vLLM finds the token `place`."""
    from PIL import Image

    sizes, rng = PICTURES[number], np.random.default_rng([noise, number])
    # Text has the tokens below the placeholder; above it are those that stand for a picture's parts.
    *texts, end = make_prompts([*(40, 25)[: len(sizes)], 8], place, seed=number)
    pictures = [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]
    tokens = [token for text in texts for token in (*text, place)]
    return {"prompt_token_ids": tokens + end, "multi_modal_data": {"image": pictures}}


@step(backends=["flashmla", "stock"], images=True)
def images(run: Run) -> None:
    """Prompts with pictures, whose tokens see those behind them too, beside text; other pictures must matter."""

    def prefills_served() -> int:
        # Of batches with pictures alone, if a GPU has 32 heads or fewer; with more, FlashMLA has long prefills.
        return sum(calls.get("flash_mla_sparse_fwd", 0) for calls in run.llm.collective_rpc("drop_in_calls"))

    run.start(language_model_only=False, skip_tokenizer_init=False, limit_mm_per_prompt={"image": 2})
    place = run.llm.get_tokenizer().convert_tokens_to_ids("<｜deepseek_image｜>")
    asked, others = ([with_pictures(i, place, noise) for i in range(len(PICTURES))] for noise in (0, 1))
    texts = make_prompts([300, 1000], place, seed=9)  # first, so that they decode while the last pictures come
    before = prefills_served()
    together = run.generate([*texts, *asked], prompt_logprobs=True)
    if run.job["backend"] == "stock":
        served = prefills_served() - before
        run.check("our kernels served the prefills of pictures", served, served)
    run.save(prompt_tokens=[len(s["prompt_ids"]) + 1 for s in together])
    control = difference([s | {"prompt_ids": []} for s in together[len(texts) :]], run.generate(others))
    run.save(control=control)
    kl = control["decode"]["kl_mean"]
    run.check(f"control: mean KL >= {CONTROL_KL}", kl >= CONTROL_KL, kl)
    reference = Path(run.job["reference"]).with_suffix(".images.npz")
    if run.job["backend"] in BASE:
        run.compare("output", kept(reference), together)
    else:
        keep(reference, together)
        alone = [run.generate([p], prompt_logprobs=True)[0] for p in [*texts, *asked]]
        run.compare("output", together, alone)
    run.check("no block in use at the end", run.blocks_in_use() == 0, run.blocks_in_use())


@step(backends=FLASHMLA)
def kv_cache(run: Run) -> None:
    """The KV cache as stock vLLM allocates it, and after a prompt its bytes, block by block in every layer."""
    # Those that V4.1 gets on Hopper, Humming's, add up in the order in which blocks arrive.
    ordered = {"linear_backend": "marlin", "moe_backend": "marlin"} if run.v41 else {}
    run.start(kv_cache_memory_bytes=1 << 28, **ordered)
    silence_attention()
    first, second = (run.generate(run.prompts[-2:], 1, prompt_logprobs=True) for _ in range(2))
    # Where the blocks differ: whether layers give the same bits twice.
    repeats = all(
        np.array_equal(a[part], b[part])
        for a, b in zip(first, second, strict=True)
        for part in ("values", "prompt_values")
    )
    layers = run.llm.llm_engine.vllm_config.compilation_config.static_forward_context
    found = {name: describe(cache) for name, layer in layers.items() if (cache := cache_of(layer)) is not None}
    written = {name: len(cache["blocks"]) for name, cache in found.items()}
    run.save(written_blocks=written, repeats=repeats)
    run.check("every layer has written blocks", written and min(written.values()) > 0, len(written))
    stored = Path(run.job["reference"]).with_suffix(".blocks.json")
    if run.job["backend"] not in BASE:
        stored.write_text(json.dumps(found))
        return
    stock = json.loads(stored.read_text())
    for what in ("layout", "blocks"):
        ours, theirs = ({name: cache[what] for name, cache in caches.items()} for caches in (found, stock))
        differ = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        run.check(f"{what} of every layer's cache as in stock vLLM", not differ, differ)
    # Where they differ: how many of a layer's blocks have bytes that none of stock's has, wherever it is.
    others = {name: set(cache["blocks"].values()) for name, cache in stock.items()}
    run.save(unlike_stock={
        name: sum(digest not in others.get(name, ()) for digest in cache["blocks"].values())
        for name, cache in found.items()
    })  # fmt: skip


def silence_attention() -> None:
    """Let sparse attention run and return zeros from now on: its rounding then reaches no row of a later layer."""

    def silenced(function: Any) -> Any:
        @functools.wraps(function)
        def silent(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            for out in (found[0], kwargs.get("out")):
                if out is not None:
                    out.zero_()
            return found

        return silent

    # FlashMLA's functions, and ours of the same names, wherever a backend has them from; also those of the wheel.
    for module in [m for n, m in sys.modules.items() if n.startswith(("vllm.", "vllm_dsv4_overlay."))]:
        for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
            if name in vars(module):
                setattr(module, name, silenced(vars(module)[name]))


def cache_of(layer: Any) -> Any:
    """The layer's KV cache, or None."""
    cache = getattr(layer, "kv_cache", None)
    cache = cache[0] if isinstance(cache, (list, tuple)) and cache else cache
    return cache if hasattr(cache, "numel") and cache.numel() else None


def describe(cache: Any) -> dict[str, Any]:
    """Its layout, and the digest of every block that is not all zeros."""
    import torch

    blocks = {}
    for i in range(1, len(cache)):  # the first is vLLM's null block
        content = cache[i].contiguous().view(torch.uint8).cpu().numpy()
        if content.any():
            blocks[str(i)] = hashlib.sha256(content.tobytes()).hexdigest()
    layout = [list(cache.shape), list(cache.stride()), cache.storage_offset(), str(cache.dtype)]
    return {"layout": layout, "blocks": blocks}
