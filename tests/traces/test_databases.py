"""Databases of Nsight Systems and of rocprofv3, and files of other tools that are named for what they are."""

from __future__ import annotations

import sqlite3

import pytest

from tests.traces.databases import NSIGHT, ROCPD, RUN
from traincast.traces.formats import read_trace_file
from traincast.traces.replay.analysis import analyse_traces
from traincast.utils.errors import TraincastError


@pytest.fixture
def export(tmp_path):
    path = tmp_path / "run.sqlite"
    with sqlite3.connect(path) as database:
        database.executescript(NSIGHT)
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
        (
            "DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME; DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL;"
            "CREATE VIEW cupti_activity_kind_kernel AS WITH RECURSIVE c(start) AS "
            "(SELECT 1 UNION ALL SELECT start FROM c) "
            "SELECT start, 2 AS end, 0 AS deviceId, 7 AS streamId, 1 AS correlationId FROM c",
            "without CUDA kernels",
        ),
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
    with pytest.raises(TraincastError, match="no sound database of Nsight Systems"):
        read_trace_file(export)


def test_graphs_that_were_recorded_whole_are_no_idle_time(export):
    """`nsys` records a launch of a CUDA graph as one row, unless told otherwise."""
    with sqlite3.connect(export) as database:
        database.executescript(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INT, end INT, deviceId INT, streamId INT,"
            " correlationId INT, graphId INT, graphExecId INT);"
            "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (650000, 850000, 0, 7, 13, 1, 1);"
            "INSERT INTO StringIds VALUES (5, 'cudaGraphLaunch_v10000');"
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (610000, 620000, 77, 13, 5);"
        )
    database.close()
    report = analyse_traces([export]).ranks[0]
    assert report.steps[0].active == pytest.approx(700e-6)
    assert any("recorded whole and count as one kernel each" in note for note in report.notes)


def test_processes_with_the_same_correlations_are_rejected(export):
    with sqlite3.connect(export) as database:
        database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (20000, 25000, {5 << 24}, 11, 1)")
    database.close()
    with pytest.raises(TraincastError, match="2 processes"):
        analyse_traces([export])


@pytest.fixture
def rocpd(tmp_path):
    path = tmp_path / "77_results.db"
    with sqlite3.connect(path) as database:
        database.executescript(ROCPD.replace("{run}", RUN))
    database.close()
    return path


def test_a_database_of_rocprofv3_is_a_timeline_with_calls_steps_and_grids(rocpd):
    """Its kernel has the number of an HSA call that stands inside of the HIP call which launched it."""
    report = analyse_traces([rocpd]).ranks[0]
    assert report.linked.trace.device_name == "AMD Instinct MI300X"
    step = report.steps[0]
    assert (step.number, step.step, step.kernels, step.active) == pytest.approx((1, 1e-3, 2, 500e-6))
    assert step.by_op["aten::mm"] == pytest.approx(400e-6)
    assert step.by_family == {"gemm": pytest.approx(400e-6), "memcpy": pytest.approx(100e-6)}
    grids = [details for details in report.linked.trace.details if details]
    assert grids == [b'{"grid":[8,4,1],"block":[256,1,1],"registers":0}'], "blocks, where the file counts threads"
    assert int(report.linked.events["bytes"].max()) == 4096


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("UPDATE rocpd_metadata{run} SET value = '4' WHERE tag = 'schema_version'", "schema '4' of rocprofv3"),
        ("ALTER TABLE rocpd_kernel_dispatch{run} DROP COLUMN start", "lacks start"),
        ("UPDATE rocpd_kernel_dispatch{run} SET end = 5", "without sound numbers"),
        ("CREATE TABLE rocpd_kernel_dispatch_02 (id INT)", "holds 2 processes"),
        ("CREATE TABLE rocpd_op (id INT)", "a trace of rocmProfileData"),
    ],
)
def test_a_database_that_rocprofv3_did_not_write_is_rejected(rocpd, change, said):
    with sqlite3.connect(rocpd) as database:
        database.executescript(change.replace("{run}", RUN))
    database.close()
    with pytest.raises(TraincastError, match=said):
        read_trace_file(rocpd)


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
