"""The collectives of traced ranks as ops of a workload."""

from __future__ import annotations

from traincast.ir.collectives import BARRIER_BYTES, COLLECTIVES, UNEVEN_FORM
from traincast.ir.ops import Scalar, Signature, TensorSpec
from traincast.traces.collectives import Collective, Match
from traincast.traces.replay.results import RankReport, TraceReport
from traincast.traces.replay.together import compute_message_bytes
from traincast.utils.errors import TraincastError


def find_world_size(report: TraceReport) -> int:
    """How many ranks the run had, as far as the traces say."""
    sizes = [rank.linked.trace.world_size or 1 for rank in report.ranks]
    sizes += [rank.rank + 1 for rank in report.ranks]
    sizes += [max((c.group_size for c in rank.collectives), default=1) for rank in report.ranks]
    return max(sizes)


def make_collective_ops(report: TraceReport, world: int, step: int) -> tuple[list[dict[int, Signature]], list[str]]:
    """For every rank the ops of the collective kernels of step number `step` by event, and what to know about them."""
    calls = [[c for c in rank.collectives if _find_communicator(rank, c) == step] for rank in report.ranks]
    together = report.together.replay if report.together else None
    matches = together.matches.collectives if together else ()
    notes = []
    complete = len(report.ranks) == world
    if not complete:
        notes.append(f"{len(report.ranks)} of {world} ranks were traced; the others are taken to run the same")
    everyone = tuple(range(world))
    matched = {(m, call.row): match for match in matches for m, call in zip(match.members, match.calls, strict=True)}
    groups = sorted({_find_group(c, everyone) for made in calls for c in made} - {("", everyone)})
    numbers = {group: number + 1 for number, group in enumerate(groups)}
    ops: list[dict[int, Signature]] = []
    for index, rank in enumerate(report.ranks):
        signatures = {}
        for call in calls[index]:
            _, members = group = _find_group(call, everyone)
            if not complete and members != everyone:
                raise TraincastError(
                    f"rank {rank.rank} talks to ranks {members} of {world}; give the traces of all ranks for a workload"
                )
            match = matched.get((index, call.row), Match(members=(index,), calls=(call,)))
            signature = _make_signature(call, match, members, numbers.get(group, 0), splits=complete)
            if signature is not None:
                signatures[call.row] = signature
        ops.append(signatures)
    left_out = sum(map(len, calls)) - sum(map(len, ops))
    if left_out:
        notes.append(f"{left_out} collectives of unknown kind or size stand in as empty kernels")
    return ops, notes


def _find_communicator(rank: RankReport, call: Collective) -> int:
    return rank.linked.steps[call.step].number if call.step >= 0 else -1


def _find_group(call: Collective, everyone: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """A process group: the world, however it is called, or what the trace says."""
    members = call.group_ranks or everyone
    return ("" if members == everyone else call.group, members)


def _make_signature(
    call: Collective, match: Match, members: tuple[int, ...], communicator: int, *, splits: bool
) -> Signature | None:
    record, kind = COLLECTIVES.get(call.kind), call.kind
    nbytes = BARRIER_BYTES if kind == "barrier" else compute_message_bytes(match, len(members))
    if record is None or not record.matched or nbytes < 0:
        return None
    ends: tuple[tuple[str, Scalar], ...] = ()
    if record.rooted:
        ends = (("root", members[0]),)  # not recorded
    if kind in UNEVEN_FORM and splits and len(call.in_splits) == len(call.out_splits) == len(members):
        kind = UNEVEN_FORM[kind]
        sent, received = (
            _convert_to_bytes(call.in_splits, call.message_bytes),
            _convert_to_bytes(call.out_splits, call.output_bytes),
        )
        ends, nbytes = (("send_splits", sent), ("recv_splits", received)), call.message_bytes
    scalars: tuple[tuple[str, Scalar], ...] = (
        ("collective", kind), ("group", members), ("communicator", communicator), ("bytes", nbytes), *ends,
        ("async_op", True),
    )  # fmt: skip
    buffer = TensorSpec((max(nbytes // 4, 1),), (1,), "float32")
    return Signature(f"c10d::{record.ops[0]}", (buffer,), (buffer,), scalars, (("tensors", 1),))


def _convert_to_bytes(splits: tuple[int, ...], nbytes: int) -> tuple[int, ...]:
    whole = sum(splits)
    return tuple(nbytes * n // whole for n in splits) if whole else splits
