"""What other distributions add is found by entry points, and what is missing is named with its remedy."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from traincast.utils import plugins
from traincast.utils.errors import TraincastError


@pytest.fixture
def offered(monkeypatch):
    """A group with one entry point; counts how often groups are read."""
    read = []

    def entry_points(*, group):
        read.append(group)
        return [EntryPoint("square", "math:sqrt", group)] if group == "traincast.test" else []

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    plugins.find_plugins.cache_clear()
    yield read
    plugins.find_plugins.cache_clear()


def test_an_entry_point_is_imported_when_it_is_asked_for(offered):
    assert plugins.load_plugin("traincast.test", "square")(9) == 3


def test_a_group_is_read_once(offered):
    plugins.load_plugin("traincast.test", "square")
    plugins.load_plugin("traincast.test", "another")

    assert offered == ["traincast.test"]


def test_what_nobody_has_is_none_or_an_error_that_says_what_to_install(offered):
    assert plugins.load_plugin("traincast.test", "cube") is None
    with pytest.raises(TraincastError, match=r"cubes needs the distribution traincast-evaluation: run `pip install "):
        plugins.require_plugin("traincast.test", "cube", "cubes")
