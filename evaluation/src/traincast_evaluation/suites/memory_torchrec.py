"""Peak memory of TorchRec's pipelines: TorchRec's own benchmark, captured on two ranks at batch 32,768, against the
figures of its pull requests.

Rows have the program of their release: 1.8.0 ("newest"), or 1.6.1 ("before"), whose pipelines hold the pooled
embeddings of a batch until it is done (pull request 4008 ended that). Inputs that are freed early came in between:
1.7.0 with that line put back."""

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
from traincast_evaluation.suites.recommenders import load_captured_step

_KMIB = 1000.0 * (1 << 20)
_COLUMNS = {
    "allocated": "peak_allocated_kmib_p90", "reserved": "peak_reserved_kmib_p90", "used": "used_kmib_p90",
}  # fmt: skip
_NEWEST = 4008  # the pull request after which pipelines no longer hold pooled embeddings
_AFTER = "sparse_data_dist_base_after"  # of its own two rows the one with its change
_BATCH = 32768
# The captured step by a word of a row's name, the first that fits: the flags of the table are those of one of two rows.
_CAPTURES: dict[str, dict[str, str | None]] = {
    "sparse_data_dist_base": {
        "free_input_inplace": "free_inplace", "free_input": "free", "clear_inputs": "clear", "bwd_opt": "bwdopt",
        "inplace": "inplace", "": "base",
    },
    "eval_dp_cpu": {
        "eval_gpu_inplace": "eval_gpu_inplace", "eval_gpu": "eval_gpu", "inplace": "eval_cpu_inplace", "": "eval_cpu",
    },
    "sparse_data_dist_metrics": {"": "metrics"},
    "sparse_data_dist_eval": {"": "eval_sdd"},
    "sparse_data_dist_shampoo": {"opt_stash": "shampoo_optstash", "bwd_opt": None, "": "shampoo"},
}  # fmt: skip
_DEVICE = "a100-80gb"  # the tables name no GPU, and allocated bytes do not depend on it


def list_torchrec_outcomes(data: Path) -> Iterator[MemoryOutcome | LeftOut]:
    """Every row of the table: allocated, reserved and used memory of its fullest rank."""
    path = data / "iterations" / "torchrec_pipeline_memory.csv"
    for row in read_rows(path) if path.exists() else ():
        name = f"{row.label('name')} (pull request {row['pr'].partition('.')[0] or 'not stated'})"
        newest = bool(row["pr"]) and (float(row["pr"]) > _NEWEST or row["name"] == _AFTER)
        captured = _find_capture(row)
        if captured is None:
            yield LeftOut(name=name, group="TorchRec", reason=_explain_absence(row))
            continue
        ranks = _load_memory(f"{'newest' if newest else 'before'}-{captured}")
        held = sha256(f"memory 2026-11|TorchRec|{name}".encode()).digest()[0] % 3 == 0
        for kind, column in _COLUMNS.items():
            if row[column]:
                found = [
                    make_outcome(name, "TorchRec", kind, row.positive(column) * _KMIB, memory, held_back=held)
                    for memory in ranks
                ]
                yield max(found, key=lambda one: one.predicted)


def _find_capture(row: Row) -> str | None:
    """The captured step of a row; None where none was captured. One configuration's batch is in another table."""
    if row["name"] == "sparse_data_dist_emb_stash":
        return "emb_stash"
    if not row["batch_size"] or float(row["batch_size"]) != _BATCH:
        return None
    if row["yaml"] == "prefetch_emo":
        return {"prefetch_emo": "prefetch_emo", "sparse_emo": "sparse_emo"}.get(row["name"])
    names = _CAPTURES.get(row["yaml"], {})
    return next((capture for word, capture in names.items() if word in row["name"]), None)


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
