"""Small untrusted files: what is read, and one clear line for everything else."""

from __future__ import annotations

import os

import pytest

from traincast.utils.errors import TraincastError, shorten_value
from traincast.utils.files.limits import MAX_DIGITS
from traincast.utils.files.reading import (
    parse_json,
    parse_toml,
    parse_yaml,
    read_bytes,
    read_csv,
    read_document,
    read_text,
)


def refused(parse, *arguments):
    with pytest.raises(TraincastError) as caught:
        parse(*arguments)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


def test_the_ending_decides_the_format(tmp_path):
    (tmp_path / "a.yaml").write_text("rows: 3\nname: clicks\n")
    (tmp_path / "a.toml").write_text("rows = 3\nname = 'clicks'\n")
    (tmp_path / "a.json").write_text('{"rows": 3, "name": "clicks"}')

    contents = [read_document(tmp_path / f"a.{ending}") for ending in ("yaml", "toml", "json")]

    assert contents == [{"rows": 3, "name": "clicks"}] * 3


def test_a_byte_order_mark_is_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfx")
    assert read_text(tmp_path / "a.txt") == "x"


def test_text_that_is_not_utf8_names_the_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    assert refused(read_text, tmp_path / "a.txt").endswith("not UTF-8 text (byte 2)")


@pytest.mark.parametrize("what", ["absent", "folder", "pipe", "device", "zero"])
def test_only_regular_files_are_read_and_nothing_is_waited_for(tmp_path, what):
    path = tmp_path / "x.yaml"
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path = "/dev/zero"
    elif what == "zero":
        path = "a\0b"
    assert "x.yaml" in (message := refused(read_bytes, path)) or "/dev/zero" in message or "\\x00" in message


def test_a_large_file_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "larger than 64 MB" in refused(read_document, tmp_path / "x.json")


YAML_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: 1\na: 2", "stands there twice"),
        ("a: .inf", "finite"),
        ("a: .nan", "finite"),
        ("a: !!int 'x'", "is no number"),
        ("a: !!timestamp 2020-01-01", "tag"),
        ("a: !!python/object/apply:os.system ['true']", "tag"),
        ("a: !!binary aGVsbG8=", "tag"),
        ("? [1, 2]\n: 3", "is no text"),
        ("a: " + "9" * 5000, "digits"),
        (YAML_BOMB, "values"),
        ("&a [*a]", ""),
        ("[" * 3000 + "]" * 3000, "nested"),
        ("a: [1, 2", "not valid YAML at line"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("a: \x01", "not valid YAML"),
    ],
)
def test_yaml_that_is_refused(text, part):
    message = refused(parse_yaml, text, "f.yaml")
    assert message.startswith("f.yaml: ") and part in message


def test_yaml_dates_are_text_and_numbers_are_keys_as_text():
    assert parse_yaml("day: 2020-01-01\n1: one", "f") == {"day": "2020-01-01", "1": "one"}


def test_yaml_words_of_old_are_text():
    assert parse_yaml("on: [yes, no, off]\ntruth: [true, False]", "f") == {
        "on": ["yes", "no", "off"], "truth": [True, False],
    }  # fmt: skip


def test_yaml_aliases_within_the_limit_are_read():
    assert parse_yaml("a: &x [1, 2]\nb: *x", "f") == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a = inf", "finite"),
        ("a = 2020-01-01", "date"),
        ("a = 1\na = 2", "not valid TOML"),
        ("a = " + "[" * 3000 + "]" * 3000, "nested"),
        ("a = " + "9" * 5000, "digits"),
        ("a = " + "9" * (MAX_DIGITS + 1), "digits"),
    ],
)
def test_toml_that_is_refused(text, part):
    assert part in refused(parse_toml, text, "f.toml")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"a": 1, "a": 2}', "'a' stands there twice"),
        ('{"a": [NaN]}', "'a' is nan; give a finite number"),
        ('{"a": 1e999}', "finite"),
        ("[" * 100_000, "nested"),
        ("9" * 5000, "digits"),
        ("{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ("[" * 100 + "]" * 100, "nested more than"),
    ],
)
def test_json_that_is_refused(text, part):
    assert part in refused(parse_json, text, "f.json")


def test_csv_rows_by_column(tmp_path):
    (tmp_path / "t.csv").write_text('name,rows\n"a,b",3\n\nc,4\n')
    assert read_csv(tmp_path / "t.csv") == [{"name": "a,b", "rows": "3"}, {"name": "c", "rows": "4"}]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty"),
        ("a,a\n1,2\n", "column 'a' stands there twice"),
        ("a,b\n1\n", "line 2 has 1 cells, the first line 2"),
        ("a,b\n1,2,3\n", "line 2 has 3 cells"),
        ('a,b\n"1,2\n', "not CSV"),
        ("x,y\n1,2\n", "no column 'a'; it has x, y"),
        (",".join(f"c{i}" for i in range(20_000)), "20000 columns"),
    ],
)
def test_csv_that_is_refused(tmp_path, text, part):
    (tmp_path / "t.csv").write_text(text)
    assert part in refused(lambda: read_csv(tmp_path / "t.csv", required=("a",)))


def test_values_in_messages_are_short_and_printable():
    assert len(shorten_value({"k": [["x" * 10**6] * 1000] * 1000})) < 300
    assert "\x1b" not in shorten_value("\x1b[31m") and "\n" not in shorten_value("a\nb")
    assert shorten_value(10**5000) == "a int"
