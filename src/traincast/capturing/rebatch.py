"""From one capture to programs of any size: which other sizes to capture at, what to do where they disagree, and who is
told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from dataclasses import replace
from os import devnull
from pathlib import Path

from traincast.capturing.assumptions import get_assumptions
from traincast.ir.generalise import align_host_ops, capture_sizes, generalise_ranks, have_same_structure
from traincast.ir.program import Program
from traincast.ir.workload import HOST_OPS_STAY
from traincast.utils.errors import TraincastError

Listener = Callable[[str], None]
"""Hears in a few words what is being done now."""

_keeper: ContextVar[Callable[[Program], None] | None] = ContextVar("keeper", default=None)
"""Keeps the first step that is recorded, should the rest of the capture fail."""
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def notify_listener(listener: Listener | None, keeper: Callable[[Program], None] | None = None) -> Iterator[None]:
    """Lets `listener` hear of captures inside the block, and `keeper` of the first step that one records."""
    token, kept = _listener.set(listener), _keeper.set(keeper)
    try:
        yield
    finally:
        _listener.reset(token)
        _keeper.reset(kept)


def report_progress(text: str) -> None:
    """Tells whoever listens."""
    listener = _listener.get()
    if listener is not None:
        listener(text)


def report_run(batch: int, length: int, rank: int | None) -> None:
    """Tells whoever listens which run begins; a batch of 0 is the script's own."""
    size = f"batch {batch}" if batch else "the script's own batch size"
    tokens, of = f", {length} tokens" if length else "", "" if rank is None else f", rank {rank}"
    report_progress(f"{size}{tokens}{of}")


def keep_first_program(program: Program) -> None:
    """Hands the first step that is recorded to whoever keeps it."""
    keeper = _keeper.get()
    if keeper is not None:
        _keeper.set(None)
        keeper(program)


