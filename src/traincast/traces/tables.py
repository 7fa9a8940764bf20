"""Growing columns that spill to disk, and string tables: what keeps memory flat however long the trace."""

from __future__ import annotations

import tempfile
from collections.abc import Hashable
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt

from traincast.utils.errors import TraincastError

Table = npt.NDArray[np.void]
K = TypeVar("K", bound=Hashable)

_ROWS_IN_MEMORY = 1 << 16  # about 10 MB of events
_MAX_TEXT = 1 << 26  # bytes of distinct names or argument lists


class Interner(dict[K, int]):
    """Numbers things in the order they first appear: `ids[thing]`."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what, self._bytes = what, 0

    def __missing__(self, key: K) -> int:
        self._bytes += len(key) if isinstance(key, (str, bytes)) else 64
        if self._bytes > _MAX_TEXT:
            raise TraincastError(f"the trace has more than {_MAX_TEXT >> 20} MB of distinct {self._what}")
        number = self[key] = len(self)
        return number


class TableBuilder:
    """Appends blocks of rows; past a size, rows go to an unnamed temporary file that is mapped back at the end."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._blocks: list[Table] = []
        self._held, self._spilled = 0, 0
        self._file: IO[bytes] | None = None

    def append_block(self, block: Table) -> None:
        """Adds rows of the table's dtype."""
        self._blocks.append(block)
        self._held += len(block)
        if self._held > _ROWS_IN_MEMORY:
            self._spill_to_disk()

    def finish_table(self) -> Table:
        """All rows, in memory or mapped; the builder is used up."""
        if self._file is None:
            return np.concatenate(self._blocks) if self._blocks else np.empty(0, dtype=self.dtype)
        self._spill_to_disk()
        self._file.flush()
        mapped = np.memmap(self._file, dtype=self.dtype, mode="r+", shape=(self._spilled,))
        return mapped.view(np.ndarray)  # single values of a memmap take five times as long to read

    def _spill_to_disk(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="traincast-")  # noqa: SIM115 - lives as long as the map
            for block in self._blocks:
                self._file.write(block.tobytes())
        except OSError as error:
            raise TraincastError(
                f"no room for the trace's columns in '{tempfile.gettempdir()}': {error.strerror}"
            ) from None
        self._blocks = []
        self._spilled += self._held
        self._held = 0
