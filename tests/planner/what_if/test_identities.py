"""Laws that hold of every edit: it is the prediction of what it says, one that changes nothing gains nothing, what is
said of a change adds up."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

import traincast
from traincast.planner.what_if.edits.registry import parse_edits
from traincast.planner.what_if.result import prepare_both_sides, split_parts
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import resolve
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError

DESCRIBED = """
bottom_mlp: [13, 64, 32]
top_mlp: [64, 1]
embedding_dim: 32
rows_per_table: [1000, 2000, 500]
lookups_per_table: [1, 4, 8]
"""
LAYOUT = {"gpus": 16, "tp": 2, "micro_batch": 1, "global_batch": 64}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Steps of every kind: built-in, captured, described."""
    file = tmp_path_factory.mktemp("laws") / "mine.yaml"
    file.write_text(DESCRIBED)
    return {"dlrm": "dlrm-ddp", "model": "din", "capture": traincast.load("dlrm-ddp"), "yaml": str(file),
            "transformer": "mpt-125m"}  # fmt: skip


ASKED = [
    ("dlrm", "batch-size=300", {"batch_size": 300}),
    ("model", "batch-size=300", {"batch_size": 300}),
    ("capture", "batch-size=300", {"batch_size": 300}),
    ("yaml", "batch-size=300", {"batch_size": 300}),
    ("dlrm", "on=h100", {"on": "h100"}),
    ("capture", "on=t4", {"on": "t4"}),
    ("yaml", "on=mi300x", {"on": "mi300x"}),
    ("dlrm", "gpus=4", {"gpus": 4}),
    ("model", "gpus=2", {"gpus": 2}),
    ("model", "dtype=tf32", {"dtype": "tf32"}),
    ("dlrm", "dtype=bf16", {"dtype": "bf16"}),
    ("dlrm", "embedding=fbgemm", {"embedding": "fbgemm"}),
    ("dlrm", "optimizer=none", {"optimizer": "none"}),
    ("capture", "optimizer=none", {"optimizer": "none"}),
    ("dlrm", "clock-mhz=900", {"clock_mhz": 900.0}),
    ("capture", "cuda-graph", {"cuda_graph": True}),
    ("dlrm", "cuda-graph", {"cuda_graph": True}),
    ("yaml", "compile", {"compiled": True}),
    ("capture", "compile", {"compiled": True}),
    ("dlrm", "host=server-2022", {"host": "server-2022"}),
    ("transformer", "batch-size=2", {"batch_size": 2}),
    ("transformer", "seq-len=512", {"seq_len": 512}),
]


@pytest.mark.parametrize(("kind", "edit", "options"), ASKED)
def test_an_edit_is_the_prediction_of_what_it_says(sources, kind, edit, options):
    start = {"batch_size": 1, "seq_len": 256} if kind == "transformer" else {}
    asked = traincast.predict(sources[kind], **{"on": "a100-80gb", **start, **options})
    edited = traincast.whatif(sources[kind], on="a100-80gb", edits=[edit], **start)
    assert edited.after.iteration == asked.iteration
    assert edited.after.interval == asked.interval
    assert edited.after.memory.by_kind == asked.memory.by_kind


def test_a_described_model_is_what_its_file_says_now(tmp_path):
    file = tmp_path / "mine.yaml"
    for width in ("32", "1024"):
        file.write_text(DESCRIBED.replace("32", width))
        result = traincast.whatif(file, on="v100", edits=["cuda-graph"])
        assert result.before.iteration == traincast.predict(file, on="v100").iteration


IDLE = {
    "dlrm": ["on=a100-80gb", "gpus=1", "batch-size=x1", "host-speed=1", "launch-speed=1", "memory-speed=1",
             "clock-speed=1", "speed:gemm=1", "speed:aten::addmm=1", "embedding-dim=128", "pooling=x1", "tables=8",
             "rows=x1", "mlp-width=1", "dtype=fp32", "accumulate=1", "stream:aten::addmm=0"],
    "capture": ["on=a100-80gb", "batch-size=x1", "accumulate=1", "speed:embedding=1", "stream:aten::relu=0",
                "pooling=x1", "rows=x1"],
    "yaml": ["embedding-dim=32", "pooling=x1", "rows=x1", "tables=3", "batch-size=x1", "dtype=fp32"],
    "model": ["batch-size=x1", "dtype=fp32"],
}  # fmt: skip
"""Edits that leave a step as it is."""


