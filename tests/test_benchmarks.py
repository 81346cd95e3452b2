"""The arithmetic that judges end-to-end runs; the runs themselves need a GPU."""

import fcntl
import functools
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import accuracy_e2e  # noqa: E402
import e2e  # noqa: E402
import features_e2e  # noqa: E402
import gpu_watch  # noqa: E402
import long_context  # noqa: E402
import quantised_e2e  # noqa: E402
import rounded_inputs  # noqa: E402
import throughput  # noqa: E402
from e2e import compare_full, compare_top  # noqa: E402
from features import comparison, one_gpu, parent, run  # noqa: E402
from features.run import Run  # noqa: E402


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def top(x, k):
    ids = np.argsort(-x, axis=-1)[:, :k]
    return ids, np.take_along_axis(x, ids, axis=-1).astype(np.float32)


COMMANDS = [path.name for path in BENCHMARKS.glob("*.py") if "Parser(description=__doc__" in path.read_text()]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_benchmark_says_what_it_does_without_vllm(name, tmp_path):
    command = [sys.executable, BENCHMARKS / name, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(f"usage: {name} ")


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 10.0])
def test_divergence_of_reported_tokens_is_a_lower_bound(scale):
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((200, 500)) * 3
    run = log_softmax(reference + scale * rng.standard_normal(reference.shape))
    reference = log_softmax(reference)
    full, bound = compare_full(reference, run), compare_top(*top(reference, 20), *top(run, 20))
    assert (bound["kl"] <= full["kl"] + 1e-6).all()
    assert (bound["diff"] <= full["diff"] + 1e-5).all()
    assert bound["kl"].mean() > 0.2 * full["kl"].mean()
    np.testing.assert_array_equal(bound["top1"], full["top1"])


def test_unrelated_distributions_are_far_apart():
    """Even if they report no token in common."""
    x = log_softmax(np.random.default_rng(0).standard_normal((2, 100, 8192)) * 3)
    assert compare_top(*top(x[0], 20), *top(x[1], 20))["kl"].mean() > 0.1
    assert abs(compare_top(*top(x[0], 20), *top(x[0], 20))["kl"]).max() < 1e-6


def generated(tokens, x):
    ids, values = top(x, 20)
    nothing = {"prompt_ids": np.empty((0, 8)), "prompt_values": np.empty((0, 8))}
    return {"tokens": np.array(tokens), "ids": ids, "values": values} | nothing


def test_tokens_that_part_are_judged_by_the_margin_there():
    x = log_softmax(np.random.default_rng(0).standard_normal((6, 500)))
    order = np.argsort(-x, axis=-1)
    first = order[:, 0]
    other = first.copy()
    other[3] = order[3, 1]
    run = x.copy()
    run[4:] = np.roll(run[4:], 1, axis=1)  # another context: not compared
    found = comparison.difference([generated(first, x)], [generated(other, run)])
    assert found["decode"]["positions"] == 4 and found["decode"]["kl_mean"] == pytest.approx(0, abs=1e-7)
    assert "prompt" not in found
    (parted,) = found["diverged"]
    assert (parted["prompt"], parted["at"]) == (0, 3)
    assert parted["margin"] == pytest.approx(x[3, first[3]] - x[3, other[3]], abs=1e-5)


def test_one_wrong_prompt_among_many_fails(tmp_path):
    """It parts early, so few of all positions are its own, and the mean over all hides it."""
    x = [log_softmax(4 * np.random.default_rng(i).standard_normal((48, 500))) for i in range(40)]
    right = [generated(np.argmax(each, axis=-1), each) for each in x]
    wrong = x[0].copy()
    wrong[0] = np.roll(wrong[0], 1)
    found = comparison.difference(right, [generated(np.argmax(wrong, axis=-1), wrong), *right[1:]])
    assert found["decode"]["kl_mean"] < 2e-2 and found["decode"]["kl_worst_prompt"] > 0.5
    run = Run({"backend": "bf16", "vocab": 500, "out": str(tmp_path / "out.json"), "own": {}, "noise": None})
    run.compare("output", right, [generated(np.argmax(wrong, axis=-1), wrong), *right[1:]], other_arithmetic=True)
    name = "output, decode: no prompt as far as another context (0.1)"
    assert run.result["checks"][name]["passed"] is False
    run.compare("output", right, right)
    assert run.result["checks"][name]["passed"] is True


def test_prompts_are_compared_where_both_report_them():
    x = log_softmax(np.random.default_rng(0).standard_normal((7, 500)))
    ids, values = top(x[:4], 8)
    reported = generated(range(3), x[4:]) | {"prompt_ids": ids, "prompt_values": values}
    other = reported | {"prompt_values": values - np.float32(0.25)}
    found = comparison.difference([reported, reported], [other, generated(range(2), x[4:6])])
    assert (found["prompt"]["positions"], found["decode"]["positions"], found["diverged"]) == (4, 5, [])
    assert found["prompt"]["logprob_diff_max"] == pytest.approx(0.25, abs=1e-5)


def test_a_token_that_is_not_reported_is_no_likelier_than_those_that_are():
    x = log_softmax(np.random.default_rng(0).standard_normal((3, 500)))
    order = np.argsort(-x, axis=-1)
    tokens = order[:, 0].copy()
    tokens[1] = order[1, 400]
    (parted,) = comparison.difference([generated(order[:2, 0], x)], [generated(tokens, x)])["diverged"]
    assert parted["margin"] == pytest.approx(x[1, order[1, 0]] - x[1, order[1, 19]], abs=1e-5)


def checkpoint(folder, **config):
    (folder / "model.safetensors.index.json").touch()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 500} | config))


