"""Programs in the style of published examples, captured as `evaluate captured` captures them."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch")

from traincast.capturing import capture_step
from traincast_evaluation.zoo.build.examples import make_example_step


def test_mask_rcnn_trains_its_pyramid_and_pools_boxes_twice_from_four_levels():
    program = capture_step(
        make_example_step("mask-rcnn", "amp", update=True), batch_size=1, name="mask-rcnn", rebatch=False
    ).programs[0]
    ops = list(program.ops)
    counted = Counter(op.name for op in ops)

    # ResNet-50 (53), pyramid (8), heads on five levels (15) and masks (6); the stem and first stage (11) are frozen
    assert counted["aten::convolution"] == 82
    assert counted["aten::convolution_backward"] == 82 - 11
    # boxes and masks are pooled from four levels each, with gradients
    assert counted["traincast_examples::roi_align"] == counted["traincast_examples::roi_align_backward"] == 8
    # convolutions run in half precision with channels last
    first = next(op for op in ops if op.name == "aten::convolution")
    assert {t.spec.dtype for t in first.inputs} == {"float16"}
    assert first.outputs[0].spec.stride[1] == 1
    # what is trained, and only that, is updated
    assert counted["aten::_fused_sgd_"] == 84
