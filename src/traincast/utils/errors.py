"""The one exception type for a user's mistake: a single clear line, exit code 2 at the command line."""

from __future__ import annotations

import difflib
import re
import reprlib
import resource
from collections.abc import Iterable
from typing import Any


class TraincastError(ValueError):
    """Bad input. The message names the thing that is wrong and the remedy, on one line."""


INSTALL_TORCHREC = "pip install 'traincast[torchrec]' && pip install --no-deps torchrec==1.8.0"
"""The one command: what TorchRec requires of its own accord pulls the CUDA build of FBGEMM."""
TORCH_MEMORY = 1 << 30
"""Bytes of address space that PyTorch, TorchRec and FBGEMM are loaded in."""


def check_memory_limit(least: int, what: str) -> None:
    """Rejects a limit of this process below `least` bytes of address space: with less, the libraries of `what` end the
    process, or fail in the middle of an import, in words that say nothing of memory."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < least:
        raise TraincastError(f"a process may take {limit >> 20} MiB here; {what} needs {least >> 20}")


_LONGEST_NAME = 300  # characters of a name that a message repeats; nothing that is known has as many


def make_unknown_error(kind: str, name: str, known: Iterable[str], remedy: str) -> TraincastError:
    """An error for a name nobody knows, with the nearest known names."""
    is_short = len(name) <= _LONGEST_NAME and name.isprintable()
    nearest = find_nearest(name, known) if is_short else []
    hint = f" Did you mean {', '.join(nearest)}?" if nearest else ""
    quoted = f"'{name}'" if is_short else shorten_value(name)
    return TraincastError(f"unknown {kind} {quoted}.{hint} {remedy}")


_MEANT = {
    "amp": "dtype", "autocast": "dtype", "b": "batchsize", "bf16": "dtype", "bs": "batchsize", "compile": "compiled",
    "compiled": "compile", "contextlength": "seqlen", "ddp": "gpus", "device": "on", "eval": "inference",
    "expertparallel": "ep", "format": "json", "fp16": "dtype", "fp8": "dtype", "gpu": "on",
    "gradientcheckpointing": "checkpoint", "half": "dtype", "hardware": "on", "inference": "mode",
    "maxlength": "seqlen", "mixedprecision": "dtype", "n": "gpus", "nodes": "gpus", "nprocpernode": "gpus",
    "numgpus": "gpus", "output": "out", "perdevicetrainbatchsize": "batchsize", "pipelineparallel": "pp",
    "platform": "on", "precision": "dtype", "recompute": "checkpoint", "sequencelength": "seqlen",
    "tensorparallel": "tp", "verbose": "full", "worldsize": "gpus", "zero1": "zero", "zero2": "zero", "zero3": "zero",
}  # fmt: skip
_MEANT_VALUES = {
    "adamw": "adam", "bfloat16": "bf16", "float": "fp32", "float16": "fp16", "float32": "fp32", "half": "fp16",
}  # fmt: skip
"""What other tools call what has another name here, both without signs."""


def _drop_signs(name: str) -> str:
    return "".join(one for one in name.lower() if one.isalnum())


def find_nearest(name: str, known: Iterable[str], most: int = 4) -> list[str]:
    """Known names that a name may stand for: the one that differs in case and signs only, or the one that other tools
    call so; else longer ones, then those spelt alike, then those that contain it.

    >>> find_nearest("A100", ["v100", "a100-40gb", "dgx-a100", "a100-80gb"])
    ['a100-40gb', 'a100-80gb', 'v100', 'dgx-a100']
    >>> find_nearest("RTX 4090", ["rtx-4090", "rtx-5090"]), find_nearest("bs", ["by", "batch-size"])
    (['rtx-4090'], ['batch-size'])
    """
    by_lower = {one.lower(): one for one in known}
    wanted, plain = name.lower(), _drop_signs(name)
    by_plain = {_drop_signs(one): one for one in by_lower}
    for meant in (plain, _MEANT.get(plain), _MEANT_VALUES.get(plain)):
        if meant and meant in by_plain:
            return [by_lower[by_plain[meant]]]
    whole, first = plain, re.split(r"[^a-z0-9]", wanted)[0]
    inside = sorted((one for one in by_lower if len(one) > 3 and _drop_signs(one) in whole), key=len, reverse=True)
    longer = [one for one in by_lower if wanted and one.startswith(wanted)]
    if len(longer) == 1 and len(plain) > 3:
        return [by_lower[longer[0]]]
    longer = longer or inside[:1]
    longer = longer or [one for one in by_lower if len(first) > 1 and first in one.split("-")]
    alike = difflib.get_close_matches(wanted, by_lower, n=3, cutoff=0.5)
    containing = [one for one in by_lower if len(wanted) > 2 and wanted in one]
    return [by_lower[one] for one in dict.fromkeys([*longer, *alike, *containing])][:most]


def escape_text(text: str) -> str:
    """An untrusted name as it may be shown: line breaks, terminal escapes and the like are written as escapes.

    >>> printable("two" + chr(10) + "lines")
    'two\\\\nlines'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 4
_SHORT.maxstring = _SHORT.maxother = 80  # characters; a message stays on one line
_SHORT.maxlong = 40


def shorten_value(value: Any) -> str:
    """An untrusted value for a message: short, on one line, without escape sequences, however large it is.

    >>> len(shown("a" * 1000)) <= 80
    True
    >>> shown("two" + chr(10) + "lines").isprintable()
    True
    """
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError):  # an integer too long to print
        return f"a {type(value).__name__}"
