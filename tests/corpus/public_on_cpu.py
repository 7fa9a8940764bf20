"""Public scripts run for real on this CPU: the ops of one update against those that were captured."""

from __future__ import annotations

import json
import os
import runpy
from contextlib import ExitStack
from pathlib import Path
from types import MethodType
from typing import Any

import torch

from tests.capturing.oracle import observed, read_trace
from tests.corpus.against_cpu import as_on_a_gpu, list_differences
from tests.corpus.public import Script, set_arguments, turn_streams
from traincast.ir.file import load_workload

_WARM = 2  # updates before the one that a capture records


class _Done(BaseException):
    """The update has been seen."""


def compare_with_cpu(script: Script, folder: Path) -> list[str]:
    """Where the captured step (`NAME.tc`, which `try_script` leaves) differs from the same update on this CPU."""
    said = folder.parent / f"{script.name}.differences.json"
    said.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        turn_streams(folder.parent / f"{script.name}.cpu.log")
        trace = folder.parent / f"{script.name}.trace.json"
        _run_script(script, folder, trace)
        workload = load_workload(folder.parent / f"{script.name}.tc")
        said.write_text(json.dumps(list_differences(read_trace(trace), workload)))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not said.exists():
        return [f"the run on the CPU ended with {os.waitstatus_to_exitcode(status)}"]
    return list(json.loads(said.read_text()))


def _run_script(script: Script, folder: Path, trace: Path) -> None:
    """Runs the script until its third update, and writes what that runs."""
    target = set_arguments(script, folder, script.arguments if script.on_cpu == "same" else script.on_cpu)
    with as_on_a_gpu(), ExitStack() as stack:
        _follow_updates(stack, trace)
        try:
            runpy.run_path(target, run_name="__main__")
        except (_Done, SystemExit):
            return


def _follow_updates(stack: ExitStack, trace: Path) -> None:
    """Observes from the second call of the optimizer that is called first to its third."""
    prepare: Any = torch.optim.Optimizer._patch_step_function
    followed: list[Any] = []

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = type(self).step(self, *args, **kwargs)
        if not followed or followed[0] is self:
            followed.append(self)
            if len(followed) == _WARM:
                stack.enter_context(observed(trace))
            elif len(followed) > _WARM:
                stack.close()
                raise _Done
        return result

    def prepare_step(self: Any) -> None:
        prepare(self)
        self.step = MethodType(step, self)

    torch.optim.Optimizer._patch_step_function = prepare_step
