"""House rules that no linter knows: sizes of files and functions, whose words stand in messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.imports import EVALUATION, PACKAGE, ROOT

MOST_FILE_LINES = 500
MOST_FUNCTION_LINES = 25
"""Of nine functions in ten."""
LONGEST_FUNCTION = 53
"""No function is longer; whoever shortens the longest lowers this."""
OPTION = re.compile(r"(?<![\w-])--(?!no-deps\b)[a-z][a-z-]+")
"""An option of the command line; `--no-deps` is one of pip's."""

NAMING = (EVALUATION / "commands", EVALUATION / "laws")
FILES = sorted(path for package in (PACKAGE, EVALUATION) for path in package.rglob("*.py"))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Every function of a file with its lines, from `def` to the last one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path.relative_to(ROOT)}: {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.fixture(scope="module")
def lengths():
    return sorted((length, name) for path in FILES for name, length in functions(path))


def test_no_file_is_too_long():
    long = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: lines for name, lines in long.items() if lines > MOST_FILE_LINES} == {}


def test_nine_functions_in_ten_fit_on_a_screen(lengths):
    assert lengths[int(0.9 * len(lengths))][0] <= MOST_FUNCTION_LINES


def test_no_function_is_longer_than_the_longest_so_far(lengths):
    assert [name for length, name in lengths if length > LONGEST_FUNCTION] == []


def messages(path: Path) -> Iterator[str]:
    """Texts of a file that a user may see: every string that is no docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documentation = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def test_names_of_options_stand_in_the_command_line_alone():
    library = [path for path in FILES if not path.is_relative_to(PACKAGE / "app" / "cli") and path.parent not in NAMING]
    naming = {f"{path.relative_to(ROOT)}: {text}" for path in library for text in messages(path) if OPTION.search(text)}
    assert naming == set(), "a caller from Python has no options: name the argument, and let cli/ translate"
