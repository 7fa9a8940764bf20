"""Values that are known without a GPU: what a script makes of constants, shapes and host data.

A meta tensor keeps a copy of its values on the host as long as nothing unknown was written into it. Masks,
lengths, positions and indices that a script builds itself can so be asked for, decided on and turned into sizes, as in
a real run. What a model computes from parameters and activations stays unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from traincast.capturing.arguments import get_traits, list_tensors
from traincast.capturing.errors import find_user_line
from traincast.capturing.fbgemm import find_lengths, has_lengths
from traincast.capturing.messages import ValueCollective
from traincast.capturing.storages import Seen, StorageBook, StorageInfo

aten = torch.ops.aten
_MOST_BYTES = {True: 1 << 16, False: 1 << 26}  # kept of one tensor, by whether it is of floating point
_MADE = frozenset(
    ("aten::zeros", "aten::ones", "aten::full", "aten::arange", "aten::eye", "aten::linspace", "aten::scalar_tensor",
     "aten::tril_indices", "aten::triu_indices", "aten::randint", "aten::randperm")
)  # fmt: skip
_MADE_LIKE = frozenset(
    ("aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_zeros", "aten::new_ones", "aten::new_full",
     "aten::randint_like")
)  # fmt: skip
_EMPTY = ("aten::empty_like", "aten::new_empty", "aten::new_empty_strided")  # whatever was in memory, which is nothing
_DRAWN = ("aten::randint", "aten::randint_like", "aten::randperm", "aten::random_")
_OVERWRITES = (aten.zero_.default, aten.fill_.Scalar, aten.copy_.default, aten.random_.default, aten.random_.to,
               getattr(aten.random_, "from"))  # fmt: skip
_ABSORBING = {
    "aten::bitwise_and": False,
    "aten::logical_and": False,
    "aten::bitwise_or": True,
    "aten::logical_or": True,
}
_BY_MASK = (aten.index.Tensor, aten.masked_select.default)
_KEY: Any = torch._C._TorchDispatchModeKey


def _get_fake_mode() -> Any:
    return torch._C._get_dispatch_mode(_KEY.FAKE)


class Values:
    """Follows ops on the values that are known. `seed` makes what a script draws the same in every capture."""

    def __init__(self, book: StorageBook, seed: int = 0) -> None:
        self._book = book
        self.masks_keep_all = False  # what unknown masks are taken to do
        self.exchanging = False  # whether any known numbers went through a collective so far
        self._generator = torch._C.Generator()
        self._generator.manual_seed(seed)

    def get_values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, sharing memory with those of its views; None where they are not known."""
        if tensor.layout is not torch.strided:
            return None
        info = self._book.live.get(tensor.untyped_storage()._cdata)
        if not tensor.is_meta:
            return None if info is not None and info.unknown else tensor
        if info is None or info.values is None:
            return None
        form = (info.values, tensor.storage_offset(), tensor.shape, tensor.stride())
        return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(*form)

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor are known."""
        if tensor.layout is not torch.strided:
            return not tensor.is_meta
        info = self._book.live.get(tensor.untyped_storage()._cdata)
        if tensor.is_meta:
            return info is not None and info.values is not None
        return info is None or not info.unknown

    def set_value(self, tensor: torch.Tensor, value: bool) -> None:
        """States what every element of a tensor is."""
        info = self._get_info(tensor)
        if info is not None and self._find_storage_to_fill(tensor):
            with torch._C._DisableTorchDispatch():
                self._keep_value(tensor, info, torch.full(tensor.shape, value, dtype=tensor.dtype))

    def replace_values(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """Gives a tensor these values, in its own form, or none."""
        info = self._get_info(tensor) if tensor.layout is torch.strided else None
        if info is None or (value is None and info.values is None and tensor.is_meta):
            return
        if not tensor.is_meta:
            if value is None:
                info.unknown = True
            else:
                tensor.copy_(value.reshape(tensor.shape))
        elif value is None or not (info.values is not None or self._is_whole_storage(tensor)):
            info.values = None
        else:
            info.values = info.values or _make_storage(info.nbytes)
            room = self.get_values(tensor)
            assert room is not None
            room.copy_(value.reshape(tensor.shape))

    def note_origin(self, tensor: torch.Tensor, done: ValueCollective) -> None:
        """Notes which collective a tensor's numbers come from."""
        info = self._get_info(tensor) if tensor.layout is torch.strided else None
        if info is not None and self.is_known(tensor):
            self.exchanging, info.exchanged = True, frozenset((done,))

    def note_read(self, *tensors: torch.Tensor) -> None:
        """Notes that a step asks for the numbers of these tensors, to decide something or make a size of them."""
        for done in self._find_origins(tensors):
            done.read = done.read or find_user_line()

    def _find_origins(self, tensors: Iterable[torch.Tensor]) -> frozenset[ValueCollective]:
        if not self.exchanging:
            return frozenset()
        infos = [self._get_info(tensor) for tensor in tensors if tensor.layout is torch.strided]
        return frozenset[ValueCollective]().union(*(info.exchanged for info in infos if info is not None))

    def _pass_on(self, tensors: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """What is computed from numbers of other ranks comes from them too."""
        origins = self._find_origins(tensors)
        for out in made if origins else ():
            info = self._get_info(out) if out.layout is torch.strided and self.is_known(out) else None
            if info is not None:
                info.exchanged |= origins

    def follow_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor],
        made: list[torch.Tensor], seen: Seen,
    ) -> None:  # fmt: skip
        """Does to the values what an op did to the tensors, `seen` before it ran; forgets those it overwrote
        with unknown ones."""
        known = get_traits(func)
        passes_lengths = has_lengths(known.name) or known.name in _ABSORBING
        if (
            seen.unknown
            and not known.mutable
            and known.name not in _MADE_LIKE
            and not (self.exchanging or passes_lengths)
        ):
            return  # the usual case: nothing can be known of what it made
        if _get_fake_mode() is not None:
            return  # PyTorch tries ops out on tensors of its own
        if known.mutable:
            self._follow_write(func, args, kwargs, tensors)
        else:
            self._follow_made(func, args, kwargs, tensors, made)
        self._pass_on(tensors, made)

    def _follow_made(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor],
        made: list[torch.Tensor],
    ) -> None:  # fmt: skip
        wanted = [(out, info) for out in made if (info := self._find_storage_to_fill(out)) is not None]
        if not wanted:
            return
        computed = self.run_op(func, args, kwargs) if self._is_computable(func, tensors) else None
        if computed is None:
            name = get_traits(func).name
            found = find_lengths(name, args, kwargs, self.get_values) or self._find_absorbed(name, tensors, made)
            for position, value in found.items():
                if (info := self._find_storage_to_fill(made[position])) is not None:
                    self._keep_value(made[position], info, value)
            return
        for (out, info), value in zip(wanted, [v for v in list_tensors(computed) if self._is_small(v)], strict=False):
            self._keep_value(out, info, value)

    def _find_absorbed(
        self, name: str, tensors: list[torch.Tensor], made: list[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """All False where one side of an `and` is, all True where one of an `or` is, whatever the other is."""
        by = _ABSORBING.get(name)
        if by is None or (by and made[0].dtype != torch.bool):
            return {}
        known = [values for tensor in tensors if (values := self.get_values(tensor)) is not None]
        absorbed = any(bool((values.bool() == by).all()) for values in known)
        return {0: torch.full(made[0].shape, by, dtype=made[0].dtype)} if absorbed else {}

    def run_value_sized(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op whose size depends on values, where these are known; else None."""
        tensors = list_tensors((args, kwargs))
        self.note_read(*tensors)
        if func is aten._pack_padded_sequence.default:
            return self._pack_sequence(*args)
        if func in _BY_MASK:
            return self._select_by_mask(func, args)
        if not self.are_known(tensors):
            return None
        computed = self.run_op(func, args, kwargs)
        return None if computed is None else self.make_meta_results(computed)

    def make_meta_results(self, computed: Any) -> Any:
        """Results as meta tensors whose values are known."""

        def emptied(value: torch.Tensor) -> torch.Tensor:
            out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            if self._is_small(value):
                self._keep_value(out, self._book.get_info(out, produced=True), value)
            return out

        return tree_map_only(torch.Tensor, emptied, computed)

    def run_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, nothing: Any = None) -> Any:
        """The op on the values alone, `nothing` if it gives no result; None where the host cannot do it."""
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        if func._schema.name in _DRAWN:
            func, kwargs = self._use_own_generator(func, kwargs)
        like = func._schema.name in _MADE_LIKE
        args, kwargs = tree_map_only(torch.Tensor, _make_host_like if like else self.get_values, (args, kwargs))
        try:
            result = func(*args, **kwargs)
            return nothing if result is None else result
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
            return None

    def _try_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an op could be done to the values; some (`_foreach_add_`) give nothing back."""
        return self.run_op(func, args, kwargs, nothing=True) is not None

    def _use_own_generator(self, func: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The same draw, from our generator."""
        if any(argument.name == "generator" for argument in func._schema.arguments):
            return func, {**kwargs, "generator": self._generator}
        name = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
        named = getattr(func.overloadpacket, name, None)
        return (func, kwargs) if named is None else (named, {**kwargs, "generator": self._generator})

    def _follow_write(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> None:
        if not any(tensor.is_meta for tensor in tensors):
            return  # the host has done it itself
        given = [args[position] for position in get_traits(func).written if position < len(args)]
        written = [
            tensor for value in given for tensor in ([value] if isinstance(value, torch.Tensor) else value or ())
        ]
        infos = [info for t in written if t.layout is torch.strided and (info := self._get_info(t)) is not None]
        if (
            func in _OVERWRITES
            and written[0].is_meta
            and self._is_whole_storage(written[0])
            and self.are_known(tensors[1:])
        ):
            infos[0].values = infos[0].values or _make_storage(infos[0].nbytes)
        if not any(info.values is not None for info in infos) and all(t.is_meta for t in written):
            return
        if self._is_computable(func, tensors) and self._try_op(func, args, kwargs):
            return
        for info in infos:
            info.values = None

    def are_known(self, tensors: list[torch.Tensor]) -> bool:
        """Whether the values of all these are known."""
        return all(self.is_known(t) for t in tensors)

    def _get_info(self, tensor: torch.Tensor) -> StorageInfo | None:
        return self._book.live.get(tensor.untyped_storage()._cdata)

    def _is_whole_storage(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is all of its storage, and small enough to be kept; a sparse one has none."""
        if tensor.layout is not torch.strided:
            return False
        whole = tensor.untyped_storage().nbytes()
        return self._is_small(tensor) and tensor.numel() * tensor.element_size() == whole and tensor.is_contiguous()

    def _is_computable(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        name = get_traits(func).name
        if not tensors:
            return name in _MADE
        if name in _MADE_LIKE:
            return True
        if name in _EMPTY:
            return False
        return (name in _DRAWN or not get_traits(func).random) and self.are_known(tensors)

    def _find_storage_to_fill(self, out: torch.Tensor) -> StorageInfo | None:
        """The storage of a result whose values are worth keeping and not there yet."""
        if not out.is_meta or out.layout is not torch.strided or not self._is_small(out):
            return None
        info = self._get_info(out)
        return info if info is not None and info.values is None and info.nbytes <= _MOST_BYTES[False] else None

    def _is_small(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() * tensor.element_size() <= _MOST_BYTES[tensor.dtype.is_floating_point]

    def _keep_value(self, out: torch.Tensor, info: StorageInfo, value: torch.Tensor) -> None:
        info.values = _make_storage(info.nbytes)
        room = self.get_values(out)
        if room is None or value.is_meta or room.shape != value.shape or room.dtype != value.dtype:
            info.values = None
        else:
            room.copy_(value)

    def _pack_sequence(self, padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        """Sequences without their padding, and on the host how many of them are that long."""
        known = self.get_values(lengths)
        if known is None:
            return None
        sizes = (known[None] > torch.arange(int(known.max()))[:, None]).sum(1)
        self._book.get_info(sizes, device="cpu", produced=True)
        data = torch.empty((int(known.sum()), *padded.shape[2:]), dtype=padded.dtype, device="meta")
        return data, sizes

    def _select_by_mask(self, func: Any, args: tuple[Any, ...]) -> Any:
        """`x[mask]`: as long as the mask has places, whatever is in x."""
        masks = [args[1]] if func is aten.masked_select.default else [m for m in args[1] if _is_mask(m)]
        for mask in masks if self.masks_keep_all else ():
            self.set_value(mask, True)
        known = [self.get_values(mask) for mask in masks]
        if any(mask is None for mask in known):
            return None
        if func is aten.masked_select.default:
            mask = known[0]
            assert mask is not None
            over = mask | torch.zeros((), dtype=torch.bool).expand(args[0].shape)
            return torch.empty(int(over.sum()), dtype=args[0].dtype, device="meta")
        indices: list[torch.Tensor | None] = []
        remaining = iter(known)
        for index in args[1]:
            places = next(remaining) if _is_mask(index) else None
            if places is None:
                indices.append(index)
            else:
                indices.extend(column.to("meta") for column in places.nonzero().unbind(1))
        return func(args[0].to("meta") if not args[0].is_meta else args[0], indices)


def _make_storage(nbytes: int) -> torch.UntypedStorage:
    made: torch.UntypedStorage = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
    return made


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _make_host_like(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor of the same form, for ops that look at nothing else."""
    if not math.prod(tensor.shape):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
