"""A DLRM by name or file on many GPUs: which one, and whether such a step has the variant asked for."""

from __future__ import annotations

from dataclasses import replace

from traincast.hardware.platform import Platform
from traincast.ir.edit import remove_phase
from traincast.ir.ops import Phase
from traincast.ir.workload import Workload
from traincast.models.dlrm.config import DlrmConfig
from traincast.models.placement.plan import Plan
from traincast.models.sharded_dlrm.hybrid import build_hybrid_dlrm
from traincast.models.sharded_dlrm.step import check_ranks
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError

AUTOCAST: dict[str | None, str] = {None: "", "fp32": "", "tf32": "", "bf16": "bfloat16", "fp16": "float16"}


def build_hybrid_variant(
    config: DlrmConfig, gpus: int, platform: Platform, scenario: Scenario, *, pipelined: bool = False,
    plan: Plan | None = None,
) -> tuple[Workload, str]:  # fmt: skip
    """`build_hybrid_dlrm` in a scenario, and what was assumed; what such a step does not have is rejected."""
    if scenario.embedding not in (None, "fbgemm"):
        raise TraincastError(f"tables on several GPUs are FBGEMM's, not '{scenario.embedding}'; leave out `embedding`")
    if scenario.optimizer not in (None, "none"):
        config = replace(config, optimizer=scenario.optimizer)
    if scenario.dtype not in AUTOCAST:
        raise TraincastError(f"`dtype={scenario.dtype}` is for described Transformers; give fp32, tf32, bf16 or fp16")
    check_ranks(gpus)
    batch = config.batch_size if scenario.batch_size is None else scenario.batch_size
    workload, assumed = build_hybrid_dlrm(
        config,
        gpus,
        batch_size=batch,
        memory_bytes=platform.device.memory_bytes,
        gpus_per_node=platform.gpus_per_node,
        half=AUTOCAST[scenario.dtype],
        pipelined=pipelined,
        plan=plan,
    )
    return (remove_phase(workload, Phase.OPTIMIZER) if scenario.optimizer == "none" else workload), assumed
