"""Recording the step of a loop until later updates do the same, and from what was seen to a `Program`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_iter

from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.errors import REJECTED
from traincast.capturing.host_work import HostClock, disable_collection, profile_host
from traincast.capturing.rebatch import keep_first_program
from traincast.capturing.recorder import CONTROL_MARK, OP_MARK, UNRECORDED, RawOp, Recorder, get_original_name
from traincast.capturing.regions import Regions
from traincast.capturing.storages import StorageBook, list_strided_parts
from traincast.capturing.updates import Choice, Update, choose_updates, compare_batch, find_cycle
from traincast.ir.builder import ProgramBuilder
from traincast.ir.ops import Phase, StorageKind
from traincast.ir.program import Program
from traincast.ir.workload import SAMPLES_PER_BATCH, SEARCHED, UPDATES
from traincast.utils.errors import TraincastError

_ENGINE = "autograd::engine::evaluate_function: "
_DISPATCHED = "PythonDispatchMode"
# Composites that add into their own intermediate result, except while a mode is watching.
_ADD_INTO = ("aten::linear", "aten::_scaled_dot_product_attention_math")
_LOSSES = ("_loss", "cross_entropy", "cross_entropy_with_logits", "kl_div")


@dataclass(slots=True)
class HostScope:
    """A top-level host op of the profiler and the recorded ops inside it.

    `sums` are additions that the engine writes into their first input if nobody else holds it, `into` those
    that a composite always writes there.
    """

    name: str
    backward: bool
    ops: list[int] = field(default_factory=list)
    sums: set[int] = field(default_factory=set)
    into: set[int] = field(default_factory=set)


def list_host_scopes(tree: Iterable[Any]) -> list[HostScope]:
    """The top-level events of a profiler's tree, in order, with the ops marked inside them.

    A mark that no dispatcher call surrounds belongs to a detach that autograd makes only because a mode is
    watching; a run without one does not have it.
    """
    scopes = []
    for event in sorted(tree, key=lambda e: e.start_time_ns):
        if event.name == UNRECORDED:
            continue
        backward = event.name.startswith(_ENGINE)
        scope = HostScope(get_original_name(event.name.removeprefix(_ENGINE)), backward)
        _collect_ops(event, scope)
        scope.ops.sort()
        if scope.ops or not event.name.startswith((_DISPATCHED, OP_MARK, CONTROL_MARK)):
            scopes.append(scope)
    return scopes


def _collect_ops(event: Any, scope: HostScope) -> None:
    """Adds the ops marked inside an event to the scope, and notes which additions are in place without a mode."""
    for child in event.children:
        if child.name.startswith(CONTROL_MARK):
            scope.ops.append(int(child.name.removeprefix(CONTROL_MARK)))
        elif child.name.startswith(OP_MARK) and event.name == _DISPATCHED:
            scope.ops.append(int(child.name.removeprefix(OP_MARK)))
        before = len(scope.ops)
        _collect_ops(child, scope)
        if child.name == "aten::add" and event.name.startswith(_ENGINE):
            scope.sums.update(scope.ops[before:])
        elif child.name == "aten::add" and event.name in _ADD_INTO:
            scope.into.update(scope.ops[before:])


def insert_other_threads(scopes: list[HostScope], ops: list[RawOp], elsewhere: list[int]) -> list[HostScope]:
    """The scopes with one for every op of another thread, before those of later ops."""
    seen = {index for scope in scopes for index in scope.ops}
    for index in elsewhere:
        if index not in seen:
            place = next((i for i, s in enumerate(scopes) if s.ops and s.ops[0] > index), len(scopes))
            scopes.insert(place, HostScope(ops[index].signature.name, backward=False, ops=[index]))
    return scopes


def assemble_program(
    ops: list[RawOp], book: StorageBook, scopes: list[HostScope], *, batch_size: int, seq_len: int
) -> Program:
    """The program of a recorded step."""
    kept = [index for scope in scopes for index in scope.ops]
    _check_complete(ops, kept)
    sums = {i for scope in scopes for i in scope.into | {j for j in scope.sums if ops[j].reuses_first}}
    ops = _sum_in_place(ops, book, sums)
    builder = ProgramBuilder(batch_size=batch_size, seq_len=seq_len)
    _add_storages(builder, book, np.cumsum(np.bincount(kept, minlength=len(ops) + 1)) - 1)
    number: dict[int, int] = {}
    thread = 0
    for scope, phase in zip(scopes, _find_phases(ops, scopes), strict=True):
        on_engine = scope.backward or (thread == 1 and _is_in_backward(ops, scope))
        changed = int(on_engine) != thread
        thread = int(on_engine)
        builder.open_scope(scope.name, phase, thread=thread, after=builder.num_scopes - 1 if changed else -1)
        for index in scope.ops:
            op = ops[index]
            number[index] = builder.add_op(
                op.signature, op.inputs, op.outputs,
                module=op.module, forward=number.get(op.forward, -1), stream=op.stream,
            )  # fmt: skip
    return builder.build_program()


def _is_in_backward(ops: list[RawOp], scope: HostScope) -> bool:
    """Whether a scope after an autograd node's is the engine's as well: callbacks at the end of backward run on its
    thread."""
    return bool(scope.ops) and all(ops[i].phase == Phase.BACKWARD for i in scope.ops)


def _check_complete(ops: list[RawOp], kept: list[int]) -> None:
    """Nothing but autograd's extra detaches may be missing from the profiler's tree."""
    missing = sorted(set(range(len(ops))) - set(kept))
    lost = next((ops[i].signature.name for i in missing if ops[i].signature.name != "aten::detach"), None)
    if lost is not None or len(kept) != len(set(kept)):
        raise TraincastError(
            f"op {lost or ops[0].signature.name} was not seen by PyTorch's profiler; is another running?"
        )


def _sum_in_place(ops: list[RawOp], book: StorageBook, sums: set[int]) -> list[RawOp]:
    """The ops with these additions written into their first input, as they are when no mode is watching."""
    same: dict[int, int] = {}  # tensor that was made -> tensor that is written to
    changed: list[RawOp] = []
    for index, op in enumerate(ops):
        op = replace(op, inputs=tuple(same.get(t, t) for t in op.inputs))
        if index in sums:
            made, target = op.outputs[0], op.inputs[0]
            same[made] = target
            book.merge_storages(made, target)
            signature = replace(op.signature, name="aten::add_", outputs=op.signature.inputs[:1])
            op = replace(op, signature=signature, outputs=(target,))
        changed.append(op)
    return changed


def _add_storages(builder: ProgramBuilder, book: StorageBook, place: Any) -> None:
    """Storages and tensors; `place` gives for each op seen the last op kept up to it."""
    number: dict[int, int] = {}
    used = {book.find_merged(storage) for storage in book.tensor_storage}
    aside = 0  # bytes that only are there: samples kept one by one, as many as a batch has
    for info in book.recorded:
        # What is on the host and no op touches is no part of the step: modules make such tensors when first imported.
        if info.merged_into is not None or (info.device != "cuda" and info.index not in used):
            continue
        # Host memory is not the device's: it takes no device bytes. Nor does what the step leaves on `meta`.
        held = info.device == "cuda" and not (info.hollow and info.index not in used)
        if info.index not in used and not held:
            continue
        if info.index not in used and info.kind == StorageKind.INPUT and info.alloc < 0 and info.free is None:
            aside += info.nbytes
            continue
        number[info.index] = builder.add_storage(info.nbytes if held else 0, info.kind)
        alloc = -1 if info.alloc < 0 else int(place[info.alloc])
        free = None if info.free is None else max(int(place[info.free]) if info.free >= 0 else -1, alloc, 0)
        builder.set_lifetime(number[info.index], alloc, free)
    if aside:
        builder.set_lifetime(builder.add_storage(aside, StorageKind.INPUT), -1, None)
    for storage in book.tensor_storage:
        builder.add_tensor(number[book.find_merged(storage)])


def _find_phases(ops: list[RawOp], scopes: list[HostScope]) -> list[Phase]:
    phases: list[Phase] = []
    current = Phase.FORWARD
    for scope in scopes:
        if scope.name.startswith(("Optimizer.zero_grad#", "cuda::")):
            phases.append(Phase.OTHER)
            continue
        if scope.backward:
            current = Phase.BACKWARD
        elif scope.name.startswith("Optimizer.step#"):
            current = Phase.OPTIMIZER
        elif scope.ops:
            # the events that order a collective come before it
            current = next((p for i in scope.ops if (p := ops[i].phase) != Phase.OTHER), ops[scope.ops[0]].phase)
            if current == Phase.FORWARD and scope.name.endswith(_LOSSES):
                current = Phase.LOSS
        elif current == Phase.OPTIMIZER:
            current = Phase.OTHER
        phases.append(current)
    return phases


class StorageClassifier:
    """Classifies the storages of a book by the modules and optimizers the step was seen to use."""

    def __init__(self, book: StorageBook, regions: Regions) -> None:
        self._book = book
        self._regions = regions

    def classify_before_step(self) -> None:
        """After the warm-up: whatever is alive and is nothing else is an input."""
        for info in self._book.live.values():
            info.kind = StorageKind.INPUT
        self._classify_storages()
        self._regions.on_optimizer = self._classify_storages

    def classify_after_step(self) -> None:
        """After the recorded step: gradients and optimizer state it made."""
        self._classify_storages()

    def _classify_storages(self) -> None:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # looking is no op of the step
            self._classify_all()

    def _classify_all(self) -> None:
        for root in self._regions.roots:
            for buffer in root.buffers():
                self._mark_storage(buffer, StorageKind.BUFFER)
            for parameter in root.parameters():
                self._mark_parameter(parameter)
        for bucket in (reference() for reference in self._regions.buckets):
            if bucket is not None:
                self._mark_storage(bucket, StorageKind.GRADIENT)
        for optimizer in self._regions.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._mark_parameter(parameter)
            self._mark_all(optimizer.state, StorageKind.OPTIMIZER_STATE)

    def _mark_parameter(self, parameter: torch.Tensor) -> None:
        self._mark_storage(parameter, StorageKind.PARAMETER)
        if parameter.grad is not None:
            self._mark_storage(parameter.grad, StorageKind.GRADIENT)

    def _mark_all(self, state: Any, kind: StorageKind) -> None:
        for per_parameter in state.values():
            for value in tree_iter(per_parameter):
                if isinstance(value, torch.Tensor):
                    self._mark_storage(value, kind)

    def _mark_storage(self, tensor: torch.Tensor, kind: StorageKind) -> None:
        for part in list_strided_parts(getattr(tensor, "_local_tensor", tensor)):  # a DTensor is a shard in a wrapper
            info = self._book.live.get(part.untyped_storage()._cdata)
            if info is not None:
                info.kind = kind


_ALIKE, _MOST = 24, 64  # updates watched where all are alike, and where they are not
_SECONDS, _MORE_SECONDS = 1.0, 6.0  # for which they are watched, likewise
_LEAST = 2  # updates that are compared with the recorded one at least
_TRIES_AFTER_OTHERS = 8  # recordings until one may follow an update of another kind
_TRIES = 24  # recordings until one is of the kind that was chosen


class RecordedSignal(BaseException):
    """Ends the user's loop: its step is recorded. No `except Exception` of the loop may hold it up."""


