"""What a step makes of the hardware (samples and tokens per second, share of the peak), and figures of parallel
layouts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from traincast.costs.kernels.cost import count_flops
from traincast.hardware.device import Device
from traincast.simulator.instructions import StepInstructions
from traincast.simulator.schedule import Code
from traincast.utils.display.text import format_quantity

if TYPE_CHECKING:
    from traincast.simulator.parallelism.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelFigures:
    """Figures of a step under a layout, of the rank that the others wait for. Seconds and bytes.

    `exposed` is the time by rank group in which the device only communicates; `bubble` the time in which a pipeline
    stage waits for others; `compute` the time in which other kernels run. `flops` is the arithmetic of the model as MFU
    counts it, `peak_flops` the rate of one GPU that it is compared with. `simulated` is how many micro-batches the
    timeline shows (the rest repeat them).
    """

    layout: Layout
    exposed: dict[str, float]
    bubble: float
    compute: float
    flops: float
    peak_flops: float
    simulated: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data; keys say their units."""
        layout = self.layout
        return {
            "layout": {
                **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(layout).items()},
                "dp": layout.dp,
                "accumulation": layout.accumulation,
            },
            "global_batch": layout.global_batch,
            "micro_batch": layout.micro_batch,
            "micro_batches": layout.accumulation,
            "micro_batches_in_timeline": self.simulated,
            "exposed_ms": {name: 1e3 * seconds for name, seconds in self.exposed.items()},
            "bubble_ms": 1e3 * self.bubble,
        }


def list_layout_figures(figures: ParallelFigures | None) -> dict[str, Any]:
    """The figures as plain data; none for a step without a layout."""
    return {} if figures is None else figures.to_dict()


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Of all GPUs together. `tokens` a second is 0 for a model without sequences.

    `flops` are the operations of one step that are GEMMs, convolutions and attention, those that
    checkpointing computes again included. `peak_flops` is the rate of all GPUs in the type most of them are computed
    in (`peak_type`), at boost or at the locked clock (0 where it is not known, as of a measured CPU); `mfu` is the
    share of it that the step uses (0 without such ops or without a peak).
    """

    samples: float
    tokens: float
    flops: float
    peak_flops: float
    peak_type: str
    mfu: float

    @property
    def note(self) -> str:
        """How an MFU comes above 100 % ("" below)."""
        return "; Winograd's convolutions multiply less often than is counted" if self.mfu > 1 else ""

    def text(self, device: str, gpus: int) -> str:
        """One line: `1,234 samples/s; 12.3 TFLOP a step, MFU 41.0% of 312 TFLOPS (bf16 peak of NVIDIA A100)`."""
        rates = [f"{_format_rate(self.samples)} samples/s"]
        if self.tokens:
            rates.append(f"{_format_rate(self.tokens)} tokens/s")
        if not self.flops:
            return ", ".join(rates)
        if not self.peak_flops:
            return f"{', '.join(rates)}; {format_quantity(self.flops, 'FLOP')} per step"
        several = f"{gpus} x " if gpus > 1 else ""
        peak = f"{several}{self.peak_flops / gpus / 1e12:,.4g} TFLOPS ({self.peak_type} peak of {device})"
        share = f"MFU {self.mfu:.1%} of {peak}{self.note}"
        return f"{', '.join(rates)}; {format_quantity(self.flops, 'FLOP')} per step, {share}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data; keys say their units. Without counted arithmetic there is no MFU."""
        return {
            "samples_per_s": self.samples,
            "tokens_per_s": self.tokens or None,
            "flops": self.flops,
            "mfu": self.mfu if self.flops and self.peak_flops else None,
            "mfu_peak_tflops": self.peak_flops / 1e12,
            "mfu_peak_type": self.peak_type,
        }


def _format_rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def compute_throughput(
    instructions: StepInstructions, device: Device, seconds: float, *, batch_size: int, seq_len: int
) -> Throughput:
    """Of a step that takes this many `seconds` with `batch_size` samples of `seq_len` tokens (0: none) a rank."""
    gpus = len(instructions.ranks)
    by_type = _sum_flops_by_type(instructions)
    flops = sum(by_type.values())
    peak_type = max(by_type, key=lambda compute: by_type[compute], default="fp32")
    peak = gpus * device.get_product_flops(peak_type)
    samples = gpus * batch_size / seconds if seconds > 0 else 0.0
    mfu = flops / seconds / peak if seconds > 0 and peak > 0 else 0.0
    return Throughput(
        samples=samples, tokens=samples * seq_len, flops=flops, peak_flops=peak, peak_type=peak_type, mfu=mfu
    )


def _sum_flops_by_type(instructions: StepInstructions) -> dict[str, float]:
    """Operations of all ranks by the type they are computed in."""
    lowered = instructions.lowered[0]  # all programs refer to the same calls
    per_call = np.zeros(len(lowered.calls))
    for rows, calls in lowered.by_family():
        per_call[rows] = count_flops(calls)
    launches = np.zeros(len(per_call))
    for schedule, ranks in zip(instructions.schedules, instructions.ranks_of, strict=True):
        made = schedule.call[schedule.code == Code.LAUNCH]
        launches += len(ranks) * np.bincount(made, minlength=len(per_call))
    sums: dict[str, float] = {}
    for call, flops in zip(lowered.calls, (per_call * launches).tolist(), strict=True):
        if flops:
            sums[call.compute] = sums.get(call.compute, 0.0) + flops
    return sums
