"""What a user states of values that a capture cannot know: how full masks are, how long sequences, which way a branch.

An assumption has a kind, perhaps a place (`FILE:LINE`, or the line alone), and a value:

    mask=0.15             a mask keeps 15 % of its elements            padding=0.3   it keeps all but 30 %
    branch=false          a decision on a tensor                       item=128      an integer read from a tensor
    lengths=64,128,256    numbers read as a list, taken in turn        distinct=0.4  share of values that differ
    experts=8             a mask or count of 8 experts with equal work; 8:1.5 gives the busiest 1.5 times the mean
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from traincast.capturing.errors import find_passing_answer, find_user_line
from traincast.capturing.updates import Bounds, Choice
from traincast.ir.memory import group_layers
from traincast.ir.validate import MAX_NAME
from traincast.ir.workload import LINES
from traincast.utils.errors import TraincastError, make_unknown_error, shorten_value

KINDS = ("mask", "padding", "branch", "item", "lengths", "distinct", "experts")
_MOST_EXPERTS = 4096
_MOST_ASKED = 1000  # times that a line outside the step decides as False
_MOST_PLACES = 2_000  # modules whose lines are noted
Assume = Mapping[str, object] | Sequence[str]
"""`{"mask": 0.15, "branch@train.py:42": False}`, or texts as on the command line: `["mask=0.15"]`."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """One statement. `value` is a share (mask, distinct), a truth value (branch), numbers (item, lengths), or for
    experts their shares of the work."""

    kind: str
    place: str
    value: Any

    def holds_at(self, line: str) -> bool:
        """Whether it is about this `FILE:LINE`."""
        if not self.place:
            return True
        file, _, number = line.rpartition(":")
        wanted, _, wanted_number = self.place.rpartition(":")
        return number == wanted_number and file.endswith(wanted)


@dataclass(slots=True)
class Assumptions:
    """Statements, those that were used, and how often each place was passed: the same place at another size of the
    step takes the same share, so that sizes stay polynomials."""

    stated: tuple[Assumption, ...] = ()
    used: dict[str, None] = field(default_factory=dict)
    taken: dict[str, None] = field(default_factory=dict)  # what nobody stated, as the most it can be
    in_step: bool = False  # whether the step is being recorded now
    bounds: Bounds = field(default_factory=Bounds)  # where steps of a loop begin and end
    steps: dict[int, Choice] = field(default_factory=dict)  # by rank: which updates of a loop are its step
    meta: dict[str, str] = field(default_factory=dict)  # what the workload keeps of it
    places: dict[str, tuple[int, str]] = field(default_factory=dict)  # by module: most bytes of an op, `FILE:LINE`
    batch: int | None = None  # samples that the step was seen to have, where nobody said how many
    _total: int | None = None  # what the last count of experts' work adds up to
    _passed: dict[tuple[str, str], int] = field(default_factory=dict)
    _asked: dict[str, int] = field(default_factory=dict)  # decisions outside the step, by line
    _shares: dict[tuple[str, str, int], Fraction] = field(default_factory=dict)

    def begin_step(self) -> None:
        """A step begins anew: places are passed for the first time."""
        self._passed.clear()

    def _find_statement(self, *kinds: str) -> tuple[Assumption, str] | None:
        """The statement for where the user's code is now, one with a place before one without."""
        line = find_user_line()
        fitting = [a for a in self.stated if a.kind in kinds and a.holds_at(line)]
        return (max(fitting, key=lambda a: len(a.place)), line) if fitting else None

    def _count_pass(self, kind: str, line: str) -> int:
        key = (kind, line)
        self._passed[key] = self._passed.get(key, -1) + 1
        return self._passed[key]

    def note_assumption(self, text: str, line: str | None = None) -> None:
        """Notes what a capture takes to be so at a `FILE:LINE`, or where the user's code is now."""
        self.taken[f"{(line or find_user_line()).rsplit('/', 1)[-1]}: {text}"] = None

    def note_once(self, text: str) -> None:
        """Notes what holds for the whole capture."""
        self.taken[text] = None

    def note_place(self, module: str, nbytes: int) -> None:
        """An op of a module makes so many bytes where the user's code is now: the most of each are kept."""
        name = group_layers(module)
        if nbytes > self.places.get(name, (0, ""))[0] and (name in self.places or len(self.places) < _MOST_PLACES):
            self.places[name] = (nbytes, find_user_line().rsplit("/", 1)[-1])

    def list_meta(self) -> dict[str, str]:
        """What the workload keeps; of the places those of the largest tensors, as many as a note holds."""
        entries, room = [], MAX_NAME - len("{}")
        for name, (_, line) in sorted(self.places.items(), key=lambda place: -place[1][0]):
            entries.append(f"{json.dumps(name)}: {json.dumps(line)}")
            room -= len(entries[-1]) + len(", ")
            if room < 0:
                entries.pop()
                break
        return {**self.meta, LINES: f"{{{', '.join(entries)}}}"} if entries else dict(self.meta)

    @property
    def texts(self) -> tuple[str, ...]:
        """All that holds for what was captured, to be printed with its answers."""
        return (*self.used, *self.taken)

    def _add_note(self, line: str, text: str) -> None:
        self.used[f"{line.rsplit('/', 1)[-1]}: {text}"] = None

    def find_count(self, size: int, *, kind: str = "mask") -> int | None:
        """How many of `size` elements a mask keeps ("mask") or differ ("distinct"); None where nothing is stated."""
        found = self._find_statement(*(("mask", "padding", "experts") if kind == "mask" else (kind,)))
        if found is None:
            return None
        assumption, line = found
        turn = self._count_pass(kind, line)
        share = assumption.value
        if assumption.kind == "experts":
            share = share[turn % len(share)]
            self._add_note(line, f"work of {len(assumption.value)} experts: {_describe_balance(assumption.value)}")
        else:
            words = {"mask": "a mask keeps", "distinct": "values that differ are"}[kind]
            self._add_note(line, f"{words} {float(share):.3g} of its elements")
        taken = self._shares.setdefault((kind, line, turn), Fraction(max(1, round(share * size)), size or 1))
        return min(size, max(min(1, size), round(taken * size)))

    def find_expert_count(self, total: int) -> int | None:
        """How many experts share `total` pieces of work; None where nothing is stated."""
        found = self._find_statement("experts")
        if found is None:
            return None
        self._total = total
        return len(found[0].value)

    def find_decision(self) -> bool | None:
        """Which way a decision on a tensor goes; None where nothing is stated."""
        found = self._find_statement("branch")
        if found is None:
            passes_by_false = find_user_line().rpartition(":")[0].endswith(_INPUT_CHECKS)
            return False if passes_by_false else None
        self._add_note(found[1], f"the decision on a tensor is {found[0].value}")
        return bool(found[0].value)

    def decide_unstated(self) -> bool | None:
        """Which way a decision goes that nobody states: such that checks pass, outside the step False; else None."""
        line = find_user_line()
        passing = find_passing_answer(line)
        if passing is not None:
            self.note_assumption("the check passes", line)
            return passing
        if self.in_step:
            return None
        self.note_assumption("a decision on a tensor outside the step is False", line)
        self._asked[line] = self._asked.get(line, 0) + 1
        return self._asked[line] % _MOST_ASKED == 0  # a loop until something holds ends

    def find_number(self) -> int | None:
        """An integer read from a tensor; None where nothing is stated."""
        found = self._find_statement("item", "lengths")
        if found is None:
            return None
        values = found[0].value
        number = int(values[self._count_pass("item", found[1]) % len(values)])
        self._add_note(found[1], f"numbers read from a tensor are {_format_list(values)}")
        return number

    def find_numbers(self, size: int) -> list[int] | None:
        """`size` integers read as a list; of experts such that they add up to the work that was counted last."""
        found = self._find_statement("lengths", "experts", "item")
        if found is None:
            return None
        assumption, line = found
        if assumption.kind != "experts":
            self._add_note(line, f"numbers read from a tensor are {_format_list(assumption.value)}")
            return [int(assumption.value[i % len(assumption.value)]) for i in range(size)]
        shares, total = assumption.value, self._total
        if total is None or size % len(shares):
            return None
        self._add_note(line, f"work of {len(shares)} experts: {_describe_balance(shares)}")
        parts = [round(shares[i % len(shares)] * total * len(shares) / size) for i in range(size)]
        parts[-1] = max(0, parts[-1] + total - sum(parts))
        return parts


