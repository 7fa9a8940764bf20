"""The keywords of the public calls that say which step is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traincast.costs.host.profile import HostProfile
from traincast.hardware.platform import Platform
from traincast.ir.given import OpCost
from traincast.ir.workload import Workload
from traincast.planner.what_if.scene import Scene, scene_of
from traincast.simulator.scenario.costs import read_costs
from traincast.simulator.scenario.loading import Loader
from traincast.simulator.scenario.predict import Question
from traincast.simulator.scenario.variant import VariantOptions, variant_of
from traincast.simulator.scenario.workloads import default_dtype
from traincast.utils.errors import TraincastError, shown

if TYPE_CHECKING:
    from traincast.simulator.parallelism.layout import Layout


class SceneOptions(VariantOptions, total=False):
    """Those of `predict`, and a layout."""

    gpus: int | None
    clock_mhz: float | None
    host: str | HostProfile | None
    roofline_only: bool
    program: str | None
    cuda_graph: bool
    loader: Loader | None
    costs: str | Path | Sequence[OpCost] | None
    layout: Layout | None


_MOST_DOLLARS = 1e9
_ASKED = ("gpus", "clock_mhz", "host", "roofline_only", "program", "cuda_graph", "loader", "costs")


def scene_from(workload: str | Path | Workload, on: str | Platform, options: SceneOptions) -> Scene:
    """The scene that keywords describe."""
    given: dict[str, Any] = dict(options)
    layout = given.pop("layout", None)
    given["costs"] = read_costs(given.get("costs"))
    asked = {name: given.pop(name) for name in _ASKED if name in given}
    if layout is not None and asked.pop("gpus", None) not in (None, layout.gpus):
        raise TraincastError("`gpus` and the layout name different numbers of GPUs; give one of them")
    variant: VariantOptions = given  # type: ignore[assignment]
    if layout is not None:
        variant = {}
    question = Question(workload=workload, on=on, variant=variant_of(variant, default_dtype(workload)), **asked)
    return scene_of(question, layout)


def prices_of(price: float | Mapping[str, float] | None) -> dict[str, float]:
    """Dollars of a GPU and hour by platform; "" is for all others."""
    if price is None:
        return {}
    known = dict(price) if isinstance(price, Mapping) else {"": price}
    for name, dollars in known.items():
        if isinstance(dollars, bool) or not isinstance(dollars, int | float) or not 0 < dollars < _MOST_DOLLARS:
            where = f" of {name}" if name else ""
            raise TraincastError(f"`price`{where} must be a number above 0, not {shown(dollars)}")
    return known
