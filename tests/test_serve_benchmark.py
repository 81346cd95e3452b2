"""benchmarks/serve.sh with a `vllm` that only pretends: what is run, what is resumed, what is refused."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VLLM = """#!{python}
import http.server, json, os, pathlib, sys
arguments = sys.argv[1:]
value = lambda name: arguments[arguments.index(name) + 1]
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
if arguments[0] == "serve":
    print("INFO GPU KV cache size: 1,234,567 tokens", flush=True)
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
    http.server.HTTPServer(("127.0.0.1", int(value("--port"))), Healthy).serve_forever()
if "--save-result" in arguments and value("--num-prompts") == os.environ.get("FAIL"):
    sys.exit(1)
if "--save-result" in arguments:
    keys = "duration output_throughput mean_ttft_ms p99_ttft_ms mean_tpot_ms p99_tpot_ms".split()
    result = dict.fromkeys(keys, 1000.0) | {{"completed": int(value("--num-prompts"))}}
    pathlib.Path(value("--result-dir"), value("--result-filename")).write_text(json.dumps(result))
"""


@pytest.fixture
def serve(tmp_path):
    (tmp_path / "bin").mkdir()
    programs = {"vllm": VLLM.format(python=sys.executable), "nvidia-smi": "#!/bin/sh\necho no GPU\n"}
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(*arguments, **env):
        (tmp_path / "calls").write_text("")
        path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            [ROOT / "benchmarks/serve.sh", "--model", "m", "--concurrency", "2,4", "--port", "18765", *arguments],
            capture_output=True, text=True, cwd=tmp_path,
            env=os.environ | {"PATH": path, "CALLS": str(tmp_path / "calls"), **env},
        )  # fmt: skip
        return done, [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]

    return run


def test_every_run_once_and_resumed(serve, tmp_path):
    done, calls = serve(FAIL="4")
    assert done.returncode == 1 and "error: vllm bench serve failed" in done.stderr
    assert (tmp_path / "serve-work/FlashMLA-2.json").exists()

    done, calls = serve()
    assert done.returncode == 0, done.stderr
    servers = [call for call in calls if call[0] == "serve"]
    dtypes = [call[call.index("--kv-cache-dtype") + 1] for call in servers]
    assert dtypes == ["fp8_ds_mla", "bfloat16", "fp8_per_tensor"]
    for call in servers:
        assert "--no-enable-prefix-caching" in call
        assert json.loads(call[call.index("--compilation-config") + 1]) == {"cudagraph_mode": "FULL_AND_PIECEWISE"}
    measured = [call[call.index("--num-prompts") + 1] for call in calls if "--save-result" in call]
    assert measured == ["4", "2", "4", "2", "4"]  # the first one of FlashMLA was there already
    # Before each measurement, as many short prompts, which are not saved.
    for before, call in zip(calls, calls[1:]):  # noqa: B905 - pairs of neighbours
        if "--save-result" in call:
            assert "--save-result" not in before and "64" in before
            assert before[before.index("--num-prompts") + 1] == call[call.index("--num-prompts") + 1]
    result = json.loads((tmp_path / "serve.json").read_text())
    assert list(result["runs"]) == ["FlashMLA", "BF16", "FP8"]
    assert result["runs"]["BF16"]["kv_cache_tokens"] == 1234567 and result["output_len"] == 8192
    assert "| 4 | FP8 | 1,000.00 | 1,000.00 | 1.00 | 1.00 | 1,000.00 | 1,000.00 | 1,234,567 |" in done.stdout

    done, calls = serve()
    assert (done.returncode, calls) == (0, [])
    done, calls = serve("--output-len", "64")
    assert (done.returncode, calls) == (1, []) and "holds measurements of something else" in done.stderr


def test_share_of_attention(tmp_path):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import serve

    kernels = {"void sparse_mla_wgmma_kernel<true, 16>(Params)": 24.0, "nvjet_gemm": 40.0, "insert_kernel": 16.0}
    events = [{"cat": "kernel", "name": name, "dur": time} for name, time in kernels.items()]
    events += [{"cat": "cpu_op", "name": "sparse_mla", "dur": 9.0}, {"name": "no kernel either"}]
    with gzip.open(tmp_path / "dp0_rank0.1.pt.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = serve.attention_share(tmp_path)
    assert (found["kernels_us"], found["attention_us"], found["share"]) == (10.0, 3.0, 0.3)
    assert next(iter(found["longest_us"])) == "nvjet_gemm"


def test_a_server_that_dies(serve, tmp_path):
    (tmp_path / "bin/vllm").write_text("#!/bin/sh\nexit 3\n")
    done, _ = serve()
    assert done.returncode == 1 and done.stderr.startswith("error: the server ended with 3; the end of ")


def test_the_dummy_has_the_shape_of_v4_flash(tmp_path):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import serve

    serve.write_dummy(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], len(config["compress_ratios"]), config["vocab_size"]) == (43, 44, 129280)
    assert config["n_routed_experts"] == 256 and config["expert_dtype"] == "fp4"
    assert "ignored_layers" not in config["quantization_config"]
