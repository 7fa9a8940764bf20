"""Steps of Transformers over GPUs: they add up, agree with the simulation, and cost the same for any number of
ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

import traincast
from traincast.app.cli.main import main
from traincast.costs.in_step import SHIPPED
from traincast.hardware.platform import add_default_links, load_platform
from traincast.models.transformers.reading import load_transformer, make_transformer
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.predict import predict_parallel
from traincast.simulator.prediction.result import split_step
from traincast.utils.errors import TraincastError

SMALL = make_transformer(
    "small", {"layers": 4, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000, "seq_len": 2048}
)


SIXTEEN_LAYERS = replace(load_transformer("llama3-70b"), layers=16)


@cache
def predicted(*, model=SIXTEEN_LAYERS, on="dgx-h100", memory=False, **options):
    transformer = load_transformer(model) if isinstance(model, str) else model
    platform = add_default_links(load_platform(on))
    return predict_parallel(transformer, platform, Layout(**options), check_memory=memory)


def test_one_gpu_is_the_described_model() -> None:
    layout = Layout(gpus=1, micro_batch=4, kernels="eager")
    result = predict_parallel(load_transformer("mpt-125m"), load_platform("h100"), layout)
    described = traincast.predict("mpt-125m", on="h100", batch_size=4, dtype="bf16")
    assert result.iteration == pytest.approx(described.iteration, rel=0.001)


def test_the_parts_are_the_step() -> None:
    result = predicted(gpus=512, tp=8, pp=4, global_batch=512, sharding="zero1")
    assert sum(seconds for _, seconds in split_step(result)) == pytest.approx(result.iteration, rel=0.02)
    low, high = result.interval
    assert low < result.iteration < high
    assert 0.2 < result.throughput.mfu < 0.7
    assert result.tokens_per_second_per_gpu * result.iteration * 512 == pytest.approx(512 * 8192)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"pp": 4, "vp": 4}, {"pp": 4}),
        ({"schedule": "zero-bubble", "pp": 4}, {"pp": 4}),
        ({"tp": 8, "overlap_tp": "all"}, {"tp": 8, "overlap_tp": "none"}),
        ({"checkpoint": "none"}, {"checkpoint": "selective"}),
        ({"checkpoint": "selective"}, {"checkpoint": "full"}),
        ({"checkpoint": "full", "checkpoint_every": 2}, {"checkpoint": "full"}),
        ({"sharding": "zero3", "kernels": "compiled"}, {"sharding": "zero3", "kernels": "eager"}),
        ({"precision": "fp8"}, {"precision": "bf16"}),
        ({"sharding": "zero1"}, {"sharding": "zero1", "overlap_gradients": False, "overlap_parameters": False}),
    ],
)
def test_what_people_switch_on_makes_steps_shorter(better, worse) -> None:
    shared = {"gpus": 64, "global_batch": 256}
    assert predicted(**shared, **better).iteration < predicted(**shared, **worse).iteration


def test_memory_falls_with_what_is_shared() -> None:
    def needed(**options) -> float:
        return predicted(gpus=64, global_batch=64, memory=True, **options).needed_bytes

    assert needed(sharding="zero3") < needed(sharding="zero1") < needed(sharding="none")
    assert needed(sharding="zero3", checkpoint="full") < needed(sharding="zero3", checkpoint="selective")
    assert needed(tp=8, sharding="zero1") < needed(tp=2, sharding="zero1")
    result = predicted(gpus=64, global_batch=64, sharding="none", memory=True)
    assert not result.fits and "too much; it would not run as it is" in result.warnings[0]


def test_mixtures_exchange_tokens_and_hold_their_share_of_experts() -> None:
    alone = predicted(model="mixtral-8x7b", gpus=8, global_batch=8, sharding="zero1", memory=True)
    shared = predicted(model="mixtral-8x7b", gpus=8, ep=8, global_batch=8, sharding="zero1", memory=True)
    assert shared.parallel.exposed["ep"] > 0 and "ep" not in alone.parallel.exposed
    assert shared.memory.by_kind["parameter"] < 0.3 * alone.memory.by_kind["parameter"]


def test_a_token_leaves_once_for_a_node_or_for_each_expert() -> None:
    def exposed(**options) -> float:
        result = predicted(model="deepseek-v3", gpus=64, global_batch=64, sharding="zero1", **options)
        return result.parallel.exposed["ep"]

    each, once = (exposed(ep=64, kernels="graph", dispatch=way) for way in ("each", "once"))
    # 8 experts of a token on 8 nodes: 8 * (1 - (7/8)^8) = 5.25 nodes hold any of them
    assert 5.0 / 8 < once / each < 0.9


def test_experts_with_a_capacity_wait_for_no_counts() -> None:
    model = load_transformer("mixtral-8x7b")
    even = replace(model, experts=replace(model.experts, capacity=1.0))
    shared = {"gpus": 8, "ep": 8, "global_batch": 8, "sharding": "zero1"}
    waiting, straight = (predicted(model=some, **shared) for some in (model, even))
    calls_per_layer = (waiting.host - straight.host) / model.layers / 1e-6 / (SHIPPED.routing_us - SHIPPED.module_us)
    assert 15 < calls_per_layer < 40
    assert waiting.iteration > straight.iteration


QWEN = {"model": "qwen3-30b-a3b", "gpus": 8, "ep": 8, "global_batch": 8, "sharding": "zero1"}


def test_graphs_of_modules_relieve_the_host_but_not_of_the_experts() -> None:
    launched, partly, whole = (
        predicted(**QWEN, **options) for options in ({}, {"graphed": ("attention", "router")}, {"kernels": "graph"})
    )
    assert whole.host < 0.1 * partly.host
    assert partly.host < 0.8 * launched.host
    assert whole.iteration < partly.iteration < launched.iteration


def test_a_graph_of_an_unknown_module_is_rejected() -> None:
    with pytest.raises(TraincastError, match="module of a CUDA graph 'atention'"):
        predicted(**QWEN, graphed=("atention",))
    with pytest.raises(TraincastError, match="give fused, or graph"):
        predicted(**QWEN, graphed=("attention",), kernels="eager")


def test_casts_of_single_experts_take_the_host_longer_the_more_of_them_a_rank_has() -> None:
    few, many = (
        predicted(**{**QWEN, "ep": ep}, precision="fp8", scaling="mx").host - predicted(**{**QWEN, "ep": ep}).host
        for ep in (8, 2)
    )
    # per layer 2 grouped GEMMs forward and 2 backward, of which each has two: 6 calls for each of 16 or 64 experts
    assert many - few == pytest.approx(48 * 6 * (64 - 16) * 1e-6 * SHIPPED.module_us, rel=0.2)


def test_tokens_that_arrive_in_the_order_of_experts_are_not_sorted_again() -> None:
    each, once = (predicted(**QWEN, kernels="graph", dispatch=way) for way in ("each", "once"))
    assert once.parallel.compute < each.parallel.compute


def test_dispatch_beside_another_micro_batch_is_hidden_also_between_tensor_parallel_ranks() -> None:
    shared = {**QWEN, "tp": 2, "kernels": "graph", "dispatch": "once"}
    beside, shown = (predicted(**shared, overlap_ep=way).parallel.exposed.get("ep", 0.0) for way in (True, False))
    assert beside < 0.2 * shown


def test_biases_of_experts_are_added_in_fp32_unless_a_graph_fuses_them() -> None:
    model = load_transformer("gpt-oss-120b")
    plain = replace(model, bias=False)
    shared = {"gpus": 8, "ep": 8, "global_batch": 8, "sharding": "zero1"}
    more = predicted(model=model, **shared).parallel.compute / predicted(model=plain, **shared).parallel.compute
    fused = predicted(model=model, **shared, kernels="graph").parallel.compute
    assert more > 1.1
    assert fused < predicted(model=model, **shared).parallel.compute / 1.05


def test_pytorchs_ring_merges_parts() -> None:
    shared = {"model": "llama3-8b", "gpus": 8, "cp": 4, "seq_len": 65536, "global_batch": 2, "sharding": "zero3"}
    ring, fused = (predicted(**shared, kernels=name).by_family["attention"] for name in ("compiled", "fused"))
    assert ring == pytest.approx(SHIPPED.ring * fused, rel=0.002)


def test_eight_bit_rows_with_wide_gradients_lie_between() -> None:
    shared = {"model": "llama3-8b", "gpus": 8, "global_batch": 8, "sharding": "zero3", "kernels": "compiled"}
    narrow = predicted(**shared, precision="fp8").by_family["gemm"]
    mixed = predicted(**shared, precision="fp8", wide_gradients=True).by_family["gemm"]
    wide = predicted(**shared).by_family["gemm"]
    assert narrow < mixed < wide
    assert (mixed - narrow) / (wide - narrow) == pytest.approx(1 / 3, abs=0.1)


def test_amds_products_take_longer_where_nobody_tuned_them() -> None:
    shared = {"model": "llama3-8b", "on": "mi300x-platform", "gpus": 8, "global_batch": 8, "joined": False}
    tuned, plain = (predicted(**shared, kernels=name).by_family["gemm"] for name in ("fused", "compiled"))
    # most products are bound by arithmetic: those that are not lose less
    assert 0.9 * SHIPPED.untuned < plain / tuned < SHIPPED.untuned


def test_every_built_in_model_has_a_step() -> None:
    for name in ("gpt-oss-120b", "deepseek-v3", "t5-11b", "vit", "mpt-7b"):
        model = load_transformer(name)
        micro = max(1, 4096 // model.seq_len)
        result = predicted(model=model, gpus=64, micro_batch=micro, sharding="zero3", ep=8 if model.experts else 1)
        assert 0.02 < result.throughput.mfu < 0.8, name


def test_the_command_line_answers_in_one_document(capsys) -> None:
    line = "predict llama3-8b --on dgx-h100 --gpus 64 --tp 2 --fsdp --micro-batch 2 --global-batch 64 --compiled --json"
    assert main(line.split()) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["gpus"] == 64 and document["layout"]["dp"] == 32 and document["compiled"]
    assert document["iteration_ms"] > 0 and document["mfu_peak_tflops"] == pytest.approx(64 * 989.4)
    assert document["memory_gb"]["peak"] < document["memory_needed_gb"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("predict llama3-8b --on dgx-h100 --gpus 8 --tp 3", "tp 3 does not divide the 32 attention heads"),
        ("predict llama3-8b --on dgx-h100 --gpus 8 --fsdp --zero 1", "--zero 1 contradicts it"),
        ("predict llama3-8b --on dgx-h100 --gpus 8,12 --tp 8", "12 GPUs are no multiple of tp 8"),
        ("predict resnet50 --on dgx-h100 --gpus 8 --tp 2", "resnet50 is a captured model"),
        ("predict llama3-8b --on dgx-h100 --gpus 8 --tp 2 --mode inference", "a Transformer that only infers"),
        ("predict llama3-8b --on dgx-h100 --gpus 8 --tp 2 --skew-ms 1", "--skew-ms is not used here"),
    ],
)
def test_bad_combinations_are_one_line(capsys, line: str, message: str) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_described_transformer_is_a_workload_of_one_gpu() -> None:
    workload = traincast.load("mpt-125m", batch_size=2, seq_len=128)
    assert workload.batch_size == 2 and workload.seq_len == 128
    result = traincast.predict("mpt-125m", on="a100-80gb", batch_size=2, seq_len=128)
    assert not result.estimated_ops


def test_uneven_experts_make_the_busiest_rank_slower() -> None:
    node = load_platform("dgx-h100")
    layout = Layout(gpus=8, ep=8, sharding="zero1")
    even, uneven = (
        predict_parallel(load_transformer("mixtral-8x7b"), node, replace(layout, expert_imbalance=share))
        for share in (1.0, 2.0)
    )
    assert 1.3 < uneven.by_family["gemm"] / even.by_family["gemm"] < 2.0
    assert uneven.iteration > 1.3 * even.iteration
    with pytest.raises(TraincastError, match="give ep 2 or more, or leave it out"):
        predict_parallel(load_transformer("mixtral-8x7b"), node, replace(layout, ep=1, expert_imbalance=2.0))


def test_recomputing_some_layers_costs_some_of_recomputing_all() -> None:
    shared = {"gpus": 64, "pp": 4, "global_batch": 256}
    none, some, every = (
        predicted(**shared, checkpoint=name, checkpoint_layers=layers).iteration
        for name, layers in (("none", 0), ("full", 1), ("full", 0))
    )
    assert (some - none) / (every - none) == pytest.approx(1 / 4, abs=0.08)


def test_ranks_and_critical_path_are_those_of_the_whole_step() -> None:
    short, long = (predicted(gpus=64, pp=4, tp=8, global_batch=batch) for batch in (16, 128))

    for step in (short, long):
        assert sum(step.path_by_activity.values()) == pytest.approx(step.iteration, rel=1e-6)
        assert sum(step.path_by_place.values()) == pytest.approx(step.iteration, rel=0.01)
        assert max(rank.iteration for rank in step.ranks) == pytest.approx(step.iteration, rel=0.01)
    assert long.ranks[0].compute == pytest.approx(8 * short.ranks[0].compute, rel=0.05)
