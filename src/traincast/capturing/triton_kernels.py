"""Triton kernels: a launch `kernel[grid](...)` becomes one op of the kernel's name, with the tensors that it is given.

What a kernel does with them nobody knows, so that its cost is that of moving them once, widely bounded; `costs` says
better. Triton is imported by nobody here: its launcher is replaced when a script has imported it.
"""

from __future__ import annotations

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
        patches.run_after_import(name, lambda module: _replace_launcher(patches, module))


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
