"""What each storage holds: parameters, gradients, optimizer state, inputs, buffers or activations."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_iter

from traincast.capturing.regions import Regions
from traincast.capturing.storages import StorageBook, strided_parts
from traincast.ir.ops import StorageKind


class Kinds:
    """Classifies the storages of a book by the modules and optimizers the step was seen to use."""

    def __init__(self, book: StorageBook, regions: Regions) -> None:
        self._book = book
        self._regions = regions

    def before_step(self) -> None:
        """After the warm-up: whatever is alive and is nothing else is an input."""
        for info in self._book.live.values():
            info.kind = StorageKind.INPUT
        self._classify()
        self._regions.on_optimizer = self._classify

    def after_step(self) -> None:
        """After the recorded step: gradients and optimizer state it made."""
        self._classify()

    def _classify(self) -> None:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # looking is no op of the step
            self._classify_all()

    def _classify_all(self) -> None:
        for root in self._regions.roots:
            for buffer in root.buffers():
                self._mark(buffer, StorageKind.BUFFER)
            for parameter in root.parameters():
                self._parameter(parameter)
        for bucket in (reference() for reference in self._regions.buckets):
            if bucket is not None:
                self._mark(bucket, StorageKind.GRADIENT)
        for optimizer in self._regions.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._parameter(parameter)
            self._mark_all(optimizer.state, StorageKind.OPTIMIZER_STATE)

    def _parameter(self, parameter: torch.Tensor) -> None:
        self._mark(parameter, StorageKind.PARAMETER)
        if parameter.grad is not None:
            self._mark(parameter.grad, StorageKind.GRADIENT)

    def _mark_all(self, state: Any, kind: StorageKind) -> None:
        for per_parameter in state.values():
            for value in tree_iter(per_parameter):
                if isinstance(value, torch.Tensor):
                    self._mark(value, kind)

    def _mark(self, tensor: torch.Tensor, kind: StorageKind) -> None:
        for part in strided_parts(getattr(tensor, "_local_tensor", tensor)):  # a DTensor is a shard in a wrapper
            info = self._book.live.get(part.untyped_storage()._cdata)
            if info is not None:
                info.kind = kind
