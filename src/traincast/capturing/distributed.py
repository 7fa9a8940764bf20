"""Capturing one step on many ranks, in one process and without a GPU."""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial

from traincast.capturing.assumptions import Assume, get_assumptions, use_assumptions
from traincast.capturing.global_state import list_tf32_arithmetic
from traincast.capturing.messages import ObjectMessages, RankNotCapturedError
from traincast.capturing.metadata_cache import share_metadata_cache
from traincast.capturing.ranks import Place
from traincast.capturing.rebatch import fix_sizes, rebatch_programs
from traincast.capturing.step import (
    ONE_SIZE,
    Step,
    adapt_to_sizes,
    capture_program,
    check_request,
    freeze_existing_objects,
)
from traincast.ir.collectives import COLLECTIVES, Route
from traincast.ir.generalise import have_same_structure
from traincast.ir.program import Columns, Program
from traincast.ir.workload import DEFAULT_FRAMEWORK, Workload
from traincast.utils.errors import TraincastError

One = Callable[[int, int, Place], Program]
"""Captures one rank at a batch size and a sequence length."""
MAX_WORLD_SIZE = 1 << 16  # a limit beyond any cluster
_ROUNDS = 8  # of captures until ranks agree on the numbers that they send each other
_AS_OWN = "the numbers that other ranks send here are taken to be those that this one sends"


def capture_distributed(
    make_step: Callable[..., Step],
    *,
    world_size: int,
    batch_size: int,
    name: str,
    seq_len: int | None = None,
    mode: str = "training",
    rebatch: bool = True,
    framework_version: str = DEFAULT_FRAMEWORK,
    synchronised: bool = False,
    ranks: Sequence[int] | None = None,
    runs_on: str = "cuda",
    assume: Assume | None = None,
) -> Workload:
    """A workload of `world_size` ranks from `make_step(batch_size, rank=..., world_size=...)`.

    As `capture_step`, once for every rank; `batch_size` counts the samples of one rank. `ranks` are those to
    capture, 0 first (default: all); a rank that is left out runs the program of the next captured rank below it.
    Ranks with the same program share it. Programs that differ in sizes only share columns and signatures.
    """
    check_request(mode, batch_size, seq_len)
    check_world(world_size, ranks)
    check_takes_ranks(make_step)

    def one(batch: int, length: int, place: Place) -> Program:
        build = adapt_to_sizes(partial(make_step, rank=place.rank, world_size=place.world_size), seq_len)
        return capture_program(build, batch, length, mode, place, runs_on=runs_on)

    with use_assumptions(assume or getattr(make_step, "assume", None)) as assumed, share_metadata_cache():
        programs, run_by = capture_ranks(
            one, world_size, (batch_size, seq_len or 0), ranks=ranks, why="" if rebatch else ONE_SIZE
        )
    return Workload(
        name=name,
        programs=programs,
        ranks=run_by,
        mode=mode,
        synchronised=synchronised,
        framework_version=framework_version,
        tf32=list_tf32_arithmetic(),
        assumptions=assumed.texts,
        meta=assumed.list_meta(),
    )


def capture_ranks(
    one: One, world_size: int, sizes: tuple[int, int], *, ranks: Sequence[int] | None = None, why: str = "",
    lengths: bool = True,
) -> tuple[tuple[Program, ...], tuple[int, ...]]:  # fmt: skip
    """The distinct programs of all ranks, and which of them each rank runs.

    `one` captures a rank at (batch size, sequence length), first at `sizes`. The programs keep these sizes if there is
    a reason `why`; else they depend on both, or without `lengths` on the batch size.
    """
    captured = check_world(world_size, ranks)
    capture = _Capture(one, world_size, sizes, why, lengths=lengths)
    programs, program_of = _deduplicate_programs(capture.capture_ranks(captured))
    rank_of = [captured[program_of.index(i)] for i in range(len(programs))]
    programs = _generalise_programs(programs, rank_of, capture)
    run_by = [program_of[bisect_right(captured, rank) - 1] for rank in range(world_size)]
    _check_left_out(programs, run_by, set(captured))
    return tuple(programs), tuple(run_by)


