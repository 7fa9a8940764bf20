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
from traincast.capturing.mail import Mail
from traincast.capturing.patches import Patches
from traincast.capturing.recorder import Recorder
from traincast.capturing.refusals import user_line
from traincast.errors import TraincastError


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of how many."""

    rank: int
    world_size: int
    mail: Mail


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
    patches.set_everywhere(dist, "init_process_group", _already_there(place))
    patches.set_everywhere(dist, "destroy_process_group", lambda *args, **kwargs: None)
    new_group = dist.new_group
    patches.set_everywhere(dist, "new_group", lambda *args, backend=None, **kwargs: new_group(*args, **kwargs))
    recorder.regions.devices = place.world_size
    recorder.regions.device = torch.device("cuda", place.rank)
    recorder.communication = Communication(recorder, place.mail)
    recorder.communication.install(patches)
    place.mail.install(patches)
    _user_code_of_fsdp(patches, devices)
    _every_rank_has_samples(patches, recorder)
    _forget_meshes()
    patches.callback(_forget_meshes)
    install_ddp(patches, devices.around, recorder.regions.note_buckets)


def _user_code_of_fsdp(patches: Patches, devices: DeviceMode) -> None:
    """Hooks that FSDP1 puts on nodes of the graph, which the autograd engine calls without our modes."""
    from torch.distributed.fsdp import _runtime_utils

    for name in ("_pre_backward_hook", "_post_backward_hook", "_post_backward_reshard", "_post_backward_final_callback",
                 "_post_backward_reshard_only_hook"):  # fmt: skip
        if hasattr(_runtime_utils, name):
            patches.set(_runtime_utils, name, devices.around(getattr(_runtime_utils, name)))


def _every_rank_has_samples(patches: Patches, recorder: Recorder) -> None:
    """Synchronised batch norm leaves out ranks without samples, by a mask that other ranks' counts decide."""
    function = torch.nn.modules._functions.SyncBatchNorm
    forward: Any = function.forward
    values = recorder.execution.values

    def assumed(*args: Any) -> Any:
        values.masks_keep_all = True
        try:
            return forward(*args)
        finally:
            values.masks_keep_all = False

    patches.set(function, "forward", staticmethod(assumed))


def _forget_meshes() -> None:
    """Empties PyTorch's caches of what was found for meshes: their groups are those of one capture of one rank."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("torch.distributed.tensor", "torch.distributed.device_mesh")):
            for value in list(vars(module).values()):
                if callable(clear := getattr(value, "cache_clear", None)) and not isinstance(value, type):
                    clear()
    dispatcher: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if dispatcher is not None:
        dispatcher._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()


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
