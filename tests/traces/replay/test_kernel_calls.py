"""Kernels that an op runs beyond what its shapes say: copies before them, casts, operands that were not recorded."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.traces.timelines import event, kernel, launch, step
from traincast.hardware.platform import load_platform
from traincast.traces.formats import read_ranks
from traincast.traces.link import link_trace
from traincast.traces.replay.kernels import KEPT, predict_kernels
from traincast.traces.signatures import SignatureReader

_COPY = "void at::native::elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>"
_CAST = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>"
_SUM = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<{}, at::native::func_wrapper_t<long>>>"
_ADD = "void at::native::elementwise_kernel<128, 4, at::native::CUDAFunctor_add<float>>"
_PROPERTIES = [{"id": 0, "name": "NVIDIA A100-SXM4-40GB"}]


def predict(tmp_path, name, dims, dtypes, *kernels):
    """Microseconds of the kernels (name, blocks of 128 threads) of one op, and whether all were predicted."""
    arguments = {"Input Dims": dims, "Input type": dtypes}
    events = [event("cpu_op", name, 10, 80, **arguments)]
    for place, (kernel_name, blocks) in enumerate(kernels):
        ran = kernel(place + 1, 100 + 50 * place, 40, name=kernel_name)
        ran["args"] |= {"grid": [blocks, 1, 1], "block": [128, 1, 1]}
        events += [launch(place + 1, 15 + 10 * place), ran]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"deviceProperties": _PROPERTIES, "traceEvents": step(*events)}))
    (traces,) = read_ranks([path])
    linked = link_trace(traces.timeline)
    found = predict_kernels(linked, SignatureReader(linked, None, None), load_platform("a100-40gb").device)
    return 1e6 * found.predicted, not np.isin(found.known, KEPT).any()


def test_a_copy_before_a_kernel_is_one_of_the_operand(tmp_path):
    """Layer norm of a tensor that was turned copies it first."""
    shapes = [[4096, 1280], [1280], [1280]], ["float"] * 3
    plain, _ = predict(tmp_path, "aten::native_layer_norm", *shapes, ("vectorized_layer_norm_kernel", 4096))

    both, modelled = predict(
        tmp_path, "aten::native_layer_norm", *shapes, (_COPY, 20480), ("vectorized_layer_norm_kernel", 4096)
    )

    assert modelled
    assert both[1] == pytest.approx(plain[0])
    least = 2 * 4096 * 1280 * 4 / 1.555e6
    assert least < both[0] < 4 * least


@pytest.mark.parametrize(("summed", "nbytes"), [("short", 2), ("int", 4), ("long", 8)])
def test_flags_are_added_up_in_the_type_that_the_kernel_says(tmp_path, summed, nbytes):
    elements = 150 * 534 * 800
    (cast, total), modelled = predict(
        tmp_path, "aten::sum", [[150, 534, 800]], ["bool"], (_CAST, elements // 512), (_SUM.format(summed), 1000)
    )

    assert modelled
    assert cast > (1 + nbytes) * elements / 1.555e6
    assert total == pytest.approx(nbytes * elements / (0.8 * 1.555e6), rel=0.3)


def test_an_operand_whose_shape_was_not_recorded_is_as_large_as_the_grid(tmp_path):
    """Of the sum of a nested tensor and a plain one only the plain one has a shape."""
    recorded = 256 * 64 * 64
    (one,), _ = predict(tmp_path, "aten::add", [[], [256, 64, 64]], ["", "float"], (_ADD, recorded // 512))
    (many,), modelled = predict(tmp_path, "aten::add", [[], [256, 64, 64]], ["", "float"], (_ADD, 64 * recorded // 512))

    assert modelled
    assert many > 30 * one


def test_the_gradient_of_a_loss_is_as_large_as_what_the_loss_is_of(tmp_path):
    fill = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"
    (zeros, _), _ = predict(
        tmp_path, "aten::nll_loss_backward", [[], [8192, 8192], [8192], [], [], [], []],
        ["float", "float", "long int", "", "", "", "float"], (fill, 131072), ("nll_loss_backward_reduce_kernel", 1),
    )  # fmt: skip

    assert zeros > 8192 * 8192 * 4 / 1.555e6


def test_tensors_of_a_list_have_the_type_of_the_kernel_that_joins_them(tmp_path):
    """The profiler leaves their types out; places in several dimensions are divisions."""

    def join(kind, dims):
        name = f"void at::native::CatArrayBatchedCopy<{kind}, unsigned int, {dims}, 64, 64>"
        (joined,), modelled = predict(
            tmp_path, "aten::cat", [[[64, 512, 512]] * 2, []], ["TensorList", "Scalar"], (name, 9)
        )
        assert modelled
        return joined

    half, full = join("at::native::(anonymous namespace)::OpaqueType<2u>", 1), join("float", 1)
    assert full == pytest.approx(2 * half, rel=0.1)
    assert full > 2 * 2 * 64 * 512 * 512 * 4 / 1.555e6
    assert join("c10::BFloat16", 4) > 1.5 * half


@pytest.mark.parametrize(
    ("trace", "platform", "op"),
    [("sam_asdf_a100", "a100-40gb", "aten::mean"), ("switch_a100pcie80_1", "a100-80gb-pcie", "aten::sum")],
)
def test_sums_of_few_elements_wait_for_their_blocks(shared_data, trace, platform, op):
    """Means over 64 channels, which lie last as the grid says, and sums of four."""
    (traces,) = read_ranks([shared_data / "traces" / "public_mixed" / f"{trace}.json.gz"])
    linked = link_trace(traces.timeline)
    found = predict_kernels(linked, SignatureReader(linked, None, None), load_platform(platform).device)
    chosen = (np.array(found.op) == op) & (np.array(found.family) == "reduction") & (found.measured > 2e-5)
    assert chosen.any()
    assert found.predicted[chosen].sum() == pytest.approx(found.measured[chosen].sum(), rel=0.2)
