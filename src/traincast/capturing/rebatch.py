"""From one capture to a program of any size: which other sizes to capture at, and what to do where they disagree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from traincast.errors import TraincastError
from traincast.workload.generalise import capture_sizes, generalise, same_structure
from traincast.workload.program import Program

At = Callable[[int, int], Program]
"""Captures at a batch size and a sequence length."""
_NEAR = 0.02  # share of ops in which the size asked for may differ from all others, and still be one of them


def rebatched(first: Program, at: At, *, shares: bool, note: Callable[[str], None]) -> Program:
    """The program made to depend on its sizes; one that no polynomial expresses keeps its size, and says why.

    In order: as a polynomial of both sizes, with the batch size squared, from the other sizes alone where the one asked
    for is special (a batch of 1, the longest length there is), of the batch size alone. `shares` are sizes that were
    assumed; `note` hears what was taken to hold.
    """
    sizes = capture_sizes(first.batch_size, first.seq_len, multiples=shares)
    try:
        others = [at(batch, length) for batch, length in sizes[1:]]
    except TraincastError as error:
        return _by_batch_alone(first, at, [], str(error), shares=shares)
    alike = [same_structure(first, other) for other in others]
    try:
        return generalise([first, *others], shares=shares)
    except TraincastError as error:
        why = str(error)
    batch, length = first.batch_size, first.seq_len
    more = (2 * sizes[-1][0] + batch, length)
    if all(alike):
        found = _tried([first, *others], at, more, shares=shares)
    elif not any(alike) and abs(others[0].num_ops - first.num_ops) <= _NEAR * first.num_ops + 1:
        found = _without_first(first, others, at, note, shares=shares)
    else:
        found = None
    return found or _by_batch_alone(first, at, others, why, shares=shares)


def _tried(captures: Sequence[Program], at: At, more: tuple[int, int], *, shares: bool) -> Program | None:
    """With one capture more; None where that expresses no polynomial either."""
    try:
        return generalise([*captures, at(*more)], shares=shares)
    except TraincastError:
        return None


def _without_first(
    first: Program, others: Sequence[Program], at: At, note: Callable[[str], None], *, shares: bool
) -> Program | None:
    """All other sizes run the same ops, and the one asked for runs nearly those: it is taken to be one of them."""
    batch, length = first.batch_size, first.seq_len
    try:
        general = generalise([*others, at(2 * batch + 5, length and length - 1)], shares=shares)
        sized = general.resized(batch, length)
    except TraincastError:
        return None
    note(
        f"at batch {batch}{f', length {length}' if length else ''} the step runs {first.num_ops} ops; taken are the "
        f"{sized.num_ops} that it runs at other sizes"
    )
    return sized


def _by_batch_alone(first: Program, at: At, others: Sequence[Program], why: str, *, shares: bool) -> Program:
    """The program at its sequence length, for any batch size."""
    rigid = replace(first, rigid=why)
    if not first.seq_len:
        return rigid
    length, known = first.seq_len, {p.batch_size: p for p in others if p.seq_len == first.seq_len}
    batches = [batch for batch, _ in capture_sizes(first.batch_size, 0, multiples=shares)[1:]]
    try:
        alone = [first, *(known.get(batch) or at(batch, length) for batch in batches)]
    except TraincastError:
        return rigid
    try:
        return generalise(alone, shares=shares)
    except TraincastError:
        more = 2 * batches[-1] + first.batch_size
        return _tried(alone, at, (more, length), shares=shares) or rigid
