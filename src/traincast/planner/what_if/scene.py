"""A scene: everything that decides how long a step takes, as one value that edits change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traincast.hardware.links import with_links
from traincast.hardware.platform import Platform
from traincast.ir.workload import Workload
from traincast.simulator.scenario.predict import Question
from traincast.simulator.scenario.workloads import is_transformer, published_program
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import file_digest

if TYPE_CHECKING:
    from traincast.models.dlrm.config import DlrmConfig
    from traincast.models.placement.plan import Plan
    from traincast.models.transformers.description import Transformer
    from traincast.planner.parallelism.ask import TrainingQuestion
    from traincast.simulator.parallelism.layout import Layout

Structural = Callable[[Workload], tuple[Workload, str]]
"""An edit of the ops of a step: the edited workload, and what is to be said about it ("": nothing)."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One step where it runs. `question` is what 'predict' is asked, its platform resolved.

    `dlrm` and `transformer` are descriptions that take the place of the question's model once they are edited, `layout`
    lays a Transformer over GPUs. `structural` edits the ops of the step in this order, before data parallelism where
    the step is one GPU's; `across` those of all ranks. `bucket_mb` is DDP's, `plan` places tables. `op_speed` is how
    many times as fast the kernels of an op run, by its name. `software` names what the edits change about who launches
    kernels: with another one, errors of a release are not shared. `content` tells files of one name apart.
    """

    question: Question
    layout: Layout | None = None
    dlrm: DlrmConfig | None = None
    transformer: Transformer | None = None
    structural: tuple[tuple[str, Structural], ...] = ()
    across: tuple[tuple[str, Structural], ...] = ()
    bucket_mb: float | None = None
    plan: Plan | None = None
    op_speed: Mapping[str, float] = field(default_factory=dict)
    software: tuple[str, ...] = ()
    content: str = ""

    @property
    def platform(self) -> Platform:
        """Where the step runs."""
        assert isinstance(self.question.on, Platform)
        return self.question.on

    @property
    def name(self) -> str:
        """What the step is called in messages."""
        source = self.question.workload
        return f"workload '{source.name}'" if isinstance(source, Workload) else str(source)

    @property
    def gpus(self) -> int:
        """How many GPUs the step runs on."""
        if self.layout is not None:
            return self.layout.gpus
        source = self.question.workload
        held = len(source.ranks) if isinstance(source, Workload) else 1
        return held if self.question.gpus is None else self.question.gpus

    @property
    def source(self) -> str:
        """What kind of thing the step comes from: "capture", "published", "transformer", "dlrm" or "model"."""
        source = self.question.workload
        if isinstance(source, Workload) or str(source).endswith(".tc"):
            return "capture"
        if published_program(source) is not None:
            return "published"
        if self.layout is not None or is_transformer(source):
            return "transformer"
        from traincast.simulator.scenario.recommenders import described_dlrm  # steps of ops need no descriptions

        return "dlrm" if described_dlrm(str(source)) is not None else "model"

    def of_dlrm(self) -> DlrmConfig:
        """The description of the recommender, or why there is none."""
        if self.dlrm is not None:
            return self.dlrm
        if self.source != "dlrm":
            raise TraincastError(
                f"{self.name} is {_KINDS[self.source]}, not a description of a DLRM; name a built-in DLRM or describe "
                "one in YAML"
            )
        from traincast.simulator.scenario.recommenders import described_dlrm

        config = described_dlrm(str(self.question.workload))
        assert config is not None
        variant = self.question.variant
        if variant.optimizer not in (None, "none"):
            config = replace(config, optimizer=variant.optimizer)
        return config if variant.embedding is None else replace(config, embedding=variant.embedding)

    def of_transformer(self) -> Transformer:
        """The description of the Transformer, or why there is none."""
        if self.transformer is not None:
            return self.transformer
        if self.source != "transformer":
            raise TraincastError(
                f"{self.name} is {_KINDS[self.source]}, not a description of a Transformer; name one such as llama3-8b "
                "or describe it in YAML"
            )
        from traincast.models.transformers.reading import load_transformer

        return load_transformer(str(self.question.workload))

    def asked(self, **changes: Any) -> Scene:
        """The scene with another question."""
        return replace(self, question=replace(self.question, **changes))

    def varied(self, **changes: Any) -> Scene:
        """The scene with another variant of the workload."""
        return self.asked(variant=replace(self.question.variant, **changes))

    def laid_out(self, **changes: Any) -> Scene:
        """The scene with another layout."""
        assert self.layout is not None
        return replace(self, layout=replace(self.layout, **changes))

    def on(self, platform: Platform) -> Scene:
        """The scene elsewhere."""
        return self.asked(on=platform)

    def with_device(self, **changes: Any) -> Scene:
        """The scene with other figures of its GPU."""
        return self.on(replace(self.platform, device=replace(self.platform.device, **changes)))

    def with_topology(self, **changes: Any) -> Scene:
        """The scene with other figures of its links."""
        linked = with_links(self.platform)
        assert linked.topology is not None
        return self.on(replace(linked, topology=replace(linked.topology, **changes)))

    def edited(self, name: str, function: Structural, *, across: bool = False, software: bool = False) -> Scene:
        """The scene with one more edit of its ops."""
        changed = replace(self, software=(*self.software, name)) if software else self
        entry = (name, function)
        if across:
            return replace(changed, across=(*self.across, entry))
        return replace(changed, structural=(*self.structural, entry))


_KINDS = {
    "capture": "a step of ops",
    "published": "one published program",
    "transformer": "a description of a Transformer",
    "dlrm": "a description of a DLRM",
    "model": "a captured model",
}


def scene_of(question: Question, layout: Layout | None = None) -> Scene:
    """The scene of a question, its platform read and its file of ops loaded once."""
    from traincast.ir.file import load_workload

    platform, source = question.platform(), question.workload
    if not isinstance(source, Workload) and str(source).endswith(".tc"):
        source = load_workload(Path(str(source)))
    content = "" if isinstance(source, Workload) else file_digest(source)
    asked = replace(question, workload=source, on=platform, clock_mhz=None, host=question.host_profile())
    return Scene(question=asked, layout=layout, content=content)


def training_question(scene: Scene) -> TrainingQuestion:
    """What is asked of a Transformer that is laid over GPUs."""
    from traincast.planner.parallelism.ask import TrainingQuestion  # only layouts need the room of training

    assert scene.layout is not None
    q = scene.question
    return TrainingQuestion(
        model=scene.of_transformer(), on=scene.platform, layout=scene.layout, host=q.host,
        roofline_only=q.roofline_only,
    )  # fmt: skip
