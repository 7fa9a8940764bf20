"""What a name given to a report is: a trace, or something else."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from traincast.traces.formats import SUFFIXES
from traincast.traces.scan import ByteSource
from traincast.utils.errors import TraincastError

_SNIFFED = 1 << 16  # bytes: a configuration of a model names itself in its first lines
_SWEEP = re.compile(rb'\s*\{\s*"workload"\s*:\s*"[^"]*",\s*"axes"\s*:')
_EVALUATION = re.compile(rb'\s*\{\s*"summary"\s*:\s*\[')
# configurations of Hugging Face, and what 'evaluate' and 'sweep' write
_OTHER = re.compile(
    rb'"(?:model_type|architectures|hidden_size|hidden_act)"|\A' + _EVALUATION.pattern + rb"|\A" + _SWEEP.pattern
)


def is_trace(source: str) -> bool:
    """Whether a name is that of a folder of traces or of a trace file; a `config.json` of a model is none."""
    with suppress(OSError, ValueError):
        path = Path(source)
        if source.strip() and path.is_dir():
            return True
        return source.endswith(SUFFIXES) and path.is_file() and not _OTHER.search(_read_start(path))
    return False


def is_evaluation(source: str) -> bool:
    """Whether a name is that of a file which 'evaluate' wrote as JSON."""
    return _matches_start(source, _EVALUATION)


def is_sweep(source: str) -> bool:
    """Whether a name is that of a file which 'sweep' wrote as JSON."""
    return _matches_start(source, _SWEEP)


def _matches_start(source: str, how: re.Pattern[bytes]) -> bool:
    with suppress(OSError, ValueError):
        return source.endswith(".json") and Path(source).is_file() and how.match(_read_start(Path(source))) is not None
    return False


def _read_start(path: Path) -> bytes:
    """The first bytes of a file, unpacked; what cannot be read has none, and its reader says what is wrong with it."""
    try:
        source = ByteSource(path)
        try:
            return source.read(_SNIFFED)
        finally:
            source.close()
    except TraincastError:
        return b""