class _Capture:
    """Captures any rank, at the size asked for and at those it takes to re-batch it."""

    def __init__(self, one: One, world_size: int, asked: tuple[int, int], why: str, *, lengths: bool) -> None:
        self._one, self._world_size, self._asked, self._why, self._lengths = one, world_size, asked, why, lengths
        self._ranks: Sequence[int] = ()
        self._known: dict[tuple[int, int], dict[int, Program]] = {}
        self._talk = False  # whether ranks give each other objects

    def capture_ranks(self, ranks: Sequence[int]) -> list[Program]:
        """The programs of these ranks at the size asked for."""
        self._ranks = ranks
        programs = self._capture_all(*self._asked)
        return [programs[rank] for rank in ranks]

    def rebatch_programs(self, programs: Sequence[Program], ranks: Sequence[int], *, shares: bool) -> list[Program]:
        """Programs of one structure made to depend on their sizes; each is that of one of these ranks."""
        if self._why:
            return fix_sizes(programs, self._why)

        def at(batch: int, length: int) -> list[Program]:
            return [
                self._capture_all(batch, length)[r]
                if self._talk
                else self._capture_at(r, batch, length, ObjectMessages())
                for r in ranks
            ]

        return rebatch_programs(
            programs,
            at,
            shares=shares,
            note=lambda text: get_assumptions().used.setdefault(text),
            lengths=self._lengths,
        )

    def _capture_all(self, batch: int, length: int) -> dict[int, Program]:
        """The programs of all ranks to capture; one that waits for an object of another is captured again after it."""
        if (batch, length) in self._known:
            return self._known[batch, length]
        messages, waiting, done = ObjectMessages(), list(self._ranks), dict.fromkeys(self._ranks)
        while waiting:
            posted, late = len(messages), []
            for rank in waiting:
                try:
                    done[rank] = self._capture_at(rank, batch, length, messages)
                except RankNotCapturedError as error:
                    late.append(rank)
                    if len(late) == len(waiting) and len(messages) == posted:
                        raise error from None  # all wait, and nobody has sent anything
            waiting = late[::-1]  # what goes from the last rank to the first, as from the first to the last
        for _ in range(_ROUNDS):
            for rank in (stale := messages.numbers.find_stale_ranks()):
                done[rank] = self._capture_at(rank, batch, length, messages)
            if not stale:
                break
        for line in messages.numbers.list_assumed_places():
            get_assumptions().note_assumption(_AS_OWN, line)
        self._talk = self._talk or messages.used or messages.numbers.differ
        self._known[batch, length] = {rank: program for rank, program in done.items() if program is not None}
        return self._known[batch, length]

    def _capture_at(self, rank: int, batch: int, length: int, messages: ObjectMessages) -> Program:
        with freeze_existing_objects():  # nor that of the ranks before
            return self._one(batch, length, Place(rank, self._world_size, messages))


def check_world(world_size: int, ranks: Sequence[int] | None) -> list[int]:
    """The ranks to capture; rejected where there are no such ones."""
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise TraincastError(f"world size {world_size} is out of range; give an integer from 1 to {MAX_WORLD_SIZE}")
    if ranks is None:
        return list(range(world_size))
    chosen = sorted(set(ranks))
    if not chosen or chosen[0] != 0 or chosen[-1] >= world_size:
        raise TraincastError(f"ranks {list(ranks)} must start with 0 and stay below the world size {world_size}")
    return chosen


def check_takes_ranks(make_step: Callable[..., Step]) -> None:
    """Rejects a function that does not say what each rank does."""
    try:
        inspect.signature(make_step).bind_partial(rank=0, world_size=1)
    except (TypeError, ValueError) as error:
        raise TraincastError(
            f"{getattr(make_step, '__name__', make_step)!r} must take rank and world_size by name: "
            "make_step(batch_size, *, rank, world_size)"
        ) from error


def _check_left_out(programs: list[Program], run_by: list[int], captured: set[int]) -> None:
    """A rank that was not captured must be able to run the program it is given."""
    allowed = [_find_participating_ranks(program) for program in programs]
    for rank, program in enumerate(run_by):
        able = allowed[program]
        if rank not in captured and able is not None and rank not in able:
            raise TraincastError(
                f"rank {rank} is not among `ranks`, and the rank below it uses a group or a message that rank {rank} "
                f"has no part in; add {rank} to `ranks`"
            )


def _find_participating_ranks(program: Program) -> set[int] | None:
    """The ranks that take part in every collective of a program; None when it has none."""
    able: set[int] | None = None
    for signature in program.signatures:
        group = signature.scalar("group")
        if signature.scalar("collective") is None or not isinstance(group, tuple):
            continue
        here = {rank for rank in group if isinstance(rank, int)}
        if COLLECTIVES[str(signature.scalar("collective"))].route is Route.PAIR:
            here = set()  # who sends to whom is another pair on every rank
        able = here if able is None else able & here
    return able


def _deduplicate_programs(programs: list[Program]) -> tuple[list[Program], list[int]]:
    """The distinct programs, and which of them each of the given ones is."""
    kept: dict[tuple[object, ...], int] = {}
    distinct: list[Program] = []
    which = []
    for program in programs:
        key = _make_identity_key(program)
        if key not in kept:
            kept[key] = len(distinct)
            distinct.append(program)
        which.append(kept[key])
    return distinct, which


def _make_identity_key(program: Program) -> tuple[object, ...]:
    columns = tuple(getattr(program.columns, name).tobytes() for name in Columns.names())
    return (program.names, program.symbolic, program.sizes.coefficients.tobytes(), columns)


def _generalise_programs(programs: list[Program], rank_of: list[int], capture: _Capture) -> list[Program]:
    """The programs made to depend on their sizes, those of one structure with one template."""
    result = list(programs)
    shares = bool(get_assumptions().used)  # of sizes: what is noted from here on states none
    for members in _group_by_structure(programs):
        made = capture.rebatch_programs([programs[i] for i in members], [rank_of[i] for i in members], shares=shares)
        for i, program in zip(members, made, strict=True):
            result[i] = program
    return result


def _group_by_structure(programs: list[Program]) -> list[list[int]]:
    groups: dict[tuple[object, ...], list[list[int]]] = {}
    for i, program in enumerate(programs):
        alike = groups.setdefault((program.num_ops, program.num_scopes, program.names), [])
        for members in alike:
            if have_same_structure(programs[members[0]], program):
                members.append(i)
                break
        else:
            alike.append([i])
    return [members for alike in groups.values() for members in alike]
