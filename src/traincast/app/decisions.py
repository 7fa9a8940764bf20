"""The Python calls that weigh changes and choices: what-ifs, advice, sensitivities, sweeps, searches for layouts and
plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from traincast.app.keywords import spell_out_keywords

if TYPE_CHECKING:
    from traincast.app.keywords import ScenarioFields, StepFields
    from traincast.ir.workload import Workload
    from traincast.planner.fitting.fit import Fit
    from traincast.planner.parallelism.plan import Plan
    from traincast.planner.sharding.result import ShardingResult
    from traincast.planner.what_if.advice import Advice
    from traincast.planner.what_if.platforms import PlatformComparison
    from traincast.planner.what_if.result import WhatIf
    from traincast.planner.what_if.sensitivity import Sensitivity
    from traincast.planner.what_if.sweeps.result import SweepResult
    from traincast.simulator.scenario.resolved import Resolved
    from traincast.simulator.scenario.scenario import On, Source


@spell_out_keywords
def whatif(
    workload: Source,
    edits: Sequence[str],
    *,
    on: On,
    price: float | None = None,
    samples: float | None = None,
    tokens: float | None = None,
    **scenario: Unpack[ScenarioFields],
) -> WhatIf:
    """A step before and after `edits` such as "batch-size=4096" or "cuda-graph" (`list_edits` names them), and the
    change with its 90 % interval: errors that both predictions share are left out of it.

    `price` is dollars of one GPU for an hour, `samples` or `tokens` those of the whole run; energy is at most that of
    `power_limit_w` (default: the limit on the sheet of the GPU). Other keywords are those of `predict`.
    """
    from traincast.planner.what_if.money import Prices
    from traincast.planner.what_if.result import answer_what_if

    prices = Prices(per_gpu_hour=price, samples=samples, tokens=tokens)
    return answer_what_if(_resolve_scenario(workload, on, scenario), edits, prices)


@spell_out_keywords
def advise(
    workload: Source,
    *,
    on: On,
    price: float | None = None,
    samples: float | None = None,
    tokens: float | None = None,
    progress: Callable[[float], None] = lambda _: None,
    **scenario: Unpack[ScenarioFields],
) -> Advice:
    """Which edits would make a step faster: those that apply, alone and in pairs, by the gain of a sample, each with
    its 90 % interval, what it does to memory and money, and its risk. Keywords as in `whatif`."""
    from traincast.planner.what_if.advice import advise as answer
    from traincast.planner.what_if.money import Prices

    prices = Prices(per_gpu_hour=price, samples=samples, tokens=tokens)
    return answer(_resolve_scenario(workload, on, scenario), prices, progress=progress)


@spell_out_keywords
def sensitivity(workload: Source, *, on: On, **scenario: Unpack[ScenarioFields]) -> Sensitivity:
    """Which numbers of the platform a step depends on, as elasticities, and which measurement would narrow its interval
    most. Keywords as in `predict`."""
    from traincast.planner.what_if.sensitivity import analyse_sensitivity as answer

    return answer(_resolve_scenario(workload, on, scenario))


def _resolve_scenario(workload: Source, on: On, fields: Any) -> Resolved:
    from traincast.app.predicting import capture_source, check_gpu
    from traincast.simulator.scenario.fields import make_scenario
    from traincast.simulator.scenario.resolved import resolve

    scenario = make_scenario({"workload": workload, "on": on, **fields})
    check_gpu(scenario)
    return resolve(capture_source(scenario))


@spell_out_keywords
def sweep(
    workload: Source,
    *,
    on: On | None = None,
    vary: Mapping[str, Sequence[str | int | float]],
    out: str | Path | None = None,
    image: str | Path | None = None,
    price: float | Mapping[str, float] | None = None,
    processes: int | None = None,
    progress: Callable[[float], None] = lambda _: None,
    **scenario: Unpack[ScenarioFields],
) -> SweepResult:
    """Predicts a step at every combination of values: `vary` has those of each edit ("batch-size", "on", "gpus", ...),
    and of "apply" edits without values ("none", "cuda-graph", "a+b"). A text may be a list or a range
    ("256:8192:x2"). Without `on` the first platform of `vary` is the one that others are edits of.

    `out` (.csv, .parquet) receives the rows; a sweep that was interrupted goes on when it is asked for again. `image`
    (.svg) is a picture of time over cost. `price` is dollars of one GPU for an hour, or those by platform. Points run
    on `processes` (default: one per core). A point that cannot be
    predicted is a row with an error.
    """
    from traincast.planner.what_if.money import read_prices
    from traincast.planner.what_if.sweeps.grid import format_value, make_grid
    from traincast.planner.what_if.sweeps.run import run_sweep as answer

    if on is None:
        platforms = vary.get("on")
        on = str(platforms.split(",")[0] if isinstance(platforms, str) else platforms[0]) if platforms else ""
    edits = {name if ":" in name else name.replace("_", "-"): values for name, values in vary.items()}
    grid = make_grid({name: [format_value(value) for value in values] for name, values in edits.items()})
    return answer(
        _resolve_scenario(workload, on, scenario), grid, out=None if out is None else Path(out),
        image=None if image is None else Path(image), prices=read_prices(price), workers=processes,
        progress=progress,
    )  # fmt: skip


@spell_out_keywords
def compare(
    workload: Source,
    *,
    on: Sequence[str],
    price: float | str | Mapping[str, float] | None = None,
    samples: float | None = None,
    tokens: float | None = None,
    progress: Callable[[float], None] = lambda _: None,
    **scenario: Unpack[ScenarioFields],
) -> PlatformComparison:
    """The same step on several platforms, fastest first: time, memory, dollars, energy, trust. `price` is dollars of
    one GPU for an hour, for all or by platform or GPU (default: the built-in list; "none": no dollars); `samples` or
    `tokens` say how long the run is. Other keywords as in `predict`."""
    from traincast.app.predicting import capture_source
    from traincast.planner.what_if.money import choose_prices
    from traincast.planner.what_if.platforms import compare_platforms
    from traincast.simulator.scenario.fields import make_scenario

    prices, priced = choose_prices(price)
    base = capture_source(make_scenario({"workload": workload, "on": on[0] if on else "", **scenario}))
    return compare_platforms(
        base, on, prices, samples=samples, tokens=tokens, priced=priced, progress=progress
    )  # fmt: skip


@spell_out_keywords
def plan(
    workload: Source,
    *,
    on: On,
    gpus: int,
    tokens_per_step: int | None = None,
    price: float | None = None,
    tokens: float | None = None,
    processes: int | None = None,
    progress: Callable[[float], None] = lambda _: None,
    **scenario: Unpack[StepFields],
) -> Plan:
    """How to train a described Transformer on `gpus` GPUs: the layouts with the fastest steps that fit in memory, best
    first, each with the command that predicts it.

    The step is `global_batch` samples (default two per GPU), or as many as hold `tokens_per_step`. `price` is dollars
    of one GPU for an hour, `tokens` those of the whole training. Other keywords are those of `predict`, but for what is
    searched. A long search runs in `processes` (default one per core); the
    plan is the same.
    """
    from traincast.planner.parallelism.plan import plan as answer
    from traincast.simulator.scenario.fields import make_scenario
    from traincast.utils.parallel.runner import search_workers

    return answer(
        make_scenario({"workload": workload, "on": on, "gpus": gpus, **scenario}), tokens_per_step=tokens_per_step,
        price=price, tokens=tokens, workers=search_workers(processes), progress=progress,
    )  # fmt: skip


def shard(
    tables: str | Path | Workload | object,
    *,
    on: str,
    gpus: int,
    batch_size: int | None = None,
    dtype: str | None = None,
    dense: str | Path | None = None,
    candidates: str | Path | None = None,
    seed: int = 0,
    time_limit: float | None = None,
    torchrec: bool = True,
    processes: int | None = None,
    arguments: Sequence[str] = (),
    progress: Callable[[float], None] = lambda _: None,
) -> ShardingResult:
    """Where embedding tables go: the plan with the fastest step on `gpus` GPUs of a node, and why others are slower.

    `tables` is a YAML, JSON, CSV or Parquet file of tables or of a DLRM, a built-in set ("mlperf-dlrm", ...), a module
    with TorchRec's collections, a captured step of one GPU, or a script ("train.py", with its own `arguments`), of
    which one is captured. `batch_size` is samples per GPU (default 2048, or those of the captured step), `dtype`
    replaces the type of all tables, `dense` describes the dense part of the model in YAML. `candidates` only ranks the
    plans of a file. The search ends after about `time_limit` seconds; `torchrec` compares with TorchRec's planner,
    where it is installed. Full walks that take long run in `processes` (default one per core); the result is the same.
    """
    from traincast.app.predicting import read_tables
    from traincast.planner.sharding.entry import shard as answer
    from traincast.utils.parallel.runner import search_workers

    source, named = read_tables(tables, batch_size, arguments)
    return answer(
        source,
        named=named,
        on=on,
        gpus=gpus,
        batch_size=batch_size,
        dtype=dtype,
        dense=None if dense is None else Path(dense),
        candidates=None if candidates is None else Path(candidates),
        seed=seed,
        time_limit=time_limit,
        torchrec=torchrec,
        workers=search_workers(processes),
        progress=progress,
    )


def list_edits() -> list[dict[str, str]]:
    """Every edit of `whatif`: how it is written, what it does, and what it may cost besides time."""
    from traincast.planner.what_if.edits.registry import list_edits

    return [{"edit": one.written, "what": one.what, "risk": one.risk} for one in list_edits().values()]


@spell_out_keywords
def fits(
    workload: Source,
    *,
    on: On,
    max: str | None = None,
    progress: Callable[[float], None] = lambda _: None,
    **scenario: Unpack[ScenarioFields],
) -> Fit:
    """Whether a step fits in the memory of its GPUs: `fits`, its probability, allocated, reserved and used memory, what
    fills it, and the changes that would make it fit. `max` is "batch-size", "seq-len" or "rows", of which
    the largest that fits is searched. Other keywords as in `predict`."""
    from traincast.planner.fitting.fit import answer_fit

    return answer_fit(_resolve_scenario(workload, on, scenario), largest=max, progress=progress)
