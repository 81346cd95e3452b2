"""vLLM's own command line, configuration and cache planning on the applied tree, and on the pristine one."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from test_config_contract import VLLMS_TOO
from vllm.dsv4_overlay.config import NAME_IS_OURS
from vllm.v1.attention.backends.registry import AttentionBackendEnum

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "vocab_size": 8192,
    "hidden_size": 4096,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1048576,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
MODELS = {
    "flash": V4 | {"num_hidden_layers": 43, "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0]},
    "mini": V4 | {"num_hidden_layers": 5, "compress_ratios": [0, 0, 4, 128, 4, 0]},
    "wide": V4 | {"num_hidden_layers": 5, "compress_ratios": [0, 0, 4, 128, 4, 0], "num_attention_heads": 256},
    "llama": LLAMA,
}
NEW = "--attention-backend=FLASHINFER_MLA_SPARSE_DSV4"
FLASHMLA = AttentionBackendEnum.FLASHMLA_SPARSE_DSV4.get_class().__name__


def alias(name):
    """The option, with vLLM's own name where that is the only one."""
    return f"--attention-backend={name}" if name.upper() in AttentionBackendEnum.__members__ else NEW.lower()


# What both trees understand.
STOCK = [("llama",), ("llama", "--kv-cache-dtype=fp8"), ("llama", "--kv-cache-dtype=bfloat16"),
         ("mini", "--kv-cache-dtype=fp8"), ("flash", "--kv-cache-dtype=fp8_ds_mla"),
         ("flash", "--kv-cache-dtype=fp8")]  # fmt: skip
