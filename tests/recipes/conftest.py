"""Places for runs of the tests of recipes.cooldown: see trunk.py."""

import os

import pytest

from tests.recipes.trunk import digests, make_place, stop_at


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a configuration, and no run yet."""
    monkeypatch.chdir(tmp_path)
    make_place(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trunk_folder(tmp_path_factory):
    """A folder with a trunk that was planned for 20 updates and stopped after 10."""
    folder = tmp_path_factory.mktemp("trunk")
    make_place(folder)
    before = os.getcwd()
    os.chdir(folder)
    stop_at("trunk", 20, 10)
    os.chdir(before)
    return folder


@pytest.fixture
def shared(trunk_folder, monkeypatch):
    """That folder; no test changes its trunk."""
    monkeypatch.chdir(trunk_folder)
    before = digests("runs/trunk")
    yield trunk_folder
    assert digests("runs/trunk") == before
