"""What a step needs of a device, and whether it fits."""

from __future__ import annotations

import json
import pickletools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import traincast
from traincast.hardware.platform import load_device
from traincast.ir.memory import CATEGORIES, EventWriter, Memory, MemoryEvents
from traincast.simulator.memory.device_memory import make_device_memory, replay_steps
from traincast.simulator.memory.snapshot import make_snapshot, write_snapshot

ACTIVATION, PARAMETER, OPTIMIZER = (CATEGORIES.index(n) for n in ("activation", "parameter", "optimizer_state"))
MIB = 1 << 20


def make_step(sizes: list[int], parameters: int = 64 * MIB) -> MemoryEvents:
    """Activations that come one by one and go in the opposite order, and an optimizer of the first step."""
    writer = EventWriter()
    writer.add_blocks(parameters, -1, None, PARAMETER, "model")
    for number, size in enumerate(sizes):
        writer.add_blocks(size, number, 2 * len(sizes) - number, ACTIVATION, f"layers.{number}")
    writer.tick = 2 * len(sizes) + 2
    writer.add_blocks(2 * parameters, -1, None, OPTIMIZER, "model", appears=writer.tick - 1)
    return writer.build_events()


def test_peaks_by_category_and_module_add_up() -> None:
    memory = Memory(make_step([30 * MIB, 50 * MIB]))
    assert memory.peak_bytes == (64 + 128 + 80) * MIB == sum(memory.by_kind.values()) == sum(memory.by_module.values())
    ticks, sums = memory.events.sample_categories(50)
    assert sums.sum(axis=0).max() == memory.peak_bytes and memory.events.peak_tick in ticks


def test_a_replay_is_stable_and_never_below_what_is_allocated() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        events = make_step((rng.integers(1, 60, 40) * MIB).tolist())
        result = replay_steps(events)
        assert events.peak_bytes <= result.allocated <= result.active <= result.reserved
        again = replay_steps(events, capacity=result.reserved)
        assert not again.missing and again.reserved == result.reserved
        assert replay_steps(events, capacity=events.peak_bytes - MIB).missing


@pytest.mark.parametrize(("name", "batch"), [("resnet50", 512), ("mpt-1b", 8), ("dlrm-default", 4096)])
def test_a_step_runs_in_the_least_that_it_needs_and_not_in_much_less(name: str, batch: int) -> None:
    """The least is counted in one replay without limit; replays under a limit are PyTorch's own rule."""
    memory = traincast.predict(name, on="v100", batch_size=batch).memory
    least = round(memory.required_bytes - memory.process.total)
    assert not replay_steps(memory.events, capacity=round(1.01 * least) + 20 * MIB).missing
    assert replay_steps(memory.events, capacity=round(0.95 * least)).missing


def test_a_device_with_room_fits_and_one_without_does_not() -> None:
    device, events = load_device("v100"), make_step([1 << 30] * 12)

    def weigh(gigabytes: float) -> float:
        return make_device_memory(
            Memory(events), replace(device, memory_bytes=gigabytes * 1e9), communicators=0
        ).fit_probability

    chances = [weigh(size) for size in (8, 13, 13.5, 14, 15, 40)]
    assert chances == sorted(chances) and chances[0] < 0.01 and chances[-1] > 0.99
    memory = make_device_memory(Memory(events), device, communicators=1)
    assert memory.peak_bytes < memory.required_bytes <= memory.used_bytes
    assert memory.allocated_interval[0] < memory.allocated_bytes < memory.allocated_interval[1]
    document = memory.to_dict()
    assert document["fits"] and document["largest"][0]["module"] == "layers.*"
    assert sum(document["by_category_gb"].values()) == pytest.approx(document["tensors_gb"])


