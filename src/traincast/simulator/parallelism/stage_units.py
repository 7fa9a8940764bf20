"""What one rank of each stage does with one micro-batch: kernels, and the collectives that kernels wait for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from traincast.costs.in_step import InStep
from traincast.ir.program import Program
from traincast.models.transformers.description import Experts, Transformer
from traincast.simulator.parallelism.communication import CommunicationCosts
from traincast.simulator.parallelism.groups import count_token_copies, make_shard, make_style
from traincast.simulator.parallelism.layer_costs import LayerCost, LayerCosts, Pass
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.parts import Part

_HALF = 2  # bytes of an activation on the wire


@dataclass(frozen=True, slots=True)
class UnitPass:
    """One way of a micro-batch through a unit: kernels, and seconds of communication that nothing hides."""

    kernels: Pass
    exposed: float = 0.0

    @property
    def device(self) -> float:
        """Seconds on the device."""
        return self.kernels.device + self.exposed


@dataclass(frozen=True, slots=True)
class Unit:
    """A part with what one micro-batch takes, forward and backward; `weight_part` are the seconds of backward that only
    make gradients of weights."""

    part: Part
    forward: UnitPass
    backward: UnitPass
    weight_part: float


class StageUnits:
    """Units of one layout."""

    def __init__(
        self, model: Transformer, layout: Layout, blocks: LayerCosts, exchanges: CommunicationCosts, c: InStep
    ) -> None:
        self.model, self.layout, self.pieces, self.exchanges, self.constants = model, layout, blocks, exchanges, c
        self.shard, self.style = make_shard(layout), make_style(layout)
        self._units: dict[tuple[Program, bool, bool], Unit] = {}

    def unit(self, part: Part) -> Unit:
        """A part priced; of equal ones the first stands for all."""
        key = (part.piece.program, part.again, part.frozen)
        if key not in self._units:
            self._units[key] = self._price(part)
        return self._units[key]

    def _price(self, part: Part) -> Unit:
        cost = self.pieces.price(part.piece.program)
        forward, backward = self._launched(cost.forward), self._launched(cost.backward)
        to, back = self._exchanged(cost, part)
        if part.frozen:  # below all that is trained: no gradient comes down to it
            return Unit(part, UnitPass(forward, to), UnitPass(Pass()), 0.0)
        recomputed, repeats = self._recomputed(forward) if part.again else (Pass(), 0.0)
        whole = UnitPass(backward.plus(recomputed), back + repeats * to)
        return Unit(part, UnitPass(forward, to), whole, 0.5 * backward.gemm)

    def _launched(self, kernels: Pass) -> Pass:
        """Kernels as they are launched: the host does nothing where one graph replays all."""
        return replace(kernels, host=0.0) if self.layout.kernels == "graph" else kernels

    def _recomputed(self, forward: Pass) -> tuple[Pass, float]:
        """What backward computes again before it starts, and which share of the collectives it repeats."""
        if self.layout.checkpoint == "full":
            return forward, 1.0
        kept = forward.gemm * (0.5 if self.layout.checkpoint == "selective" else 1.0)
        seconds = max(0.0, forward.device - forward.attention - kept)
        host = forward.host * (0.5 if self.layout.checkpoint == "selective" else 0.15)  # of few modules of a layer
        return Pass(device=seconds, host=host, gemm=forward.gemm - kept), 0.0

    def _message(self) -> float:
        """Bytes of all tokens of a micro-batch in the residual stream."""
        return float(self.shard.tokens * self.model.hidden * (4 if self.layout.wide else _HALF))

    def _exchanged(self, cost: LayerCost, part: Part) -> tuple[float, float]:
        """Seconds of exposed communication of a part, forward and backward."""
        if part.label == "embedding":
            return self.exchanges.tensor(
                "reduce_scatter" if self.shard.sequence else "all_reduce", self._message()
            ), 0.0
        if part.label == "head":
            gathered = self.exchanges.tensor("all_gather", self._message()) if self.shard.sequence else 0.0
            return gathered, gathered
        experts = part.sparse > 0
        ways = [
            self._tensor_parallel(cost, halves=1 if experts and self.layout.etp == 1 else 2),
            self._sample_parallel(cost),
            self._expert_parallel(cost) if experts else (0.0, 0.0),
        ]
        return sum(way[0] for way in ways), sum(way[1] for way in ways)

    def _tensor_parallel(self, cost: LayerCost, *, halves: int) -> tuple[float, float]:
        """Of attention and feed-forward (`halves`): a gather before and a scatter after, or one sum."""
        layout = self.layout
        if layout.tp == 1:
            return 0.0, 0.0
        whole = self._message()
        if not self.shard.sequence:
            total = halves * self.exchanges.tensor("all_reduce", whole)
            each, numbers = [total, total], [halves, halves]
        else:
            gather = self.exchanges.tensor("all_gather", whole / (2 if layout.quantised_tokens else 1))
            scatter = self.exchanges.tensor("reduce_scatter", whole)
            each, numbers = [halves * (gather + scatter), halves * (2 * gather + scatter)], [2 * halves, 3 * halves]
        hidden = [0.0, 0.0]
        if layout.overlap_tp == "all":
            # GEMMs in as many parts as there are ranks: all but the first part of a collective can hide
            hidden = [
                min(total * (1 - 1 / layout.tp), way.gemm)
                for total, way in zip(each, (cost.forward, cost.backward), strict=True)
            ]
        elif layout.overlap_tp == "backward":
            hidden[1] = min(each[1] * (2 / 3 if self.shard.sequence else 1.0), 0.5 * cost.backward.gemm)
        to, back = (
            total - away + self.constants.beside * away + self._stalled(number if not away else 0)
            for total, away, number in zip(each, hidden, numbers, strict=True)
        )
        return to, back

    def _stalled(self, exchanges: int) -> float:
        """Seconds that the device stands still around collectives that nothing runs alongside."""
        return 1e-6 * self.constants.stall_us * exchanges

    def _sample_parallel(self, cost: LayerCost) -> tuple[float, float]:
        """Keys and values on their way round the ranks of a sample, alongside attention; with their gradients
        backward."""
        layout, model = self.layout, self.model
        if layout.cp == 1:
            return 0.0, 0.0
        width = 2 * max(1, model.kv_heads // layout.tp) * model.head_dim
        if model.latent is not None:
            width = max(1, model.heads // layout.tp) * (model.head_dim * 2 + model.latent.rope_dim)
        part = float(self.shard.tokens * width * _HALF)
        if layout.cp_gather:
            to, back = (self.exchanges.sample("all_gather", factor * part * layout.cp) for factor in (1, 2))
            return to, back
        to, back = (
            self._ring(self.exchanges.sample("send_recv", factor * part), kernels.attention / layout.cp)
            for factor, kernels in ((1, cost.forward), (2, cost.backward))
        )
        return to, back

    def _ring(self, step: float, block: float) -> float:
        """What a ring shows whose every step sends beside a block of attention."""
        return (self.layout.cp - 1) * (max(0.0, step - block) + self.constants.beside * min(step, block))

    def _expert_parallel(self, cost: LayerCost) -> tuple[float, float]:
        """Tokens sent to their experts and back, each way of the micro-batch."""
        layout, experts = self.layout, self.model.experts
        if layout.ep * layout.etp == 1 or experts is None:
            return 0.0, 0.0
        narrow = 0.75 if self.style.narrow else 1.0  # 8-bit tokens out, 16-bit results back
        sent = float(self.shard.rows * self._copies(experts) * self.model.hidden * _HALF)
        total = 2 * narrow * self.exchanges.experts("all_to_all", sent)
        hidden = [min(total, 0.5 * way.device) if layout.overlap_ep else 0.0 for way in (cost.forward, cost.backward)]
        stalled = self._stalled(0 if layout.overlap_ep else 2)
        to, back = (total - away + self.constants.beside * away + stalled for away in hidden)
        return to, back

    def _copies(self, experts: Experts) -> float:
        """Copies of a token that leave for experts."""
        topology = self.exchanges.topology
        return count_token_copies(self.layout, experts, topology.gpus_per_node if topology is not None else 1)
