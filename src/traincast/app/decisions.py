"""The Python calls that weigh changes and choices (what-ifs, advice, sweeps, searches), and those about the machine at
hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from traincast.app.keywords import spell_out_keywords

if TYPE_CHECKING:
    from traincast.app.keywords import ScenarioFields, StepFields, VariantFields
    from traincast.calibration.bench.measure import Measured
    from traincast.calibration.bench.selfcheck import SelfCheck
    from traincast.calibration.here import Benched, Calibrated
    from traincast.calibration.measure import Source as Step
    from traincast.calibration.refine import Refined
    from traincast.ir.workload import Workload
    from traincast.planner.fitting import Fit
    from traincast.planner.parallelism.plan import Plan
    from traincast.planner.sharding.result import ShardingResult
    from traincast.planner.what_if.advice import Advice, Sensitivity
    from traincast.planner.what_if.money import PlatformComparison
    from traincast.planner.what_if.result import WhatIf
    from traincast.planner.what_if.sweeps.result import SweepResult
    from traincast.simulator.scenario.resolved import Resolved
    from traincast.simulator.scenario.scenario import On, Scenario, Source


Progress = Callable[[float], None]
"""Hears the fraction that is done."""


def _ignore_progress(_: float) -> None:
    """Ignores progress."""


def _make_variant(fields: VariantFields) -> Scenario:
    """The variant of a step that is run: in fp32 unless another arithmetic is named."""
    from traincast.simulator.scenario.resolved import make_scenario

    return make_scenario({"dtype": "fp32", **fields})


@spell_out_keywords
def measure(
    step: Step,
    *,
    device: str = "cpu",
    repeats: int = 30,
    seconds: float = 20.0,
    clock: str = "wall",
    nominal: float | None = None,
    trace_out: str | Path | None = None,
    gpus: int = 1,
    progress: Progress = _ignore_progress,
    **variant: Unpack[VariantFields],
) -> Measured:
    """Runs a real training step on this machine, interleaved with a reference kernel, and says how long it takes.

    `step` is a built-in model, a DLRM in YAML or as a `DlrmConfig`, "FILE.py:FUNCTION" or a function (`capture` says
    of which form). It is run up to `repeats` times within about `seconds`. `clock` is "wall", or "busy" (the time of
    this thread alone). `nominal` is how long the reference takes where the corrected figure is to hold (default: here
    and now). `trace_out` receives a Kineto trace of one more step; on a GPU there is one in any case. With `gpus` as
    many processes train together (a DLRM hybrid parallel, others under DDP), over gloo on a CPU, one thread each, or
    NCCL. Needs torch; variants as in `predict`.
    """
    from traincast.calibration.measure import make_slug
    from traincast.calibration.measure import measure_here as run
    from traincast.costs.cpu.profile import get_profile_home

    trace = None if trace_out is None else Path(trace_out)
    if trace is None and device == "cuda" and gpus == 1:
        trace = get_profile_home() / f"step-{make_slug(step)}.json"
        trace.parent.mkdir(parents=True, exist_ok=True)
    if gpus != 1:
        from traincast.calibration.measure_ranks import measure_ranks

        return measure_ranks(
            step, _make_variant(variant), gpus, device=device, repeats=repeats, seconds=seconds, clock=clock,
            nominal=nominal, trace=trace,
        )  # fmt: skip
    return run(
        step, _make_variant(variant), device=device, repeats=repeats, seconds=seconds, clock=clock, nominal=nominal,
        trace=trace, progress=progress,
    )  # fmt: skip


@spell_out_keywords
def bench(
    *,
    device: str = "cpu",
    budget: str = "10m",
    store: str | Path | None = None,
    workload: Step | None = None,
    seed: int = 0,
    dry_run: bool = False,
    clock_mhz: float = 0.0,
    progress: Progress = _ignore_progress,
    covered: Callable[[str], None] = lambda _: None,
    **variant: Unpack[VariantFields],
) -> Benched:
    """Measures this machine: microbenchmarks into a store (a folder; default: one per device), for the time `budget`.

    With a `workload` (as `measure` takes it, in a variant) only its own ops are measured, most valuable first, and
    `covered` hears after each minute, in words, how much of its time is. A `dry_run` says what would be measured.
    `clock_mhz` is the clock that a GPU was locked to, a part of its identity. A run that was interrupted goes on where
    it stopped; two at a time do not write to one store. Needs torch and polars.
    """
    from traincast.calibration.here import run_campaign as run

    return run(
        device=device, budget=budget, store=None if store is None else Path(store), workload=workload,
        variant=_make_variant(variant), seed=seed, dry_run=dry_run, clock_mhz=clock_mhz, progress=progress,
        covered=covered,
    )  # fmt: skip


def self_check(device: str = "cpu") -> SelfCheck:
    """Tries every part that `bench` needs of a device once; the report says which failed. Needs torch."""
    from traincast.calibration.bench.selfcheck import check_device
    from traincast.calibration.bench.store import open_device

    return check_device(lambda: open_device(device), device)


def fit_store(store: str | Path, *, out: str | Path | None = None, clock: str = "wall") -> Calibrated:
    """Fits the profile of a machine from the store that `bench` filled, and writes it to the file `out` (default: where
    `on="here"` looks). The result has the errors on a held-out fifth (percent). Needs polars."""
    from traincast.calibration.here import fit_store as run

    return run(Path(store), None if out is None else Path(out), clock)


def refine_from_traces(*files: str | Path, platform: str, out: str | Path | None = None) -> Refined:
    """Corrects the shipped models of a built-in GPU and its host by traced runs of your own, and writes a platform
    (`out`, .toml) that predictions take. Every other step is fitted to; the result says how far the others are off."""
    from traincast.calibration.refine import refine_from_traces as run

    return run(files, platform, None if out is None else Path(out))


def refine(store: str | Path, platform: str, *, out: str | Path | None = None) -> Refined:
    """Corrects the shipped model of a built-in GPU by a store that `bench` filled on one, and writes a platform (`out`,
    .toml) that predictions take. The fewer samples a family has, the less it is corrected. Needs polars."""
    from traincast.calibration.refine import refine_platform as run

    return run(Path(store), platform, None if out is None else Path(out))


@spell_out_keywords
def whatif(
    workload: Source,
    edits: Sequence[str],
    *,
    on: On,
    price: float | str | Mapping[str, float] | None = None,
    samples: float | None = None,
    tokens: float | None = None,
    **scenario: Unpack[ScenarioFields],
) -> WhatIf:
    """A step before and after `edits` such as "batch-size=4096" or "cuda-graph" (`list_edits` names them), and the
    change with its 90 % interval: errors that both predictions share are left out of it.

    `price` is dollars of one GPU for an hour, or those by platform or GPU ("h100=2.5,a100-80gb=1.6"; others as listed),
    `samples` or `tokens` those of the whole run; energy is at most that of `power_limit_w` (default: the limit on the
    sheet of the GPU). Other keywords are those of `predict`.
    """
    from traincast.planner.what_if.money import make_prices
    from traincast.planner.what_if.result import answer_what_if

    prices = make_prices(price, samples=samples, tokens=tokens)
    return answer_what_if(_resolve_scenario(workload, on, scenario), edits, prices)


@spell_out_keywords
def advise(
    workload: Source,
    *,
    on: On,
    price: float | str | Mapping[str, float] | None = None,
    samples: float | None = None,
    tokens: float | None = None,
    progress: Callable[[float], None] = lambda _: None,
    **scenario: Unpack[ScenarioFields],
) -> Advice:
    """Which edits would make a step faster: those that apply, alone and in pairs, by the gain of a sample, each with
    its 90 % interval, what it does to memory and money, and its risk. Keywords as in `whatif`."""
    from traincast.planner.what_if.advice import advise as answer
    from traincast.planner.what_if.money import make_prices

    prices = make_prices(price, samples=samples, tokens=tokens)
    return answer(_resolve_scenario(workload, on, scenario), prices, progress=progress)


@spell_out_keywords
def sensitivity(workload: Source, *, on: On, **scenario: Unpack[ScenarioFields]) -> Sensitivity:
    """Which numbers of the platform a step depends on, as elasticities, and which measurement would narrow its interval
    most. Keywords as in `predict`."""
    from traincast.planner.what_if.advice import analyse_sensitivity as answer

    return answer(_resolve_scenario(workload, on, scenario))


def _resolve_scenario(workload: Source, on: On, fields: Any) -> Resolved:
    from traincast.app.predicting import capture_source, check_gpu
    from traincast.simulator.scenario.resolved import make_scenario, resolve

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
    from traincast.planner.what_if.sweeps.points import format_value, make_grid
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
    from traincast.planner.what_if.money import choose_prices, compare_platforms
    from traincast.simulator.scenario.resolved import make_scenario

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
    tool: str | None = None,
    processes: int | None = None,
    progress: Callable[[float], None] = lambda _: None,
    **scenario: Unpack[StepFields],
) -> Plan:
    """How to train a described Transformer on `gpus` GPUs: the layouts with the fastest steps that fit in memory, best
    first, each with the command that predicts it.

    The step is `global_batch` samples (default two per GPU), or as many as hold `tokens_per_step`. `price` is dollars
    of one GPU for an hour, `tokens` those of the whole training. With a `tool` ("torchtitan", "deepspeed", ...) only
    layouts that its launch file can state take part. Other keywords are those of `predict`, but for what is searched.
    A long search runs in `processes` (default one per core); the plan is the same.
    """
    from traincast.planner.parallelism.plan import plan as answer
    from traincast.simulator.scenario.resolved import make_scenario
    from traincast.utils.parallel.runner import search_workers

    return answer(
        make_scenario({"workload": workload, "on": on, "gpus": gpus, **scenario}), tokens_per_step=tokens_per_step,
        price=price, tokens=tokens, tool=tool, workers=search_workers(processes), progress=progress,
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
    from traincast.planner.sharding.search import shard as answer
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
    from traincast.planner.fitting import answer_fit

    return answer_fit(_resolve_scenario(workload, on, scenario), largest=max, progress=progress)
