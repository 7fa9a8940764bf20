"""Everything that has to be in place around a step so that it runs without a GPU, and as one would run it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast

from traincast.capturing.autocast import Autocast
from traincast.capturing.cuda_choices import install_choices
from traincast.capturing.cuda_module import install_cuda_module
from traincast.capturing.data_loading import install_data_loading
from traincast.capturing.devices import DeviceMode
from traincast.capturing.patches import Patches
from traincast.capturing.recorder import Recorder
from traincast.capturing.refusals import user_line
from traincast.capturing.stand_ins import install_stand_ins
from traincast.utils.errors import TraincastError


def environment(patches: Patches, recorder: Recorder, devices: DeviceMode, *, runs_on: str = "cuda") -> None:
    """Installs modes, hooks and stand-ins for a step that runs on "cuda" or "cpu"; `patches` undoes them."""
    recorder.regions.install(patches)
    _own_labels_only(patches)
    _default_device(patches, devices)
    _user_code_in_backward(patches, devices)
    recorder.regions.compiled.install(patches)
    _refuse_profiling(patches)
    _devices_by_number(patches)
    install_stand_ins(patches, devices, alone=recorder.communication is None)
    _without_values(patches)
    _follow_resizes(patches, recorder)
    _parameters_without_data(patches, recorder)
    install_data_loading(patches, recorder.book)
    install_cuda_module(patches, recorder)
    if runs_on == "cuda":
        install_choices(patches)
    else:
        _loops_over_parameters(patches)
    Autocast().install(patches)
    patches.sweep()
    patches.enter_context(recorder)
    patches.enter_context(devices)


def _loops_over_parameters(patches: Patches) -> None:
    """On a CPU, PyTorch's optimizers take neither foreach nor fused kernels unless told to."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, "_default_to_fused_or_foreach"):
            patches.set(module, "_default_to_fused_or_foreach", lambda *_, **__: (False, False))


def _own_labels_only(patches: Patches) -> None:
    """`record_function` labels show up as host ops only where PyTorch itself puts them: on optimizers."""
    label = torch.autograd.profiler.record_function

    def enter(self: Any) -> Any:
        self._traincast = _RecordFunctionFast(self.name) if self.name.startswith("Optimizer.") else None
        if self._traincast is not None:
            self._traincast.__enter__()
        return self

    def leave(self: Any, *error: Any) -> None:
        if self._traincast is not None:
            self._traincast.__exit__(*error)

    patches.set(label, "__enter__", enter)
    patches.set(label, "__exit__", leave)


def _user_code_in_backward(patches: Patches, devices: DeviceMode) -> None:
    """The autograd engine leaves function modes behind; custom functions, hooks and recomputation need ours."""
    node = torch.autograd.function.BackwardCFunction
    patches.set(node, "apply", devices.around(node.apply))
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        patches.set(torch.Tensor, name, _around_hook(getattr(torch.Tensor, name), devices))
    saved = torch.autograd.graph.saved_tensors_hooks
    original = saved.__init__

    def init(self: Any, pack_hook: Any, unpack_hook: Any) -> None:
        original(self, devices.around(pack_hook), devices.around(unpack_hook))

    patches.set(saved, "__init__", init)


def _around_hook(register: Any, devices: DeviceMode) -> Any:
    return lambda tensor, hook: register(tensor, devices.around(hook))


def _refuse_profiling(patches: Patches) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise TraincastError(f"{user_line()}: the profiler is in use by the capture itself; give the step without it")

    patches.set(torch.autograd.profiler, "profile", refuse)


class _DeviceType(type):
    """Stands for `torch.device`, which refuses a bare number where there is no GPU; here a number is one."""

    real: Any = torch.device

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        """The device; a number alone is a GPU's."""
        numbered = len(args) == 1 and not kwargs and isinstance(args[0], int)
        device: torch.device = cls.real("cuda", args[0]) if numbered else cls.real(*args, **kwargs)
        return device

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.real)


def _devices_by_number(patches: Patches) -> None:
    """`torch.device(0)` and `module.to(0)`, as scripts for several GPUs write them."""
    patches.set(torch, "device", _DeviceType("device", (), {}))
    parse: Any = torch._C._nn._parse_to

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (torch.device(args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device(kwargs["device"])
        return parse(*args, **kwargs)

    patches.set(torch._C._nn, "_parse_to", parse_to)


def _without_values(patches: Patches) -> None:
    """Initialisers that draw until all values are in range; PyTorch skips them too for tensors without data."""
    original = nn.init._no_grad_trunc_normal_

    def trunc_normal(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            without_data = tensor.is_meta
        return tensor if without_data else original(tensor, *args, **kwargs)

    patches.set(nn.init, "_no_grad_trunc_normal_", trunc_normal)


def _follow_resizes(patches: Patches, recorder: Recorder) -> None:
    """FSDP gives the memory of gathered parameters back and takes it again by resizing their storages."""
    resize: Any = torch.UntypedStorage.resize_

    def resized(self: torch.UntypedStorage, size: int) -> Any:
        recorder.book.resized(self, size)
        return resize(self, size)

    patches.set(torch.UntypedStorage, "resize_", resized)


def _default_device(patches: Patches, devices: DeviceMode) -> None:
    """`torch.set_default_device("cuda")` means tensors without data, and ends with the capture."""
    original = torch.set_default_device
    before = torch.get_default_device()
    patches.callback(lambda: original(None if before.type == "cpu" else before))

    def set_default(device: Any) -> None:
        if device is not None and torch.device(device).type == "cuda":
            devices.meta_is_hollow = False
        original(None if device is None else devices.real(device))

    patches.set(torch, "set_default_device", set_default)


def _parameters_without_data(patches: Patches, recorder: Recorder) -> None:
    """Parameters never have data, so that moving a module to `cuda` keeps them the same objects, tied or not."""
    original = nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) is torch.Tensor:
            with torch._C.DisableTorchFunction():
                if not data.is_meta:
                    data = data.to("meta") if data.device.type == "cpu" else data
                    recorder.book.info(data, device="cpu").device = "cpu"
        return original(cls, data, requires_grad)

    patches.set(nn.Parameter, "__new__", staticmethod(new))
    lazy = nn.parameter.UninitializedParameter.__new__

    def new_lazy(cls: Any, requires_grad: bool = True, device: Any = None, dtype: Any = None) -> Any:
        return lazy(cls, requires_grad, "meta", dtype)

    patches.set(nn.parameter.UninitializedParameter, "__new__", staticmethod(new_lazy))
    apply: Any = nn.Module._apply
    known: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def converted(self: nn.Module, fn: Any, recurse: bool = True) -> Any:
        for name, parameter in self._parameters.items():
            with torch._C.DisableTorchFunction():
                lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
                real = parameter is not None and not lazy and not parameter.is_meta
            if parameter is not None and real:  # built before the capture
                if id(parameter) not in known:
                    known[id(parameter)] = (parameter, nn.Parameter(parameter.detach(), parameter.requires_grad))
                self._parameters[name] = known[id(parameter)][1]
        return apply(self, fn, recurse)

    patches.set(nn.Module, "_apply", converted)
