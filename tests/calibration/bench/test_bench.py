"""Microbenchmarks into a store, the profile from it, and a step predicted with that: the whole way, small."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from tests.calibration.bench.test_measure import TINY
from traincast.app.api import bench, fit_store, measure, predict, self_check
from traincast.app.cli.main import main
from traincast.calibration.bench.bench import OpCall, find_op, make_task_key, measure_task
from traincast.calibration.bench.bench import run_benchmarks as run
from traincast.calibration.bench.device import Reference
from traincast.calibration.bench.inside import draw_small_steps
from traincast.calibration.bench.parts import AGAIN, measure_host
from traincast.calibration.bench.plans import KINDS, Task, plan_benchmarks
from traincast.calibration.bench.signatures import make_op, make_spec
from traincast.calibration.bench.store import Store, open_device
from traincast.calibration.here import _list_measured_before, parse_budget
from traincast.costs.cpu.features import get_kind
from traincast.costs.cpu.samples import group_visits
from traincast.ir.ops import Signature
from traincast.utils.errors import TraincastError


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCAST_HOME", str(tmp_path))
    return tmp_path


def test_every_kind_of_the_plan_runs(monkeypatch):
    monkeypatch.setattr("traincast.calibration.bench.selfcheck._RANKS_SECONDS", 600.0)
    report = self_check("cpu")
    of_this_machine = ("timer", "reference")  # say whether it is calm; on a scripted one: test_selfcheck.py
    assert [(part, said) for part, good, said in report.parts if not good and part not in of_this_machine] == []
    assert {part for part, _, _ in report.parts} >= set(KINDS)
    assert report.headline().startswith("self-check of cpu: ")


def test_the_same_seed_draws_the_same_shapes():
    first, again, other = (
        [make_task_key(t) for t, _ in zip(plan_benchmarks(seed), range(90), strict=False)] for seed in (0, 0, 1)
    )
    assert first == again != other
    assert len(set(first)) == 90


def test_operands_are_as_the_signature_says():
    device = open_device("cpu")
    for task, _ in zip(plan_benchmarks(2), range(30), strict=False):
        args, _ = OpCall(task.signature, device)._arguments[0]
        first = args[0][0] if isinstance(args[0], list) else args[0]
        if not first.is_sparse:
            assert (tuple(first.shape), first.stride()) == (task.signature.inputs[0].shape, first.stride())


def test_sets_of_operands_have_nothing_in_common():
    device = open_device("cpu")
    tasks = {get_kind(task.signature): task for task, _ in zip(plan_benchmarks(4), range(60), strict=False)}
    for kind in ("gemm", "_embedding_bag"):
        call = OpCall(tasks[kind].signature, device, sets=2)
        first, second = (args[0].data_ptr() for args, _ in call._arguments)
        assert first != second
        call(0)
        call(1)


def test_an_op_that_torch_does_not_know_is_named():
    with pytest.raises(TraincastError, match="op aten::nonsense is unknown to torch"):
        find_op(Signature("aten::nonsense", (make_spec(1),), ()))


def test_a_sample_holds_one_call_by_two_clocks():
    device = open_device("cpu")
    task = Task(make_op("relu", [("self", make_spec(1 << 22))], [make_spec(1 << 22)]), between=0)  # milliseconds
    sample = measure_task(device, Reference(device), task)
    assert sample.busy > 0 and sample.wall > 0 and sample.reference_busy > 0


def test_what_timing_itself_takes_is_found_once_a_run():
    device = open_device("cpu")
    reference = Reference(device)
    first = reference.nothing
    measure_task(device, reference, next(plan_benchmarks(0, ("relu",))))
    assert reference.nothing is first and first.wall >= 0


def test_a_second_turn_takes_what_the_first_has_measured(tmp_path):
    device = open_device("cpu")
    store = Store(tmp_path / "store", device.identity())
    assert run(device, store, islice(plan_benchmarks(0, ("relu", "tanh")), 3)) == 3
    assert run(device, store, _list_measured_before(store, plan_benchmarks(0, ("relu", "tanh"))), turn=AGAIN) == 3
    assert len(store) == 6
    assert [len(several) for several in group_visits(list(store.samples()))] == [2, 2, 2]
    assert run(device, store, _list_measured_before(store, plan_benchmarks(0, ("relu", "tanh"))), turn=AGAIN) == 0


def test_products_are_seldom_measured_again():
    tasks = list(islice(plan_benchmarks(0, ("gemm", "relu")), 18))
    held = {make_task_key(task): None for task in tasks}
    again = [get_kind(task.signature) for task in _list_measured_before(held, iter(tasks))]
    assert again.count("relu") == 2 and len(again) == 2 + 4, "and every fifth of sixteen GEMMs"


def test_small_steps_are_run_at_two_times_and_go_on_where_they_stopped(tmp_path, monkeypatch):
    device = open_device("cpu")
    store = Store(tmp_path / "store", device.identity())
    sample = measure_task(device, Reference(device), next(plan_benchmarks(0, ("relu",))))
    order: list[str] = []

    def measured(_device, _reference, small):
        order.append(small.name)
        yield f"{small.name}-0", sample
        if len(order) == 3:
            raise RuntimeError("interrupted")
        yield small.name, sample

    monkeypatch.setattr("traincast.calibration.bench.inside.measure_inside", measured)
    monkeypatch.setattr("traincast.calibration.bench.parts._MOST_STEPS", 2)
    names = [small.name for small in islice(draw_small_steps(0), 2)]
    assert measure_host(device, store, 0, 1e9, lambda: None) == [
        "the host's overheads could not be measured: interrupted"
    ]
    assert measure_host(device, store, 0, 1e9, lambda: None) == []
    assert order == [*names, names[0], *names], "the third was interrupted"
    assert {f"{name}{turn}" for name in names for turn in ("", AGAIN)} <= set(store._rows)
    assert measure_host(device, store, 0, 1e9, lambda: None) == [] and len(order) == 5


def test_measured_fitted_predicted(home, monkeypatch, counted_budget):
    monkeypatch.setattr("traincast.calibration.here._measure_other_parts", lambda *_: [])
    first = bench(budget="3s")
    again = bench(budget="4s")
    assert first.measured > 0 and again.total == first.measured + again.measured, "a run goes on where one stopped"
    calibrated = fit_store(home / "store-cpu", clock="busy")
    assert calibrated.file == home / "here.toml"
    predicted = predict(TINY, on="here")
    measured = measure(TINY, clock="busy", nominal=calibrated.profile.reference, repeats=5)
    assert 0.02 < predicted.iteration / measured.summary.corrected < 50, "plumbing: the bound is loose"


def test_only_the_ops_of_a_workload(home, counted_budget):
    result = bench(budget="3s", workload=TINY, batch_size=8)
    assert 0.0 < result.coverage[-1][1] <= 1.0 + 1e-9
    assert "of the step's predicted time" in result.headline()
    assert result.measured == result.total > 0


def test_a_dry_run_needs_no_device(home, capsys):
    assert main(["bench", "--device", "cuda", "--dry-run", "--budget", "1m", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["planned"]["gemm"] > 10 and document["measured"] == 0
    assert document["planned"]["copies"] > 5 and document["planned"]["collectives"] > 5 and document["seconds"] <= 60
    assert not (home / "store-cuda").exists()


def test_the_self_check_of_a_missing_gpu_fails_with_its_reason(capsys):
    assert main(["bench", "--device", "cuda", "--self-check"]) == 1
    assert "FAIL open: TraincastError: torch " in capsys.readouterr().out


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("5m", 300.0), ("0.5h", 1800.0)])
def test_budgets(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-5m", "5 minutes", "1e9", "nan", "25h"])
def test_a_budget_that_is_none_is_refused(text):
    with pytest.raises(TraincastError, match="`budget` is"):
        parse_budget(text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fit", "--store", "nowhere"], "no store 'nowhere'"),
        (["fit", "gemm", "--store", "nowhere"], "leave out pieces"),
        (["fit", "--clock", "busy"], "--clock and --refine are about a --store"),
        (["predict", "dlrm-ddp", "--on", "here"], "measure this machine with 'traincast bench'"),
        (["predict", "dlrm-ddp", "--on", "here", "--gpus", "2,4"], "name a GPU or node"),
        (["predict", "dlrm-ddp", "--on", "here", "--clock-mhz", "900"], "--clock-mhz is not used here"),
        (["measure", "dlrm-ddp", "--gpus", "99"], "--gpus is 99; give an integer number of ranks from 2 to 64"),
        (["measure", "dlrm-ddp", "--gpus", "2", "--clock", "busy"], "leave out --clock"),
        (["measure", "dlrm-ddp", "--gpus", "2", "--optimizer", "adam"], "with SGD and EmbeddingBags"),
        (["measure", "dlrm-ddp", "--gpus", "2", "--trace-out", "t.json"], "a trace is of one process"),
        (["measure", "dlrm-v2", "--gpus", "2"], "dlrm-v2 is not trained data parallel here"),
    ],
)
def test_what_is_missing_is_said_in_one_line(home, capsys, arguments, said):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
