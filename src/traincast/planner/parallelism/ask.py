"""A step of a large Transformer asked for by names: the model, the platform, the layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from traincast.costs.host.profile import HostProfile, load_host_profile
from traincast.hardware.links import with_links
from traincast.hardware.platform import Platform, load_platform
from traincast.models.transformers.description import Transformer
from traincast.models.transformers.reading import load_transformer
from traincast.planner.parallelism.candidates import Wanted
from traincast.planner.parallelism.plan import Plan, make_plan
from traincast.simulator.parallelism.layout import MAX_GPUS, PRECISIONS, Layout
from traincast.simulator.parallelism.predict import predict_training
from traincast.simulator.parallelism.result import TrainingPrediction
from traincast.utils.errors import TraincastError
from traincast.utils.parallel.where import SEARCH, Workers


@dataclass(frozen=True, kw_only=True)
class TrainingQuestion:
    """Which Transformer (built in, described in a file, or itself) is trained where, and how it is laid out."""

    model: str | Transformer
    on: str | Platform
    layout: Layout
    clock_mhz: float | None = None
    host: str | HostProfile | None = None
    roofline_only: bool = False

    def platform(self) -> Platform:
        """The platform asked for, its clock locked where one is given; a single GPU gets the links usual for it."""
        platform = load_platform(self.on) if isinstance(self.on, str) else self.on
        return with_links(platform if self.clock_mhz is None else platform.at_clock(self.clock_mhz))

    def transformer(self) -> Transformer:
        """The model asked for."""
        return load_transformer(self.model) if isinstance(self.model, str) else self.model


def answer_training(question: TrainingQuestion) -> TrainingPrediction:
    """The answer, which says among its warnings what was assumed."""
    host = load_host_profile(question.host) if isinstance(question.host, str) else question.host
    return predict_training(
        question.transformer(), question.platform(), question.layout, host=host, roofline_only=question.roofline_only
    )


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """Which Transformer is to be trained on how many GPUs, with how many samples or tokens a step.

    `price` is dollars of one GPU for an hour, `tokens` those of the whole training; `workers` predict the layouts.
    """

    model: str | Transformer
    on: str | Platform
    gpus: int
    global_batch: int | None = None
    tokens_per_step: int | None = None
    seq_len: int | None = None
    dtype: str = "bf16"
    price: float | None = None
    tokens: float | None = None
    workers: Workers = SEARCH

    def checked(self) -> None:
        """Refuses numbers that make no sense, each by its name."""
        whole = {"gpus": self.gpus, "global-batch": self.global_batch, "tokens-per-step": self.tokens_per_step,
                 "seq-len": self.seq_len}  # fmt: skip
        for name, value in whole.items():
            if value is not None and not 1 <= value <= (MAX_GPUS if name == "gpus" else 1 << 40):
                raise TraincastError(f"{name} {value} is out of range; give a whole number above 0")
        for name, amount in (("price", self.price), ("tokens", self.tokens)):
            if amount is not None and not 0 < amount < 1e18:
                raise TraincastError(f"{name} {amount:g} is out of range; give a number above 0")
        if self.global_batch is not None and self.tokens_per_step is not None:
            raise TraincastError("global-batch and tokens-per-step both say how large a step is; give one of them")
        if self.dtype not in PRECISIONS:
            raise TraincastError(f"unknown dtype '{self.dtype}'; choose from {', '.join(PRECISIONS)}")


def answer_plan(question: PlanQuestion, progress: Callable[[float], None]) -> Plan:
    """The best layouts."""
    question.checked()
    asked = TrainingQuestion(model=question.model, on=question.on, layout=Layout(gpus=question.gpus))
    model, platform = asked.transformer(), asked.platform()
    seq_len = question.seq_len or model.seq_len
    samples = question.global_batch or 2 * question.gpus
    if question.tokens_per_step is not None:
        samples = max(1, round(question.tokens_per_step / seq_len))
    wanted = Wanted(
        gpus=question.gpus, global_batch=samples, seq_len=seq_len, precision=question.dtype,
        per_node=min(platform.gpus_per_node, 8),
    )  # fmt: skip
    return make_plan(
        model, platform, wanted, price=question.price, tokens=question.tokens, workers=question.workers,
        progress=progress,
    )  # fmt: skip
