"""Steps of built-in models and DLRMs as this machine runs them, in one process or on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from traincast.calibration.measure import Runnable
from traincast.calibration.measure_ranks import RanksStep
from traincast.models.dlrm.config import DlrmConfig
from traincast.simulator.scenario.scenario import Scenario
from traincast.utils.errors import TraincastError
from traincast_evaluation.trials.catalog import draw_task_plans
from traincast_evaluation.trials.dlrm import build_dlrm_step as sharded_step
from traincast_evaluation.trials.plans import BALANCED
from traincast_evaluation.trials.tasks import DlrmTask
from traincast_evaluation.trials.workloads import list_rank_access
from traincast_evaluation.zoo.build.recipes import RECIPES
from traincast_evaluation.zoo.build.recommenders import RECOMMENDERS
from traincast_evaluation.zoo.build.steps import Setting, make_dlrm_step
from traincast_evaluation.zoo.define.dlrm import Dlrm


def make_one_rank_step(model: str | DlrmConfig, variant: Scenario, device: str, *, drawn: bool) -> Runnable:
    """The step of a DLRM or of a built-in model, by name, in one process; `drawn` inputs are not zeros."""
    if isinstance(model, DlrmConfig):
        return _make_dlrm(model, variant, device, drawn=drawn)
    return _make_built_in(model, variant, device, drawn=drawn)


def make_many_ranks_step(
    model: str | DlrmConfig, variant: Scenario, ranks: int, device: str, *, drawn: bool
) -> RanksStep:
    """The step of a DLRM with its tables divided between ranks, or of a built-in model, by name, under DDP."""
    if isinstance(model, DlrmConfig):
        return _make_sharded_dlrm(model, variant, ranks)
    return _make_data_parallel(model, variant, ranks, device, drawn=drawn)


def _make_dlrm(config: DlrmConfig, variant: Scenario, device: str, *, drawn: bool) -> Runnable:
    if variant.embedding not in (None, "bag"):
        raise TraincastError(f"tables of the kind '{variant.embedding}' are not run here; give `embedding='bag'`")
    config = replace(config, embedding="bag", optimizer=variant.optimizer or config.optimizer)
    build = make_dlrm_step(_make_setting(variant, "bag", config.optimizer, device, drawn=drawn), Dlrm, config)
    tables = 4 * sum(config.table_rows) * config.embedding_dim
    return Runnable(config.name, variant.batch_size or config.batch_size, 0, build, tables)


def _make_built_in(name: str, variant: Scenario, device: str, *, drawn: bool) -> Runnable:
    recipe = RECIPES[name]
    choice = (variant.attention if recipe.axis == "attention" else variant.embedding) or recipe.choices[0]
    if choice not in recipe.choices or choice == "fbgemm" or name in {model.name for model in RECOMMENDERS}:
        raise TraincastError(
            f"{name} does not run here with '{choice}': its tables or its attention can be predicted only; give "
            "FILE.py:FUNCTION to run your own"
        )
    build = recipe.make(_make_setting(variant, choice, recipe.optimizers[0], device, drawn=drawn))
    return Runnable(name, variant.batch_size or recipe.batch_size, variant.seq_len or recipe.seq_len, build)


def _make_sharded_dlrm(config: DlrmConfig, variant: Scenario, ranks: int) -> RanksStep:
    """Tables whole, balanced by their lookups; MLPs on every rank; SGD."""
    if variant.dtype != "fp32" or variant.optimizer not in (None, "sgd") or variant.embedding not in (None, "bag"):
        raise TraincastError(
            "DLRMs of several ranks are run here in fp32 with SGD and EmbeddingBags; leave out `dtype`, `optimizer` "
            "and `embedding`"
        )
    rows = config.access or ("uniform",) * config.num_tables
    config = replace(config, embedding="bag", index_dtype="int64", optimizer="sgd", access=rows)
    size = variant.batch_size or config.batch_size
    task = DlrmTask(name=config.name, config=config, batch_sizes=(size,), ranks=ranks, seed=0)
    plan = draw_task_plans(task)[BALANCED]
    access = tuple(list_rank_access(config, plan, rank) for rank in range(ranks))
    return RanksStep(config.name, size, 0, sharded_step(task, plan), access)


def _make_data_parallel(name: str, variant: Scenario, ranks: int, device: str, *, drawn: bool) -> RanksStep:
    recipe = RECIPES[name]
    if not recipe.data_parallel:
        raise TraincastError(f"{name} is not trained data parallel here; give a DLRM, a Transformer or a CNN")
    choice = (variant.attention if recipe.axis == "attention" else None) or recipe.choices[0]
    setting = replace(_make_setting(variant, choice, recipe.optimizers[0], device, drawn=drawn), ranks=ranks)
    build = recipe.make(setting)
    length = variant.seq_len or recipe.seq_len

    def make_step(batch_size: int, *, rank: int, world_size: int) -> Callable[[], object]:
        return build(batch_size, length)

    return RanksStep(name, variant.batch_size or recipe.batch_size, length, make_step, ((),) * ranks)


def _make_setting(variant: Scenario, choice: str, optimizer: str, device: str, *, drawn: bool) -> Setting:
    """How the step of a built-in model is run on a device."""
    if variant.dtype not in ("fp32", "bf16"):
        raise TraincastError(f"steps are run here in fp32 or bf16, not {variant.dtype}; leave out `dtype`")
    if variant.optimizer == "none":
        raise TraincastError("a step without its optimizer cannot be run as one; leave out `optimizer`")
    mode = variant.mode or "training"
    return Setting(
        mode=mode,
        optimizer="" if mode == "inference" else variant.optimizer or optimizer,
        precision="half" if variant.dtype == "bf16" else "fp32",
        choice=choice,
        device=device,
        drawn=drawn,
    )
