"""benchmarks/serve.sh with a `vllm` that only pretends: what is run, what is resumed, what is refused."""

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


PORT = free_port()
VLLM = """#!{python}
import http.server, json, os, pathlib, socket, sys, threading, time
arguments = sys.argv[1:]
value = lambda name: arguments[arguments.index(name) + 1]
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([*arguments, "of this run", os.environ.get("VLLM_OF_THIS_RUN"),
                            "drop-in", os.environ.get("VLLM_DSV4_DROP_IN")]) + "\\n")
def compile(name):
    file = pathlib.Path.home() / ".triton/cache" / str(os.getpid()) / (name + ".cubin")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
if arguments[0] == "serve":
    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(200)
            if self.path == "/version":
                self.wfile.write(json.dumps({{"version": "0.22.1"}}).encode())
            if self.path == "/metrics" and os.environ.get("PREEMPTS"):
                benches = open(os.environ["CALLS"]).read().count('["bench"')
                text = 'vllm:num_preemptions_total%s %d.0' % (chr(123) + 'engine="0"' + chr(125), benches)
                self.wfile.write(("# HELP\\n" + text + "\\n").encode())
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with open(os.environ["CALLS"], "a") as calls:
                calls.write(json.dumps(["warm-up", len(body["prompt"]), body["max_tokens"]]) + "\\n")
            compile("warm_kernel")
            if os.environ.get("FAIL") == "server":
                self.connection.shutdown(socket.SHUT_RDWR)  # what the client sees first
                time.sleep(1)
                os._exit(9)
            self.answer(500 if os.environ.get("FAIL") == "prompt" else 200)
        def answer(self, status):
            self.send_response(status)
            self.end_headers()
        def log_message(self, *_):
            pass
    compile("early_kernel"), time.sleep(0.2), compile("other_kernel")
    print("INFO GPU KV cache size: 1,234,567 tokens", flush=True)
    for rank in range(2):
        print(f"(TP{{rank}}) INFO 1-2 [drop_in.py:3] The drop-in (x) has FlashMLA's sparse calls.", flush=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(value("--port"))), Server)
    timer = threading.Timer(60, server.shutdown)  # whatever happens to the test
    timer.daemon = True
    timer.start()
    server.serve_forever()
"""
CLIENT = """
import json, os, pathlib, sys, time
def add_cli_args(parser):
    pass
def compile(name):
    file = pathlib.Path.home() / ".triton/cache" / str(os.getpid()) / (name + ".cubin")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
def main(arguments):
    value = lambda name: arguments[arguments.index(name) + 1]
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(json.dumps(["bench", *arguments]) + "\\n")
    if os.environ.get("FAIL") == value("--num-prompts"):
        sys.exit(1)
    if os.environ.get("FAIL") == "never":
        pathlib.Path("pid").write_text(str(os.getpid()))
        time.sleep(60)
    if value("--num-prompts") == "2":
        compile("late_kernel")
    keys = "duration output_throughput total_input_tokens total_output_tokens".split()
    keys += [of + metric + "_ms" for of in ("mean_", "median_", "p99_") for metric in ("ttft", "tpot", "itl")]
    result = dict.fromkeys(keys, 1000.0) | dict(request_goodput=7.0 if "--goodput" in arguments else None)
    if os.environ.get("RISING"):
        result["output_throughput"] = float(open(os.environ["CALLS"]).read().count('["bench"'))
    result["completed"] = int(value("--num-prompts")) - (os.environ.get("FAIL") == "one")
    pathlib.Path(value("--result-dir"), value("--result-filename")).write_text(json.dumps(result))
"""
PARSER = """
class FlexibleArgumentParser:
    def parse_args(self, arguments):
        return arguments
"""


