"""The best layouts of a Transformer on GPUs, asked for by a scenario."""

from __future__ import annotations

from collections.abc import Callable

from traincast.planner.parallelism.plan import Plan, make_plan
from traincast.simulator.scenario.fields import list_scenario_fields
from traincast.simulator.scenario.kinds import KINDS, USED, find_source_kind
from traincast.simulator.scenario.resolved import resolve
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError
from traincast.utils.parallel.where import SEARCH, Workers

SEARCHED = ("tp", "pp", "vp", "cp", "ep", "fsdp", "zero", "micro_batch", "batch_size", "checkpoint")
"""Fields of a scenario that a plan chooses."""
PLANNED = tuple(name for name in list_scenario_fields() if name in USED["parallel"] and name not in SEARCHED)
"""Fields of a scenario that a plan takes."""


def plan(
    scenario: Scenario,
    *,
    tokens_per_step: int | None = None,
    price: float | None = None,
    tokens: float | None = None,
    workers: Workers = SEARCH,
    progress: Callable[[float], None] = lambda _: None,
) -> Plan:
    """The best layouts of a scenario's Transformer on its GPUs. A step is `global_batch` samples (default two per GPU),
    or as many as hold `tokens_per_step`. `price` is dollars of one GPU for an hour, `tokens` those of the whole
    training; `workers` predict the layouts."""
    for name in scenario.given():
        if name not in PLANNED:
            why = "a plan chooses it" if name in SEARCHED else "it is not for Transformers on several GPUs"
            raise TraincastError(f"`{name}` is not used here: {why}; leave it out")
    for name, amount in (("tokens_per_step", tokens_per_step), ("price", price), ("tokens", tokens)):
        if amount is not None and not 0 < amount < 1e18:
            raise TraincastError(f"`{name}` {amount:g} is out of range; give a number above 0")
    if scenario.global_batch is not None and tokens_per_step is not None:
        raise TraincastError("`global_batch` and `tokens_per_step` both say how large a step is; give one of them")
    if scenario.gpus is None:
        raise TraincastError("`gpus` is missing: say how many GPUs the plan is for")
    kind = find_source_kind(scenario.workload)
    if kind != "transformer":
        raise TraincastError(f"a plan lays out described Transformers, such as llama3-8b; this is {KINDS[kind]}")
    resolved = resolve(scenario.replace(global_batch=scenario.global_batch or 2 * scenario.gpus))
    seq_len = scenario.seq_len or resolved.of_transformer().seq_len
    sizes = {"seq_len": seq_len}
    if tokens_per_step is not None:
        sizes["global_batch"] = max(1, round(tokens_per_step / seq_len))
    return make_plan(resolved.changed(**sizes), price=price, tokens=tokens, workers=workers, progress=progress)
