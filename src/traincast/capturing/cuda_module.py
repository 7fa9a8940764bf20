"""Stubs for what scripts call in `torch.cuda`: the GPU they are told, streams, events and synchronisation, without
one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.errors import find_user_line, is_internal_file
from traincast.capturing.patches import Patches
from traincast.capturing.recorder import Recorder
from traincast.utils.errors import TraincastError

_BF16_FROM = (8, 0)


@dataclass(frozen=True, slots=True)
class PretendedGpu:
    """What scripts ask of a GPU."""

    name: str = "NVIDIA A100-SXM4-80GB"
    capability: tuple[int, int] = (8, 0)
    memory_bytes: int = 80 << 30
    num_sms: int = 108

    def list_answers(self) -> dict[str, Callable[..., Any]]:
        """Functions of `torch.cuda` that tell of the device; the capture notes who asks."""
        major, minor = self.capability
        properties = SimpleNamespace(
            name=self.name, major=major, minor=minor, total_memory=self.memory_bytes,
            multi_processor_count=self.num_sms, warp_size=32, max_threads_per_multi_processor=2048,
            gcnArchName="", is_integrated=False, L2_cache_size=40 << 20, regs_per_multiprocessor=1 << 16,
            shared_memory_per_block=48 << 10, shared_memory_per_block_optin=160 << 10,
        )  # fmt: skip
        return {
            "get_device_capability": self._answer(self.capability),
            "get_device_name": self._answer(self.name),
            "get_device_properties": self._answer(properties),
            "mem_get_info": self._answer((self.memory_bytes, self.memory_bytes)),
            "is_bf16_supported": self._answer(self.capability >= _BF16_FROM),
            "get_arch_list": self._answer([f"sm_{major}{minor}"]),
        }

    def _answer(self, value: Any) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if not is_internal_file(frame.f_code.co_filename):
                get_assumptions().note_once(
                    f"the script asks which GPU it has, and is told {self.name} (compute capability "
                    f"{self.capability[0]}.{self.capability[1]}, {self.memory_bytes / 2**30:.0f} GiB): capture it as "
                    "another one with `as_gpu` if it is to run there"
                )
            return value

        return answer


_current: ContextVar[PretendedGpu] = ContextVar("pretended")


def get_pretended_gpu() -> PretendedGpu:
    """The GPU of the capture that is running: an A100 unless told otherwise."""
    return _current.get(PretendedGpu())


@contextmanager
def pretend_gpu(gpu: PretendedGpu | None) -> Iterator[None]:
    """Lets scripts inside run on this GPU."""
    token = _current.set(gpu or PretendedGpu())
    try:
        yield
    finally:
        _current.reset(token)


class Event:
    """A CUDA event; what it does is recorded."""

    recorder: ClassVar[Recorder]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = self.recorder.regions.make_event_number()

    def record(self, stream: Stream | None = None) -> None:
        """Records the event on a stream (default: the current one)."""
        self.recorder.record_synchronisation(
            "cuda::event_record", event=self.number, stream=_get_stream_number(self.recorder, stream)
        )

    def wait(self, stream: Stream | None = None) -> None:
        """Makes a stream (default: the current one) wait for the event."""
        self.recorder.record_synchronisation(
            "cuda::stream_wait_event", event=self.number, stream=_get_stream_number(self.recorder, stream)
        )

    def synchronize(self) -> None:
        """Makes the host wait for the event."""
        self.recorder.record_synchronisation("cuda::event_synchronize", event=self.number)

    def query(self) -> bool:
        """Whether the event has happened: always."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two events: none, nothing runs."""
        return 0.0


class Stream:
    """A CUDA stream; number 0 is the default one."""

    recorder: ClassVar[Recorder]
    event_type: ClassVar[type[Event]]

    def __init__(self, *args: Any, number: int | None = None, **kwargs: Any) -> None:
        self.number = self.recorder.regions.make_stream_number() if number is None else number
        self.stream_id = self.cuda_stream = self.number
        self.device = self.recorder.regions.device
        self._outer: list[tuple[int, int | None]] = []

    def wait_event(self, event: Event) -> None:
        """Waits for an event."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """Records an event, a new one unless given."""
        event = event or self.event_type()
        event.record(self)
        return event

    def wait_stream(self, stream: Stream) -> None:
        """Waits for what another stream has been given so far."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Makes the host wait for the stream."""
        self.recorder.record_synchronisation("cuda::stream_synchronize", stream=self.number)

    def query(self) -> bool:
        """Whether the stream is idle: always."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured: never."""
        return False

    def __enter__(self) -> Stream:
        regions = self.recorder.regions
        self._outer.append((regions.stream, regions.hook_stream))
        regions.stream = self.number
        if torch._C._current_autograd_node() is not None:
            regions.hook_stream = self.number
        return self

    def __exit__(self, *error: object) -> None:
        regions = self.recorder.regions
        regions.stream, regions.hook_stream = self._outer.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


