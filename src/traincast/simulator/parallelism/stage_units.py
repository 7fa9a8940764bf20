"""What one rank of each stage does with one micro-batch: layers and the optimizer priced once, and the collectives
kernels wait for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from traincast.costs.host.profile import HostProfile
from traincast.costs.in_step import SHIPPED, InStep
from traincast.costs.kernels.cost import convert_to_in_step, price_alone
from traincast.costs.kernels.lower import lower_program
from traincast.costs.kernels.registry import LoweringContext
from traincast.hardware.device import Device
from traincast.ir.ops import MODULE_SCOPE, Phase
from traincast.ir.program import Program
from traincast.models.transformers.description import Experts, Transformer
from traincast.models.transformers.program.step import build_optimizer_program
from traincast.simulator.parallelism.groups import CommunicationCosts, count_token_copies, make_shard, make_style
from traincast.simulator.parallelism.layout import WHOLE, Layout
from traincast.simulator.parallelism.parts import Part, mark_repeated_ops
from traincast.simulator.prediction.step import list_host_seconds
from traincast.simulator.schedule import Code, build_schedule
from traincast.utils.arrays import BoolArray

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

    def count_gemm_share(self, program: Program, chosen: BoolArray) -> float:
        """Share of the seconds of forward GEMMs that chosen ops launch."""
        return self._alone[program].count_gemm_share(chosen)

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
        forward = np.isin(phase, _PHASES[0])
        self.forward_ops = schedule.op[launches][forward]

    def count_gemm_share(self, chosen: BoolArray) -> float:
        """Share of the seconds of forward GEMMs that chosen ops launch."""
        mine = self.calls[0]
        seconds = np.where(self.family[mine] == "gemm", self.costs.seconds[mine], 0.0)
        return float(seconds[chosen[self.forward_ops]].sum() / max(seconds.sum(), 1e-30))

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
        recomputed, repeats = self._recomputed(forward, part) if part.again else (Pass(), 0.0)
        whole = UnitPass(backward.plus(recomputed), back + repeats * to)
        return Unit(part, UnitPass(forward, to), whole, 0.5 * backward.gemm)

    def _launched(self, kernels: Pass) -> Pass:
        """Kernels as they are launched: the host does nothing where one graph replays all."""
        return replace(kernels, host=0.0) if self.layout.kernels == "graph" else kernels

    def _recomputed(self, forward: Pass, part: Part) -> tuple[Pass, float]:
        """What backward computes again before it starts, and which share of the collectives it repeats."""
        if self.layout.checkpoint in WHOLE:
            repeated = mark_repeated_ops(part.piece, self.layout)
            left = 1 - self.pieces.count_gemm_share(part.piece.program, repeated)
            return forward.plus(Pass(device=forward.gemm, gemm=forward.gemm), -left), 1.0
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
        ways = [
            self._tensor_parallel(cost, halves=part.shared),
            self._sample_parallel(cost) if cost.forward.attention else (0.0, 0.0),
            self._expert_parallel(cost) if part.sparse > 0 else (0.0, 0.0),
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
        """Seconds that the device stands still around collectives that nothing runs alongside: hosts launch them at
        different moments, one CUDA graph does not."""
        return 0.0 if self.layout.kernels == "graph" else 1e-6 * self.constants.stall_us * exchanges

    def _sample_parallel(self, cost: LayerCost) -> tuple[float, float]:
        """Keys and values on their way round the ranks of a sample, alongside attention; with their gradients
        backward. Or all heads on their way to ranks that take part of them, and back."""
        layout, model = self.layout, self.model
        if layout.cp == 1:
            return 0.0, 0.0
        width = 2 * max(1, model.kv_heads // layout.tp) * model.head_dim
        if model.latent is not None:
            width = max(1, model.heads // layout.tp) * (model.head_dim * 2 + model.latent.rope_dim)
        part = float(self.shard.tokens * width * _HALF)
        if self.shard.by_heads:
            heads = max(1, model.heads // layout.tp) * model.head_dim * self.shard.tokens * _HALF
            each = sum(self.exchanges.sample("all_to_all", nbytes) for nbytes in (heads + part, heads))
            return each + self._stalled(2), each + self._stalled(2)
        if layout.cp_exchange == "gather":
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
