"""Peak memory of RecBole's models on a TITAN V: its own training steps, captured, against the figures it publishes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from importlib.resources import as_file, files
from pathlib import Path

from traincast.hardware.platform import load_device
from traincast.ir.file import load_workload
from traincast.ir.memory import compute_peak_memory
from traincast.simulator.memory.device_memory import make_device_memory
from traincast_evaluation.suites.cases import LeftOut
from traincast_evaluation.suites.memory_outcome import MemoryOutcome, make_outcome
from traincast_evaluation.suites.published import Row, read_rows

_GIB = float(1 << 30)
_TITAN_V_BYTES = 12.0 * _GIB
_TABLES = {
    ("General", "MovieLens-1m"): "general-ml-1m", ("General", "Amazon-Books (2018)"): "general-books",
    ("General", "Yelp2022"): "general-yelp", ("Sequential", "ml-1m"): "sequential-ml-1m",
    ("Sequential", "Amazon-Books"): "sequential-books", ("Sequential", "Yelp2022"): "sequential-yelp",
    ("Context-aware", "ml-1m"): "context-ml-1m", ("Context-aware", "Criteo"): "context-criteo",
}  # fmt: skip
_NAMES = {"DCN V2 (stacked)": "DCNV2", "PNN(inner)": "PNN"}
_EVALUATION = "its figure is that of evaluation as well: RecBole prints the largest since the process began"
_KNOWLEDGE = "the sizes of its knowledge graph are not published"


def list_recbole_outcomes(data: Path) -> Iterator[MemoryOutcome | LeftOut]:
    """Every row of the table: what the allocator reserves while it trains, which RecBole prints in GiB."""
    path = data / "iterations" / "recbole_titanv.csv"
    rows = read_rows(path) if path.exists() else []
    for row in rows:
        name = f"{row.label('model')} on {row.label('dataset')}"
        capture = _find_capture(row)
        if isinstance(capture, str):
            yield LeftOut(name=name, group="RecBole", reason=capture)
            continue
        with as_file(capture) as file:
            memory = compute_peak_memory(load_workload(file).programs[0])
        device = replace(load_device("v100"), memory_bytes=_TITAN_V_BYTES)
        held = sha256(f"memory 2026-11|RecBole|{row['model']}".encode()).digest()[0] % 2 == 0  # whole models
        yield make_outcome(
            name, "RecBole", "reserved", row.positive("train_memory_gb") * _GIB,
            make_device_memory(memory, device, communicators=0), held_back=held,
        )  # fmt: skip


def _find_capture(row: Row) -> Path | str:
    """The captured step of a row, or why there is none."""
    table = _TABLES.get((row["family"], row["dataset"]))
    if table is None:
        return _KNOWLEDGE
    if not row["train_memory_gb"] or float(row["train_memory_gb"]) <= 0.0:
        return "it has no figure of its training memory"
    if row["train_memory_gb"] == row["eval_memory_gb"]:
        return _EVALUATION
    folder = files("traincast_evaluation") / "suites" / "captured_recbole"
    capture = folder / f"{table}-{_NAMES.get(row['model'], row['model'])}.tc"
    if not capture.is_file():
        return "its step was not captured"
    return Path(str(capture))
