"""Layouts as programs: whole, simulated as every other step, and the same however many ranks and micro-batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.effort import calls
from traincast.costs.in_step import SHIPPED
from traincast.hardware.platform import load_platform
from traincast.ir.memory import compute_peak_memory
from traincast.ir.validate import validate_workload
from traincast.models.transformers.description import count_all_parameters
from traincast.models.transformers.reading import load_transformer, make_transformer
from traincast.simulator.parallelism import predict as predicting
from traincast.simulator.parallelism.layout import Layout, complete_layout
from traincast.simulator.parallelism.predict import count_simulated_micro_batches, estimate_seconds, predict_parallel
from traincast.simulator.parallelism.program import build_parallel_workload

SMALL = make_transformer(
    "small", {"layers": 8, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 32000, "seq_len": 2048}
)  # fmt: skip
MIXTURE = make_transformer(
    "mixture", {"layers": 4, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000, "seq_len": 2048,
                "experts": {"count": 8, "top_k": 2, "ffn": 2048}},
)  # fmt: skip
NODE = load_platform("dgx-h100")

LAYOUTS = {
    "one GPU": {"gpus": 1},
    "eager": {"gpus": 1, "kernels": "eager"},
    "copies": {"gpus": 8},
    "copies, nothing overlapped": {"gpus": 8, "overlap_gradients": False},
    "distributed optimizer": {"gpus": 16, "sharding": "zero1"},
    "distributed optimizer, exposed": {"gpus": 16, "sharding": "zero1", "overlap_parameters": False},
    "FSDP": {"gpus": 16, "sharding": "zero3", "kernels": "compiled"},
    "FSDP of stages": {"gpus": 16, "pp": 2, "sharding": "zero3", "kernels": "compiled", "global_batch": 64},
    "FSDP in groups": {"gpus": 16, "sharding": "zero3", "shard_group": 8, "reshard": False},
    "tensor parallel": {"gpus": 8, "tp": 8},
    "tensor parallel, all overlapped": {"gpus": 8, "tp": 8, "overlap_tp": "all"},
    "tensor parallel without sequence": {"gpus": 8, "tp": 8, "sequence": False, "overlap_tp": "none"},
    "stages": {"gpus": 8, "pp": 4, "global_batch": 16},
    "stages, exposed": {"gpus": 8, "pp": 4, "global_batch": 16, "overlap_pp": False},
    "chunks": {"gpus": 8, "pp": 4, "vp": 2, "global_batch": 16},
    "zero bubble": {"gpus": 8, "pp": 4, "schedule": "zero-bubble", "global_batch": 16},
    "ring": {"gpus": 8, "cp": 4, "seq_len": 16384},
    "gathered keys": {"gpus": 8, "cp": 4, "cp_exchange": "gather", "seq_len": 16384},
    "tokens for heads": {"gpus": 8, "cp": 4, "cp_exchange": "all-to-all", "seq_len": 16384},
    "full recomputation": {"gpus": 8, "tp": 2, "checkpoint": "full"},
    "selective recomputation": {"gpus": 8, "checkpoint": "selective", "checkpoint_every": 2},
    "graph": {"gpus": 8, "tp": 2, "kernels": "graph"},
    "adapters": {"gpus": 8, "adapter_rank": 8},
    "frozen": {"gpus": 8, "frozen_layers": 3},
    "fp8": {"gpus": 8, "precision": "fp8", "sharding": "zero3"},
}


def model_of(name: str):
    return MIXTURE if name == "experts" else SMALL


LAYOUTS["experts"] = {"gpus": 16, "ep": 8, "sharding": "zero1"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_a_valid_workload_that_the_closed_form_agrees_with(name: str) -> None:
    # Given a layout of each kind
    model, layout = model_of(name), Layout(**LAYOUTS[name])

    # When it is simulated
    result = predict_parallel(model, NODE, layout)

    # Then its programs are whole, and the search's estimate is close
    validate_workload(replace(result.workload, ranks=result.workload.ranks[: 1 << 16]))
    estimate = estimate_seconds(model, NODE, layout)
    assert estimate == pytest.approx(result.iteration, rel=0.12)
    low, high = result.interval
    assert low < result.iteration < high
    assert result.gpus == layout.gpus and result.timeline.seconds > 0


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 8, "sharding": "zero1", "global_batch": 8 * 9},
        {"gpus": 8, "sharding": "zero3", "kernels": "eager", "global_batch": 8 * 9},
        {"gpus": 8, "tp": 2, "pp": 4, "global_batch": 24},
        {"gpus": 4, "pp": 4, "stage_layers": (1, 2, 2, 3), "global_batch": 24},
        {"gpus": 8, "pp": 2, "vp": 2, "global_batch": 4 * 16},
    ],
)
def test_micro_batches_that_repeat_are_extended_exactly(options, monkeypatch) -> None:
    layout = complete_layout(Layout(**options), SMALL)
    simulated, _ = count_simulated_micro_batches(layout)
    assert simulated < layout.accumulation
    short = predict_parallel(SMALL, NODE, layout)

    monkeypatch.setattr(predicting, "count_simulated_micro_batches", lambda layout: (layout.accumulation, 1))
    whole = predict_parallel(SMALL, NODE, layout)

    # of interleaved stages the first micro-batches are not yet quite in step
    assert short.iteration == pytest.approx(whole.iteration, rel=5e-4 if layout.vp == 1 else 0.01)
    # of stages that are done together, another one may be the one that is shown
    assert short.device_active == pytest.approx(whole.device_active, rel=0.02)
    for family in ("gemm", "attention"):
        assert short.by_family[family] == pytest.approx(whole.by_family[family], rel=0.02)
    assert short.by_op["aten::mm"] == pytest.approx(whole.by_op["aten::mm"], rel=0.02)


def test_ranks_of_a_sample_swap_its_tokens_for_heads_around_one_attention() -> None:
    ring, swapped = (
        predict_parallel(SMALL, NODE, Layout(gpus=8, cp=4, cp_exchange=way, seq_len=16384))
        for way in ("ring", "all-to-all")
    )

    assert _count_ops(ring, "aten::_flash_attention_forward") == 4 * SMALL.layers, "a kernel for each part"
    assert _count_ops(swapped, "aten::_flash_attention_forward") == SMALL.layers
    # queries, keys and values together before, what they gave after; the same backward
    assert _count_ops(swapped, "c10d::alltoall_base_") == 4 * SMALL.layers
    assert _count_ops(swapped, "c10d::send") == 0
    assert swapped.by_family["attention"] < ring.by_family["attention"]


def _count_ops(result, name: str) -> int:
    program = result.timeline.program
    return sum(program.signatures[n].name == name for n in program.columns.op_signature.tolist())


def test_one_graph_lets_no_rank_come_late_to_a_collective() -> None:
    layout = Layout(gpus=8, cp=4, cp_exchange="all-to-all", seq_len=16384)
    launched, replayed = (
        predict_parallel(SMALL, NODE, replace(layout, kernels=kernels)).by_family["collective"]
        for kernels in ("fused", "graph")
    )

    stalls = 1e-6 * SHIPPED.stall_us * 4 * SMALL.layers
    assert launched - replayed == pytest.approx(stalls, rel=0.02)


def test_pipelines_gather_sharded_parameters_once_per_step() -> None:
    def count_gathers(batch: int) -> list[int]:
        layout = Layout(gpus=16, pp=2, sharding="zero3", kernels="compiled", global_batch=batch)
        programs = predict_parallel(SMALL, NODE, layout).workload.programs
        return [sum(op.signature.name.startswith("c10d::_allgather") for op in p.ops) for p in programs]

    assert count_gathers(16) == count_gathers(32) and min(count_gathers(16)) == 5  # four layers and an end


def test_ten_thousand_ranks_cost_what_64_do() -> None:
    def predict(gpus: int):
        return predict_parallel(SMALL, NODE, Layout(gpus=gpus, tp=8, pp=4, global_batch=8 * gpus, sharding="zero1"))

    predict(64)
    few, many = (calls(lambda gpus=gpus: predict(gpus)) for gpus in (64, 10240))
    assert many < 1.5 * few


def test_one_program_stands_for_all_ranks_of_a_stage() -> None:
    result = predict_parallel(SMALL, NODE, Layout(gpus=64, tp=8, pp=2))
    assert len(result.workload.programs) == 2
    assert sum(len(rank.ranks) for rank in result.ranks) == 64
    assert result.path and result.path[-1].end > result.path[0].start


def test_time_is_told_by_module_and_group() -> None:
    result = predict_parallel(SMALL, NODE, Layout(gpus=8, tp=4, sharding="zero1"))
    figures = result.parallel
    assert figures is not None and figures.exposed["tp"] > 0
    assert result.by_layer["layers.3"] > 0 and result.by_module["layers.*.feed_forward"] > 0
    parts = figures.compute + sum(figures.exposed.values())
    assert parts <= result.iteration * 1.001
    document = result.to_dict()
    assert document["layout"]["tp"] == 4 and document["fits"] is True
    assert document["tokens_per_second_per_gpu"] == pytest.approx(2 * 2048 / result.iteration / 8)


def test_a_bubble_is_what_fewer_micro_batches_leave() -> None:
    few, many = (predict_parallel(SMALL, NODE, Layout(gpus=4, pp=4, global_batch=batch)) for batch in (4, 32))
    assert few.parallel is not None and many.parallel is not None
    # (pp - 1) / (m + pp - 1) of even stages: 3/7 of the step with 4 micro-batches, 3/35 with 32; the last has the head
    assert few.parallel.bubble / few.iteration == pytest.approx(3 / 7, abs=0.1)
    assert many.parallel.bubble / many.iteration == pytest.approx(3 / 35, abs=0.06)


def test_kernel_time_is_without_the_wait_for_other_stages() -> None:
    result = predict_parallel(SMALL, NODE, Layout(gpus=4, pp=4, global_batch=4))
    assert result.parallel is not None and result.parallel.bubble > 0.3 * result.iteration
    assert result.by_family["collective"] < 0.05 * result.iteration
    assert result.exposed_comm == pytest.approx(sum(result.parallel.exposed.values()))
    assert result.device_idle == pytest.approx(result.parallel.bubble, rel=0.01)
    total = sum(result.by_family.values())
    for split in (result.by_phase, result.by_op, result.by_layer, result.by_module):
        assert sum(split.values()) == pytest.approx(total, rel=1e-6)


def test_layers_are_written_once_for_all_their_copies() -> None:
    layout = complete_layout(Layout(gpus=1, global_batch=3), SMALL)
    workload = build_parallel_workload(SMALL, layout, (), gpus_per_node=8, micro_batches=3)
    program = workload.programs[0]
    assert len(program.symbolic) < program.num_ops / 5
    held = compute_peak_memory(program).by_kind
    # 16-bit weights once, whatever the number of micro-batches
    assert held["parameter"] + held.get("embedding_table", 0) == pytest.approx(
        4 * count_all_parameters(SMALL), rel=0.02
    )
    modules = {program.names[m] for m in np.unique(program.columns.op_module).tolist()}
    assert {f"layers.{n}.attention" for n in range(8)} <= modules


def test_a_large_model_has_a_timeline_of_every_stage() -> None:
    result = predict_parallel(load_transformer("llama3-70b"), NODE, Layout(gpus=512, tp=8, pp=4))
    assert len(result.ranks) == 4
    for c in range(4):
        times = result.simulation.timeline(c).times
        assert np.all(times.kernel_end >= times.kernel_start)


def test_gradients_are_reduced_in_larger_buckets_where_more_ranks_share_a_ring() -> None:
    def reductions(gpus: int) -> int:
        layout = complete_layout(Layout(gpus=gpus, global_batch=gpus, sharding="zero1"), SMALL)
        (program,) = build_parallel_workload(SMALL, layout, (), gpus_per_node=8, micro_batches=1).programs
        names = [program.symbolic[s].name for s in program.columns.op_signature.tolist()]
        return names.count("c10d::_reduce_scatter_base_")

    # Given ten parts of 65 to 67 million weights: one fills a bucket of 40 million, two one of 128 million
    # When gradients are reduced, then fewer and larger collectives carry them
    assert reductions(8) == 10  # eight layers, embedding and head
    assert reductions(128) == 5


@pytest.mark.parametrize(
    ("model", "options", "switch", "group"),
    [
        (SMALL, {"gpus": 8, "tp": 8}, {"overlap_tp": "all"}, "tp"),
        (MIXTURE, {"gpus": 8, "ep": 8, "kernels": "graph"}, {"overlap_ep": True}, "ep"),
    ],
)
def test_collectives_hide_beside_the_kernels_of_a_layer_both_ways(model, options, switch, group) -> None:
    # Given one layout whose collectives nothing overlaps with, and one where kernels run beside them
    waits, hides = (
        predict_parallel(model, NODE, Layout(micro_batch=4, **(options | {"overlap_tp": "none"} | more)))
        for more in ({}, switch)
    )

    # Then most of their time no longer shows
    assert waits.parallel is not None and hides.parallel is not None
    assert hides.parallel.exposed.get(group, 0.0) < 0.35 * waits.parallel.exposed[group]
    assert hides.iteration < waits.iteration


def test_tensor_parallel_functions_of_megatron_cost_the_host_of_one_rank_too() -> None:
    def scopes(kernels: str) -> set[str]:
        layout = complete_layout(Layout(gpus=1, kernels=kernels), SMALL)
        (program,) = build_parallel_workload(SMALL, layout, (), gpus_per_node=8, micro_batches=1).programs
        return {program.names[n] for n in program.columns.scope_name.tolist()}

    assert {"GatherBackward", "ScatterBackward"} <= scopes("fused")
    assert not {"GatherBackward", "ScatterBackward"} & scopes("eager")
