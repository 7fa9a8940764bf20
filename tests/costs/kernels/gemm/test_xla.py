"""Another library's products."""

from __future__ import annotations

import numpy as np
from traincast_evaluation.kernels.gemm.other_sources import evaluate_gemm_xla, read_xla

from traincast.costs.kernels.call import COMPUTE_TYPES


def test_rows_that_cannot_be_true_are_left_out(shared_data):
    samples = read_xla(shared_data)
    keys = np.array([device.key for device in samples.devices])[samples.device]
    types = np.array(COMPUTE_TYPES)[samples.calls.compute]
    assert not ((keys == "h100") & (types == "fp8")).any()
    assert set(types[keys == "mi355x"]) == {"bf16"}
    flop = 2 * np.prod(samples.calls.values[:, :4], axis=1)
    peaks = np.array([samples.devices[i].peak(str(name)) for i, name in zip(samples.device, types, strict=True)])
    assert (flop / samples.seconds <= 1.01 * peaks).all()


def test_another_library_is_slower_at_small_sizes(shared_data):
    rows = {row.group: row for row in evaluate_gemm_xla(shared_data)}
    assert rows["h100 bmm bf16"].gmae <= 12
    assert all(rows[group].bias < 0 for group in ("h100 mm bf16", "b200 mm bf16", "mi355x mm bf16"))
    # the times that ours were fitted to hold the cast of the activations, XLA's do not
    assert rows["b200 mm fp8"].bias > 0
