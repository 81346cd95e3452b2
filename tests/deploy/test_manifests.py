"""deploy/kubernetes: each variant as kustomize makes it, against strict schemas, and the check of the settings."""

import copy
import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/kubernetes"
VARIANTS = sorted(path.parent.name for path in FOLDER.glob("*/settings.yaml"))
KUBERNETES = ("1.30", "1.34")  # the oldest, as docs/deploy.md says, and a newer one
SCHEMAS = json.loads((Path(__file__).parent / "schemas.json").read_text())
GROUPS = {"LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1", "ServiceMonitor": "monitoring.coreos.com/v1",
          "PrometheusRule": "monitoring.coreos.com/v1", "ScaledObject": "keda.sh/v1alpha1"}  # fmt: skip
LWS = {"LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"}
sys.path[:0] = [str(FOLDER), str(ROOT / "scripts")]

import check  # noqa: E402
from dsv4_overlay_tools.series import load_series, release_folders  # noqa: E402

needs_kustomize = pytest.mark.skipif(not shutil.which("kubectl"), reason="there is no kubectl")


def kustomize(folder):
    """The resources of a kustomization, by kind and name."""
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return {(r["kind"], r["metadata"]["name"]): r for r in yaml.safe_load_all(done.stdout)}


@functools.cache
def rendered(variant):
    return kustomize(FOLDER / variant)


def of(variant, kind, name="vllm"):
    """A resource of a variant, by the name that it has without the variant's."""
    return rendered(variant)[kind, f"{variant}-{name}"]


def workload(variant):
    return of(variant, "LeaderWorkerSet", "vllm-group") if variant == "h200x8x2" else of(variant, "Deployment")


def with_components(tmp_path, variant, *components):
    """A copy of deploy/kubernetes whose variant also has these components, after that of one machine."""
    copied = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, copied)
    path = copied / variant / "kustomization.yaml"
    content = yaml.safe_load(path.read_text())
    content["components"][1:1] = [f"../optional/{component}" for component in components]
    path.write_text(yaml.safe_dump(content))
    return copied / variant


def validate(resource):
    """Raise for anything that Kubernetes or the custom resource does not know or takes otherwise."""
    for version in KUBERNETES:
        if resource["kind"] not in SCHEMAS:
            kubernetes_validate.validate(resource, version, strict=True)
            continue
        assert resource["apiVersion"] == GROUPS[resource["kind"]]
        assert set(resource) == {"apiVersion", "kind", "metadata", "spec"}
        carrier = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": resource["metadata"]}
        kubernetes_validate.validate(carrier, version, strict=True)
        jsonschema.Draft202012Validator(SCHEMAS[resource["kind"]]).validate(resource["spec"])
        if resource["kind"] == "LeaderWorkerSet":
            for template in pods(resource).values():
                kubernetes_validate.validate(
                    {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template},
                    version, strict=True,
                )  # fmt: skip


def pods(workload):
    """The pod templates of what serves, by their component."""
    if workload["kind"] == "Deployment":
        return {"server": workload["spec"]["template"]}
    template = workload["spec"]["leaderWorkerTemplate"]
    return {"server": template["leaderTemplate"], "worker": template["workerTemplate"]}


def jobs(variant):
    """The pod templates of the Jobs that are made by hand, by their component."""
    found = {name: of(variant, "CronJob", name) for name in ("fetch", "calibrate")}
    return {name: job["spec"]["jobTemplate"]["spec"]["template"] for name, job in found.items()}


def container(template, name="vllm"):
    return {each["name"]: each for each in template["spec"]["containers"]}[name]


def env(container):
    return {entry["name"]: entry.get("value") for entry in container["env"]}


@needs_kustomize
@pytest.mark.parametrize("variant", VARIANTS)
def test_strictly_valid(variant):
    for resource in rendered(variant).values():
        validate(resource)
    kinds = sorted(kind for kind, _ in rendered(variant))
    assert kinds == sorted([workload(variant)["kind"], "Service", "ConfigMap", "PersistentVolumeClaim", "CronJob",
                            "CronJob", "PodDisruptionBudget", "NetworkPolicy", "NetworkPolicy"])  # fmt: skip
    if variant == "h200x8x2":  # makes a headless service of its own name, if there is none of it
        assert workload(variant)["metadata"]["name"] != of(variant, "Service")["metadata"]["name"]
    else:
        probe = container(pods(workload(variant))["server"])["startupProbe"]
        start = probe["periodSeconds"] * probe["failureThreshold"]
        assert workload(variant)["spec"]["progressDeadlineSeconds"] > start