@pytest.mark.parametrize("passed", [True, False])
def test_steps_share_the_gpus(tmp_path, monkeypatch, passed):
    """The plain run first and once; each GPU has its share of the steps at a time, whatever number they take."""
    checkpoint(tmp_path, num_nextn_predict_layers=1)
    ran, together = [], threading.Barrier(3)

    def run_step(args, backend, name, gpus, steps):
        assert backend == "bf16"
        ran.append((name, gpus))
        if name != "reference":
            together.wait(60)
        return {"ok": passed or name != "pp2", "measured": {}, "seconds": 1, "failed": []}

    monkeypatch.setattr(features_e2e, "run_step", run_step)
    monkeypatch.setattr(features_e2e, "machine", dict)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    options = ["--model", str(tmp_path), "--out", str(tmp_path / "out.json"), "--jobs", "3", "--steps"]
    assert features_e2e.main([*options, "tp2,pp2,dp2_ep"]) == (0 if passed else 1)
    assert ran[0] == ("reference", ["4"])
    assert sorted(ran[1:]) == [("dp2_ep", ["4", "5"]), ("pp2", ["6", "7"]), ("tp2", ["4", "5"])]
    (tmp_path / "out/bf16.reference.npz").touch()
    assert features_e2e.main([*options, "mtp1,mtp2,prefix"]) == 0
    assert sorted(ran[4:]) == [("mtp1", ["4"]), ("mtp2", ["5"]), ("prefix", ["6"])]
    assert features_e2e.main([*options, "tp4,chunked,nodes2"]) == 0
    named = dict(ran[7:])
    assert named["tp4"] == ["4", "5", "6", "7"] and not {*named["chunked"]} & {*named["nodes2"]}
    assert len(json.loads((tmp_path / "out.json").read_text())["steps"]["bf16"]) == 10
    ran.clear()
    with pytest.raises(SystemExit, match="tp4 need 4 GPUs; 2 are visible"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        features_e2e.main([*options, "tp4"])
    assert not ran


def test_steps_of_another_checkpoint_are_not_merged(tmp_path, monkeypatch):
    """They would be compared with the plain run of the first."""
    models = [tmp_path / name for name in ("first", "second")]
    for number, model in enumerate(models):
        model.mkdir()
        checkpoint(model, num_attention_heads=16 << number)
    ran = []
    found = {"ok": True, "measured": {}, "seconds": 1, "failed": []}
    monkeypatch.setattr(features_e2e, "run_step", lambda args, backend, name, *_: (ran.append(name), found)[1])
    monkeypatch.setattr(features_e2e, "machine", dict)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    out = tmp_path / "out.json"
    asked = [["--model", str(model), "--out", str(out), "--steps", "prefix"] for model in models]
    assert features_e2e.main(asked[0]) == 0 and ran == ["reference", "prefix"]
    (tmp_path / "out/bf16.reference.npz").touch()
    with pytest.raises(SystemExit, match="out.json holds steps of another checkpoint; give another --out."):
        features_e2e.main(asked[1])
    assert features_e2e.main(asked[0]) == 0 and ran == ["reference", "prefix", "prefix"]


@pytest.mark.parametrize("gpus, shared", [("4,4,4", True), ("4,5,6", False)])
def test_nodes_of_one_host(monkeypatch, gpus, shared):
    """Each rank is a node on its GPU, which NCCL must not know to be on one host where they share one."""
    others, here = [], {"CUDA_VISIBLE_DEVICES": gpus, "PATH": "/bin"}
    node = SimpleNamespace(wait=lambda: 0)
    popen = SimpleNamespace(Popen=lambda command, env: others.append((json.loads(command[-1]), env)) or node)
    monkeypatch.setattr(e2e, "subprocess", popen)
    monkeypatch.setattr(e2e.os, "environ", here)
    nodes, started = e2e.start_nodes({"model": "m", "tensor_parallel_size": 3})
    assert len(started) == 2 and nodes["nnodes"] == 3 and nodes.get("disable_custom_all_reduce", False) is shared
    assert [asked for asked, _ in others] == [
        {"model": "m", "tensor_parallel_size": 3, "node_rank": rank} | nodes for rank in (1, 2)
    ]
    environments = [here, *(env for _, env in others)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environments] == gpus.split(",")
    assert len({env["NCCL_HOSTID"] for env in environments}) == 3
    assert all(env["PATH"] == "/bin" and env["NCCL_SOCKET_IFNAME"] == "lo" for env in environments)


@pytest.mark.parametrize("name, capability", e2e.CAPABILITIES.items())
def test_a_gpu_stands_in_for_another(monkeypatch, name, capability):
    """Triton and FlashInfer go on with the one that is there; all others see the other."""

    class Platform:
        @classmethod
        def get_device_capability(cls, device_id=0):
            return (9, 0)

    asked = []
    cuda = SimpleNamespace(get_device_capability=lambda device=None: (9, 0))
    active = SimpleNamespace(get_current_target=lambda: asked.append(cuda.get_device_capability()))
    inductor = SimpleNamespace()
    fakes = {
        "torch": SimpleNamespace(cuda=cuda),
        "torch._dynamo.device_interface": SimpleNamespace(CudaInterface=inductor),
        "triton": SimpleNamespace(runtime=SimpleNamespace(driver=SimpleNamespace(active=active))),
        "vllm.platforms": SimpleNamespace(current_platform=Platform()),
        "vllm.platforms.interface": SimpleNamespace(DeviceCapability=lambda *capability: capability),
    }
    for module, fake in fakes.items():
        monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.setattr(e2e.os, "environ", {})
    e2e.stand_in(name)
    assert asked == [(9, 0)] and e2e.os.environ == {"FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
    assert cuda.get_device_capability(0) == Platform.get_device_capability(device_id=1) == capability
    assert inductor.get_compute_capability() == 90


def distance(kl, logprobs):
    return {"decode": {"kl_mean": kl, "logprob_diff_max": logprobs}, "diverged": []}


@pytest.mark.parametrize(
    "backend, base, drop_in, model",
    [
        ("stock", "flashmla", "1", {"model_type": "deepseek_v4"}),
        ("sparse_fp8", "flashmla_fp8", "0", {"model_type": "deepseek_v32"}),
        ("drop_in_bf16", "flashmla_bf16", "1", {"model_type": "deepseek_v32"}),
    ],
)
def test_a_backend_is_measured_against_flashmla(tmp_path, monkeypatch, backend, base, drop_in, model):
    """Every step runs with FlashMLA alone first, once, and what that differed from the plain run is allowed."""
    checkpoint(tmp_path, **model)
    ran = []

    def run_child(command, log_file, env, timeout):
        job = json.loads(Path(command[-1]).read_text())
        ran.append((job["backend"], job["step"], env["VLLM_DSV4_DROP_IN"]))
        assert job["reference"] == str(tmp_path / f"out/{base}.reference.npz")
        noise = distance(1e-4, 0.01) if job["step"] == "reference" else {}
        first = job["step"] == "reference" and job["backend"] == base
        assert job["noise"] == (None if first else distance(1e-4, 0.01))
        assert job["own"].get("output") == (distance(5e-3, 0.3) if ran[-1][:2] == (backend, "graphs") else None)
        measured = {"noise": noise, "output": distance(5e-3, 0.3), "cudagraph_mode": "NONE"}
        if first:
            del measured["output"]
            Path(job["reference"]).touch()
        Path(job["out"]).write_text(json.dumps({"checks": {}, "measured": measured}))
        log_file.write_text("")
        return 0, 1.0

    monkeypatch.setattr(parent, "run_child", run_child)
    monkeypatch.setattr(features_e2e, "machine", dict)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    options = ["--model", str(tmp_path), "--out", str(tmp_path / "out.json"), "--backend", backend, "--steps"]
    assert features_e2e.main([*options, "reference,graphs"]) == 0
    plain, other = [(base, "reference", "0"), (backend, "reference", drop_in)], (backend, "graphs", drop_in)
    assert ran == [*plain, (base, "graphs", "0"), other]
    assert features_e2e.main([*options, "graphs"]) == 0
    assert ran[4:] == [other]
    assert {k: list(v) for k, v in json.loads((tmp_path / "out.json").read_text())["steps"].items()} == {
        base: ["reference", "graphs"], backend: ["reference", "graphs"]
    }  # fmt: skip


def test_what_flashmla_differs_from_itself_bounds_the_drop_in():
    kl, margin = comparison.allowed([distance(1e-4, 0.01), distance(5e-3, 0.3)], False)
    assert kl == {"decode": pytest.approx(2e-2), "prompt": 1e-3} and margin == 0.6
    assert comparison.allowed([distance(5e-3, 0.3), distance(1e-4, 0.01)], False) == (kl, margin)
    assert comparison.allowed([None], False) == ({"decode": 1e-3, "prompt": 1e-3}, 0.2)
    assert comparison.allowed([distance(1e-4, 0.01), None], False)[0]["decode"] == 1e-3
    assert comparison.allowed([distance(1e-4, 0.01)], True) == ({"decode": 2e-2, "prompt": 2e-2}, 1.5)


@pytest.mark.parametrize("count, failed", [(6, []), (2, ["output: as many tokens as the reference"])])
def test_a_request_that_ended_early_fails(tmp_path, count, failed):
    """Those tokens that it wrote are the reference's."""
    x = log_softmax(np.random.default_rng(0).standard_normal((6, 500)))
    tokens = np.argsort(-x, axis=-1)[:, 0]
    a_run = Run({"backend": "bf16", "vocab": 500, "out": str(tmp_path / "x.json"), "noise": None, "own": {}})
    whole = generated(tokens, x)
    a_run.compare("output", [whole, whole], [whole, generated(tokens[:count], x[:count])])
    assert [name for name, check in a_run.result["checks"].items() if not check["passed"]] == failed


@pytest.mark.parametrize(
    "backend, calls, passed",
    [
        ("stock", [{"flash_mla_with_kvcache": 3}, {"flash_mla_sparse_fwd": 1}], True),
        ("stock", [{"flash_mla_with_kvcache": 3}, {}], False),  # compared with itself on one GPU
        ("flashmla", [{}, {}], True),
        ("flashmla", [{}, {"flash_mla_sparse_fwd": 1}], False),
        ("sparse_bf16", [{"flash_mla_sparse_fwd": 1}], True),
        ("sparse_bf16", [{}], False),
        ("sm80_bf16", [{"flash_mla_sparse_fwd": 1}], True),
        ("sm80_bf16", [{}], False),
        ("flashmla_fp8", [{"flash_mla_with_kvcache": 1}], False),
    ],
)
def test_a_step_says_who_served(backend, calls, passed, tmp_path):
    run = Run({"backend": backend, "vocab": 500, "out": str(tmp_path / "out.json")})
    run.llm = SimpleNamespace(collective_rpc=lambda method: {"drop_in_calls": calls}[method])
    run.finish()
    (check,) = json.loads((tmp_path / "out.json").read_text())["checks"].values()
    assert check["passed"] is passed


@pytest.mark.parametrize(
    "seen, off, served, failed",
    [
        (True, 0, 1, []),
        (False, 0, 1, ["control: mean KL >= 0.1"]),
        (True, 0.2, 1, ["output, decode: mean KL <= 0.001"]),
        (True, 0.5, 1, ["output, decode: mean KL <= 0.001",
                        "output, decode: no prompt as far as another context (0.1)"]),
        (True, 0, 0, ["our kernels served the prefills of pictures"]),
    ],
)  # fmt: skip
def test_pictures_with_the_drop_in_against_flashmla(tmp_path, monkeypatch, seen, off, served, failed):
    """It fails if pictures do not show, if the drop-in's output is another, or if FlashMLA had the prefills."""
    pytest.importorskip("PIL")
    calls = {"flash_mla_sparse_fwd": 0}

    def generate(run, prompts, steps=1, **options):
        if run.job["backend"] == "stock":
            calls["flash_mla_sparse_fwd"] += served
        found = []
        for prompt in prompts:
            key = 0
            if isinstance(prompt, dict) and seen:
                key = sum(np.asarray(p, dtype=np.int64).sum() for p in prompt["multi_modal_data"]["image"])
            x = np.random.default_rng(key).standard_normal((4, 500)) * 3
            x[:, 1] = 10  # the same token in each
            if run.job["backend"] == "stock":
                x += off * np.random.default_rng(key + 1).standard_normal(x.shape)
            found.append(generated([1, 1, 1, 1], log_softmax(x)))
        return found

    def start(run, **changes):
        run.llm = SimpleNamespace(
            get_tokenizer=lambda: SimpleNamespace(convert_tokens_to_ids=lambda name: 400),
            collective_rpc=lambda method: [dict(calls)],
        )

    for name, function in (("start", start), ("generate", generate), ("blocks_in_use", lambda run: 0)):
        monkeypatch.setattr(Run, name, function)
    job = {"vocab": 500, "noise": None, "own": {}, "reference": str(tmp_path / "flashmla.reference.npz")}
    for backend in ("flashmla", "stock"):
        file = tmp_path / f"{backend}.json"
        one_gpu.images(Run(job | {"backend": backend, "out": str(file)}))
        found = json.loads(file.read_text())["checks"]
    assert [name for name, check in found.items() if not check["passed"]] == failed


def test_calls_that_flashmla_has_are_not_counted():
    from features import drop_in_calls

    def serve(q):
        if q is None:
            raise ValueError("another's")
        return q

    call = drop_in_calls.counted(serve)
    before = drop_in_calls.DropInCalls().drop_in_calls().get("serve", 0)
    assert call(1) == 1
    with pytest.raises(ValueError, match="another's"):
        call(None)
    assert drop_in_calls.DropInCalls().drop_in_calls()["serve"] == before + 1


@pytest.mark.parametrize(
    "backend, config, step, words",
    [
        ("stock", {"num_nextn_predict_layers": 1}, "dspark", "needs a checkpoint with drafts of dspark"),
        ("stock", {"num_nextn_predict_layers": 1, "dspark_block_size": 5}, "mtp1", "with drafts of mtp"),
        ("stock", {}, "images", "images: needs a checkpoint with images"),
        ("fp8", {"vision_n_layers": 2}, "images", "images: is for --backend flashmla and stock"),
        ("fp8", {}, "kv_cache", "kv_cache: is for --backend flashmla and stock"),
        ("fp8", {}, "disaggregated", "needs the package nixl"),
        ("sparse_fp8", {"model_type": "glm_moe_dsa"}, "dspark", "needs a checkpoint with drafts of dspark"),
        ("sparse_fp8", {"model_type": "glm_moe_dsa"}, "dcp2", "needs vLLM 0.33.0"),
        ("sm80_fp8", {"model_type": "glm_moe_dsa"}, "kv_cache", "kv_cache: is for --backend flashmla_bf16"),
    ],
)
def test_steps_that_cannot_run_here(tmp_path, monkeypatch, capsys, backend, config, step, words):
    """Refused by name, and left out with a reason otherwise."""
    checkpoint(tmp_path, **config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    options = ["--model", str(tmp_path), "--out", str(tmp_path / "out.json"), "--backend", backend]
    options += ["--gpus", str(features_e2e.STEP[step].gpus)]
    with pytest.raises(SystemExit):
        features_e2e.parse_args([*options, "--steps", f"prefix,{step}"])
    assert words in capsys.readouterr().err
    args = features_e2e.parse_args(options)
    assert step not in args.steps and {"prefix", "tp2"} & set(args.steps)
    assert any(words in line for line in args.left_out)


@pytest.mark.parametrize("gpus, left_out", [("0,0,0,0", True), ("0,1,2,3", False)])
def test_ranks_of_a_data_parallel_rank_do_not_share_a_gpu(tmp_path, monkeypatch, gpus, left_out):
    checkpoint(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    args = features_e2e.parse_args(["--model", str(tmp_path), "--out", str(tmp_path / "out.json"), "--gpus", "4"])
    assert "tp4" in args.steps and ("dp2_tp2_ep" not in args.steps) is left_out
    assert args.left_out == ["dp2_tp2_ep: needs a GPU for every rank"] * left_out


@pytest.mark.parametrize(
    "backend, model, words",
    [
        ("bf16", "deepseek_v32", "no --backend bf16; it has flashmla_bf16, sparse_bf16, drop_in_bf16, "),
        ("sparse_fp8", "deepseek_v4", "no --backend sparse_fp8; it has bf16, fp8, flashmla, stock"),
    ],
)
def test_backends_of_another_model(tmp_path, capsys, backend, model, words):
    checkpoint(tmp_path, model_type=model)
    with pytest.raises(SystemExit):
        features_e2e.parse_args(["--model", str(tmp_path), "--out", "x.json", "--backend", backend])
    assert words in capsys.readouterr().err


def test_engine_of_sparse_mla(tmp_path):
    """V3.2's blocks, the cache of the backend, and a worker that counts who served."""
    checkpoint(tmp_path, model_type="deepseek_v32")
    job = {"model": str(tmp_path), "backend": "sparse_fp8", "vocab": 500, "out": str(tmp_path / "out.json")}
    arguments = run.engine_arguments(job)
    assert arguments["block_size"] == Run(job).block == 64
    assert arguments["worker_extension_cls"] == "features.drop_in_calls.DropInCalls"
    ours, theirs = (run.engine_arguments(job | {"backend": b}) for b in ("sparse_fp8", "flashmla_fp8"))
    assert ours == theirs | {"attention_backend": "MLA_KERNELS_SPARSE"}
    assert ours["kv_cache_dtype"] == "fp8_ds_mla" and theirs["attention_backend"] == "FLASHMLA_SPARSE"


def test_drafts_of_sparse_mla_have_its_backend(tmp_path):
    """vLLM would choose FlashMLA for them."""
    started = []

    class Asked(Exception):
        pass

    def start(**arguments):
        started.append(arguments["speculative_config"])
        raise Asked

    for backend in ("sparse_bf16", "flashmla"):
        with pytest.raises(Asked):
            one_gpu.mtp2(SimpleNamespace(job={"backend": backend}, start=start))
    plain = {"num_speculative_tokens": 2, "method": "mtp"}
    assert started == [plain | {"attention_backend": "MLA_KERNELS_SPARSE"}, plain]


def test_calls_of_mla_kernels_sparse_are_counted(monkeypatch):
    """It has the functions by names of its own; a wheel, or another release, has no such module."""
    from features import drop_in_calls

    def flash_mla_sparse_fwd():
        pass

    backend = SimpleNamespace(flash_mla_sparse_fwd=flash_mla_sparse_fwd, flash_mla_with_kvcache=print)

    def import_module(name):
        if name != "vllm.dsv4_overlay.sparse_mla_attention":
            raise ImportError(name)
        return backend

    monkeypatch.setattr(drop_in_calls.importlib, "import_module", import_module)
    monkeypatch.setattr(drop_in_calls, "calls", drop_in_calls.collections.Counter())
    drop_in_calls.watch()
    backend.flash_mla_sparse_fwd()
    assert drop_in_calls.DropInCalls().drop_in_calls() == {"flash_mla_sparse_fwd": 1}


@pytest.mark.parametrize(
    "warmup, eager, asked",
    [({"kernel_config": {}}, False, ["watch_compilation"]), ({"kernel_config": {}}, True, []), ({}, False, [])],
)
def test_compilation_is_watched_without_vllms_warm_up(tmp_path, monkeypatch, warmup, eager, asked):
    """vLLM 0.33.0 does so only after its JIT warm-up, which is left out."""
    checkpoint(tmp_path, model_type="deepseek_v4")
    called = []

    def engine(**arguments):
        config = SimpleNamespace(
            model_config=SimpleNamespace(enforce_eager=arguments["enforce_eager"]),
            compilation_config=SimpleNamespace(cudagraph_mode="NONE"),
            scheduler_config=SimpleNamespace(async_scheduling=False),
        )
        return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config), collective_rpc=called.append)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=engine))
    monkeypatch.setattr(run, "import_flashinfer", lambda: None)
    monkeypatch.setattr(run, "compiled_when_used", lambda: warmup)
    job = {"model": str(tmp_path), "backend": "fp8", "vocab": 500, "out": str(tmp_path / "out.json")}
    Run(job).start(enforce_eager=eager)
    assert called == asked


