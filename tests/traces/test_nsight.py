"""Exports of Nsight Systems, and files of other tools that are named for what they are."""

from __future__ import annotations

import sqlite3

import pytest

from traincast.traces.formats import read_trace_file
from traincast.traces.replay.analysis import analyse_traces
from traincast.utils.errors import TraincastError

_TABLES = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT, correlationId INT,
    demangledName INT, gridX INT, gridY INT, gridZ INT, blockX INT, blockY INT, blockZ INT, registersPerThread INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, deviceId INT, streamId INT, correlationId INT, bytes INT,
    copyKind INT, srcKind INT, dstKind INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, correlationId INT, nameId INT);
CREATE TABLE NVTX_EVENTS (start INT, end INT, globalTid INT, eventType INT, text TEXT, textId INT);
INSERT INTO StringIds VALUES (1, 'cudaLaunchKernel_v7000'), (2, 'volta_sgemm_128x64_nn'), (3, 'ProfilerStep#1'),
    (4, 'cudaMemcpyAsync_v3020');
INSERT INTO TARGET_INFO_GPU VALUES (0, 'Tesla V100-SXM2-16GB');
INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (30000, 430000, 0, 7, 11, 2, 8, 4, 1, 256, 1, 1, 128);
INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (500000, 600000, 0, 7, 12, 4096, 1, 1, 2);
INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (20000, 25000, 77, 11, 1), (480000, 490000, 77, 12, 4);
INSERT INTO NVTX_EVENTS VALUES (0, 1000000, 77, 59, NULL, 3), (10000, 40000, 77, 59, 'aten::mm, seq = 3', NULL);
"""


@pytest.fixture
def export(tmp_path):
    path = tmp_path / "run.sqlite"
    with sqlite3.connect(path) as database:
        database.executescript(_TABLES)
    database.close()
    return path


def test_an_export_is_a_timeline_with_calls_steps_and_grids(export):
    report = analyse_traces([export]).ranks[0]
    assert report.linked.trace.device_name == "Tesla V100-SXM2-16GB"
    step = report.steps[0]
    assert (step.step, step.kernels, step.active) == pytest.approx((1e-3, 2, 500e-6))
    assert step.by_op["aten::mm"] == pytest.approx(400e-6)
    assert step.by_family == {"gemm": pytest.approx(400e-6), "memcpy": pytest.approx(100e-6)}
    grids = [details for details in report.linked.trace.details if details]
    assert grids == [b'{"grid":[8,4,1],"block":[256,1,1],"registers":128}']
    assert any("Nsight Systems" in note for note in report.notes)


def test_a_copy_says_its_direction_and_bytes(export):
    trace = read_trace_file(export)
    names = [trace.names[number] for number in trace.events["name"]]
    assert "Memcpy HtoD (Pinned -> Device)" in names
    assert int(trace.events["bytes"].max()) == 4096


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL; DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME", "without CUDA kernels"),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 'x'", "without sound numbers"),
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME DROP COLUMN correlationId", "lacks correlationId"),
    ],
)
def test_a_database_that_is_no_report_is_rejected(export, change, said):
    with sqlite3.connect(export) as database:
        database.executescript(change)
    database.close()
    with pytest.raises(TraincastError, match=said):
        read_trace_file(export)


def test_a_cut_export_is_rejected(export):
    export.write_bytes(export.read_bytes()[:3000])
    with pytest.raises(TraincastError, match="no sound export of Nsight Systems"):
        read_trace_file(export)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("run.nsys-rep", b"binary", "a report of Nsight Systems; export it as SQLite with 'nsys export'"),
        ("memory.pickle", b"\x80\x04\x95", "a pickle .* may run code and is not read"),
        ("snapshot", b"\x80\x04\x95", "a pickle"),
        ("roc.json", b'{"rocprofiler-sdk-tool": [{}]}', "rocprofv3's own JSON"),
    ],
)
def test_files_of_other_tools_are_named(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraincastError, match=said):
        read_trace_file(path)
