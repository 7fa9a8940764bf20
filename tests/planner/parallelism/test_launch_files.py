"""Launch files of other tools: what is written is read back as the same layout, and starts no guess."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import yaml

from traincast import plan, predict
from traincast.models.transformers.reading import load_transformer
from traincast.planner.parallelism.launch_files import TOOLS, read_launch_file, write_launch_file
from traincast.planner.parallelism.plan import read_layout
from traincast.simulator.parallelism.layout import Layout, complete_layout
from traincast.utils.errors import TraincastError

MODEL = load_transformer("llama3-8b")
ENDINGS = {
    "torchtitan": ".sh",
    "torchtitan-toml": ".toml",
    "megatron": ".sh",
    "bridge": ".txt",
    "deepspeed": ".json",
    "accelerate": ".yaml",
}


def layout(**fields):
    return complete_layout(Layout(seq_len=8192, **fields), MODEL)


def read_back(tool, laid, tmp_path):
    path = tmp_path / f"launch{ENDINGS[tool]}"
    path.write_text(write_launch_file(tool, laid, MODEL))
    return read_launch_file(path)


@pytest.mark.parametrize("tool", TOOLS)
def test_sharded_data_parallel_is_read_back(tool, tmp_path):
    laid = layout(gpus=16, micro_batch=2, global_batch=64, sharding="zero3", checkpoint="full")

    fields = read_back(tool, laid, tmp_path)

    sharded = {"zero": 3} if tool == "deepspeed" else {"fsdp": 2}
    assert fields.items() >= sharded.items()
    if tool != "accelerate":
        assert fields.items() >= {"micro_batch": 2, "global_batch": 64}.items()
    assert fields["checkpoint"] == "full"


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("fields", [
    {"sharding": "zero1"}, {"sharding": "zero2"}, {"checkpoint": "light"}, {"checkpoint": "selective"},
    {"pp": 2, "vp": 2, "sharding": "zero3"}, {"pp": 2, "vp": 8, "sharding": "zero1"}, {"tp": 2, "checkpoint": "full"},
])  # fmt: skip
def test_a_file_states_the_whole_layout_or_is_not_written(tool, fields, tmp_path):
    laid = layout(gpus=16, micro_batch=1, global_batch=64, **fields)
    try:
        found = read_back(tool, laid, tmp_path)
    except TraincastError:
        with pytest.raises(TraincastError, match="choose another tool"):
            write_launch_file(tool, laid, MODEL)
        return
    sharded = "zero3" if "fsdp" in found else f"zero{found['zero']}" if "zero" in found else "none"
    assert sharded == laid.sharding
    assert found.get("checkpoint", "none") == laid.checkpoint
    assert [found.get(name, 1) for name in ("tp", "pp", "vp")] == [laid.tp, laid.pp, laid.vp]


@pytest.mark.parametrize("tool", ["torchtitan", "torchtitan-toml", "deepspeed", "megatron", "bridge"])
def test_a_file_is_told_by_its_text_where_its_name_says_nothing(tool, tmp_path):
    laid = layout(gpus=8, micro_batch=2, global_batch=16)
    path = tmp_path / "job.launch"
    path.write_text(write_launch_file(tool, laid, MODEL))

    assert read_launch_file(path)["micro_batch"] == 2


@pytest.mark.parametrize(("name", "config"), [("llama3-8b", "llama3_8b"), ("qwen3-8b", "")])
def test_the_script_for_torchtitan_starts_it_or_asks_for_its_configuration(tmp_path, name, config):
    model = load_transformer(name)
    laid = complete_layout(Layout(seq_len=4096, gpus=16, pp=2, micro_batch=2, global_batch=64, sharding="zero3"), model)
    script, starter = tmp_path / "job.sh", tmp_path / "torchrun"
    script.write_text(write_launch_file("torchtitan", laid, model))
    starter.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    starter.chmod(0o755)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}

    done = subprocess.run(["bash", str(script)], env=path, capture_output=True, text=True, check=False)

    if not config:
        assert done.returncode == 1 and "MODULE: torchtitan ships no such model" in done.stderr
        return
    words = done.stdout.split()
    assert words[:4] == ["--nnodes", "2", "--nproc_per_node", "8"]
    at = words.index("--module")
    assert words[at : at + 4] == ["--module", "llama3", "--config", config]
    assert words[words.index("--parallelism.num_pp_microbatches") + 1] == str(laid.accumulation)
    assert words[words.index("--training.num_tokens_per_train_step") + 1] == str(64 * 4096)


@pytest.mark.parametrize("tool", ["torchtitan", "torchtitan-toml"])
def test_what_torchtitan_is_started_with_is_predicted_as_it_was_asked_for(tool, tmp_path):
    sizes = {"tp": 2, "pp": 2, "micro_batch": 2, "global_batch": 64, "seq_len": 4096, "checkpoint": "full"}
    asked = predict("llama3-8b", on="dgx-h100", gpus=16, fsdp=2, **sizes)
    laid = complete_layout(Layout(gpus=16, sharding="zero3", kernels="eager", **sizes), MODEL)
    path = tmp_path / f"job{ENDINGS[tool]}"
    path.write_text(write_launch_file(tool, laid, MODEL))

    again = predict("llama3-8b", on="dgx-h100", gpus=16, **read_launch_file(path))

    assert again.to_dict() == asked.to_dict()


@pytest.mark.parametrize(("text", "wanted"), [
    ("--training.num_tokens_per_microbatch_per_dp_rank=16384 --training.max_context_length=8192 "
     "activation-checkpoint:full", {"micro_batch": 2, "seq_len": 8192, "checkpoint": "full"}),
    ("--training.num_tokens_per_microbatch_per_dp_rank 10000 --training.max_context_length 8192", "multiples"),
    ("--training.num_tokens_per_microbatch_per_dp_rank 8192", "give all three"),
    ("--training.num_tokens_per_microbatch_per_dp_rank 8192 --training.max_context_length 8192 "
     "--parallelism.pipeline_parallel_degree 2 --parallelism.num_pp_microbatches 8", "num_tokens_per_train_step"),
])  # fmt: skip
def test_tokens_of_torchtitan_are_batches(tmp_path, text, wanted):
    path = tmp_path / "job.sh"
    path.write_text(text)
    if isinstance(wanted, str):
        with pytest.raises(TraincastError, match=wanted):
            read_launch_file(path)
        return
    assert read_launch_file(path) == wanted


def test_interleaved_stages_of_megatron_are_read_from_their_layers(tmp_path):
    path = tmp_path / "job.sh"
    path.write_text("--num-layers 32 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2\n")

    assert read_launch_file(path) == {"pp": 4, "vp": 4}


@pytest.mark.parametrize("tool", ["torchtitan", "torchtitan-toml", "megatron", "bridge"])
def test_degrees_are_read_back(tool, tmp_path):
    sharding = "zero3" if tool.startswith("torchtitan") else "zero1"
    laid = layout(gpus=64, tp=4, pp=2, cp=2, micro_batch=1, global_batch=128, sharding=sharding)

    fields = read_back(tool, laid, tmp_path)

    wanted = {"tp": 4, "pp": 2, "cp": 2, "micro_batch": 1, "global_batch": 128, "seq_len": 8192}
    assert fields.items() >= wanted.items()
    assert "ep" not in fields


@pytest.mark.parametrize("tool", ["deepspeed", "accelerate"])
def test_what_a_tool_cannot_run_is_refused(tool):
    with pytest.raises(TraincastError, match=f"{tool} has no tp"):
        write_launch_file(tool, layout(gpus=8, tp=8, global_batch=8), MODEL)


def test_megatron_has_the_sizes_of_the_model():
    text = write_launch_file("megatron", layout(gpus=8, global_batch=8), MODEL)

    assert "--num-layers 32 " in text and "--num-query-groups 8 " in text and "--hidden-size 4096 " in text


def test_training_arguments_of_hugging_face_are_read(tmp_path):
    path = tmp_path / "training_args.json"
    arguments = {"per_device_train_batch_size": 4, "gradient_checkpointing": True, "fsdp": ["full_shard"], "bf16": True}
    path.write_text(json.dumps(arguments))

    assert read_launch_file(path) == {"micro_batch": 4, "fsdp": 2, "checkpoint": "full"}


def test_switches_of_other_sections_are_not_taken_for_the_compiler(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        "[training]\nlocal_batch_size = 2\n[checkpoint]\nenable = true\nmode = 'full'\n[compile]\nenable = false\n"
    )

    assert read_launch_file(path) == {"micro_batch": 2}


@pytest.mark.parametrize(("name", "text"), [
    ("a.json", "{}"), ("a.toml", "x = 1"), ("a.sh", "echo 'unclosed"), ("a.sh", ""), ("a.yaml", "- 1"),
    ("a.toml", "[["), ("none.json", None),
])  # fmt: skip
def test_files_of_no_tool_are_refused(tmp_path, name, text):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(TraincastError):
        read_launch_file(tmp_path / name)


@pytest.mark.parametrize(("sharding", "kind"), [("zero3", "FSDP"), ("zero2", "DEEPSPEED"), ("none", "MULTI_GPU")])
def test_accelerate_knows_every_key(sharding, kind):
    """Accelerate 1.15.0 rejects a file with any other key (ClusterConfig), and looks for the rest in its tables."""
    known = {"compute_environment", "num_processes", "mixed_precision", "distributed_type", "fsdp_config",
             "deepspeed_config"}  # fmt: skip
    inner = {"fsdp_version", "fsdp_reshard_after_forward", "fsdp_auto_wrap_policy", "fsdp_activation_checkpointing",
             "zero_stage", "gradient_accumulation_steps"}  # fmt: skip

    document = yaml.safe_load(
        write_launch_file("accelerate", layout(gpus=8, global_batch=64, sharding=sharding), MODEL)
    )

    assert document["distributed_type"] == kind and set(document) <= known
    assert {key for value in document.values() if isinstance(value, dict) for key in value} <= inner


def test_a_plan_for_a_tool_has_layouts_that_its_file_states(tmp_path):
    found = plan("llama3-8b", on="dgx-h100", gpus=16, global_batch=32, tool="deepspeed", processes=1)

    assert {read_layout(step).tp * read_layout(step).pp for step in found.best} == {1}
    assert all(write_launch_file("deepspeed", read_layout(step), MODEL) for step in found.best)
