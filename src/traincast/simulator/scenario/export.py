"""A workload written as an execution trace that other tools read, and what that answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traincast.ir.export_chakra import export_chakra_et
from traincast.ir.trace_nodes import export_pytorch_et
from traincast.ir.workload import Workload
from traincast.utils.errors import make_unknown_error
from traincast.utils.results import Result

_WRITERS = {"pytorch": export_pytorch_et, "chakra": export_chakra_et}
FORMATS = tuple(_WRITERS)


@dataclass(frozen=True, repr=False)
class Exported(Result):
    """An execution trace that was written: the workload's name, the format, the file and how many ops it has."""

    workload: str
    format: str
    file: Path
    ops: int

    def to_dict(self) -> dict[str, Any]:
        """What was written as plain data."""
        return {"workload": self.workload, "format": self.format, "file": str(self.file), "ops": self.ops}

    def headline(self) -> str:
        """File, size and format in one line."""
        return f"{self.file}: {self.ops} ops of {self.workload} as a {self.format} execution trace"


def export_workload(workload: Workload, out: Path, to: str) -> Exported:
    """Writes the program of rank 0 in a format of `FORMATS`."""
    if to not in _WRITERS:
        raise make_unknown_error("format", to, FORMATS, f"Choose from {', '.join(FORMATS)}.")
    _WRITERS[to](workload, 0, out)
    return Exported(workload.name, to, out, workload.programs[0].num_ops)
