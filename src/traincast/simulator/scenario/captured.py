"""Captured steps over GPUs that share the model (ZeRO, FSDP), and the passes of forward and backward of an update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traincast.ir.workload import Workload
from traincast.simulator.scenario.kinds import check_sharing
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.models.data_parallel import Sharding
    from traincast.simulator.scenario.resolved import Resolved

MOST_PASSES = 128
"""Passes of one update that are simulated one by one."""


def read_sharding(scenario: Scenario) -> Sharding | None:
    """What the fields of a scenario say that ranks share; None: nothing."""
    check_sharing(scenario)
    zero = 3 if scenario.fsdp else scenario.zero
    if zero is None:
        return None
    if scenario.no_reshard and zero != 3:
        raise TraincastError("`no_reshard` is for parameters that ranks share; give `fsdp`, or leave it out")
    from traincast.models.data_parallel import Sharding

    return Sharding(zero, reshard=not scenario.no_reshard, group=scenario.shard_group)


def check_undivided(resolved: Resolved) -> None:
    """Rejects sharing and passes of programs that divide embedding tables among GPUs."""
    for name in ("fsdp", "zero", "global_batch"):
        if getattr(resolved.scenario, name) is not None:
            raise _make_divided_tables_error(resolved.name, name)


def _make_divided_tables_error(name: str, field: str) -> TraincastError:
    return TraincastError(
        f"{name} divides its embedding tables among GPUs by their plan, and the rest is data parallel; leave out "
        f"`{field}`"
    )


def share_captured(resolved: Resolved, step: Workload) -> tuple[Workload, list[str]]:
    """A step of one GPU on GPUs that share what its scenario says, and notes on it."""
    from traincast.models.data_parallel import share_step
    from traincast.models.sharded_dlrm.recommender import is_shardable

    scenario, gpus = resolved.scenario, resolved.gpus
    sharding = read_sharding(scenario)
    assert sharding is not None
    field = "fsdp" if scenario.fsdp else "zero"
    if is_shardable(step):
        raise _make_divided_tables_error(resolved.name, field)
    _check_shareable(resolved, step, field)
    passes = _count_passes(resolved, step)
    if passes > 1:
        from traincast.transforms.accumulation import accumulate_gradients

        step, _ = accumulate_gradients(step, passes)
    shared = share_step(step, gpus, sharding, bucket_mb=resolved.bucket_mb)
    return shared, [_describe_passes(passes, step.batch_size, every=sharding.zero == 3) if gpus > 1 else ""]


def _check_shareable(resolved: Resolved, step: Workload, field: str) -> None:
    """Rejects steps in which nothing is shared, or by a program of their own."""
    if len(step.ranks) > 1:
        raise TraincastError(f"{resolved.name} runs on {len(step.ranks)} GPUs already; leave out `{field}`")
    if step.mode != "training":
        raise TraincastError(f"{resolved.name} is asked for {step.mode}, which shares nothing; leave out `{field}`")
    if resolved.bucket_mb is not None and (resolved.scenario.fsdp or resolved.scenario.zero == 3):
        raise TraincastError(f"`{field}` reduces gradients by layers, not in buckets; leave out one of them")


def accumulate_captured(resolved: Resolved, step: Workload) -> tuple[Workload, str]:
    """A step, on its GPUs already, with the passes of its update, and what is to be said about them."""
    passes = _count_passes(resolved, step)
    if passes == 1:
        return step, ""
    from traincast.transforms.accumulation import accumulate_gradients

    return accumulate_gradients(step, passes)


def _describe_passes(passes: int, batch_size: int, *, every: bool) -> str:
    if passes == 1:
        return ""
    when = "every pass" if every else "the last pass only"
    return f"a step is {passes} batches of {batch_size} samples and one update, gradients are reduced in {when}"


def _count_passes(resolved: Resolved, step: Workload) -> int:
    """How often forward and backward run before an update."""
    whole, gpus = resolved.scenario.global_batch, resolved.gpus
    if whole is None:
        return 1
    together = step.batch_size * gpus
    passes, left = divmod(whole, together)
    if left or not passes:
        raise TraincastError(
            f"`global_batch` {whole} is no multiple of the {together} samples of {gpus} GPUs with {step.batch_size} "
            "each; give a multiple, or another `micro_batch`"
        )
    if passes > MOST_PASSES:
        raise TraincastError(
            f"`global_batch` {whole} takes {passes} passes of {together} samples, more than the {MOST_PASSES} that are "
            "simulated; give a larger `micro_batch`"
        )
    return passes
