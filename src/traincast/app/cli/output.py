"""Where results go: one JSON document or text on stdout, files through a temporary name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from traincast.app.cli.colours import colour_text, is_coloured
from traincast.app.cli.options import name_options
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import format_path
from traincast.utils.files.writing import check_output
from traincast.utils.results import Result

Shown = TypeVar("Shown", bound=Result)


def check_outputs(*paths: Path | None, inputs: Iterable[str | Path | None] = ()) -> None:
    """Rejects files that cannot be written, before any work: two of one name, an input, a folder, a device, a link."""
    wanted = [path for path in paths if path is not None]
    for path in wanted:
        check_output(path, inputs=[source for source in inputs if source is not None])
        if wanted.count(path) > 1:
            raise TraincastError(f"'{format_path(path)}' would be written twice; give two paths")


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    with _name_stdout_errors():
        json.dump(document, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")


def print_text(text: str) -> None:
    """Text on stdout."""
    with _name_stdout_errors():
        shown = colour_text(text) if is_coloured(sys.stdout) else text
        sys.stdout.write(shown if shown.endswith("\n") else shown + "\n")


@contextmanager
def _name_stdout_errors() -> Iterator[None]:
    """Names stdout where it is what cannot be written; a reader that has gone is no complaint."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise TraincastError(f"cannot write to stdout: {error.strerror}") from None


def print_result(
    result: Shown, text: Callable[[Shown], str], *, as_json: bool, options: Mapping[str, str] | None = None
) -> None:
    """A result on stdout: its document, or its page as text with parameters named as options of the command."""
    if as_json:
        print_json(result.to_dict())
    else:
        print_text(name_options(text(result), options or {}))