@pytest.mark.parametrize("drop_in", [None, SimpleNamespace(_PROVIDER="sm90")])
def test_the_reference_serves_and_is_counted(monkeypatch, drop_in):
    """MLA_KERNELS_SPARSE, which names no provider, and the drop-in, which does, where that is applied."""
    flash_mla = SimpleNamespace(pick_provider=lambda device: "sm90", serves=lambda *call: False)
    modules = {"vllm": {}, "vllm.third_party": {}, "vllm.third_party.mla_kernels": {"flash_mla": flash_mla}}
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    overlay = SimpleNamespace(drop_in=drop_in) if drop_in else None  # None: it cannot be imported
    monkeypatch.setitem(sys.modules, "vllm.dsv4_overlay", overlay)
    monkeypatch.delitem(sys.modules, "reference_attention", raising=False)
    from reference_attention import ReferenceAttention

    monkeypatch.delitem(sys.modules, "reference_attention")
    before = ReferenceAttention().drop_in_calls().get("reference", 0)
    assert flash_mla.pick_provider("cuda:0") == "reference"
    assert ReferenceAttention().drop_in_calls()["reference"] == before + 1
    assert flash_mla.serves("v4", 64) is bool(drop_in) and (not drop_in or drop_in._PROVIDER is None)


@pytest.mark.parametrize(
    "served_by, calls",
    [
        ("reference", {"flash_mla_sparse_fwd": 4, "reference": 4}),
        ("ours", {"flash_mla_sparse_fwd": 4}),
        ("flashmla", {}),
    ],
)
def test_accuracy_is_of_who_served(served_by, calls):
    accuracy_e2e.check_served(served_by, [calls, calls])
    for other in {"reference", "ours", "flashmla"} - {served_by}:
        with pytest.raises(RuntimeError, match=f"was served by {served_by}, not by {other}"):
            accuracy_e2e.check_served(other, [calls])