def _describe_balance(shares: Sequence[Fraction]) -> str:
    busiest = float(max(shares)) * len(shares)
    return "equal" if busiest < 1.001 else f"the busiest has {busiest:.3g} times the mean"


def _format_list(values: Sequence[int]) -> str:
    texts = [str(value) for value in values[:6]]
    return ", ".join(texts) + (", ..." if len(values) > 6 else "") + (" in turn" if len(values) > 1 else "")


_INPUT_CHECKS = ("torchrec/sparse/jagged_tensor_validator.py",)
"""Files of libraries that ask whether inputs are wrong: those of a run that goes well are not."""
_current: ContextVar[Assumptions] = ContextVar("assumptions")


def get_assumptions() -> Assumptions:
    """Those that hold for the capture that is running."""
    return _current.get(_NONE)


_NONE = Assumptions()


@contextmanager
def use_assumptions(assume: Assume | None) -> Iterator[Assumptions]:
    """Lets these hold inside the block."""
    token = _current.set(Assumptions(read_assumptions(assume)))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def read_assumptions(assume: Assume | None) -> tuple[Assumption, ...]:
    """Statements from a mapping or from texts `KIND[@PLACE]=VALUE`."""
    if assume is None:
        return ()
    items = assume.items() if isinstance(assume, Mapping) else [_split_place(text) for text in assume]
    return tuple(_read_assumption(str(key), value) for key, value in items)


