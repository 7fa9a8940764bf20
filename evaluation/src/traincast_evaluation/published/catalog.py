"""Published training programs by name: what they are, and their step on any number of GPUs."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from traincast.ir.workload import MAX_BATCH, Workload
from traincast.models.sharded_dlrm.step import check_ranks
from traincast.utils.errors import TraincastError, make_unknown_error
from traincast_evaluation.published import distributed_embeddings, hugectr, nvidia_dlrm
from traincast_evaluation.published.run import Run

_FILE = Path(__file__).parent / "programs.toml"
_RIGID = "the sizes of a published program are written for one batch size; build it anew for another one"


@dataclass(frozen=True, slots=True)
class _Writer:
    """What writes a step of some sizes, and counts its parameters."""

    step: Callable[[Mapping[str, Any], Run], Workload]
    parameters: Callable[[Mapping[str, Any]], int]


_WRITERS = {
    "nvidia_dlrm": _Writer(nvidia_dlrm.write, nvidia_dlrm.parameters),
    "hugectr": _Writer(hugectr.write, hugectr.parameters),
    "distributed_embeddings": _Writer(distributed_embeddings.write, distributed_embeddings.parameters),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedProgram:
    """One program. Published runs train `global_batch` samples on all GPUs together; `host` names the host profile it
    runs with ("": the platform's), `note` is what a result must say; `sizes` are its writer's."""

    name: str
    description: str
    source: str
    global_batch: int
    dtypes: tuple[str, ...]
    optimizer: str
    writer: str
    host: str
    note: str
    sizes: Mapping[str, Any]

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, every row of every table counted."""
        return _WRITERS[self.writer].parameters(self.sizes)

    def batch_size(self, gpus: int) -> int:
        """Samples per GPU when the published batch is divided among this many."""
        return max(1, self.global_batch // gpus)

    def dtype_for(self, dtype: str) -> str:
        """The type it runs in when `dtype` is asked for: its first one when it has no fp32; others are rejected."""
        if dtype in self.dtypes:
            return dtype
        if dtype != "fp32":
            raise make_unknown_error("dtype", dtype, self.dtypes, f"{self.name} runs in {', '.join(self.dtypes)}.")
        return self.dtypes[0]

    def step(
        self, *, gpus: int = 1, global_batch: int | None = None, dtype: str = "fp32", gpus_per_node: int = 8
    ) -> Workload:
        """One training step of `global_batch` samples (default: as published) on `gpus` GPUs together."""
        check_ranks(gpus)
        batch = gpus * self.batch_size(gpus) if global_batch is None else global_batch
        if not gpus <= batch <= gpus * MAX_BATCH:
            raise TraincastError(f"{batch} samples on {gpus} GPUs; give each from 1 to {MAX_BATCH}")
        run = Run(
            gpus=gpus, global_batch=batch, dtype=self.dtype_for(dtype), gpus_per_node=max(1, min(gpus, gpus_per_node))
        )
        workload = _WRITERS[self.writer].step(self.sizes, run)
        programs = tuple(replace(program, rigid=_RIGID) for program in workload.programs)
        return replace(workload, name=self.name, programs=programs)


@cache
def published_programs() -> dict[str, PublishedProgram]:
    """Every published program by name."""
    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return {name: _make_program(name, _fill_shared_fields(row, rows)) for name, row in rows.items()}


def _fill_shared_fields(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A program's fields with those of the one that it is `like`."""
    return (_fill_shared_fields(rows[row["like"]], rows) if "like" in row else {}) | {
        k: v for k, v in row.items() if k != "like"
    }


def _make_program(name: str, row: dict[str, Any]) -> PublishedProgram:
    common = {key: row.pop(key) for key in ("description", "source", "global_batch", "writer", "optimizer")}
    return PublishedProgram(
        name=name,
        dtypes=tuple(row.pop("dtypes")),
        host=row.pop("host", ""),
        note=row.pop("note", ""),
        sizes=row,
        **common,
    )
