"""Plans: the fastest layout that fits, the same every time, and what others cost."""

from __future__ import annotations

import json
import random
import shlex
from itertools import islice

import pytest

import traincast
from traincast.app.cli.main import main
from traincast.hardware.platform import load_platform
from traincast.models.transformers.reading import load_transformer, make_transformer
from traincast.planner.parallelism.plan import count_state_bytes, list_layout_candidates, make_plan, read_layout
from traincast.simulator.parallelism.layout import Layout, complete_layout
from traincast.simulator.parallelism.predict import estimate_seconds, estimate_used_bytes, predict_parallel
from traincast.simulator.scenario.resolved import resolve
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.parallel.runner import Workers

SMALL = make_transformer(
    "small", {"layers": 16, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 32000, "seq_len": 2048}
)
NODE = load_platform("dgx-h100")


@pytest.fixture(scope="module")
def planned():
    return traincast.plan("llama3-8b", on="dgx-h100", gpus=64, global_batch=128, price=2.0, tokens=15e12)


def test_no_random_layout_that_fits_is_faster_than_the_plan(planned) -> None:
    model = load_transformer("llama3-8b")
    layouts = list(list_layout_candidates(model, NODE.device, planned.base, 8))
    chosen = random.Random(18).sample(layouts, 200)
    ordered = sorted(chosen, key=lambda layout: estimate_seconds(model, NODE, layout))
    fits = (layout for layout in ordered if estimate_used_bytes(model, NODE, layout) <= NODE.device.memory_bytes)
    nearest = list(islice(fits, 3))
    assert planned.best[0].iteration <= min(predict_parallel(model, NODE, layout).iteration for layout in nearest)
    assert planned.scored == len(layouts) and len(planned.best) == 8


def test_any_number_of_processes_gives_the_same_plan() -> None:
    asked = resolve(Scenario(workload=SMALL, on="dgx-h100", gpus=64, global_batch=128, seq_len=2048))
    alone, together = (make_plan(asked, workers=Workers(processes=number)) for number in (1, 2))
    assert alone.to_dict() == together.to_dict()
    assert read_layout(alone.best[0]) == read_layout(together.best[0])


def test_the_best_come_first_and_fit(planned) -> None:
    times = [result.iteration for result in planned.best]
    assert times == sorted(times)
    assert all(result.fits for result in planned.best)
    assert planned.row(0)["slower_by"] == "" and planned.row(7)["slower_by"].endswith("ms")


def test_money_and_days_follow_from_tokens_a_second(planned) -> None:
    row, result = planned.row(0), planned.best[0]
    assert row["days"] == pytest.approx(15e12 / result.throughput.tokens / 86400)
    # 1e9 tokens at r tokens per second and GPU are 1e9 / r GPU-seconds
    assert row["dollars_per_billion_tokens"] == pytest.approx(2.0 * 1e9 / result.tokens_per_second_per_gpu / 3600)


def test_a_plan_is_the_same_every_time() -> None:
    first, second = (traincast.plan(SMALL, on="dgx-h100", gpus=4) for _ in range(2))
    assert first.to_dict() == second.to_dict()


def test_a_plan_is_what_predict_says_of_its_layout() -> None:
    result = traincast.plan(SMALL, on="dgx-h100", gpus=4).best[0]
    again = predict_parallel(SMALL, NODE, read_layout(result))
    assert again.iteration == result.iteration and again.needed_bytes == result.needed_bytes


def test_every_row_has_the_command_that_predicts_it(capsys) -> None:
    # given plans under other settings than the defaults
    for fields in ({}, {"kernels": "fused", "dtype": "fp8"}):
        plan = traincast.plan("mpt-1b", on="dgx-h100", gpus=16, global_batch=64, **fields)

        # when the commands of some rows are run, then each gives its row to the last digit
        for row in plan.to_dict()["rows"][::4]:
            _, *line = shlex.split(row["command"])
            assert main([*line, "--json"]) == 0
            document = json.loads(capsys.readouterr().out)
            assert document["iteration_ms"] == row["iteration_ms"]
            assert document == row["prediction"]


def test_states_that_cannot_fit_are_never_scored() -> None:
    model = load_transformer("llama3-405b")
    alone = complete_layout(Layout(gpus=8, global_batch=8), model)
    assert count_state_bytes(model, alone) > 80e9
    assert all(
        count_state_bytes(model, layout) <= 80e9 for layout in list_layout_candidates(model, NODE.device, alone, 8)
    )


def test_the_command_line_prints_a_table_and_a_document(capsys) -> None:
    assert (
        main(["plan", "mpt-125m", "--on", "dgx-h100", "--gpus", "4", "--tokens-per-step", "32768", "--price", "2"]) == 0
    )
    text = capsys.readouterr().out
    assert "layouts scored" in text and "$ per billion tokens" in text and "slower by" in text
    assert main(["plan", "mpt-125m", "--on", "dgx-h100", "--gpus", "4", "--global-batch", "16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["gpus"] == 4 and document["rows"][0]["dollars_per_billion_tokens"] is None
    assert document["global_batch"] == 16


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan llama3-405b --on dgx-h100 --gpus 8", "give more GPUs"),
        ("plan mpt-7b --on dgx-h100 --gpus 0", "--gpus: 0 is out of range"),
        ("plan mpt-7b --on dgx-h100 --gpus 8 --price -1", "--price -1 is out of range"),
        ("plan mpt-7b --on dgx-h100 --gpus 8 --global-batch 8 --tokens-per-step 9", "give one of them"),
        ("plan nothing --on dgx-h100 --gpus 8", "unknown model 'nothing'"),
    ],
)
def test_what_cannot_be_planned_is_one_line(capsys, line: str, message: str) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
