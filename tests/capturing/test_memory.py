"""Peak memory of a captured step against what PyTorch's profiler sees on this CPU; what storages hold."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from tests.capturing import small_models
from tests.capturing.oracle import profiled_peak
from traincast.capturing import capture_step
from traincast.ir import StorageKind, compute_peak_memory

FEW_LOOKUPS = [
    {"tables": 4, "rows": 20_000, "dim": 16, "lookups": 3},
    {"tables": 8, "rows": 30_000, "dim": 64, "lookups": 4},
]
MANY_LOOKUPS = [
    {"tables": 8, "rows": 5_000, "dim": 64, "lookups": 10},
    {"tables": 8, "rows": 5_000, "dim": 64, "lookups": 40},
]


def peaks(shape):
    step = small_models.dlrm(512, "cpu", **shape)
    held = dict(zip(step.__code__.co_freevars, (cell.cell_contents for cell in step.__closure__), strict=True))
    inputs = [held["dense"], held["target"], *held["indices"], *held["offsets"]]
    real = profiled_peak(step, [*held["model"].parameters(), *held["model"].buffers(), *inputs])
    workload = capture_step(lambda b: small_models.dlrm(b, "cuda", **shape), batch_size=512, name="x", rebatch=False)
    return real, compute_peak_memory(workload.programs[0])


@pytest.mark.parametrize("shape", FEW_LOOKUPS)
def test_peak_is_within_one_percent_of_a_real_run(shape):
    real, captured = peaks(shape)
    assert captured.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)
    assert sum(captured.by_kind.values()) == captured.peak_bytes


@pytest.mark.parametrize("shape", FEW_LOOKUPS + MANY_LOOKUPS)
def test_what_is_missing_from_the_peak_is_scratch_space_inside_an_op(shape):
    """Captures do not know it: with many lookups per table the peak comes out more than 1 % low."""
    real, captured = peaks(shape)
    assert captured.peak_bytes < real.peak_bytes
    assert captured.peak_bytes == pytest.approx(real.peak_bytes - real.scratch_bytes, rel=0.01)


def test_storages_say_what_they_hold():
    # Given a model with parameters, buffers, momentum and inputs of sizes of their own
    def make_step(batch):
        model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.BatchNorm1d(100)).cuda()
        optimizer = torch.optim.SGD(model[:1].parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(batch, 100, device="cuda")

        def step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        return step

    # When it is captured
    program = capture_step(make_step, batch_size=7, name="x", rebatch=False).programs[0]
    columns, sizes = program.columns, program.storage_nbytes

    # Then each kind is found with its bytes
    def bytes_of(kind, **where):
        chosen = columns.storage_kind == kind
        for column, value in where.items():
            chosen &= getattr(columns, column) == value
        return int(sizes[chosen].sum())

    weight, bias = 40_000, 400
    assert bytes_of(StorageKind.PARAMETER) == weight + 2 * bias
    assert bytes_of(StorageKind.BUFFER) == 2 * bias + 8
    assert bytes_of(StorageKind.OPTIMIZER_STATE) == weight
    assert bytes_of(StorageKind.INPUT) == 7 * 400
    assert bytes_of(StorageKind.GRADIENT, storage_alloc=-1) == weight + 2 * bias  # of the step before
    outlive = columns.storage_free == program.num_ops
    assert int(sizes[outlive & (columns.storage_kind == StorageKind.GRADIENT)].sum()) == weight + 2 * bias

    # and what is made is made before it is freed, and freed within the step or not at all
    made = columns.storage_alloc >= 0
    assert (columns.storage_free[made] >= columns.storage_alloc[made]).all()
    assert outlive[columns.storage_kind == StorageKind.PARAMETER].all()


def test_activations_kept_for_backward_live_until_it():
    program = capture_step(lambda b: small_models.mlp(b, "cuda"), batch_size=6, name="x", rebatch=False).programs[0]
    (tanh,), (backward,) = ([op for op in program.ops if op.name == f"aten::tanh{end}"] for end in ("", "_backward"))
    assert tanh.outputs[0].storage == backward.inputs[1].storage
    assert tanh.outputs[0].id == backward.inputs[1].id or tanh.outputs[0].spec == backward.inputs[1].spec
    assert program.columns.storage_free[tanh.outputs[0].storage] >= backward.index


def test_what_a_script_leaves_on_meta_takes_no_memory():
    # Given a model that is described on `meta`, of which the step only runs what was made of it on the GPU
    def make_step(batch):
        with torch.device("meta"):
            whole = nn.Linear(100, 100, bias=False)
        copied = nn.Linear(10, 10, bias=False).to("meta")
        shard = nn.Parameter(torch.empty_like(whole.weight[:50], device="cuda"))
        x = torch.zeros(batch, 100, device="cuda")
        return lambda: (x @ shard.t(), whole, copied)[0]

    program = capture_step(make_step, batch_size=7, name="x", rebatch=False, mode="inference").programs[0]
    assert compute_peak_memory(program).peak_bytes == pytest.approx(4 * (50 * 100 + 7 * 100 + 7 * 50), abs=3 * 512)


def test_a_model_that_runs_where_it_was_described_takes_its_memory():
    def make_step(batch):
        model = nn.Linear(100, 100, bias=False, device="meta")
        x = torch.zeros(batch, 100, device="cuda")
        return lambda: model(x)

    program = capture_step(make_step, batch_size=7, name="x", rebatch=False, mode="inference").programs[0]
    assert compute_peak_memory(program).peak_bytes >= 4 * 100 * 100
