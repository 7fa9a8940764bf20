"""What a predicted step of a large Transformer is."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from traincast.hardware.platform import Platform
from traincast.models.transformers.description import Transformer
from traincast.simulator.parallelism.layout import Layout
from traincast.simulator.parallelism.step import Parts
from traincast.simulator.prediction.result import Prediction
from traincast.utils.display.text import milliseconds
from traincast.utils.quantiles import Z90
from traincast.utils.results import Records, Result

_KINDS = {
    "parameter": "parameters", "gradient": "gradients", "optimizer_state": "optimizer", "activation": "activations",
}  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class TrainingPrediction(Result):
    """One step of a Transformer under a layout. Times are seconds; `interval` is a 90 % interval of `iteration`.

    `parts` is what the slowest stage's step is made of; `memory` are bytes of the fullest rank by kind, `needed` all
    that its device must hold. `prediction` is the simulated step these figures are from. `flops` is the
    arithmetic that MFU counts, `peak_flops` the rate it is divided by.
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
    prediction: Prediction
    warnings: tuple[str, ...] = ()

    @staticmethod
    def of(model: Transformer, answer: Prediction) -> TrainingPrediction:
        """The figures of a simulated step."""
        figures = answer.parallel
        assert figures is not None
        update = answer.by_phase.get("optimizer", 0.0)
        shown = sum(figures.exposed.values())
        parts = Parts(
            total=answer.iteration,
            sigma=math.log(answer.interval[1] / answer.iteration) / Z90,
            kernels=figures.compute - update,
            exposed=figures.exposed,
            bubble=figures.bubble,
            waiting=max(0.0, answer.iteration - figures.compute - shown - figures.bubble),
            optimizer=update,
            gemm=answer.by_family.get("gemm", 0.0),
            attention=answer.by_family.get("attention", 0.0),
            unknown=sum(item.seconds for item in answer.outside if not item.op.startswith("c10d::")),
        )
        return TrainingPrediction(
            model=model,
            platform=answer.platform,
            layout=figures.layout,
            host_profile=answer.host_profile,
            parts=parts,
            memory={_KINDS.get(kind, kind): float(size) for kind, size in answer.memory.by_kind.items()},
            needed=figures.needed,
            flops=figures.flops,
            peak_flops=figures.peak_flops,
            warnings=answer.warnings,
            prediction=answer,
        )

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
        """The answer as plain data; keys are stable and say their units."""
        parts, device = self.parts, self.platform.device
        return {
            "workload": self.model.name,
            "platform": self.platform.key,
            "device": device.name,
            "clock_mhz": device.clock_mhz,
            "mode": "training",
            "compiled": self.layout.kernels == "compiled",
            "batch_size": self.layout.global_batch // self.layout.gpus or None,
            "global_batch": self.layout.global_batch,
            "seq_len": self.layout.seq_len,
            "gpus": self.layout.gpus,
            "layout": {**asdict(self.layout), "dp": self.layout.dp, "accumulation": self.layout.accumulation},
            "iteration_ms": 1e3 * self.iteration,
            "interval_ms": [1e3 * limit for limit in self.interval],
            "device_active_ms": 1e3 * self.device_active,
            "device_idle_ms": 1e3 * max(0.0, self.iteration - self.device_active),
            "kernels_ms": 1e3 * parts.kernels,
            "gemm_ms": 1e3 * parts.gemm,
            "attention_ms": 1e3 * parts.attention,
            "exposed_comm_ms": 1e3 * sum(parts.exposed.values()),
            "exposed_ms": {name: 1e3 * seconds for name, seconds in parts.exposed.items()},
            "bubble_ms": 1e3 * parts.bubble,
            "host_wait_ms": 1e3 * parts.waiting,
            "optimizer_ms": 1e3 * parts.optimizer,
            "out_of_domain_ms": 1e3 * parts.unknown,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "mfu": self.mfu,
            "mfu_peak_tflops": self.peak_flops / 1e12,
            "memory_gb": {
                "peak": sum(self.memory.values()) / 1e9,
                "needed": self.needed / 1e9,
                **{kind: size / 1e9 for kind, size in self.memory.items()},
            },
            "fits": self.fits,
            "host_profile": self.host_profile,
            "warnings": list(self.warnings),
        }

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
