"""What a collective exchanges: its kind, ranks, bytes and splits, from the arguments of PyTorch's op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName

from traincast.capturing.arguments import Arguments
from traincast.capturing.refusals import user_line
from traincast.errors import TraincastError
from traincast.workload.ops import Scalar

NAMESPACES = ("c10d", "_c10d_functional")
_BARRIER_BYTES = 4  # NCCL has no barrier: PyTorch sums one float32
_WRITTEN = ("output", "outputs", "output_tensor", "output_tensors", "output_lists", "out", "tensors")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as this rank sees it. `bytes` follows nccl-tests: the larger buffer of one rank.

    `splits` are the bytes sent to and received from every rank of the group, when they are uneven. `ends` are named
    global ranks: `root`, or `source` and `target`.
    """

    kind: str
    group: dist.ProcessGroup
    bytes: int
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    ends: tuple[tuple[str, int], ...] = ()
    async_op: bool = True

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the group."""
        return tuple(dist.get_process_group_ranks(self.group))

    @property
    def communicator(self) -> int | str:
        """PyTorch's name of the group, the same on every rank: 0 for the world, counted up by `new_group`."""
        name = str(self.group.group_name)
        return int(name) if name.isdecimal() else name

    def scalars(self) -> tuple[tuple[str, Scalar], ...]:
        """What the op of the program carries; sizes in bytes."""
        uneven: tuple[tuple[str, Scalar], ...] = ()
        if self.splits is not None:
            uneven = (("send_splits", self.splits[0]), ("recv_splits", self.splits[1]))
        return (
            ("collective", self.kind), ("group", self.ranks), ("communicator", self.communicator),
            ("bytes", self.bytes), *uneven, *self.ends, ("async_op", self.async_op),
        )  # fmt: skip


def describe(name: str, arguments: Arguments) -> Collective:
    """The collective that a call of `c10d::name` or `_c10d_functional::name` makes."""
    known = _KINDS.get(name)
    if known is None:
        raise TraincastError(f"{user_line()}: the collective {name} cannot be captured; use another one")
    values = dict(arguments)
    given = values["process_group"] if "process_group" in values else values["group_name"]
    return known(values, _group(given))


def written(arguments: Arguments) -> list[torch.Tensor]:
    """The tensors that a collective writes into, among its arguments."""
    for name, value in arguments:
        if name in _WRITTEN:
            return _flat(value)
    return []


def _group(given: Any) -> dist.ProcessGroup:
    if isinstance(given, torch.ScriptObject):
        return dist.ProcessGroup.unbox(given)
    if isinstance(given, str):
        return _resolve_process_group(GroupName(given))
    group: dist.ProcessGroup = given
    return group


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value or () for tensor in _flat(item)]


def _nbytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _flat(value))


def _first(values: dict[str, Any], *names: str) -> Any:
    return next(values[name] for name in names if name in values)


def _reduced(kind: str) -> Callable[[dict[str, Any], dist.ProcessGroup], Collective]:
    """A collective on one buffer: all-reduce, broadcast, reduce."""

    def make(values: dict[str, Any], group: dist.ProcessGroup) -> Collective:
        size = _nbytes(_first(values, "tensors", "inputs", "input"))
        root = values.get("root_rank", values.get("src"))
        ends = () if root is None else (("root", dist.get_process_group_ranks(group)[root]),)
        return Collective(kind, group, size, ends=ends, async_op=values.get("async_op", True))

    return make


def _all_gather(values: dict[str, Any], group: dist.ProcessGroup) -> Collective:
    given = _nbytes(_first(values, "input_tensors", "input_tensor", "input_list", "inputs", "input"))
    return Collective("all_gather", group, given * group.size(), async_op=values.get("async_op", True))


def _reduce_scatter(values: dict[str, Any], group: dist.ProcessGroup) -> Collective:
    given = _nbytes(_first(values, "input_tensors", "input_tensor", "inputs", "input"))
    return Collective("reduce_scatter", group, given, async_op=values.get("async_op", True))


