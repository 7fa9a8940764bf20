"""Scopes are the top-level events that PyTorch's profiler shows, by name and in order."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.capturing import small_models
from tests.capturing.oracle import profiled_scopes
from traincast.capturing import capture_step
from traincast.ir import Phase, Program

ON_CUDA = {"NativeBatchNormBackward0": "CudnnBatchNormBackward0"}


class LookupFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, rows):
        ctx.save_for_backward(rows)
        ctx.shape = weight.shape
        return weight[rows]

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        return torch.zeros(ctx.shape, device=grad.device).index_add_(0, rows, grad), None


def lookup(batch, device):
    weight = nn.Parameter(torch.zeros(50, 8, device=device))
    rows = torch.randint(0, 50, (batch,), device=device)
    optimizer = torch.optim.SGD([weight], lr=0.1, foreach=True)

    def step():
        optimizer.zero_grad()
        with torch.profiler.record_function("a label of the user"):
            loss = LookupFunction.apply(weight, rows).sum()
        loss.backward()
        optimizer.step()

    return step


STEPS = {
    "dlrm": small_models.dlrm,
    "sparse dlrm": lambda batch, device: small_models.dlrm(batch, device, sparse=True),
    "mlp": lambda batch, device: small_models.mlp(batch, device, optimizer="Adam"),
    "cnn": small_models.cnn,
    "encoder": lambda batch, device: small_models.encoder(batch, 9, device),
}


def captured(make_step, batch=6, **options) -> Program:
    workload = capture_step(lambda b: make_step(b, "cuda"), batch_size=batch, name="x", rebatch=False, **options)
    return workload.programs[0]


@pytest.mark.parametrize("name", STEPS)
def test_names_and_order_equal_the_profilers(name):
    with sdpa_kernel(SDPBackend.MATH):
        real = [ON_CUDA.get(scope, scope) for scope in profiled_scopes(STEPS[name](6, "cpu"))]
        scopes = captured(STEPS[name]).scopes
    assert [scope.name for scope in scopes] == real


def test_a_custom_function_has_its_own_name_and_a_users_label_is_no_scope():
    names = [scope.name for scope in captured(lookup).scopes]
    assert names[:3] == ["Optimizer.zero_grad#SGD.zero_grad", "LookupFunction", "aten::sum"]
    assert "LookupFunctionBackward" in names
    assert not any("label" in name for name in names)


def test_phases_threads_and_ties_between_threads():
    # Given a captured step
    scopes = captured(lambda b, device: small_models.dlrm(b, device, copies=True)).scopes
    by_name = {scope.name: scope for scope in scopes}

    # Then copies of inputs, forward, loss, backward and optimizer are told apart
    assert by_name["aten::to"].phase == Phase.INPUT
    assert by_name["aten::linear"].phase == Phase.FORWARD
    assert by_name["aten::binary_cross_entropy"].phase == Phase.LOSS
    assert by_name["AddmmBackward0"].phase == Phase.BACKWARD
    assert by_name["torch::autograd::AccumulateGrad"].phase == Phase.BACKWARD
    assert by_name["Optimizer.step#SGD.step"].phase == Phase.OPTIMIZER
    assert by_name["Optimizer.zero_grad#SGD.zero_grad"].phase == Phase.OTHER

    # and backward runs on the engine's thread, tied to the main thread at both ends
    backward = [scope for scope in scopes if scope.thread == 1]
    assert {scope.phase for scope in backward} == {Phase.BACKWARD}
    assert backward[0].after == backward[0].index - 1
    following = scopes[backward[-1].index + 1]
    assert (following.name, following.thread, following.after) == ("Optimizer.step#SGD.step", 0, backward[-1].index)
    assert all(scope.after == -1 for scope in scopes if scope not in (backward[0], following))


def test_every_parameter_has_an_accumulate_scope():
    names = [scope.name for scope in captured(small_models.mlp).scopes]
    assert names.count("torch::autograd::AccumulateGrad") == 6


def test_modules_and_forward_ops_of_backward_ops():
    # Given a captured step
    ops = captured(small_models.dlrm).ops

    # Then forward ops carry the module that runs them
    bags = [op for op in ops if op.name == "aten::_embedding_bag"]
    assert [op.module for op in bags] == [f"DLRM.tables.{i}" for i in range(4)]

    # and backward ops the forward op whose gradient they compute, with its module
    for op in ops:
        if op.name == "aten::_embedding_bag_backward":
            forward = ops[op.forward]
            assert forward.name == "aten::_embedding_bag"
            assert forward.module == op.module
            assert forward.inputs[1].id == op.inputs[1].id  # the same indices
    assert any(ops[op.forward].name == "aten::addmm" for op in ops if op.name == "aten::mm")
