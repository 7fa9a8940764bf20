"""Traincast: how long will one training step of this model take on that hardware, and why?

>>> import traincast
>>> answer = traincast.predict("dlrm-default", on="v100", batch_size=2048)
>>> answer.iteration > answer.device_active > 0
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from traincast.app.api import (
    advise,
    bench,
    capture,
    check,
    compare,
    compare_traces,
    export,
    fit_store,
    fits,
    list_edits,
    list_models,
    list_platforms,
    load,
    load_trace,
    measure,
    plan,
    predict,
    record,
    recording,
    refine,
    scaling,
    self_check,
    sensitivity,
    shard,
    sweep,
    trace,
    whatif,
    write_report,
)
from traincast.utils.version import __version__

if TYPE_CHECKING:
    from traincast import callbacks
    from traincast.app.watching import WatchedSteps, profile
    from traincast.hardware.platform import Platform
    from traincast.ir.formula import OpCost
    from traincast.ir.workload import Workload
    from traincast.models.transformers.description import Transformer
    from traincast.simulator.prediction.result import Prediction
    from traincast.simulator.scenario.scaling import ScalingCurve
    from traincast.simulator.scenario.scenario import Scenario
    from traincast.utils.errors import TraincastError

_TYPES = {
    "OpCost": "traincast.ir.formula",
    "Platform": "traincast.hardware.platform",
    "Prediction": "traincast.simulator.prediction.result",
    "ScalingCurve": "traincast.simulator.scenario.scaling",
    "Scenario": "traincast.simulator.scenario.scenario",
    "TraincastError": "traincast.utils.errors",
    "Transformer": "traincast.models.transformers.description",
    "WatchedSteps": "traincast.app.watching",
    "Workload": "traincast.ir.workload",
    "profile": "traincast.app.watching",
}  # imported when they are named, so that `import traincast` costs little

__all__ = [
    "OpCost",
    "Platform",
    "Prediction",
    "ScalingCurve",
    "Scenario",
    "TraincastError",
    "Transformer",
    "WatchedSteps",
    "Workload",
    "__version__",
    "advise",
    "bench",
    "callbacks",
    "capture",
    "check",
    "compare",
    "compare_traces",
    "export",
    "fit_store",
    "fits",
    "list_edits",
    "list_models",
    "list_platforms",
    "load",
    "load_trace",
    "measure",
    "plan",
    "predict",
    "profile",
    "record",
    "recording",
    "refine",
    "scaling",
    "self_check",
    "sensitivity",
    "shard",
    "sweep",
    "trace",
    "whatif",
    "write_report",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "callbacks":
        return import_module("traincast.callbacks")
    if name not in _TYPES:
        raise AttributeError(f"module 'traincast' has no attribute '{name}'")
    return getattr(import_module(_TYPES[name]), name)
