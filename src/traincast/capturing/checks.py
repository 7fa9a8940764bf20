"""Lines of a script that only check something: what must be true for them to pass."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


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
