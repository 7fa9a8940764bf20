"""One scenario predicted, wherever it runs: on the GPUs of a platform, or on the machine at hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError

_PROGRAM = re.compile(r"(.+\.py)(?::\w+)?")
_BATCH = 32  # samples, where none are given: the default of captures

if TYPE_CHECKING:
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
    program = _PROGRAM.fullmatch(str(source)) if isinstance(source, str | Path) else None
    if program is None or not Path(program[1]).is_file():
        return scenario
    from traincast.capturing.from_file import capture_function

    workload = capture_function(
        str(source), batch_size=scenario.samples_per_pass or _BATCH, seq_len=scenario.seq_len, gpus=None, ranks=None,
        mode=scenario.mode or "training", name=None, assume=None, arguments=(),
    )  # fmt: skip
    return scenario.replace(workload=workload)


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
    from traincast.simulator.scenario.settings import list_settings_of_kind

    check_used(scenario, "here")
    assert isinstance(scenario.on, str)
    variant = scenario.replace(dtype=scenario.dtype or "fp32")
    result = predict_here(scenario.workload, variant, scenario.on, scenario.gpus)  # type: ignore[arg-type]
    return replace(result, scenario=list_settings_of_kind(variant, "here", result))
