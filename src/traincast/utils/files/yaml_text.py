"""Untrusted YAML: plain values only, and no more of them than the text could spell out."""

from __future__ import annotations

import re
from typing import Any

import yaml

from traincast.utils.errors import TraincastError, shorten_value
from traincast.utils.files.limits import MAX_DEPTH, MAX_DIGITS, MAX_VALUES

_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "null", "map", "seq")}
_BOOL = re.compile("^(?:true|True|TRUE|false|False|FALSE)$")


class _PlainLoader(yaml.SafeLoader):
    """PyYAML's safe loader without dates, merges and sets, and with text as keys, each once. As in YAML 1.2, `on`,
    `off`, `yes` and `no` are text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own class attribute
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _PLAIN_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_document(self) -> Any:
        node = super().compose_document()
        if node is not None:
            _check_size(node)
        return node

    def construct_plain_mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise _make_error(key_node, f"key {shorten_value(key)} is no text")
            if str(key) in content:
                raise _make_error(key_node, f"key {shorten_value(str(key))} stands there twice; give it once")
            content[str(key)] = self.construct_object(value_node, deep=True)
        return content

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        if len(node.value) > MAX_DIGITS:
            raise _make_error(node, f"a number with {len(node.value)} digits; give a shorter one")
        whole = node.tag.endswith(":int")
        try:
            return self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)
        except (ValueError, IndexError):
            raise _make_error(node, f"{shorten_value(node.value)} is no number") from None

    def construct_anything_else(self, node: yaml.Node) -> Any:
        raise _make_error(node, f"the tag {shorten_value(node.tag)} is not read; give plain values")


_PlainLoader.add_constructor("tag:yaml.org,2002:map", _PlainLoader.construct_plain_mapping)
_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_number)
_PlainLoader.add_constructor("tag:yaml.org,2002:float", _PlainLoader.construct_number)
for _kind in ("binary", "timestamp", "omap", "pairs", "set"):
    _PlainLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _PlainLoader.construct_anything_else)
_PlainLoader.add_constructor(None, _PlainLoader.construct_anything_else)


_PlainLoader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))


def load_yaml(text: str, where: str) -> Any:
    """The one document of a YAML text; `where` begins every complaint."""
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise TraincastError(f"{where}: not valid YAML{line}: {problem}") from None
    except RecursionError:
        raise TraincastError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise TraincastError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from None


def _make_error(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _check_size(node: yaml.Node) -> None:
    """Rejects a document whose aliases, written out, are too many values or too deep; each node is counted once."""
    sizes: dict[int, int] = {}
    left: list[tuple[yaml.Node, int, bool]] = [(node, 0, False)]
    while left:
        item, depth, children_done = left.pop()
        if id(item) in sizes and not children_done:
            continue
        if depth > MAX_DEPTH:
            raise _make_error(item, f"nested more than {MAX_DEPTH} deep")
        inner = _list_children(item)
        if not children_done:
            left.append((item, depth, True))
            left.extend((child, depth + 1, False) for child in inner)
            continue
        sizes[id(item)] = 1 + sum(sizes.get(id(child), 1) for child in inner)
        if sizes[id(item)] > MAX_VALUES:
            raise _make_error(item, f"more than {MAX_VALUES:,} values with its aliases written out")


def _list_children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
