"""Databases of AMD's rocprofv3 (rocpd, its default format, schema 3): kernels, copies, HIP calls and roctx ranges.

The columns are those of `rocpd_tables.sql` in ROCm/rocprofiler-sdk. A kernel has the stack id of the call around it:
of a HIP call, or of one of HSA's inside of that where HSA was traced too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from traincast.traces.database import DatabaseReader
from traincast.traces.events import Kind
from traincast.utils.errors import TraincastError

_KERNEL, _COPY, _REGION, _EVENT = "rocpd_kernel_dispatch", "rocpd_memory_copy", "rocpd_region", "rocpd_event"
_STRING, _SYMBOL, _AGENT, _META = "rocpd_string", "rocpd_info_kernel_symbol", "rocpd_info_agent", "rocpd_metadata"
_DIRECTIONS = {"HOST_TO_DEVICE": "HtoD", "DEVICE_TO_HOST": "DtoH", "DEVICE_TO_DEVICE": "DtoD", "HOST_TO_HOST": "HtoH"}
_SIZES = ("grid_size_x", "grid_size_y", "grid_size_z", "workgroup_size_x", "workgroup_size_y", "workgroup_size_z")
_DEEPEST = 64  # calls around a kernel


class RocprofReader(DatabaseReader):
    """Reads the database of one process."""

    tool = "rocprofv3"
    tables = (_KERNEL, _COPY, _REGION, _EVENT, _STRING, _SYMBOL, _AGENT, _META)

    def find_table(self, table: str) -> str:
        """The table's name followed by the number of the run; several runs in one file are rejected."""
        names = [row[0] for row in self.database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = [name for name in names if re.fullmatch(rf"{table}(?:_[0-9a-f_]+)?", name)]
        if len(found) > 1:
            raise TraincastError(
                f"'{self.path}' holds {len(found)} processes; give the database of each, as rocprofv3 wrote it"
            )
        return found[0] if found else table

    def fill_rows(self) -> str:
        """Kernels, copies, calls and ranges."""
        version = dict(self.select_rows(_META, ("tag", "value"))).get("schema_version", "")
        if not str(version).startswith("3"):
            raise TraincastError(f"'{self.path}' has schema '{version}' of rocprofv3; schema 3 is read")
        if not self.columns[_KERNEL] and not self.columns[_REGION]:
            raise TraincastError(f"'{self.path}' has no kernels of rocprofv3; let it trace HIP and kernels")
        self.strings = dict(self.select_rows(_STRING, ("id", "string")))
        self.stacks = {
            event: (self.strings.get(category, ""), stack, above, extra)
            for event, category, stack, above, extra in self.select_rows(
                _EVENT, ("id", "category_id", "stack_id", "parent_stack_id", "extdata")
            )
        }
        callers = self._read_regions()
        agents = {
            agent: (kind, str(product or model or name or ""))
            for agent, kind, product, model, name in self.select_rows(
                _AGENT, ("id", "type", "product_name", "model_name", "name")
            )
        }
        first = self._read_kernels(callers)
        self._read_copies(callers, agents)
        return agents.get(first, ("", ""))[1]

    def _read_regions(self) -> dict[Any, Any]:
        """HIP calls and ranges; what encloses each stack id that is no HIP call's."""
        above: dict[Any, Any] = {}
        for start, end, thread, name, event in self.select_rows(
            _REGION, ("start", "end", "tid", "name_id", "event_id")
        ):
            category, stack, parent, extra = self.stacks.get(event, ("", -1, -1, None))
            called = str(self.strings.get(name, "call"))
            if category.startswith("HIP"):
                self.add_row(Kind.RUNTIME, called, ("host", thread), start, end, correlation=stack)
            elif "MARKER" in category:
                self.add_range(_read_message(extra) or called, ("host", thread), start, end)
            else:
                above[stack] = parent
        return above

    def _read_kernels(self, callers: dict[Any, Any]) -> Any:
        """The agent of the first kernel."""
        first = None
        symbols = dict(self.select_rows(_SYMBOL, ("id", "display_name")))
        rows = list(self.select_rows(
            _KERNEL, ("start", "end", "agent_id", "stream_id", "queue_id", "kernel_id", "event_id", *_SIZES)
        ))  # fmt: skip
        streams = any(row[3] for row in rows)  # all 0 where HIP's streams were not traced: then by queue
        for start, end, agent, stream, queue, kernel, event, *sizes in rows:
            first = agent if first is None else first
            at = stream if streams else queue
            self.add_row(
                Kind.KERNEL, str(symbols.get(kernel) or "kernel"), (agent, at), start, end, device=agent, stream=at,
                correlation=self._find_call(event, callers), details=self._number_blocks(sizes),
            )  # fmt: skip
        return first

    def _read_copies(self, callers: dict[Any, Any], agents: dict[Any, tuple[Any, str]]) -> None:
        for start, end, to, source, stream, size, name, event in self.select_rows(
            _COPY, ("start", "end", "dst_agent_id", "src_agent_id", "stream_id", "size", "name_id", "event_id")
        ):
            direction = str(self.strings.get(name, "")).removeprefix("MEMORY_COPY_")
            device = to if agents.get(to, ("",))[0] == "GPU" else source
            self.add_row(
                Kind.MEMCPY, f"Memcpy {_DIRECTIONS.get(direction, 'unknown')}", (device, "copies"), start, end,
                device=device, stream=-1 if stream is None else stream, correlation=self._find_call(event, callers),
                bytes=size,
            )  # fmt: skip

    def _find_call(self, event: Any, callers: dict[Any, Any]) -> Any:
        """The stack id of the HIP call around what the device ran."""
        stack = self.stacks.get(event, ("", -1, -1, None))[1]
        for _ in range(_DEEPEST):
            if stack not in callers:
                break
            stack = callers[stack]
        return stack

    def _number_blocks(self, sizes: Sequence[Any]) -> int:
        """The recorded grid; rocprofv3 counts its threads."""
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            return 0
        blocks = [-(-threads // block) for threads, block in zip(sizes[:3], sizes[3:], strict=True)]
        return self.number_grid(blocks, sizes[3:], 0)


def _read_message(extra: Any) -> str:
    """What a marker is called: its message, in the JSON that comes with its event."""
    try:
        document = json.loads(extra or "{}")
    except (TypeError, ValueError, RecursionError):
        return ""
    message = document.get("message") if isinstance(document, dict) else None
    return message if isinstance(message, str) else ""
