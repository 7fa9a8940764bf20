"""What is trained of a model, how samples are packed and stages divided: arithmetic, collectives and memory follow."""

from __future__ import annotations

import pytest

import traincast
from traincast.app.cli.main import main
from traincast.hardware.platform import load_platform
from traincast.models.transformers.program.step import build_layer_block
from traincast.models.transformers.program.style import Shard, Style
from traincast.models.transformers.reading import load_transformer, make_transformer
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.predict import predict_parallel

TINY = make_transformer("tiny", {"layers": 1, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 9, "seq_len": 32})


def predicted(**options):
    return predict_parallel(load_transformer("llama3-8b"), load_platform("dgx-h100"), Layout(gpus=8, **options))


def test_adapters_of_four_projections_are_all_that_is_trained() -> None:
    style = Style(frozen=True, adapter_rank=4, joined=False)
    piece = build_layer_block(TINY, Shard(batch=2, seq_len=32), style, modules="*-")
    assert piece.trained == 4 * 2 * 4 * 64  # query, key, value and output: two matrices of rank 4 each
    products = [op.name for op in piece.program.ops].count("aten::mm")
    # forward 7 and two for each adapter; backward one for each frozen weight and four for each adapter
    assert products == 7 + 8 + 7 + 16


def test_frozen_models_keep_no_gradients_but_those_of_adapters() -> None:
    whole, adapted = predicted(), predicted(adapter_rank=16)
    assert adapted.iteration < whole.iteration
    assert adapted.memory.by_kind["parameter"] == pytest.approx(whole.memory.by_kind["parameter"], rel=0.01)
    assert 0 < adapted.memory.by_kind["optimizer_state"] < 0.01 * whole.memory.by_kind["optimizer_state"]
    assert 0 < adapted.by_phase["optimizer"] < 0.01 * whole.by_phase["optimizer"]
    assert adapted.throughput.mfu == pytest.approx(
        2 / 3 * whole.parallel.flops / adapted.iteration / 8 / whole.parallel.peak_flops
    )


@pytest.mark.parametrize("sharding", ["none", "zero3"])
def test_frozen_layers_have_no_backward_pass(sharding: str) -> None:
    steps = [predicted(frozen_layers=count, sharding=sharding) for count in (0, 8, 24)]
    assert steps[0].iteration > steps[1].iteration > steps[2].iteration > steps[0].iteration / 3
    assert steps[2].memory.by_kind["optimizer_state"] < 0.4 * steps[0].memory.by_kind["optimizer_state"]


def test_packed_documents_save_attention_alone() -> None:
    whole, packed = predicted(), predicted(document_len=1024)
    assert packed.by_family["gemm"] == pytest.approx(whole.by_family["gemm"])
    assert packed.by_family["attention"] < 0.4 * whole.by_family["attention"]
    assert packed.parallel.flops < whole.parallel.flops


def test_the_longest_stage_sets_the_pace() -> None:
    even, uneven = (predicted(pp=2, global_batch=64, stage_layers=layers) for layers in ((16, 16), (8, 24)))
    assert even.iteration == pytest.approx(predicted(pp=2, global_batch=64).iteration)
    assert 1.3 < uneven.iteration / even.iteration < 1.5


def test_block_scales_cost_casts() -> None:
    tensor, blocks = (predicted(precision="fp8", scaling=scaling) for scaling in ("tensor", "mx"))
    assert 1.005 < blocks.iteration / tensor.iteration < 1.1
    assert blocks.by_family["gemm"] == pytest.approx(tensor.by_family["gemm"], rel=0.002)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--overlap foo", "unknown communication 'foo'"),
        ("--overlap tp --no-overlap", "--overlap and --no-overlap contradict each other"),
        ("--fsdp --fp8-gather", "--fp8-gather is for 8-bit arithmetic (--dtype fp8), not bf16"),
        ("--dtype bf16 --fp8-scaling mx", "--fp8-scaling is for 8-bit arithmetic (--dtype fp8), not bf16"),
        ("--tp 2 --optimizer sgd", "--optimizer sgd has no layout of GPUs"),
        ("--tp 2 --compiled --kernels eager", "--compiled and --kernels eager contradict each other"),
        ("--tp 2 --pageable", "copies no inputs from pinned memory"),
        ("--pp 2 --stage-layers 15,x", "--stage-layers '15,x' are no integers"),
    ],
)
def test_options_that_clash_are_refused(options: str, message: str, capsys) -> None:
    assert main(f"predict llama3-8b --on dgx-h100 --gpus 8 {options}".split()) == 2
    assert message in capsys.readouterr().err


def test_several_gpus_and_no_more_is_data_parallel(capsys) -> None:
    words = ["predict", "llama3-8b", "--on", "dgx-h100", "--gpus", "8"]
    assert main([*words, "--overlap", "gradients"]) == 0
    assert main([*words, "--json"]) == 0
    assert traincast.predict("llama3-8b", on="dgx-h100", gpus=8).parallel.layout.dp == 8


def test_four_bits_are_faster_than_eight_where_there_are_units() -> None:
    node = load_platform("hgx-b200")
    steps = [
        predict_parallel(load_transformer("llama3-8b"), node, Layout(gpus=8, precision=name))
        for name in ("bf16", "fp8", "fp4")
    ]
    assert steps[0].by_family["gemm"] > steps[1].by_family["gemm"] > steps[2].by_family["gemm"]
    assert steps[1].by_family["attention"] == pytest.approx(steps[2].by_family["attention"], rel=1e-3)
