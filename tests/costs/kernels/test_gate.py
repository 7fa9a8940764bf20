"""What a workload of untrusted input may not hold, so that nothing after loading has to look again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from traincast.costs.kernels.lower import lower
from traincast.costs.kernels.registry import LoweringContext
from traincast.ir.ops import Signature, TensorSpec
from traincast.ir.validate import validate_workload
from traincast.models.catalog import load_model
from traincast.utils.errors import TraincastError

CONTEXT = LoweringContext()


def tensor(*shape, dtype="float32"):
    stride, strides = 1, []
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= size
    return TensorSpec(shape=shape, stride=tuple(strides), dtype=dtype, device="cuda")


def signature(name, inputs=(), outputs=(), **scalars):
    return Signature(name, tuple(inputs), tuple(outputs), scalars=tuple(scalars.items()))


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[31mred", "x" * 3000, "\u202e"])
def test_names_that_would_forge_a_report_are_refused(name):
    workload = load_model("dlrm-ddp", mode="inference")
    with pytest.raises(TraincastError, match="is not a printable text"):
        validate_workload(replace(workload, name=name))
    with pytest.raises(TraincastError, match="is not a printable text"):
        validate_workload(replace(workload, meta={"description": name}))


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (signature("aten::mm", [tensor(2, 3)], [tensor(2, 2)]), "it has no tensor"),
        (signature("aten::mm", [tensor(2), tensor(3)], [tensor(2, 2)]), "values to unpack"),
        (signature("aten::addmm", [], [tensor(2, 2)]), ""),
        (signature("aten::_foreach_mul_", [tensor(1 << 45)], []), "launches"),
        (signature("cuda::event_record", event=-(10**15)), "event -1000000000000000 is not from"),
        (signature("cuda::stream_wait_event", event=1, stream=1 << 40), "stream"),
        (signature("aten::relu", [tensor(1 << 40, 1 << 40)], [tensor(1 << 40, 1 << 40)]), "sizes"),
    ],
)
def test_ops_whose_arguments_do_not_fit_their_kernels_are_refused_by_name(op, reason):
    with pytest.raises(TraincastError) as caught:
        lower(op, CONTEXT)
    assert op.name in str(caught.value) and reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_convolution_needs_a_stride():
    image, weight = tensor(8, 3, 32, 32), tensor(16, 3, 3, 3)
    op = signature("aten::cudnn_convolution", [image, weight], [tensor(8, 16, 30, 30)], stride=(0, 1))
    with pytest.raises(TraincastError, match="stride, dilation and groups must be 1 or more"):
        lower(op, CONTEXT)
