"""The step of one GPU taken apart: embedding modules that many GPUs shard, its dense part, and copying it scope by
scope into a rank's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np

from traincast.ir.memory import compute_peak_memory
from traincast.ir.ops import ACCUMULATE_GRAD, Phase, Signature, StorageKind, TensorSpec
from traincast.ir.program import Program, find_storages_of_ops
from traincast.ir.workload import PLACEMENTS, TABLES, Workload
from traincast.models.data_parallel.data_parallel import (
    Reducer,
    find_accumulating,
    find_end_of_backward,
    find_gradients,
)
from traincast.models.embeddings.access import Uniform, parse_access
from traincast.models.embeddings.documents import list_entries
from traincast.models.embeddings.read import make_table
from traincast.models.embeddings.table import Pooling, Table
from traincast.models.layers.builder import RankBuilder, Ref
from traincast.models.recommenders.storage import STASH_BACK, STASH_OUT
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import parse_json

_LOOKUP = re.compile(r"fbgemm::split_embedding_codegen_forward_(un)?weighted_cuda|dynamicemb::lookup")
_UPDATE = re.compile(r"fbgemm::split_embedding_backward_codegen_(\w+?)_(un)?weighted_exact_cuda|dynamicemb::update")
_FILLS = ("fbgemm::lru_cache_populate", "traincast::drive_cache_populate")
_BEFORE = (
    "aten::to", "fbgemm::bounds_check_indices", "fbgemm::linearize_cache_indices", *_FILLS, "fbgemm::lxu_cache_lookup",
)  # fmt: skip
"""Scopes that a lookup begins with, each once; offsets and row numbers are cast."""
_UNPOOLED = 2  # FBGEMM's number of the mode


@dataclass(frozen=True, slots=True)
class EmbeddingModule:
    """FBGEMM tables in a step: `lookup` and `update` are ops, `forward` and `backward` the scopes they make up.

    Each table is looked up for `bags` bags; `pooled` says that these are samples. Otherwise every bag is a lookup whose
    row goes on by itself. `known`: the step says how often each table is looked up; else all are alike.
    `in_host`: rows are in unified memory. `stacked`: the rows of all tables come one below the other, as FBGEMM gives
    those it does not pool. `shared`: some lookups share a table, and count as tables with equal parts of its rows.
    """

    tables: tuple[Table, ...]
    bags: int
    pooled: bool
    lookup: int
    update: int
    forward: range
    backward: range
    known: bool
    in_host: bool
    stacked: bool
    shared: bool

    @property
    def rows_shape(self) -> tuple[int, int]:
        """Of what the lookup gives."""
        dims = [table.dim for table in self.tables]
        return (self.bags * len(dims), dims[0]) if self.stacked else (self.bags, sum(dims))

    @property
    def columns(self) -> int:
        """Columns of a bag of all tables."""
        return sum(table.dim for table in self.tables)

    def count_lookups_per_sample(self, table: Table, batch_size: int) -> float:
        """Lookups that a sample makes in one of the tables."""
        return table.pooling.mean * self.bags / batch_size


def find_embedding_modules(program: Program) -> tuple[EmbeddingModule, ...]:
    """The embedding modules of a training step, in the order of their lookups."""
    lookups = {_find_weights(program, op): op for op in _find_ops(program, _LOOKUP)}
    updates = {_find_weights(program, op): op for op in _find_ops(program, _UPDATE)}
    by_lookup = {int(program.columns.op_forward[op]): op for op in updates.values()}  # of weights that were away
    modules = []
    for weights, lookup in lookups.items():
        update = updates.get(weights, by_lookup.get(lookup))
        if update is None:
            raise TraincastError("some embedding tables of the step are not updated by it; capture a whole step")
        modules.append(_make_module(program, lookup, update))
    return tuple(modules)


def find_operand(program: Program, op: int, name: str) -> int:
    """The tensor that an op is given under a name."""
    c = program.columns
    signature = program.signatures[c.op_signature[op]]
    for group, span in signature.spans():
        if group == name:
            return int(c.input_tensor[c.input_ptr[op] + span.start])
    raise TraincastError(f"{signature.name} has no '{name}'; capture the step again")


def compute_resident_bytes(program: Program, module: EmbeddingModule) -> int:
    """Bytes that the tables of a module and the state of their optimizer take in the step of one GPU."""
    c = program.columns
    groups = program.signatures[c.op_signature[module.update]].groups
    names = [name for name, _ in groups if name in ("dev_weights", "slots") or name.startswith("momentum")]
    storages = {int(c.tensor_storage[find_operand(program, module.update, name)]) for name in names}
    return sum(int(program.storage_nbytes[storage]) for storage in storages)


def _make_module(program: Program, lookup: int, update: int) -> EmbeddingModule:
    c = program.columns
    signature = program.signatures[c.op_signature[lookup]]
    dims = _read_integers(signature, "dims")
    rows, shared = _read_rows(signature, dims)
    (indices,) = signature.tensors("indices")
    stacked = signature.scalar("pooling_mode") == _UNPOOLED
    bags = -(-signature.outputs[0].shape[0] // (len(dims) if stacked else 1))
    fused = _UPDATE.fullmatch(program.signatures[c.op_signature[update]].name)
    assert fused is not None
    name = program.names[c.op_module[lookup]]
    pooling, access = (_list_items(signature, item) for item in ("pooling", "access"))
    known, even = len(pooling) == len(rows), indices.numel / max(1, bags * len(rows))
    tables = tuple(
        Table(
            name=f"{name}.{number}",
            rows=height,
            dim=dim,
            pooling=Pooling.from_constant(pooling[number] if known else even),
            access=parse_access(access[number]) if len(access) == len(rows) else Uniform(),
            weighted=fused[0].startswith("fbgemm") and fused[2] is None,
            optimizer=fused[1] or str(signature.scalar("optimizer")),
        )
        for number, (height, dim) in enumerate(zip(rows, dims, strict=True))
    )
    first, last = int(program.op_scope[lookup]), int(program.op_scope[update])
    begin = first
    while begin and program.names[c.scope_name[begin - 1]] in _BEFORE and begin > first - len(_BEFORE) - 1:
        begin -= 1
    end = last + 1
    if end < program.num_scopes and program.names[c.scope_name[end]] == ACCUMULATE_GRAD:
        end += int(c.scope_ptr[end] == c.scope_ptr[end + 1])  # of the tables, which have no gradient
    stashed = program.names[c.scope_name[first + 1]] == STASH_OUT
    forward = range(begin, first + 1 + stashed)
    in_host = bool(signature.scalar("host")) or any(program.names[c.scope_name[scope]] in _FILLS for scope in forward)
    return EmbeddingModule(
        tables, bags, bags == program.batch_size and not stacked, lookup, update, forward, range(last - stashed, end),
        known, in_host, stacked, shared,
    )  # fmt: skip


def _read_rows(signature: Signature, dims: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """The rows of the table of each lookup, and whether some share one. These have equal parts of it, of which a batch
    wants as many different rows as they want together."""
    rows, captured = _read_integers(signature, "rows"), signature.scalar("pooling_mode") is not None
    if len(rows) != len(dims):
        raise TraincastError(f"{signature.name} has {len(rows)} rows and {len(dims)} dims; capture the step again")
    if not captured or sum(map(mul, rows, dims)) == signature.tensors("dev_weights")[0].numel:
        return rows, False
    sharers = _read_integers(signature, "sharers")
    return tuple(-(-height // number) for height, number in zip(rows, sharers, strict=True)), True


def list_scopes(program: Program, name: str) -> list[int]:
    """The scopes of a name."""
    known = [number for number, one in enumerate(program.names) if one == name]
    return np.flatnonzero(np.isin(program.columns.scope_name, known)).tolist()


def _find_ops(program: Program, name: re.Pattern[str]) -> Iterator[int]:
    known = [index for index, signature in enumerate(program.symbolic) if name.fullmatch(signature.name)]
    yield from np.flatnonzero(np.isin(program.columns.op_signature, known)).tolist()


def _find_weights(program: Program, op: int) -> int:
    return int(program.columns.tensor_storage[find_operand(program, op, "dev_weights")])


def _list_items(signature: Signature, name: str) -> tuple[Any, ...]:
    value = signature.scalar(name)
    return value if isinstance(value, tuple) else ()


def _read_integers(signature: Signature, name: str) -> tuple[int, ...]:
    value = signature.scalar(name)
    if not isinstance(value, tuple):
        raise TraincastError(f"{signature.name} does not say the {name} of its tables; they cannot be sharded")
    return tuple(item for item in value if isinstance(item, int))


class StepCopier:
    """Copies the scopes of `source` but those in `dropped` into `builder`, with the storages that other ops use.

    What takes the place of dropped scopes is written between `copy_scopes`s. A storage lives as long as it did;
    `replace_tensor` puts another tensor in the place of one whose op was dropped.
    """

    def __init__(self, source: Program, dropped: Sequence[int], builder: RankBuilder) -> None:
        builder.continue_from(source, builder.world)
        c = source.columns
        self.source, self.builder = source, builder
        self._tensors: dict[int, int] = {}
        self._ops: dict[int, int] = {}
        self._scopes: list[int] = []
        self._lasting: set[int] = set()
        self._born = _group_storages_by_op(c.storage_alloc, source.num_ops)
        self._gone = _group_storages_by_op(c.storage_free, source.num_ops)
        self._storages = {
            storage: builder.target.add_storage(
                int(source.storage_nbytes[storage]), self._get_storage_kind(storage), before_step=True
            )
            for storage in _find_resident_storages(source, dropped)
        }

    def copy_scopes(self, scopes: range) -> None:
        """Copies scopes as they are."""
        c, names = self.source.columns, self.source.names
        for scope in scopes:
            after = int(c.scope_after[scope])
            self.builder.open_scope_on(
                int(c.scope_thread[scope]), names[c.scope_name[scope]], Phase(int(c.scope_phase[scope])),
                after=-1 if after < 0 else self._scopes[after],
            )  # fmt: skip
            self._scopes.append(self.builder.target.last_scope)
            for op in range(int(c.scope_ptr[scope]), int(c.scope_ptr[scope + 1])):
                self._copy_op(op)

    def drop_scopes(self, scopes: range) -> None:
        """Leaves scopes out: what waits for them waits for what was written last, what they let go is gone."""
        c = self.source.columns
        self._scopes += [self.builder.target.last_scope] * len(scopes)
        for op in range(int(c.scope_ptr[scopes.start]), int(c.scope_ptr[scopes.stop])):
            self._free_after(op)

    def get_ref(self, tensor: int, spec: TensorSpec) -> Ref:
        """A tensor of the source, as it is here."""
        return Ref(self._copy_tensor(tensor), self._find_storage(tensor), spec)

    def replace_tensor(self, tensor: int, by: Ref) -> None:
        """From here on another tensor stands in the place of one of the source, for all that is on its storage."""
        c = self.source.columns
        storage = int(c.tensor_storage[tensor])
        for known in [one for one in self._tensors if c.tensor_storage[one] == storage]:
            del self._tensors[known]
        self._tensors[tensor], self._storages[storage] = by.tensor, by.storage

    def _copy_op(self, op: int) -> None:
        c = self.source.columns
        for storage in self._born[op]:
            self._storages[storage] = self.builder.target.add_storage(
                int(self.source.storage_nbytes[storage]), self._get_storage_kind(storage)
            )
        signature = self._spread_collective(self.source.signatures[c.op_signature[op]])
        self._ops[op] = self.builder.target.add_op(
            signature,
            [self._copy_tensor(int(tensor)) for tensor in c.input_tensor[c.input_ptr[op] : c.input_ptr[op + 1]]],
            [self._copy_tensor(int(tensor)) for tensor in c.output_tensor[c.output_ptr[op] : c.output_ptr[op + 1]]],
            module=self.source.names[c.op_module[op]],
            forward=self._ops.get(int(c.op_forward[op]), -1),
            stream=int(c.op_stream[op]),
        )
        self._free_after(op)

    def _spread_collective(self, signature: Signature) -> Signature:
        """A collective of the one rank is one of all ranks."""
        if signature.scalar("collective") is None:
            return signature
        scalars = ((name, self.builder.world.ranks if name == "group" else value) for name, value in signature.scalars)
        return replace(signature, scalars=tuple(scalars))

    def _free_after(self, op: int) -> None:
        for storage in self._gone[op]:
            here = self._storages.get(storage)
            if here is not None and here not in self._lasting:
                self.builder.target.free_storage(here)

    def _copy_tensor(self, tensor: int) -> int:
        if tensor not in self._tensors:
            self._tensors[tensor] = self.builder.target.add_tensor(self._find_storage(tensor))
        return self._tensors[tensor]

    def _find_storage(self, tensor: int) -> int:
        """The storage of a tensor of the source, as it is here."""
        storage = int(self.source.columns.tensor_storage[tensor])
        if storage not in self._storages:
            raise TraincastError(f"storage {storage} of the workload is used before it is allocated; capture it again")
        return self._storages[storage]

    def _get_storage_kind(self, storage: int) -> StorageKind:
        return StorageKind(int(self.source.columns.storage_kind[storage]))


class ReducingCopier(StepCopier):
    """Copies a step of one GPU without its embedding `modules`, each gradient reduced over all ranks where it is ready;
    a step that reduces its gradients itself does so."""

    def __init__(self, source: Program, modules: Sequence[EmbeddingModule], builder: RankBuilder) -> None:
        self.dropped = {scope for one in modules for scopes in (one.forward, one.backward) for scope in scopes}
        self.restored = list_scopes(source, STASH_BACK)
        self.dropped.update(self.restored)
        super().__init__(source, sorted(self.dropped), builder)
        accumulating = find_accumulating(source).tolist()
        self.end = find_end_of_backward(source, accumulating) if accumulating else source.num_scopes
        self.begin = int((source.columns.scope_phase == Phase.BACKWARD).argmax())
        communicates = any(signature.scalar("collective") is not None for signature in source.symbolic)
        self._ready = {} if communicates else {gradient.scope: gradient for gradient in find_gradients(source)}
        forms = [gradient.grad.spec for gradient in self._ready.values()]
        self._reducer = Reducer(builder, builder.world, forms, kind=StorageKind.GRADIENT, as_views=True)

    def copy_scope(self, scope: int) -> None:
        """One scope as it is; a gradient that is ready then goes into its bucket, and stays a part of it."""
        if scope in self.dropped:
            self.drop_scopes(range(scope, scope + 1))
            return
        self.copy_scopes(range(scope, scope + 1))
        if scope in self._ready:
            gradient = self._ready[scope]
            grad = self.get_ref(gradient.grad.tensor, gradient.grad.spec)
            slot = self._reducer.reduce_gradient(grad, stream=gradient.stream)
            self.replace_tensor(gradient.grad.tensor, slot)
            self._lasting.add(slot.storage)

    def finish_reduction(self) -> None:
        """Reduced gradients are there; what waits for the scope copied last waits for what was written since."""
        if self._ready:
            self._reducer.finish_reduction()
            self._scopes[-1] = self.builder.target.last_scope


def _group_storages_by_op(column: np.ndarray[tuple[int], np.dtype[np.int32]], ops: int) -> list[list[int]]:
    """Storages by the op that a column names."""
    result: list[list[int]] = [[] for _ in range(ops)]
    for storage, op in enumerate(column.tolist()):
        if 0 <= op < ops:
            result[op].append(storage)
    return result


def _find_resident_storages(program: Program, dropped: Sequence[int]) -> list[int]:
    """Storages that are there before the step and are not those of dropped ops alone. Gradients of the step before are
    left out: they are parts of DDP's buckets."""
    c = program.columns
    gone = np.isin(program.op_scope, dropped)
    by_kept, by_dropped = (np.zeros(len(c.storage_bytes), dtype=np.bool_) for _ in range(2))
    for op in range(program.num_ops):
        (by_dropped if gone[op] else by_kept)[find_storages_of_ops(program, op, op + 1)] = True
    grads = (c.storage_kind == StorageKind.GRADIENT) & ~by_kept
    return np.flatnonzero((c.storage_alloc < 0) & (by_kept | ~by_dropped) & ~grads).tolist()


