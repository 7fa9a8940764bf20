"""Activations in host memory: against PyTorch's own hooks for it, captured."""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("torch")

import torch

import traincast
from traincast.capturing import capture_step
from traincast.ir.memory import compute_peak_memory
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step
from traincast.transforms.offloading import offload_activations
from traincast.utils.errors import TraincastError


def _make_step(batch, saves, optimizer=torch.optim.AdamW):
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(512, 1)).cuda()
    update, inputs = optimizer(net.parameters(), lr=0.01), torch.randn(batch, 512, device="cuda")

    def step():
        update.zero_grad()
        with torch.autograd.graph.save_on_cpu(pin_memory=True) if saves else contextlib.nullcontext():
            loss = net(inputs).square().mean()
        loss.backward()
        update.step()

    return step


def test_offloaded_activations_are_those_of_pytorchs_own_hooks() -> None:
    # given a step, and the same step under torch.autograd.graph.save_on_cpu
    plain, hooked = (
        capture_step(lambda batch, saves=saves: _make_step(batch, saves), batch_size=4096, name="x", rebatch=False)
        for saves in (False, True)
    )
    # when the activations of the first are offloaded
    whole, ours, theirs = (
        traincast.predict(step, on="a100-40gb", offload=offload)
        for step, offload in ((plain, None), (plain, "activations"), (hooked, None))
    )
    # then both hold the same and take about as long: the hooks move weights and inputs to the host as well
    assert ours.memory.peak_bytes < 0.6 * whole.memory.peak_bytes
    assert ours.memory.peak_bytes == pytest.approx(theirs.memory.peak_bytes, rel=0.03)
    assert ours.iteration == pytest.approx(theirs.iteration, rel=0.15) and ours.iteration > 1.5 * whole.iteration
    assert whole.memory.host_bytes < ours.memory.host_bytes < theirs.memory.host_bytes


@pytest.mark.parametrize("name", ["resnet50", "bert-large"])
def test_what_waits_on_the_host_leaves_the_device(name: str) -> None:
    step = load_single_gpu_step(Scenario(workload=name, on="v100"), "model")
    offloaded, note = offload_activations(step)
    before, after = (compute_peak_memory(one.programs[0]).events for one in (step, offloaded))
    assert "wait in host memory" in note
    assert after.peak_bytes < before.peak_bytes <= after.peak_bytes + after.host_bytes
    # every op still finds what it found
    assert offloaded.programs[0].num_ops - step.programs[0].num_ops == 2 * int(note.split()[0])


def test_only_training_offloads_and_only_what_is_kept() -> None:
    with pytest.raises(TraincastError, match="only training"):
        traincast.predict("resnet50", on="v100", mode="inference", offload="activations")
    with pytest.raises(TraincastError, match="optimizer or activations"):
        traincast.predict("resnet50", on="v100", offload="parameters")


def test_moments_are_stored_in_fewer_bits_or_on_the_host() -> None:
    step = capture_step(lambda batch: _make_step(batch, False), batch_size=64, name="x", rebatch=False)
    plain, half, eighth, away = (
        traincast.predict(step, on="a100-40gb", **fields)
        for fields in ({}, {"optimizer_state": "bf16"}, {"optimizer_state": "int8"}, {"offload": "optimizer"})
    )
    held = [one.memory.by_kind.get("optimizer_state", 0) for one in (plain, half, eighth, away)]
    weights = 4 * 512 * 512
    assert held[0] == pytest.approx(8 * weights, rel=0.02) and held[3] == 0
    assert held[1] == pytest.approx(held[0] / 2, rel=0.02)
    assert held[2] == pytest.approx((2 + 8 / 256) * weights, rel=0.03)  # small tensors stay
    assert away.memory.host_bytes - plain.memory.host_bytes == pytest.approx(held[0], rel=0.02)
    assert plain.iteration == away.iteration and any("cost no time" in note for note in away.warnings)
    without = capture_step(
        lambda batch: _make_step(batch, False, torch.optim.SGD), batch_size=64, name="x", rebatch=False
    )
    with pytest.raises(TraincastError, match="keeps no state"):
        traincast.predict(without, on="a100-40gb", optimizer_state="bf16")
