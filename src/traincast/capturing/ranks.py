"""One rank of many in one process: `torch.distributed` with its fake backend, and what hangs on it."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from traincast.capturing.communication import Communication
from traincast.capturing.ddp import install_ddp
from traincast.capturing.devices import DeviceMode
from traincast.capturing.patches import Patches
from traincast.capturing.recorder import Recorder
from traincast.capturing.refusals import user_line
from traincast.errors import TraincastError


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of how many."""

    rank: int
    world_size: int


def install_ranks(patches: Patches, recorder: Recorder, devices: DeviceMode, place: Place) -> None:
    """Makes this process rank `place.rank` of a world that is not there, until the patches are undone.

    Collectives reach the recorder; the process group is there from the start, so that `init_process_group` of a
    script has nothing left to do.
    """
    if not dist.is_available():
        raise TraincastError("this PyTorch was built without torch.distributed; install a build that has it")
    if dist.is_initialized():
        raise TraincastError("this process already has a process group; call destroy_process_group before a capture")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    patches.set(sys, "excepthook", sys.excepthook)  # PyTorch puts the rank before every line of a traceback
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=place.rank, world_size=place.world_size, store=FakeStore())
    destroy = dist.destroy_process_group
    patches.callback(lambda: destroy() if dist.is_initialized() else None)
    for name, value in (("RANK", place.rank), ("LOCAL_RANK", place.rank), ("WORLD_SIZE", place.world_size)):
        _environment_variable(patches, name, str(value))
    patches.set(torch._C, "_get_accelerator", lambda check=None: torch.device("cuda"))  # where meshes are by default
    patches.set(dist, "init_process_group", _already_there(place))
    patches.set(dist, "destroy_process_group", lambda *args, **kwargs: None)
    new_group = dist.new_group
    patches.set(dist, "new_group", lambda *args, backend=None, **kwargs: new_group(*args, **kwargs))  # fake ones only
    recorder.communication = Communication(recorder)
    recorder.communication.install(patches)
    install_ddp(patches, devices.around, recorder.regions.note_buckets)


def _already_there(place: Place) -> Any:
    def init_process_group(*args: Any, world_size: int = -1, rank: int = -1, **kwargs: Any) -> None:
        for what, requested, there in (("world_size", world_size, place.world_size), ("rank", rank, place.rank)):
            if requested not in (-1, there):
                raise TraincastError(
                    f"{user_line()}: init_process_group is called with {what}={requested}, but the capture has "
                    f"{what} {there}; use the rank and world_size given to make_step"
                )

    return init_process_group


def _environment_variable(patches: Patches, name: str, value: str) -> None:
    before = os.environ.get(name)
    os.environ[name] = value
    if before is None:
        patches.callback(os.environ.pop, name, None)
    else:
        patches.callback(os.environ.__setitem__, name, before)
