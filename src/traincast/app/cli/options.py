"""Names of parameters in messages, as the command line writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PARAMETER = re.compile(r"`([a-z0-9_]+)(?:='?([^'`]*)'?)?`")


def name_options(message: str, options: Mapping[str, str]) -> str:
    """A message with the parameters it names between backticks written as options of the command.

    >>> in_options("leave out `seq_len`", {"seq_len": "--seq-len"})
    'leave out --seq-len'
    >>> in_options("add `mode='inference'` to `predict`", {"mode": "--mode"})
    'add --mode inference to `predict`'
    """

    def written(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in options:
            return match[0]
        return options[name] if value is None else f"{options[name]} {value}"

    return _PARAMETER.sub(written, message)
