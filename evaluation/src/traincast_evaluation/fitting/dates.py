"""When the numbers of a profile were first fitted: the same data give the same bytes, and the date is true."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path

from traincast.utils.errors import TraincastError

# the date is a line of its own, first in the provenance, or in the file where that is nothing but provenance
_LINE = re.compile(r'\n +"date": "([^"]*)",')
_PLACE = re.compile(r'"provenance": \{(?=\n( +)")')
_PLACE_IN_PROVENANCE = re.compile(r'\A\{(?=\n( +)")')


def date_profiles(made: Path, shipped: Path) -> None:
    """Writes its date into every profile in the folder `made`.

    It is that of the profile of this name in `shipped` where nothing but the date differs, and today's elsewhere.
    """
    day = read_fitting_date()
    for path in sorted(made.glob("*.json")):
        text = _LINE.sub("", path.read_text(encoding="utf-8"))
        date = _read_shipped_date(path, text, shipped / path.name) or day
        place = _PLACE.search(text) or _PLACE_IN_PROVENANCE.search(text)
        assert place is not None, f"{path.name} has no provenance"
        line = f'\n{place[1]}"date": "{date}",'
        path.write_text(text[: place.end()] + line + text[place.end() :], encoding="utf-8")


def read_fitting_date() -> str:
    """This day as YYYY-MM-DD in UTC, or the one of SOURCE_DATE_EPOCH (seconds since 1970) where that is set."""
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if text is None:
        return datetime.now(UTC).date().isoformat()
    try:
        return datetime.fromtimestamp(int(text), UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):
        message = f"SOURCE_DATE_EPOCH is {text!r}, which is no time: give seconds since 1970, or unset it."
        raise TraincastError(message) from None


def _read_shipped_date(path: Path, undated: str, shipped: Path) -> str | None:
    """The date of the shipped profile; None if it has none, or if anything else differs."""
    if not shipped.is_file():
        return None
    before = shipped.read_text(encoding="utf-8")
    date = _LINE.search(before)
    if date is None or _LINE.sub("", before) != undated:
        return None
    numbers, numbers_before = path.with_suffix(".npz"), shipped.with_suffix(".npz")
    if numbers.is_file() != numbers_before.is_file():
        return None
    if numbers.is_file() and numbers.read_bytes() != numbers_before.read_bytes():
        return None
    return date[1]
