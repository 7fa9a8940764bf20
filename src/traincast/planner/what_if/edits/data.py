"""What feeds a step and divides it: the input pipeline, the plan of tables, the program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, get_args

from traincast.hardware.links import add_default_links
from traincast.hardware.platform import Platform
from traincast.planner.what_if.edits.registry import Trial, Value, register_edit
from traincast.planner.what_if.edits.sizes import get_batch_size
from traincast.simulator.scenario.predict import make_loader
from traincast.simulator.scenario.programs import TORCHREC
from traincast.simulator.scenario.resolved import Resolved
from traincast.simulator.scenario.scenario import ProgramName
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.models.dlrm.config import DlrmConfig
    from traincast.models.placement.plan import Plan
    from traincast.models.sharded_dlrm.config import Dense

SEARCH = "search"
_SEARCH_SECONDS = 20.0


@register_edit("input-pipeline", "batches are there when the step wants them, in pinned memory",
      trials=(Trial("", "steps"),), risk="more loader workers")  # fmt: skip
def change_input_pipeline(resolved: Resolved, value: Value) -> Resolved:
    """A loader that keeps up."""
    if make_loader(resolved.scenario) is None:
        raise TraincastError("the step has no data loader that could hold it up; say how batches come (`loader_ms`)")
    return resolved.changed(loader_ms=None, workers=None, pageable=False)


@register_edit("program", "the program that trains a DLRM on several GPUs", takes="|".join(get_args(ProgramName)),
      risk="another code base", trials=(Trial("torchrec-pipelined", "steps"),))  # fmt: skip
def change_program(resolved: Resolved, value: Value) -> Resolved:
    """Another program."""
    choice = value.choice(get_args(ProgramName))
    asked = resolved.changed(program=choice)
    same = choice == (resolved.scenario.program or (TORCHREC if resolved.gpus > 1 else None))
    return asked if same else replace(asked, software=(*resolved.software, f"program={choice}"))


@register_edit(
    "plan",
    "another sharding plan: a file, or the best that is found",
    takes=f"FILE|{SEARCH}",
    trials=(Trial(SEARCH, "steps"),),
    risk="tables must be moved",
)
def change_plan(resolved: Resolved, value: Value) -> Resolved:
    """Tables elsewhere."""
    from traincast.models.sharded_dlrm.config import Dense  # only this edit needs them
    from traincast.simulator.scenario.programs import AUTOCAST

    config = resolved.of_dlrm()
    if resolved.gpus == 1:
        raise TraincastError("on one GPU there is no plan to choose; give `gpus` of 2 or more")
    if resolved.scenario.mode == "inference":
        raise TraincastError("GPUs that only infer share no tables here, each has them all; leave out `mode`")
    if value.text == SEARCH:
        dense = replace(Dense.from_dlrm(config), half=AUTOCAST[resolved.scenario.dtype])
        return replace(
            resolved,
            plan=_search_plan(config, dense, resolved.gpus, get_batch_size(resolved), _Held(resolved.platform)),
        )
    return resolved.changed(plan=value.text)


@dataclass(frozen=True, slots=True)
class _Held:
    """A platform that is the same as another one of the same figures."""

    platform: Platform

    def __hash__(self) -> int:
        return hash(self.platform.key)


@lru_cache(maxsize=64)
def _search_plan(config: DlrmConfig, dense: Dense, gpus: int, batch_size: int, held: _Held) -> Plan:
    """The best plan that is found in time. It is searched once: how far a search gets in its time is not always the
    same, and one question is to have one result."""
    from traincast.models.sharded_dlrm.hybrid import make_dlrm_tables  # only this edit needs the search
    from traincast.planner.sharding.search import search
    from traincast.planner.sharding.task import make_task

    platform = add_default_links(held.platform)
    task = make_task(make_dlrm_tables(config), platform, gpus=gpus, batch_size=batch_size, dense=dense)
    return search(task, time_limit=_SEARCH_SECONDS).best.plan
