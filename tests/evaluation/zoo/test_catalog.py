"""The built-in models: every file loads, choices are checked, edits do what they say."""

from __future__ import annotations

import pytest

from traincast.ir import Phase, StorageKind, compute_peak_memory
from traincast.ir.file import load_workload
from traincast.models.catalog import DATA, list_models, load_model
from traincast.utils.errors import TraincastError

NAMES = (
    "dlrm-default", "dlrm-mlperf", "dlrm-ddp", "dlrm-v2", "hstu", "onetrans", "din", "deepfm", "wide-deep", "ncf",
    "bert-large", "gpt2-large", "gpt3-xl", "gpt3-2.7b", "opt-1.3b", "switch-xl4", "xlnet", "transformer",
    "resnet50", "inception-v3", "vgg13",
)  # fmt: skip
MEGABYTE = 1 << 20


def test_every_model_of_the_documentation_is_there() -> None:
    assert tuple(info.name for info in list_models()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_files_are_those_of_the_index_and_load(name: str) -> None:
    (info,) = [info for info in list_models() if info.name == name]

    assert {path.name for path in (DATA / name).glob("*.tc")} == set(info.files)
    for file in info.files:
        workload = load_workload(DATA / name / file)
        (program,) = workload.programs
        assert (workload.name, program.rigid) == (name, "")
        assert (workload.batch_size, workload.seq_len) == (info.batch_size, info.seq_len)
        assert file.startswith(workload.mode)


@pytest.mark.parametrize("name", NAMES)
def test_default_training_step(name: str) -> None:
    (info,) = [info for info in list_models() if info.name == name]

    workload = load_model(name)

    (program,) = workload.programs
    assert program.num_ops == info.ops
    phases = {scope.phase for scope in program.scopes}
    assert {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER} <= phases
    resized = workload.resized(batch_size=2 * info.batch_size)
    assert compute_peak_memory(resized.programs[0]).peak_bytes > compute_peak_memory(program).peak_bytes


def test_all_files_together_are_small() -> None:
    assert sum(path.stat().st_size for path in DATA.rglob("*.tc")) < 12 * MEGABYTE


def test_inference_is_the_forward_pass() -> None:
    program = load_model("bert-large", mode="inference").programs[0]

    assert {scope.phase for scope in program.scopes} == {Phase.FORWARD}
    assert not any(op.name == "aten::native_dropout" for op in program.ops)


def test_sdpa_has_fused_attention_and_eager_has_none() -> None:
    def fused(attention: str) -> bool:
        ops = load_model("gpt2-large", attention=attention, mode="inference").programs[0].ops
        return any("scaled_dot_product" in op.name for op in ops)

    assert fused("sdpa")
    assert not fused("eager")


@pytest.mark.parametrize(("precision", "dtype"), [("amp", "bfloat16"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_half_precision(precision: str, dtype: str) -> None:
    program = load_model("resnet50", precision=precision).programs[0]

    used = {tensor.spec.dtype for op in program.ops for tensor in (*op.inputs, *op.outputs)}
    assert dtype in used
    assert not ({"bfloat16", "float16"} - {dtype}) & used


def test_without_optimizer_there_is_no_update_and_no_state() -> None:
    with_update = load_model("bert-large", optimizer="adam").programs[0]

    without = load_model("bert-large", optimizer="none").programs[0]

    assert Phase.OPTIMIZER not in {scope.phase for scope in without.scopes}
    assert without.num_ops < with_update.num_ops
    assert StorageKind.OPTIMIZER_STATE not in set(without.columns.storage_kind.tolist())
    assert compute_peak_memory(without).peak_bytes < compute_peak_memory(with_update).peak_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "bert-larg"}, "unknown model 'bert-larg'. Did you mean bert-large"),
        ({"name": "resnet50", "attention": "sdpa"}, "resnet50 has no attention variants"),
        ({"name": "bert-large", "embedding": "bag"}, "bert-large has no embedding variants"),
        ({"name": "dlrm-v2", "embedding": "bag"}, "unknown embedding 'bag'"),
        ({"name": "xlnet", "attention": "sdpa"}, "unknown attention 'sdpa'"),
        ({"name": "resnet50", "optimizer": "lamb"}, "unknown optimizer 'lamb'"),
        (
            {"name": "dlrm-ddp", "embedding": "bag", "optimizer": "adam"},
            "dlrm-ddp is not there with embedding 'bag', optimizer 'adam'",
        ),
        ({"name": "resnet50", "precision": "fp8"}, "unknown precision 'fp8'"),
        ({"name": "resnet50", "mode": "eval"}, "unknown mode 'eval'"),
        ({"name": "resnet50", "mode": "inference", "optimizer": "sgd"}, "inference has no optimizer"),
    ],
)
def test_a_wrong_choice_is_one_clear_line(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(TraincastError) as refusal:
        load_model(**arguments)  # type: ignore[arg-type]

    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
