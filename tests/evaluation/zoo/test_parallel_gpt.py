"""GPT-2 divided over GPUs: what is exchanged, and what is left of the work."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from traincast.capturing import capture_distributed
from traincast.hardware import load_platform
from traincast.simulator.prediction.prediction import predict_step
from traincast.utils.errors import TraincastError
from traincast_evaluation.zoo.build.parallel_gpt import make_pipeline_step, make_tensor_parallel_step
from traincast_evaluation.zoo.define.sizes import LanguageModelSizes

CONFIG = LanguageModelSizes(num_layers=4, hidden_size=64, num_heads=4, max_seq_len=32, vocab_size=1000)
BATCH, LENGTH, GPUS = 2, 32, 4


def captured(make, **options):
    return capture_distributed(
        make(CONFIG), world_size=GPUS, batch_size=BATCH, seq_len=LENGTH, name="x", rebatch=False, **options
    )


def exchanged(program):
    return [op for op in program.ops if op.signature.scalar("collective") is not None]


def test_every_layer_divided():
    workload = captured(make_tensor_parallel_step)
    assert workload.ranks == (0,) * GPUS
    program = workload.programs[0]
    hidden = 4 * BATCH * LENGTH * CONFIG.hidden_size
    sizes = [op.signature.scalar("bytes") for op in exchanged(program)]
    # two sums a block each way, the token embeddings and the gradient of the head's input
    assert sizes.count(hidden) == 4 * CONFIG.num_layers + 2
    # the loss: maxima, the labels' scores and sums of exponentials, one number per token
    assert sizes.count(4 * BATCH * (LENGTH - 1)) == 3
    # a quarter of the columns, then of the rows, of every product
    products = [[t.spec.shape for t in op.inputs[1:]] for op in program.ops if op.name == "aten::addmm"][:4]
    assert [right for _, right in products] == [(64, 48), (16, 64), (64, 64), (64, 64)]


def test_layers_one_after_the_other():
    workload = captured(make_pipeline_step)
    ends = [
        [(op.signature.scalar("source"), op.signature.scalar("target")) for op in exchanged(workload.programs[p])]
        for p in workload.ranks
    ]
    assert ends == [
        [(0, 1), (1, 0)],
        [(0, 1), (1, 2), (2, 1), (1, 0)],
        [(1, 2), (2, 3), (3, 2), (2, 1)],
        [(2, 3), (3, 2)],
    ]
    assert {op.signature.scalar("bytes") for p in workload.programs for op in exchanged(p)} == {4 * BATCH * LENGTH * 64}


def test_a_pipeline_of_one_micro_batch_takes_as_long_as_all_stages_together():
    result = predict_step(captured(make_pipeline_step), load_platform("dgx-a100"))
    assert len(result.ranks) == GPUS
    # every GPU is busy for its own stage only and waits for the others for the rest
    assert all(rank.compute < 0.6 * result.iteration for rank in result.ranks)
    assert result.exposed_comm > 0


@pytest.mark.parametrize("make", [make_tensor_parallel_step, make_pipeline_step])
def test_what_cannot_be_divided_is_refused(make):
    with pytest.raises(TraincastError, match="cannot be divided over 3 GPUs"):
        capture_distributed(make(CONFIG), world_size=3, batch_size=2, seq_len=8, name="x", rebatch=False)
