"""`torch.compile` in a step: traced through, with the profiler's mark of a compiled region around what it compiles.

PyTorch itself is told to run compiled functions as they are written (`set_stance("force_eager")`), also those that were
compiled before the capture. What ran inside is fused when the step is predicted.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast

from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.patches import Patches
from traincast.ir.compiled import REGION

_WITH_GRAPHS = ("reduce-overhead", "max-autotune")


class CompiledRegions:
    """Follows calls of compiled functions; a region ends early where a compiler would break the graph."""

    def __init__(self) -> None:
        self._frames: list[FrameType] = []
        self._open: Any = None

    @property
    def inside(self) -> bool:
        """Whether a compiled function is running."""
        return bool(self._frames)

    def close_region(self) -> None:
        """A backward pass or an optimizer's step begins: neither is part of the function's own graph."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def install_hooks(self, patches: Patches) -> None:
        """Watches compiled functions until the patches are undone; the compiler is imported only if a script does."""

        @patches.wrap(torch, "compile")
        def compiling(compile_function: Any, *args: Any, **kwargs: Any) -> Any:
            self._watch_compiler(patches)
            if kwargs.get("mode") in _WITH_GRAPHS:
                get_assumptions().note_once(
                    f"torch.compile(mode={kwargs['mode']!r}) replays CUDA graphs, which this step is without: "
                    "`cuda_graph` predicts it with one"
                )
            return compile_function(*args, **kwargs)

        patches.enter_context(warnings.catch_warnings())
        warnings.filterwarnings(
            "ignore", message=r"Using `torch.compile\(module\)` when there are global hooks"
        )  # ours
        self._watching = False
        if "torch._dynamo.eval_frame" in sys.modules:
            self._watch_compiler(patches)

    def _watch_compiler(self, patches: Patches) -> None:
        if self._watching:
            return
        self._watching = True
        import torch._dynamo.eval_frame

        eval_frame: Any = torch._dynamo.eval_frame
        patches.enter_context(torch.compiler.set_stance("force_eager"))
        leave: Any = eval_frame.set_eval_frame

        def enter(callback: Any) -> None:
            if callback not in (None, False) and _is_call(frame := sys._getframe(1)):
                self._enter_region(frame)

        def left(callback: Any) -> Any:
            if self._frames and sys._getframe(1) is self._frames[-1]:
                self._leave_region()
            return leave(callback)

        patches.set_attribute(eval_frame, "_callback_from_stance", enter)  # nothing is compiled: it answers None
        patches.set_attribute(eval_frame, "set_eval_frame", left)

    def _enter_region(self, frame: FrameType) -> None:
        self._frames.append(frame)
        if self._open is None and torch._C._current_autograd_node() is None:
            self._open = _RecordFunctionFast(REGION)
            self._open.__enter__()

    def _leave_region(self) -> None:
        self._frames.pop()
        if not self._frames:
            self.close_region()


def _is_call(frame: FrameType) -> bool:
    """Whether a frame is the call of a compiled function, and not of one that PyTorch compiles to run it eagerly."""
    own = getattr(frame.f_locals.get("fn"), "__name__", "") == "_flex_attention_hop_wrapper"
    return frame.f_code.co_name == "compile_wrapper" and not own
