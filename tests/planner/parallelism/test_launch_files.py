"""Launch files of other tools: what is written is read back as the same layout, and starts no guess."""

from __future__ import annotations

import json

import pytest

from traincast.models.transformers.reading import load_transformer
from traincast.planner.parallelism.launch_files import TOOLS, read_launch_file, write_launch_file
from traincast.simulator.parallelism.layout import Layout, complete_layout
from traincast.utils.errors import TraincastError

MODEL = load_transformer("llama3-8b")
ENDINGS = {"torchtitan": ".toml", "megatron": ".sh", "bridge": ".txt", "deepspeed": ".json", "accelerate": ".yaml"}


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


@pytest.mark.parametrize("tool", ["torchtitan", "deepspeed", "megatron", "bridge"])
def test_a_file_is_told_by_its_text_where_its_name_says_nothing(tool, tmp_path):
    laid = layout(gpus=8, micro_batch=2, global_batch=16)
    path = tmp_path / "job.launch"
    path.write_text(write_launch_file(tool, laid, MODEL))

    assert read_launch_file(path)["micro_batch"] == 2


def test_interleaved_stages_of_megatron_are_read_from_their_layers(tmp_path):
    path = tmp_path / "job.sh"
    path.write_text("--num-layers 32 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2\n")

    assert read_launch_file(path) == {"pp": 4, "vp": 4}


@pytest.mark.parametrize("tool", ["torchtitan", "megatron", "bridge"])
def test_degrees_are_read_back(tool, tmp_path):
    sharding = "zero3" if tool == "torchtitan" else "zero1"
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
