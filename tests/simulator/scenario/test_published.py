"""Published programs asked for by name."""

from __future__ import annotations

import pytest

from traincast.simulator.scenario.kinds import find_source_kind
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import resolve
from traincast.simulator.scenario.scaling import predict_scaling
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step
from traincast.utils.errors import TraincastError


def ask(name, on="dgx-a100", *, gpus=None, **variant):
    return predict(Scenario(workload=name, on=on, gpus=gpus, **variant))


def test_a_program_is_predicted_on_any_platform():
    # Given NVIDIA's DLRM on eight GPUs, 8192 samples each
    a100, h100 = (ask("nvidia-dlrm", on, gpus=8, dtype="fp16", batch_size=8192) for on in ("dgx-a100", "dgx-h100"))

    # then the newer node is faster
    assert 0 < h100.iteration < a100.iteration < 1


def test_the_batch_size_is_that_of_one_gpu():
    assert load_single_gpu_step(Scenario(workload="nvidia-dlrm", batch_size=512)).batch_size == 512
    assert ask("hugectr-dlrm", "h100", batch_size=512).iteration < ask("hugectr-dlrm", "h100").iteration


def test_a_type_that_the_program_chooses_is_said():
    result = ask("hugectr-dlrm", "h100", batch_size=512)
    assert any("runs in fp16, as published" in warning for warning in result.warnings)


def test_a_graph_leaves_the_host_one_launch_a_step():
    result = ask("hugectr-dlrm", gpus=8, batch_size=6912)
    assert result.host == pytest.approx(20e-6)
    assert result.exposed_comm > 0


def test_the_host_is_the_one_of_the_program_unless_another_is_asked_for():
    question = Scenario(workload="distributed-embeddings-tiny", on="h100", host="server-2022")
    assert resolve(question).host.name == "server-2022"
    assert resolve(Scenario(workload="nvidia-dlrm", on="h100")).host is None
    tensorflow = resolve(Scenario(workload="distributed-embeddings-tiny", on="h100")).host
    assert tensorflow.t2["HorovodAlltoall"] == 0.5e-3


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (Scenario(seq_len=128), "leave out `seq_len`"),
        (Scenario(optimizer="adam"), "leave out `optimizer`"),
        (Scenario(attention="sdpa"), "leave out `attention`"),
        (Scenario(embedding="bag"), "leave out `embedding`"),
        (Scenario(mode="inference"), "has no inference"),
        (Scenario(dtype="bf16"), "nvidia-dlrm runs in fp32, tf32, fp16"),
    ],
)
def test_choices_that_were_not_published_are_refused(variant, message):
    with pytest.raises(TraincastError, match=message):
        load_single_gpu_step(variant.replace(workload="nvidia-dlrm"))


def test_a_misspelt_name_is_met_with_the_nearest():
    with pytest.raises(TraincastError, match=r"unknown model 'nvidia-dlmr'.*nvidia-dlrm"):
        load_single_gpu_step(Scenario(workload="nvidia-dlmr"))


def test_built_in_models_and_files_are_no_published_programs():
    assert find_source_kind("bert-large") == "model"
    assert find_source_kind("nvidia-dlrm.tc") == "workload"
    assert find_source_kind("nvidia-dlrm") == "program"


def test_a_curve_divides_the_published_batch():
    question = Scenario(workload="nvidia-dlrm", on="dgx-a100", dtype="tf32")
    curve = predict_scaling(question, [1, 8], "strong")
    assert [point.global_batch for point in curve.points] == [65536, 65536]
    assert curve.points[1].throughput > curve.points[0].throughput
