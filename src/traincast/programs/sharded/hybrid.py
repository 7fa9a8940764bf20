"""A DLRM on many GPUs when no plan was given: each table whole on one of them, its dense part on all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from traincast.embeddings.access import Uniform, parse_access
from traincast.embeddings.table import Pooling, Table
from traincast.errors import TraincastError, unknown
from traincast.placement.greedy import WEIGHTS, greedy_plan
from traincast.placement.kinds import ShardingKind
from traincast.placement.memory import MemoryLimits
from traincast.platform.platform import Platform
from traincast.programs.dlrm.config import OPTIMIZERS, STUDY_DLRMS, DlrmConfig
from traincast.programs.dlrm.cross_config import DLRM_V2, DcnConfig
from traincast.programs.dlrm.yaml_file import read_dlrm
from traincast.programs.sharded.config import Dense
from traincast.programs.sharded.step import check_ranks, sharded_dlrm
from traincast.workload.edit import without_phase
from traincast.workload.ops import Phase
from traincast.workload.workload import MAX_BATCH, Workload

BALANCED = "greedy by lookups"
_AUTOCAST = {"fp32": "", "tf32": "", "amp": "bfloat16", "bf16": "bfloat16", "fp16": "float16"}


def dlrm_tables(config: DlrmConfig) -> tuple[Table, ...]:
    """The embedding tables of a DLRM, all rows of them; without a word on access every row as likely as any other."""
    access = tuple(parse_access(text) for text in config.access) or (Uniform(),) * config.num_tables
    sizes = zip(config.rows_per_table, config.lookups_per_table, access, strict=True)
    return tuple(
        Table(
            name=f"table{index}",
            rows=rows,
            dim=config.embedding_dim,
            pooling=Pooling.constant(lookups),
            access=wanted,
            optimizer=config.optimizer,
        )
        for index, (rows, lookups, wanted) in enumerate(sizes)
    )


def hybrid_dlrm(
    config: DlrmConfig, gpus: int, platform: Platform, *, batch_size: int, half: str = ""
) -> tuple[Workload, str]:
    """One training step of a DLRM on `gpus` GPUs of a platform, `batch_size` samples each, and what was assumed.

    Tables go whole to one GPU each, the busiest first to the GPU with the least lookups that has room for it; one
    that fits nowhere is split by rows over all. Lookups are FBGEMM's, the dense part is under DDP; with `half`
    (bfloat16, float16) its forward pass runs under autocast.
    """
    tables = dlrm_tables(config)
    dense = replace(Dense.of(config), half=half)
    held = dense.memory_bytes(sum(table.dim for table in tables), batch_size)
    limits = MemoryLimits(device=platform.device.memory_bytes, dense=held)
    plan = greedy_plan(tables, WEIGHTS[BALANCED], limits, gpus, batch_size=batch_size)
    workload = sharded_dlrm(
        dense,
        tables,
        plan,
        batch_size=batch_size,
        gpus_per_node=platform.gpus_per_node,
        index_dtype=config.index_dtype,
        name=config.name,
    )
    split = sum(placement.kind is not ShardingKind.TABLE_WISE for placement in plan.placements)
    rows = f", {split} of them split by rows" if split else ""
    above = "MLPs and cross network" if isinstance(config, DcnConfig) else "MLPs"
    said = (
        f"{config.name} is taken as hybrid parallel: FBGEMM tables placed {BALANCED}{rows}, {above} under DDP "
        "(traincast shard searches better plans)"
    )
    return workload, said


def described_dlrm(name: str) -> DlrmConfig | None:
    """The DLRM of this name, built in or in YAML, that can be sharded; None when the name is another model's."""
    if name.endswith((".yaml", ".yml")):
        return read_dlrm(Path(name))
    return DLRM_V2 if name == DLRM_V2.name else STUDY_DLRMS.get(name)


def hybrid_variant(
    config: DlrmConfig,
    gpus: int,
    platform: Platform,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    dtype: str = "fp32",
    optimizer: str | None = None,
    attention: str | None = None,
    embedding: str | None = None,
) -> tuple[Workload, str]:
    """`hybrid_dlrm` with the choices of a prediction; what such a step does not have is refused."""
    if seq_len is not None or attention is not None:
        raise TraincastError(f"{config.name} has no sequences and no attention; leave out `seq_len` and `attention`")
    if dtype not in _AUTOCAST:
        raise unknown("dtype", dtype, _AUTOCAST, f"Choose from {', '.join(_AUTOCAST)}.")
    if embedding not in (None, "fbgemm"):
        raise TraincastError(f"tables on several GPUs are FBGEMM's, not '{embedding}'; leave out `embedding`")
    if optimizer not in (None, "none", *OPTIMIZERS):
        raise unknown("optimizer", optimizer, OPTIMIZERS, f"Choose from {', '.join(OPTIMIZERS)}, none.")
    if optimizer not in (None, "none"):
        config = replace(config, optimizer=optimizer)
    check_ranks(gpus)
    batch = config.batch_size if batch_size is None else batch_size
    if not 1 <= batch <= MAX_BATCH:
        raise TraincastError(f"batch size {batch} is out of range; give a whole number from 1 to {MAX_BATCH}")
    workload, said = hybrid_dlrm(config, gpus, platform, batch_size=batch, half=_AUTOCAST[dtype])
    return (without_phase(workload, Phase.OPTIMIZER) if optimizer == "none" else workload), said
