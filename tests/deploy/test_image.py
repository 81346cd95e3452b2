"""The real Dockerfile, built by buildah through docker/build.sh on a stand-in for vllm/vllm-openai.

The stand-in is Debian with the stock vLLM wheel, this environment's packages (a torch without CUDA) and this
machine's CUDA compiler. What that does not prove: docs/deploy.md.
"""

import fcntl
import functools
import hashlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
RELEASE = "0.22.1"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-dsv4-overlay" / "stand-in"
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"usr/local/lib/{PYTHON}/dist-packages"
PACKAGES = "python3,python3-pip,python3-venv,ca-certificates,g++"


def missing():
    if os.geteuid():
        return "only root can make the stand-in base"
    for program in ("buildah", "debootstrap"):
        if not shutil.which(program):
            return f"there is no {program}"
    if not (CUDA / "bin/nvcc").exists():
        return "there is no CUDA toolkit in $CUDA_HOME or /usr/local/cuda"
    if PYTHON != "python3.11":
        return "the stand-in's Python is Debian 12's 3.11, and this environment's packages are for another"
    return None


def needs_buildah(test):
    return pytest.mark.image(pytest.mark.skipif(missing() is not None, reason=str(missing()))(test))


def test_bake_file_is_what_the_releases_say():
    done = subprocess.run([ROOT / "docker/build.sh", "--bake"], capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "docker-bake.json").read_text(), "docker/build.sh --bake > docker-bake.json"
    served = set()
    for path in ROOT.glob("patches/*/release.toml"):
        pins = tomllib.loads(path.read_text())
        served |= {pins["release"], *pins.get("serves", [])}
    assert {target["args"]["RELEASE"] for target in json.loads(done.stdout)["target"].values()} == served


def test_flashinfer_pins():
    for path in ROOT.glob("patches/*/release.toml"):
        version = tomllib.loads(path.read_text()).get("image", {}).get("flashinfer")
        if version:
            lines = (ROOT / f"docker/flashinfer-{version}.txt").read_text().splitlines()
            pinned = [line.split() for line in lines if not line.startswith("#")]
            names = [f"flashinfer-python=={version}", f"flashinfer-cubin=={version}"]
            assert [name for name, _ in pinned] == names
            assert all(value.startswith("--hash=sha256:") for _, value in pinned)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["9.9.9"], "There is no patch series for vLLM 9.9.9; supported: "),
        ([RELEASE, "--builder", "podman"], "There is no podman on PATH"),
    ],
)
def test_refusals(arguments, words, tmp_path):
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    if "podman" in arguments and shutil.which("podman", path=env["PATH"]):
        pytest.skip("there is a podman")
    done = subprocess.run([ROOT / "docker/build.sh", *arguments], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and words in done.stderr


DOCKER = """#!/bin/sh
echo "$@" >> calls
case "$1 $2" in
"pull registry/"* | "pull docker.io/"*) echo layers ;;
"pull "*) echo pull access denied >&2; exit 1 ;;
"image inspect")
    case "$5" in
    registry/*) echo '["other/it@sha256:99","registry/it@sha256:12"]' ;;
    docker.io/*) echo '["team/it@sha256:56"]' ;;
    mine) echo '[]' ;; *) exit 1 ;; esac ;;
esac
"""


@pytest.mark.parametrize(
    "base, built_on",
    [
        ("registry/it:1", "registry/it:1@sha256:12"),
        ("docker.io/team/it:1", "docker.io/team/it:1@sha256:56"),  # which docker names without its registry
        ("mine", "mine"),
        ("it@sha256:34", "it@sha256:34"),
        ("none", None),
    ],
)
def test_a_base_of_a_registry_or_of_ones_own(base, built_on, tmp_path):
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [ROOT / "docker/build.sh", RELEASE, "--builder", "docker", "--base", base],
        capture_output=True, text=True, cwd=tmp_path, env=env,
    )  # fmt: skip
    calls = (tmp_path / "calls").read_text()
    if built_on is None:
        assert done.returncode == 1 and "error: build-failed: docker image ended with 1; " in done.stderr
        assert "build --tag" not in calls
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"built vllm-dsv4-overlay:{RELEASE} on {built_on}\n"
        assert f" --build-arg BASE_IMAGE={built_on} " in calls


def test_revision_tells_of_what_is_not_committed(tmp_path):
    sys.path.insert(0, str(ROOT / "scripts"))
    from dsv4_overlay_tools import image

    assert image.revision(tmp_path) == ""
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert image.revision(tmp_path) == head
    (tmp_path / "new").write_text("")
    assert image.revision(tmp_path) == f"{head}-dirty"


