"""The one way from a scenario to a prediction: its step is loaded, edited, spread over GPUs and simulated."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from traincast.hardware.platform import Platform, add_default_links
from traincast.ir.editor import remove_phase
from traincast.ir.formula import merge_op_costs
from traincast.ir.ops import Phase
from traincast.ir.workload import COVERS, Workload
from traincast.simulator.memory.allocator import parse_settings
from traincast.simulator.memory.device_memory import WOULD_NOT_RUN
from traincast.simulator.memory.savings import save_optimizer_state
from traincast.simulator.prediction.prediction import predict_step
from traincast.simulator.prediction.rank_results import Note, warn_of_positions
from traincast.simulator.prediction.result import Prediction
from traincast.simulator.prediction.step import Unevenness
from traincast.simulator.scenario.captured import (
    Loader,
    accumulate_captured,
    check_undivided,
    count_batches,
    read_sharding,
    read_traced_loader,
    share_captured,
)
from traincast.simulator.scenario.kinds import parse_offload
from traincast.simulator.scenario.resolved import Resolved, Structural, list_settings, resolve
from traincast.simulator.scenario.scenario import Scenario
from traincast.simulator.scenario.workloads import (
    PIPELINED,
    TORCHREC,
    build_recommender,
    check_eager,
    compile_workload,
    load_single_gpu_step,
    make_no_program_error,
    spread_on_gpus,
)
from traincast.utils.errors import TraincastError

if TYPE_CHECKING:
    from traincast.models.dlrm.config import DlrmConfig


def predict(scenario: Scenario | Resolved) -> Prediction:
    """The prediction of a scenario; what was assumed and edited is among its warnings."""
    resolved = resolve(scenario) if isinstance(scenario, Scenario) else scenario
    if resolved.kind == "parallel":
        result = _predict_parallel(resolved)
    else:
        step, notes = load_step(resolved)
        result = _simulate(resolved, step, notes)
    result = _save_memory(resolved, result)
    if resolved.scenario.seq_len is not None:
        rows = resolved.of_transformer().positions if resolved.source == "transformer" else None
        result = replace(result, warnings=(*result.warnings, *warn_of_positions(result.workload, rows)))
    return replace(result, scenario=list_settings(resolved, result))


def _save_memory(resolved: Resolved, result: Prediction) -> Prediction:
    """The prediction with the allocator's settings and what saves memory in a step of ops; with them it may fit."""
    scenario, memory, ranks, notes = resolved.scenario, result.memory, result.ranks, list[str]()
    offloaded = parse_offload(scenario.offload)
    if resolved.kind != "parallel" and (scenario.optimizer_state is not None or "optimizer" in offloaded):
        save = partial(save_optimizer_state, kind=scenario.optimizer_state or "fp32", on_host="optimizer" in offloaded)
        memory = replace(memory, events=save(memory.events))
        ranks = tuple([replace(one, memory=replace(one.memory, events=save(one.memory.events))) for one in ranks])
        notes.append("an update takes as long as with moments in fp32" if scenario.optimizer_state else "")
    if "optimizer" in offloaded or (offloaded and resolved.kind == "parallel"):
        notes.append("copies to and from host memory cost no time here")
    if scenario.allocator is not None:
        memory = replace(memory, settings=parse_settings(scenario.allocator))
    if memory is result.memory:
        return replace(result, warnings=(*result.warnings, *filter(None, notes))) if notes else result
    kept = [note for note in result.warnings if not note.endswith(WOULD_NOT_RUN)]
    if not memory.fits:
        kept.insert(0, memory.describe_excess("the step" if result.gpus == 1 else "the fullest rank"))
    return replace(result, memory=memory, ranks=ranks, warnings=(*kept, *filter(None, notes)))


def _simulate(resolved: Resolved, step: Workload, notes: list[str]) -> Prediction:
    """The prediction of a step that was loaded, with notes among its warnings."""
    scenario, alone = resolved.scenario, resolved.platform
    many = len(step.ranks) > 1 or resolved.kind == "tables"
    platform = add_default_links(alone) if many else alone
    loader = make_loader(scenario, step)
    result = predict_step(
        step,
        platform,
        tf32=scenario.dtype == "tf32",
        host=resolved.host,
        roofline_only=scenario.roofline_only,
        uneven=_make_unevenness(scenario),
        late=0.0 if loader is None else loader.late(count_batches(step)),
        op_speed=resolved.op_speed,
    )
    if loader is not None:
        result = loader.limit_prediction(result, count_batches(step))
    missing = describe_missing_units(scenario.dtype or "fp32", alone) if resolved.kind != "tables" else ""
    said = (missing, *notes, platform.assumed if many and len(step.ranks) > 1 else "")
    warnings = (*result.warnings, *(Note(note) for note in said if note))
    return replace(result, warnings=warnings) if len(warnings) > len(result.warnings) else result


