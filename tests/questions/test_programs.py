"""Which program trains a recommender on many GPUs."""

from __future__ import annotations

import pytest

from traincast.errors import TraincastError
from traincast.questions.predict import Question, predict
from traincast.questions.programs import choices
from traincast.questions.variant import Variant
from traincast.workload.ops import Phase


def ask(model, program=None, *, gpus=8, on="dgx-a100", **variant):
    return predict(Question(workload=model, on=on, gpus=gpus, program=program, variant=Variant(**variant)))


def test_the_default_is_torchrecs_and_says_so():
    answer = ask("dlrm-mlperf", batch_size=512)
    (said,) = [warning for warning in answer.warnings if "hybrid parallel" in warning]
    assert said.endswith("this is TorchRec's program, `program` has others: torchrec-pipelined, hugectr, nvidia")
    assert answer.iteration == ask("dlrm-mlperf", "torchrec", batch_size=512).iteration


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
    answer = ask(model, program, batch_size=512)
    assert (answer.workload.name, answer.gpus, answer.workload.batch_size) == (name, 8, 512)
    assert any(f"{model} as {name} runs it" in warning for warning in answer.warnings)


@pytest.mark.parametrize(
    ("model", "program", "message"),
    [
        ("dlrm-v2", "nvidia", r"dlrm-v2 was not published with .*'nvidia'.*torchrec, torchrec-pipelined, hugectr$"),
        ("dlrm-ddp", "hugectr", r"dlrm-ddp was not published"),
        ("bert-large", "torchrec", r"bert-large has no programs to choose from"),
        ("hugectr-dlrm", "hugectr", r"hugectr-dlrm has no programs to choose from"),
        ("dlrm-v2", "torchrek", r"unknown program 'torchrek'. Did you mean torchrec"),
    ],
)
def test_a_program_that_a_model_does_not_have_is_refused(model, program, message):
    with pytest.raises(TraincastError, match=message):
        ask(model, program)


def test_every_recommender_has_torchrecs_programs():
    assert choices("mine") == ("torchrec", "torchrec-pipelined")
    assert ask("dlrm-ddp", "torchrec-pipelined", gpus=2, batch_size=64).gpus == 2