def change(path, value):
    def edit(resource):
        *parents, last = path
        functools.reduce(lambda node, key: node[key], parents, resource)[last] = value

    return edit


@needs_kustomize
@pytest.mark.parametrize(
    "variant, kind, edit",
    [
        ("h200x8", "Deployment", change(["spec", "replica"], 1)),
        ("h200x8", "Deployment", change(["spec", "replicas"], "1")),
        ("h200x8", "Deployment", change(["spec", "template", "spec", "containers", 0, "enviroment"], [])),
        ("h200x8", "Service", change(["spec", "ports", 0, "port"], "http")),
        ("h200x8", "NetworkPolicy", change(["spec", "egres"], [])),
        ("monitoring", "ServiceMonitor", change(["spec", "endpoints", 0, "interval"], "15")),
        ("monitoring", "ServiceMonitor", change(["spec", "endpoints", 0, "prot"], "http")),
        ("monitoring", "PrometheusRule", change(["spec", "groups", 0, "rules", 0, "for"], "5 minutes")),
        ("h200x8x2", "LeaderWorkerSet", change(["spec", "leaderWorkerTemplate", "size"], "2")),
        ("h200x8x2", "LeaderWorkerSet", change(["spec", "leaderWorkerTemplate", "restartpolicy"], "None")),
        ("h200x8x2", "LeaderWorkerSet", change(
            ["spec", "leaderWorkerTemplate", "workerTemplate", "spec", "containers", 0, "port"], 1)),
        ("h200x8x2", "LeaderWorkerSet", change(["metadata", "label"], {})),
    ],
)  # fmt: skip
def test_mistakes_do_not_validate(variant, kind, edit):
    resource = copy.deepcopy(next(r for (found, _), r in rendered(variant).items() if found == kind))
    edit(resource)
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(resource)


@needs_kustomize
@pytest.mark.parametrize("variant", VARIANTS)
def test_settings_arrive(variant):
    settings = check.read(FOLDER / variant).settings
    expected = {key: settings[key] for key in ("MODEL", "REVISION")}
    for template in (*pods(workload(variant)).values(), jobs(variant)["calibrate"]):
        main = container(template)
        assert template["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": settings["GPU"]}
        for kind in ("requests", "limits"):
            assert main["resources"][kind]["nvidia.com/gpu"] == settings["TENSOR_PARALLEL_SIZE"]
        assert main["resources"] == container(pods(workload(variant))["server"])["resources"]
        used = {name for arg in main["args"] for name in re.findall(r"\$\((\w+)\)", arg)}
        assert used <= env(main).keys() | LWS
        for name in used & settings.keys():
            assert env(main)[name] == settings[name]
        # The others are not of the command line, or, when it calibrates, the overlay's own.
        served = settings.keys() - {"NAME", "IMAGE", "PULL_SECRET", "GPU"}
        assert used >= (served - {"ATTENTION_BACKEND", "KV_CACHE_DTYPE"} if "command" in main else served)
        assert env(template["spec"]["initContainers"][0]) == expected
    for template in (*pods(workload(variant)).values(), *jobs(variant).values()):
        spec = template["spec"]
        assert {c["image"] for c in (*spec["containers"], *spec.get("initContainers", ()))} == {settings["IMAGE"]}
        assert spec["imagePullSecrets"] == [{"name": settings["PULL_SECRET"]}]
    assert env(container(jobs(variant)["fetch"], "fetch")).items() >= expected.items()


