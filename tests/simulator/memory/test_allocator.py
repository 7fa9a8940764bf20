"""The allocator's documented rules, by cases and by properties of random programs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from traincast.simulator.memory.allocator import (
    LARGE_SEGMENT,
    MIB,
    SMALL_SEGMENT,
    AllocatorSettings,
    Block,
    CachingAllocator,
    OutOfMemoryError,
    parse_settings,
    round_size,
    segment_size,
)
from traincast.utils.errors import TraincastError

SETTINGS = (
    AllocatorSettings(),
    AllocatorSettings(expandable_segments=True),
    AllocatorSettings(max_split_size=32 * MIB),
    AllocatorSettings(divisions=4),
)


@pytest.mark.parametrize("settings", SETTINGS, ids=["default", "expandable", "max_split", "power2"])
@pytest.mark.parametrize("seed", range(6))
def test_blocks_tile_their_segments_and_never_overlap(settings: AllocatorSettings, seed: int) -> None:
    # Given a random program on three streams
    random_ = random.Random(seed)
    allocator, held = CachingAllocator(settings), []
    for _ in range(400):
        if held and random_.random() < 0.45:
            allocator.free(held.pop(random_.randrange(len(held))))
        else:
            size = int(2 ** random_.uniform(0, 28))
            held.append(allocator.allocate(size, random_.randrange(3)))
            # Then a block is on its stream, at least as large as asked for, and small ones stay among small ones
            assert held[-1].size >= size and held[-1].size % 512 == 0
            assert held[-1].segment.small == (round_size(size, settings.divisions) <= MIB)
    # Then blocks tile every segment, no two free neighbours are left, and the counters are the sums
    for segment in allocator.segments.values():
        blocks = segment.blocks()
        assert [b.address for b in blocks] == [
            segment.address + sum(one.size for one in blocks[:n]) for n in range(len(blocks))
        ]
        assert sum(b.size for b in blocks) == segment.size
        assert not any(not a.allocated and not b.allocated for a, b in zip(blocks, blocks[1:], strict=False))
        assert all(b.stream == segment.stream for b in blocks)
    assert allocator.allocated == sum(b.size for b in held) <= allocator.reserved <= allocator.peak_reserved
    assert allocator.reserved == sum(s.size for s in allocator.segments.values())
    # When all is freed and the cache is given back, nothing is left
    for block in held:
        allocator.free(block)
    allocator.release_cached()
    assert (allocator.allocated, allocator.active, allocator.reserved, len(allocator.segments)) == (0, 0, 0, 0)


def test_segments_have_the_sizes_of_the_pools() -> None:
    assert [segment_size(n) for n in (512, MIB, MIB + 512, 10 * MIB - 512)] == [
        SMALL_SEGMENT, SMALL_SEGMENT, LARGE_SEGMENT, LARGE_SEGMENT,
    ]  # fmt: skip
    assert segment_size(10 * MIB) == 10 * MIB and segment_size(11 * MIB) == 12 * MIB


def test_a_block_is_reused_on_its_own_stream_only() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB, 0))
    allocator.allocate(30 * MIB, 1)
    assert allocator.reserved == 60 * MIB
    allocator.allocate(28 * MIB, 0)
    assert allocator.reserved == 60 * MIB


def test_a_block_in_use_elsewhere_stays_active_until_that_stream_is_done() -> None:
    allocator, done = CachingAllocator(), [False]
    block = allocator.allocate(30 * MIB)
    allocator.record_stream(block, 7)
    allocator.free(block, lambda: done[0])
    assert (allocator.allocated, allocator.active) == (0, 30 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    assert allocator.reserved == 60 * MIB
    done[0] = True
    allocator.allocate(512)
    assert allocator.active == 512


def test_large_remainders_are_split_and_small_ones_are_not() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    whole = allocator.allocate(29 * MIB + 512)
    assert whole.size == 30 * MIB  # what would be left is no more than 1 MiB
    allocator.free(whole)
    assert allocator.allocate(20 * MIB).size == 20 * MIB


def test_unsplit_blocks_stay_whole_beyond_the_limit() -> None:
    allocator = CachingAllocator(AllocatorSettings(max_split_size=40 * MIB))
    allocator.free(allocator.allocate(100 * MIB))
    allocator.allocate(10 * MIB)  # may not take the large one
    assert allocator.reserved == 110 * MIB
    allocator.allocate(90 * MIB)  # nearly as large, and takes it whole
    assert allocator.reserved == 110 * MIB


def test_expandable_segments_lose_nothing_to_sizes_that_grow() -> None:
    plain, grown = CachingAllocator(), CachingAllocator(AllocatorSettings(expandable_segments=True))
    for allocator in (plain, grown):
        for size in range(30, 90, 10):
            allocator.free(allocator.allocate(size * MIB))
    assert grown.reserved == 80 * MIB < plain.reserved


def test_the_cache_is_given_back_before_memory_runs_out() -> None:
    allocator = CachingAllocator(capacity=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB, 1))
    allocator.allocate(80 * MIB, 0)
    assert (allocator.retries, allocator.reserved) == (1, 80 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(40 * MIB)


def test_old_segments_are_collected_beyond_the_threshold() -> None:
    allocator = CachingAllocator(AllocatorSettings(garbage_collection_threshold=0.5), capacity=200 * MIB)
    for stream in (1, 2):
        allocator.free(allocator.allocate(60 * MIB, stream))
    assert allocator.reserved == 120 * MIB  # the first 60 MiB were below the threshold
    allocator.allocate(30 * MIB, 0)
    assert [segment.stream for segment in allocator.segments.values()] == [2, 0]


def _churn(allocator: CachingAllocator, seed: int, most: int = 48 * MIB) -> Iterator[int]:
    """Random requests and frees on two streams; after each what is in use."""
    rng, held = random.Random(seed), list[tuple[int, Block]]()
    for _ in range(300):
        if held and (rng.random() < 0.5 or sum(size for size, _ in held) > 512 * MIB):
            allocator.free(held.pop(rng.randrange(len(held)))[1])
        else:
            size = rng.randrange(2 * MIB, most)
            held.append((size, allocator.allocate(size, rng.randrange(2))))
        yield allocator.allocated


@pytest.mark.parametrize("seed", range(6))
def test_no_block_beyond_the_limit_is_ever_split(seed: int) -> None:
    """PyTorch's notes: `max_split_size_mb` keeps blocks above it whole, and smaller requests do not take them."""
    allocator = CachingAllocator(AllocatorSettings(max_split_size=64 * MIB))
    for _ in _churn(allocator, seed, most=160 * MIB):
        for segment in allocator.segments.values():
            assert segment.size <= 64 * MIB or len(segment.blocks()) == 1


