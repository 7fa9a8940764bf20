"""Traincast: how long will one training step of this model take on that hardware, and why?

>>> import traincast
>>> answer = traincast.predict("dlrm-default", on="v100", batch_size=2048)
>>> answer.iteration > answer.device_active > 0
True
"""

from traincast.app.api import (
    advise,
    bench,
    capture,
    compare_traces,
    export,
    fit_store,
    list_edits,
    list_models,
    list_platforms,
    load,
    load_trace,
    measure,
    plan,
    predict,
    predict_here,
    predict_training,
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

__all__ = [
    "__version__",
    "advise",
    "bench",
    "capture",
    "compare_traces",
    "export",
    "fit_store",
    "list_edits",
    "list_models",
    "list_platforms",
    "load",
    "load_trace",
    "measure",
    "plan",
    "predict",
    "predict_here",
    "predict_training",
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
