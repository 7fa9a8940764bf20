"""Published recommender steps: every row has a prediction, and the promised accuracy holds."""

from __future__ import annotations

import statistics

import pytest

from traincast.embeddings import Pooling, Table
from traincast.evaluation.distributed_embeddings import distributed_embeddings_cases
from traincast.evaluation.iterations import run_cases
from traincast.evaluation.multi_gpu_dlrm import GROUPS, dlrm_cases
from traincast.programs.published.distributed_embeddings_tables import Group, place
from traincast.programs.published.hugectr import dense_bound
from traincast.programs.published.nvidia_dlrm import Run, deal, nvidia_dlrm
from traincast.workload.validate import validate_workload


@pytest.fixture(scope="module")
def outcomes(shared_data):
    return run_cases(dlrm_cases(shared_data))


def _errors(outcomes, *groups: str) -> list[float]:
    names = {GROUPS[group] for group in groups}
    return [outcome.error_percent for outcome in outcomes if outcome.case.group in names]


def test_every_published_row_is_predicted(outcomes):
    assert len(outcomes) == 72 + 51
    assert {outcome.case.group for outcome in outcomes} == set(GROUPS.values())


def test_pytorch_rows_are_within_the_target(outcomes):
    errors = _errors(outcomes, "dle", "dle_old", "mlperf")
    assert len(errors) == 64
    assert statistics.median(map(abs, errors)) <= 15


def test_no_hugectr_step_is_faster_than_its_bound(outcomes):
    errors = _errors(outcomes, "hugectr", "pcie")
    assert len(errors) == 47
    assert max(errors) < 0


def test_distributed_embeddings_rows_are_within_the_target(shared_data):
    errors = [outcome.error_percent for outcome in run_cases(distributed_embeddings_cases(shared_data))]
    assert len(errors) == 7
    assert statistics.median(map(abs, errors)) <= 15
    assert max(map(abs, errors)) <= 30


def test_tables_are_dealt_as_nvidia_deals_them():
    # at most ceil(26 / 7) a GPU, none for GPU 0 of eight, the largest ones apart
    rows = [10**6 - i for i in range(26)]
    owners = deal(rows, 8)
    assert owners[0] == [] and sorted(t for held in owners for t in held) == list(range(26))
    assert max(map(len, owners)) == 4
    assert len({next(rank for rank, held in enumerate(owners) if t in held) for t in range(7)}) == 7
    four = deal(rows, 4)
    assert sum(map(len, four)) == 26 and max(map(len, four)) == 7


def test_rank_0_has_the_bottom_mlp_for_all_samples():
    tables = [Table(name=f"t{i}", rows=1000 + i, dim=128, pooling=Pooling.constant(1)) for i in range(26)]
    run = Run(gpus=8, global_batch=8 * 64, half=True, casts=True, synchronised=True)
    workload = nvidia_dlrm(tables, run)
    validate_workload(workload)
    first, other = (workload.programs[workload.ranks[rank]] for rank in (0, 1))
    products = {op.inputs[0].spec.shape[0] for op in first.ops if op.name == "aten::mm" and op.phase == 1}
    assert products == {64, 512}
    assert {op.inputs[0].spec.shape[0] for op in other.ops if op.name == "aten::mm" and op.phase == 1} == {64}
    assert not any("embedding" in op.name for op in first.ops)


def test_large_tables_are_cut_into_columns_and_memory_is_balanced():
    groups = [Group(1, 200_000_000, 128, (1, 100)), Group(64, 1000, 32, (1,))]
    held = place(groups, 32)
    slices = [part for parts in held for part in parts if part.rows == 200_000_000]
    assert (len(slices), {part.dim for part in slices}) == (32, {4})
    assert {len(parts) for parts in held} == {3}
    assert [len(parts) for parts in place(groups, 1)] == [65]  # one GPU: nothing is cut


def test_cross_layers_cost_more_than_dot_products():
    dot, cross = (dense_bound(512, cross=cross) for cross in (False, True))
    flops = [
        sum(
            2 * op.inputs[0].spec.numel * op.outputs[0].spec.shape[-1]
            for op in w.programs[0].ops
            if op.name == "aten::mm"
        )
        for w in (dot, cross)
    ]
    assert flops[1] > 2 * flops[0]
