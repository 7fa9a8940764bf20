"""Which rows are whose, as HugeCTR's hybrid embedding finds it."""

from __future__ import annotations

from tests.costs.kernels.signatures import field, kernels, lowered, tensor


def found(gpus, nodes, frequent=1000, local=26_000):
    inputs = {"keys": tensor(gpus * local, dtype="int32"), "local": tensor(local, dtype="int32")}
    return lowered("hugectr::hybrid_indices", inputs, (), gpus=gpus, nodes=nodes, frequent=frequent)


def test_the_whole_batch_is_numbered_and_searched_at_random():
    items = found(8, 1)
    assert field(items[0], "elements") == 8 * 26_000
    gathers = [field(item, "elements") for item in items if item.kind == "gather"]
    assert gathers == [8 * 26_000, 26_000, 8 * 26_000]  # rows of this GPU, its own samples, masks of frequent rows


def test_between_nodes_a_gpu_masks_its_own_keys_for_every_other():
    items = found(16, 2)
    assert [field(item, "elements") for item in items if item.kind == "gather"] == [16 * 26_000, 26_000, 26_000]
    mask = next(item for item in items if item.compute == "int8")
    assert field(mask, "bytes_written") == 16 * 26_000
    assert "memcpy:memset" not in kernels(items)


def test_without_frequent_rows_masks_are_still_made():
    assert kernels(found(8, 1, frequent=0)) == kernels(found(8, 1))
