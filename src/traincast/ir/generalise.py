"""From several captures of one step to a program that depends on batch size and sequence length.

Every integer of every op is solved for as a polynomial (see `sizes`) from captures at several sizes, one more than
there are unknowns; all must be reproduced exactly, or the program is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

import numpy as np
import numpy.typing as npt

from traincast.ir.editor import drop_host_scopes, find_host_scopes
from traincast.ir.ops import Scalar, Signature, StorageKind
from traincast.ir.program import Columns, Program
from traincast.ir.sizes import MONOMIALS, SizeTable, compute_monomials, replace_sizes_by_indices, round_up_size
from traincast.utils.arrays import BoolArray, IntArray
from traincast.utils.errors import TraincastError

_STRUCTURE = tuple(name for name in Columns.names() if name not in ("op_signature", "storage_bytes"))
_OF_STORAGES = tuple(name for name in Columns.names() if name.startswith("storage_"))

_DRAWN_NEAR, _DRAWN_SPREAD = 0.25, 2.0  # how far drawn sizes may be from other captures: a share, and of counts
_CUTS = ("aten::slice", "aten::select", "aten::narrow", "aten::unbind", "aten::split")
_SQUARED = MONOMIALS.index("B^2")
_PADDINGS = (8, 16, 32, 64, 128)  # what attention kernels round sequence lengths up to


def capture_sizes(batch: int, seq_len: int, *, multiples: bool = False) -> list[tuple[int, int]]:
    """The (batch, sequence length) pairs to capture at: those to solve from, then one to verify with.

    The first is the pair asked for. Sizes are spread so that no dimension of a usual model is met by chance. With
    `multiples` all are multiples of it: shares of a size then stay whole.
    """
    if multiples:
        lengths = (seq_len, 2 * seq_len, 3 * seq_len) if seq_len else (0,)
        pairs = [(b, s) for b in (batch, 2 * batch) for s in lengths]
        return [*pairs, (3 * batch, 4 * seq_len)]
    other = batch + 3 if batch < 8 else batch // 2 + 1
    if not seq_len:
        return [(batch, 0), (other, 0), (batch + other, 0)]
    if seq_len < 12:
        others = (seq_len + 1, seq_len + 3)
    else:
        # One above a multiple of 128, so that every padding below rounds it to another length.
        half = seq_len // 2 // 128 * 128 + 1 if seq_len >= 256 else seq_len // 2 + 1
        quarter = seq_len // 4 + 3
        others = (half, quarter + (quarter == half))
    pairs = [(b, s) for b in (batch, other) for s in (seq_len, *others)]
    return [*pairs, (batch + other, seq_len // 2 + 5)]


def generalise_captures(captures: Sequence[Program], *, shares: bool = False) -> Program:
    """One program from captures at the sizes of `capture_sizes`, all of which it reproduces exactly."""
    return generalise_ranks([captures], shares=shares)[0]


def generalise_ranks(ranks: Sequence[Sequence[Program]], *, shares: bool = False, drawn: bool = False) -> list[Program]:
    """One program per rank, from captures of every rank at the same sizes. They differ in nothing but sizes.

    Sizes that are `shares` of others need not be whole at every batch size, those of nothing assumed must. Sizes that
    are `drawn` at random (lengths of bags, sampled neighbours) follow no polynomial: they grow with the batch size from
    what they are in the first capture, which the others must not be far from.

    The programs share their columns, names and signatures; each has a size table of its own. Captured at one size
    only, its sizes are constants.
    """
    first = ranks[0][0]
    ranks = [[_number_storages_alike(first, other) for other in captures] for captures in ranks]
    for captures in ranks:
        for other in captures:
            _check_same_structure(first, other)
    values = [np.array([_list_all_sizes(program) for program in captures], dtype=np.int64) for captures in ranks]
    position = _number_joint_sizes(values)
    _, where = np.unique(position, return_index=True)
    points = [(program.batch_size, program.seq_len) for program in ranks[0]]
    observed = [np.ascontiguousarray(rows[:, where].T) for rows in values]
    free = _find_sizes_without_effect(first, position)
    tables = [
        _solve_polynomials(o, points, free, shares=shares, drawn=drawn)
        if len(points) > 1
        else SizeTable.constant(o[:, 0])
        for o in observed
    ]
    template = _rebuild_program(first, tables[0], position)
    return [replace(template, sizes=table) for table in tables]


def _find_sizes_without_effect(first: Program, position: IntArray) -> BoolArray:
    """Which sizes only data has that a step cuts its batch out of (a text folded into as many columns as a batch has
    samples): nothing is computed with all of it, so that its form may stay what it is in the first capture."""
    ran = first.columns.op_signature.tolist()
    cuts = np.array([first.symbolic[index].name in _CUTS for index in ran], dtype=np.bool_)
    lengths = np.array([len(first.forms[index][1]) for index in ran], dtype=np.int64)
    without = np.concatenate([np.repeat(cuts, lengths), first.columns.storage_kind == StorageKind.INPUT])
    free = np.ones(int(position.max(initial=-1)) + 1, dtype=np.bool_)
    free[position[~without]] = False
    return free


def _number_joint_sizes(values: Sequence[IntArray]) -> IntArray:
    """Numbers the sizes so that two share a number if they are equal in every capture of every rank."""
    position = np.zeros(values[0].shape[1], dtype=np.int64)
    for row in (row for rows in values for row in rows):
        _, position = np.unique(np.stack([position, row]), axis=1, return_inverse=True)
        position = position.reshape(-1).astype(np.int64)
    return position


def have_same_structure(first: Program, other: Program) -> bool:
    """Whether two programs run the same ops on the same tensors, whatever the sizes."""
    try:
        _check_same_structure(first, other)
    except TraincastError:
        return False
    return True


def _number_storages_alike(first: Program, other: Program) -> Program:
    """The other program with its storages in the order of the first, where only that differs: threads that load weights
    make them in any order."""
    here, there = first.columns.tensor_storage, other.columns.tensor_storage
    number = len(first.columns.storage_bytes)
    if len(here) != len(there) or number != len(other.columns.storage_bytes) or np.array_equal(here, there):
        return other
    source = np.full(number, -1, dtype=np.int64)  # by number in the first, that in the other
    source[here] = there
    left = np.setdiff1d(np.arange(number), there)
    if not np.array_equal(source[here], there) or np.count_nonzero(source < 0) != len(left):
        return other
    source[source < 0] = left
    moved = {name: getattr(other.columns, name)[source] for name in _OF_STORAGES}
    return replace(other, columns=replace(other.columns, tensor_storage=here, **moved))


def align_host_ops(first: Program, other: Program) -> Program:
    """The `first` program with the sizes of another where both run the same ops of the device: the ops of the host, of
    which a batch may have more, stay those of the first. Rejected where ops of the device differ."""
    on_device = drop_host_scopes(first)
    there = _number_storages_alike(on_device, drop_host_scopes(other))
    _check_same_structure(on_device, there)
    numbered = replace(first.columns, storage_bytes=np.arange(len(first.storage_nbytes), dtype=np.int32))
    room = SizeTable.constant(np.arange(max(len(first.sizes), len(first.storage_nbytes)), dtype=np.int64))
    storages = drop_host_scopes(replace(first, columns=numbered, sizes=room)).columns.storage_bytes
    lengths = np.array([len(first.forms[index][1]) for index in first.columns.op_signature.tolist()], dtype=np.int64)
    slots = np.flatnonzero(np.repeat(~find_host_scopes(first)[first.op_scope], lengths))
    sizes = np.array(_list_all_sizes(first), dtype=np.int64)
    sizes[np.concatenate([slots, lengths.sum() + storages])] = _list_all_sizes(there)
    aligned = _rebuild_program(first, SizeTable.constant(sizes), np.arange(len(sizes), dtype=np.int64))
    return replace(aligned, batch_size=other.batch_size, seq_len=other.seq_len)


def _describe_first_difference(first: Program, other: Program) -> str:
    """Where two programs part, in words."""
    ran, there = ([p.symbolic[number].name for number in p.columns.op_signature.tolist()] for p in (first, other))
    place = next((i for i, (a, b) in enumerate(zip(ran, there, strict=False)) if a != b), min(len(ran), len(there)))
    if place == len(ran) == len(there):
        return "the same ops, but other tensors are shared or kept"
    here, instead = (names[place] if place < len(names) else "the end" for names in (ran, there))
    return f"op {place} is {instead} instead of {here}"


def _check_same_structure(first: Program, other: Program) -> None:
    if first is other:
        return
    if (first.num_ops, first.names) != (other.num_ops, other.names) or any(
        not np.array_equal(getattr(first.columns, name), getattr(other.columns, name)) for name in _STRUCTURE
    ):
        raise TraincastError(
            f"the step runs other ops at batch {other.batch_size}, length {other.seq_len} "
            f"({other.num_ops} ops) than at batch {first.batch_size}, length {first.seq_len} ({first.num_ops} ops): "
            f"{_describe_first_difference(first, other)}"
        )
    pairs = set(zip(first.columns.op_signature.tolist(), other.columns.op_signature.tolist(), strict=True))
    for a, b in pairs:
        if first.forms[a][0] != other.forms[b][0] and _drop_fractions(first.forms[a][0]) != _drop_fractions(
            other.forms[b][0]
        ):
            name = first.signatures[a].name
            raise TraincastError(f"op {name} changes its form between batch sizes; capture at one size only")


def _drop_fractions(form: Signature) -> Signature:
    """A form without its fractions, which cost nothing: `100 / batch`, a share that is drawn, a rate of learning."""
    return replace(form, scalars=tuple([(name, _drop_fraction(value)) for name, value in form.scalars]))


def _drop_fraction(value: Scalar) -> Scalar:
    if isinstance(value, tuple):
        return tuple([_drop_fraction(item) for item in value])
    return 0.0 if type(value) is float else value


def _list_all_sizes(program: Program) -> list[int]:
    flat: list[int] = []
    for index in program.columns.op_signature.tolist():
        flat.extend(program.forms[index][1])
    flat.extend(program.storage_nbytes.tolist())
    return flat


def _solve_polynomials(
    observed: IntArray, points: list[tuple[int, int]], free: BoolArray, *, shares: bool, drawn: bool
) -> SizeTable:
    """The polynomial of each row of `observed` (one column per point), some of them in a padded sequence length; rows
    that are `free` stay what they are where no polynomial gives them.

    A batch size squared (scores of all samples against all) takes one capture more than the others.
    """
    lengths = len({length for _, length in points}) > 1
    used = [0, 1, 2, 3, 4, 5] if lengths else [0, 1]
    if len(points) > len(used) + 1:
        used = [*used, _SQUARED]
    fit = _fit_polynomials(observed, points, used, shares=shares)
    multiples = np.ones(len(observed), dtype=np.int64)
    for multiple in _PADDINGS if lengths else ():
        left = np.flatnonzero(~fit.good)
        padded = [(batch, round_up_size(length, multiple)) for batch, length in points]
        again = _fit_polynomials(observed[left], padded, [0, 1, 2, 3], shares=shares)
        taken = left[again.good]
        fit.coefficients[taken], fit.denominator[taken] = again.coefficients[again.good], again.denominator[again.good]
        fit.good[taken], multiples[taken] = True, multiple
    if drawn:
        _fit_drawn_sizes(fit, observed, points)
    stay = np.flatnonzero(~fit.good & free)
    fit.coefficients[stay], fit.denominator[stay], fit.good[stay] = 0, 1, True
    fit.coefficients[stay, MONOMIALS.index("1")] = observed[stay, 0]
    if not fit.good.all():
        raise TraincastError(
            f"a size of this step is {observed[np.argmin(fit.good)].tolist()} at (batch, length) {points}, which no "
            "polynomial of low degree gives; it can only be used at the size it was captured at"
        )
    return SizeTable(fit.coefficients, fit.denominator, multiples)


@dataclass(frozen=True, slots=True)
class _Fit:
    """Polynomials in some monomials, and which rows they reproduce at every point."""

    coefficients: IntArray
    denominator: IntArray
    good: BoolArray


def _fit_polynomials(observed: IntArray, points: list[tuple[int, int]], used: list[int], *, shares: bool) -> _Fit:
    """Solves each row from as many points as there are unknowns, exactly, and checks it at all of them."""
    fit = _Fit(
        np.zeros((len(observed), len(MONOMIALS)), dtype=np.int64),
        np.ones(len(observed), dtype=np.int64),
        np.zeros(len(observed), dtype=np.bool_),
    )
    design = [[Fraction(compute_monomials(batch, length)[c]) for c in used] for batch, length in points]
    chosen = _find_independent_rows(design)
    if len(chosen) < len(used):
        return fit
    inverse = _invert_matrix([design[i] for i in chosen])
    denominator = math.lcm(*(entry.denominator for row in inverse for entry in row))
    scaled = np.array([[int(entry * denominator) for entry in row] for row in inverse], dtype=object)
    for i, row in enumerate(observed[:, chosen].astype(object) @ scaled.T):
        parts = [Fraction(int(entry), denominator) for entry in row]
        common = math.lcm(*(part.denominator for part in parts))
        whole = [int(part * common) for part in parts]
        if max(map(abs, (common, *whole))) < 2**63:
            fit.denominator[i], fit.coefficients[i, used], fit.good[i] = common, whole, True
    expected = observed.astype(object) * fit.denominator[:, None]
    fit.good[:] &= np.all(_compute_numerators(fit, points) == expected, axis=1)
    if not shares:
        fit.good[:] &= _find_always_whole(fit)
    return fit


def _fit_drawn_sizes(fit: _Fit, observed: IntArray, points: list[tuple[int, int]]) -> None:
    """Lets sizes that no polynomial gives grow with the batch size, where all captures are near that."""
    batches = np.array([batch for batch, _ in points], dtype=np.float64)
    left = np.flatnonzero(~fit.good)
    first, others = observed[left, 0], observed[left, 1:].sum(axis=1) * batches[0] / batches[1:].sum()
    near = np.abs(first - others) <= _DRAWN_NEAR * others + _DRAWN_SPREAD * np.sqrt(others)
    rows = left[near]
    fit.coefficients[rows], fit.denominator[rows], fit.good[rows] = 0, int(batches[0]), True
    fit.coefficients[rows, MONOMIALS.index("B")] = observed[rows, 0]


def _compute_numerators(fit: _Fit, points: Iterable[tuple[int, int]]) -> npt.NDArray[np.object_]:
    """Numerators at every point, in Python's integers, which do not overflow."""
    terms = np.array([compute_monomials(batch, length) for batch, length in points], dtype=object)
    values: npt.NDArray[np.object_] = fit.coefficients.astype(object) @ terms.T
    return values