def test_a_snapshot_has_the_fields_of_pytorchs_viewer() -> None:
    memory = make_device_memory(Memory(make_step([30 * MIB, 3 * MIB, 512])), load_device("a100-40gb"), communicators=0)
    snapshot = make_snapshot(memory)
    assert {"segments", "device_traces"} <= set(snapshot)
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == memory.replay.allocator.reserved
    for segment in snapshot["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        assert {b["state"] for b in segment["blocks"]} <= {"active_allocated", "inactive"}
    actions = [event["action"] for event in snapshot["device_traces"][0]]
    assert actions == ["alloc"] * 3 + ["free_requested", "free_completed"] * 3


@pytest.mark.parametrize("text", ["", "expandable_segments:True", "max_split_size_mb:32"])
def test_the_trace_of_a_snapshot_ends_at_its_blocks(text: str) -> None:
    # given a snapshot of a real step
    memory = traincast.predict("resnet50", on="v100", batch_size=8, allocator=text or None).memory
    snapshot = make_snapshot(memory)
    blocks: dict[int, int] = {}
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                blocks[block["address"]] = block["size"]
    at_the_end = dict(blocks)
    # when its trace is walked backwards from there, as the viewer does, then every block lies in a segment, alone
    for event in reversed(snapshot["device_traces"][0]):
        if event["action"] == "alloc":
            assert blocks.pop(event["addr"]) == event["size"]
        elif event["action"] == "free_completed":
            assert event["addr"] not in blocks
            assert any(s["address"] <= event["addr"] < s["address"] + s["total_size"] for s in snapshot["segments"])
            blocks[event["addr"]] = event["size"]
    # and the step begins with as much as it leaves: it is steady
    assert sum(blocks.values()) == sum(at_the_end.values())


def test_a_pickled_snapshot_has_what_the_viewer_unpickles(tmp_path: Path) -> None:
    memory = make_device_memory(Memory(make_step([30 * MIB, 3 * MIB, 512])), load_device("a100-40gb"), communicators=0)
    write_snapshot(tmp_path / "memory.pickle", memory)
    write_snapshot(tmp_path / "memory.json", memory)
    # plain values only, in a protocol and opcodes of the viewer's own reader
    listed = {opcode.name for opcode, _, _ in pickletools.genops((tmp_path / "memory.pickle").read_bytes())}
    assert listed <= {
        "PROTO", "FRAME", "MARK", "STOP", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
        "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "APPEND", "APPENDS",
        "SETITEM", "SETITEMS", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT",
    }  # fmt: skip
    assert json.loads((tmp_path / "memory.json").read_text()) == make_snapshot(memory)


def test_what_a_step_leaves_is_freed_where_the_next_one_frees_it() -> None:
    # given a loss that a step finds, frees once its own is made, and leaves; and gradients that nothing finds
    writer = EventWriter()
    loss, gradient, work = 100 * MIB, 40 * MIB, 60 * MIB
    writer.add_blocks(loss, -1, 3, CATEGORIES.index("input"), "loss")
    writer.add_blocks(loss, 2, None, ACTIVATION, "loss")
    writer.add_blocks(gradient, 4, None, CATEGORIES.index("gradient"), "model")
    writer.add_blocks(work, 5, 6, ACTIVATION, "model")
    writer.tick = 8
    events = writer.build_events()
    # when several steps are replayed
    replay = replay_steps(events)
    # then two losses overlap only between ticks 2 and 3, and gradients of the step before are gone
    assert replay.allocated == 2 * loss == events.peak_bytes
    assert replay.allocator.allocated == loss


def test_a_snapshot_is_read_by_the_viewer_of_the_installed_pytorch() -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    memory = traincast.predict("resnet50", on="v100", batch_size=8).memory
    snapshot = json.loads(json.dumps(make_snapshot(memory)))

    listed = viewer.trace(snapshot)
    assert f"{len(snapshot['device_traces'][0])} entries" in listed
    assert "Summary of segments" in viewer.segsum(snapshot)
    assert "MemoryViz" in viewer.trace_plot(snapshot) and "MemoryViz" in viewer.segment_plot(snapshot)
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == memory.reserved_bytes
