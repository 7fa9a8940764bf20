"""What libraries keep for a whole process, which in a capture is one rank after the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch.distributed as dist

from traincast.capturing.patches import Patches

# Names that hold something made once per process: groups, meshes.
_ONCE = {
    "torchrec.distributed.comm": ("_INTRA_PG", "_CROSS_PG", "_INTRA_PG_2D", "_CROSS_PG_2D", "_NODE_GROUP_SIZE_2D"),
    "torch.distributed.tensor._random": ("_rng_tracker",),
}
# Classes whose objects all share one state.
_SHARED = {"accelerate.state": ("PartialState", "AcceleratorState", "GradientState")}


def forget_leftovers(patches: Patches) -> None:
    """Starts a rank with none of it, and puts what there was back when the patches are undone."""
    before = dict(os.environ)
    patches.callback(_set_environment, before)
    once = {(module, name): getattr(sys.modules.get(module), name, None) for module in _ONCE for name in _ONCE[module]}
    shared = {id(state): dict(state) for state in _list_states()}
    patches.callback(lambda: _restore_state(once, shared))
    _restore_state(dict.fromkeys(once), {})
    patches.callback(_forget_groups, set(sys.modules))


def _restore_state(once: dict[tuple[str, str], Any], shared: dict[int, dict[str, Any]]) -> None:
    for (module, name), value in once.items():
        if hasattr(sys.modules.get(module), name):
            setattr(sys.modules[module], name, value)
    for state in _list_states():
        state.clear()
        state.update(shared.get(id(state), {}))


def _forget_groups(known: set[str]) -> None:
    """Modules imported while there was a process group may have made it a default (`group=dist.group.WORLD`): they get
    what they would have had, imported before."""
    for name in set(sys.modules) - known:
        for function in _list_functions(vars(sys.modules[name])):
            if any(isinstance(value, dist.ProcessGroup) for value in function.__defaults__ or ()):
                function.__defaults__ = tuple(
                    None if isinstance(value, dist.ProcessGroup) else value for value in function.__defaults__ or ()
                )


def _list_functions(names: Any) -> Iterator[FunctionType]:
    for value in list(names.values()):
        if isinstance(value, FunctionType):
            yield from (f for f in (value, unwrap(value)) if isinstance(f, FunctionType))
        elif isinstance(value, type):
            yield from _list_functions(
                {name: held for name, held in vars(value).items() if isinstance(held, FunctionType)}
            )


def _list_states() -> list[dict[str, Any]]:
    held = [getattr(sys.modules.get(module), name, None) for module in _SHARED for name in _SHARED[module]]
    return [owner._shared_state for owner in held if owner is not None]


def _set_environment(wanted: dict[str, str]) -> None:
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
