"""Evaluations before the step: forward passes that repeat one another are not run again and again.

A script may evaluate hundreds of batches before its first update. Without values all passes of one shape give the
same, so that after a few of them the last result stands for the others. Once updates are watched all passes are run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from traincast.capturing.patches import Patches

_RUN = 3  # passes of one shape that are run
_KNOWN = (torch.Tensor, int, float, str, bool, type(None))


class Evaluations:
    """Results of forward passes in eval mode without gradients, by model and by what it is given."""

    def __init__(self, is_before_step: Callable[[], bool]) -> None:
        self._is_before_step = is_before_step
        self._results: dict[Any, tuple[int, Any]] = {}  # passes that were run, and the last result
        self._running = False

    def install_hooks(self, patches: Patches) -> None:
        """Looks at calls of models until the patches are undone."""

        @patches.wrap(nn.Module, "__call__")
        def call(run: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._running or torch.is_grad_enabled() or module.training or not self._is_before_step():
                return run(module, *args, **kwargs)
            return self._evaluate(run, module, args, kwargs)

    def _evaluate(self, run: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        key = _describe_call(module, args, kwargs)
        times, result = self._results.get(key, (0, None))
        if key is not None and times >= _RUN:
            return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, result)
        self._running = True
        try:
            made = run(module, *args, **kwargs)
        finally:
            self._running = False
        if key is not None and (not times or _describe(made) == _describe(result) is not None):
            self._results[key] = (times + 1, made)
        return made


def _describe_call(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What tells one call from another; None for one that must be run: hooks see it, or objects are given."""
    if next(module.parameters(), None) is None or any(part._forward_hooks for part in module.modules()):
        return None
    given = _describe((args, kwargs))
    return None if given is None else (id(module), given)


def _describe(tree: Any) -> Any:
    leaves, form = tree_flatten(tree)
    if not all(isinstance(leaf, _KNOWN) for leaf in leaves):
        return None
    shown = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return str(form), tuple(shown)
