"""How a step updates: gradient accumulation over several passes, another optimizer, and ops moved to a stream of their
own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from traincast.ir.editor import ProgramEditor, TensorCopies, remove_phase
from traincast.ir.ops import ACCUMULATE_GRAD, Phase, Signature, StorageKind
from traincast.ir.program import Program
from traincast.ir.rows import OpRow, ScopeRow
from traincast.ir.workload import Workload, check_follows_tensors
from traincast.models.data_parallel.data_parallel import InsertingBuilder, find_gradients
from traincast.models.layers.builder import Communicator, Ref
from traincast.models.layers.optimizers import TITLES, make_optimizer_state, write_foreach_step
from traincast.utils.errors import TraincastError, make_unknown_error

RECORD, WAIT = "cuda::event_record", "cuda::stream_wait_event"


def move_to_stream(step: Workload, name: str, stream: int) -> tuple[Workload, str]:
    """The step with all ops of a name on another stream."""
    names = {signature.name for program in step.programs for signature in program.symbolic}
    if name not in names:
        raise make_unknown_error("op", name, names, "Name one of the step's ops.")
    check_follows_tensors(step)
    programs = tuple(_move_to_stream(program, name, stream) for program in step.programs)
    return replace(step, programs=programs), f"{name} runs on stream {stream}, with events where data crosses"


def _move_to_stream(program: Program, name: str, stream: int) -> Program:
    editor = ProgramEditor(program)
    taken = [signature.scalar("event") for signature in program.signatures]
    events = _Events(1 + max((event for event in taken if isinstance(event, int)), default=-1))
    stays = all(op.stream == stream for op in editor.ops if op.signature.name == name)
    for op in editor.ops:
        if op.signature.name == name:
            op.stream = stream
    writer: dict[int, OpRow] = {}
    for scope in editor.scopes:
        ops: list[OpRow] = []
        for op in scope.ops:
            for source in _find_source_ops(editor, op, writer):
                events.wait(op, source, ops)
            ops.append(op)
            for tensor in op.outputs:
                writer[editor.tensors[tensor]] = op
        scope.ops = ops
    events.record(editor)
    if not events.of and stays:
        return program
    if not events.of:
        raise TraincastError(f"{name} has nothing to wait for and nobody waits for it")
    return editor.build()


def _find_source_ops(editor: ProgramEditor, op: OpRow, writer: dict[int, OpRow]) -> list[OpRow]:
    """Ops of other streams whose results an op reads or overwrites."""
    found: dict[OpRow, None] = {}
    for tensor in (*op.inputs, *op.outputs):
        source = writer.get(editor.tensors[tensor])
        if source is not None and source.stream != op.stream:
            found[source] = None
    return list(found)


class _Events:
    """An event after every op that somebody on another stream waits for."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.of: dict[OpRow, int] = {}
        self.waited: set[tuple[int, int]] = set()

    def wait(self, op: OpRow, source: OpRow, before: list[OpRow]) -> None:
        """The stream of `op` waits for `source`, once."""
        event = self.of.setdefault(source, self.first + len(self.of))
        if (event, op.stream) not in self.waited:
            self.waited.add((event, op.stream))
            before.append(OpRow(_make_control_signature(WAIT, event), (), (), op.module, op.stream))

    def record(self, editor: ProgramEditor) -> None:
        """Puts the events in place."""
        for scope in editor.scopes:
            ops: list[OpRow] = []
            for op in scope.ops:
                ops.append(op)
                if op in self.of:
                    ops.append(OpRow(_make_control_signature(RECORD, self.of[op]), (), (), op.module, op.stream))
            scope.ops = ops


def _make_control_signature(name: str, event: int) -> Signature:
    return Signature(name, (), (), (("event", event),))


