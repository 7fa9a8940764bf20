from __future__ import annotations

from tests.costs.kernels.signatures import field, kernels, lowered, tensor
from traincast.costs.kernels.streaming.launches import STREAM_SYNCHRONIZE
from traincast.costs.kernels.streaming.lowering.index import make_radix_sort


def _index(*shape, device="cuda"):
    return tensor(*shape, dtype="int64", device=device)


def test_row_gather_keeps_rows_together():
    (call,) = lowered("aten::index", {"self": tensor(1000, 64), "indices": [_index(10)]}, tensor(10, 64))
    assert (field(call, "elements"), field(call, "row_elements")) == (640, 64)
    assert field(call, "bytes_read") == 4 * 640 + 8 * 10


def test_lower_triangle_gather_takes_single_elements():
    inputs = {"self": tensor(2048, 27, 27), "indices": [_index(351), _index(351)]}
    (call,) = lowered("aten::index", inputs, tensor(2048, 351), indices_given=(False, True, True))
    assert (field(call, "elements"), field(call, "row_elements")) == (2048 * 351, 1)


def test_host_indices_are_copied_and_waited_for():
    inputs = {"self": tensor(2048, 27, 27), "indices": [_index(351, device="cpu"), _index(351, device="cpu")]}
    items = lowered("aten::index", inputs, tensor(2048, 351), indices_given=(False, True, True))
    assert kernels(items) == ["memcpy:h2d_pageable", "memcpy:h2d_pageable", "index:gather"]
    assert items.count(STREAM_SYNCHRONIZE) == 2


def _triangle_gradient(device):
    inputs = {
        "self": tensor(2048, 27, 27),
        "indices": [_index(351, device=device), _index(351, device=device)],
        "values": tensor(2048, 351),
    }
    return lowered(
        "aten::_index_put_impl_", inputs, tensor(2048, 27, 27), accumulate=True, indices_given=(False, True, True)
    )


def test_accumulating_index_put_sorts_as_the_2021_05_14_trace_shows():
    # 10 launches after the zeros: re-ordered values, 2 x (wrap, scale), add, divide, positions, sort, accumulate
    assert kernels(_triangle_gradient("cuda")) == [
        "copy:layout", *["elementwise:add"] * 6, "elementwise:fill", "index:sort", "index:put",
    ]  # fmt: skip
    put = _triangle_gradient("cuda")[-1]
    assert (field(put, "elements"), field(put, "row_elements")) == (2048 * 351, 1)


def test_accumulating_index_put_with_host_indices_as_the_2021_08_22_trace_shows():
    # 8 launches after the zeros: two transfers more, the wrapping and scaling of indices not on the device
    assert kernels(_triangle_gradient("cpu")) == [
        "memcpy:h2d_pageable", "memcpy:h2d_pageable", "copy:layout", "elementwise:add", "elementwise:add",
        "elementwise:fill", "index:sort", "index:put",
    ]  # fmt: skip


def test_plain_index_put_scatters_onto_a_copy_unless_in_place():
    inputs = {"self": tensor(1000, 64), "indices": [_index(10)], "values": tensor(10, 64)}
    assert kernels(lowered("aten::index_put", inputs, tensor(1000, 64))) == ["memcpy:d2d", "index:scatter"]
    assert kernels(lowered("aten::index_put_", inputs, tensor(1000, 64))) == ["index:scatter"]


def test_mask_index_tells_the_host_how_many():
    inputs = {"self": tensor(64, 8), "indices": [tensor(64, dtype="bool")]}
    assert STREAM_SYNCHRONIZE in lowered("aten::index", inputs, tensor(10, 8))


def test_few_keys_sort_in_one_launch_and_many_in_a_pass_a_byte():
    assert kernels(make_radix_sort(2304, bits=26)) == ["index:sort"]
    # FBGEMM's sort of 13,312 keys of 26 bits: histogram, scan, four passes, a memset before each
    assert kernels(make_radix_sort(13312, bits=26)) == [
        "memcpy:memset", "memcpy:memset", "reduction:full", "elementwise:fill", *["memcpy:memset", "index:sort"] * 4,
    ]  # fmt: skip


def test_scatter_add_in_place():
    inputs = {"self": tensor(64, 8), "index": _index(64, 2), "src": tensor(64, 2)}
    (call,) = lowered("aten::scatter_add_", inputs, tensor(64, 8), dim=1)
    assert (call.kind, field(call, "elements"), field(call, "bytes_read")) == ("scatter", 128, 4 * 128 + 8 * 128)
