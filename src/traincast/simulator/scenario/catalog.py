"""Built-in models, published programs and platforms as lists with their figures; workloads written as execution
traces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traincast.costs.kernels.families import list_measured_families
from traincast.hardware.platform import Platform, list_platform_keys, load_platform
from traincast.ir.export_traces import export_chakra_et, export_pytorch_et
from traincast.ir.workload import Workload
from traincast.models.catalog import ModelInfo, PublishedProgram, list_models, list_published_programs
from traincast.models.embeddings.documents import BUILTIN_SETS, list_builtin_sizes
from traincast.models.transformers.description import Transformer, count_all_parameters
from traincast.models.transformers.reading import list_built_in_names, load_transformer
from traincast.utils.errors import make_unknown_error
from traincast.utils.results import Records, Result, ResultList, drop_nested_values

if TYPE_CHECKING:
    from traincast.costs.kernels.lower import OpCoverage


RECOMMENDERS, LANGUAGE, CAPTURED = "recommenders", "Transformers, laid out over GPUs", "Transformers, captured"
VISION, PROGRAMS, TABLES = "vision (CNNs)", "published programs", "embedding tables (shard, predict with a plan)"
GROUPS = (RECOMMENDERS, LANGUAGE, CAPTURED, VISION, PROGRAMS, TABLES)
"""Groups of what is built in, in the order of lists."""
_RECOMMENDERS = ("hstu", "onetrans", "din", "deepfm", "wide-deep", "ncf")


@dataclass(frozen=True)
class BuiltInModel:
    """A built-in model: what the catalog says of it, and what its default training step holds."""

    info: ModelInfo
    group: str = ""

    @cached_property
    def workload(self) -> Workload:
        """One training step at the model's default size."""
        from traincast.simulator.scenario.scenario import Scenario
        from traincast.simulator.scenario.workloads import load_single_gpu_step

        return load_single_gpu_step(Scenario(workload=self.info.name))

    @cached_property
    def coverage(self) -> list[OpCoverage]:
        """Every op of the step by name: how often it occurs, how many kernels it launches, whether they are known."""
        from traincast.costs.kernels.lower import list_op_coverage
        from traincast.costs.kernels.registry import make_lowering_context

        return list_op_coverage(self.workload.programs[0], make_lowering_context(self.workload))

    def to_dict(self) -> dict[str, Any]:
        """Sizes and choices as plain data."""
        return {
            "group": self.group,
            "model": self.info.name,
            "description": self.info.description,
            "parameters": self.info.parameters,
            "batch_size": self.info.batch_size or None,
            "seq_len": self.info.seq_len or None,
            "ops": self.info.ops or None,
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
        """How every op of every captured model and published program is lowered to kernels."""
        captured = [model for model in self if model.group not in (LANGUAGE, TABLES)]
        return CoverageList([(model.info.name, op) for model in captured for op in model.coverage])

    def select(self, text: str) -> ModelList:
        """The models whose name, group or description has a text in it, whatever its case."""
        wanted = text.lower()
        words = [(model, f"{model.info.name} {model.group} {model.info.description}".lower()) for model in self]
        return ModelList([model for model, known in words if wanted in known])


class CoverageList(ResultList["tuple[str, OpCoverage]"]):
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
    """Everything that has a name: captured models, described Transformers, published programs, sets of tables. Steps
    are read or written when they are looked at."""
    models = [BuiltInModel(info, _find_group(info)) for info in list_models()]
    described = [_make_described_info(load_transformer(name)) for name in list_built_in_names()]
    programs = [_make_published_info(program) for program in list_published_programs().values()]
    models += [BuiltInModel(info, LANGUAGE) for info in described]
    models += [BuiltInModel(info, PROGRAMS) for info in programs]
    models += [BuiltInModel(_make_table_info(name), TABLES) for name in BUILTIN_SETS]
    return ModelList(sorted(models, key=lambda model: GROUPS.index(model.group)))


def _find_group(info: ModelInfo) -> str:
    """Recommenders have tables, Transformers tokens, and what has neither sees images."""
    if info.axis == "embedding" or info.name in _RECOMMENDERS:
        return RECOMMENDERS
    return CAPTURED if info.seq_len else VISION


def _make_described_info(model: Transformer) -> ModelInfo:
    experts = f", {model.experts.count} experts" if model.experts is not None else ""
    return ModelInfo(
        name=model.name, description=f"{model.layers} layers of {model.hidden}{experts}", batch_size=1,
        seq_len=model.seq_len, parameters=count_all_parameters(model), ops=0, axis="", choices=(),
        optimizers=("adam",), files=(),
    )  # fmt: skip


def _make_table_info(name: str) -> ModelInfo:
    sizes = list_builtin_sizes(name)
    return ModelInfo(
        name=name, description=f"{len(sizes)} embedding tables", batch_size=0, seq_len=0,
        parameters=sum(rows * dim for rows, dim in sizes), ops=0, axis="", choices=(), optimizers=(),
        files=(),
    )  # fmt: skip


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


class PlatformList(ResultList[Platform]):
    """Built-in GPUs and nodes."""

    __slots__ = ()

    def to_dict(self) -> list[dict[str, Any]]:
        """One row per platform; keys say their units."""
        return [_make_platform_row(platform) for platform in self]

    def headline(self) -> str:
        """How many there are, and their names."""
        return f"{len(self)} built-in platforms\n" + ", ".join(platform.key for platform in self)

    def select(self, text: str) -> PlatformList:
        """The platforms with a text in their key or in the name of their device, whatever its case."""
        wanted = text.lower()
        return PlatformList([one for one in self if wanted in f"{one.key} {one.device.name}".lower()])

    def records(self) -> Records:
        """Table "platforms": one row per platform, with a column per peak rate (TFLOPS)."""
        peaks = [{f"{name}_tflops": rate for name, rate in row["peak_tflops"].items()} for row in self.to_dict()]
        return {"platforms": [drop_nested_values(row) | peak for row, peak in zip(self.to_dict(), peaks, strict=True)]}


def list_built_in_platforms() -> PlatformList:
    """Every built-in GPU and node."""
    return PlatformList([load_platform(key) for key in list_platform_keys()])


def _make_platform_row(platform: Platform) -> dict[str, Any]:
    device = platform.device
    return {
        "platform": platform.key,
        "device": device.name,
        "arch": device.arch,
        "gpus_per_node": platform.gpus_per_node,
        "memory_gb": device.memory_bytes / 1e9,
        "dram_bandwidth_gbs": device.dram_bandwidth / 1e9,
        "peak_tflops": {name: rate / 1e12 for name, rate in device.peak_flops.items()},
        "num_sms": device.num_sms,
        "boost_clock_mhz": device.boost_clock_mhz,
        "sustained_clock_mhz": device.sustained_clock_mhz,
        "l2_mb": device.l2_bytes / 1e6,
        "source": device.source,
        "measured": list_measured_families(device.key),
    }


_WRITERS = {"pytorch": export_pytorch_et, "chakra": export_chakra_et}
FORMATS = tuple(_WRITERS)


@dataclass(frozen=True, repr=False)
class Exported(Result):
    """An execution trace that was written: the workload's name, the format, the file and how many ops it has."""

    workload: str
    format: str
    file: Path
    ops: int

    def to_dict(self) -> dict[str, Any]:
        """What was written as plain data."""
        return {"workload": self.workload, "format": self.format, "file": str(self.file), "ops": self.ops}

    def headline(self) -> str:
        """File, size and format in one line."""
        return f"{self.file}: {self.ops} ops of {self.workload} as a {self.format} execution trace"


def export_workload(workload: Workload, out: Path, to: str) -> Exported:
    """Writes the program of rank 0 in a format of `FORMATS`."""
    if to not in _WRITERS:
        raise make_unknown_error("format", to, FORMATS, f"Choose from {', '.join(FORMATS)}.")
    _WRITERS[to](workload, 0, out)
    return Exported(workload.name, to, out, workload.programs[0].num_ops)
