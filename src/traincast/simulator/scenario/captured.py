"""Captured steps over GPUs that share the model (ZeRO, FSDP), their accumulated passes, and the loading before a
step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from traincast.ir.ops import Signature
from traincast.ir.workload import LOADER, Workload
from traincast.simulator.prediction.rank_results import Note
from traincast.simulator.prediction.result import Prediction
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
        from traincast.transforms.updates import accumulate_gradients

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
    from traincast.transforms.updates import accumulate_gradients

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


_COPIES = ("aten::_to_copy", "aten::copy_", "aten::to")
_MOST_MS, _MOST_WORKERS = 1e6, 4096
_HEADROOM = 1e-9  # seconds: a loader as fast as the step holds nobody up


@dataclass(frozen=True, kw_only=True, slots=True)
class Loader:
    """How batches come. One takes `ms` milliseconds to make; `workers` processes make them side by side, ahead of the
    step (0: the training process itself makes each before its step). `pageable`: they are copied from pageable memory,
    which the host waits for; else from pinned memory."""

    ms: float = 0.0
    workers: int = 0
    pageable: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.ms <= _MOST_MS:
            raise TraincastError(f"`loader_ms` {self.ms:g} is out of range; give 0 to {_MOST_MS:g} milliseconds")
        if not 0 <= self.workers <= _MOST_WORKERS:
            raise TraincastError(f"`workers` {self.workers} is out of range; give 0 to {_MOST_WORKERS}")

    def late(self, batches: int) -> float:
        """Seconds that the training process spends on the batches of a step before it."""
        return 0.0 if self.workers else 1e-3 * self.ms * batches

    @property
    def period(self) -> float:
        """Seconds from one batch of the workers to the next; 0 without workers."""
        return 1e-3 * self.ms / self.workers if self.workers else 0.0

    def feed_workload(self, workload: Workload) -> Workload:
        """The workload with its inputs copied as this loader has them."""
        if not self.pageable:
            return workload
        fed = make_inputs_pageable(workload)
        if [p.symbolic for p in fed.programs] == [p.symbolic for p in workload.programs]:
            raise TraincastError(
                f"{workload.name} copies no inputs from pinned memory, which `pageable` is about; leave it out"
            )
        return fed

    def limit_prediction(self, result: Prediction, batches: int) -> Prediction:
        """The result, as long as its batches take where workers are slower than the step."""
        notes: tuple[str, ...] = ()
        late = self.late(batches)
        if late:
            made = "its batch" if batches == 1 else f"its {batches} batches"
            notes = (Note(f"every step begins {1e3 * late:g} ms late, in which the training process makes {made}"),)
        period = self.period * batches
        if period > result.iteration + _HEADROOM:
            every = "a batch" if batches == 1 else f"{batches} batches"
            held = f"the data loader holds the step up: {every} every {1e3 * period:.3g} ms from {self.workers} workers"
            notes = (
                Note(f"{held}, for a step of {1e3 * result.iteration:.3g} ms; its time is as given, without interval"),
            )
            longer = period - result.iteration
            result = replace(
                result, iteration=period, interval=(period, max(period, result.interval[1])),
                device_idle=result.device_idle + longer,
            )  # fmt: skip
        return replace(result, warnings=(*result.warnings, *notes)) if notes else result


def read_traced_loader(workload: Workload, asked: Loader) -> Loader:
    """The loader that a traced step waited for, where it says so, else the one asked for."""
    milliseconds, _, workers = workload.meta.get(LOADER, "").partition(" ")
    try:
        return replace(asked, ms=float(milliseconds), workers=int(workers)) if milliseconds else asked
    except ValueError:
        raise TraincastError(f"{workload.name} does not say how its batches came: '{LOADER}' is no number") from None


def count_batches(workload: Workload) -> int:
    """Batches that a step wants: several where gradients of several are accumulated."""
    return max(1, workload.samples // workload.batch_size)


def make_inputs_pageable(workload: Workload) -> Workload:
    """The workload with every copy to the device made from pageable memory."""
    programs = tuple(
        replace(program, symbolic=tuple(map(_make_pageable, program.symbolic))) for program in workload.programs
    )
    return replace(workload, programs=programs)


def _make_pageable(signature: Signature) -> Signature:
    if signature.name not in _COPIES or not any(spec.device == "cpu:pinned" for spec in signature.inputs):
        return signature
    inputs = tuple(
        replace(spec, device="cpu") if spec.device == "cpu:pinned" else spec for spec in signature.inputs
    )  # fmt: skip
    return replace(signature, inputs=inputs)
