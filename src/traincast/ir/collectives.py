"""The collectives that Traincast knows: one record each, from which every other package takes what it needs.

A record says what PyTorch, NCCL, traces and Chakra call a collective, which buffer gives its size, and how its bytes
travel. `docs/extend/add-a-collective.md` adds one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Route(Enum):
    """How the bytes of a collective travel between ranks."""

    RING = "ring"  # from rank to rank round a ring
    RING_OR_TREE = "ring or tree"  # likewise, or up and down a tree where that is faster
    PEERS = "peers"  # from every rank to every other one, side by side
    PAIR = "pair"  # from one rank to one other
    DIRECT = "direct"  # kernels use the memory of node mates, host threads write to that of other nodes: no NCCL


@dataclass(frozen=True, kw_only=True)
class CollectiveKind:
    """One collective. Names are without namespaces.

    `ops` are PyTorch's ops of namespace c10d, `functional_ops` those of _c10d_functional; the first of `ops` is the one
    that a traced call becomes. `library_ops` are ops of other libraries, with their namespaces. `kernel` is the word in
    NCCL's kernel names and `traced` how the names begin that profilers give it (lower case, no underscores); both are
    empty where there are none. `made_of` is the collective whose kernel NCCL runs for one that has no kernel of its
    own.

    The busiest link of a node carries `bus_whole + bus_share * (ranks - 1) / ranks` times the message. `like` is the
    collective whose measurements stand for one without any; `uneven_form_of` the one that sends all ranks alike.
    `gathers` says that the message is the output of a rank (else its input), `in_place` that a rank alone moves
    nothing, `one_size` that all ranks pass messages of one size, `rooted` that one rank is named. `chakra` is Chakra's
    CollectiveCommType.
    """

    name: str
    ops: tuple[str, ...] = ()
    functional_ops: tuple[str, ...] = ()
    library_ops: tuple[str, ...] = ()
    kernel: str = ""
    traced: str = ""
    made_of: str = ""
    route: Route = Route.PEERS
    bus_share: float = 1.0
    bus_whole: float = 0.0
    like: str = ""
    uneven_form_of: str = ""
    gathers: bool = False
    in_place: bool = False
    one_size: bool = False
    rooted: bool = False
    chakra: int = -1

    @property
    def matched(self) -> bool:
        """Whether traces name it and every rank of its group runs one kernel of it: its calls can be matched."""
        return bool(self.traced) and not self.made_of


# bus shares are those of nccl-tests (PERFORMANCE.md): an all-reduce is a reduce-scatter and an all-gather
_RECORDS = (
    CollectiveKind(
        name="all_reduce", kernel="AllReduce", traced="allreduce", route=Route.RING_OR_TREE, bus_share=2.0,
        in_place=True, one_size=True, chakra=0,
        ops=("allreduce_", "allreduce_coalesced_"), functional_ops=("all_reduce_", "all_reduce_coalesced_"),
    ),
    CollectiveKind(
        name="all_gather", kernel="AllGather", traced="allgather", route=Route.RING, gathers=True, chakra=2,
        ops=("_allgather_base_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
        functional_ops=(
            "all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced",
        ),
    ),
    CollectiveKind(
        name="reduce_scatter", kernel="ReduceScatter", traced="reducescatter", route=Route.RING, one_size=True,
        chakra=7,
        ops=("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
        functional_ops=("reduce_scatter_tensor", "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced"),
    ),
    CollectiveKind(
        name="all_to_all", traced="alltoall", route=Route.PEERS, chakra=6,
        ops=("alltoall_base_", "alltoall_"), functional_ops=("all_to_all_single",),
    ),
    CollectiveKind(name="all_to_all_v", route=Route.PEERS, like="all_to_all", uneven_form_of="all_to_all"),
    CollectiveKind(
        name="broadcast", kernel="Broadcast", traced="broadcast", route=Route.RING_OR_TREE, bus_share=0.0,
        bus_whole=1.0, like="all_gather", in_place=True, one_size=True, rooted=True, chakra=5,
        ops=("broadcast_",), functional_ops=("broadcast_",),
    ),
    CollectiveKind(
        name="reduce", kernel="Reduce", traced="reduce", route=Route.RING_OR_TREE, bus_share=0.0, bus_whole=1.0,
        like="reduce_scatter", in_place=True, one_size=True, rooted=True, chakra=1, ops=("reduce_",),
    ),
    CollectiveKind(
        name="send_recv", kernel="SendRecv", route=Route.PAIR, bus_share=0.0, bus_whole=1.0, like="all_to_all",
        in_place=True, ops=("send", "recv_"),
    ),
    CollectiveKind(
        name="barrier", traced="barrier", route=Route.RING_OR_TREE, bus_share=2.0, like="all_reduce", in_place=True,
        chakra=9, ops=("barrier",),
    ),
    CollectiveKind(
        name="one_shot_all_reduce", route=Route.DIRECT, bus_share=2.0, like="all_reduce", in_place=True, one_size=True,
        library_ops=("hugectr::one_shot_all_reduce",),
    ),
    CollectiveKind(
        name="node_first_all_to_all", route=Route.DIRECT, like="all_to_all", one_size=True,
        library_ops=("hugectr::node_first_all_to_all",),
    ),
    CollectiveKind(name="gather", traced="gather", made_of="all_to_all_v", rooted=True, chakra=3, ops=("gather_",)),
    CollectiveKind(name="scatter", traced="scatter", made_of="all_to_all_v", rooted=True, chakra=4, ops=("scatter_",)),
)  # fmt: skip

COLLECTIVES = {record.name: record for record in _RECORDS}
"""Every collective by name."""

UNEVEN_FORM = {record.uneven_form_of: record.name for record in _RECORDS if record.uneven_form_of}
"""The collective that takes other sizes for every rank, by the one that sends all ranks alike."""

BARRIER_BYTES = 4
"""What a barrier exchanges: NCCL has none, so PyTorch sums one float32."""

NAMESPACES = ("c10d", "_c10d_functional")
"""The namespaces of PyTorch's collective ops."""

COLLECTIVE_OPS = {
    f"{namespace}::{op}": record
    for record in _RECORDS
    for namespace, ops in zip(NAMESPACES, (record.ops, record.functional_ops), strict=True)
    for op in ops
}
"""The collective of every op, by its full name."""

LIBRARY_OPS = {op: record for record in _RECORDS for op in record.library_ops}
"""The collective of every op of a library other than PyTorch, by its full name."""

# the longest names first: "reduce_scatter" begins like "reduce"
_TRACED = sorted((record for record in _RECORDS if record.traced), key=lambda record: -len(record.traced))


def parse_collective_name(name: str) -> CollectiveKind | None:
    """The collective of a name that a profiler or PyTorch gave it: "allreduce", "_allgather_base_" and so on."""
    plain = name.lower().replace("_", "")
    return next((record for record in _TRACED if plain.startswith(record.traced)), None)
