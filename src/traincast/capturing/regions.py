"""Where in the step the program is: module, phase, stream."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss
from torch.optim.optimizer import register_optimizer_step_pre_hook

from traincast.capturing.compilation import CompiledRegions
from traincast.capturing.patches import Patches
from traincast.capturing.updates import UpdateWatch
from traincast.ir.ops import Phase

_BETWEEN = (str(Path(__file__).parent), torch._ops.__file__)  # frames of the recording itself


class Regions:
    """Follows module calls, backward passes and streams while a step runs."""

    def __init__(self, *, training: bool) -> None:
        self.stream = 0
        self.hook_stream: int | None = None  # chosen by a `with stream` inside a backward hook
        self.roots: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.buckets: list[weakref.ref[torch.Tensor]] = []  # flat gradients of data parallelism
        self.on_optimizer: Callable[[], None] | None = None  # called before an optimizer's step
        self.on_backward_end: Callable[[], None] | None = None
        self.compiled = CompiledRegions()
        self.watch: UpdateWatch | None = None  # of the recorder, which follows updates
        self.devices = 1  # that a script can count
        self.device = torch.device("cuda", 0)  # the one that is pretended
        self.training = training
        self._streams = 0
        self._events = 0
        self._paths: dict[int, tuple[weakref.ref[nn.Module], str]] = {}  # by id, which another may have later
        self._stack: list[tuple[str, bool]] = []  # path, whether a loss
        self._backward = 0
        self._after_backward = False
        self._afterwards: list[Callable[[], None]] = []
        self._model_done = False

    @property
    def module(self) -> str:
        """Path of the module that is running, from its outermost module's class name: `DLRM.bottom.0`."""
        return self._stack[-1][0] if self._stack else ""

    def reset_position(self) -> None:
        """Forgets how far the step has come."""
        self._after_backward = self._model_done = False

    def find_phase(self, proposed: Phase) -> Phase:
        """The phase of an op that runs now; `proposed` is INPUT for a host-to-device copy, OTHER for a sync."""
        if self._backward:
            return Phase.BACKWARD
        if proposed == Phase.OTHER or self._after_backward:
            return Phase.OTHER
        if proposed == Phase.INPUT:
            return Phase.INPUT
        if self._stack:
            return Phase.LOSS if any(loss for _, loss in self._stack) else Phase.FORWARD
        return Phase.LOSS if self._model_done and self.training else Phase.FORWARD

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is running."""
        return self._backward > 0

    def note_buckets(self, buckets: list[torch.Tensor]) -> None:
        """Flat gradients of one data-parallel module."""
        self.buckets.extend(weakref.ref(bucket) for bucket in buckets)

    def run_outside_backward(self, action: Callable[[], None]) -> None:
        """Runs the action now, or when the backward pass that is running has ended."""
        if self._backward:
            self._afterwards.append(action)
        else:
            action()

    def make_stream_number(self) -> int:
        """The number of a new stream; 0 is the default one."""
        self._streams += 1
        return self._streams

    def make_event_number(self) -> int:
        """The number of a new event."""
        self._events += 1
        return self._events - 1

    def is_called_by_engine(self) -> bool:
        """Whether the running op was called by the autograd engine itself and not by Python code in a hook."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
            frame = frame.f_back
        return frame.f_code.co_name == "_engine_run_backward"

    def install_hooks(self, patches: Patches) -> None:
        """Hooks module calls, optimizers and backward passes until the patches are undone."""
        hooks = nn.modules.module
        patches.callback(hooks.register_module_forward_pre_hook(self._enter_module).remove)
        patches.callback(hooks.register_module_forward_hook(self._leave_module, always_call=True).remove)
        step_hook = register_optimizer_step_pre_hook(self._note_optimizer)
        patches.callback(step_hook.remove)
        for name in ("backward", "grad"):
            adds_up = name == "backward"  # `grad` gives gradients, and adds none to what an update uses
            patches.set_attribute(torch.autograd, name, self._wrap_backward(getattr(torch.autograd, name), adds_up))

    def _wrap_backward(self, original: Any, adds_up: bool) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.compiled.close_region()
            with self._enter_backward(adds_up):
                return original(*args, **kwargs)

        return run

    @contextmanager
    def _enter_backward(self, adds_up: bool) -> Iterator[None]:
        self._backward += 1
        try:
            yield
        finally:
            self._backward -= 1
            if self.on_backward_end is not None and not self._backward:
                self.on_backward_end()
            self._after_backward = True
            if adds_up and self.watch is not None and not self._backward:
                self.watch.note_backward()
            while self._afterwards and not self._backward:
                self._afterwards.pop(0)()

    def _note_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.compiled.close_region()
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        if self.watch is not None:
            self.watch.note_step(followed=optimizer is self.optimizers[0])
        if self.on_optimizer is not None:
            self.on_optimizer()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if not self._stack:
            self._add_root(module)
            if self.watch is not None and self.watch.watching and not self._backward:
                self.watch.note_model_call(module)
        path = self._find_path(module)
        if path is None:
            path = f"{self._stack[-1][0]}.{type(module).__name__}" if self._stack else type(module).__name__
        self._stack.append((path, isinstance(module, _Loss)))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        _, loss = self._stack.pop()
        if not self._stack and self.watch is not None and not loss:
            self.watch.note_model_result(output)
        if not self._stack and not loss and not self._backward:
            self._model_done = True

    def _add_root(self, module: nn.Module) -> None:
        if not self._backward and not isinstance(module, _Loss):
            self._after_backward = self._model_done = False
        if any(module is root for root in self.roots):
            return
        self.roots.append(module)
        module = getattr(module, "_orig_mod", module)  # of a compiled one
        name = type(module).__name__
        for path, child in module.named_modules():
            if self._find_path(child) is None:
                self._paths[id(child)] = (weakref.ref(child), f"{name}.{path}" if path else name)

    def _find_path(self, module: nn.Module) -> str | None:
        """The path of a module below the first outermost one that had it."""
        known, path = self._paths.get(id(module), (None, None))
        return path if known is not None and known() is module else None
