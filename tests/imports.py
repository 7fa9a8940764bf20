"""What the modules of both distributions import, read from their syntax: at any depth, lazily or for types only."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "traincast"
EVALUATION = ROOT / "evaluation" / "src" / "traincast_evaluation"

Graph = dict[str, set[str]]
"""Names of modules by the name of the module that imports them."""


def modules(*packages: Path) -> dict[str, Path]:
    """Every module's file by its name (`traincast.ir.ops`; a package's `__init__` by the package's name)."""
    names = {}
    for package in packages or (PACKAGE, EVALUATION):
        for path in sorted(package.rglob("*.py")):
            parts = [package.name, *path.relative_to(package).with_suffix("").parts]
            names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def package_of(module: str) -> str:
    """`ir` for `traincast.ir.ops`, `traincast` for the package itself; all of the second distribution
    is `traincast_evaluation`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == PACKAGE.name else parts[0]


def imported(path: Path, known: set[str]) -> set[str]:
    """Every module that a file imports: the package's own ones (`known`) as deep as they are named, strings that name
    one included (`import_module("traincast.…")`; of `f"traincast.app.cli.commands.{verb}"` the package), all others by
    their first name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno} imports relatively"
            names |= {deepest(f"{node.module}.{alias.name}", known) for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {node.value.rstrip(".")} & known if "." in node.value else set()
    return {name if name in known else name.split(".")[0] for name in names}


def deepest(name: str, known: set[str]) -> str:
    """`name` if that is a module of the package, else the module that the name is fetched from."""
    return name if name in known else name.rpartition(".")[0]


def import_graph() -> Graph:
    files = modules()
    return {name: imported(path, set(files)) - {name} for name, path in files.items()}


def between_modules(graph: Graph) -> Graph:
    """Only imports between the package's modules, without those that merely re-export: a package's `__init__` gives
    out its modules' names, and its modules may then import each other, but nothing imports the package back."""
    return {
        name: {other for other in names if other in graph and not other.startswith(f"{name}.")}
        for name, names in graph.items()
    }


def cycles(graph: Graph) -> list[set[str]]:
    """The strongly connected components of more than one node (Tarjan), in order of their smallest names."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            start = stack.index(node)
            components.append(set(stack[start:]))
            del stack[start:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted((component for component in components if len(component) > 1), key=min)
