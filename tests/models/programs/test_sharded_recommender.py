"""Recommenders of one GPU with their tables sharded over many: what is exchanged, who looks up what, what stays."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.evaluation.zoo.captured import connected, storages
from traincast.hardware.platform import load_platform
from traincast.ir.memory import compute_peak_memory
from traincast.models.catalog import load_model
from traincast.models.layers.builder import RankBuilder
from traincast.models.sharded_dlrm.captured import StepCopier, find_embedding_modules
from traincast.models.sharded_dlrm.recommender import build_sharded_recommender, is_shardable
from traincast.models.sharded_dlrm.step import PREFETCH
from traincast.simulator.prediction.prediction import predict_step
from traincast.utils.errors import TraincastError

NAMES = ("hstu", "onetrans", "din", "deepfm", "wide-deep")
FLOAT = 4


def small(name):
    """A step of eight samples (and sixteen tokens where there are sequences)."""
    workload = load_model(name)
    return workload.resized(batch_size=8, seq_len=16 if workload.programs[0].seq_len else None)


def sharded(name, gpus, **options):
    return build_sharded_recommender(small(name), gpus, memory_bytes=80e9, gpus_per_node=8, **options)[0]


def collectives(workload, kind):
    """The collectives of every rank of a kind (`all_to_all` also with uneven parts)."""
    return [
        [op for op in workload.programs[p].ops if str(op.signature.scalar("collective")).removesuffix("_v") == kind]
        for p in workload.ranks
    ]


def floats(ops):
    return [op for op in ops if op.inputs[-1].spec.dtype == "float32"]


def test_modules_are_found_with_their_tables_and_bags():
    # Given a step of items that are not pooled and features that are
    tables, items = find_embedding_modules(small("onetrans").programs[0])
    # When they are described, then both have their heights, dims and optimizer
    assert (len(tables.tables), tables.bags, tables.pooled) == (32, 8, True)
    assert (len(items.tables), items.bags, items.pooled) == (1, 8 * 16, False)
    assert (items.tables[0].rows, items.tables[0].dim, items.tables[0].optimizer) == (10_000_000, 256, "adam")


def test_a_step_without_tables_has_no_modules():
    assert find_embedding_modules(load_model("ncf").programs[0]) == ()
    assert not is_shardable(load_model("ncf"))
    assert not is_shardable(load_model("deepfm", mode="inference"))
    with pytest.raises(TraincastError, match="no fused embedding tables"):
        build_sharded_recommender(load_model("ncf"), 2, memory_bytes=80e9, gpus_per_node=8)


@pytest.mark.parametrize("name", ["din", "resnet50"])
def test_a_step_copied_with_nothing_dropped_is_the_same(name):
    # Given a step, when every scope is copied, then ops, tensors, scopes and lifetimes are what they were
    source = load_model(name).resized(batch_size=4).programs[0]
    builder = RankBuilder(4, 0, 1, 8)
    StepCopier(source, [], builder).copy_scopes(range(source.num_scopes))
    copied = builder.build_program()
    assert list(connected(copied)) == list(connected(source))
    assert copied.scopes == source.scopes
    assert storages(copied) == storages(source)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pipelined", [False, True])
def test_the_dense_part_is_that_of_one_gpu(name, pipelined):
    # Given the step of one GPU without its lookups and updates
    alone = small(name).programs[0]
    left_out = {scope for m in find_embedding_modules(alone) for part in (m.forward, m.backward) for scope in part}
    dense = Counter((op.name, op.module) for op in alone.ops if op.scope not in left_out)
    # When it runs on four, then all of it is there on every rank
    for program in sharded(name, 4, pipelined=pipelined).programs:
        assert not dense - Counter((op.name, op.module) for op in program.ops)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent_is_received_and_all_gradients_are_averaged(name):
    workload = sharded(name, 4)
    sent = [sum(op.signature.scalar("bytes") for op in ops) for ops in collectives(workload, "all_to_all")]
    received = [sum(op.inputs[0].spec.nbytes for op in ops) for ops in collectives(workload, "all_to_all")]
    assert sum(sent) == sum(received) > 0
    dense = sum(model_gradient.nbytes for model_gradient in gradients(small(name).programs[0]))
    for ops in collectives(workload, "all_reduce"):
        assert sum(op.signature.scalar("bytes") for op in ops) == dense


def gradients(program):
    return [op.outputs[0].spec for op in program.ops if program.scopes[op.scope].name.endswith("AccumulateGrad")]


def test_unpooled_rows_of_whole_tables_go_to_whoever_asked():
    # Given two tables of 64 columns that are asked 17 times by each of 8 samples, each on one of two GPUs
    workload = sharded("din", 2)
    forward, backward = floats(collectives(workload, "all_to_all")[0])
    # Then a rank sends the rows of its table for the samples of both, and gets their gradients back
    assert forward.signature.scalar("bytes") == backward.signature.scalar("bytes") == 2 * 8 * 17 * 64 * FLOAT
    assert not any(op.name == "aten::index_select" for op in workload.programs[0].ops)


def test_unpooled_rows_of_split_tables_are_put_in_order_again():
    # Given one table of items that every GPU asks 2 x 8 x 16 + 128 times, split by rows over two
    workload = sharded("hstu", 2)
    lookups = 2 * 8 * 16 + 128
    forward, _ = floats(collectives(workload, "all_to_all")[0])
    assert forward.signature.scalar("bytes") == lookups * 256 * FLOAT
    # Then rows that came are selected in the order of the lookups, and their gradients added up on the way back
    program = workload.programs[0]
    (select,) = [op for op in program.ops if op.name == "aten::index_select"]
    assert select.outputs[0].spec.shape == (lookups, 256)
    assert select.inputs[1].spec.shape == (lookups,)
    assert [op.name for op in program.ops if op.name == "aten::index_add_"] == ["aten::index_add_"]


@pytest.mark.parametrize(("name", "gpus"), [("din", 2), ("din", 4), ("deepfm", 4), ("wide-deep", 4), ("hstu", 4)])
def test_ranks_hold_all_rows_and_make_all_lookups_between_them(name, gpus):
    modules = find_embedding_modules(small(name).programs[0])
    workload = sharded(name, gpus)
    updates = [op for p in workload.ranks for op in workload.programs[p].ops if "backward_codegen" in op.name]
    held = sum(op.signature.tensors("dev_weights")[0].numel for op in updates)
    assert held == sum(table.rows * table.dim for module in modules for table in module.tables)
    made = sum(op.signature.tensors("indices")[0].numel for op in updates)
    assert made == pytest.approx(gpus * sum(m.bags * t.pooling.mean for m in modules for t in m.tables), abs=gpus)


def test_the_next_batch_is_distributed_beside_the_step():
    # Given a pipelined step, then row numbers travel on a stream of their own, between forward and backward
    program = sharded("din", 4, pipelined=True).programs[0]
    dealt = [op for op in program.ops if op.name == "fbgemm::block_bucketize_sparse_features"]
    assert [op.stream for op in dealt] == [PREFETCH]
    lookup = next(op for op in program.ops if "codegen_forward" in op.name)
    assert lookup.index < dealt[0].index


def test_a_copied_dlrm_looks_up_and_multiplies_as_the_written_one():
    # Given the captured step of a DLRM, and the one that is written from its configuration
    from traincast.simulator.scenario.predict import load_step
    from traincast.simulator.scenario.resolved import resolve
    from traincast.simulator.scenario.scenario import Scenario

    platform = load_platform("dgx-a100")
    captured = load_model("dlrm-default", embedding="fbgemm")
    asked = [resolve(Scenario(workload=source, on=platform, gpus=8)) for source in (captured, "dlrm-default")]
    steps = [load_step(one)[0] for one in asked]
    first, second = (predict_step(step, platform).by_family for step in steps)
    # When both are sharded over eight GPUs, then lookups and GEMMs take as long
    assert first["embedding"] == pytest.approx(second["embedding"], rel=0.01)
    assert first["gemm"] == pytest.approx(second["gemm"], rel=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_memory_of_the_fullest_rank_falls_with_more_gpus(name):
    peaks = [max(compute_peak_memory(p).peak_bytes for p in sharded(name, gpus).programs) for gpus in (2, 8)]
    assert peaks[1] < peaks[0]
