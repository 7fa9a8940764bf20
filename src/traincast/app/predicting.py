"""One scenario predicted, wherever it runs: on the GPUs of a platform, or on the machine at hand."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError

_PROGRAM = re.compile(r"(.+\.py)(?::\w+)?")
_BATCH = 32  # samples, where none are given: the default of captures
_LAST_LINES = 20  # of what a program printed before its capture failed

if TYPE_CHECKING:
    from traincast.ir.workload import Workload
    from traincast.models.embeddings.table import Table
    from traincast.simulator.prediction.result import Prediction


def predict(scenario: Scenario) -> Prediction:
    """The prediction of a scenario."""
    if _is_here(scenario):
        return _predict_here(scenario)
    from traincast.simulator.scenario.predict import predict as predict_on_gpus

    return predict_on_gpus(capture_source(scenario))


def capture_source(scenario: Scenario) -> Scenario:
    """The scenario with its step captured where the workload is a program, `train.py` or `train.py:make_step`; it is
    run as Python. Others stay as they are."""
    source = scenario.workload
    if not isinstance(source, str | Path) or not _is_program(str(source)):
        return scenario
    if scenario.plan is not None:  # whose tables it places, however many GPUs it is for
        return scenario.replace(workload=capture_recommender(str(source), scenario.batch_size))
    # a script has its own batch size, and tells whether it runs at another; a function is asked for one
    batch_size = None if str(source).endswith(".py") else scenario.samples_per_pass or _BATCH
    captured = _capture(str(source), batch_size, scenario.seq_len, mode=scenario.mode or "training")
    return scenario.replace(workload=captured)


def capture_recommender(source: str, batch_size: int | None, arguments: Sequence[str] = ()) -> Workload:
    """The step of one GPU of a recommender whose tables are to be placed: of `train.py`, as `torchrun` starts one
    process of it, or of `train.py:make_step`."""
    if source.endswith(".py"):
        return _capture(source, batch_size, gpus=1, arguments=arguments)
    return _capture(source, batch_size or _BATCH)


def read_tables(
    source: object, batch_size: int | None, arguments: Sequence[str]
) -> tuple[str | Workload | tuple[Table, ...], str | None]:
    """What `shard` is given as its planner reads it, and the name that `predict` knows it by: of a program one step is
    captured, of a module its tables are described."""
    from traincast.ir.workload import Workload

    text = str(source) if isinstance(source, str | Path) else ""
    if text and _is_program(text):
        return capture_recommender(text, batch_size, arguments), None if arguments else text
    if _PROGRAM.fullmatch(text):
        raise TraincastError(f"no file {text} to take the tables of; give the path of the script, or list them in a "
                             ".yaml, .json or .csv file (name, rows, dim, pooling)")  # fmt: skip
    if arguments:
        raise TraincastError("arguments are those of a script, and no script was given")
    if text:
        return text, text
    if isinstance(source, Workload):
        return source, None
    from traincast.planner.torchrec.planner import describe_module
    from traincast.planner.torchrec.tables import tables_from_json

    if not hasattr(source, "named_modules"):
        raise TraincastError(f"{type(source).__name__} is no description of tables; give a file, a script or a module")
    return tables_from_json(describe_module(source)).tables, None


def _is_program(source: str) -> bool:
    program = _PROGRAM.fullmatch(source)
    return program is not None and Path(program[1]).is_file()


def _capture(
    source: str, batch_size: int | None, seq_len: int | None = None, *, gpus: int | None = None,
    mode: str = "training", arguments: Sequence[str] = (),
) -> Workload:  # fmt: skip
    """The step of a program, captured as `capture` does it; what it prints is shown only where that fails."""
    from traincast.app.captures import TIME_LIMIT_S, capture_isolated
    from traincast.app.cli.output import show_progress_line

    how = {"batch_size": batch_size, "seq_len": seq_len, "gpus": gpus, "mode": mode, "name": None,
           "arguments": list(arguments)}  # fmt: skip
    printed = StringIO()
    try:
        with show_progress_line(f"capturing {source}") as tell, redirect_stdout(printed), redirect_stderr(printed):
            return capture_isolated(source, None, tell, how, TIME_LIMIT_S)
    except TraincastError:
        sys.stderr.write("".join(printed.getvalue().splitlines(keepends=True)[-_LAST_LINES:]))
        raise


def check_gpu(scenario: Scenario) -> None:
    """Rejects the machine at hand where only steps on GPUs are known."""
    if _is_here(scenario):
        raise TraincastError(f"`on` '{scenario.on}' is for predictions; name a GPU or node")


def _is_here(scenario: Scenario) -> bool:
    if not isinstance(scenario.on, str) or not (scenario.on == "here" or scenario.on.endswith(".toml")):
        return False
    from traincast.costs.cpu.profile import is_here

    return is_here(scenario.on)


def _predict_here(scenario: Scenario) -> Prediction:
    """A step on the machine at hand, or on the one that a fitted profile was measured on."""
    from traincast.calibration.here import predict_here
    from traincast.simulator.scenario.kinds import check_used
    from traincast.simulator.scenario.resolved import list_settings_of_kind

    check_used(scenario, "here")
    assert isinstance(scenario.on, str)
    variant = scenario.replace(dtype=scenario.dtype or "fp32")
    result = predict_here(scenario.workload, variant, scenario.on, scenario.gpus)  # type: ignore[arg-type]
    return replace(result, scenario=list_settings_of_kind(variant, "here", result))
