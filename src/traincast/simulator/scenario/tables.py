"""Sets of embedding tables and their plans: read from names and files, and the step that trains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from traincast.ir.workload import Workload
from traincast.models.dlrm.config import DLRM_V2, STUDY_DLRMS
from traincast.models.embeddings.documents import ASSUMED_DIM, lacks_width
from traincast.models.embeddings.read import load_tables
from traincast.models.embeddings.table import ITEM_BYTES, Table, check_tables
from traincast.models.placement.plan import Plan, load_plans, read_plan_from_json
from traincast.models.sharded_dlrm.captured import split_recommender
from traincast.models.sharded_dlrm.dense import Dense
from traincast.models.sharded_dlrm.step import AnyDense, build_sharded_dlrm
from traincast.simulator.scenario.dlrm_file import MAX_LAYERS, read_dlrm, read_sizes
from traincast.simulator.scenario.kinds import find_source_kind
from traincast.simulator.scenario.workloads import PIPELINED, TORCHREC, load_single_gpu_step
from traincast.utils.errors import TraincastError, make_unknown_error
from traincast.utils.files.reading import parse_json, read_document

if TYPE_CHECKING:
    from traincast.hardware.platform import Platform
    from traincast.simulator.scenario.scenario import Scenario

DEFAULT_BATCH = 2048
"""Samples per GPU of a set of tables, which has no batch of its own."""
_STEPS = ("model", "workload", "recommender")  # kinds of which a step of one GPU has tables and all else
_LISTS = ("bottom_mlp", "top_mlp")


def read_plan(plan: str) -> Plan:
    """One plan: of a file, or as JSON text (which begins with a brace)."""
    if plan.lstrip().startswith("{"):
        return read_plan_from_json(parse_json(plan, "`plan`"), "`plan`")
    plans = load_plans(Path(plan))
    if len(plans) > 1:
        raise TraincastError(f"{plan} holds {len(plans)} plans; give a file with one")
    return next(iter(plans.values()))


def retype_tables(tables: tuple[Table, ...], dtype: str | None) -> tuple[Table, ...]:
    """Tables with another type of their elements, where one is given."""
    if dtype is None:
        return tables
    if dtype not in ITEM_BYTES:
        raise TraincastError(f"`dtype={dtype}` is no type of tables; give {', '.join(ITEM_BYTES)}")
    return tuple(replace(table, dtype=dtype) for table in tables)


def load_dense(path: Path) -> Dense:
    """The dense part of a recommender from YAML: fields of `Dense`, or a whole DLRM, whose tables are left out."""
    content = read_document(path)
    if isinstance(content, Mapping) and "rows_per_table" in content:
        return Dense.from_dlrm(read_dlrm(path))
    names = [field.name for field in fields(Dense)]
    if not isinstance(content, Mapping) or not set(_LISTS) <= set(content):
        raise TraincastError(f"{path}: give bottom_mlp and top_mlp, and optionally interaction, loss and optimizer")
    for name in content:
        if name not in names:
            raise make_unknown_error("field", str(name), names, f"{path} may have {', '.join(names)}.")
    try:
        bottom, top = (read_sizes(name, content[name], least=1, most=MAX_LAYERS) for name in _LISTS)
    except TraincastError as error:
        raise TraincastError(f"{path}: {error}") from None
    words = {str(name): str(word) for name, word in content.items() if name not in _LISTS}
    return Dense(bottom_mlp=bottom, top_mlp=top, **words)


def load_recommender(
    source: str | Workload | tuple[Table, ...], batch_size: int | None = None
) -> tuple[tuple[Table, ...], AnyDense | None, list[str]]:
    """The tables of a set, of a DLRM or of a captured step, the dense part of the last two, and what was assumed. Steps
    that can be resized are, to `batch_size` samples."""
    if isinstance(source, tuple):
        return source, None, []
    if isinstance(source, Workload) or find_source_kind(source) in _STEPS:
        from traincast.simulator.scenario.scenario import Scenario

        step = load_single_gpu_step(Scenario(workload=source, batch_size=batch_size))
        return *split_recommender(step), [f"assumed: {text}" for text in step.assumptions]
    path = Path(source)
    written = path.suffix in (".yaml", ".yml", ".json") and path.is_file()
    content = read_document(path) if written else None
    described = isinstance(content, Mapping) and "rows_per_table" in content
    if described or source in STUDY_DLRMS or source == DLRM_V2.name:
        from traincast.models.sharded_dlrm.step import make_dlrm_tables
        from traincast.simulator.scenario.dlrm_file import load_described_dlrm

        config = load_described_dlrm(source)
        return make_dlrm_tables(config), Dense.from_dlrm(config), []
    return load_tables(source), None, [ASSUMED_DIM] if lacks_width(content) else []


def place_captured(step: Workload, plan: Plan, platform: Platform, program: str | None) -> tuple[Workload, str]:
    """A step of one GPU with its tables where a plan has them, and what is to be said about it."""
    if program not in (None, TORCHREC, PIPELINED):
        raise TraincastError(f"a `plan` is for TorchRec's program, not '{program}'; leave out one of them")
    tables, dense = split_recommender(step)
    _check_placed(tables, plan, step.name)
    placed = build_sharded_dlrm(
        dense, tables, plan, batch_size=dense.program.batch_size, pipelined=program == PIPELINED, name=step.name,
        gpus_per_node=min(platform.gpus_per_node, plan.world_size),
    )  # fmt: skip
    return placed, f"{step.name} is sharded under the plan that was given, the rest under DDP"


def _check_placed(tables: Sequence[Table], plan: Plan, name: str) -> None:
    if tuple(table.name for table in tables) != plan.tables:
        raise TraincastError(f"the `plan` places other tables than those of {name}; give one made for it")


def build_tables_step(scenario: Scenario, plan: Plan | None, platform: Platform, gpus: int) -> tuple[Workload, str]:
    """One training step of a set of tables under a plan, and what it leaves out."""
    if plan is None:
        raise TraincastError(
            f"{scenario.workload} is a set of tables, and nothing says where they go; give a `plan`, or let "
            "'traincast shard' find the best"
        )
    loaded, _, assumed = load_recommender(str(scenario.workload))
    tables = check_tables(retype_tables(loaded, scenario.dtype))
    _check_placed(tables, plan, str(scenario.workload))
    dense = None if scenario.dense is None else load_dense(Path(scenario.dense))
    step = build_sharded_dlrm(
        dense, tables, plan, batch_size=scenario.batch_size or DEFAULT_BATCH,
        gpus_per_node=min(platform.gpus_per_node, gpus), name=Path(str(scenario.workload)).stem,
    )  # fmt: skip
    left_out = [] if dense else ["embedding part only: give `dense` for the whole step"]
    return step, "; ".join((*left_out, *assumed))
