"""Temporary changes to other modules, undone in reverse order however the block ends."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

_Stub = Callable[..., Any]
_MISSING = object()
_WITHOUT: dict[
    str, tuple[int, int]
] = {}  # modules that were looked through, with this many names, and had none of ours


class Patches(ExitStack):
    """An exit stack that can also set attributes and put the old ones back.

    Modules that were imported in the meantime may hold stubs under names of their own: they get the originals too,
    so that nothing of one capture reaches the next.
    """

    def __init__(self) -> None:
        super().__init__()
        self._modules = set(sys.modules)
        self._originals: dict[int, tuple[Any, Any]] = {}  # by id of the stub, which is held
        self._everywhere: dict[int, tuple[Any, Any]] = {}  # by id of the original
        self.callback(self._restore_new_modules)

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Sets `owner.name` until the stack closes."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        if before is not _MISSING and callable(value):
            self._originals.setdefault(id(value), (value, before))
        self.callback(_restore_attribute, owner, name, before)

    def wrap(self, owner: Any, *names: str, everywhere: bool = False) -> Callable[[_Stub], _Stub]:
        """A decorator: the function stands at these names of `owner`, and is given what stood there first."""

        def put(stub: _Stub) -> _Stub:
            for name in names:
                set_stub = self.set_everywhere if everywhere else self.set_attribute
                set_stub(owner, name, _bind_original(stub, getattr(owner, name)))
            return stub

        return put

    def set_everywhere(self, owner: Any, name: str, value: Any) -> None:
        """As `set_attribute`; `replace_imported_names` then also sets what scripts have imported by name."""
        before = vars(owner).get(name, _MISSING)
        if before is not _MISSING:
            self._everywhere[id(before)] = (before, value)
        self.set_attribute(owner, name, value)

    def replace_imported_names(self) -> None:
        """Replaces what modules other than PyTorch's have imported by name."""
        known = self._everywhere
        for module_name, module in list(sys.modules.items()):
            if module_name == "torch" or module_name.startswith("torch."):
                continue
            names = getattr(module, "__dict__", {})
            looked_at = (len(names), len(known))
            if _WITHOUT.get(module_name) == looked_at:
                continue
            if known.keys().isdisjoint(map(id, list(names.values()))):
                _WITHOUT[module_name] = looked_at
                continue
            for name, held in list(names.items()):
                if id(held) in known:
                    self.set_attribute(module, name, known[id(held)][1])

    def run_after_import(self, name: str, function: Callable[[ModuleType], None]) -> None:
        """Gives a module to `function`, now or when somebody imports it."""
        if name in sys.modules:
            function(sys.modules[name])
            return
        finder = _Finder(name, function)
        sys.meta_path.insert(0, finder)
        self.callback(sys.meta_path.remove, finder)

    def _restore_new_modules(self) -> None:
        for module_name in set(sys.modules) - self._modules:
            module = sys.modules.get(module_name)
            for name, held in list(getattr(module, "__dict__", {}).items()):
                value, original = self._originals.get(id(held), (_MISSING, None))
                if value is held:
                    setattr(module, name, original)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets a module be changed as soon as it is loaded."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self._name, self._function = name, function

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The usual place, with a loader that has the module changed after it has loaded it."""
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._function(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _bind_original(stub: _Stub, original: Any) -> _Stub:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return stub(original, *args, **kwargs)

    return stand_in


def _restore_attribute(owner: Any, name: str, before: Any) -> None:
    if before is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
