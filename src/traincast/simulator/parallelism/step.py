"""A step put together: micro-batches through stages, collectives between copies of the model alongside them, the
update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from traincast.costs.in_step import SHIPPED, InStep
from traincast.hardware.platform import Platform
from traincast.models.transformers.description import Transformer
from traincast.simulator.parallelism.communication import CommunicationCosts
from traincast.simulator.parallelism.layer_costs import LayerCosts, Pass
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.orders import compute_pipeline_seconds, split_layers_into_stages
from traincast.simulator.parallelism.stage_units import Share, StageUnits, Unit

STEP_SIGMA = 0.05
"""Log-sigma of steps beyond what their kernels and collectives err by."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The units of one stage, in order."""

    units: tuple[Unit, ...]

    @property
    def dense(self) -> float:
        """Weights that all data-parallel ranks hold, elements on one rank."""
        return sum(unit.dense for unit in self.units)

    @property
    def sparse(self) -> float:
        """Weights of experts, elements on one rank."""
        return sum(unit.sparse for unit in self.units)

    @property
    def trained(self) -> Share:
        """Those of both that get a gradient."""
        return Share(sum(unit.trained.dense for unit in self.units), sum(unit.trained.sparse for unit in self.units))


@dataclass(frozen=True, slots=True)
class Parts:
    """What a step is made of, in seconds of the slowest stage; `total` is the step."""

    total: float
    sigma: float
    kernels: float
    exposed: dict[str, float]
    bubble: float
    waiting: float  # for the host
    optimizer: float
    gemm: float
    attention: float
    unknown: float


