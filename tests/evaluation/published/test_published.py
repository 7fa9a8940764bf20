"""Published programs by name: their sizes, their division over GPUs, and what they reject."""

from __future__ import annotations

import pytest
import yaml

from traincast.ir import Phase, StorageKind
from traincast.ir.validate import validate_workload
from traincast.utils.errors import TraincastError
from traincast_evaluation.published.catalog import published_programs
from traincast_evaluation.published.distributed_embeddings_tables import EqualTables, place_slices
from traincast_evaluation.published.nvidia_dlrm import deal_tables, list_rows_per_table

PROGRAMS = published_programs()


def collectives(program):
    scalars = [(op.signature.scalar("collective"), op.signature.scalar("bytes")) for op in program.ops]
    return [(kind, nbytes) for kind, nbytes in scalars if kind]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "jumbo" not in name and "large" not in name])
@pytest.mark.parametrize("gpus", [1, 4])
def test_every_program_has_a_valid_step_on_one_gpu_and_on_several(name, gpus):
    workload = PROGRAMS[name].step(gpus=gpus, global_batch=gpus * 128)

    validate_workload(workload)
    assert (workload.name, len(workload.ranks), workload.batch_size) == (name, gpus, 128)
    assert {op.phase for op in workload.programs[0].ops} >= {Phase.FORWARD}


def test_every_program_says_where_it_was_published():
    assert all(program.source and program.description for program in PROGRAMS.values())
    assert {program.writer for program in PROGRAMS.values()} == {"nvidia_dlrm", "hugectr", "distributed_embeddings"}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # rows * 128 and MLPs 13-512-256-128, 480-1024-1024-512-256-1
        ("nvidia-dlrm-mlperf", 187_767_399 * 128 + 171_392 + 2_198_529),
        # features are padded from 13 to 16
        ("hugectr-dlrm", 187_767_399 * 128 + 171_392 + 3 * 512 + 2_198_529),
        # the top MLP reads 27 * 128 columns, after three layers 3456-512-3456
        ("hugectr-dlrm-dcnv2", 204_184_588 * 128 + 171_392 + 3 * 512 + 2_198_529 + (3456 - 480) * 1024
         + 3 * (2 * 3456 * 512 + 3456)),
    ],
)  # fmt: skip
def test_parameters_are_those_of_the_whole_model(name, parameters):
    assert PROGRAMS[name].parameters == parameters


def test_parameters_are_what_a_step_on_one_gpu_holds():
    # Given a program whose weights are there once, in fp32
    program = PROGRAMS["distributed-embeddings-tiny"]
    (step,) = program.step(global_batch=64).programs

    held = step.storage_nbytes[step.columns.storage_kind == StorageKind.PARAMETER].sum()

    assert held == 4 * program.parameters


def test_the_published_batch_is_divided_among_the_gpus():
    program = PROGRAMS["nvidia-dlrm"]
    assert [program.step(gpus=gpus).batch_size for gpus in (1, 8)] == [65536, 8192]
    assert [program.batch_size(gpus) for gpus in (1, 3, 100_000)] == [65536, 21845, 1]


def test_half_precision_is_autocast_in_deep_learning_examples_and_kept_weights_in_mlperf():
    steps = [PROGRAMS[name].step(global_batch=64, dtype="fp16") for name in ("nvidia-dlrm", "nvidia-dlrm-mlperf")]
    casts = [
        sum(op.name == "aten::_to_copy" and op.outputs[0].spec.dtype == "float16" for op in step.programs[0].ops)
        for step in steps
    ]
    # a weight and a bias of eight layers are cast every step by autocast only, the bottom MLP's result and its gradient
    # by Apex only
    assert casts[0] - casts[1] == 16 - 2


def test_a_type_that_was_not_published_is_refused():
    program = PROGRAMS["nvidia-dlrm-mlperf"]
    assert program.dtype_for("fp32") == "fp16"
    with pytest.raises(TraincastError, match=r"unknown dtype 'tf32'.*nvidia-dlrm-mlperf runs in fp16"):
        program.step(dtype="tf32")


@pytest.mark.parametrize(("gpus", "batch", "message"), [(0, 64, "0 GPUs"), (8, 7, "7 samples on 8 GPUs")])
def test_impossible_runs_are_refused(gpus, batch, message):
    with pytest.raises(TraincastError, match=message):
        PROGRAMS["nvidia-dlrm"].step(gpus=gpus, global_batch=batch)


def test_more_gpus_than_pieces_of_tables_are_refused():
    with pytest.raises(TraincastError, match=r"distributed-embeddings.*pieces of tables.*fewer GPUs"):
        PROGRAMS["distributed-embeddings-tiny"].step(gpus=512, global_batch=65536)


def test_another_batch_size_needs_another_step():
    workload = PROGRAMS["hugectr-dlrm"].step(global_batch=64)
    with pytest.raises(TraincastError, match="build it anew"):
        workload.resized(batch_size=128)


def test_all_to_alls_carry_every_vector_of_every_sample():
    # Given eight GPUs with 64 samples each, 27 vectors of 128 half-precision numbers per sample
    workload = PROGRAMS["nvidia-dlrm"].step(gpus=8, global_batch=8 * 64, dtype="fp16")

    sent = sum(collectives(workload.programs[program])[0][1] for program in workload.ranks)

    assert sent == 8 * 64 * 27 * 128 * 2


