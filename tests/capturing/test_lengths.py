"""Lengths of jagged tensors that ids decide, or that ids are moved with."""

import pytest
import torch

from traincast.capturing import capture_step
from traincast.capturing.fbgemm import find_lengths
from traincast.utils.errors import TraincastError


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


@pytest.mark.parametrize(
    ("known", "assume", "rows"), [(True, None, 12), (False, {"mask": 0.5}, 10), (False, None, None)]
)
def test_rows_of_a_padded_tensor_are_as_many_as_its_offsets_say(known, assume, rows):
    pytest.importorskip("fbgemm_gpu")

    def make_step(batch):
        layer = torch.nn.Linear(8, 8).cuda()
        offsets = torch.arange(0, 3 * batch + 1, 3, device="cuda")
        offsets = offsets if known else (torch.rand(batch + 1, device="cuda") * 3).long()

        def step():
            padded = layer(torch.rand(batch, 5, 8, device="cuda"))
            torch.ops.fbgemm.dense_to_jagged(padded, [offsets])[0].sum().backward()

        return step

    if rows is None:
        with pytest.raises(TraincastError, match=r"dense_to_jagged needs the values .*mask=SHARE"):
            capture_step(make_step, batch_size=4, name="x", rebatch=False, assume=assume)
        return
    program = capture_step(make_step, batch_size=4, name="x", rebatch=False, assume=assume).programs[0]
    made = next(op for op in program.ops if op.name == "fbgemm::dense_to_jagged_forward")
    assert made.outputs[0].spec.shape == (rows, 8)
