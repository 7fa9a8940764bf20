"""Where PyTorch takes another road for meta tensors: what a GPU runs instead."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from tests.capturing.test_cuda_choices import cuda, names_of, ops_of


def test_a_number_is_filled_in_by_one_kernel():
    def run():
        rows = cuda(4, 8)
        rows[:, 0] = 1.5

    assert names_of(run) == ["select", "fill_"]


def test_numbers_that_a_script_assigns_stay_known():
    def run():
        lengths = torch.zeros(3, dtype=torch.long, device="cuda")
        lengths[1] = 5
        return cuda(lengths.max().item(), 2) @ cuda(2, 2)

    (product,) = [op for op in ops_of(run) if op.name == "aten::mm"]
    assert product.outputs[0].spec.shape == (5, 2)


def test_one_hot_puts_ones_into_zeros():
    def run():
        return F.one_hot(torch.zeros(4, dtype=torch.long, device="cuda"), 10)

    assert names_of(run) == ["zeros", "zeros", "unsqueeze", "scatter_"]


def test_the_number_of_classes_may_come_from_known_values():
    def run():
        return F.one_hot(torch.arange(4, device="cuda"))

    assert ops_of(run)[-1].outputs[0].spec.shape == (4, 4)


@pytest.mark.parametrize("norm", ["layer", "rms", "group"])
def test_gradients_of_norms_are_contiguous_whatever_came_in(norm):
    def run():
        x = cuda(2, 8, 6, grad=True)
        if norm == "group":
            F.group_norm(x.transpose(1, 2), 2, cuda(6), cuda(6)).transpose(1, 2).square().sum().backward()
        else:
            across = cuda(2, 6, 8, grad=True).transpose(1, 2)
            made = F.layer_norm(across, [6]) if norm == "layer" else F.rms_norm(across, [6], cuda(6))
            made.square().sum().backward()

    (backward,) = [op for op in ops_of(run) if "norm_backward" in op.name]
    spec = backward.outputs[0].spec
    assert spec.stride == torch.empty(spec.shape).stride()
