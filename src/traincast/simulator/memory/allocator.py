"""PyTorch's CUDA caching allocator, replayed: which segments it asks the driver for, and what is lost between blocks.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` in PyTorch 2: sizes are rounded up to 512 bytes; up to 1 MiB
come from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones from segments of their own in steps of
2 MiB; a block belongs to the stream that it was allocated on; free neighbours become one block.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

from traincast.utils.errors import TraincastError

MIB = 1 << 20
MIN_BLOCK = 512
SMALL_SIZE = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_LARGE_ALLOCATION = 10 * MIB
LARGE_STEP = 2 * MIB
UNLIMITED = 1 << 62
"""Bytes of a device that never ends, and of a limit that is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """What `PYTORCH_CUDA_ALLOC_CONF` says. Bytes; the garbage collector's threshold is a share of the device (0: off),
    `divisions` are those of `roundup_power2_divisions` (0: off)."""

    expandable_segments: bool = False
    max_split_size: int = UNLIMITED
    garbage_collection_threshold: float = 0.0
    divisions: int = 0


def parse_settings(text: str) -> AllocatorSettings:
    """The settings of a text like `expandable_segments:True,max_split_size_mb:128`."""
    values: dict[str, float | bool | int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition(":"))
        try:
            if name == "expandable_segments" and value.lower() in ("true", "false"):
                values["expandable_segments"] = value.lower() == "true"
            elif name == "max_split_size_mb" and int(value) > 20:
                values["max_split_size"] = int(value) * MIB
            elif name == "garbage_collection_threshold" and 0.0 < float(value) < 1.0:
                values["garbage_collection_threshold"] = float(value)
            elif name == "roundup_power2_divisions" and int(value) in (1, 2, 4, 8, 16, 32, 64):
                values["divisions"] = int(value)
            else:
                raise ValueError
        except ValueError:
            raise TraincastError(
                f"allocator setting '{part[:60]}' is not known; give expandable_segments:True, max_split_size_mb:N "
                "(more than 20), garbage_collection_threshold:0.N or roundup_power2_divisions:N, separated by commas"
            ) from None
    return AllocatorSettings(**values)  # type: ignore[arg-type]


