"""A sharded Transformer against two real processes with gloo: op by op, what is exchanged, and the most memory held."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.capturing import sharded_steps
from tests.capturing.oracle import differences, peak_bytes
from tests.capturing.real_pair import WORLD, device_ops, exchanged, real_exchanged, real_pair
from traincast.capturing import capture_distributed


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return real_pair("tests.capturing.sharded_steps:fsdp2", tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def program():
    def make_step(batch, *, rank, world_size):
        return sharded_steps.fsdp2(rank, "cuda")

    with sdpa_kernel(SDPBackend.MATH):
        workload = capture_distributed(
            make_step, world_size=WORLD, batch_size=sharded_steps.BATCH, name="x", rebatch=False
        )
    assert workload.ranks == (0, 0)
    return workload.programs[0]


def test_fully_shard_runs_the_ops_of_a_real_run(real, program):
    left = device_ops(program)
    assert list(differences(real.trace, left)) == []
    assert left == []


def test_fully_shard_exchanges_the_bytes_of_a_real_run_in_its_order(real, program):
    assert exchanged(program) == real_exchanged(real.trace)
    assert len(exchanged(program)) == 11  # four modules gathered, three of them twice, and four gradients scattered


def test_fully_shard_holds_the_memory_of_a_real_run(real, program):
    """Parameters of one layer at a time: those of all would be a third more."""
    assert peak_bytes(program) == pytest.approx(real.peak.peak_bytes - real.peak.scratch_bytes, rel=0.001)
