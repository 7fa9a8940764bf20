"""Pipeline schedules (1F1B, interleaved, zero-bubble), and short programs between the layers of a stage: messages,
collectives, the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps

from traincast.ir.builder import ProgramBuilder
from traincast.ir.ops import BETWEEN_STAGES, VARIANT, Phase, StorageKind
from traincast.ir.program import Program
from traincast.models.layers.builder import Communicator, Scalars, StepBuilder
from traincast.models.transformers.program.step import write_update
from traincast.models.transformers.program.style import write_collective
from traincast.simulator.parallelism.groups import (
    DATA,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    Groups,
)
from traincast.simulator.parallelism.layout import Layout

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"


@dataclass(frozen=True, slots=True)
class Turn:
    """One pass of one micro-batch through one chunk of a stage; `kind` is FORWARD, BACKWARD or WEIGHTS (the gradients
    of weights alone, where a schedule separates them)."""

    kind: str
    chunk: int
    micro_batch: int


def split_layers_into_parts(layers: int, stages: int, chunks: int = 1) -> tuple[int, ...]:
    """Layers of every part of the model in order; part p is chunk p // stages of stage p % stages. Where they do not
    divide, the first and last parts get fewer: they also hold the embedding and the head.

    >>> part_layers(14, 4)
    (3, 4, 4, 3)
    """
    parts = stages * chunks
    base, left = divmod(layers, parts)
    by_part = [base] * parts
    for part in sorted(range(parts), key=lambda part: abs(2 * part - parts + 1))[:left]:
        by_part[part] += 1
    return tuple(by_part)


def order_1f1b(stage: int, stages: int, micro_batches: int) -> list[Turn]:
    """One forward, one backward: as many forwards ahead as stages follow (Narayanan et al. 2019)."""
    ahead = min(micro_batches, stages - stage - 1)
    turns = [Turn(FORWARD, 0, m) for m in range(ahead)]
    for m in range(micro_batches - ahead):
        turns += [Turn(FORWARD, 0, ahead + m), Turn(BACKWARD, 0, m)]
    return turns + [Turn(BACKWARD, 0, m) for m in range(micro_batches - ahead, micro_batches)]


def order_interleaved(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Turn]:
    """Chunks in turns of as many micro-batches as there are stages (Narayanan et al. 2021, Megatron-LM)."""
    total = micro_batches * chunks

    def turn(number: int, kind: str) -> Turn:
        group, inside = divmod(number, stages * chunks)
        chunk = inside // stages
        return Turn(kind, chunk if kind == FORWARD else chunks - 1 - chunk, group * stages + inside % stages)

    ahead = min(total, 2 * (stages - stage - 1) + (chunks - 1) * stages)
    turns = [turn(number, FORWARD) for number in range(ahead)]
    for number in range(total - ahead):
        turns += [turn(ahead + number, FORWARD), turn(number, BACKWARD)]
    return turns + [turn(number, BACKWARD) for number in range(total - ahead, total)]


def order_zero_bubble(
    forward: Sequence[float], backward: Sequence[float], weights: Sequence[float], micro_batches: int
) -> list[list[Turn]]:
    """The order of every stage where gradients of weights fill what would be bubbles, with the memory of 1F1B (ZB-H1,
    Qi et al. 2024): a stage prefers a backward pass, then a forward pass, then gradients of weights.

    `forward`, `backward` (inputs' gradients only) and `weights` are the seconds of a micro-batch on every stage.
    """
    stages = len(forward)
    orders: list[list[Turn]] = [[] for _ in range(stages)]
    done_f = [[float("inf")] * micro_batches for _ in range(stages)]
    done_b = [[float("inf")] * micro_batches for _ in range(stages)]
    clock, counts = [0.0] * stages, [[0, 0, 0] for _ in range(stages)]
    for _ in range(3 * micro_batches * stages):
        options = [
            _choose_next_turn(s, counts, clock, done_f, done_b, micro_batches, weights[s]) for s in range(stages)
        ]
        ready = [(start, s, kind) for s, option in enumerate(options) if option is not None for start, kind in [option]]
        start, s, kind = min(ready)
        number = counts[s][kind]
        counts[s][kind] += 1
        clock[s] = start + (forward, backward, weights)[kind][s]
        if kind == 0:
            done_f[s][number] = clock[s]
        elif kind == 1:
            done_b[s][number] = clock[s]
        orders[s].append(Turn((FORWARD, BACKWARD, WEIGHTS)[kind], 0, number))
    return orders


def _choose_next_turn(
    s: int,
    counts: Sequence[Sequence[int]],
    clock: Sequence[float],
    done_f: Sequence[Sequence[float]],
    done_b: Sequence[Sequence[float]],
    micro_batches: int,
    weight_seconds: float,
) -> tuple[float, int] | None:
    """When a stage can begin its next turn, and which kind it is (0 forward, 1 backward, 2 weights): gradients of
    weights where half of them fit in before another turn can begin."""
    stages = len(counts)
    f, b, w = counts[s]
    choices = []
    if b < f:
        arrived = done_f[s][b] if s == stages - 1 else done_b[s + 1][b]
        choices.append((max(clock[s], arrived), 1))
    if f < micro_batches and f - b < stages - s:
        choices.append((max(clock[s], 0.0 if s == 0 else done_f[s - 1][f]), 0))
    known = [choice for choice in choices if choice[0] < float("inf")]
    first = min((start for start, _ in known), default=float("inf"))
    if w < b and first > clock[s] + weight_seconds / 2:
        return clock[s], 2
    ready = [choice for choice in known if choice[0] <= first]
    return min(ready, key=lambda choice: choice[1] != 1) if ready else None


def compute_pipeline_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    *,
    chunks: int = 1,
    weights: Sequence[float] | None = None,
) -> tuple[float, float]:
    """Seconds of all micro-batches and of the idle time in them, for one-forward-one-backward schedules.

    `forward` and `backward` are the seconds of a micro-batch on every stage (all its chunks together). With several
    `chunks` a stage waits that much less while the pipeline fills and drains. `weights` are the parts of `backward`
    that only make gradients of weights: a zero-bubble schedule puts them where the stage would wait.

    >>> pipeline_seconds([1.0, 1.0], [2.0, 2.0], 4)
    (15.0, 3.0)
    """
    costs = [f + b for f, b in zip(forward, backward, strict=True)]
    slowest = max(costs)
    ramp = (sum(costs) - slowest) / chunks
    if weights is not None:
        # Qi et al. 2024: the bubble of a stage falls from F + B + W to F + B - W
        ramp = max(0.0, ramp - 2 * (sum(weights) - weights[costs.index(slowest)]) / chunks)
    return micro_batches * slowest + ramp, ramp


_EVENTS_OF_LAYERS = 256
"""Events below are those of collectives inside layers."""
_ISSUE, _REDUCED, _MESSAGE, _SENT = range(_EVENTS_OF_LAYERS, _EVENTS_OF_LAYERS + 4)
_FIRST = _EVENTS_OF_LAYERS + 8
_TENSOR_ELEMENTS = 10_000_000  # weights of one tensor of the update
_MOST_TENSORS = 2048  # more weights than any GPU holds (20 billion with their states) are in larger tensors


def _write_once(write: Callable[..., Program | None]) -> Callable[..., Program | None]:
    """Writes every snippet once for all stages, messages between two of them once for each."""

    @wraps(write)
    def look_up(self: Snippets, *arguments: object, **options: object) -> Program | None:
        stage = self.stage if write.__name__ in ("receive", "send") else -1
        key = (write.__name__, stage, arguments, tuple(sorted(options.items())))
        if key not in self.written:
            self.written[key] = write(self, *arguments, **options)
        return self.written[key]

    return look_up


class Snippets:
    """Writes what one rank of a stage does between its layers; None where a layout needs nothing. `written` are those
    of all stages."""

    def __init__(
        self, layout: Layout, groups: Groups, hidden: int, stage: int, written: dict[object, Program | None]
    ) -> None:
        self.layout, self.groups, self.hidden, self.stage = layout, groups, hidden, stage
        self.first_bucket = _FIRST + 1024
        self.written = written

    @_write_once
    def receive(self, kind: str, chunk: int) -> Program | None:
        """What the stage before (or after, backward) sends: the compute stream waits for it."""
        other = self._neighbour(chunk, -1 if kind == FORWARD else 1)
        if other is None:
            return None
        forward = kind == FORWARD
        builder = self._builder("c10d::recv_", kind)
        stream = RECEIVE_FORWARD if forward else RECEIVE_BACKWARD
        self._message(builder, "recv_", other, self.stage, SEND_FORWARD if forward else SEND_BACKWARD, stream)
        _record_event(builder, _MESSAGE, stream)
        _wait_for_event(builder, _MESSAGE, 0)
        if not self.layout.overlap_pp:
            _synchronize_host(builder)
        return builder.build_program()

    @_write_once
    def send(self, kind: str, chunk: int) -> Program | None:
        """A message to the next stage (or the one before, backward), which the kernels after it overlap with unless the
        layout says otherwise."""
        other = self._neighbour(chunk, 1 if kind == FORWARD else -1)
        if other is None:
            return None
        stream = SEND_FORWARD if kind == FORWARD else SEND_BACKWARD
        builder = self._builder("c10d::send", kind)
        _record_event(builder, _ISSUE, 0)
        _wait_for_event(builder, _ISSUE, stream)
        self._message(builder, "send", self.stage, other, stream, stream)
        if not self.layout.overlap_pp:
            _record_event(builder, _SENT, stream)
            _wait_for_event(builder, _SENT, 0)
        return builder.build_program()

    @_write_once
    def gather(self, dense: float, sparse: float, event: int, kind: str) -> Program | None:
        """Parameters of a layer that data-parallel ranks share, gathered alongside what runs now."""
        size = 1 if self.layout.quantised_gather else self.layout.gather_bytes
        parts = [
            ("all_gather", self.groups.sharing, size * dense),
            ("all_gather", self.groups.expert_data, size * sparse),
        ]
        return self._between_copies(parts, _FIRST + event, kind)

    @_write_once
    def wait(self, event: int, kind: str) -> Program | None:
        """The compute stream waits for parameters."""
        if self.groups.data is None and self.groups.expert_data is None:
            return None
        builder = self._builder("cuda::stream_wait_event", kind)
        _wait_for_event(builder, event if event >= self.first_bucket else _FIRST + event, 0)
        return builder.build_program()

    @_write_once
    def reduce(self, dense: float, sparse: float) -> Program | None:
        """Gradients summed over copies of the model, alongside what runs now."""
        layout, groups, size = self.layout, self.groups, self.layout.reduce_bytes
        kind = "all_reduce" if layout.sharding == "none" else "reduce_scatter"
        whole = groups.sharing if layout.sharding == "zero3" else groups.data
        parts = [(kind, whole, size * dense)]
        if layout.sharding == "zero3" and layout.sharing < layout.dp * layout.cp:
            parts.append(("all_reduce", groups.copies, size * dense / layout.sharing))
        parts.append((kind, groups.expert_data, size * sparse))
        return self._between_copies(parts, _REDUCED, "backward")

    @_write_once
    def wait_for_reduced(self) -> Program:
        """The compute stream waits for all gradients."""
        builder = self._builder("cuda::stream_wait_event", "update")
        _wait_for_event(builder, _REDUCED, 0)
        return builder.build_program()

    @_write_once
    def gather_updated(self, dense: float, sparse: float, event: int, waits: bool = False) -> Program | None:
        """16-bit parameters after the update of a distributed optimizer."""
        parts = [("all_gather", self.groups.data, 2 * dense), ("all_gather", self.groups.expert_data, 2 * sparse)]
        return self._between_copies(parts, event, "forward", waits=waits)

    @_write_once
    def update(self, dense: float, sparse: float) -> Program | None:
        """The norm of gradients and Adam over this rank's share of the weights."""
        layout = self.layout
        if layout.optimizer == "none":
            return None
        inner = layout.gpus // layout.pp // (layout.ep * layout.etp)
        shared, experts = (layout.sharing, inner) if layout.sharding != "none" else (1, 1)
        elements = int(dense / shared + sparse / experts)
        if not elements:
            return None
        tensors = min(_MOST_TENSORS, max(1, round(elements / _TENSOR_ELEMENTS)))
        builder = self._builder("aten::_foreach_norm", "update")
        write_update(
            builder, elements, tensors, dtype="float32" if layout.wide else "bfloat16", optimizer=layout.optimizer,
            norm=True,
        )  # fmt: skip
        return builder.build_program()

    def _between_copies(
        self, parts: list[tuple[str, Communicator | None, float]], event: int, kind: str, *, waits: bool = False
    ) -> Program | None:
        wanted = [(name, group, nbytes) for name, group, nbytes in parts if group is not None and nbytes > 0]
        if not wanted:
            return None
        builder = self._builder("c10d::" + wanted[0][0], kind)
        _record_event(builder, _ISSUE, 0)
        _wait_for_event(builder, _ISSUE, DATA)
        for name, group, nbytes in wanted:
            ref = builder.add_resident_tensor((max(1, int(nbytes) // 2),), StorageKind.BUFFER, "bfloat16")
            write_collective(builder, name, group, nbytes, ref, stream=DATA)
        _record_event(builder, event, DATA)
        if waits:
            _wait_for_event(builder, event, 0)
        return builder.build_program()

    def _neighbour(self, chunk: int, step: int) -> int | None:
        """The stage that holds the part of the model before or after this chunk."""
        stages = self.layout.pp
        part = chunk * stages + self.stage + step
        return part % stages if stages > 1 and 0 <= part < stages * self.layout.vp else None

    def _message(
        self, builder: StepBuilder, name: str, source: int, target: int, communicator: int, stream: int
    ) -> None:
        layout = self.layout
        rows = layout.micro_batch * layout.seq_len // layout.cp // (layout.tp if layout.sequence else 1)
        ranks = (self.groups.first_rank(source), self.groups.first_rank(target))
        ref = builder.add_resident_tensor((max(1, rows), self.hidden), StorageKind.BUFFER, "bfloat16")
        scalars: Scalars = [
            ("collective", "send_recv"), ("group", ranks), ("source", ranks[0]), ("target", ranks[1]),
            ("communicator", communicator), ("bytes", ref.spec.nbytes), (VARIANT, BETWEEN_STAGES),
        ]  # fmt: skip
        builder.add_op(f"c10d::{name}", [("tensors", ref)], [ref], scalars, stream=stream)

    def _builder(self, scope: str, kind: str) -> StepBuilder:
        layout = self.layout
        builder = StepBuilder(
            layout.micro_batch, target=ProgramBuilder(batch_size=layout.micro_batch, seq_len=layout.seq_len)
        )
        phases = {"forward": Phase.FORWARD, "backward": Phase.BACKWARD, "update": Phase.OPTIMIZER}
        builder.open_scope(scope, phases[kind])
        return builder


def _record_event(builder: StepBuilder, event: int, stream: int) -> None:
    builder.add_op("cuda::event_record", [], [], [("event", event), ("stream", stream)], stream=stream)


def _synchronize_host(builder: StepBuilder) -> None:
    """The host waits, as Megatron's does for a message that nothing overlaps with."""
    builder.add_op("cuda::stream_synchronize", [], [], [("event", -1), ("stream", 0)])


def _wait_for_event(builder: StepBuilder, event: int, stream: int) -> None:
    builder.add_op("cuda::stream_wait_event", [], [], [("event", event), ("stream", stream)], stream=stream)