def test_nodes_of_one_gpu_start_before_cuda_is_asked(monkeypatch):
    """With a GPU that is named twice: it would find none, and processes that it starts could not either."""
    seen = []

    def stop():
        raise RuntimeError("enough")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    monkeypatch.setattr(accuracy_e2e, "start_nodes", lambda arguments: (seen.append(arguments), ({}, []))[1])
    monkeypatch.setattr(accuracy_e2e, "import_flashinfer", stop)
    job = {"spec": accuracy_e2e.RUNS["drop_in"], "vocab": 8, "prompts": [[1]], "forced": None, "steps": 1,
           "model": "/m", "tp": 2, "batch": 64}  # fmt: skip
    with pytest.raises(RuntimeError, match="enough"):
        accuracy_e2e.child(job)
    assert [arguments["tensor_parallel_size"] for arguments in seen] == [2]


def test_runs_and_bars_of_sparse_mla(tmp_path, capsys):
    checkpoint(tmp_path, model_type="glm_moe_dsa")
    asked = ["--model", str(tmp_path), "--out", "x.json"]
    args = accuracy_e2e.parse_args(asked)
    drop_in = ["drop_in_bf16", "drop_in_fp8"]
    assert args.runs == [
        "truth", "flashmla_bf16", "flashmla_fp8", "sparse_bf16", "sparse_fp8", *drop_in, "truth_fp8"
    ]  # fmt: skip
    assert [run for run, spec in args.specs.items() if spec["env"]["VLLM_DSV4_DROP_IN"] == "1"] == drop_in
    with pytest.raises(SystemExit):
        accuracy_e2e.parse_args([*asked, "--runs", "drop_in"])
    assert "unknown runs ['drop_in']" in capsys.readouterr().err
    kl = {"truth|flashmla_bf16": 1e-4, "truth|sparse_bf16": 1.04e-4, "truth|flashmla_fp8": 1e-3,
          "truth|sparse_fp8": 1.06e-3}  # fmt: skip
    found = accuracy_e2e.bars({pair: {"decode": {"kl_mean": value}} for pair, value in kl.items()}, True)
    assert [bar["passed"] for bar in found] == [True, False, *[None] * 6]
    assert found[1]["bar"] == "decode: KL(truth|sparse_fp8) <= 1.05 KL(truth|flashmla_fp8)"
    equal = dict.fromkeys(("truth|flashmla_bf16", "truth|sparse_bf16"), 1e-4)
    equal |= dict.fromkeys(("truth|flashmla_fp8", "truth|sparse_fp8"), 0.0)
    found = accuracy_e2e.bars({pair: {"decode": {"kl_mean": value}} for pair, value in equal.items()}, True)
    assert not any(bar["passed"] for bar in found)  # both left it to the same kernels
    kl |= {"truth_sm89|sm89_fp8": 1.06e-3}  # a GPU that stands in has FlashMLA's own bars
    found = accuracy_e2e.bars({pair: {"decode": {"kl_mean": value}} for pair, value in kl.items()}, True)
    assert [(bar["bar"], bar["passed"]) for bar in found if "sm89" in bar["bar"]] == [
        ("decode: KL(truth_sm89|sm89_fp8) <= 1.05 KL(truth|flashmla_fp8)", False),
        ("prompt: KL(truth_sm89|sm89_fp8) <= 1.05 KL(truth|flashmla_fp8)", None),
    ]


def test_a_cache_is_compared_in_its_layout_and_every_block():
    torch = pytest.importorskip("torch")
    pool = torch.zeros(5, 4, 32, dtype=torch.uint8)
    cache = pool[:, :3, :24]
    cache[2, 1, 3] = 1
    cache[0] = 7  # vLLM's null block
    pool[3, 3] = 1  # another's
    found = one_gpu.describe(cache)
    assert found["layout"] == [[5, 3, 24], [128, 32, 1], 0, "torch.uint8"] and list(found["blocks"]) == ["2"]
    assert one_gpu.describe(cache.contiguous())["blocks"] == found["blocks"]
    cache[2, 1, 3] = 2
    assert one_gpu.describe(cache)["blocks"] != found["blocks"]


def test_silent_attention_runs_and_returns_zeros(monkeypatch):
    torch = pytest.importorskip("torch")

    def flash_mla_with_kvcache(q, out=None):
        called.append(q)
        return (q + 1 if out is None else out.fill_(3)), None

    called, names = [], ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
    ops = SimpleNamespace(flashmla=SimpleNamespace(**dict.fromkeys(names, flash_mla_with_kvcache)))
    caller = SimpleNamespace(**dict.fromkeys(names, flash_mla_with_kvcache))
    # Modules of vLLM that other tests have imported stay as they are.
    modules = {"vllm.v1.attention.ops": ops, "vllm.caller": caller}
    monkeypatch.setattr(one_gpu, "sys", SimpleNamespace(modules=modules))
    one_gpu.silence_attention()
    out = torch.ones(2)
    assert caller.flash_mla_with_kvcache(torch.ones(2))[0].tolist() == [0, 0]
    assert caller.flash_mla_sparse_fwd(torch.ones(2), out=out)[0] is out and out.tolist() == [0, 0]
    assert len(called) == 2


