"""The same script gives the same program, however often and after whatever it is captured."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from tests.capturing.test_metadata_cache import contents
from traincast.capturing import capture_step, regions


def captured(make_step):
    return capture_step(make_step, batch_size=2, name="x", rebatch=False)


def test_a_module_does_not_inherit_the_path_of_one_that_was_replaced(monkeypatch):
    # Given a model that was run, one of whose layers is gone since (as when batch norms are made synchronised ones)
    same_place = lambda module: 7 if isinstance(module, (nn.ReLU, nn.Tanh)) else id(module)  # noqa: E731
    monkeypatch.setattr(regions, "id", same_place, raising=False)
    seen, model = regions.Regions(training=True), nn.Sequential(nn.ReLU())
    seen._enter_module(model, ())
    seen._leave_module(model, (), None)
    del model[0]

    # When another module comes to be where it was
    seen._enter_module(nn.Tanh(), ())

    # Then it has a path of its own
    assert seen.module == "Tanh"


def test_a_storage_as_an_argument_is_its_size_and_not_what_lies_in_it():
    def make_step(batch):
        x = torch.zeros(batch, device="cuda")

        def step():
            torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage(12))
            return x + 1

        return step

    (taken,) = [op for op in captured(make_step).programs[0].ops if op.name == "aten::set_"]
    assert taken.signature.scalar("source") == 12


def test_a_tensor_that_a_library_keeps_on_the_host_is_no_part_of_the_step():
    kept = []

    def make_step(batch):
        if not kept:  # as a module does that is imported here for the first time
            kept.append(torch.ones(3))
        x = torch.zeros(batch, device="cuda")
        return lambda: x + 1

    first = captured(make_step)
    assert contents(captured(make_step)) == contents(first)
    assert len(first.programs[0].columns.storage_kind) == 2
