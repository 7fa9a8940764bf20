"""Described recommenders: the steps that captures of the same models have, and others of any size."""

from __future__ import annotations

from pathlib import Path

import pytest

import traincast
from traincast.ir.validate import validate_workload
from traincast.models.dlrm.config import CRITEO_ROWS
from traincast.models.recommenders.description import read_description
from traincast.models.recommenders.families import build_recommender_workload
from traincast.utils.errors import TraincastError

CRITEO = {f"t{number}": {"rows": rows, "dim": 64, "optimizer": "adam"} for number, rows in enumerate(CRITEO_ROWS)}
NARROW = {name: {**table, "dim": 32} for name, table in CRITEO.items()}
SHOP = {
    "item": {"rows": 10_000_000, "dim": 64, "optimizer": "adam"},
    "category": {"rows": 100_000, "dim": 64, "optimizer": "adam"},
}
WIDE = {"rows": 1_000_000, "dim": 256, "optimizer": "adam"}
ONETRANS = {"item": {**WIDE, "rows": 10_000_000}, **{f"f{number}": WIDE for number in range(32)}}
AS_CAPTURED = {
    "deepfm": ({"tables": CRITEO, "batch_size": 8192}, 1e-4),
    "wide-deep": ({"tables": NARROW, "batch_size": 8192}, 1e-4),
    "din": ({"tables": SHOP, "history": 100, "batch_size": 2048}, 1e-3),
    # its linear layers over slices copy them first when captured
    "onetrans": ({"tables": ONETRANS, "history": 256, "layers": 6, "heads": 4, "batch_size": 64}, 0.05),
}
FILE = "tables: {a: {rows: 5000, dim: 32}, b: {rows: 100, dim: 32}}\nbatch_size: 256\n"
TOWERS = {"user": {"rows": 1000, "dim": 16}, "item": {"rows": 500, "dim": 32}}


def described(**content):
    return read_description(content, Path("x.yaml"))


@pytest.mark.parametrize("family", AS_CAPTURED)
def test_a_described_model_takes_as_long_as_the_captured_one(family):
    # Given the sizes of a built-in model, when it is described, then its step is that of the capture
    content, near = AS_CAPTURED[family]
    workload = build_recommender_workload(described(recommender=family, **content))
    validate_workload(workload)

    captured = traincast.predict(family, on="a100-80gb", optimizer="adam", dtype="fp32").iteration
    assert traincast.predict(workload, on="a100-80gb").iteration == pytest.approx(captured, rel=near)


@pytest.mark.parametrize("family", ["two-tower", "hstu"])
def test_families_without_a_capture_of_their_own_have_valid_steps(family):
    more = {"query": ["user"], "candidate": ["item"]} if family == "two-tower" else {"history": 20, "layers": 2}
    workload = build_recommender_workload(described(recommender=family, tables=TOWERS, batch_size=64, **more))

    validate_workload(workload)
    assert traincast.predict(workload, on="a100-80gb").iteration > 0


def test_attention_in_one_kernel_is_faster_than_op_by_op():
    sizes = {"recommender": "hstu", "tables": {"item": WIDE}, "history": 512, "layers": 4, "batch_size": 32}
    fused, padded = (
        traincast.predict(build_recommender_workload(described(**sizes, attention=how)), on="h100").iteration
        for how in ("fused", "padded")
    )
    assert fused < padded


def test_every_action_looks_up_the_tables_that_are_named():
    tables = {name: {"rows": 1000, "dim": 64} for name in ("item", "artist", "user")}
    what = described(
        recommender="hstu", tables=tables, history=20, layers=1, batch_size=8, per_action=["item", "artist"]
    )
    workload = build_recommender_workload(what)

    validate_workload(workload)
    looked_up = [op for op in workload.programs[0].ops if op.name.startswith("fbgemm::split_embedding_codegen_forward")]
    assert [op.outputs[0].spec.shape for op in looked_up] == [(160, 128), (8, 64)]


def test_lengths_that_differ_more_take_longer():
    sizes = {"recommender": "hstu", "tables": {"item": WIDE}, "layers": 4, "batch_size": 64}
    even, uneven = (
        traincast.predict(build_recommender_workload(described(**sizes, history=how)), on="h100").iteration
        for how in ({"mean": 500, "longest": 2000}, {"mean": 500, "spread": 400, "longest": 2000})
    )
    assert even < uneven


def test_a_file_is_predicted_on_one_gpu_and_on_many(tmp_path):
    file = tmp_path / "deepfm.yaml"
    file.write_text(
        "recommender: deepfm\ntables: {a: {rows: 5000, dim: 32}, b: {rows: 100, dim: 32}}\nbatch_size: 256\n"
    )

    one = traincast.predict(str(file), on="dgx-h100")
    eight = traincast.predict(str(file), on="dgx-h100", gpus=8, dtype="bf16")
    assert one.iteration < eight.iteration
    assert traincast.predict(str(file), on="dgx-h100", batch_size=8192).iteration > one.iteration


def test_its_tables_are_sharded_by_name(tmp_path):
    file = tmp_path / "wide.yaml"
    file.write_text(
        "recommender: wide-deep\ntables: {a: {rows: 5000, dim: 32}, b: {rows: 100, dim: 32}}\nbatch_size: 256\n"
    )

    found = traincast.shard(str(file), on="dgx-h100", gpus=2, torchrec=False, time_limit=0)
    assert [table.name for table in found.task.tables] == ["a.wide", "b.wide", "a", "b"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"recommender": "dien", "tables": TOWERS}, "unknown recommender 'dien'"),
        ({"recommender": "din"}, "no tables"),
        ({"recommender": "din", "tables": TOWERS, "layers": 3}, "unknown field 'layers'"),
        ({"recommender": "deepfm", "tables": TOWERS}, "tables of one width"),
        ({"recommender": "din", "tables": TOWERS, "mlp": [0]}, "mlp 0"),
        ({"recommender": "din", "tables": TOWERS, "history": {"mean": 0}}, "history: mean 0"),
        ({"recommender": "two-tower", "tables": TOWERS, "query": ["shop"]}, "query"),
        ({"recommender": "din", "tables": {"a": {"rows": 5, "dim": 4, "weighted": True}}}, "without weights"),
    ],
)
def test_what_is_wrong_is_named(content, said):
    with pytest.raises(TraincastError, match=said):
        read_description(content, Path("x.yaml"))
