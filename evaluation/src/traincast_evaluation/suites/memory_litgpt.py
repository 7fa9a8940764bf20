"""Peak memory of LitGPT's fine-tuning recipes on A10G: its own steps, captured, against the figures it publishes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.resources import as_file, files
from pathlib import Path

from traincast.hardware.platform import load_device
from traincast.ir.file import load_workload
from traincast.ir.workload import Workload
from traincast.simulator.memory.device_memory import DeviceMemory, make_device_memory
from traincast.simulator.memory.workspaces import compute_memory_on
from traincast.simulator.prediction.rank_results import count_communicators
from traincast_evaluation.suites.cases import LeftOut
from traincast_evaluation.suites.memory_outcome import MemoryOutcome, make_outcome
from traincast_evaluation.suites.published import read_rows

_A10G_BYTES = 22.2 * (1 << 30)  # what PyTorch says an A10G of AWS has
_TOKENS = 512  # that the steps were captured at
_NAMES = {"gemma2b": "gemma-2-2b", "gemma2-9b": "gemma-2-9b"}  # folders of the table that are called otherwise
_IMPOSSIBLE = {"llama-3.2-1b-full", "llama-3.2-3b-full", "phi-3-full"}
_IMPOSSIBLE_REASON = "its figure is below weights, gradients and AdamW's states on the one GPU it is said to be of"


def list_litgpt_outcomes(data: Path) -> Iterator[MemoryOutcome | LeftOut]:
    """Every row of the table: allocated memory, or that the run was out of it."""
    path = data / "iterations" / "litgpt_memory_a10g.csv"
    for row in read_rows(path) if path.exists() else ():
        config = Path(row["config"])
        capture = f"{_NAMES.get(config.parent.name, config.parent.name)}-{config.stem}"
        name = f"{config.parent.name}/{config.stem} {row['micro_batch']} on {row['machine']}"
        out = row["out_of_memory"].lower() == "true"
        if capture in _IMPOSSIBLE and not out:
            yield LeftOut(name=name, group="litgpt", reason=_IMPOSSIBLE_REASON)
            continue
        workload = _load_step(capture)
        if workload is None or not row["machine"].endswith("A10G"):
            reason = "its recipe was not captured" if workload is None else "it is of another GPU"
            yield LeftOut(name=name, group="litgpt", reason=reason)
            continue
        if (row.count("micro_batch"), row.count("max_seq_len")) != (workload.batch_size, _TOKENS):
            yield LeftOut(name=name, group="litgpt", reason="its recipe was captured at other sizes")
            continue
        held = sha256(f"memory 2026-11|litgpt|{row['model']}".encode()).digest()[0] % 3 == 0  # whole models
        measured = None if out else row.positive("memory_gb") * 1e9
        yield make_outcome(name, "litgpt", "allocated", measured, _make_memory(workload), held_back=held)


@cache
def _load_step(name: str) -> Workload | None:
    """The captured step of a recipe; None where there is none."""
    file = files("traincast_evaluation") / "suites" / "captured_litgpt" / f"{name}.tc"
    if not file.is_file():
        return None
    with as_file(file) as path:
        return load_workload(path)


def _make_memory(workload: Workload) -> DeviceMemory:
    """The memory of a recipe on the GPUs that it asks for: tables of adapters were made on four GPUs as on one, of
    which one was in use."""
    device = replace(load_device("a10"), memory_bytes=_A10G_BYTES)
    groups = count_communicators(workload.programs)
    return make_device_memory(compute_memory_on(device, workload, 0), device, communicators=groups)
