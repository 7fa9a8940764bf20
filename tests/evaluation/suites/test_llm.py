"""Published steps of large Transformers: rows become questions by rules, and errors stay where they were measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from traincast.utils.errors import TraincastError
from traincast_evaluation.suites.cases import Case, LeftOut, Outcome, run_cases
from traincast_evaluation.suites.llm import llm_cases, summarise_llm
from traincast_evaluation.suites.llm_rows import is_fitted, make_request, read_model, read_platform
from traincast_evaluation.suites.published import Row

COLUMNS = dict.fromkeys(
    ("set", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "device", "gpus", "precision",
     "tp", "pp", "vp", "cp", "ep", "zero_or_fsdp_stage", "micro_batch", "global_batch", "activation_checkpointing",
     "compile", "notes", "date"), "",
)  # fmt: skip


def row(**cells: str) -> Row:
    given = {
        "set": "torchtitan_torchao", "model": "Llama3-8B", "layers": "32", "hidden": "4096", "heads": "32",
        "kv_heads": "8", "ffn": "14336", "vocab": "128256", "seq_len": "8192", "device": "H100", "gpus": "8",
        "precision": "bf16", "tp": "1", "pp": "1", "cp": "1", "ep": "1", "micro_batch": "2", "global_batch": "16",
        "activation_checkpointing": "selective (op)", "compile": "yes",
    }  # fmt: skip
    return Row("llm_training.csv", 1, {**COLUMNS, **given, **cells})


def test_a_row_of_torchtitan_is_fsdp_compiled() -> None:
    layout = make_request(row()).layout
    assert (layout.sharding, layout.kernels, layout.checkpoint, layout.joined) == (
        "zero3",
        "compiled",
        "selective",
        False,
    )
    assert make_request(row(compile="no")).layout.kernels == "eager"
    assert [make_request(row(date=date)).layout.loss for date in ("2024-12", "2025-06", "")] == ["eager", "", ""]
    assert make_request(row(notes="local batch 2. async TP", tp="8", gpus="64")).layout.overlap_tp == "all"
    assert make_request(row(notes="vanilla TP", tp="8", gpus="64")).layout.overlap_tp == "none"
    assert make_request(row(precision="float8 tensorwise linear")).layout.precision == "fp8"


def test_a_row_without_its_micro_batch_fills_the_stages() -> None:
    layout = make_request(row(micro_batch="", pp="4", gpus="32", global_batch="128")).layout
    assert (layout.micro_batch, layout.pp) == (4, 4)


def test_rows_of_other_sources_follow_their_own_rules() -> None:
    foundry = make_request(
        row(set="llm_foundry_mpt", model="MPT-7b", precision="bf16 (FSDP mixed_precision PURE)", kv_heads="32",
            zero_or_fsdp_stage="FSDP1 FULL_SHARD (ZeRO-3)", activation_checkpointing="full (per block)")
    ).layout  # fmt: skip
    assert (foundry.attention, foundry.gather_bytes, foundry.checkpoint) == ("triton", 2, "full")
    megatron = make_request(row(set="megatron_bridge_perf", precision="FP8-CS", pp="8", gpus="64", global_batch="128"))
    assert (megatron.layout.vp, megatron.layout.sharding, megatron.layout.precision) == (4, "zero1", "fp8")
    uneven = make_request(row(set="mlperf_training_v31_v51", pp="8", gpus="64", layers="61", global_batch="128"))
    assert uneven.layout.vp == 1
    measured = make_request(row(set="simumax_b200", device="B200-SXM")).layout
    assert measured.overlap_tp == "none" and not measured.overlap_gradients


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"model": "Mamba-3B"}, "no description of model 'Mamba-3B'"),
        ({"device": "TPU v5"}, "no sheet of device 'TPU v5'"),
        ({"precision": "ambiguous: fp8 or fp4"}, "does not say which arithmetic it ran in"),
        ({"tp": ""}, "does not say how the model is laid out"),
    ],
)
def test_rows_that_cannot_be_asked_say_why(cells, message: str) -> None:
    with pytest.raises(TraincastError, match=message):
        make_request(row(**cells))


def test_dimensions_come_from_the_row() -> None:
    model = read_model(row(layers="12", hidden="8192", heads="64"))
    assert (model.layers, model.head_dim, model.activation) == (12, 128, "swiglu")
    assert read_platform(row(device="A100-80GB")).device.key == "a100-80gb"


def test_the_halves_are_told_from_configurations(shared_data) -> None:
    cases = [case for case in llm_cases(shared_data) if not isinstance(case, LeftOut)]
    share = np.mean([case.fitted for case in cases])
    assert 0.45 < share < 0.55
    assert is_fitted(row()) == is_fitted(row(notes="another note", vocab="1"))


def test_a_slice_of_the_held_out_half_stays_as_close_as_reported(shared_data) -> None:
    held = [case for case in llm_cases(shared_data) if not isinstance(case, LeftOut) and not case.fitted]
    outcomes = [outcome for outcome in run_cases(held[::14]) if isinstance(outcome, Outcome)]
    rows = {line.group: line for line in summarise_llm("llm", outcomes)}
    assert len(outcomes) > 25
    assert rows["all: step"].mape < 14
    assert rows["llm_foundry_mpt"].mape < 11
    assert "all: half that constants were fitted on" not in rows


def test_rows_of_other_programs_say_why_they_are_left_out(shared_data: Path) -> None:
    # Given the table that no constant was fitted on
    cases = [case for case in llm_cases(shared_data) if case.name.startswith("llm_training_extra") or _is_extra(case)]

    # Then steps have a request, none of them in the fitted half, and the others a reason
    reasons = [case.reason for case in cases if isinstance(case, LeftOut)]
    assert len(cases) == 56 and not any(case.fitted for case in cases if isinstance(case, Case))
    assert any("'QLoRA' is not modelled" in reason for reason in reasons)
    assert any("no description of model 'DeepSeek-V4 flash, 16 layers'" in reason for reason in reasons)


def _is_extra(case: Case | LeftOut) -> bool:
    return case.group.startswith(("nemo_automodel", "torchtune", "fms_fsdp", "primus"))
