"""Activation checkpointing: what chosen modules keep for the backward pass is computed again there instead."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from traincast.ir.editor import ProgramEditor, TensorCopies
from traincast.ir.ops import Phase
from traincast.ir.program import Program
from traincast.ir.rows import OpRow, ScopeRow
from traincast.ir.workload import Workload, check_follows_tensors
from traincast.utils.errors import TraincastError, shorten_value

LAYERS = "layers"
_ANY = "*"


def checkpoint_layers(step: Workload, modules: str) -> tuple[Workload, str]:
    """The step with `torch.utils.checkpoint` (not re-entrant) around every module whose path fits a pattern such as
    `*.layers.*`, or around each repeated layer ("layers", "*")."""
    if step.mode != "training":
        raise TraincastError(f"'{step.name}' is a step of {step.mode}; only training keeps activations")
    if len(step.ranks) > 1:
        raise TraincastError(f"'{step.name}' runs on {len(step.ranks)} GPUs; checkpoint its step on one GPU")
    check_follows_tensors(step)
    names = sorted({name for program in step.programs for name in _list_forward_modules(program)})
    chosen = (
        _find_layer_modules(names, step.name) if modules in (LAYERS, _ANY) else _find_matching_modules(names, modules)
    )
    programs = tuple(_Checkpointing(program, chosen).run() for program in step.programs)
    if all(new is old for new, old in zip(programs, step.programs, strict=True)):
        raise TraincastError(f"{chosen[0]} and the like keep nothing for the backward pass")
    notes = f"{len(chosen)} modules ({chosen[0]} to {chosen[-1]}) compute their activations again in the backward pass"
    return replace(step, programs=programs), notes


def _list_forward_modules(program: Program) -> list[str]:
    """Paths of the modules of the forward pass, their parents included."""
    forward = program.columns.op_module[(program.op_phase == Phase.FORWARD) | (program.op_phase == Phase.LOSS)]
    found = set()
    for index in set(forward.tolist()):
        parts = program.names[index].split(".")
        found |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return [path for path in found if path]


def _find_matching_modules(names: list[str], pattern: str) -> list[str]:
    """The outermost modules that a pattern names; a `*` stands for one part of a path at least."""
    fit = [name for name in names if fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")]
    fit = fit or [name for name in names if fnmatchcase(name, pattern)]
    outer = [name for name in fit if not any(name.startswith(f"{other}.") for other in fit)]
    if not outer:
        raise TraincastError(
            f"no module fits {shorten_value(pattern)}; the step has "
            f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        )
    return _sort_modules(outer)


def _find_layer_modules(names: list[str], step: str) -> list[str]:
    """The layers of the longest list of modules that have modules inside."""
    lists: dict[str, list[str]] = defaultdict(list)
    for name in names:
        parent, _, last = name.rpartition(".")
        if last.isdecimal() and any(other.startswith(f"{name}.") for other in names):
            lists[parent].append(name)
    several = {parent: found for parent, found in lists.items() if len(found) > 1}
    outer = {
        parent: found
        for parent, found in several.items()
        if not any(parent.startswith(f"{other}.") for other in several)
    }
    if not outer:
        raise TraincastError(f"'{step}' has no repeated layers of modules; name modules: checkpoint=*.encoder")
    return _sort_modules(max(outer.values(), key=len))


def _sort_modules(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: [(part.isdecimal(), int(part) if part.isdecimal() else 0, part)
                                           for part in name.split(".")])  # fmt: skip


@dataclass(eq=False, slots=True)
class _Region:
    """One run of a module: its forward ops, and backward ops with what they read of the forward pass."""

    ops: list[OpRow] = field(default_factory=list)
    readers: list[tuple[ScopeRow, OpRow]] = field(default_factory=list)


class _Checkpointing:
    """A program whose modules are computed again; `run` gives it, or the program as it was."""

    def __init__(self, program: Program, modules: list[str]) -> None:
        self.program, self.editor = program, ProgramEditor(program)
        self.module = {
            number: module
            for number, name in enumerate(program.names)
            for module in modules
            if name == module or name.startswith(f"{module}.")
        }
        scopes = self.editor.scopes
        self.backward = {op for scope in scopes if scope.phase == Phase.BACKWARD for op in scope.ops}

    def run(self) -> Program:
        """The program with its regions computed again."""
        regions = self._regions()
        for region in regions:
            if region.readers:
                self._recompute_region(region)
        return self.editor.build() if any(region.readers for region in regions) else self.program

    def _regions(self) -> list[_Region]:
        regions: list[_Region] = []
        of: dict[OpRow, _Region] = {}
        last = ""
        made: set[int] = set()
        for scope in self.editor.scopes:
            if scope.phase == Phase.BACKWARD:
                last = ""
                for op in scope.ops:
                    region = None if op.forward is None else of.get(op.forward)
                    if region is not None and any(tensor not in made for tensor in op.inputs):
                        region.readers.append((scope, op))
                made |= {tensor for op in scope.ops for tensor in op.outputs}
                continue
            for op in scope.ops if scope.phase in (Phase.FORWARD, Phase.LOSS) else ():
                module = self.module.get(op.module, "")
                if module and module != last:
                    regions.append(_Region())
                if module:
                    regions[-1].ops.append(op)
                    of[op] = regions[-1]
                last = module
        return regions

    def _recompute_region(self, region: _Region) -> None:
        """Puts the ops of a region, as far as something was kept, before the first that reads what was kept."""
        editor = self.editor
        kept = {op.forward for _, op in region.readers}
        last = max(number for number, op in enumerate(region.ops) if op in kept)
        ops = region.ops[: last + self._keeps_result(region, region.ops[last])]
        ran = set(ops)
        own = {n for n, row in enumerate(editor.storages) if row.made and row.alloc in ran}
        copies = TensorCopies(editor, own.__contains__)
        again = [
            OpRow(op.signature, copies.copy(op.inputs), copies.copy(op.outputs), op.module, op.stream) for op in ops
        ]
        scope = region.readers[0][0]
        scope.ops[:0] = again
        for _, op in region.readers:
            op.inputs = copies.copy(op.inputs)
            for tensor in op.outputs:  # a view of what was kept
                editor.tensors[tensor] = copies.storage.get(editor.tensors[tensor], editor.tensors[tensor])
        for old, new in copies.storage.items():
            before, after = editor.storages[old], editor.storages[new]
            if before.free in self.backward and not before.lasts:
                before.free, after.free = None, before.free

    def _keeps_result(self, region: _Region, last: OpRow) -> bool:
        """Whether an op kept what it gave: one that only kept what it was given need not run again, as the second run
        ends when all is there that was kept."""
        made = {self.editor.tensors[tensor] for tensor in last.outputs}
        return any(
            op.forward is last and any(self.editor.tensors[tensor] in made for tensor in op.inputs)
            for _, op in region.readers
        )
