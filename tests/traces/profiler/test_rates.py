"""Which op explains a launch, and what copies say of themselves."""

from __future__ import annotations

import pytest

from tests.traces.timelines import event, kernel, launch, linked, op, step
from traincast.traces.events import Kind
from traincast.traces.profiler.rates import OpFinder, infer_framework_version, make_rate_rows, make_version_context
from traincast.traces.signatures import SignatureReader


def finder(tmp_path, *events):
    tied = linked(tmp_path, step(*events))
    return tied, OpFinder(tied, SignatureReader(tied))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "h2d_pageable"),
        ("Memcpy HtoD (Pinned -> Device)", "h2d_pinned"),
        ("Memcpy DtoH (Device -> Pinned)", "d2h_pinned"),
        ("Memcpy DtoD (Device -> Device)", "d2d"),
    ],
)
def test_a_copy_names_its_direction_and_memory(tmp_path, name, kind):
    copy = event("gpu_memcpy", name, 20, 5, 7, correlation=1, stream=7, device=0, bytes=4096)
    tied, ops = finder(tmp_path, launch(1, 10, name="cudaMemcpyAsync"), copy)

    call = ops.read_copy(int(tied.trace.find_rows(Kind.MEMCPY)[0]))

    assert (call.kind, call.values) == (kind, (4096.0,))


def test_a_kernel_is_no_copy(tmp_path):
    tied, ops = finder(tmp_path, launch(1, 10), kernel(1, 20, 5))

    assert ops.read_copy(int(tied.trace.find_rows(Kind.KERNEL)[0])) is None


def test_the_outermost_op_that_lowering_knows_explains_a_launch(tmp_path):
    shapes = [[8, 4], [4, 2]]
    tied, ops = finder(tmp_path, op("aten::matmul", 5, 40, shapes), op("aten::mm", 8, 30, shapes), launch(1, 15))

    call = int(tied.trace.find_rows(Kind.RUNTIME)[0])

    assert tied.get_name(ops.find_anchor(call)) == "aten::mm"  # aten::matmul only calls others
    assert [tied.get_name(row) for row in ops.list_enclosing_ops(call)] == ["aten::mm", "aten::matmul"]


def test_a_launch_outside_of_any_op_has_no_explanation(tmp_path):
    tied, ops = finder(tmp_path, launch(1, 10))

    assert ops.find_anchor(int(tied.trace.find_rows(Kind.RUNTIME)[0])) == -1


@pytest.mark.parametrize(("node", "version"), [("AddmmBackward", "1.8"), ("AddmmBackward0", "1.12")])
def test_autograd_nodes_tell_the_version_of_pytorch(tmp_path, node, version):
    tied, _ = finder(tmp_path, event("cpu_op", node, 10, 5))

    assert infer_framework_version(tied) == version
    assert make_version_context("2.1").framework_version == (2, 1)


@pytest.mark.parametrize(
    ("name", "version"),
    [("aten::scaled_dot_product_attention", "2.1"), ("triton_poi_fused_relu_0", "2.1"), ("aten::addmm", "1.12"),
     ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>", "1.13")],
)  # fmt: skip
def test_names_that_only_newer_versions_have_tell_it_too(tmp_path, name, version):
    tied, _ = finder(tmp_path, event("cpu_op", name, 10, 5))

    assert infer_framework_version(tied) == version


def test_a_concatenation_has_a_rate_of_bytes(tmp_path):
    ran = kernel(1, 20, 10, name="void at::native::CatArrayBatchedCopy<float, unsigned int, 1, 64, 64>")
    joined = event(
        "cpu_op", "aten::cat", 5, 12, **{"Input Dims": [[[1000, 1000]], []], "Input type": ["TensorList", ""]}
    )
    tied, ops = finder(tmp_path, *step(joined, launch(1, 8), ran))

    (row,) = make_rate_rows(tied, ops.reader)

    assert (row.flops, row.bytes) == (0.0, 8e6)
    assert row.tbytes == pytest.approx(0.8)
