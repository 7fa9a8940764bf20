"""Embedding bags that were fused by an edit, against models that were written with one table-batched op."""

from __future__ import annotations

from collections import Counter

import pytest

import traincast
from tests.transforms.steps import edited_step, kernels_of
from traincast.ir.validate import validate_workload
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step
from traincast.utils.errors import TraincastError

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402


class _Tables:
    """Tables of a small recommender, as much of a DLRM's description as a table-batched lookup needs."""

    rows_per_table = table_rows = (1000, 2000, 3000, 4000)
    num_tables, embedding_dim, optimizer = 4, 32, "sgd"


def captured_recommender(*, batched, sparse=True, apart=False, weight_decay=0.0, mode="sum"):
    """A step of a small recommender with one bag per table, or one table-batched op for all."""
    from traincast_evaluation.zoo.define.embeddings import BatchedTables

    rows, width = _Tables.rows_per_table, _Tables.embedding_dim

    def make_step(batch_size):
        below = nn.Linear(16, width).cuda()
        above = nn.Linear((1 + len(rows)) * width, 1).cuda()
        options = {"mode": mode, "sparse": sparse, "device": "cuda"}
        tables = (
            [nn.EmbeddingBag(n, width, **options) for n in rows] if not batched else [BatchedTables(_Tables()).cuda()]
        )
        dense = [*below.parameters(), *above.parameters()]
        learned = dense if batched else [*dense, *(table.weight for table in tables)]
        steps = torch.optim.SGD(learned, lr=0.01, weight_decay=weight_decay)
        x = torch.empty(batch_size, 16, device="cuda")
        lookups = 10 * batch_size
        shares = 1 if batched else len(rows)
        indices = [torch.empty(lookups * len(rows) // shares, dtype=torch.int64, device="cuda") for _ in range(shares)]
        ends = batch_size * len(rows) + 1 if batched else batch_size
        offsets = [torch.empty(ends, dtype=torch.int64, device="cuda") for _ in range(shares)]

        def step():
            steps.zero_grad()
            found = [table(i, o) for table, i, o in zip(tables, indices, offsets, strict=True)]
            if batched:
                found = [found[0].view(batch_size, -1)]
            elif apart:
                found = [one.relu() for one in found]
            above(torch.cat([below(x), *found], 1)).square().mean().backward()
            steps.step()

        return step

    return traincast.capture(make_step, batch_size=256, name="recommender")


@pytest.fixture(scope="module")
def batched():
    return captured_recommender(batched=True)


@pytest.mark.parametrize("sparse", [True, False])
def test_fused_bags_are_those_of_a_model_with_table_batched_embeddings(batched, sparse):
    # given a step with one bag per table, its gradients sparse or dense, with its bags fused
    step = edited_step(captured_recommender(batched=False, sparse=sparse), "fuse-embedding-bags")
    validate_workload(step)

    # then, at its own size and another, it is the step of the model that was written with one table-batched op
    for size in (256, 1024):
        edited, mine = kernels_of(step.resized(batch_size=size))
        fresh, theirs = kernels_of(batched.resized(batch_size=size))
        assert mine == theirs
        assert edited.iteration == pytest.approx(fresh.iteration, rel=0.01)
        assert edited.memory.peak_bytes == pytest.approx(fresh.memory.peak_bytes, rel=0.02)


@pytest.mark.parametrize("model", ["dlrm-default", "dlrm-ddp"])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_fused_bags_of_a_saved_dlrm_are_its_table_batched_variant(model, mode):
    bag, batched = (
        load_single_gpu_step(Scenario(workload=model, embedding=kind, mode=mode)) for kind in ("bag", "batched")
    )
    (edited, mine), (fresh, theirs) = (kernels_of(step) for step in (edited_step(bag, "fuse-embedding-bags"), batched))
    assert mine == theirs
    assert edited.iteration == pytest.approx(fresh.iteration, rel=0.01)
    assert edited.memory.peak_bytes == pytest.approx(fresh.memory.peak_bytes, rel=0.02)


def test_bags_whose_results_go_different_ways_are_fused_too():
    step = edited_step(captured_recommender(batched=False, apart=True), "fuse-embedding-bags")
    validate_workload(step)
    kernels = kernels_of(step)[1]
    kinds = Counter(call.kind for call in kernels.elements() if call.family.name == "embedding")
    assert kinds == {"batched_forward": 1, "batched_backward_sgd": 1}


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"batched": True}, "no embedding bags"),
        ({"batched": False, "mode": "mean"}, "weighted or averaged"),
        ({"batched": False, "sparse": False, "weight_decay": 0.1}, "plain SGD"),
    ],
)
def test_bags_that_cannot_be_fused_say_why(written, reason):
    with pytest.raises(TraincastError, match=reason):
        edited_step(captured_recommender(**written), "fuse-embedding-bags")
