import tarfile

import pytest
from building import archive, copy_repository, install, run


@pytest.fixture(scope="session")
def repo(tmp_path_factory):
    root = tmp_path_factory.mktemp("plugin") / "repo"
    copy_repository(root)
    return root


@pytest.fixture(scope="session")
def wheel(repo, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheels")
    done = run(repo / "scripts/build-wheel.sh", out)
    assert done.returncode == 0, done.stderr
    (file,) = out.iterdir()
    assert done.stdout == f"built {file}\n"
    return file


@pytest.fixture(scope="session")
def site(wheel, tmp_path_factory):
    """A folder with the wheel installed."""
    return install(wheel, tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def trees(tmp_path_factory):
    """Unpacks the Python of a release, once."""
    folder = tmp_path_factory.mktemp("vllm")

    def tree(release):
        root = folder / f"vllm-{release}"
        if not root.exists():
            if not archive(release).is_file():
                pytest.skip(f"there is no {archive(release)}")
            with tarfile.open(archive(release)) as tar:
                ours = (f"vllm-{release}/vllm/", f"vllm-{release}/PKG-INFO")
                members = (m for m in tar if m.isfile() and m.name.startswith(ours))
                # Debian 12's Python, 3.11.2, has no filter.
                tar.extractall(folder, members, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        return root

    return tree
