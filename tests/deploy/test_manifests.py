"""deploy/kubernetes: each variant as kustomize makes it, against strict schemas, and the check of the settings."""

import copy
import functools
import json
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
KUBERNETES = "1.34"
SCHEMAS = json.loads((Path(__file__).parent / "schemas.json").read_text())
GROUPS = {"LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1", "ServiceMonitor": "monitoring.coreos.com/v1"}
sys.path.insert(0, str(ROOT / "scripts"))

from dsv4_overlay_tools import manifests  # noqa: E402

needs_kustomize = pytest.mark.skipif(not shutil.which("kubectl"), reason="there is no kubectl")


@functools.cache
def rendered(variant):
    done = subprocess.run(["kubectl", "kustomize", FOLDER / variant], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    resources = list(yaml.safe_load_all(done.stdout))
    # Claims are the one kind of which there are two.
    return {r["metadata"]["name"] if r["kind"] == "PersistentVolumeClaim" else r["kind"]: r for r in resources}


def validate(resource):
    """Raise for anything that Kubernetes or the custom resource does not know or takes otherwise."""
    if resource["kind"] not in SCHEMAS:
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)
        return
    assert resource["apiVersion"] == GROUPS[resource["kind"]]
    assert set(resource) == {"apiVersion", "kind", "metadata", "spec"}
    carrier = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": resource["metadata"]}
    kubernetes_validate.validate(carrier, KUBERNETES, strict=True)
    jsonschema.Draft202012Validator(SCHEMAS[resource["kind"]]).validate(resource["spec"])
    for template in pods({resource["kind"]: resource}).values():
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template},
            KUBERNETES, strict=True,
        )  # fmt: skip


def pods(resources):
    """The pod templates by their component."""
    found = {}
    if "Deployment" in resources:
        found["server"] = resources["Deployment"]["spec"]["template"]
    if "LeaderWorkerSet" in resources:
        template = resources["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
        found |= {"server": template["leaderTemplate"], "worker": template["workerTemplate"]}
    return found


@needs_kustomize
@pytest.mark.parametrize("variant", VARIANTS)
def test_strictly_valid(variant):
    resources = rendered(variant)
    for resource in resources.values():
        validate(resource)
    workload = "LeaderWorkerSet" if variant == "h200x8x2" else "Deployment"
    if workload == "LeaderWorkerSet":  # makes a headless service of its own name, if there is none of it
        assert resources[workload]["metadata"]["name"] != resources["Service"]["metadata"]["name"]
        size = resources[workload]["spec"]["leaderWorkerTemplate"]["size"]
        assert resources["PodDisruptionBudget"]["spec"]["maxUnavailable"] == size
    else:
        probe = pods(resources)["server"]["spec"]["containers"][0]["startupProbe"]
        start = probe["periodSeconds"] * probe["failureThreshold"]
        assert resources[workload]["spec"]["progressDeadlineSeconds"] > start
    others = {"Service", "PodDisruptionBudget", "ServiceMonitor", "NetworkPolicy", "models", "jit-cache"}
    assert set(resources) == {workload, *others}


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
        ("h200x8", "ServiceMonitor", change(["spec", "endpoints", 0, "interval"], "15")),
        ("h200x8", "ServiceMonitor", change(["spec", "endpoints", 0, "prot"], "http")),
        ("h200x8x2", "LeaderWorkerSet", change(["spec", "leaderWorkerTemplate", "size"], "2")),
        ("h200x8x2", "LeaderWorkerSet", change(["spec", "leaderWorkerTemplate", "restartpolicy"], "None")),
        ("h200x8x2", "LeaderWorkerSet", change(
            ["spec", "leaderWorkerTemplate", "workerTemplate", "spec", "containers", 0, "port"], 1)),
        ("h200x8x2", "LeaderWorkerSet", change(["metadata", "label"], {})),
    ],
)  # fmt: skip
def test_mistakes_do_not_validate(variant, kind, edit):
    resource = copy.deepcopy(rendered(variant)[kind])
    edit(resource)
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(resource)


@needs_kustomize
@pytest.mark.parametrize("variant", VARIANTS)
def test_settings_arrive(variant):
    settings = manifests.read(FOLDER / variant / "settings.yaml")
    for template in pods(rendered(variant)).values():
        (container,) = template["spec"]["containers"]
        assert container["image"] == f"{settings['IMAGE']}:{settings['RELEASE']}"
        assert container["imagePullPolicy"] == "Always"  # or hosts of a group may have different builds
        assert template["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": settings["GPU"]}
        for kind in ("requests", "limits"):
            assert container["resources"][kind]["nvidia.com/gpu"] == settings["TENSOR_PARALLEL_SIZE"]
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        used = {name for arg in container["args"] for name in re.findall(r"\$\((\w+)\)", arg)}
        assert used <= env.keys() | {"LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"}
        for name in used & settings.keys():
            assert env[name] == settings[name]
        assert used >= settings.keys() - {"IMAGE", "RELEASE", "GPU"}


