"""The Python calls that weigh changes: what-ifs, advice, sensitivities, sweeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

if TYPE_CHECKING:
    from traincast.platform.platform import Platform
    from traincast.what_if.advice import Advice
    from traincast.what_if.options import SceneOptions
    from traincast.what_if.result import WhatIf
    from traincast.what_if.sensitivity import Sensitivity
    from traincast.what_if.sweeps.result import SweepResult
    from traincast.workload.workload import Workload


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
    from traincast.what_if.ask import ask
    from traincast.what_if.money import Prices
    from traincast.what_if.options import scene_from

    prices = Prices(per_gpu_hour=price, samples=samples, tokens=tokens, power_watts=power_watts)
    return ask(scene_from(workload, on, scene), edits, prices)


def advise(
    workload: str | Path | Workload,
    *,
    on: str | Platform,
    price: float | None = None,
    progress: Callable[[float], None] = lambda _: None,
    **scene: Unpack[SceneOptions],
) -> Advice:
    """Which edits would make a step faster: those that apply, alone and in pairs, by the gain of a sample, each with
    its 90 % interval, what it does to memory and money, and its risk. Keywords as in `whatif`."""
    from traincast.what_if.advice import advise as answer
    from traincast.what_if.money import Prices
    from traincast.what_if.options import scene_from

    return answer(scene_from(workload, on, scene), Prices(per_gpu_hour=price), progress=progress)


def sensitivity(workload: str | Path | Workload, *, on: str | Platform, **scene: Unpack[SceneOptions]) -> Sensitivity:
    """Which numbers of the platform a step depends on, as elasticities, and which measurement would narrow its interval
    most. Keywords as in `whatif`."""
    from traincast.what_if.options import scene_from
    from traincast.what_if.sensitivity import sensitivity as answer

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
    ray: str | None = None,
    progress: Callable[[float], None] = lambda _: None,
    **scene: Unpack[SceneOptions],
) -> SweepResult:
    """Predicts a step at every combination of values: `vary` has those of each edit ("batch-size", "on", "gpus", ...),
    and of "apply" edits without values ("none", "cuda-graph", "a+b"). A text may be a list or a range
    ("256:8192:x2").

    `out` (.csv, .parquet) receives the rows; a sweep that was interrupted goes on when it is asked for again. `image`
    (.svg) is a picture of time over cost. `price` is dollars of one GPU for an hour, or those by platform. Points run
    on `workers` processes (default: one a core), or on the Ray cluster at the address `ray`. A point that cannot be
    predicted is a row with an error.
    """
    from traincast.what_if.options import prices_of, scene_from
    from traincast.what_if.sweeps.grid import grid_of
    from traincast.what_if.sweeps.run import sweep as answer

    grid = grid_of({name: [str(value) for value in values] for name, values in vary.items()})
    return answer(
        scene_from(workload, on, scene), grid, out=None if out is None else Path(out),
        image=None if image is None else Path(image), prices=prices_of(price), workers=workers, ray=ray,
        progress=progress,
    )  # fmt: skip


def list_edits() -> list[dict[str, str]]:
    """Every edit of `whatif`: how it is written, what it does, and what it may cost besides time."""
    from traincast.what_if.edits.registry import edits

    return [{"edit": one.written, "what": one.what, "risk": one.risk} for one in edits().values()]
