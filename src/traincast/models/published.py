"""Published training programs (HugeCTR, NVIDIA's DLRM, ...): what a prediction asks of one, and where they come from.

They are written by other distributions, which name them by the entry point `traincast.programs`: `published`, a
function that gives programs by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from traincast.ir.workload import Workload
from traincast.utils.plugins import PROGRAMS, load_plugin, missing_evaluation


class PublishedProgram(Protocol):
    """One program. Published runs train `global_batch` samples on all GPUs together, in one of `dtypes`; `host` names
    the host profile it runs with ("": the platform's), `note` is what a result must say."""

    name: str
    description: str
    global_batch: int
    dtypes: tuple[str, ...]
    optimizer: str
    host: str
    note: str

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, every row of every table counted."""
        ...

    def dtype_for(self, dtype: str) -> str:
        """The type it runs in when `dtype` is asked for; types that it does not have are rejected."""
        ...

    def step(
        self, *, gpus: int = 1, global_batch: int | None = None, dtype: str = "fp32", gpus_per_node: int = 8
    ) -> Workload:
        """One training step of `global_batch` samples (default: as published) on `gpus` GPUs together."""
        ...


def list_published_programs() -> Mapping[str, PublishedProgram]:
    """Every published program by name; none where no distribution brings them."""
    programs = load_plugin(PROGRAMS, "published")
    found: Mapping[str, PublishedProgram] = {} if programs is None else programs()
    return found


def find_published_program(name: str) -> PublishedProgram:
    """The program of this name; where no distribution brings it, an error that says what to install."""
    programs = list_published_programs()
    if name not in programs:
        raise missing_evaluation(f"the program {name}")
    return programs[name]
