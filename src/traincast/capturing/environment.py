"""Everything that has to be in place around a step so that it runs without a GPU, and as one would run it."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast

from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.autocast import Autocast
from traincast.capturing.cuda_choices import install_choices
from traincast.capturing.cuda_module import install_cuda_module
from traincast.capturing.devices import DeviceMode
from traincast.capturing.patches import Patches
from traincast.capturing.recorder import Recorder
from traincast.capturing.stubs import install_data_loading, install_stubs
from traincast.capturing.triton_kernels import install_triton


def install_environment(patches: Patches, recorder: Recorder, devices: DeviceMode, *, runs_on: str = "cuda") -> None:
    """Installs modes, hooks and stubs for a step that runs on "cuda" or "cpu"; `patches` undoes them."""
    recorder.regions.install_hooks(patches)
    _limit_labels(patches)
    _patch_default_device(patches, devices)
    _wrap_user_code_in_backward(patches, devices)
    recorder.regions.compiled.install_hooks(patches)
    _leave_out_profilers(patches)
    _accept_device_numbers(patches)
    install_stubs(patches, devices, alone=recorder.communication is None)
    _skip_value_initialisers(patches)
    _follow_resizes(patches, recorder)
    _patch_parameters(patches, recorder)
    install_data_loading(patches, recorder)
    install_triton(patches)
    install_cuda_module(patches, recorder)
    if runs_on == "cuda":
        install_choices(patches)
    else:
        _disable_foreach(patches)
    Autocast().install_casts(patches)
    patches.replace_imported_names()
    patches.enter_context(recorder)
    patches.enter_context(devices)
    _follow_threads(patches, recorder, devices)


def _follow_threads(patches: Patches, recorder: Recorder, devices: DeviceMode) -> None:
    """Modes are of one thread: those that the script starts (prefetchers) get them too, one op at a time."""

    @patches.wrap(threading.Thread, "run")
    def run_watched(run: Any, self: threading.Thread) -> None:
        with recorder, devices:
            run(self)


def _disable_foreach(patches: Patches) -> None:
    """On a CPU, PyTorch's optimizers take neither foreach nor fused kernels unless told to."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, "_default_to_fused_or_foreach"):
            patches.set_attribute(module, "_default_to_fused_or_foreach", lambda *_, **__: (False, False))


def _limit_labels(patches: Patches) -> None:
    """`record_function` labels show up as host ops only where PyTorch itself puts them: on optimizers."""
    label = torch.autograd.profiler.record_function

    def enter(self: Any) -> Any:
        # a recording that begins inside, with an optimizer that this one wraps, does not know of it
        noted = self.name.startswith("Optimizer.") and torch.autograd.profiler._is_profiler_enabled
        self._traincast = _RecordFunctionFast(self.name) if noted else None
        if self._traincast is not None:
            self._traincast.__enter__()
        return self

    def leave(self: Any, *error: Any) -> None:
        if self._traincast is not None:
            self._traincast.__exit__(*error)

    patches.set_attribute(label, "__enter__", enter)
    patches.set_attribute(label, "__exit__", leave)


def _wrap_user_code_in_backward(patches: Patches, devices: DeviceMode) -> None:
    """The autograd engine leaves function modes behind; custom functions, hooks and recomputation need ours."""
    node = torch.autograd.function.BackwardCFunction
    patches.set_attribute(node, "apply", devices.wrap_function(node.apply))

    @patches.wrap(torch.Tensor, "register_hook", "register_post_accumulate_grad_hook")
    @patches.wrap(torch.autograd.graph.saved_tensors_hooks, "__init__")
    def register(original: Any, self: Any, *hooks: Any) -> Any:
        return original(self, *map(devices.wrap_function, hooks))


def _leave_out_profilers(patches: Patches) -> None:
    """The profiler is the capture's own; a script's stays off, which changes nothing of its step."""

    class Profile(_Unprofiled):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if (args[0] if args else kwargs.get("enabled", True)) is not False:
                get_assumptions().note_once("the script profiles itself, which is left out")

    patches.set_everywhere(torch.autograd.profiler, "profile", Profile)
    patches.set_everywhere(torch.profiler, "profile", Profile)


