"""What a compiler makes of an eager step: chains of element-wise ops and row reductions as one kernel each; steps
replayed as CUDA graphs.

Follows what TorchInductor does in the large: GEMMs, convolutions, attention and lookups stay calls of their libraries;
element-wise ops, copies, softmax, layer norms and reductions that hand each other their results over the same elements
become one kernel, which reads what comes from outside and writes what is wanted outside. Views cost nothing and
constants are part of the kernels that use them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property

import numpy as np

from traincast.costs.kernels.contract import KernelCall
from traincast.costs.kernels.lower import lower
from traincast.costs.kernels.registry import ControlKind, Item, LoweringContext, count_real_bytes, make_lowering_context
from traincast.costs.kernels.rowwise import NORM, SOFTMAX
from traincast.costs.kernels.streaming import COPY, ELEMENTWISE, REDUCTION
from traincast.ir.compiled import LAUNCH, find_compiled_ops, find_scopes_in_phases, mark_compiled_model, mark_graphs
from traincast.ir.editor import ProgramEditor
from traincast.ir.ops import Phase, Signature, TensorSpec
from traincast.ir.program import Program
from traincast.ir.rows import OpRow, ScopeRow
from traincast.ir.workload import Workload, check_follows_tensors
from traincast.utils.arrays import BoolArray
from traincast.utils.errors import TraincastError

FUSED = "inductor::fused"
_SAID = (
    "compiled: chains of element-wise ops and row reductions run as one kernel each, as TorchInductor would fuse them; "
    "the host is given the time of an eager op for each of them, which is rather too long"
)
_STORED = (
    "what the forward pass keeps for backward is what an eager step keeps: which results a compiler computes again "
    "instead is not modelled"
)
FUSED_CHAINS = (
    "chains of element-wise ops run as one kernel each; what the backward pass needs is stored, nothing is computed "
    "again"
)
_ENGINE = 1  # the thread of the backward pass
_FUSING = frozenset(family.name for family in (ELEMENTWISE, COPY, SOFTMAX, REDUCTION))
_NORMS = frozenset({"layer_forward", "batch_inference"})


class _Role(Enum):
    FREE = auto()  # no work on the device
    CONSTANT = auto()  # writes what it was told
    FUSING = auto()
    CALL = auto()


@dataclass(frozen=True, slots=True)
class _Form:
    """How an op can be fused: the elements it goes through, and the rows it reduces them to (0: it reduces nothing)."""

    role: _Role
    elements: int = 0
    rows: int = 0


@dataclass(slots=True)
class _FusedOps:
    """Ops of one kernel; `closed` once an op outside has used a result."""

    elements: int
    rows: int
    members: list[int] = field(default_factory=list)
    closed: bool = False

    def takes(self, form: _Form) -> bool:
        """Whether an op that uses a result of the group can run inside of it."""
        if self.closed:
            return False
        if form.elements == self.elements:
            return not (form.rows and self.rows) or form.rows == self.rows
        return self.rows > 0 and form.elements == self.rows and not form.rows


def compile_step(workload: Workload, context: LoweringContext) -> Workload:
    """The workload as a compiler would run it: a step of inference whole, of training the model and its backward pass,
    as they are captured under `torch.compile(model)`."""
    if "compiled" in workload.meta:
        return workload
    check_follows_tensors(workload)
    if workload.mode != "inference":
        marked = tuple(mark_compiled_model(program) for program in workload.programs)
        return compile_regions(replace(workload, programs=marked), context)
    programs = tuple(_compile_program(program, context) for program in workload.programs)
    return replace(workload, programs=programs, meta={**workload.meta, "compiled": _SAID})


def compile_regions(workload: Workload, context: LoweringContext) -> Workload:
    """The workload with what its script compiled run as a compiler would run it; the rest stays as it is."""
    marked = [find_compiled_ops(program) for program in workload.programs]
    if "compiled" in workload.meta or not any(ops.any() for ops in marked):
        return workload
    programs = tuple(
        _compile_program(program, context, ops & (program.columns.op_stream == 0)) if ops.any() else program
        for program, ops in zip(workload.programs, marked, strict=True)
    )
    notes = _SAID if workload.mode == "inference" else f"{_SAID}; {_STORED}"
    return replace(workload, programs=programs, meta={**workload.meta, "compiled": notes})


def _compile_program(program: Program, context: LoweringContext, inside: BoolArray | None = None) -> Program:
    """The program with all its ops compiled, or those marked in `inside`. Memory lives from the first to the last op
    that touches it."""
    of_ops = _find_fusion_forms(program, context)
    if inside is not None:
        call = _Form(_Role.CALL)
        of_ops = [form if here else call for form, here in zip(of_ops, inside.tolist(), strict=True)]
    ops = _Ops(program, of_ops)
    editor = ProgramEditor(program)
    kernels, gone = ops.merge(editor, ops.groups())
    gone |= {editor.ops[op] for op, form in enumerate(ops.forms) if form.role is _Role.FREE or op in ops.folded}
    eager = set() if inside is None else {editor.ops[op] for op in np.flatnonzero(~inside).tolist()}
    editor.scopes = _split_scopes(editor.scopes, kernels, gone, eager)
    for row in editor.ops:
        row.forward = None
    for storage in editor.storages:
        storage.alloc = storage.free = None
    return editor.build()


def _split_scopes(scopes: list[ScopeRow], kernels: set[OpRow], gone: set[OpRow], eager: set[OpRow]) -> list[ScopeRow]:
    """A scope for every op that is not in `gone`: a fused kernel gives its own its name. Eager ops of one scope stay
    together, and so does what one node of the backward pass calls one after the other: the node is taken up once."""
    parted: list[ScopeRow] = []
    for scope in scopes:
        before: OpRow | None = None
        for op in (op for op in scope.ops if op not in gone):
            node = scope.thread == _ENGINE and op not in kernels and before not in kernels
            if before is not None and (node or (op in eager and before in eager)):
                parted[-1].ops.append(op)
            else:
                name = op.signature.name if op in kernels else scope.name
                after = parted[-1] if parted and parted[-1].thread != scope.thread else None
                parted.append(ScopeRow(name, scope.phase, scope.thread, [op], after))
            before = op
    return parted


def fuse_ops(step: Workload) -> tuple[Workload, str]:
    """The step with chains of element-wise ops and row reductions as one kernel each, none across two phases."""
    check_follows_tensors(step)
    context = make_lowering_context(step)
    programs = tuple(_fuse_ops(program, context) for program in step.programs)
    before, after = (sum(p.num_ops for p in ps) for ps in (step.programs, programs))
    if before == after:
        raise TraincastError(f"'{step.name}' has no chains of element-wise ops to fuse")
    return replace(step, programs=programs), FUSED_CHAINS


def _fuse_ops(program: Program, context: LoweringContext) -> Program:
    ops = _Ops(program, _find_fusion_forms(program, context), fold=False)
    editor = ProgramEditor(program)
    kernels, gone = ops.merge(editor, ops.groups(program.op_phase.tolist()))
    editor.drop_ops(gone)
    for scope in editor.scopes:
        if len(scope.ops) == 1 and scope.ops[0] in kernels:
            scope.name = FUSED + ("Backward" if scope.phase == Phase.BACKWARD else "")
    return editor.build()


def _find_fusion_forms(program: Program, context: LoweringContext) -> list[_Form]:
    """How each op can be fused."""
    forms = [_find_fusion_form(signature, lower(signature, context)) for signature in program.signatures]
    return [forms[s] for s in program.columns.op_signature.tolist()]


def _find_fusion_form(signature: Signature, items: tuple[Item, ...]) -> _Form:
    if not items:
        return _Form(_Role.FREE)
    calls = [item for item in items if isinstance(item, KernelCall)]
    if len(calls) < len(items) or not signature.outputs or not all(_can_fuse_kernel(call) for call in calls):
        return _Form(_Role.CALL)
    written = max(spec.numel for spec in signature.outputs)
    if not signature.inputs and calls[0].kind == "fill":
        return _Form(_Role.CONSTANT, written)
    first, read = calls[0], max((spec.numel for spec in signature.inputs), default=0)
    if first.family is REDUCTION:
        return _Form(_Role.FUSING, read, written)
    if first.family in (SOFTMAX, NORM) and first.kind != "batch_inference":
        return _Form(_Role.FUSING, written, int(first.values[first.family.fields.index("rows")]))
    return _Form(_Role.FUSING, written)


def _can_fuse_kernel(call: KernelCall) -> bool:
    return call.family.name in _FUSING or (call.family is NORM and call.kind in _NORMS)


class _Ops:
    """The ops of a program with what they read and write."""

    def __init__(self, program: Program, forms: list[_Form], *, fold: bool = True) -> None:
        self.program, self.forms, self.fold = program, forms, fold
        c = program.columns
        self.storage: list[int] = c.tensor_storage.tolist()
        spans = ((c.input_ptr.tolist(), c.input_tensor.tolist()), (c.output_ptr.tolist(), c.output_tensor.tolist()))
        self.reads, self.writes = (
            [flat[pointer[op] : pointer[op + 1]] for op in range(program.num_ops)] for pointer, flat in spans
        )
        self.readers: dict[int, list[int]] = defaultdict(list)  # by storage, ascending
        for op, tensors in enumerate(self.reads):
            if forms[op].role is not _Role.FREE:
                for storage in {self.storage[t] for t in tensors}:
                    self.readers[storage].append(op)

    def groups(self, apart: Sequence[int] = ()) -> list[_FusedOps]:
        """Which ops run together. Every group runs where its last op ran: an op joins those that made what it reads
        as long as nothing else has used their results, and (with `apart`, a number per op) those have its number."""
        group_of: dict[int, _FusedOps] = {}
        writer: dict[int, int] = {}
        groups: list[_FusedOps] = []
        for op, form in enumerate(self.forms):
            if form.role is _Role.FREE:
                continue
            sources = [writer[s] for s in map(self.storage.__getitem__, self.reads[op]) if s in writer]
            makers = {id(group_of[w]): group_of[w] for w in sources if w in group_of}
            near = [g for g in makers.values() if not apart or apart[g.members[-1]] == apart[op]]
            joined = [g for g in near if form.role is _Role.FUSING and g.takes(form)]
            for group in makers.values():
                group.closed = group.closed or not any(group is other for other in joined)
            if form.role is _Role.FUSING:
                merged_group = _FusedOps(form.elements, form.rows)
                merged_group.members = sorted([op, *(member for group in joined for member in group.members)])
                merged_group.elements = max(merged_group.elements, *(group.elements for group in joined), 0)
                merged_group.rows = max(merged_group.rows, *(group.rows for group in joined), 0)
                groups = [group for group in groups if not any(group is other for other in joined)] + [merged_group]
                group_of.update(dict.fromkeys(merged_group.members, merged_group))
            for tensor in self.writes[op]:
                writer[self.storage[tensor]] = op
        return groups

    @cached_property
    def folded(self) -> frozenset[int]:
        """Constants that only fused kernels use, which then hold them themselves."""
        if not self.fold:
            return frozenset()
        return frozenset(
            op
            for op, form in enumerate(self.forms)
            if form.role is _Role.CONSTANT
            and all(
                self.forms[user].role is _Role.FUSING
                for tensor in self.writes[op]
                for user in self.readers[self.storage[tensor]]
            )
        )

    def merge(self, editor: ProgramEditor, groups: Sequence[_FusedOps]) -> tuple[set[OpRow], set[OpRow]]:
        """Makes every group of two ops or more one kernel; gives the kernels and the ops that they stand for."""
        kernels: set[OpRow] = set()
        gone: set[OpRow] = set()
        for group in groups:
            if len(group.members) > 1:
                gone |= editor.merge_ops(group.members, *self._kernel(group))
                kernels.add(editor.ops[group.members[-1]])
        return kernels, gone

    def _kernel(self, group: _FusedOps) -> tuple[Signature, tuple[int, ...], tuple[int, ...]]:
        """The kernel of a group: what it reads from outside and what is wanted outside."""
        inside = set(group.members)
        inputs: dict[int, tuple[TensorSpec, TensorSpec]] = {}  # with symbolic and with plain sizes
        outputs: dict[int, TensorSpec] = {}
        known = {self.storage[tensor] for op in self.folded for tensor in self.writes[op]}
        for op in group.members:
            symbolic, plain = self._signatures(op)
            for tensor, specs in zip(self.reads[op], zip(symbolic.inputs, plain.inputs, strict=True), strict=True):
                if self.storage[tensor] not in known:
                    inputs[tensor] = specs
            for tensor, spec in zip(self.writes[op], symbolic.outputs, strict=True):
                known.add(self.storage[tensor])
                if self._wanted(self.storage[tensor], op, inside):
                    outputs[tensor] = spec
        reads = self._find_distinct_tensors({tensor: plain for tensor, (_, plain) in inputs.items()})
        names = " ".join(self._signatures(op)[0].name.removeprefix("aten::") for op in group.members)
        forms = tuple([inputs[tensor][0] for tensor in reads])
        return Signature(FUSED, forms, tuple(outputs.values()), (("ops", names),)), reads, tuple(outputs)

    def _signatures(self, op: int) -> tuple[Signature, Signature]:
        number = self.program.columns.op_signature[op]
        return self.program.symbolic[number], self.program.signatures[number]

    def _wanted(self, storage: int, op: int, inside: set[int]) -> bool:
        """Whether something after `op`, or after the step, uses what it wrote."""
        c = self.program.columns
        if c.storage_alloc[storage] < 0 or c.storage_free[storage] >= self.program.num_ops:
            return True
        return any(reader > op and reader not in inside for reader in self.readers[storage])

    def _find_distinct_tensors(self, inputs: dict[int, TensorSpec]) -> tuple[int, ...]:
        """The tensors read, as many of each storage as show all of it: others are the same memory in another form."""
        room = {self.storage[tensor]: int(self.program.storage_nbytes[self.storage[tensor]]) for tensor in inputs}
        reads = []
        for tensor in sorted(inputs, key=lambda tensor: -count_real_bytes(inputs[tensor])):
            if room[self.storage[tensor]] > 0:
                room[self.storage[tensor]] -= count_real_bytes(inputs[tensor])
                reads.append(tensor)
        return tuple(sorted(reads))


_HOLDS = (ControlKind.DEVICE_SYNCHRONIZE, ControlKind.STREAM_SYNCHRONIZE, ControlKind.EVENT_SYNCHRONIZE)
_SHOWN = 4  # ops that break graphs, by name


def apply_cuda_graphs(workload: Workload) -> tuple[Workload, str]:
    """The step with everything behind its inputs replayed as CUDA graphs, and what is to be said about that.

    Inputs are copied before, into tensors that stay. An op for which the host waits, or which copies to or from
    pageable memory, cannot be captured: it runs between two graphs.
    """
    context = make_lowering_context(workload)
    known: dict[int, Program] = {}
    programs, breaks, graphs = [], set(), 0
    for program in workload.programs:
        if id(program.columns) not in known:
            breaking = _find_breaking_ops(program, context)
            scopes = ~find_scopes_in_phases(program, Phase.INPUT)
            scopes[program.op_scope[breaking]] = False
            known[id(program.columns)] = mark_graphs(program, scopes)
            breaks |= {program.symbolic[s].name for s in program.columns.op_signature[breaking].tolist()}
        graph = known[id(program.columns)]
        programs.append(replace(program, names=graph.names, columns=graph.columns))
        launches = [name.startswith(LAUNCH) for name in graph.names]
        graphs = max(graphs, int(np.array(launches)[graph.columns.scope_name].sum()))
    notes = f"the step is replayed as {graphs} CUDA graph{'s'[: graphs != 1]}, its inputs are copied before"
    if breaks:
        shown = ", ".join(sorted(breaks)[:_SHOWN]) + (", ..." if len(breaks) > _SHOWN else "")
        notes += f"; the host waits in {shown}, which no graph can hold: make the step do without for a single graph"
    return replace(workload, programs=tuple(programs)), notes


def _find_breaking_ops(program: Program, context: LoweringContext) -> BoolArray:
    """Ops that cannot be captured, those of the inputs left out."""
    breaks = np.array([any(map(_breaks_graph, lower(s, context))) for s in program.signatures], dtype=np.bool_)
    inputs = find_scopes_in_phases(program, Phase.INPUT)[program.op_scope]
    return np.asarray(breaks[program.columns.op_signature] & ~inputs)


def _breaks_graph(item: Item) -> bool:
    if isinstance(item, KernelCall):
        return item.family.name == "memcpy" and item.kind.endswith("pageable")
    return item.kind in _HOLDS
