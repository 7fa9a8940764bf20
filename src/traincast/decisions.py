"""The Python calls that weigh changes: what-ifs, advice, sensitivities, sweeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

if TYPE_CHECKING:
    from traincast.platform.platform import Platform
    from traincast.what_if.advice import Advice
    from traincast.what_if.options import SceneOptions
    from traincast.what_if.result import WhatIf
    from traincast.what_if.sensitivity import Sensitivity
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


def list_edits() -> list[dict[str, str]]:
    """Every edit of `whatif`: how it is written, what it does, and what it may cost besides time."""
    from traincast.what_if.edits.registry import edits

    return [{"edit": one.written, "what": one.what, "risk": one.risk} for one in edits().values()]