def test_throughput_of_several_starts(tmp_path):
    """Runs in turns; medians, and the least and most that two starts leave open."""
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    asked = ["--model", str(tmp_path), "--out", str(tmp_path / "x.json")]
    assert [throughput.ENVIRONMENT[run]["VLLM_DSV4_DROP_IN"] for run in ("flashmla", "drop_in")] == ["0", "1"]
    args = throughput.parse_args([*asked, "--repeat", "2", "--runs", "fp8,flashmla", "--prompt", "30000"])
    assert args.runs == ["flashmla", "fp8", "flashmla-2", "fp8-2"]
    job = throughput.make_job(args, "fp8-2", None)
    arguments = throughput.engine_arguments(job)
    assert job["prompt"] == 30000 < arguments["max_model_len"]
    assert arguments["kv_cache_dtype"] == "fp8_per_tensor" and job["out"].endswith("/fp8-2.json")
    assert arguments.items() >= throughput.DUMMY_WEIGHTS.items()
    rates = {"flashmla": 100.0, "fp8": 110.0, "flashmla-2": 110.0, "fp8-2": 121.0, "fp8-3": 143.0}
    runs = {name: {"prefill": {"tokens_per_second": rate}, "decode": {}} for name, rate in rates.items()}
    runs["fp8-4"] = {"prefill": {"tokens_per_second": 999.0}, "decode": {}, "ok": False}
    ratios, text = throughput.report(runs, [16])
    assert ratios == {"fp8": {"prefill": {"ratio": round(121 / 105, 3), "least_most": [1.0, 1.43]}}}
    assert "121 (1.15, 1.00-1.43)" in text
    with pytest.raises(SystemExit):
        throughput.parse_args([*asked, "--repeat", "0"])


def test_throughput_of_a_quantised_layout(tmp_path, capsys):
    """A share of V4-Flash's real sizes, whose configuration is that of a checkpoint in the layout."""
    asked = ["--model", "flash", "--out", str(tmp_path / "x.json"), "--work", str(tmp_path)]
    config = throughput.parse_args([*asked, "--share-of", "4", "--layout", "nvfp4-experts"]).made
    sizes = ("num_hidden_layers", "n_routed_experts", "num_attention_heads", "moe_intermediate_size", "o_groups")
    assert [config[name] for name in sizes] == [43, 256, 16, 512, 2]
    assert config["quantization_config"]["moe_quant_algo"] == "NVFP4"
    stock = throughput.parse_args([*asked, "--share-of", "4"]).made
    assert not any(tmp_path.iterdir())  # before a GPU was asked for
    assert stock["expert_dtype"] == "fp4" and "moe_quant_algo" not in stock["quantization_config"]
    for wrong, sentence in (
        (["--layout", "fp3"], "--layout fp3: --model flash has nvfp4-experts, ct-nvfp4, ct-fp8-tensor, "),
        (["--model", "v3.2", "--layout", "nvfp4"], "--layout nvfp4: --model flash has "),
        (["--share-of", "16"], "--share-of is of --model v3.2, and up to 8 of flash and glm-5."),
    ):
        with pytest.raises(SystemExit):
            throughput.parse_args([*asked, *wrong])
        assert sentence in capsys.readouterr().err


def test_throughput_beside_others(tmp_path, monkeypatch):
    """With a lock for what it measures. The index of a layout's tensors is written, by which vLLM makes layers."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(throughput, "processes", lambda gpus: {7})
    jobs = []
    monkeypatch.setattr(throughput, "run_child", lambda command, *_: (jobs.append(command[-1]), ("1", 0.0))[1])
    monkeypatch.setattr(throughput, "tail", lambda path: "")
    monkeypatch.setattr(throughput, "collect", lambda *_: {"ok": False})
    asked = ["--model", "flash", "--share-of", "8", "--layout", "nvfp4-experts", "--runs", "drop_in"]
    asked += ["--out", str(tmp_path / "x.json"), "--work", str(tmp_path / "work")]
    assert throughput.main([*asked, "--lock", str(tmp_path / "lock")]) == 1
    job = json.loads(Path(jobs[0]).read_text())
    assert job["lock"] == str(tmp_path / "lock") and job["weights"] is False
    assert job["context_is_fixed"]  # another command, which does not see this one's, may fill the same file
    names = json.loads((tmp_path / "work/flash/model.safetensors.index.json").read_text())["weight_map"]
    assert {"layers.42.ffn.experts.0.w1.weight_scale_2", "layers.42.attn.wq_b.scale"} <= names.keys()
    with pytest.raises(SystemExit, match="other processes"):
        throughput.main(asked)


def test_throughput_profiles_every_batch(tmp_path, monkeypatch):
    """The traces of this start, in the order in which batches are measured; older ones are another's."""
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(throughput, "processes", lambda gpus: set())
    rate = {"tokens_per_second": 1.0}

    def run_child(command, *_):
        job = json.loads(Path(command[-1]).read_text())
        assert throughput.engine_arguments(job)["profiler_config"]["torch_profiler_dir"] == job["profile"]
        Path(job["profile"]).mkdir(parents=True)
        for number in (1, 2, 3, 4):
            (Path(job["profile"]) / f"rank0.{number}.pt.trace.json.gz").touch()
        decode = {batch: rate.copy() for batch in ("16", "4")}
        Path(job["out"]).write_text(json.dumps({"prefill": rate, "decode": decode, "ok": True}))
        return 0, 1.0

    monkeypatch.setattr(throughput, "run_child", run_child)
    monkeypatch.setattr(throughput, "collect", lambda job, *_: json.loads(Path(job["out"]).read_text()))
    monkeypatch.setattr(throughput, "profiled_step", lambda trace: trace.name.split(".")[1])
    asked = ["--model", str(tmp_path), "--out", str(tmp_path / "x.json"), "--runs", "drop_in", "--batches", "4,16"]
    assert throughput.main([*asked, "--profile"]) == 0
    run = json.loads((tmp_path / "x.json").read_text())["runs"]["drop_in"]
    steps = {batch: of["step"] for batch, of in run["decode"].items()}
    assert run["prefill"]["step"] == "2" and steps == {"16": "3", "4": "4"}
    assert "profiler_config" not in throughput.engine_arguments(
        throughput.make_job(throughput.parse_args(asked), "drop_in", None)
    )

    def no_trace(folder, count):
        sys.exit("error: no trace")

    monkeypatch.setattr(throughput, "newest_traces", no_trace)
    shutil.rmtree(tmp_path / "x/drop_in-profile")
    (tmp_path / "x.json").unlink()
    with pytest.raises(SystemExit, match="no trace"):
        throughput.main([*asked, "--profile"])
    assert json.loads((tmp_path / "x.json").read_text())["runs"]["drop_in"]["decode"]["4"] == rate


@pytest.mark.parametrize("kl, noise", [(2e-2, True), (3e-2, False)])
def test_what_a_base_gets_wrong_is_no_noise(kl, noise):
    assert parent.is_noise({"decode": {"kl_mean": 1e-4}, "prompt": {"kl_mean": kl}, "diverged": []}) == noise
    assert not parent.is_noise({"FULL": 3}) and not parent.is_noise(0.5)


class StandInEngine:
    """A token a step for each of the first `room` requests, as if the cache held no more; they wait in turns if
    `takes_turns`, as vLLM has it by preemption."""

    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=1))

    def __init__(self, room, takes_turns):
        self.room, self.takes_turns, self.left, self.tokens = room, takes_turns, {}, itertools.count()
        self.steps = 0

    def add_request(self, name, prompt, params):
        self.left[name] = params.max_tokens

    def abort_request(self, names):
        for name in names:
            self.left.pop(name, None)

    def get_num_unfinished_requests(self):
        return len(self.left)

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        self.steps += 1
        first = self.steps // 40 % max(len(self.left), 1) if self.takes_turns else 0  # each has 40 steps off
        names = list(self.left)
        served = [*names[first:], *names[:first]][: self.room]
        for name in served:
            self.left[name] -= 1
            if not self.left[name]:
                del self.left[name]
        written = ([SimpleNamespace(token_ids=[next(self.tokens)])] for _ in served)
        return [SimpleNamespace(request_id=n, outputs=w) for n, w in zip(served, written, strict=True)]


