"""Peak memory of RecBole's models on a TITAN V: its own training steps, captured, against the figures it publishes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from importlib.resources import as_file, files
from pathlib import Path

from traincast.hardware.platform import load_device
from traincast.ir.file import load_workload
from traincast.simulator.memory.device_memory import make_device_memory
from traincast.simulator.memory.workspaces import compute_memory_on
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
_ROUNDED, _MOST_ROUNDING = 0.005, 0.1  # GiB that two decimals may hide, and the share that says too little
_STATES = 4  # weights, gradients and both moments of Adam
_SCORES = 3  # of a softmax over all items when its backward pass runs: the result and the gradients on both sides
_OF_PAIRS = {"FPMC", "TransRec"}  # models whose loss looks at two items
_FEWEST_ITEMS, _LESS = "ml-1m", 0.9  # graphs of shorter sequences may be a little smaller
_EVALUATION = "its figure is that of evaluation as well: RecBole prints the largest since the process began"
_KNOWLEDGE = "the sizes of its knowledge graph are not published"


def list_recbole_outcomes(data: Path) -> Iterator[MemoryOutcome | LeftOut]:
    """Every row of the table: what the allocator reserves while it trains, which RecBole prints in GiB."""
    path = data / "iterations" / "recbole_titanv.csv"
    rows = read_rows(path) if path.exists() else []
    smaller = {_name_setting(row): row for row in rows if row["dataset"] == _FEWEST_ITEMS}
    for row in rows:
        name = f"{row.label('model')} on {row.label('dataset')}"
        capture = _find_capture(row, smaller.get(_name_setting(row)))
        if isinstance(capture, str):
            yield LeftOut(name=name, group="RecBole", reason=capture)
            continue
        with as_file(capture) as file:
            workload = load_workload(file)
        if workload.batch_size != row.count("train_batch"):
            yield LeftOut(name=name, group="RecBole", reason="its step was captured at another batch")
            continue
        device = replace(load_device("v100"), memory_bytes=_TITAN_V_BYTES)
        memory = make_device_memory(compute_memory_on(device, workload, 0), device, framework=row["torch_version"])
        held = sha256(f"memory 2026-11|RecBole|{row['model']}".encode()).digest()[0] % 2 == 0  # whole models
        measured = row.positive("train_memory_gb") * _GIB
        yield make_outcome(name, "RecBole", "reserved", measured, memory, held_back=held)


def _name_setting(row: Row) -> tuple[str, ...]:
    """A model and its sizes, that of the data set left out."""
    return tuple(row[column] for column in ("family", "model", "train_batch", "embedding_size", "max_seq_len"))


def _find_capture(row: Row, smaller: Row | None) -> Path | str:
    """The captured step of a row, or why there is none. `smaller` is that of the same step with fewest items."""
    table = _TABLES.get((row["family"], row["dataset"]))
    if table is None:
        return _KNOWLEDGE
    if "TITAN V" not in row["device"]:
        return "it is of another GPU"
    if not row["train_memory_gb"] or row.signed("train_memory_gb") <= 0.0:
        return "it has no figure of its training memory"
    if row["train_memory_gb"] == row["eval_memory_gb"]:
        return _EVALUATION
    if impossible := _explain_impossible(row, smaller):
        return impossible
    folder = files("traincast_evaluation") / "suites" / "captured_recbole"
    capture = folder / f"{table}-{_NAMES.get(row['model'], row['model'])}.tc"
    if not capture.is_file():
        return "its step was not captured"
    return Path(str(capture))


def _explain_impossible(row: Row, smaller: Row | None) -> str:
    """Why no program of the stated sizes has this figure, from sizes and figures of the table alone; "": one may."""
    measured = row.positive("train_memory_gb")
    if measured * _MOST_ROUNDING < _ROUNDED:
        return "its figure is rounded by more than a tenth of itself"
    if measured * _GIB > _TITAN_V_BYTES:
        return "its figure is more than the one GPU has that it is said to be of"
    if row["family"] != "Sequential" or row["model"] in _OF_PAIRS:
        return ""
    items = 0
    with suppress(ValueError, IndexError, TypeError):
        items = int(json.loads(row["dataset_numbers"])[1])
    scores = _SCORES * row.count("train_batch") * items
    if measured * _GIB < 4 * (scores + _STATES * items * row.count("embedding_size")):
        return "its figure is below the scores of all items for the batch that is stated"
    if smaller is not None and measured < _LESS * smaller.signed("train_memory_gb"):
        return "its figure is below that of the same batch and model with fewer items"
    return ""
