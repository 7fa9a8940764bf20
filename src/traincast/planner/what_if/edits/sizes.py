"""Batch size."""

from __future__ import annotations

from traincast.ir.workload import MAX_BATCH
from traincast.planner.what_if.edits.registry import Trial, Value, register_edit
from traincast.simulator.scenario.resolved import Resolved
from traincast.utils.errors import TraincastError


@register_edit("batch-size", "samples per GPU (of a micro-batch where a Transformer is laid out over GPUs)", takes="N",
      risk="accuracy: another batch",
      trials=(Trial("x2"), Trial("x4"),
              *(Trial(part, "", "all") for part in ("x0.5", "x0.25", "x0.125", "x0.0625"))))  # fmt: skip
def change_batch_size(resolved: Resolved, value: Value) -> Resolved:
    """Another batch size per GPU; `x2` is twice what it is."""
    if value.text.startswith("x"):
        number = round(get_batch_size(resolved) * value.factor())
        return change_batch_size(resolved, Value(text=str(max(1, number)), edit=value.edit))
    number = value.whole(most=MAX_BATCH)
    scenario, layout = resolved.scenario, resolved.layout
    if layout is None:
        return resolved.changed(batch_size=number)
    sizes = {"batch_size" if scenario.micro_batch is None else "micro_batch": number}
    if scenario.global_batch is not None:
        share = number * layout.dp
        sizes["global_batch"] = max(share, scenario.global_batch // share * share)
    return resolved.changed(**sizes)


def get_batch_size(resolved: Resolved) -> int:
    """Samples per GPU of a step as it is."""
    from traincast.simulator.scenario.workloads import load_single_gpu_step  # only factors need it

    scenario = resolved.scenario
    if resolved.source == "transformer":
        return scenario.micro_batch or scenario.batch_size or 1
    if scenario.batch_size is not None:
        return scenario.batch_size
    if resolved.dlrm is not None or resolved.source == "dlrm":
        return resolved.of_dlrm().batch_size
    if resolved.source == "program":
        raise TraincastError(f"{resolved.name} has a batch for all its GPUs; give a number instead of a factor")
    return load_single_gpu_step(scenario, resolved.source).batch_size