@pytest.fixture
def throughput_child(tmp_path, monkeypatch):
    """A run of throughput.py's own process over a stand-in with so much room; what it leaves."""
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')
    monkeypatch.setattr(throughput, "import_flashinfer", lambda: None)
    monkeypatch.setattr(throughput, "compiled_when_used", dict)

    def run_it(room, takes_turns=False):
        llm = SimpleNamespace(llm_engine=StandInEngine(room, takes_turns))
        for name, has in {
            "vllm": {"LLM": lambda **_: llm, "SamplingParams": SimpleNamespace},
            "vllm.inputs.engine": {"tokens_input": list},
            "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA=None)},
        }.items():
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(**has))
        asked = ["--model", str(tmp_path), "--work", str(tmp_path), "--out", str(tmp_path / "x.json")]
        job = throughput.make_job(throughput.parse_args([*asked, "--batches", "2,4"]), "drop_in", None)
        try:
            throughput.child(job)
        finally:
            found = json.loads(Path(job["out"]).read_text())
        return found

    return run_it


def test_throughput_measures_every_batch(throughput_child):
    found = throughput_child(room=8)
    assert found["done"] and list(found["decode"]) == ["4", "2"]
    for batch, of in found["decode"].items():
        assert of["ms_per_step"] == pytest.approx(1e3 * int(batch) / of["tokens_per_second"])


def test_throughput_with_a_cache_that_is_too_small(throughput_child):
    """It must not go on until the time is up, for vLLM lets the requests take turns."""
    with pytest.raises(RuntimeError, match="1 of 4 requests .* is too small; give more --kv-gib"):
        throughput_child(room=3)


def test_throughput_of_requests_that_take_turns(throughput_child):
    """All begin, but the decode of 4 would be of 3 at a time."""
    with pytest.raises(RuntimeError, match="not all of 4 requests wrote in every step: .* give more --kv-gib"):
        throughput_child(room=3, takes_turns=True)


def test_one_at_a_time_has_the_lock(tmp_path):
    with throughput.locked(tmp_path / "lock"), open(tmp_path / "lock") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(tmp_path / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_throughput_of_v32(tmp_path, capsys):
    """A share of V3.2's real sizes, by each backend; ratios are to FlashMLA over the same cache."""
    asked = ["--model", "v3.2", "--out", str(tmp_path / "x.json"), "--work", str(tmp_path)]
    args = throughput.parse_args([*asked, "--share-of", "16", "--layers", "8"])
    assert args.runs == list(e2e.SPARSE_MLA)
    with_drop_in = [name for name in args.runs if throughput.ENVIRONMENT[name]["VLLM_DSV4_DROP_IN"] == "1"]
    assert with_drop_in == ["drop_in_bf16", "drop_in_fp8"]
    config = args.made
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "moe_intermediate_size", "vocab_size")
    assert [config[name] for name in sizes] == [8, 7168, 8, 128, 8080]
    assert config["quantization_config"].get("ignored_layers", []) == []
    arguments = throughput.engine_arguments(throughput.make_job(args, "sparse_fp8-2", None))
    assert arguments["block_size"] == 64 and arguments.items() >= e2e.SPARSE_MLA["sparse_fp8"].items()
    rates = {"flashmla_bf16": 100.0, "sparse_bf16": 130.0, "flashmla_fp8": 200.0, "sparse_fp8": 210.0}
    runs = {name: {"prefill": {"tokens_per_second": rate}, "decode": {}} for name, rate in rates.items()}
    ratios, _ = throughput.report(runs, [16])
    assert {name: found["prefill"]["ratio"] for name, found in ratios.items()} == {
        "sparse_bf16": 1.3, "sparse_fp8": 1.05
    }  # fmt: skip
    glm = throughput.parse_args([*asked, "--model", "glm-5", "--share-of", "8"]).made
    assert [glm[name] for name in sizes] == [32, 6144, 8, 256, 19360] and glm["v_head_dim"] == 256
    for wrong, words in (["--layers", "3"], "3 are dense"), (["--runs", "bf16"], "unknown runs"):
        with pytest.raises(SystemExit):
            throughput.parse_args([*asked, *wrong])
        assert words in capsys.readouterr().err


def nvml(gpus, clocks, slowed):
    """Of as many GPUs; `clocks` are those of the SMs, one after another."""
    return SimpleNamespace(
        NVML_CLOCK_SM=0, NVML_CLOCK_MEM=1, NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: gpus, nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetClockInfo=lambda gpu, kind: 3201 if kind else next(clocks, 1500),
        nvmlDeviceGetTemperature=lambda gpu, kind: 55 + gpu, nvmlDeviceGetPowerUsage=lambda gpu: 650_900,
        nvmlDeviceGetCurrentClocksThrottleReasons=slowed,
    )  # fmt: skip


def test_samples_of_the_gpu(monkeypatch):
    clocks = iter([1980, 1980, 1200, 1500])
    monkeypatch.setitem(sys.modules, "pynvml", nvml(1, clocks, lambda gpu: 0x4))
    with gpu_watch.Watch() as watch:
        (found,) = watch.summary()
        assert found == {"sm_mhz": [1980] * 3, "memory_mhz": [3201] * 3, "temperature_c": [55] * 3,
                         "power_w": [650] * 3, "slowed_by": ["power cap"]}  # fmt: skip
        while len(watch._samples) < 4:
            time.sleep(0.01)
    (found,) = watch.summary()
    assert found["sm_mhz"][0] == 1200 and found["sm_mhz"][2] == 1980
    (last,) = watch.summary(since=time.monotonic())
    assert last["sm_mhz"] == [1500] * 3
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with gpu_watch.Watch() as watch:
        assert watch.summary().startswith("no samples: ")


def test_a_driver_that_answers_no_more_leaves_no_samples(monkeypatch):
    """The last one would stand for all that is measured after it."""
    answers = iter([0])
    monkeypatch.setitem(sys.modules, "pynvml", nvml(1, itertools.repeat(1000), lambda gpu: next(answers)))
    monkeypatch.setattr(gpu_watch, "PERIOD", 0.001)
    with gpu_watch.Watch() as watch:
        watch._thread.join(20)
        assert watch.summary(time.monotonic()).startswith("no samples to the end: ")


def test_each_gpu_has_samples_of_its_own(monkeypatch):
    slowed, clocks = iter([0x0, 0x0, 0x20, 0x8]), iter([1000, 1001, 1300, 1001, 1100, 1001])
    monkeypatch.setitem(sys.modules, "pynvml", nvml(2, clocks, lambda gpu: next(slowed, 0)))
    with gpu_watch.Watch() as watch:
        while len(watch._samples) < 3:
            time.sleep(0.01)
    del watch._samples[3:]
    assert [found["sm_mhz"] for found in watch.summary()] == [[1000, 1100, 1300], [1001] * 3]
    assert [found["temperature_c"][0] for found in watch.summary()] == [55, 56]
    assert [found["slowed_by"] for found in watch.summary()] == [["temperature"], ["hardware slowdown"]]


HELD = {7: 2**30, 8: None}


@pytest.mark.parametrize("gpus, found", [(["1"], HELD), (["0"], {}), (["GPU-b", "0"], HELD)])
def test_processes_on_the_gpus_at_hand(monkeypatch, gpus, found):
    running = {"a": [], "b": [SimpleNamespace(pid=pid, usedGpuMemory=of) for pid, of in HELD.items()]}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda i: "ab"[i],
        nvmlDeviceGetHandleByUUID=lambda name: name[-1],
        nvmlDeviceGetComputeRunningProcesses=running.get,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_watch.processes(gpus) == found
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_watch.processes(gpus) == {}


SCRIPTS = {
    accuracy_e2e: ["--model", "MODEL"],
    features_e2e: ["--model", "MODEL"],
    throughput: ["--model", "MODEL"],
    long_context: [],
    quantised_e2e: ["--folder", "MODEL"],
}
with_a_model = pytest.mark.parametrize("script", [accuracy_e2e, features_e2e, throughput])


