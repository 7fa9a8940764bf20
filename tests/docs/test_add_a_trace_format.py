"""docs/extend/add-a-trace-format.md, carried out."""

from __future__ import annotations

import json

from tests.docs.following import follow, run_in

EVENTS = (
    ("annotation", "ProfilerStep#3", 0, 100, 1, -1),
    ("op", "aten::mm", 10, 20, 1, -1),
    ("runtime", "cudaLaunchKernel", 15, 5, 1, 7),
    ("kernel", "volta_sgemm_128x64", 30, 40, 0, 7),
)
READ = """
import sys
from traincast.app.cli.main import main
sys.exit(main(["trace", "run.tsv", "--json"]))
"""
KINETO = """
import json
from traincast.traces.formats import read_trace_file
event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2, "pid": 1, "tid": 1}
open("run.json", "w").write(json.dumps({"traceEvents": [event]}))
print(type(read_trace_file("run.json")).__name__)
"""


def write_trace(folder):
    lines = ["\t".join(map(str, event)) for event in EVENTS]
    (folder / "run.tsv").write_text("\n".join(["kind\tname\tstart\tlength\ttrack\tcorrelation", *lines, ""]))


def test_the_page_touches_two_files(tmp_path):
    assert follow("add-a-trace-format.md", tmp_path) == ["traincast/traces/formats.py", "traincast/traces/tabbed.py"]


def test_a_trace_of_the_new_format_is_measured_and_replayed(tmp_path):
    follow("add-a-trace-format.md", tmp_path)
    write_trace(tmp_path)

    (rank,) = json.loads(run_in(tmp_path, READ))["ranks"]
    (step,) = rank["steps"]

    assert step["number"] == 3
    assert step["iteration_ms"] == 0.1
    assert step["device_active_ms"] == 0.04
    assert step["by_family_ms"] == {"gemm": 0.04}
    assert step["by_op_ms"] == {"aten::mm": 0.04}


def test_the_other_formats_are_read_as_before(tmp_path):
    follow("add-a-trace-format.md", tmp_path)

    assert run_in(tmp_path, KINETO).strip() == "TimelineTrace"
