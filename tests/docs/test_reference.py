"""The reference follows the code: every verb and option, every call of the API."""

from __future__ import annotations

import re
import runpy

import traincast
import traincast_evaluation
from tests.docs.pages import DOCS, ROOT
from traincast.app.cli.verbs import known_verbs


def test_command_line_page_is_what_its_script_writes():
    script = runpy.run_path(str(ROOT / "scripts" / "write_command_line.py"))

    page = (DOCS / "reference" / "command-line.md").read_text(encoding="utf-8")
    assert page == script["page_text"](), "run python scripts/write_command_line.py"
    assert re.findall(r"(?m)^## (.*)$", page) == list(known_verbs())


def test_prediction_page_is_what_its_script_writes():
    script = runpy.run_path(str(ROOT / "scripts" / "write_prediction.py"))

    page = (DOCS / "reference" / "prediction.md").read_text(encoding="utf-8")
    assert page == script["page_text"](), "run python scripts/write_prediction.py"


def test_api_page_has_every_call():
    page = (DOCS / "reference" / "index.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"(?m)^::: traincast\.(\w+)$", page))

    assert {name for name in traincast.__all__ if name != "__version__"} <= shown
    assert set(traincast_evaluation.__all__) == set(re.findall(r"(?m)^::: traincast_evaluation\.(\w+)$", page))
