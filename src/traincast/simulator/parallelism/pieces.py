"""The pieces of a step priced once each: a layer, what stands before and after all of them, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traincast.costs.host.profile import HostProfile
from traincast.costs.kernels.attention import ATTENTION
from traincast.costs.kernels.call import KernelCall
from traincast.costs.kernels.cost import price
from traincast.costs.kernels.lowered import lower_program
from traincast.costs.kernels.registry import LoweringContext
from traincast.hardware.device import Device
from traincast.ir.ops import Phase
from traincast.ir.program import Program, peak_memory
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.program.step import (
    Piece,
    embedding_piece,
    head_piece,
    layer_piece,
    optimizer_program,
)
from traincast.models.transformers.program.style import Shard, Style
from traincast.simulator.prediction.step import host_seconds
from traincast.simulator.schedule import Code, build_schedule

_OPTIMIZER_ELEMENTS = 100_000_000  # an update is priced at this size; longer ones take as much longer


@dataclass(frozen=True, slots=True)
class Pass:
    """One way through a piece: seconds of its kernels and of the host that launches them. `gemm` (of them `grouped` in
    stacks, `narrow` in eight bits) and `attention` are parts of `device`; `arithmetic` is the work of attention in
    operations."""

    device: float = 0.0
    host: float = 0.0
    kernels: int = 0
    spread: float = 0.0  # seconds: what kernels may err by together
    gemm: float = 0.0
    grouped: float = 0.0
    attention: float = 0.0
    unknown: float = 0.0  # seconds of kernels outside of what was measured
    arithmetic: float = 0.0
    narrow: float = 0.0

    def plus(self, other: Pass, times: float = 1.0) -> Pass:
        """Both one after the other, the other so many times."""
        return Pass(
            self.device + times * other.device,
            self.host + times * other.host,
            self.kernels + round(times * other.kernels),
            self.spread + times * other.spread,
            self.gemm + times * other.gemm,
            self.grouped + times * other.grouped,
            self.attention + times * other.attention,
            self.unknown + times * other.unknown,
            self.arithmetic + times * other.arithmetic,
            self.narrow + times * other.narrow,
        )


@dataclass(frozen=True, slots=True)
class Priced:
    """A piece: forward, backward, bytes kept in between, bytes that it needs on top while it runs, and how many
    elements of its weights get a gradient."""

    forward: Pass
    backward: Pass
    saved_bytes: int
    working_bytes: int
    trained: int


class Pieces:
    """Prices pieces for one model on one device and host; equal ones once."""

    def __init__(self, model: Transformer, device: Device, host: HostProfile, *, roofline_only: bool = False) -> None:
        self.model, self.device, self.host, self.roofline_only = model, device, host, roofline_only
        self._known: dict[tuple[object, ...], Priced] = {}
        self._updates: dict[tuple[bool, bool], Pass] = {}

    def layer(
        self, shard: Shard, style: Style, *, experts: bool, window: int = 0, encoder: bool = False
    ) -> Priced:  # fmt: skip
        """One layer."""
        key = ("layer", shard, style, experts, window, encoder)
        if key not in self._known:
            piece = layer_piece(self.model, shard, style, experts=experts, window=window, encoder=encoder)
            self._known[key] = self._priced(piece)
        return self._known[key]

    def embedding(self, shard: Shard, style: Style) -> Priced:
        """What stands before the first layer."""
        key = ("embedding", shard, style)
        if key not in self._known:
            self._known[key] = self._priced(embedding_piece(self.model, shard, style))
        return self._known[key]

    def head(self, shard: Shard, style: Style) -> Priced:
        """What stands after the last layer."""
        key = ("head", shard, style)
        if key not in self._known:
            self._known[key] = self._priced(head_piece(self.model, shard, style))
        return self._known[key]

    def optimizer(self, elements: float, *, one_by_one: bool, master: bool) -> Pass:
        """The update of this many weights."""
        key = (one_by_one, master)
        if key not in self._updates:
            program = optimizer_program(_OPTIMIZER_ELEMENTS, 10, master=master, one_by_one=one_by_one)
            self._updates[key] = _passes(program, self.device, self.host, roofline_only=self.roofline_only)[2]
        return Pass().plus(self._updates[key], elements / _OPTIMIZER_ELEMENTS)

    def _priced(self, piece: Piece) -> Priced:
        forward, backward, _ = _passes(piece.program, self.device, self.host, roofline_only=self.roofline_only)
        busiest = peak_memory(piece.program).by_kind.get("activation", 0)
        return Priced(forward, backward, piece.saved_bytes, max(0, busiest - piece.saved_bytes), piece.trained)


def _passes(program: Program, device: Device, host: HostProfile, *, roofline_only: bool) -> tuple[Pass, Pass, Pass]:
    """Forward, backward and update of a program: its kernels one after the other with the device's gap between."""
    lowered = lower_program(program, LoweringContext())
    costs = price(lowered, device, roofline_only=roofline_only)
    schedule = build_schedule(program, lowered)
    busy = host_seconds(schedule, program, host)
    launches = np.flatnonzero(schedule.code == Code.LAUNCH)
    call = schedule.call[launches]
    phase_of_scope = np.asarray(program.columns.scope_phase)
    phase, host_phase = phase_of_scope[schedule.scope[launches]], phase_of_scope[schedule.scope]
    sigma = costs.spread()
    family = np.array([item.family.name for item in lowered.calls])
    kind = np.array([item.kind for item in lowered.calls])
    compute = np.array([item.compute for item in lowered.calls])
    passes = []
    for chosen in ((Phase.FORWARD, Phase.LOSS), (Phase.BACKWARD,), (Phase.OPTIMIZER,)):
        mine = call[np.isin(phase, chosen)]
        seconds = costs.seconds[mine]
        passes.append(
            Pass(
                device=float(seconds.sum() + len(mine) * device.kernel_gap),
                host=float(busy[np.isin(host_phase, chosen)].sum()),
                kernels=len(mine),
                spread=float((seconds * sigma[mine]).sum()),
                gemm=float(seconds[family[mine] == "gemm"].sum()),
                grouped=float(seconds[kind[mine] == "bmm"].sum()),
                attention=float(seconds[family[mine] == "attention"].sum()),
                unknown=float(seconds[~costs.in_domain[mine]].sum()),
                narrow=float(seconds[(family[mine] == "gemm") & (compute[mine] == "fp8")].sum()),
                arithmetic=sum(_attention_flops(lowered.calls[i]) for i in mine.tolist()),
            )
        )
    forward, backward, update = passes
    return forward, backward, update


def _attention_flops(call: KernelCall) -> float:
    """Floating-point operations of an attention kernel: two products forward, five backward, half of them masked."""
    if call.family is not ATTENTION:
        return 0.0
    sizes = dict(zip(ATTENTION.fields, call.values, strict=True))
    work = 4.0 * sizes["batch"] * sizes["q_heads"] * sizes["q_len"] * sizes["kv_len"] * sizes["head_dim"]
    return work * (0.5 if sizes["causal"] else 1.0) * (2.5 if call.kind == "backward" else 1.0)
