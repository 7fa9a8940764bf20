"""Published programs asked for by name."""

from __future__ import annotations

import pytest

from traincast.simulator.scenario.predict import Question, predict
from traincast.simulator.scenario.scaling import predict_scaling
from traincast.simulator.scenario.variant import Variant
from traincast.simulator.scenario.workloads import load, published_program
from traincast.utils.errors import TraincastError


def ask(name, on="dgx-a100", *, gpus=None, **variant):
    return predict(Question(workload=name, on=on, gpus=gpus, variant=Variant(**variant)))


def test_a_program_is_predicted_on_any_platform():
    # Given NVIDIA's DLRM on eight GPUs, 8192 samples each
    a100, h100 = (ask("nvidia-dlrm", on, gpus=8, dtype="fp16", batch_size=8192) for on in ("dgx-a100", "dgx-h100"))

    # then the newer node is faster
    assert 0 < h100.iteration < a100.iteration < 1


def test_the_batch_size_is_that_of_one_gpu():
    assert load("nvidia-dlrm", Variant(batch_size=512)).batch_size == 512
    assert ask("hugectr-dlrm", "h100", batch_size=512).iteration < ask("hugectr-dlrm", "h100").iteration


def test_a_type_that_the_program_chooses_is_said():
    answer = ask("hugectr-dlrm", "h100", batch_size=512)
    assert any("runs in fp16, as published" in warning for warning in answer.warnings)


def test_a_graph_leaves_the_host_one_launch_a_step():
    answer = ask("hugectr-dlrm", gpus=8, batch_size=6912)
    assert answer.host == pytest.approx(20e-6)
    assert answer.exposed_comm > 0


def test_the_host_is_the_one_of_the_program_unless_another_is_asked_for():
    question = Question(workload="distributed-embeddings-tiny", on="h100", host="server-2022")
    assert question.host_profile().name == "server-2022"
    assert Question(workload="nvidia-dlrm", on="h100").host_profile() is None
    tensorflow = Question(workload="distributed-embeddings-tiny", on="h100").host_profile()
    assert tensorflow.t2["HorovodAlltoall"] == 0.5e-3


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (Variant(seq_len=128), "leave out `seq_len`"),
        (Variant(optimizer="adam"), "leave out `optimizer`"),
        (Variant(attention="sdpa"), "leave out `attention`"),
        (Variant(embedding="bag"), "leave out `embedding`"),
        (Variant(mode="inference"), "has no inference"),
        (Variant(dtype="bf16"), "nvidia-dlrm runs in fp32, tf32, fp16"),
    ],
)
def test_choices_that_were_not_published_are_refused(variant, message):
    with pytest.raises(TraincastError, match=message):
        load("nvidia-dlrm", variant)


def test_a_misspelt_name_is_met_with_the_nearest():
    with pytest.raises(TraincastError, match=r"unknown model 'nvidia-dlmr'.*nvidia-dlrm"):
        load("nvidia-dlmr", Variant())


def test_built_in_models_and_files_are_no_published_programs():
    assert published_program("bert-large") is None
    assert published_program("nvidia-dlrm.tc") is None
    assert published_program("nvidia-dlrm").name == "nvidia-dlrm"


def test_a_curve_divides_the_published_batch():
    question = Question(workload="nvidia-dlrm", on="dgx-a100", variant=Variant(dtype="tf32"))
    curve = predict_scaling(question, [1, 8], "strong")
    assert [point.global_batch for point in curve.points] == [65536, 65536]
    assert curve.points[1].throughput > curve.points[0].throughput
