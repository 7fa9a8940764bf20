"""Collectives inside a layer: among tensor-parallel ranks, ranks that share a sample, and ranks that share experts.

All ranks of such a group run the same program, so that a collective carries the shape of its group (`UNIFORM`): the
ranks of one group, which stand for all others that are formed like it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from traincast.ir.collectives import COLLECTIVES
from traincast.ir.variants import EXPOSED, UNIFORM, VARIANT
from traincast.models.layers.builder import Communicator, Ref, Scalars, StepBuilder


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroups:
    """Rank groups of a layer and how their collectives run; None: no such group.

    `overlap_tp` is "none", "backward" (alongside the GEMMs of gradients, as Megatron does) or "all" (also in the
    forward pass, of each collective the share `hidden_tp`). `token_bytes` is the size of an element that
    tensor-parallel ranks gather. `cp_gather`: keys and values are gathered, not sent round a ring. `dispatched` is how
    many copies of a token leave for experts; `overlap_ep`: alongside other kernels; `sorted_by_dispatch`: they arrive
    in the order of experts; `counts_on_host`: the host waits for the token counts of experts.
    """

    tp: Communicator | None = None
    cp: Communicator | None = None
    ep: Communicator | None = None
    overlap_tp: str = "none"
    hidden_tp: float = 0.0
    token_bytes: int = 2
    cp_gather: bool = False
    dispatched: float = 0.0
    overlap_ep: bool = False
    sorted_by_dispatch: bool = False
    counts_on_host: bool = False


@dataclass(slots=True)
class Region:
    """What runs on all tokens of a micro-batch, between two tensor-parallel collectives.

    `late` writes the gradients of its weights, which run alongside the collective of the gradient of its input.
    """

    regather: Callable[[], None] | None = None
    late: list[Callable[[], None]] = field(default_factory=list)


def write_collective(
    builder: StepBuilder,
    kind: str,
    group: Communicator,
    nbytes: float,
    ref: Ref,
    *,
    stream: int = 0,
    exposed: bool = False,
    module: str = "",
) -> None:
    """A collective on a stream of its own choice; `exposed`: nothing can run alongside it."""
    record = COLLECTIVES[kind]
    scalars: Scalars = [
        ("collective", kind), ("group", group.ranks), ("communicator", group.number), ("bytes", int(nbytes)),
        (VARIANT, f"{UNIFORM} {EXPOSED}" if exposed else UNIFORM),
    ]  # fmt: skip
    builder.add_op(f"c10d::{record.ops[0]}", [("tensors", ref)], [ref], scalars, stream=stream, module=module)


def begin_collective(
    builder: StepBuilder, kind: str, group: Communicator, nbytes: float, ref: Ref, *, module: str = ""
) -> int:
    """A collective on its communicator's stream (numbered as the communicator), after what the compute stream has so
    far; gives the event of its end."""
    stream = group.number
    builder.wait_for_event(builder.record_event(0), stream)
    write_collective(builder, kind, group, nbytes, ref, stream=stream, module=module)
    return builder.record_event(stream)
