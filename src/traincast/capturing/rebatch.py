"""From one capture to programs of any size: which other sizes to capture at, and what to do where they disagree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from traincast.errors import TraincastError
from traincast.workload.generalise import capture_sizes, generalise_ranks, same_structure
from traincast.workload.program import Program

At = Callable[[int, int], Sequence[Program]]
"""Captures the same ranks at a batch size and a sequence length."""
_NEAR = 0.02  # share of ops in which the size asked for may differ from all others, and still be one of them


def rebatched(
    firsts: Sequence[Program], at: At, *, shares: bool, note: Callable[[str], None], lengths: bool = True
) -> list[Program]:
    """The programs made to depend on their sizes; those that no polynomial expresses keep their size, and say why.

    They are those of one or more ranks that run the same ops, and share a template. In order: as a polynomial of both
    sizes, with the batch size squared, from the other sizes alone where the one asked for is special (a batch of 1, the
    longest length there is), of the batch size alone. `shares` are sizes that were assumed; `note` hears what was taken
    to hold. Without `lengths` the sequence length stays what it is.
    """
    first = firsts[0]
    if first.seq_len and not lengths:
        return _by_batch_alone(firsts, at, [], "", shares=shares)
    sizes = capture_sizes(first.batch_size, first.seq_len, multiples=shares)
    try:
        others = [at(batch, length) for batch, length in sizes[1:]]
    except TraincastError as error:
        return _by_batch_alone(firsts, at, [], str(error), shares=shares)
    try:
        return _general([firsts, *others], shares=shares)
    except TraincastError as error:
        why = str(error)
    alike = [all(map(same_structure, firsts, other)) for other in others]
    more = (2 * sizes[-1][0] + first.batch_size, first.seq_len)
    if all(alike):
        found = _tried([firsts, *others], at, more, shares=shares)
    elif not any(alike) and abs(others[0][0].num_ops - first.num_ops) <= _NEAR * first.num_ops + 1:
        found = _without_first(firsts, others, at, note, shares=shares)
    else:
        found = None
    return found or _by_batch_alone(firsts, at, others, why, shares=shares)


def rigid(firsts: Sequence[Program], why: str) -> list[Program]:
    """The programs at their one size, with one template."""
    return [replace(program, rigid=why) for program in generalise_ranks([[program] for program in firsts])]


def _general(captures: Sequence[Sequence[Program]], *, shares: bool) -> list[Program]:
    """From captures of all ranks at each size."""
    return generalise_ranks([list(of_rank) for of_rank in zip(*captures, strict=True)], shares=shares)


def _tried(
    captures: Sequence[Sequence[Program]], at: At, more: tuple[int, int], *, shares: bool
) -> list[Program] | None:
    """With one capture more; None where that expresses no polynomial either."""
    try:
        return _general([*captures, at(*more)], shares=shares)
    except TraincastError:
        return None


def _without_first(
    firsts: Sequence[Program], others: Sequence[Sequence[Program]], at: At, note: Callable[[str], None], *, shares: bool
) -> list[Program] | None:
    """All other sizes run the same ops, and the one asked for runs nearly those: it is taken to be one of them."""
    first = firsts[0]
    batch, length = first.batch_size, first.seq_len
    try:
        general = _general([*others, at(2 * batch + 5, length and length - 1)], shares=shares)
        sized = [program.resized(batch, length) for program in general]
    except TraincastError:
        return None
    note(
        f"at batch {batch}{f', length {length}' if length else ''} the step runs {first.num_ops} ops; taken are the "
        f"{sized[0].num_ops} that it runs at other sizes"
    )
    return sized


def _by_batch_alone(
    firsts: Sequence[Program], at: At, others: Sequence[Sequence[Program]], why: str, *, shares: bool
) -> list[Program]:
    """The programs at their sequence length, for any batch size; `why` they do not depend on both."""
    first = firsts[0]
    if not first.seq_len:
        return rigid(firsts, why)
    length, known = first.seq_len, {p[0].batch_size: p for p in others if p[0].seq_len == first.seq_len}
    batches = [batch for batch, _ in capture_sizes(first.batch_size, 0, multiples=shares)[1:]]
    try:
        alone = [firsts, *(known.get(batch) or at(batch, length) for batch in batches)]
    except TraincastError as error:
        return rigid(firsts, why or str(error))
    try:
        return _general(alone, shares=shares)
    except TraincastError as error:
        more = 2 * batches[-1] + first.batch_size
        return _tried(alone, at, (more, length), shares=shares) or rigid(firsts, why or str(error))
