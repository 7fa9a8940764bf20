"""The pieces of a step priced once each: a layer, what stands before and after all of them, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from traincast.costs.host.profile import HostProfile
from traincast.costs.in_step import SHIPPED, InStep
from traincast.costs.kernels.cost import convert_to_in_step, price_alone
from traincast.costs.kernels.lowered import lower_program
from traincast.costs.kernels.registry import LoweringContext
from traincast.hardware.device import Device
from traincast.ir.ops import Phase
from traincast.ir.program import Program
from traincast.ir.variants import MODULE_SCOPE
from traincast.models.transformers.program.step import build_optimizer_program
from traincast.simulator.prediction.step import list_host_seconds
from traincast.simulator.schedule import Code, build_schedule

_OPTIMIZER_ELEMENTS = 100_000_000  # an update is priced at this size; longer ones take as much longer
_PHASES = ((Phase.FORWARD, Phase.LOSS), (Phase.BACKWARD,), (Phase.OPTIMIZER,))


@dataclass(frozen=True, slots=True)
class Pass:
    """One way through a piece: seconds of its kernels and of the host that launches them. `gemm` and `attention` are
    parts of `device`."""

    device: float = 0.0
    host: float = 0.0
    gemm: float = 0.0
    attention: float = 0.0

    def plus(self, other: Pass, times: float = 1.0) -> Pass:
        """Both one after the other, the other `times` times."""
        return Pass(
            self.device + times * other.device,
            self.host + times * other.host,
            self.gemm + times * other.gemm,
            self.attention + times * other.attention,
        )


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A piece: forward, backward, update of weights."""

    forward: Pass
    backward: Pass
    update: Pass


class LayerCosts:
    """Prices pieces on one device and host; equal ones once. Their collectives count with the host time of their
    launches only."""

    def __init__(
        self, device: Device, host: HostProfile, *, roofline_only: bool = False, in_step: InStep = SHIPPED
    ) -> None:
        self.device, self.host, self.roofline_only, self.in_step = device, host, roofline_only, in_step
        self._alone: dict[Program, _Alone] = {}
        self._known: dict[Program, LayerCost] = {}

    def with_numbers(self, in_step: InStep) -> LayerCosts:
        """The same pieces where steps add other numbers; what kernels take alone is not priced again."""
        if in_step == self.in_step:
            return self
        other = LayerCosts(self.device, self.host, roofline_only=self.roofline_only, in_step=in_step)
        other._alone = self._alone
        return other

    def price(self, program: Program) -> LayerCost:
        """One piece."""
        if program not in self._known:
            if program not in self._alone:
                self._alone[program] = _Alone(program, self.device, self.host, roofline_only=self.roofline_only)
            self._known[program] = LayerCost(*self._alone[program].passes(self.in_step))
        return self._known[program]

    def price_update(self, elements: float, optimizer: str, *, master: bool) -> Pass:
        """The update of this many weights."""
        return Pass().plus(self.price(_write_update(optimizer, master)).update, elements / _OPTIMIZER_ELEMENTS)


@lru_cache(maxsize=16)
def _write_update(optimizer: str, master: bool) -> Program:
    return build_optimizer_program(_OPTIMIZER_ELEMENTS, 10, master=master, optimizer=optimizer)


class _Alone:
    """The kernels of a piece, each priced by itself, and the host that launches them."""

    def __init__(self, program: Program, device: Device, host: HostProfile, *, roofline_only: bool) -> None:
        self.device, self.roofline_only = device, roofline_only
        self.lowered = lower_program(program, LoweringContext())
        self.costs = price_alone(self.lowered, device, roofline_only=roofline_only)
        schedule = build_schedule(program, self.lowered)
        launches = np.flatnonzero(schedule.code == Code.LAUNCH)
        phase_of_scope = np.asarray(program.columns.scope_phase)
        phase, host_phase = phase_of_scope[schedule.scope[launches]], phase_of_scope[schedule.scope]
        busy = list_host_seconds(schedule, program, host)
        names = np.array([name == MODULE_SCOPE for name in program.names], dtype=np.bool_)
        modules = names[schedule.name] & (schedule.code == Code.HOST)
        self.module_scale = host.alone[MODULE_SCOPE] / max(SHIPPED.module_us, 1e-9)
        self.calls = [schedule.call[launches][np.isin(phase, chosen)] for chosen in _PHASES]
        self.host = [float(busy[np.isin(host_phase, chosen)].sum()) for chosen in _PHASES]
        self.modules = [int((modules & np.isin(host_phase, chosen)).sum()) for chosen in _PHASES]
        self.family = np.array([item.family.name for item in self.lowered.calls])

    def passes(self, in_step: InStep) -> tuple[Pass, Pass, Pass]:
        """Forward, backward and update: kernels one after the other with the device's gap between."""
        costs = self.costs
        if not self.roofline_only:
            costs = convert_to_in_step(costs, self.lowered, self.device, in_step)
        passes = []
        for mine, host, modules in zip(self.calls, self.host, self.modules, strict=True):
            seconds, family = costs.seconds[mine], self.family[mine]
            passes.append(
                Pass(
                    device=float(seconds.sum() + len(mine) * self.device.kernel_gap),
                    host=host + modules * self.module_scale * (in_step.module_us - SHIPPED.module_us),
                    gemm=float(seconds[family == "gemm"].sum()),
                    attention=float(seconds[family == "attention"].sum()),
                )
            )
        forward, backward, update = passes
        return forward, backward, update
