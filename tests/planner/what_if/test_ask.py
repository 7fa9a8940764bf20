"""What-ifs asked by name."""

from __future__ import annotations

import math

import pytest

import traincast
from traincast.ir.formula import OpCost
from traincast.planner.what_if.result import Difference, list_error_sources
from traincast.simulator.scenario.predict import predict
from traincast.simulator.scenario.resolved import resolve
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError


@pytest.fixture(scope="module")
def bags():
    return traincast.whatif("dlrm-default", on="v100", embedding="bag", edits=["fuse-embedding-bags"], price=2.0)


def test_before_is_what_predict_says(bags):
    plain = traincast.predict("dlrm-default", on="v100", embedding="bag")
    assert bags.before.iteration == plain.iteration and bags.before.interval == plain.interval


def test_after_is_what_predict_says_of_the_edited_model(bags):
    assert bags.after.iteration == traincast.predict("dlrm-default", on="v100", embedding="batched").iteration


def test_the_difference_is_known_better_than_two_independent_predictions(bags):
    # given the log-sigmas of both steps, when they are taken to be independent
    steps = (("bag", bags.before), ("batched", bags.after))
    scenes = [(resolve(Scenario(workload="dlrm-default", on="v100", embedding=name)), result) for name, result in steps]
    alone = [math.hypot(*list_error_sources(scene, result).values()) for scene, result in scenes]

    # then the shared part is missing from the interval of the change
    assert 0 < bags.change.sigma < math.hypot(*alone)
    assert bags.change.certain


def test_an_edit_that_changes_nothing_has_no_uncertainty():
    same = traincast.whatif("dlrm-ddp", on="v100", edits=["batch-size=2048"])
    assert same.change.seconds == 0 and same.change.sigma == 0 and not same.change.certain
    assert "nothing changes" in same.verdict


def test_errors_of_another_device_are_not_shared():
    there = traincast.whatif("dlrm-ddp", on="v100", edits=["on=a100-80gb"])
    here = traincast.whatif("dlrm-ddp", on="v100", edits=["batch-size=1024"])
    assert there.change.sigma > here.change.sigma


def test_the_error_sources_make_up_the_interval_of_the_step():
    scene = resolve(Scenario(workload="dlrm-default", on="v100"))
    result = predict(scene)
    sources = list_error_sources(scene, result)
    shared = {key: sigma for key, sigma in sources.items() if key[0] != "kernel"}
    terms = math.hypot(*result.interval_terms.values())
    assert math.isclose(math.hypot(*shared.values()), terms, rel_tol=1e-9)


def test_a_change_within_its_uncertainty_is_called_so():
    change = Difference(before=1.0, after=0.99, sigma=0.02)
    assert not change.certain and change.interval[0] < 0 < change.interval[1]


def test_cost_of_a_run(bags):
    cost = bags.cost_before
    assert math.isclose(cost.dollars_per_step, 2.0 * bags.before.iteration / 3600)
    assert cost.to_dict()["run_dollars"] is None
    whole = traincast.whatif("dlrm-ddp", on="v100", edits=["cuda-graph"], price=2.0, samples=2048e6)
    assert math.isclose(whole.cost_after.to_dict()["run_dollars"], 1e6 * whole.cost_after.dollars_per_step)
    assert math.isclose(whole.cost_after.joules_per_step, 300 * whole.after.iteration)  # a V100's limit


def test_samples_per_step_count_when_the_batch_changes():
    twice = traincast.whatif("dlrm-default", on="v100", edits=["batch-size=x2"])
    assert twice.change.ratio > 1 > twice.per_sample.ratio
    assert "a sample is" in twice.verdict


def test_spaces_around_an_edit_are_none_of_its_name():
    assert traincast.whatif("dlrm-ddp", on="v100", edits=[" batch-size = 512 "]).edits == ("batch-size=512",)


