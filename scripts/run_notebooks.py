#!/usr/bin/env python
"""Runs the notebooks of docs/notebooks and writes into them what they show.

    .venv/bin/python scripts/run_notebooks.py

A cell is run as Jupyter runs it: what it prints, then its last expression as HTML and text. Jupyter itself would bring
some thirty packages for this; a notebook that runs here runs there, since it is plain Python.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
FOLDER = NOTEBOOKS.parent / "tutorial"
"""Where they run: the trace that they explain is there."""


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of one cell; `names` are the variables of the notebook."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, outputs = io.StringIO(), []
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None
    if printed.getvalue():
        outputs.append(
            {"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)}
        )
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        outputs.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return outputs


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of this run."""
    names: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    os.chdir(FOLDER)
    try:
        cells = []
        for number, cell in enumerate(notebook["cells"], 1):
            if cell["cell_type"] == "code":
                outputs = run_cell("".join(cell["source"]), names)
                for output in outputs:
                    if "execution_count" in output:
                        output["execution_count"] = number
                cell = {**cell, "execution_count": number, "outputs": outputs}
            cells.append(cell)
    finally:
        os.chdir(before)
    return {**notebook, "cells": cells}


def main() -> None:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = run(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path.name)


if __name__ == "__main__":
    main()
