"""Which reader a file gets."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.traces import damaged
from traincast.traces.events import EVENT, Kind, TimelineTrace, make_blank_events
from traincast.traces.execution import ExecutionTrace
from traincast.traces.formats import FORMATS, SUFFIXES, read_trace_file
from traincast.utils.errors import TraincastError

KINETO = json.dumps(damaged.kineto_document()).encode()
EXECUTION = json.dumps({"schema": "1.0.1", "nodes": [{"id": 1, "name": "aten::mm", "parent": 0}]}).encode()


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.json", KINETO, TimelineTrace),
        ("a.json.gz", gzip.compress(KINETO, mtime=0), TimelineTrace),
        ("a.json", EXECUTION, ExecutionTrace),
        ("a.et", EXECUTION, ExecutionTrace),  # JSON whatever its name says
        ("a.et", damaged.chakra_bytes(3), ExecutionTrace),
        ("a.et.gz", gzip.compress(damaged.chakra_bytes(3), mtime=0), ExecutionTrace),
    ],
)
def test_content_and_name_tell_the_format(tmp_path, name, data, kind):
    path = tmp_path / name
    path.write_bytes(data)

    assert isinstance(read_trace_file(path), kind)


def test_what_no_format_knows_is_refused_by_the_last_reader(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"something": 1}')

    with pytest.raises(TraincastError, match="no ops, launches or kernels of a Kineto trace"):
        read_trace_file(path)


def test_folders_are_searched_for_the_files_of_every_format():
    assert set(SUFFIXES) == {".json", ".json.gz", ".json.zip", ".et", ".et.gz", ".sqlite", ".db"}
    assert FORMATS[-1].matches("anything", b"at all")


def test_blank_events_know_nothing():
    (row,) = make_blank_events(1)

    assert row.dtype == EVENT
    assert (row["correlation"], row["stream"], row["bytes"], row["sequence"]) == (-1, -1, -1, -1)
    assert (row["start"], row["duration"], row["kind"]) == (0, 0, Kind.OP)
