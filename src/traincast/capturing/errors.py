"""One-line rejections that name the user's own file and line, and lines that only check something."""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

import torch

from traincast.utils.errors import TraincastError

_PACKAGES = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib")
)  # alongside torch's, not torch's
_STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"
_NOT_THE_USER = (
    f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}", "<frozen", "<string>",
)  # fmt: skip


MASK, BRANCH, ITEM = "`assume` mask=SHARE", "`assume` branch=true|false", "`assume` item=NUMBER"
"""What a user can state instead of values; the same words are keys of `assume` in Python."""

OTHER_PROCESSES = "needs other processes; say how many GPUs there are with `gpus`"
"""For code of several ranks that is captured as if it were one process."""


_OF_A_POOL = (
    ", in a pool of the script's own, which is taken for its ranks where it has as many processes as the capture GPUs"
)


REJECTED: list[TraincastError] = []
"""What was rejected since the recording began: code of the user's may have caught it."""


def find_user_line() -> str:
    """`FILE:LINE` of the innermost running frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_internal_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "the step function"


def find_raised_line(trace: TracebackType | None) -> str:
    """`FILE:LINE` of the innermost frame of a traceback that is neither torch's nor ours."""
    for entry in reversed(traceback.extract_tb(trace)):
        if not is_internal_file(entry.filename):
            return f"{entry.filename}:{entry.lineno}"
    return "the step function"


def is_internal_file(filename: str) -> bool:
    """Whether a file is torch's, ours or the standard library's; packages installed below the latter are not."""
    standard = filename.startswith(_STANDARD) and not filename.startswith(_PACKAGES)
    return standard or filename.startswith(_NOT_THE_USER)


def reject_values(what: str, remedy: str) -> TraincastError:
    """For code that needs the values of a tensor that has none."""
    error = TraincastError(
        f"{find_user_line()}: {what} needs the values of a tensor, and a capture without a GPU has only shapes; "
        f"{remedy}"
    )
    REJECTED.append(error)
    return error


def format_one_line(error: BaseException) -> str:
    """An exception as one short line."""
    text = " ".join(str(error).split())
    said = f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
    return said + _OF_A_POOL * (type(error.__cause__).__name__ == "RemoteTraceback")


def find_passing_answer(line: str) -> bool | None:
    """What a tensor must answer at this `FILE:LINE` so that an `assert` holds, or an `if` that raises does not; None
    where the line is no such check."""
    file, _, number = line.rpartition(":")
    return _find_checks(file).get(int(number)) if number.isdigit() else None


@cache
def _find_checks(file: str) -> dict[int, bool]:
    """Answers by line."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return {}
    answers: dict[int, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            test, passes = node.test, True
        elif isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
            test, passes = node.test, False
        else:
            continue
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, passes = test.operand, not passes
        for number in range(test.lineno, (test.end_lineno or test.lineno) + 1):
            answers[number] = passes
    return answers
