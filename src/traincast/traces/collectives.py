"""The collectives of a timeline: what they did, over which group, how much they moved and how it was split."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from traincast.ir.collectives import COLLECTIVES, parse_collective_name
from traincast.traces.link import Linked
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
    `meeting` is what all ranks of one collective have in common and no other has: Kineto's `Comms Id`, else the group
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
    meeting: str = ""


def find_collectives(linked: Linked) -> list[Collective]:
    """Every collective kernel in order of start."""
    parsed: dict[int, dict[str, Any]] = {}
    return [
        _make_collective(linked, row, parsed)
        for row in linked.device[linked.find_communication(linked.device)].tolist()
    ]


def _make_collective(linked: Linked, row: int, parsed: dict[int, dict[str, Any]]) -> Collective:
    annotated: dict[str, Any] = {}
    above = int(linked.launch[row])
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
        "meeting": _read_meeting(metadata),
        **sizes,
    }


def _read_meeting(metadata: dict[str, Any]) -> str:
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
