"""The tables of a profiler's page, on timelines that can be worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.traces.timelines import event, kernel, launch, linked, op, small_events, step, write_trace, write_two_ranks
from traincast.simulator.memory.allocator import segment_size
from traincast.traces.collectives import Collective
from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace
from traincast.traces.profiler.kernels import (
    make_annotation_rows,
    make_graph_rows,
    make_kernel_rows,
    make_launch_rows,
    make_module_rows,
    make_queue_points,
    make_stream_rows,
)
from traincast.traces.profiler.rates import make_rate_rows
from traincast.traces.profiler.tables import (
    make_communication_rows,
    make_memory_points,
    make_memory_rows,
    replay_recorded,
)
from traincast.traces.replay.analysis import analyse_traces
from traincast.traces.signatures import SignatureReader
from traincast.traces.slowdowns import launch_queue


def module(name, ts, dur):
    return event("python_function", f"nn.Module: {name}", ts, dur)


def allocation(ts, nbytes, total=None, device=0):
    totals = {} if total is None else {"Total Allocated": total, "Total Reserved": 4096}
    args = {"Device Type": 1, "Device Id": device, "Bytes": nbytes, **totals}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 9, "tid": 1, "ts": ts, "args": args}


def test_kernels_by_name_with_count_mean_and_share(tmp_path):
    events = step(
        launch(1, 10),
        kernel(1, 20, 30),
        launch(2, 60),
        kernel(2, 70, 10),
        launch(3, 90),
        kernel(3, 100, 60, name="relu"),
    )
    first, second = make_kernel_rows(linked(tmp_path, events))
    assert (first.name, first.count, first.share) == ("relu", 1, pytest.approx(0.6))
    assert (second.name, second.count) == ("gemm", 2)
    assert (second.mean, second.shortest, second.longest) == pytest.approx((20e-6, 10e-6, 30e-6))


def test_rates_of_a_product_follow_from_its_shapes_and_time(tmp_path):
    path = tmp_path / "t.json"
    devices = [{"id": 0, "name": "Tesla V100-SXM2-16GB"}]
    path.write_text(json.dumps({"traceEvents": small_events(), "deviceProperties": devices}))
    tied = link_trace(read_kineto(path))
    row, summed = make_rate_rows(tied, SignatureReader(tied))
    assert (summed.op, summed.family, summed.of_flops) == ("aten::add", "elementwise", None)  # it only moves data
    assert summed.of_bandwidth is not None
    assert (row.op, row.shapes, row.family, row.count) == ("aten::mm", "64x64 64x64", "gemm", 1)
    assert row.flops == 2 * 64**3
    assert row.bytes == 3 * 64 * 64 * 4
    assert row.tflops == pytest.approx(2 * 64**3 / 400e-6 / 1e12)
    assert row.of_flops == pytest.approx(row.tflops / 15.7, rel=0.02)
    assert row.of_bandwidth == pytest.approx(row.tbytes / 0.9, rel=0.02)


def test_a_device_nobody_knows_has_rates_without_shares(tmp_path):
    tied = linked(tmp_path, small_events())
    row, _ = make_rate_rows(tied, SignatureReader(tied))
    assert row.tflops > 0
    assert row.of_flops is None
    assert row.of_bandwidth is None


def test_modules_count_what_lies_deeper_and_what_is_their_own(tmp_path):
    events = step(
        module("Net_0", 10, 200), module("Linear_0", 50, 100),
        launch(1, 20), kernel(1, 30, 20), launch(2, 60), kernel(2, 70, 50), launch(3, 300), kernel(3, 310, 500),
    )  # fmt: skip
    net, linear = make_module_rows(linked(tmp_path, events))
    assert (net.name, net.kernels, net.device, net.own) == ("Net_0", 2, pytest.approx(70e-6), pytest.approx(20e-6))
    assert (linear.name, linear.kernels, linear.device, linear.own) == ("Linear_0", 1, *[pytest.approx(50e-6)] * 2)


def test_a_module_inside_one_of_its_own_name_counts_once(tmp_path):
    events = step(module("Block_0", 10, 200), module("Block_0", 50, 100), launch(1, 60), kernel(1, 70, 50))
    (block,) = make_module_rows(linked(tmp_path, events))
    assert (block.count, block.kernels, block.device) == (2, 1, pytest.approx(50e-6))


def test_annotations_leave_out_the_step_markers(tmp_path):
    events = step(event("user_annotation", "## forward ##", 10, 100), launch(1, 20), kernel(1, 30, 40))
    (row,) = make_annotation_rows(linked(tmp_path, events))
    assert (row.name, row.host, row.device) == ("## forward ##", pytest.approx(100e-6), pytest.approx(40e-6))


def test_launches_say_how_long_kernels_waited_and_how_many_are_short(tmp_path):
    events = step(launch(1, 10), kernel(1, 20, 100), launch(2, 30), kernel(2, 125, 8))
    tied = linked(tmp_path, events)
    (row,) = make_launch_rows(tied, launch_queue(tied))
    assert (row.calls, row.waiting_most, row.short) == (2, 1, 1)
    assert row.short_seconds == pytest.approx(8e-6)
    assert row.delay_median == pytest.approx((10e-6 + 95e-6) / 2)


def test_a_graph_is_named_with_the_time_between_its_nodes(tmp_path):
    events = step(
        launch(1, 10, name="cudaGraphLaunch"), kernel(1, 20, 30, name="first"), kernel(1, 70, 10, name="second")
    )
    (row,) = make_graph_rows(linked(tmp_path, events))
    assert row.name == "graph of 2 nodes that begins with first"
    assert (row.device, row.span, row.idle) == pytest.approx((40e-6, 60e-6, 20e-6))


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_of_a_step_with_totals_or_from_the_begin_of_the_trace(tmp_path, recorded):
    totals = (1024, 3072, 2048) if recorded else (None,) * 3
    moves = zip((1024, 2048, -1024), totals, (10, 20, 30), strict=True)
    events = step(launch(1, 10), kernel(1, 20, 30), *(allocation(ts, size, total) for size, total, ts in moves))
    tied = linked(tmp_path, events)
    (row,) = make_memory_rows(tied)
    assert (row.peak, row.end, row.allocations, row.relative) == (3072, 2048, 3, not recorded)
    assert row.reserved == (4096 if recorded else -1)
    assert [point.allocated for point in make_memory_points(tied)] == [1024, 3072, 2048]


def test_bus_bandwidth_counts_as_nccl_tests_do():
    call = Collective(row=0, kind="all_reduce", seconds=1e-3, step=0, stream=1, message_bytes=10**6, group_size=4)
    gather = Collective(row=0, kind="all_gather", seconds=1e-3, step=0, stream=1, message_bytes=10**6, group_size=4)
    rows = {row.kind: row for row in make_communication_rows([call, gather], None)}
    assert rows["all_reduce"].bus == pytest.approx(1.5e9)
    assert rows["all_gather"].message_bytes == 4 * 10**6  # of the whole
    assert rows["all_gather"].bus == pytest.approx(3e9)


def test_a_collective_of_unknown_size_has_no_bandwidth():
    call = Collective(row=0, kind="all_reduce", seconds=1e-3, step=0, stream=1)
    (row,) = make_communication_rows([call], 8)
    assert row.bus is None


def test_over_ranks_transfer_and_waiting_are_told_apart(tmp_path):
    together = analyse_traces([write_two_ranks(tmp_path)]).together
    (row,) = together.exchanges
    assert (row.transfer, row.waiting, row.longest) == pytest.approx((50e-6, 300e-6, 300e-6))
    assert (row.last, row.last_count) == (1, 1)
    assert row.bus == pytest.approx(4096 * 1.0 / 50e-6)


def test_every_table_is_in_the_records_with_its_rank(tmp_path):
    report = analyse_traces([write_trace(tmp_path / "t.json", small_events())])
    records = report.records()
    assert records["top_kernels"][0]["mean_us"] == pytest.approx(400)
    assert {row["rank"] for name in ("rates", "launches", "top_kernels") for row in records[name]} == {0}
    assert json.loads(json.dumps(report.to_dict()))["ranks"][0]["profile"]["rates"][0]["tflops"] > 0


def test_allocations_that_make_no_sense_are_left_out(tmp_path):
    bad = [allocation(10, "many"), allocation(10, 1 << 80), {"ph": "i", "name": "[memory]", "ts": 5}]
    events = step(op("aten::mm", 10, 5, [[4, 4], [4, 4]]), launch(1, 10), kernel(1, 20, 30), *bad)
    assert len(linked(tmp_path, events).trace.memory) == 0


def test_streams_have_busy_and_idle_time_and_rates_of_copies(tmp_path):
    copy = event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 400, 100, 9, correlation=3, stream=9, bytes=1_000_000)
    events = step(
        launch(1, 10), kernel(1, 20, 100), launch(2, 200), kernel(2, 220, 50), launch(3, 300, name="cudaMemcpyAsync"),
        copy,
    )  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    tied = link_trace(read_kineto(path))
    first, second = make_stream_rows(tied)
    assert (first.stream, first.kernels, first.total, first.idle) == pytest.approx((7, 2, 150e-6, 100e-6))
    assert (second.stream, second.bytes_per_second) == pytest.approx((9, 10e9))
    assert [point.waiting for point in make_queue_points(tied, launch_queue(tied))] == [0, 0, 0]


RECORDED = {  # traces whose profiler recorded addresses and totals: (apart, replayed / recorded reserved) at most
    "public_mixed/switch_a100pcie80_1": (0, 0.01),
    "public_mixed/kernelforge_gh200": (0, 0.03),
    "public_mixed/transformer_h100_1": (0, 0.03),
    "public_mixed/resnet50_t4_b": (0, 0.25),
    "triosim_vgg13_h100/kineto_iter41": (4 << 20, 0.01),
    "hta_compiled_v100/kineto": (17 << 20, 0.01),
    "tracelens_h100/owlv2_large": (4096, 0.01),
    "tracelens_h100/vit_nsfw": (1 << 20, 0.03),
    "tracelens_h100/bert_small": (1 << 20, 0.04),
    "tracelens_h100/qwen_0.5b": (4 << 20, 0.05),
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_allocator_replays_what_a_profiler_recorded(shared_data, name):
    """Blocks that are not split, as large as others before the trace, may be there in one and not in the other; so may
    pieces of the cache."""
    trace = read_kineto(shared_data / "traces" / f"{name}.json.gz")
    memory = trace.memory[np.argsort(trace.memory["time"], kind="stable")]
    bytes_apart, share = RECORDED[name]

    allocated, reserved = replay_recorded(memory["bytes"], memory["address"], memory["allocated"], memory["reserved"])

    assert abs(allocated - memory["allocated"]).max() <= bytes_apart
    assert reserved.max() == pytest.approx(memory["reserved"].max(), rel=share)


def test_segments_of_a_recorded_run_are_as_large_as_ours(shared_data):
    trace = read_kineto(shared_data / "traces" / "public_mixed/switch_a100pcie80_1.json.gz")
    memory = trace.memory[np.argsort(trace.memory["time"], kind="stable")]
    grown = np.diff(memory["reserved"])
    asked = memory["bytes"][1:][grown > 0]

    assert len(asked) > 100
    assert grown[grown > 0].tolist() == [segment_size(size) for size in asked.tolist()]


def test_numbers_of_devices_and_of_launches_are_no_times_in_the_plain_form(tmp_path):
    events = [*small_events(), allocation(1, 1024, 1024, device=1)]
    tables = analyse_traces([write_trace(tmp_path / "t.json", events)]).ranks[0].profile.to_dict()
    assert [row["device"] for row in tables["memory_curve"]] == [1]
    assert {type(row["waiting"]) for row in tables["queue_curve"]} == {int}