@needs_kustomize
@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_fit_together(variant):
    templates = pods(workload(variant))
    selector = of(variant, "Service")["spec"]["selector"]
    options = next(name for kind, name in rendered(variant) if kind == "ConfigMap")
    for component, template in (templates | jobs(variant)).items():
        labels, spec = template["metadata"]["labels"], template["spec"]
        assert (selector.items() <= labels.items()) == (component == "server")
        assert of(variant, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        fetch = of(variant, "NetworkPolicy", "fetch")["spec"]["podSelector"]["matchLabels"]
        assert (fetch.items() <= labels.items()) == (component == "fetch")
        budget = of(variant, "PodDisruptionBudget")["spec"]["selector"]
        (among,) = budget["matchExpressions"]
        assert budget["matchLabels"].items() <= labels.items()
        assert (labels[among["key"]] in among["values"]) == (component in templates)
        (main,) = spec["containers"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert volumes == {mount["name"] for mount in main["volumeMounts"]}
        for each in spec.get("initContainers", ()):
            assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
        # The claim of the weights is not the variant's: they outlive it, and other instances have it too.
        claims = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"]
                  if "persistentVolumeClaim" in v}  # fmt: skip
        assert claims.pop("models") == "models" and ("PersistentVolumeClaim", "models") not in rendered(variant)
        assert list(claims.values()) == [f"{variant}-jit-cache"] * (component != "fetch")
        assert {v["configMap"]["name"] for v in spec["volumes"] if "configMap" in v} == {
            "fetch": set(), "calibrate": {options, "prompts"}
        }.get(component, {options})  # fmt: skip
        writes = {mount["name"]: not mount.get("readOnly") for mount in main["volumeMounts"]}["models"]
        assert writes == (component in jobs(variant))
        assert (env(main).get("HF_HUB_OFFLINE") == "1") == (component != "fetch")
        assert all("value" in entry or entry["valueFrom"].keys() <= {"secretKeyRef", "fieldRef"}
                   for entry in main["env"])  # fmt: skip
        probes = {name for name in main if name.endswith("Probe")}
        if component in templates:
            assert "command" not in main
            # Kubernetes would set VLLM_PORT for a service of this name, which vLLM takes for its own.
            assert spec["enableServiceLinks"] is False
            drain = int(next(a for a in main["args"] if a.startswith("--shutdown-timeout=")).partition("=")[2])
            assert spec["terminationGracePeriodSeconds"] > drain + (15 if component == "server" else 0)
        if component == "server":
            assert probes == {"startupProbe", "readinessProbe", "livenessProbe"}
            assert main["ports"] == [{"name": "http", "containerPort": 8000}]
            for name in probes:
                assert main[name]["httpGet"] == {"path": "/health", "port": "http"}
        else:
            assert not main.get("ports")
            assert probes == ({"readinessProbe"} if component == "worker" else set())
        if component == "worker":
            assert main["args"] == [*container(templates["server"])["args"], "--headless"]
            assert f"range({drain + 20})" in main["lifecycle"]["preStop"]["exec"]["command"][2]


@needs_kustomize
def test_a_group_takes_the_arguments_of_one_machine():
    """They are written out again, for kustomize replaces such a list as a whole."""
    one = container(pods(workload("h200x8"))["server"])["args"]
    group = container(pods(workload("h200x8x2"))["server"])["args"]
    assert group[: len(one)] == one
    assert all(re.search(r"\$\(LWS_|=mp$", argument) for argument in group[len(one) :])


@needs_kustomize
def test_groups_start_again_only_after_their_start_and_go_one_at_a_time():
    spec = workload("h200x8x2")["spec"]["leaderWorkerTemplate"]
    assert spec["restartPolicy"] == "RecreateGroupAfterStart"
    # Two would be one of each of two groups, which are both gone then.
    assert of("h200x8x2", "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


@needs_kustomize
def test_two_instances_in_a_namespace(tmp_path):
    """A variant is copied and renamed, as docs/deploy.md says: the two share the weights and nothing else."""
    copied = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, copied)
    shutil.copytree(FOLDER / "h200x8", copied / "chat")
    for name in ("settings.yaml", "kustomization.yaml"):
        path = copied / "chat" / name
        path.write_text(path.read_text().replace("h200x8", "chat"))
    one, other = rendered("h200x8"), kustomize(copied / "chat")
    assert not one.keys() & other.keys() and len(one) == len(other)
    for resources, name in ((one, "h200x8"), (other, "chat")):
        for resource in resources.values():
            text = json.dumps(resource)
            for selector in re.findall(r'"(?:matchLabels|selector)": (\{[^{}]*/name"[^{}]*\})', text):
                assert json.loads(selector)["app.kubernetes.io/instance"] == name
    mine = (copied / "chat/settings.yaml").read_text().replace("registry.example.com", "registry.mine.org")
    (copied / "chat/settings.yaml").write_text(mine)
    check.check(check.read(copied / "chat"))


@needs_kustomize
def test_optional_components(tmp_path):
    folder = with_components(tmp_path, "h200x8x2", "rdma", "runtime-class")
    resources = kustomize(folder)
    for resource in resources.values():
        validate(resource)
    for template in pods(resources["LeaderWorkerSet", "h200x8x2-vllm-group"]).values():
        main = container(template)
        assert main["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert main["resources"]["limits"]["rdma/ib"] == "1" and env(main)["NCCL_IB_HCA"]
        assert template["spec"]["runtimeClassName"] == "nvidia"
    pod = resources["CronJob", "h200x8x2-calibrate"]["spec"]["jobTemplate"]["spec"]["template"]
    assert pod["spec"]["runtimeClassName"] == "nvidia"


@needs_kustomize
def test_the_scaler_scales_its_own_instance(tmp_path):
    resources = kustomize(with_components(tmp_path, "h200x4", "keda"))
    for resource in resources.values():
        validate(resource)
    spec = resources["ScaledObject", "h200x4-vllm"]["spec"]
    assert ("Deployment", spec["scaleTargetRef"]["name"]) in resources
    assert '{app_kubernetes_io_instance="h200x4"}' in spec["triggers"][0]["metadata"]["query"]
    # Else the next kubectl apply would scale back.
    assert "replicas" not in resources["Deployment", "h200x4-vllm"]["spec"]


@needs_kustomize
def test_models_and_monitoring():
    assert list(rendered("models")) == [("PersistentVolumeClaim", "models")]
    for folder in ("models", "monitoring"):
        for resource in rendered(folder).values():
            validate(resource)
    monitor = rendered("monitoring")["ServiceMonitor", "vllm"]["spec"]
    service = of("h200x8", "Service")
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert set(monitor["targetLabels"]) <= service["metadata"]["labels"].keys()
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]


def test_patches_go_by_names():
    """An operation of JSON patch on a place in a list changes another thing once the list changes."""
    for path in FOLDER.rglob("*.yaml"):
        assert not re.search(r"\bop: |[a-z][/.]\d+[/.][a-z]", path.read_text()), path


PARSE = """
import json, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
arguments = json.loads(sys.argv[1])
parser = FlexibleArgumentParser()
serve = parser.add_subparsers().add_parser("serve")
serve.add_argument("model")
for flag in ("--enable-auto-tool-choice", "--headless"):
    serve.add_argument(flag, action="store_true")
names = {argument.split("=")[0] for argument in arguments if "=" in argument}
for option in (*names, "--reasoning-parser", "--tool-call-parser"):
    serve.add_argument(option)
print(json.dumps(vars(parser.parse_args(["serve", *arguments]))))
"""


@pytest.mark.skipif("VLLM_SOURCE" not in os.environ, reason="there is no $VLLM_SOURCE")
@needs_kustomize
@pytest.mark.parametrize("component", ["server", "worker"])
def test_vllm_reads_its_arguments_and_the_file(component, tmp_path):
    """With vLLM's own parser, which looks for --config in a way of its own."""
    settings = check.read(FOLDER / "h200x8x2").settings
    arguments = container(pods(workload("h200x8x2"))[component])["args"]
    arguments = [re.sub(r"\$\((\w+)\)", lambda match: settings.get(match[1], "1"), each) for each in arguments]
    arguments[arguments.index("/etc/vllm/vllm.yaml")] = str(FOLDER / "h200x8x2/vllm.yaml")
    done = subprocess.run([sys.executable, "-c", PARSE, json.dumps(arguments)], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": os.environ["VLLM_SOURCE"]}, cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout.splitlines()[-1])
    assert parsed["model"] == settings["MODEL"] and parsed["kv_cache_dtype"] == settings["KV_CACHE_DTYPE"]
    assert parsed["reasoning_parser"] == "deepseek_v4" and parsed["enable_auto_tool_choice"] is True
    assert parsed["headless"] == (component == "worker")


@pytest.mark.skipif("VLLM_SOURCE" not in os.environ, reason="there is no $VLLM_SOURCE")
def test_metrics_that_are_asked_for_exist():
    source = Path(os.environ["VLLM_SOURCE"], "vllm/v1/metrics/loggers.py")
    defined = set(re.findall(r'"(vllm:\w+)"', source.read_text()))
    asked = set()
    for path in (*FOLDER.glob("monitoring/*"), *FOLDER.glob("optional/keda/*")):
        asked |= set(re.findall(r"vllm:\w+", path.read_text()))
    # Prometheus adds these to counters and histograms.
    assert {re.sub("_(total|bucket)$", "", name) for name in asked} - defined == set() and len(asked) > 6


@needs_kustomize
@pytest.mark.parametrize("misses, stops", [(3, False), (20, True)])
def test_a_worker_stops_when_its_leader_has(misses, stops):
    """Not at the first connection that fails: the leader is needed until its last request is finished."""
    main = container(pods(workload("h200x8x2"))["worker"])
    _, option, code = main["lifecycle"]["preStop"]["exec"]["command"]
    fake = """
import itertools, time
calls = itertools.count()
class Socket:
    def close(self): pass
def connect(address, timeout):
    if 2 <= next(calls) < 2 + MISSES:
        raise OSError
    return Socket()
socket.create_connection, time.sleep = connect, lambda seconds: None
"""
    head, rest = code.split("\n", 1)
    code = f"{head}\n{fake.replace('MISSES', str(misses))}\n{rest}\nprint(next(calls))"
    done = subprocess.run([sys.executable, option, code], env={"LWS_LEADER_ADDRESS": "127.0.0.1"},
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert (int(done.stdout) < 20) == stops


@needs_kustomize
def test_a_worker_is_ready_when_its_leader_is():
    main = container(pods(workload("h200x8x2"))["worker"])
    _, option, code = main["readinessProbe"]["exec"]["command"]
    with socket.create_server(("127.0.0.1", 0)) as leader:
        probe = [sys.executable, option, code.replace("8000", str(leader.getsockname()[1]))]
        ready = subprocess.run(probe, env={"LWS_LEADER_ADDRESS": "127.0.0.1"}, capture_output=True)
    gone = subprocess.run(probe, env={"LWS_LEADER_ADDRESS": "127.0.0.1"}, capture_output=True)
    assert (ready.returncode, gone.returncode) == (0, 1)


@needs_kustomize
def test_servers_wait_for_what_the_job_fetches(tmp_path):
    """The Job's mark is the one that servers look for, and it is made when all is there."""
    fetch = container(jobs("h200x8")["fetch"], "fetch")["command"][2].replace("/models", str(tmp_path))
    (server,) = pods(workload("h200x8"))["server"]["spec"]["initContainers"]
    wait = ["timeout", "1", *server["command"][:2], server["command"][2].replace("/models", str(tmp_path))]
    hub = tmp_path / "lib/huggingface_hub.py"
    hub.parent.mkdir()
    variables = os.environ | {"MODEL": "team/model", "REVISION": "main", "PYTHONPATH": str(hub.parent)}

    def ran(command):
        return subprocess.run(command, env=variables, capture_output=True, text=True)

    hub.write_text("def snapshot_download(model, revision): raise OSError('full')\n")
    assert ran([sys.executable, "-c", fetch]).returncode == 1
    waiting = ran(wait)
    assert waiting.returncode == 124 and "team/model at main is not in " in waiting.stdout
    hub.write_text("def snapshot_download(model, revision): return 'done'\n")
    assert ran([sys.executable, "-c", fetch]).returncode == 0
    assert ran(wait).returncode == 0
    hub.write_text("def snapshot_download(model, revision): raise OSError('full')\n")  # of what main is by now
    assert ran([sys.executable, "-c", fetch]).returncode == 1
    assert ran(wait).returncode == 124
    variables["MODEL"] = str(tmp_path)  # a folder needs no fetch
    assert ran(wait).returncode == 0


# ---------------------------------------------------------------- the check of the settings


@pytest.fixture
def variant(tmp_path):
    """A folder with the files of h200x8 and an image; run(old, new, FILE): the check after that change."""
    shutil.copytree(FOLDER / "h200x8", tmp_path, dirs_exist_ok=True)
    settings = tmp_path / "settings.yaml"
    settings.write_text(settings.read_text().replace("registry.example.com", "registry.mine.org"))
    original = {path.name: path.read_text() for path in tmp_path.iterdir()}

    def run(old, new, file="settings.yaml"):
        assert old in original[file]
        for name, text in original.items():
            text = text.replace(old, new) if name == file else text
            (tmp_path / name).write_text(text, errors="surrogateescape")
        return subprocess.run([FOLDER / "check.sh", tmp_path], capture_output=True, text=True)

    return run


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_lack_an_image_only(name, tmp_path):
    done = subprocess.run([FOLDER / "check.sh", name], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "") and "IMAGE is 'registry.example.com/" in done.stderr
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    settings = tmp_path / "kubernetes" / name / "settings.yaml"
    settings.write_text(settings.read_text().replace("registry.example.com", "registry.mine.org"))
    done = subprocess.run([FOLDER / "check.sh", settings.parent], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"kubectl apply -k {settings.parent}\n" in done.stdout


TAG = ":0.22.1-0.3.0-g000000000000"
DTYPE = 'DTYPE: "fp8"'


def full_width(dtype, tag=TAG):
    """What the settings say, from the image on, and what they say of the full-width cache."""
    settings = (FOLDER / "h200x8/settings.yaml").read_text()
    old = settings[settings.index(TAG) : settings.index(DTYPE) + len(DTYPE)]
    new = old.replace(TAG, tag).replace("FLASHMLA_SPARSE_DSV4", check.FULL_CACHE)
    return old, new.replace(DTYPE, f'DTYPE: "{dtype}"')


@pytest.mark.parametrize(
    "old, new, words",
    [
        ('"FLASHMLA_SPARSE_DSV4"', '"FLASHINFER_MLA"', "ATTENTION_BACKEND is 'FLASHINFER_MLA'; write"),
        (DTYPE, 'DTYPE: "bfloat16"', "is 'bfloat16', which FLASHMLA_SPARSE_DSV4 does not serve; write"),
        (*full_width("fp8_ds_mla"), "is 'fp8_ds_mla', which FLASHINFER_MLA_SPARSE_DSV4 does"),
        (*full_width("fp16"), "write one of auto, bfloat16, fp8, fp8_e4m3, fp8_per_tensor."),
        (*full_width("fp8"), "KV_CACHE_DTYPE is 'fp8' without scales; calibrate and name them in vllm.yaml"),
        ('SIZE: "8"', 'SIZE: "3"', "does not divide the 64 attention heads of deepseek-ai/DeepSeek-V4-Flash"),
        ('SIZE: "8"', 'SIZE: "16"', "TENSOR_PARALLEL_SIZE is '16'; write a whole number from 1 to 8."),
        ('SIZE: "8"', 'SIZE: "eight"', "write a whole number from 1 to 8."),
        ('"131072"', '"2000000"', "MAX_MODEL_LEN is '2000000'; write a whole number from 1 to 1048576."),
        ('"131072"', '"128k"', "MAX_MODEL_LEN is '128k'"),
        ("deepseek-ai/DeepSeek-V4-Flash", "/models/mine", "whose number of attention heads is unknown; write"),
        ("DeepSeek-V4-Flash", "DeepSeek-V4-Flashy", "whose number of attention heads is unknown; write"),
        (TAG, "", "write REPOSITORY:TAG with the tag that docker/build.sh gave, or REPOSITORY@sha256:"),
        (TAG, ":latest", "write REPOSITORY:TAG"),
        (*full_width("bfloat16", TAG.replace("0.22.1", "0.28.0")), "vLLM 0.28.0, which has no full-width cache"),
        (*full_width("bfloat16", f"{TAG}_fp8-experts"), "the series fp8-experts alone, and FLASHINFER_"),
        (TAG, f"{TAG}_drop-in-base-0123456789ab", "the series drop-in alone, and FLASHMLA_SPARSE_DSV4 needs"),
        (TAG, f"{TAG}_drop-in", "the series drop-in alone, and FLASHMLA_SPARSE_DSV4 needs full-width; build one"),
        (TAG, "@sha256:12", "write REPOSITORY:TAG"),
        ("registry.mine.org/", "registry.mine.org//", "write REPOSITORY:TAG"),
        ('  GPU: "NVIDIA-H200"\n', "", "GPU is missing; write it below data."),
        ("NVIDIA-H200", "NVIDIA H200", "GPU is 'NVIDIA H200'; write the label"),
        ("NVIDIA-H200", "NVIDIA-A100-SXM4-80GB", "-80GB', which the overlay does not serve; write a Hopper or"),
        ("NVIDIA-H200", "NVIDIA-GB200", "add the component optional/blackwell."),
        ("deepseek-ai", "\udcff", "cannot be read (not UTF-8); give the folder of a variant."),
        ("registry.mine.org", "registry.example.com", "an example; write where"),
        ('  GPU: "', '  GPUS: "8"\n  GPU: "', "GPUS is no setting; the settings are "),
        ('  GPU: "', '  REVISION: "main"\n  GPU: "', "REVISION is there twice; remove one."),
        ('SIZE: "8"', "SIZE: 8", "TENSOR_PARALLEL_SIZE is 8, which is no text; write it in quotes."),
        ("data:", "data: [", "settings.yaml is not YAML ("),
        ("data:", "dat:", "has no settings; write them below data."),
        ('NAME: "h200x8"', 'NAME: "chat"', "kustomization.yaml says another; write namePrefix: chat- and"),
        ('NAME: "h200x8"', 'NAME: "Chat"', "NAME is 'Chat'; write up to 30 small letters"),
    ],
)
def test_wrong_settings(variant, old, new, words):
    done = variant(old, new)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr


@pytest.mark.parametrize(
    "new, words",
    [
        ("", "has no options, which vLLM refuses; write one"),
        ("kv_cache_dtype: fp8", "kv-cache-dtype in vllm.yaml would not count, for the manifests give it; remove"),
        ("KV_CACHE_DTYPE: fp8", "KV-CACHE-DTYPE in vllm.yaml would not count, for the manifests give it; remove"),
        ("additional-config: {dsv4_scales: x}", "dsv4_scales in vllm.yaml is for an FP8 cache of "),
        ("gpu-memory-utilization: 90", "gpu-memory-utilization in vllm.yaml is 90; write a number up to 1."),
        ("additional-config: 5", "additional-config in vllm.yaml is 5; write options below it, as dsv4_scales: "),
        ("seed: 0\nseed: 1", "seed is there twice; remove one."),
    ],
)
def test_wrong_options(variant, new, words):
    options = (FOLDER / "h200x8/vllm.yaml").read_text()
    done = variant(options, new, "vllm.yaml")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and words in done.stderr


@pytest.mark.parametrize("new", ["", "components:\n", "labels: 1\n", "labels: [{}]\n", "[1]\n"])
def test_a_wrong_kustomization(variant, new):
    done = variant((FOLDER / "h200x8/kustomization.yaml").read_text(), new, "kustomization.yaml")
    words = "kustomization.yaml has no lists of components and labels, as one of kustomize; take h200x8's."
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and words in done.stderr


def read(**changes):
    found = check.read(FOLDER / "h200x8")
    settings = found.settings | {"IMAGE": "registry.mine.org/it:1"} | changes
    return found._replace(settings=settings)


@pytest.mark.parametrize(
    "changes, machines, words",
    [
        # 865 GB are 806 GiB, 101 for each of 8.
        (dict(MODEL="deepseek-ai/DeepSeek-V4-Pro-0813"), 1, None),
        (dict(MODEL="deepseek-ai/DeepSeek-V4-Pro-0813", GPU="NVIDIA-H100-80GB-HBM3"), 1,
         "deepseek-ai/DeepSeek-V4-Pro-0813 has 806 GiB of weights, 101 for each of 8 GPUs, and vLLM takes 71 of "
         "the 79 GiB of a NVIDIA-H100-80GB-HBM3; use at least 12 of them."),
        (dict(MODEL="deepseek-ai/DeepSeek-V4-Pro", GPU="NVIDIA-H100-80GB-HBM3"), 2, None),
        (dict(MODEL="deepseek-ai/DeepSeek-V4-Pro", TENSOR_PARALLEL_SIZE="4"), 1, "use at least 7 of them."),
        (dict(TENSOR_PARALLEL_SIZE="1"), 1, "use at least 2 of them."),
        (dict(TENSOR_PARALLEL_SIZE="2"), 1, None),
        (dict(MODEL="/models/DeepSeek-V4-Flash-Base/"), 1, None),
    ],
)  # fmt: skip
def test_memory(changes, machines, words):
    variant = read(**changes)._replace(machines=machines)
    if words is None:
        check.check(variant)
    else:
        with pytest.raises(check.Wrong, match=re.escape(words)):
            check.check(variant)


def test_machines_are_counted():
    assert [check.read(FOLDER / name).machines for name in ("h200x8", "h200x8x2")] == [1, 2]


def test_other_settings(tmp_path):
    for gpu in "NVIDIA-H100-80GB-HBM3", "NVIDIA-GH200-480GB", "NVIDIA-H200-NVL", "NVIDIA-H20", "NVIDIA-H20-3e":
        check.check(read(GPU=gpu))
    digest = "@sha256:" + "a1" * 32
    for image in "localhost:5000/team/it:0.22.1-x_Y", f"it:1{digest}", f"registry/it{digest}":
        check.check(read(IMAGE=image))
    check.check(read(ATTENTION_BACKEND=check.FULL_CACHE, KV_CACHE_DTYPE="bfloat16"))
    scales = {"additional-config": {"dsv4_scales": "/models/it"}}
    check.check(read(ATTENTION_BACKEND=check.FULL_CACHE)._replace(options=scales))
    check.check(read(IMAGE="team/it:0.28.0-0.3.0-gabc"))
    check.check(read(IMAGE="team/it:0.28.0-0.3.0-gabc_drop-in"))
    for rest in "_default_fp8-experts", "_full-width-base-0123456789ab", "-aarch64_default", "-base-0123456789ab":
        check.check(read(IMAGE=f"team/it:0.22.1-0.3.0-gabc{rest}"))
    for heads, words in ((12, "does not divide the 12 attention"), (1040, "gives a GPU 130 attention heads")):
        (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": heads}))
        with pytest.raises(check.Wrong, match=words):
            check.check(read(MODEL=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 64}))
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(2 << 40)
    with pytest.raises(check.Wrong, match="has 2048 GiB of weights, 256 for each of 8 GPUs"):
        check.check(read(MODEL=str(tmp_path)))


def test_the_check_knows_what_the_overlay_accepts():
    """Read from the source: this must not need vLLM."""
    source = (ROOT / "overlay/common/vllm/dsv4_overlay/config.py").read_text()
    table = re.search(r"^ACCEPTED_DTYPES = (\{.*?^\})", source, re.MULTILINE | re.DOTALL)[1]
    assert list(check.CACHE_DTYPES[check.FULL_CACHE]) == list(yaml.safe_load(table))
    for backend in check.CACHE_DTYPES:
        assert f"AttentionBackendEnum.{backend}\n" in source
    kernels = ROOT / "overlay/common/vllm/third_party/mla_kernels/interface.py"
    assert f"\nMAX_HEADS = {check.HEADS_A_GPU}\n" in kernels.read_text()
    series = [load_series(folder) for folder in release_folders(ROOT) if folder.parent.name == "full-width"]
    assert sorted(release for one in series for release in one.sdists) == list(check.FULL_CACHE_RELEASES)
    assert f'OPTION = "{check.SCALES}"\n' in (ROOT / "overlay/common/vllm/dsv4_overlay/scales.py").read_text()
