"""What goes with ops that are taken out: what only they used, and what was only done with their results."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

from traincast.errors import TraincastError
from traincast.workload.rewrite import OpRow, Rewrite

_FOLLOW = frozenset({
    "aten::add_", "aten::_foreach_add_", "aten::zero_", "aten::_foreach_zero_", "aten::detach", "aten::_indices",
    "aten::_values", "aten::_sparse_coo_tensor_with_dims_and_tensors",
})  # fmt: skip
"""Ops on gradients of tables and on tables that a plain update by SGD is made of."""


class Pruning:
    """Ops of a program that go (`gone`, by id); `drop` takes them out."""

    def __init__(self, rows: Rewrite, gone: Iterable[OpRow]) -> None:
        self.rows = rows
        self.ops = [op for scope in rows.scopes for op in scope.ops]
        self.gone = {id(op) for op in gone}
        self.users: dict[int, list[OpRow]] = defaultdict(list)
        for op in self.ops:
            for tensor in set(op.inputs):
                self.users[tensor].append(op)

    def follow(self, storages: set[int]) -> None:
        """All that is done with what lies in `storages` goes: whole ops, or their places in lists of tensors."""
        found = -1
        while found != len(storages) + len(self.gone):
            found = len(storages) + len(self.gone)
            for op in self.ops:
                touched = {self.rows.tensors[t] for t in (*op.inputs, *op.outputs)}
                if id(op) in self.gone or not touched & storages:
                    continue
                if op.signature.name not in _FOLLOW:
                    raise TraincastError(
                        f"its tables or their gradients are used by {op.signature.name}; the table-batched op updates "
                        "by plain SGD: capture the model with table-batched embeddings"
                    )
                if "_foreach_" in op.signature.name and not self._all_in(op, storages):
                    storages |= self._without_places(op, storages)
                else:
                    self.gone.add(id(op))
                    storages |= touched

    def _all_in(self, op: OpRow, storages: set[int]) -> bool:
        return all(self._places(op)[place] & storages for place in range(len(self._places(op))))

    def _places(self, op: OpRow) -> list[set[int]]:
        """The storages at every place of the lists that an op was given."""
        length = max(count for _, count in op.signature.groups)
        return [{self.rows.tensors[t] for t in op.inputs[place::length]} for place in range(length)]

    def _without_places(self, op: OpRow, storages: set[int]) -> set[int]:
        """Shortens the lists of an op; gives all storages at the places that went."""
        places = self._places(op)
        kept = [number for number, place in enumerate(places) if not place & storages]
        lists = len(op.inputs) // len(places)
        numbers = [part * len(places) + place for part in range(lists) for place in kept]
        signature = op.signature
        op.signature = replace(
            signature,
            inputs=tuple(signature.inputs[n] for n in numbers),
            groups=tuple((name, len(kept)) for name, _ in signature.groups),
        )
        op.inputs = tuple(op.inputs[n] for n in numbers)
        return set().union(*(place for number, place in enumerate(places) if number not in kept))

    def unused(self) -> None:
        """Ops whose results only ops that go have used go too."""
        before = -1
        while before != len(self.gone):
            before = len(self.gone)
            for op in reversed(self.ops):
                users = [user for t in op.outputs for user in self.users[t] if user is not op]
                if id(op) not in self.gone and users and all(id(user) in self.gone for user in users):
                    self.gone.add(id(op))

    def drop(self) -> None:
        """Takes the ops out, and memory that nothing uses any more; what is left must have all that it reads."""
        rows = self.rows
        lost = {rows.tensors[t] for op in self.ops if id(op) in self.gone for t in (*op.inputs, *op.outputs)}
        rows.drop(lambda op: id(op) in self.gone)
        touched: Counter[int] = Counter()
        for op in (op for scope in rows.scopes for op in scope.ops):
            for tensor in op.inputs:
                row = rows.storage_of(tensor)
                if row.made and rows.tensors[tensor] in lost and not touched[rows.tensors[tensor]]:
                    raise TraincastError(f"what its bags share with others is used by {op.signature.name}")
            touched.update(rows.tensors[t] for t in (*op.inputs, *op.outputs))
        for storage in lost - set(touched):
            rows.storages[storage].made = True  # there before the step for ops that are gone: so is it