_BROADCAST = "torch.distributed::_broadcast_coalesced"
"""The scope in which buffers are sent before forward."""
_ALL_REDUCE = "c10d::allreduce_"
_COPIES = ("aten::copy_", "aten::mul")
"""What puts a gradient into its bucket."""
_ZERO = "Optimizer.zero_grad#"
_KEPT = ("aten::detach", "aten::clone")
"""What makes a new gradient the parameter's where there was none."""


def accumulate_gradients(step: Workload, passes: int) -> tuple[Workload, str]:
    """The step with `passes` batches before its update; a step then has as many times the samples."""
    if step.mode != "training":
        raise TraincastError(f"'{step.name}' is a step of {step.mode}; gradients are accumulated in training")
    if "accumulation" in step.meta:
        raise TraincastError(f"'{step.name}' accumulates {step.meta['accumulation']} batches already")
    known: dict[int, Program] = {}
    programs = []
    for program in step.programs:
        key = id(program.columns)  # ranks that run the same ops share them and differ in their sizes
        made = known[key] = known[key] if key in known else _repeat_micro_batches(program, passes)
        programs.append(replace(program, symbolic=made.symbolic, names=made.names, columns=made.columns))
    edited = replace(step, programs=tuple(programs), meta={**step.meta, "accumulation": str(passes)})
    notes = f"a step is {passes} batches of {step.batch_size} samples and one update"
    notes += ", gradients are reduced in the last pass only" * (len(step.ranks) > 1)
    return edited, notes + "; tables that backward itself updates are updated in every pass" * _fuse_ops(
        step.programs[0]
    )


def _fuse_ops(program: Program) -> bool:
    """Whether backward updates embedding tables: it is given their weights then."""
    c = program.columns
    weights = c.storage_kind[c.tensor_storage[c.input_tensor]] == StorageKind.PARAMETER
    ops = np.unique(np.searchsorted(c.input_ptr, np.flatnonzero(weights), side="right") - 1)
    late = ops[program.op_phase[ops] == Phase.BACKWARD]
    return any("embedding" in program.symbolic[number].name for number in np.unique(c.op_signature[late]).tolist())


def _repeat_micro_batches(program: Program, passes: int) -> Program:
    editor = ProgramEditor(program)
    backward = [i for i, scope in enumerate(editor.scopes) if scope.phase == Phase.BACKWARD]
    if not backward:
        raise TraincastError("the step has no backward pass whose gradients could be accumulated")
    end = backward[-1] + 1
    once, rest = editor.scopes[:end], editor.scopes[end:]
    late = _find_reductions(editor, once)
    # DDP sends buffers before the first pass only: those after it follow a pass without a collective
    again = [scope for scope in once if not scope.name.startswith((_ZERO, _BROADCAST))]
    copies = [_Pass(editor, again) for _ in range(1, passes)]
    for before, copy in pairwise([once, *(copy.scopes for copy in copies)]):
        if copy[0].thread != before[-1].thread:
            copy[0].after = before[-1]
    for scope in rest:
        if scope.after is not None:
            scope.after = copies[-1].new.get(scope.after, scope.after)
    editor.scopes = [*once, *(scope for copy in copies for scope in copy.scopes), *rest]
    editor.drop_ops(late.union(copy.op[op] for copy in copies[:-1] for op in late if op in copy.op))
    return editor.build()


