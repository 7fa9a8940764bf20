"""What the time of an op depends on, and where its operands are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from traincast.calibration.bench.plans import make_op, make_spec, plan_benchmarks
from traincast.costs.cpu.features import (
    FAR,
    WORK,
    Caches,
    Operand,
    count_touched_bytes,
    describe_op,
    get_family,
    get_kind,
    list_operands,
    split_by_level,
)
from traincast.costs.cpu.op_costs import make_cpu_ops
from traincast.costs.cpu.samples import (
    Sample,
    average_visits,
    format_sample,
    format_signature,
    group_visits,
    list_call_operands,
    parse_row,
    parse_signature,
)
from traincast.ir.ops import Signature, TensorSpec
from traincast.models.dlrm.config import DlrmConfig
from traincast.models.dlrm.program import build_dlrm_workload
from traincast.utils.errors import TraincastError

CACHES = Caches(512e3, 16e6)
TINY = DlrmConfig(
    name="tiny", bottom_mlp=(8, 16, 8), top_mlp=(16, 1), rows_per_table=(50, 1000), embedding_dim=8,
    lookups_per_table=(2, 2), batch_size=16,
)  # fmt: skip
MM = make_op("mm", [("self", make_spec(64, 32)), ("mat2", make_spec(32, 16, transposed=True))], [make_spec(64, 16)])


def tasks(number=166):
    return [task for task, _ in zip(plan_benchmarks(3), range(number), strict=False)]


@pytest.mark.parametrize(
    ("name", "kind", "family"),
    [
        ("aten::addmm", "gemm", "gemm"), ("aten::bmm", "bmm", "gemm"), ("aten::add_", "add", "elementwise"),
        ("aten::sub", "add", "elementwise"), ("aten::clone", "copy", "elementwise"),
        ("aten::_softmax", "_softmax", "reduction"), ("aten::convolution", "conv", "conv"),
        ("aten::zero_", "fill", "elementwise"), ("aten::_embedding_bag", "_embedding_bag", "embedding forward"),
    ],
)  # fmt: skip
def test_ops_fall_into_kinds(name, kind, family):
    signature = Signature(name, (make_spec(4, 4),) * 3, (make_spec(4, 4),))
    assert (get_kind(signature), get_family(get_kind(signature))) == (kind, family)


def test_a_product_is_its_flops_and_its_sizes():
    features = describe_op(MM, (Operand(100, 0), Operand(200, FAR)), CACHES)
    assert features.terms[:4].tolist() == pytest.approx([1.0, 100.0, 0.0, 200.0], abs=0.1)
    assert features.terms[6] == 2 * 64 * 32 * 16
    assert features.place[:3].tolist() == [6.0, 4.0, 5.0]
    assert features.place[3:5].tolist() == [0.0, 3.0], "the right operand is transposed"


def test_few_columns_one_behind_the_other_are_a_kernel_of_their_own():
    def place(columns, *, transposed):
        signature = make_op(
            "mm",
            [("self", make_spec(64, 32)), ("mat2", make_spec(32, columns, transposed=transposed))],
            [make_spec(64, 4)],
        )
        return describe_op(signature, (), CACHES).place[10:12].tolist()

    assert place(2, transposed=True) == [2.0, 6.0], "no vector of four; three doublings short of a wide one"
    assert place(4, transposed=True) == [0.0, 4.0] and place(4, transposed=False) == [0.0, 0.0]
    assert place(32, transposed=True) == [0.0, 0.0], "many columns are packed"


def test_every_kind_of_the_plan_has_terms_of_one_length():
    lengths: dict[str, set[int]] = {}
    for task in tasks():
        features = describe_op(task.signature, list_call_operands(task.signature, task.access, task.between), CACHES)
        lengths.setdefault(features.kind, set()).add(len(features.terms))
        assert np.isfinite(features.terms).all() and np.isfinite(features.place).all()
    assert {kind: sizes for kind, sizes in lengths.items() if len(sizes) > 1} == {}


def test_bytes_are_where_their_distance_says():
    assert split_by_level([Operand(1000, 0)], 1e6, 1e8).tolist() == pytest.approx([1000.0, 0.0, 0.0], abs=2)
    assert split_by_level([Operand(1000, 10**7)], 1e5, 1e10).tolist() == pytest.approx([0.0, 1000.0, 0.0], abs=2)
    assert split_by_level([Operand(1000, FAR)], 1e5, 1e7).tolist() == pytest.approx([0.0, 0.0, 1000.0])
    nearer, further = (split_by_level([Operand(1000, away)], 1e5, 1e7)[1] for away in (10**6, 10**7))
    assert 1000 > nearer > further > 0, "less and less remains"


def test_a_table_counts_with_the_rows_that_are_looked_up():
    bag = next(task.signature for task in tasks() if get_kind(task.signature) == "_embedding_bag")
    rows, dim = bag.inputs[0].shape
    lookups = bag.inputs[1].numel
    assert 0 < count_touched_bytes(bag)[0] <= 4 * dim * min(rows, lookups)
    assert count_touched_bytes(bag, "zipf:1.4")[0] < count_touched_bytes(bag)[0]


def test_many_lookups_share_pages_and_lines_of_the_page_table():
    bag = next(task.signature for task in tasks() if get_kind(task.signature) == "_embedding_bag")

    def translations(lookups):
        table = replace(bag.inputs[0], shape=(1_000_000, 64), stride=(64, 1))
        indices = replace(bag.inputs[1], shape=(lookups,))
        wanted = replace(bag, inputs=(table, indices, *bag.inputs[2:]))
        terms = describe_op(wanted, [Operand(256 * lookups, FAR)], Caches(1e6, 8e6)).terms
        return terms[WORK + 6 : WORK + 10] / lookups

    few, many = translations(100), translations(200_000)
    assert few == pytest.approx([0.99] * 4, rel=0.01), "each row is in a page of its own"
    assert (many < [1.0, 0.31, 0.04, 0.04]).all(), "62,500 pages, 7,813 lines of their addresses"


def test_what_is_read_again_is_near_and_what_is_not_is_far():
    program = build_dlrm_workload(TINY).programs[0]
    rows = list_operands(program, 1e9)
    assert len(rows) == program.num_ops
    distances = np.array([operand.distance for row, _ in rows for operand in row if operand.nbytes])
    assert distances.min() == 0
    assert np.mean(distances < 2e6) > 0.9, "in a small step little but code is between two uses"


def test_beyond_the_caches_nobody_counts():
    program = build_dlrm_workload(TINY).programs[0]
    assert max(operand.distance for row, _ in list_operands(program, 1000) for operand in row) == FAR


def test_optimizers_loop_over_their_parameters_on_a_cpu():
    tensors = (make_spec(3, 4), make_spec(5), make_spec(3, 4), make_spec(5))
    groups = (("self", 2), ("other", 2))
    many = Signature("aten::_foreach_add_", tensors, tensors[:2], (("alpha", -0.1),), groups, "List")
    assert [(one.name, one.inputs) for one in make_cpu_ops(many)] == [
        ("aten::add_", (make_spec(3, 4), make_spec(3, 4))),
        ("aten::add_", (make_spec(5), make_spec(5))),
    ]


def test_views_and_transfers_cost_no_kernel():
    host, device = TensorSpec((4,), (1,), "float32", "cpu:pinned"), TensorSpec((4,), (1,), "float32")
    assert make_cpu_ops(Signature("aten::_to_copy", (host,), (device,))) == ()
    assert make_cpu_ops(Signature("aten::view", (device,), (device,))) == ()
    assert len(make_cpu_ops(Signature("aten::_to_copy", (device,), (device,)))) == 1


def test_dropout_draws_a_mask_scales_it_and_applies_it():
    dropped = Signature("aten::native_dropout", (make_spec(4, 4),), (make_spec(4, 4), make_spec(4, 4)))
    assert [one.name for one in make_cpu_ops(dropped)] == ["aten::bernoulli_", "aten::div_", "aten::mul"]


def test_samples_survive_being_written_down():
    for task in tasks(83):
        sample = Sample(
            signature=task.signature, between=task.between, access=task.access, wall=2e-3, busy=1e-3,
            reference_wall=2e-3, reference_busy=1e-3, spread=0.01, found=(0.0, 5.0),
        )  # fmt: skip
        again = parse_row(format_sample(sample))
        assert again == sample
        assert again.held_out == sample.held_out


def test_a_fifth_is_held_out():
    held = [parse_signature(format_signature(task.signature)) for task in tasks(400)]
    samples = [
        Sample(signature=one, between=0, access="", wall=1, busy=1, reference_wall=1, reference_busy=1, spread=0)
        for one in held
    ]
    assert 0.13 < np.mean([sample.held_out for sample in samples]) < 0.27


def test_what_was_measured_at_two_times_is_one_sample():
    one, other = tasks(2)
    first = Sample(
        signature=one.signature, between=one.between, access="", wall=2e-3, busy=2e-3, reference_wall=1e-3,
        reference_busy=1e-3, spread=0.02,
    )  # fmt: skip
    later = replace(first, wall=16e-3, reference_wall=2e-3, spread=0.04)
    apart = [replace(first, signature=other.signature), replace(first, found=(1.0,)), replace(first, code_far=True)]
    groups = group_visits([first, *apart, later])
    assert groups == [[first, later], *([one] for one in apart)]
    mean = average_visits(groups[0])
    assert mean.ratio("wall") == pytest.approx(4.0), "of 2 and 8"
    assert mean.ratio("busy") == pytest.approx(2.0) and mean.spread == pytest.approx(0.03)
    assert average_visits([later]) is later


def test_a_damaged_sample_is_one_line():
    with pytest.raises(TraincastError, match="damaged"):
        parse_row({"op": "[1, 2", "between": 0})
    with pytest.raises(TraincastError, match="damaged"):
        parse_signature("[]")
