"""The host in event-timed convolutions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.costs.kernels.conv.test_model import conv
from traincast.costs.kernels.contract import Calls, load_state
from traincast.costs.kernels.conv import CONV
from traincast.costs.kernels.conv.model import ConvModel
from traincast.costs.kernels.families import PROFILES
from traincast.hardware import load_device
from traincast_evaluation.kernels.conv.fit import with_host_parts
from traincast_evaluation.kernels.conv.measurements import ConvSamples


def test_the_host_s_delay_is_found_where_it_may_be_seen_and_typical_elsewhere():
    random = np.random.default_rng(3)
    devices = tuple(load_device(key) for key in ("t4", "v100-pcie", "p100"))
    shapes = [
        conv(*(int(x) for x in np.exp(random.uniform(0.7, 4.5, 3))), int(random.integers(5, 30))) for _ in range(250)
    ]
    calls = Calls.of(CONV, shapes * 6)
    device, queued = np.repeat([0, 1, 2, 0, 1, 2], 250), np.repeat([False, True], 750)
    model = ConvModel.from_state(load_state(PROFILES / "conv"))
    took = np.concatenate([model.predict(Calls.of(CONV, shapes), devices[i]).seconds for i in (0, 1, 2, 0, 1, 2)])
    share, longest = np.tile(random.uniform(0, 1, 250), 6), np.array([4e-4, 2.5e-4, 6e-4])
    delay = np.where(queued, 0.0, 5e-5 + share * longest[device])
    held = np.tile(np.arange(250) % 5 == 0, 6)
    nothing = np.zeros(1500)
    samples = ConvSamples(devices, device, calls, took + delay, held, ~queued, nothing, nothing)

    found = with_host_parts(samples, ~held)

    assert not found.offset[queued].any()
    known, other = ~queued & ~held & (took < 2e-4), ~queued & held
    assert np.corrcoef(found.offset[known], delay[known])[0, 1] > 0.95
    assert np.median(np.abs(found.offset - delay)[known]) < 3e-5 < np.median(np.abs(found.offset - delay)[other])
    for index in range(3):
        assert len(np.unique(found.offset[other & (device == index)])) == 1
    louder = with_host_parts(replace(samples, seconds=np.where(held, 3 * samples.seconds, samples.seconds)), ~held)
    assert np.array_equal(louder.offset, found.offset)  # held-out readings say nothing
