"""Training loops watched: a few steps traced by `traincast.profile()`, and measured steps held against their
prediction."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from types import TracebackType
from typing import TYPE_CHECKING, Any

from traincast.simulator.prediction.result import Prediction, rank_bounds, suggest_remedy
from traincast.utils.display.text import count_of, format_duration, format_interval, wrap_words
from traincast.utils.errors import TraincastError
from traincast.utils.results import Records, Result

if TYPE_CHECKING:
    from traincast.traces.replay.results import RankReport, TraceReport


_WARM_UP = 2  # steps before the traced ones: the first has allocations, the second a profiler that wakes up


class Profiled:
    """Traces `steps` steps of the loop in the block with torch.profiler; `report` is what `traincast.trace` says of
    them, `verdict` its sentences. Optimizer steps are counted by themselves; call `step()` where there is none."""

    def __init__(
        self, steps: int, out: str | Path | None, on: str | None, say: Callable[[str], None], modules: Any
    ) -> None:
        if steps < 1:
            raise TraincastError(f"`steps` {steps}: give at least 1")
        if modules is not None and not hasattr(modules, "named_modules"):
            raise TraincastError(f"`modules` is a {type(modules).__name__}: give the model, an nn.Module")
        self.steps, self.on, self.say, self.modules = steps, on, say, modules
        self.out = None if out is None else Path(out)
        self.report: TraceReport | None = None
        self.verdict = ""
        self._trace: Path | None = None
        self._host: dict[str, float] = {}
        self._seen, self._explicit = 0, False
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Profiled:
        try:
            from torch import cuda, profiler
            from torch.optim.optimizer import register_optimizer_step_post_hook
        except ImportError:
            raise TraincastError("traincast.profile needs torch: pip install 'traincast[capture]'") from None
        if self.out is None:
            self._folder = tempfile.TemporaryDirectory(prefix="traincast-")
        kinds = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if cuda.is_available() else [])]
        plan = profiler.schedule(wait=0, warmup=_WARM_UP, active=self.steps, repeat=1)
        self._open = ExitStack()
        self._profiler = self._open.enter_context(
            profiler.profile(
                activities=kinds, schedule=plan, on_trace_ready=self._keep, record_shapes=True, with_stack=False
            )
        )
        self._optimizer: int | None = None
        if self.modules is not None:
            _name_modules(self.modules, self._open)
        self._hook = register_optimizer_step_post_hook(self._note_optimizer)
        return self

    def step(self) -> None:
        """A step has ended."""
        self._explicit = True
        self._advance()

    def _note_optimizer(self, optimizer: Any, *_: Any) -> None:
        """Of several optimizers the first one counts steps."""
        self._optimizer = id(optimizer) if self._optimizer is None else self._optimizer
        if not self._explicit and id(optimizer) == self._optimizer:
            self._advance()

    def _advance(self) -> None:
        self._seen += 1
        if self._trace is None:
            self._profiler.step()

    def _keep(self, profiler: Any) -> None:
        path = self.out or Path(self._folder.name if self._folder else ".") / "steps.json"
        profiler.export_chrome_trace(str(path))
        self._trace = path
        self._host = {row.key: float(row.self_cpu_time_total) for row in profiler.key_averages()}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        self._open.__exit__(kind, error, trace)
        try:
            if kind is None:
                self._explain()
        finally:
            if self._folder is not None:
                self._folder.cleanup()

    def _explain(self) -> None:
        """The verdict of the trace that was kept."""
        needed = _WARM_UP + self.steps
        if self._seen < needed:
            raise TraincastError(f"the loop ended after {self._seen} of {needed} steps ({_WARM_UP} to warm up, "
                                 f"{self.steps} to trace); run more, or give fewer `steps`")  # fmt: skip
        assert self._trace is not None
        from traincast.app.report.compared import state_traces
        from traincast.traces.replay.analysis import analyse_trace_files

        self.report = analyse_trace_files([self._trace], on=self.on, host=None, host_scale=None, twice=())
        rank = self.report.ranks[0]
        self.verdict = "\n".join(state_traces(self.report)) if len(rank.linked.device) else self._state_host(rank)
        self.say(self.verdict)

    def _state_host(self, rank: RankReport) -> str:
        """The verdict of a loop that launched no kernel: it ran on the CPU."""
        ops = {name: spent for name, spent in self._host.items() if not name.startswith("ProfilerStep")}
        name, spent = max(ops.items(), key=lambda pair: pair[1], default=("nothing", 0.0))
        step = f"{format_duration(rank.median_step.step)} per step, median of {count_of(len(rank.steps), 'step')}"
        share = spent / (sum(ops.values()) or 1.0)
        return f"{step}, on the host alone: no GPU kernel was recorded; {name} has {share:.0%} of the time of ops."


def _name_modules(model: Any, until: ExitStack) -> None:
    """Annotates every forward pass with its module's path, as predictions call it: `Bert.layers.0.mlp`."""
    from torch.autograd.profiler import record_function

    running: list[Any] = []

    def end(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    for name, module in model.named_modules():
        path = ".".join(filter(None, (type(model).__name__, name)))

        def begin(*_: Any, path: str = path) -> None:
            running.append(record_function(path))
            running[-1].__enter__()

        until.callback(module.register_forward_pre_hook(begin).remove)
        until.callback(module.register_forward_hook(end, always_call=True).remove)


def profile(
    steps: int = 3,
    *,
    out: str | Path | None = None,
    on: str | None = None,
    modules: Any = None,
    say: Callable[[str], None] = print,
) -> Profiled:
    """Traces `steps` steps of the training loop inside the block, after two to warm up, and says where their time goes:

        with traincast.profile() as p:
            for batch in loader:
                train(batch)

    `out` (.json) keeps the trace, which Perfetto and `traincast trace` read; `on` names the GPU to predict the step on
    as well; `modules` is a model whose modules are to be named in the trace, so that a comparison with its
    prediction tells modules apart; `say` receives the verdict. On a machine without a GPU the host alone is traced.
    Needs torch."""
    return Profiled(steps, out, on, say, modules)


_BOX = 84  # characters of a line inside the frame
WARM_UP = 3
"""Steps at the beginning that do not count: allocations, autotuning, compilation."""


@dataclass(frozen=True, kw_only=True, repr=False)
class WatchedSteps(Result):
    """Steps of a job as they were measured (`seconds` of each, without the first ones), and what was predicted (None:
    nothing was)."""

    seconds: tuple[float, ...]
    prediction: Prediction | None = None

    @property
    def measured(self) -> float:
        """The median step, seconds."""
        return median(self.seconds)

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return None if self.prediction is None else self.measured / (self.prediction.iteration or 1.0)

    @property
    def mfu(self) -> float | None:
        """The share of the GPUs' peak that the measured step uses; None without a prediction, or without a peak."""
        if self.prediction is None or not self.prediction.throughput.mfu:
            return None
        return self.prediction.throughput.mfu * self.prediction.iteration / self.measured

    @property
    def verdict(self) -> str:
        """Whether the step is as long as it should be."""
        p, ratio = self.prediction, self.ratio
        if p is None or ratio is None:
            return "nothing was predicted to compare it with"
        low, high = p.interval
        if low <= self.measured <= high:
            return "as predicted: inside the 90 % interval"
        if self.measured < low:
            return "faster than predicted: is it the step that was described (batch, dtype, layers)?"
        return f"{format_duration(self.measured - p.iteration)} longer than predicted: " + (
            "profile it ('with traincast.profile() as p:'), something slows it that the prediction does not know"
        )

    def headline(self) -> str:
        """The measured step, the prediction, the verdict, and what would help."""
        low, high = _find_spread(self.seconds)
        count = count_of(len(self.seconds), "step")
        spread = f", {format_interval((low, high))} for 8 of 10" if len(self.seconds) > 1 else ""
        lines = [f"measured  {format_duration(self.measured)} per step (median of {count}{spread})"]
        p = self.prediction
        if p is not None:
            interval = f"90 % interval {format_interval(p.interval)}"
            lines.append(f"predicted {format_duration(p.iteration)} per step ({interval}); {p.trust.word}")
            lines += [f"MFU       {self.mfu:.1%} (predicted {p.throughput.mfu:.1%})"] if self.mfu else []
            lines.append("bound by  " + ", ".join(f"{name} {share:.0%}" for name, share in rank_bounds(p)))
        lines.append(f"verdict   {self.verdict}")
        remedy = suggest_remedy(p) if p is not None else ""
        return "\n".join([*lines, *([f"worth trying: {remedy.replace('`', '')}"] if remedy else [])])

    def box(self) -> str:
        """The same in a frame."""
        lines = ["Traincast"]
        lines += [row for line in self.headline().split("\n") for row in wrap_words(line, _BOX, hanging=" " * 10)]
        width = max(map(len, lines))
        rows = [f"│ {line.ljust(width)} │" for line in lines]
        return "\n".join([f"┌{'─' * (width + 2)}┐", *rows, f"└{'─' * (width + 2)}┘"])

    def to_dict(self) -> dict[str, Any]:
        """The figures; keys say their units."""
        p, (low, high) = self.prediction, _find_spread(self.seconds)
        return {
            "steps": len(self.seconds),
            "measured_ms": 1e3 * self.measured,
            "spread_ms": [1e3 * low, 1e3 * high],
            "predicted_ms": None if p is None else 1e3 * p.iteration,
            "interval_ms": None if p is None else [1e3 * limit for limit in p.interval],
            "measured_over_predicted": self.ratio,
            "mfu": self.mfu,
            "verdict": self.verdict,
        }

    def records(self) -> Records:
        """Table "steps": milliseconds of each."""
        return {"steps": [{"step": number, "ms": 1e3 * s} for number, s in enumerate(self.seconds)]}


@dataclass
class StepWatch:
    """Listens to a loop: `note_step` at the end of every optimizer step. Steps are the times between those calls, which
    in the long run is what the device needs however far the host runs ahead."""

    prediction: Prediction | None = None
    warm_up: int = WARM_UP
    _last: float | None = None
    _seconds: list[float] = field(default_factory=list)

    def note_step(self) -> dict[str, float]:
        """A step has ended; gives figures to log (milliseconds and shares), none during the first steps."""
        now = time.perf_counter()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now
        if len(self._seconds) <= self.warm_up:
            return {}
        last = self._seconds[-1]
        figures = {"traincast/step_ms": 1e3 * last}
        if self.prediction is not None:
            figures["traincast/predicted_ms"] = 1e3 * self.prediction.iteration
            figures["traincast/measured_over_predicted"] = last / (self.prediction.iteration or 1.0)
            if mfu := self.prediction.throughput.mfu:
                figures["traincast/mfu"] = mfu * self.prediction.iteration / last
        return figures

    def pause(self) -> None:
        """What was done since the last step is none (an evaluation, a checkpoint): its time does not count."""
        if self._last is not None:
            self._last = time.perf_counter()

    def finish(self) -> WatchedSteps | None:
        """What was measured; None where there were too few steps to say anything."""
        seconds = tuple(self._seconds[self.warm_up :])
        return WatchedSteps(seconds=seconds, prediction=self.prediction) if seconds else None


def log_figures(figures: Mapping[str, float], step: int) -> None:
    """Hands figures to trackers that the job uses already: wandb with a run, mlflow with an active one."""
    wandb, mlflow = sys.modules.get("wandb"), sys.modules.get("mlflow")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.log(dict(figures), step=step, commit=False)
    if mlflow is not None and mlflow.active_run() is not None:
        mlflow.log_metrics({name.replace("/", "."): value for name, value in figures.items()}, step=step)


def _find_spread(seconds: tuple[float, ...]) -> tuple[float, float]:
    """Between which two times eight of ten steps lie."""
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    tenths = quantiles(seconds, n=10, method="inclusive")
    return tenths[0], tenths[-1]
