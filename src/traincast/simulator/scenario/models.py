"""Built-in models and published programs as a list: sizes, ops and kernels of a step, and how every op is lowered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from traincast.costs.kernels.lowered import OpCoverage, list_op_coverage
from traincast.costs.kernels.registry import make_lowering_context
from traincast.ir.workload import Workload
from traincast.models.catalog import ModelInfo, list_models
from traincast.models.published import PublishedProgram, list_published_programs
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import load_single_gpu_step
from traincast.utils.results import Records, ResultList, drop_nested_values


@dataclass(frozen=True)
class BuiltInModel:
    """A built-in model: what the catalog says of it, and what its default training step holds."""

    info: ModelInfo

    @cached_property
    def workload(self) -> Workload:
        """One training step at the model's default size."""
        return load_single_gpu_step(Scenario(workload=self.info.name))

    @cached_property
    def coverage(self) -> list[OpCoverage]:
        """Every op of the step by name: how often it occurs, how many kernels it launches, whether they are known."""
        return list_op_coverage(self.workload.programs[0], make_lowering_context(self.workload))

    def to_dict(self) -> dict[str, Any]:
        """Sizes and choices as plain data."""
        return {
            "model": self.info.name,
            "description": self.info.description,
            "parameters": self.info.parameters,
            "batch_size": self.workload.batch_size,
            "seq_len": self.workload.seq_len or None,
            "ops": self.workload.programs[0].num_ops,
            "kernels": sum(op.launches for op in self.coverage),
            self.info.axis or "variants": list(self.info.choices),
            "optimizers": list(self.info.optimizers),
        }


class ModelList(ResultList[BuiltInModel]):
    """Every built-in model, in the order of the documentation."""

    __slots__ = ()

    def to_dict(self) -> list[dict[str, Any]]:
        """One row per model."""
        return [model.to_dict() for model in self]

    def headline(self) -> str:
        """How many there are, and their names."""
        return f"{len(self)} built-in models\n" + ", ".join(model.info.name for model in self)

    def records(self) -> Records:
        """Table "models": one row per model."""
        return {"models": [drop_nested_values(row) for row in self.to_dict()]}

    def coverage(self) -> CoverageList:
        """How every op of every model is lowered to kernels."""
        return CoverageList([(model.info.name, op) for model in self for op in model.coverage])


class CoverageList(ResultList[tuple[str, OpCoverage]]):
    """Models and their ops: how often an op occurs, how many kernels it launches, and whether those are known."""

    __slots__ = ()

    def to_dict(self) -> list[dict[str, Any]]:
        """One row per model and op."""
        return [
            {"model": model, "op": op.name, "count": op.count, "kernels": op.launches, "lowered": op.lowered}
            for model, op in self
        ]

    def headline(self) -> str:
        """How many ops there are, and how many are only estimated."""
        estimated = sum(not op.lowered for _, op in self)
        return f"{len(self)} ops of models, {estimated} of them estimated from their bytes and flops"

    def records(self) -> Records:
        """Table "ops": one row per model and op."""
        return {"ops": self.to_dict()}


def list_built_in_models() -> ModelList:
    """The built-in models and the published programs; their steps are read or written when they are looked at."""
    published = [_make_published_info(program) for program in list_published_programs().values()]
    return ModelList([BuiltInModel(info) for info in (*list_models(), *published)])


def _make_published_info(program: PublishedProgram) -> ModelInfo:
    return ModelInfo(
        name=program.name,
        description=program.description,
        batch_size=program.global_batch,
        seq_len=0,
        parameters=program.parameters,
        ops=0,
        axis="dtype",
        choices=program.dtypes,
        optimizers=(program.optimizer,),
        files=(),
    )