def make_loader(scenario: Scenario, step: Workload | None = None) -> Loader | None:
    """How batches come, where the scenario says so, or else the trace that a step is from."""
    loader = Loader(ms=scenario.loader_ms or 0.0, workers=scenario.workers or 0, pageable=scenario.pageable)
    if step is not None and scenario.loader_ms is None:
        loader = read_traced_loader(step, loader)
    return None if loader == Loader() else loader


def _make_unevenness(scenario: Scenario) -> Unevenness | None:
    if not (scenario.skew_ms or scenario.jitter):
        return None
    return Unevenness(skew_ms=scenario.skew_ms or 0.0, jitter=scenario.jitter or 0.0, seed=scenario.seed or 0)


def load_step(resolved: Resolved) -> tuple[Workload, list[str]]:
    """The workload of a scenario with all its edits on all its GPUs, and notes on it."""
    step, notes = _load_on_gpus(resolved)
    if resolved.costs:
        step = replace(step, costs=merge_op_costs(step.costs, resolved.costs))
    step, more = _apply_edits(step, resolved.across)
    notes += more
    step, more = _offload_step(resolved, step)
    notes += more
    loader = make_loader(resolved.scenario)
    if loader is not None:
        step = loader.feed_workload(step)
    if resolved.scenario.is_graphed:
        from traincast.transforms.fusion import apply_cuda_graphs  # only graphs need it

        step, said = apply_cuda_graphs(step)
        notes.append(said)
    return step, [*notes, *list_step_notes(step)]


def _load_on_gpus(resolved: Resolved) -> tuple[Workload, list[str]]:
    """The step on its GPUs with its structural edits."""
    platform = add_default_links(resolved.platform)
    if not _is_divided(resolved):
        whole, assumed = _load_single_gpu_step(resolved, platform)
        step, notes = _apply_edits(whole, resolved.structural)
        if resolved.scenario.is_compiled and resolved.source != "transformer":
            step = compile_workload(step)
        step, said = _spread_over_gpus(resolved, step, platform)
        return step, [assumed, *said, *notes]
    check_undivided(resolved)
    step, division = _load_divided_step(resolved, platform)
    step, notes = _apply_edits(step, resolved.structural)
    _check_buckets(resolved, step)
    return step, [division, *notes]


def _offload_step(resolved: Resolved, step: Workload) -> tuple[Workload, list[str]]:
    """The step with its activations in host memory where that is asked for, and notes on it."""
    offloaded = parse_offload(resolved.scenario.offload)
    if "parameters" in offloaded:
        raise TraincastError(
            f"{resolved.name} works on its parameters where they are; `offload` of a step of ops is optimizer or "
            "activations"
        )
    if "activations" not in offloaded:
        return step, []
    from traincast.transforms.offloading import offload_activations  # only this field needs it

    step, said = offload_activations(step)
    return step, [said]


def _is_divided(resolved: Resolved) -> bool:
    """Whether the step on several GPUs is another program than that of one GPU under data parallelism."""
    trained = resolved.source == "dlrm" and resolved.scenario.mode != "inference"
    if trained and (resolved.gpus > 1 or resolved.plan is not None):
        return True
    return (
        resolved.source in ("program", "tables") or resolved.plan is not None or resolved.scenario.program is not None
    )


def _load_divided_step(resolved: Resolved, platform: Platform) -> tuple[Workload, str]:
    """The step of a program that divides tables among GPUs."""
    scenario, gpus, program = resolved.scenario, resolved.gpus, resolved.scenario.program
    if resolved.source == "tables":
        from traincast.simulator.scenario.tables import build_tables_step

        return build_tables_step(scenario, resolved.plan, platform, gpus)
    if resolved.source == "program":
        from traincast.models.catalog import find_published_program
        from traincast.simulator.scenario.workloads import build_published_step

        return build_published_step(
            find_published_program(str(scenario.workload)), gpus, scenario, platform.gpus_per_node
        )
    if scenario.mode == "inference":
        raise make_no_program_error(resolved.name)
    if resolved.source == "dlrm":
        return _load_recommender(resolved, platform)
    from traincast.models.sharded_dlrm.recommender import is_shardable
    from traincast.simulator.scenario.tables import place_captured
    from traincast.simulator.scenario.workloads import shard_workload

    check_eager(resolved.name, gpus, scenario)
    step = load_single_gpu_step(scenario, resolved.source)
    if resolved.plan is not None:
        return place_captured(step, resolved.plan, platform, program)
    if not is_shardable(step):
        raise make_no_program_error(resolved.name)
    return shard_workload(step, gpus, platform, program)


