"""A step put together: micro-batches through stages, collectives between copies of the model alongside them, the
update."""

from __future__ import annotations

from dataclasses import dataclass

from traincast.costs.in_step import SHIPPED, InStep
from traincast.hardware.platform import Platform
from traincast.models.transformers.description import Transformer
from traincast.simulator.parallelism.groups import CommunicationCosts, Groups
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.parts import make_parts
from traincast.simulator.parallelism.snippets import compute_pipeline_seconds
from traincast.simulator.parallelism.stage_units import LayerCosts, StageUnits, Unit


@dataclass(frozen=True, slots=True)
class Stage:
    """The units of one stage, in order."""

    units: tuple[Unit, ...]

    @property
    def weight_part(self) -> float:
        """Seconds of backward that only make gradients of weights."""
        return sum(unit.weight_part for unit in self.units)

    @property
    def trained(self) -> tuple[float, float]:
        """Elements on one rank that get a gradient: weights that all data-parallel ranks hold, those of experts."""
        parts = [unit.part for unit in self.units]
        return sum(part.trained_dense for part in parts), sum(part.trained_sparse for part in parts)


class StepModel:
    """A step of a model under a layout in closed form; pieces that were priced before are not priced again."""

    def __init__(
        self, model: Transformer, platform: Platform, layout: Layout, pieces: LayerCosts, constants: InStep = SHIPPED
    ) -> None:
        self.model, self.layout, self.pieces, self.constants = model, layout, pieces, constants
        self.exchanges = CommunicationCosts(layout, platform.topology)
        self.gpus_per_node = platform.topology.gpus_per_node if platform.topology is not None else 1

    def list_stages(self) -> list[Stage]:
        """The stages: their parts, and what each costs."""
        layout = self.layout
        units = StageUnits(self.model, layout, self.pieces, self.exchanges, self.constants)
        parts = make_parts(self.model, layout, Groups(layout).in_layers(self.model, self.gpus_per_node))
        return [
            Stage(tuple(units.unit(part) for chunk in parts[stage :: layout.pp] for part in chunk))
            for stage in range(layout.pp)
        ]

    def estimate_seconds(self) -> float:
        """Micro-batches through the stages, and what the slowest of them adds."""
        layout, stages = self.layout, self.list_stages()
        forward, backward = ([way[i] for way in map(self._stage, stages)] for i in (0, 1))
        busy = compute_pipeline_seconds(
            forward, backward, layout.accumulation, chunks=layout.vp if layout.schedule == "interleaved" else 1,
            weights=[stage.weight_part for stage in stages] if layout.schedule == "zero-bubble" else None,
        )[0]  # fmt: skip
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
        message = layout.micro_batch * layout.seq_len // layout.cp * self.model.hidden * 2
        one = self.exchanges.stages(message / (layout.tp if layout.sequence else 1))
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
        dense = self.exchanges.data("all_gather", size * unit.part.dense, ranks=self.layout.sharing)
        return dense + self.exchanges.expert_data("all_gather", size * unit.part.sparse)

    def _scatter(self, unit: Unit) -> float:
        size, part = self.layout.reduce_bytes, unit.part
        dense = self.exchanges.data("reduce_scatter", size * part.trained_dense, ranks=self.layout.sharing)
        if self.layout.sharing < self.layout.dp * self.layout.cp:
            dense += self.exchanges.copies("all_reduce", size * part.trained_dense / self.layout.sharing)
        return dense + self.exchanges.expert_data("reduce_scatter", size * part.trained_sparse)

    def _between_copies(self, stage: Stage, forward: float, backward: float) -> float:
        """Seconds that gradients (and updated parameters) show between copies of the model."""
        layout = self.layout
        if layout.sharding == "zero3" and not layout.gathers_once:
            return 0.0
        dense, sparse = stage.trained
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
        dense, sparse = stage.trained
        elements = dense / shared + sparse / (inner if layout.sharding != "none" else 1)
        done = self.pieces.price_update(elements, layout.optimizer, master=not layout.wide)
        norm = 4 * elements / self.pieces.device.dram_bandwidth
        return done.device + norm
