"""Compiled functions of a step are traced through, and fused when it is predicted."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import traincast
from traincast.capturing import capture_step
from traincast.ir.compiled import REGION, find_compiled_ops


def chain(x):
    return torch.sigmoid(x * 2 + 1).square()


compiled_before = torch.compile(chain)


def captured(function, **how):
    def make_step(batch):
        layer = nn.Linear(64, 64, device="cuda")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        x = torch.randn(batch, 64, device="cuda")

        def step():
            optimizer.zero_grad()
            function(layer(x)).sum().backward()
            optimizer.step()

        return step

    return capture_step(make_step, batch_size=1024, name="x", rebatch=False, **how)


@pytest.mark.parametrize("compiled", [compiled_before, lambda x: torch.compile(chain, fullgraph=True)(x)])
def test_what_runs_is_what_runs_without_a_compiler(compiled):
    # Given a step whose activation is compiled, before the capture or in it, and the same step without
    program, plain = captured(compiled).programs[0], captured(chain).programs[0]

    # Then the same ops were seen, and those of the function and of its backward are marked
    assert [op.name for op in program.ops] == [op.name for op in plain.ops]
    marked = find_compiled_ops(program)
    names = [op.name for op in program.ops if marked[op.index]]
    assert names[:4] == ["aten::mul", "aten::add", "aten::sigmoid", "aten::pow"]
    assert "aten::sigmoid_backward" in names and "aten::addmm" not in names and "aten::sum" not in names
    assert [scope.name for scope in program.scopes].count(REGION) == 1
    assert not find_compiled_ops(plain).any()


def test_a_compiled_training_step_runs_fewer_kernels():
    eager, compiled = (traincast.predict(captured(f), on="a100-80gb") for f in (chain, compiled_before))

    # Three kernels fewer forward (four become one), and the backward chain becomes one too
    assert compiled.iteration < eager.iteration
    assert "compiled" in compiled.workload.meta and "compiled" not in eager.workload.meta
    fused = [op for op in compiled.workload.programs[0].ops if op.name == "inductor::fused"]
    assert len(fused) == 2
    assert fused[0].signature.scalar("ops") == "mul add sigmoid pow"

    # and threads still wait for each other, as in the eager step
    for result in (eager, compiled):
        scopes = result.workload.programs[0].scopes
        changes = [i for i in range(1, len(scopes)) if scopes[i].thread != scopes[i - 1].thread]
        assert changes and all(scopes[i].after == i - 1 for i in changes)


def test_compilation_of_ones_own_works_again_after_a_capture():
    captured(compiled_before)
    x = torch.randn(8)
    assert torch.equal(torch.compile(chain, backend="eager")(x), chain(x))


@pytest.mark.parametrize(
    ("mask", "causal", "keys"),
    [
        (lambda b, h, q, k: q >= k, True, 256),
        (lambda b, h, q, k: q >= 0, False, 256),
        (lambda b, h, q, k: (q >= k) & (q - k < 32), False, 29),
    ],
)
def test_flex_attention_costs_what_its_mask_leaves(mask, causal, keys):
    def make_step(batch):
        q, k, v = (torch.randn(batch, 2, 256, 16, device="cuda", requires_grad=True) for _ in range(3))
        blocks = create_block_mask(mask, None, None, 256, 256, device="cuda")
        return lambda: torch.compile(flex_attention)(q, k, v, block_mask=blocks).sum().backward()

    program = capture_step(make_step, batch_size=2, name="x", rebatch=False).programs[0]
    (attention,) = [op for op in program.ops if op.name.endswith("attention_overrideable")]
    assert attention.signature.scalar("is_causal") is causal
    assert attention.inputs[1].spec.shape[2] == pytest.approx(keys, abs=3)
    assert any(op.name.endswith("attention_overrideable_backward") for op in program.ops)


def test_a_mask_of_flex_attention_that_needs_unknown_values_is_said_to_hide_nothing():
    def make_step(batch):
        q, k, v = (torch.randn(batch, 2, 256, 16, device="cuda", requires_grad=True) for _ in range(3))
        document = torch.randn(256, device="cuda")
        blocks = create_block_mask(lambda b, h, i, j: document[i] > document[j], None, None, 256, 256, device="cuda")
        return lambda: torch.compile(flex_attention)(q, k, v, block_mask=blocks).sum().backward()

    workload = capture_step(make_step, batch_size=2, name="x", rebatch=False)
    (attention,) = [op for op in workload.programs[0].ops if op.name.endswith("attention_overrideable")]
    assert attention.inputs[1].spec.shape[2] == 256
    assert len(workload.assumptions) == 1 and "taken to hide nothing" in workload.assumptions[0]