def _get_stream_number(recorder: Recorder, stream: Stream | None) -> int:
    return recorder.regions.stream if stream is None else stream.number


class _StreamContext:
    """`with torch.cuda.stream(stream):`; a class, since scripts name it in annotations."""

    def __init__(self, stream: Stream | None) -> None:
        self._inside = stream or nullcontext()

    def __enter__(self) -> None:
        self._inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)


class _DeviceContext:
    """`with torch.cuda.device(0):`, which chooses nothing here; a class, since PyTorch asks for its type."""

    def __init__(self, *args: Any) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        """Nothing to choose."""

    def __exit__(self, *error: Any) -> None:
        """Nothing to put back."""


class Generator(torch._C.Generator):
    """A random generator of any device: numbers are never drawn."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """On the host, whatever the device."""
        return super().__new__(cls, device="cpu")  # type: ignore[call-arg]


def install_cuda_module(patches: Patches, recorder: Recorder) -> None:
    """Puts the stubs in place until the patches are undone."""
    event = type("Event", (Event,), {"recorder": recorder})
    stream: Any = type("Stream", (Stream,), {"recorder": recorder, "event_type": event})

    def synchronize(device: Any = None) -> None:
        recorder.record_synchronisation("cuda::device_synchronize")

    def current_stream(device: Any = None) -> Any:
        return stream(number=recorder.regions.stream)

    def set_stream(stream: Stream) -> None:
        recorder.regions.stream = stream.number

    stand_ins: dict[str, Any] = {
        **_make_device_functions(),
        "Stream": stream, "Event": event, "ExternalStream": stream, "stream": _StreamContext,
        "StreamContext": _StreamContext,
        "current_stream": current_stream, "default_stream": lambda device=None: stream(number=0),
        "set_stream": set_stream, "synchronize": synchronize, "device_count": lambda: recorder.regions.devices,
        "current_device": lambda: recorder.regions.device.index,
        "CUDAGraph": _NoGraph, "graph": _NoGraph, "make_graphed_callables": _reject_graphs,
        "graph_pool_handle": lambda: (0, 0),
    }  # fmt: skip
    for name, value in stand_ins.items():
        patches.set_everywhere(torch.cuda, name, value)
    patches.set_everywhere(torch, "Stream", stream)
    patches.set_everywhere(torch, "Event", event)
    for name in ("range_push", "range_pop", "mark"):
        patches.set_attribute(torch.cuda.nvtx, name, lambda *args, **kwargs: 0)
    patches.set_attribute(torch.cuda.nvtx, "range", lambda *args, **kwargs: nullcontext())
    for name, value in {
        "is_available": lambda: True, "device_count": lambda: recorder.regions.devices, "synchronize": synchronize,
        "current_accelerator": lambda check_available=False: torch.device("cuda"), "current_stream": current_stream,
        "current_device_index": lambda: recorder.regions.device.index, "set_stream": set_stream,
        **dict.fromkeys(("set_device_index", "set_device_idx", "empty_cache", "reset_peak_memory_stats"), _do_nothing),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), lambda device=None: 0),
    }.items():  # fmt: skip
        patches.set_attribute(torch.accelerator, name, value)
    for name in ("_record_memory_history", "_dump_snapshot"):
        patches.set_attribute(torch.cuda.memory, name, lambda *args, **kwargs: None)
    patches.set_attribute(torch, "Generator", Generator)
    patches.set_attribute(torch.Tensor, "record_stream", lambda tensor, stream: None)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """For settings that change nothing here."""


def _make_device_functions() -> dict[str, Callable[..., Any]]:
    """Questions about the device, and settings that change nothing here."""

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    nothing = ("empty_cache", "init", "_lazy_init", "set_device", "manual_seed", "manual_seed_all", "seed", "seed_all",
               "reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated",
               "ipc_collect", "set_rng_state",
               "set_rng_state_all", "set_per_process_memory_fraction")  # fmt: skip
    zero = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "initial_seed",
            "utilization")  # fmt: skip
    return {
        **{name: constant(None) for name in nothing},
        **{name: constant(0) for name in zero},
        "is_current_stream_capturing": constant(False),
        "is_available": constant(True), "is_initialized": constant(True),
        **get_pretended_gpu().list_answers(),
        "memory_stats": lambda device=None: {}, "memory_summary": constant(""),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "device": _DeviceContext, "device_of": _DeviceContext,
    }  # fmt: skip


def _reject_graphs(*args: Any, **kwargs: Any) -> Any:
    raise TraincastError(f"{find_user_line()}: CUDA graphs cannot be captured; give the step without them")


class _NoGraph:
    """Stands for classes of CUDA graphs, which scripts may name but not use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _reject_graphs()
