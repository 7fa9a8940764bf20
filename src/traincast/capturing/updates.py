"""What a training loop does from one update to the next, and which of its updates make up its step."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from traincast.capturing.storages import StorageBook

_MOSTLY = 0.6  # share of the updates that makes one kind the usual one
_CHANCE = 0.1  # by which share of all sizes updates of the same ops may differ, and one stands for all
_AVERAGED = 8  # updates that stand for a loop whose updates never repeat
USUAL_WARM = 2  # updates before the recorded one: optimizers make their state in the first


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a step of a loop begins and ends: at calls of its optimizer, or (`by_backward`) at ends of backward passes;
    `warm` of them are let pass until the step is recorded (0: it begins when the optimizer is made)."""

    warm: int = USUAL_WARM
    by_backward: bool = False

    def describe(self) -> str:
        """What is to be said of them; "" for the usual ones."""
        if self.by_backward:
            return "no optimizer of torch.optim steps: a step is what runs from one backward pass to the next"
        if self.warm < USUAL_WARM:
            which = "first" if not self.warm else "second"
            return f"the loop ends after {self.warm + 1} updates: its {which} is the step, with what only that one does"
        return ""


@dataclass(slots=True)
class Update:
    """What runs between two calls of the optimizer that is followed.

    `names` and `forms` are hashes of its device ops, without and with their shapes, of which `elements` is the sum;
    `evaluations` counts forward passes of models in eval mode without gradients; `passes` are the backward passes that
    the update itself adds up; `batches` the sizes of what every model was given, by model and by where the first
    tensor is kept.
    """

    names: int = 0
    forms: int = 0
    ops: int = 0
    elements: int = 0
    evaluations: int = 0
    passes: int = 0
    optimizers: int = 0
    partial: bool = False  # a data loader gave fewer samples than its batches have
    batches: dict[int, dict[int, tuple[tuple[int, ...], ...]]] = field(default_factory=dict)

    @property
    def micro_batches(self) -> int:
        """Batches whose gradients the update adds up: backward passes, each of data of its own."""
        given = max((len(calls) for calls in self.batches.values()), default=self.passes)
        return max(1, min(self.passes, given))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what the model was given first; () where that is not known."""
        return next((shapes for calls in self.batches.values() for shapes in calls.values() if shapes), ())

    @property
    def batch(self) -> int:
        """The first dimension of the first tensor that a model was given; 0 where that is not known."""
        return self.shapes[0][0] if self.shapes else 0


class UpdateWatch:
    """Follows ops, models and backward passes; `current` is the update that is being watched."""

    def __init__(self, book: StorageBook) -> None:
        self.current = Update()
        self.watching = False
        self.check: Callable[[], None] | None = None  # called at every op: has it been long enough?
        self.after_backward: Callable[[], None] | None = None
        self.on_evaluation: Callable[[], None] | None = None  # a model in eval mode is called
        self._book = book
        self._passes = 0
        self._given_out: set[int] = set()  # what models have made, in this update or before: no data

    def start_update(self) -> Update:
        """Begins another update; gives the one that has ended."""
        ended, self.current = self.current, Update()
        return ended

    def note_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One op of the device; those of the host differ from batch to batch."""
        shapes = tuple([arg.shape for arg in args if isinstance(arg, torch.Tensor) and arg.is_meta])
        if not shapes and not _is_listed_on_device(args) and "device" not in kwargs:
            return
        update = self.current
        update.names = hash((update.names, func))
        update.forms = hash((update.forms, func, shapes))
        update.ops += 1
        update.elements += sum(map(math.prod, shapes))
        if self.check is not None:
            self.check()

    def note_model_call(self, model: Any) -> None:
        """A model is called that no other has called; what has no parameters prepares data or is a loss."""
        if next(model.parameters(), None) is None:
            return
        frame = sys._getframe(2)  # of PyTorch's call, which has the arguments by name too
        given = tree_iter((frame.f_locals.get("args", ()), frame.f_locals.get("kwargs", {})))
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
            return  # one of many samples that run at once
        if tensors and tensors[0].requires_grad:
            return  # made from data (a gradient penalty's), and no data
        if not torch.is_grad_enabled():
            self.current.evaluations += not model.training
            if self.on_evaluation is not None and not model.training:
                self.on_evaluation()
            return
        with torch._C.DisableTorchFunction():
            place = self._find_place(tensors[0]) if tensors else -1 - self._passes
            shapes = tuple([tuple(t.shape) for t in tensors if t.dim()])
        if place not in self._given_out:
            self.current.batches.setdefault(id(model), {}).setdefault(place, shapes)

    def note_model_result(self, result: Any) -> None:
        """What a model gives is no data for another."""
        with torch._C.DisableTorchFunction():
            self._given_out.update(self._find_place(t) for t in tree_iter(result) if isinstance(t, torch.Tensor))

    def _find_place(self, tensor: torch.Tensor) -> int:
        if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return id(tensor)
        return self._book.get_info(tensor).serial * (1 << 40) + int(tensor.storage_offset())

    def note_backward(self) -> None:
        """A backward pass has ended."""
        self._passes += 1
        if self.after_backward is not None:
            self.after_backward()

    def note_step(self, *, followed: bool) -> None:
        """An optimizer steps, the one that is followed or another."""
        self.current.optimizers += 1
        if followed:
            self.current.passes = self._passes
        self._passes = 0


