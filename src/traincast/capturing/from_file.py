"""Capturing a step that a user keeps in a Python file: `FILE.py:FUNCTION`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from traincast.capturing.assumptions import Assume
from traincast.capturing.distributed import capture_distributed
from traincast.capturing.errors import find_raised_line, format_one_line
from traincast.capturing.global_state import keep_precision_switches
from traincast.capturing.sandbox import use_sandbox
from traincast.capturing.script import NO_GPUS, capture_script
from traincast.capturing.step import capture_step
from traincast.ir.workload import CAPTURED_AT, DEFAULT_FRAMEWORK, Workload
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value

DEFAULT_BATCH = 32
_FORM = "give FILE.py:FUNCTION"
_USUAL = "make_step"  # the name of the contract says nothing of the model; that of its file does


def capture_function(
    function: str | Callable[..., Any],
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    name: str | None = None,
    mode: str = "training",
    rebatch: bool = True,
    framework_version: str = DEFAULT_FRAMEWORK,
    synchronised: bool = False,
    gpus: int | None = None,
    ranks: Sequence[int] | None = None,
    assume: Assume | None = None,
    arguments: Sequence[str] = (),
) -> Workload:
    """Captures the step that a function makes, or that of `FILE.py:FUNCTION`, or of the script `FILE.py`
    with these `arguments`; see `capture_step` for its contract, or
    with a number of `gpus`, of which `ranks` are captured, `capture_distributed`. Nothing that its code writes reaches
    files of the user's (`traincast.capturing.sandbox`). A function without a `batch_size` gets 32; a script has its
    own."""
    both: dict[str, Any] = {"name": name, "gpus": gpus, "ranks": ranks, "assume": assume}
    with use_sandbox() as box:
        if isinstance(function, str) and function.endswith(".py"):
            workload = capture_script(function, arguments, batch_size=batch_size, seq_len=seq_len or 0, **both)
        else:
            workload = _capture_function(
                function, batch_size=DEFAULT_BATCH if batch_size is None else batch_size, seq_len=seq_len, mode=mode,
                rebatch=rebatch, framework_version=framework_version, synchronised=synchronised, **both,
            )  # fmt: skip
    return replace(workload, meta={**workload.meta, CAPTURED_AT: str(workload.batch_size), **box.meta})


@contextmanager
def _run_as_file(function: str | Callable[..., Any]) -> Iterator[None]:
    """Keeps what is alongside the file importable until its step has run, as in a run of the file itself, which does
    not end this process; precision switches are put back."""
    before = list(sys.path)
    if isinstance(function, str):
        sys.path.insert(0, str(Path(function.rpartition(":")[0]).resolve().parent))
    try:
        with keep_precision_switches():
            yield
    except SystemExit as stop:
        where = find_raised_line(stop.__traceback__)
        raise TraincastError(
            f"{where}: the code to capture ends with sys.exit({shorten_value(stop.code)}); remove it"
        ) from None
    finally:
        sys.path[:] = before


def _capture_function(
    function: str | Callable[..., Any], *, name: str | None, gpus: int | None, ranks: Sequence[int] | None, **how: Any
) -> Workload:
    with _run_as_file(function):
        if isinstance(function, str):
            file, _, called = function.rpartition(":")
            make_step, default = load_function(function), called if called != _USUAL else Path(file).stem
        else:
            make_step, default = function, getattr(function, "__name__", type(function).__name__)
        if gpus is not None:
            return capture_distributed(make_step, world_size=gpus, ranks=ranks, name=name or default, **how)
        if ranks is not None:
            raise TraincastError(NO_GPUS)
        return capture_step(make_step, name=name or default, **how)


def load_function(spec: str) -> Callable[..., Any]:
    """The function of `FILE.py:FUNCTION`. The file is run, as `python FILE.py` would run it; give only your own."""
    file, separator, function = spec.rpartition(":")
    if not separator or not file or not function.isidentifier():
        raise TraincastError(f"'{spec}' names no function; {_FORM}")
    path = Path(file)
    if not path.is_file():
        raise TraincastError(f"no file {file}; {_FORM}")
    module = _run_file(path)
    attribute = getattr(module, function, None)
    if attribute is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise make_unknown_error("function", function, functions, f"It must be defined in {file}.")
    if not callable(attribute):
        raise TraincastError(f"{function} in {file} is no function but {type(attribute).__name__}")
    made: Callable[..., Any] = attribute
    return made


def _run_file(path: Path) -> ModuleType:
    """The file as a module, with its own folder importable as in a run of the file itself."""
    location = importlib.util.spec_from_file_location(f"traincast_captured_{path.stem}", path.resolve())
    if location is None or location.loader is None:
        raise TraincastError(f"{path} is no Python file; {_FORM}")
    module = importlib.util.module_from_spec(location)
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    sys.modules[location.name] = module
    try:
        location.loader.exec_module(module)
    except Exception as error:
        del sys.modules[location.name]
        raise TraincastError(
            f"{_find_error_line(error, path)}: the file fails to load: {format_one_line(error)}"
        ) from error
    finally:
        sys.path.remove(folder)
    return module


def _find_error_line(error: Exception, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename or path}:{error.lineno}"
    where = find_raised_line(error.__traceback__)
    return where if ":" in where else str(path)
