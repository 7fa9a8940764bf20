"""One scenario predicted, wherever it runs: on the GPUs of a platform, or on the machine at hand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.simulator.prediction.result import Prediction


def predict(scenario: Scenario) -> Prediction:
    """The prediction of a scenario."""
    if _is_here(scenario):
        return _predict_here(scenario)
    from traincast.simulator.scenario.predict import predict as predict_on_gpus

    return predict_on_gpus(scenario)


def check_gpu(scenario: Scenario) -> None:
    """Rejects the machine at hand where only steps on GPUs are known."""
    if _is_here(scenario):
        raise TraincastError(f"`on` '{scenario.on}' is for predictions; name a GPU or node")


def _is_here(scenario: Scenario) -> bool:
    if not isinstance(scenario.on, str) or not (scenario.on == "here" or scenario.on.endswith(".toml")):
        return False
    from traincast.costs.cpu.machine import is_here

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
