"""FSDP and ZeRO: a step of one GPU on ranks that share parameters, gradients or the optimizer. Needs no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from traincast.ir.ops import Phase, StorageKind
from traincast.ir.program import Program
from traincast.ir.workload import Workload
from traincast.models.data_parallel.data_parallel import (
    BUCKET_BYTES,
    MIB,
    assign_buckets,
    broadcast_buffers,
    check_data_parallel,
    explain_fixed_size,
    find_buffers,
)
from traincast.models.data_parallel.shards import (
    NewGradient,
    Pass,
    ShardBuilder,
    Unit,
    find_new_gradients,
    find_units,
    keep_shards,
)
from traincast.models.layers.builder import Communicator, Ref
from traincast.utils.errors import TraincastError

OPTIMIZER, GRADIENTS, ALL = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Sharding:
    """What ranks share, by DeepSpeed's number `zero`: the optimizer (1), also gradients (2), also parameters (3: FSDP).

    `reshard`: gathered parameters are given back after forward and gathered again for backward. `group` ranks share
    (None: all); groups hold copies (hybrid sharding).
    """

    zero: int
    reshard: bool = True
    group: int | None = None


def share_step(workload: Workload, gpus: int, sharding: Sharding, *, bucket_mb: float | None = None) -> Workload:
    """The training step of one GPU on `gpus` GPUs that share what `sharding` says; on one GPU it stays as it is. The
    batch size stays that of one GPU; the passes of an accumulating step are there already.

    Every rank keeps a part of each tensor along its first dimension, as FSDP2 does. `bucket_mb` is the size of the
    buckets of gradients of ZeRO 1 and 2, in MiB; None is DDP's default.
    """
    if len(workload.ranks) != 1:
        raise TraincastError(
            f"workload '{workload.name}' runs on {len(workload.ranks)} GPUs already; share the step of one GPU"
        )
    if workload.mode != "training":
        raise TraincastError(
            f"'{workload.name}' is a step of {workload.mode}, which shares nothing; give one of training"
        )
    group, copies = _find_groups(gpus, sharding)
    if gpus == 1:
        return workload
    check_data_parallel(workload)
    program = workload.programs[0]
    gradients = find_new_gradients(program)
    write = _write_fully_sharded if sharding.zero == ALL else _write_sharded_update
    limits = BUCKET_BYTES if bucket_mb is None else (bucket_mb * MIB,)
    builder = ShardBuilder(program, group, copies)
    write(builder, gradients, sharding, limits)
    shared = keep_shards(builder.build_program(), program, builder.marks, parts=len(group.ranks), zero=sharding.zero)
    rigid = program.rigid or explain_fixed_size(program, [one.total.tensor for one in gradients])
    return replace(workload, programs=(replace(shared, rigid=rigid),), ranks=(0,) * gpus)


def _find_groups(gpus: int, sharding: Sharding) -> tuple[Communicator, Communicator | None]:
    """The ranks that share, and those that hold copies of a shard, each as the group of rank 0."""
    size = gpus if sharding.group is None else sharding.group
    if sharding.group is not None and sharding.zero != ALL:
        raise TraincastError("`shard_group` is for parameters that ranks share; give `fsdp`, or leave it out")
    if gpus % size or (size == 1 and gpus > 1):
        raise TraincastError(f"`shard_group` {size} does not divide {gpus} GPUs; give a divisor of 2 or more")
    copies = Communicator(1, tuple(range(0, gpus, size))) if size < gpus else None
    return Communicator(0, tuple(range(size))), copies


def _write_fully_sharded(
    builder: ShardBuilder, gradients: Sequence[NewGradient], sharding: Sharding, limits: Sequence[float]
) -> None:
    """Parameters of a layer are there when a pass needs them, and its gradients are reduced once backward has them."""
    units = find_units(builder.program)
    for place in sorted({place for unit in units for place in unit.first}):
        if place[1] and not sharding.reshard:
            forward = (place[0], False)
            kept = {key: ref for key, ref in builder.marks.gathered.items() if key[0] == forward}
            builder.marks.gathered |= {(place, storage): ref for (_, storage), ref in kept.items()}
        else:
            _gather_in_order(builder, units, place)
    _reduce_by_unit(builder, gradients)
    last = max(one.number for one in gradients)
    builder.finish_backward([one for one in gradients if one.number == last])


def _gather_in_order(builder: ShardBuilder, units: Sequence[Unit], place: Pass) -> None:
    """Every layer is gathered while the one before it runs."""
    used = sorted((unit for unit in units if place in unit.first), key=lambda unit: unit.first[place])
    flat, event = builder.gather(used[0].parameters, used[0].first[place], place)
    for unit, following in zip_longest(used, used[1:]):
        builder.copy_out(flat, event, unit.parameters, unit.first[place], place)
        if following is not None:
            flat, event = builder.gather(following.parameters, unit.first[place], place)


def _reduce_by_unit(builder: ShardBuilder, gradients: Sequence[NewGradient]) -> None:
    """The gradients of a layer together, in every pass; what a pass adds is added to the shards."""
    groups: dict[tuple[int, str, str], list[NewGradient]] = defaultdict(list)
    for one in gradients:
        groups[one.number, one.unit, one.new.spec.dtype].append(one)
    kept: dict[tuple[str, str], Ref] = {}
    for (_, unit, dtype), members in sorted(groups.items(), key=lambda item: item[1][-1].scope):
        before = kept.get((unit, dtype))
        shard = _reduce_new(builder, members, before, one_at_a_time=True)
        if before is None:
            kept[unit, dtype] = shard


def _reduce_new(
    builder: ShardBuilder, members: Sequence[NewGradient], before: Ref | None = None, *, one_at_a_time: bool = False
) -> Ref:
    """Reduces what a pass made of these gradients and adds the shard to the one `before`, or to resident ones; gives
    the shard."""
    builder.append_to(members[-1].scope)
    shard = builder.reduce_scatter([one.new for one in members], one_at_a_time=one_at_a_time)
    resident = [one.total for one in members if _is_resident(builder.program, one)]
    if resident:
        builder.add(shard, [builder.shard_of(ref) for ref in resident])
    elif before is not None:
        builder.add(shard, [before])
    else:
        builder.keep(members, shard)
    builder.marks.summed |= {one.total.storage for one in members}
    return shard


def _is_resident(program: Program, gradient: NewGradient) -> bool:
    """Whether a gradient is there before the step, which adds to it."""
    return bool(program.columns.storage_alloc[gradient.total.storage] < 0)


def _write_sharded_update(
    builder: ShardBuilder, gradients: Sequence[NewGradient], sharding: Sharding, limits: Sequence[float]
) -> None:
    """Gradients of the last pass are reduced bucket by bucket; every rank updates its part, and parts are gathered."""
    broadcast_buffers(builder, builder.group, find_buffers(builder.program))
    last = max(one.number for one in gradients)
    ready = [one for one in gradients if one.number == last]
    at_once = sharding.zero == GRADIENTS and last == 0
    for bucket in sorted(assign_buckets([one.total.spec for one in ready], limits), key=lambda b: max(b.members)):
        members = [ready[index] for index in bucket.members]
        if at_once:
            _reduce_new(builder, members)
            continue
        builder.append_to(members[-1].scope)
        builder.keep(members, builder.reduce_scatter([one.total for one in members]))
        stay = (one for one in members if sharding.zero == OPTIMIZER or _is_resident(builder.program, one))
        builder.marks.whole |= {one.total.storage for one in stay}
    builder.finish_backward(ready)
    _gather_updated(builder, limits)


def _gather_updated(builder: ShardBuilder, limits: Sequence[float]) -> None:
    """Parameters that other ranks updated, bucket by bucket, before the step ends."""
    program = builder.program
    updates = np.flatnonzero(program.columns.scope_phase == Phase.OPTIMIZER)
    trained = _find_updated(program)
    if not trained:
        return
    end = int(updates[-1]) + 1
    builder.insert_before(end)
    events = []
    for bucket in assign_buckets([ref.spec for ref in trained], limits):
        whole = [trained[index] for index in bucket.members]
        shards = [builder.shard_of(ref) for ref in whole]
        builder.open_engine_scope("c10d::allgather_into_tensor_coalesced_", Phase.OPTIMIZER)
        nbytes = sum(ref.spec.nbytes for ref in whole)
        arguments = [("output_tensors", whole), ("input_tensors", shards)]
        events.append(
            builder.add_collective(
                "allgather_into_tensor_coalesced_", "all_gather", builder.group, arguments, whole[0], nbytes=nbytes
            )
        )
    builder.wait_for_event(events[-1])


def _find_updated(program: Program) -> list[Ref]:
    """The parameters that the update writes, each as a new flat tensor."""
    c = program.columns
    wanted = (c.storage_kind == StorageKind.PARAMETER) & ~program.storages.on_host
    found: dict[int, Ref] = {}
    for op in program.ops:
        if op.phase != Phase.OPTIMIZER:
            continue
        for tensor in op.inputs:
            if wanted[tensor.storage] and tensor.storage not in found:
                found[tensor.storage] = Ref(tensor.id, tensor.storage, tensor.spec)
    return list(found.values())
