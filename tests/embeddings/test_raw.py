from __future__ import annotations

import numpy as np
import pytest

from traincast.embeddings.measure import measure
from traincast.embeddings.raw import from_arrays, from_npz, from_parquet
from traincast.errors import TraincastError

INDICES = np.array([4, 4, 1, 0, 2, 4, 4], dtype=np.int32)
LENGTHS = np.array([2, 0, 1, 4])


def _bags(batches):
    return [(bags.indices.tolist(), bags.lengths.tolist()) for bags in batches]


def test_lengths_and_offsets_say_the_same():
    by_lengths = _bags(from_arrays(INDICES, lengths=LENGTHS, batch_size=3))
    assert by_lengths == [([4, 4, 1], [2, 0, 1]), ([0, 2, 4, 4], [4])]
    assert _bags(from_arrays(INDICES, offsets=[0, 2, 2, 3, 7], batch_size=3)) == by_lengths
    assert _bags(from_arrays(INDICES, offsets=[0, 2, 2, 3], batch_size=3)) == by_lengths


def test_measured_counts_are_exact():
    measured = measure(from_arrays(INDICES, lengths=LENGTHS, batch_size=3), rows=5)
    assert (measured.batches, measured.lookups, measured.unique_rows) == (2, 3.5, 2.5)
    assert measured.duplicates == 1.0
    assert measured.largest_index == 4
    assert measured.pooling.lengths == (0, 1, 2, 4)
    assert measured.pooling.mean == 7 / 4
    assert measured.lru.hits(1) == 2  # 4 after 4, twice
    assert measured.lru.hits(4) == 3  # and 4 after 1, 0 and 2
    assert measured.access.histogram.row_shares[0] == pytest.approx(3 / 5)


@pytest.mark.parametrize("compressed", [False, True])
def test_one_table_of_many_is_streamed_from_npz(tmp_path, compressed):
    lengths = np.array([[1, 2, 0], [3, 0, 1], [0, 1, 1]])
    path = tmp_path / "lookups.npz"
    save = np.savez_compressed if compressed else np.savez
    save(path, indices=np.arange(9), lengths=lengths)
    assert _bags(from_npz(path, table=1)) == [([3, 4, 5, 6], [3, 0, 1])]
    assert _bags(from_npz(path, table=2, batch_size=2)) == [([7], [0, 1]), ([8], [1])]
    with pytest.raises(TraincastError, match="no table 3"):
        list(from_npz(path, table=3))


def test_offsets_in_npz(tmp_path):
    np.savez(tmp_path / "a.npz", indices=INDICES, offsets=np.array([0, 2, 2, 3, 7]))
    assert _bags(from_npz(tmp_path / "a.npz")) == [(INDICES.tolist(), LENGTHS.tolist())]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"indices": INDICES}, "needs arrays"),
        ({"indices": INDICES, "lengths": np.array([9])}, "ends too early"),
        ({"indices": INDICES * 1.0, "lengths": LENGTHS}, "give integers"),
        ({"indices": INDICES, "lengths": np.array([8, -1])}, "below 0"),
        ({"indices": INDICES, "lengths": np.zeros((1, 1, 1), dtype=int)}, "give one dimension"),
        ({"indices": np.array([object()]), "lengths": LENGTHS}, "give integers"),
    ],
)
def test_a_wrong_npz_is_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(TraincastError, match=message):
        list(from_npz(tmp_path / "a.npz"))


def test_what_is_no_npz_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(b"PK\x03\x04 nothing more")
    with pytest.raises(TraincastError, match="not a readable"):
        list(from_npz(path))
    with pytest.raises(TraincastError, match="not a readable"):
        list(from_npz(tmp_path / "missing.npz"))


def test_a_column_of_lists_is_a_table(tmp_path):
    pl = pytest.importorskip("polars")
    path = tmp_path / "samples.parquet"
    frame = pl.DataFrame({"user": [[4, 4], [], [1], None, [0, 2]], "item": [3, None, 3, 1, 0], "text": ["a"] * 5})
    frame.write_parquet(path)
    assert _bags(from_parquet(path, column="user", batch_size=3)) == [([4, 4, 1], [2, 0, 1]), ([0, 2], [0, 2])]
    assert _bags(from_parquet(path, column="item", batch_size=5)) == [([3, 3, 1, 0], [1, 0, 1, 1, 1])]
    with pytest.raises(TraincastError, match="no column 'users'"):
        list(from_parquet(path, column="users", batch_size=3))
    with pytest.raises(TraincastError, match="give whole numbers"):
        list(from_parquet(path, column="text", batch_size=3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "either lengths or offsets"),
        ({"lengths": [1], "offsets": [0]}, "either lengths or offsets"),
        ({"lengths": [1, 2]}, "sum to 3 for 7"),
        ({"lengths": [8, -1]}, "none below 0"),
        ({"lengths": [7.0]}, "give integers"),
    ],
)
def test_arrays_that_disagree_are_refused(given, message):
    with pytest.raises(TraincastError, match=message):
        list(from_arrays(INDICES, **given))


@pytest.mark.parametrize(("indices", "wrong"), [([0, 5], "index 5"), ([-1, 0], "index -1")])
def test_an_index_outside_the_table_is_refused(indices, wrong):
    with pytest.raises(TraincastError, match=f"{wrong} lies outside"):
        measure(from_arrays(indices, lengths=[2]), rows=5)


def test_indices_without_lookups_are_refused():
    with pytest.raises(TraincastError, match="no lookups"):
        measure(from_arrays(np.array([], dtype=int), lengths=[0, 0]))
