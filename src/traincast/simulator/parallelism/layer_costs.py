"""The pieces of a step priced once each: a layer, what stands before and after all of them, the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.program.communication import LayerGroups
from traincast.models.transformers.program.step import (
    LayerBlock,
    build_embedding_block,
    build_head_block,
    build_layer_block,
    build_optimizer_program,
)
from traincast.models.transformers.program.style import Shard, Style
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
    """A piece: forward, backward, update of weights, and how many elements of its weights get a gradient."""

    forward: Pass
    backward: Pass
    update: Pass
    trained: int


class LayerCosts:
    """Prices pieces for one model on one device and host; equal ones once."""

    def __init__(
        self, model: Transformer, device: Device, host: HostProfile, *, roofline_only: bool = False,
        in_step: InStep = SHIPPED,
    ) -> None:  # fmt: skip
        self.model, self.device, self.host, self.roofline_only = model, device, host, roofline_only
        self.in_step = in_step
        self._alone: dict[tuple[object, ...], tuple[_Alone, int]] = {}
        self._known: dict[tuple[object, ...], LayerCost] = {}

    def with_numbers(self, in_step: InStep) -> LayerCosts:
        """The same pieces where steps add other numbers; what kernels take alone is not priced again."""
        if in_step == self.in_step:
            return self
        other = LayerCosts(self.model, self.device, self.host, roofline_only=self.roofline_only, in_step=in_step)
        other._alone = self._alone
        return other

    def layer(
        self, shard: Shard, style: Style, groups: LayerGroups, *, experts: bool, window: int = 0, encoder: bool = False,
        split: bool = False,
    ) -> LayerCost:  # fmt: skip
        """One layer; its collectives count with the host time of their launches only."""
        key = ("layer", shard, style, groups, experts, window, encoder, split)
        return self._priced(
            key,
            lambda: build_layer_block(
                self.model, shard, style, experts=experts, window=window, encoder=encoder, groups=groups, split=split
            ),
        )

    def embedding(self, shard: Shard, style: Style, groups: LayerGroups, *, split: bool = False) -> LayerCost:
        """What stands before the first layer."""
        key = ("embedding", shard, style, groups, split)
        return self._priced(key, lambda: build_embedding_block(self.model, shard, style, groups=groups, split=split))

    def head(self, shard: Shard, style: Style, groups: LayerGroups, *, split: bool = False) -> LayerCost:
        """What stands after the last layer."""
        key = ("head", shard, style, groups, split)
        return self._priced(key, lambda: build_head_block(self.model, shard, style, groups=groups, split=split))

    def optimizer(self, elements: float, optimizer: str, *, master: bool) -> Pass:
        """The update of this many weights."""

        def piece() -> LayerBlock:
            return LayerBlock(build_optimizer_program(_OPTIMIZER_ELEMENTS, 10, master=master, optimizer=optimizer), 0)

        cost = self._priced(("optimizer", optimizer, master), piece)
        return Pass().plus(cost.update, elements / _OPTIMIZER_ELEMENTS)

    def _priced(self, key: tuple[object, ...], write: Callable[[], LayerBlock]) -> LayerCost:
        if key not in self._known:
            if key not in self._alone:
                block = write()
                alone = _Alone(block.program, self.device, self.host, roofline_only=self.roofline_only)
                self._alone[key] = (alone, block.trained)
            alone, trained = self._alone[key]
            self._known[key] = LayerCost(*alone.passes(self.in_step), trained)
        return self._known[key]


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
