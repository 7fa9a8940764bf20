"""One rank of many in one process: `torch.distributed` with its fake backend, and what hangs on it."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist

from traincast.capturing.communication import Communication
from traincast.capturing.ddp import install_ddp
from traincast.capturing.devices import DeviceMode
from traincast.capturing.errors import find_user_line
from traincast.capturing.global_state import forget_leftovers
from traincast.capturing.launchers import install_launchers
from traincast.capturing.messages import ObjectMessages
from traincast.capturing.patches import Patches
from traincast.capturing.recorder import Recorder
from traincast.utils.errors import TraincastError

_USUAL_NODE = 8  # GPUs
_NCCL, _CUDA = (2, 27, 5), "12.8"  # versions of a usual build
_CACHES: dict[str, tuple[int, list[Any]]] = {}  # modules with this many names, and their functions that have a cache
_OF_MESHES: tuple[int, list[str]] = (0, [])  # this many modules were imported, and those that keep things for meshes


_WARNED: set[tuple[str, str]] = set()  # logger and message of warnings that were shown


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of how many."""

    rank: int
    world_size: int
    messages: ObjectMessages


def install_ranks(patches: Patches, recorder: Recorder, devices: DeviceMode, place: Place) -> None:
    """Makes this process rank `place.rank` of a world that is not there, until the patches are undone.

    Collectives reach the recorder; the process group is there from the start, so that `init_process_group` of a
    script has nothing left to do.
    """
    if not dist.is_available():
        raise TraincastError("this PyTorch was built without torch.distributed; install a build that has it")
    if dist.is_initialized():
        raise TraincastError("this process already has a process group; call destroy_process_group before a capture")
    # much of PyTorch, imported where it is needed; before there is a group, which modules take for their default
    from torch.distributed.fsdp import _runtime_utils
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    from traincast.capturing.shardings import install_shardings

    patches.set_attribute(sys, "excepthook", sys.excepthook)  # PyTorch puts the rank before every line of a traceback
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=place.rank, world_size=place.world_size, store=FakeStore())
    destroy = dist.destroy_process_group
    patches.callback(lambda: destroy() if dist.is_initialized() else None)
    forget_leftovers(patches)
    _draw_the_same(patches)
    os.environ.update(_make_torchrun_environment(place))
    patches.set_attribute(
        torch._C, "_get_accelerator", lambda check=None: torch.device("cuda")
    )  # where meshes are by default
    patches.set_everywhere(dist, "destroy_process_group", lambda *args, **kwargs: None)
    recorder.regions.devices = int(os.environ["LOCAL_WORLD_SIZE"])
    recorder.regions.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    communication = recorder.communication = Communication(recorder, place.messages)
    communication.install_patches(patches)
    patches.set_everywhere(dist, "init_process_group", _make_init_stub(place, communication))
    _report_requested_backends(patches, communication)
    install_launchers(patches, int(os.environ["LOCAL_RANK"]))
    place.messages.install_patches(patches)
    patches.set_everywhere(dist, "is_nccl_available", lambda: True)
    patches.set_attribute(torch.cuda.nccl, "version", lambda: _NCCL)
    patches.set_attribute(torch.version, "cuda", _CUDA)  # scripts ask for both before they take bfloat16
    _wrap_fsdp_hooks(patches, devices, _runtime_utils)
    _assume_samples_on_every_rank(patches, recorder)
    _forget_meshes()
    patches.callback(_forget_meshes)
    install_shardings(patches, recorder)
    install_ddp(patches, devices.wrap_function, recorder.regions.note_buckets)
    patches.enter_context(warnings.catch_warnings())  # DDP blames the line that calls it, which is ours
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    _warn_once(patches)


def _warn_once(patches: Patches) -> None:
    """What libraries log as a warning on every rank is shown once."""

    @patches.wrap(logging.Logger, "callHandlers")
    def call_handlers(original: Any, logger: logging.Logger, record: logging.LogRecord) -> None:
        said = (record.name, str(record.msg))
        if record.levelno != logging.WARNING or said not in _WARNED:
            original(logger, record)
        _WARNED.add(said)


