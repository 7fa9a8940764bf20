"""The naive method as a baseline: every op of a step timed alone, again and again on the same tensors, and added up."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_REPEATS = 3  # of an op whose operands its first run left in the cache


class _OpsAlone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every op of a step once for its result and then alone for its time; `seconds` adds the times up.

    Views run no kernel. An op that writes in place does so again, which changes values and no times.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one op."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view:
            times = []
            for _ in range(_REPEATS):
                begin = time.thread_time()
                func(*args, **kwargs)
                times.append(time.thread_time() - begin)
            self.seconds += median(times)
        return result


def measure_isolated_seconds(step: Callable[[], object]) -> float:
    """Processor seconds of a step's ops, each alone in a warm cache, added up."""
    alone = _OpsAlone()
    with alone:
        step()
    return alone.seconds
