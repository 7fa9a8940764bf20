"""Edits by name: what each takes, which exclude each other, and how a text such as `batch-size=4096` is applied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module

from traincast.simulator.scenario.resolved import Resolved
from traincast.simulator.scenario.scenario import FieldInfo, list_scenario_fields
from traincast.utils.errors import TraincastError, make_unknown_error

_FAMILIES = ("hardware", "description", "step")
_FIELDS_AFTER = "description"  # fields of the scenario are set before sizes and ops are edited
_RISKS = {"seq_len": "accuracy: other samples", "global_batch": "accuracy: another batch"}
_NOT_EDITED = ("workload", "compiled")  # another step; the edit `compile`
MOST_EDITS = 32
"""Of one what-if."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A value of an edit that is tried unasked: to save `time`, or memory of a step that has too little `room`. Each
    says of what: "layouts" of Transformers over GPUs, other "steps", "all" or "" (of none)."""

    value: str
    time: str = "all"
    room: str = ""


_TRIALS = {
    "allocator": (Trial("expandable_segments:True", "", "all"),),
    "attention": (Trial("sdpa", "all", "steps"),),
    "loss": (Trial("fused", "layouts", "layouts"),),
    "offload": (Trial("activations", "", "all"), Trial("optimizer", "", "all")),
    "optimizer_state": (Trial("bf16", "", "all"), Trial("int8", "", "all")),
    "tp": tuple(Trial(number, "layouts", "layouts") for number in "248"),
}  # of plain fields


@dataclass(frozen=True, kw_only=True)
class Value:
    """What an edit is given: its text after `=`, and what stands after `:` of its name ("": nothing)."""

    text: str
    target: str = ""
    edit: str = ""

    def whole(self, *, least: int = 1, most: int = 1 << 40) -> int:
        """An integer in a range."""
        text = self.text.replace("_", "")
        if not (text.isascii() and text.isdecimal() and len(text) <= 15):
            raise TraincastError(f"{self.edit}={self.text}: give an integer from {least} to {most}")
        number = int(text)
        if not least <= number <= most:
            near = least if number < least else most
            raise TraincastError(
                f"{self.edit}={number} is out of range; give {least} to {most} (the nearest is {near})"
            )
        return number

    def factor(self, *, least: float = 0.01, most: float = 100.0) -> float:
        """A positive number in a range; `x2` is 2."""
        try:
            number = float(self.text.removeprefix("x"))
        except ValueError:
            number = float("nan")
        if not number == number:
            raise TraincastError(f"{self.edit}={self.text}: give a number from {least:g} to {most:g}, such as 2")
        if not least <= number <= most:
            near = least if number < least else most
            x = "x" if self.text.startswith("x") else ""
            raise TraincastError(
                f"{self.edit}={x}{number:g} is out of range; give {x}{least:g} to {x}{most:g} (the nearest is "
                f"{x}{near:g})"
            )
        return number

    def choice(self, choices: Sequence[str]) -> str:
        """One of some words."""
        if self.text not in choices:
            raise make_unknown_error(f"{self.edit} value", self.text, choices, f"Choose from {', '.join(choices)}.")
        return self.text


Apply = Callable[[Resolved, Value], Resolved]


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A named edit. `takes` is what stands after `=` ("": nothing), `target` what stands after `:` of its name.

    `excludes` names edits that cannot be applied alongside it. `risk` is what it may cost besides time: accuracy,
    memory, work; `risks` says it of single values.
    """

    name: str
    what: str
    apply: Apply
    takes: str = ""
    target: str = ""
    excludes: tuple[str, ...] = ()
    risk: str = ""
    risks: Mapping[str, str] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()

    @property
    def written(self) -> str:
        """How it is written: `batch-size=N`, `speed:FAMILY=N`."""
        return self.name + (f":{self.target}" if self.target else "") + (f"={self.takes}" if self.takes else "")


_EDITS: dict[str, Edit] = {}


def register_edit(
    name: str, what: str, *, takes: str = "", target: str = "", excludes: tuple[str, ...] = (), risk: str = "",
    risks: Mapping[str, str] | None = None, trials: tuple[Trial, ...] = (),
) -> Callable[[Apply], Apply]:  # fmt: skip
    """Registers a function as the edit of this name."""

    def register(apply: Apply) -> Apply:
        assert name not in _EDITS, name
        _EDITS[name] = Edit(
            name=name, what=what, apply=apply, takes=takes, target=target, excludes=excludes, risk=risk,
            risks=risks or {}, trials=trials,
        )  # fmt: skip
        return apply

    return register