def test_horovod_averages_gradients_and_the_loss():
    program = PROGRAMS["distributed-embeddings-tiny"].step(gpus=2, global_batch=128).programs[0]
    kinds = [kind.removesuffix("_v") for kind, _ in collectives(program)]
    assert kinds == ["all_to_all", "all_to_all", "all_reduce", "all_reduce"]
    assert collectives(program)[-1][1] == 4  # the loss


def test_sizes_are_those_of_the_public_specifications(shared_data):
    specs = yaml.safe_load((shared_data / "iterations" / "distributed_embeddings_specs.yaml").read_text())["models"]
    for name, spec in specs.items():
        sizes, stride = PROGRAMS[f"distributed-embeddings-{name}"].sizes, spec["interact_stride"] or 0
        assert (sizes["mlp"], sizes["dense_features"], sizes["interact_stride"]) == (
            spec["mlp"],
            spec["dense_features"],
            stride,
        )
        groups = [{key: group[key] for key in ("tables", "rows", "dim", "lookups")} for group in spec["groups"]]
        assert sizes["groups"] == groups
    configs = yaml.safe_load((shared_data / "iterations" / "dlrm_configs.yaml").read_text())
    published = configs["nvidia_deep_learning_examples"]["model_sizes"]
    for name, rows in (
        ("nvidia-dlrm", published["small"]["rows_per_table"]),
        ("nvidia-dlrm-large", published["large"]["rows_per_table"]),
        ("nvidia-dlrm-mlperf", configs["mlperf"]["dlrm"]["rows_per_table"]),
    ):
        assert list(list_rows_per_table(PROGRAMS[name].sizes)) == rows


def test_tables_are_dealt_as_nvidia_deals_them():
    # at most ceil(26 / 7) a GPU, none for GPU 0 of eight, the largest ones apart
    rows = [10**6 - i for i in range(26)]
    owners = deal_tables(rows, 8)
    assert owners[0] == [] and sorted(t for held in owners for t in held) == list(range(26))
    assert max(map(len, owners)) == 4
    assert len({next(rank for rank, held in enumerate(owners) if t in held) for t in range(7)}) == 7
    four = deal_tables(rows, 4)
    assert sum(map(len, four)) == 26 and max(map(len, four)) == 7


def test_rank_0_has_the_bottom_mlp_for_all_samples():
    workload = PROGRAMS["nvidia-dlrm"].step(gpus=8, global_batch=8 * 64, dtype="fp16")
    validate_workload(workload)
    first, other = (workload.programs[workload.ranks[rank]] for rank in (0, 1))
    products = {op.inputs[0].spec.shape[0] for op in first.ops if op.name == "aten::mm" and op.phase == 1}
    assert products == {64, 512}
    assert {op.inputs[0].spec.shape[0] for op in other.ops if op.name == "aten::mm" and op.phase == 1} == {64}
    assert not any("embedding" in op.name for op in first.ops)


def test_large_tables_are_cut_into_columns_and_memory_is_balanced():
    groups = [EqualTables(1, 200_000_000, 128, (1, 100)), EqualTables(64, 1000, 32, (1,))]
    held = place_slices(groups, 32)
    slices = [part for parts in held for part in parts if part.rows == 200_000_000]
    assert (len(slices), {part.dim for part in slices}) == (32, {4})
    assert {len(parts) for parts in held} == {3}
    assert [len(parts) for parts in place_slices(groups, 1)] == [65]  # one GPU: nothing is cut


def test_cross_layers_cost_more_than_dot_products():
    dot, cross = (PROGRAMS[name].step(global_batch=512) for name in ("hugectr-dlrm", "hugectr-dlrm-dcnv2"))
    flops = [
        sum(
            2 * op.inputs[0].spec.numel * op.outputs[0].spec.shape[-1]
            for op in w.programs[0].ops
            if op.name == "aten::mm"
        )
        for w in (dot, cross)
    ]
    assert flops[1] > 2 * flops[0]


def test_a_program_that_is_like_another_takes_what_it_does_not_say():
    old, new = PROGRAMS["nvidia-dlrm-2021"], PROGRAMS["nvidia-dlrm"]
    assert (old.dtypes, old.source, old.sizes["rows_per_table"]) == (
        new.dtypes,
        new.source,
        new.sizes["rows_per_table"],
    )
    assert (old.sizes["autocast"], new.sizes["autocast"]) == (False, True)
    assert "like" not in old.sizes


def test_tables_are_updated_by_adding_scaled_gradients():
    (program,) = PROGRAMS["nvidia-dlrm"].step(global_batch=64).programs
    names = [op.name for op in program.ops]
    assert names[-2:] == ["aten::mul", "aten::index_add_"]
    assert program.ops[-1].inputs[-1].spec.shape == (64 * 26, 128)


@pytest.mark.parametrize(("name", "dtype", "graphs"), [
    ("nvidia-dlrm", "fp16", 1), ("nvidia-dlrm", "tf32", 0), ("nvidia-dlrm-2021", "fp16", 0),
])  # fmt: skip
def test_forward_and_backward_are_a_cuda_graph_under_amp_since_2022(name, dtype, graphs):
    (program,) = PROGRAMS[name].step(global_batch=64, dtype=dtype).programs
    scopes = [program.names[number] for number in program.columns.scope_name]
    assert sum(scope.startswith("cuda_graph_launch::") for scope in scopes) == graphs
    updates = [scope for scope in scopes if "Optimizer" in scope]
    assert not any(scope.startswith("cuda_graph") for scope in updates)
