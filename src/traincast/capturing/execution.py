"""Running ops on meta tensors, and on small host tensors for real."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from traincast.capturing.arguments import get_traits, list_tensors
from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.errors import BRANCH, ITEM, find_user_line, reject_values
from traincast.capturing.fbgemm import find_fbgemm_shape
from traincast.capturing.kernels import WITHOUT_META, size_depends_on_values
from traincast.capturing.metadata_cache import MetadataCache, get_metadata_cache
from traincast.capturing.storages import Seen, StorageBook, list_strided_parts
from traincast.capturing.unknown import make_assumed_result
from traincast.capturing.values import Values
from traincast.utils.errors import TraincastError

_LOCAL_SCALAR = torch.ops.aten._local_scalar_dense.default
_TO_COPY = torch.ops.aten._to_copy.default
_PACK = torch.ops.aten._pack_padded_sequence.default
_REAL_BYTES = 1 << 16  # host tensors up to this size keep their values: constructors compute with them
_DRAWN_BYTES = 1 << 22  # likewise fractions that are drawn: lengths of samples are made of them, which become sizes
_WHOLE_BYTES = 1 << 26  # likewise whole numbers: orders of samples


class Request(threading.local):
    """What the call that runs now is about, in each of the script's threads."""

    copy_target: str | None = None  # where the copy being made goes
    number_asked = False  # item() or the like was called
    host_call = False  # a function of PyTorch's runs that works on the host alone


