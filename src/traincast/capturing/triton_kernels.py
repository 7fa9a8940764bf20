"""Triton kernels: a launch `kernel[grid](...)` becomes one op of the kernel's name, with the tensors that it is given.

What a kernel does with them nobody knows, so that its cost is that of moving them once, widely bounded; `costs` says
better. Triton is imported by nobody here: its launcher is replaced when a script has imported it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch

from traincast.capturing.arguments import list_tensors
from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.patches import Patches

_LAUNCHERS = {"triton.runtime.jit": "JITFunction", "triton.runtime.autotuner": "Autotuner"}
_SPACE = "triton_kernel"
_libraries: dict[str, Any] = {}  # by kernel: ops may be defined once


def install_triton(patches: Patches) -> None:
    """Replaces the launchers, now or when they are imported, until the patches are undone."""
    for name in _LAUNCHERS:
        if name in sys.modules:
            _replace_launcher(patches, sys.modules[name])
    finder = _Finder(patches)
    sys.meta_path.insert(0, finder)
    patches.callback(sys.meta_path.remove, finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the launchers be replaced as soon as their modules are loaded."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The usual place, with a loader that replaces the launcher after it has loaded the module."""
        if fullname not in _LAUNCHERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _replace_launcher(self._patches, module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _replace_launcher(patches: Patches, module: ModuleType) -> None:
    name = _LAUNCHERS[module.__name__]
    patches.set_attribute(getattr(module, name), "run", _launch if name == "JITFunction" else _launch_tuned)


def _launch(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
    """One launch of a kernel."""
    tensors = list_tensors((args, kwargs))
    if tensors and not warmup:
        name = str(self.fn.__name__)
        get_assumptions().note_once(
            f"the Triton kernel {name} is an op {_SPACE}::{name} that moves the tensors it is given once; `costs` says "
            "what it does"
        )
        _find_op(name)(tensors)


def _launch_tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
    """One launch of a kernel that has several configurations: with the first."""
    first = self.configs[0].all_kwargs() if self.configs else {}
    return self.fn.run(*args, **{**first, **kwargs})


def _find_op(name: str) -> Any:
    if name not in _libraries:
        library: Any = torch.library.Library(_SPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
        library.define(f"{name}(Tensor(a!)[] tensors) -> ()")
        library.impl(name, lambda tensors: None, "CompositeExplicitAutograd")
        _libraries[name] = library
    return getattr(getattr(torch.ops, _SPACE), name).default
