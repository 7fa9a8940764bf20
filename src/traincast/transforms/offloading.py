"""Activations in host memory: what the forward pass keeps for the backward pass is copied to the host once it was last
read, and back before it is wanted, as `torch.autograd.graph.save_on_cpu(pin_memory=True)` does."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from traincast.ir.editor import ProgramEditor, TensorCopies
from traincast.ir.ops import Phase, Signature, StorageKind, TensorSpec
from traincast.ir.program import Program
from traincast.ir.rows import OpRow, ScopeRow
from traincast.ir.workload import Workload, check_follows_tensors
from traincast.utils.errors import TraincastError

_FEWEST_BYTES = 1024
"""Of a tensor that is worth a copy (torchtune's `OffloadActivations`)."""
_EARLY = (Phase.INPUT, Phase.FORWARD, Phase.LOSS)


def offload_activations(step: Workload) -> tuple[Workload, str]:
    """The step with its activations in pinned host memory; copies are kernels of the stream that computes."""
    if step.mode != "training":
        raise TraincastError(f"'{step.name}' is a step of {step.mode}; only training keeps activations")
    check_follows_tensors(step)
    known = {id(program): _Offloading(program) for program in step.programs}
    programs = {key: one.run() for key, one in known.items()}
    count = max(one.count for one in known.values())
    if not count:
        raise TraincastError(f"'{step.name}' keeps nothing for its backward pass that is worth a copy")
    notes = f"{count} tensors wait in host memory for the backward pass; their copies overlap nothing"
    return replace(step, programs=tuple(programs[id(program)] for program in step.programs)), notes


@dataclass(eq=False, slots=True)
class _Kept:
    """What the forward pass keeps in one storage: the scopes in which it was last used before the backward pass and is
    first read there, and all ops that read it there."""

    made: OpRow
    spec: TensorSpec
    tensor: int
    last: ScopeRow
    first: ScopeRow | None = None
    readers: list[OpRow] = field(default_factory=list)


class _Offloading:
    """A program whose activations leave the device; `count` of them."""

    def __init__(self, program: Program) -> None:
        self.program, self.editor, self.count = program, ProgramEditor(program), 0
        self.before: dict[ScopeRow, list[ScopeRow]] = defaultdict(list)
        self.behind: dict[ScopeRow, list[ScopeRow]] = defaultdict(list)

    def run(self) -> Program:
        """The program with the copies."""
        for storage, kept in self._find_kept().items():
            self._offload(storage, kept)
        if not self.count:
            return self.program
        editor = self.editor
        editor.scopes = [
            row for scope in editor.scopes for row in (*self.before[scope], scope, *self.behind[scope])
        ]  # fmt: skip
        return editor.build()

    def _find_kept(self) -> dict[int, _Kept]:
        """What backward reads and nothing else after the forward pass, by storage."""
        editor, values, found, other = self.editor, self.program.size_values, dict[int, _Kept](), set[int]()
        for scope in editor.scopes:
            for op in scope.ops:
                if scope.phase in _EARLY:
                    for tensor, spec in zip(op.outputs, op.signature.outputs, strict=True):
                        row, storage = editor.get_storage(tensor), editor.tensors[tensor]
                        if row.alloc is op and row.kind == StorageKind.ACTIVATION and not row.lasts:
                            found.setdefault(storage, _Kept(op, spec, tensor, scope))
                touched = {editor.tensors[tensor] for tensor in (*op.inputs, *op.outputs)}
                for storage in touched & found.keys():
                    kept = found[storage]
                    if scope.phase in _EARLY:
                        kept.last = scope
                    elif scope.phase == Phase.BACKWARD:
                        kept.first = kept.first or scope
                        kept.readers.append(op)
                    else:
                        other.add(storage)
        return {
            storage: kept for storage, kept in found.items()
            if kept.first is not None and storage not in other and kept.spec.device == "cuda"
            and values[editor.storages[storage].size] >= _FEWEST_BYTES
        }  # fmt: skip

    def _offload(self, storage: int, kept: _Kept) -> None:
        editor, made = self.editor, kept.made
        assert kept.first is not None
        old = editor.storages[storage]
        copies = TensorCopies(editor, {storage}.__contains__)
        for op in kept.readers:
            op.inputs, op.outputs = copies.copy(op.inputs), copies.copy(op.outputs)
        returned = editor.add_view(copies.storage[storage])
        hosted = editor.add_tensor(old.size, StorageKind.ACTIVATION)
        there = replace(kept.spec, device="cpu:pinned")
        self.behind[kept.last].append(ScopeRow("aten::_to_copy", kept.last.phase, kept.last.thread, [
            OpRow(_make_copy(kept.spec, there), (kept.tensor,), (hosted,), made.module, made.stream)
        ]))  # fmt: skip
        first = kept.first
        self.before[first].append(ScopeRow("aten::_to_copy", first.phase, first.thread, [
            OpRow(_make_copy(there, kept.spec), (hosted,), (returned,), made.module, made.stream)
        ]))  # fmt: skip
        old.free = None
        self.count += 1


def _make_copy(source: TensorSpec, target: TensorSpec) -> Signature:
    return Signature("aten::_to_copy", (source,), (target,), (("non_blocking", True),), (("self", 1),))
