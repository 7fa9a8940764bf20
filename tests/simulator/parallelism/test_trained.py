"""What is trained of a model, how samples are packed and stages divided: arithmetic, exchanges and memory follow."""

from __future__ import annotations

import pytest

import traincast
from traincast.app.cli.main import main
from traincast.models.transformers.program.step import layer_piece
from traincast.models.transformers.program.style import Shard, Style
from traincast.models.transformers.reading import described
from traincast.simulator.parallelism.layout import Layout
from traincast.utils.errors import TraincastError

TINY = described("tiny", {"layers": 1, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 9, "seq_len": 32})


def predicted(**options):
    return traincast.predict_training("llama3-8b", on="dgx-h100", layout=Layout(gpus=8, **options))


def test_adapters_of_four_projections_are_all_that_is_trained() -> None:
    style = Style(frozen=True, adapter_rank=4, joined=False)
    piece = layer_piece(TINY, Shard(batch=2, seq_len=32), style, experts=False)
    assert piece.trained == 4 * 2 * 4 * 64  # query, key, value and output: two matrices of rank 4 each
    products = [op.name for op in piece.program.ops].count("aten::mm")
    # forward 7 and two for each adapter; backward one for each frozen weight and four for each adapter
    assert products == 7 + 8 + 7 + 16


def test_frozen_models_keep_no_gradients_but_those_of_adapters() -> None:
    whole, adapted = predicted(), predicted(adapter_rank=16)
    assert adapted.iteration < whole.iteration
    assert adapted.memory["parameters"] == pytest.approx(whole.memory["parameters"], rel=0.01)
    assert 0 < adapted.memory["optimizer"] < 0.01 * whole.memory["optimizer"]
    assert 0 < adapted.parts.optimizer < 0.01 * whole.parts.optimizer
    assert adapted.mfu == pytest.approx(2 / 3 * whole.flops / adapted.iteration / 8 / whole.peak_flops)


@pytest.mark.parametrize("sharding", ["none", "zero3"])
def test_frozen_layers_have_no_backward_pass(sharding: str) -> None:
    steps = [predicted(frozen_layers=count, sharding=sharding) for count in (0, 8, 24)]
    assert steps[0].iteration > steps[1].iteration > steps[2].iteration > steps[0].iteration / 3
    assert steps[2].memory["gradients"] < 0.4 * steps[0].memory["gradients"]


def test_packed_documents_save_attention_alone() -> None:
    whole, packed = predicted(), predicted(document_len=1024)
    assert packed.parts.gemm == pytest.approx(whole.parts.gemm)
    assert packed.parts.attention < 0.4 * whole.parts.attention
    assert packed.flops < whole.flops


def test_the_longest_stage_sets_the_pace() -> None:
    even, uneven = (predicted(pp=2, global_batch=64, stage_layers=layers) for layers in ((16, 16), (8, 24)))
    assert even.iteration == pytest.approx(predicted(pp=2, global_batch=64).iteration)
    assert 1.3 < uneven.iteration / even.iteration < 1.5


def test_block_scales_cost_casts() -> None:
    tensor, blocks = (predicted(precision="fp8", scaling=scaling) for scaling in ("tensor", "mx"))
    assert 1.005 < blocks.iteration / tensor.iteration < 1.1
    assert blocks.parts.gemm == pytest.approx(tensor.parts.gemm, rel=0.002)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--overlap foo", "unknown exchange 'foo'"),
        ("--overlap tp --no-overlap", "--overlap and --no-overlap say different things"),
        ("--fp8-gather", "`fp8_gather` is for 8-bit arithmetic (dtype fp8), not bf16"),
        ("--fp8-scaling mx", "`fp8_scaling` is for 8-bit arithmetic (dtype fp8), not bf16"),
        ("--tp 2 --optimizer sgd", "optimizer 'sgd' has no layout of GPUs"),
        ("--tp 2 --compiled --kernels eager", "--compiled and kernels 'eager' say different things"),
        ("--tp 2 --loader-ms 5", "data loaders and --program do not go with a layout of GPUs"),
        ("--pp 2 --stage-layers 15,x", "stage layers '15,x' are no whole numbers"),
    ],
)
def test_options_that_clash_are_refused(options: str, message: str, capsys) -> None:
    assert main(f"predict llama3-8b --on dgx-h100 --gpus 8 {options}".split()) == 2
    assert message in capsys.readouterr().err


def test_several_gpus_and_no_more_is_data_parallel(capsys) -> None:
    words = ["predict", "llama3-8b", "--on", "dgx-h100", "--gpus", "8"]
    assert main([*words, "--cp-exchange", "gather", "--overlap", "gradients"]) == 0
    assert main(words) == 0
    assert "dp 8" in capsys.readouterr().out
    with pytest.raises(TraincastError, match="is laid over 8 GPUs by a layout"):
        traincast.predict("llama3-8b", on="dgx-h100", gpus=8)
