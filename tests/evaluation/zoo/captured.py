"""Capturing small models for tests, and comparing programs."""

from __future__ import annotations

from collections.abc import Iterator

from traincast.capturing import capture_step
from traincast.ir import Op, Program, Signature
from traincast.models.dlrm.config import DlrmConfig
from traincast_evaluation.zoo.build.legacy import split_engine_ops
from traincast_evaluation.zoo.build.steps import MakeStep, Setting, make_dlrm_step
from traincast_evaluation.zoo.define.dlrm import Dlrm

FP32_TRAINING = Setting(mode="training", optimizer="sgd", precision="fp32", choice="eager")


def capture_once(make: MakeStep, batch_size: int, seq_len: int = 0, *, mode: str = "training") -> Program:
    """One capture at one size."""
    workload = capture_step(
        make if seq_len else lambda batch: make(batch, 0),
        batch_size=batch_size, seq_len=seq_len or None, name="test", mode=mode, rebatch=False,
    )  # fmt: skip
    return workload.programs[0]


def capture_dlrm(config: DlrmConfig, batch_size: int, *, mode: str = "training") -> Program:
    """One capture of a DLRM, its scopes as the built-in ones have them."""
    optimizer = config.optimizer if mode == "training" else ""
    setting = Setting(mode=mode, optimizer=optimizer, precision="fp32", choice=config.embedding)
    return split_engine_ops(capture_once(make_dlrm_step(setting, Dlrm, config), batch_size, mode=mode))


def connected(program: Program) -> Iterator[tuple[Signature, tuple[int, ...], tuple[object, ...]]]:
    """Every op with its storages numbered by first use, and where it runs."""
    number: dict[int, int] = {}
    for op in program.ops:
        storages = tuple(number.setdefault(t.storage, len(number)) for t in (*op.inputs, *op.outputs))
        yield op.signature, storages, (op.phase, op.module, op.scope, op.forward, op.thread, op.stream)


def storages(program: Program) -> list[tuple[int, int, int, int]]:
    """(bytes, kind, alloc, free) of every storage an op uses, by first use."""
    c = program.columns
    order = dict.fromkeys(t.storage for op in program.ops for t in (*op.inputs, *op.outputs))
    return [
        (int(program.storage_nbytes[s]), int(c.storage_kind[s]), int(c.storage_alloc[s]), int(c.storage_free[s]))
        for s in order
    ]


VIEWS = {
    "aten::t", "aten::view", "aten::_reshape_alias", "aten::transpose", "aten::slice", "aten::detach",
    "aten::lift_fresh", "aten::select", "aten::expand", "aten::permute", "aten::unsqueeze", "aten::_unsafe_view",
    "aten::alias", "aten::split",
}  # fmt: skip


def runs_on_device(op: Op) -> bool:
    """Whether an op gives the device something to do."""
    return op.name not in VIEWS and any(t.spec.device == "cuda" for t in (*op.inputs, *op.outputs))