def _is_listed_on_device(args: tuple[Any, ...]) -> bool:
    listed = args[0] if args and isinstance(args[0], list | tuple) else ()
    return any(isinstance(item, torch.Tensor) and item.is_meta for item in listed[:1])


@dataclass(frozen=True, slots=True)
class Choice:
    """Which updates the step is made of: as many as one cycle has, by the hashes of their ops; `notes` say what else
    was seen. Without `forms` any updates will do."""

    forms: tuple[int, ...]
    names: tuple[int, ...]
    notes: tuple[str, ...] = ()
    whole: bool = False  # what the model is given has the batch size among its sizes
    evaluates: bool = False  # it has an evaluation in it

    def accepts(self, updates: Sequence[Update], *, sizes: bool, batch: int = 0) -> bool:
        """Whether these updates are of the kind that was chosen, with their shapes or (`sizes` False) without, but
        with as many samples as the `batch` size has (0: any)."""
        if len(updates) != len(self.names):
            return False
        if not sizes and not self.whole and any(update.partial for update in updates):
            return False
        if not self.forms:
            return not any(update.evaluations for update in updates)
        if not sizes and batch and any(batch not in update.shapes[0] for update in updates if update.shapes):
            return False
        wanted = self.forms if sizes else self.names
        return tuple(u.forms if sizes else u.names for u in updates) == wanted


def choose_updates(seen: Sequence[Update]) -> Choice:
    """The step of a loop whose updates were watched one after the other: what they repeat.

    Updates with an evaluation that others do not have, or with fewer samples than others of the same ops, are left out
    and named. Those that repeat in a cycle are taken together; of others the kind that most of them are.
    """
    kept, notes = _leave_out(seen)
    forms = [update.forms for update in kept]
    found = find_cycle(forms)
    if found is not None:
        start, length = found
        cycle = kept[start : start + length]
        if length > 1:
            ops = ", ".join(str(update.ops) for update in cycle[:8]) + ", ..." * (length > 8)
            notes.append(
                f"a step is a cycle of {length} updates that differ ({ops} device ops): its time and samples are those "
                f"of {length} updates"
            )
        return Choice(tuple(u.forms for u in cycle), tuple(u.names for u in cycle), tuple(notes))
    usual, times = Counter(forms).most_common(1)[0]
    if times >= _MOSTLY * len(forms):
        others = len(forms) - times
        one = next(update for update in kept if update.forms == usual)
        ops = ", ".join(sorted({str(update.ops) for update in kept if update.forms != usual})[:4])
        notes.append(
            f"{others} of {len(forms)} updates watched run other work ({ops} device ops instead of {one.ops}), which "
            "is not in the step"
        )
        return Choice((usual,), (one.names,), tuple(notes))
    least, most = min(u.elements for u in kept), max(u.elements for u in kept)
    if len({update.names for update in kept}) == 1 and most <= least * (1 + _CHANCE):
        notes.append(
            f"samples differ from one update to the next (sizes by {most / max(1, least) - 1:.1%}): one is taken"
        )
        return Choice((), (kept[0].names,), tuple(notes))
    number = min(_AVERAGED, len(kept))
    low, high = min(u.ops for u in kept), max(u.ops for u in kept)
    notes.append(
        f"updates differ from one to the next ({low} to {high} device ops; random depths or sizes?): a step is "
        f"{number} updates in a row, its time and samples are those of {number} updates"
    )
    return Choice((), tuple(u.names for u in kept[:number]), tuple(notes))


