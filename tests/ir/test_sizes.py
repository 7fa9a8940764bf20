import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traincast.ir.sizes import SizeTable
from traincast.utils.errors import TraincastError

COEFFICIENTS = st.lists(st.integers(-(10**6), 10**6), min_size=7, max_size=7)


def table(*rows: list[int], denominator: int = 1) -> SizeTable:
    padded = [[*row, *[0] * (7 - len(row))] for row in rows]
    return SizeTable(np.array(padded, dtype=np.int64).reshape(-1, 7), np.full(len(rows), denominator, dtype=np.int64))


@given(COEFFICIENTS, st.integers(1, 4096), st.integers(0, 4096))
def test_a_size_is_its_polynomial(row: list[int], b: int, s: int) -> None:
    c = row
    expected = c[0] + c[1] * b + c[2] * s + c[3] * b * s + c[4] * s * s + c[5] * b * s * s + c[6] * b * b
    assert table(row).at(b, s).tolist() == [expected]


def test_a_large_constant_beside_large_sizes_is_no_overflow() -> None:
    # Given the end of an open slice (2^63 - 1), a 400 MB parameter and a size that grows with batch and length
    sizes = table([2**63 - 1, 0, 0, 0, 0, 0], [400_000_000, 0, 0, 0, 0, 0], [0, 0, 0, 16, 0, 0])
    # When evaluated at a large batch and length, then every one is exact
    assert sizes.at(4096, 131072).tolist() == [2**63 - 1, 400_000_000, 16 * 4096 * 131072]


def test_the_smallest_integer_is_a_valid_constant() -> None:
    assert table([-(2**63), 0, 0, 0, 0, 0]).at(7, 0).tolist() == [-(2**63)]


@pytest.mark.parametrize("row", [[0, 2**60, 0, 0, 0, 0], [0, 0, 0, 0, 0, 2**20], [1, 2**61, 0, 2**61, 0, 0]])
def test_sizes_beyond_64_bits_are_refused(row: list[int]) -> None:
    with pytest.raises(TraincastError, match="beyond 64 bits"):
        table(row).at(1 << 26, 1 << 20)


def test_an_unused_monomial_may_exceed_64_bits() -> None:
    assert table([0, 4, 0, 0, 0, 0]).at(1 << 26, 1 << 20).tolist() == [4 << 26]


def test_a_fraction_must_come_out_whole() -> None:
    half_a_batch = table([0, 1, 0, 0, 0, 0], denominator=2)
    assert half_a_batch.at(6, 0).tolist() == [3]
    with pytest.raises(TraincastError, match="does not divide evenly"):
        half_a_batch.at(7, 0)


def test_a_length_is_rounded_up_to_the_multiple_of_its_row() -> None:
    rows = np.array([[0, 0, 1, 0, 0, 0, 0], [1, 0, 0, 2, 0, 0, 0]], dtype=np.int64)
    padded = SizeTable(rows, np.ones(2, dtype=np.int64), np.array([1, 32]))
    assert padded.at(3, 33).tolist() == [33, 1 + 2 * 3 * 64]
    assert padded.at(3, 0).tolist() == [0, 1]


def test_dependence_on_batch_and_length() -> None:
    assert not table([5, 0, 0, 0, 0, 0]).depends_on_batch()
    assert table([5, 0, 0, 1, 0, 0]).depends_on_batch()
    assert table([5, 0, 0, 0, 1, 0]).depends_on_seq_len()
    assert not table([5, 1, 0, 0, 0, 0]).depends_on_seq_len()


def test_an_empty_table_has_no_sizes() -> None:
    assert len(SizeTable.constant(np.array([], dtype=np.int64)).at(1, 1)) == 0