@pytest.fixture
def serve(tmp_path):
    (tmp_path / "bin").mkdir()
    programs = {"vllm": VLLM.format(python=sys.executable), "nvidia-smi": "#!/bin/sh\necho no GPU\n"}
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    for name, text in {"benchmarks/serve.py": CLIENT, "utils/argparse_utils.py": PARSER}.items():
        (tmp_path / "site/vllm" / name).parent.mkdir(parents=True)
        (tmp_path / "site/vllm" / name).write_text(text)

    def start(*arguments, **env):
        (tmp_path / "calls").write_text("")
        path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.Popen(
            [ROOT / "benchmarks/serve.sh", "--model", "m", "--concurrency", "2,4", "--port", PORT, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env=os.environ | {"PATH": path, "PYTHONPATH": str(tmp_path / "site"), "CALLS": str(tmp_path / "calls"),
                              "HOME": str(tmp_path), **env},
        )  # fmt: skip

    def run(*arguments, **env):
        process = start(*arguments, **env)
        out, errors = process.communicate()
        done = subprocess.CompletedProcess(process.args, process.returncode, out, errors)
        return done, [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]

    run.start = start
    return run


def test_every_run_once_and_resumed(serve, tmp_path):
    done, calls = serve(FAIL="4")
    assert done.returncode == 1 and "error: vllm bench serve ended with 1 " in done.stderr
    assert (tmp_path / "serve-work/FlashMLA-2-1.json").exists()

    done, calls = serve()
    assert done.returncode == 0, done.stderr
    servers = [call for call in calls if call[0] == "serve"]
    dtypes = [call[call.index("--kv-cache-dtype") + 1] for call in servers]
    assert dtypes == ["fp8_ds_mla", "fp8_ds_mla", "bfloat16", "fp8_per_tensor"]
    assert [call[-1] for call in servers] == ["0", "1", None, None]
    measured = [call[call.index("--num-prompts") + 1] for call in calls if call[0] == "bench"]
    assert measured == ["4", "2", "4", "2", "4", "2", "4"]  # the first one of FlashMLA was there already
    # Before each, the same prompts; of 8192 tokens each, so that few tokens out are enough.
    at = 0
    for call in calls:
        at = 0 if call[0] == "serve" else at + 1
        if call[0] == "bench":
            count = int(call[call.index("--num-prompts") + 1])
            place = calls.index(call)
            assert calls[place - count : place] == [["warm-up", 8192, 16 + 2 * count]] * count and at == count + 1
            at = 0
    result = json.loads((tmp_path / "serve.json").read_text())
    assert list(result["runs"]) == ["FlashMLA", "DropIn", "BF16", "FP8"]
    assert result["runs"]["BF16"]["kv_cache_tokens"] == 1234567 and result["output_len"] == 8192
    assert result["runs"]["BF16"]["vllm"] == "0.22.1"
    assert result["runs"]["BF16"]["sparse_calls"] == ["The drop-in (x) has FlashMLA's sparse calls."]
    (compiled,) = result["runs"]["BF16"]["concurrency"]["2"]["compiled"]
    assert compiled.endswith("/late_kernel.cubin")
    begin, first = (result["runs"]["BF16"][title]["compiled"]["Triton"] for title in ("start", "first_requests"))
    assert begin["files"] == 2 and 0.2 <= begin["seconds"] < 10 and first["files"] == 1
    assert "| 2 | BF16* | " in done.stdout and "| 4 | BF16 | " in done.stdout and "\n*: kernels" in done.stdout
    assert "| 4 | FP8 | 1,000.00 | 1,000.00 | 250.00 | 1.00 | 1.00 | 1.00 | 1,000.00 | 1,000.00 |" in done.stdout
    assert re.search(r"^BF16: start \d+ s; compiling 0 s Triton \(2\)$", done.stdout, re.M)
    assert " | 1,000.00 | 1,234,567 |" in done.stdout and "good prompts" not in done.stdout

    done, calls = serve()
    assert (done.returncode, calls) == (0, [])
    others = [{}, "--output-len", "64"], [{}, "--concurrency", "2"], [{"VLLM_OF_THIS_TEST": "1"}]
    for env, *options in others:  # 2 alone: another --max-num-seqs
        done, calls = serve(*options, **env)
        assert (done.returncode, calls) == (1, []) and "holds measurements of something else" in done.stderr


def test_repeated_measurements(serve, tmp_path):
    """One start and one warm-up for all; the median, and every figure beside it."""
    done, calls = serve("--repeat", "3", "--runs", "FP8", RISING="1")
    assert done.returncode == 0, done.stderr
    kinds = [call[0] for call in calls]
    assert kinds == ["serve", *["warm-up"] * 2, *["bench"] * 3, *["warm-up"] * 4, *["bench"] * 3]
    seeds = {call[call.index("--seed") + 1] for call in calls if call[0] == "bench"}
    assert len(seeds) == 6  # each has other prompts, of which a cache has none
    row = json.loads((tmp_path / "serve.json").read_text())["runs"]["FP8"]["concurrency"]["4"]
    assert row["output_throughput"] == 5.0
    assert [found["output_throughput"] for found in row["repeats"]] == [4.0, 5.0, 6.0]
    assert all(found["gpu_meanwhile"] for found in row["repeats"])  # samples, or why there are none
    for found in row["repeats"]:
        host = found["host_meanwhile"]
        assert all(0 <= host[percent] <= 100 for percent in ("idle_percent", "stolen_percent"))
        assert 0 < host["loop_us"][0] <= host["loop_us"][1] <= host["loop_us"][2]
    assert "| 5.00 (4.00-6.00) |" in done.stdout

    (tmp_path / "serve-work/FP8-4-2.json").unlink()
    done, calls = serve("--repeat", "3,4", "--runs", "FP8")  # 3 of 2 at once, 4 of 4
    assert [call[0] for call in calls] == ["serve", *["warm-up"] * 4, *["bench"] * 2]


def test_loads_and_shapes(serve, tmp_path):
    """One server for all, warmed up once a shape; what is as it was by default has its old name in the result."""
    words = [
        "--shapes",
        "1k/8,16/2k",
        "--load",
        "burst,steady,2.5",
        "--times",
        "3",
        "--goodput",
        "ttft:20",
        "tpot:5",
    ]
    done, calls = serve("--runs", "FP8", "--concurrency", "4", *words)
    assert done.returncode == 0, done.stderr
    assert [call[0] for call in calls] == ["serve", *(["warm-up"] * 4 + ["bench"] * 3) * 2]
    assert calls[0][calls[0].index("--max-model-len") + 1] == str(16 + 2048 + 8)
    benches = [call for call in calls if call[0] == "bench"]
    names = ("random-input-len", "random-output-len", "num-prompts", "max-concurrency")
    asked = [[call[call.index(f"--{name}") + 1] for name in names] for call in benches]
    assert asked == [[*shape, n, "4"] for shape in (["1024", "8"], ["16", "2048"]) for n in ("4", "12", "12")]
    rates = [call[call.index("--request-rate") + 1] for call in benches if "--request-rate" in call]
    assert rates == ["2.5"] * 2 and "2.5" in benches[2] and "2.5" in benches[5]
    assert all(call[call.index("--goodput") + 1 :][:2] == ["ttft:20", "tpot:5"] for call in benches)
    result = json.loads((tmp_path / "serve.json").read_text())
    rows = result["runs"]["FP8"]["concurrency"]
    assert list(rows) == [
        f"{shape}{load} 4" for shape in ("1024/8", "16/2048") for load in ("", " steady", " 2.5")
    ]
    row = rows["16/2048 steady 4"]
    assert row["case"] | {"input_len": 16, "load": "steady", "count": 4} == row["case"]
    assert (row["request_goodput"], row["output_per_gpu"], row["output_per_user"]) == (7.0, 250.0, 1.0)
    assert row["median_itl_ms"] == row["p99_itl_ms"] == 1000.0
    assert "| 16/2048 steady 4 | FP8 | " in done.stdout and "| 7.00 | 1,234,567 |" in done.stdout

    assert serve("--runs", "FP8", "--concurrency", "4", *words)[1] == []
    done, calls = serve("--runs", "FP8", "--concurrency", "4", *words[:-1], "tpot:6")
    assert (done.returncode, calls) == (1, []) and "holds measurements of something else" in done.stderr


def test_runs_of_ones_own(serve):
    """As another run, with more in its environment and more options."""
    own = [
        "--run",
        "Triton=DropIn VLLM_OF_THIS_RUN='{\"a\": 1}' --moe-backend triton",
        "--run",
        "Big=Triton --x 'y z'",
    ]
    done, calls = serve("--concurrency", "4", "--runs", "FlashMLA,Triton,Big", *own)
    assert done.returncode == 0, done.stderr
    stock, triton, big = (call for call in calls if call[0] == "serve")
    assert [call[-3:] for call in (stock, triton, big)] == [
        [None, "drop-in", "0"], ['{"a": 1}', "drop-in", "1"], ['{"a": 1}', "drop-in", "1"]
    ]  # fmt: skip
    at = triton.index("--moe-backend")
    assert triton[at - 4 : at + 2] == ["--attention-backend", "FLASHMLA_SPARSE_DSV4", "--kv-cache-dtype",
                                       "fp8_ds_mla", "--moe-backend", "triton"]  # fmt: skip
    assert big[big.index("triton") + 1 :][:2] == ["--x", "y z"] and "--moe-backend" not in stock
    assert "| 4 | Triton | " in done.stdout


def test_servers_of_one_group_start_together_and_are_measured_in_turns(serve, tmp_path):
    options = ["--runs", "FlashMLA,FP8,BF16", "--together", "2", "--kv-gib", "20", "--repeat", "2"]
    done, calls = serve(*options, "--concurrency", "2", PREEMPTS="1")
    assert done.returncode == 0, done.stderr

    def port(call):
        option = "--port" if call[0] == "serve" else "--base-url"
        return call[call.index(option) + 1].rpartition(":")[2]

    first, second = PORT, str(int(PORT) + 1)
    turns = [(call[0], port(call)) for call in calls if call[0] != "warm-up"]
    pair = [("bench", first), ("bench", second)]
    assert sorted(turns[:2]) == [("serve", first), ("serve", second)]
    assert turns[2:] == [*pair, *pair[::-1], ("serve", first), *pair[:1] * 2]
    # Both have been warmed up before either is measured.
    assert [call[0] for call in calls[2:7]] == ["warm-up"] * 4 + ["bench"]
    for call in calls:
        if call[0] == "serve":
            assert call[call.index("--kv-cache-memory-bytes") + 1] == str(20 << 30)
            assert float(call[call.index("--gpu-memory-utilization") + 1]) < 0.1
    result = json.loads((tmp_path / "serve.json").read_text())
    assert (result["together"], result["kv_gib"], list(result["runs"])) == (2, 20, ["FlashMLA", "FP8", "BF16"])
    seeds = [call[call.index("--seed") + 1] for call in calls if call[0] == "bench"]
    assert len(seeds) == 6 and len(set(seeds)) == 2  # all three have the same prompts
    assert result["runs"]["FP8"]["concurrency"]["2"]["preemptions"] == 2  # one in each of the stub's measurements
    assert "FP8, 2 at once: 2 requests were preempted; the cache is too small" in done.stdout


def test_one_of_two_servers_that_ends_takes_the_other_along(serve, tmp_path):
    vllm = tmp_path / "bin/vllm"
    serves = vllm.read_text()
    fails = "case $* in *fp8_per_tensor*) exit 3;; esac"
    vllm.write_text(f"#!/bin/sh\necho $$ >> pids\n{fails}\nexec {vllm}.real $@\n")
    (tmp_path / "bin/vllm.real").write_text(serves)
    (tmp_path / "bin/vllm.real").chmod(0o755)
    done, _ = serve("--runs", "FlashMLA,FP8", "--together", "2", "--kv-gib", "1")
    assert done.returncode == 1 and "error: the server ended with 3; the end of serve-work/FP8.log" in done.stderr
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2 and not any(Path("/proc", pid).exists() for pid in pids)


def test_a_server_that_runs(serve, tmp_path):
    env = os.environ | {"CALLS": str(tmp_path / "calls"), "HOME": str(tmp_path)}
    (tmp_path / "calls").write_text("")
    port = free_port()
    other = subprocess.Popen([tmp_path / "bin/vllm", "serve", "m", "--port", port], env=env)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except OSError:
                time.sleep(0.1)
        done, calls = serve("--base-url", f"{url}/")
        assert (done.returncode, calls) == (1, []) and "say by --tensor-parallel-size on how many" in done.stderr
        done, calls = serve("--base-url", f"{url}/", "--concurrency", "4", "--tensor-parallel-size", "4")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    assert done.returncode == 0, done.stderr
    assert [call[0] for call in calls] == ["warm-up"] * 4 + ["bench"]
    assert calls[-1][calls[-1].index("--base-url") + 1] == url
    result = json.loads((tmp_path / "serve.json").read_text())
    assert result["weights"] == "the server's" and result["runs"]["server"]["base_url"] == url
    assert result["runs"]["server"]["vllm"] == "0.22.1"
    assert "| 4 | server | 1,000.00 |" in done.stdout
    assert result["runs"]["server"]["concurrency"]["4"]["preemptions"] is None  # it does not say


@pytest.mark.parametrize(
    "fail, words",
    [
        ("server", "the server ended with 9; the end of serve-work/FlashMLA.log says why."),
        ("prompt", "the server answers a prompt with: HTTP Error 500: Internal Server Error; its log is "),
        ("one", "the server answered 1 prompts of 2; serve-work/FlashMLA.log says why."),
    ],
)
def test_what_goes_wrong_is_said_in_a_sentence(serve, tmp_path, fail, words):
    done, _ = serve(FAIL=fail)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("error: " + words)
    assert not (tmp_path / "serve-work/FlashMLA-2-1.json").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--concurrency", "a"], "--concurrency is 'a'; write whole numbers with commas between them."),
        (["--concurrency", "2,0"], "--concurrency is '2,0'; write whole numbers"),
        (["--repeat", "0"], "--repeat is 0; give 1 or more, or one such number for each --concurrency."),
        (["--repeat", "1,2,3"], "--repeat is 1,2,3; give 1 or more, or one such number"),
        (["--port", "99999"], "--port is 99999; give 1 to 65535: servers take it and those after it."),
        (["--shapes", "8k"], "--shapes is '8k'; write tokens in and out, as in 1k/8k,8k/1k"),
        (["--shapes", "8k/1k", "--input-len", "2"], "--shapes has what --input-len and --output-len say"),
        (["--load", "fast"], "--load is 'fast'; write burst, steady or prompts a second"),
        (["--load", "0"], "--load is '0'; write burst, steady or prompts a second"),
        (["--times", "1"], "--times is 1; give 2 or more"),
        (["--goodput", "ttft"], "--goodput has 'ttft'; write ttft, tpot or e2el, a colon and milliseconds."),
        (
            ["--run", "Mine=None --x"],
            "--run is 'Mine=None --x'; write NAME=RUN and further words, with a new NAME",
        ),
        (["--run", "FP8=BF16 --x"], "--run is 'FP8=BF16 --x'; write NAME=RUN"),
        (["--run", "Mine=FP8 'x"], "which a shell could not read (No closing quotation)."),
        (["--together", "2"], "--together is 2; give 1 or more, and --kv-gib with more than one: vLLM cannot"),
        (["--together", "0", "--kv-gib", "2"], "--together is 0; give 1 or more"),
        (["--kv-gib", "0"], "--kv-gib is 0; give 1 or more."),
        (["--base-url", "http://127.0.0.1:1"], "nothing at http://127.0.0.1:1 answers /health; give the URL of"),
        (["--base-url", "nonsense"], "nothing at nonsense answers /health; give the URL of a vLLM server"),
        (["--base-url", "http://127.0.0.1:1", "--profile"], "--base-url is of a server that runs already"),
        (["--out", "none/x.json"], "--out none/x.json cannot be written; give a file"),
        (["--out", "."], "--out . cannot be written; give a file"),
        (["--work", "file"], "--work file cannot be made (File exists); give another folder."),
    ],
)
def test_bad_arguments(serve, tmp_path, arguments, words):
    (tmp_path / "file").write_text("")
    done, calls = serve(*arguments)
    assert (done.returncode, calls, done.stderr.count("\n")) == (1, [], 1), done.stderr
    assert words in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bin", "calls", "file", "site"]


