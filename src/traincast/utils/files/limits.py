"""How much of a small file is read."""

from __future__ import annotations

MAX_BYTES = 1 << 26
"""Bytes of a file that is read whole, unless its reader says less: the largest real one seen here has 12 MB."""
MAX_DEPTH = 64
"""Levels of nesting; the formats that are read nest at most six deep."""
MAX_VALUES = 1_000_000
"""Values of a document, YAML's aliases written out; a set of 100,000 tables has fewer."""
MAX_DIGITS = 40
"""Digits of a number; every size fits in 19."""
MAX_COLUMNS = 10_000
"""Columns of a table; the widest file seen here has 40."""
