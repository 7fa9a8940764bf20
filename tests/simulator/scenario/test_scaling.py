"""Scaling curves: what stays the same, and what is rejected."""

from __future__ import annotations

import pytest

from tests.simulator.rank_programs import RankProgram, workload
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.scaling import MAX_COUNTS, predict_scaling
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError


def question(name="vgg13", **variant):
    return Scenario(workload=name, on="dgx-a100", **variant)


def test_weak_scaling_keeps_the_batch_of_a_gpu():
    curve = predict_scaling(question(batch_size=4), [8, 1, 8, 16])

    assert [(p.gpus, p.nodes, p.global_batch) for p in curve.points] == [(1, 1, 4), (8, 1, 32), (16, 2, 64)]
    assert [p.answer.workload.batch_size for p in curve.points] == [4, 4, 4]
    assert curve.points[0].efficiency == 1
    assert all(p.throughput == p.global_batch / p.answer.iteration for p in curve.points)
    last = curve.points[-1]
    assert last.efficiency == pytest.approx(curve.points[0].answer.iteration / last.answer.iteration)


def test_strong_scaling_divides_the_batch_of_all():
    curve = predict_scaling(question(batch_size=8), [2, 4], "strong")

    assert [(p.global_batch, p.answer.workload.batch_size) for p in curve.points] == [(8, 4), (8, 2)]


def test_without_a_batch_size_it_is_the_model_s_own():
    (point,) = predict_scaling(question(), [1]).points

    assert point.global_batch == predict(question()).workload.batch_size


def test_a_dlrm_s_own_batch_is_that_of_its_description():
    (point,) = predict_scaling(question("dlrm-default"), [2]).points

    assert point.answer.workload.batch_size == point.global_batch // 2
    assert any("hybrid parallel" in said for said in point.answer.warnings)


@pytest.mark.parametrize(
    ("gpus", "kind", "said"),
    [
        ([], "weak", "numbers of GPUs must be 1 or more"),
        ([4, 0], "weak", "numbers of GPUs must be 1 or more, not 4, 0"),
        (range(1, MAX_COUNTS + 2), "weak", f"{MAX_COUNTS + 1} numbers of GPUs are too many; give at most {MAX_COUNTS}"),
        ([1], "weakly", "scaling 'weakly' is unknown; choose weak or strong"),
        ([3], "strong", "a batch of 4 cannot be divided among 3 GPUs .*give a `batch_size` that is a multiple of 3"),
    ],
)
def test_impossible_curves_are_refused(gpus, kind, said):
    with pytest.raises(TraincastError, match=said):
        predict_scaling(question(batch_size=4), gpus, kind)


def test_a_step_of_several_gpus_has_no_curve():
    step = workload(RankProgram().compute(64), RankProgram().compute(64))
    with pytest.raises(TraincastError, match="was made for 2 GPUs; a curve needs one made for one GPU"):
        predict_scaling(Scenario(workload=step, on="dgx-a100"), [1, 2])


@pytest.mark.parametrize("model", ["wide-deep", "deepfm", "dlrm-default", "dlrm-v2", "vgg13", "mpt-1b"])
def test_one_gpu_of_a_curve_is_the_step_that_predict_gives(model):
    (point,) = predict_scaling(question(model), [1]).points

    assert point.answer.iteration == predict(question(model)).iteration


def test_a_laid_out_transformer_has_a_weak_curve():
    # given a Transformer whose layout says what ranks share
    asked = question("mpt-1b", fsdp=2, seq_len=1024, micro_batch=2)

    # when the number of GPUs grows, then so does the data-parallel part of the layout, and micro-batches stay
    curve = predict_scaling(asked, [1, 2, 8])
    assert [(p.gpus, p.global_batch, p.answer.parallel.layout.micro_batch) for p in curve.points] == [
        (1, 2, 2), (2, 4, 2), (8, 16, 2)
    ]  # fmt: skip
    for point in curve.points:
        assert point.answer.iteration == predict(asked.replace(gpus=point.gpus)).iteration
    assert all(point.throughput == point.global_batch / point.answer.iteration for point in curve.points)


def test_a_laid_out_transformer_has_a_strong_curve():
    curve = predict_scaling(question("mpt-1b", tp=2, seq_len=1024, global_batch=32), [2, 8], "strong")

    assert [(p.global_batch, p.answer.parallel.layout.accumulation) for p in curve.points] == [(32, 32), (32, 8)]


@pytest.mark.parametrize(
    ("fields", "gpus", "kind", "said"),
    [
        ({"tp": 4}, [2, 4], "weak", "2 GPUs are no multiple of tp 4"),
        ({"global_batch": 8}, [1, 2], "weak", "`global_batch` is for one prediction"),
        ({"batch_size": 6}, [4], "strong", "a global batch of 6 is no multiple of dp 4"),
    ],
)
def test_impossible_curves_of_layouts_are_refused(fields, gpus, kind, said):
    with pytest.raises(TraincastError, match=said):
        predict_scaling(question("mpt-1b", seq_len=1024, **fields), gpus, kind)
