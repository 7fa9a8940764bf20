"""Steps with edits, and the kernels that a step launches."""

from __future__ import annotations

from collections import Counter

import pytest

from traincast.hardware.platform import load_platform
from traincast.planner.what_if.edits.registry import parse_edits
from traincast.planner.what_if.result import prepare_both_sides
from traincast.simulator.prediction.prediction import predict_step
from traincast.simulator.scenario.predict import load_step
from traincast.simulator.scenario.resolved import make_scenario, resolve


def edited_step(capture, *edits, on="a100-80gb", **options):
    """A step with edits."""
    _, changed = prepare_both_sides(
        resolve(make_scenario({"workload": capture, "on": on, **options})), parse_edits(edits)
    )
    return load_step(changed)[0]


def kernels_of(step):
    """The prediction of a step, and how often it launches every kernel."""
    result = predict_step(step, load_platform("a100-80gb"))
    calls = result.timeline.schedule.call[result.timeline.launches].tolist()
    return result, Counter(result.timeline.calls[call] for call in calls)


def assert_same(edited, fresh, *, memory=0.02):
    """Two steps that launch the same kernels in the same time."""
    (mine, ours), (theirs, wanted) = kernels_of(edited), kernels_of(fresh)
    assert ours == wanted
    assert mine.iteration == pytest.approx(theirs.iteration, rel=0.01)
    assert mine.device_active == pytest.approx(theirs.device_active, rel=0.01)
    assert mine.memory.peak_bytes == pytest.approx(theirs.memory.peak_bytes, rel=memory)
