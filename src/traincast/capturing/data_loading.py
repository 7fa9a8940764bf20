"""A data loader inside the step: it works in processes of its own, so what it does is no part of the step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch.utils.data as data
from torch._C._profiler import _RecordFunctionFast
from torch.utils.data import _utils, dataloader

from traincast.capturing.patches import Patches
from traincast.capturing.recorder import UNRECORDED, Recorder


def install_data_loading(patches: Patches, recorder: Recorder) -> None:
    """Lets loaders read batches in this process and unrecorded, in the order samples are; pinned where they pin."""
    book = recorder.book
    single = dataloader._SingleProcessDataLoaderIter
    pinned: Any = _utils.pin_memory.pin_memory

    def iterator(self: Any) -> Any:
        workers, self.__dict__["num_workers"] = self.num_workers, 0
        try:
            with _RecordFunctionFast(UNRECORDED), book.pause_recording():  # an epoch may begin inside the step
                made: Any = single(self)
        finally:
            self.__dict__["num_workers"] = workers
        made._traincast_pins = self.pin_memory
        return made

    following = single.__next__

    def batch(self: Any) -> Any:
        clock, since = recorder.clock, time.perf_counter()
        if clock is not None:
            clock.enter()
        recorder.clock = None
        try:
            with _RecordFunctionFast(UNRECORDED), book.pause_recording():
                found = following(self)
                return pinned(found) if getattr(self, "_traincast_pins", False) else found
        finally:
            recorder.clock = clock
            if clock is not None:
                clock.add_loading(time.perf_counter() - since)

    def in_order(self: Any) -> Iterator[int]:
        size = len(self.data_source)
        return (number % size for number in range(self.num_samples))

    choose: Any = single._next_index

    def next_index(self: Any) -> Any:
        chosen, size = choose(self), getattr(self._index_sampler, "batch_size", None)
        recorder.watch.current.partial |= isinstance(chosen, list) and size is not None and len(chosen) < size
        return chosen

    patches.set_attribute(single, "_next_index", next_index)
    patches.set_attribute(data.DataLoader, "_get_iterator", iterator)
    patches.set_attribute(single, "__next__", batch)
    patches.set_attribute(data.RandomSampler, "__iter__", in_order)
