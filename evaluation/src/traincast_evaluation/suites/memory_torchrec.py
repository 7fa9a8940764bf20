"""Peak memory of TorchRec's pipelines: TorchRec's own benchmark, captured on two ranks at batch 32,768, against the
figures of its pull requests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path

from traincast.hardware.platform import load_device
from traincast.simulator.memory.device_memory import DeviceMemory, make_device_memory
from traincast.simulator.memory.workspaces import compute_memory_on
from traincast.simulator.prediction.rank_results import count_communicators
from traincast_evaluation.suites.cases import LeftOut
from traincast_evaluation.suites.memory_outcome import MemoryOutcome, make_outcome
from traincast_evaluation.suites.published import Row, read_rows
from traincast_evaluation.suites.torchrec_rows import find_captured_step, load_captured_step, name_release

_KMIB = 1000.0 * (1 << 20)
_COLUMNS = {
    "allocated": "peak_allocated_kmib_p90", "reserved": "peak_reserved_kmib_p90", "used": "used_kmib_p90",
}  # fmt: skip
_DEVICE = "a100-80gb"  # the tables name no GPU, and allocated bytes do not depend on it


def list_torchrec_outcomes(data: Path) -> Iterator[MemoryOutcome | LeftOut]:
    """Every row of the table: allocated, reserved and used memory of its fullest rank."""
    path = data / "iterations" / "torchrec_pipeline_memory.csv"
    for row in read_rows(path) if path.exists() else ():
        name = f"{row.label('name')} (pull request {row['pr'].partition('.')[0] or 'not stated'})"
        captured = find_captured_step(row)
        if captured is None or not captured.startswith(name_release(row)):
            yield LeftOut(name=name, group="TorchRec", reason=_explain_absence(row))
            continue
        ranks = _load_memory(captured)
        held = sha256(f"memory 2026-11|TorchRec|{name}".encode()).digest()[0] % 3 == 0
        for kind, column in _COLUMNS.items():
            if row[column]:
                found = [
                    make_outcome(name, "TorchRec", kind, row.positive(column) * _KMIB, memory, held_back=held)
                    for memory in ranks
                ]
                yield max(found, key=lambda one: one.predicted)


def _explain_absence(row: Row) -> str:
    if not row["yaml"]:
        return "its configuration is not known"
    return f"its pipeline or flags were not captured ({row.label('yaml')}, {row.label('flags')[:40] or 'no flags'})"


@cache
def _load_memory(name: str) -> list[DeviceMemory]:
    """The memory of every rank of a captured step."""
    workload = load_captured_step(name)
    device = load_device(_DEVICE)
    groups = count_communicators(workload.programs)
    return [
        make_device_memory(compute_memory_on(device, workload, number), device, communicators=groups)
        for number in range(len(workload.programs))
    ]
