"""Writing what ranks that share a model exchange: gathered parameters, and gradients of which each keeps a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from traincast.ir.ops import DTYPE_BYTES, Phase, StorageKind
from traincast.ir.program import Program
from traincast.ir.variants import UNIFORM, VARIANT
from traincast.models.data_parallel.data_parallel import find_end_of_backward
from traincast.models.data_parallel.inserting import InsertingBuilder
from traincast.models.data_parallel.units import NewGradient, Parameter, Pass
from traincast.models.layers.builder import Arguments, Communicator, Ref, Scalars


@dataclass(slots=True)
class Marks:
    """What was written, by storage: the memory that a pass has a parameter `gathered` in, parameters whose casts by
    autocast are `cast_in_shards`, and the shards that gradients were `reduced` to. `summed` are gradients to which
    passes add by shards, `whole` those that stay whole although the update reads their shards."""

    gathered: dict[tuple[Pass, int], int] = field(default_factory=dict)
    cast_in_shards: set[int] = field(default_factory=set)
    reduced: dict[int, int] = field(default_factory=dict)
    summed: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)


class ShardBuilder(InsertingBuilder):
    """Writes into `program`, whose rank shares with those of `group`; `copies` are the ranks of other groups that hold
    the same shard. Copies into and out of what is sent run on a stream of their own, as FSDP's do."""

    def __init__(self, program: Program, group: Communicator, copies: Communicator | None = None) -> None:
        super().__init__(program, group)
        self.group, self.copies, self.parts = group, copies, len(group.ranks)
        self.marks = Marks()
        self.copy_stream = 1 + max(self.stream_of(one) for one in (group, copies) if one is not None)
        self._sent: Ref | None = None
        self._reduced_event = -1
        # groups of hybrid sharding are written as those of rank 0, and all others do alike
        self._details: Scalars = () if copies is None else ((VARIANT, UNIFORM),)

    def share(self, numel: int) -> int:
        """Elements of a rank's part."""
        return -(-numel // self.parts)

    def _open_before(self, scope: int, name: str, place: Pass) -> None:
        """Opens a scope of a pass before one of the program, on its thread."""
        c, phase = self.program.columns, Phase.BACKWARD if place[1] else Phase.FORWARD
        self.insertion.insert_before(scope)
        self.open_scope_on(int(c.scope_thread[scope]), name, phase, after=int(c.scope_after[scope]))

    def gather(self, parameters: Sequence[Parameter], scope: int, place: Pass) -> tuple[Ref, int]:
        """Sends shards of parameters to all ranks before a scope of a pass; gives what arrives and the event of its
        end."""
        shards = [self._flat(p.storage, self.share(p.numel), p.dtype) for p in parameters]
        dtypes = {p.used_as for p in parameters}
        mine = [self.share(p.numel) for p in parameters]
        dtype = dtypes.pop() if len(dtypes) == 1 else "uint8"
        size = (
            sum(mine) if dtype != "uint8" else sum(n * _count_bytes(p) for n, p in zip(mine, parameters, strict=True))
        )
        self._open_before(scope, "fsdp::all_gather_copy_in", place)
        self.wait_for_event(self.record_event(0), self.copy_stream)
        flat = self.add_tensor((self.parts * size,), dtype)
        part = self.add_view(flat, (size,))
        arguments: Arguments = [("all_gather_inputs", shards), ("all_gather_output", flat)]
        self.add_op("fsdp::all_gather_copy_in", arguments, [part, flat], stream=self.copy_stream)
        if not place[1]:  # in backward, hooks of autograd run inside one op
            self._open_before(scope, "c10d::_allgather_base_", place)
        event = self.add_collective(
            "_allgather_base_", "all_gather", self.group, [("output_tensor", flat), ("input_tensor", part)], flat,
            nbytes=flat.spec.nbytes, details=self._details, stream=self.copy_stream,
        )  # fmt: skip
        return flat, event

    def copy_out(self, flat: Ref, event: int, parameters: Sequence[Parameter], scope: int, place: Pass) -> None:
        """Parameters of a pass, each in memory of its own, once they have arrived: before a scope of the pass."""
        self._open_before(scope, "fsdp::split_with_sizes_copy", place)
        self.wait_for_event(event)
        rows = self.add_view(flat, (self.parts, flat.spec.numel // self.parts))
        self.add_op("aten::view", [("self", flat)], [rows], [("size", rows.shape)])
        whole = [self.add_tensor((p.numel,), p.used_as) for p in parameters]
        self.add_op("fsdp::split_with_sizes_copy", [("all_gather_output", flat), ("out", whole)])
        self.free_tensors(flat)
        for parameter, ref in zip(parameters, whole, strict=True):
            self.target.set_kind(ref.storage, StorageKind.PARAMETER)
            for storage in (parameter.storage, *parameter.copies):
                self.marks.gathered[place, storage] = ref.storage
            if parameter.copies:
                self.marks.cast_in_shards.add(parameter.storage)

    def reduce_scatter(self, gradients: Sequence[Ref], *, one_at_a_time: bool = False) -> Ref:
        """Sums gradients of one type over ranks, of which each keeps its part; written at the end of the open scope.
        With `one_at_a_time`, kernels wait for the gradients before these, whose memory is then free."""
        size, dtype = sum(self.share(grad.spec.numel) for grad in gradients), gradients[0].spec.dtype
        if one_at_a_time:
            self._wait_for_sent()
        flat = self.add_tensor((self.parts * size,), dtype)
        self.add_op("fsdp::chunk_cat", [("tensors", gradients), ("out", flat)])
        self.wait_for_event(self.record_event(0), self.copy_stream)
        shard = self.add_tensor((size,), dtype)
        self._reduced_event = self.add_collective(
            "_reduce_scatter_base_", "reduce_scatter", self.group, [("output_tensor", shard), ("input_tensor", flat)],
            shard, nbytes=flat.spec.nbytes, details=self._details, stream=self.copy_stream,
        )  # fmt: skip
        if self.copies is not None:
            self._reduced_event = self.add_collective(
                "allreduce_", "all_reduce", self.copies, [("tensors", shard)], shard, nbytes=shard.spec.nbytes,
                details=self._details, stream=self.stream_of(self.group),
            )  # fmt: skip
        self._sent = flat
        if not one_at_a_time:
            self.free_tensors(flat)
        self.target.set_kind(shard.storage, StorageKind.GRADIENT)
        return shard

    def _wait_for_sent(self) -> None:
        """Kernels wait for the gradients that were sent last."""
        if self._sent is not None:
            self.wait_for_event(self._reduced_event)
            self.free_tensors(self._sent)

    def keep(self, gradients: Sequence[NewGradient], shard: Ref) -> None:
        """The update reads this shard in the place of these gradients."""
        self.marks.reduced |= {gradient.total.storage: shard.storage for gradient in gradients}

    def add(self, shard: Ref, into: Sequence[Ref]) -> None:
        """Adds a shard to shards that are there already, alongside the kernels of the step."""
        stream = self.stream_of(self.copies or self.group)
        parts = [self.add_view(shard, ref.shape) for ref in into]
        arguments = [("self", into), ("other", parts)]
        self.add_op("aten::_foreach_add_", arguments, [], [("alpha", 1)], overload="List", stream=stream)
        self._reduced_event = self.record_event(stream)
        self.free_tensors(shard)

    def shard_of(self, ref: Ref) -> Ref:
        """A rank's part of a tensor that stays, as a flat tensor."""
        return self._flat(ref.storage, self.share(ref.spec.numel), ref.spec.dtype)

    def finish_backward(self, gradients: Sequence[NewGradient]) -> None:
        """The stream of kernels waits for all gradients before backward returns."""
        end = find_end_of_backward(self.program, [one.scope for one in gradients])
        self.insert_before(end)
        self.open_engine_scope("cuda::stream_wait_event", Phase.OTHER)
        self._wait_for_sent()
        if end < self.program.num_scopes:
            self.insertion.set_wait(end)

    def _flat(self, storage: int, numel: int, dtype: str) -> Ref:
        return self._add_tensor(storage, (numel,), (1,), dtype, "cuda")


def _count_bytes(parameter: Parameter) -> int:
    return DTYPE_BYTES[parameter.used_as]