def make_stages(model: Transformer, layout: Layout, roles: StageUnits) -> list[Stage]:
    """Every stage's units; equal layers are one object."""
    counts = layout.stage_layers or split_layers_into_stages(model.layers, layout.pp, layout.vp)
    stages, first = [], 0
    for number, count in enumerate(counts):
        units = [roles.layer(first + place, place // layout.vp) for place in range(count)]
        if number == 0:
            encoder = [roles.layer(place, place, encoder=True) for place in range(model.encoder_layers)]
            units = [roles.embedding(), *encoder, *units]
        if number == layout.pp - 1:
            units = [*units, roles.head()]
        stages.append(Stage(tuple(units)))
        first += count
    return stages


class StepModel:
    """Steps of one model on one platform; what is priced once is kept."""

    def __init__(self, model: Transformer, platform: Platform, blocks: LayerCosts, constants: InStep = SHIPPED) -> None:
        self.model, self.platform, self.pieces, self.constants = model, platform, blocks, constants

    def roles(self, layout: Layout) -> StageUnits:
        """The roles that ranks play under a layout."""
        exchanges = CommunicationCosts(layout, self.platform.topology)
        return StageUnits(self.model, layout, self.pieces, exchanges, self.constants)

    def stages(self, layout: Layout) -> list[Stage]:
        """The stages of a layout: their weights, and what each costs."""
        return make_stages(self.model, layout, self.roles(layout))

    def predict(self, layout: Layout) -> tuple[Parts, list[Stage]]:
        """The step and its stages."""
        roles = self.roles(layout)
        stages = make_stages(self.model, layout, roles)
        return _Composer(layout, roles.exchanges, self.pieces, self.constants, stages).step(), stages


class _Composer:
    """Puts one step together."""

    def __init__(
        self,
        layout: Layout,
        exchanges: CommunicationCosts,
        blocks: LayerCosts,
        constants: InStep,
        stages: Sequence[Stage],
    ) -> None:
        self.layout, self.exchanges, self.pieces, self.constants = layout, exchanges, blocks, constants
        self.stages = stages

    def step(self) -> Parts:
        layout = self.layout
        ways = [self._stage(stage) for stage in self.stages]
        forward, backward = [way[0] for way in ways], [way[1] for way in ways]
        weights = [sum(unit.weight_part for unit in stage.units) for stage in self.stages]
        busy, bubble = compute_pipeline_seconds(
            forward, backward, layout.accumulation, chunks=layout.vp if layout.schedule == "interleaved" else 1,
            weights=weights if layout.schedule == "zero-bubble" else None,
        )  # fmt: skip
        slowest = max(range(len(ways)), key=lambda i: forward[i] + backward[i])
        stage = self.stages[slowest]
        exchanged, spread = self._between_copies(stage, forward[slowest], backward[slowest])
        update = self._update(stage)
        kernels, exposed, erring = _sum_micro_batches(stage, layout.accumulation)
        exposed |= {"dp": exchanged + ways[slowest][2] * layout.accumulation, "pp": self._sends() * layout.accumulation}
        total = busy + exchanged + update
        shown = sum(exposed.values())
        waiting = max(0.0, total - kernels.device - shown - bubble - update)
        sigma = math.hypot(kernels.spread, erring + spread) / total
        return Parts(
            total=total,
            sigma=math.hypot(sigma, STEP_SIGMA),
            kernels=kernels.device,
            exposed={name: seconds for name, seconds in exposed.items() if seconds},
            bubble=bubble,
            waiting=waiting,
            optimizer=update,
            gemm=kernels.gemm,
            attention=kernels.attention,
            unknown=kernels.unknown,
        )

    def _stage(self, stage: Stage) -> tuple[float, float, float]:
        """Seconds of a micro-batch forward and backward, and those among them that gathering parameters costs."""
        if self.layout.sharding == "zero3" and not self.layout.gathers_once:
            forward, backward, shown = self._fully_sharded(stage)
        else:
            forward = sum(unit.forward.device for unit in stage.units)
            backward = sum(unit.backward.device for unit in stage.units)
            shown = 0.0
        sends = self._sends()
        launching = [
            sum(way.kernels.host for way in ways)
            for ways in ([unit.forward for unit in stage.units], [unit.backward for unit in stage.units])
        ]
        if self.layout.kernels == "graph":
            launching = [0.0, 0.0]
        return max(forward + sends / 2, launching[0]), max(backward + sends / 2, launching[1]), shown

    def _sends(self) -> float:
        """Seconds of a micro-batch that stages wait for activations and gradients of their neighbours."""
        layout = self.layout
        if layout.pp == 1:
            return 0.0
        roles_message = layout.micro_batch * layout.seq_len // layout.cp * self.pieces.model.hidden * 2
        one = self.exchanges.stages(roles_message / (layout.tp if layout.sequence else 1))[0]
        if layout.overlap_pp:
            return 2 * layout.vp * one * self.constants.beside
        return 2 * layout.vp * one

    def _fully_sharded(self, stage: Stage) -> tuple[float, float, float]:
        """Forward and backward of a micro-batch whose parameters are gathered one unit ahead, and what that costs."""
        gathers = [self._gather(unit) for unit in stage.units]
        scatters = [self._scatter(unit) for unit in stage.units]
        forward, compute = gathers[0], 0.0
        for i, unit in enumerate(stage.units):
            beside = gathers[i + 1] if i + 1 < len(gathers) else 0.0
            forward += self._beside(unit.forward.device, beside)
            compute += unit.forward.device
        backward, last = 0.0, len(stage.units) - 1
        for i in range(last, -1, -1):
            unit = stage.units[i]
            again = i > 0 and self.layout.reshard and stage.units[i - 1].backward.kernels.kernels > 0
            ahead = gathers[i - 1] if again else 0.0
            beside = ahead + (scatters[i + 1] if i < last else 0.0)
            backward += self._beside(unit.backward.device, beside)
            compute += unit.backward.device
        backward += scatters[0]
        return forward, backward, forward + backward - compute

    def _beside(self, kernels: float, exchange: float) -> float:
        """Seconds until both are done: kernels take longer while the collective lasts."""
        return max(kernels + self.constants.beside * min(kernels, exchange), exchange)

    def _gather(self, unit: Unit) -> float:
        size = 1 if self.layout.quantised_gather else self.layout.gather_bytes
        dense = self.exchanges.data("all_gather", size * unit.dense, ranks=self.layout.sharing)[0]
        return dense + self.exchanges.expert_data("all_gather", size * unit.sparse)[0]

    def _scatter(self, unit: Unit) -> float:
        size = self.layout.reduce_bytes
        trained = unit.trained
        dense = self.exchanges.data("reduce_scatter", size * trained.dense, ranks=self.layout.sharing)[0]
        if self.layout.sharing < self.layout.dp * self.layout.cp:
            dense += self.exchanges.copies("all_reduce", size * trained.dense / self.layout.sharing)[0]
        return dense + self.exchanges.expert_data("reduce_scatter", size * trained.sparse)[0]

    def _between_copies(self, stage: Stage, forward: float, backward: float) -> tuple[float, float]:
        """Seconds that gradients (and updated parameters) show between copies of the model, and their spread."""
        layout = self.layout
        if layout.sharding == "zero3" and not layout.gathers_once:
            return 0.0, 0.0
        dense, sparse = stage.trained.dense, stage.trained.sparse
        kind = "all_reduce" if layout.sharding == "none" else "reduce_scatter"
        reduced = [
            self.exchanges.data(kind, layout.reduce_bytes * dense),
            self.exchanges.expert_data(kind, layout.reduce_bytes * sparse),
        ]
        gathered = [
            self.exchanges.data("all_gather", 2 * dense),
            self.exchanges.expert_data("all_gather", 2 * sparse),
        ]
        shown, spread = 0.0, 0.0
        for prices, overlaps, window in (
            (reduced, layout.overlap_gradients, backward),
            (gathered if layout.sharding != "none" else [], layout.overlap_parameters, forward),
        ):
            seconds = sum(price[0] for price in prices)
            spread += sum(price[0] * price[1] for price in prices)
            hidden = min(seconds * (1 - 1 / max(2, len(stage.units))), window) if overlaps else 0.0
            shown += seconds - hidden + self.constants.beside * hidden
        return shown, spread

    def _update(self, stage: Stage) -> float:
        """Clipping and the update of this rank's share of the weights."""
        layout = self.layout
        if layout.optimizer == "none":
            return 0.0
        shared = layout.sharing if layout.sharding != "none" else 1
        inner = layout.gpus // layout.pp // (layout.ep * layout.etp)
        elements = stage.trained.dense / shared + stage.trained.sparse / (inner if layout.sharding != "none" else 1)
        done = self.pieces.optimizer(elements, layout.optimizer, master=not layout.wide)
        norm = 4 * elements / self.pieces.device.dram_bandwidth
        return done.device + norm


def _sum_micro_batches(stage: Stage, micro_batches: int) -> tuple[Pass, dict[str, float], float]:
    """Kernels, exposed communication and the spread of the latter over all micro-batches of a stage."""
    kernels, exposed, erring = Pass(), dict[str, float](), 0.0
    for unit in stage.units:
        for way in (unit.forward, unit.backward):
            kernels = kernels.plus(way.kernels, micro_batches)
            erring += micro_batches * way.spread
            for name, seconds in way.exposed.items():
                exposed[name] = exposed.get(name, 0.0) + micro_batches * seconds
    return kernels, exposed, erring
