"""Which storages and tensors a step uses: identity, device, size, lifetime and what they hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from traincast.capturing.messages import ValueCollective
from traincast.ir.ops import StorageKind, TensorSpec

_TENSOR_ID = "_traincast_tensor_id"
_books = count()


@dataclass(slots=True, eq=False)
class StorageInfo:
    """A storage: `alloc` and `free` count recorded ops (alloc -1: there before the step; free None: never).

    `unknown` marks one on the host whose values come from the device, so that what it holds here means nothing;
    `hollow` is one that the user has put on `meta`, which takes no memory in a real run either; `managed` is one of
    unified memory, which lies on the host and says that it is the GPU's.
    `values` are those of one without data, where they are known; `exchanged` are the collectives that they come from.
    """

    index: int
    device: str
    nbytes: int
    alloc: int
    kind: StorageKind = StorageKind.ACTIVATION
    free: int | None = None
    unknown: bool = False
    hollow: bool = False
    managed: bool = False
    values: torch.UntypedStorage | None = field(default=None, repr=False)
    exchanged: frozenset[ValueCollective] = field(default=frozenset(), repr=False)
    merged_into: int | None = None
    serial: int = -1  # no two storages of a book have the same
    reference: weakref.ref[Any] | None = field(default=None, repr=False)


@dataclass(slots=True)
class Seen:
    """What an op's tensors are: whether the values of any are `unknown`, and where they are."""

    unknown: bool = False
    some_meta: bool = False
    all_meta: bool = True
    on_cuda: bool = False


COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(slots=True, eq=False)
class StorageBook:
    """Every storage met since the model was built, live or recorded; tensor ids on top of them.

    Meta tensors (device `meta`) stand for the GPU's; those marked in `place` stand for the host's.
    """

    live: dict[int, StorageInfo] = field(default_factory=dict)  # by address
    recorded: list[StorageInfo] = field(default_factory=list)
    tensor_storage: list[int] = field(default_factory=list)
    num_ops: int = 0
    recording: bool = False
    paused: int = 0  # blocks that record nothing
    any_hollow: bool = False
    any_managed: bool = False
    _serial: int = field(default_factory=lambda: next(_books))
    _created: int = 0
    _tensor_by_form: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _specs: dict[tuple[Any, ...], TensorSpec] = field(default_factory=dict)

    def get_info(self, tensor: torch.Tensor, *, device: str | None = None, produced: bool = False) -> StorageInfo:
        """The storage behind a strided tensor. `device` places it when it is new (default: where its data is)."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        info = self.live.get(key)
        if info is None:
            place = device or ("cuda" if tensor.is_meta else "cpu")
            info = StorageInfo(self._created, place, storage.nbytes(), self.num_ops if produced else -1)
            info.serial = self._created
            self._created += 1
            info.reference = weakref.ref(storage, lambda _: self._note_release(key))
            self.live[key] = info
            if self.recording:
                self._record_storage(info)
        return info

    def note_resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """A storage gave its memory back (0 bytes), or took memory anew: from now on it is another one."""
        info = self.live.get(storage._cdata)
        if info is None or nbytes == info.nbytes:
            return
        if self.recording:
            info.free = self.num_ops - 1
        gathered = (
            info.kind if info.nbytes else StorageKind.PARAMETER
        )  # what is taken again each time is a gathered one
        fresh = StorageInfo(self._created, info.device, nbytes, self.num_ops, gathered, reference=info.reference)
        self._created += 1
        self.live[storage._cdata] = fresh
        if self.recording:
            self._record_storage(fresh)

    def _record_storage(self, info: StorageInfo) -> None:
        info.index = len(self.recorded)
        self.recorded.append(info)

    def _note_release(self, key: int) -> None:
        info = self.live.pop(key, None)
        if info is not None and self.recording:
            info.free = self.num_ops - 1

    def start_recording(self) -> None:
        """Begins recording, perhaps anew: what is alive now was there before the step."""
        self.recording, self.num_ops, self._serial = True, 0, next(_books)
        self.recorded, self.tensor_storage, self._tensor_by_form = [], [], {}
        for info in self.live.values():
            info.alloc, info.free, info.merged_into = -1, None, None
            self._record_storage(info)

    def stop_recording(self) -> None:
        """Ends recording: what is released from now on outlives the step."""
        self.recording = False

    @contextmanager
    def pause_recording(self) -> Iterator[None]:
        """Records nothing inside the block; what it leaves behind was there before."""
        recording, self.recording = self.recording, False
        self.paused += 1
        before = set(self.live)
        try:
            yield
        finally:
            self.paused -= 1
            self.recording = recording
            for key, info in self.live.items():
                if recording and key not in before:
                    info.alloc = -1
                    self._record_storage(info)

    def merge_storages(self, made: int, target: int) -> None:
        """Tensor `made` turned out to be written into tensor `target`'s storage: they share it from now on."""
        gone = self.recorded[self.find_merged(self.tensor_storage[made])]
        stays = self.recorded[self.find_merged(self.tensor_storage[target])]
        gone.merged_into = stays.index
        stays.free, stays.kind = gone.free, gone.kind

    def find_merged(self, storage: int) -> int:
        """The storage that this one was merged into, or itself."""
        while (target := self.recorded[storage].merged_into) is not None:
            storage = target
        return storage

    def get_device(self, tensor: torch.Tensor) -> str:
        """`cuda`, `cpu` or `cpu:pinned`: where the tensor would be in a run with a GPU."""
        if tensor.layout is not torch.strided:
            return "cuda" if tensor.is_meta else "cpu"
        try:
            info = self.live.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # a wrapper of torch.func
            info = None
        if info is not None:
            return info.device
        return "cuda" if tensor.is_meta else "cpu"

    def is_managed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in unified memory."""
        return self.any_managed and self.get_info(tensor).managed

    def is_hollow(self, tensor: torch.Tensor) -> bool:
        """Whether the user has put the tensor on `meta`."""
        if tensor.layout is not torch.strided:
            return False
        info = self.live.get(tensor.untyped_storage()._cdata)
        return info is not None and info.hollow

    def is_without_values(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has no values, or values that the device would have written."""
        if tensor.layout is not torch.strided:
            return tensor.is_meta
        info = self.live.get(tensor.untyped_storage()._cdata)
        if tensor.is_meta:
            return info is None or info.values is None
        return info is not None and info.unknown

    def inspect_tensors(self, tensors: list[torch.Tensor]) -> Seen:
        """`is_without_values` and `get_device` of them all, each looked at once."""
        seen = Seen()
        for tensor in tensors:
            meta = tensor.is_meta
            strided = tensor.layout is torch.strided
            info = self.live.get(tensor.untyped_storage()._cdata) if strided else None
            if meta:
                seen.some_meta = True
                seen.unknown = seen.unknown or info is None or info.values is None
            else:
                seen.all_meta = False
                seen.unknown = seen.unknown or (info is not None and info.unknown)
            seen.on_cuda = seen.on_cuda or (meta if info is None else info.device == "cuda")
        return seen

    def get_spec(self, tensor: torch.Tensor, device: str) -> TensorSpec:
        """The tensor's form, as recorded; equal ones are the same object."""
        form = (tensor.shape, tensor.stride(), tensor.dtype, device)
        spec = self._specs.get(form)
        if spec is None:
            spec = TensorSpec(tuple(tensor.shape), tensor.stride(), str(tensor.dtype)[6:], device)
            self._specs[form] = spec
        return spec

    def get_tensor_id(self, tensor: torch.Tensor, info: StorageInfo, *, new: bool) -> int:
        """The tensor's number; the same for the copies autograd keeps of it.

        The number lives on the Python object; a tensor that autograd saved and handed back is another object,
        recognised by its storage and form.
        """
        known = tensor.__dict__.get(_TENSOR_ID)
        if not new and known is not None and known[0] == self._serial and self.tensor_storage[known[1]] == info.index:
            return int(known[1])
        form = (info.index, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        number = None if new else self._tensor_by_form.get(form)
        if number is None:
            number = len(self.tensor_storage)
            self.tensor_storage.append(info.index)
            self._tensor_by_form[form] = number
        tensor.__dict__[_TENSOR_ID] = (self._serial, number)
        return number


def list_strided_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself, or the strided tensors a sparse one is made of."""
    if tensor.layout is torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout in COMPRESSED:
        by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        yield from (
            (tensor.crow_indices(), tensor.col_indices()) if by_rows else (tensor.ccol_indices(), tensor.row_indices())
        )
        yield tensor.values()
    else:
        yield tensor
