"""Captures of files: in a process of their own, which can change nothing here and whose crash leaves what was kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traincast.hardware.platform import load_platform
from traincast.ir.file import load_workload, save_workload
from traincast.ir.validate import check_names
from traincast.ir.workload import CAPTURED_BY, KEPT_BACK, Workload
from traincast.utils.errors import TORCH_MEMORY, TraincastError, check_memory_limit
from traincast.utils.parallel.apart import CAN_FORK, Ended, make_scratch, run_apart

if TYPE_CHECKING:
    from traincast.capturing.cuda_module import PretendedGpu
    from traincast.ir.program import Program

TIME_LIMIT_S = 3600.0
_PLACE = "{batch_size}"
_NOT_WRITTEN = (
    "; a capture lets no code write outside its scratch folder: take the writing out, or give it a path there"
)
_CUT_SHORT = "the capture was cut short after its first step: {}"


def capture_isolated(
    function: str | Callable[..., Any], as_gpu: str | None, progress: Callable[[str], None] | None,
    how: Mapping[str, Any], time_limit_s: float,
) -> Workload:  # fmt: skip
    """`capture_function` of a file in a process of its own, of a function in this one."""
    if not time_limit_s > 0:
        raise TraincastError(f"a time limit of {time_limit_s:g} s is out of range; give seconds above 0")
    check_names(filter(None, (how["name"],)))  # what is wrong here is said before the code runs
    if as_gpu is not None:
        load_platform(as_gpu)
    if callable(function) or not CAN_FORK:
        return _capture_here(function, as_gpu, progress, how)
    if find_spec("torch") is None:  # said here: in the other process it would be an error of its own
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    check_memory_limit(TORCH_MEMORY, "a capture")
    with make_scratch() as scratch:
        whole, first = Path(scratch) / "whole.tc", Path(scratch) / "first.tc"

        def work(tell: Callable[[str], None]) -> None:
            save_workload(_capture_here(function, as_gpu, tell, how, first), whole)

        ended = run_apart(work, scratch, listener=progress, seconds=time_limit_s)
        if ended.own and ended.failure:
            raise TraincastError(ended.failure + _NOT_WRITTEN * ("ermission denied" in ended.failure))
        if ended.failure and not first.exists():
            raise TraincastError(f"{function}: {ended.failure}, before a step was recorded")
        workload = _read_first(first, ended.failure) if ended.failure else load_workload(whole)
    asked = json.dumps({"function": str(function), "as_gpu": as_gpu, **how}, default=list)
    return _tell_changes(replace(workload, meta={**workload.meta, CAPTURED_BY: asked}), ended)


def recapture(
    workload: Workload, batch_size: int | None, seq_len: int | None, progress: Callable[[str], None] | None
) -> Workload:
    """The workload captured again at these sizes, by the file that it was captured from: runs its code."""
    batch = workload.batch_size if batch_size is None else batch_size
    if workload.serves_size(batch, seq_len):
        return workload
    try:
        asked = dict(json.loads(workload.meta[CAPTURED_BY]))
        function, as_gpu = str(asked.pop("function")), asked.pop("as_gpu")
        script = not function.rpartition(":")[1]
        arguments = [str(argument) for argument in asked["arguments"]]
    except (KeyError, TypeError, ValueError):
        raise TraincastError(
            f"workload '{workload.name}' does not say which file it was captured from; capture it at batch {batch}"
        ) from None
    if script and not any(_PLACE in argument for argument in arguments):
        raise TraincastError(
            f"the arguments of {function} do not say where its batch size is; capture it again with {_PLACE} there, or "
            f"with arguments for batch {batch}"
        )
    how = {**asked, "arguments": arguments, "batch_size": batch, "seq_len": seq_len or asked.get("seq_len")}
    return replace(capture_isolated(function, as_gpu, progress, how, TIME_LIMIT_S), costs=workload.costs)


def _read_first(first: Path, failure: str) -> Workload:
    """What was recorded before the process was ended, at its one size."""
    workload = load_workload(first)
    why = _CUT_SHORT.format(failure)
    fixed = tuple(replace(program, rigid=why) for program in workload.programs)
    return replace(workload, programs=fixed, assumptions=(*workload.assumptions, why))


def _tell_changes(workload: Workload, ended: Ended) -> Workload:
    if not ended.changed:
        return workload
    named = ", ".join(ended.changed[:5]) + ", ..." * (len(ended.changed) > 5)
    text = f"changed for real, by code that this system cannot hold back: {named}"
    told = "; ".join(filter(None, (workload.meta.get(KEPT_BACK), text)))
    return replace(workload, meta={**workload.meta, KEPT_BACK: told})


def _capture_here(
    function: str | Callable[..., Any], as_gpu: str | None, progress: Callable[[str], None] | None,
    how: Mapping[str, Any], first: Path | None = None,
) -> Workload:  # fmt: skip
    """Captures in this process; the first step recorded is kept in the file `first` as well."""
    from traincast.capturing.cuda_module import pretend_gpu
    from traincast.capturing.from_file import capture_function
    from traincast.capturing.rebatch import notify_listener

    def keep(program: Program) -> None:
        if first is not None and how.get("gpus") is None:  # one rank alone is no step of several
            save_workload(Workload(name=how["name"] or Path(str(function)).stem, programs=(program,)), first)

    gpu = None if as_gpu is None else _describe_gpu(as_gpu)
    with notify_listener(progress, keep), pretend_gpu(gpu):
        return capture_function(function, **how)


def _describe_gpu(key: str) -> PretendedGpu:
    """What a captured script is told of a GPU or of those of a platform."""
    from traincast.capturing.cuda_module import PretendedGpu

    device = load_platform(key).device
    major, minor = divmod(round(10 * device.compute_capability), 10)
    return PretendedGpu(device.name, (major, minor), int(device.memory_bytes), device.num_sms)
