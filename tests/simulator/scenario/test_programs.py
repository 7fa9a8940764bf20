"""Which program trains a recommender on many GPUs."""

from __future__ import annotations

import pytest

from traincast.ir.ops import Phase
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import list_programs
from traincast.utils.errors import TraincastError


def ask(model, program=None, *, gpus=8, on="dgx-a100", **variant):
    return predict(Scenario(workload=model, on=on, gpus=gpus, program=program, **variant))


def test_the_default_is_torchrecs_and_says_so():
    result = ask("dlrm-mlperf", batch_size=512)
    (said,) = [warning for warning in result.warnings if "hybrid parallel" in warning]
    assert said.endswith("this is TorchRec's program, `program` has others: torchrec-pipelined, hugectr, nvidia")
    assert result.iteration == ask("dlrm-mlperf", "torchrec", batch_size=512).iteration


def test_a_pipeline_distributes_the_next_batch_beside_the_step():
    plain, pipelined = (ask("dlrm-mlperf", program, batch_size=6912) for program in ("torchrec", "torchrec-pipelined"))
    # the step is shorter, and no kernel was left out
    assert 0.8 * plain.iteration < pipelined.iteration < plain.iteration
    assert len(pipelined.timeline.launches) == len(plain.timeline.launches)
    program = pipelined.timeline.program
    streams = program.columns.op_stream[program.op_phase == Phase.INPUT]
    assert set(streams.tolist()) == {0, 16}  # the wait for the batch, and everything of the next one


@pytest.mark.parametrize(
    ("model", "program", "name"),
    [
        ("dlrm-mlperf", "hugectr", "hugectr-dlrm"),
        ("dlrm-mlperf", "nvidia", "nvidia-dlrm-mlperf"),
        ("dlrm-v2", "hugectr", "hugectr-dlrm-dcnv2"),
    ],
)
def test_published_programs_train_the_models_they_were_published_with(model, program, name):
    result = ask(model, program, batch_size=512)
    assert (result.workload.name, result.gpus, result.workload.batch_size) == (name, 8, 512)
    assert any(f"{model} as {name} runs it" in warning for warning in result.warnings)


@pytest.mark.parametrize(
    ("model", "program", "message"),
    [
        ("dlrm-v2", "nvidia", r"dlrm-v2 was not published with .*'nvidia'.*torchrec, torchrec-pipelined, hugectr$"),
        ("dlrm-ddp", "hugectr", r"dlrm-ddp was not published"),
        ("bert-large", "torchrec", r"bert-large has no programs to choose from"),
        ("hugectr-dlrm", "hugectr", r"`program` is not used here: hugectr-dlrm is one published program"),
        ("dlrm-v2", "torchrek", r"unknown program 'torchrek'. Did you mean torchrec"),
    ],
)
def test_a_program_that_a_model_does_not_have_is_refused(model, program, message):
    with pytest.raises(TraincastError, match=message):
        ask(model, program)


def test_every_recommender_has_torchrecs_programs():
    assert list_programs("mine") == ("torchrec", "torchrec-pipelined")
    assert ask("dlrm-ddp", "torchrec-pipelined", gpus=2, batch_size=64).gpus == 2


@pytest.mark.parametrize("model", ["hstu", "onetrans", "din", "deepfm", "wide-deep"])
def test_modern_recommenders_shard_their_tables(model):
    # Given a recommender with fused tables, when it runs on eight GPUs, then TorchRec's program runs and says so
    result = ask(model)
    assert len(result.workload.ranks) == 8
    assert any(f"{model} is taken as sharded" in said and "torchrec-pipelined" in said for said in result.warnings)
    assert result.exposed_comm > 0
    # and the next batch may be distributed alongside the step, which is not longer for it
    assert ask(model, "torchrec-pipelined").iteration < 1.001 * result.iteration


def test_a_program_that_a_recommender_was_not_published_with_is_refused():
    with pytest.raises(TraincastError, match="deepfm was not published with the program 'hugectr'"):
        ask("deepfm", "hugectr")
    with pytest.raises(TraincastError, match="ncf has no programs to choose from"):
        ask("ncf", "torchrec")


def test_they_run_at_other_sizes_in_half_precision_and_on_numbers_of_gpus_that_fit_no_node():
    short, long = (ask("hstu", gpus=2, seq_len=length, batch_size=4, dtype="bf16").iteration for length in (64, 256))
    assert short < long
    with pytest.raises(TraincastError, match="multiple of 8"):
        ask("din", gpus=12)