@pytest.mark.parametrize("option", ["--input-len", "--output-len", "--tensor-parallel-size"])
@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_numbers_that_make_no_sense(serve, option, value):
    done, calls = serve(f"{option}={value}")
    assert (done.returncode, calls) == (2, [])
    assert f"argument {option}: {value!r} is no whole number from 1 on" in done.stderr


@pytest.mark.parametrize("text, words", [(None, "cannot be made"), ("{", "config.json is no JSON object")])
def test_a_folder_for_dummy_weights_that_is_none(tmp_path, text, words):
    model = tmp_path / "model"
    if text is None:
        model.write_text("")
    else:
        model.mkdir()
        (model / "config.json").write_text(text)
    command = [sys.executable, ROOT / "benchmarks/serve.py", "--dummy", model, "--work", tmp_path / "work"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and words in done.stderr, done.stderr


def test_a_checkpoint_is_not_overwritten(tmp_path):
    model = tmp_path / "real"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for more in None, "model-00001.safetensors":
        if more:
            (model / "config.json").unlink(), (model / more).write_text("")
        before = sorted((file.name, file.read_text()) for file in model.iterdir())
        command = [ROOT / "benchmarks/serve.sh", "--dummy", model, "--work", tmp_path / "work"]
        env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
        assert done.returncode == 1 and f"{model} holds another model, which --dummy would" in done.stderr
        assert sorted((file.name, file.read_text()) for file in model.iterdir()) == before


def test_a_stopped_start_leaves_no_server(serve, tmp_path):
    (tmp_path / "bin/vllm").write_text("#!/bin/sh\necho $$ > pid\nexec sleep 60\n")
    process = serve.start()
    while not (tmp_path / "pid").exists():
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1] == "error: terminated; the same command goes on.\n"
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_a_stopped_measurement_leaves_no_client(serve, tmp_path):
    process = serve.start(FAIL="never")
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1] == "error: terminated; the same command goes on.\n"
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_another_server_is_not_measured(serve, tmp_path):
    other = subprocess.Popen([sys.executable, "-m", "http.server", PORT, "--bind", "127.0.0.1"], cwd=tmp_path)
    (tmp_path / "health").write_text("")
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health").close()
                break
            except OSError:
                time.sleep(0.1)
        done, calls = serve()
    finally:
        other.kill()
        other.wait()
    assert (done.returncode, calls) == (1, []) and "error: something serves at http://127.0.0.1:" in done.stderr