OVERLAY = [
    ("flash", NEW),
    ("flash", "--kv-cache-dtype=bfloat16"),
    ("flash", "--kv-cache-dtype=fp8_per_tensor"),
    ("mini", NEW, "--kv-cache-dtype=bfloat16"),
    ("mini", alias("v4_flashinfer_mla_sparse"), "--kv-cache-dtype=fp8"),
    ("mini", alias("FLASHINFER_MLA_SPARSE_V4"), "--kv-cache-dtype=fp8_e4m3"),
    ("mini", "--attention-backend=FLASHMLA_SPARSE_DSV4", "--kv-cache-dtype=fp8"),
    ("mini", NEW, "--kv-cache-dtype=fp8_ds_mla"),
    ("wide", NEW),
    ("llama", NEW),
]
SCALES = [
    ("mini", NEW, "--kv-cache-dtype=fp8", '--additional-config={"dsv4_scales": "mini.safetensors"}'),
    ("flash", NEW, "--kv-cache-dtype=fp8", '--additional-config={"dsv4_scales": "mini.safetensors"}'),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    save_file({f"layers.{n}.attn.k_scale": torch.tensor(2.0**n) for n in range(5)}, folder / "mini.safetensors")
    return folder


def on_hopper(tree, folder, requests, capability="9.0", **env):
    """What hopper.py says to each request, with `tree` as vLLM."""
    done = subprocess.run(
        [sys.executable, str(HERE / "hopper.py")],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": "", "CAPABILITY": capability} | env,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def ask(tree, models, cases, capability="9.0"):
    arguments = [[f"--model={models / model}", *options] for model, *options in cases]
    return dict(zip(cases, on_hopper(tree, models, arguments, capability), strict=True))


@pytest.fixture(scope="module")
def answers(applied, models):
    return ask(applied, models, STOCK + OVERLAY + SCALES)


@pytest.fixture(scope="module")
def reverted(applied, tmp_path_factory):
    tree = tmp_path_factory.mktemp("pristine")
    shutil.copytree(applied / "vllm", tree / "vllm", ignore=shutil.ignore_patterns("*.pyc.*"))
    shutil.copy(applied / "PKG-INFO", tree)
    subprocess.run([ROOT / "scripts/apply-patches.sh", "--revert", tree], check=True, capture_output=True)
    return tree


@pytest.fixture(scope="module")
def stock_answers(reverted, models):
    return ask(reverted, models, STOCK)


def test_revert_gives_back_the_released_files(reverted):
    record = (reverted / "PKG-INFO").read_text()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    archive = cache / f"vllm-dsv4-overlay/sdist/vllm-{re.search(r'^Version: (.*)', record, re.M)[1]}.tar.gz"
    if not archive.is_file():
        pytest.skip(f"there is no {archive} to compare with")
    found = {path.relative_to(reverted).as_posix() for path in (reverted / "vllm").rglob("*") if path.is_file()}
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            if member.isfile() and path.startswith("vllm/"):
                assert (reverted / path).read_bytes() == tar.extractfile(member).read(), path
                found.discard(path)
    assert not {path for path in found if not path.endswith(".pyc")}


@pytest.mark.parametrize("case", STOCK, ids=" ".join)
def test_who_uses_neither_sees_no_change(answers, stock_answers, case):
    """The whole configuration, its hash, and every cache spec, page and allocation are those of stock vLLM."""
    assert "error" not in stock_answers[case]
    assert answers[case] == stock_answers[case]


def test_stock_dtype_is_still_flashmla(answers):
    layers = answers["flash", "--kv-cache-dtype=fp8_ds_mla"]["layers"]
    assert layers["backend"] == FLASHMLA
    assert layers["padded_heads"] == 64 and layers["ours"] == 0
    assert "page_size_padded=37440" in layers["specs"]["model.layers.2.attn"]


@pytest.mark.parametrize(
    "case, cache_dtype",
    [(OVERLAY[0], "bfloat16"), (OVERLAY[1], "bfloat16"), (OVERLAY[2], "fp8_per_tensor"), (OVERLAY[3], "bfloat16"),
     (OVERLAY[4], "fp8_per_tensor"), (OVERLAY[5], "fp8_per_tensor")],
)  # fmt: skip
def test_full_cache_is_chosen(answers, case, cache_dtype):
    answer = answers[case]
    assert answer["cache_dtype"] == cache_dtype
    layers = answer["layers"]
    assert layers["backend"] == "DeepseekV4FullCacheBackend"
    assert layers["padded_heads"] == 16
    assert layers["ours"] == MODELS[case[0]]["num_hidden_layers"]
    assert set(layers["heads"]) == {16}  # as the warm-up has q
    assert layers["compressors"] == ([] if NAME_IS_OURS else ["vllm.dsv4_overlay.adapter"])
    assert not answer["cuda_initialized"]


def test_scales_reach_the_layers_or_are_refused_early(answers):
    """Through vLLM's own command line, and before any layer is made."""
    assert answers[SCALES[0]]["layers"]["kv_scales"] == [1, 2, 4, 8, 16]
    assert answers[OVERLAY[4]]["layers"]["kv_scales"] == [1] * 5
    assert "dsv4_scales mini.safetensors has no layers.5.attn.k_scale;" in answers[SCALES[1]]["error"]


def test_flashmla_by_name(answers, stock_answers):
    """The layers, their caches and allocations are those of a stock vLLM that was asked for no backend."""
    answer = answers["mini", "--attention-backend=FLASHMLA_SPARSE_DSV4", "--kv-cache-dtype=fp8"]
    assert answer["layers"]["backend"] == FLASHMLA
    assert answer["layers"] == stock_answers["mini", "--kv-cache-dtype=fp8"]["layers"]


def test_flashmla_is_not_touched(applied):
    """By the full-width series: neither its implementation, metadata and kernels, nor the operators below it."""
    loading = {f"vllm/models/deepseek_v4/nvidia/{name}.py" for name in ("model", "mtp", "flashinfer_sparse")}
    record = json.loads((applied / "vllm/_dsv4_overlay/record.json").read_text())
    changed = [file["path"] for file in record["files"] if "full-width/" in (file.get("patch") or "full-width/")]
    parts = ["v1/attention/backends/mla", "v1/attention/ops", "third_party/flashmla"]
    if (applied / "vllm/models/deepseek_v4").is_dir():  # from 0.22.0 on
        parts += ["models/deepseek_v4/nvidia", "models/deepseek_v4/common"]
    for part in parts:
        assert (applied / "vllm" / part).is_dir()
        assert not [path for path in changed if path.startswith(f"vllm/{part}/") and path not in loading]


@pytest.mark.parametrize(
    "case", [("flash", NEW), ("flash", "--kv-cache-dtype=fp8_per_tensor"), OVERLAY[3], OVERLAY[4]], ids=" ".join
)
def test_pages(answers, case):
    """Page arithmetic, and that every cache gets the memory that its pages need."""
    layers = answers[case]["layers"]
    ratios = MODELS[case[0]]["compress_ratios"]
    element = 2 if answers[case]["cache_dtype"] == "bfloat16" else 1
    dtype = "torch.bfloat16" if element == 2 else "torch.uint8" if NAME_IS_OURS else "torch.float8_e4m3fn"
    for name, page in layers["pages"].items():
        ratio = ratios[int(re.search(r"\d+", name)[0])]
        if ".indexer." in name:
            # 64 x 132 bytes of rows or 4 x 512 float32, aligned; padded to each other up to 0.22.1.
            assert page == (8640 if NAME_IS_OURS else 8192 if name.endswith("state_cache") else 8704)
        elif name.endswith("state_cache"):
            # 4 x 2048 or 8 x 1024 float32 are 32768 bytes; padded up to 0.22.1, where BF16 pages are larger.
            assert page == 32768 * (element if NAME_IS_OURS else 1)
            assert ("alignment=None" if NAME_IS_OURS else "page_size_padded=None") in layers["specs"][name]
        else:
            rows = 256 // ratio if name.endswith(".attn") else 64
            assert page == rows * 512 * element
            assert layers["shapes"][name] == [[1, rows, 512], dtype]
    assert sorted(sum(layers["groups"], [])) == sorted(layers["pages"])
    if not NAME_IS_OURS:
        check_packing(layers, 512 * element)
        return
    assert {name for _, names in layers["tensors"] for name in names} == layers["pages"].keys()
    for size, names in layers["tensors"]:
        assert all(layers["pages"][name] * layers["num_blocks"] == size for name in names)
    # A cache shares no memory with another of its own group: they use the same blocks.
    for group in layers["groups"]:
        for _, names in layers["tensors"]:
            assert len(set(names) & set(group)) <= 1


def check_packing(layers, row):
    """Each group has its pages side by side in the same blocks, which lie a whole number of rows apart."""
    places = {}
    for tensor in layers["tensors"]:
        stride = tensor["block_stride"]
        assert tensor["size"] == stride * layers["num_blocks"] and stride % row == 0
        for number, name in enumerate(tensor["layers"]):
            places[name] = tensor["offset"] + number * tensor["layer_stride"]
    assert places.keys() == layers["pages"].keys()
    assert len({tensor["block_stride"] for tensor in layers["tensors"]}) == 1
    for group in layers["groups"]:
        end = 0
        for start, name in sorted((places[name], name) for name in group):
            assert start >= end and start % 16 == 0  # what the native kernels need of a row
            end = start + layers["pages"][name]
        assert end <= stride


@VLLMS_TOO
def test_no_kernel_is_compiled_that_never_runs(answers):
    """vLLM compiles, before the first request, what its layers have registered."""
    ours = set(answers["mini", NEW, "--kv-cache-dtype=bfloat16"]["layers"]["warmed_up"])
    stock = set(answers["flash", "--kv-cache-dtype=fp8_ds_mla"]["layers"]["warmed_up"])
    assert ours < stock and {"SavePartialStatesKernel", "ComputeSWAIndicesAndLensKernel"} < ours
    theirs = ("BuildC128A", "ComputeGlobalTopk", "CombineTopk", "DequantizeAndGather", "_SPARSE_ATTN_COMPRESS",
              "_SPARSE_ATTN_NORM_ROPE_STORE")  # fmt: skip
    assert all(name.startswith(theirs) for name in stock - ours)


@VLLMS_TOO
def test_vllms_own_layer_on_blackwell(applied, models):
    """Stock but for real scales, and for blocks that hold a whole number of BF16 rows."""
    cases = [("flash", NEW), ("flash", "--kv-cache-dtype=fp8_per_tensor"), SCALES[0]]
    bf16, fp8, scaled = ask(applied, models, cases, "10.0").values()
    for answer, row in ((bf16, 1024), (fp8, 512)):
        assert answer["layers"]["backend"] == "DeepseekV4FlashInferMLASparseBackend"
        check_packing(answer["layers"], row)
    assert fp8["backend"] == "FLASHINFER_MLA_SPARSE_DSV4" and fp8["layers"]["kv_scales"] == [1] * 43
    assert scaled["layers"]["kv_scales"] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    "case, words",
    [
        (("mini", NEW, "--kv-cache-dtype=fp8_ds_mla"), "fp8_ds_mla is not served by"),
        (("wide", NEW), "this model has 256; raise --tensor-parallel-size."),
        (("llama", NEW), "serves DeepSeek V4 only, and this model is LlamaForCausalLM"),
    ],
)
def test_refused_when_the_configuration_is_made(answers, case, words):
    assert words in answers[case]["error"]


OTHER_GPUS = ["8.0", "12.0"] if NAME_IS_OURS else ["8.0"]


@pytest.mark.parametrize("capability", OTHER_GPUS)
def test_other_gpus_are_refused(applied, models, capability):
    stock = ("mini", "--kv-cache-dtype=fp8")
    found = ask(applied, models, [("mini", NEW), stock], capability)
    assert f"this machine has compute capability {capability}" in found["mini", NEW]["error"]
    assert "error" not in found[stock]


def test_engine_arguments_of_the_end_to_end_scripts(applied, models, tmp_path, monkeypatch):
    """They run where GPU time is dear: vLLM must accept what they ask for, and mean it."""
    if "VLLM_USE_BREAKABLE_CUDAGRAPH" not in (applied / "vllm/envs.py").read_text():
        pytest.skip("the scripts use VLLM_USE_BREAKABLE_CUDAGRAPH, which vLLM has from 0.22.0 on")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import e2e
    import throughput
    from features import one_gpu, several_gpus  # noqa: F401
    from features.run import GRAPHS, STEP, Run, engine_arguments

    def start(run, **changes):
        asked.append(changes)
        raise StopIteration

    monkeypatch.setattr(Run, "start", start)
    ended = SimpleNamespace(wait=lambda: 0)
    popen = SimpleNamespace(Popen=lambda command, env: others.append(command) or ended)
    monkeypatch.setattr(several_gpus, "subprocess", popen)
    monkeypatch.setattr(e2e, "subprocess", popen)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")  # disaggregated changes it
    requests, graphs, expected, others = [], [], [], []
    ours, stock = "DeepseekV4FullCacheBackend", FLASHMLA
    for backend, name in itertools.product(("fp8", "stock"), STEP):
        if backend not in STEP[name].backends or name in ("dspark", "images"):  # of other checkpoints
            continue
        asked, gpus = [], STEP[name].gpus
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # nodes2 changes it
        job = {"backend": backend, "model": str(models / "mini"), "vocab": 8192, "out": str(tmp_path / "out")}
        if name.startswith("dp"):
            asked = [GRAPHS | {"tensor_parallel_size": gpus // 2, "enable_expert_parallel": True}]
        else:
            with pytest.raises(StopIteration):
                STEP[name].function(Run(job))
        arguments = engine_arguments(job, **asked[0])
        requests.append(arguments | ({"distributed_executor_backend": "mp"} if gpus > 1 else {}))
        graphs.append("NONE" if arguments["enforce_eager"] else "FULL_DECODE_ONLY")
        if name.startswith("graphs"):
            graphs[-1] = "FULL_AND_PIECEWISE"
        expected.append(ours if backend == "fp8" else stock)
    for command in others:
        if command[1] == "-c":
            requests.append(json.loads(command[-1]))
            graphs.append("FULL_DECODE_ONLY")
            expected.append(ours if requests[-1]["kv_cache_dtype"] == "fp8_per_tensor" else stock)
    for run in throughput.RUNS:
        args = throughput.parse_args(["--model", str(models / "flash"), "--out", str(tmp_path / "t"), "--tp", "4"])
        arguments = throughput.engine_arguments(throughput.make_job(args, run, None))
        requests.append(arguments | {"distributed_executor_backend": "mp"})
        graphs.append("FULL_DECODE_ONLY")
    answers = on_hopper(applied, models, requests, VLLM_USE_BREAKABLE_CUDAGRAPH="1")
    assert [answer.get("error") for answer in answers] == [None] * len(answers)
    assert [answer["graphs"] for answer in answers] == graphs
    expected += [ours if run in ("fp8", "bf16") else stock for run in throughput.RUNS]
    assert [answer["layers"]["backend"] for answer in answers] == expected


def test_configuration_imports_no_kernels(applied, tmp_path):
    """Every vLLM process imports vllm.config; only DeepSeek V4 may pay for its kernels."""
    code = (
        "import sys, vllm.config, vllm.v1.attention.backends.registry\n"
        "print(sorted(name for name in sys.modules if 'dsv4' in name))"
    )
    env = os.environ | {"PYTHONPATH": str(applied), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr[-1000:]
