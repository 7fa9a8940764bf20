"""The source keeps to the map of docs/packages.toml: who imports whom, and nothing in a circle."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.imports import EVALUATION, PACKAGE, between_modules, cycles, import_graph, imported, modules, package_of

ROOT = Path(__file__).resolve().parent.parent
FREE = {"msgspec", "numpy", "yaml"}
"""What Traincast always requires, and so any room may import."""


def write_map():
    spec = importlib.util.spec_from_file_location("write_map", ROOT / "scripts" / "write_map.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def graph():
    return import_graph()


@pytest.fixture(scope="module")
def packages():
    return write_map().declared_packages()


def edges(graph):
    """Imports between packages, each with one place where it stands."""
    files = modules()
    return {
        (package_of(name), package_of(other)): files[name].name
        for name, others in graph.items()
        for other in others
        if other in graph and package_of(name) != package_of(other)
    }


def test_every_room_and_leaf_module_has_its_row(graph, packages):
    assert set(packages) == {package_of(name) for name in graph}


def test_a_row_names_only_rooms_above_it(packages):
    order = list(packages)
    wrong = {(name, other) for name, row in packages.items() for other in row["imports"]} - {
        (name, other) for at, name in enumerate(order) for other in order[:at]
    }
    assert wrong == set()


def test_every_import_between_rooms_is_declared(graph, packages):
    declared = {(name, other) for name, row in packages.items() for other in row["imports"]}
    undeclared = {edge: place for edge, place in edges(graph).items() if edge not in declared}
    assert undeclared == {}, "an import against the map: move the code, or (left to right) extend docs/packages.toml"


def test_every_declared_import_is_used(graph, packages):
    ours = {name: row for name, row in packages.items() if name != EVALUATION.name}  # that may import any package
    declared = {(name, other) for name, row in ours.items() for other in row["imports"]}
    assert declared - set(edges(graph)) == set(), "the map allows what nobody needs: take it out of docs/packages.toml"


def test_the_users_package_does_not_know_the_second_distribution():
    naming = [path.name for path in PACKAGE.rglob("*.py") if f"{EVALUATION.name}." in path.read_text(encoding="utf-8")]
    assert naming == [], "say it by an entry point: utils/plugins.py"


def test_libraries_are_imported_only_where_the_map_says(graph, packages):
    used = {
        (package_of(name), other)
        for name, others in graph.items()
        for other in others
        if other not in graph and other not in FREE and other not in sys.stdlib_module_names
    }
    assert used <= {(name, library) for name, row in packages.items() for library in row["libraries"]}


def test_rooms_import_each_other_in_no_circle(graph):
    between = {name: set() for name in map(package_of, graph)}
    for name, other in set(edges(graph)):
        between[name].add(other)
    assert cycles(between) == []


def test_modules_import_each_other_in_no_circle(graph):
    assert cycles(between_modules(graph)) == []


def test_documentation_prints_the_same_table():
    writer = write_map()
    page = writer.PAGE.read_text(encoding="utf-8")
    assert writer.page_with_map(page) == page, "run scripts/write_map.py"


def test_circles_are_found_whatever_leads_into_them():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"e"}, "e": {"f"}, "f": {"d"}, "g": {"g"}}

    assert cycles(graph) == [{"b", "c"}, {"d", "e", "f"}]


KNOWN = {
    "traincast",
    "traincast.simulator.schedule",
    "traincast.app.api",
    "traincast.app.cli.main",
    "traincast_evaluation.zoo",
}


def test_imports_are_seen_at_any_depth_lazy_and_in_strings(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from traincast.simulator.schedule import Block\n"
        "def later():\n    from traincast.app import api\n    "
        "import_module('traincast.app.cli.main')\n    import torch.fx\n"
        "    import_module(f'traincast_evaluation.zoo.{name}')\n    ('traincast.unknown', 'traincast')\n"
    )

    names = imported(path, KNOWN)

    assert names == KNOWN - {"traincast"} | {"typing", "torch"}


def test_relative_imports_are_refused(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("from .simulation import blocks\n")

    with pytest.raises(AssertionError, match="imports relatively"):
        imported(path, set())


def test_a_package_that_gives_out_its_modules_names_is_no_circle():
    graph = {"p": {"p.a", "p.b"}, "p.a": {"p.b"}, "p.b": set(), "q": {"q.a"}, "q.a": {"q"}}

    assert cycles(between_modules(graph)) == []
