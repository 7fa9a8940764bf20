"""Embedding modules in the step of one GPU: the lookups and fused updates that many GPUs shard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import mul

import numpy as np

from traincast.ir.ops import ACCUMULATE_GRAD, Signature
from traincast.ir.program import Program
from traincast.models.embeddings.table import Pooling, Table
from traincast.utils.errors import TraincastError

_LOOKUP = re.compile(r"fbgemm::split_embedding_codegen_forward_(un)?weighted_cuda")
_UPDATE = re.compile(r"fbgemm::split_embedding_backward_codegen_(\w+?)_(un)?weighted_exact_cuda")
_BEFORE = ("aten::to", "fbgemm::bounds_check_indices")  # scopes that a lookup begins with
_UNPOOLED = 2  # FBGEMM's number of the mode


@dataclass(frozen=True, slots=True)
class EmbeddingModule:
    """FBGEMM tables in a step: `lookup` and `update` are ops, `forward` and `backward` the scopes they make up.

    Each table is looked up for `bags` bags; `pooled` says that these are samples. Otherwise every bag is a lookup whose
    row goes on by itself.
    """

    tables: tuple[Table, ...]
    bags: int
    pooled: bool
    lookup: int
    update: int
    forward: range
    backward: range

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
    modules = []
    for weights, lookup in lookups.items():
        if weights not in updates:
            raise TraincastError("some embedding tables of the step are not updated by it; capture a whole step")
        modules.append(_make_module(program, lookup, updates[weights]))
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
    names = [name for name, _ in groups if name == "dev_weights" or name.startswith("momentum")]
    storages = {int(c.tensor_storage[find_operand(program, module.update, name)]) for name in names}
    return sum(int(program.storage_nbytes[storage]) for storage in storages)


def _make_module(program: Program, lookup: int, update: int) -> EmbeddingModule:
    c = program.columns
    signature = program.signatures[c.op_signature[lookup]]
    rows, dims = _read_integers(signature, "rows"), _read_integers(signature, "dims")
    _check_own(signature, rows, dims)
    (indices,) = signature.tensors("indices")
    bags = signature.outputs[0].shape[0]
    fused = _UPDATE.fullmatch(program.signatures[c.op_signature[update]].name)
    assert fused is not None
    name = program.names[c.op_module[lookup]]
    tables = tuple(
        Table(
            name=f"{name}.{number}",
            rows=height,
            dim=dim,
            pooling=Pooling.from_constant(indices.numel / max(1, bags * len(rows))),
            weighted=fused[2] is None,
            optimizer=fused[1],
        )
        for number, (height, dim) in enumerate(zip(rows, dims, strict=True))
    )
    first, last = int(program.op_scope[lookup]), int(program.op_scope[update])
    begin = first
    while begin and program.names[c.scope_name[begin - 1]] in _BEFORE and begin > first - 3:
        begin -= 1
    end = last + 1
    if end < program.num_scopes and program.names[c.scope_name[end]] == ACCUMULATE_GRAD:
        end += int(c.scope_ptr[end] == c.scope_ptr[end + 1])  # of the tables, which have no gradient
    pooled = bags == program.batch_size
    return EmbeddingModule(tables, bags, pooled, lookup, update, range(begin, first + 1), range(last, end))


def _check_own(signature: Signature, rows: tuple[int, ...], dims: tuple[int, ...]) -> None:
    """Rejects lookups of FBGEMM's own module (which says how it pools) that do not belong to a table each."""
    if len(rows) != len(dims):
        raise TraincastError(f"{signature.name} has {len(rows)} rows and {len(dims)} dims; capture the step again")
    pooling = signature.scalar("pooling_mode")
    if pooling is None:
        return
    (weights,) = signature.tensors("dev_weights")
    if pooling == _UNPOOLED or sum(map(mul, rows, dims)) != weights.numel:
        raise TraincastError(
            "FBGEMM tables that several lookups share, or whose rows are not added up, are not sharded here; capture "
            "the step you run with `gpus`"
        )


def _find_ops(program: Program, name: re.Pattern[str]) -> Iterator[int]:
    known = [index for index, signature in enumerate(program.symbolic) if name.fullmatch(signature.name)]
    yield from np.flatnonzero(np.isin(program.columns.op_signature, known)).tolist()


def _find_weights(program: Program, op: int) -> int:
    return int(program.columns.tensor_storage[find_operand(program, op, "dev_weights")])


def _read_integers(signature: Signature, name: str) -> tuple[int, ...]:
    value = signature.scalar(name)
    if not isinstance(value, tuple):
        raise TraincastError(f"{signature.name} does not say the {name} of its tables; they cannot be sharded")
    return tuple(item for item in value if isinstance(item, int))
