"""`--gpus`: one number, several numbers, and what is rejected."""

from __future__ import annotations

import json

import pytest

from tests.app.cli.test_bad_input import refusal
from traincast.app.cli.main import main
from traincast.ir.file import save_workload
from traincast.models.catalog import load_model
from traincast.models.data_parallel import apply_data_parallel


def result(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_data_parallel_training_on_one_node(capsys):
    alone = result(capsys, "predict", "vgg13", "--on", "dgx-a100")
    eight = result(capsys, "predict", "vgg13", "--on", "dgx-a100", "--gpus", 8)
    assert (alone["gpus"], eight["gpus"]) == (1, 8)
    assert eight["iteration_ms"] > alone["iteration_ms"]
    assert "collective" in eight["per_family"]
    assert eight["batch_size"] == alone["batch_size"]


def test_more_gpus_than_a_node_holds_are_several_nodes(capsys):
    eight = result(capsys, "predict", "vgg13", "--on", "dgx-a100", "--gpus", 8)
    sixteen = result(capsys, "predict", "vgg13", "--on", "dgx-a100", "--gpus", 16)
    # 25 GB/s between nodes against 300 inside
    assert sixteen["per_family"]["collective"] > 1.2 * eight["per_family"]["collective"]


def test_a_bare_device_says_which_links_were_assumed(capsys):
    precision, warning = result(capsys, "predict", "vgg13", "--on", "a100-80gb", "--gpus", 4)["warnings"]
    assert "run in TF32" in precision and "dgx-a100" in warning
    (warning,) = result(capsys, "predict", "vgg13", "--on", "t4", "--gpus", 2, "--batch-size", 8)["warnings"]
    assert "8 to a server, joined by PCIe 3 at 16 GB/s" in warning


def test_inference_on_many_gpus_takes_as_long_as_on_one(capsys):
    one = result(capsys, "predict", "vgg13", "--on", "dgx-a100", "--mode", "inference")
    many = result(capsys, "predict", "vgg13", "--on", "dgx-a100", "--mode", "inference", "--gpus", 64)
    assert many["gpus"] == 64
    assert many["iteration_ms"] == pytest.approx(one["iteration_ms"])
    assert many["exposed_comm_ms"] == 0


def test_weak_scaling(capsys):
    curve = result(capsys, "predict", "vgg13", "--on", "dgx-a100", "--gpus", "4,1,16", "--batch-size", 32)
    assert curve["scaling"] == "weak"
    rows = curve["rows"]
    assert [(r["gpus"], r["nodes"], r["batch_size"], r["global_batch"]) for r in rows] == [
        (1, 1, 32, 32),
        (4, 1, 32, 128),
        (16, 2, 32, 512),
    ]
    for row in rows:
        assert row["throughput_samples_per_s"] == pytest.approx(1e3 * row["global_batch"] / row["iteration_ms"])
        relative = rows[0]["iteration_ms"] / row["iteration_ms"]
        assert row["efficiency"] == pytest.approx(relative)
    assert 1 == rows[0]["efficiency"] > rows[1]["efficiency"] >= rows[2]["efficiency"] > 0


def test_strong_scaling_divides_the_batch(capsys):
    curve = result(
        capsys, "predict", "vgg13", "--on", "dgx-a100", "--gpus", "1,2,8", "--batch-size", 64, "--scaling", "strong"
    )
    assert [(r["batch_size"], r["global_batch"]) for r in curve["rows"]] == [(64, 64), (32, 64), (8, 64)]
    assert curve["rows"][2]["iteration_ms"] < curve["rows"][0]["iteration_ms"]


def test_the_curve_as_text(capsys):
    assert main(["predict", "vgg13", "--on", "dgx-a100", "--gpus", "1,8", "--batch-size", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "vgg13 (training) on NVIDIA A100-SXM4-40GB: weak scaling, batch of a GPU fixed"
    assert lines[1].startswith("8 GPUs: ") and "fits, " in lines[1]
    assert lines[2].startswith("Efficiency ")
    assert lines[4].split()[:3] == ["GPUs", "nodes", "batch"]
    assert [line.split()[0] for line in lines[6:]] == ["1", "8", "note:"]
    assert "100.0%" in lines[6]


def test_a_thousand_gpus(capsys):
    row = result(capsys, "predict", "vgg13", "--on", "dgx-h100", "--gpus", "8,1024")["rows"][1]
    assert (row["gpus"], row["nodes"]) == (1024, 128)


def test_a_workload_of_several_ranks_runs_on_its_own_number(capsys, tmp_path):
    path = tmp_path / "four.tc"
    save_workload(apply_data_parallel(load_model("vgg13"), 4), path)
    made = result(capsys, "predict", path, "--on", "dgx-a100")
    assert made["gpus"] == result(capsys, "predict", path, "--on", "dgx-a100", "--gpus", 4)["gpus"] == 4
    direct = result(capsys, "predict", "vgg13", "--on", "dgx-a100", "--gpus", 4)
    assert made["iteration_ms"] == pytest.approx(direct["iteration_ms"])
    assert "4 GPUs" in refusal(capsys, "predict", path, "--on", "dgx-a100", "--gpus", 8)
    assert "4 GPUs" in refusal(capsys, "predict", path, "--on", "dgx-a100", "--gpus", 1)
    assert "4 GPUs" in refusal(capsys, "predict", path, "--on", "dgx-a100", "--gpus", "4,8")


@pytest.mark.parametrize("gpus", ["0", "-2", "two", "1,,2", "", "1.5", "99999999999", "0,4"])
def test_numbers_that_are_none(capsys, gpus):
    assert "GPU" in refusal(capsys, "predict", "vgg13", "--on", "dgx-a100", f"--gpus={gpus}").replace("--gpus", "GPU")


def test_a_batch_that_cannot_be_divided(capsys):
    message = refusal(
        capsys, "predict", "vgg13", "--on", "dgx-a100", "--gpus", "1,3", "--batch-size", 64, "--scaling", "strong"
    )
    assert "64 cannot be divided among 3 GPUs" in message


def test_a_timeline_needs_one_number(capsys, tmp_path):
    message = refusal(
        capsys, "predict", "vgg13", "--on", "dgx-a100", "--gpus", "1,2", "--trace-out", tmp_path / "t.json"
    )
    assert "one number" in message


def test_a_dlrm_shards_its_tables(capsys):
    eight = result(capsys, "predict", "dlrm-default", "--on", "dgx-a100", "--gpus", 8)
    assert eight["gpus"] == 8
    (warning,) = eight["warnings"]
    assert "hybrid parallel" in warning and "traincast shard" in warning
    rows = result(capsys, "predict", "dlrm-default", "--on", "dgx-a100", "--gpus", "1,8")["rows"]
    assert rows[1]["iteration_ms"] == pytest.approx(eight["iteration_ms"])
    # a curve compares like with like: its first point is sharded as well, on one GPU
    assert 0.5 < rows[1]["efficiency"] < 1.5


def test_a_table_too_large_for_one_gpu_is_split(capsys):
    (warning, *_) = result(capsys, "predict", "dlrm-mlperf", "--on", "dgx1-v100", "--gpus", 16)["warnings"]
    assert "split by rows" in warning


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--embedding", "bag", "FBGEMM"),
        ("--seq-len", 8, "not used"),
        ("--batch-size", 0, "0"),
    ],
)
def test_what_a_sharded_dlrm_does_not_have(capsys, option, value, said):
    assert said in refusal(capsys, "predict", "dlrm-default", "--on", "dgx-a100", "--gpus", 2, option, value)


def test_a_saved_step_with_fused_tables_is_sharded(capsys, tmp_path):
    path = tmp_path / "saved.tc"
    save_workload(load_model("dlrm-v2"), path)
    found = result(capsys, "predict", path, "--on", "dgx-a100", "--gpus", 8)
    assert found["gpus"] == 8 and found["exposed_comm_ms"] > 0
    assert any("table" in warning for warning in found["warnings"])


def test_dlrm_v2_shards_its_tables(capsys):
    eight = result(capsys, "predict", "dlrm-v2", "--on", "dgx-h100", "--gpus", 8)
    assert (eight["gpus"], eight["batch_size"]) == (8, 8192)
    assert "MLPs and cross network under DDP" in eight["warnings"][0]
    rows = result(capsys, "predict", "dlrm-v2", "--on", "dgx-h100", "--gpus", "2,8")["rows"]
    assert rows[1]["iteration_ms"] == pytest.approx(eight["iteration_ms"])


@pytest.mark.parametrize("model", ["dlrm-default", "dlrm-v2"])
def test_mixed_precision_of_a_sharded_dlrm(capsys, model):
    full, bf16, fp16 = (
        result(capsys, "predict", model, "--on", "dgx-a100", "--gpus", 4, "--batch-size", 8192, "--dtype", dtype)
        for dtype in ("fp32", "bf16", "fp16")
    )
    assert bf16["per_family"]["gemm"] < 0.5 * full["per_family"]["gemm"]
    assert bf16["per_family"]["embedding"] == pytest.approx(full["per_family"]["embedding"], rel=0.01)
    assert bf16["per_family"]["collective"] == pytest.approx(full["per_family"]["collective"], rel=0.05)
    assert bf16["iteration_ms"] == pytest.approx(fp16["iteration_ms"], rel=0.02)


def test_a_curve_of_a_described_dlrm_in_mixed_precision(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "bottom_mlp: [13, 64, 32]\ntop_mlp: [64, 1]\nnum_tables: 4\nrows_per_table: 1000\nlookups_per_table: 3\n"
        "embedding_dim: 32\nbatch_size: 4096\n"
    )
    curve = result(capsys, "predict", path, "--on", "dgx-a100", "--gpus", "2,4", "--dtype", "bf16")
    assert [row["global_batch"] for row in curve["rows"]] == [8192, 16384]

    # one GPU is asked for as `predict` asks for it, whose program has no such arithmetic
    for gpus in ("1", "1,4"):
        assert main(["predict", str(path), "--on", "dgx-a100", "--gpus", gpus, "--dtype", "bf16"]) == 2
        assert "fp32 or tf32, not bf16" in capsys.readouterr().err


def test_a_cluster_of_your_own(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("device: a100-80gb\ngpus_per_node: 4\nlink_gbs: 300\nnetwork_gbs_per_gpu: 12.5\n")
    curve = result(capsys, "predict", "vgg13", "--on", path, "--gpus", "4,8")
    assert [row["nodes"] for row in curve["rows"]] == [1, 2]
    (precision,) = curve["warnings"]
    assert "run in TF32" in precision