def round_size(nbytes: int, divisions: int = 0) -> int:
    """Bytes of a block for this many bytes.

    >>> round_size(1), round_size(513), round_size(0)
    (512, 1024, 512)
    """
    if nbytes < MIN_BLOCK:
        return MIN_BLOCK
    if divisions > 1 and nbytes > MIN_BLOCK * divisions:
        power = 1 << (nbytes.bit_length() - 1)
        if power != nbytes:
            step = power // divisions
            return -(-nbytes // step) * step
        return nbytes
    return -(-nbytes // MIN_BLOCK) * MIN_BLOCK


def segment_size(size: int) -> int:
    """Bytes that the allocator asks the driver for when it needs a block of `size` bytes.

    >>> segment_size(512) // MIB, segment_size(2 * MIB) // MIB, segment_size(11 * MIB + 512) // MIB
    (2, 20, 12)
    """
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE_ALLOCATION:
        return LARGE_SEGMENT
    return -(-size // LARGE_STEP) * LARGE_STEP


class Block:
    """A part of a segment; `idle`: free for others to take. `tag` is whatever its owner calls it; `streams` are others
    that use it."""

    __slots__ = (
        "address", "allocated", "following", "freed_at", "idle", "previous", "segment", "size", "stream", "streams",
        "tag",
    )  # fmt: skip

    def __init__(self, segment: Segment, address: int, size: int, stream: int) -> None:
        self.segment, self.address, self.size, self.stream = segment, address, size, stream
        self.previous: Block | None = None
        self.following: Block | None = None
        self.allocated = self.idle = False
        self.streams: set[int] | None = None
        self.tag = -1
        self.freed_at = 0


class Segment:
    """What one call of the driver gave, or one expandable range."""

    __slots__ = ("address", "expandable", "first", "size", "small", "stream")

    def __init__(self, address: int, size: int, stream: int, *, small: bool, expandable: bool) -> None:
        self.address, self.size, self.stream, self.small, self.expandable = address, size, stream, small, expandable
        self.first = Block(self, address, size, stream)

    def blocks(self) -> list[Block]:
        """Its blocks, by address."""
        found, block = [], self.first
        while block is not None:
            found.append(block)
            block = block.following  # type: ignore[assignment]
        return found


class OutOfMemoryError(Exception):
    """A block was asked for that the device has no room for, even after the cache was given back."""

    def __init__(self, wanted: int) -> None:
        super().__init__(wanted)
        self.wanted = wanted


_Pool = list[tuple[int, int, Block]]
Listener = Callable[[str, int, int, int, int], None]
"""Is told what happens, in the words of PyTorch's snapshots: action, address, bytes, stream, tag of the block."""


class CachingAllocator:
    """Replays allocations and frees. `allocated` are bytes of blocks in use, `active` with those that wait for another
    stream, `held` those of segments that could not be given back, `reserved` those of all; `peak_*` are the largest so
    far. `capacity` is what the driver has."""

    def __init__(self, settings: AllocatorSettings | None = None, capacity: int = UNLIMITED) -> None:
        self.settings = settings or AllocatorSettings()
        self.capacity = capacity
        self.allocated = self.active = self.held = self.reserved = 0
        self.peak_allocated = self.peak_active = self.peak_held = self.peak_reserved = 0
        self.retries = 0
        self.segments: dict[int, Segment] = {}
        self._free: dict[tuple[bool, int], _Pool] = {}
        self._arenas: dict[tuple[bool, int], Segment] = {}
        self.listener: Listener | None = None
        self._pending: list[tuple[Block, Callable[[], bool]]] = []
        self._next = 1 << 32
        self._clock = 0

    def allocate(self, nbytes: int, stream: int = 0, tag: int = -1) -> Block:
        """A block of at least this many bytes on a stream."""
        self._clock += 1
        if self._pending:
            self._collect_pending()
        settings = self.settings
        size = round_size(nbytes, settings.divisions)
        small = size <= SMALL_SIZE
        pool = self._free.get((small, stream))
        if pool is None:
            pool = self._free[small, stream] = []
        block = self._take(pool, size) or self._grow(pool, size, stream, small=small)
        remaining = block.size - size
        if block.following is None and (block.previous is None or block.segment.expandable):
            self.held += block.size
        if remaining and self._may_split(size, remaining, small=small):
            rest = Block(block.segment, block.address + size, remaining, stream)
            rest.previous, rest.following = block, block.following
            if rest.following is not None:
                rest.following.previous = rest
            elif block.segment.expandable:
                self.held -= remaining
            block.following, block.size = rest, size
            rest.freed_at, rest.idle = block.freed_at, True
            insort(pool, (remaining, rest.address, rest))
        block.allocated, block.tag, block.streams = True, tag, None
        self.allocated += block.size
        self.active += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        if self.active > self.peak_active:
            self.peak_active = self.active
        if self.held > self.peak_held:
            self.peak_held = self.held
        if self.listener is not None:
            self.listener("alloc", block.address, block.size, stream, tag)
        return block

    def _may_split(self, size: int, remaining: int, *, small: bool) -> bool:
        """Whether what is left of a block is worth one of its own."""
        if small or self.settings.expandable_segments:
            return remaining >= MIN_BLOCK
        return remaining > SMALL_SIZE and size < self.settings.max_split_size

    def record_stream(self, block: Block, stream: int) -> None:
        """Another stream uses the block: once freed it waits for that stream."""
        if stream != block.stream:
            block.streams = (block.streams or set()) | {stream}

    def free(self, block: Block, is_done: Callable[[], bool] | None = None) -> None:
        """Gives a block back. One that other streams use stays active until `is_done` says that they are."""
        block.allocated = False
        self.allocated -= block.size
        if self.listener is not None:
            self.listener("free_requested", block.address, block.size, block.stream, block.tag)
        if block.streams and is_done is not None and not is_done():
            self._pending.append((block, is_done))
            return
        self._release(block)

    def release_cached(self) -> None:
        """Gives every segment without a block in use back to the driver, as `empty_cache` does."""
        for pool in self._free.values():
            kept = []
            for entry in pool:
                block = entry[2]
                if block.segment.expandable and block.following is None:
                    self._shrink(block)
                elif block.previous is None and block.following is None:
                    self._give_back(block)
                else:
                    kept.append(entry)
            pool[:] = kept

    def synchronize(self) -> None:
        """Every stream is done."""
        pending, self._pending = self._pending, []
        for block, _ in pending:
            self._release(block)

    def _collect_pending(self) -> None:
        waiting = []
        for block, is_done in self._pending:
            if is_done():
                self._release(block)
            else:
                waiting.append((block, is_done))
        self._pending = waiting

    def _take(self, pool: _Pool, size: int) -> Block | None:
        """The smallest free block that is large enough; none of another stream, none that may not be split."""
        at = bisect_left(pool, (size, -1))
        if at == len(pool):
            return None
        found = pool[at][0]
        most = self.settings.max_split_size
        if size < most <= found or (size >= most and found >= size + LARGE_SEGMENT):
            return None
        block = pool.pop(at)[2]
        block.idle = False
        return block

    def _grow(self, pool: _Pool, size: int, stream: int, *, small: bool) -> Block:
        if self.settings.expandable_segments:
            return self._extend(pool, size, stream, small=small)
        wanted, threshold = segment_size(size), self.settings.garbage_collection_threshold
        if threshold:
            self._collect_garbage(self.reserved - threshold * self.capacity)
        if self.reserved + wanted > self.capacity:
            self.retries += 1
            self.synchronize()
            self.release_cached()
            if self.reserved + wanted > self.capacity:
                raise OutOfMemoryError(wanted)
        segment = Segment(self._next, wanted, stream, small=small, expandable=False)
        self._next += wanted + LARGE_SEGMENT
        self.segments[segment.address] = segment
        self._reserve(wanted)
        self._tell("segment_alloc", segment.address, wanted, stream)
        return segment.first

    def _extend(self, pool: _Pool, size: int, stream: int, *, small: bool) -> Block:
        """Maps more memory at the end of the stream's range; a free block there counts."""
        step = SMALL_SEGMENT if small else LARGE_SEGMENT
        for again in (False, True):
            arena = self._arenas.get((small, stream))
            last = _last_block(arena) if arena is not None else None
            spare = last.size if last is not None and last.idle else 0
            mapped = -(-(size - spare) // step) * step
            if self.reserved + mapped <= self.capacity:
                break
            if again:
                raise OutOfMemoryError(mapped)
            self.retries += 1
            self.synchronize()
            self.release_cached()
        self._reserve(mapped)
        if arena is None:
            arena = Segment(self._next, mapped, stream, small=small, expandable=True)
            self._next += 1 << 44
            self._arenas[small, stream] = arena
            self.segments[arena.address] = arena
            self._tell("segment_map", arena.address, mapped, stream)
            return arena.first
        self._tell("segment_map", arena.address + arena.size, mapped, stream)
        arena.size += mapped
        assert last is not None
        if spare:
            del pool[bisect_left(pool, (last.size, last.address))]
            last.size, last.idle = last.size + mapped, False
            return last
        block = Block(arena, last.address + last.size, mapped, stream)
        block.previous, last.following = last, block
        return block

    def _shrink(self, block: Block) -> None:
        """Unmaps the free end of an expandable range."""
        segment = block.segment
        self.reserved -= block.size
        segment.size -= block.size
        self._tell("segment_unmap", block.address, block.size, block.stream)
        if block.previous is None:
            del self.segments[segment.address]
            del self._arenas[segment.small, segment.stream]
        else:
            block.previous.following = None

    def _collect_garbage(self, excess: float) -> None:
        """Gives the segments back that have been free for longest, until `excess` bytes are."""
        whole = [
            (block.freed_at, address, pool, block)
            for pool in self._free.values()
            for _, address, block in pool
            if block.previous is None and block.following is None and not block.segment.small
        ]
        for _, address, pool, block in sorted(whole, key=lambda entry: entry[:2]):
            if excess <= 0:
                return
            del pool[bisect_left(pool, (block.size, address))]
            self._give_back(block)
            excess -= block.size

    def _give_back(self, block: Block) -> None:
        """Gives a segment that is one free block back to the driver."""
        del self.segments[block.segment.address]
        self.reserved -= block.size
        self._tell("segment_free", block.address, block.size, block.stream)

    def _tell(self, action: str, address: int, size: int, stream: int, tag: int = -1) -> None:
        if self.listener is not None:
            self.listener(action, address, size, stream, tag)

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _release(self, block: Block) -> None:
        """Puts a block among the free ones, joined with free neighbours."""
        self._clock += 1
        self.active -= block.size
        if self.listener is not None:
            self.listener("free_completed", block.address, block.size, block.stream, block.tag)
        block.streams, block.tag, block.freed_at = None, -1, self._clock
        segment = block.segment
        pool = self._free[segment.small, block.stream]
        before, after = block.previous, block.following
        if before is not None and before.idle:
            del pool[bisect_left(pool, (before.size, before.address))]
            before.size += block.size
            before.following = after
            if after is not None:
                after.previous = before
            before.freed_at, block = block.freed_at, before
        if after is not None and after.idle:
            del pool[bisect_left(pool, (after.size, after.address))]
            if after.following is None and segment.expandable:
                self.held += after.size
            block.size += after.size
            block.following = after.following
            if after.following is not None:
                after.following.previous = block
        if block.following is None and (block.previous is None or segment.expandable):
            self.held -= block.size
        block.idle = True
        insort(pool, (block.size, block.address, block))


def _last_block(segment: Segment) -> Block:
    block = segment.first
    while block.following is not None:
        block = block.following
    return block
