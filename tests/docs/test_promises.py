"""The page of promises is what its script writes, of the tests and of the runs that are kept."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "write_promises.py"))
TRIES = re.compile(r"\| \d+ \| `tests/promises")  # grows with every option of a scenario


def test_the_page_is_as_written():
    runs = json.loads(SCRIPT["RUNS"].read_text(encoding="utf-8"))

    page, written = (TRIES.sub("", text) for text in (SCRIPT["PAGE"].read_text(), SCRIPT["write_page"](runs)))

    assert page == written
