"""Copies from samples: a curve per direction and memory."""

from __future__ import annotations

import pytest

from traincast.costs.cpu.copies import copy_of, copy_seconds, copy_signature, fit_copies, is_copy
from traincast.costs.cpu.samples import Sample
from traincast.utils.errors import TraincastError


def sample(direction, memory, nbytes):
    seconds = 1e-5 + nbytes / (1e10 if memory == "pinned" else 5e9)
    return Sample(
        signature=copy_signature(direction, memory, nbytes), between=1 << 26, access="", wall=seconds, busy=seconds,
        reference_wall=1e-3, reference_busy=1e-3, spread=0.01,
    )  # fmt: skip


MADE = [
    sample(direction, memory, 5000 * 2**number + 64 * number)
    for direction in ("to device", "to host")
    for memory in ("pinned", "pageable")
    for number in range(14)
]


def test_every_way_has_its_own_speed():
    models, (held_out,) = fit_copies(MADE, 1e-3, "wall")
    assert set(models) == {"to device, pinned", "to device, pageable", "to host, pinned", "to host, pageable"}
    assert held_out.group == "host copies" and held_out.n > 3 and held_out.gmae < 3
    pinned, pageable = (copy_seconds(models, "to device", memory, 10_000_000)[0] for memory in ("pinned", "pageable"))
    assert (pinned, pageable) == (pytest.approx(1.01e-3, rel=0.05), pytest.approx(2.01e-3, rel=0.05))


def test_a_way_that_was_not_measured_is_refused():
    with pytest.raises(TraincastError, match="copies in memory, pageable were not measured"):
        copy_seconds({}, "in memory", "pageable", 10)


def test_a_signature_says_which_copy():
    made = copy_signature("to host", "pinned", 640)
    assert is_copy(made) and copy_of(made) == ("to host", "pinned", 640)
