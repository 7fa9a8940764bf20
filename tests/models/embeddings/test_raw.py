from __future__ import annotations

import tracemalloc
import zipfile

import numpy as np
import pytest

from traincast.models.embeddings.raw import measure_access
from traincast.models.embeddings.read import read_bags_from_npz, read_bags_from_parquet
from traincast.utils.errors import TraincastError

INDICES = np.array([4, 4, 1, 0, 2, 4, 4], dtype=np.int32)
LENGTHS = np.array([2, 0, 1, 4])


def _bags(batches):
    return [(bags.indices.tolist(), bags.lengths.tolist()) for bags in batches]


def _read(folder, indices, *, batch_size=None, **arrays):
    np.savez(folder / "some.npz", indices=np.asarray(indices), **{name: np.asarray(v) for name, v in arrays.items()})
    return read_bags_from_npz(folder / "some.npz", batch_size=batch_size)


def test_lengths_and_offsets_say_the_same(tmp_path):
    by_lengths = _bags(_read(tmp_path, INDICES, lengths=LENGTHS, batch_size=3))
    assert by_lengths == [([4, 4, 1], [2, 0, 1]), ([0, 2, 4, 4], [4])]
    assert _bags(_read(tmp_path, INDICES, offsets=[0, 2, 2, 3, 7], batch_size=3)) == by_lengths
    assert _bags(_read(tmp_path, INDICES, offsets=[0, 2, 2, 3], batch_size=3)) == by_lengths


def test_measured_counts_are_exact(tmp_path):
    measured = measure_access(_read(tmp_path, INDICES, lengths=LENGTHS, batch_size=3), rows=5)
    assert (measured.batches, measured.lookups, measured.unique_rows) == (2, 3.5, 2.5)
    assert measured.duplicates == 1.0
    assert measured.largest_index == 4
    assert measured.pooling.lengths == (0, 1, 2, 4)
    assert measured.pooling.mean == 7 / 4
    assert measured.lru.count_hits(1) == 2  # 4 after 4, twice
    assert measured.lru.count_hits(4) == 3  # and 4 after 1, 0 and 2
    assert measured.access.histogram.row_shares[0] == pytest.approx(3 / 5)


@pytest.mark.parametrize("compressed", [False, True])
def test_one_table_of_many_is_streamed_from_npz(tmp_path, compressed):
    lengths = np.array([[1, 2, 0], [3, 0, 1], [0, 1, 1]])
    path = tmp_path / "lookups.npz"
    save = np.savez_compressed if compressed else np.savez
    save(path, indices=np.arange(9), lengths=lengths)
    assert _bags(read_bags_from_npz(path, table=1)) == [([3, 4, 5, 6], [3, 0, 1])]
    assert _bags(read_bags_from_npz(path, table=2, batch_size=2)) == [([7], [0, 1]), ([8], [1])]
    with pytest.raises(TraincastError, match="no table 3"):
        list(read_bags_from_npz(path, table=3))


def test_offsets_in_npz(tmp_path):
    np.savez(tmp_path / "a.npz", indices=INDICES, offsets=np.array([0, 2, 2, 3, 7]))
    assert _bags(read_bags_from_npz(tmp_path / "a.npz")) == [(INDICES.tolist(), LENGTHS.tolist())]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"indices": INDICES}, "needs arrays"),
        ({"indices": INDICES, "lengths": LENGTHS, "offsets": [0, 7]}, "either 'lengths' or 'offsets'"),
        ({"indices": INDICES, "lengths": np.array([9])}, "lengths sum to 9 for 7 indices"),
        ({"indices": INDICES, "lengths": np.array([6])}, "lengths sum to 6 for 7 indices"),
        ({"indices": INDICES, "lengths": np.array([[3, 1], [1, 1]])}, "lengths sum to 6 for 7 indices"),
        ({"indices": INDICES, "lengths": np.array([2**62] * 3 + [2**62 + 7])}, "sum to 18446744073709551623 for 7"),
        ({"indices": INDICES * 1.0, "lengths": LENGTHS}, "indices: float64 numbers; give integers"),
        ({"indices": np.array([np.nan]), "lengths": [1]}, "indices: float64 numbers; give integers"),
        ({"indices": INDICES, "lengths": LENGTHS * 1.0}, "lengths: float64 numbers; give integers"),
        ({"indices": INDICES, "lengths": np.array([8, -1])}, "lengths: -1; a sample makes 0"),
        ({"indices": INDICES, "lengths": np.array([[8, -1], [0, 0]])}, "lengths: -1 in table 0"),
        ({"indices": INDICES, "lengths": np.zeros((1, 1, 1), dtype=int)}, "give one dimension"),
        ({"indices": INDICES.reshape(7, 1), "lengths": LENGTHS}, "indices have 2 dimensions"),
        ({"indices": INDICES, "offsets": [0, 4, 2, 7]}, "offsets fall from 4 to 2"),
        ({"indices": INDICES, "offsets": [2, 4, 7]}, "offsets begin with 2"),
        ({"indices": INDICES, "offsets": [0, 9]}, "offsets reach 9 for 7 indices"),
        ({"indices": np.array([object()]), "lengths": LENGTHS}, "indices: object numbers; give integers"),
        ({"indices": INDICES, "lengths": np.array([7, None])}, "lengths: object numbers; give integers"),
        ({"indices": np.array([2**63], dtype=np.uint64), "lengths": [1]}, "9223372036854775808 is too large"),
    ],
)
def test_a_wrong_npz_is_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(TraincastError, match=message) as caught:
        list(read_bags_from_npz(tmp_path / "a.npz"))
    assert str(tmp_path / "a.npz") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i8', 'fortran_order': False, 'shape': (1",
        "{'descr': " + "[" * 500,
        "__import__('os').abort()",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (-5,)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (10000000000,)}",
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header):
    text = header.encode() + b"\n"
    member = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(8)
    np.savez(tmp_path / "a.npz", lengths=np.array([1]))
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("indices.npy", member)
    with pytest.raises(TraincastError, match=r"a\.npz: ") as caught:
        list(read_bags_from_npz(tmp_path / "a.npz"))
    assert "\n" not in str(caught.value)


