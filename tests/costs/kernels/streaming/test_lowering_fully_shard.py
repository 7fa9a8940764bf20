from __future__ import annotations

import pytest

from tests.costs.kernels.signatures import field, kernels, lowered, tensor

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