@cache
def list_edits() -> dict[str, Edit]:
    """Every edit by name, in the order in which they are applied: hardware, model, plain fields, sizes, ops."""
    for family in _FAMILIES:
        import_module(f"traincast.planner.what_if.edits.{family}")
    ordered: dict[str, Edit] = {}
    for family in _FAMILIES:
        ordered |= {name: one for name, one in _EDITS.items() if one.apply.__module__.endswith(f".{family}")}
        if family == _FIELDS_AFTER:
            plain = (_make_field_edit(info) for name, info in list_scenario_fields().items() if name not in _NOT_EDITED)
            ordered |= {one.name: one for one in plain if one.name not in _EDITS}
    return ordered


def list_trials(why: str, *, is_layout: bool) -> list[str]:
    """Edits that are tried unasked as texts: `why` is "time" or "room"."""
    of = "layouts" if is_layout else "steps"
    return [
        f"{name}={trial.value}" if edit.takes else name
        for name, edit in list_edits().items() for trial in edit.trials if getattr(trial, why) in ("all", of)
    ]  # fmt: skip


def _make_field_edit(info: FieldInfo) -> Edit:
    """The edit that sets a field of the scenario and does nothing else."""

    def apply(resolved: Resolved, value: Value) -> Resolved:
        return resolved.changed(**{info.name: True if info.kind == "flag" else info.parse(value.text)})

    kinds = {"choice": "|".join(map(str, info.choices)), "flag": "", "integer": "N", "number": "N"}
    return Edit(
        name=info.option.removeprefix("--"), what=info.help, apply=apply, takes=kinds.get(info.kind, "TEXT"),
        risk=_RISKS.get(info.name, ""), trials=_TRIALS.get(info.name, ()),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """An edit that was asked for, with its value."""

    edit: Edit
    value: Value

    @property
    def text(self) -> str:
        """As it is written on the command line."""
        name = self.edit.name + (f":{self.value.target}" if self.value.target else "")
        return f"{name}={self.value.text}" if self.edit.takes else name

    @property
    def risk(self) -> str:
        """What it may cost besides time."""
        return self.edit.risks.get(self.value.text, self.edit.risk)


def parse_edit(text: str) -> Requirement:
    """The edit that a text such as `batch-size=4096`, `speed:gemm=2` or `cuda-graph` names."""
    left, equals, value = text.strip().partition("=")
    left = left.strip()
    name, _, target = left.partition(":")
    known = list_edits()
    if name not in known:
        raise make_unknown_error("edit", name, known, _LISTED)
    found = known[name]
    if found.takes and not (equals and value.strip()):
        raise TraincastError(f"edit '{name}' needs a value: {found.written}")
    if equals and not found.takes:
        raise TraincastError(f"edit '{name}' takes no value; write {found.written}")
    if bool(target) != bool(found.target):
        raise TraincastError(f"edit '{format_name(left)}' is written {found.written}")
    return Requirement(edit=found, value=Value(text=value.strip(), target=target, edit=left))


_LISTED = "'traincast whatif' shows them with `list`, and so does list_edits() in Python."


def format_name(name: str) -> str:
    """A name as messages repeat it."""
    return name if len(name) <= 80 and name.isprintable() else "?"


def parse_edits(texts: Iterable[str]) -> tuple[Requirement, ...]:
    """Edits in the order in which they are applied; two that exclude each other are rejected."""
    wanted = [parse_edit(text) for text in texts]
    if len(wanted) > MOST_EDITS:
        raise TraincastError(f"{len(wanted)} edits are too many for one what-if; give at most {MOST_EDITS}")
    seen: dict[tuple[str, str], str] = {}
    for one in wanted:
        key = (one.edit.name, one.value.target)
        if key in seen:
            raise TraincastError(f"'{seen[key]}' and '{one.text}' are the same edit twice; give one of them")
        seen[key] = one.text
    names = {one.edit.name: one.text for one in wanted}
    for one in wanted:
        for other in one.edit.excludes:
            if other in names:
                raise TraincastError(f"'{one.text}' and '{names[other]}' exclude each other; give one of them")
    order = list(list_edits())
    return tuple(sorted(wanted, key=lambda one: order.index(one.edit.name)))


def apply_edits(resolved: Resolved, wanted: Iterable[Requirement]) -> Resolved:
    """The step with all edits; what cannot be applied says why."""
    for one in wanted:
        try:
            resolved = one.edit.apply(resolved, one.value)
        except TraincastError as error:
            named = str(error).startswith(one.edit.name)
            raise TraincastError(str(error) if named else f"edit {one.text}: {error}") from None
    return resolved
