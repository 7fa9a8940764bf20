"""Every edit on every built-in model: what an edited step must be, whichever it is."""

from __future__ import annotations

import math

from traincast.errors import TraincastError
from traincast.prediction.result import Prediction
from traincast.programs.published.catalog import published_programs
from traincast.what_if.ask import both
from traincast.what_if.edits.registry import edits, parse_edits
from traincast.what_if.options import scene_from
from traincast.what_if.predict import Answer, predicted
from traincast.what_if.result import fits, memory_bytes
from traincast.zoo.catalog import list_models

VALUES = {
    "on": "a100-80gb", "gpus": "2", "host": "server-2022", "host-speed": "2", "launch-speed": "2", "memory-speed": "2",
    "clock-mhz": "1000", "clock-speed": "2", "link-speed": "2", "nic-speed": "2", "link-latency": "0.5", "speed": "2",
    "embedding-dim": "32", "pooling": "4", "tables": "4", "rows": "x0.5", "mlp-width": "2",
    "bottom-mlp": "512-256-64", "top-mlp": "256-1", "layers": "2", "ffn": "1024", "vocab": "1000", "tp": "2", "pp": "2",
    "cp": "2", "sharding": "zero1", "kernels": "compiled", "global-batch": "64", "recompute": "full",
    "batch-size": "x2", "seq-len": "64", "dtype": "tf32", "optimizer": "none", "attention": "sdpa",
    "embedding": "fbgemm", "bucket-mb": "4", "overlap": "none", "program": "torchrec-pipelined", "plan": "search",
    "accumulate": "2", "stream": "1", "checkpoint": "*",
}  # fmt: skip
TARGETS = {"speed": "gemm", "stream": "aten::addmm"}
INVERSE = {"host-speed", "launch-speed", "memory-speed", "clock-speed", "link-speed", "nic-speed", "link-latency",
           "speed", "mlp-width"}  # fmt: skip
"""Edits whose value F is undone by 1 / F."""


def models() -> list[str]:
    """Names of all built-in models and published programs."""
    return [*(info.name for info in list_models()), *published_programs()]


def texts() -> list[str]:
    """One text for every edit."""
    return [
        name + (f":{TARGETS[name]}" if edit.target else "") + (f"={VALUES[name]}" if edit.takes else "")
        for name, edit in edits().items()
    ]


def check_edit(model: str, text: str, *, on: str = "v100") -> str:
    """Applies an edit to a model: "" when all is well with the edited step, else why it cannot be applied."""
    scene = scene_from(model, on, {"gpus": 2} if text.startswith(("bucket-mb", "overlap")) else {})
    try:
        base, changed = both(scene, parse_edits([text]))
        answer = predicted(changed)
    except TraincastError as error:
        return str(error)
    check_answer(answer)
    name = text.partition("=")[0].partition(":")[0]
    if name in INVERSE:
        back = text.partition("=")[0] + f"={1 / float(VALUES[name]):g}"
        _, again = both(changed, parse_edits([back]))
        assert math.isclose(predicted(again).iteration, predicted(base).iteration, rel_tol=1e-9), text
    return ""


def check_answer(answer: Answer) -> None:
    """A step as steps are: finite, positive, in seconds, its memory the sum of its kinds."""
    low, high = answer.interval
    assert math.isfinite(high)
    assert 1e-6 < low <= answer.iteration <= high < 1e4
    assert memory_bytes(answer) > 0
    assert fits(answer) == (memory_bytes(answer) <= answer.platform.device.memory_bytes)
    if isinstance(answer, Prediction):
        assert sum(answer.memory.by_kind.values()) == answer.memory.peak_bytes
        # what a pipelined program copies for the next step runs beside this one, and both count
        assert 0 <= answer.device_active <= 2 * answer.iteration