MODULE = "DistributedModelParallel"


@dataclass(frozen=True, eq=False, slots=True)
class CapturedDense:
    """A step of one GPU without the lookups and updates of its embedding `modules`."""

    workload: Workload
    modules: tuple[EmbeddingModule, ...]

    @property
    def program(self) -> Program:
        """The step."""
        return self.workload.programs[0]

    def compute_memory_bytes(self, columns: int, batch_size: int) -> float:
        """Bytes of the step alongside its tables and their state."""
        tables = sum(compute_resident_bytes(self.program, module) for module in self.modules)
        return max(0.0, float(compute_peak_memory(self.program).peak_bytes - tables))


def split_recommender(workload: Workload) -> tuple[tuple[Table, ...], CapturedDense]:
    """The tables of a captured step of one GPU, under the names and lookups that its script had, and all else of it."""
    if workload.mode != "training" or len(workload.ranks) != 1:
        raise TraincastError(f"'{workload.name}' is no training step of one GPU; capture it without `gpus`")
    program = workload.programs[0]
    modules = find_embedding_modules(program)
    if not modules or not all(module.pooled and not module.shared for module in modules):
        raise TraincastError(
            f"the step of '{workload.name}' has no fused tables that pool their rows, each for one lookup (an "
            "EmbeddingBagCollection under DistributedModelParallel has), or others besides them; `shard` places only "
            "such tables"
        )
    dense = CapturedDense(workload, modules)
    found = [table for module in modules for table in module.tables]
    noted = workload.meta.get(TABLES)
    if noted is None:
        return tuple(found), dense
    content = parse_json(noted, "its tables")
    if PLACEMENTS in content:
        raise TraincastError(
            f"'{workload.name}' says how its tables are sharded or kept, which is what `shard` finds: leave out its "
            "`sharding` and `storage`, or ask `predict`"
        )
    entries = list_entries(content, workload.name)
    known = [make_table(entry, f"table {place}", Path()) for place, entry in enumerate(entries, 1)]
    return tuple(_name_table(table, known, workload.name) for table in found), dense


