"""What libraries keep for a whole process, which a capture puts back: switches of precision, state of ranks."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import unwrap
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from traincast.capturing.patches import Patches

_get: Any = torch._C._get_fp32_precision_getter
_set: Any = torch._C._set_fp32_precision_setter
_SWITCHES = (("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"))


def list_tf32_arithmetic() -> tuple[str, ...]:
    """What the switches allow now; a switch that was never set follows that of the whole backend."""
    allowed = []
    for arithmetic, op in (("products", "matmul"), ("convolutions", "conv")):
        chosen = (_get("cuda", op), _get("cuda", "all"), _get("generic", "all"))
        if next((value for value in chosen if value != "none"), "ieee") == "tf32":
            allowed.append(arithmetic)
    return tuple(allowed)


@contextmanager
def keep_precision_switches() -> Iterator[None]:
    """Puts PyTorch's precision switches back as they were, whatever a script sets."""
    before = [_get(backend, op) for backend, op in _SWITCHES]
    products, allowed = torch.get_float32_matmul_precision(), list_tf32_arithmetic()
    searches = torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.benchmark = searches
        torch.backends.cudnn.allow_tf32 = "convolutions" in allowed  # the older switch, which the new ones leave
        for (backend, op), value in zip(_SWITCHES, before, strict=True):
            _set(backend, op, value)


# Names that hold something made once per process: groups, meshes.
_ONCE = {
    "torchrec.distributed.comm": ("_INTRA_PG", "_CROSS_PG", "_INTRA_PG_2D", "_CROSS_PG_2D", "_NODE_GROUP_SIZE_2D"),
    "torch.distributed.tensor._random": ("_rng_tracker",),
}
_GLOBAL = re.compile(rb"^[ \t]+global [^#\n]*", re.MULTILINE)
_set_once: dict[str, dict[str, Any]] = {}  # names that functions of a module set, with what they begin as, by its name
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
    known = {
        name: {key: vars(sys.modules[name])[key] for key in _find_set_names(name) if key in vars(sys.modules[name])}
        for name in list(sys.modules)
    }
    patches.callback(_reset_globals, known)


def _reset_globals(known: dict[str, dict[str, Any]]) -> None:
    """Names that functions have set (`global NAME`) are as they were, or as their module begins with them."""
    for name, module in list(sys.modules.items()):
        for key, value in known.get(name, _find_set_names(name)).items():
            setattr(module, key, value)


def _find_set_names(name: str) -> dict[str, Any]:
    """What a module that uses PyTorch, and is no part of it, sets by `global` and begins with a constant."""
    if name not in _set_once:
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        ours = name.partition(".")[0] in ("torch", "traincast") or not file.endswith(".py")
        _set_once[name] = {} if ours else _read_set_names(file)
    return _set_once[name]


def _read_set_names(file: str) -> dict[str, Any]:
    try:
        text = Path(file).read_bytes()
        if b"torch" not in text or not (lines := _GLOBAL.findall(text)):
            return {}
        body = ast.parse(text).body
    except (OSError, SyntaxError, ValueError):
        return {}
    wanted = {word.strip().decode() for line in lines for word in line.split(None, 1)[1].split(b",")}
    found: dict[str, Any] = {}
    for line in body:
        targets = (
            line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
        )
        names = [target.id for target in targets if isinstance(target, ast.Name) and target.id in wanted]
        if names and isinstance(line, ast.Assign | ast.AnnAssign) and isinstance(line.value, ast.Constant):
            found.update(dict.fromkeys(names, line.value.value))
    return found


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
