"""benchmarks/serve.sh with vLLM's own client and options; only the model's answers are made up."""

import gzip
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COUNT, INPUT, OUTPUT = 3, 8192, 8
VLLM = """#!{python}
import os, sys
sys.path[:0] = [{source!r}, {here!r}]
import test_bench_serve
test_bench_serve.serve(sys.argv[2:])
"""


def serve(arguments):
    """As `vllm serve` up to its configuration; then a completion has its number of tokens, of no text."""
    import hopper
    from aiohttp import web
    from vllm.tokenizers import get_tokenizer

    parser = hopper.EngineArgs.add_cli_args(hopper.FlexibleArgumentParser())
    parser.add_argument("--port", type=int)
    options = parser.parse_args(["--model", *arguments])
    options.tensor_parallel_size = 1  # more would look for as many GPUs
    options.hf_overrides = {"quantization_config": None}  # its check imports the compiled kernels of every method
    config = hopper.EngineArgs.from_cli_args(options).create_engine_config()
    tokenizer = get_tokenizer(options.model, tokenizer_mode=config.model_config.tokenizer_mode)
    found = {
        "graphs": config.compilation_config.cudagraph_mode.name,
        "sizes": config.compilation_config.cudagraph_capture_sizes,
        "cache_dtype": config.cache_config.cache_dtype,
        "backend": config.attention_config.backend.name,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "max_model_len": config.model_config.max_model_len,
        "memory": [config.cache_config.kv_cache_memory_bytes, config.cache_config.gpu_memory_utilization],
        "seeded": [
            config.load_config.load_format,
            config.parallel_config.worker_extension_cls,
            importlib.util.find_spec("seeded_weights") is not None,
        ],
        "steps": [config.profiler_config.delay_iterations, config.profiler_config.max_iterations],
        "prompts": [],
    }

    async def complete(request):
        body = await request.json()
        prompt = body["prompt"] if isinstance(body["prompt"], list) else tokenizer(body["prompt"]).input_ids
        found["prompts"].append([len(prompt), body["max_tokens"], body["ignore_eos"], body["temperature"]])
        Path("found.json").write_text(json.dumps(found))
        stream = web.StreamResponse()
        await stream.prepare(request)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        chunks = [{"choices": [{"text": ""}]}] * body["max_tokens"] + [{"choices": [], "usage": usage}]
        for chunk in [*map(json.dumps, chunks), "[DONE]"]:
            await stream.write(f"data: {chunk}\n\n".encode())
        return stream

    async def start_profile(request):
        folder = Path(config.profiler_config.torch_profiler_dir)
        folder.mkdir()
        events = [{"cat": "user_annotation", "name": f"execute_context_0(0)_generation_{COUNT}({COUNT})"}]
        events += [{"cat": "kernel", "name": "sparse_mla_wgmma_kernel", "ts": 1, "dur": 1}]
        with gzip.open(folder / "dp0_pp0_tp0_dcp0_ep0_rank0.1.pt.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": events}, file)
        return web.Response()

    async def nothing(request):
        return web.Response()

    print("GPU KV cache size: 12,345 tokens", flush=True)
    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.get("/health", nothing), web.post("/v1/completions", complete),
                    web.post("/start_profile", start_profile), web.post("/stop_profile", nothing)])  # fmt: skip
    web.run_app(app, host="127.0.0.1", port=options.port, print=None)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_options_tokens_and_results(applied, tmp_path):
    (tmp_path / "bin").mkdir()
    vllm = tmp_path / "bin/vllm"
    vllm.write_text(VLLM.format(python=sys.executable, source=str(applied), here=str(Path(__file__).parent)))
    vllm.chmod(0o755)
    env = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(applied),
        "CAPABILITY": "9.0", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [ROOT / "benchmarks/serve.sh", "--dummy", "v4", "--runs", "FP8", "--profile", "--port", str(free_port()),
         "--concurrency", str(COUNT), "--input-len", str(INPUT), "--output-len", str(OUTPUT), "--kv-gib", "3",
         "--", "--no-enable-flashinfer-autotune", "--cudagraph-capture-sizes", "1", "2", "4"],
        cwd=tmp_path, env=env, capture_output=True, text=True,
    )  # fmt: skip
    log = tmp_path / "serve-work/FP8.log"
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + log.read_text()[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    prompts = found.pop("prompts")
    delay = COUNT * (INPUT // 1024 + 1)
    assert found == {
        "graphs": "FULL_AND_PIECEWISE", "sizes": [1, 2, 4], "cache_dtype": "fp8_per_tensor",
        "backend": "FLASHINFER_MLA_SPARSE_DSV4", "prefix_caching": False, "max_model_len": INPUT + delay + 40,
        "seeded": ["dummy", "seeded_weights.SeededWeights", True], "steps": [delay, 8],
        "memory": [3 << 30, 0.05],
    }  # fmt: skip
    # Warm-up, measurement, profile; exactly as long as asked for, the first token of a sequence included.
    assert prompts == [[INPUT, output, True, 1] for output in (OUTPUT, OUTPUT, delay + 32) for _ in range(COUNT)]
    result = json.loads((tmp_path / "serve.json").read_text())
    run = result["runs"]["FP8"]
    row = run["concurrency"][str(COUNT)]
    assert (row["total_input_tokens"], row["total_output_tokens"]) == (COUNT * INPUT, COUNT * OUTPUT)
    assert 0 < row["mean_ttft_ms"] <= row["p99_ttft_ms"] and row["mean_tpot_ms"] <= row["p99_tpot_ms"]
    assert run["kv_cache_tokens"] == 12345 and run["decode_step"]["share"] == 1.0
    assert f"| {COUNT} | FP8 | " in done.stdout
