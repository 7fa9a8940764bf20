"""Lengths of jagged tensors that ids decide, or that ids are moved with."""

import torch

from traincast.capturing.fbgemm import find_lengths


def test_permuted_lengths_do_not_ask_for_ids() -> None:
    lengths, order = torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([2, 0, 1])
    ids = torch.empty(21, device="meta")
    known = find_lengths(
        "fbgemm::permute_2D_sparse_data", (order, lengths, ids), {}, lambda t: None if t.is_meta else t
    )
    assert known[0].tolist() == [[5, 6], [1, 2], [3, 4]]


def test_unknown_ids_are_spread_evenly_and_bags_keep_their_length() -> None:
    lengths, ids = torch.tensor([5, 0, 7, 30]), torch.empty(42, device="meta", dtype=torch.int64)
    args = (lengths, ids, False, False, torch.tensor([10]), 4)
    made = find_lengths("fbgemm::block_bucketize_sparse_features", args, {}, lambda t: None if t.is_meta else t)[
        0
    ].reshape(4, 4)
    assert made.sum(0).tolist() == lengths.tolist()
    assert made.sum(1).max() - made.sum(1).min() <= 1
    assert find_lengths("fbgemm::block_bucketize_sparse_features", args, {}, lambda t: t) == {}


def test_other_ops_have_none() -> None:
    assert find_lengths("aten::mm", (), {}, lambda t: t) == {}