def _find_always_whole(fit: _Fit) -> BoolArray:
    """Which sizes are whole at every batch size and sequence length.

    A polynomial of degree 2 in B and in S is, if it is at 3 x 3 neighbouring points. `S // 2` met at a few
    lengths can be fitted by chance; the fit then has fractions that no real size has.
    """
    remainders = _compute_numerators(fit, product((0, 1, 2), (0, 1, 2))) % fit.denominator[:, None]
    whole: BoolArray = np.all(remainders == 0, axis=1)
    return whole


def _find_independent_rows(rows: list[list[Fraction]]) -> list[int]:
    """Indices of the first rows that are linearly independent."""
    chosen: list[int] = []
    reduced: list[tuple[int, list[Fraction]]] = []  # pivot column, row
    for index, row in enumerate(rows):
        rest = row
        for pivot, other in reduced:
            factor = rest[pivot] / other[pivot]
            rest = [a - factor * b for a, b in zip(rest, other, strict=True)]
        pivot = next((c for c, entry in enumerate(rest) if entry), -1)
        if pivot >= 0:
            reduced.append((pivot, rest))
            chosen.append(index)
    return chosen


def _invert_matrix(matrix: list[list[Fraction]]) -> list[list[Fraction]]:
    size = len(matrix)
    rows = [row + [Fraction(int(i == j)) for j in range(size)] for i, row in enumerate(matrix)]
    for pivot in range(size):
        best = next(r for r in range(pivot, size) if rows[r][pivot])
        rows[pivot], rows[best] = rows[best], rows[pivot]
        scale = rows[pivot][pivot]
        rows[pivot] = [entry / scale for entry in rows[pivot]]
        for r in range(size):
            if r != pivot and rows[r][pivot]:
                factor = rows[r][pivot]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[pivot], strict=True)]
    return [row[size:] for row in rows]


def _rebuild_program(first: Program, table: SizeTable, position: IntArray) -> Program:
    """The first program with its sizes replaced by indices into the solved table, signatures made distinct anew."""
    numbers = position.tolist()
    lengths = [len(sizes) for _, sizes in first.forms]
    distinct: dict[Signature, int] = {}
    known: dict[tuple[int, ...], int] = {}  # by the signature it had and the numbers of its sizes
    op_signature, start = [], 0
    for index in first.columns.op_signature.tolist():
        end = start + lengths[index]
        key = (index, *numbers[start:end])
        if key not in known:
            cursor = iter(key[1:])
            rebuilt = replace_sizes_by_indices(first.signatures[index], lambda _: next(cursor))  # noqa: B023 - called at once
            known[key] = distinct.setdefault(rebuilt, len(distinct))
        op_signature.append(known[key])
        start = end
    storages = np.array(numbers[start:], dtype=np.int32)
    columns = replace(first.columns, op_signature=np.array(op_signature, dtype=np.int32), storage_bytes=storages)
    return replace(first, sizes=table, symbolic=tuple(distinct), columns=columns)
