"""What-ifs and predictions are one: the step before is the one that `predict` answers for, and so is a compiled one."""

from __future__ import annotations

import json

import pytest

import traincast
from traincast.models.placement.plan import Placement, Plan, convert_plan_to_json
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import make_scenario, resolve
from traincast.utils.errors import TraincastError

ASKED = [
    ("dlrm-ddp", "a100-80gb", {}),
    ("dlrm-ddp", "dgx-a100", {"gpus": 2}),
    ("dlrm-ddp", "dgx-a100", {"gpus": 2, "mode": "inference"}),
    ("dlrm-mlperf", "dgx-a100", {"gpus": 8, "program": "hugectr"}),
    ("din", "dgx-a100", {"gpus": 2}),
    ("deepfm", "dgx-a100", {"gpus": 2, "batch_size": 512, "optimizer": "none"}),
    ("vgg13", "dgx-a100", {"gpus": 2, "dtype": "bf16"}),
    ("mpt-125m", "a100-80gb", {"batch_size": 2, "seq_len": 256}),
]
COMPILED = [
    ("dlrm-ddp", "a100-80gb", {}),
    ("dlrm-ddp", "a100-80gb", {"mode": "inference"}),
    ("din", "dgx-a100", {"gpus": 2}),
    ("vgg13", "v100", {"batch_size": 8}),
    ("mpt-125m", "a100-80gb", {"batch_size": 2, "seq_len": 256}),
]
NOT_COMPILED = [
    ("dlrm-ddp", "dgx-a100", {"gpus": 2}),
    ("dlrm-mlperf", "dgx-a100", {"gpus": 8, "program": "hugectr"}),
    ("hugectr-dlrm", "dgx-a100", {"gpus": 8}),
]


@pytest.mark.parametrize(("name", "on", "options"), ASKED)
def test_the_step_before_is_the_one_that_predict_answers_for(name, on, options):
    asked, before = (
        traincast.predict(name, on=on, **options),
        predict(resolve(make_scenario({"workload": name, "on": on, **options}))),
    )
    assert (before.iteration, before.interval) == (asked.iteration, asked.interval)
    assert before.memory.peak_bytes == asked.memory.peak_bytes


@pytest.mark.parametrize(("name", "on", "options"), COMPILED)
def test_the_edit_compile_gives_the_step_of_predict_compiled(name, on, options):
    asked = traincast.predict(name, on=on, compiled=True, **options)
    edited = traincast.whatif(name, on=on, edits=["compile"], **options)
    assert edited.after.iteration == asked.iteration != edited.before.iteration
    assert edited.after.memory.peak_bytes == asked.memory.peak_bytes


@pytest.mark.parametrize(("name", "on", "options"), NOT_COMPILED)
def test_what_predict_does_not_compile_the_edit_does_not_either(name, on, options):
    with pytest.raises(TraincastError) as asked:
        traincast.predict(name, on=on, compiled=True, **options)
    with pytest.raises(TraincastError) as edited:
        traincast.whatif(name, on=on, edits=["compile"], **options)
    assert "compiled" in str(asked.value) and "leave" in str(edited.value)


def test_a_compiled_step_stays_compiled_under_edits_of_its_description():
    result = traincast.whatif("dlrm-ddp", on="v100", edits=["embedding-dim=32"], compiled=True)
    assert "compiled" in result.before.workload.meta and "compiled" in result.after.workload.meta


@pytest.mark.parametrize("edit", ["checkpoint=layers", "fuse-elementwise"])
def test_what_excludes_compile_is_refused_of_a_step_that_is_compiled_from_the_start(edit):
    with pytest.raises(TraincastError, match="leave out `compiled`"):
        traincast.whatif("vgg13", on="v100", edits=[edit], compiled=True)


def test_compiling_a_compiled_step_changes_nothing():
    result = traincast.whatif("dlrm-ddp", on="v100", edits=["compile"], compiled=True)
    assert result.verdict.startswith("nothing changes")


@pytest.mark.parametrize("more", [[], ["program=hugectr"]])
def test_a_published_program_has_no_other_tables(more):
    options = {} if more else {"program": "hugectr"}
    with pytest.raises(TraincastError, match="one published program"):
        traincast.whatif("dlrm-v2", on="dgx-h100", edits=["embedding-dim=64", *more], gpus=8, **options)


def test_edits_of_a_description_keep_the_mode_on_several_gpus():
    result = traincast.whatif("dlrm-ddp", on="dgx-a100", edits=["embedding-dim=32"], gpus=2, mode="inference")
    assert result.before.workload.mode == result.after.workload.mode == "inference"


@pytest.fixture
def plan_of_two(tmp_path):
    """A plan of rows for the eight tables of `dlrm-ddp` on two GPUs."""
    names = tuple(f"table{number}" for number in range(8))
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(convert_plan_to_json(Plan(names, (Placement.make_row_wise(2),) * 8, 2))))
    return file


def test_a_plan_keeps_the_choice_of_no_update_and_of_the_program(plan_of_two):
    options = {"gpus": 2, "optimizer": "none", "program": "torchrec-pipelined"}
    result = traincast.whatif("dlrm-ddp", on="dgx-a100", edits=[f"plan={plan_of_two}"], **options)
    assert _phases(result.after) == _phases(result.before)
    unpipelined = {"gpus": 2, "optimizer": "none"}
    other = traincast.whatif("dlrm-ddp", on="dgx-a100", edits=[f"plan={plan_of_two}"], **unpipelined)
    assert other.after.iteration != result.after.iteration != result.before.iteration


def _phases(result):
    return {int(phase) for program in result.workload.programs for phase in program.columns.scope_phase}


@pytest.mark.parametrize("options", [{"gpus": 4}, {"gpus": 2, "mode": "inference"}, {"gpus": 2, "compiled": True}])
def test_a_plan_for_another_step_is_refused(plan_of_two, options):
    with pytest.raises(TraincastError, match=r"the `plan` is for 2 ranks|leave out"):
        traincast.whatif("dlrm-ddp", on="dgx-a100", edits=[f"plan={plan_of_two}"], **options)


@pytest.mark.parametrize(("mode", "dtype"), [("training", "bf16"), ("inference", "fp16")])
def test_a_described_recommender_in_16_bits_is_the_captured_one(tmp_path, mode, dtype):
    # given dlrm-default once more, in a file of one's own
    file = tmp_path / "mine.yaml"
    file.write_text(MINE)

    # then 16 bits of the file, and of the description that an edit leaves as it is, are those of the capture
    options = {"mode": mode, "batch_size": 4096}
    built_in = traincast.predict("dlrm-default", on="a100-80gb", dtype=dtype, **options)
    edited = traincast.whatif("dlrm-default", on="a100-80gb", edits=["embedding-dim=64"], dtype=dtype, **options)
    mine = traincast.whatif(file, on="a100-80gb", edits=[f"dtype={dtype}"], **options)
    for result in (edited.after, mine.after):
        assert result.iteration == pytest.approx(built_in.iteration, rel=0.01)
        assert result.memory.peak_bytes == pytest.approx(built_in.memory.peak_bytes, rel=0.02)


MINE = """
bottom_mlp: [512, 512, 64]
top_mlp: [1024, 1024, 1024, 1]
embedding_dim: 64
num_tables: 8
rows_per_table: 1000000
lookups_per_table: 100
loss: mse
"""
