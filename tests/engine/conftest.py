import os

import pytest
from smallworld import KINDS, Engine, make_repo, make_target


@pytest.fixture
def engine(tmp_path):
    return Engine(make_repo(tmp_path / "repo"))


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def target(tmp_path, kind):
    return make_target(tmp_path / "target", kind)


@pytest.fixture(autouse=True)
def no_disk(monkeypatch):
    """Waiting for the disk takes most of the time here and shows in no result."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