# ---------------------------------------------------------------- with buildah


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """Where buildah keeps images: not with those of this machine. No working container outlives the tests."""
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = tmp_path_factory.mktemp("buildah")
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{CACHE}/store"\nrunroot = "{folder}/run"\n'
    )
    env = os.environ | {"CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"), "BUILDAH_ISOLATION": "chroot"}

    def remove_containers():
        subprocess.run(["buildah", "rm", "--all"], env=env, check=True, stdout=subprocess.DEVNULL)

    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run's containers would go, too
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        remove_containers()  # of a run that was killed
        yield env
        remove_containers()
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def buildah(storage):
    def run(*arguments, check=True):
        done = subprocess.run(["buildah", *map(str, arguments)], capture_output=True, text=True, env=storage)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip() if check else done

    return run


def make_root(folder):
    # What debootstrap mounts there, and would leave if killed, is for itself only.
    private = ["unshare", "--mount", "--propagation", "private"]
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", folder]
    subprocess.run([*private, *bootstrap], check=True, stdout=subprocess.DEVNULL)
    for managed in folder.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        managed.unlink()
    site = folder / SITE
    ignored = shutil.ignore_patterns("__pycache__")
    packages = Path(sys.prefix, "lib", PYTHON, "site-packages")
    shutil.copytree(packages, site, dirs_exist_ok=True, symlinks=True, ignore=ignored)
    shutil.copytree(CUDA.resolve(), folder / "usr/local/cuda", symlinks=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"]
    subprocess.run([*pip, "--target", site, f"vllm=={RELEASE}"], check=True)
    old = "0.6.11.post2+cu130"  # named as in the real one, but empty
    info = site / f"flashinfer_jit_cache-{old}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flashinfer-jit-cache\nVersion: {old}\n")
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
    if bundle := os.environ.get("SSL_CERT_FILE"):  # the package index may be behind a proxy with its own
        shutil.copy(bundle, folder / "etc/ssl/certs/ca-certificates.crt")


@pytest.fixture(scope="module")
def base(buildah):
    """The name of the stand-in, which is made once and kept."""
    recipe = inspect.getsource(make_root) + PACKAGES + (ROOT / "requirements-test.txt").read_text()
    name = "localhost/stand-in:" + hashlib.sha256(recipe.encode()).hexdigest()[:12]
    if buildah("inspect", "--type", "image", name, check=False).returncode == 0:
        return name
    work = buildah("from", "scratch")
    make_root(Path(buildah("mount", work)))
    certificates = "/etc/ssl/certs/ca-certificates.crt"
    env = {"PATH": "/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
           "SSL_CERT_FILE": certificates, "PIP_CERT": certificates}  # fmt: skip
    env |= {key: value for key, value in os.environ.items() if key in ("PIP_INDEX_URL", "PIP_DEFAULT_TIMEOUT")}
    for key, value in env.items():
        buildah("config", "--env", f"{key}={value}", work)
    # What the real one has, so that it can be seen to stay.
    buildah("config", "--entrypoint", '["vllm", "serve"]', "--workingdir", "/vllm-workspace", work)
    buildah("commit", "--quiet", "--rm", work, name)
    return name


@pytest.fixture(scope="module")
def build(storage):
    def run(release, base, tag):
        done = subprocess.run(
            [ROOT / "docker/build.sh", release, "--builder", "buildah", "--base", base, "--tag", tag,
             "--pull-never", "--build-arg", "DSV4_CUDA_ARCHS=90a"],
            capture_output=True, text=True, env=storage,
        )  # fmt: skip
        print(done.stdout, done.stderr, sep="\n")
        return done

    return run


@pytest.fixture(scope="module")
def image(build, base):
    done = build(RELEASE, base, "localhost/dsv4:test")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return "localhost/dsv4:test"


@pytest.fixture
def container(buildah, image):
    """Run a command in a new container of the image."""
    name = buildah("from", "--pull-never", image)
    yield functools.partial(buildah, "run", name, "--")
    buildah("rm", name)


def config(buildah, image):
    return json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["config"]


ENDING = """
import os, signal, time
from test_image import buildah, storage

def test(buildah):
    buildah("from", "scratch")
    {end}
"""


@pytest.mark.image
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("buildah"), reason="there is no buildah, or no root")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_no_container_outlives_the_tests(name, tmp_path):
    test = tmp_path / "test_it.py"
    pytest_again = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp", tmp_path / "temporary"]
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT / "tests/deploy")}
    store = tmp_path / "cache/vllm-dsv4-overlay/stand-in/store"

    def containers_after(end):
        test.write_text(ENDING.format(end=end))
        done = subprocess.run([*pytest_again, test], capture_output=True, text=True, env=env, cwd=tmp_path)
        print(done.stdout)
        listing = ["buildah", "--root", store, "containers", "--quiet"]
        return done.returncode, subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()

    ended, left = containers_after(f"os.kill(os.getpid(), signal.{name}); time.sleep(60)")
    if name == "SIGKILL":  # what that left, the next run removes
        assert ended == -signal.SIGKILL and len(left) == 1
        ended, left = containers_after("raise ValueError")
        assert (ended, left) == (1, [])
    else:
        assert (ended, left) == (2, [])


