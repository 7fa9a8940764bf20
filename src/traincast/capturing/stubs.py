"""Stubs for what scripts call that needs a GPU, other processes or values: files, loaders, old types, launchers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
import torch.utils.data as data
import torch.utils.flop_counter  # PyTorch's attention on nested tensors takes it to be imported
from torch import nn
from torch._C._profiler import _RecordFunctionFast
from torch.utils._pytree import tree_map_only
from torch.utils.data import _utils, dataloader

from traincast.capturing.devices import OLD_TYPES, DeviceMode
from traincast.capturing.errors import OTHER_PROCESSES, find_user_line
from traincast.capturing.patches import Patches
from traincast.capturing.recorder import UNRECORDED, Recorder
from traincast.utils.errors import TraincastError


def install_stubs(patches: Patches, devices: DeviceMode, *, alone: bool) -> None:
    """Puts them in place until the patches are undone; `alone` is a process that is no rank of several."""
    if alone:
        _reject_process_groups(patches)
    _patch_tensor_grouping(patches, devices)
    _patch_legacy_types(patches, devices)
    _patch_load(patches)
    _patch_data_parallel(patches)


def _reject_process_groups(patches: Patches) -> None:
    """A script of several processes that is captured as one is told how to say so."""
    dist = torch.distributed
    if not dist.is_available():
        return
    original: Any = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        try:
            if max(int(kwargs.get("world_size", -1)), int(os.environ.get("WORLD_SIZE", -1))) > 1:
                raise ValueError("nobody else is there to wait for")
            original(*args, **kwargs)
        except (ValueError, RuntimeError) as error:
            raise TraincastError(f"{find_user_line()}: init_process_group {OTHER_PROCESSES}") from error
        patches.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **options: Any) -> None:
        if nprocs != 1:
            raise TraincastError(f"{find_user_line()}: spawn {OTHER_PROCESSES}")
        fn(0, *args)

    patches.set_everywhere(dist, "init_process_group", init_process_group)
    patches.set_everywhere(torch.multiprocessing, "spawn", spawn)


def _patch_tensor_grouping(patches: Patches, devices: DeviceMode) -> None:
    """PyTorch groups tensors in C++ to go over them at once (optimizers, clipping), and asks for the device it finds:
    that of meta tensors is none it goes over at once."""

    @patches.wrap(torch._C, "_group_tensors_by_device_and_dtype")
    def grouped(original: Any, lists: Any, with_indices: bool = False) -> Any:
        found = {}
        for (device, dtype), group in original(lists, with_indices).items():
            tensor = next(tensor for tensors in group[0] for tensor in tensors if tensor is not None)
            found[devices.get_device(tensor) if device.type == "meta" else device, dtype] = group
        return found

    patches.set_attribute(torch._C, "_cuda_getCurrentRawStream", lambda *_: 0)  # libraries take it when imported


def _patch_legacy_types(patches: Patches, devices: DeviceMode) -> None:
    """`torch.cuda.FloatTensor` and the like, which scripts call and give to `tensor.type`."""
    for name in OLD_TYPES:
        patches.set_everywhere(torch.cuda, name, _make_legacy_type(name, devices))


def _make_legacy_type(name: str, devices: DeviceMode) -> Any:
    """Stands for a class like `torch.cuda.FloatTensor`."""

    def new(cls: Any, *args: Any) -> torch.Tensor:
        return devices.move_tensor(getattr(torch, name)(*args), torch.device("meta"))

    return type(name, (), {"__new__": new, "__module__": "torch.cuda", "dtype": OLD_TYPES[name], "is_cuda": True})


def _patch_load(patches: Patches) -> None:
    """`torch.load` reads files to the host, as there is no GPU; what was asked to be on it goes there afterwards."""

    @patches.wrap(torch, "load", everywhere=True)
    def load(original: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, dict):
            map_location = next(iter(map_location.values()), None)
        map_location = None if callable(map_location) else map_location
        loaded = original(f, "cpu", *args, **kwargs)
        wanted = None if map_location is None else torch.device(map_location)
        if wanted is None or wanted.type == "cpu":
            return loaded
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(wanted), loaded)


def _patch_data_parallel(patches: Patches) -> None:
    """`nn.DataParallel` on the one GPU there is: inputs go to it, and nothing is scattered."""

    def scatter(self: Any, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        if len(device_ids) > 1:
            raise TraincastError(
                f"{find_user_line()}: nn.DataParallel on {len(device_ids)} GPUs is not captured; use "
                "DistributedDataParallel, or predict one GPU's step with its share of the batch"
            )
        moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda"), (inputs, kwargs))
        return (moved[0],), (moved[1],)

    patches.set_attribute(nn.DataParallel, "scatter", scatter)


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

    @patches.wrap(single, "__next__")
    def batch(following: Any, self: Any) -> Any:
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

    @patches.wrap(single, "_next_index")
    def next_index(choose: Any, self: Any) -> Any:
        chosen, size = choose(self), getattr(self._index_sampler, "batch_size", None)
        recorder.watch.current.partial |= isinstance(chosen, list) and size is not None and len(chosen) < size
        return chosen

    patches.set_attribute(data.DataLoader, "_get_iterator", iterator)
    patches.set_attribute(data.RandomSampler, "__iter__", in_order)
