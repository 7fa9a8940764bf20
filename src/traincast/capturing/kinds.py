"""What each storage holds: parameters, gradients, optimizer state, inputs, buffers or activations."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_iter

from traincast.capturing.regions import Regions
from traincast.capturing.storages import StorageBook, list_strided_parts
from traincast.ir.ops import StorageKind


class StorageClassifier:
    """Classifies the storages of a book by the modules and optimizers the step was seen to use."""

    def __init__(self, book: StorageBook, regions: Regions) -> None:
        self._book = book
        self._regions = regions

    def classify_before_step(self) -> None:
        """After the warm-up: whatever is alive and is nothing else is an input."""
        for info in self._book.live.values():
            info.kind = StorageKind.INPUT
        self._classify_storages()
        self._regions.on_optimizer = self._classify_storages

    def classify_after_step(self) -> None:
        """After the recorded step: gradients and optimizer state it made."""
        self._classify_storages()

    def _classify_storages(self) -> None:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # looking is no op of the step
            self._classify_all()

    def _classify_all(self) -> None:
        for root in self._regions.roots:
            for buffer in root.buffers():
                self._mark_storage(buffer, StorageKind.BUFFER)
            for parameter in root.parameters():
                self._mark_parameter(parameter)
        for bucket in (reference() for reference in self._regions.buckets):
            if bucket is not None:
                self._mark_storage(bucket, StorageKind.GRADIENT)
        for optimizer in self._regions.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._mark_parameter(parameter)
            self._mark_all(optimizer.state, StorageKind.OPTIMIZER_STATE)

    def _mark_parameter(self, parameter: torch.Tensor) -> None:
        self._mark_storage(parameter, StorageKind.PARAMETER)
        if parameter.grad is not None:
            self._mark_storage(parameter.grad, StorageKind.GRADIENT)

    def _mark_all(self, state: Any, kind: StorageKind) -> None:
        for per_parameter in state.values():
            for value in tree_iter(per_parameter):
                if isinstance(value, torch.Tensor):
                    self._mark_storage(value, kind)

    def _mark_storage(self, tensor: torch.Tensor, kind: StorageKind) -> None:
        for part in list_strided_parts(getattr(tensor, "_local_tensor", tensor)):  # a DTensor is a shard in a wrapper
            info = self._book.live.get(part.untyped_storage()._cdata)
            if info is not None:
                info.kind = kind
