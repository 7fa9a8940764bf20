"""What a predicted step of a large Transformer is."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from traincast.hardware.platform import Platform
from traincast.models.transformers.description import Transformer
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.step import Parts
from traincast.simulator.prediction.document import prediction_document
from traincast.utils.display.text import milliseconds
from traincast.utils.quantiles import Z90
from traincast.utils.results import Records, Result


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class TrainingPrediction(Result):
    """One step of a Transformer under a layout. Times are seconds; `interval` is a 90 % interval of `iteration`.

    `parts` is what the slowest stage's step is made of; `memory` are bytes of the fullest rank by kind, `needed` all
    that its device must hold. `flops` is the arithmetic that MFU counts, `peak_flops` the rate it is divided by.
    """

    model: Transformer
    platform: Platform
    layout: Layout
    host_profile: str
    parts: Parts
    memory: dict[str, float]
    needed: float
    flops: float
    peak_flops: float
    warnings: tuple[str, ...] = ()
    scenario: dict[str, Any] = field(default_factory=dict)

    @property
    def iteration(self) -> float:
        """Seconds of a step."""
        return self.parts.total

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which 90 of 100 steps lie."""
        spread = math.exp(Z90 * self.parts.sigma)
        return self.iteration / spread, self.iteration * spread

    @property
    def device_active(self) -> float:
        """Seconds in which kernels or exposed exchanges run."""
        return self.parts.kernels + sum(self.parts.exposed.values()) + self.parts.optimizer

    @property
    def tokens_per_second(self) -> float:
        """Tokens that one GPU trains a second."""
        return self.layout.global_batch * self.layout.seq_len / self.iteration / self.layout.gpus

    @property
    def mfu(self) -> float:
        """Share of the peak rate that the model's arithmetic uses."""
        return self.flops / self.iteration / self.layout.gpus / self.peak_flops

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's device holds all it must."""
        return self.needed <= self.platform.device.memory_bytes

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain data: the keys of `PredictionDocument`."""
        parts, device, layout = self.parts, self.platform.device, self.layout
        other = parts.kernels - parts.gemm - parts.attention
        kernels = {"gemm": parts.gemm, "attention": parts.attention, "other": other, "optimizer": parts.optimizer}
        return prediction_document({
            "scenario": self.scenario,
            "workload": self.model.name,
            "platform": self.platform.key,
            "device": device.name,
            "clock_mhz": device.clock_mhz,
            "mode": "training",
            "compiled": layout.kernels == "compiled",
            "batch_size": layout.global_batch // layout.gpus or None,
            "global_batch": layout.global_batch,
            "seq_len": layout.seq_len,
            "gpus": layout.gpus,
            "iteration_ms": 1e3 * self.iteration,
            "interval_ms": [1e3 * limit for limit in self.interval],
            "device_active_ms": 1e3 * self.device_active,
            "device_idle_ms": 1e3 * max(0.0, self.iteration - self.device_active),
            "exposed_comm_ms": 1e3 * sum(parts.exposed.values()),
            "per_family": {name: 1e3 * seconds for name, seconds in kernels.items() if seconds > 0},
            "out_of_domain_ms": 1e3 * parts.unknown,
            "memory_gb": {
                "peak": sum(self.memory.values()) / 1e9,
                "needed": self.needed / 1e9,
                **{kind: size / 1e9 for kind, size in self.memory.items()},
            },
            "fits": self.fits,
            "host_profile": self.host_profile,
            "warnings": list(self.warnings),
            "assumptions": [],
            "given_costs": {},
            "samples_per_s": layout.global_batch / self.iteration,
            "tokens_per_s": self.tokens_per_second * layout.gpus,
            "flops": self.flops,
            "mfu": self.mfu,
            "mfu_peak_tflops": layout.gpus * self.peak_flops / 1e12,
            "mfu_peak_type": layout.precision,
            "layout": {**asdict(layout), "stage_layers": list(layout.stage_layers), "dp": layout.dp,
                       "accumulation": layout.accumulation},
            "parts_ms": {name: 1e3 * seconds for name, seconds in self.split()},
        }, missing="the step is put together from the roles of ranks, not from ops")  # fmt: skip

    def headline(self) -> str:
        """Model, platform and layout, then the time of a step with its interval, and what it makes of the device."""
        low, high = (milliseconds(limit) for limit in self.interval)
        peak = f"{self.peak_flops / 1e12:,.0f} TFLOPS"
        where = f"{self.layout.gpus} x {self.platform.device.name}"
        return (
            f"{self.model.name} (training, {self.layout.precision}) on {where}\n"
            f"{self.layout.described()}; {self.layout.global_batch} samples of {self.layout.seq_len} tokens: "
            f"{milliseconds(self.iteration)} ms a step, 90 % interval {low} to {high} ms\n"
            f"{self.tokens_per_second:,.0f} tokens/s a GPU, MFU {self.mfu:.1%} of {peak}"
        )

    def split(self) -> list[tuple[str, float]]:
        """The step by what it waits for, in seconds; together they are the step."""
        parts = self.parts
        names = {"tp": "tensor parallel", "cp": "context parallel", "ep": "expert parallel", "pp": "stages",
                 "dp": "data parallel"}  # fmt: skip
        other = parts.kernels - parts.gemm - parts.attention
        rows = [("matrix products", parts.gemm), ("attention", parts.attention), ("other kernels", other)]
        rows += [(f"exposed: {names[name]}", seconds) for name, seconds in parts.exposed.items()]
        rows += [("pipeline bubble", parts.bubble), ("waiting for the host", parts.waiting)]
        return [row for row in (*rows, ("optimizer", parts.optimizer)) if row[1] > 0]

    def records(self) -> Records:
        """Tables "parts" of the step (ms) and "memory" of the fullest rank (GB)."""
        return {
            "parts": [{"part": name, "ms": 1e3 * seconds} for name, seconds in self.split()],
            "memory": [{"kind": kind, "gb": size / 1e9} for kind, size in self.memory.items()],
        }
