"""The real Dockerfile, built by buildah through docker/build.sh on a stand-in for vllm/vllm-openai.

The stand-in is Debian with a stock vLLM wheel, this environment's packages (a torch without CUDA) and this
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
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "docker")]
import image as tool  # noqa: E402

RELEASE, NEWEST = "0.22.1", "0.33.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-dsv4-overlay" / "stand-in"
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"usr/local/lib/{PYTHON}/dist-packages"
PACKAGES = "python3,python3-pip,python3-venv,ca-certificates,g++"
# What `vllm serve` imports before it reads its arguments, beside this environment's packages.
SERVING = (
    "httptools==0.9.0", "ijson==3.6.0", "jmespath==1.1.0", "mistral_common==1.13.1",
    "model_hosting_container_standards==0.1.16", "orjson==3.13.0", "prometheus_fastapi_instrumentator==8.1.0",
    "pycountry==26.2.16", "pydantic_extra_types==2.11.1", "python_multipart==0.0.34", "setproctitle==1.3.8",
    "supervisor==4.3.0", "tiktoken==0.14.0", "watchfiles==1.3.0",
)  # fmt: skip


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


def releases():
    """(release, its [image] table) of every release that has one, which is in one of its series."""
    for path in ROOT.glob("patches/*/*/release.toml"):
        pins = tomllib.loads(path.read_text())
        for release in (pins["release"], *pins.get("serves", [])):
            if "image" in pins:
                yield release, pins["image"]


@pytest.mark.parametrize("option", ["--tag", "--base", "--series", "--build-arg"])
def test_an_empty_argument(option):
    """As of a variable that is not set."""
    done = subprocess.run([ROOT / "docker/build.sh", "0.22.1", option, ""], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.endswith("error: an argument is empty (is a variable unset?)\n")


def test_bake_file_is_what_the_releases_say():
    done = subprocess.run([ROOT / "docker/build.sh", "--bake"], capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "docker-bake.json").read_text(), "docker/build.sh --bake > docker-bake.json"
    file = json.loads(done.stdout)
    expected = {"default": {}, "blackwell": {}}
    for release, image in releases():
        # Bake cannot ask a registry, and a tag must not come to mean another base.
        if digest := image.get("digests", {}).get(release):
            expected["default"][release] = (digest, "")
            if "flashinfer" in image:
                expected["blackwell"][release] = (digest, image["flashinfer"])
    for group, wanted in expected.items():
        targets = [file["target"][name] for name in file["group"][group]["targets"]]
        args = [target["args"] for target in targets]
        assert {a["RELEASE"]: (a["BASE_DIGEST"], a["FLASHINFER"]) for a in args} == wanted
        assert all(a["BASE_IMAGE"].endswith(f"@{a['BASE_DIGEST']}") for a in args)
        assert all(target["tags"][0].endswith("-blackwell") == (group == "blackwell") for target in targets)
    tags = [tag for target in file["target"].values() for tag in target["tags"]]
    assert len(set(tags)) == len(tags) == len(file["target"])


def test_flashinfer_pins():
    for path in ROOT.glob("patches/*/*/release.toml"):
        version = tomllib.loads(path.read_text()).get("image", {}).get("flashinfer")
        if version:
            lines = (ROOT / f"docker/flashinfer-{version}.txt").read_text().splitlines()
            pinned = [line.split() for line in lines if not line.startswith("#")]
            names = [f"flashinfer-python=={version}", f"flashinfer-cubin=={version}"]
            assert [name for name, _ in pinned] == names
            assert all(value.startswith("--hash=sha256:") for _, value in pinned)


@pytest.fixture
def checkout(tmp_path):
    """What build.sh needs of this repository, committed; run(*arguments, NAME=a program for PATH), and git."""
    root, programs = tmp_path / "repo", tmp_path / "bin"
    for name in ("docker", "patches", "scripts", "overlay"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "VERSION", root)
    programs.mkdir()

    def git(*arguments):
        command = ["git", "-C", root, "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        env = os.environ | {"GIT_COMMITTER_DATE": "2026-01-02T03:04:05+02:00"}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.strip()

    git("init", "-q")
    git("remote", "add", "origin", "https://me:secret@git.example.org/team/it.git")
    git("add", "-A")
    git("commit", "-q", "-m", "one")

    def run(*arguments, **scripts):
        for name, script in scripts.items():
            (programs / name).write_text(script)
            (programs / name).chmod(0o755)
        return subprocess.run(
            [root / "docker/build.sh", *arguments], capture_output=True, text=True, cwd=tmp_path,
            env=os.environ | {"PATH": f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin"},
        )  # fmt: skip

    return run, git


WORKS, FAILS = '#!/bin/sh\necho "$@" >> calls\n', "#!/bin/sh\nexit 1\n"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["9.9.9"], "There is no patch series for vLLM 9.9.9; supported: "),
        ([RELEASE, "--builder", "podman"], "There is no podman on PATH"),
        ([RELEASE, "--series", "fp8"], f"vLLM {RELEASE} has no series 'fp8'; it has: drop-in, fp8-experts, "),
        ([NEWEST, "--blackwell"], f"The image of vLLM {NEWEST} has no variant for Blackwell; omit --blackwell."),
        ([RELEASE, "--build-arg", "MLA_CUDA_ARCHS=90a"], "has another content than its tag says; give --tag."),
        ([RELEASE, "--target", "checked"], "has another content than its tag says; give --tag."),
    ],
)
def test_refusals(arguments, words, checkout):
    if "podman" in arguments and shutil.which("podman", path="/usr/bin:/bin"):
        pytest.skip("there is a podman")
    done = checkout[0](*arguments)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and words in done.stderr


def test_the_engine_that_works(checkout):
    """docker is on PATH of many machines without a daemon, or without BuildKit."""
    run, _ = checkout
    done = run(RELEASE, docker=FAILS, podman=FAILS, buildah=FAILS)
    assert done.returncode == 1
    assert "error: build-failed: No builder works: `docker buildx inspect`, `podman info`, " in done.stderr
    done = run(RELEASE, docker=FAILS, podman=WORKS, buildah=WORKS)
    assert done.returncode == 0 and "+ podman build --tag " in done.stderr, done.stderr


def test_a_tag_says_what_is_in_the_image(checkout, tmp_path):
    run, git = checkout
    commit, version = git("rev-parse", "HEAD"), (ROOT / "VERSION").read_text().strip()
    name = f"vllm-dsv4-overlay:{RELEASE}-{version}-g{commit[:12]}"
    assert run(RELEASE, docker=WORKS).stdout.startswith(f"built {name} on {tool.BASE}:v{RELEASE}@sha256:")
    assert run(RELEASE, "--blackwell", docker=WORKS).stdout.startswith(f"built {name}-blackwell on ")
    more = ["--series", "fp8-experts", "--series", "default"]
    assert run(RELEASE, *more, docker=WORKS).stdout.startswith(f"built {name}_default_fp8-experts on ")
    assert " --build-arg SERIES=--series=default --series=fp8-experts " in (tmp_path / "calls").read_text()
    # A base of one's own, or a newer one under the same tag, is another image.
    done = run(RELEASE, "--base", "mine@sha256:0123456789abcdef", docker=WORKS)
    assert done.stdout == f"built {name}-base-0123456789ab on mine@sha256:0123456789abcdef\n"
    calls = (tmp_path / "calls").read_text()
    assert f" --tag {name} " in calls and " --build-arg FLASHINFER= " in calls
    assert f" --build-arg REVISION={commit} " in calls
    assert " --build-arg CREATED=2026-01-02T01:04:05Z " in calls
    assert " --build-arg SOURCE=https://git.example.org/team/it " in calls and "secret" not in calls


def test_what_is_not_committed_gets_no_tag(checkout, tmp_path, monkeypatch):
    run, git = checkout
    (tmp_path / "repo/new").write_text("")
    (tmp_path / "ignored").write_text("*\n")  # by the user's own list
    git("config", "core.excludesFile", str(tmp_path / "ignored"))
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own way to say so
    assert " has no commit that git tells of, so no tag could say" in run(RELEASE, docker=WORKS).stderr
    monkeypatch.delenv("GIT_TEST_ASSUME_DIFFERENT_OWNER")
    done = run(RELEASE, docker=WORKS)
    assert done.returncode == 1 and "has changes that are not committed, so no tag could say" in done.stderr
    assert not (tmp_path / "calls").exists() or " build " not in (tmp_path / "calls").read_text()
    assert run(RELEASE, "--tag", "mine", docker=WORKS).returncode == 0
    assert f"REVISION={git('rev-parse', 'HEAD')}-dirty " in (tmp_path / "calls").read_text()


@pytest.mark.parametrize(
    "remote, address",
    [
        ("https://me:secret@git.example.org/team/it.git", "https://git.example.org/team/it"),
        ("git@git.example.org:team/it.git", "https://git.example.org/team/it"),
        ("ssh://git@git.example.org/team/it", "https://git.example.org/team/it"),
        ("/srv/it.git", ""),
    ],
)
def test_where_the_source_is(remote, address):
    assert tool.public_url(remote) == address


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
def test_a_base_of_a_registry_or_of_ones_own(base, built_on, checkout, tmp_path):
    done = checkout[0](RELEASE, "--builder", "docker", "--base", base, "--tag", "it", docker=DOCKER)
    calls = (tmp_path / "calls").read_text()
    if built_on is None:
        assert done.returncode == 1 and "error: build-failed: docker image ended with 1; " in done.stderr
        assert "build --tag" not in calls
    else:
        assert (done.returncode, done.stdout) == (0, f"built it on {built_on}\n"), done.stderr
        assert f" --build-arg BASE_IMAGE={built_on} " in calls


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
    """All of the stand-in but vLLM."""
    # What debootstrap mounts there, and would leave if killed, is for itself only.
    private = ["unshare", "--mount", "--propagation", "private"]
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", folder]
    subprocess.run([*private, *bootstrap], check=True, stdout=subprocess.DEVNULL)
    for managed in folder.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        managed.unlink()
    ignored = shutil.ignore_patterns("__pycache__")
    packages = Path(sys.prefix, "lib", PYTHON, "site-packages")
    shutil.copytree(packages, folder / SITE, dirs_exist_ok=True, symlinks=True, ignore=ignored)
    shutil.copytree(CUDA.resolve(), folder / "usr/local/cuda", symlinks=True)
    install(folder, *SERVING)
    if bundle := os.environ.get("SSL_CERT_FILE"):  # the package index may be behind a proxy with its own
        shutil.copy(bundle, folder / "etc/ssl/certs/ca-certificates.crt")


def install(folder, *packages):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--prefer-binary"]
    subprocess.run([*pip, "--target", folder / SITE, *packages], check=True)


def add_vllm(release, folder):
    install(folder, f"vllm=={release}")
    program = folder / "usr/local/bin/vllm"  # which pip makes for the Python that it runs in
    program.write_text("#!/usr/bin/python3\nfrom vllm.entrypoints.cli.main import main\n\nmain()\n")
    program.chmod(0o755)
    old = "0.6.11.post2+cu130"  # named as in the real one, but empty
    info = folder / SITE / f"flashinfer_jit_cache-{old}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flashinfer-jit-cache\nVersion: {old}\n")
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/RECORD,,\n")


@pytest.fixture(scope="module")
def bases(buildah):
    """The names of the stand-ins by release, which are made once and kept."""
    requirements = (ROOT / "requirements-test.txt").read_text()

    def make(what, parent, fill, *recipe):
        key = hashlib.sha256("".join((parent, requirements, *map(str, recipe))).encode()).hexdigest()[:12]
        name = f"localhost/stand-in-{what}:{key}"
        if buildah("inspect", "--type", "image", name, check=False).returncode == 0:
            return name
        work = buildah("from", "--pull-never", parent)
        try:
            fill(Path(buildah("mount", work)))
        except BaseException:
            buildah("rm", work)
            raise
        certificates = "/etc/ssl/certs/ca-certificates.crt"
        env = {"PATH": "/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
               "SSL_CERT_FILE": certificates, "PIP_CERT": certificates}  # fmt: skip
        env |= {key: value for key, value in os.environ.items() if key in ("PIP_INDEX_URL", "PIP_DEFAULT_TIMEOUT")}
        for variable, value in env.items():
            buildah("config", "--env", f"{variable}={value}", work)
        # What the real one has, so that it can be seen to stay.
        buildah("config", "--entrypoint", '["vllm", "serve"]', "--workingdir", "/vllm-workspace", work)
        buildah("commit", "--quiet", "--rm", work, name)
        return name

    sources = map(inspect.getsource, (make_root, install))
    root = make("root", "scratch", make_root, *sources, PACKAGES, SERVING)
    return {
        release: make(release, root, functools.partial(add_vllm, release), inspect.getsource(add_vllm))
        for release in (RELEASE, NEWEST)
    }


@pytest.fixture(scope="module")
def build(storage):
    def run(release, base, tag, *options):
        done = subprocess.run(
            [ROOT / "docker/build.sh", release, "--builder", "buildah", "--base", base, "--tag", tag, *options,
             "--pull-never", "--build-arg", "MLA_CUDA_ARCHS=90a"],
            capture_output=True, text=True, env=storage,
        )  # fmt: skip
        print(done.stdout, done.stderr, sep="\n")
        return done

    return run


@pytest.fixture(scope="module")
def images(build, bases):
    """The images by release, and "blackwell" of RELEASE."""
    found = {}
    for name, release, options in (
        (RELEASE, RELEASE, ()), (NEWEST, NEWEST, ()),
        ("blackwell", RELEASE, ["--blackwell", "--series", "default", "--series", "quantised-linears"]),
    ):  # fmt: skip
        found[name] = f"localhost/dsv4:test-{name}"
        done = build(release, bases[release], found[name], *options)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return found


@pytest.fixture
def run_in(buildah):
    """Run a command in a new container of an image; returns what buildah does."""

    def run(image, *command):
        name = buildah("from", "--pull-never", image)
        try:
            return buildah("run", name, "--", *command, check=False)
        finally:
            buildah("rm", name)

    return run


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
        # A process that was started in the background would hand on that it ignores SIGINT.
        done = subprocess.run(
            [*pytest_again, test], capture_output=True, text=True, env=env, cwd=tmp_path,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
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
@pytest.mark.parametrize("name", [RELEASE, NEWEST, "blackwell"])
def test_the_build_checked_itself(buildah, run_in, images, name):
    facts = json.loads(run_in(images[name], "cat", "/usr/share/vllm-dsv4-overlay/provenance.json").stdout)
    labels = config(buildah, images[name])["Labels"]
    assert facts["revision"] == facts["overlay"]["commit"] == labels["org.opencontainers.image.revision"]
    assert facts["base_digest"] == labels["org.opencontainers.image.base.digest"]
    assert facts["vllm"] == (RELEASE if name == "blackwell" else name)
    series = facts["overlay"]["series"]
    assert "drop-in" in series and ("quantised-linears" in series) == (name == "blackwell")
    assert facts["native_kernels"]["archs"] == "90a"
    commit = tool.source(ROOT)
    assert labels["org.opencontainers.image.created"] == commit.created
    assert labels["org.opencontainers.image.source"] == commit.url
    pinned, base = None, "0.6.11.post2+cu130"  # FlashInfer is as the base has it, except for Blackwell
    if name == "blackwell":
        pinned, base = dict(releases())[RELEASE]["flashinfer"], None
    assert facts["flashinfer"] == {
        "flashinfer-python": pinned, "flashinfer-cubin": pinned, "flashinfer-jit-cache": base
    }  # fmt: skip


@needs_buildah
@pytest.mark.parametrize("release", [RELEASE, NEWEST])
def test_the_entry_point_runs(buildah, run_in, bases, images, release):
    """As far as it can without a GPU, which is where the base stops too."""
    last = []
    for image in (bases[release], images[release]):
        entry = config(buildah, image)["Entrypoint"]
        assert entry == ["vllm", "serve"]
        done = run_in(image, *entry, "/model", "--attention-backend", "FLASHINFER_MLA_SPARSE_DSV4")
        assert done.returncode == 1, done.stdout + done.stderr
        last.append([line for line in done.stderr.splitlines() if line.startswith("RuntimeError: ")])
    print(last[1])
    assert "Failed to infer device type" in last[0][0] and last[1] == last[0]


@needs_buildah
def test_status_revert_and_apply_again(buildah, images):
    (CACHE / "tools").mkdir(exist_ok=True)
    name = buildah("from", "--pull-never", images[RELEASE])

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
def test_second_build_does_nothing(buildah, build, bases, images):
    image = images[RELEASE]
    before = buildah("images", "--format", "{{.ID}}", image)
    done = build(RELEASE, bases[RELEASE], image)
    assert done.returncode == 0 and buildah("images", "--format", "{{.ID}}", image) == before
    steps = [line for line in done.stderr.splitlines() if "Preparing the tools" in line]
    assert not steps  # as it says when that layer is made


@needs_buildah
def test_a_wrong_base_is_refused_before_anything_is_compiled(build, bases):
    done = build("0.22.0", bases[RELEASE], "localhost/dsv4:wrong")
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert f"error: image: the base image holds vLLM {RELEASE}, not 0.22.0; build on " in output
    assert "RUN /src/scripts/build-kernels.sh" not in output


@needs_buildah
def test_read_only_and_not_root(buildah, images):
    """The self-test as vLLM's user, on a root nobody can write to, with one writable folder."""
    name = buildah("from", "--pull-never", images[RELEASE])
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
def test_the_image_is_the_base_with_little_added(buildah, bases, images):
    base, image = bases[RELEASE], images[RELEASE]
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
    # buildah makes hosts, and the working folder that the base lacks.
    ours = ("vllm/", f"vllm-{RELEASE}.dist-info/RECORD")
    others = ("usr/share/vllm-dsv4-overlay", "etc/hosts", "vllm-workspace")
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
