"""Where a script has its batch size when its arguments do not say: options, data loaders, numbers called `batch_size`.

A script is run at another batch size with all of them changed: arguments and options named after the batch, data
loaders, numbers of its own files that stand for the batch by name (`batch_size = 32`, `fit(batch_size=32)`,
`{"batch_size": 32}`), and the first dimension of inputs that it makes (`torch.randn(32, 10)`). Only numbers equal to
the batch size are taken.
"""

from __future__ import annotations

import argparse
import ast
import runpy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from torch.utils import data

from traincast.capturing.errors import is_internal_file
from traincast.capturing.patches import Patches

_SHORT = ("bs", "bsz", "b")
_OTHER = ("batches", "num_batch", "n_batch", "norm", "accum", "index", "idx")  # no sizes of a batch
_SHAPED = ("rand", "randn", "zeros", "ones", "empty", "full", "randint", "normal")
_MOST_NAMED = 4


class BatchPlaces:
    """The places of a script that have its batch size; `found` are those met in its last run."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self._size = self._to = 0

    def describe(self) -> str:
        """Where they are."""
        more = len(self.found) - _MOST_NAMED
        named = ", ".join(list(self.found)[:_MOST_NAMED])
        return f"{named}{f' and {more} more' if more > 0 else ''}"

    def change_arguments(self, arguments: Sequence[str]) -> list[str]:
        """The script's own arguments with another batch size."""
        told = list(arguments)
        for place, argument in enumerate(arguments):
            option, equals, value = argument.partition("=")
            if equals and _names_batch(option) and self._is_size(value):
                told[place] = f"{option}={self._note(option)}"
            elif place and _names_batch(arguments[place - 1]) and self._is_size(argument):
                told[place] = str(self._note(arguments[place - 1]))
        return told

    @contextmanager
    def change_size(self, size: int, to: int) -> Iterator[None]:
        """Lets a script that has the batch size `size` run with another inside the block."""
        self._size, self._to = size, to
        self.found.clear()
        with Patches() as patches:
            self._change_options(patches)
            self._change_loaders(patches)

            @patches.wrap(SourceFileLoader, "get_code")
            def get_code(load: Any, loader: Any, fullname: str) -> Any:
                path = loader.get_filename(fullname)
                own = not is_internal_file(path) and "site-packages" not in path
                return self._compile_changed(Path(path).read_bytes(), path) if own else load(loader, fullname)

            patches.set_attribute(runpy, "compile", lambda text, path, mode: self._compile_changed(text, path))
            yield

    def _is_size(self, value: object) -> bool:
        return (type(value) is int or isinstance(value, str)) and str(value) == str(self._size)

    def _note(self, place: str) -> int:
        self.found[place] = None
        return self._to

    def _change_options(self, patches: Patches) -> None:
        @patches.wrap(argparse.ArgumentParser, "parse_known_args")
        def parse_known_args(parse: Any, parser: Any, *args: Any, **kwargs: Any) -> Any:
            read, rest = parse(parser, *args, **kwargs)
            for name, value in list(vars(read).items()):
                if type(value) is int and _names_batch(name) and self._is_size(value):
                    setattr(read, name, self._note(f"option {name}"))
            return read, rest

    def _change_loaders(self, patches: Patches) -> None:
        @patches.wrap(data.DataLoader, "__init__")
        def init(make: Any, loader: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
            if self._is_size(batch_size):
                batch_size = self._note(type(loader).__name__)
            make(loader, dataset, batch_size, *args, **kwargs)

    def _compile_changed(self, text: Any, path: str) -> CodeType:
        tree = ast.parse(text, path)
        for number in _list_batch_numbers(tree):
            if type(number.value) is int and self._is_size(number.value):
                number.value = self._note(f"{Path(path).name}:{number.lineno}")
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)  # not our `annotations`
        return code


def _names_batch(name: str) -> bool:
    plain = name.lstrip("-").lower().replace("-", "_").rpartition(".")[2]
    return plain in _SHORT or ("batch" in plain and not any(word in plain for word in _OTHER))


def _list_batch_numbers(tree: ast.AST) -> Iterator[ast.Constant]:
    """Numbers that stand for a batch size by name, or as the first dimension of a tensor that is made."""
    for node in ast.walk(tree):
        for name, value in _list_named_values(node):
            if _names_batch(name):
                yield from _list_constants(value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SHAPED:
            yield from _list_first_dimensions(node)


def _list_constants(value: ast.expr | None) -> Iterator[ast.Constant]:
    """The constants that a value may be: itself, either side of `a if b else c` and `a or b`, a call's default."""
    if isinstance(value, ast.Constant):
        yield value
    parts = {ast.IfExp: ("body", "orelse"), ast.BoolOp: ("values",), ast.Call: ("args",)}.get(type(value), ())
    for part in parts:
        held = getattr(value, part)
        for item in held if isinstance(held, list) else [held]:
            yield from _list_constants(item)


def _list_named_values(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """(name, value) of assignments, arguments by name, defaults of parameters and entries of mappings."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            pairs = (
                zip(target.elts, node.value.elts, strict=False)
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                else [(target, node.value)]
            )
            yield from ((_find_name(one), value) for one, value in pairs)
    elif isinstance(node, ast.AnnAssign):
        yield _find_name(node.target), node.value
    elif isinstance(node, ast.keyword):
        yield node.arg or "", node.value
    elif isinstance(node, ast.arguments):
        positional = [*node.posonlyargs, *node.args]
        for given, default in zip(reversed(positional), reversed(node.defaults), strict=False):
            yield given.arg, default
        yield from ((one.arg, value) for one, value in zip(node.kwonlyargs, node.kw_defaults, strict=True))
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            yield str(key.value) if isinstance(key, ast.Constant) else "", value


def _find_name(target: ast.expr) -> str:
    if isinstance(target, ast.Name):
        return target.id
    return target.attr if isinstance(target, ast.Attribute) else ""


def _list_first_dimensions(call: ast.Call) -> Iterator[ast.Constant]:
    sizes = [value.value for value in call.keywords if value.arg == "size"] or list(call.args)
    tuples = [size for size in sizes if isinstance(size, ast.Tuple | ast.List) and len(size.elts) > 0]
    first = tuples[0].elts[0] if tuples else (call.args[0] if len(call.args) > 1 else None)
    if isinstance(first, ast.Constant):
        yield first
