"""The collectives of a timeline: what they did, over which group, how much they moved and how it was split; and which
ones of several ranks are the same."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from traincast.ir.collectives import COLLECTIVES, parse_collective_name
from traincast.traces.link import Linked
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import escape_text

_ANNOTATION = re.compile(r"(?:nccl|gloo|rccl):_?(\w+)")
# the longest names first: "ReduceScatter" begins like "Reduce"
_KERNEL_NAMES = {record.kernel: record.name for record in COLLECTIVES.values() if record.kernel}
_KERNEL = re.compile("|".join(sorted(_KERNEL_NAMES, key=len, reverse=True)))
_ITEM_BYTES = {
    "float": 4, "int": 4, "long int": 8, "long": 8, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "bool": 1,
    "signed char": 1, "unsigned char": 1, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Double": 8,
    "Byte": 1, "Char": 1, "Bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective kernel. `message_bytes` is this rank's input (-1 unknown), splits are elements per rank.

    `group` is the process group's name, `group_ranks` its members; both are empty where the trace does not say.
    `comms_id` is what all ranks of one collective have in common and no other has: Kineto's `Comms Id`, else the group
    and its `Seq` ("" where neither was recorded).
    """

    row: int
    kind: str
    seconds: float
    step: int
    stream: int
    message_bytes: int = -1
    output_bytes: int = -1
    group: str = ""
    group_size: int = 0
    group_ranks: tuple[int, ...] = ()
    in_splits: tuple[int, ...] = ()
    out_splits: tuple[int, ...] = ()
    comms_id: str = ""


def find_collectives(linked: Linked) -> list[Collective]:
    """Every collective kernel in order of start."""
    parsed: dict[int, dict[str, Any]] = {}
    return [
        _make_collective(linked, row, parsed)
        for row in linked.device[linked.find_communication(linked.device)].tolist()
    ]


def _make_collective(linked: Linked, row: int, parsed: dict[int, dict[str, Any]]) -> Collective:
    annotated: dict[str, Any] = {}
    above = int(linked.author[row])
    details = [_read_details(linked, row, parsed)]
    while above >= 0:
        details.append(_read_details(linked, above, parsed))
        annotation = _ANNOTATION.match(linked.get_name(above))
        if annotation:
            annotated.setdefault("kind", _normalise_kind(annotation[1]))
            annotated.setdefault("message_bytes", _count_bytes(details[-1]))
        above = int(linked.parent[above])
    metadata: dict[str, Any] = next((d["collective"] for d in details if isinstance(d.get("collective"), dict)), {})
    kernel = _KERNEL.search(linked.get_name(row))
    return Collective(
        row=row,
        seconds=1e-9 * int(linked.events["duration"][row]),
        step=int(linked.step[row]),
        stream=int(linked.events["stream"][row]),
        **{"kind": _KERNEL_NAMES[kernel[0]] if kernel else "unknown", **annotated, **_read_metadata(metadata)},
    )


def _read_details(linked: Linked, row: int, parsed: dict[int, dict[str, Any]]) -> dict[str, Any]:
    index = int(linked.events["details"][row])
    if index not in parsed:
        try:
            document = msgspec.json.decode(linked.trace.details[index] or b"{}")
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            document = {}
        parsed[index] = document if isinstance(document, dict) else {}
    return parsed[index]


def _count_bytes(details: dict[str, Any]) -> int:
    """Bytes of the first recorded tensor, or -1."""
    dims, types = details.get("dims"), details.get("types")
    if not (isinstance(dims, list) and isinstance(types, list) and dims and types):
        return -1
    item = _ITEM_BYTES.get(str(types[0]), 0)
    sizes = dims[0]
    if not item or not isinstance(sizes, list) or not all(isinstance(n, int) and n >= 0 for n in sizes):
        return -1
    return math.prod(sizes) * item