class _Unprofiled:
    """A profiler that sees nothing."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to stop."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


class _DeviceType(type):
    """Stands for `torch.device`, which rejects a bare number where there is no GPU; here a number is one."""

    real: Any = torch.device

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        """The device; a number alone is a GPU's."""
        numbered = len(args) == 1 and not kwargs and isinstance(args[0], int)
        device: torch.device = cls.real("cuda", args[0]) if numbered else cls.real(*args, **kwargs)
        return device

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.real)


def _accept_device_numbers(patches: Patches) -> None:
    """`torch.device(0)` and `module.to(0)`, as scripts for several GPUs write them."""
    patches.set_attribute(torch, "device", _DeviceType("device", (), {}))

    @patches.wrap(torch._C._nn, "_parse_to")
    def parse_to(parse: Any, *args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (torch.device(args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device(kwargs["device"])
        with torch._C.DisableTorchFunction():  # parameters of libraries (4-bit ones) look at the device it gives
            return parse(*args, **kwargs)


def _skip_value_initialisers(patches: Patches) -> None:
    """Initialisers that draw until all values are in range; PyTorch skips them too for meta tensors."""

    @patches.wrap(nn.init, "_no_grad_trunc_normal_")
    def trunc_normal(original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            without_data = tensor.is_meta
        return tensor if without_data else original(tensor, *args, **kwargs)


def _follow_resizes(patches: Patches, recorder: Recorder) -> None:
    """FSDP gives the memory of gathered parameters back and takes it again by resizing their storages."""

    @patches.wrap(torch.UntypedStorage, "resize_")
    def resized(resize: Any, self: torch.UntypedStorage, size: int) -> Any:
        recorder.book.note_resize(self, size)
        return resize(self, size)


def _patch_default_device(patches: Patches, devices: DeviceMode) -> None:
    """`torch.set_default_device("cuda")` means meta tensors, and ends with the capture."""
    original = torch.set_default_device
    before = torch.get_default_device()
    patches.callback(lambda: original(None if before.type == "cpu" else before))

    def set_default(device: Any) -> None:
        if device is not None and torch.device(device).type == "cuda":
            devices.meta_is_hollow = False
        original(None if device is None else devices.resolve_device(device))

    patches.set_attribute(torch, "set_default_device", set_default)


def _patch_parameters(patches: Patches, recorder: Recorder) -> None:
    """Parameters never have data, so that moving a module to `cuda` keeps them the same objects, tied or not."""
    original = nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) is torch.Tensor:
            with torch._C.DisableTorchFunction():
                if not data.is_meta:
                    data = data.to("meta") if data.device.type == "cpu" else data
                    recorder.book.get_info(data, device="cpu").device = "cpu"
        return original(cls, data, requires_grad)

    patches.set_attribute(nn.Parameter, "__new__", staticmethod(new))
    lazy = nn.parameter.UninitializedParameter.__new__

    def new_lazy(cls: Any, requires_grad: bool = True, device: Any = None, dtype: Any = None) -> Any:
        return lazy(cls, requires_grad, "meta", dtype)

    patches.set_attribute(nn.parameter.UninitializedParameter, "__new__", staticmethod(new_lazy))
    known: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    @patches.wrap(nn.Module, "_apply")
    def converted(apply: Any, self: nn.Module, fn: Any, recurse: bool = True) -> Any:
        for name, parameter in self._parameters.items():
            with torch._C.DisableTorchFunction():
                lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
                real = parameter is not None and not lazy and not parameter.is_meta
            if parameter is not None and real:  # built before the capture
                if id(parameter) not in known:
                    known[id(parameter)] = (parameter, nn.Parameter(parameter.detach(), parameter.requires_grad))
                self._parameters[name] = known[id(parameter)][1]
        return apply(self, fn, recurse)
