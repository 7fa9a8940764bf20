"""What the names of top-level ops say."""

from __future__ import annotations

import pytest

from traincast.costs.host.profile import ENGINE, NODE, PYTHON, get_current_name, get_issuer


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("AddmmBackward", "AddmmBackward0"),  # nodes were not numbered before PyTorch 1.9
        ("AddmmBackward0", "AddmmBackward0"),
        ("CudnnConvolutionBackward", "ConvolutionBackward0"),
        ("ThnnConv2DBackward0", "ConvolutionBackward0"),
        ("ReluBackward1", "ReluBackward0"),
        ("All2All_ReqBackward", "All2All_ReqBackward"),  # an autograd function of the user's keeps its class's name
        ("aten::addmm", "aten::addmm"),
    ],
)
def test_old_names_become_those_of_profiles(then, now):
    assert get_current_name(then) == now


def test_the_main_thread_runs_the_users_python():
    assert get_issuer("AddmmBackward0", main=True) == PYTHON


def test_other_threads_belong_to_the_engine_and_its_nodes():
    assert get_issuer("AddmmBackward0", main=False) == NODE
    assert get_issuer("torch::autograd::AccumulateGrad", main=False) == NODE
    assert get_issuer("aten::add_", main=False) == ENGINE