@needs_kustomize
@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_fit_together(variant):
    resources = rendered(variant)
    templates = pods(resources)
    selector = resources["Service"]["spec"]["selector"]
    for component, template in templates.items():
        labels, spec = template["metadata"]["labels"], template["spec"]
        assert (selector.items() <= labels.items()) == (component == "server")
        for kind in ("PodDisruptionBudget", "NetworkPolicy"):
            rule = resources[kind]["spec"]
            assert rule.get("selector", rule.get("podSelector"))["matchLabels"].items() <= labels.items()
        sources = [volume.get("persistentVolumeClaim") for volume in spec["volumes"]]
        claims = {source["claimName"] for source in sources if source}
        assert claims == {"models", "jit-cache"} <= resources.keys()
        (container,) = spec["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
        drain = int(next(a for a in container["args"] if a.startswith("--shutdown-timeout=")).partition("=")[2])
        assert spec["terminationGracePeriodSeconds"] > drain + (15 if component == "server" else 0)
        # Kubernetes would set VLLM_PORT for a service of this name, which vLLM takes for its own.
        assert spec["enableServiceLinks"] is False
        assert "command" not in container
        assert all("value" in entry or entry["valueFrom"].keys() <= {"secretKeyRef", "fieldRef"}
                   for entry in container["env"])  # fmt: skip
        probes = {name for name in container if name.endswith("Probe")}
        assert probes == ({"startupProbe", "readinessProbe", "livenessProbe"} if component == "server" else set())
        if component == "server":
            assert container["ports"] == [{"name": "http", "containerPort": 8000}]
            for name in probes:
                assert container[name]["httpGet"] == {"path": "/health", "port": "http"}
        else:
            assert "--headless" in container["args"]
            assert f"range({drain + 20})" in container["lifecycle"]["preStop"]["exec"]["command"][2]


@needs_kustomize
def test_a_worker_stops_when_its_leader_has():
    (container,) = pods(rendered("h200x8x2"))["worker"]["spec"]["containers"]
    _, option, code = container["lifecycle"]["preStop"]["exec"]["command"]
    with socket.create_server(("127.0.0.1", 0)) as leader:
        port = str(leader.getsockname()[1])
        waiting = subprocess.Popen([sys.executable, option, code.replace("8000", port)],
                                   env={"LWS_LEADER_ADDRESS": "127.0.0.1"})  # fmt: skip
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=4)
    assert waiting.wait(timeout=10) == 0


# ---------------------------------------------------------------- the check of the settings


