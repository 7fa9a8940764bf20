from __future__ import annotations

import pytest

from tests.costs.kernels.signatures import field, kernels, lowered, tensor, transposed
from traincast.costs.kernels.streaming import MEMCPY
from traincast.costs.kernels.streaming.launches import STREAM_SYNCHRONIZE

_BYTES = 4 * 1024 * 64


def _copy(source, target, **scalars):
    return lowered("aten::_to_copy", {"self": source}, target, **scalars)


def test_contiguous_copy_is_a_memcpy():
    assert lowered("aten::clone", {"self": tensor(1024, 64)}, tensor(1024, 64)) == (
        MEMCPY.call("d2d", "int8", bytes=_BYTES),
    )


def test_cast_is_elementwise():
    (call,) = _copy(tensor(1024, 64), tensor(1024, 64, dtype="bfloat16"))
    assert (call.family.name, call.kind) == ("elementwise", "copy")
    assert (field(call, "bytes_read"), field(call, "bytes_written")) == (_BYTES, _BYTES / 2)


def test_transposing_copy_changes_layout():
    (call,) = lowered("aten::clone", {"self": transposed(1024, 64)}, tensor(1024, 64))
    assert (call.family.name, call.kind) == ("copy", "layout")


def test_copy_of_an_expanded_tensor_reads_it_once():
    (call,) = lowered("aten::clone", {"self": tensor(1024, 64, stride=(0, 1))}, tensor(1024, 64))
    assert (call.kind, field(call, "bytes_read")) == ("strided", 4 * 64)


def test_contiguous_of_a_contiguous_tensor_is_free():
    assert lowered("aten::contiguous", {"self": tensor(8, 8)}, tensor(8, 8)) == ()


@pytest.mark.parametrize(
    ("source", "non_blocking", "kind", "waits"),
    [
        ("cpu:pinned", False, "h2d_pinned", True),
        ("cpu:pinned", True, "h2d_pinned", False),
        ("cpu", False, "h2d_pageable", True),
        ("cpu", True, "h2d_pageable", True),  # more than 64 KiB: staged in pieces
    ],
)
def test_to_device(source, non_blocking, kind, waits):
    items = _copy(tensor(1024, 64, device=source), tensor(1024, 64), non_blocking=non_blocking)
    assert items[0] == MEMCPY.call(kind, "int8", bytes=_BYTES)
    assert (STREAM_SYNCHRONIZE in items) == waits


def test_small_pageable_copy_does_not_wait():
    items = _copy(tensor(64, device="cpu"), tensor(64), non_blocking=True)
    assert kernels(items) == ["memcpy:h2d_pageable"]
    assert STREAM_SYNCHRONIZE not in items


def test_host_casts_before_the_transfer():
    (copy, *_) = _copy(tensor(1024, 64, device="cpu:pinned"), tensor(1024, 64, dtype="float16"))
    assert field(copy, "bytes") == _BYTES / 2


def test_to_host_waits_unless_pinned_and_asynchronous():
    into = {"self": tensor(64, device="cpu"), "src": tensor(64)}
    assert STREAM_SYNCHRONIZE in lowered("aten::copy_", into, tensor(64, device="cpu"), non_blocking=True)
    # a fresh copy that need not wait is made in pinned memory
    (copy,) = _copy(tensor(64), tensor(64, device="cpu"), non_blocking=True)
    assert copy.kind == "d2h_pinned"
    assert STREAM_SYNCHRONIZE in _copy(tensor(64), tensor(64, device="cpu"))
    assert STREAM_SYNCHRONIZE in _copy(tensor(64), tensor(64, device="cpu:pinned"))
    assert STREAM_SYNCHRONIZE not in _copy(tensor(64), tensor(64, device="cpu:pinned"), non_blocking=True)


def test_copy_in_place_broadcasts():
    (call,) = lowered("aten::copy_", {"self": tensor(1024, 64), "src": tensor(64)}, tensor(1024, 64))
    assert (call.kind, field(call, "bytes_read"), field(call, "bytes_written")) == ("strided", 4 * 64, _BYTES)


def test_cat_takes_128_tensors_a_launch():
    parts = [tensor(16, 8) for _ in range(300)]
    calls = lowered("aten::cat", {"tensors": parts}, tensor(4800, 8))
    assert [field(call, "tensors") for call in calls] == [128, 128, 44]
    assert sum(field(call, "bytes_read") for call in calls) == 4 * 4800 * 8


def test_slice_gradient_is_zeros_and_a_copy():
    whole = tensor(2048, 27, 27)
    assert kernels(lowered("aten::slice_backward", {"grad_output": whole}, whole, dim=1)) == [
        "elementwise:fill",
        "memcpy:d2d",
    ]
    part = tensor(2048, 10, 27)
    assert kernels(lowered("aten::slice_backward", {"grad_output": part}, whole, dim=1))[-1] == "copy:layout"
    rows = tensor(100, 27, 27)
    assert kernels(lowered("aten::slice_backward", {"grad_output": rows}, whole, dim=0))[-1] == "memcpy:d2d"


SHARDS = [tensor(32, 64), tensor(32)]


WHOLE = [tensor(128, 64), tensor(128)]


BUFFER = tensor(4, 32 * 64 + 32)


@pytest.mark.parametrize(
    ("name", "inputs", "moved"),
    [
        ("fsdp::all_gather_copy_in", {"all_gather_inputs": SHARDS, "all_gather_output": BUFFER}, SHARDS),
        ("fsdp::split_with_sizes_copy", {"all_gather_output": BUFFER, "out": WHOLE}, WHOLE),
        ("fsdp::chunk_cat", {"tensors": WHOLE, "out": BUFFER}, WHOLE),
    ],
)
def test_packing_moves_every_parameter_once(name, inputs, moved):
    items = lowered(name, inputs)
    assert kernels(items) == ["copy:cat"]
    nbytes = sum(spec.nbytes for spec in moved)
    assert (field(items[0], "bytes_read"), field(items[0], "bytes_written")) == (nbytes, nbytes)
    assert not items[0].estimated


def test_a_layer_without_parameters_launches_nothing():
    assert lowered("fsdp::chunk_cat", {"tensors": [tensor(0)], "out": tensor(4, 0)}) == ()