def _leave_out(seen: Sequence[Update]) -> tuple[list[Update], list[str]]:
    """The updates that are whole and have no evaluation in them, and what is to be said of the others."""
    notes = []
    kept = list(seen)
    plain = [update for update in kept if not update.evaluations]
    if plain and len(plain) < len(kept):
        passes = max(update.evaluations for update in kept)
        notes.append(
            f"{len(kept) - len(plain)} of {len(kept)} updates watched have an evaluation before them ({passes} forward "
            "passes in eval mode without gradients), which is not in the step"
        )
        kept = plain
    most: dict[int, int] = {}
    for update in kept:
        most[update.names] = max(most.get(update.names, 0), update.batch)
    if len(kept) > 2 and len({update.batch for update in kept}) == len(kept):  # samples of different lengths
        whole = [update for update in kept if not update.partial] or kept
    else:
        whole = [update for update in kept if update.batch == most[update.names]]
    if len(whole) < len(kept):
        small = min(update.batch for update in kept)
        notes.append(
            f"{len(kept) - len(whole)} of {len(kept)} updates watched have fewer samples ({small} instead of "
            f"{max(most.values())}: the last batch of an epoch?), and are not in the step"
        )
    return whole, notes


def find_cycle(kinds: Sequence[int]) -> tuple[int, int] | None:
    """Where the shortest cycle that repeats to the end begins, and its length; None where nothing repeats."""
    number = len(kinds)
    if number == 1:
        return 0, 1
    found = [
        (start + length, start, length)
        for start in range(number // 2 + 1)
        for length in range(1, (number - start) // 2 + 1)
        if all(kinds[i] == kinds[i + length] for i in range(start, number - length))
    ]
    return min(found)[1:] if found else None


def compare_batch(update: Update, asked: int) -> tuple[int, Fraction, str]:
    """The batch size to go by, samples of an update for each of it, and what is to be said: what is `asked` for (0:
    nothing was said) beside what reaches the model."""
    shapes, batch, passes = update.shapes, update.batch, update.micro_batches
    share, said = Fraction(1), []
    given = [shape for calls in update.batches.values() for call in calls.values() for shape in call]
    seen = ", ".join(str(list(shape)) for shape in shapes[:3])
    if not asked:
        asked = batch or 1
        said.append(
            f"batch size {batch}: the first dimension of what the model is given; none was stated"
            if batch
            else "how many samples a batch has was neither stated nor seen: samples/s are batches/s"
        )
    elif shapes and not any(asked in shape for shape in given):
        alike = len({shape[0] for shape in shapes}) == 1
        if batch * passes == asked or (alike and batch < asked):
            share = Fraction(batch, asked)
        if batch * passes != asked:
            counted = int(asked * share)
            said.append(f"batch size {asked} is stated, and what reaches the model has {seen}: {counted} are counted")
    if passes > 1 and share * passes != 1:
        said.append(f"an update adds up gradients of {passes} batches of {int(asked * share)} samples")
    return asked, share * passes, "; ".join(said)
