"""Published steps of large Transformers: rows become questions by rules, and errors stay where they were measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from traincast.models.transformers.description import Experts
from traincast.utils.errors import TraincastError
from traincast_evaluation.suites.cases import Case, LeftOut, Outcome, run_cases
from traincast_evaluation.suites.llm import llm_cases, summarise_llm
from traincast_evaluation.suites.llm_rows import DOUBT, is_fitted, make_request, read_model, read_platform
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
        ({"model": "Mamba-3B", "hidden": ""}, "no description of model 'Mamba-3B'"),
        ({"device": "TPU v5"}, "no sheet of device 'TPU v5'"),
        ({"tp": ""}, "does not say how the model is laid out"),
    ],
)
def test_rows_that_cannot_be_asked_say_why(cells, message: str) -> None:
    with pytest.raises(TraincastError, match=message):
        make_request(row(**cells))


def test_what_a_row_leaves_open_widens_its_interval() -> None:
    assert make_request(row()).doubt == 0
    assert make_request(row(precision="ambiguous: fp8 or fp4", set="mlperf")).doubt == DOUBT
    unknown = make_request(row(model="Grok-9", notes="MoE experts=8 topk=2 moe_ffn=512", global_batch=""))
    assert unknown.doubt > DOUBT and unknown.layout.global_batch == 0
    assert unknown.transformer().experts == Experts(count=8, top_k=2, ffn=512)


def test_names_of_other_releases_are_known() -> None:
    sizes = {"layers": "", "hidden": "", "heads": "", "kv_heads": "", "ffn": "", "vocab": ""}
    for name, layers in (
        ("NemotronH_56B", 118), ("Nemotron Nano 9B v2", 56), ("Nemotron_3_Nano", 52), ("LLAMA4_E128", 48),
        ("Qwen3-Next 80B-A3B", 48), ("NEMOTRON4_340B", 96), ("Llama 3.2 1B", 16), ("GPT3 175B", 96),
        ("mixtral:mixtral_8x7b_tp2pp4ep4", 32), ("Moonlight 16B", 27),
    ):  # fmt: skip
        assert read_model(row(model=name, **sizes)).layers == layers, name
    assert read_model(row(set="megatron_lm_ci_golden", model="moe:deepseekv3_proxy", layers="14")).layers == 14
    for name, device in (
        ("NVIDIA L40S", "l40s"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("A10G", "a10g"), ("AMD MI300 (?)", "mi300x"),
        ("NVIDIA GH200 480GB", "gh200"), ("H800", "h800"), ("Tesla T4", "t4"),
    ):  # fmt: skip
        assert read_platform(row(device=name)).device.key == device
    assert read_platform(row(device="H100", gpus_per_node="4")).gpus_per_node == 4


def test_a_layout_stands_in_the_name_of_a_configuration() -> None:
    named = make_request(row(set="mlperf_x", tp="", cp="", config_path="x/config_GB300_18x4x1xtp1pp1cp2_8b.sh"))
    assert (named.layout.tp, named.layout.cp) == (1, 2)


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
    assert any("'unpacked' is not modelled" in reason for reason in reasons)
    assert any("no description of model 'DeepSeek-V4 flash, 16 layers'" in reason for reason in reasons)


def _is_extra(case: Case | LeftOut) -> bool:
    return case.group.startswith(("nemo_automodel", "torchtune", "fms_fsdp", "primus"))
