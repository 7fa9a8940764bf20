"""The Python API: one call per command of the command line, with the same results.

Everything is imported when it is needed, so that `import traincast` costs little and a prediction needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from traincast.app.decisions import advise as advise
from traincast.app.decisions import bench as bench
from traincast.app.decisions import compare as compare
from traincast.app.decisions import fit_store as fit_store
from traincast.app.decisions import fits as fits
from traincast.app.decisions import list_edits as list_edits
from traincast.app.decisions import measure as measure
from traincast.app.decisions import plan as plan
from traincast.app.decisions import refine as refine
from traincast.app.decisions import refine_from_traces as refine_from_traces
from traincast.app.decisions import self_check as self_check
from traincast.app.decisions import sensitivity as sensitivity
from traincast.app.decisions import shard as shard
from traincast.app.decisions import sweep as sweep
from traincast.app.decisions import whatif as whatif
from traincast.app.keywords import spell_out_keywords
from traincast.utils.results import write_pages_with

if TYPE_CHECKING:
    from traincast.app.checking import CheckResult
    from traincast.app.keywords import ScenarioFields, StepFields
    from traincast.app.pages.writing import WrittenPage
    from traincast.capturing.script import Recording
    from traincast.hardware.platform import Platform
    from traincast.ir.formula import OpCost
    from traincast.ir.workload import Workload
    from traincast.simulator.prediction.result import Prediction
    from traincast.simulator.scenario.catalog import Exported, ModelList, PlatformList
    from traincast.simulator.scenario.scaling import ScalingCurve
    from traincast.simulator.scenario.scenario import On, Source
    from traincast.traces.replay.compare import TraceComparison
    from traincast.traces.replay.results import TraceReport
    from traincast.utils.results import Result

Costs: TypeAlias = "str | Path | Sequence[OpCost] | None"
"""What ops cost, as their author knows it: a file (.toml) or a list."""
Progress = Callable[[float], None]
"""Hears the fraction that is done."""


def _ignore_progress(_: float) -> None:
    """Ignores progress."""


@spell_out_keywords
def predict(workload: Source, *, on: On, **scenario: Unpack[ScenarioFields]) -> Prediction:
    """Predicts one step of a workload on a platform; see `Prediction` for what comes back (seconds).

    `workload` is a built-in model, a described Transformer ("llama3-8b"), a DLRM described in YAML, a Hugging Face
    `config.json`, a saved workload (`.tc`), or one of these as an object. `on` is a built-in GPU or node, your own
    description (`.toml`), "here" (the machine at hand, once it was measured), or a `Platform`. All other keywords are
    the fields of `Scenario`, the same as the options of `traincast predict`. One that this step does not use is an
    error.
    """
    from traincast.app.predicting import predict as answer
    from traincast.simulator.scenario.resolved import make_scenario

    return answer(make_scenario({"workload": workload, "on": on, **scenario}))


@spell_out_keywords
def scaling(
    workload: Source, *, on: On, gpus: Sequence[int], kind: str = "weak", **scenario: Unpack[StepFields]
) -> ScalingCurve:
    """Predicts one step on every number of GPUs given. `batch_size` is that of one GPU for a curve of the `kind`
    "weak", and that of all GPUs together for a "strong" one. Other keywords as in `predict`."""
    from traincast.simulator.scenario.resolved import make_scenario
    from traincast.simulator.scenario.scaling import predict_scaling

    return predict_scaling(make_scenario({"workload": workload, "on": on, **scenario}), gpus, kind)


def check(
    scenarios: Sequence[str | Path] = (),
    *,
    baseline: str | Path,
    gate: str = "step:+3%,memory:+2%,kernels:+5%",
    update: str = "",
    progress: Progress = _ignore_progress,
) -> CheckResult:
    """Predicts scenarios (YAML files with fields of `Scenario`; none: all of the baseline) and compares them with a
    stored `baseline` under a `gate`. With a reason as `update` the baseline is written instead."""
    from traincast.app.checking import check as answer

    return answer(scenarios, baseline=baseline, gate=gate, update=update, progress=progress)


def capture(
    function: str | Callable[..., Any],
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    gpus: int | None = None,
    ranks: Sequence[int] | None = None,
    mode: str = "training",
    name: str | None = None,
    out: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
    assume: Mapping[str, object] | Sequence[str] | None = None,
    costs: Costs = None,
    arguments: Sequence[str] = (),
    as_gpu: str | None = None,
    time_limit_s: float = 3600.0,
) -> Workload:
    """Captures a training step of your own model, without a GPU. Needs torch.

    `function` is `make_step(batch_size)` or `make_step(batch_size, seq_len)`, or "FILE.py:FUNCTION": it builds model,
    optimizer and inputs in plain PyTorch and returns a callable that runs one iteration. With a number of `gpus` it is
    `make_step(batch_size, *, rank, world_size)`, captured for all ranks or for those in `ranks`. `out` is a file (.tc)
    that receives the workload as well; `progress` hears which size and rank is being captured. What comes back can be
    given to `predict` at any batch size.

    `assume` states what the step reads from tensors, which a capture does not have: `{"mask": 0.15}` (a mask keeps 15 %
    of its elements), `padding`, `branch`, `item`, `lengths`, `distinct`, `experts`; a key may name its place,
    `"branch@train.py:42"`. `costs` say what ops of your own cost: a file (.toml) or a list of `OpCost`. "FILE.py"
    without a function is a script, run as it is with its own `arguments` until its optimizer was called three times;
    where they have `{batch_size}` (and `{seq_len}`), at several sizes; with a number of `gpus`, rank by rank. `as_gpu`
    names the device that code which asks is told (default: an A100 of 80 GB). What is in a file runs in a process of
    its own: it changes no file and reaches no other machine, and is ended after `time_limit_s` seconds.
    """
    from traincast.app.captures import capture_isolated
    from traincast.ir.file import save_workload
    from traincast.simulator.scenario.resolved import read_costs

    how = {
        "batch_size": batch_size, "seq_len": seq_len, "gpus": gpus, "ranks": ranks, "mode": mode, "name": name,
        "assume": assume, "arguments": arguments,
    }  # fmt: skip
    known = read_costs(costs)  # before the code runs, which may take long
    workload = replace(capture_isolated(function, as_gpu, progress, how, time_limit_s), costs=known)
    if out is not None:
        save_workload(workload, out)
    return workload


def record(
    loop: Callable[..., object], *, batch_size: int = 32, seq_len: int | None = None, name: str | None = None,
    assume: Mapping[str, object] | Sequence[str] | None = None, out: str | Path | None = None,
) -> Workload:  # fmt: skip
    """Records a step of `loop(batch_size)` or `loop(batch_size, seq_len)`, a function that builds model and optimizer
    and runs the training loop, without a GPU. It is run at several sizes, each until its optimizer was called three
    times, so that the workload can be predicted at any; `out` is a file (.tc) that receives it. Needs torch."""
    from traincast.capturing.script import record as record_loop
    from traincast.ir.file import save_workload

    workload = record_loop(loop, batch_size=batch_size, seq_len=seq_len, name=name, assume=assume)
    if out is not None:
        save_workload(workload, out)
    return workload


def recording(
    *, batch_size: int = 1, seq_len: int = 0, name: str = "recorded",
    assume: Mapping[str, object] | Sequence[str] | None = None,
) -> AbstractContextManager[Recording]:  # fmt: skip
    """Records a step of the training loop inside the block, without a GPU: `with recording() as found: ...` gives
    `found.workload`, at the one size that the block has (`record` runs a loop at several). Model and optimizer are
    built inside; the third call of the optimizer ends it. Needs torch."""
    from traincast.capturing.script import recording as record_block

    return record_block(batch_size=batch_size, seq_len=seq_len, name=name, assume=assume)


@spell_out_keywords
def load(workload: Source, **scenario: Unpack[ScenarioFields]) -> Workload:
    """A built-in model by name, a saved workload (`.tc`), or a model described in a file, as a step of one GPU in the
    variant that fields of `Scenario` choose (`batch_size`, `dtype`, `mode`, ...)."""
    from traincast.simulator.scenario.kinds import check_used, find_source_kind
    from traincast.simulator.scenario.resolved import make_scenario
    from traincast.simulator.scenario.workloads import load_single_gpu_step as load_step

    asked = make_scenario({"workload": workload, **scenario})
    kind = find_source_kind(asked.workload)
    check_used(asked, kind)
    return load_step(asked, kind)


@spell_out_keywords
def export(workload: Source, out: str | Path, *, to: str = "pytorch", **scenario: Unpack[ScenarioFields]) -> Exported:
    """Writes rank 0 of a workload as an execution trace that other tools read: `to` is "pytorch" (the JSON of
    PyTorch's ExecutionTraceObserver) or "chakra" (a Chakra protobuf trace). Other keywords as in `load`."""
    from traincast.simulator.scenario.catalog import export_workload as write

    return write(load(workload, **scenario), Path(out), to)


def trace(
    *files: str | Path,
    on: str | Platform | None = None,
    host: str | None = None,
    host_scale: float | None = None,
    twice: Sequence[str] = (),
    step_marker: str = "",
) -> TraceReport:
    """What measured traces say: every step, where its time went, and whether a replay of it agrees.

    `files` are Kineto traces, with or without the execution traces of the same run, or folders of them, one file per
    rank. With a platform `on` the traced step is also predicted, with its own host times or those of the host profile
    `host` ("platform": the platform's own), `host_scale` times as slow (None: as its launch calls are). `twice` names
    ops, kernel families or "host" that are to be twice as fast, `step_marker` the op or annotation at which steps begin
    (default: the profiler's own markers, else an optimizer's steps, else the period of the kernels).
    """
    from traincast.traces.replay.analysis import analyse_trace_files as answer

    return answer(files, on=on, host=host, host_scale=host_scale, twice=twice, step_marker=step_marker)


def compare_traces(before: str | Path, after: str | Path, *, step_marker: str = "") -> TraceComparison:
    """Two traced runs (files, or folders of ranks, of which the slowest count): what of the step changed, and which
    ops, matched by name and shape, explain it. `before` may be the JSON of a prediction of the run (`traincast predict`
    in JSON): then by op and module. `step_marker` is as in `trace`."""
    from traincast.traces.replay.analysis import compare_traces as answer

    return answer(before, after, step_marker=step_marker)


def load_trace(*files: str | Path, step: int | None = None) -> Workload:
    """One step (by number; default: the one of median length) of a traced run as a workload, which can be saved with
    `traincast.ir.save_workload` and predicted elsewhere. Its `meta` says what the trace did not tell."""
    from traincast.traces.replay.workload import trace_workload

    name = Path(files[0]).name.partition(".")[0] if files else ""
    return trace_workload(trace(*files), name=name, step=step)


def write_report(
    answer: Result, out: str | Path, *, price: float | None = None, against: TraceReport | None = None
) -> WrittenPage:
    """Writes any answer of these calls as one self-contained HTML file (`out`): the number and its evidence, why, the
    timeline, memory, what-ifs, provenance. `price` is dollars of one GPU for an hour; `against` is the traced run that
    another one is to be compared with."""
    from traincast.app.pages.writing import add_what_ifs, make_page, write_page

    return write_page(add_what_ifs(make_page(answer, price, against), answer, price), Path(out))


def list_models() -> ModelList:
    """The built-in models; `list_models().coverage()` says how each of their ops is lowered to kernels."""
    from traincast.simulator.scenario.catalog import list_built_in_models

    return list_built_in_models()


def list_platforms() -> PlatformList:
    """The built-in GPUs and nodes, with the figures predictions use."""
    from traincast.simulator.scenario.catalog import list_built_in_platforms

    return list_built_in_platforms()


write_pages_with(lambda result, path: write_report(result, path))
