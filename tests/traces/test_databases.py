"""Databases of Nsight Systems and of rocprofv3, and files of other tools that are named for what they are."""

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


_RUN = "_019a2b3c_4d5e_7f60_8123_456789abcdef"
_ROCPD = """
CREATE TABLE rocpd_metadata{run} (id INTEGER PRIMARY KEY, tag TEXT, value TEXT);
CREATE TABLE rocpd_string{run} (id INTEGER PRIMARY KEY, guid TEXT, string TEXT);
CREATE TABLE rocpd_info_agent{run} (id INTEGER PRIMARY KEY, guid TEXT, nid INT, pid INT, type TEXT, absolute_index INT,
    name TEXT, model_name TEXT, vendor_name TEXT, product_name TEXT);
CREATE TABLE rocpd_info_kernel_symbol{run} (id INTEGER PRIMARY KEY, guid TEXT, kernel_name TEXT, display_name TEXT);
CREATE TABLE rocpd_event{run} (id INTEGER PRIMARY KEY, guid TEXT, category_id INT, stack_id INT, parent_stack_id INT,
    correlation_id INT, call_stack TEXT, line_info TEXT, extdata TEXT);
CREATE TABLE rocpd_region{run} (id INTEGER PRIMARY KEY, guid TEXT, nid INT, pid INT, tid INT, start BIGINT, end BIGINT,
    name_id INT, event_id INT, extdata TEXT);
CREATE TABLE rocpd_kernel_dispatch{run} (id INTEGER PRIMARY KEY, guid TEXT, nid INT, pid INT, tid INT, agent_id INT,
    kernel_id INT, dispatch_id INT, queue_id INT, stream_id INT, start BIGINT, end BIGINT, private_segment_size INT,
    group_segment_size INT, workgroup_size_x INT, workgroup_size_y INT, workgroup_size_z INT, grid_size_x INT,
    grid_size_y INT, grid_size_z INT, region_name_id INT, event_id INT, extdata TEXT);
CREATE TABLE rocpd_memory_copy{run} (id INTEGER PRIMARY KEY, guid TEXT, nid INT, pid INT, tid INT, start BIGINT,
    end BIGINT, name_id INT, dst_agent_id INT, dst_address INT, src_agent_id INT, src_address INT, size INT,
    queue_id INT, stream_id INT, region_name_id INT, event_id INT, extdata TEXT);
CREATE VIEW rocpd_string AS SELECT * FROM rocpd_string{run};
INSERT INTO rocpd_metadata{run} (tag, value) VALUES ('schema_version', '3');
INSERT INTO rocpd_string{run} (id, string) VALUES (1, 'HIP_RUNTIME_API_EXT'), (2, 'hipLaunchKernel'),
    (3, 'HSA_CORE_API'),
    (4, 'hsa_signal_store'), (5, 'KERNEL_DISPATCH'), (6, 'MARKER_CORE_RANGE_API'), (7, 'roctxThreadRangeA'),
    (8, 'MEMORY_COPY_HOST_TO_DEVICE'), (9, 'MEMORY_COPY'), (10, 'hipMemcpyAsync');
INSERT INTO rocpd_info_agent{run} (id, type, name, product_name) VALUES (0, 'CPU', 'EPYC', 'EPYC'),
    (4, 'GPU', 'gfx942', 'AMD Instinct MI300X');
INSERT INTO rocpd_info_kernel_symbol{run} (id, kernel_name, display_name)
    VALUES (9, 'k.kd', 'Cijk_Ailk_Bljk_SB_MT128x128');
INSERT INTO rocpd_event{run} (id, category_id, stack_id, parent_stack_id, extdata) VALUES (1, 1, 11, 0, '{}'),
    (2, 3, 12, 11, '{}'), (3, 5, 12, 12, '{}'), (4, 6, 10, 0, '{"message": "ProfilerStep#1"}'),
    (5, 6, 13, 0, '{"message": "aten::mm, seq = 3"}'), (6, 1, 14, 0, '{}'), (7, 9, 14, 14, '{}');
INSERT INTO rocpd_region{run} (id, tid, start, end, name_id, event_id) VALUES (11, 77, 20000, 25000, 2, 1),
    (12, 77, 21000, 22000, 4, 2), (10, 77, 0, 1000000, 7, 4), (13, 77, 10000, 40000, 7, 5),
    (14, 77, 480000, 490000, 10, 6);
INSERT INTO rocpd_kernel_dispatch{run} (id, tid, agent_id, kernel_id, queue_id, stream_id, start, end, workgroup_size_x,
    workgroup_size_y, workgroup_size_z, grid_size_x, grid_size_y, grid_size_z, event_id)
    VALUES (1, 77, 4, 9, 2, 0, 30000, 430000, 256, 1, 1, 2048, 4, 1, 3);
INSERT INTO rocpd_memory_copy{run} (id, tid, start, end, name_id, dst_agent_id, src_agent_id, size, stream_id, event_id)
    VALUES (1, 77, 500000, 600000, 8, 4, 0, 4096, 0, 7);
"""


@pytest.fixture
def rocpd(tmp_path):
    path = tmp_path / "77_results.db"
    with sqlite3.connect(path) as database:
        database.executescript(_ROCPD.replace("{run}", _RUN))
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
        database.executescript(change.replace("{run}", _RUN))
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