def test_edits_compose():
    both = traincast.whatif("dlrm-ddp", on="v100", edits=["cuda-graph", "batch-size=512", "memory-speed=2"])
    other = traincast.whatif("dlrm-ddp", on="v100", edits=["memory-speed=2", "batch-size=512", "cuda-graph"])
    assert both.after.iteration == other.after.iteration and both.edits == other.edits


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        (["batchsize=4"], "Did you mean batch-size"),
        (["batch-size=0"], "nearest is 1"),
        (["batch-size=99999999999"], "nearest is 67108864"),
        (["batch-size=many"], "integer"),
        (["batch-size"], "needs a value"),
        (["cuda-graph=yes"], "takes no value"),
        (["batch-size=8", "batch-size=16"], "twice"),
        (["embedding=batched", "fuse-embedding-bags"], "exclude each other"),
        (["speed:gem=2"], "Did you mean gemm"),
        (["speed:aten::mmm=2"], "Did you mean aten::mm"),
        (["host-speed=1000"], "nearest is 100"),
        (["dtype=bf17"], "Did you mean bf16"),
        (["fuse-embedding-bags"], "in one op already"),
        (["layers=3"], "not a description of a Transformer"),
        (["on=v1000"], "Did you mean v100"),
        ([], "no edits"),
    ],
)  # fmt: skip
def test_bad_edits_are_refused_with_what_would_work(edits, said):
    with pytest.raises(TraincastError, match=said):
        traincast.whatif("dlrm-default", on="v100", edits=edits)


def test_a_layout_is_edited_too():
    faster = traincast.whatif("llama3-8b", on="dgx-h100", gpus=8, tp=2, edits=["link-speed=2", "tp=4"])
    assert faster.after.parallel.layout.tp == 4 and faster.change.sigma > 0


def test_ops_of_every_stage_of_a_layout_are_edited():
    # given a Transformer over stages
    asked = {"on": "dgx-h100", "gpus": 8, "tp": 2, "pp": 2, "seq_len": 2048}

    # when its GEMMs run twice as fast, then they take about half as long (beside collectives more), in equal memory
    faster = traincast.whatif("mpt-1b", edits=["speed:aten::mm=2"], **asked)
    assert faster.after.by_family["gemm"] == pytest.approx(faster.before.by_family["gemm"] / 2, rel=0.05)
    assert faster.after.needed_bytes == faster.before.needed_bytes

    # and where element-wise ops are joined, there are fewer kernels, on all stages
    fused = traincast.whatif("mpt-1b", edits=["fuse-elementwise"], **asked)
    assert fused.after.iteration < fused.before.iteration
    kernels = [[program.num_ops for program in side.workload.programs] for side in (fused.before, fused.after)]
    assert all(after < before for before, after in zip(*kernels, strict=True))

    # and an op that it does not have is an error
    with pytest.raises(TraincastError, match=r"unknown op 'aten::mn'.*aten::mm"):
        traincast.whatif("mpt-1b", edits=["speed:aten::mn=2"], **asked)


def test_json_is_plain(bags):
    import json

    document = json.loads(json.dumps(bags.to_dict(), allow_nan=False))
    assert document["bottleneck_moved"] and document["ratio"] < 1


def test_costs_that_are_given_count_as_in_predict():
    plain = traincast.whatif("dlrm-ddp", on="v100", edits=["batch-size=x2"])
    costs = [OpCost("aten::addmm", seconds=0.01)]
    given = traincast.whatif("dlrm-ddp", on="v100", edits=["batch-size=x2"], costs=costs)
    asked = traincast.predict("dlrm-ddp", on="v100", costs=costs)
    assert given.before.iteration == asked.iteration > plain.before.iteration + 0.01
    assert set(asked.warnings) <= set(given.before.warnings)


def test_an_accumulated_step_waits_for_all_its_batches():
    result = traincast.whatif("dlrm-ddp", on="v100", loader_ms=20.0, workers=1, edits=["accumulate=3"])
    assert result.before.iteration == pytest.approx(0.020)
    assert result.after.iteration == pytest.approx(0.060)
    assert any("3 batches every 60 ms" in said for said in result.after.warnings)
