"""What a prediction is: how long a step takes on a platform, what it is made of, and all that in a few sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from traincast.costs.kernels.contract import KernelCall
from traincast.costs.kernels.cost import Costs
from traincast.hardware.platform import Platform
from traincast.ir.rows import count_bytes_left_out
from traincast.ir.workload import Workload
from traincast.simulator.collective_calls import format_rank_list
from traincast.simulator.memory.device_memory import DeviceMemory
from traincast.simulator.prediction.breakdown import (
    OutsideOp,
    list_marked_ops,
    sum_seconds_by_layer,
    sum_seconds_by_module,
    sum_seconds_by_op,
    sum_seconds_by_phase,
    sum_seconds_by_source,
)
from traincast.simulator.prediction.document import make_prediction_document
from traincast.simulator.prediction.rank_results import (
    RankResult,
    Trust,
    compute_imbalance,
    find_step_path,
    sum_path_by_activity,
    sum_path_by_place,
)
from traincast.simulator.prediction.step import StepSimulation
from traincast.simulator.prediction.throughput import (
    ParallelFigures,
    Throughput,
    compute_throughput,
    list_layout_figures,
)
from traincast.simulator.timeline import PathPart, Timeline
from traincast.utils.arrays import BoolArray
from traincast.utils.display.text import format_duration, format_gigabytes, format_interval, format_milliseconds
from traincast.utils.metrics import Z90
from traincast.utils.results import Records, Result, drop_nested_values


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Prediction(Result):
    """One step of a workload on a platform. Times are seconds; `interval` is a 90 % interval of `iteration`, made of
    `interval_terms` (log-sigmas by name: kernels and host, the software's release, the set-up of several GPUs, wiring,
    a chip that nobody measured).

    On several ranks `iteration` is the time from one step to the next until all are done; what the step is made of
    (`device_active` to `out_of_domain_seconds`, `timeline`) is that of the rank that the others wait for. `ranks` has
    all ranks, those that do the same together; `imbalance` is by how much the busiest one computes longer than the
    mean.

    `estimated_ops` are ops without a kernel model (costed from their bytes and flops), `outside` those with a call
    outside of what their model was fitted on and how far, both with most device time first; `estimated_seconds` and
    `out_of_domain_seconds` are the device time of those calls.

    `kernel_errors` are the seconds that one log-sigma of each kernel call is worth, `host_spread` is the log-sigma of
    the host: what two predictions share of their errors is found in them. `scenario` are the settings it was predicted
    under, by field of `Scenario` (empty where it was asked for otherwise).

    `parallel` are the figures that only a Transformer under a layout has. Where its timeline shows some of the
    micro-batches, `extended` has the figures of all of them that would be read from the timeline, by property.
    """

    workload: Workload
    platform: Platform
    host_profile: str
    iteration: float
    interval: tuple[float, float]
    device_active: float
    device_idle: float
    host: float
    exposed_comm: float
    by_family: dict[str, float]
    by_phase: dict[str, float]
    by_source: dict[str, float]
    estimated_ops: tuple[str, ...]
    estimated_seconds: float
    outside: tuple[OutsideOp, ...]
    memory: DeviceMemory
    warnings: tuple[str, ...]
    timeline: Timeline
    simulation: StepSimulation
    ranks: tuple[RankResult, ...]
    imbalance: float = 0.0
    gpus: int = 1
    interval_terms: dict[str, float] = field(default_factory=dict)
    kernel_errors: dict[KernelCall, float] = field(default_factory=dict)
    host_spread: float = 0.0
    scenario: dict[str, Any] = field(default_factory=dict)
    parallel: ParallelFigures | None = None
    extended: dict[str, dict[Any, float]] = field(default_factory=dict)

    @property
    def out_of_domain_ops(self) -> tuple[str, ...]:
        """Names of the ops `outside`."""
        return tuple(item.op for item in self.outside)

    @property
    def out_of_domain_seconds(self) -> float:
        """Device time of the calls `outside`."""
        return sum(item.seconds for item in self.outside)

    @property
    def trust(self) -> Trust:
        """How far the number rests on measurements."""
        whole = sum(self.by_family.values()) or 1.0
        why = f"{self.outside[0].op}: {self.outside[0].why}" if self.outside else ""
        return Trust(self.out_of_domain_seconds / whole, self.estimated_seconds / whole, why)

    @cached_property
    def path(self) -> list[PathPart]:
        """The critical path over all ranks."""
        return find_step_path(self.simulation)

    @cached_property
    def path_by_activity(self) -> dict[str, float]:
        """Seconds of the critical path by what it is spent on, longest first."""
        return self.extended.get("path_by_activity") or sum_path_by_activity(self.path)

    @cached_property
    def path_by_place(self) -> dict[tuple[int, str], float]:
        """Seconds of the critical path by rank and op, longest first: the first one holds the step back most."""
        return self.extended.get("path_by_place") or sum_path_by_place(self.path)

    @cached_property
    def throughput(self) -> Throughput:
        """Samples and tokens per second of all GPUs, the step's arithmetic and its share of the peak."""
        if self.parallel is not None:
            return self._model_throughput(self.parallel)
        return compute_throughput(
            self.simulation.instructions, self.platform.device, self.iteration,
            batch_size=self.workload.samples, seq_len=self.workload.seq_len,
        )  # fmt: skip

    @cached_property
    def by_module(self) -> dict[str, float]:
        """Kernel seconds by module, numbered ones together (`Bert.layers.*.mlp`), backward included."""
        return self.extended.get("by_module") or sum_seconds_by_module(self.timeline)

    @cached_property
    def by_layer(self) -> dict[str, float]:
        """Kernel seconds by layer (`Bert.layers.3`), backward included."""
        return self.extended.get("by_layer") or sum_seconds_by_layer(self.timeline)

    @cached_property
    def by_op(self) -> dict[str, float]:
        """Kernel seconds by op (`aten::mm`)."""
        return self.extended.get("by_op") or sum_seconds_by_op(self.timeline)

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """Tokens that one GPU trains per second; None for a model without sequences."""
        return self.throughput.tokens / self.gpus if self.throughput.tokens else None

    @property
    def needed_bytes(self) -> float:
        """Bytes that the step takes of the fullest device: what the allocator reserves, and the process around it;
        where that is more than there is and it fits all the same, the least that it needs."""
        return self.memory.needed_bytes

    @cached_property
    def left_out_bytes(self) -> int:
        """Bytes of rows of embedding tables that the step has and does not hold (docs/models.md, Rows)."""
        return max(map(count_bytes_left_out, self.simulation.instructions.programs)) if self.parallel is None else 0

    @property
    def fit_probability(self) -> float:
        """How sure it is that every device holds all it must, rows of tables that are left out included."""
        left_out = self.left_out_bytes
        return self.memory.weigh_fit(left_out) if left_out else self.memory.fit_probability

    @property
    def fits(self) -> bool:
        """Whether every device holds all it must."""
        return self.fit_probability >= 0.5

    def _model_throughput(self, figures: ParallelFigures) -> Throughput:
        layout = figures.layout
        samples, peak = layout.global_batch / self.iteration, self.gpus * figures.peak_flops
        return Throughput(
            samples=samples,
            tokens=samples * layout.seq_len,
            flops=figures.flops,
            peak_flops=peak,
            peak_type=layout.precision,
            mfu=figures.flops / self.iteration / peak,
        )

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain data: the keys of `PredictionDocument`."""
        return make_prediction_document({
            "scenario": self.scenario,
            "workload": self.workload.name,
            "platform": self.platform.key,
            "device": self.platform.device.name,
            "clock_mhz": self.platform.device.clock_mhz,
            "mode": self.workload.mode,
            "compiled": "compiled" in self.workload.meta,
            "batch_size": self.workload.batch_size,
            "global_batch": self.workload.samples * self.gpus,
            "seq_len": self.workload.seq_len or None,
            "gpus": self.gpus,
            "iteration_ms": 1e3 * self.iteration,
            "interval_ms": [1e3 * limit for limit in self.interval],
            "interval_terms": self.interval_terms,
            "device_active_ms": 1e3 * self.device_active,
            "device_idle_ms": 1e3 * self.device_idle,
            "host_ms": 1e3 * self.host,
            "exposed_comm_ms": 1e3 * self.exposed_comm,
            "per_family": _convert_to_milliseconds(self.by_family),
            "per_phase": _convert_to_milliseconds(self.by_phase),
            "per_source": _convert_to_milliseconds(self.by_source),
            "critical_path": _convert_to_milliseconds(self.path_by_activity),
            "kernels": len(self.timeline.launches),
            "estimated_ops": list(self.estimated_ops),
            "estimated_ms": 1e3 * self.estimated_seconds,
            "out_of_domain_ops": list(self.out_of_domain_ops),
            "out_of_domain_ms": 1e3 * self.out_of_domain_seconds,
            "out_of_domain": [item.to_dict() for item in self.outside],
            "memory_gb": {"peak": self.memory.peak_bytes / 1e9, **_convert_to_gigabytes(self.memory.by_kind)},
            "host_profile": self.host_profile,
            "trust": self.trust.to_dict(),
            "warnings": list(self.warnings),
            "assumptions": list(self.workload.assumptions),
            "given_costs": {cost.op: cost.as_text() for cost in self.workload.costs},
            "ranks": [_make_rank_row(result) for result in self.ranks],
            "imbalance": self.imbalance,
            "critical_path_ranks": self._path_rows(),
            **self.throughput.to_dict(),
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "memory": self.memory.to_dict(),
            "fits": self.fits,
            "memory_needed_gb": self.needed_bytes / 1e9,
            **list_layout_figures(self.parallel),
            "by_module": _convert_to_milliseconds(self.by_module),
            "by_layer": _convert_to_milliseconds(self.by_layer),
            "by_op": _convert_to_milliseconds(self.by_op),
        })  # fmt: skip

    def headline(self) -> str:
        """Model, platform and size, then the time of a step with its interval, then what that makes of the GPUs."""
        device = self.platform.device
        clock = f", SM clock locked at {device.clock_mhz:g} MHz" if device.clock_mhz else ""
        sequence = f", {self.workload.seq_len} tokens" if self.workload.seq_len else ""
        low, high = (format_milliseconds(limit) for limit in self.interval)
        compiled = ", compiled" if "compiled" in self.workload.meta else ""
        several, per_gpu = (f"{self.gpus} x ", " per GPU") if self.gpus > 1 else ("", "")
        return (
            f"{self.workload.name} ({self.workload.mode}{compiled}) on {several}{device.name}{clock}\n"
            f"batch {self.workload.batch_size}{per_gpu}{sequence}: {format_milliseconds(self.iteration)} ms per step, "
            f"90 % interval {low} to {high} ms\n{self.throughput.text(device.name, self.gpus)}"
        )

    def records(self) -> Records:
        """Tables "families", "phases", "sources", "modules", "layers" and "ops" of kernel time, "memory" by kind (of
        the fullest rank), "critical_path" by rank and op, and "ranks" (one row per class of ranks that do the same)."""
        return {
            "families": _make_rows("family", self.by_family),
            "phases": _make_rows("phase", self.by_phase),
            "sources": _make_rows("source", self.by_source),
            "modules": _make_rows("module", self.by_module),
            "layers": _make_rows("layer", self.by_layer),
            "ops": _make_rows("op", self.by_op),
            "memory": [{"kind": kind, "gb": size} for kind, size in _convert_to_gigabytes(self.memory.by_kind).items()],
            "critical_path": self._path_rows(),
            "ranks": [
                {"ranks": format_rank_list(result.ranks), **drop_nested_values(_make_rank_row(result))}
                for result in self.ranks
            ],
        }

    def _path_rows(self) -> list[dict[str, Any]]:
        return [{"rank": rank, "op": op, "ms": 1e3 * s} for (rank, op), s in self.path_by_place.items()]


def _convert_to_milliseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {name: 1e3 * length for name, length in seconds.items()}


def _convert_to_gigabytes(sizes: dict[str, int]) -> dict[str, float]:
    return {kind: nbytes / 1e9 for kind, nbytes in sizes.items()}


def _make_rows(what: str, seconds: dict[str, float]) -> list[dict[str, Any]]:
    return [{what: name, "ms": length} for name, length in _convert_to_milliseconds(seconds).items()]


def _make_rank_row(result: RankResult) -> dict[str, Any]:
    return {
        "ranks": list(result.ranks),
        "iteration_ms": 1e3 * result.iteration,
        "device_active_ms": 1e3 * result.device_active,
        "device_idle_ms": 1e3 * result.device_idle,
        "compute_ms": 1e3 * result.compute,
        "host_ms": 1e3 * result.host,
        "exposed_comm_ms": 1e3 * result.exposed_comm,
        "waiting_ms": 1e3 * result.waiting,
        "memory_gb": result.memory.peak_bytes / 1e9,
        "memory_by_kind_gb": _convert_to_gigabytes(result.memory.by_kind),
    }


def make_prediction(
    workload: Workload, platform: Platform, simulated: StepSimulation, costs: Costs, *, ranks: tuple[RankResult, ...],
    slowest: int, timeline: Timeline, estimated: BoolArray, host_profile: str, host_spread: float,
    terms: dict[str, float], errors: dict[KernelCall, float], outside: tuple[OutsideOp, ...], memory: DeviceMemory,
    warnings: tuple[str, ...],
) -> Prediction:  # fmt: skip
    """What a simulation says of a step, and of the rank that the others wait for (class `slowest`, whose `timeline` it
    is): on GPUs and on a machine that was measured alike."""
    result, seconds = ranks[slowest], simulated.seconds
    spread = math.hypot(*terms.values()) if terms else 0.0
    estimated_ops, estimated_seconds = list_marked_ops(timeline, estimated)
    return Prediction(
        workload=workload,
        platform=platform,
        host_profile=host_profile,
        iteration=seconds,
        interval=(seconds * math.exp(-Z90 * spread), seconds * math.exp(Z90 * spread)),
        interval_terms=terms,
        kernel_errors=errors,
        host_spread=host_spread,
        device_active=result.device_active,
        device_idle=max(seconds - result.device_active, 0.0),
        host=result.host,
        exposed_comm=result.exposed_comm,
        by_family=timeline.seconds_by_family(),
        by_phase=sum_seconds_by_phase(timeline),
        by_source=sum_seconds_by_source(timeline, costs),
        estimated_ops=estimated_ops,
        estimated_seconds=estimated_seconds,
        outside=outside,
        memory=memory,
        warnings=warnings,
        timeline=timeline,
        simulation=simulated,
        ranks=ranks,
        imbalance=compute_imbalance(ranks),
        gpus=len(workload.ranks),
    )


_SURE = 0.9  # from here on whether it fits is stated without a word of doubt
_LEAST_BOUND = 0.1  # of the step: a second bound below it is not worth a word
_IDLE, _EXPOSED, _FUSABLE, _ARITHMETIC = 0.15, 0.12, 0.25, 0.4  # shares of the step from which a remedy is worth trying
_FUSED = ("elementwise", "norm", "softmax", "reduction", "copy", "other kernels")
_COMPUTE = ("gemm", "conv", "attention", "GEMMs")
_HOST = ("host", "waiting for the host")
_GROUPS = {"tp": "tensor parallel", "cp": "context parallel", "ep": "expert parallel", "pp": "stages",
           "dp": "data parallel"}  # fmt: skip


def state_verdict(p: Prediction) -> tuple[str, ...]:
    """Two or three sentences; parameters stand between backticks."""
    bounds = " and ".join(f"{name} ({share:.0%})" for name, share in rank_bounds(p))
    lines = [
        f"{format_duration(p.iteration)} per step (90 % interval {format_interval(p.interval)}), bound by {bounds}; "
        f"{state_memory(p)}.",
        p.trust.sentence,
    ]
    remedy = suggest_remedy(p)
    return (*lines, f"Worth trying: {remedy}.") if remedy else tuple(lines)


def _name_bound(name: str) -> str:
    kind, _, group = name.partition("exposed: ")
    return f"exposed {group} communication" if group else kind


def split_critical_path(p: Prediction) -> dict[str, float]:
    """Seconds of the critical path by what it is spent on; under a layout, of the step by what it waits for, unless
    the host, which kernels hide, is most of the path."""
    if p.parallel is None or p.path_by_activity.get("host", 0.0) > p.iteration / 2:
        return p.path_by_activity
    return dict(split_step(p))


def rank_bounds(p: Prediction) -> list[tuple[str, float]]:
    """What takes most of the step and, where it matters, what comes second, with their shares."""
    whole = p.iteration or 1.0
    ranked = sorted(split_critical_path(p).items(), key=lambda item: -item[1])
    first = [(_name_bound(name), seconds / whole) for name, seconds in ranked[:2]]
    return [pair for number, pair in enumerate(first) if not number or pair[1] >= _LEAST_BOUND] or [("nothing", 0.0)]


def state_memory(p: Prediction) -> str:
    """Whether it fits: `fits, 27.1 of 80 GB`; how sure that is where it is not clear."""
    needed, limit, sure = p.needed_bytes + p.left_out_bytes, p.platform.device.memory_bytes, p.fit_probability
    if not math.isfinite(limit):
        return f"{format_gigabytes(needed)} GB of memory"
    word = "fits" if p.fits else "does not fit"
    if 1 - _SURE < sure < _SURE:
        word = f"probably {word} ({max(sure, 1 - sure):.0%})"
    return f"{word}, {format_gigabytes(needed)} of {limit / 1e9:,.3g} GB"


def suggest_remedy(p: Prediction) -> str:
    """The first thing worth trying, by what bounds the step; "" where nothing simple is."""
    used, device = p.scenario, p.platform.device
    if device.is_cpu or not used or p.workload.mode != "training":
        return ""
    if not p.fits:
        return "traincast fits, which tries what would make it fit"
    share = {name: seconds / (p.iteration or 1.0) for name, seconds in split_critical_path(p).items()}
    is_eager = used.get("kernels") == "eager"
    bubble, tensor_parallel = share.get("pipeline bubble", 0.0), share.get("exposed: tensor parallel", 0.0)
    idle = (p.device_idle / p.iteration if p.iteration else 0.0) - bubble
    if is_eager and (sum(share.get(name, 0.0) for name in _HOST) > _IDLE or idle > _IDLE):
        return "`cuda_graph` or `compiled`, since the GPU waits for its host"
    if bubble > _EXPOSED and bubble >= tensor_parallel:
        return f"a larger `global_batch` or `vp` or a smaller `pp`, since {bubble:.0%} of the step is pipeline bubble"
    if tensor_parallel > _EXPOSED:
        return f"a smaller `tp`, since {tensor_parallel:.0%} of the step is exposed tensor-parallel communication"
    if p.exposed_comm / (p.iteration or 1.0) > _EXPOSED:
        return f"a larger `batch_size`, since {p.exposed_comm / p.iteration:.0%} of the step is exposed communication"
    if used.get("dtype") == "fp32" and sum(share.get(name, 0.0) for name in _COMPUTE) > _ARITHMETIC:
        faster = next((dtype for dtype in ("bf16", "tf32", "fp16") if dtype in device.peak_flops), "")
        if faster:
            return f"`dtype={faster}`, since GEMMs run in fp32"
    fusable = sum(share.get(name, 0.0) for name in _FUSED)
    if is_eager and fusable > _FUSABLE:
        return f"`compiled`, since it fuses the small kernels that are {fusable:.0%} of the step"
    return ""


def split_step(result: Prediction) -> list[tuple[str, float]]:
    """The step of the rank that the others wait for by what it is spent on, in seconds; together they are the step."""
    figures = result.parallel
    assert figures is not None
    gemm, attention = (result.by_family.get(name, 0.0) for name in ("gemm", "attention"))
    update = result.by_phase.get("optimizer", 0.0)
    shown = figures.compute + sum(figures.exposed.values()) + figures.bubble
    rows = [("GEMMs", gemm), ("attention", attention)]
    rows.append(("other kernels", max(0.0, figures.compute - update - gemm - attention)))
    rows += [(f"exposed: {_GROUPS[name]}", seconds) for name, seconds in figures.exposed.items()]
    rows += [("pipeline bubble", figures.bubble), ("waiting for the host", max(0.0, result.iteration - shown))]
    return [row for row in (*rows, ("optimizer", update)) if row[1] > 0]
