"""Ops, launches, kernels, steps and what follows from them, on traces small enough to work out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.traces import damaged
from tests.traces.timelines import event, kernel, launch, linked, step
from traincast.traces.breakdown import Intervals, combine_ranks, compute_breakdown
from traincast.traces.classify import find_kernel_family
from traincast.traces.events import Kind
from traincast.traces.execution import join_execution, read_execution_trace
from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace
from traincast.traces.overheads.extraction import Distribution, ProfilerCost, estimate_profiler_cost, measure_overheads


def one_op():
    """An op of 40 us with two launches 20 us apart, after another that launches nothing."""
    return step(
        event("cpu_op", "aten::view", 10, 10),
        event("cpu_op", "aten::linear", 30, 40), event("cpu_op", "aten::addmm", 32, 36),
        launch(1, 40), kernel(1, 50, 100), launch(2, 60), kernel(2, 150, 50),
    )  # fmt: skip


def test_a_kernel_belongs_to_its_launch_and_its_top_level_op(tmp_path):
    tied = linked(tmp_path, one_op())
    kernels = tied.trace.find_rows(Kind.KERNEL)
    scopes = tied.scope[tied.launch[kernels]]
    assert [tied.get_name(row) for row in scopes] == ["aten::linear"] * 2
    assert [tied.get_name(row) for row in tied.parent[tied.launch[kernels]]] == ["aten::addmm"] * 2
    assert [tied.get_name(row) for row in tied.scopes] == ["aten::view", "aten::linear"]


def test_overheads_of_an_op_by_hand(tmp_path):
    table = measure_overheads(linked(tmp_path, one_op()), ProfilerCost(0, 0)).table
    us = {key: 1e6 * d.total for key, d in table.items()}
    assert us["T1", "python"] == pytest.approx(10)
    assert us["T2", "aten::linear"] == pytest.approx(10)
    assert us["T5", "aten::linear"] == pytest.approx(15)
    assert us["T3", "aten::linear"] == pytest.approx(5)
    assert us["alone", "aten::view"] == pytest.approx(10)
    assert us["T4", "launch"] == pytest.approx(10)


def test_recording_costs_and_waiting_are_not_overhead(tmp_path):
    events = step(
        event("cpu_op", "aten::item", 10, 100), event("cpu_op", "aten::_local_scalar_dense", 12, 90),
        launch(1, 20, name="cudaMemcpyAsync"), event("cuda_runtime", "cudaStreamSynchronize", 30, 60, correlation=2),
    )  # fmt: skip
    us = {k: 1e6 * d.total for k, d in measure_overheads(linked(tmp_path, events), ProfilerCost(2000, 0)).table.items()}
    assert us["T2", "aten::item"] == pytest.approx(10 - 2)
    assert us["T3", "aten::item"] == pytest.approx(85 - 60)


def test_waiting_for_another_thread_is_not_a_gap(tmp_path):
    events = step(
        event("cpu_op", "aten::sum", 0, 10), event("cpu_op", "AddBackward0", 30, 300, 2),
        event("cpu_op", "aten::add", 400, 10),
    )  # fmt: skip
    assert not measure_overheads(linked(tmp_path, events)).select_type("T1")


def test_gaps_are_told_apart_by_who_issues_the_next_op_and_lose_the_cost_of_recording_one(tmp_path):
    events = step(
        event("cpu_op", "aten::mm", 10, 10), event("cpu_op", "aten::relu", 30, 10),
        event("cpu_op", "MmBackward0", 50, 10, 2), event("cpu_op", "aten::sum", 63, 10, 2),
        event("cpu_op", "ReluBackward0", 80, 10, 2),
    )  # fmt: skip
    table = measure_overheads(linked(tmp_path, events), ProfilerCost(2000, 0)).select_type("T1")
    assert {name: round(1e6 * d.total) for name, d in table.items()} == {"python": 8, "node": 5, "engine": 1}


def test_idle_time_has_a_reason(tmp_path):
    (b,) = compute_breakdown(linked(tmp_path, one_op()))
    assert 1e6 * b.compute == pytest.approx(150)
    assert 1e6 * b.idle == pytest.approx(850)
    # the call returned at 45 us, the kernel began at 50; after 200 nothing was launched any more
    assert 1e6 * b.host_bound == pytest.approx(45 + 800)
    assert 1e6 * b.launch_latency == pytest.approx(5)
    assert b.compute + b.exposed_comm + b.idle == pytest.approx(b.step)


def test_a_call_that_loads_code_is_the_hosts_and_work_from_before_the_trace_is_not(tmp_path):
    events = step(launch(1, 100, dur=600), kernel(1, 710, 50), kernel(99, 20, 30), kernel(98, 60, 10))
    (b,) = compute_breakdown(linked(tmp_path, events))
    assert 1e6 * b.launch_latency == pytest.approx(20 + 10 + 10)  # before both from before the trace, after the call
    assert 1e6 * b.host_bound == pytest.approx(630 + 240)  # until the call had returned, and after the last kernel


def test_a_kernel_whose_call_was_lost_belongs_where_the_one_before_it_does(tmp_path):
    tied = linked(tmp_path, step(launch(1, 10), kernel(1, 20, 100), kernel(2, 150, 50), kernel(9, 5, 10)))
    first, lost, before = tied.trace.find_rows(Kind.KERNEL)
    assert tied.follows[[first, lost, before]].tolist() == [-1, first, -1]
    assert tied.step[[first, lost, before]].tolist() == [0, 0, -1]
    (b,) = compute_breakdown(tied)
    assert (b.kernels, b.by_family) == (2, {"gemm": pytest.approx(150e-6)})


def test_only_communication_without_compute_is_exposed(tmp_path):
    events = step(
        event("cpu_op", "aten::mm", 0, 30), launch(1, 5), launch(2, 15),
        kernel(1, 20, 100), kernel(2, 50, 200, stream=9, name="ncclKernel_AllReduce"),
    )  # fmt: skip
    (b,) = compute_breakdown(linked(tmp_path, events))
    assert 1e6 * b.communication == pytest.approx(200)
    assert 1e6 * b.exposed_comm == pytest.approx(130)
    assert combine_ranks([[b], [b]]).eg_comm == pytest.approx(0.13)


def test_a_stream_that_waited_for_another_is_seen(tmp_path):
    events = step(
        event("cpu_op", "aten::mm", 0, 60), launch(1, 5), launch(9, 20, name="cudaStreamWaitEvent"), launch(2, 30),
        kernel(1, 20, 300), kernel(2, 322, 50, stream=9),
    )  # fmt: skip
    tied = linked(tmp_path, events)
    first, second = tied.trace.find_rows(Kind.KERNEL)
    assert tied.waited_for[second] == first
    assert tied.waited_for[first] == -1


def test_a_trace_without_markers_is_one_step(tmp_path):
    tied = linked(tmp_path, one_op()[1:])
    assert not tied.marked
    assert [s.seconds for s in tied.steps] == [pytest.approx(190e-6)]


def test_a_trace_joins_its_execution_trace(shared_data):
    folder = shared_data / "traces/param_dlrm_8xv100"
    tied = link_trace(read_kineto(folder / "kineto_rank0.json.gz"))
    execution = read_execution_trace(folder / "et_rank0.json.gz")
    node = join_execution(tied, execution)
    ops = tied.trace.find_rows(Kind.OP)
    assert (node[ops] >= 0).all()
    linear = [row for row in ops.tolist() if tied.get_name(row) in ("aten::addmm", "aten::mm", "aten::cat")]
    for row in linear:
        shapes = json.loads(tied.trace.details[tied.events["details"][row]])["dims"]
        recorded = json.loads(execution.details[execution.nodes["details"][node[row]]])["dims"]
        assert shapes[0] == recorded[0] or tied.get_name(row) == "aten::cat"


def test_breakdowns_of_public_traces_add_up(shared_data):
    for file in ("kineto_resnet50_v100/num_workers_0", "hta_recsys_a100_rank3of8/kineto_rank3"):
        for b in compute_breakdown(link_trace(read_kineto(shared_data / f"traces/{file}.json.gz"))):
            assert b.compute + b.exposed_comm + b.idle == pytest.approx(b.step, rel=1e-9)
            reasons = b.host_bound + b.synchronised + b.event_wait + b.launch_latency
            assert reasons == pytest.approx(b.idle, rel=1e-9)
            assert b.by_family.get("other", 0.0) < 0.01 * b.step


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("volta_sgemm_128x64_nn", "gemm"), ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "communication"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>", "elementwise"),
        ("volta_scudnn_128x64_relu_medium_nn_v1", "conv"), ("Memcpy HtoD (Pageable -> Device)", "memcpy"),
        ("void cudnn::bn_bw_1C11_kernel_new<float>", "norm"), ("flash_fwd_kernel<...>", "attention"),
        ("split_embedding_codegen_forward_unweighted_kernel<float>", "embedding"),
        ("Cijk_Ailk_Bljk_SB_MT128x128x16", "gemm"), ("nobody_knows", "other"),
    ],
)  # fmt: skip
def test_kernels_are_told_by_name(name, family):
    assert find_kernel_family(name) == family


def test_intervals_cover_and_leave_out():
    covered = Intervals.from_spans(np.array([10, 0, 4]), np.array([20, 5, 8]))
    assert covered.start.tolist() == [0, 10]
    assert covered.end.tolist() == [8, 20]
    gaps = covered.find_gaps(-5, 25)
    assert gaps.start.tolist() == [-5, 8, 20]
    assert gaps.end.tolist() == [0, 10, 25]
    assert covered.subtract_length(Intervals.from_spans(np.array([6]), np.array([12]))) == 6 + 8


def test_distributions_merge_and_shrug_off_outliers():
    rng = np.random.default_rng(0)
    a, b = rng.normal(20e-6, 2e-6, 500), rng.normal(20e-6, 2e-6, 500)
    together = Distribution.from_samples(a).merge_with(Distribution.from_samples(np.append(b, [5e-3, 9e-3])))
    assert together.count == 1002
    assert together.compute_robust_moments()[0] == pytest.approx(20e-6, rel=0.02)
    assert together.compute_quantile(0.5) == pytest.approx(np.median(np.append(a, b)), rel=0.05)
    assert together.total == pytest.approx(a.sum() + b.sum() + 14e-3)


def test_the_small_trace_breaks_down(tmp_path):
    tied = linked(tmp_path, damaged.kineto_events())
    assert [b.kernels for b in compute_breakdown(tied)] == [6, 6]


def test_recording_stacks_costs_what_equal_ops_at_other_depths_show(tmp_path):
    """An op reaches its first child after 4 us without a stack, after 4 + 1.5 us a frame with one."""
    events, at = [], 10
    for depth in (0, 4, 10) * 3:
        hop = 4 + 1.5 * depth
        stack = {"Call stack": ";".join(f"model.py({n}): forward" for n in range(depth))}
        events += [event("cpu_op", "aten::conv2d", at, hop + 30, **stack)]
        events += [event("cpu_op", "aten::convolution", at + hop, 20, **stack), launch(at, at + hop + 12, 5)]
        at += 100
    tied = linked(tmp_path, step(*events, length=at))
    assert tied.events["frames"].max() == 10
    cost = estimate_profiler_cost(tied)
    assert cost.frame == pytest.approx(1500)
    spent = measure_overheads(tied, ProfilerCost(0, 0, cost.frame)).table["T2", "aten::conv2d"]
    # 4 us to the child and 12 to its launch, less what its own stack took (the stack of the op itself is in the hop)
    assert 1e6 * spent.total == pytest.approx(sum(max(4 + 12 - 1.5 * depth, 0) for depth in (0, 4, 10)) * 3)
    assert estimate_profiler_cost(linked(tmp_path, one_op())).frame == 0.0


def test_a_zero_that_several_calls_have_is_no_correlation(tmp_path):
    tied = linked(tmp_path, step(launch(0, 10), kernel(0, 20, 30), launch(0, 60), kernel(0, 70, 30)))

    assert not tied.launched
