"""The Python calls that weigh changes and choices: what-ifs, advice, sensitivities, sweeps, searches for layouts and
plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

if TYPE_CHECKING:
    from traincast.hardware.platform import Platform
    from traincast.ir.workload import Workload
    from traincast.models.transformers.description import Transformer
    from traincast.planner.parallelism.plan import Plan
    from traincast.planner.sharding.result import ShardingAnswer
    from traincast.planner.what_if.advice import Advice
    from traincast.planner.what_if.options import SceneOptions
    from traincast.planner.what_if.result import WhatIf
    from traincast.planner.what_if.sensitivity import Sensitivity
    from traincast.planner.what_if.sweeps.result import SweepResult


def whatif(
    workload: str | Path | Workload,
    *,
    on: str | Platform,
    edits: Sequence[str],
    price: float | None = None,
    samples: float | None = None,
    tokens: float | None = None,
    power_watts: float | None = None,
    **scene: Unpack[SceneOptions],
) -> WhatIf:
    """A step before and after `edits` such as "batch-size=4096" or "cuda-graph" (`list_edits` names them), and the
    change with its 90 % interval: errors that both predictions share are left out of it.

    `price` is dollars of one GPU for an hour, `samples` or `tokens` those of the whole run, `power_watts` the power
    limit of a GPU (default: that of its sheet). Other keywords are those of `predict`; `layout` lays a Transformer over
    GPUs as in `predict_training`.
    """
    from traincast.planner.what_if.ask import ask
    from traincast.planner.what_if.money import Prices
    from traincast.planner.what_if.options import scene_from

    prices = Prices(per_gpu_hour=price, samples=samples, tokens=tokens, power_watts=power_watts)
    return ask(scene_from(workload, on, scene), edits, prices)


def advise(
    workload: str | Path | Workload,
    *,
    on: str | Platform,
    price: float | None = None,
    samples: float | None = None,
    tokens: float | None = None,
    power_watts: float | None = None,
    progress: Callable[[float], None] = lambda _: None,
    **scene: Unpack[SceneOptions],
) -> Advice:
    """Which edits would make a step faster: those that apply, alone and in pairs, by the gain of a sample, each with
    its 90 % interval, what it does to memory and money, and its risk. Keywords as in `whatif`."""
    from traincast.planner.what_if.advice import advise as answer
    from traincast.planner.what_if.money import Prices
    from traincast.planner.what_if.options import scene_from

    prices = Prices(per_gpu_hour=price, samples=samples, tokens=tokens, power_watts=power_watts)
    return answer(scene_from(workload, on, scene), prices, progress=progress)


def sensitivity(workload: str | Path | Workload, *, on: str | Platform, **scene: Unpack[SceneOptions]) -> Sensitivity:
    """Which numbers of the platform a step depends on, as elasticities, and which measurement would narrow its interval
    most. Keywords as in `whatif`."""
    from traincast.planner.what_if.options import scene_from
    from traincast.planner.what_if.sensitivity import sensitivity as answer

    return answer(scene_from(workload, on, scene))


def sweep(
    workload: str | Path | Workload,
    *,
    on: str | Platform,
    vary: Mapping[str, Sequence[str | int | float]],
    out: str | Path | None = None,
    image: str | Path | None = None,
    price: float | Mapping[str, float] | None = None,
    workers: int | None = None,
    progress: Callable[[float], None] = lambda _: None,
    **scene: Unpack[SceneOptions],
) -> SweepResult:
    """Predicts a step at every combination of values: `vary` has those of each edit ("batch-size", "on", "gpus", ...),
    and of "apply" edits without values ("none", "cuda-graph", "a+b"). A text may be a list or a range
    ("256:8192:x2").

    `out` (.csv, .parquet) receives the rows; a sweep that was interrupted goes on when it is asked for again. `image`
    (.svg) is a picture of time over cost. `price` is dollars of one GPU for an hour, or those by platform. Points run
    on `workers` processes (default: one per core). A point that cannot be
    predicted is a row with an error.
    """
    from traincast.planner.what_if.options import prices_of, scene_from
    from traincast.planner.what_if.sweeps.grid import grid_of, value_text
    from traincast.planner.what_if.sweeps.run import sweep as answer

    grid = grid_of({name: [value_text(value) for value in values] for name, values in vary.items()})
    return answer(
        scene_from(workload, on, scene), grid, out=None if out is None else Path(out),
        image=None if image is None else Path(image), prices=prices_of(price), workers=workers,
        progress=progress,
    )  # fmt: skip


def plan(
    model: str | Path | Transformer,
    *,
    on: str | Platform,
    gpus: int,
    global_batch: int | None = None,
    tokens_per_step: int | None = None,
    seq_len: int | None = None,
    dtype: str = "bf16",
    price: float | None = None,
    tokens: float | None = None,
    workers: int | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> Plan:
    """How to train a Transformer on so many GPUs: the layouts with the fastest steps that fit in memory, best first.

    The step is `global_batch` samples (default two a GPU), or as many as hold `tokens_per_step`. `price` is dollars of
    one GPU for an hour, `tokens` those of the whole training. The model is named as in `predict_training`. A long
    search runs in `workers` processes (default one per core); the answer is
    the same.
    """
    from traincast.planner.parallelism.ask import PlanQuestion, answer_plan
    from traincast.utils.parallel.where import search_workers

    question = PlanQuestion(
        model=str(model) if isinstance(model, Path) else model, on=on, gpus=gpus, global_batch=global_batch,
        tokens_per_step=tokens_per_step, seq_len=seq_len, dtype=dtype, price=price, tokens=tokens,
        workers=search_workers(workers),
    )  # fmt: skip
    return answer_plan(question, progress)


def shard(
    tables: str | Path,
    *,
    on: str,
    gpus: int,
    batch_size: int = 2048,
    dtype: str | None = None,
    dense: str | Path | None = None,
    candidates: str | Path | None = None,
    seed: int = 0,
    time_limit: float | None = None,
    torchrec: bool = True,
    workers: int | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> ShardingAnswer:
    """Where embedding tables go: the plan with the fastest step on `gpus` GPUs of a node, and why others are slower.

    `tables` is a YAML, CSV or Parquet file, a TorchRec module description (.json) or a built-in set ("mlperf-dlrm",
    ...). `batch_size` is samples per GPU, `dtype` replaces the type of all tables, `dense` describes the dense part of
    the model in YAML. `candidates` only ranks the plans of a file. The search ends after about `time_limit` seconds;
    `torchrec` compares with TorchRec's planner, where it is installed. Full walks that take long run in `workers`
    processes (default one per core); the answer is the same.
    """
    from traincast.planner.sharding.ask import shard as answer
    from traincast.utils.parallel.where import search_workers

    return answer(
        str(tables),
        on=on,
        gpus=gpus,
        batch_size=batch_size,
        dtype=dtype,
        dense=None if dense is None else Path(dense),
        candidates=None if candidates is None else Path(candidates),
        seed=seed,
        time_limit=time_limit,
        torchrec=torchrec,
        workers=search_workers(workers),
        progress=progress,
    )


def list_edits() -> list[dict[str, str]]:
    """Every edit of `whatif`: how it is written, what it does, and what it may cost besides time."""
    from traincast.planner.what_if.edits.registry import edits

    return [{"edit": one.written, "what": one.what, "risk": one.risk} for one in edits().values()]