def _name_table(table: Table, known: list[Table], name: str) -> Table:
    """The first table of these sizes that has not been seen, as it was updated."""
    for one in known:
        if (one.rows, one.dim, one.weighted) == (table.rows, table.dim, table.weighted):
            known.remove(one)
            return replace(one, optimizer=table.optimizer)
    raise TraincastError(f"a table of {table.rows} rows of '{name}' is none that its script was seen to have")


class ReplayedDense:
    """The scopes of the captured step in their order: what comes before its lookups, between them and its updates, and
    after."""

    def __init__(self, builder: RankBuilder, dense: CapturedDense, batch: int) -> None:
        source = self.source = dense.program
        if batch != source.batch_size:
            raise TraincastError(f"the step was captured at batch size {source.batch_size}; it has no other")
        self.builder, self.modules = builder, dense.modules
        self.copier = ReducingCopier(source, dense.modules, builder)
        self.done = 0

    def write_inputs(self) -> None:
        """What the step does before its first lookup: its inputs are copied, its bottom part may run."""
        self._copy_until(min(module.forward.start for module in self.modules))

    def write_bottom_forward(self) -> None:
        """It has run."""

    def write_top_forward(self, embedded: Sequence[Ref]) -> None:
        """From pooled embeddings [batch, columns] to the loss."""
        builder, c = self.builder, self.source.columns
        self.widths = [part.shape[1] for part in embedded]
        columns = [module.columns for module in self.modules]
        joined = embedded[0]
        if len(embedded) > 1:
            builder.open_scope("aten::cat", Phase.FORWARD)
            joined = builder.add_tensor((joined.shape[0], sum(self.widths)))
            builder.add_op("aten::cat", [("tensors", embedded)], [joined], [("dim", 1)], module=MODULE)
            builder.free_tensors(*embedded)
        parts = [joined]
        if len(columns) > 1:
            builder.open_scope("aten::split_with_sizes", Phase.FORWARD)
            parts = builder.add_column_slices(joined, columns, module=MODULE)
        for module, part in zip(self.modules, parts, strict=True):
            self.copier.replace_tensor(int(c.output_tensor[c.output_ptr[module.lookup]]), part)
        self._copy_until(self.copier.begin)

    def write_top_backward(self) -> list[Ref]:
        """Back to the pooled embeddings: their gradients, in the order they were given."""
        self._copy_until(max(module.backward.start for module in self.modules))
        builder, c, grads = self.builder, self.source.columns, []
        for module in self.modules:
            spec = self.source.signatures[c.op_signature[module.update]].tensors("grad_output")[0]
            grads.append(self.copier.get_ref(find_operand(self.source, module.update, "grad_output"), spec))
        grad = grads[0]
        if len(grads) > 1:
            builder.open_scope("SplitWithSizesBackward0", Phase.BACKWARD)
            grad = builder.add_tensor((grad.shape[0], sum(self.widths)))
            builder.add_op("aten::cat", [("tensors", grads)], [grad], [("dim", 1)], module=MODULE)
        if len(self.widths) == 1:
            return [grad]
        builder.open_scope("CatBackward0", Phase.BACKWARD)
        return builder.add_column_slices(grad, self.widths, module=MODULE)

    def write_bottom_backward(self) -> None:
        """What is left of backward."""
        self._copy_until(self.copier.end)

    def write_end_of_backward(self) -> None:
        """Reduced gradients come back."""
        self.copier.finish_reduction()

    def write_optimizer_step(self) -> None:
        """The optimizer's, and whatever the loop does besides."""
        self._copy_until(self.source.num_scopes)

    def _copy_until(self, scope: int) -> None:
        """Scopes up to one, those of lookups and updates left out."""
        for one in range(self.done, scope):
            self.copier.copy_scope(one)
        self.done = max(self.done, scope)