def _split_place(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise TraincastError(f"assumption {shorten_value(text)} must be KIND[@FILE:LINE]=VALUE, for instance mask=0.15")
    return key, value


def _read_assumption(key: str, value: object) -> Assumption:
    kind, _, place = key.partition("@")
    if kind not in KINDS:
        raise make_unknown_error("assumption", kind, KINDS, f"Choose from {', '.join(KINDS)}.")
    if place and not place.rpartition(":")[2].isdigit():
        raise TraincastError(
            f"assumption {shorten_value(key)}: its place must be FILE:LINE or a line, as in {kind}@train.py:42"
        )
    try:
        read = _READERS[kind](value)
    except (TypeError, ValueError, ZeroDivisionError):
        raise TraincastError(f"assumption {kind}={shorten_value(value)} means nothing; give {_FORMS[kind]}") from None
    return Assumption("mask" if kind == "padding" else kind, place, read)


def _read_share(value: object) -> Fraction:
    share = Fraction(str(value)).limit_denominator(1_000_000)
    if not 0 <= share <= 1:
        raise ValueError
    return share


def _read_truth(value: object) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ValueError
    return str(value).lower() == "true"


def _read_integers(value: object) -> tuple[int, ...]:
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    numbers = tuple(int(str(part)) for part in parts)
    if not numbers or min(numbers) < 0:
        raise ValueError
    return numbers


def _read_experts(value: object) -> tuple[Fraction, ...]:
    """Shares of the work: equal, or falling in a line from the busiest."""
    count, _, skew = str(value).partition(":")
    number = int(count)
    if not 1 <= number <= _MOST_EXPERTS:
        raise ValueError
    busiest = Fraction(1) if skew in ("", "balanced") else Fraction(skew).limit_denominator(1000)
    if not 1 <= busiest <= 2:
        raise ValueError
    steps = max(1, number - 1)
    return tuple((busiest - (busiest - 1) * 2 * Fraction(i, steps)) / number for i in range(number))


_READERS: dict[str, Callable[[object], Any]] = {
    "mask": _read_share,
    "distinct": _read_share,
    "padding": lambda value: 1 - _read_share(value),
    "branch": _read_truth,
    "item": _read_integers,
    "lengths": _read_integers,
    "experts": _read_experts,
}
_FORMS = {
    **dict.fromkeys(("mask", "distinct", "padding"), "a share from 0 to 1"), "branch": "true or false",
    **dict.fromkeys(("item", "lengths"), "integers, separated by commas"),
    "experts": "how many there are, and perhaps how much busier than the mean the busiest is: 8, or 8:1.5 (1 to 2)",
}  # fmt: skip