class _Pass:
    """One more pass: ops on tensors of its own, but for what outlives a pass. `op` and `new` are the ops and scopes of
    this pass by those that they are copies of."""

    def __init__(self, editor: ProgramEditor, scopes: Sequence[ScopeRow]) -> None:
        self.editor = editor
        self.tensors = TensorCopies(editor, lambda storage: editor.storages[storage].made)
        self.op: dict[OpRow, OpRow] = {}
        self.new: dict[ScopeRow, ScopeRow] = {}
        for scope in scopes:
            after = None if scope.after is None else self.new.get(scope.after)
            ops = [self._op(op, scope.name) for op in scope.ops]
            self.new[scope] = ScopeRow(scope.name, scope.phase, scope.thread, ops, after)
        self.scopes = list(self.new.values())

    def _op(self, op: OpRow, scope: str) -> OpRow:
        inputs = self.tensors.copy(op.inputs)
        name = op.signature.name
        if scope == ACCUMULATE_GRAD and name in _KEPT and self.editor.get_storage(op.outputs[0]).made:
            # there is a gradient already: the new one is added to it, and who reads it reads the sum
            grad, spec = op.outputs[0], op.signature.outputs[0]
            add = Signature("aten::add_", (spec, spec), (spec,), (("alpha", 1),), (("self", 1), ("other", 1)), "Tensor")
            copy = OpRow(add, (grad, inputs[0]), (grad,), op.module, op.stream)
            self.tensors.tensor[grad] = grad
        else:
            copy = OpRow(op.signature, inputs, self.tensors.copy(op.outputs), op.module, op.stream)
            copy.forward = None if op.forward is None else self.op.get(op.forward)
        self.op[op] = copy
        return copy


def _find_reductions(editor: ProgramEditor, scopes: Sequence[ScopeRow]) -> set[OpRow]:
    """Ops of these scopes that are left out without a collective of gradients."""
    ops = [op for scope in scopes for op in scope.ops]
    buckets = _find_buckets(editor, ops)
    _check_collectives(editor, scopes, buckets)
    found: set[OpRow] = set()
    events: set[int] = set()
    for place, op in enumerate(ops):
        if not any(editor.tensors[tensor] in buckets for tensor in (*op.inputs, *op.outputs)):
            continue
        found.add(op)
        if op.signature.name == _ALL_REDUCE:
            events |= _find_events(ops, place)
    waits = (op for op in ops if op.signature.name in (RECORD, WAIT) and op.signature.scalar("event") in events)
    return found.union(waits)


def _find_buckets(editor: ProgramEditor, ops: Sequence[OpRow]) -> set[int]:
    """Memory that is there before the step and is all-reduced in it."""
    reduced = [editor.tensors[op.inputs[0]] for op in ops if op.signature.name == _ALL_REDUCE]
    return {storage for storage in reduced if not editor.storages[storage].made}


def _find_events(ops: Sequence[OpRow], place: int) -> set[int]:
    """The events of a collective: one before it that its stream waits for, and one of its end."""
    around = [ops[n] for n in (place - 2, place + 1) if 0 <= n < len(ops)]
    found = [op.signature.scalar("event") for op in around if op.signature.name == RECORD]
    return {event for event in found if isinstance(event, int)}


def _check_collectives(editor: ProgramEditor, scopes: Sequence[ScopeRow], buckets: set[int]) -> None:
    """Rejects collectives of gradients that are no plain all-reduces of buckets."""
    for scope in scopes:
        for op in scope.ops:
            kind = op.signature.scalar("collective")
            if scope.phase == Phase.BACKWARD and kind == "reduce_scatter":
                raise TraincastError(
                    f"its ranks share gradients ({kind}), and whether each pass does so is a choice of the program; "
                    "capture the step with the passes you run"
                )
            copied = scope.name == ACCUMULATE_GRAD and op.signature.name in _COPIES
            into = {editor.tensors[tensor] for tensor in op.outputs if not editor.get_storage(tensor).made}
            if copied and not into <= buckets:
                raise TraincastError(
                    "its gradients are reduced by a hook of its own; capture the step with the passes you run"
                )


LISTS_SINCE = 2  # the PyTorch whose optimizers work on lists by default


def change_optimizer(step: Workload, optimizer: str) -> tuple[Workload, str]:
    """The step with another update of the parameters that have gradients."""
    if step.mode != "training":
        raise TraincastError(f"'{step.name}' is a step of {step.mode}; only training has an optimizer")
    if int(step.framework_version.partition(".")[0]) < LISTS_SINCE:
        raise TraincastError(f"'{step.name}' follows PyTorch {step.framework_version}; capture it with {optimizer}")
    bare = remove_phase(step, Phase.OPTIMIZER)
    programs = tuple(_replace_optimizer(program, optimizer) for program in bare.programs)
    notes = f"{TITLES[optimizer]} updates by lists of parameters (foreach), as PyTorch does by default"
    return replace(bare, programs=programs), notes


