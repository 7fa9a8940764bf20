"""TorchRec's dry-run planning (from 1.9 on) over hardware by our names: its `PlannerProvider`, with links and memory of
our platforms and with our costs of shards and plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from traincast.hardware.platform import add_default_links, load_platform
from traincast.planner.sharding.result import Task, make_task
from traincast.planner.torchrec.estimator import make_perf_plugins
from traincast.planner.torchrec.planner import describe_module, import_torchrec, make_topology
from traincast.planner.torchrec.tables import tables_from_json
from traincast.utils.errors import TraincastError

_GIB = 1 << 30
_NEEDED = "this TorchRec has no 'planner.provider'; it came with 1.9 ('register_perf_config' serves 1.8)"


def make_planner_provider() -> Any:
    """A `PlannerProvider` for `DefaultPlannerExecutor`: every SKU is the name of one of our platforms or devices, or a
    description (`.toml`). Its nodes are the platform's; memory that the request states takes the place of its own."""
    try:
        provider = import_torchrec("distributed.planner.provider")
    except TraincastError as error:
        raise TraincastError(_NEEDED) from error

    class TraincastPlannerProvider(provider.DefaultPlannerProvider):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self._plugins: dict[int, tuple[Any, Any]] = {}  # by topology, which lives as long as its planner

        def build_topology(self, sku: str, request: Any, ctx: Any) -> Any:
            task = make_requested_task(sku, request)
            topology = make_topology(task)
            self._plugins[id(topology)] = make_perf_plugins(task)
            ctx.hw_source[sku] = "traincast"
            return topology

        def _build_perf_estimator(self, sku: str, topology: Any, constraints: Any, ctx: Any) -> Any:
            return self._plugins[id(topology)][0]

        def _build_performance_model(self, cfg: Any, topology: Any) -> Any:
            return self._plugins[id(topology)][1]

    return TraincastPlannerProvider()


def run_dry_run(arguments: Sequence[str]) -> int:
    """TorchRec's own dry-run command line with this provider: `--sku-list dgx-h100,hgx-b200 --world-size 64 ...`."""
    provider = make_planner_provider()
    api, cli, executor = (
        import_torchrec(f"distributed.planner.{name}") for name in ("dry_run.api", "dry_run.cli", "executor")
    )
    orchestrator = api.DryRunOrchestrator(executor.DefaultPlannerExecutor(provider))
    return int(cli.main(list(arguments), orchestrator=orchestrator))


def make_requested_task(sku: str, request: Any) -> Task:
    """The task of a `ShardingPlanRequest`: the tables of its model, with the pooling factors of its constraints."""
    model = request.model if hasattr(request.model, "named_modules") else request.model()
    factors = {
        name: wanted.pooling_factors[0]
        for name, wanted in (request.constraints or {}).items()
        if getattr(wanted, "pooling_factors", None)
    }
    tables = tables_from_json(describe_module(model, factors)).tables
    platform = add_default_links(load_platform(sku))
    hbm, ddr = (getattr(request, name, None) for name in ("hbm_gb", "ddr_gb"))
    if hbm is not None:
        platform = platform.with_device(replace(platform.device, memory_bytes=hbm * _GIB))
    task = make_task(tables, platform, gpus=request.world_size, batch_size=request.batch_size)
    return task if ddr is None else replace(task, limits=replace(task.limits, host=ddr * _GIB))
