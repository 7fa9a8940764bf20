"""Traincast: how long will one training step of this model take on that hardware, and why?

>>> import traincast
>>> answer = traincast.predict("dlrm-default", on="v100", batch_size=2048)
>>> answer.iteration > answer.device_active > 0
True
"""

from traincast.api import (
    capture,
    evaluate,
    export,
    fit,
    load,
    load_trace,
    measure,
    models,
    plan,
    platforms,
    predict,
    predict_training,
    scaling,
    shard,
    trace,
)
from traincast.version import __version__

__all__ = [
    "__version__",
    "capture",
    "evaluate",
    "export",
    "fit",
    "load",
    "load_trace",
    "measure",
    "models",
    "plan",
    "platforms",
    "predict",
    "predict_training",
    "scaling",
    "shard",
    "trace",
]
