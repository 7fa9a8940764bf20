"""Captured ops equal, op by op, to PyTorch's execution trace of the same step run for real on this CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.capturing import small_models
from tests.capturing.oracle import Node, execution_trace, is_composite, tensors_of
from traincast.capturing import capture_step
from traincast.workload import Op

# What CUDA runs (left) where the CPU runs another op (right). Everything else must be the same op.
ON_CUDA = {
    "aten::cudnn_batch_norm": "aten::native_batch_norm",
    "aten::cudnn_batch_norm_backward": "aten::native_batch_norm_backward",
}
# Ops whose inputs differ between the devices: intermediate results of another size, an input more.
OTHER_INPUTS = ("aten::_embedding_bag_backward", "aten::cudnn_batch_norm_backward")

STEPS = {
    "dlrm": small_models.dlrm,
    "mlp with SGD": small_models.mlp,
    "mlp with AdamW": lambda batch, device: small_models.mlp(batch, device, optimizer="AdamW"),
    "mlp with Adagrad": lambda batch, device: small_models.mlp(batch, device, optimizer="Adagrad"),
    "cnn": small_models.cnn,
    "encoder": lambda batch, device: small_models.encoder(batch, 9, device),
}


@pytest.mark.parametrize("name", STEPS)
def test_ops_shapes_and_dtypes_equal_those_of_a_real_run(name, tmp_path):
    # Given the same step on this CPU and captured as on a GPU, attention in its portable form on both
    make_step = STEPS[name]
    with sdpa_kernel(SDPBackend.MATH):
        trace = execution_trace(make_step(6, "cpu"), tmp_path)
        workload = capture_step(lambda batch: make_step(batch, "cuda"), batch_size=6, name=name, rebatch=False)

    # When both are read side by side
    left = list(workload.programs[0].ops)
    differences = list(_differences(trace, left))

    # Then no op, shape or dtype differs, and none is left over
    assert differences == []
    assert left == []


def _differences(nodes: list[Node], left: list[Op]):
    """Walks the real trace; each captured op stands for a node and everything below it."""
    for node in nodes:
        if left and node.name in (left[0].name, ON_CUDA.get(left[0].name)):
            op = left.pop(0)
            captured = [(t.spec.shape, t.spec.dtype) for t in op.inputs]
            if op.name not in OTHER_INPUTS and captured != _without_numbers(node, len(captured)):
                yield f"{op.name}: captured {captured}, real {tensors_of(node)}"
        elif node.children:
            yield from _differences(node.children, left)
        elif node.name.startswith("aten::") and not is_composite(node.name):
            yield f"{node.name} {tensors_of(node)} is missing before {left[0].name if left else 'the end'}"


def _without_numbers(node: Node, count: int) -> list:
    """A trace shows Python numbers as tensors without dimensions, at the end."""
    tensors = tensors_of(node)
    while len(tensors) > count and tensors[-1][0] == ():
        tensors.pop()
    return tensors


def test_the_comparison_notices_a_missing_op(tmp_path):
    # Given a real trace and a capture of another step
    trace = execution_trace(small_models.mlp(6, "cpu"), tmp_path)
    other = capture_step(lambda batch: small_models.dlrm(batch, "cuda"), batch_size=6, name="x", rebatch=False)

    # When they are compared
    left = list(other.programs[0].ops)
    differences = list(_differences(trace, left))

    # Then it shows
    assert differences
    assert left
