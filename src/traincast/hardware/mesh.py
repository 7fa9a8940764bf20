"""Rings and flows over point-to-point links: what a cube mesh can carry between the GPUs in use."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

Links = tuple[tuple[int, int, int], ...]


@cache
def count_rings(links: Links, ranks: int) -> int:
    """How many one-way rings over GPUs 0..ranks-1 can run at once, each with a link of its own on every hop.

    A link carries both directions, so every closed loop of three or more GPUs serves two rings.

    >>> ring_count(((0, 1, 1), (1, 2, 1), (0, 2, 1)), 3)
    2
    """
    capacity = _count_links(links, ranks)
    if ranks == 2:
        return capacity.get((0, 1), 0)
    if len(capacity) == ranks * (ranks - 1) // 2 and len(set(capacity.values())) == 1:
        # every GPU joined to every other: all links are used at once (measured on 2, 4 and 8 MI350X)
        return capacity[0, 1] * (ranks - 1)
    return 2 * _count_disjoint_loops(list(_find_loops(capacity, ranks)), capacity)


@cache
def compute_all_to_all_load(links: Links, ranks: int) -> float:
    """Pair messages that the busiest link direction carries when every GPU sends one to every other.

    Neighbours use their own links; others take one hop over the GPU in between with the least load. Infinite when some
    pair is further apart.
    """
    capacity = _count_links(links, ranks)
    load = {(a, b): 1.0 / wires for (i, j), wires in capacity.items() for a, b in ((i, j), (j, i))}
    wires_of = {(a, b): wires for (i, j), wires in capacity.items() for a, b in ((i, j), (j, i))}
    for a in range(ranks):
        for b in range(ranks):
            if a == b or (a, b) in wires_of:
                continue
            via = [v for v in range(ranks) if (a, v) in wires_of and (v, b) in wires_of]
            if not via:
                return float("inf")
            best = min(via, key=lambda v: (max(load[a, v], load[v, b]), v))
            for hop in ((a, best), (best, b)):
                load[hop] += 1.0 / wires_of[hop]
    return max(load.values())


def count_most_strangers(links: Links, ranks: int) -> int:
    """To how many of GPUs 0..ranks-1 the one with the fewest neighbours among them has no link.

    >>> count_most_strangers(((0, 1, 1), (1, 2, 1)), 3)
    1
    """
    joined = _count_links(links, ranks)
    return max(ranks - 1 - sum(gpu in pair for pair in joined) for gpu in range(ranks))


def is_connected(links: Links, ranks: int) -> bool:
    """Whether links join GPUs 0..ranks-1."""
    capacity = _count_links(links, ranks)
    reached = {0}
    while True:
        more = {b for i, j in capacity for a, b in ((i, j), (j, i)) if a in reached} - reached
        if not more:
            return len(reached) == ranks
        reached |= more


def _count_links(links: Links, ranks: int) -> dict[tuple[int, int], int]:
    return {(min(a, b), max(a, b)): wires for a, b, wires in links if max(a, b) < ranks}


def _find_loops(capacity: dict[tuple[int, int], int], ranks: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every closed loop through all GPUs, once per direction-less loop, as its links."""

    def extend(path: list[int]) -> Iterator[tuple[tuple[int, int], ...]]:
        if len(path) == ranks:
            if path[1] < path[-1] and (0, path[-1]) in capacity:
                yield tuple((min(a, b), max(a, b)) for a, b in zip(path, [*path[1:], 0], strict=True))
            return
        for nxt in range(1, ranks):
            if nxt not in path and (min(path[-1], nxt), max(path[-1], nxt)) in capacity:
                yield from extend([*path, nxt])

    return extend([0])


def _count_disjoint_loops(loops: list[tuple[tuple[int, int], ...]], capacity: dict[tuple[int, int], int]) -> int:
    """The most loops that fit into the links together."""
    usable = [loop for loop in loops if all(capacity[link] > 0 for link in loop)]
    best = 0
    for position, loop in enumerate(usable):
        left = dict(capacity)
        for link in loop:
            left[link] -= 1
        best = max(best, 1 + _count_disjoint_loops(usable[position:], left))
        if best * 2 >= min(_count_degrees(capacity)):  # a loop takes two links of every GPU: no more can fit
            break
    return best


def _count_degrees(capacity: dict[tuple[int, int], int]) -> list[int]:
    degree: dict[int, int] = {}
    for (a, b), wires in capacity.items():
        degree[a] = degree.get(a, 0) + wires
        degree[b] = degree.get(b, 0) + wires
    return [max(1, d) for d in degree.values()]