def _load_recommender(resolved: Resolved, platform: Platform) -> tuple[Workload, str]:
    """A described recommender with its tables sharded: by its program, or under a plan."""
    scenario, config = resolved.scenario, resolved.of_dlrm()
    if resolved.dlrm is not None or resolved.plan is not None:
        scenario = scenario.replace(embedding=None)
    if resolved.plan is None:
        return build_recommender(config, resolved.gpus, platform, scenario, scenario.program)
    check_eager(config.name, resolved.gpus, scenario)
    if scenario.program not in (None, TORCHREC, PIPELINED):
        raise TraincastError(f"a `plan` is for TorchRec's program, not '{scenario.program}'; leave out one of them")
    from traincast.simulator.scenario.workloads import build_hybrid_variant

    pipelined = scenario.program == PIPELINED
    return build_hybrid_variant(config, resolved.gpus, platform, scenario, pipelined=pipelined, plan=resolved.plan)


def _load_single_gpu_step(resolved: Resolved, platform: Platform) -> tuple[Workload, str]:
    """The step of one GPU before edits of its ops, and what was assumed; of eager ops, but for Transformers, which are
    written compiled."""
    scenario = resolved.scenario
    if resolved.source == "transformer":  # sizes decide what is written
        from traincast.simulator.scenario.layouts import build_described_step

        return build_described_step(resolved.of_transformer(), scenario), ""
    if resolved.dlrm is not None:
        return _write_dlrm_step(resolved.dlrm, scenario, platform)
    variant = Scenario(
        workload=scenario.workload, dtype=scenario.dtype, mode=scenario.mode, optimizer=scenario.optimizer,
        attention=scenario.attention, embedding=scenario.embedding,
    )  # fmt: skip
    return _load_resized(variant, resolved.source, resolved.content, scenario.samples_per_pass, scenario.seq_len), ""


@lru_cache(maxsize=16)
def _load_at_own_size(variant: Scenario, kind: str, content: str) -> Workload:
    """A workload as it was saved: what-ifs of many sizes read its file once, as long as it has this content."""
    return load_single_gpu_step(variant, kind)


@lru_cache(maxsize=16)
def _load_resized(variant: Scenario, kind: str, content: str, batch_size: int | None, seq_len: int | None) -> Workload:
    """One object for one size, so that what was lowered for one platform serves others. What a compiler fuses depends
    on sizes: a step with compiled regions is loaded at each."""
    own = _load_at_own_size(variant, kind, content)
    if "compiled" in own.meta or kind == "recommender":
        return load_single_gpu_step(variant.replace(batch_size=batch_size, seq_len=seq_len), kind)
    return own.resized(batch_size=batch_size, seq_len=seq_len)


def _spread_over_gpus(resolved: Resolved, step: Workload, platform: Platform) -> tuple[Workload, list[str]]:
    """The step on its GPUs with the passes of an update, and notes on it."""
    _check_buckets(resolved, step)
    if read_sharding(resolved.scenario) is not None:
        return share_captured(resolved, step)
    spread_out, notes = _replicate_step(resolved, step, platform)
    spread_out, more = accumulate_captured(resolved, spread_out)
    return spread_out, [notes, more]


def _replicate_step(
    resolved: Resolved, step: Workload, platform: Platform
) -> tuple[Workload, str]:  # fmt: skip
    """The step on GPUs that each hold all of the model, but for tables."""
    if resolved.bucket_mb is None:
        return spread_on_gpus(step, resolved.scenario.gpus, platform)
    from traincast.models.data_parallel import apply_data_parallel
    from traincast.models.sharded_dlrm.recommender import is_shardable

    if is_shardable(step):
        raise TraincastError(f"{resolved.name} shards its tables over GPUs; its buckets are those of its program")
    return apply_data_parallel(step, resolved.gpus, bucket_mb=resolved.bucket_mb), ""


def _check_buckets(resolved: Resolved, step: Workload) -> None:
    if resolved.bucket_mb is None:
        return
    if len(step.ranks) > 1:
        raise TraincastError(
            f"{resolved.name} keeps the buckets it was made with; buckets are chosen where a step of one GPU becomes "
            "data parallel"
        )
    if resolved.gpus == 1:
        raise TraincastError("one GPU reduces no gradients: buckets need `gpus` of 2 or more")


