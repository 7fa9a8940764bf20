"""What a name given to a report is: a trace, or something else."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from traincast.errors import TraincastError
from traincast.traces.formats import SUFFIXES
from traincast.traces.source import ByteSource

_SNIFFED = 1 << 16  # bytes: a configuration of a model names itself in its first lines
_CONFIGURATION = re.compile(rb'"(?:model_type|architectures|hidden_size|hidden_act)"')  # of Hugging Face


def is_trace(source: str) -> bool:
    """Whether a name is that of a folder of traces or of a trace file; a `config.json` of a model is none."""
    with suppress(OSError, ValueError):
        path = Path(source)
        if source.strip() and path.is_dir():
            return True
        return source.endswith(SUFFIXES) and path.is_file() and not _is_configuration(path)
    return False


def _is_configuration(path: Path) -> bool:
    try:
        source = ByteSource(path)
    except TraincastError:  # the reader of traces says what is wrong with it
        return False
    try:
        return _CONFIGURATION.search(source.read(_SNIFFED)) is not None
    except TraincastError:
        return False
    finally:
        source.close()