@pytest.mark.parametrize("seed", range(6))
def test_the_collector_gives_back_what_is_unused_beyond_its_threshold(seed: int) -> None:
    """PyTorch's notes: beyond the share of the device unused blocks are given back, the oldest first."""
    limit, allocator = (
        0.3 * 1024 * MIB,
        CachingAllocator(AllocatorSettings(garbage_collection_threshold=0.3), 1024 * MIB),
    )
    known, grown = set[int](), 0
    for _ in _churn(allocator, seed):
        for address in set(allocator.segments) - known:  # one was asked for: what is unused went first
            unused = [one for one in allocator.segments.values() if not any(block.allocated for block in one.blocks())]
            before = allocator.reserved - allocator.segments[address].size
            assert before <= limit or not unused
            grown += before > limit
        known = set(allocator.segments)
    assert grown


def test_settings_are_read_as_pytorch_writes_them() -> None:
    read = parse_settings("expandable_segments:True, max_split_size_mb:128")
    assert read.expandable_segments and read.max_split_size == 128 * MIB
    for text in (
        "expandable_segments",
        "max_split_size_mb:4",
        "backend:cudaMallocAsync",
        "garbage_collection_threshold:2",
    ):
        with pytest.raises(TraincastError, match="allocator setting"):
            parse_settings(text)