def _read_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """What newer traces write out themselves."""
    if not metadata:
        return {}
    item = _ITEM_BYTES.get(str(metadata.get("dtype")), 0)
    sizes = {
        key: item * metadata[name] if item and isinstance(metadata.get(name), int) else -1
        for key, name in (("message_bytes", "in_elements"), ("output_bytes", "out_elements"))
    }
    size = metadata.get("group_size")
    return {
        "kind": _normalise_kind(escape_text(str(metadata["name"]))),
        "group": escape_text(str(metadata.get("group", ""))),
        "group_size": size if isinstance(size, int) else 0,
        "group_ranks": _read_integers(metadata.get("group_ranks")),
        "in_splits": _read_integers(metadata.get("in_split")),
        "out_splits": _read_integers(metadata.get("out_split")),
        "comms_id": _read_comms_id(metadata),
        **sizes,
    }


def _read_comms_id(metadata: dict[str, Any]) -> str:
    shared, order = metadata.get("comms_id"), metadata.get("seq")
    if isinstance(shared, (int, str)) and shared not in ("", -1):
        return escape_text(f"id {shared}")
    if isinstance(order, int) and order >= 0 and metadata.get("group") not in (None, ""):
        ranks = metadata.get("group_ranks", "")
        return escape_text(f"{metadata['group']} {ranks} {metadata['name']} {order}")
    return ""


def _normalise_kind(name: str) -> str:
    """One name for each collective: "allreduce", "_all_gather_base" and so on are written in many ways."""
    record = parse_collective_name(name)
    return record.name if record else name


def _read_integers(value: Any) -> tuple[int, ...]:
    """A list of ranks or split sizes, which traces write as text: "[0, 1, 2]"."""
    if isinstance(value, list):
        return tuple(n for n in value if isinstance(n, int))
    return (
        tuple(int(n) for n in re.findall(r"\d{1,18}", value)) if isinstance(value, str) and "..." not in value else ()
    )


