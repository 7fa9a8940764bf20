"""Layouts: what they mean, and rejections that name two numbers and the nearest that work."""

from __future__ import annotations

import pytest

from traincast.hardware.platform import load_platform
from traincast.models.transformers.reading import load_transformer
from traincast.simulator.parallelism.groups import count_group_nodes
from traincast.simulator.parallelism.layout import Layout, check_arithmetic_units, complete_layout
from traincast.simulator.parallelism.predict import predict_parallel
from traincast.utils.errors import TraincastError

LLAMA, MIXTRAL = load_transformer("llama3-70b"), load_transformer("mixtral-8x7b")


def test_what_is_left_of_the_gpus_is_data_parallel() -> None:
    layout = complete_layout(Layout(gpus=512, tp=8, pp=4, cp=2, global_batch=64, sharding="zero1"), LLAMA)
    assert (layout.dp, layout.accumulation, layout.sharing, layout.seq_len) == (8, 8, 16, 8192)
    assert layout.described() == (
        "tp 8, pp 4, cp 2, dp 8, distributed optimizer, 8 x micro-batch 1"
    )  # fmt: skip


def test_a_batch_left_out_keeps_the_stages_busy() -> None:
    assert complete_layout(Layout(gpus=64, tp=8, pp=4, micro_batch=2), LLAMA).global_batch == 2 * 2 * 8


def test_several_chunks_are_an_interleaved_schedule() -> None:
    assert complete_layout(Layout(gpus=32, tp=8, pp=4, vp=5, global_batch=8), LLAMA).schedule == "interleaved"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(gpus=8, tp=3), "tp 3 does not divide the 64 attention heads of llama3-70b; give 2 or 4"),
        (Layout(gpus=16, tp=16), ""),
        (Layout(gpus=96, pp=96), "pp 96 x vp 1 are more stages than the 80 layers of llama3-70b; give pp 80 or fewer"),
        (Layout(gpus=12, tp=8), "12 GPUs are no multiple of tp 8 x pp 1 x cp 1 = 8; give 8 or 16 GPUs"),
        (Layout(gpus=8, ep=2), "ep 2 needs experts, and llama3-70b has 0; leave it out"),
        (Layout(gpus=8, global_batch=12), "batch of 12 is no multiple of dp 8 x micro-batch 1 = 8; give 8 or 16"),
        (Layout(gpus=8, pp=4, vp=2, global_batch=6), "multiples of pp 4, and there are 3; give a global batch of 8"),
        (Layout(gpus=8, cp=3), ""),
        (
            Layout(gpus=16, cp=16, cp_exchange="all-to-all"),
            "cp 16 does not divide the 8 key-value heads of a rank of",
        ),
        (Layout(gpus=6, cp=3, seq_len=64), "cp 3 does not divide 64 tokens into halves; give 2 or 4"),
        (Layout(gpus=8, shard_group=3), "groups of 3 do not divide 8 data-parallel ranks; give 2 or 4"),
        (Layout(gpus=0), "gpus 0 is out of range"),
        (Layout(gpus=8, sharding="zero9"), "unknown sharding 'zero9'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(layout: Layout, message: str) -> None:
    if not message:
        if layout.tp == 16:
            assert complete_layout(layout, LLAMA).dp == 1  # heads of keys are copied where there are fewer than ranks
            return
        message = "cp 3 does not divide"
    with pytest.raises(TraincastError) as caught:
        complete_layout(layout, LLAMA)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_must_divide_among_ranks() -> None:
    with pytest.raises(TraincastError, match="ep 3 does not divide the 8 experts of mixtral-8x7b; give 2 or 4"):
        complete_layout(Layout(gpus=12, ep=3), MIXTRAL)
    with pytest.raises(TraincastError, match="ep 8 does not divide the 4 GPUs of a stage"):
        complete_layout(Layout(gpus=8, pp=2, ep=8), MIXTRAL)


def test_groups_lie_on_as_few_nodes_as_their_strides_allow() -> None:
    topology = load_platform("dgx-h100").topology
    assert topology is not None
    assert count_group_nodes(8, 1, topology) == 1  # tensor parallel: neighbours
    assert count_group_nodes(16, 8, topology) == 16  # data parallel alongside tp 8: one of each node
    assert count_group_nodes(16, 2, topology) == 4


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(gpus=2, pp=2, stage_layers=(40, 39)), "with 79 layers; llama3-70b has 80 on pp 2: give 2 numbers"),
        (Layout(gpus=2, pp=2, vp=2, stage_layers=(40, 40), global_batch=4), "one chunk each, and vp is 2"),
        (Layout(gpus=1, frozen_layers=80), "80 frozen layers leave none of the 80 of llama3-70b to train; give 79"),
        (Layout(gpus=1, frozen_layers=8, adapter_rank=16), "freeze the whole model, and 8 layers are to be frozen"),
        (Layout(gpus=1, document_len=1000), "documents of 1000 tokens do not divide samples of 8192; give 512 or 1024"),
        (Layout(gpus=2, cp=2, document_len=1024), "documents of 1024 tokens are not split over cp 2; give cp 1"),
        (
            Layout(gpus=2, cp=2, attention="unfused"),
            "cp 2 needs fused attention, whose kernels meet the keys of others; give attention sdpa or cp 1",
        ),
    ],
)
def test_what_is_frozen_packed_or_uneven_is_refused_by_its_numbers(layout: Layout, message: str) -> None:
    with pytest.raises(TraincastError, match=message):
        complete_layout(layout, LLAMA)


def test_fp8_needs_units_for_it() -> None:
    check_arithmetic_units("fp8", load_platform("dgx-h100").device)
    with pytest.raises(TraincastError, match=r"a100-40gb has no fp8 units.* give `dtype` bf16, fp16, or a GPU"):
        predict_parallel(MIXTRAL, load_platform("dgx-a100"), Layout(gpus=8, precision="fp8"))
    with pytest.raises(TraincastError, match=r"h100 has no fp4 units.* give `dtype` fp8, bf16, fp16, or a GPU"):
        predict_parallel(MIXTRAL, load_platform("dgx-h100"), Layout(gpus=8, precision="fp4"))
