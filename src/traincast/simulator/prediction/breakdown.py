"""What kernel time is spent on: phases, sources, modules, layers and ops, and ops outside of what was fitted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from traincast.costs.kernels.cost import Costs, Source
from traincast.ir.ops import Phase, find_layer
from traincast.simulator.timeline import Timeline
from traincast.utils.arrays import BoolArray, FloatArray
from traincast.utils.metrics import sum_by_key

PLACES = ("module", "layer", "op")
"""What kernel time can be shown by."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def mask_module_numbers(path: str) -> str:
    """A module's path with "*" for its numbers: `Bert.layers.*.mlp`."""
    return _NUMBER.sub("*", path)


def sum_seconds_by_module(timeline: Timeline) -> dict[str, float]:
    """Kernel seconds by module, backward included, modules that differ in numbers only together: `Bert.layers.*.mlp`.

    What no module runs is named by its phase: `(optimizer)`.
    """
    return _sum_seconds_by_path(timeline, mask_module_numbers)


def sum_seconds_by_layer(timeline: Timeline) -> dict[str, float]:
    """Kernel seconds by layer, backward included: a module's path up to its first number (`Bert.layers.3`), else its
    first two names; what no module runs is named by its phase."""
    return _sum_seconds_by_path(timeline, find_layer)


def sum_seconds_by_op(timeline: Timeline) -> dict[str, float]:
    """Kernel seconds by op: `aten::mm`."""
    program = timeline.program
    signature = program.columns.op_signature[timeline.schedule.op[timeline.launches]]
    seconds = np.bincount(signature, weights=timeline.kernel_seconds, minlength=len(program.symbolic))
    return _sum_positive_seconds((program.symbolic[n].name, s) for n, s in enumerate(seconds.tolist()))


def sum_seconds_by_phase(timeline: Timeline) -> dict[str, float]:
    """Kernel seconds by phase of the step."""
    phase = timeline.program.op_phase[timeline.schedule.op[timeline.launches]]
    totals = np.bincount(phase, weights=timeline.kernel_seconds, minlength=len(Phase))
    return {p.name.lower(): float(totals[p]) for p in Phase if totals[p]}


def sum_seconds_by_source(timeline: Timeline, costs: Costs) -> dict[str, float]:
    """Kernel seconds by how their durations were found."""
    source = costs.source[timeline.schedule.call[timeline.launches]]
    seconds = np.bincount(source, weights=timeline.kernel_seconds, minlength=len(Source))
    return {source.name.lower(): float(seconds[source]) for source in Source if seconds[source]}


def list_marked_ops(timeline: Timeline, marked: BoolArray) -> tuple[tuple[str, ...], float]:
    """Names of the ops whose launches use a marked call, most device time first, and the seconds of those calls."""
    launches = timeline.launches
    chosen = marked[timeline.schedule.call[launches]]
    program, seconds = timeline.program, timeline.kernel_seconds[chosen]
    signatures = program.columns.op_signature[timeline.schedule.op[launches][chosen]]
    by_signature = np.bincount(signatures, weights=seconds, minlength=len(program.symbolic))
    totals: dict[str, float] = {}
    for index in np.unique(signatures).tolist():
        name = program.symbolic[index].name
        totals[name] = totals.get(name, 0.0) + float(by_signature[index])
    return tuple(sorted(totals, key=lambda name: (-totals[name], name))), float(seconds.sum())


def _sum_seconds_by_path(timeline: Timeline, shortened: Callable[[str], str]) -> dict[str, float]:
    program = timeline.program
    op = timeline.schedule.op[timeline.launches]
    place = program.columns.op_module[op].astype(np.int64) * len(Phase) + program.op_phase[op]
    seconds = np.bincount(place, weights=timeline.kernel_seconds, minlength=len(program.names) * len(Phase))
    names = [shortened(name) for name in program.names]

    def named(index: int) -> str:
        module, phase = divmod(index, len(Phase))
        return names[module] or f"({Phase(phase).name.lower()})"

    return _sum_positive_seconds((named(index), float(seconds[index])) for index in np.flatnonzero(seconds).tolist())


def _sum_positive_seconds(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    return {name: seconds for name, seconds in sum_by_key(pairs).items() if seconds}


@dataclass(frozen=True, slots=True)
class OutsideOp:
    """An op with calls outside of what their model was fitted on: their device time in seconds, the `shift` of the
    step's time (as a share of it) that one standard deviation of them is worth, how many times (`factor`) the size
    farthest outside is beyond the fitted ones (1: all sizes are inside), and whether the GPU was not measured for
    them."""

    op: str
    seconds: float
    shift: float
    factor: float
    new_gpu: bool

    @property
    def why(self) -> str:
        """What is outside, and how far, in a few words."""
        how = "slightly" if self.factor < 1.05 else f"up to {_format_factor(self.factor)}"
        far = f"sizes {how} beyond" if self.factor > 1.0 else ""
        reasons = ["GPU not measured" if self.new_gpu else "", far]
        return ", ".join(filter(None, reasons)) or "kind or type not measured"

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "op": self.op,
            "ms": 1e3 * self.seconds,
            "shift": self.shift,
            "factor": self.factor,
            "new_gpu": self.new_gpu,
            "why": self.why,
        }


def list_outside_ops(timeline: Timeline, costs: Costs, marked: BoolArray, sigma: FloatArray) -> tuple[OutsideOp, ...]:
    """The ops whose launches use a `marked` call, most device time first; `sigma` is the log-sigma of every call."""
    call = timeline.schedule.call[timeline.launches]
    chosen = np.flatnonzero(marked[call])
    call, seconds, program = call[chosen], timeline.kernel_seconds[chosen], timeline.program
    signature = program.columns.op_signature[timeline.schedule.op[timeline.launches[chosen]]]
    names, op = np.unique([program.symbolic[s].name for s in signature.tolist()], return_inverse=True)
    spent = np.bincount(op, weights=seconds, minlength=len(names))
    error = np.bincount(op, weights=seconds * sigma[call], minlength=len(names)) / max(timeline.seconds, 1e-30)
    factor, new_gpu = np.ones(len(names)), np.zeros(len(names), dtype=np.bool_)
    np.maximum.at(factor, op, costs.factor[call])
    np.logical_or.at(new_gpu, op, costs.new_gpu[call])
    found = [
        OutsideOp(*row)
        for row in zip(names.tolist(), spent.tolist(), error.tolist(), factor.tolist(), new_gpu.tolist(), strict=True)
    ]
    return tuple(sorted(found, key=lambda item: (-item.seconds, item.op)))


def _format_factor(factor: float) -> str:
    """`1.3 x`, `12 x`, `4,000 x`."""
    return f"{factor:.1f} x" if factor < 9.95 else f"{float(f'{factor:.2g}'):,.0f} x"