def test_a_large_file_is_read_in_bounded_memory(tmp_path):
    """Given 32 MB of indices, when they are measured in small batches, then memory stays far below that."""
    np.savez(tmp_path / "a.npz", indices=np.arange(4_000_000) % 5000, lengths=np.full(40_000, 100))
    tracemalloc.start()
    measured = measure_access(read_bags_from_npz(tmp_path / "a.npz", batch_size=100), rows=5000, largest_cache=1 << 10)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (measured.batches, measured.unique_rows) == (400, 5000)
    assert peak < 5e6


def test_what_is_no_npz_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(b"PK\x03\x04 nothing more")
    with pytest.raises(TraincastError, match="not a readable"):
        list(read_bags_from_npz(path))
    with pytest.raises(TraincastError, match="not a readable"):
        list(read_bags_from_npz(tmp_path / "missing.npz"))


def test_a_column_of_lists_is_a_table(tmp_path):
    pl = pytest.importorskip("polars")
    path = tmp_path / "samples.parquet"
    frame = pl.DataFrame({"user": [[4, 4], [], [1], None, [0, 2]], "item": [3, None, 3, 1, 0], "text": ["a"] * 5})
    frame.write_parquet(path)
    assert _bags(read_bags_from_parquet(path, column="user", batch_size=3)) == [
        ([4, 4, 1], [2, 0, 1]),
        ([0, 2], [0, 2]),
    ]
    assert _bags(read_bags_from_parquet(path, column="item", batch_size=5)) == [([3, 3, 1, 0], [1, 0, 1, 1, 1])]
    with pytest.raises(TraincastError, match="no column 'users'"):
        list(read_bags_from_parquet(path, column="users", batch_size=3))
    with pytest.raises(TraincastError, match="give integers"):
        list(read_bags_from_parquet(path, column="text", batch_size=3))
    with pytest.raises(TraincastError, match="batch_size 0"):
        list(read_bags_from_parquet(path, column="user", batch_size=0))


def test_a_null_inside_a_list_is_refused(tmp_path):
    pl = pytest.importorskip("polars")
    pl.DataFrame({"user": [[4, None], [1]]}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(TraincastError, match="column 'user' has a null inside a list"):
        list(read_bags_from_parquet(tmp_path / "a.parquet", column="user", batch_size=3))


@pytest.mark.parametrize("size", [0, 2.5])
def test_a_batch_has_samples(tmp_path, size):
    with pytest.raises(TraincastError, match=f"batch_size {size}"):
        list(_read(tmp_path, INDICES, lengths=LENGTHS, batch_size=size))


@pytest.mark.parametrize(("indices", "wrong"), [([0, 5], "index 5"), ([-1, 0], "index -1")])
def test_an_index_outside_the_table_is_refused(tmp_path, indices, wrong):
    with pytest.raises(TraincastError, match=f"{wrong} is outside"):
        measure_access(_read(tmp_path, indices, lengths=[2]), rows=5)


def test_indices_without_lookups_are_refused(tmp_path):
    with pytest.raises(TraincastError, match="no lookups"):
        measure_access(_read(tmp_path, np.array([], dtype=int), lengths=[0, 0]))


def _npz(path, **headers):
    """A file whose arrays are all zeros, of any shape, without ever holding them."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, shape in headers.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, {"descr": "|i1", "fortran_order": False, "shape": shape})
                left = int(np.prod(shape))
                while left:
                    left -= member.write(bytes(min(left, 1 << 20)))
    return path


@pytest.mark.parametrize("shape", [(10**9, 0), (10**9, 1), (100_000, 10_000)])
def test_more_tables_than_anyone_has_are_refused_before_they_are_read(tmp_path, shape):
    path = _npz(tmp_path / "a.npz", indices=(0,), lengths=(0,))
    with zipfile.ZipFile(path, "w") as archive:
        for name, dimensions in (("indices", (0,)), ("lengths", shape)):
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array_header_1_0(
                    member, {"descr": "|i1", "fortran_order": False, "shape": dimensions}
                )
    with pytest.raises(TraincastError, match="split the file"):
        list(read_bags_from_npz(path))


def test_a_small_file_of_very_many_lookups_is_refused_before_they_are_read(tmp_path):
    path = _npz(tmp_path / "a.npz", indices=((1 << 24) + 1,), offsets=(1,))
    assert path.stat().st_size < 60_000
    tracemalloc.start()
    try:
        with pytest.raises(TraincastError, match="give a smaller batch_size"):
            list(read_bags_from_npz(path))
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
