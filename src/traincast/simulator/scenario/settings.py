"""The resolved settings of a prediction: every field of its scenario with the value that was used."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from traincast.simulator.scenario.fields import list_scenario_fields
from traincast.simulator.scenario.kinds import USED
from traincast.simulator.scenario.scenario import Scenario

if TYPE_CHECKING:
    from traincast.simulator.prediction.result import Prediction
    from traincast.simulator.scenario.resolved import Resolved


_LAYOUT = ("tp", "pp", "vp", "cp", "ep", "etp", "global_batch", "micro_batch", "schedule", "checkpoint")
"""Fields of a layout that are shown even where they were not given."""


def list_settings(resolved: Resolved, result: Prediction) -> dict[str, Any]:
    """Every field by name with the value that was used; None where the kind of step does not use it, or where its
    default is nothing. Objects are shown by their names."""
    scenario, used = resolved.scenario, USED[resolved.kind]
    settings = list_settings_of_kind(scenario, resolved.kind, result)
    if result.parallel is not None:
        settings["batch_size"] = scenario.batch_size
        for name in _LAYOUT:
            settings[name] = getattr(result.parallel.layout, name)
    settings |= {name: value for name, value in _list_model_choices(resolved).items() if settings[name] is None}
    if "kernels" in used:
        settings["kernels"] = "compiled" if scenario.is_compiled else scenario.kernels or "eager"
    return settings


def list_settings_of_kind(scenario: Scenario, kind: str, result: Prediction) -> dict[str, Any]:
    """The settings of a step of a kind as far as the scenario and the prediction say them."""
    used = USED[kind]
    settings = {
        name: convert_to_plain(getattr(scenario, name)) if name in used else None for name in list_scenario_fields()
    }
    settings |= {"gpus": result.gpus, "host": result.host_profile, "mode": result.workload.mode}
    return settings | {"batch_size": result.workload.batch_size, "seq_len": result.workload.seq_len or None}


def _list_model_choices(resolved: Resolved) -> dict[str, Any]:
    """Optimizer, attention and embedding that a model has where none was asked for."""
    if resolved.kind == "transformer":
        return {"attention": "sdpa"}
    if resolved.kind == "parallel":
        return {"optimizer": "adam", "attention": "sdpa"}
    if resolved.source == "dlrm":
        config = resolved.of_dlrm()
        return {"optimizer": config.optimizer, "embedding": "fbgemm" if resolved.gpus > 1 else config.embedding}
    if resolved.source != "model":
        return {}
    from traincast.models.catalog import list_models

    info = next(info for info in list_models() if info.name == resolved.scenario.workload)
    own = {} if resolved.scenario.mode == "inference" else {"optimizer": info.optimizers[0]}
    return own | ({info.axis: info.choices[0]} if info.axis else {})


def format_settings(settings: dict[str, Any]) -> str:
    """One line with the settings that a step was predicted under: `dtype fp32, batch_size 8, kernels eager`."""
    shown = {name: value for name, value in settings.items() if value not in (None, False, "") and name != "workload"}
    if isinstance(shown.get("plan"), str) and len(shown["plan"]) > 60:
        shown["plan"] = "as given"
    return ", ".join(name if value is True else f"{name} {value}" for name, value in shown.items())


def convert_to_plain(value: Any) -> Any:
    """A value as JSON has it: objects by their key or name."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple):
        return [convert_to_plain(one) for one in value]
    return str(getattr(value, "key", None) or getattr(value, "name", None) or value)


def format_predict_command(scenario: Scenario) -> str:
    """The command that predicts a scenario, with an option for every field that was given."""
    words = ["traincast", "predict", str(convert_to_plain(scenario.workload))]
    for name, value in scenario.given().items():
        if name == "workload":
            continue
        option = list_scenario_fields()[name].option
        words += [option] if value is True else [option, str(convert_to_plain(value))]
    return shlex.join(words)