# those that all ranks of a group call in one order, as far as traces name them
_KINDS = frozenset(record.name for record in COLLECTIVES.values() if record.matched)
_SAME_SIZE = frozenset(record.name for record in COLLECTIVES.values() if record.one_size)
_APART_NS = 100_000.0  # clocks that agree no better than this are worth a remark
_Communicator = tuple[int, str, tuple[int, ...], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One collective as the ranks saw it: `members` are indices of ranks, `calls` what each of them recorded.

    `seconds` is the transfer alone: what it took the rank that came last and waited for nobody.
    """

    members: tuple[int, ...]
    calls: tuple[Collective, ...]

    @property
    def kind(self) -> str:
        """What was done: "all_reduce", "all_to_all", ..."""
        return self.calls[0].kind

    @property
    def seconds(self) -> float:
        """The shortest duration over ranks."""
        return min(call.seconds for call in self.calls)


@dataclass(frozen=True, eq=False, kw_only=True)
class Matches:
    """All matched collectives of a run. `offset` is what to take from each rank's clock, in nanoseconds, so that
    collectives end together; `spread` how far apart they still end at most, in seconds."""

    collectives: tuple[Match, ...]
    offset: FloatArray
    spread: float
    notes: tuple[str, ...]


def match_collectives(ranks: Sequence[Linked], calls: Sequence[Sequence[Collective]]) -> Matches:
    """Matches the collectives of ranks by what newer traces number them with, else by step, communicator and order, and
    aligns the clocks.

    Traces that do not name process groups are matched by the order in which their communication streams came into use.
    A call whose order cannot be right, since kinds or sizes differ, is left unmatched with all of its communicator's
    calls of that step.
    """
    queues: dict[_Communicator, dict[int, list[Collective]]] = {}
    notes: list[str] = []
    matched = _match_by_comms_id(calls)
    done = {(index, call.row) for match in matched for index, call in zip(match.members, match.calls, strict=True)}
    for index, (linked, made) in enumerate(zip(ranks, calls, strict=True)):
        for key, call in _add_communicator_keys(linked, made):
            if (index, call.row) not in done:
                queues.setdefault(key, {}).setdefault(index, []).append(call)
    for key, queue in queues.items():
        if len(queue) > 1:
            problem = _find_disagreement(queue)
            if problem:
                notes.append(f"step {key[0]}{f', group {key[1]}' if key[1] else ''}: {problem}; not matched over ranks")
            else:
                members = tuple(sorted(queue))
                matched += [
                    Match(members=members, calls=together)
                    for together in zip(*(queue[m] for m in members), strict=True)
                ]
    notes += _find_missing(matched)
    matched.sort(key=lambda match: int(ranks[match.members[0]].events["start"][match.calls[0].row]))
    offset, spread = _align_clocks(ranks, matched)
    if 1e9 * spread > _APART_NS:
        notes.append(f"collectives end up to {1e6 * spread:.0f} us apart after their clocks were aligned")
    return Matches(collectives=tuple(matched), offset=offset, spread=spread, notes=tuple(notes))


def _match_by_comms_id(calls: Sequence[Sequence[Collective]]) -> list[Match]:
    """Collectives whose ranks recorded what they have in common (`Collective.comms_id`), each once on every rank."""
    shared: dict[str, dict[int, list[Collective]]] = {}
    for index, made in enumerate(calls):
        for call in made:
            if call.comms_id and call.kind in _KINDS and call.step >= 0:
                shared.setdefault(call.comms_id, {}).setdefault(index, []).append(call)
    return [
        Match(members=tuple(sorted(found)), calls=tuple(found[index][0] for index in sorted(found)))
        for found in shared.values()
        if len(found) > 1 and all(len(made) == 1 for made in found.values())
    ]


def _add_communicator_keys(linked: Linked, calls: Sequence[Collective]) -> list[tuple[_Communicator, Collective]]:
    streams: dict[int, int] = {}
    keyed = []
    for call in calls:
        number = streams.setdefault(call.stream, len(streams))
        if call.step < 0 or call.kind not in _KINDS:
            continue
        named = bool(call.group or call.group_ranks)
        key = (linked.steps[call.step].number, call.group, call.group_ranks, -1 if named else number)
        keyed.append((key, call))
    return keyed


def _find_disagreement(queue: dict[int, list[Collective]]) -> str:
    """Why these calls cannot be the same ones on all ranks, or nothing."""
    counts = {index: len(calls) for index, calls in queue.items()}
    if len(set(counts.values())) > 1:
        low, high = min(counts, key=lambda i: counts[i]), max(counts, key=lambda i: counts[i])
        return f"the {high + 1}. rank has {counts[high]} collectives, the {low + 1}. has {counts[low]}"
    first, *others = queue.items()
    for other, calls in others:
        for number, (a, b) in enumerate(zip(first[1], calls, strict=True)):
            sizes = (a.message_bytes, b.message_bytes)
            if a.kind != b.kind or (a.kind in _SAME_SIZE and min(sizes) >= 0 and sizes[0] != sizes[1]):
                return (
                    f"collective {number + 1} is {a.kind} of {a.message_bytes} bytes on the {first[0] + 1}. rank, "
                    f"{b.kind} of {b.message_bytes} bytes on the {other + 1}."
                )
    return ""


def _find_missing(matched: Sequence[Match]) -> list[str]:
    sizes = {(m.calls[0].group_size, len(m.members)) for m in matched if m.calls[0].group_size > len(m.members)}
    return [
        f"{traced} of a group's {size} ranks were given: waiting for the others stays part of its collectives"
        for size, traced in sorted(sizes)
    ]


def _align_clocks(ranks: Sequence[Linked], matches: Sequence[Match]) -> tuple[FloatArray, float]:
    """Clock offsets in nanoseconds, so that the medians of the ends agree; ranks that meet nobody keep theirs."""
    base = min((linked.steps[0].start for linked in ranks), default=0)  # keeps nanoseconds within a float's precision
    ends = [
        np.array([float(int(ranks[m].end[c.row]) - base) for m, c in zip(x.members, x.calls, strict=True)])
        for x in matches
    ]
    offset = np.zeros(len(ranks))
    placed: set[int] = set()
    for root in range(len(ranks)):
        placed.add(root)
        while True:
            differences: dict[int, list[float]] = {}
            for match, moments in zip(matches, ends, strict=True):
                known = [moments[i] - offset[m] for i, m in enumerate(match.members) if m in placed]
                if known:
                    at = float(np.median(known))
                    for i, m in enumerate(match.members):
                        if m not in placed:
                            differences.setdefault(m, []).append(float(moments[i]) - at)
            if not differences:
                break
            for m, values in differences.items():
                offset[m] = float(np.median(values))
                placed.add(m)
    spread = max((float(np.ptp(e - offset[list(m.members)])) for m, e in zip(matches, ends, strict=True)), default=0.0)
    return offset, 1e-9 * spread
