"""A step put together: micro-batches through stages, collectives between copies of the model alongside them, the
update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traincast.costs.in_step import SHIPPED, InStep
from traincast.hardware.platform import Platform
from traincast.models.transformers.description import Transformer
from traincast.simulator.parallelism.communication import CommunicationCosts
from traincast.simulator.parallelism.layer_costs import LayerCosts
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.orders import compute_pipeline_seconds, split_layers_into_stages
from traincast.simulator.parallelism.stage_units import Share, StageUnits, Unit


@dataclass(frozen=True, slots=True)
class Stage:
    """The units of one stage, in order."""

    units: tuple[Unit, ...]

    @property
    def weight_part(self) -> float:
        """Seconds of backward that only make gradients of weights."""
        return sum(unit.weight_part for unit in self.units)

    @property
    def trained(self) -> Share:
        """Elements on one rank that get a gradient: weights that all data-parallel ranks hold, those of experts."""
        return Share(sum(unit.trained.dense for unit in self.units), sum(unit.trained.sparse for unit in self.units))


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

    def stages(self, layout: Layout) -> list[Stage]:
        """The stages of a layout: their weights, and what each costs."""
        exchanges = CommunicationCosts(layout, self.platform.topology)
        return make_stages(self.model, layout, StageUnits(self.model, layout, self.pieces, exchanges, self.constants))

    def estimate_seconds(self, layout: Layout) -> float:
        """Seconds of the step in closed form."""
        exchanges = CommunicationCosts(layout, self.platform.topology)
        return _Composer(layout, exchanges, self.pieces, self.constants).step(self.stages(layout))


class _Composer:
    """Puts one step together."""

    def __init__(self, layout: Layout, exchanges: CommunicationCosts, blocks: LayerCosts, constants: InStep) -> None:
        self.layout, self.exchanges, self.pieces, self.constants = layout, exchanges, blocks, constants

    def step(self, stages: Sequence[Stage]) -> float:
        """Micro-batches through the stages, and what the slowest of them adds."""
        layout = self.layout
        forward, backward = ([way[i] for way in map(self._stage, stages)] for i in (0, 1))
        busy, _ = compute_pipeline_seconds(
            forward, backward, layout.accumulation, chunks=layout.vp if layout.schedule == "interleaved" else 1,
            weights=[stage.weight_part for stage in stages] if layout.schedule == "zero-bubble" else None,
        )  # fmt: skip
        slowest = max(range(len(stages)), key=lambda i: forward[i] + backward[i])
        stage = stages[slowest]
        return busy + self._between_copies(stage, forward[slowest], backward[slowest]) + self._update(stage)

    def _stage(self, stage: Stage) -> tuple[float, float]:
        """Seconds of a micro-batch forward and backward."""
        if self.layout.sharding == "zero3" and not self.layout.gathers_once:
            ways = self._fully_sharded(stage)
        else:
            ways = sum(unit.forward.device for unit in stage.units), sum(unit.backward.device for unit in stage.units)
        launching = (
            sum(unit.forward.kernels.host for unit in stage.units),
            sum(unit.backward.kernels.host for unit in stage.units),
        )
        sends = self._sends() / 2
        return max(ways[0] + sends, launching[0]), max(ways[1] + sends, launching[1])

    def _sends(self) -> float:
        """Seconds of a micro-batch that stages wait for activations and gradients of their neighbours."""
        layout = self.layout
        if layout.pp == 1:
            return 0.0
        roles_message = layout.micro_batch * layout.seq_len // layout.cp * self.pieces.model.hidden * 2
        one = self.exchanges.stages(roles_message / (layout.tp if layout.sequence else 1))
        if layout.overlap_pp:
            return 2 * layout.vp * one * self.constants.beside
        return 2 * layout.vp * one

    def _fully_sharded(self, stage: Stage) -> tuple[float, float]:
        """Forward and backward of a micro-batch whose parameters are gathered one unit ahead."""
        units = stage.units
        gathers = [self._gather(unit) for unit in units]
        scatters = [self._scatter(unit) for unit in units]
        forward = gathers[0] + sum(
            self._beside(unit.forward.device, ahead) for unit, ahead in zip(units, [*gathers[1:], 0.0], strict=True)
        )
        backward, last = scatters[0], len(units) - 1
        for i, unit in enumerate(units):
            again = i > 0 and self.layout.reshard and units[i - 1].backward.kernels.device > 0
            beside = (gathers[i - 1] if again else 0.0) + (scatters[i + 1] if i < last else 0.0)
            backward += self._beside(unit.backward.device, beside)
        return forward, backward

    def _beside(self, kernels: float, exchange: float) -> float:
        """Seconds until both are done: kernels take longer while the collective lasts."""
        return max(kernels + self.constants.beside * min(kernels, exchange), exchange)

    def _gather(self, unit: Unit) -> float:
        size = 1 if self.layout.quantised_gather else self.layout.gather_bytes
        dense = self.exchanges.data("all_gather", size * unit.dense, ranks=self.layout.sharing)
        return dense + self.exchanges.expert_data("all_gather", size * unit.sparse)

    def _scatter(self, unit: Unit) -> float:
        size = self.layout.reduce_bytes
        trained = unit.trained
        dense = self.exchanges.data("reduce_scatter", size * trained.dense, ranks=self.layout.sharing)
        if self.layout.sharing < self.layout.dp * self.layout.cp:
            dense += self.exchanges.copies("all_reduce", size * trained.dense / self.layout.sharing)
        return dense + self.exchanges.expert_data("reduce_scatter", size * trained.sparse)

    def _between_copies(self, stage: Stage, forward: float, backward: float) -> float:
        """Seconds that gradients (and updated parameters) show between copies of the model."""
        layout = self.layout
        if layout.sharding == "zero3" and not layout.gathers_once:
            return 0.0
        dense, sparse = stage.trained.dense, stage.trained.sparse
        kind = "all_reduce" if layout.sharding == "none" else "reduce_scatter"
        reduced = self.exchanges.data(kind, layout.reduce_bytes * dense)
        reduced += self.exchanges.expert_data(kind, layout.reduce_bytes * sparse)
        shown = self._show(stage, reduced, backward if layout.overlap_gradients else 0.0)
        if layout.sharding == "none":
            return shown
        gathered = self.exchanges.data("all_gather", 2 * dense) + self.exchanges.expert_data("all_gather", 2 * sparse)
        return shown + self._show(stage, gathered, forward if layout.overlap_parameters else 0.0)

    def _show(self, stage: Stage, seconds: float, window: float) -> float:
        """Seconds of a collective over a stage's weights that `window` seconds of kernels do not hide."""
        hidden = min(seconds * (1 - 1 / max(2, len(stage.units))), window)
        return seconds - hidden + self.constants.beside * hidden

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
