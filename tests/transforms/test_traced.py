"""Edits of steps that were made from traces: tensors have forms there, but nobody knows which op uses whose result."""

from __future__ import annotations

import json

import pytest

from tests.traces.timelines import event, kernel, launch, step
from tests.transforms.steps import edited_step, kernels_of
from traincast.ir.validate import validate_workload
from traincast.traces.replay.analysis import analyse_traces
from traincast.traces.replay.workload import trace_workload
from traincast.utils.errors import TraincastError

ROWS, WIDTH, BATCH, LOOKUPS = (1000, 2000, 3000, 4000), 32, 256, 2560


class _Recording:
    """Events of a step, one op after the other; an op in `inside` of another launches one kernel."""

    def __init__(self):
        self.events, self.at, self.number = [], 10, 0

    def op(self, name, dims, *, inside="", types=None, tid=1):
        """An op of tensors of these shapes."""
        known = {"Input Dims": dims, "Input type": types or ["float"] * len(dims)}
        self.number += 1
        if inside:
            self.events.append(event("cpu_op", inside, self.at, 18, tid))
        self.events += [event("cpu_op", name, self.at + 1, 15, tid, **known), launch(self.number, self.at + 5, tid=tid),
                        kernel(self.number, self.at + 12, 5)]  # fmt: skip
        self.at += 20


def _recommender(tmp_path, *, update="aten::add_"):
    """A traced step of a recommender with one bag a table, sparse gradients and an update of one table at a time."""
    run, indices = _Recording(), ["float", "long int", "long int"]
    for rows in ROWS:
        run.op("aten::_embedding_bag", [[rows, WIDTH], [LOOKUPS], [BATCH]], inside="aten::embedding_bag", types=indices)
    run.op("aten::addmm", [[1], [BATCH, 4 * WIDTH], [4 * WIDTH, 1]], inside="aten::linear")
    run.op("aten::mm", [[4 * WIDTH, BATCH], [BATCH, 1]], inside="AddmmBackward0", tid=2)
    for _ in ROWS:
        run.op("aten::_embedding_bag_sparse_backward", [[BATCH, WIDTH], [LOOKUPS], [BATCH]],
               inside="EmbeddingBagBackward0", types=indices, tid=2)  # fmt: skip
    for rows in ROWS:
        run.op(update, [[rows, WIDTH], [rows, WIDTH]], inside="Optimizer.step#SGD.step")
    run.op("aten::add_", [[1, 4 * WIDTH], [1, 4 * WIDTH]], inside="Optimizer.step#SGD.step")
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": step(*run.events, length=run.at + 100)}))
    return trace_workload(analyse_traces([path]), name="traced")


def _lookups(step):
    return {call: n for call, n in kernels_of(step)[1].items() if call.family.name == "embedding"}


def test_bags_of_a_trace_become_the_kernels_of_a_capture_with_table_batched_embeddings(tmp_path):
    pytest.importorskip("torch")
    from tests.transforms.test_bags import captured_recommender

    # given a traced step with one bag a table, and a capture of the model with one table-batched op
    traced = _recommender(tmp_path)
    fused = edited_step(traced, "fuse-embedding-bags")
    validate_workload(fused)

    # then the lookups are those of the capture, the updates of the tables are part of them, and all else stays
    assert _lookups(fused) == _lookups(captured_recommender(batched=True))
    (mine, _), (before, _) = kernels_of(fused), kernels_of(traced)
    assert mine.iteration < before.iteration
    names = [op.name for op in fused.programs[0].ops]
    assert names == ["traincast::batched_embedding_forward", "aten::addmm", "aten::mm",
                     "traincast::batched_embedding_backward_sgd", "aten::add_"]  # fmt: skip


def test_bags_of_a_trace_that_another_optimizer_updates_are_refused(tmp_path):
    with pytest.raises(TraincastError, match=r"updated by aten::addcdiv_; .* plain SGD"):
        edited_step(_recommender(tmp_path, update="aten::addcdiv_"), "fuse-embedding-bags")


@pytest.mark.parametrize(
    "edit", ["dtype=bf16", "dtype=bf16-weights", "checkpoint=layers", "compile", "fuse-elementwise"]
)
def test_edits_that_follow_tensors_refuse_a_trace(tmp_path, edit):
    with pytest.raises(TraincastError, match="as a trace does; capture"):
        edited_step(_recommender(tmp_path), edit)
