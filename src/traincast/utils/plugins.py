"""What other installed distributions add to Traincast. They name it as entry points, by groups.

A group is read when something of it is first asked for: a prediction of a built-in model reads none. Groups are

- `traincast.commands`: an `AddedCommand` by the name of the command,
- `traincast.fit`: `shipped`, the module that rebuilds the shipped profiles for `traincast fit`,
- `traincast.definitions`: `steps`, the module that writes steps of built-in models in PyTorch,
- `traincast.programs`: `published`, the function that gives published programs by name,
- `traincast.lowerings`: the module that registers how ops become kernels, by their name space,
- `traincast.pages`: `evaluation`, the module that draws reports of evaluations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMANDS, FIT, PAGES = "traincast.commands", "traincast.fit", "traincast.pages"
DEFINITIONS, PROGRAMS = "traincast.definitions", "traincast.programs"
LOWERED = "traincast.lowerings"
"""Groups of entry points."""


@dataclass(frozen=True, slots=True)
class AddedCommand:
    """A command of another distribution: what it is for, and the module that has its `add_arguments` and `run`."""

    summary: str
    module: str


@cache
def find_plugins(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name; nothing of them is imported."""
    from importlib.metadata import entry_points  # takes longer to import than a prediction

    return {point.name: point for point in entry_points(group=group)}


def load_plugin(group: str, name: str) -> Any:
    """What an entry point names, imported; None where nobody has it."""
    point = find_plugins(group).get(name)
    return None if point is None else point.load()


def require_plugin(group: str, name: str, needed_for: str) -> Any:
    """What an entry point names, imported; without it, an error that says what to install."""
    found = load_plugin(group, name)
    if found is None:
        raise missing_evaluation(needed_for)
    return found


def missing_evaluation(needed_for: str) -> TraincastError:
    """The error of a thing that only the second distribution has."""
    return TraincastError(
        f"{needed_for} needs the distribution traincast-evaluation: run `pip install ./evaluation` in a source checkout"
    )
