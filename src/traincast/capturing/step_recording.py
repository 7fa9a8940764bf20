"""Recording the step of a loop: once, then watching whether later updates do the same, and again where they do not."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch

from traincast.capturing.assemble import StorageClassifier, assemble_program, insert_other_threads, list_host_scopes
from traincast.capturing.assumptions import get_assumptions
from traincast.capturing.errors import REJECTED
from traincast.capturing.host_work import HostClock, disable_collection, profile_host
from traincast.capturing.progress import keep_first_program
from traincast.capturing.recorder import Recorder
from traincast.capturing.regions import Regions
from traincast.capturing.updates import Choice, Update, choose_updates, compare_batch, find_cycle
from traincast.ir.program import Program
from traincast.ir.workload import SAMPLES_PER_BATCH, SEARCHED, UPDATES

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