class StepRecording:
    """Records what is between the boundaries that `pass_boundary` is told of.

    The first run records one update, watches those that follow, and decides which of them are the step
    (`Assumptions.steps`, by rank); runs at other sizes record updates of the same kind.
    """

    def __init__(
        self, recorder: Recorder, regions: Regions, batch: int, length: int, *, rank: int = 0, alone: bool = True,
        of_loop: bool = False,
    ) -> None:  # fmt: skip
        self.program: Program | None = None
        self._recorder, self._regions, self._sizes = recorder, regions, (batch, length)
        self._rank, self._alone, self._of_loop = rank, alone, of_loop
        self._choice: Choice | None = get_assumptions().steps.get(rank)
        self._first = self._choice is None
        self._open = ExitStack()
        self._profiler: Any = None
        self._kinds: StorageClassifier | None = None
        self._recorded: list[Update] = []  # of the recording that runs or has ended last
        self._kept: list[Update] = []  # of the program
        self._before: list[Update] | None = None  # the update before the one that is recorded, where it was watched
        self._watched: list[Update] = []
        self._since = 0.0
        self._tries = 0
        self._clock = HostClock(recorder)

    def close(self) -> None:
        """Ends a recording that the user's code has left."""
        self._open.close()
        get_assumptions().in_step = False

    def pass_boundary(self) -> None:
        """An update has ended; raises `RecordedSignal` when the step is recorded."""
        watch = self._recorder.watch
        ended = watch.start_update()
        if not watch.watching:
            watch.watching = True
            self._begin_recording()
        elif self._recorder.book.recording:
            self._recorded.append(ended)
            if len(self._recorded) == (len(self._choice.names) if self._choice else 1):
                self._end_recording()
        else:
            self._watched.append(ended)
            if self._choice is not None:
                self._begin_recording()  # one update was left out, so that another of a cycle is the first
            elif self._has_seen_enough():
                self.settle()

    def settle(self) -> None:
        """Decides which updates are the step from those seen; raises `RecordedSignal` if they are recorded."""
        self._recorder.watch.check = None
        seen = [*self._kept, *self._watched]
        self._choice = choose_updates(seen)
        self._before = seen[-1:]
        if self._choice.accepts(self._recorded, sizes=True):
            self._finish()
        self._begin_recording()

    def _has_seen_enough(self) -> bool:
        forms = [update.forms for update in (*self._kept, *self._watched)]
        seconds, alike = time.perf_counter() - self._since, len(set(forms)) == 1
        if len(self._watched) < _LEAST and seconds < _MORE_SECONDS:
            return False
        if not self._alone or seconds > (_SECONDS if alike else _MORE_SECONDS) or len(forms) >= _MOST:
            return True
        cycle = find_cycle(forms)
        return len(forms) >= (_ALIKE if alike or cycle is None else 3 * sum(cycle))

    def _check_time(self) -> None:
        """Between updates: an evaluation that takes long is not waited for."""
        if time.perf_counter() - self._since > _MORE_SECONDS and not self._regions.in_backward:
            unfinished = self._recorder.watch.current
            if unfinished.evaluations:
                get_assumptions().note_once(
                    "after some updates the script evaluates (forward passes in eval mode without gradients), which is "
                    "not in the step"
                )
            self._recorder.watch.check = None
            self._choice = choose_updates([*self._kept, *self._watched])
            self._finish()

    def _begin_recording(self) -> None:
        self._recorded = []
        self._kinds = StorageClassifier(self._recorder.book, self._regions)
        self._regions.reset_position()
        stated = get_assumptions()
        stated.begin_step()
        self._kinds.classify_before_step()
        self._open.enter_context(disable_collection())
        self._recorder.start_recording()
        REJECTED.clear()
        stated.in_step = True
        if self._choice is not None and not (self._first or self._choice.evaluates):
            self._recorder.watch.on_evaluation = self._leave_step
        if torch.backends.cudnn.benchmark:
            stated.meta[SEARCHED] = "1"
        self._profiler = self._open.enter_context(profile_host())
        self._clock.start()

    @staticmethod
    def _leave_step() -> None:
        """An evaluation begins, which the step has not: this update is another, and may read what it will."""
        get_assumptions().in_step = False

    def _end_recording(self) -> None:
        self._clock.stop()
        self._open.close()
        self._recorder.book.stop_recording()
        get_assumptions().in_step = False
        if REJECTED:
            raise REJECTED[0]
        assert self._kinds is not None
        self._kinds.classify_after_step()
        self._tries += 1
        if not self._recorder.ops:
            raise RecordedSignal
        if self._choice is None:
            self._assemble()
            if self.program is not None:
                keep_first_program(replace(self.program, batch_size=self._sizes[0] or self._kept[0].batch or 1))
            self._since = time.perf_counter()
            self._recorder.watch.check = self._check_time
            return
        if self._is_wanted(self._choice) or self._tries >= _TRIES:
            self._assemble()
            self._finish()
        if len(self._choice.names) == 1:
            self._begin_recording()

    def _is_wanted(self, choice: Choice) -> bool:
        """Whether what was recorded is of the kind that was chosen, and so (if it can be) what ran before it: its
        tensors may still be there."""
        batch = self._sizes[0] if choice.whole else 0
        wanted = choice.accepts(self._recorded, sizes=self._first, batch=batch)
        before, self._before = self._before, self._recorded
        if not wanted or len(choice.names) > 1 or before is None or self._tries > _TRIES_AFTER_OTHERS:
            return wanted
        return choice.accepts(before, sizes=self._first, batch=batch)

    def _assemble(self) -> None:
        self._kept = self._recorded
        scopes = list_host_scopes(self._profiler.kineto_results.experimental_event_tree())
        scopes = insert_other_threads(scopes, self._recorder.ops, self._recorder.elsewhere)
        self.program = assemble_program(
            self._recorder.ops, self._recorder.book, scopes, batch_size=self._sizes[0], seq_len=self._sizes[1]
        )

    def finish_early(self) -> None:
        """The user's loop has ended, or failed, after its step was recorded."""
        self.close()
        if self._first and self.program is not None:
            choice = self._choice or choose_updates([*self._kept, *self._watched])
            if not choice.accepts(self._kept, sizes=True):
                get_assumptions().note_once(
                    "the loop ended before its usual updates could be recorded: this is another"
                )
                names = tuple(update.names for update in self._kept)
                choice = replace(choice, forms=names, names=names)
            self._choice = choice
            self._keep_choice()

    def _finish(self) -> None:
        self._keep_choice()
        raise RecordedSignal

    def _keep_choice(self) -> None:
        """Leaves for other sizes what was chosen, and says what holds of it."""
        stated = get_assumptions()
        if not self._first or self._choice is None:
            return
        self._first = False
        size = self._sizes[0]
        whole = all(not update.shapes or size in update.shapes[0] for update in self._kept)
        evaluates = any(update.evaluations for update in self._kept)
        stated.steps[self._rank] = replace(self._choice, whole=whole, evaluates=evaluates)
        for note in self._choice.notes:
            stated.note_once(note)
        for note in self._clock.describe(len(self._kept)):
            stated.note_once(note)
        updates = len(self._kept)
        batch, share, text = compare_batch(self._kept[0], self._sizes[0] or stated.batch or 0)
        stated.batch = stated.batch or batch
        if text and (self._of_loop or share != 1):
            stated.note_once(text)
        if updates > 1:
            stated.meta[UPDATES] = str(updates)
        if share * updates != 1:
            stated.meta[SAMPLES_PER_BATCH] = str(Fraction(share * updates))
