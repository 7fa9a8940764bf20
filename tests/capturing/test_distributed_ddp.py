"""Data parallelism and sharded data parallelism, against two real processes with gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.capturing import real_ranks
from traincast.capturing import capture_distributed
from traincast.ir import Phase, Program, StorageKind
from traincast.utils.errors import TraincastError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.capturing.real_ranks", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "result.json").read_text())


def captured(step_of_device) -> Program:
    def make_step(batch, *, rank, world_size):
        return step_of_device("cuda")

    workload = capture_distributed(
        make_step, world_size=real_ranks.WORLD, batch_size=real_ranks.BATCH, name="x", rebatch=False
    )
    assert workload.ranks == (0,) * real_ranks.WORLD
    return workload.programs[0]


def names(program: Program, wanted: tuple[str, ...]) -> list[str]:
    return [op.name for op in program.ops if op.name.startswith(wanted)]


def bucket_contents(program: Program) -> list[list[tuple[int, ...]]]:
    """Shapes of the gradients that were copied into the storage of each all-reduce, in order."""
    reduced = [op.inputs[0].storage for op in program.ops if op.name == "c10d::allreduce_"]
    copies = [op.outputs[0] for op in program.ops if op.name == "aten::mul"]
    return [[t.spec.shape for t in copies if t.storage == storage] for storage in reduced]


@pytest.mark.parametrize("name", [*real_ranks.DDP_OPTIONS, "accumulate"])
def test_ddp_runs_the_ops_of_a_real_run_in_its_order(real, name):
    options = real_ranks.DDP_OPTIONS.get(name, {})
    program = captured(lambda device: real_ranks.ddp_step(device, options, accumulate=name == "accumulate"))
    seen = names(program, (*real_ranks.SEEN, "aten::clone"))
    assert [op.replace("clone", "copy_") for op in seen] == real["ddp"][name]  # a clone is a copy in the profiler


@pytest.mark.parametrize("name", ["default", "small buckets", "views"])
def test_buckets_hold_what_they_hold_in_a_real_run(real, name):
    # Given the parameters of each bucket and its bytes, as PyTorch reports them after a real run
    indices, sizes = real["buckets"][name]
    parameters = list(real_ranks.Net().parameters())
    expected = [[tuple(parameters[int(i)].shape) for i in bucket.split()] for bucket in indices.split(",")]
    assert len(expected) > 1

    # When the same module is captured
    program = captured(lambda device: real_ranks.ddp_step(device, real_ranks.DDP_OPTIONS[name]))

    # Then its buckets have the same content in the same order, and the same size
    assert bucket_contents(program) == expected
    reduces = [op for op in program.ops if op.name == "c10d::allreduce_"]
    assert [op.signature.scalar("bytes") for op in reduces] == [int(size) for size in sizes.split(",")]


def test_default_bucket_sizes():
    def make_step(batch, *, rank, world_size):
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12))).cuda())
        x = torch.zeros(batch, 1024, device="cuda")
        return lambda: model(x).sum().backward()

    program = capture_distributed(make_step, world_size=8, batch_size=2, name="x", ranks=[0]).programs[0]
    layer = 4 * (1024 * 1024 + 1024)
    sizes = [op.signature.scalar("bytes") for op in program.ops if op.name == "c10d::allreduce_"]
    assert sizes == [layer, 7 * layer, 4 * layer]  # 1 MiB are reached by one layer, 25 MiB by seven


def test_all_reduce_overlaps_with_backward_and_the_step_waits_for_it():
    program = captured(lambda device: real_ranks.ddp_step(device, {"bucket_cap_mb": 0.8}))
    ops = program.ops
    first, last = [i for i, op in enumerate(ops) if op.name == "c10d::allreduce_"]

    # The all-reduce is issued by the autograd thread, on the group's own stream, and backward goes on
    assert {ops[first].stream, ops[last].stream} == {1}
    assert (ops[first].thread, ops[first].phase) == (1, Phase.BACKWARD)
    assert any(op.name == "aten::mm" for op in ops[first:last])

    # It waits for the compute stream before, and the compute stream waits for it before gradients are copied back
    record, wait = ops[first - 2 : first]
    assert (record.name, wait.name) == ("cuda::event_record", "cuda::stream_wait_event")
    assert (record.stream, wait.stream) == (0, 1)
    assert record.signature.scalar("event") == wait.signature.scalar("event")
    done = ops[first + 1].signature.scalar("event")
    (waited,) = [
        i for i, op in enumerate(ops) if op.name == "cuda::stream_wait_event" and op.signature.scalar("event") == done
    ]
    assert ops[waited].stream == 0
    assert next(op.name for op in ops[waited + 1 :] if op.name != "aten::as_strided") == "aten::copy_"


def test_buckets_are_gradients_that_are_there_before_the_step():
    program = captured(lambda device: real_ranks.ddp_step(device, {}))
    for op in program.ops:
        if op.name == "c10d::allreduce_":
            storage = op.inputs[0].storage
            assert program.columns.storage_kind[storage] == StorageKind.GRADIENT
            assert program.columns.storage_alloc[storage] == -1


def test_device_ids_are_accepted_and_inputs_on_the_device_stay_there():
    def make_step(batch, *, rank, world_size):
        torch.cuda.set_device(rank)
        model = DistributedDataParallel(nn.Linear(4, 4).to(f"cuda:{rank}"), device_ids=[rank], output_device=rank)
        x = torch.zeros(batch, 4, device=f"cuda:{rank}")
        return lambda: model(x).sum().backward()

    workload = capture_distributed(make_step, world_size=3, batch_size=2, name="x", rebatch=False)
    assert workload.ranks == (0, 0, 0)
    assert not [op for op in workload.programs[0].ops if op.name == "aten::_to_copy"]


@pytest.mark.parametrize("options", [{"mixed_precision": object()}, {"sparse": True}])
def test_what_cannot_be_captured_is_refused(options):
    def make_step(batch, *, rank, world_size):
        if options.get("sparse"):
            DistributedDataParallel(nn.EmbeddingBag(4, 4, sparse=True).cuda())
        DistributedDataParallel(nn.Linear(4, 4).cuda(), **options)
        return lambda: None

    with pytest.raises(TraincastError, match=r"test_distributed_ddp.py:\d+: DistributedDataParallel with .* leave it"):
        capture_distributed(make_step, world_size=2, batch_size=2, name="x")


def test_a_communication_hook_runs_while_backward_goes_on():
    # Given DDP that sends gradients in half precision
    def make_step(batch, *, rank, world_size):
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda(), bucket_cap_mb=1e-5)
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        x = torch.zeros(batch, 8, device="cuda")
        return lambda: model(x).sum().backward()

    ops = capture_distributed(make_step, world_size=2, batch_size=2, name="x", ranks=[0]).programs[0].ops

    # Then half the bytes are reduced, made and widened again on the device
    reduces = [op for op in ops if op.name == "c10d::allreduce_"]
    assert {op.inputs[0].spec.dtype for op in reduces} == {"float16"}
    assert sum(op.signature.scalar("bytes") for op in reduces) == 2 * 2 * (8 * 8 + 8)

    # and what widens them runs on a stream that has waited for the all-reduce, while backward has not ended
    widened = [op for op in ops if op.name == "aten::copy_" and op.inputs[1].spec.dtype == "float16"]
    assert len(widened) == len(reduces) > 1 and {op.stream for op in widened}.isdisjoint({0, reduces[0].stream})
    assert any(op.name == "aten::mm" and op.index > widened[0].index for op in ops)


def test_an_optimizer_in_backward_updates_each_bucket_when_it_is_reduced():
    # Given DDP of parameters that are updated as soon as their gradients are there
    def make_step(batch, *, rank, world_size):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        model = DistributedDataParallel(model, bucket_cap_mb=1e-5)
        x = torch.zeros(batch, 8, device="cuda")
        return lambda: model(x).sum().backward()

    ops = capture_distributed(make_step, world_size=2, batch_size=2, name="x", ranks=[0]).programs[0].ops

    # Then updates run on a stream of their own, the first before backward has ended
    updates = [op for op in ops if op.name == "aten::_foreach_add_"]
    reduces = [op for op in ops if op.name == "c10d::allreduce_"]
    assert len(updates) == 4 and {op.stream for op in updates}.isdisjoint({0, reduces[0].stream})
    assert any(op.name == "aten::mm" and op.index > updates[0].index for op in ops)


def test_a_parameter_without_gradient_is_refused():
    def make_step(batch, *, rank, world_size):
        model = DistributedDataParallel(nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}).cuda())
        model.module.forward = lambda x: model.module["a"](x)
        x = torch.zeros(batch, 4, device="cuda")
        return lambda: model(x).sum().backward()

    with pytest.raises(TraincastError, match="took no part in the backward pass"):
        capture_distributed(make_step, world_size=2, batch_size=2, name="x")


def test_fully_shard_runs_the_collectives_of_a_real_run_in_its_order(real):
    program = captured(real_ranks.fsdp_step)
    assert names(program, real_ranks.FSDP_SEEN) == real["fsdp"]


def test_fully_shard_shards():
    program = captured(real_ranks.fsdp_step)
    ops = program.ops

    # 64 x 130 and 130 x 64 weights with biases; every layer's parameters in one message
    whole = 4 * (2 * 64 * 130 + 130 + 64)
    exchanged = [op for op in ops if op.name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")]
    assert {op.signature.scalar("bytes") for op in exchanged} == {whole}
    assert {op.signature.scalar("collective") for op in exchanged} == {"all_gather", "reduce_scatter"}

    # The optimizer steps this rank's shards, which are all the parameters it keeps
    (update,) = [op for op in ops if op.name == "aten::_foreach_add_"]
    assert {t.spec.shape for t in update.inputs} == {(65, 64), (65,), (32, 130), (32,)}
    columns = program.columns
    parameters, before = columns.storage_kind == StorageKind.PARAMETER, columns.storage_alloc < 0
    assert program.storage_nbytes[parameters & before].sum() == 3 * whole // 2

    # Gathered parameters take their memory when they are gathered and give it back after use, forwards and backwards
    gathered = parameters & ~before & (program.storage_nbytes > 0)
    assert gathered.any() and (columns.storage_free[gathered] < program.num_ops).all()

    # Every event that a stream waits for was recorded before, on another stream
    recorded: dict[object, int] = {}
    for op in ops:
        event = op.signature.scalar("event")
        if op.name == "cuda::event_record":
            recorded[event] = op.stream
        elif op.name == "cuda::stream_wait_event":
            assert recorded[event] != op.stream


def test_a_two_dimensional_mesh_shards_in_rows_and_reduces_in_columns():
    def make_step(batch, *, rank, world_size):
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(nn.Linear(64, 64).cuda(), mesh=mesh)
        x = torch.zeros(batch, 64, device="cuda")
        return lambda: model(x).sum().backward()

    workload = capture_distributed(make_step, world_size=4, batch_size=2, name="x")
    assert len({id(p.columns) for p in workload.programs}) == 1
    exchanged = [
        [(op.signature.scalar("collective"), op.signature.scalar("group")) for op in p.ops if op.name[:6] == "c10d::"]
        for p in (workload.programs[i] for i in workload.ranks)
    ]
    assert exchanged[0] == [("all_gather", (0, 1)), ("reduce_scatter", (0, 1)), ("all_reduce", (0, 2))]
    assert exchanged[3] == [("all_gather", (2, 3)), ("reduce_scatter", (2, 3)), ("all_reduce", (1, 3))]


def test_tensor_parallelism_computes_on_shards():
    def make_step(batch, *, rank, world_size):
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).cuda()
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(model, init_device_mesh("cuda", (world_size,)), plan)
        x = torch.zeros(batch, 64, device="cuda")
        return lambda: model(x)

    workload = capture_distributed(make_step, world_size=4, batch_size=16, name="x", mode="inference")
    assert workload.ranks == (0, 0, 0, 0)
    ops = workload.programs[0].ops
    assert next(op for op in ops if op.name == "aten::addmm").outputs[0].spec.shape == (16, 32)
    (reduced,) = [op for op in ops if op.signature.scalar("collective") is not None]
    assert (reduced.signature.scalar("collective"), reduced.signature.scalar("bytes")) == ("all_reduce", 4 * 16 * 64)
