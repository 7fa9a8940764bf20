"""The GPU that a captured script is told it runs on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.errors import is_internal_file

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
