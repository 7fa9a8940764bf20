"""The replayed allocator as PyTorch's memory viewer reads it: the document that `torch.cuda.memory._snapshot()` makes,
as JSON."""

from __future__ import annotations

from typing import Any

from traincast.ir.memory import CATEGORIES
from traincast.simulator.memory.allocator import CachingAllocator, Segment, round_size
from traincast.simulator.memory.device_memory import DeviceMemory, list_step_events

_MOST_EVENTS = 100_000  # of the trace: as many as PyTorch's own history keeps by default


def make_snapshot(memory: DeviceMemory) -> dict[str, Any]:
    """Segments and blocks after the last step, and the allocations of a steady step as its trace."""
    allocator = memory.replay.allocator
    return {
        "segments": [_describe_segment(memory, one) for one in allocator.segments.values()],
        "device_traces": [_list_trace(memory)],
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
        "segment_type": "small" if segment.small else "large", "is_expandable": segment.expandable,
        "blocks": [
            {"address": block.address, "size": block.size, "requested_size": block.size,
             "state": "active_allocated" if block.allocated else "inactive", "frames": _name_frames(memory, block.tag)}
            for block in blocks
        ],
    }  # fmt: skip


def _list_trace(memory: DeviceMemory) -> list[dict[str, Any]]:
    """What a steady step allocates and frees, in order, each at the address that a fresh allocator gives it."""
    events, trace = memory.events, []
    allocator, held = CachingAllocator(memory.settings), {}
    for number in (events.born < 0).nonzero()[0].tolist():
        held[number] = allocator.allocate(int(events.nbytes[number]), 0, number)
    for tick, number, comes in list_step_events(events, first=False)[:_MOST_EVENTS]:
        if comes:
            held[number] = allocator.allocate(int(events.nbytes[number]), int(events.stream[number]), number)
        elif number not in held:
            continue
        block = held[number]
        trace.append({
            "action": "alloc" if comes else "free_completed", "addr": block.address,
            "size": round_size(int(events.nbytes[number])), "stream": block.stream, "time_us": tick,
            "frames": _name_frames(memory, number),
        })  # fmt: skip
        if not comes:
            allocator.free(held.pop(number))
    return trace


def _name_frames(memory: DeviceMemory, number: int) -> list[dict[str, Any]]:
    """The module and category of a block where PyTorch has its call stack."""
    if number < 0:
        return []
    events = memory.events
    place = events.labels[int(events.label[number])] or "step"
    return [{"filename": place, "line": 0, "name": CATEGORIES[int(events.category[number])]}]
