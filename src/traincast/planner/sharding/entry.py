"""What the user gives: tables, platform, dense part and plans, from names and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from traincast.hardware.links import add_default_links
from traincast.hardware.platform import load_platform
from traincast.ir.workload import TABLES, Workload
from traincast.models.embeddings.table import Table
from traincast.models.placement.plan import Plan, load_plans
from traincast.models.sharded_dlrm.captured_dense import CapturedDense
from traincast.planner.sharding.result import ShardingResult
from traincast.planner.sharding.search import rank_plans, search
from traincast.planner.sharding.task import Task, make_task
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.tables import DEFAULT_BATCH, load_dense, load_recommender, retype_tables
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import read_document
from traincast.utils.parallel.runner import SEARCH, Workers

TORCHREC = "TorchRec's plan"
"""The name of the plan that TorchRec's planner makes."""
_TORCHREC_SECONDS = 60  # its planner is asked to stop after this long


def shard(
    tables: str | Workload | tuple[Table, ...],
    *,
    on: str,
    gpus: int,
    batch_size: int | None,
    dtype: str | None = None,
    dense: Path | None = None,
    candidates: Path | None = None,
    seed: int = 0,
    time_limit: float | None = None,
    torchrec: bool = True,
    named: str | None = None,
    workers: Workers = SEARCH,
    progress: Callable[[float], None] = lambda _: None,
) -> ShardingResult:
    """Searches for the plan with the fastest step, or ranks the plans of the file `candidates`; `workers` walk them.
    `named` is what `predict` knows the tables by, if it does."""
    if time_limit is not None and not time_limit >= 0:
        raise TraincastError(f"`time_limit={time_limit:g}`; give seconds, 0 or more")
    if seed < 0:
        raise TraincastError(f"`seed={seed}`; give an integer, 0 or more")
    task, assumed = load_task(tables, on=on, gpus=gpus, batch_size=batch_size, dtype=dtype, dense=dense)
    scenario = None if named is None else Scenario(
        workload=named, on=on, gpus=gpus, batch_size=None if isinstance(tables, Workload) else task.batch_size,
        dtype=dtype, dense=None if dense is None else str(dense),  # type: ignore[arg-type]
    )  # fmt: skip
    notes = [*assumed, *describe_assumed_links(task)]
    if candidates is not None:
        result = rank_plans(task, load_candidates(candidates, task), workers=workers, progress=progress)
    else:
        rivals = make_torchrec_rival(task, time_limit, notes) if torchrec else {}
        limit = float("inf") if time_limit is None else time_limit
        result = search(task, seed=seed, time_limit=limit, rivals=rivals, workers=workers, progress=progress)
    return replace(result, notes=(*result.notes, *notes), scenario=scenario)


def load_task(
    tables: str | Workload | tuple[Table, ...], *, on: str, gpus: int, batch_size: int | None, dtype: str | None = None,
    dense: Path | None = None,
) -> tuple[Task, list[str]]:  # fmt: skip
    """A task from what the command line was given, and what was assumed; `dtype` replaces that of all tables, `dense`
    the dense part of a described DLRM. Without a `batch_size` it is that of a captured step, or the default."""
    to_place, described, assumed = load_recommender(tables, batch_size)
    platform = add_default_links(load_platform(on))
    part = described if dense is None else load_dense(dense)
    if isinstance(part, CapturedDense):
        if dtype is not None:
            raise TraincastError("`dtype` is that of described tables; those of a captured step have their own")
        batch_size = part.program.batch_size
    size = DEFAULT_BATCH if batch_size is None else batch_size
    return make_task(retype_tables(to_place, dtype), platform, gpus=gpus, batch_size=size, dense=part), assumed


def describe_assumed_links(task: Task) -> list[str]:
    """What is assumed about the links of several GPUs of a platform that is a device alone, to be said."""
    return [task.platform.assumed] if task.platform.assumed and task.gpus > 1 else []


def load_candidates(path: Path, task: Task) -> dict[str, Plan]:
    """The plans of a file by name: ours, or one of TorchRec's."""
    content = read_document(path)
    ours = isinstance(content, Mapping) and ({"plans"} == set(content) or "world_size" in content)
    if ours or path.suffix != ".json":
        return load_plans(path)
    from traincast.planner.torchrec.plans import load_plan

    return {path.stem: load_plan(path, task.tables, world_size=task.gpus, gpus_per_node=task.gpus_per_node)}


def write_torchrec_plan(tables: str, task: Task, plan: Plan) -> dict[str, Any]:
    """A plan as TorchRec's; modules are those of a TorchRec description or script, else one for all tables."""
    from traincast.planner.torchrec.plans import plan_to_json
    from traincast.planner.torchrec.tables import default_modules

    content = read_document(Path(tables)) if tables.endswith(".json") else None
    if isinstance(task.dense, CapturedDense):
        content = json.loads(task.dense.workload.meta.get(TABLES, "null"))
    modules = default_modules(task.tables)
    if isinstance(content, Mapping) and "modules" in content:
        modules = {table["name"]: path for path, module in content["modules"].items() for table in module["tables"]}
    return plan_to_json(plan, task.tables, gpus_per_node=task.gpus_per_node, modules=modules)


def make_torchrec_rival(task: Task, time_limit: float | None, notes: list[str]) -> dict[str, Plan]:
    """The plan that TorchRec's planner makes, where it is installed; else a note says why there is none."""
    if find_spec("torchrec") is None:
        notes.append(
            "TorchRec is not installed: its plan is not among those compared (pip install 'traincast[torchrec]')"
        )
        return {}
    from traincast.planner.torchrec.planner import plan_with_torchrec

    seconds = _TORCHREC_SECONDS if time_limit is None else max(1, min(_TORCHREC_SECONDS, round(time_limit)))
    try:
        return {TORCHREC: plan_with_torchrec(task, timeout_seconds=seconds)}
    except TraincastError as error:
        notes.append(f"TorchRec's plan is not among those compared: {error}")
        return {}