def _all_to_all(sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup, async_op: bool) -> Collective:
    even = len({*sent, *received}) == 1
    splits = None if even else (tuple(sent), tuple(received))
    return Collective("all_to_all" if even else "all_to_all_v", group, sum(sent), splits, async_op=async_op)


def _all_to_all_list(values: dict[str, Any], group: dist.ProcessGroup) -> Collective:
    sent = [_nbytes(tensor) for tensor in values["input_tensors"]]
    received = [_nbytes(tensor) for tensor in values["output_tensors"]]
    return _all_to_all(sent, received, group, values["async_op"])


def _all_to_all_single(values: dict[str, Any], group: dist.ProcessGroup) -> Collective:
    sent = _row_splits(values["input"], values["input_split_sizes"], group)
    if values.get("output") is not None:
        received = _row_splits(values["output"], values["output_split_sizes"], group)
    else:
        row = _row_bytes(values["input"])
        received = [rows * row for rows in values["output_split_sizes"]] or sent
    return _all_to_all(sent, received, group, values.get("async_op", True))


def _row_splits(tensor: torch.Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    if not rows:
        return [_nbytes(tensor) // group.size()] * group.size()
    return [count * _row_bytes(tensor) for count in rows]


def _row_bytes(tensor: torch.Tensor) -> int:
    row = tensor.element_size()
    for size in tensor.shape[1:]:
        row *= size
    return row


def _rooted(*, to_root: bool) -> Callable[[dict[str, Any], dist.ProcessGroup], Collective]:
    """Gather and scatter, which NCCL makes of sends and receives: an all-to-all in which only one end is busy."""

    def make(values: dict[str, Any], group: dist.ProcessGroup) -> Collective:
        root, size = values["root_rank"], group.size()
        part = _nbytes(values["input_tensors"]) if to_root else _nbytes(values["output_tensors"])
        one = tuple(part if rank == root else 0 for rank in range(size))
        everyone = (part,) * size if group.rank() == root else (0,) * size
        splits = (one, everyone) if to_root else (everyone, one)
        ends = (("root", dist.get_process_group_ranks(group)[root]),)
        return Collective("all_to_all_v", group, sum(splits[0]), splits, ends, values["async_op"])

    return make


def _message(*, sends: bool) -> Callable[[dict[str, Any], dist.ProcessGroup], Collective]:
    def make(values: dict[str, Any], group: dist.ProcessGroup) -> Collective:
        ranks = dist.get_process_group_ranks(group)
        me, other = ranks[group.rank()], ranks[values["dst"] if sends else values["src"]]
        ends = (("source", me), ("target", other)) if sends else (("source", other), ("target", me))
        return Collective("send_recv", group, _nbytes(values["tensors"]), ends=ends)

    return make


def _barrier(values: dict[str, Any], group: dist.ProcessGroup) -> Collective:
    return Collective("barrier", group, _BARRIER_BYTES, async_op=values["async_op"])


_KINDS: dict[str, Callable[[dict[str, Any], dist.ProcessGroup], Collective]] = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "all_reduce_", "all_reduce_coalesced_"),
                    _reduced("all_reduce")),
    **dict.fromkeys(("broadcast_",), _reduced("broadcast")),
    "reduce_": _reduced("reduce"),
    **dict.fromkeys(("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
                     "all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced"),
                    _all_gather),
    **dict.fromkeys(("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
                     "reduce_scatter_tensor", "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced"),
                    _reduce_scatter),
    "alltoall_": _all_to_all_list,
    **dict.fromkeys(("alltoall_base_", "all_to_all_single"), _all_to_all_single),
    "gather_": _rooted(to_root=True), "scatter_": _rooted(to_root=False),
    "send": _message(sends=True), "recv_": _message(sends=False),
    "barrier": _barrier,
}  # fmt: skip
