"""Exchanges that know of nodes: first between the GPUs of a node, then between GPUs of equal places in all nodes."""

from __future__ import annotations

from traincast.programs.rank_tape import RankTape
from traincast.programs.tape import Ref
from traincast.workload.ops import StorageKind


class NodeExchanges:
    """Exchanges of half-precision numbers that a stream of a rank waits for; on one node they are plain ones."""

    def __init__(self, tape: RankTape, *, several_nodes: bool, stream: int) -> None:
        self.tape, self.several_nodes, self.stream = tape, several_nodes, stream

    def all_to_all(self, numel: int) -> None:
        """So many numbers of every rank, shared out evenly between all."""
        tape = self.tape
        for group in (tape.within, tape.across) if self.several_nodes else (tape.world,):
            each = numel // len(group.ranks)
            if len(group.ranks) == 1 or not each:
                continue
            splits = [each] * len(group.ranks)
            sent, received = (tape.new((sum(splits),), "float16") for _ in range(2))
            self._wait(tape.all_to_all(group, sent, received, splits, splits, stream=self.stream))

    def all_reduce(self, numel: int) -> None:
        """A sum of so many numbers over all ranks."""
        tape, mates = self.tape, len(self.tape.within.ranks)
        if tape.world_size == 1 or not numel:
            return
        if not self.several_nodes:
            flat = tape.resident((numel,), StorageKind.GRADIENT, "float16")
            self._wait(tape.all_reduce(tape.world, flat, stream=self.stream))
            return
        part = -(-numel // mates)
        whole = tape.resident((part * mates,), StorageKind.GRADIENT, "float16")
        share = self.within("_reduce_scatter_base_", "reduce_scatter", whole, (part,))
        # switches that add up what passes (SHARP) take and give every number once: the bytes of a reduce-scatter
        summed = tape.new((part,), "float16")
        arguments = [("output", summed), ("input", share)]
        name, kind = "_reduce_scatter_base_", "reduce_scatter"
        self._wait(
            tape.collective(name, kind, tape.across, arguments, summed, nbytes=share.spec.nbytes, stream=self.stream)
        )
        self.within("_allgather_base_", "all_gather", share, (part * mates,))

    def within(self, name: str, kind: str, source: Ref, shape: tuple[int, ...]) -> Ref:
        """A collective between the GPUs of a node that gives a tensor of this shape."""
        tape = self.tape
        result = tape.new(shape, "float16")
        largest = max(source.spec.nbytes, result.spec.nbytes)
        arguments = [("output", result), ("input", source)]
        self._wait(tape.collective(name, kind, tape.within, arguments, result, nbytes=largest, stream=self.stream))
        return result

    def _wait(self, event: int) -> None:
        self.tape.wait(event, self.stream)
