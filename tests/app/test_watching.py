"""Steps of real loops are timed, held against a prediction, and explained."""

from __future__ import annotations

import sys
import types

import pytest

import traincast
from traincast.app import watching
from traincast.app.watching import StepWatch, WatchedSteps
from traincast.callbacks import make_hugging_face, make_lightning, watch_torchtitan
from traincast.utils.errors import TraincastError

torch = pytest.importorskip("torch")
DLRM = {"workload": "dlrm-default", "on": "v100", "batch_size": 2048}


@pytest.fixture(scope="module")
def prediction():
    return traincast.predict("dlrm-default", on="v100", batch_size=2048)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(watching.time, "perf_counter", lambda: now.seconds)
    return now


def run_steps(watch, clock, lengths):
    figures = []
    for length in lengths:
        clock.seconds += length
        figures.append(watch.note_step())
    return figures


def test_first_steps_do_not_count_and_the_median_does(clock, prediction):
    watch = StepWatch(prediction)

    figures = run_steps(watch, clock, [9.0, 5.0, 3.0, *[1.1 * prediction.iteration] * 5])
    result = watch.finish()

    assert figures[:4] == [{}] * 4
    assert figures[-1]["traincast/measured_over_predicted"] == pytest.approx(1.1)
    assert result.measured == pytest.approx(1.1 * prediction.iteration)
    assert result.mfu == pytest.approx(prediction.throughput.mfu / 1.1)
    assert result.verdict.startswith("as predicted")


@pytest.mark.parametrize(("times", "said"), [(3.0, "longer than predicted"), (0.3, "faster than predicted")])
def test_steps_outside_of_the_interval_say_what_to_do(prediction, times, said):
    result = WatchedSteps(seconds=(times * prediction.iteration,) * 4, prediction=prediction)

    assert said in result.verdict
    lines = result.box().split("\n")
    assert len({len(line) for line in lines}) == 1 and lines[0].startswith("┌")
    assert result.to_dict()["measured_over_predicted"] == pytest.approx(times)


def test_an_evaluation_in_between_is_no_step(clock):
    watch = StepWatch(warm_up=0)
    run_steps(watch, clock, [1.0, 1.0])

    clock.seconds += 100.0  # an evaluation
    watch.pause()
    run_steps(watch, clock, [1.0])

    assert watch.finish().seconds == pytest.approx((1.0, 1.0))


def test_trackers_that_run_already_are_given_the_figures(monkeypatch):
    logged = []
    wandb = types.SimpleNamespace(run=object(), log=lambda values, **how: logged.append((values, how)))
    mlflow = types.SimpleNamespace(active_run=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)

    watching.log_figures({"traincast/step_ms": 2.0}, 7)

    assert logged == [({"traincast/step_ms": 2.0}, {"step": 7, "commit": False})]


def test_the_callback_of_hugging_face_is_one_and_prints_its_verdict(capsys):
    transformers = pytest.importorskip("transformers")
    callback = make_hugging_face(**DLRM)
    handler = transformers.trainer_callback.CallbackHandler([callback], None, None, None, None)
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    arguments = types.SimpleNamespace()

    for number in range(8):
        state.global_step = number
        handler.on_step_end(arguments, state, control)
    handler.on_train_end(arguments, state, control)

    assert isinstance(callback, transformers.TrainerCallback)
    assert len(callback.listener.result.seconds) == 4
    assert "predicted 7.8" in capsys.readouterr().out


def test_the_callback_of_lightning_counts_optimizer_steps_once(monkeypatch, capsys):
    given = types.SimpleNamespace(Callback=type("Callback", (), {}))
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", given)
    callback = make_lightning()

    for batch in range(16):  # two batches are one optimizer step
        callback.on_train_batch_end(types.SimpleNamespace(global_step=(batch + 1) // 2), None, None, None, batch)
    callback.on_train_end(None, None)

    assert len(callback.listener.result.seconds) == 4
    assert "nothing was predicted" in capsys.readouterr().out


def test_a_trainer_of_torchtitan_is_watched_and_left_as_it_was(clock, capsys):
    class Trainer:
        step = 0

        def train_step(self, data):
            self.step += 1
            clock.seconds += 1.0
            return data

    trainer = Trainer()
    with watch_torchtitan(trainer) as listener:
        for number in range(6):
            assert trainer.train_step(number) == number
            clock.seconds += 100.0  # a checkpoint, which is no part of a step

    assert listener.result.seconds == (1.0, 1.0) and trainer.step == 6
    assert "train_step" not in vars(trainer)
    assert "measured" in capsys.readouterr().out


@pytest.mark.parametrize("given", [{"on": "v100"}, {"workload": "resnet50"}, {"workload": "resnet50", "on": "A100"}])
def test_what_a_callback_lacks_is_said_before_training(given):
    pytest.importorskip("transformers")
    with pytest.raises(TraincastError, match=r"workload|`on`|a100-40gb"):
        make_hugging_face(**given)


def test_a_loop_is_profiled_and_explained(tmp_path):
    said = []
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with traincast.profile(steps=2, out=tmp_path / "trace.json", say=said.append) as profiled:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()

    assert len(profiled.report.ranks[0].steps) == 2
    assert said == [profiled.verdict] and "on the host alone" in profiled.verdict
    assert len(traincast.trace(tmp_path / "trace.json").ranks[0].steps) == 2


def test_modules_of_a_profiled_loop_have_the_names_of_predictions(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    with traincast.profile(steps=1, out=tmp_path / "trace.json", modules=model, say=str) as profiled:
        for _ in range(3):
            model(torch.ones(2, 8))
            profiled.step()
    names = {row.name for row in traincast.trace(tmp_path / "trace.json").ranks[0].profile.annotations}
    assert {"Sequential", "Sequential.0", "Sequential.1"} <= names
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    with pytest.raises(TraincastError, match="is a list: give the model"):
        traincast.profile(modules=[model])


def test_a_loop_that_is_too_short_or_fails_says_so():
    with pytest.raises(TraincastError, match="ended after 1 of 5 steps"), traincast.profile(say=str) as profiled:
        profiled.step()
    with pytest.raises(ZeroDivisionError), traincast.profile(say=str):
        raise ZeroDivisionError  # the loop's own error comes out as it is