def _write_dlrm_step(config: DlrmConfig, scenario: Scenario, platform: Platform) -> tuple[Workload, str]:
    """A described recommender on one GPU."""
    from traincast.models.dlrm.config import DcnConfig
    from traincast.models.dlrm.program import build_dlrm_workload
    from traincast.simulator.scenario.workloads import AUTOCAST, build_hybrid_variant
    from traincast.transforms.retyping.edit import with_autocast, with_weights

    mode = scenario.mode or "training"
    if isinstance(config, DcnConfig):
        if mode == "inference":
            raise TraincastError(f"{config.name} is written as a step of training; leave out the edit or `mode`")
        return build_hybrid_variant(config, 1, platform, scenario.replace(embedding=None))
    if config.embedding == "bag":
        raise TraincastError(
            f"{config.name} with one embedding bag per table is a capture; set embedding=batched to change its sizes"
        )
    step = build_dlrm_workload(config, mode=mode).resized(batch_size=scenario.batch_size)
    if half := AUTOCAST[scenario.dtype]:
        step, _ = (with_weights if mode == "inference" else with_autocast)(step, half)
    return (remove_phase(step, Phase.OPTIMIZER) if scenario.optimizer == "none" else step), ""


def _apply_edits(step: Workload, edits: tuple[tuple[str, Structural], ...]) -> tuple[Workload, list[str]]:
    notes = []
    for name, function in edits:
        try:
            step, said = function(step)
        except TraincastError as error:
            raise TraincastError(f"edit {name}: {error}") from None
        notes.append(said)
    return step, notes


def _predict_parallel(resolved: Resolved) -> Prediction:
    """A Transformer that trains, laid out over its GPUs; edits of ops change every stage."""
    from traincast.simulator.parallelism.layout import complete_layout  # only layouts need them
    from traincast.simulator.parallelism.predict import predict_parallel

    model, loader, notes = resolved.of_transformer(), make_loader(resolved.scenario), list[str]()
    assert resolved.layout is not None
    layout = complete_layout(resolved.layout, model)

    def prepare(step: Workload) -> Workload:
        edited, said = _edit_step(resolved, step)
        notes[:] = said
        return edited

    changes = bool(resolved.structural or resolved.across or resolved.costs or loader is not None)
    result = predict_parallel(
        model, add_default_links(resolved.platform), layout, host=resolved.host,
        roofline_only=resolved.scenario.roofline_only, prepare=prepare if changes else None, op_speed=resolved.op_speed,
        late=0.0 if loader is None else loader.late(layout.accumulation),
    )  # fmt: skip
    result = replace(result, warnings=(*result.warnings, *(note for note in notes if note)))
    return result if loader is None else loader.limit_prediction(result, layout.accumulation)


def _edit_step(resolved: Resolved, step: Workload) -> tuple[Workload, list[str]]:
    """A step laid out over GPUs with costs and edits of ops, and notes on it."""
    if resolved.costs:
        step = replace(step, costs=merge_op_costs(step.costs, resolved.costs))
    step, notes = _apply_edits(step, (*resolved.structural, *resolved.across))
    loader = make_loader(resolved.scenario)
    return (step if loader is None else loader.feed_workload(step)), [*notes, *_list_given_costs(step)]


def list_step_notes(step: Workload) -> tuple[str, ...]:
    """Notes on any prediction of a step: how it was compiled, what its trace covers, what was assumed."""
    compiled, covers = step.meta.get("compiled"), step.meta.get(COVERS)
    return (
        *([compiled] if compiled else []),
        *([f"the traced step covers {covers}"] if covers else []),
        *(f"assumed: {text}" for text in step.assumptions),
        *_list_given_costs(step),
    )


def _list_given_costs(step: Workload) -> tuple[str, ...]:
    """Which ops of the step cost what their author says."""
    present = {signature.name for program in step.programs for signature in program.symbolic}
    used = [cost for cost in step.costs if cost.op in present]
    return tuple(
        f"{cost.op} costs as given: {', '.join(f'{part} {text}' for part, text in cost.as_text().items())}"
        for cost in used
    )


def describe_missing_units(dtype: str, platform: Platform) -> str:
    """What is assumed of a device that has no units for the type asked for; "" where it has them.

    TF32 is then fp32: the same four bytes, the same cores. In a 16-bit type tensors keep their two bytes, and GEMMs
    run at the rate of fp32, into which the cores widen their operands (convolutions without Winograd, as in any 16-bit
    type).
    """
    if dtype in platform.device.peak_flops:
        return ""
    if dtype == "tf32":
        return f"{platform.key} has no TF32 units; it computes in fp32"
    return f"{platform.key} has no {dtype} units; GEMMs are taken to run at its fp32 rate with two bytes per element"
