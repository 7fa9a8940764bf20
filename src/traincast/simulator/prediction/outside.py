"""Ops outside of what their kernel models were fitted on: how far, why, and what that may shift the step by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from traincast.costs.kernels.cost import Costs
from traincast.simulator.timeline import Timeline
from traincast.utils.arrays import BoolArray, FloatArray


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
        far = f"sizes up to {_format_factor(self.factor)} beyond" if self.factor > 1.0 else ""
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