@pytest.fixture
def variant(tmp_path):
    """A folder with the settings of h200x8 and an image, and run(old, new): the check after that change."""
    good = (FOLDER / "h200x8/settings.yaml").read_text().replace("registry.example.com", "registry.mine.org")

    def run(old, new):
        assert old in good
        (tmp_path / "settings.yaml").write_text(good.replace(old, new), errors="surrogateescape")
        return subprocess.run([FOLDER / "check.sh", tmp_path], capture_output=True, text=True)

    return run


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_lack_an_image_only(name, tmp_path):
    done = subprocess.run([FOLDER / "check.sh", name], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "") and "IMAGE is 'registry.example.com/" in done.stderr
    settings = (FOLDER / name / "settings.yaml").read_text()
    (tmp_path / "settings.yaml").write_text(settings.replace("registry.example.com", "registry.mine.org"))
    done = subprocess.run([FOLDER / "check.sh", tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"kubectl apply -k {tmp_path}\n" in done.stdout


@pytest.mark.parametrize(
    "old, new, words",
    [
        ('"FLASHINFER_MLA_SPARSE_DSV4"', '"FLASHINFER_MLA"', "ATTENTION_BACKEND is 'FLASHINFER_MLA'; write"),
        ('"fp8_per_tensor"', '"fp8_ds_mla"', "is 'fp8_ds_mla', which FLASHINFER_MLA_SPARSE_DSV4 does"),
        ('"fp8_per_tensor"', '"fp16"', "write one of auto, bfloat16, fp8, fp8_e4m3, fp8_per_tensor."),
        ('SIZE: "8"', 'SIZE: "3"', "does not divide the 64 attention heads of deepseek-ai/DeepSeek-V4-Flash"),
        ('SIZE: "8"', 'SIZE: "16"', "TENSOR_PARALLEL_SIZE is '16'; write a whole number from 1 to 8."),
        ('SIZE: "8"', 'SIZE: "eight"', "write a whole number from 1 to 8."),
        ('"131072"', '"2000000"', "MAX_MODEL_LEN is '2000000'; write a whole number from 1 to 1048576."),
        ('"131072"', '"128k"', "MAX_MODEL_LEN is '128k'"),
        ('"0.22.1"', '"0.22.9"', "RELEASE is '0.22.9'; write one of "),
        ("deepseek-ai/DeepSeek-V4-Flash", "/models/mine", "whose number of attention heads is unknown; write"),
        ('overlay"', 'overlay:latest"', "write a repository without a tag"),
        ('overlay"', 'overlay/"', "write a repository without a tag"),
        ("registry.mine.org/", "registry.mine.org//", "write a repository without a tag"),
        ('  GPU: "NVIDIA-H200"\n', "", "GPU is missing; write it below data."),
        ("NVIDIA-H200", "NVIDIA H200", "GPU is 'NVIDIA H200'; write the label"),
        ("NVIDIA-H200", "NVIDIA-A100-SXM4-80GB", "-80GB', which the overlay does not serve; write a Hopper or"),
        ("deepseek-ai", "\udcff", "cannot be read (not UTF-8); give the folder of a variant."),
        ("registry.mine.org", "registry.example.com", "an example; write where"),
        ('  GPU: "', '  GPUS: "8"\n  GPU: "', "GPUS is no setting; the settings are "),
        ('  GPU: "', '  RELEASE: "0.22.1"\n  GPU: "', "RELEASE is there twice; remove one."),
        ('SIZE: "8"', "SIZE: 8", "'TENSOR_PARALLEL_SIZE: 8' is not of the form KEY: \"value\"."),
    ],
)
def test_wrong_settings(variant, old, new, words):
    done = variant(old, new)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr


def test_blackwell_elsewhere(variant, tmp_path):
    """Its containers need rights that the other variants do not give."""
    assert variant("NVIDIA-H200", "NVIDIA-B200").returncode == 0  # a folder without kustomization.yaml
    (tmp_path / "kustomization.yaml").write_text((FOLDER / "h200x8/kustomization.yaml").read_text())
    done = variant("NVIDIA-H200", "NVIDIA-GB200")
    assert done.returncode == 1 and "use the variant b200x8." in done.stderr
    (tmp_path / "kustomization.yaml").write_text((FOLDER / "b200x8/kustomization.yaml").read_text())
    assert variant("NVIDIA-H200", "NVIDIA-B200").returncode == 0


def test_other_settings(variant, tmp_path):
    for gpu in "NVIDIA-H100-80GB-HBM3", "NVIDIA-GH200-480GB", "NVIDIA-H200-NVL", "NVIDIA-H20":
        assert variant("NVIDIA-H200", gpu).returncode == 0
    assert variant('"fp8_per_tensor"', '"bfloat16"  # as exact as it gets').returncode == 0
    assert variant("registry.mine.org/", "localhost:5000/team/").returncode == 0
    (tmp_path / "config.json").write_text('{"num_attention_heads": 12}')
    done = variant("deepseek-ai/DeepSeek-V4-Flash", str(tmp_path))
    assert "does not divide the 12 attention heads" in done.stderr
    (tmp_path / "config.json").write_text('{"num_attention_heads": 1040}')
    done = variant("deepseek-ai/DeepSeek-V4-Flash", str(tmp_path))
    assert "gives a GPU 130 attention heads" in done.stderr


def test_the_check_knows_what_the_overlay_accepts():
    """Read from the source: this must not need vLLM."""
    source = (ROOT / "overlay/common/vllm/dsv4_overlay/config.py").read_text()
    table = re.search(r"^_ACCEPTED_DTYPES = (\{.*?^\})", source, re.MULTILINE | re.DOTALL)[1]
    assert list(manifests.CACHE_DTYPES[manifests.FULL_CACHE]) == list(yaml.safe_load(table))
    for backend in manifests.CACHE_DTYPES:
        assert f"AttentionBackendEnum.{backend}\n" in source
    kernels = ROOT / "overlay/common/vllm/third_party/dsv4_kernels/interface.py"
    assert f"\nMAX_HEADS = {manifests.HEADS_A_GPU}\n" in kernels.read_text()