@contextmanager
def hold_prints() -> Iterator[None]:
    """Keeps back what the user's code prints when it is run once more, which it has printed before."""
    with Path(devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


At = Callable[[int, int], Sequence[Program]]
"""Captures the same ranks at a batch size and a sequence length."""
_NEAR = 0.02  # share of ops in which the size asked for may differ from all others, and still be one of them


def rebatch_programs(
    firsts: Sequence[Program], capture: At, *, shares: bool, note: Callable[[str], None], lengths: bool = True
) -> list[Program]:
    """The programs made to depend on their sizes; those that no polynomial expresses keep their size, and say why.

    They are those of one or more ranks that run the same ops, and share a template. In order: as a polynomial of both
    sizes, with the batch size squared, from the other sizes alone where the one asked for is special (a batch of 1, the
    longest length there is), of the batch size alone, at its multiples alone. `shares` are sizes that were
    assumed; `note` hears what was taken to hold. Without `lengths` the sequence length stays what it is.
    """
    first = firsts[0]

    def at(batch: int, length: int) -> Sequence[Program]:
        with hold_prints():
            return capture(batch, length)

    if first.seq_len and not lengths:
        return _generalise_by_batch(firsts, at, [], "", note, shares=shares)
    sizes = capture_sizes(first.batch_size, first.seq_len, multiples=shares)
    try:
        others = [at(batch, length) for batch, length in sizes[1:]]
    except TraincastError as error:
        return _generalise_by_batch(firsts, at, [], str(error), note, shares=shares)
    try:
        return _generalise_captures([firsts, *others], note, shares=shares)
    except TraincastError as error:
        why = str(error)
    alike = [all(map(have_same_structure, firsts, other)) for other in others]
    more = (2 * sizes[-1][0] + first.batch_size, first.seq_len)
    if all(alike):
        found = _try_generalise([firsts, *others], at, more, note, shares=shares)
    elif not any(alike) and abs(others[0][0].num_ops - first.num_ops) <= _NEAR * first.num_ops + 1:
        found = _generalise_without_first(firsts, others, at, note, shares=shares)
    else:
        found = None
    return found or _generalise_by_batch(firsts, at, others, why, note, shares=shares)


def fix_sizes(firsts: Sequence[Program], why: str) -> list[Program]:
    """The programs at their one size, with one template."""
    return [replace(program, rigid=why) for program in generalise_ranks([[program] for program in firsts])]


def _generalise_captures(
    captures: Sequence[Sequence[Program]], note: Callable[[str], None], *, shares: bool, drawn: bool = False
) -> list[Program]:
    """From captures of all ranks at each size. Where they differ in ops of the host (samples that are read one by one)
    and those of the device are the same, those of the host stay what they are at the first size."""
    ranks: list[Sequence[Program]] = list(zip(*captures, strict=True))
    try:
        return generalise_ranks(ranks, shares=shares, drawn=drawn)
    except TraincastError:
        if all(have_same_structure(of_rank[0], other) for of_rank in ranks for other in of_rank):
            raise
        ranks = [[align_host_ops(of_rank[0], other) for other in of_rank] for of_rank in ranks]
    note(
        f"ops of the host grow in number with the batch (samples read one by one?), and stay as many as at batch "
        f"{captures[0][0].batch_size}"
    )
    get_assumptions().meta[HOST_OPS_STAY] = "1"
    return generalise_ranks(ranks, shares=shares, drawn=drawn)


def _try_generalise(
    captures: Sequence[Sequence[Program]], at: At, more: tuple[int, int], note: Callable[[str], None], *, shares: bool
) -> list[Program] | None:
    """With one capture more; None where that expresses no polynomial either."""
    try:
        return _generalise_captures([*captures, at(*more)], note, shares=shares)
    except TraincastError:
        return None


def _generalise_without_first(
    firsts: Sequence[Program], others: Sequence[Sequence[Program]], at: At, note: Callable[[str], None], *, shares: bool
) -> list[Program] | None:
    """All other sizes run the same ops, and the one asked for runs nearly those: it is taken to be one of them."""
    first = firsts[0]
    batch, length = first.batch_size, first.seq_len
    try:
        general = _generalise_captures([*others, at(2 * batch + 5, length and length - 1)], note, shares=shares)
        sized = [program.resized(batch, length) for program in general]
    except TraincastError:
        return None
    note(
        f"at batch {batch}{f', length {length}' if length else ''} the step runs {first.num_ops} ops; taken are the "
        f"{sized[0].num_ops} that it runs at other sizes"
    )
    return sized


def _generalise_by_batch(
    firsts: Sequence[Program], at: At, others: Sequence[Sequence[Program]], why: str, note: Callable[[str], None], *,
    shares: bool,
) -> list[Program]:  # fmt: skip
    """The programs at their sequence length, for any batch size; `why` they do not depend on both."""
    first = firsts[0]
    length, known = first.seq_len, {p[0].batch_size: p for p in others if p[0].seq_len == first.seq_len}
    if not length:
        return _generalise_by_multiples(firsts, at, why, note)
    batches = [batch for batch, _ in capture_sizes(first.batch_size, 0, multiples=shares)[1:]]
    try:
        alone = [firsts, *(known.get(batch) or at(batch, length) for batch in batches)]
    except TraincastError as error:
        return _generalise_by_multiples(firsts, at, why or str(error), note)
    try:
        return _generalise_captures(alone, note, shares=shares)
    except TraincastError as error:
        more = 2 * batches[-1] + first.batch_size
        found = _try_generalise(alone, at, (more, length), note, shares=shares)
        return found or _generalise_by_multiples(firsts, at, why or str(error), note)


def _generalise_by_multiples(firsts: Sequence[Program], at: At, why: str, note: Callable[[str], None]) -> list[Program]:
    """The programs at multiples of their batch size alone, or at halves of it: code divides it (`batch // 4`), data
    has no more samples, or sizes are drawn at random."""
    batch, length = firsts[0].batch_size, firsts[0].seq_len
    tried = {"multiples": (2 * batch, 3 * batch)}
    if not batch % 4 and batch > 4:
        tried["halves"] = (batch // 2, batch // 4)
    for kind, others in tried.items():
        try:
            captures = [firsts, *(at(other, length) for other in others)]
        except TraincastError as error:
            why = why or str(error)
            continue
        taken = {
            False: f"sizes are those of {kind} of batch {batch}; at others, {why.partition(';')[0]}",
            True: f"sizes that differ from draw to draw are those drawn at batch {batch}, and grow with it",
        }
        for drawn, text in taken.items():
            try:
                found = _generalise_captures(captures, note, shares=True, drawn=drawn)
            except TraincastError as error:
                why = why or str(error)
            else:
                note(text)
                return found
    return fix_sizes(firsts, why)
