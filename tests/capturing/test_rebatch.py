"""A captured step at another batch size or sequence length equals a fresh capture at that size."""

from __future__ import annotations

import time

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from tests.capturing import small_models
from traincast.capturing import capture_step
from traincast.errors import TraincastError
from traincast.workload import Program, Workload, peak_memory
from traincast.workload.validate import validate


def assert_same(program: Program, fresh: Program) -> None:
    assert [s.name for s in program.scopes] == [s.name for s in fresh.scopes]
    assert program.ops == fresh.ops  # signatures (shapes, strides, dtypes, scalars), tensors, storages, scopes
    for column in ("storage_alloc", "storage_free", "storage_kind"):
        assert np.array_equal(getattr(program.columns, column), getattr(fresh.columns, column))
    assert np.array_equal(program.storage_nbytes, fresh.storage_nbytes)
    assert peak_memory(program) == peak_memory(fresh)


WITHOUT_LENGTH = {
    "dlrm": lambda b: small_models.dlrm(b, "cuda"),
    "dlrm with copies": lambda b: small_models.dlrm(b, "cuda", copies=True),
    "sparse dlrm": lambda b: small_models.dlrm(b, "cuda", sparse=True),
    "mlp": lambda b: small_models.mlp(b, "cuda", optimizer="AdamW"),
    "cnn": lambda b: small_models.cnn(b, "cuda"),
}


@pytest.mark.parametrize("name", WITHOUT_LENGTH)
def test_another_batch_size(name):
    workload = capture_step(WITHOUT_LENGTH[name], batch_size=16, name=name)
    assert workload.programs[0].rigid == ""
    validate(workload.programs[0])
    for batch in (5, 16, 96):
        fresh = capture_step(WITHOUT_LENGTH[name], batch_size=batch, name=name, rebatch=False)
        assert_same(workload.resized(batch_size=batch).programs[0], fresh.programs[0])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_another_batch_size_and_sequence_length(dropout):
    def make_step(batch, length):
        return small_models.encoder(batch, length, "cuda", dropout=dropout)

    workload = capture_step(make_step, batch_size=4, seq_len=48, name="encoder")
    assert workload.programs[0].rigid == ""
    validate(workload.programs[0])
    for batch, length in ((4, 48), (2, 20), (16, 128)):
        fresh = capture_step(make_step, batch_size=batch, seq_len=length, name="encoder", rebatch=False)
        assert_same(workload.resized(batch_size=batch, seq_len=length).programs[0], fresh.programs[0])


def test_a_step_whose_ops_depend_on_the_size_keeps_its_one_capture():
    # Given a step that runs one op less at large batch sizes
    def make_step(batch):
        x = torch.randn(batch, 4, device="cuda")
        return lambda: x.exp() if batch > 12 else x.exp().exp()

    # When it is captured to be re-batched
    workload = capture_step(make_step, batch_size=10, name="jumps")

    # Then it is usable at its size only, and says why
    assert len(workload.programs[0].ops) == 2
    assert "runs other ops" in workload.programs[0].rigid
    with pytest.raises(TraincastError, match="jumps"):
        workload.resized(batch_size=20)


def test_without_rebatch_the_workload_is_rigid():
    workload = capture_step(WITHOUT_LENGTH["mlp"], batch_size=10, name="mlp", rebatch=False)
    with pytest.raises(TraincastError, match="one size only"):
        workload.resized(batch_size=20)


def test_what_the_workload_says_about_itself():
    workload: Workload = capture_step(
        lambda b: lambda: torch.ones(b, device="cuda"), batch_size=3, name="n", mode="inference",
        framework_version="2.13", synchronised=True,
    )  # fmt: skip
    assert (workload.name, workload.mode, workload.synchronised) == ("n", "inference", True)
    assert (workload.batch_size, workload.seq_len, workload.framework_version) == (3, 0, "2.13")


def test_a_dlrm_of_26_tables_takes_under_a_second():
    # Given PyTorch's lazy imports done
    capture_step(WITHOUT_LENGTH["mlp"], batch_size=2, name="warm", rebatch=False)

    # When a DLRM with 26 tables of a million rows is captured
    start = time.perf_counter()
    workload = capture_step(
        lambda b: small_models.dlrm(b, "cuda", tables=26, rows=1_000_000, dim=64),
        batch_size=2048,
        name="x",
        rebatch=False,
    )
    seconds = time.perf_counter() - start

    # Then it takes less than a second
    assert seconds < 1.0
    assert sum(op.name == "aten::_embedding_bag" for op in workload.programs[0].ops) == 26


def test_a_model_in_evaluation_needs_no_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)).eval()

    def make_step(batch):
        model.cuda()
        x = torch.randn(batch, 4, device="cuda")
        return torch.no_grad()(lambda: model(x))

    program = capture_step(make_step, batch_size=3, name="x", mode="inference", rebatch=False).programs[0]
    assert [op.name for op in program.ops] == ["aten::t", "aten::addmm"]
