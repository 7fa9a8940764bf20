"""A traced run held against the saved prediction of it: the step and its parts, kernels by family, op and module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from traincast.simulator.prediction.breakdown import mask_module_numbers
from traincast.simulator.prediction.document import SCHEMA, PredictionDocument
from traincast.traces.classify import COMMUNICATION
from traincast.traces.events import UNREADABLE, Kind
from traincast.traces.link import Linked
from traincast.traces.profiler.kernels import find_kernels_in_steps
from traincast.traces.profiler.rates import OpFinder
from traincast.traces.replay.compare import (
    Times,
    TraceComparison,
    compute_mean_step,
    find_slowest_rank,
    list_changes,
    sum_by_name,
    sum_families,
)
from traincast.traces.replay.results import RankReport, TraceReport
from traincast.traces.signatures import SignatureReader
from traincast.utils.errors import TraincastError
from traincast.utils.files.reading import read_bytes

_BEGINS = re.compile(rb'\s*\{\s*"schema"\s*:')  # no trace does
_LARGEST = 1 << 28  # bytes of a saved prediction
_GRADIENT = re.compile(r"Backward\d*$|AccumulateGrad|CppNode|^autograd::engine")


def is_saved_prediction(path: Path) -> bool:
    """Whether a file is the JSON of a prediction, by how it begins."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return False
        with path.open("rb") as file:
            return _BEGINS.match(file.read(64)) is not None
    except OSError:
        return False


def read_prediction(path: Path) -> PredictionDocument:
    """A prediction as `traincast predict` printed it in JSON."""
    try:
        document = msgspec.json.decode(read_bytes(path, most=_LARGEST), type=PredictionDocument)
    except UNREADABLE as error:
        raise TraincastError(f"'{path}' is no prediction: {error}; give what predict prints as JSON") from None
    if document.schema != SCHEMA:
        raise TraincastError(f"'{path}' has schema {document.schema}, this release reads {SCHEMA}: predict it again")
    return document


def compare_with_prediction(predicted: PredictionDocument, report: TraceReport) -> TraceComparison:
    """What of the measured step of the slowest rank is not as predicted, matched by name."""
    rank = find_slowest_rank(report)
    step, exposed = predicted.iteration_ms, predicted.exposed_comm_ms or 0.0
    active = step if predicted.device_active_ms is None else predicted.device_active_ms
    parts = {"compute": active - exposed, "exposed_comm": exposed, "idle": step - active}
    measured = {name: 1e3 * compute_mean_step(rank, name) for name in parts}
    modules = _sum_modules(rank.linked, set(predicted.by_module or ()))
    return TraceComparison(
        names=(f"the prediction of {predicted.workload} on {predicted.platform}", rank.linked.trace.path.name),
        step=(1e-3 * step, compute_mean_step(rank, "step")),
        kernels=(predicted.kernels, rank.median_step.kernels),
        interval=tuple(1e-3 * limit for limit in predicted.interval_ms) if predicted.interval_ms else (),
        parts=list_changes(_read_times(parts), _read_times(measured)),
        families=list_changes(_read_times(predicted.per_family), sum_families(rank)),
        ops=list_changes(_read_times(predicted.by_op), _sum_ops(rank)),
        modules=list_changes(_read_times(predicted.by_module or {}), modules) if modules else (),
    )


def _read_times(milliseconds: dict[str, float]) -> Times:
    return {(name, ""): (None, 1e-3 * value) for name, value in milliseconds.items()}


def _sum_ops(rank: RankReport) -> Times:
    """Kernel time by the op that lowering knows, which predictions name too."""
    linked, rows = rank.linked, find_kernels_in_steps(rank.linked)
    reader = SignatureReader(linked, rank.execution, rank.node)
    finder = OpFinder(linked, reader)
    exchanges = linked.find_communication(rows)

    def name_op(row: int, exchanging: bool) -> str:
        author = int(linked.author[row])
        anchor = finder.find_anchor(author) if author >= 0 else -1
        if exchanging or anchor < 0:
            return COMMUNICATION if exchanging else "(no op)"
        signature = reader.get_signature(anchor)
        return linked.get_name(anchor) if signature is None else signature.name

    return sum_by_name(map(name_op, rows.tolist(), exchanges.tolist()), linked, rows)


def _sum_modules(linked: Linked, predicted: set[str]) -> Times:
    """Kernel time by the innermost annotation that is called as a predicted module is, backward included, numbered ones
    together; nothing where the trace names no module."""
    roots = {name.partition(".")[0] for name in predicted if not name.startswith("(")}
    names = [mask_module_numbers(name) if name.partition(".")[0] in roots else "" for name in linked.trace.names]
    is_module = np.array([bool(name) for name in names])[linked.events["name"]]
    is_module &= linked.events["kind"] == Kind.ANNOTATION
    if not is_module.any():
        return {}
    rows = find_kernels_in_steps(linked)
    rows = rows[linked.launch[rows] >= 0]
    forward = _find_forward_ops(linked)

    def name_module(call: int) -> str:
        node = ""
        for above in _iterate_with_forward(linked, call, forward):
            if is_module[above]:
                return names[int(linked.events["name"][above])]
            name = linked.get_name(above)
            if name.startswith("Optimizer.step"):
                return "(optimizer)"
            node = node or ("(backward)" if _GRADIENT.search(name) else "")
        return node or "(other)"

    return sum_by_name(map(name_module, linked.author[rows].tolist()), linked, rows)


def _find_forward_ops(linked: Linked) -> dict[tuple[int, int], int]:
    """The forward op of each autograd sequence number, by step and number."""
    events = linked.events
    made = (events["kind"] == Kind.OP) & (events["sequence"] >= 0) & (events["forward_thread"] <= 0)
    rows = np.flatnonzero(made)
    return dict(zip(zip(linked.step[rows].tolist(), events["sequence"][rows].tolist(), strict=True), rows.tolist(),
                    strict=True))  # fmt: skip


def _iterate_with_forward(linked: Linked, call: int, forward: dict[tuple[int, int], int]) -> Iterator[int]:
    """What encloses a call, innermost first, then what encloses the forward op of the gradient that it is part of."""
    events, of_forward = linked.events, -1
    for above in linked.iterate_enclosing(call):
        yield above
        if of_forward < 0 and events["forward_thread"][above] > 0:
            of_forward = forward.get((int(linked.step[above]), int(events["sequence"][above])), -1)
    if of_forward >= 0:
        yield from linked.iterate_enclosing(of_forward)
