"""Samples of copies: what their signatures say, and that damaged ones are rejected."""

from __future__ import annotations

import pytest

from traincast.costs.cpu.samples import is_copy, make_copy_signature, read_copy
from traincast.utils.errors import TraincastError


def test_a_signature_says_which_copy():
    made = make_copy_signature("to host", "pinned", 640)
    assert is_copy(made) and read_copy(made) == ("to host", "pinned", 640)


def test_a_copy_that_nobody_measures_is_refused():
    with pytest.raises(TraincastError, match="a sample of a copy in the store is damaged"):
        read_copy(make_copy_signature("sideways", "pinned", 640))
