"""`with traincast.profile() as p:` around any training loop: a few steps are traced, and the verdict follows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from traincast.utils.display.text import count_of, format_duration
from traincast.utils.errors import TraincastError

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
        from traincast.app.report.measured_verdict import state_traces
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
