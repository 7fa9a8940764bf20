"""A rank that keeps shards: which parameters are sharded together, its memory and update, what is gathered and
reduced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import (
    ACCUMULATE_GRAD,
    DTYPE_BYTES,
    UNIFORM,
    VARIANT,
    Phase,
    Signature,
    StorageKind,
    TensorSpec,
    find_layer,
)
from traincast.ir.program import Program
from traincast.ir.rows import OpRow
from traincast.models.data_parallel.data_parallel import InsertingBuilder, find_end_of_backward
from traincast.models.layers.builder import Arguments, Communicator, Ref, Scalars
from traincast.utils.arrays import BoolArray
from traincast.utils.errors import TraincastError

Pass: TypeAlias = tuple[int, bool]
"""A pass of a step: the number of its micro-batch, and whether it is the backward one."""
CAST = "aten::_to_copy"
ADD = "aten::add_"
_HALF = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter by its storage: elements and their type. `used_as` is the type that ranks gather it in: that of
    autocast where the step only uses it cast, in `copies` (storages), as FSDP's mixed precision does."""

    storage: int
    numel: int
    dtype: str
    used_as: str
    copies: tuple[int, ...] = ()


@dataclass(slots=True)
class Unit:
    """The parameters of a layer, and the first scope of every pass that runs it."""

    name: str
    parameters: list[Parameter] = field(default_factory=list)
    first: dict[Pass, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NewGradient:
    """A gradient that is ready when `scope` ends in pass `number`, of the layer `unit`: `new` is what the pass made,
    `total` what it became or, with `added`, what it was added to."""

    new: Ref
    total: Ref
    added: bool
    scope: int
    number: int
    unit: str


def find_passes(phases: Sequence[int]) -> list[Pass | None]:
    """The pass of every scope; None for inputs, the update and what belongs to none.

    >>> find_passes([Phase.FORWARD, Phase.BACKWARD, Phase.LOSS, Phase.OPTIMIZER])
    [(0, False), (0, True), (1, False), None]
    """
    number, backward = 0, False
    passes: list[Pass | None] = []
    for phase in phases:
        if phase not in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD):
            passes.append(None)
            continue
        number += backward and phase != Phase.BACKWARD
        backward = phase == Phase.BACKWARD
        passes.append((number, backward))
    return passes


def find_units(program: Program) -> list[Unit]:
    """The layers with parameters on the device, in the order of their first use; a parameter that several layers share
    belongs to the first."""
    passes = find_passes(program.columns.scope_phase.tolist())
    units: dict[str, Unit] = {}
    unit_of: dict[int, Unit] = {}
    for storage, (parameter, layer) in _find_parameters(program, passes).items():
        unit = units.setdefault(layer, Unit(layer))
        unit.parameters.append(parameter)
        unit_of |= dict.fromkeys((storage, *parameter.copies), unit)
    _find_first_scopes(program, passes, units, unit_of)
    return list(units.values())


def _find_parameters(program: Program, passes: Sequence[Pass | None]) -> dict[int, tuple[Parameter, str]]:
    """The parameters that passes use, by their storage, and the layers that use them first."""
    c = program.columns
    wanted = (c.storage_kind == StorageKind.PARAMETER) & ~program.storages.on_host
    seen: dict[int, tuple[TensorSpec, str]] = {}
    casts: dict[int, list[tuple[int, str]]] = {}
    plain: set[int] = set()
    for op, tensor, spec in _find_uses(program, wanted):
        place = passes[program.op_scope[op]]
        if place is None:
            continue
        storage = int(c.tensor_storage[tensor])
        seen.setdefault(storage, (spec, find_layer(program.names[c.op_module[op]])))
        signature = program.signatures[c.op_signature[op]]
        if signature.name == CAST and not place[1] and signature.outputs[0].dtype in _HALF:
            made = int(c.tensor_storage[c.output_tensor[c.output_ptr[op]]])
            casts.setdefault(storage, []).append((made, signature.outputs[0].dtype))
        else:
            plain.add(storage)
    found = {}
    for storage, (spec, layer) in seen.items():
        copies = [] if storage in plain else casts.get(storage, [])
        numel = int(program.storage_nbytes[storage]) // DTYPE_BYTES[spec.dtype]
        used_as = copies[0][1] if copies else spec.dtype
        found[storage] = (Parameter(storage, numel, spec.dtype, used_as, tuple(made for made, _ in copies)), layer)
    return found


