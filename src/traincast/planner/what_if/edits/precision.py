"""Arithmetic and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from traincast.ir.workload import Workload
from traincast.planner.what_if.edits.registry import Trial, Value, register_edit
from traincast.simulator.scenario.predict import describe_missing_units
from traincast.simulator.scenario.resolved import Resolved
from traincast.simulator.scenario.scenario import Dtype, Optimizer
from traincast.utils.errors import TraincastError

_HALF = {"amp": "float16", "fp16": "float16", "bf16": "bfloat16"}
_WEIGHTS = {"fp16-weights": "float16", "bf16-weights": "bfloat16"}
DTYPES, OPTIMIZERS = get_args(Dtype), get_args(Optimizer)
_SCALED = ("fp8", "fp4")
_ALL = (*(name for name in DTYPES if name not in _SCALED), "amp", *_WEIGHTS, *_SCALED)
_RISKS = {
    "fp32": "", "tf32": "accuracy: GEMMs of 10 bits", "bf16": "accuracy: numbers of 7 bits",
    **dict.fromkeys(("fp16", "amp"), "accuracy: numbers of 10 bits, the loss must be scaled"),
    **dict.fromkeys(_WEIGHTS, "accuracy: weights and optimizer in 16 bits"),
    "fp8": "accuracy: GEMMs of 2 or 3 bits, operands must be scaled",
    "fp4": "accuracy: GEMMs of 1 bit, blocks of operands must be scaled",
}  # fmt: skip
"""Of each type, by the bits of its fraction."""


@register_edit(
    "dtype",
    "arithmetic: TF32, autocast to 16 bits (amp: fp16, PyTorch's default), weights in 16 bits, fp8 and "
    "fp4 of described Transformers",
    takes="|".join(_ALL),
    risk="accuracy: fewer bits; fp16 needs loss scaling",
    risks=_RISKS,
    trials=(Trial("tf32", "steps"), Trial("bf16"), Trial("fp8", "layouts")),
)
def change_dtype(resolved: Resolved, value: Value) -> Resolved:
    """Another arithmetic."""
    choice = value.choice(_ALL)
    if resolved.kind == "parallel":
        if choice == "amp":
            return resolved.changed(dtype="fp16", autocast=True)
        return resolved.changed(dtype=choice.removesuffix("-weights"), autocast=False)
    if choice in _SCALED:
        raise TraincastError(
            f"{choice} needs modules that scale their operands, which a step of ops does not have; it is predicted for "
            "described Transformers: give bf16 here"
        )
    from traincast.transforms.retyping.edit import with_autocast, with_weights  # only this edit needs them

    if choice in _WEIGHTS:
        if resolved.scenario.mode == "inference" and resolved.source != "workload":
            return resolved.changed(dtype=choice.removesuffix("-weights"))
        return _cast_ops(resolved, choice, with_weights, _WEIGHTS[choice])
    if choice in _HALF and _is_described_dlrm(resolved):
        infers = resolved.scenario.mode == "inference"
        return _cast_ops(resolved, choice, with_weights if infers else with_autocast, _HALF[choice])
    if choice in _HALF and resolved.source == "workload":
        return _cast_ops(resolved, choice, with_autocast, _HALF[choice])
    return resolved.changed(dtype="fp16" if choice == "amp" else choice)


def _is_described_dlrm(resolved: Resolved) -> bool:
    """Whether the step is that of a DLRM on one GPU that is written in float32 from its file."""
    alone = resolved.source == "dlrm" and resolved.gpus == 1 and resolved.scenario.program is None
    return alone and resolved.dlrm is None and str(resolved.scenario.workload).endswith((".yaml", ".yml"))


def _cast_ops(
    resolved: Resolved, choice: str, retyped: Callable[[Workload, str], tuple[Workload, str]], low: str
) -> Resolved:
    """The step with casts among its ops."""
    missing = describe_missing_units({"float16": "fp16", "bfloat16": "bf16"}[low], resolved.platform)

    def edited(step: Workload) -> tuple[Workload, str]:
        changed, notes = retyped(step, low)
        return changed, f"{notes}; {missing}" if missing else notes

    return resolved.edited(f"dtype={choice}", edited)


@register_edit("optimizer", "another optimizer, or none", takes="|".join(OPTIMIZERS), risk="accuracy: another training")
def optimizer(resolved: Resolved, value: Value) -> Resolved:
    """Another optimizer."""
    choice = value.choice(OPTIMIZERS)
    if resolved.source == "workload" and choice != "none":
        from traincast.transforms.optimizing import change_optimizer  # only this edit needs it

        return resolved.edited(f"optimizer={choice}", lambda step: change_optimizer(step, choice))
    return resolved.changed(optimizer=choice)
