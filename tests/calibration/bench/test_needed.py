"""What a step needs measured, and how much of its time that covers."""

from __future__ import annotations

import pytest

from tests.calibration.bench.test_measure import TINY
from traincast.calibration.bench.bench import Coverage
from traincast.calibration.bench.plans import FAR_BYTES
from traincast.calibration.here import capture_here
from traincast.costs.cpu.features import count_touched_bytes, get_kind, list_operands
from traincast.costs.cpu.op_costs import PricedOp, make_cpu_ops, runs_no_kernel
from traincast.simulator.scenario.scenario import Scenario


@pytest.fixture(scope="module")
def program():
    return capture_here(TINY, Scenario(batch_size=64, dtype="fp32"))[0].programs[0]


def test_nothing_measured_covers_nothing_and_everything_all(program):
    coverage = Coverage(program)
    assert coverage.share() == 0.0
    shares = []
    for task in coverage.tasks:
        coverage.add(task, 1e-5)
        shares.append(coverage.share())
    assert shares[-1] == pytest.approx(1.0)
    assert 0.0 < shares[0] < 1.0


def test_what_was_not_measured_is_guessed_at_the_speed_of_what_was(program):
    fast, slow = Coverage(program), Coverage(program)
    first = fast.tasks[0]
    fast.add(first, 1e-6)
    slow.add(first, 1e-3)
    assert fast.share() == pytest.approx(slow.share()), "a machine that is slower is slower for the rest as well"


def test_ops_are_measured_where_their_operands_lie(program):
    states = {get_kind(task.signature): task.between for task in Coverage(program).tasks}
    assert set(states.values()) <= {0, 1 << 20, 4 << 20, 16 << 20, FAR_BYTES}
    assert min(states.values()) < FAR_BYTES, "a tiny step keeps its operands in the cache"


class _Unsure:
    """A profile that is unsure of one kind of op only."""

    def __init__(self, kind):
        self.kind = kind

    def priced(self, program, profile, access=()):
        return [
            PricedOp(op, get_kind(one), 1e-6, 0.5 if get_kind(one) == self.kind else 0.03, known=True)
            for op in program.ops
            for one in make_cpu_ops(op.signature)
        ]


def test_ops_that_a_profile_is_unsure_of_are_measured_first(program, monkeypatch):
    # given a machine that was fitted, and of whose ops one kind is not known well
    kinds = {get_kind(task.signature) for task in Coverage(program).tasks}
    rare = min(kinds, key=lambda kind: sum(get_kind(task.signature) == kind for task in Coverage(program).tasks))
    monkeypatch.setattr("traincast.calibration.bench.bench.price_ops", _Unsure(rare).priced)

    # then that kind comes first, in the list and in what the list says of kinds
    coverage = Coverage(program, profile=object())
    assert get_kind(coverage.tasks[0].signature) == rare
    assert next(iter(coverage.by_kind)) == rare
    assert set(coverage.tasks) == set(Coverage(program).tasks)


def test_a_sparse_gradient_that_was_emptied_has_the_bytes_of_its_new_rows(program):
    found = list_operands(program, 1e9, lambda _, one: count_touched_bytes(one))
    updates = [op for op in program.ops if get_kind(op.signature) == "sparse_update"]
    assert updates
    for op in updates:
        rows = found[op.index].operands[1:3]
        assert [operand.nbytes for operand in rows] == [spec.nbytes for spec in op.signature.inputs[1:3]]


def test_to_zero_a_sparse_gradient_runs_no_kernel_and_is_not_measured(program):
    zeroed = [op.signature for op in program.ops if runs_no_kernel(op.signature)]
    assert zeroed and not {task.signature for task in Coverage(program).tasks} & set(zeroed)
