"""A built-in model at another size equals a fresh capture at that size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from tests.evaluation.zoo.captured import FP32_TRAINING, capture_dlrm, capture_once, connected, storages
from traincast.capturing import capture_step
from traincast.ir import Program, compute_peak_memory
from traincast.models.catalog import load_model
from traincast.models.dlrm.config import DLRM_DEFAULT, DLRM_MLPERF, DlrmConfig
from traincast_evaluation.zoo.build.recipes import make_classes, make_images, make_token_ids
from traincast_evaluation.zoo.build.steps import MakeStep, make_cnn_study_step, make_modern_step
from traincast_evaluation.zoo.define import bert, gpt2, opt, sizes, switch, transformer, xlnet
from traincast_evaluation.zoo.define.resnet import Bottleneck


def _assert_same(ours: Program, theirs: Program) -> None:
    assert [s.name for s in ours.scopes] == [s.name for s in theirs.scopes]
    for a, b in zip(connected(ours), connected(theirs), strict=True):
        assert a == b
    assert storages(ours) == storages(theirs)
    assert compute_peak_memory(ours) == compute_peak_memory(theirs)


@pytest.mark.parametrize("embedding", ["batched", "bag", "fbgemm"])
@pytest.mark.parametrize("config", [DLRM_DEFAULT, DLRM_MLPERF], ids=lambda config: config.name)
def test_built_in_dlrm_re_batched(config: DlrmConfig, embedding: str) -> None:
    stored = load_model(config.name, embedding=embedding).resized(batch_size=777)

    fresh = capture_dlrm(replace(config, embedding=embedding), 777)

    _assert_same(stored.programs[0], fresh)


def _language_model(build: Callable[[], torch.nn.Module], inputs: int = 1) -> MakeStep:
    def loss(outputs: object, labels: torch.Tensor) -> torch.Tensor:
        return xlnet.compute_token_loss(outputs[0] if isinstance(outputs, tuple) else outputs, labels)

    return make_modern_step(FP32_TRAINING, build, make_token_ids(inputs), loss, make_token_ids(1))


SMALL_GPT = replace(sizes.GPT2_LARGE, num_layers=1, hidden_size=48, num_heads=4, max_seq_len=64, vocab_size=100)
SMALL_SWITCH = replace(
    sizes.SWITCH_XL4,
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    head_dim=8,
    ffn_size=64,
    vocab_size=100,
    expert_capacity=3,
)
SMALL_SIZES: dict[str, int] = {"num_layers": 1, "hidden_size": 48, "num_heads": 4, "ffn_size": 96, "vocab_size": 100}
SMALL: dict[str, MakeStep] = {
    "bert": _language_model(lambda: bert.BertForPreTraining(replace(sizes.BERT_LARGE, **SMALL_SIZES, max_seq_len=64))),
    "gpt2": _language_model(lambda: gpt2.Gpt2(SMALL_GPT)),
    "gpt2-sdpa": _language_model(lambda: gpt2.Gpt2(replace(SMALL_GPT, attention="sdpa"))),
    "opt": _language_model(lambda: opt.Opt(replace(sizes.OPT_13, **SMALL_SIZES, max_seq_len=64))),
    "xlnet": _language_model(lambda: xlnet.Xlnet(replace(sizes.XLNET_BASE, **SMALL_SIZES, head_dim=12))),
    "transformer": _language_model(
        lambda: transformer.Transformer(replace(sizes.TRANSFORMER_BASE, **SMALL_SIZES)),
        inputs=2,
    ),
    "switch": _language_model(lambda: switch.Switch(SMALL_SWITCH), inputs=2),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_transformer_re_sized(name: str) -> None:
    workload = capture_step(SMALL[name], batch_size=4, seq_len=32, name=name)

    resized = workload.resized(batch_size=9, seq_len=21)

    _assert_same(resized.programs[0], capture_once(SMALL[name], 9, 21))


def test_a_residual_block_re_batched() -> None:
    def build() -> torch.nn.Module:
        layers = [torch.nn.Conv2d(3, 64, 3), Bottleneck(64, 64, 1), torch.nn.Flatten(), torch.nn.Linear(256 * 36, 5)]
        return torch.nn.Sequential(*layers)

    make = make_cnn_study_step(FP32_TRAINING, build, make_images(8, FP32_TRAINING), make_classes)
    workload = capture_step(lambda batch: make(batch, 0), batch_size=4, name="block")

    _assert_same(workload.resized(batch_size=11).programs[0], capture_once(make, 11))
