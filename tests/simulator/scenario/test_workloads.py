"""Names and files become workloads in the variant asked for."""

from __future__ import annotations

import pytest

from traincast.ir.file import save_workload
from traincast.ir.ops import Phase
from traincast.models.catalog import load_model
from traincast.simulator.scenario.predict import load_step
from traincast.simulator.scenario.resolved import resolve
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step
from traincast.utils.errors import TraincastError

DLRM = """
bottom_mlp: [4, 8, 16]
top_mlp: [32, 1]
embedding_dim: 16
batch_size: 64
rows_per_table: [1000, 2000]
lookups_per_table: [2, 1]
"""


@pytest.fixture
def described(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(DLRM)
    return path


def test_a_built_in_model_by_name():
    workload = load_single_gpu_step(Scenario(workload="resnet50", batch_size=4, mode="inference"))

    assert (workload.name, workload.batch_size, workload.mode) == ("resnet50", 4, "inference")


def test_a_saved_workload_by_file(tmp_path):
    save_workload(load_model("vgg13"), tmp_path / "step.tc")

    assert load_single_gpu_step(Scenario(workload=tmp_path / "step.tc", batch_size=3)).batch_size == 3
    with pytest.raises(TraincastError, match=r"step.tc holds its own optimizer"):
        load_single_gpu_step(Scenario(workload=tmp_path / "step.tc", optimizer="sgd"))


@pytest.mark.parametrize("saved", [True, False])
def test_the_optimizer_of_a_held_step_can_be_left_out(tmp_path, saved):
    whole = load_model("vgg13")
    save_workload(whole, tmp_path / "step.tc")

    step = load_single_gpu_step(Scenario(workload=tmp_path / "step.tc" if saved else whole, optimizer="none"))

    assert Phase.OPTIMIZER in whole.programs[0].columns.scope_phase
    assert Phase.OPTIMIZER not in step.programs[0].columns.scope_phase
    assert (
        step.programs[0].num_ops
        == load_single_gpu_step(Scenario(workload="vgg13", optimizer="none")).programs[0].num_ops
    )


def test_what_a_workload_itself_does_not_have_is_refused():
    with pytest.raises(TraincastError, match="workload 'vgg13' keeps the ops it was captured with"):
        load_single_gpu_step(Scenario(workload=load_model("vgg13"), attention="sdpa"))


def test_a_dlrm_by_its_description(described):
    workload = load_single_gpu_step(Scenario(workload=described))

    assert (workload.name, workload.batch_size, len(workload.ranks)) == ("mine", 64, 1)


def test_a_workload_itself_is_only_resized():
    workload = load_model("vgg13")

    assert load_single_gpu_step(Scenario(workload=workload)) is workload
    assert load_single_gpu_step(Scenario(workload=workload, batch_size=7)).batch_size == 7


def test_a_compiled_step_has_fewer_ops():
    eager, compiled = (
        load_single_gpu_step(Scenario(workload="bert-large", mode="inference", compiled=c)) for c in (False, True)
    )

    assert compiled.programs[0].num_ops < eager.programs[0].num_ops
    assert "compiled" in compiled.meta


def on_gpus(source, **fields):
    """A step on GPUs of a DGX A100, and the first note on it."""
    resolved = resolve(Scenario(workload=str(source), on="dgx-a100", **fields))
    step, notes = load_step(resolved)
    return step, next((note for note in notes if note), "")


@pytest.mark.parametrize("gpus", [None, 1])
def test_a_dlrm_of_one_gpu_is_not_sharded(described, gpus):
    workload, assumed = on_gpus(described, gpus=gpus)

    assert (len(workload.ranks), assumed) == (1, "")


def test_a_dlrm_of_several_gpus_is_sharded_and_says_so(described):
    workload, assumed = on_gpus(described, gpus=2)

    assert len(workload.ranks) == 2
    assert assumed.startswith("mine is taken as hybrid parallel: FBGEMM tables placed greedy by lookups")


def test_inference_of_a_dlrm_is_not_sharded(described):
    workload, assumed = on_gpus(described, mode="inference", gpus=4)

    assert (len(workload.ranks), assumed) == (4, "")
    assert len(workload.programs) == 1


def test_any_other_model_is_data_parallel():
    workload, assumed = on_gpus("vgg13", batch_size=2, gpus=3)

    assert (workload.ranks, assumed) == ((0, 0, 0), "")


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_told_from_a_model_and_where_it_goes(tmp_path, name):
    path = tmp_path / name
    path.write_text('{"schemaVersion": 1, "traceEvents": []}')

    with pytest.raises(TraincastError, match=r"is a trace of what ran: 'traincast trace' says"):
        resolve(Scenario(workload=str(path), on="v100"))
