"""One embedding bag per table becomes one table-batched lookup, whose backward updates the tables (SGD)."""

from __future__ import annotations

from dataclasses import replace

from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import ACCUMULATE_GRAD, Phase, Scalar, Signature, StorageKind, TensorSpec
from traincast.ir.program import Program
from traincast.ir.rows import OpRow, ScopeRow
from traincast.ir.sizes import SizeRef
from traincast.ir.workload import Workload, follows_tensors
from traincast.transforms.bags import ARGUMENTS, LEARNING_RATE, Bag, batch_traced_bags, find_bags, find_host_copies
from traincast.transforms.pruning import Pruning
from traincast.transforms.updates import LISTS_SINCE, update_by_lists
from traincast.utils.errors import TraincastError

_TRACED = "gradients and updates of tensors that have the form of a table were taken for theirs"
_SAID = "all tables are looked up by one table-batched op, whose backward updates their rows by SGD"


def batch_bags(step: Workload) -> tuple[Workload, str]:
    """The step with its bags fused."""
    if len(step.ranks) > 1:
        raise TraincastError(f"'{step.name}' runs on {len(step.ranks)} GPUs; fuse the bags of its step on one GPU")
    if not follows_tensors(step.programs[0]):
        return replace(step, programs=(batch_traced_bags(step.programs[0]),)), f"{_SAID} ({_TRACED})"
    batching = _Batching(step.programs[0])
    batching.rewrite()
    if int(step.framework_version.partition(".")[0]) >= LISTS_SINCE:
        update_by_lists(batching.editor)
    return replace(step, programs=(batching.editor.build(),)), _SAID


_PLAIN = frozenset({
    "aten::add_", "aten::_foreach_add_", "aten::zero_", "aten::_foreach_zero_", "aten::detach", "aten::_indices",
    "aten::_values", "aten::_sparse_coo_tensor_with_dims_and_tensors",
})  # fmt: skip
"""Ops on gradients of tables and on tables that a plain update by SGD is made of."""


def _check_plain(op: OpRow) -> None:
    if op.signature.name not in _PLAIN:
        raise TraincastError(
            f"its tables or their gradients are used by {op.signature.name}; the table-batched op updates by plain "
            "SGD: capture the model with table-batched embeddings"
        )


