from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from traincast.models.embeddings import raw
from traincast.models.embeddings.raw import LruCounter, count_earlier_and_greater, stack_distances
from traincast.utils.errors import TraincastError


def _simulated_hits(indices, cache_rows):
    cache, hits = OrderedDict(), 0
    for index in indices:
        if index in cache:
            hits += 1
            cache.move_to_end(index)
        else:
            cache[index] = True
            if len(cache) > cache_rows:
                cache.popitem(last=False)
    return hits


def test_distance_counts_the_other_rows_in_between():
    assert stack_distances(np.array([7, 3, 7, 7, 5, 3, 3])).tolist() == [-1, -1, 1, 0, -1, 2, 0]


def test_nothing_wanted_has_no_distances():
    assert stack_distances(np.array([], dtype=np.int64)).tolist() == []


@pytest.mark.parametrize("count", [1, 2, 3, 31, 64, 1000, 300_000])
def test_earlier_and_greater_is_what_a_double_loop_counts(count):
    permutation = np.random.default_rng(count).permutation(count).astype(np.int32)
    some = range(0, count, max(1, count // 1000))
    expected = [int((permutation[:i] > permutation[i]).sum()) for i in some]
    assert count_earlier_and_greater(permutation)[list(some)].tolist() == expected


@pytest.mark.parametrize("pieces", [1, 4, 37])
def test_counter_agrees_with_a_simulated_cache_however_the_stream_is_cut(pieces):
    indices = np.random.default_rng(3).zipf(1.3, 6000) % 900
    counter = LruCounter(largest=300)
    for piece in np.array_split(indices, pieces):
        counter.add_lookups(piece)
    for cache_rows in (1, 2, 7, 50, 299, 300):
        assert counter.count_hits(cache_rows) == _simulated_hits(indices.tolist(), cache_rows)
    assert counter.lookups == 6000


def test_counter_keeps_no_more_than_its_largest_cache():
    counter = LruCounter(largest=10)
    counter.add_lookups(np.arange(100_000))
    assert len(counter._recent) == 10


def test_counter_refuses_a_cache_it_did_not_count():
    with pytest.raises(TraincastError, match="up to 8"):
        LruCounter(largest=8).count_hits(9)


def test_a_long_piece_is_counted_in_parts_with_the_same_result(monkeypatch):
    indices = np.random.default_rng(5).integers(0, 40, 500)
    whole, parts = LruCounter(16), LruCounter(16)
    whole.add_lookups(indices)
    monkeypatch.setattr(raw, "_PIECE", 17)
    parts.add_lookups(indices)
    assert [parts.count_hits(size) for size in range(17)] == [whole.count_hits(size) for size in range(17)]
    assert parts.lookups == whole.lookups == 500
