"""The recommenders alongside DLRM: parameter counts, what their steps are made of, and other sizes than the
captured."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch")

import torch

from tests.evaluation.zoo.captured import FP32_TRAINING, capture_once, connected, storages
from traincast.capturing import capture_step
from traincast.hardware.platform import load_platform
from traincast.models.catalog import load_model
from traincast.models.data_parallel import replicate_on_gpus
from traincast.models.dlrm.config import CRITEO_ROWS
from traincast.simulator.prediction.prediction import predict_step
from traincast.utils.errors import TraincastError
from traincast_evaluation.zoo.build.recipes import RECIPES
from traincast_evaluation.zoo.build.recommenders import RECOMMENDERS
from traincast_evaluation.zoo.build.steps import make_recommender_step
from traincast_evaluation.zoo.define.recommenders import NCF_ITEMS, NCF_USERS
from traincast_evaluation.zoo.define.sequences import Hstu, HstuConfig, OneTrans, OneTransConfig

NAMES = tuple(model.name for model in RECOMMENDERS)


def linear(*widths: int) -> int:
    return sum(a * b + b for a, b in zip(widths, widths[1:], strict=False))


def test_parameters_are_tables_and_layers() -> None:
    criteo = sum(CRITEO_ROWS)
    deep = linear(13, 512, 64) + linear(27 * 64, 512, 512, 64) + linear(64 + 64 + 1, 1)
    assert RECIPES["deepfm"].parameters() == 64 * criteo + deep
    assert RECIPES["wide-deep"].parameters() == (32 + 4) * criteo + linear(13 + 26 * 32, 1024, 512, 256, 1)
    din = linear(4 * 128, 80, 40, 1) + linear(3 * 128, 200, 80, 1)
    assert RECIPES["din"].parameters() == 64 * (10_000_000 + 100_000) + din
    ncf = (NCF_USERS + NCF_ITEMS) * (64 + 128) + linear(256, 256, 128, 64) + linear(64 + 64, 1)
    assert RECIPES["ncf"].parameters() == ncf
    layer = 256 * 4 * 256 + (2 * 4096 - 1) + linear(256, 256)
    assert RECIPES["hstu"].parameters() == 256 * 10_000_000 + 256 * 4096 + 8 * layer


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_looked_up_and_updated_in_one_kernel_each(name: str) -> None:
    ops = Counter(op.name for op in load_model(name).programs[0].ops)
    lookups = {"hstu": 1, "onetrans": 2, "din": 1, "deepfm": 1, "wide-deep": 2, "ncf": 0}[name]
    assert ops["fbgemm::split_embedding_codegen_forward_unweighted_cuda"] == lookups
    assert ops["fbgemm::split_embedding_backward_codegen_adam_unweighted_exact_cuda"] == lookups
    assert ops["aten::embedding"] == {"hstu": 1, "onetrans": 1, "ncf": 4}.get(name, 0)


def test_unpooled_lookups_have_a_bag_each() -> None:
    """A history of 100 and the item on offer, in two tables, for each of 2048 samples."""
    (lookup,) = [op for op in load_model("din").programs[0].ops if op.name.endswith("forward_unweighted_cuda")]
    assert lookup.outputs[0].spec.shape == (2048 * 101, 128)


def test_attention_of_hstu_is_padded_and_its_rows_are_jagged() -> None:
    ops = [op for op in load_model("hstu").programs[0].ops if op.name.startswith("fbgemm::")]
    counted = Counter(op.name for op in ops)
    assert counted["fbgemm::jagged_to_padded_dense_forward"] == 8 * (3 + 1)
    assert counted["fbgemm::dense_to_jagged_forward"] == 8 * (1 + 3)
    padded = next(op for op in ops if op.name == "fbgemm::jagged_to_padded_dense_forward")
    assert (padded.inputs[0].spec.shape, padded.outputs[0].spec.shape) == ((32 * 512, 256), (32, 512, 256))


SMALL = {
    "hstu": lambda optimizer: Hstu(optimizer, HstuConfig(items=1000, width=16, layers=1, heads=2, head_dim=8)),
    "onetrans": lambda optimizer: OneTrans(
        optimizer, OneTransConfig(items=1000, features=(50,) * 32, width=16, layers=1, heads=2)
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_one_re_sized_equals_a_capture(name: str) -> None:
    (family,) = [model for model in RECOMMENDERS if model.name == name]
    make = make_recommender_step(FP32_TRAINING, SMALL[name], *family.batch(FP32_TRAINING))
    resized = capture_step(make, batch_size=4, seq_len=64, name=name).resized(batch_size=6, seq_len=96).programs[0]
    fresh = capture_once(make, 6, 96)
    assert list(connected(resized)) == list(connected(fresh))
    assert storages(resized) == storages(fresh)


@pytest.mark.parametrize("name", NAMES)
def test_they_are_predicted_and_longer_batches_take_longer(name: str) -> None:
    platform, workload = load_platform("h100"), load_model(name)
    larger = workload.resized(batch_size=2 * workload.batch_size)
    usual, double = (predict_step(step, platform).iteration for step in (workload, larger))
    assert 1e-4 < usual < double < 3 * usual


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ncf"])
def test_fused_tables_are_not_copied_to_many_gpus_silently(name: str) -> None:
    with pytest.raises(TraincastError, match="fused embedding tables"):
        replicate_on_gpus(load_model(name), 8)


def test_ncf_is_data_parallel_as_it_was_trained() -> None:
    assert len(replicate_on_gpus(load_model("ncf"), 8).ranks) == 8


def test_a_click_and_a_next_item_have_their_own_cross_entropy() -> None:
    from traincast_evaluation.zoo.build.steps import compute_click_or_next_loss

    logits = torch.tensor([[0.0], [0.0]])
    assert compute_click_or_next_loss(logits, torch.tensor([[0.0], [1.0]])).item() == pytest.approx(0.6931, abs=1e-3)
    assert compute_click_or_next_loss(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)).item() == pytest.approx(
        1.3863, abs=1e-3
    )