@pytest.mark.parametrize(("kind", "edit"), [(kind, edit) for kind, edits in IDLE.items() for edit in edits])
def test_an_edit_that_changes_nothing_gains_nothing(sources, kind, edit):
    _assert_nothing(traincast.whatif(sources[kind], on="a100-80gb", edits=[edit]))


@pytest.mark.parametrize(
    "edit", ["gpus=2", "link-speed=1", "nic-speed=1", "link-latency=1", "overlap=on", "on=dgx-a100"]
)
def test_an_edit_of_exchanges_that_changes_nothing_gains_nothing(edit):
    _assert_nothing(traincast.whatif("vgg13", on="dgx-a100", edits=[edit], gpus=2, batch_size=4))


@pytest.mark.parametrize("edit", ["program=torchrec", "gpus=2", "link-speed=1"])
def test_an_edit_of_sharded_tables_that_changes_nothing_gains_nothing(edit):
    _assert_nothing(traincast.whatif("dlrm-ddp", on="dgx-a100", edits=[edit], gpus=2))


@pytest.mark.parametrize(
    "edit", ["tp=2", "pp=1", "cp=1", "gpus=16", "batch-size=1", "global-batch=64", "on=dgx-h100", "dtype=bf16",
             "layers=12", "link-speed=1", "host-speed=1"],
)  # fmt: skip
def test_an_edit_of_a_layout_that_changes_nothing_gains_nothing(edit):
    _assert_nothing(traincast.whatif("mpt-125m", on="dgx-h100", edits=[edit], **LAYOUT))


@pytest.mark.parametrize("edit", ["cuda-graph", "compile"])
def test_what_a_step_is_from_the_start_it_does_not_become(edit):
    options = {"cuda_graph": edit == "cuda-graph", "compiled": edit == "compile"}
    _assert_nothing(traincast.whatif("dlrm-ddp", on="v100", edits=[edit], **options))


def _assert_nothing(result):
    assert result.change.seconds == 0 and result.change.sigma == 0 and result.per_sample.ratio == 1
    low, high = result.change.interval
    assert low <= 0 <= high and not result.change.certain
    assert result.after.needed_bytes == result.before.needed_bytes
    assert "nothing changes" in result.verdict


POOL = {
    "dlrm": ["batch-size=x2", "embedding-dim=32", "pooling=3", "rows=x2", "drop-table=1", "dtype=bf16", "on=v100",
             "cuda-graph", "accumulate=2", "memory-speed=2", "speed:gemm=3", "optimizer=none", "compile", "gpus=2"],
    "capture": ["batch-size=100", "drop-table=2+0", "add-table=900x10", "dtype=bf16", "checkpoint=layers", "cuda-graph",
                "compile", "accumulate=3", "on=h100", "host-speed=2", "fuse-elementwise", "optimizer=adam", "gpus=2"],
    "yaml": ["batch-size=64", "tables=5", "add-table=70x2", "mlp-width=2", "dtype=amp", "accumulate=2", "compile",
             "clock-speed=2", "rows=500", "top-mlp=32-1", "cuda-graph"],
}  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_edits_together_are_one_change_in_any_order_and_what_is_said_of_it_adds_up(sources, seed):
    draw = Random(seed)
    kind = draw.choice(sorted(POOL))
    edits = draw.sample(POOL[kind], draw.randint(2, 4))
    outcomes = {_outcome(sources[kind], order) for order in draw.sample(list(permutations(edits)), 2)}
    assert len(outcomes) == 1, edits


def _outcome(source, edits):
    """Time and memory of an edited step; of one that is rejected, how many line breaks are in the reason."""
    try:
        result = traincast.whatif(source, on="a100-80gb", edits=edits)
    except TraincastError as error:
        return str(error).count("\n")
    assert result.change.seconds == result.after.iteration - result.before.iteration
    for step in (result.before, result.after):
        _assert_whole(step)
    alone = predict(prepare_both_sides(resolve(Scenario(workload=source, on="a100-80gb")), parse_edits(edits))[1])
    assert alone.iteration == result.after.iteration
    return result.after.iteration, result.after.needed_bytes


def _assert_whole(step):
    parts = split_parts(step)
    if isinstance(step, Prediction):
        active, idle = parts["device active"], parts["device idle"]
        assert active + idle == pytest.approx(step.iteration, rel=1e-9)
        assert 0 <= parts["exposed communication"] <= active  # a part of it
        assert sum(step.memory.by_kind.values()) == step.memory.peak_bytes
    else:
        assert sum(parts.values()) == pytest.approx(step.iteration, rel=1e-9)