@needs_buildah
def test_the_build_checked_itself(buildah, container, image):
    facts = json.loads(container("cat", "/usr/share/vllm-dsv4-overlay/provenance.json"))
    labels = config(buildah, image)["Labels"]
    assert facts["revision"] == facts["overlay"]["commit"] == labels["org.opencontainers.image.revision"]
    assert facts["base_digest"] == labels["org.opencontainers.image.base.digest"]
    assert facts["vllm"] == RELEASE and facts["native_kernels"]["archs"] == "90a"
    pinned = tomllib.loads((ROOT / f"patches/{RELEASE}/release.toml").read_text())["image"]["flashinfer"]
    assert facts["flashinfer"] == {
        "flashinfer-python": pinned, "flashinfer-cubin": pinned, "flashinfer-jit-cache": None
    }  # fmt: skip


@needs_buildah
def test_status_revert_and_apply_again(buildah, image):
    (CACHE / "tools").mkdir(exist_ok=True)
    name = buildah("from", "--pull-never", image)

    def overlay(*arguments):
        done = buildah(
            "run", "--volume", f"{ROOT}:/src:ro", "--volume", f"{CACHE}/tools:/cache", name, "--",
            "env", "XDG_CACHE_HOME=/cache", "/src/scripts/apply-patches.sh", "--installed", "--json", *arguments,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    try:
        assert overlay("--status")["state"] == "applied"
        assert overlay("--revert")["state"] == "clean"
        assert overlay()["state"] == "applied"
        assert "already applied; nothing to do" in overlay()["notes"]
    finally:
        buildah("rm", name)


@needs_buildah
def test_second_build_does_nothing(buildah, build, base, image):
    before = buildah("images", "--format", "{{.ID}}", image)
    done = build(RELEASE, base, image)
    assert done.returncode == 0 and buildah("images", "--format", "{{.ID}}", image) == before
    steps = [line for line in done.stderr.splitlines() if "Preparing the tools" in line]
    assert not steps  # as it says when that layer is made


@needs_buildah
def test_another_release_is_refused(build, base):
    done = build("0.22.0", base, "localhost/dsv4:wrong")
    assert done.returncode == 1
    assert f"error: image: the base image holds vLLM {RELEASE}, not 0.22.0; build on " in done.stdout + done.stderr


@needs_buildah
def test_read_only_and_not_root(buildah, image):
    """The self-test as vLLM's user, on a root nobody can write to, with one writable folder."""
    name = buildah("from", "--pull-never", image)
    root = buildah("mount", name)
    script = f"""set -e
        mount --bind {root} {root}
        mount -t tmpfs -o mode=1777 tmpfs {root}/tmp
        mount --rbind /dev {root}/dev
        mount -t proc proc {root}/proc
        mount -o remount,ro,bind {root}
        exec chroot --userspec=2000:0 {root} sh -c '
            if touch /usr/x 2>/dev/null || [ $(id -u) != 2000 ]; then exit 3; fi
            HOME=/tmp python3 -m vllm.dsv4_overlay.selftest'"""
    try:
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            capture_output=True, text=True, env={"PATH": os.environ["PATH"]},
        )  # fmt: skip
        print(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        buildah("rm", name)


@needs_buildah
def test_the_image_is_the_base_with_little_added(buildah, base, image):
    before, after = config(buildah, base), config(buildah, image)
    labels = after.pop("Labels")
    assert before.pop("Labels").items() <= labels.items() and after == before
    name, digest = labels["org.opencontainers.image.base.name"], labels["org.opencontainers.image.base.digest"]
    assert name == base and digest in buildah("images", "--format", "{{.Digest}}", base).split()
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert labels["org.opencontainers.image.revision"].removesuffix("-dirty") == head

    names = [buildah("from", "--pull-never", name) for name in (base, image)]
    try:
        old, new = (listing(Path(buildah("mount", name))) for name in names)
    finally:
        buildah("rm", *names)
    changed = {path for path in old.keys() | new.keys() if old.get(path) != new.get(path)}
    provenance = "usr/share/vllm-dsv4-overlay/provenance.json"
    assert provenance in changed and f"{SITE}/vllm/_dsv4_overlay/record.json" in changed
    # FlashInfer's wheel has the build_ files; buildah makes hosts, and the working folder that the base lacks.
    ours = ("vllm/", f"vllm-{RELEASE}.dist-info/RECORD", "flashinfer", "build_backend.py", "build_utils.py")
    others = ("usr/share/vllm-dsv4-overlay", "usr/local/bin/flashinfer", "etc/hosts", "vllm-workspace")
    expected = (*(f"{SITE}/{path}" for path in ours), *others)
    assert sorted(path for path in changed if not path.startswith(expected)) == []
    assert not [path for path in changed if path.endswith(".pyc") or path in new and new[path][0] & 0o002]


def listing(root):
    """Mode, size and time of every file below `root`; of folders the mode."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            info = os.lstat(path := os.path.join(folder, name))
            if not os.path.islink(path):
                facts = (info.st_size, info.st_mtime_ns) if name in files else ()
                found[os.path.relpath(path, root)] = (info.st_mode, *facts)
    return found