def _find_uses(program: Program, wanted: BoolArray) -> Iterator[tuple[int, int, TensorSpec]]:
    """Ops that read tensors on the wanted storages, with tensor and form, in the order they run."""
    c = program.columns
    for entry in np.flatnonzero(wanted[c.tensor_storage[c.input_tensor]]).tolist():
        op = int(np.searchsorted(c.input_ptr, entry, side="right")) - 1
        spec = program.signatures[c.op_signature[op]].inputs[entry - int(c.input_ptr[op])]
        yield op, int(c.input_tensor[entry]), spec


def _find_first_scopes(
    program: Program, passes: Sequence[Pass | None], units: dict[str, Unit], unit_of: dict[int, Unit]
) -> None:
    """Sets where each pass needs a unit first: at an op of its modules, or that uses its parameters."""
    c = program.columns
    by_module = [units.get(find_layer(name)) if name else None for name in program.names]
    inputs, pointer, storage = c.input_tensor.tolist(), c.input_ptr.tolist(), c.tensor_storage.tolist()
    scopes, modules = program.op_scope.tolist(), c.op_module.tolist()
    for op in range(program.num_ops):
        place = passes[scopes[op]]
        if place is None:
            continue
        used = [unit_of.get(storage[tensor]) for tensor in inputs[pointer[op] : pointer[op + 1]]]
        for unit in (by_module[modules[op]], *used):
            if unit is not None:
                unit.first.setdefault(place, scopes[op])


def find_new_gradients(program: Program) -> list[NewGradient]:
    """The gradients of all passes in the order in which they become ready."""
    c = program.columns
    passes = find_passes(c.scope_phase.tolist())
    made_by: dict[int, str] = {}
    found = []
    for scope in program.scopes:
        ops = program.ops[scope.first_op : scope.first_op + scope.num_ops]
        for op in ops:
            made_by |= {tensor.storage: op.module for tensor in op.outputs if op.module}
        place = passes[scope.index]
        if scope.name != ACCUMULATE_GRAD or not ops or place is None:
            continue
        last = ops[-1]
        if len(last.outputs) != 1:
            raise TraincastError("a sparse gradient cannot be sharded; use dense embeddings, or leave out `zero`")
        added = last.name == ADD and len(last.inputs) == 2
        new, total = last.inputs[1] if added else last.outputs[0], last.outputs[0]
        unit = find_layer(made_by.get(last.inputs[-1].storage if last.inputs else -1, ""))
        refs = [Ref(tensor.id, tensor.storage, tensor.spec) for tensor in (new, total)]
        found.append(NewGradient(refs[0], refs[1], added, scope.index, place[0], unit))
    return found


@dataclass(slots=True)
class Marks:
    """What was written, by storage: the memory that a pass has a parameter `gathered` in, parameters whose casts by
    autocast are `cast_in_shards`, and the shards that gradients were `reduced` to. `summed` are gradients to which
    passes add by shards, `whole` those that stay whole although the update reads their shards."""

    gathered: dict[tuple[Pass, int], int] = field(default_factory=dict)
    cast_in_shards: set[int] = field(default_factory=set)
    reduced: dict[int, int] = field(default_factory=dict)
    summed: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)


