"""How much work something is, by measures that are the same at every load: the clock's would be the machine's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls(work: Callable[[], object]) -> int:
    """How many functions some work calls, Python's and those written in C."""
    count, before = 0, sys.getprofile()

    def note(_: FrameType, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def instructions(work: Callable[[], object]) -> int:
    """How many instructions of Python some work takes: loops that call nothing count too. Slow, for little work."""
    count, before = 0, sys.gettrace()

    def note(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return note

    sys.settrace(note)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
