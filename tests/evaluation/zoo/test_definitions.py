"""The modules are the published models: parameter counts, and op by op what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from tests.evaluation.zoo.captured import capture_once
from traincast.ir import Op, Phase, Program
from traincast_evaluation.zoo.build.recipes import RECIPES, count_parameters, make_token_ids
from traincast_evaluation.zoo.build.steps import Setting, make_modern_step
from traincast_evaluation.zoo.define import bert, gpt2, opt, sizes, xlnet

PARAMETERS = {
    "bert-large": 336_226_108,  # with both pre-training heads
    "gpt2-large": 774_030_080,
    "gpt3-xl": 2_879_554_560,
    "gpt3-2.7b": 2_651_553_280,
    "opt-1.3b": 1_315_758_080,
    "switch-xl4": 5_267_615_744,
    "xlnet": 116_718_336 + 32_000,  # the language model head adds a bias
    "transformer": 63_045_632,
    "resnet50": 25_557_032,
    "inception-v3": 27_161_264,  # with the auxiliary classifier
    "vgg13": 133_047_848,
    "dlrm-default": 514_499_137,
    "dlrm-mlperf": 24_036_595_969,
    "dlrm-ddp": 82_710_913,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name: str) -> None:
    assert RECIPES[name].parameters() == PARAMETERS[name]


def test_parameter_count_of_the_other_bert_head_and_of_bare_models() -> None:
    assert count_parameters(lambda: bert.BertForSequenceClassification(sizes.BERT_LARGE)) == 335_143_938
    assert count_parameters(lambda: bert.Bert(sizes.BERT_LARGE)) == 335_141_888


def test_parameter_count_of_dlrm_v2() -> None:
    tables, cross = sum(_dlrm_v2_rows()) * 128, 3 * (2 * 3456 * 512 + 3456)
    bottom = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 128 + 128
    top = 3456 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 512 + 512 + 512 * 256 + 256 + 256 + 1

    assert RECIPES["dlrm-v2"].parameters() == tables + cross + bottom + top


def _dlrm_v2_rows() -> tuple[int, ...]:
    from traincast.models.dlrm.config import DLRM_V2

    return DLRM_V2.rows_per_table


def _one_layer(name: str, mode: str) -> Callable[[], torch.nn.Module]:
    if name == "bert_large":
        head = bert.BertForPreTraining if mode == "train" else bert.BertForSequenceClassification
        return lambda: head(replace(sizes.BERT_LARGE, num_layers=1))
    if name == "opt_13":
        return lambda: opt.Opt(replace(sizes.OPT_13, num_layers=1))
    config = {"gpt2_large": sizes.GPT2_LARGE, "gpt3_xl": sizes.GPT3_XL, "gpt3_27": sizes.GPT3_27}[name]
    return lambda: gpt2.Gpt2(replace(config, num_layers=1))


# what the measured graph calls per op, and the dispatcher ops it becomes
KINDS = {
    "Linear": "gemm", "BMM": "bmm", "VECadd": "add", "VECaddu": "add", "VECmul": "mul", "VECmulu": "mul",
    "VECdiv": "div", "VECdivu": "div", "VECpowu": "pow", "VECtanh": "tanh", "VECgelu": "gelu", "VECrelu": "act",
    "VECsoftmax": "softmax", "VECln": "norm", "where": "where", "dropout": "dropout", "cumsum": "cumsum",
}  # fmt: skip
OPS = {
    "aten::addmm": "gemm", "aten::mm": "gemm", "aten::bmm": "bmm", "aten::add": "add", "aten::mul": "mul",
    "aten::div": "div", "aten::pow": "pow", "aten::tanh": "tanh", "aten::gelu": "gelu", "aten::relu": "act",
    "aten::_softmax": "softmax", "aten::native_layer_norm": "norm", "aten::where": "where",
    "aten::native_dropout": "dropout", "aten::cumsum": "cumsum",
}  # fmt: skip


def _measured(rows: Iterator[dict[str, object]]) -> list[tuple[str, int]]:
    """(kind, output elements) of the ops that do work, in order."""
    found = []
    for row in rows:
        if row["op_kind"] in KINDS:
            shape = [int(size) for size in str(row["output_shape"]).strip("()[] ").split(",") if size.strip()]
            # BERT's pooler is a tanh that the source files under relu
            pooler = str(row["target"]).endswith("pooler.activation")
            found.append(("tanh" if pooler else KINDS[str(row["op_kind"])], _product(shape)))
    return found


def _product(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _ours(program: Program) -> list[tuple[str, int]]:
    def forward(op: Op) -> bool:
        return op.phase == Phase.FORWARD and op.name in OPS

    return [(OPS[op.name], op.outputs[0].spec.numel) for op in program.ops if forward(op)]


@pytest.mark.parametrize(
    ("name", "mode", "batch"),
    [
        ("bert_large", "train", 2),
        ("bert_large", "inf", 16),
        ("gpt2_large", "inf", 4),
        ("gpt3_xl", "inf", 2),
        ("gpt3_27", "inf", 2),
        ("opt_13", "inf", 2),
    ],
)
def test_forward_runs_the_measured_ops(shared_data: Path, name: str, mode: str, batch: int) -> None:
    polars = pytest.importorskip("polars")
    table = polars.read_parquet(shared_data / "iterations" / "transformer_op_latencies.parquet")
    chosen = table.filter(polars.col("model") == name, polars.col("mode") == mode, polars.col("batch") == batch)
    chosen = chosen.filter(polars.col("device") == chosen["device"][0])
    seq_len = int(chosen["seq_len"][0])
    setting = Setting(
        mode="training" if mode == "train" else "inference", optimizer="sgd", precision="fp32", choice="eager"
    )

    def loss(outputs: object, labels: torch.Tensor) -> torch.Tensor:
        scores = outputs[0] if isinstance(outputs, tuple) else outputs
        return xlnet.compute_token_loss(scores, labels)

    make = make_modern_step(setting, _one_layer(name, mode), make_token_ids(1), loss, make_token_ids(1))
    program = capture_once(make, batch, seq_len, mode=setting.mode)

    assert _ours(program) == _measured(chosen.iter_rows(named=True))
