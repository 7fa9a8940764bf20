"""What the host of a GPU takes: the five overheads of small steps, out of traces that PyTorch's profiler records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from traincast.calibration.bench.device import Device
from traincast.costs.cpu.samples import Sample
from traincast.ir.ops import Signature
from traincast.traces.kineto import read_kineto
from traincast.traces.link import link_trace
from traincast.traces.overheads.extraction import LONGEST_GAP, TYPES, measure_overheads
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.calibration.bench.small_steps import SmallStep
    from traincast.calibration.bench.timing import Reference

NAME = "traincast::overhead"
_WARM_UPS = 3  # the optimizer's state, then the allocator's cache


def make_overhead_signature(kind: str, name: str) -> Signature:
    """An overhead ("T2") of an op, an issuer or a runtime call as the signature of a sample."""
    return Signature(NAME, (), (), (("overhead", kind), ("of", name)))


def is_overhead(signature: Signature | None) -> bool:
    """Whether a sample is of a host's overhead."""
    return signature is not None and signature.name == NAME


def parse_overhead_signature(signature: Signature) -> tuple[str, str]:
    """(type, what it belongs to) of a sample's signature."""
    kind, name = signature.scalar("overhead"), signature.scalar("of")
    if kind not in TYPES or not isinstance(name, str):
        raise TraincastError("a sample of a host's overhead in the store is damaged; measure it again")
    return str(kind), name


def trace_overheads(device: Device, reference: Reference, small: SmallStep) -> Iterator[tuple[str, Sample]]:
    """Every overhead of one traced step: (key, sample) with its mean; the last has the step's name for a key."""
    import torch

    from traincast.calibration.bench.measure import record_trace

    with torch.device(device.kind):
        step = small.make(small.batch_size)
    for _ in range(_WARM_UPS):
        step()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        record_trace(step, device, path)
        overheads = measure_overheads(link_trace(read_kineto(path)))
    beside = reference.seconds()
    rows = sorted(overheads.table.items())
    for number, ((kind, name), times) in enumerate(rows, 1):
        mean, deviation = (
            (times.compute_mean_below(LONGEST_GAP), 0.0) if kind == "T1" else times.compute_robust_moments()
        )
        yield small.name if number == len(rows) else f"{small.name}-{kind}-{name}", Sample(
            signature=make_overhead_signature(kind, name), between=0, access="", wall=mean, busy=mean,
            reference_wall=beside.wall, reference_busy=beside.busy, spread=deviation / mean if mean else 0.0,
        )  # fmt: skip