def _draw_the_same(patches: Patches) -> None:
    """Ranks that draw their samples without a seed draw the same: sizes that differ by chance would mean nothing."""
    patches.callback(torch.set_rng_state, torch.get_rng_state())
    torch.default_generator.manual_seed(0)


def _wrap_fsdp_hooks(patches: Patches, devices: DeviceMode, utilities: ModuleType) -> None:
    """Hooks that FSDP1 puts on nodes of the graph, which the autograd engine calls without our modes."""
    for name in ("_pre_backward_hook", "_post_backward_hook", "_post_backward_reshard", "_post_backward_final_callback",
                 "_post_backward_reshard_only_hook"):  # fmt: skip
        if hasattr(utilities, name):
            patches.set_attribute(utilities, name, devices.wrap_function(getattr(utilities, name)))


def _assume_samples_on_every_rank(patches: Patches, recorder: Recorder) -> None:
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

    patches.set_attribute(function, "forward", staticmethod(assumed))


def _forget_meshes() -> None:
    """Empties PyTorch's caches of what was found for meshes: their groups are those of one capture of one rank."""
    for name in _list_mesh_modules():
        names = vars(sys.modules[name])
        if _CACHES.get(name, (0, ()))[0] != len(names):
            held = [value for value in list(names.values()) if not isinstance(value, type)]
            _CACHES[name] = (len(names), [v for v in held if callable(getattr(v, "cache_clear", None))])
        for cached in _CACHES[name][1]:
            cached.cache_clear()
    dispatcher: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if dispatcher is not None:
        dispatcher._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()


def _list_mesh_modules() -> list[str]:
    """Looked for anew when other modules have been imported."""
    global _OF_MESHES
    if _OF_MESHES[0] != len(sys.modules) or not all(name in sys.modules for name in _OF_MESHES[1]):
        of_meshes = ("torch.distributed.tensor", "torch.distributed.device_mesh")
        _OF_MESHES = (len(sys.modules), [name for name in list(sys.modules) if name.startswith(of_meshes)])
    return _OF_MESHES[1]


def _make_init_stub(place: Place, communication: Communication) -> Any:
    def init_process_group(
        backend: str | None = None, *args: Any, world_size: int = -1, rank: int = -1, **kwargs: Any
    ) -> None:
        communication.backend = str(backend or "").lower()
        for what, requested, there in (("world_size", world_size, place.world_size), ("rank", rank, place.rank)):
            if requested not in (-1, there):
                raise TraincastError(
                    f"{find_user_line()}: init_process_group is called with {what}={requested}, but the capture has "
                    f"{what} {there}; use the rank and world_size given to make_step"
                )

    return init_process_group


def _report_requested_backends(patches: Patches, communication: Communication) -> None:
    """Groups are all fake, and say they are what the script has asked for: code that asks goes the way of a GPU."""
    asked = dict[int, tuple[Any, str]]()

    @patches.wrap(dist, "new_group", everywhere=True)
    def made(new_group: Any, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        if backend:
            asked[id(group)] = (group, str(backend))
        return group

    @patches.wrap(dist, "get_backend", everywhere=True)
    def answer(get_backend: Any, group: Any = None) -> str:
        get_backend(group)  # rejects a group that this rank is no part of
        _, backend = asked.get(id(group), (None, communication.backend))
        return str(dist.Backend(backend or dist.Backend.NCCL))


def _make_torchrun_environment(place: Place) -> dict[str, str]:
    """What `torchrun` tells a process: nodes have as many ranks as `LOCAL_WORLD_SIZE` says, or 8 where that fits."""
    stated = os.environ.get("LOCAL_WORLD_SIZE", "")
    node = int(stated) if stated.isdecimal() and int(stated) else _USUAL_NODE
    local = node if place.world_size % node == 0 else place.world_size
    numbers = {
        "RANK": place.rank, "WORLD_SIZE": place.world_size, "LOCAL_RANK": place.rank % local,
        "LOCAL_WORLD_SIZE": local, "GROUP_RANK": place.rank // local, "GROUP_WORLD_SIZE": place.world_size // local,
    }  # fmt: skip
    texts = {name: str(number) for name, number in numbers.items()}
    return {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", **texts}
