"""Captured ops equal, op by op, to PyTorch's execution trace of the same step run for real on this CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.capturing import small_models
from tests.capturing.oracle import differences, execution_trace
from traincast.capturing import capture_step

STEPS = {
    "dlrm": small_models.dlrm,
    "mlp with SGD": small_models.mlp,
    "mlp with AdamW": lambda batch, device: small_models.mlp(batch, device, optimizer="AdamW"),
    "mlp with Adagrad": lambda batch, device: small_models.mlp(batch, device, optimizer="Adagrad"),
    "cnn": small_models.cnn,
    "encoder": lambda batch, device: small_models.encoder(batch, 9, device),
}


@pytest.mark.parametrize("name", STEPS)
def test_ops_shapes_and_dtypes_equal_those_of_a_real_run(name, tmp_path):
    # Given the same step on this CPU and captured as on a GPU, attention in its portable form on both
    make_step = STEPS[name]
    with sdpa_kernel(SDPBackend.MATH):
        trace = execution_trace(make_step(6, "cpu"), tmp_path)
        workload = capture_step(lambda batch: make_step(batch, "cuda"), batch_size=6, name=name, rebatch=False)

    # When both are read side by side
    left = list(workload.programs[0].ops)
    found = list(differences(trace, left))

    # Then no op, shape or dtype differs, and none is left over
    assert found == []
    assert left == []


def test_the_comparison_notices_a_missing_op(tmp_path):
    # Given a real trace and a capture of another step
    trace = execution_trace(small_models.mlp(6, "cpu"), tmp_path)
    other = capture_step(lambda batch: small_models.dlrm(batch, "cuda"), batch_size=6, name="x", rebatch=False)

    # When they are compared
    left = list(other.programs[0].ops)
    found = list(differences(trace, left))

    # Then it shows
    assert found
    assert left
