"""Nsight Systems reports as `nsys export --type sqlite` writes them: kernels, copies, runtime calls and NVTX ranges.

The columns are those of NVIDIA's schema reference for exported data.
"""

from __future__ import annotations

from typing import Any

from traincast.traces.database import DatabaseReader
from traincast.traces.events import Kind
from traincast.utils.errors import TraincastError

_KERNEL, _RUNTIME, _GRAPH = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "RUNTIME", "GRAPH_TRACE"))
_MEMCPY, _MEMSET = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
_NVTX, _GPUS, _STRINGS = "NVTX_EVENTS", "TARGET_INFO_GPU", "StringIds"
_DIRECTIONS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}  # of CUpti_ActivityMemcpyKind
_MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}
_RANGES = (59, 60)  # of NVTX events: pushed and popped, started and ended
_GRID = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread")
_COMMON = ("start", "end", "deviceId", "streamId", "correlationId")
_PROCESS_BITS = 24  # a thread's global number ends in its own, the process stands above


class NsightReader(DatabaseReader):
    """Reads an exported report."""

    tool = "Nsight Systems"
    tables = (_KERNEL, _RUNTIME, _GRAPH, _MEMCPY, _MEMSET, _NVTX, _GPUS, _STRINGS)

    def fill_rows(self) -> str:
        """Kernels, copies, calls and ranges."""
        if not self.columns[_KERNEL] and not self.columns[_RUNTIME]:
            raise TraincastError(
                f"'{self.path}' is a database without CUDA kernels or calls of Nsight Systems; trace cuda "
                "and nvtx with 'nsys profile', and export that as SQLite with 'nsys export'"
            )
        strings = dict(self.select_rows(_STRINGS, ("id", "value")))
        first = self._read_kernels(strings)
        self._read_graphs()
        self._read_copies()
        self._read_host(strings)
        return self._find_device_name(first)

    def _read_kernels(self, strings: dict[Any, Any]) -> int:
        """The number of the device of the first kernel."""
        first = -1
        has = self.columns[_KERNEL]
        name = next((c for c in ("demangledName", "shortName", "mangledName") if c in has), "NULL")
        for start, end, device, stream, correlation, kernel, *sizes in self.select_rows(
            _KERNEL, (*_COMMON, name, *self.keep_known(_KERNEL, _GRID))
        ):
            first = device if first < 0 else first
            self.add_row(
                Kind.KERNEL, str(strings.get(kernel, "kernel")), (device, stream), start, end, device=device,
                stream=stream, correlation=correlation, details=self.number_grid(sizes[:3], sizes[3:6], sizes[6]),
            )  # fmt: skip
        return first

    def _read_graphs(self) -> None:
        """Launches of CUDA graphs, which `nsys` records as one piece unless told otherwise."""
        count = 0
        for start, end, device, stream, correlation in self.select_rows(_GRAPH, _COMMON):
            count += 1
            self.add_row(
                Kind.KERNEL, "CUDA graph", (device, stream), start, end, device=device, stream=stream,
                correlation=correlation,
            )  # fmt: skip
        if count:
            self.notes.append(
                f"{count} launches of CUDA graphs were recorded whole and count as one kernel each; "
                "tracing graphs by node (nsys) records what runs in them"
            )

    def _read_copies(self) -> None:
        kinds = self.keep_known(_MEMCPY, ("copyKind", "srcKind", "dstKind"))
        for start, end, device, stream, correlation, size, *kind in self.select_rows(
            _MEMCPY, (*_COMMON, "bytes", *kinds)
        ):
            ends = " -> ".join(_MEMORIES.get(memory, "Unknown") for memory in kind[1:])
            self.add_row(
                Kind.MEMCPY, f"Memcpy {_DIRECTIONS.get(kind[0], 'unknown')} ({ends})", (device, stream), start, end,
                device=device, stream=stream, correlation=correlation, bytes=size,
            )  # fmt: skip
        for start, end, device, stream, correlation, size in self.select_rows(_MEMSET, (*_COMMON, "bytes")):
            self.add_row(
                Kind.MEMSET, "Memset (Device)", (device, stream), start, end, device=device, stream=stream,
                correlation=correlation, bytes=size,
            )  # fmt: skip

    def _read_host(self, strings: dict[Any, Any]) -> None:
        """Runtime calls, and NVTX ranges."""
        for start, end, thread, correlation, name in self.select_rows(
            _RUNTIME, ("start", "end", "globalTid", "correlationId", "nameId")
        ):
            call = str(strings.get(name, "call")).partition("_v")[0]  # cudaLaunchKernel_v7000
            self.add_row(Kind.RUNTIME, call, _name_track(thread), start, end, correlation=correlation)
        (text,) = self.keep_known(_NVTX, ("textId",))
        for start, end, thread, kind, written, number in self.select_rows(
            _NVTX, ("start", "end", "globalTid", "eventType", "text", text)
        ):
            if kind in _RANGES and end is not None:
                self.add_range(str(written or strings.get(number, "range")), _name_track(thread), start, end)

    def _find_device_name(self, number: int) -> str:
        """Name of the GPU ("" where the report does not say)."""
        if not {"id", "name"} <= self.columns[_GPUS]:
            return ""
        names = {key: str(name) for key, name in self.select_rows(_GPUS, ("id", "name"))}
        return names.get(number) or (next(iter(names.values())) if len(set(names.values())) == 1 else "")


def _name_track(thread: Any) -> tuple[int | str, int | str]:
    """Process and thread of a call."""
    return (thread >> _PROCESS_BITS, thread) if isinstance(thread, int) else ("host", str(thread))
