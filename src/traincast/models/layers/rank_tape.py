"""The tape of one of many ranks: its process groups, its all-to-alls, and inputs that the training loop holds."""

from __future__ import annotations

from collections.abc import Sequence

from traincast.ir.builder import ProgramBuilder
from traincast.ir.program import Program
from traincast.ir.template import SizesBuilder
from traincast.models.layers.tape import Communicator, Ref, Scalars, Tape


class RankTape(Tape):
    """The tape of one rank. With `like`, a program of a rank that runs the same ops, only sizes are taken."""

    def __init__(
        self, batch_size: int, rank: int, world_size: int, gpus_per_node: int, like: Program | None = None
    ) -> None:
        builder = ProgramBuilder(batch_size=batch_size, by_place=True) if like is None else SizesBuilder(like)
        super().__init__(batch_size, builder=builder)
        self.rank, self.world_size = rank, world_size
        self.world = Communicator(0, tuple(range(world_size)))
        node, local = divmod(rank, gpus_per_node)
        nodes = -(-world_size // gpus_per_node)
        mates = range(node * gpus_per_node, min((node + 1) * gpus_per_node, world_size))
        peers = range(local, world_size, gpus_per_node)
        # as `new_group` numbers them: one group per node, then one of equal places in all nodes
        self.within = Communicator(1 + node, tuple(mates))
        self.across = Communicator(1 + nodes + local, tuple(peers))
        self._held: set[int] = set()

    def all_to_all(
        self, group: Communicator, source: Ref, output: Ref, send: Sequence[int], receive: Sequence[int],
        *, module: str = "", forward: int = -1, stream: int = 0,
    ) -> int:  # fmt: skip
        """An all-to-all of flat tensors; `send` and `receive` count the elements to and from each rank."""
        item = source.spec.itemsize
        sent, received = tuple(item * n for n in send), tuple(item * n for n in receive)
        even = len({*sent, *received}) == 1
        splits: Scalars = () if even else (("send_splits", sent), ("recv_splits", received))
        return self.collective(
            "alltoall_base_", "all_to_all" if even else "all_to_all_v", group, [("output", output), ("input", source)],
            output, nbytes=sum(sent), details=splits, module=module, forward=forward, stream=stream,
        )  # fmt: skip

    def copied_in(self, shape: tuple[int, ...], dtype: str, *, non_blocking: bool = True) -> Ref:
        """An input copied from pinned host memory, without waiting for it. The training loop holds it to the end."""
        copied = super().copied_in(shape, dtype, non_blocking=non_blocking)
        self._held.add(copied.storage)
        return copied

    def free(self, *refs: Ref) -> None:
        """Releases storages after the last op so far, but not what the training loop holds."""
        super().free(*(ref for ref in refs if ref.storage not in self._held))
