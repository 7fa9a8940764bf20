"""The replayed allocator as PyTorch's memory viewer (pytorch.org/memory_viz) reads it: what
`torch.cuda.memory._snapshot()` makes, as JSON, or as the pickle that the viewer wants. Pickles are written, never
read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

from traincast.ir.memory import CATEGORIES
from traincast.simulator.memory.allocator import CachingAllocator, Segment
from traincast.simulator.memory.device_memory import DeviceMemory, StepReplay
from traincast.utils.files.writing import write_bytes

_MOST_EVENTS = 100_000  # of the trace: as many as PyTorch's own history keeps by default
_PICKLES = (".pickle", ".pkl")
_PROTOCOL = 4  # the newest that the viewer knows


def write_snapshot(path: str | Path, memory: DeviceMemory) -> None:
    """Writes the snapshot: a pickle where the file is called one, else JSON."""
    snapshot = make_snapshot(memory)
    if Path(path).suffix in _PICKLES:
        write_bytes(path, pickle.dumps(snapshot, protocol=_PROTOCOL))
    else:
        write_bytes(path, json.dumps(snapshot, separators=(",", ":")).encode())


def make_snapshot(memory: DeviceMemory) -> dict[str, Any]:
    """Segments and blocks after a steady step, and what the allocator did in that step as its trace."""
    trace: list[dict[str, Any]] = []

    def note(action: str, address: int, size: int, stream: int, tag: int) -> None:
        trace.append({
            "action": action, "addr": address, "size": size, "stream": stream, "time_us": len(trace),
            "frames": _name_frames(memory, tag),
        })  # fmt: skip

    allocator = CachingAllocator(memory.settings)
    step = StepReplay(memory.events, allocator)
    step.allocate_resident()
    for number in range(memory.replay.steps + 1):
        allocator.listener = note if number == memory.replay.steps else None
        step.run(first=number == 0)
    return {
        "segments": [_describe_segment(memory, one) for one in allocator.segments.values()],
        "device_traces": [trace[-_MOST_EVENTS:]],
        "allocator_settings": {
            "expandable_segments": memory.settings.expandable_segments,
            "garbage_collection_threshold": memory.settings.garbage_collection_threshold,
        },
    }


def _describe_segment(memory: DeviceMemory, segment: Segment) -> dict[str, Any]:
    blocks = segment.blocks()
    used = sum(block.size for block in blocks if block.allocated)
    return {
        "device": 0, "address": segment.address, "total_size": segment.size, "allocated_size": used,
        "active_size": used, "requested_size": used, "stream": segment.stream,
        "segment_type": "small" if segment.small else "large", "is_expandable": segment.expandable, "frames": [],
        "blocks": [
            {"address": block.address, "size": block.size, "requested_size": block.size,
             "state": "active_allocated" if block.allocated else "inactive", "frames": _name_frames(memory, block.tag)}
            for block in blocks
        ],
    }  # fmt: skip


def _name_frames(memory: DeviceMemory, number: int) -> list[dict[str, Any]]:
    """The module and category of a block where PyTorch has its call stack."""
    if number < 0:
        return []
    events = memory.events
    place = events.labels[int(events.label[number])] or "step"
    return [{"filename": place, "line": 0, "name": CATEGORIES[int(events.category[number])]}]