def test_without_a_vllm_script_the_module_serves(serve, tmp_path):
    """As from an unpacked wheel."""
    cli = tmp_path / "site/vllm/entrypoints/cli"
    cli.mkdir(parents=True)
    (cli / "main.py").write_text((tmp_path / "bin/vllm").read_text())
    (tmp_path / "bin/vllm").unlink()
    (tmp_path / "bin/python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin/python3").chmod(0o755)
    done, calls = serve("--runs", "FP8", PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert [call[0] for call in calls if call[0] != "warm-up"] == ["serve", "bench", "bench"]


def test_names_of_attention_kernels():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import serve_report

    csrc = "".join(path.read_text() for path in (ROOT / "csrc").glob("*.cu"))
    ours = set(re.findall(r"(\w+_kernel)\(const __grid_constant__", csrc))
    triton = ROOT / "overlay/common/vllm/third_party/mla_kernels"
    ours |= set(re.findall(r"^(\w+_kernel)\[", (triton / "triton_sparse_mla.py").read_text(), re.MULTILINE))
    ours |= set(re.findall(r"(_\w+_kernel)\[", "".join(path.read_text() for path in triton.glob("*.py"))))
    attention = {name for name in ours if serve_report.ATTENTION.search(name)}
    assert attention == {"sparse_mla_wgmma_kernel", "sparse_mla_m64_kernel", "sparse_mla_mma_kernel",
                         "sparse_mla_m64_rows_kernel", "sparse_mla_m64_merge_kernel",
                         "sparse_mla_wgmma_rows_kernel", "_attend_kernel", "_merge_kernel"}  # fmt: skip
    assert ours - attention == {"insert_kernel", "_insert_kernel", "_compress_kernel", "_build_kernel",
                                "slots_kernel", "_slots_kernel", "_columns_kernel", "_scores_kernel",
                                "_topk_kernel", "_expert_sum_kernel", "_save_compress_kernel",
                                "topk_kernel"}  # fmt: skip
    assert serve_report.KINDS["top-k"].search("void mla::(anonymous namespace)::topk_kernel<1, false>(mla::TopK)")
    # In _flashmla_C.abi3.so of the wheel of 0.22.0, for Hopper: decode, its schedule, its second part, prefill.
    for name in ("sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel",
                 "smxx::decode::get_mla_metadata_kernel", "smxx::decode::flash_fwd_mla_combine_kernel",
                 "sm90::fwd::sparse_attn_fwd_kernel"):  # fmt: skip
        assert serve_report.ATTENTION.search(f"void {name}<64>(Params)")
    # Of vLLM 0.33.0, as a profile names them.
    flash = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMain"
    assert serve_report.ATTENTION.search(flash)
    assert serve_report.KINDS["top-k"].search("void vllm::cooperative::cooperative_topk_cs8<2048u>(Params)")


def test_share_of_attention(tmp_path):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import serve_report

    kernels = {"void sparse_mla_wgmma_kernel<true, 16>(Params)": 24.0, "nvjet_gemm": 40.0, "insert_kernel": 16.0}
    # The second waits for the first while it runs already; the third comes later.
    events = [{"cat": "kernel", "name": name, "dur": time, "ts": start}
              for (name, time), start in zip(kernels.items(), (100.0, 116.0, 300.0), strict=True)]  # fmt: skip
    events += [{"cat": "cpu_op", "name": "sparse_mla", "dur": 9.0}, {"name": "no kernel either"}]
    step = "execute_context_0(0)_generation_16(16)"
    events += [{"cat": cat, "name": step, "dur": 9.0} for cat in ["user_annotation"] * 8 + ["gpu_user_annotation"]]
    for rank, found in enumerate([events, []]):
        with gzip.open(tmp_path / f"dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}.1.pt.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": found}, file)
    found = serve_report.attention_share(tmp_path)
    assert (found["kernels_us"], found["attention_us"], found["share"]) == (10.0, 3.0, 0.3)
    assert found["busy_us"] == (56 + 16) / 8
    assert found["steps"] == {step: 8}
    kinds = {kind: tuple(of.values()) for kind, of in found["kinds"].items() if of["launches"]}
    assert kinds == {"attention": (3.0, 0.1), "compressors and inserts": (2.0, 0.1), "BF16 products": (5.0, 0.1)}

    with pytest.raises(SystemExit, match="^error: the profiler left 1 of 2 traces in "):
        serve_report.newest_traces(tmp_path, 2)

    with gzip.open(tmp_path / "dp0_pp0_tp0_dcp0_ep0_rank0.2.pt.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events[-9:]}, file)
    with pytest.raises(SystemExit, match="json.gz has 8 steps and 0 kernels; remove it to profile again."):
        serve_report.attention_share(tmp_path)
    assert next(iter(found["longest_us"])) == "nvjet_gemm"


def test_long_names_of_kernels_that_begin_alike_are_one(tmp_path):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import serve_report

    times = {"a": 40, "b": 2}
    events = [{"cat": "kernel", "name": "x" * 120 + end, "dur": us, "ts": 0.0} for end, us in times.items()]
    events.append({"cat": "user_annotation", "name": "execute_context_0(0)_generation_16(16)"})
    with gzip.open(tmp_path / "rank0.1.pt.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert serve_report.attention_share(tmp_path)["longest_us"] == {"x" * 120: 42.0}


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void marlin_moe_wna16::Marlin<1125899906909960l, 562949953487106l>", "experts"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16, __nv_bfloat162>", "experts"),
        ("void deep_gemm::fp8_gemm_kernel_swapAB<1536u, 4096u>", "FP8 products"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0>", "FP8 products"),
        ("void tensorrt_llm::kernels::fp8_blockscale_gemm::scale_1x128_kernel<__nv_bfloat16>", "quantisation"),
        ("_fused_inv_rope_fp8_quant_per_head", "quantisation"),
        ("void vllm::deepseek_v4_fused_ops::fusedDeepseekV4QNormRopeKVRopeQuantInsertKernel<c10::BFloat16, 16>",
         "compressors and inserts"),
        ("_fused_kv_compress_norm_rope_insert_indexer_attn", "compressors and inserts"),
        ("kernel_cutlass_kernel_vllmmodelsdeepseek_v4nvidiaopssparse_attn_compress_cutedslSparseAttnCompressKernel",
         "compressors and inserts"),
        ("_compress_kernel", "compressors and inserts"),
        ("void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<sm90::decode>", "attention"),
        ("kernel_cutlass_kernel_vllmmodelsdeepseek_v4nvidiaopsfused_indexer_q_cutedslIndexerQ", "index scores"),
        ("void deep_gemm::sm90_fp8_paged_mqa_logits<1u, 64u>", "index scores"),
        ("void vllm::persistent::persistent_topk_kernel<512, 4u>", "top-k"),
        ("_compute_global_topk_indices_and_lens_kernel", "index tables"),
        ("void deep_gemm::sm90_tf32_hc_prenorm_gemm_impl<24u, 16384u>", "mHC"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>>", "fills"),
        ("nvjet_sm90_tss_64x16_64x16_4x1_v_bz_splitK_TNT", "BF16 products"),
        ("_fused_q_kv_rmsnorm_kernel", "all else"),
    ],
)  # fmt: skip
def test_kinds_of_kernels(tmp_path, kernel, kind):
    """Names that a profile of vLLM 0.22.1 on an H200 had."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import serve_report

    events = [{"cat": "user_annotation", "name": "execute_1"}]
    events += [{"cat": "kernel", "name": kernel, "dur": 2.0, "ts": 1.0}]
    with gzip.open(tmp_path / "a_rank0.1.pt.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    kinds = serve_report.attention_share(tmp_path)["kinds"]
    assert [name for name, of in kinds.items() if of["launches"]] == [kind]


def test_a_server_that_dies(serve, tmp_path):
    (tmp_path / "bin/vllm").write_text("#!/bin/sh\nsleep 1; exit 3\n")
    done, _ = serve()
    assert done.returncode == 1 and done.stderr.startswith("error: the server ended with 3; the end of ")
    assert done.stdout.endswith(" s\n")  # of the progress, which the error must not continue


def test_shares_that_are_none(serve, tmp_path):
    done, calls = serve("--share-of", "4")
    assert (done.returncode, calls) == (1, []) and done.stderr.startswith("error: --share-of is for --dummy")
    done, calls = serve("--dspark")
    assert (done.returncode, calls) == (1, []) and done.stderr.startswith("error: --dspark is for --dummy")
    command = [sys.executable, ROOT / "benchmarks/serve.py", "--dummy", tmp_path / "dummy", "--share-of", "4"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)  # at tensor parallel 4
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "divided by 8 at most" in done.stderr
    assert not (tmp_path / "dummy").exists()


def test_the_dummy_has_the_shape_of_v4_flash(tmp_path):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import serve

    serve.write_dummy(tmp_path, share_of=1)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], len(config["compress_ratios"]), config["vocab_size"]) == (43, 44, 129280)
    assert config["num_hash_layers"] == 43  # a router of near-zero weights would pick the same experts always
    assert config["n_routed_experts"] == 256 and config["expert_dtype"] == "fp4"
    assert "ignored_layers" not in config["quantization_config"]

    serve.write_dummy(tmp_path, share_of=4)
    share = json.loads((tmp_path / "config.json").read_text())
    divided = {"num_attention_heads": 16, "o_groups": 2, "moe_intermediate_size": 512, "vocab_size": 32320}
    assert {key: share[key] for key in config if share[key] != config[key]} == divided

    serve.write_dummy(tmp_path, share_of=4, dspark=True)
    drafts = json.loads((tmp_path / "config.json").read_text())
    assert drafts["n_mtp_layers"] == 3 and drafts["compress_ratios"][43:] == [0, 0, 0]
    assert drafts["dspark_block_size"] == serve.speculation()["num_speculative_tokens"] == 5
