"""A DLRM by name or file on many GPUs: which one, and whether such a step has the variant asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from traincast.hardware.platform import Platform
from traincast.ir.edit import without_phase
from traincast.ir.ops import Phase
from traincast.ir.workload import MAX_BATCH, Workload
from traincast.models.dlrm.config import STUDY_DLRMS, DlrmConfig
from traincast.models.dlrm.cross_config import DLRM_V2
from traincast.models.placement.plan import Plan
from traincast.models.sharded_dlrm.hybrid import hybrid_dlrm
from traincast.models.sharded_dlrm.step import check_ranks
from traincast.simulator.scenario.dlrm_file import read_dlrm
from traincast.simulator.scenario.variant import Variant
from traincast.utils.errors import TraincastError

AUTOCAST = {"fp32": "", "tf32": "", "bf16": "bfloat16", "fp16": "float16"}


def described_dlrm(name: str) -> DlrmConfig | None:
    """The DLRM of this name, built in or in YAML, that can be sharded; None when the name is another model's."""
    if name.endswith((".yaml", ".yml")):
        return read_dlrm(Path(name))
    return DLRM_V2 if name == DLRM_V2.name else STUDY_DLRMS.get(name)


def hybrid_variant(
    config: DlrmConfig, gpus: int, platform: Platform, variant: Variant, *, pipelined: bool = False,
    plan: Plan | None = None,
) -> tuple[Workload, str]:  # fmt: skip
    """`hybrid_dlrm` in a variant, and what was assumed; what such a step does not have is refused."""
    if variant.seq_len is not None or variant.attention is not None:
        raise TraincastError(f"{config.name} has no sequences and no attention; leave out `seq_len` and `attention`")
    if variant.embedding not in (None, "fbgemm"):
        raise TraincastError(f"tables on several GPUs are FBGEMM's, not '{variant.embedding}'; leave out `embedding`")
    if variant.optimizer not in (None, "none"):
        config = replace(config, optimizer=variant.optimizer)
    check_ranks(gpus)
    batch = config.batch_size if variant.batch_size is None else variant.batch_size
    if not 1 <= batch <= MAX_BATCH:
        raise TraincastError(f"batch size {batch} is out of range; give a whole number from 1 to {MAX_BATCH}")
    workload, assumed = hybrid_dlrm(
        config,
        gpus,
        batch_size=batch,
        memory_bytes=platform.device.memory_bytes,
        gpus_per_node=platform.gpus_per_node,
        half=AUTOCAST[variant.dtype],
        pipelined=pipelined,
        plan=plan,
    )
    return (without_phase(workload, Phase.OPTIMIZER) if variant.optimizer == "none" else workload), assumed
