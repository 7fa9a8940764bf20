"""Temporary changes to other modules, undone in reverse order however the block ends."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

_MISSING = object()


class Patches(ExitStack):
    """An exit stack that can also set attributes and put the old ones back."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets `owner.name` until the stack closes."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        self.callback(_restore, owner, name, before)


def _restore(owner: Any, name: str, before: Any) -> None:
    if before is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