@pytest.fixture
def refuses(tmp_path, monkeypatch, capsys):
    """Calls a script with options; returns what it says, in one line, having started and written nothing."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "deepseek_v4", "vocab_size": 8192}')
    (model / "model.safetensors.index.json").write_text("{}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for module in (e2e, accuracy_e2e, throughput, long_context, parent):
        monkeypatch.setattr(module, "run_child", lambda *_: pytest.fail("a run was started"))

    def call(script, *options, out="out.json"):
        before = sorted(tmp_path.rglob("*"))
        given = [str(model) if word == "MODEL" else word for word in SCRIPTS[script]]
        with pytest.raises(SystemExit) as ended:
            script.main([*given, "--out", str(tmp_path / out), *options])
        assert sorted(tmp_path.rglob("*")) == before
        if ended.value.code == 2:  # argparse, after its usage
            return capsys.readouterr().err.splitlines()[-1]
        assert ended.value.code.startswith("error: ") and "\n" not in ended.value.code
        return ended.value.code

    return call


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_gpu(refuses, monkeypatch, script):
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert "needs 1 GPU; 0 are visible" in refuses(script)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", "")  # nor nvidia-smi
    assert "needs 1 GPU; 0 are visible" in refuses(script)


def test_speeds_of_a_gpu_that_others_use(refuses, monkeypatch):
    monkeypatch.setattr(throughput, "processes", lambda gpus: {8, 7} if gpus == ["0"] else set())
    assert "other processes (7, 8) use the GPU" in refuses(throughput)


THREE_RUNS = """
import argparse, os, sys
from pathlib import Path
import e2e
work = Path("work")
e2e.prepare(argparse.Namespace(out=Path("out.json"), work=work))
command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
e2e.at_once(2, lambda n: e2e.run_child(command, work / n, dict(os.environ), 60), "012")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_on_the_gpus_by_a_command_that_is_interrupted(tmp_path, number):
    """Servers of runs that go on would keep their memory, and slow down what is measured next."""
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
    heeded = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # even if a shell began this with &
    arguments = [sys.executable, "-c", THREE_RUNS]
    command = subprocess.Popen(arguments, cwd=tmp_path, env=environment, preexec_fn=heeded)
    logs = [tmp_path / "work" / n for n in "01"]
    while not all(log.exists() and log.read_text() for log in logs):
        assert command.poll() is None
        time.sleep(0.1)
    command.send_signal(number)
    assert command.wait(timeout=20)
    assert not [log for log in logs if Path("/proc", log.read_text().strip()).exists()]
    assert not (tmp_path / "work" / "2").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_another_command_in_the_same_folder(refuses, tmp_path, script):
    """Each would start what the other has begun, and write over it."""
    work = tmp_path / "work"
    work.mkdir()
    other = os.open(work, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        assert "another command is at work" in refuses(script, "--work", str(work))
    finally:
        os.close(other)


@pytest.mark.parametrize("script", SCRIPTS)
def test_results_that_could_not_be_written(refuses, tmp_path, script):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert "folder.json cannot be written" in refuses(script, out="folder.json")
    assert "folder cannot be written" in refuses(script, out="folder")  # OUT without suffix is the folder of logs
    assert "cannot be made" in refuses(script, out="file/out.json")
    assert "cannot be made" in refuses(script, "--work", str(tmp_path / "file"))


@with_a_model
@pytest.mark.parametrize("text, words", [("{", "JSON object"), ("[]", "JSON object"), ("{}", "no vocab_size")])
def test_a_model_s_damaged_settings(refuses, tmp_path, script, text, words):
    (tmp_path / "model/config.json").write_text(text)
    assert words in refuses(script)


@pytest.mark.parametrize("script", [features_e2e, throughput])
def test_results_of_other_gpus_are_not_merged(refuses, tmp_path, monkeypatch, script):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(script, "machine", lambda: {"gpus": ["NVIDIA H200, 580.1"]})
    (tmp_path / "out.json").write_text('{"machine": {"gpus": ["NVIDIA H100 80GB HBM3, 580.1"]}}')
    assert "another vLLM, overlay, environment, GPU or driver; give another --out." in refuses(script)


def test_runs_with_other_options_are_not_replaced(refuses, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(throughput, "machine", lambda: {})
    (tmp_path / "out.json").write_text('{"settings": {"kv_gib": 1}, "runs": {"drop_in": {}}}')
    said = refuses(throughput)
    assert "out.json holds runs with another " in said and "batches, " in said and "kv_gib, " in said


@pytest.mark.parametrize("script", [features_e2e, throughput])
@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_damaged_results_are_left_alone(refuses, tmp_path, script, text):
    (tmp_path / "out.json").write_text(text)
    (tmp_path / "out").mkdir()
    assert "out.json is no JSON object" in refuses(script)
    assert (tmp_path / "out.json").read_text() == text


@pytest.mark.parametrize("script, option", [
    *((accuracy_e2e, name) for name in ("--lengths", "--steps", "--batch", "--tp", "--jobs")),
    (features_e2e, "--jobs"),
    *((throughput, name) for name in ("--repeat", "--tp", "--batches", "--context", "--batch-tokens", "--kv-gib")),
    *((quantised_e2e, name) for name in ("--steps", "--tp")),
])  # fmt: skip
@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", ""])
def test_numbers_that_make_no_sense(refuses, script, option, value):
    assert f"argument {option}: {value!r} is no whole number from 1 on" in refuses(script, f"{option}={value}")


def test_layouts_and_caches_that_there_are_not(refuses):
    assert "--layouts names nope; there are nvfp4, " in refuses(quantised_e2e, "--layouts", "nvfp4,nope")
    assert "invalid choice: 'nope'" in refuses(quantised_e2e, "--kv", "nope")


@pytest.mark.parametrize("group, groups", [(128, 3), (None, 1)])
def test_rounded_inputs_are_e4m3_with_a_power_of_two_a_group(group, groups):
    torch.manual_seed(0)
    x = torch.randn(5, 384) * torch.logspace(-6, 6, 5, 10).unsqueeze(1)
    x[2] = 0
    x = x.bfloat16()
    found = rounded_inputs.rounded(x, group)
    assert found.dtype == x.dtype and found.shape == x.shape
    for token, row in enumerate(x.view(5, groups, -1)):
        for values, of in zip(row.double(), found.view(5, groups, -1)[token].double(), strict=True):
            power = 2.0 ** math.ceil(math.log2(max(values.abs().max().item(), 1e-30) / 448))
            scaled = (of / power).float()
            assert torch.equal(scaled.to(torch.float8_e4m3fn).float(), scaled)  # E4M3 values, exactly
            # To the nearest: of 3 bits after the point, or of 2^-9 below the least normal number.
            assert ((of - values).abs() <= (values.abs() / 16).clamp(min=power * 2**-10)).all()
    assert not torch.equal(found, x)


@pytest.mark.parametrize("options, here", [
    ([], ""), (["--kv", "bfloat16", "--graphs", "--tp", "2"], "-bfloat16-graphs-tp2"),
])  # fmt: skip
def test_a_quantised_layout_is_held_to_its_own_error(tmp_path, monkeypatch, options, here):
    """One with FP8 linears to its values with rounded inputs, another to its values."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(quantised_e2e, "machine", lambda: {})
    for name in ("truth", "nvfp4", "nvfp4-dequantised", "ct-nvfp4", "ct-nvfp4-dequantised"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"vocab_size": 512}')
    jobs = {}
    noise = {"nvfp4-dequantised": 0.3, "nvfp4": 0.3, "ct-nvfp4-rounded": 0.1, "ct-nvfp4": 0.4}

    def start_run(name, job, args):
        jobs[name] = job
        rng = np.random.default_rng(5)
        shape = {f"{part}_{i}": (9, 512) for part in ("decode", "prompt") for i in range(5)}
        exact = {key: rng.standard_normal(size) for key, size in shape.items()}
        own = np.random.default_rng(len(jobs))
        by = noise.get(name.removesuffix(here), 0)
        rows = {key: log_softmax(x + by * own.standard_normal(x.shape)) for key, x in exact.items()}
        np.savez(job["out"], **rows)
        Path(job["out"]).with_suffix(".json").write_text(json.dumps({"key": job["key"], "tokens": [[1]] * 5}))
        (args.work / f"{name}.log").write_text("Model loading took 1.5 GiB memory")
        return {"ok": True, "seconds": 1.0}

    monkeypatch.setattr(accuracy_e2e, "start_run", start_run)
    asked = ["--folder", str(tmp_path), "--out", str(tmp_path / "x.json"), "--layouts", "nvfp4,ct-nvfp4"]
    assert quantised_e2e.main([*asked, *options]) == 1
    plain = {"truth", "nvfp4-dequantised", "ct-nvfp4-rounded"}
    assert jobs.keys() == plain | {f"{name}{here}" for name in ("truth", "nvfp4", "ct-nvfp4")}
    assert all((jobs[name]["tp"], jobs[name]["spec"]["kv"]) == (1, "fp8") for name in plain)
    assert jobs["ct-nvfp4-rounded"]["spec"]["rounded_like"] == str(tmp_path / "ct-nvfp4")
    assert jobs["ct-nvfp4-rounded"]["model"] == str(tmp_path / "ct-nvfp4-dequantised")
    of_layout = jobs[f"nvfp4{here}"]
    if here:
        assert (of_layout["tp"], of_layout["spec"]["kv"]) == (2, "bfloat16") and "compilation" in of_layout["spec"]
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["comparisons"].keys() == {
        "truth|nvfp4-dequantised", f"truth{here}|nvfp4{here}", f"nvfp4-dequantised|nvfp4{here}",
        "truth|ct-nvfp4-rounded", f"truth{here}|ct-nvfp4{here}", f"ct-nvfp4-rounded|ct-nvfp4{here}",
    }  # fmt: skip
    assert [row["passed"] for row in result["bars"]] == [True, True, False, False]
    jobs.clear()
    assert quantised_e2e.main([*asked, *options]) == 1 and not jobs  # all are in --work


def test_secrets_are_no_part_of_a_result(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    found = e2e.machine()["environment"]
    assert found["VLLM_USE_BREAKABLE_CUDAGRAPH"] == "1" and "VLLM_API_KEY" not in found


JIT, WARM = "Kernel JIT monitor activated\n", "Warm-up of the full-width attention kernels took {} s\n"
COMPILED = "JIT compilation during inference: "
NO_KERNEL, IN_TIME = "no kernel of ours compiled after warm-up", "warm-up < 20 s"


@pytest.mark.parametrize("backend, step, text, status, failed", [
    ("bf16", "graphs", JIT + WARM.format(19.9), 0, []),
    ("bf16", "graphs", JIT + WARM.format(19.9), 1, []),
    ("bf16", "graphs", JIT + WARM.format(20.1) + WARM.format(3), 0, [IN_TIME]),
    ("bf16", "graphs", JIT, 0, [IN_TIME]),
    ("bf16", "reference", JIT + WARM.format(60), 0, []),  # fills the JIT caches
    ("bf16", "graphs", WARM.format(1), 0, [NO_KERNEL]),
    ("stock", "graphs", JIT + COMPILED + "_build_kernel\n", 0, [NO_KERNEL]),
    ("stock", "graphs", JIT + COMPILED + "another\n", 0, []),
])  # fmt: skip
def test_what_the_log_of_a_step_says(backend, step, text, status, failed, tmp_path):
    log = tmp_path / "log"
    log.write_text(text + "GPU KV cache size: 1,234,567 tokens\n")
    found = parent.collect(step, {"backend": backend, "out": str(tmp_path / "none")}, log, status, 7.0)
    assert found["failed"] == failed and found["ok"] is (status == 0 and not failed)
    assert found["measured"].get("kv_tokens_per_gib") == (308641 if step == "reference" else None)
    assert found["measured"]["compiled_by_vllm"] == (["another"] if "another" in text else [])
    assert ("log_end" in found) is (status != 0)


def test_eager_runs_without_a_monitor(tmp_path):
    """As on 0.33.0."""
    (tmp_path / "log").touch()
    for mode, failed in (("NONE", []), ("FULL_DECODE_ONLY", [NO_KERNEL])):
        (tmp_path / "out").write_text(json.dumps({"checks": {}, "measured": {"cudagraph_mode": mode}}))
        job = {"backend": "stock", "out": str(tmp_path / "out")}
        assert parent.collect("graphs", job, tmp_path / "log", 0, 7.0)["failed"] == failed


def test_a_step_has_its_gpus_and_its_environment(tmp_path, monkeypatch):
    """And no result of an earlier run of it."""
    checkpoint(tmp_path)
    out = tmp_path / "bf16.tp2.json"
    out.write_text(json.dumps({"checks": {}, "measured": {"kept": 1}}))
    own = replace(parent.STEP["tp2"], environment={"OF_THE_STEP": "1"})
    monkeypatch.setitem(parent.STEP, "tp2", own)

    def run_child(command, log_file, env, timeout):
        assert not out.exists() and (env["CUDA_VISIBLE_DEVICES"], env["OF_THE_STEP"]) == ("4,5", "1")
        log_file.write_text(JIT + WARM.format(1))
        return 0, 1.0

    monkeypatch.setattr(parent, "run_child", run_child)
    args = SimpleNamespace(model=tmp_path, work=tmp_path, timeout=60)
    assert parent.run_step(args, "bf16", "tp2", ["4", "5"], {})["ok"]


def test_names_of_our_kernels():
    names = parent.our_kernels()
    assert {"_insert_kernel", "_compress_kernel", "_build_kernel", "_attend_kernel"} <= names


LONG_RUN = """
import json, pathlib, sys
job = json.loads(pathlib.Path(sys.argv[2]).read_text())
print("INFO Available KV cache memory: 101.50 GiB")
print("INFO GPU KV cache size: 1,234,567 tokens")
out = pathlib.Path(job["out"])
overrun = {overruns!r}[job["run"]]
if overrun == "memory":
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB.")
if overrun == "other":
    sys.exit("ValueError: no")
out.write_text(json.dumps(dict(served=True, seconds=7.0, overrun_gib=overrun)))
"""


@pytest.mark.parametrize(
    "overruns, status, words",
    [
        ({"stock": 2.4, "fp8": 2.45, "fp8_without": 3.4}, 0,
         ["served in 7.0 s, 2.40 GiB over", "+0.05 beside stock", "+0.95 beside fp8"]),
        ({"stock": 2.4, "fp8": 2.6}, 1, ["2.40 GiB over", "+0.20 beside stock"]),
        ({"stock": 2.4, "fp8": 2.4, "fp8_without": 2.5}, 1, ["over", "over", "fp8: fp8 shows nothing"]),
        ({"stock": 2.4, "fp8": "memory", "fp8_without": 3.4}, 1, ["over", "Tried to allocate 9", "no fp8 to"]),
        ({"stock": "other"}, 1, ["not served: 1"]),
    ],
)  # fmt: skip
def test_verdicts_of_a_million_tokens(tmp_path, monkeypatch, overruns, status, words):
    """Only a run that overruns further without the reservation shows that it counts."""
    stub = tmp_path / "stub.py"
    stub.write_text(LONG_RUN.format(overruns=overruns))
    run_child = long_context.run_child
    monkeypatch.setattr(long_context, "machine", dict)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(
        long_context, "run_child",
        lambda command, *rest: run_child([command[0], str(stub), *command[2:]], *rest),
    )  # fmt: skip
    out = tmp_path / "long.json"
    assert long_context.main(["--out", str(out), "--runs", ",".join(overruns)]) == status
    runs = json.loads(out.read_text())["runs"]
    assert list(runs) == list(overruns)
    assert all(word in run["verdict"] for word, run in zip(words, runs.values(), strict=True)), runs
    assert all((run["available_kv_gib"], run["kv_cache_tokens"]) == (101.5, 1234567) for run in runs.values())
    assert json.loads(out.read_text())["table_mib"] == 1040


def test_arguments_of_a_million_tokens(capsys):
    job = {"run": "bf16_without", "model": "m", "context": 1 << 20, "tokens": 8192}
    arguments = long_context.engine_arguments(job)
    assert arguments["kv_cache_dtype"] == "bfloat16" and arguments["max_model_len"] == 1 << 20
    assert "kv_cache_memory_bytes" not in arguments
    assert long_context.model_config()["compress_ratios"].count(128) == 1
    stock = long_context.engine_arguments(job | {"run": "stock"})
    assert stock["kv_cache_dtype"] == "fp8"  # V4 does not start with vLLM's default
    assert arguments == stock | {"attention_backend": long_context.BACKEND, "kv_cache_dtype": "bfloat16"}
    for wrong in ["--runs", "flashmla"], ["--runs", "fp8,stock"], ["--context", "1000"], ["--tokens", "0"]:
        with pytest.raises(SystemExit):
            long_context.parse_args(["--out", "x.json", *wrong])
        assert f"{wrong[0]} " in capsys.readouterr().err.splitlines()[-1]
