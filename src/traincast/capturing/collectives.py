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
from traincast.capturing.errors import find_user_line
from traincast.ir.collectives import BARRIER_BYTES, COLLECTIVE_OPS, NAMESPACES, UNEVEN_FORM
from traincast.ir.ops import Scalar
from traincast.utils.errors import TraincastError

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

    def list_scalars(self) -> tuple[tuple[str, Scalar], ...]:
        """What the op of the program carries; sizes in bytes."""
        uneven: tuple[tuple[str, Scalar], ...] = ()
        if self.splits is not None:
            uneven = (("send_splits", self.splits[0]), ("recv_splits", self.splits[1]))
        return (
            ("collective", self.kind), ("group", self.ranks), ("communicator", self.communicator),
            ("bytes", self.bytes), *uneven, *self.ends, ("async_op", self.async_op),
        )  # fmt: skip


def describe_collective(name: str, arguments: Arguments) -> Collective:
    """The collective that a call of `c10d::name` or `_c10d_functional::name` makes."""
    record = next((found for space in NAMESPACES if (found := COLLECTIVE_OPS.get(f"{space}::{name}"))), None)
    if record is None or record.name not in _READERS:
        raise TraincastError(f"{find_user_line()}: the collective {name} cannot be captured; use another one")
    values = dict(arguments)
    group = values["process_group"] if "process_group" in values else values["group_name"]
    return _READERS[record.name](values, _get_group(group))


def list_written_tensors(arguments: Arguments) -> list[torch.Tensor]:
    """The tensors that a collective writes into, among its arguments."""
    for name, value in arguments:
        if name in _WRITTEN:
            return _flatten_tensors(value)
    return []


def _get_group(argument: Any) -> dist.ProcessGroup:
    if isinstance(argument, torch.ScriptObject):
        return dist.ProcessGroup.unbox(argument)
    if isinstance(argument, str):
        return _resolve_process_group(GroupName(argument))
    group: dist.ProcessGroup = argument
    return group


def _flatten_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value or () for tensor in _flatten_tensors(item)]


def _count_bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _flatten_tensors(value))


def _get_first(values: dict[str, Any], *names: str) -> Any:
    return next(values[name] for name in names if name in values)


def _make_one_buffer_reader(kind: str) -> Callable[[dict[str, Any], dist.ProcessGroup], Collective]:
    """A collective on one buffer: all-reduce, broadcast, reduce."""

    def make(values: dict[str, Any], group: dist.ProcessGroup) -> Collective:
        size = _count_bytes(_get_first(values, "tensors", "inputs", "input"))
        root = values.get("root_rank", values.get("src"))
        ends = () if root is None else (("root", dist.get_process_group_ranks(group)[root]),)
        return Collective(kind, group, size, ends=ends, async_op=values.get("async_op", True))

    return make


def _read_all_gather(values: dict[str, Any], group: dist.ProcessGroup) -> Collective:
    part = _count_bytes(_get_first(values, "input_tensors", "input_tensor", "input_list", "inputs", "input"))
    return Collective("all_gather", group, part * group.size(), async_op=values.get("async_op", True))


def _reduce_scatter(values: dict[str, Any], group: dist.ProcessGroup) -> Collective:
    whole = _count_bytes(_get_first(values, "input_tensors", "input_tensor", "inputs", "input"))
    return Collective("reduce_scatter", group, whole, async_op=values.get("async_op", True))


def _read_all_to_all(values: dict[str, Any], group: dist.ProcessGroup) -> Collective:
    if "input_tensors" in values:
        sent = [_count_bytes(tensor) for tensor in values["input_tensors"]]
        received = [_count_bytes(tensor) for tensor in values["output_tensors"]]
    else:
        sent = _convert_row_splits(values["input"], values["input_split_sizes"], group)
        received = _compute_received_splits(values, sent, group)
    even = len({*sent, *received}) == 1
    splits = None if even else (tuple(sent), tuple(received))
    kind = "all_to_all" if even else UNEVEN_FORM["all_to_all"]
    return Collective(kind, group, sum(sent), splits, async_op=values.get("async_op", True))


def _compute_received_splits(values: dict[str, Any], sent: list[int], group: dist.ProcessGroup) -> list[int]:
    if values.get("output") is not None:
        return _convert_row_splits(values["output"], values["output_split_sizes"], group)
    row = _count_row_bytes(values["input"])
    return [rows * row for rows in values["output_split_sizes"]] or sent


def _convert_row_splits(tensor: torch.Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    if not rows:
        return [_count_bytes(tensor) // group.size()] * group.size()
    return [count * _count_row_bytes(tensor) for count in rows]


def _count_row_bytes(tensor: torch.Tensor) -> int:
    row = tensor.element_size()
    for size in tensor.shape[1:]:
        row *= size
    return row


def _make_rooted_reader(*, to_root: bool) -> Callable[[dict[str, Any], dist.ProcessGroup], Collective]:
    """Gather and scatter, which NCCL makes of sends and receives: an all-to-all in which only one end is busy."""

    def make(values: dict[str, Any], group: dist.ProcessGroup) -> Collective:
        root, size = values["root_rank"], group.size()
        part = _count_bytes(values["input_tensors"]) if to_root else _count_bytes(values["output_tensors"])
        one = tuple(part if rank == root else 0 for rank in range(size))
        everyone = (part,) * size if group.rank() == root else (0,) * size
        splits = (one, everyone) if to_root else (everyone, one)
        ends = (("root", dist.get_process_group_ranks(group)[root]),)
        return Collective("all_to_all_v", group, sum(splits[0]), splits, ends, values["async_op"])

    return make


def _read_message(values: dict[str, Any], group: dist.ProcessGroup) -> Collective:
    sends, ranks = "dst" in values, dist.get_process_group_ranks(group)
    me, other = ranks[group.rank()], ranks[values["dst"] if sends else values["src"]]
    ends = (("source", me), ("target", other)) if sends else (("source", other), ("target", me))
    return Collective("send_recv", group, _count_bytes(values["tensors"]), ends=ends)


def _read_barrier(values: dict[str, Any], group: dist.ProcessGroup) -> Collective:
    return Collective("barrier", group, BARRIER_BYTES, async_op=values["async_op"])


# how the arguments of each collective's ops are read
_READERS: dict[str, Callable[[dict[str, Any], dist.ProcessGroup], Collective]] = {
    "all_reduce": _make_one_buffer_reader("all_reduce"),
    "broadcast": _make_one_buffer_reader("broadcast"),
    "reduce": _make_one_buffer_reader("reduce"),
    "all_gather": _read_all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _read_all_to_all,
    "gather": _make_rooted_reader(to_root=True),
    "scatter": _make_rooted_reader(to_root=False),
    "send_recv": _read_message,
    "barrier": _read_barrier,
}
