"""Published programs by name, in the variant asked for, and the hosts that they run on."""

from __future__ import annotations

from traincast.costs.host.profile import HostProfile, load_host_profile
from traincast.ir.workload import Workload
from traincast.models.published import PublishedProgram
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError


def build_published_step(
    program: PublishedProgram, gpus: int, scenario: Scenario, gpus_per_node: int = 8
) -> tuple[Workload, str]:
    """One training step on `gpus` GPUs, and what is to be said about it; choices that it does not have are rejected."""
    for option in ("seq_len", "optimizer", "attention", "embedding"):
        choice = getattr(scenario, option)
        if choice is not None:
            raise TraincastError(f"{program.name} is one published program: leave out `{option}`")
    if not scenario.trains_eagerly:
        raise TraincastError(f"{program.name} is a training step as published; it has no inference and is not compiled")
    batch = None if scenario.batch_size is None else gpus * scenario.batch_size
    asked = scenario.dtype or "fp32"
    dtype = program.dtype_for(asked)
    notes = [program.note] if program.note else []
    if dtype != asked:
        notes.append(f"{program.name} runs in {dtype}, as published")
    step = program.step(gpus=gpus, global_batch=batch, dtype=dtype, gpus_per_node=gpus_per_node)
    return step, "; ".join(notes)


def find_published_host(program: PublishedProgram) -> HostProfile | None:
    """The host that a published program runs on; None when the platform's will do."""
    if not program.host:
        return None
    return load_host_profile(program.host)