class ShardBuilder(InsertingBuilder):
    """Writes into `program`, whose rank shares with those of `group`; `copies` are the ranks of other groups that hold
    the same shard. Copies into and out of what is sent run on a stream of their own, as FSDP's do."""

    def __init__(self, program: Program, group: Communicator, copies: Communicator | None = None) -> None:
        super().__init__(program, group)
        self.group, self.copies, self.parts = group, copies, len(group.ranks)
        self.marks = Marks()
        self.copy_stream = 1 + max(self.stream_of(one) for one in (group, copies) if one is not None)
        self._sent: Ref | None = None
        self._reduced_event = -1
        # groups of hybrid sharding are written as those of rank 0, and all others do alike
        self._details: Scalars = () if copies is None else ((VARIANT, UNIFORM),)

    def share(self, numel: int) -> int:
        """Elements of a rank's part."""
        return -(-numel // self.parts)

    def _open_before(self, scope: int, name: str, place: Pass) -> None:
        """Opens a scope of a pass before one of the program, on its thread."""
        c, phase = self.program.columns, Phase.BACKWARD if place[1] else Phase.FORWARD
        self.insertion.insert_before(scope)
        self.open_scope_on(int(c.scope_thread[scope]), name, phase, after=int(c.scope_after[scope]))

    def gather(self, parameters: Sequence[Parameter], scope: int, place: Pass) -> tuple[Ref, int]:
        """Sends shards of parameters to all ranks before a scope of a pass; gives what arrives and the event of its
        end."""
        shards = [self._flat(p.storage, self.share(p.numel), p.dtype) for p in parameters]
        dtypes = {p.used_as for p in parameters}
        mine = [self.share(p.numel) for p in parameters]
        dtype = dtypes.pop() if len(dtypes) == 1 else "uint8"
        size = (
            sum(mine) if dtype != "uint8" else sum(n * _count_bytes(p) for n, p in zip(mine, parameters, strict=True))
        )
        self._open_before(scope, "fsdp::all_gather_copy_in", place)
        self.wait_for_event(self.record_event(0), self.copy_stream)
        flat = self.add_tensor((self.parts * size,), dtype)
        part = self.add_view(flat, (size,))
        arguments: Arguments = [("all_gather_inputs", shards), ("all_gather_output", flat)]
        self.add_op("fsdp::all_gather_copy_in", arguments, [part, flat], stream=self.copy_stream)
        if not place[1]:  # in backward, hooks of autograd run inside one op
            self._open_before(scope, "c10d::_allgather_base_", place)
        event = self.add_collective(
            "_allgather_base_", "all_gather", self.group, [("output_tensor", flat), ("input_tensor", part)], flat,
            nbytes=flat.spec.nbytes, details=self._details, stream=self.copy_stream,
        )  # fmt: skip
        return flat, event

    def copy_out(self, flat: Ref, event: int, parameters: Sequence[Parameter], scope: int, place: Pass) -> None:
        """Parameters of a pass, each in memory of its own, once they have arrived: before a scope of the pass."""
        self._open_before(scope, "fsdp::split_with_sizes_copy", place)
        self.wait_for_event(event)
        rows = self.add_view(flat, (self.parts, flat.spec.numel // self.parts))
        self.add_op("aten::view", [("self", flat)], [rows], [("size", rows.shape)])
        whole = [self.add_tensor((p.numel,), p.used_as) for p in parameters]
        self.add_op("fsdp::split_with_sizes_copy", [("all_gather_output", flat), ("out", whole)])
        self.free_tensors(flat)
        for parameter, ref in zip(parameters, whole, strict=True):
            self.target.set_kind(ref.storage, StorageKind.PARAMETER)
            for storage in (parameter.storage, *parameter.copies):
                self.marks.gathered[place, storage] = ref.storage
            if parameter.copies:
                self.marks.cast_in_shards.add(parameter.storage)

    def reduce_scatter(self, gradients: Sequence[Ref], *, one_at_a_time: bool = False) -> Ref:
        """Sums gradients of one type over ranks, of which each keeps its part; written at the end of the open scope.
        With `one_at_a_time`, kernels wait for the gradients before these, whose memory is then free."""
        size, dtype = sum(self.share(grad.spec.numel) for grad in gradients), gradients[0].spec.dtype
        if one_at_a_time:
            self._wait_for_sent()
        flat = self.add_tensor((self.parts * size,), dtype)
        self.add_op("fsdp::chunk_cat", [("tensors", gradients), ("out", flat)])
        self.wait_for_event(self.record_event(0), self.copy_stream)
        shard = self.add_tensor((size,), dtype)
        self._reduced_event = self.add_collective(
            "_reduce_scatter_base_", "reduce_scatter", self.group, [("output_tensor", shard), ("input_tensor", flat)],
            shard, nbytes=flat.spec.nbytes, details=self._details, stream=self.copy_stream,
        )  # fmt: skip
        if self.copies is not None:
            self._reduced_event = self.add_collective(
                "allreduce_", "all_reduce", self.copies, [("tensors", shard)], shard, nbytes=shard.spec.nbytes,
                details=self._details, stream=self.stream_of(self.group),
            )  # fmt: skip
        self._sent = flat
        if not one_at_a_time:
            self.free_tensors(flat)
        self.target.set_kind(shard.storage, StorageKind.GRADIENT)
        return shard

    def _wait_for_sent(self) -> None:
        """Kernels wait for the gradients that were sent last."""
        if self._sent is not None:
            self.wait_for_event(self._reduced_event)
            self.free_tensors(self._sent)

    def keep(self, gradients: Sequence[NewGradient], shard: Ref) -> None:
        """The update reads this shard in the place of these gradients."""
        self.marks.reduced |= {gradient.total.storage: shard.storage for gradient in gradients}

    def add(self, shard: Ref, into: Sequence[Ref]) -> None:
        """Adds a shard to shards that are there already, alongside the kernels of the step."""
        stream = self.stream_of(self.copies or self.group)
        parts = [self.add_view(shard, ref.shape) for ref in into]
        arguments = [("self", into), ("other", parts)]
        self.add_op("aten::_foreach_add_", arguments, [], [("alpha", 1)], overload="List", stream=stream)
        self._reduced_event = self.record_event(stream)
        self.free_tensors(shard)

    def shard_of(self, ref: Ref) -> Ref:
        """A rank's part of a tensor that stays, as a flat tensor."""
        return self._flat(ref.storage, self.share(ref.spec.numel), ref.spec.dtype)

    def finish_backward(self, gradients: Sequence[NewGradient]) -> None:
        """The stream of kernels waits for all gradients before backward returns."""
        end = find_end_of_backward(self.program, [one.scope for one in gradients])
        self.insert_before(end)
        self.open_engine_scope("cuda::stream_wait_event", Phase.OTHER)
        self._wait_for_sent()
        if end < self.program.num_scopes:
            self.insertion.set_wait(end)

    def _flat(self, storage: int, numel: int, dtype: str) -> Ref:
        return self._add_tensor(storage, (numel,), (1,), dtype, "cuda")


def _count_bytes(parameter: Parameter) -> int:
    return DTYPE_BYTES[parameter.used_as]


_STATE = (StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE)


def keep_shards(program: Program, before: Program, marks: Marks, *, parts: int, zero: int) -> Program:
    """A program into which communication was written, that keeps one of `parts` of what ranks share; `before` is the
    program without it. `zero` is DeepSpeed's number of what is shared."""
    edit = _ShardEdit(program, before, marks, parts, zero)
    edit.change_ops()
    edit.change_storages()
    return edit.editor.build()


class _ShardEdit:
    def __init__(self, program: Program, before: Program, marks: Marks, parts: int, zero: int) -> None:
        self.editor, self.marks, self.parts, self.zero = ProgramEditor(program), marks, parts, zero
        self.batch_size, self.seq_len = program.batch_size, program.seq_len
        self.old_tensors = len(before.columns.tensor_storage)
        self.old_storages = len(before.columns.storage_bytes)
        self.on_host = before.storages.on_host.tolist()
        self._views: dict[tuple[object, int], int] = {}
        self._forms: dict[TensorSpec, TensorSpec] = {}
        self._in_passes: set[int] = set()
        self._in_update: set[int] = set()

    def change_ops(self) -> None:
        """Ops of passes use gathered parameters, those of the update shards."""
        editor, gone = self.editor, set()
        passes = find_passes([int(scope.phase) for scope in editor.scopes])
        for scope, place in zip(editor.scopes, passes, strict=True):
            touched = self._in_passes if place is not None or scope.phase == Phase.INPUT else self._in_update
            for op in scope.ops:
                touched.update(editor.tensors[tensor] for tensor in (*op.inputs, *op.outputs))
        for scope, place in zip(editor.scopes, passes, strict=True):
            for op in scope.ops:
                if place is not None and self._is_replaced(op, scope.name, place):
                    gone.add(op)
                elif place is not None:
                    op.inputs = tuple([self._gathered(tensor, place) for tensor in op.inputs])
                    op.outputs = tuple([self._gathered(tensor, place) for tensor in op.outputs])
                elif scope.phase != Phase.INPUT:
                    self._share_update(op, scope.phase)
        editor.drop_ops(gone)

    def _is_replaced(self, op: OpRow, scope: str, place: Pass) -> bool:
        """Whether an op is done on shards: casts of parameters, and sums of gradients that ranks share."""
        if op.signature.name == CAST and not place[1]:
            return op.inputs[0] < self.old_tensors and self.editor.tensors[op.inputs[0]] in self.marks.cast_in_shards
        sums = scope == ACCUMULATE_GRAD and op.signature.name == ADD and op.inputs[0] < self.old_tensors
        return sums and self.editor.tensors[op.inputs[0]] in self.marks.summed

    def _gathered(self, tensor: int, place: Pass) -> int:
        if tensor >= self.old_tensors:
            return tensor
        storage = self.marks.gathered.get((place, self.editor.tensors[tensor]))
        return tensor if storage is None else self._view(place, tensor, storage)

    def _view(self, key: object, tensor: int, storage: int) -> int:
        if (key, tensor) not in self._views:
            self._views[key, tensor] = self.editor.add_view(storage)
        return self._views[key, tensor]

    def _share_update(self, op: OpRow, phase: Phase) -> None:
        """Gives an op of the update the shards of what it works on."""
        inputs = [self._share(*one, phase) for one in zip(op.inputs, op.signature.inputs, strict=True)]
        outputs = [self._share(*one, phase) for one in zip(op.outputs, op.signature.outputs, strict=True)]
        forms = (tuple([form for _, form in side]) for side in (inputs, outputs))
        op.inputs, op.outputs = (tuple([tensor for tensor, _ in side]) for side in (inputs, outputs))
        op.signature = _replace_forms(op.signature, *forms)

    def _share(self, tensor: int, form: TensorSpec, phase: Phase) -> tuple[int, TensorSpec]:
        if tensor >= self.old_tensors:
            return tensor, form
        storage = self.editor.tensors[tensor]
        kind, shard = self.editor.storages[storage].kind, self.marks.reduced.get(storage)
        if storage in self.marks.whole and phase != Phase.OPTIMIZER:
            return tensor, form
        if shard is not None:
            return self._view("update", tensor, shard), self._divide_form(form)
        if kind in _STATE or (phase == Phase.OPTIMIZER and storage not in self._in_passes):
            return tensor, self._divide_form(form)
        return tensor, form

    def _divide_form(self, form: TensorSpec) -> TensorSpec:
        if form not in self._forms:
            shape = (self._divide_size(form.shape[0]), *form.shape[1:]) if form.shape else ()
            self._forms[form] = replace(form, shape=shape)
        return self._forms[form]

    def _divide_size(self, size: int) -> int:
        sizes = self.editor.sizes
        return sizes.constant(-(-sizes.at(size, self.batch_size, self.seq_len) // self.parts))

    def change_storages(self) -> None:
        """Memory of shards, and of whole tensors only as long as they are used."""
        lasting = {
            shard: any(self.editor.storages[one].lasts for one, to in self.marks.reduced.items() if to == shard)
            for shard in set(self.marks.reduced.values())
        }
        for storage, row in enumerate(self.editor.storages):
            if storage in lasting:
                row.lasts, row.free = lasting[storage], None
        for storage in set(self.marks.gathered.values()):
            self.editor.storages[storage].lasts, self.editor.storages[storage].free = False, None
        for storage, row in enumerate(self.editor.storages[: self.old_storages]):
            if self.on_host[storage]:
                continue
            if storage in self.marks.reduced and self.zero > 1 and row.made:
                row.lasts, row.free = False, None
            elif self._is_shared(storage, row.kind, made=row.made):
                row.size = self._divide_size(row.size)

    def _is_shared(self, storage: int, kind: int, *, made: bool) -> bool:
        """Whether a rank keeps only a part of a storage."""
        if kind == StorageKind.PARAMETER:
            return self.zero == 3
        if kind == StorageKind.GRADIENT:
            return self.zero > 1 and storage not in self.marks.whole and not made
        only_update = made and storage in self._in_update and storage not in self._in_passes
        return kind == StorageKind.OPTIMIZER_STATE or only_update


def _replace_forms(signature: Signature, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> Signature:
    same = inputs == signature.inputs and outputs == signature.outputs
    return signature if same else replace(signature, inputs=inputs, outputs=outputs)
