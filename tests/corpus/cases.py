"""Small programs that once came out wrong without a word (`../shared/capture_cases`): captured, predicted, and told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import traincast
from traincast.app.report.prediction import format_prediction
from traincast.utils.errors import TraincastError

GPUS = ("a100-80gb", "h100", "rtx-2080-ti")


@dataclass
class Answer:
    """What came of one case: ms on each GPU, or the message that it was refused with, and all that was said."""

    milliseconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # by GPU; "capture": none was captured
    said: str = ""
    samples: float = 0.0


def list_cases(folder: Path) -> Iterator[str]:
    """Every case of a folder: FILE.py of a script, or FILE.py:FUNCTION for each function that makes a step."""
    for file in sorted(folder.glob("*.py")):
        functions = re.findall(r"^def (make_\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE)
        yield from (f"{file.name}:{function}" for function in functions) if functions else (file.name,)


def try_case(folder: Path, case: str, **how: Any) -> Answer:
    """Captures a case with these options and predicts it on three GPUs."""
    answer = Answer()
    try:
        workload = traincast.capture(str(folder / case), time_limit_s=120.0, **how)
    except TraincastError as error:
        answer.refused["capture"] = str(error)
        return answer
    answer.samples = workload.samples / workload.updates
    said = [workload.contents(), *workload.assumptions]
    for gpu in GPUS:
        try:
            result = traincast.predict(workload, on=gpu if len(workload.ranks) == 1 else "dgx-a100")
        except TraincastError as error:
            answer.refused[gpu] = str(error)
            continue
        answer.milliseconds[gpu] = result.iteration * 1e3
        said.append(format_prediction(result))
    answer.said = "\n".join(said)
    return answer
