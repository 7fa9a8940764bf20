"""A prediction asked for by names and files: what was asked as one value, and its answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from traincast.costs.host.profile import HostProfile, load_host_profile
from traincast.hardware.links import with_links
from traincast.hardware.platform import Platform, load_platform
from traincast.ir.given import OpCost, joined
from traincast.ir.workload import COVERS, Workload
from traincast.simulator.prediction.prediction import predict_step
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.scenario.loading import Loader
from traincast.simulator.scenario.variant import Variant
from traincast.simulator.scenario.workloads import Source, load_on, published_program
from traincast.simulator.uneven import Unevenness


@dataclass(frozen=True, kw_only=True)
class Question:
    """Which step is to be predicted, and where.

    `on` is a platform, its name or its file. `gpus` None is one, or as many as the workload was captured on.
    `clock_mhz` locks the SM clock. `host` is a host profile or its name (None: the platform's). `roofline_only`
    takes rooflines instead of the fitted kernel models. `uneven` lets ranks differ by chance. `program` names the
    program that trains a recommender (`questions.programs`), `cuda_graph` replays the step as CUDA graphs, `loader`
    says how batches come. `costs` are those of ops that their authors give, before the workload's own.
    """

    workload: Source
    on: str | Platform
    variant: Variant = field(default_factory=Variant)
    gpus: int | None = None
    clock_mhz: float | None = None
    host: str | HostProfile | None = None
    roofline_only: bool = False
    uneven: Unevenness | None = None
    program: str | None = None
    cuda_graph: bool = False
    loader: Loader | None = None
    costs: tuple[OpCost, ...] = ()

    def platform(self) -> Platform:
        """The platform asked for, its clock locked where one is given."""
        platform = load_platform(self.on) if isinstance(self.on, str) else self.on
        return platform if self.clock_mhz is None else platform.at_clock(self.clock_mhz)

    def host_profile(self) -> HostProfile | None:
        """The host asked for, or the one that a published program runs on; None is the platform's."""
        if isinstance(self.host, str):
            return load_host_profile(self.host)
        program = published_program(self.workload) if self.host is None else None
        if program is None:
            return self.host
        from traincast.simulator.scenario.published import published_host

        return published_host(program)


def predict(question: Question, *, always_sharded: bool = False) -> Prediction:
    """The answer, which says among its warnings what was assumed; `always_sharded` as in `load_on`."""
    alone = question.platform()
    platform = with_links(alone)
    step, shards = load_on(
        question.workload, platform, question.variant, gpus=question.gpus, always_sharded=always_sharded,
        program=question.program,
    )  # fmt: skip
    if question.costs:
        step = replace(step, costs=joined(step.costs, question.costs))
    step, graphs = _as_replayed(step, question)
    many = len(step.ranks) > 1
    answer = predict_step(
        step,
        platform if many else alone,
        tf32=question.variant.dtype == "tf32",
        host=question.host_profile(),
        roofline_only=question.roofline_only,
        uneven=question.uneven,
        late=0.0 if question.loader is None else question.loader.late(step),
    )
    if question.loader is not None:
        answer = question.loader.limited(answer)
    notes = (
        missing_units(question.variant.dtype, alone),
        shards,
        graphs,
        platform.assumed if many else "",
        *step_notes(step),
    )
    assumed = tuple(said for said in notes if said)
    return replace(answer, warnings=(*answer.warnings, *assumed)) if assumed else answer


def step_notes(step: Workload) -> tuple[str, ...]:
    """What is to be said of any answer about a step: how it was compiled, what its trace covers, what was assumed."""
    compiled, covers = step.meta.get("compiled"), step.meta.get(COVERS)
    return (
        *([compiled] if compiled else []),
        *([f"the traced step covers {covers}"] if covers else []),
        *(f"assumed: {text}" for text in step.assumptions),
        *_given(step),
    )


def _given(step: Workload) -> tuple[str, ...]:
    """Which ops of the step cost what their author says."""
    present = {signature.name for program in step.programs for signature in program.symbolic}
    used = [cost for cost in step.costs if cost.op in present]
    return tuple(
        f"{cost.op} costs as given: {', '.join(f'{part} {text}' for part, text in cost.as_text().items())}"
        for cost in used
    )


def _as_replayed(step: Workload, question: Question) -> tuple[Workload, str]:
    """The step with its inputs as the loader has them, as graphs where they are asked for, and what is said of that."""
    if question.loader is not None:
        step = question.loader.feeding(step)
    if not question.cuda_graph:
        return step, ""
    from traincast.transforms.cuda_graph import graphed_step

    return graphed_step(step)


def missing_units(dtype: str, platform: Platform) -> str:
    """What is assumed of a device that has no units for the type asked for; "" where it has them.

    TF32 is then fp32: the same four bytes, the same cores. In a 16-bit type tensors keep their two bytes, and products
    run at the rate of fp32, into which the cores widen their operands (convolutions without Winograd, as in any 16-bit
    type).
    """
    if dtype in platform.device.peak_flops:
        return ""
    if dtype == "tf32":
        return f"{platform.key} has no TF32 units; it computes in fp32"
    return f"{platform.key} has no {dtype} units; products are taken to run at its fp32 rate with two bytes per element"
