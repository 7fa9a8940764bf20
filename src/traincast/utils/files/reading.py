"""Small untrusted files: YAML, TOML, JSON and CSV, read within limits on size, depth, digits and
repeated keys.

Whatever is wrong becomes one `TraincastError` that begins with the file and says what to change. Values that come back
are plain: dicts with text as keys, lists, text, whole and finite numbers, booleans, None.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import stat
import tomllib
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from traincast.utils.errors import TraincastError, shorten_value
from traincast.utils.files.limits import MAX_BYTES, MAX_COLUMNS, MAX_DEPTH, MAX_DIGITS, MAX_VALUES


def read_bytes(path: str | Path, *, most: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file of at most `most`. Pipes, devices and folders are rejected, never waited for."""
    path = Path(path)
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(number, "rb") as file:
            state = os.fstat(number)
            if not stat.S_ISREG(state.st_mode):
                raise TraincastError(f"{format_path(path)}: not a regular file; give the path of a file")
            data = file.read(most + 1) if state.st_size <= most else b""
    except TraincastError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise TraincastError(f"{format_path(path)}: cannot be read ({reason})") from None
    if state.st_size > most or len(data) > most:
        raise TraincastError(
            f"{format_path(path)}: larger than {_format_bytes(most)}; such a file is shorter than that"
        )
    return data


def compute_file_digest(path: str | Path) -> str:
    """A short name of what a file holds; "" for a path that names no file that `read_bytes` takes."""
    try:
        return blake2b(read_bytes(path), digest_size=16).hexdigest()
    except TraincastError:
        return ""


def read_text(path: str | Path, *, most: int = MAX_BYTES) -> str:
    """The UTF-8 text of a file, a byte-order mark left out."""
    try:
        return read_bytes(path, most=most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraincastError(f"{format_path(path)}: not UTF-8 text (byte {error.start})") from None


def format_path(path: str | Path) -> str:
    """A path as messages show it: on one line, printable."""
    text = str(path)
    return text if text.isprintable() else shorten_value(text)


def read_document(path: str | Path, *, most: int = MAX_BYTES) -> Any:
    """What a `.yaml`, `.yml`, `.toml` or `.json` file holds; any other ending is read as JSON."""
    text = read_text(path, most=most)
    parse = {".yaml": parse_yaml, ".yml": parse_yaml, ".toml": parse_toml}.get(Path(path).suffix.lower(), parse_json)
    return parse(text, format_path(path))


def parse_yaml(text: str, where: str) -> Any:
    """The content of a YAML text; `where` begins complaints. Dates are text; tags and repeated keys are rejected."""
    from traincast.utils.files.yaml_text import load_yaml

    content = load_yaml(text, where)
    _check_plain(content, where)
    return content


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The content of a TOML text; `where` begins every complaint. Dates are rejected: nothing asks for one."""
    try:
        content = tomllib.loads(text)
    except RecursionError:
        raise TraincastError(f"{where}: nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        raise TraincastError(f"{where}: not valid TOML: {error}") from None
    except ValueError:  # an integer with more digits than Python converts
        raise TraincastError(f"{where}: a number with more than {MAX_DIGITS} digits; give a shorter one") from None
    _check_plain(content, where)
    return content


def parse_json(text: str | bytes, where: str) -> Any:
    """The content of a JSON text; `where` begins every complaint. NaN and repeated keys are rejected."""
    try:
        content = json.loads(text, parse_int=_parse_integer, object_pairs_hook=_reject_repeated_keys)
    except TraincastError as error:
        raise TraincastError(f"{where}: {error}") from None
    except RecursionError:
        raise TraincastError(f"{where}: nested too deeply") from None
    except ValueError as error:  # not JSON, or bytes that are no text
        raise TraincastError(f"{where}: not JSON ({error})") from None
    _check_plain(content, where)
    return content


def read_csv(path: str | Path, *, most: int = MAX_BYTES, required: tuple[str, ...] = ()) -> list[dict[str, str]]:
    """The rows of a CSV file by column name; all have the columns of the first line, where each stands once."""
    where = format_path(path)
    reader = csv.reader(io.StringIO(read_text(path, most=most), newline=""), strict=True)
    try:
        header = next(reader, [])
        _check_header(header, required, where)
        rows = []
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise TraincastError(
                    f"{where}: line {reader.line_num} has {len(cells)} cells, the first line {len(header)}; "
                    "give every row as many"
                )
            rows.append(dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise TraincastError(f"{where}: line {reader.line_num}: not CSV ({error})") from None
    return rows


def _check_header(header: list[str], required: tuple[str, ...], where: str) -> None:
    if not any(header):
        raise TraincastError(f"{where}: empty; the first line must name the columns")
    if len(header) > MAX_COLUMNS:
        raise TraincastError(f"{where}: {len(header)} columns; at most {MAX_COLUMNS} are read")
    repeated = (
        next((name for name in header if header.count(name) > 1), None) if len(set(header)) < len(header) else None
    )
    if repeated is not None:
        raise TraincastError(f"{where}: column {shorten_value(repeated)} stands there twice; name every column once")
    missing = [name for name in required if name not in header]
    if missing:
        raise TraincastError(f"{where}: no column '{missing[0]}'; it has {format_names(header)}")


def format_names(names: list[str], most: int = 12) -> str:
    """A list of names for a message: the first few, each printable."""
    some = ", ".join(name if name.isprintable() and len(name) <= 40 else shorten_value(name) for name in names[:most])
    return some + (f" and {len(names) - most} more" if len(names) > most else "")


def _check_plain(content: Any, where: str) -> None:
    """Rejects values that are not plain, named by their key, and a whole that is too deep or too large."""
    left, values = [(content, "", 0)], 0
    while left:
        value, key, depth = left.pop()
        values += 1
        if depth > MAX_DEPTH:
            raise TraincastError(f"{where}: nested more than {MAX_DEPTH} deep")
        if values > MAX_VALUES:
            raise TraincastError(f"{where}: more than {MAX_VALUES:,} values; split it")
        if isinstance(value, Mapping):
            left.extend((item, name, depth + 1) for name, item in value.items())
        elif isinstance(value, list):
            left.extend((item, key, depth + 1) for item in value)
        elif wrong := _find_problem(value):
            raise TraincastError(f"{where}: {f'{shorten_value(key)} is ' if key else ''}{wrong}")


def _find_problem(value: Any) -> str:
    """What is wrong with a single value ("" for nothing)."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{value}; give a finite number"
    if isinstance(value, int):
        return "" if abs(value) < 10**MAX_DIGITS else f"a number with more than {MAX_DIGITS} digits; give a shorter one"
    if value is None or isinstance(value, str):
        return ""
    return f"{shorten_value(str(value))}, a {type(value).__name__}; give text or a number"


def _reject_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise TraincastError(f"key {shorten_value(repeated)} stands there twice; give it once")
    return content


def _parse_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise TraincastError(f"a number with {len(digits)} digits; give a shorter one")
    return int(digits)


def _format_bytes(count: int) -> str:
    return f"{count >> 20} MB" if count >= 1 << 20 else f"{count} bytes"
