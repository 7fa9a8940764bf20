"""Described recommenders: the steps that captures of the same models have, and others of any size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import traincast
from traincast.ir.ops import POINTWISE
from traincast.ir.validate import validate_workload
from traincast.ir.workload import TABLES
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


def test_pointwise_attention_pads_nothing_and_follows_the_spread_of_lengths():
    sizes = {"recommender": "hstu", "tables": {"item": WIDE}, "layers": 1, "batch_size": 32}
    lengths = [{"mean": 512, "spread": spread, "longest": 2048} for spread in (0, 512)]
    even, uneven = (build_recommender_workload(described(**sizes, history=each)) for each in lengths)
    names = [signature.name for signature in even.programs[0].signatures]
    assert POINTWISE in names and not any("padded" in name for name in names)
    seconds = [traincast.predict(step, on="h100").timeline.seconds_by_family()["attention"] for step in (even, uneven)]
    assert 1.5 < seconds[1] / seconds[0] < 2.2, "twice as many pairs"


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


@pytest.mark.parametrize("gpus", [1, 2])
def test_each_table_is_looked_up_as_often_as_it_says(gpus):
    # Given as many lookups altogether, when most are in the large table, then its rows come from memory, not from L2
    def time(large, small):
        tables = {
            "large": {"rows": 50_000_000, "dim": 64, "pooling": large},
            "small": {"rows": 100, "dim": 64, "pooling": small},
        }
        workload = build_recommender_workload(described(recommender="deepfm", tables=tables, batch_size=65_536))
        return traincast.predict(workload, on="dgx-h100", gpus=gpus).iteration

    assert time(39, 1) > 1.05 * time(1, 39)


def keep(**storage):
    """A step with a large table that is kept in some way, beside a small one."""
    tables = {
        "user": {"rows": 20_000_000, "dim": 64, "optimizer": "adam", "storage": storage},
        "item": {"rows": 100_000, "dim": 64, "optimizer": "adam"},
    }
    return build_recommender_workload(described(recommender="deepfm", tables=tables, batch_size=262_144))


def test_rows_that_are_not_on_the_device_take_longer_and_leave_room():
    # Given a table in each place, when its step is predicted, then the device holds less of it, and links are waited
    # for the more the less it holds
    steps = {kind: keep(kind=kind) for kind in ("device", "uvm", "uvm_caching", "hash", "stashed")}
    steps["half a hash"] = keep(kind="hash", cache=0.5)
    steps["ssd"] = keep(kind="ssd", drive_gb_per_s=6)
    for workload in steps.values():
        validate_workload(workload)
    found = {name: traincast.predict(workload, on="h100") for name, workload in steps.items()}
    time = {name: one.iteration for name, one in found.items()}
    held = {name: one.memory.peak_bytes for name, one in found.items()}

    assert time["device"] < time["hash"] < time["half a hash"] and time["device"] < time["uvm"]
    assert time["device"] < time["uvm_caching"] < time["ssd"]
    assert held["uvm"] < held["uvm_caching"] < held["half a hash"] < held["hash"]
    # both ways over the link, 5.1 GB of weights each
    assert time["stashed"] - time["device"] > 2 * 5.1e9 / 128e9


def test_the_hit_rate_of_a_table_is_what_a_description_says():
    half, most = (
        traincast.predict(keep(kind="hash", cache=0.1, hit_rate=rate), on="h100").iteration for rate in (0.5, 0.9)
    )
    assert most < half


def test_a_described_table_is_cut_and_kept_as_it_says_on_several_gpus():
    tables = {
        "user": {"rows": 20_000_000, "dim": 64, "storage": "uvm_caching", "sharding": "row_wise"},
        "item": {"rows": 1000, "dim": 64, "sharding": "data_parallel"},
        "shop": {"rows": 1000, "dim": 64},
    }
    workload = build_recommender_workload(described(recommender="deepfm", tables=tables, batch_size=4096))
    step = traincast.predict(workload, on="dgx-h100", gpus=2)
    ops = [op.name for op in step.workload.programs[0].ops]

    assert ops.count("fbgemm::lru_cache_populate") == 1
    assert any("reduce_scatter" in name for name in ops)
    assert any(name.startswith("fbgemm::dense_embedding_codegen_forward") for name in ops)
    with pytest.raises(TraincastError, match="`shard` finds"):
        traincast.shard(workload, on="dgx-h100", gpus=2, torchrec=False, time_limit=0)


def test_unified_memory_of_a_capture_is_not_shared_in_silence():
    # Given a step with tables in unified memory that nobody described, when it is asked for on several GPUs
    for kind in ("uvm", "uvm_caching"):
        with pytest.raises(TraincastError, match="unified memory"):
            traincast.predict(replace(keep(kind=kind), meta={}), on="dgx-h100", gpus=2)


@pytest.mark.parametrize("sharding", [None, "row_wise"])
def test_rows_that_are_not_on_the_device_are_shared_by_several_gpus(sharding):
    # Given a table in each place, when its step is predicted on two GPUs, then it is looked up as on one, takes longer
    # than on the device, and what leaves the device comes back
    kinds = {name: {"kind": name} for name in ("device", "hash", "stashed", "uvm_caching")}
    kinds["half a hash"] = {"kind": "hash", "cache": 0.5}
    kinds["ssd"] = {"kind": "ssd", "drive_gb_per_s": 6}
    kinds["all hit"] = {"kind": "uvm_caching", "hit_rate": 1.0}
    found = {}
    for name, kind in kinds.items():
        workload = keep(**kind)
        if sharding is not None:
            workload = cut(workload, sharding)
        found[name] = traincast.predict(workload, on="dgx-h100", gpus=2)
        for program in found[name].workload.programs:
            validate_workload(replace(workload, programs=(program,), ranks=(0,)))
    time = {name: one.iteration for name, one in found.items()}
    ops = {name: {op.name for program in one.workload.programs for op in program.ops} for name, one in found.items()}

    assert time["device"] < time["hash"] < time["half a hash"] and time["device"] < time["stashed"]
    assert time["all hit"] < time["uvm_caching"] < time["ssd"]
    assert {"dynamicemb::lookup", "dynamicemb::update"} <= ops["hash"]
    assert "traincast::drive_cache_populate" in ops["ssd"]
    assert found["half a hash"].memory.peak_bytes < found["hash"].memory.peak_bytes


def cut(workload, kind):
    """The same with its tables cut in a way that is stated."""
    content = json.loads(workload.meta[TABLES])
    for one in content["placements"]:
        one["kind"] = kind
    return replace(workload, meta={**workload.meta, TABLES: json.dumps(content)})


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"storage": "disk"}, "unknown storage 'disk'"),
        ({"storage": {"cache": 0.5}}, "give a kind"),
        ({"storage": {"kind": "uvm", "cache": 0.5}}, "has no cache"),
        ({"storage": {"kind": "hash", "hit_rate": 90}}, "hit_rate 90; give a number up to 1"),
        ({"storage": {"kind": "hash", "cache": 0}}, "cache 0"),
        ({"storage": "ssd"}, "how fast its drive is"),
        ({"sharding": "column_wise"}, "unknown sharding 'column_wise'"),
        ({"sharding": "data_parallel", "storage": "hash"}, "a copied table is on every device"),
    ],
)
def test_a_place_that_cannot_be_is_told_with_its_table(entry, said):
    with pytest.raises(TraincastError, match=said) as error:
        described(recommender="deepfm", tables={"user": {"rows": 10, "dim": 4, **entry}})
    assert "user" in str(error.value)


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