def _replace_optimizer(program: Program, optimizer: str) -> Program:
    try:
        gradients = [one.grad for one in find_gradients(program)]
    except TraincastError:  # a gradient of two tensors
        raise TraincastError(
            f"some of its gradients are sparse, which are not updated by lists; capture it with {optimizer}, or with "
            "dense gradients"
        ) from None
    if not gradients:
        raise TraincastError("the step accumulates no gradients that an optimizer could use")
    builder = InsertingBuilder(program, Communicator(0, (0,)))
    builder.insert_before(program.num_scopes)
    stepped = make_optimizer_state(builder, optimizer, _match_parameters(program, gradients))
    write_foreach_step(builder, optimizer, stepped, gradients)
    # what the training loop still held when the old optimizer was done, it holds until the new one is
    held = (program.columns.storage_alloc >= 0) & (program.columns.storage_free == program.num_ops - 1)
    for storage in np.flatnonzero(held).tolist():
        builder.insertion.free_storage(storage)
    backward = np.flatnonzero(program.columns.scope_phase == Phase.BACKWARD)
    builder.insertion.set_wait(program.num_scopes, int(backward[-1]))  # the first new scope
    built = builder.build_program()
    return replace(built, names=tuple(_rename_optimizer_scope(name, optimizer) for name in built.names))


def _rename_optimizer_scope(name: str, optimizer: str) -> str:
    if not name.startswith("Optimizer.zero_grad#"):
        return name
    return f"Optimizer.zero_grad#{TITLES[optimizer]}.zero_grad"


def _match_parameters(program: Program, gradients: list[Ref]) -> list[Ref]:
    """A parameter for every gradient: one of its size that no other gradient has."""
    c = program.columns
    by_size: dict[int, list[int]] = defaultdict(list)
    wanted = (c.storage_kind == StorageKind.PARAMETER) & ~program.storages.on_host
    tensor_of = {int(storage): tensor for tensor, storage in reversed(list(enumerate(c.tensor_storage.tolist())))}
    for storage in np.flatnonzero(wanted).tolist():
        if storage in tensor_of:
            by_size[int(program.storage_nbytes[storage])].append(storage)
    found = []
    for grad in gradients:
        alike = by_size[grad.spec.nbytes]
        if not alike:
            raise TraincastError("a gradient has no parameter of its size; capture the step with that optimizer")
        storage = alike.pop(0)
        found.append(Ref(tensor_of[storage], storage, grad.spec))
    return found


def update_by_lists(editor: ProgramEditor) -> None:
    """Joins the updates of single parameters that an optimizer is left with."""
    for scope in editor.scopes:
        if scope.phase != Phase.OPTIMIZER:
            continue
        single = [op for op in scope.ops if op.signature.name == "aten::add_" and len(op.inputs) == 2]
        if len(single) < 2 or len({(op.signature.scalars, op.stream) for op in single}) > 1:
            continue
        joined = _join_updates(single)
        scope.ops = [joined if op is single[0] else op for op in scope.ops if op not in single[1:]]
        for storage in editor.storages:  # what was held until one of them was done
            if any(storage.free is op for op in single):
                storage.free = joined


def _join_updates(single: list[OpRow]) -> OpRow:
    first, number = single[0], len(single)
    specs = tuple(op.signature.inputs[place] for place in (0, 1) for op in single)
    tensors = tuple(op.inputs[place] for place in (0, 1) for op in single)
    groups = (("self", number), ("other", number))
    signature = Signature("aten::_foreach_add_", specs, (), first.signature.scalars, groups, "List")
    return OpRow(signature, tensors, (), first.module, first.stream)