class _Batching:
    """A program whose bags become one op."""

    def __init__(self, program: Program) -> None:
        self.program, self.editor = program, ProgramEditor(program)
        self.sizes = self.editor.sizes
        self.plain: list[int] = program.size_values.tolist()
        bags = find_bags(self.editor, self.plain)
        self.pruning = Pruning(self.editor, (op for bag in bags for op in (bag.op, bag.backward) if op is not None))
        self.cat = self._find_joining_op(bags)
        place = {} if self.cat is None else {tensor: number for number, tensor in enumerate(self.cat.inputs)}
        self.bags = sorted(bags, key=lambda bag: place.get(bag.op.outputs[0], 0))
        self.results = [self.editor.tensors[bag.op.outputs[0]] for bag in bags]
        self.batch, self.dim = bags[0].op.signature.outputs[0].shape
        self.count = self.sizes.constant(len(bags))
        self.one = self.sizes.constant(1)
        self.columns = self.sizes.total([self.dim], times=len(bags))

    def rewrite(self) -> None:
        """Puts the table-batched op in the place of the bags."""
        first, trained = self.bags[0], self.bags[0].backward is not None
        operands, specs = self._make_lookup_operands()
        lookup, pooled = self._lookup(operands, specs)
        at = min(self.editor.scopes.index(bag.scope) for bag in self.bags)
        new = [lookup, *self._hand_result_on(pooled, first.scope)]
        self.editor.scopes[at:at] = new
        if trained:
            self._backward(lookup.ops[0], operands, specs)
        nodes = [bag.backward for bag in self.bags if bag.backward is not None]
        self.pruning.forget_gradients(nodes)
        tables = {self.editor.tensors[bag.op.inputs[0]] for bag in self.bags}
        self.pruning.follow(tables, {t for op in nodes for t in op.outputs}, _check_plain)
        self.pruning.drop_unused_ops()
        self.pruning.drop()
        self._set_result_lifetime()

    def _set_result_lifetime(self) -> None:
        """The result lives as long as those of the bags did, or until the op before that is still there."""
        freeing = {self.editor.storages[storage].free for storage in self.results}
        ops = self.pruning.ops
        last = max((number for number, op in enumerate(ops) if op in freeing), default=-1)
        left = (op for op in reversed(ops[: last + 1]) if op not in self.pruning.gone)
        self.pooled.free = next(left, None)

    def _find_joining_op(self, bags: list[Bag]) -> OpRow | None:
        """The op that puts the results of all bags side by side and is the only one that reads them."""
        results = [bag.op.outputs[0] for bag in bags]
        users = {user for result in results for user in self.pruning.users[result]}
        cat = users.pop() if len(users) == 1 else None
        if cat is None or cat.signature.name not in ("aten::cat", "aten::concat"):
            return None
        dim = cat.signature.scalar("dim")
        places = sorted(cat.inputs.index(result) for result in results)
        neighbours = places == list(range(places[0], places[0] + len(places)))
        beside = isinstance(dim, int) and self.plain[dim] in (1, -1)
        return cat if neighbours and beside and len(places) < len(cat.inputs) else None

    def _make_lookup_operands(self) -> tuple[tuple[int, ...], tuple[TensorSpec, ...]]:
        """Weights of all tables in one, where each begins, and the lookups of all."""
        weight = self.bags[0].weight
        rows = self.sizes.total([bag.weight.shape[0] for bag in self.bags])
        all_rows = TensorSpec((rows, self.dim), (self.dim, self.one), weight.dtype)
        begins = TensorSpec((self.count,), (self.one,), "int64")
        dim = self.plain[self.dim]
        weights = self.editor.add_tensor(
            self.sizes.total([rows], times=dim * weight.itemsize), StorageKind.PARAMETER, made=False
        )
        offset = self.editor.add_tensor(self.sizes.constant(8 * len(self.bags)), StorageKind.BUFFER, made=False)
        lookups = self.sizes.total([bag.input("indices")[1].shape[0] for bag in self.bags])
        bounds = self.sizes.total([self.batch], times=len(self.bags), plus=1)
        indices, offsets = self._join_lookup_inputs("indices", lookups), self._join_lookup_inputs("offsets", bounds)
        return (weights, offset, indices[0], offsets[0]), (all_rows, begins, indices[1], offsets[1])

    def _join_lookup_inputs(self, name: str, size: int) -> tuple[int, TensorSpec]:
        """The lookups of all bags as one tensor: copied from the host in one go if the bags' own were."""
        _, form = self.bags[0].input(name)
        spec = replace(form, shape=(size,), stride=(self.one,))
        number_of_bytes = self.sizes.total([size], times=form.itemsize)
        copies = find_host_copies(self.editor, (bag.input(name)[0] for bag in self.bags))
        copy = copies[0]
        if copy is None:
            return self.editor.add_tensor(number_of_bytes, StorageKind.INPUT, made=False), spec
        host = self.editor.add_tensor(number_of_bytes, self.editor.get_storage(copy.inputs[0]).kind, made=False)
        there = self.editor.add_tensor(number_of_bytes, self.editor.get_storage(copy.outputs[0]).kind)
        from_host = replace(spec, device=copy.signature.inputs[0].device)
        signature = replace(copy.signature, inputs=(from_host,), outputs=(spec,))
        at = next(i for i, scope in enumerate(self.editor.scopes) if any(op is copy for op in scope.ops))
        old = self.editor.scopes[at]
        self.editor.scopes.insert(at, ScopeRow(old.name, old.phase, old.thread, [
            OpRow(signature, (host,), (there,), copy.module, copy.stream)
        ]))  # fmt: skip
        return there, spec

    @property
    def _forms(self) -> tuple[tuple[str, Scalar], ...]:
        """What the op is told of its tables."""
        rows = tuple(SizeRef(bag.weight.shape[0]) for bag in self.bags)
        forms: list[tuple[str, Scalar]] = [("rows", rows), ("dims", len(self.bags) * (SizeRef(self.dim),))]
        lookups = [self.plain[bag.input("indices")[1].shape[0]] for bag in self.bags]
        batch = self.plain[self.batch]
        if len(set(lookups)) > 1:
            if any(number % batch for number in lookups):
                raise TraincastError("its bags hold no integer number of lookups per sample")
            forms.append(("pooling", tuple(SizeRef(self.sizes.constant(number // batch)) for number in lookups)))
        return tuple(forms)

    def _pooled(self) -> TensorSpec:
        stride = (self.columns, self.dim, self.one)
        return TensorSpec((self.batch, self.count, self.dim), stride, self.bags[0].weight.dtype)

    def _bytes(self) -> int:
        return self.sizes.total(
            [self.batch], times=len(self.bags) * self.plain[self.dim] * self.bags[0].weight.itemsize
        )

    def _lookup(self, operands: tuple[int, ...], specs: tuple[TensorSpec, ...]) -> tuple[ScopeRow, int]:
        first = self.bags[0]
        pooled = self.editor.add_tensor(self._bytes(), StorageKind.ACTIVATION)
        self.pooled = self.editor.storages[-1]
        name = "traincast::batched_embedding_forward"
        signature = Signature(name, specs, (self._pooled(),), self._forms, ARGUMENTS)
        op = OpRow(signature, operands, (pooled,), first.op.module, first.op.stream)
        return ScopeRow("LookupFunction", Phase.FORWARD, first.scope.thread, [op]), pooled

    def _hand_result_on(self, pooled: int, scope: ScopeRow) -> list[ScopeRow]:
        """Gives the result to who used the bags': the cat as one of its inputs, others as views of it."""
        first, flat = self.bags[0].op, replace(self._pooled(), shape=(self.batch, self.columns),
                                               stride=(self.columns, self.one))  # fmt: skip
        storage = self.editor.tensors[pooled]
        if self.cat is None:
            outputs = tuple(bag.op.outputs[0] for bag in self.bags)
            for tensor in outputs:
                self.editor.tensors[tensor] = storage
            block = replace(self._pooled(), shape=(self.batch, self.dim), stride=(self.columns, self.one))
            signature = Signature(
                "aten::unbind",
                (self._pooled(),),
                len(outputs) * (block,),
                (("dim", SizeRef(self.one)),),
                (("self", 1),),
            )
            view = OpRow(signature, (pooled,), outputs, first.module, first.stream)
            return [ScopeRow("aten::unbind", Phase.FORWARD, scope.thread, [view])]
        tensor = self.editor.add_view(storage)
        size = (SizeRef(self.batch), SizeRef(self.columns))
        signature = Signature("aten::view", (self._pooled(),), (flat,), (("size", size),), (("self", 1),))
        start = self.cat.inputs.index(self.bags[0].op.outputs[0])
        stop = start + len(self.bags)
        old = self.cat.signature
        inputs = (*old.inputs[:start], flat, *old.inputs[stop:])
        self.cat.signature = replace(old, inputs=inputs, groups=(("tensors", len(inputs)),))
        self.cat.inputs = (*self.cat.inputs[:start], tensor, *self.cat.inputs[stop:])
        view = OpRow(signature, (pooled,), (tensor,), first.module, first.stream)
        return [ScopeRow("aten::view", Phase.FORWARD, scope.thread, [view])]

    def _backward(self, lookup: OpRow, operands: tuple[int, ...], specs: tuple[TensorSpec, ...]) -> None:
        scopes = [bag.backward_scope for bag in self.bags if bag.backward_scope is not None]
        last = max(scopes, key=self.editor.scopes.index)
        before, grad, form = self._gradient(last)
        scalars = (*self._forms, ("learning_rate", LEARNING_RATE))
        signature = Signature(
            "traincast::batched_embedding_backward_sgd", (form, *specs), (), scalars, (("grad", 1), *ARGUMENTS)
        )
        op = OpRow(signature, (grad, *operands), (), lookup.module, lookup.stream, lookup)
        new = [before, ScopeRow("LookupFunctionBackward", Phase.BACKWARD, last.thread, [op]),
               ScopeRow(ACCUMULATE_GRAD, Phase.BACKWARD, last.thread)]  # fmt: skip
        at = self.editor.scopes.index(last)
        self.editor.scopes[at:at] = new

    def _gradient(self, scope: ScopeRow) -> tuple[ScopeRow, int, TensorSpec]:
        """The gradient of the result: a slice of the cat's, or the gradients of the bags put together."""
        backward = [bag.backward for bag in self.bags if bag.backward is not None]
        grads = [op.inputs[0] for op in backward]
        slices = [op for op in self.pruning.ops if op.signature.name == "aten::slice" and op.outputs[0] in grads]
        slices.sort(key=lambda op: grads.index(op.outputs[0]))
        if self.cat is not None and len(slices) == len(grads) and len({op.inputs for op in slices}) == 1:
            return self._join_sliced_gradients(slices, scope)
        whole = self.editor.add_tensor(self._bytes(), StorageKind.ACTIVATION)
        inputs = tuple(op.signature.inputs[0] for op in backward)
        signature = Signature(
            "aten::stack", inputs, (self._pooled(),), (("dim", SizeRef(self.one)),), (("tensors", len(inputs)),)
        )
        stack = OpRow(signature, tuple(grads), (whole,), backward[0].module, backward[0].stream)
        for grad in grads:  # who makes them stays
            self.pruning.users[grad].append(stack)
        return ScopeRow("UnbindBackward0", Phase.BACKWARD, scope.thread, [stack]), whole, self._pooled()

    def _join_sliced_gradients(self, slices: list[OpRow], scope: ScopeRow) -> tuple[ScopeRow, int, TensorSpec]:
        first, last = slices[0], slices[-1]
        kept = {"end": last.signature.scalar("end")}
        row = first.signature.outputs[0].stride[0]
        flat = replace(first.signature.outputs[0], shape=(self.batch, self.columns))
        first.signature = replace(
            first.signature, outputs=(flat,),
            scalars=tuple((name, kept.get(name, value)) for name, value in first.signature.scalars),
        )  # fmt: skip
        self.pruning.gone.update(slices[1:])
        grad = self.editor.add_view(self.editor.tensors[first.outputs[0]])
        form = replace(self._pooled(), stride=(row, self.dim, self.one))
        size = tuple(map(SizeRef, form.shape))
        signature = Signature("aten::view", (flat,), (form,), (("size", size),), (("self", 1),))
        view = OpRow(signature, (first.outputs[0],), (grad,), first.module, first.stream)
        # the bags' own users of the slice go, so it is this view that keeps it
        self.pruning.users[first.outputs[0]].append(view)
        return ScopeRow("ViewBackward0", Phase.BACKWARD, scope.thread, [view]), grad, form