@dataclass(slots=True)
class Execution:
    """Runs ops."""

    book: StorageBook
    values: Values
    request: Request = field(default_factory=Request)
    unknown_numbers: bool = False  # whether item() has given any integer so far
    metadata_cache: MetadataCache = field(default_factory=get_metadata_cache)

    def run_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
        """The op's result, and the device that what it makes would be on."""
        tensors = list_tensors(args)
        if kwargs:
            tensors.extend(list_tensors(kwargs))
        if func is _LOCAL_SCALAR and (number := self._read_value(tensors[0])) is not None:
            return number, "cpu"
        seen = self.book.inspect_tensors(tensors)
        device = self._choose_result_device(seen, kwargs)
        plain = tensors and device == "cpu" and not (seen.some_meta or seen.unknown or self.values.exchanging)
        if plain and not self.book.recording:
            return func(*args, **kwargs), device  # data of the host: nothing is to be noted of it before the step
        result = self._run_value_sized(func, args, kwargs) if seen.unknown or seen.some_meta else None
        # numbers on the host that are made of known lengths are known
        unknown = seen.unknown and (result is None or func is not _PACK)
        if result is None:
            result = self._execute_op(func, args, kwargs, seen, device, made_from_nothing=not tensors)
        hollow = self.book.any_hollow and kwargs.get("device") is None and self._are_all_meta(tensors)
        made = list_tensors(result)
        for out in made:
            for part in list_strided_parts(out):
                info = self.book.get_info(part, device=device, produced=True)
                info.unknown |= unknown
                info.hollow |= hollow
        self.values.follow_op(func, args, kwargs, tensors, made, seen)
        return result, device

    def _read_value(self, tensor: torch.Tensor) -> Any:
        """The one value of a meta tensor; None where the host has it."""
        self.values.note_read(tensor)
        if tensor.is_meta and (known := self.values.get_values(tensor)) is not None:
            return known.item()
        return self._read_number(tensor) if self.book.is_without_values(tensor) else None

    def _are_all_meta(self, tensors: list[torch.Tensor]) -> bool:
        return bool(tensors) and all(map(self.book.is_hollow, tensors))

    def _run_value_sized(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op whose size depends on values of the device; None for all other ops."""
        remedy = size_depends_on_values(func, args, kwargs)
        if not remedy:
            return None
        result = make_assumed_result(func, args, kwargs, get_assumptions())
        if result is None:
            result = self.values.run_value_sized(func, args, kwargs)
        if result is None:
            raise reject_values(func._schema.name, remedy)
        return result

    def _read_number(self, tensor: torch.Tensor) -> float | int | bool:
        """A single value that the device has: as stated, or 0 for who asked for a number by name."""
        if tensor.dtype.is_floating_point:
            return 0.0
        if tensor.dtype is torch.bool:
            if torch.is_anomaly_enabled() and torch._C._current_autograd_node() is not None:
                return False  # the autograd engine asks whether gradients are broken
            decided = get_assumptions().find_decision()
            decided = get_assumptions().decide_unstated() if decided is None else decided
            if decided is None and not self.request.number_asked:
                raise reject_values("a decision on a tensor", f"use torch.where, or state it: {BRANCH}")
            if decided is None:
                raise reject_values("a decision on a tensor", f"take it outside the step, or state it: {BRANCH}")
            return decided
        if self.request.number_asked:
            return 0
        stated = get_assumptions().find_number()
        if stated is None:
            raise reject_values("a tensor as an index or size", f"use a Python int, or state it: {ITEM}")
        return stated

    def _choose_result_device(self, seen: Seen, kwargs: dict[str, Any]) -> str:
        if self.request.copy_target is not None:
            return self.request.copy_target
        wanted = kwargs.get("device")
        if wanted is not None:
            return "cpu" if wanted.type == "cpu" or self.request.host_call else "cuda"
        return "cuda" if seen.on_cuda else "cpu"

    def _execute_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Seen, device: str, *,
        made_from_nothing: bool,
    ) -> Any:  # fmt: skip
        if not seen.some_meta and device != "cuda":
            return self._run_on_host(func, args, kwargs, made_from_nothing=made_from_nothing)
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}
        wanted = kwargs.get("device")
        if wanted is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        if func is _TO_COPY and wanted == torch.device("cpu") and self.request.copy_target is None:
            return torch.zeros_like(func(*args, **kwargs), device=wanted)  # autograd's: of a tensor that has its values
        if seen.all_meta:
            return self.metadata_cache.call_op(func, args, kwargs, _call_without_data)
        return self._run_with_host_tensors(func, args, kwargs)

    def _run_with_host_tensors(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op on a mixture: host tensors lose their data for it, and those written to stay themselves."""
        real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def without_data(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta or (tensor.dim() == 0 and not func._schema.is_mutable):
                return tensor
            if id(tensor) not in real:
                real[id(tensor)] = (tensor, tensor.to("meta"))
            return real[id(tensor)][1]

        args, kwargs = tree_map_only(torch.Tensor, without_data, (args, kwargs))
        result = _call_without_data(func, args, kwargs)
        back = {id(placeholder): original for original, placeholder in real.values()}
        return tree_map_only(torch.Tensor, lambda t: back.get(id(t), t), result)

    def _run_on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, made_from_nothing: bool) -> Any:
        """Ops on host tensors run for real, unless they would make a large tensor: that stays without data."""
        if made_from_nothing and any(name == "device" for name, *_ in get_traits(func).parameters):
            elsewhere = {"device": torch.device("meta"), **({"generator": None} if "generator" in kwargs else {})}
            trial = func(*args, **{**kwargs, **elsewhere})
            most = _DRAWN_BYTES if get_traits(func).random else _REAL_BYTES
            if not (trial.is_floating_point() or trial.is_complex()):
                most = _WHOLE_BYTES
            if trial.numel() * trial.element_size() > most:
                return trial
        return func(*args, **kwargs)


def _call_without_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if get_traits(func).name.startswith("aten::_foreach_") and not func._schema.returns:
        return None  # in place: nothing to find out
    placeholder = WITHOUT_META.get(func) or find_fbgemm_shape(get_traits(func).name)
    if placeholder is not None:
        return placeholder(*args, **kwargs)
    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_missing_implementation(error):
            raise
        raise TraincastError(
            f"{find_user_line()}: op {func} cannot run without data: it has no Meta implementation; register one with "
            "torch.library.register_fake, or leave the op out of the step"
        ) from error


def _is_missing_implementation(error: RuntimeError) -> bool:
    return isinstance(error, NotImplementedError) or "no fake impl registered" in str(error)
