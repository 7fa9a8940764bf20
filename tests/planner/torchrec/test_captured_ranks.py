"""TorchRec's sharded tables against two real processes with gloo: op by op, what is exchanged, the most memory held."""

from __future__ import annotations

import pytest

from tests.planner.torchrec.conftest import NEEDS_TORCHREC

pytest.importorskip("torch")

from tests.capturing.oracle import peak_bytes, tensors_of
from tests.capturing.real_pair import WORLD, exchanged, real_exchanged, real_pair
from tests.planner.torchrec import sharded_steps
from traincast.capturing import capture_distributed

pytestmark = NEEDS_TORCHREC

# What computes or exchanges. TorchRec makes numbers on a GPU otherwise than on a CPU: as pinned copies.
SEEN = (
    "fbgemm::", "c10d::", "aten::addmm", "aten::mm", "aten::cat", "aten::stack", "aten::split_with_sizes", "aten::sum",
    "aten::mean", "aten::pow", "aten::mul", "aten::div", "aten::clone", "aten::zeros_like", "aten::_foreach",
)  # fmt: skip
RUNS = 8
# FBGEMM's kernels for a GPU, and what it calls on any device.
LOOKUPS = {
    "fbgemm::split_embedding_codegen_forward_unweighted_cuda":
        "fbgemm::split_embedding_codegen_lookup_sgd_function_pt2",
    "fbgemm::split_embedding_backward_codegen_sgd_unweighted_exact_cuda":
        "fbgemm::split_embedding_backward_codegen_sgd_unweighted_pt2_wrapper",
}  # fmt: skip


@pytest.fixture(scope="module")
def workload():
    def make_step(batch, *, rank, world_size):
        return sharded_steps.sharded(rank, "cuda")

    return capture_distributed(make_step, world_size=WORLD, batch_size=sharded_steps.BATCH, name="x", rebatch=False)


def real_ops(nodes):
    """Name and tensors of the outermost ops that are looked at."""
    for node in nodes:
        if node.name.startswith(SEEN):
            yield node.name, [(shape, dtype) for shape, dtype in tensors_of(node) if shape or dtype == "float32"]
        else:
            yield from real_ops(node.children)


def captured_ops(program):
    for op in program.ops:
        tensors = [(t.spec.shape, t.spec.dtype) for t in op.inputs]
        if op.name.startswith(SEEN) and (op.name, tensors[0][1]) != ("aten::clone", "int64"):
            yield LOOKUPS.get(op.name, op.name), tensors


def same_op(ours, theirs):
    if ours[0] in LOOKUPS.values():  # lookups take more arguments that say how their tables are
        return ours[0] == theirs[0] and set(ours[1]) <= set(theirs[1])
    return ours == theirs


def places(captured, ran, same):
    """Where in the captured order what ran stands; all of it must."""
    found, at = set(), 0
    for one in ran:
        while at < len(captured) and not same(captured[at], one):
            at += 1
        assert at < len(captured), f"{one} ran, and was not captured after {captured[max(found, default=0)]}"
        found.add(at)
        at += 1
    return found


@pytest.fixture(scope="module")
def real(tmp_path_factory, workload):
    """Real runs until each captured op and collective was seen in one: PyTorch's traces of a step now and then lack
    some of its ops (a few of 53 in every second one), never the same."""
    program, runs = workload.programs[workload.ranks[0]], []
    ops, told = list(captured_ops(program)), exchanged(program)
    seen, met = set(), set()
    while len(runs) < RUNS and (len(seen) < len(ops) or len(met) < len(told)):
        runs.append(real_pair("tests.planner.torchrec.sharded_steps:sharded", tmp_path_factory.mktemp("pair")))
        seen |= places(ops, list(real_ops(runs[-1].trace)), same_op)
        met |= places(told, real_exchanged(runs[-1].trace), lambda ours, theirs: ours == theirs)
    return runs, seen, met


def test_a_rank_runs_the_ops_of_a_real_run(real, workload):
    captured = list(captured_ops(workload.programs[workload.ranks[0]]))
    assert [one for place, one in enumerate(captured) if place not in real[1]] == []
    assert sum(name in LOOKUPS.values() for name, _ in captured) == 4


def test_ranks_exchange_the_ids_and_rows_of_a_real_run(real, workload):
    """Tables whole and in rows; ranks with bags of other lengths know how many ids the other one sends."""
    captured = exchanged(workload.programs[workload.ranks[0]])
    assert [one for place, one in enumerate(captured) if place not in real[2]] == [] and len(captured) == 11
    assert workload.assumptions == ()


def test_a_rank_holds_the_memory_of_a_real_run(real, workload):
    held = peak_bytes(workload.programs[workload.ranks[0]])
    # what FBGEMM's ops take and keep until they return is not told from what they give: up to 4 % of the peak here
    peak = real[0][-1].peak
    assert held == pytest.approx(peak.peak_bytes - peak.scratch_bytes, rel=0.05)
