"""Figures that only a step under a parallel layout has."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from traincast.simulator.parallelism.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelFigures:
    """Figures of a step under a layout, of the rank that the others wait for. Seconds and bytes.

    `exposed` is the time by rank group in which the device only communicates; `bubble` the time in which a pipeline
    stage waits for others; `compute` the time in which other kernels run. `flops` is the arithmetic of the model as MFU
    counts it, `peak_flops` the rate of one GPU that it is compared with. `simulated` is how many micro-batches the
    timeline shows (the rest repeat them).
    """

    layout: Layout
    exposed: dict[str, float]
    bubble: float
    compute: float
    flops: float
    peak_flops: float
    simulated: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data; keys say their units."""
        layout = self.layout
        return {
            "layout": {
                **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(layout).items()},
                "dp": layout.dp,
                "accumulation": layout.accumulation,
            },
            "global_batch": layout.global_batch,
            "micro_batch": layout.micro_batch,
            "micro_batches": layout.accumulation,
            "micro_batches_in_timeline": self.simulated,
            "exposed_ms": {name: 1e3 * seconds for name, seconds in self.exposed.items()},
            "bubble_ms": 1e3 * self.bubble,
        }


def list_layout_figures(figures: ParallelFigures | None) -> dict[str, Any]:
    """The figures as plain data; none for a step without a layout."""
    return {} if figures is None else figures.to_dict()
