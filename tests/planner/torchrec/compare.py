"""Captured ranks of TorchRec against two real processes with gloo: op by op, and what is exchanged.

`python -m tests.planner.torchrec.compare [NAME ...]` compares all set-ups, or those named, and ends with 1 where one
differs. Every op and collective of a real run must have been captured, in its order and with its shapes.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.capturing.oracle import tensors_of
from tests.capturing.real_pair import WORLD, Real, exchanged, real_exchanged, real_pair
from tests.planner.torchrec import sharded_steps
from traincast.capturing import capture_distributed
from traincast.ir.workload import Workload

# What computes or exchanges. TorchRec makes numbers on a GPU otherwise than on a CPU: as pinned copies.
SEEN = (
    "fbgemm::", "c10d::", "aten::addmm", "aten::mm", "aten::cat", "aten::stack", "aten::split_with_sizes", "aten::sum",
    "aten::mean", "aten::pow", "aten::mul", "aten::div", "aten::clone", "aten::zeros_like", "aten::_foreach",
)  # fmt: skip
# FBGEMM's kernels for a GPU, and what it calls on any device.
_GPU = (
    (re.compile(r"fbgemm::split_embedding_codegen_forward_(?:un)?weighted_cuda"), "lookup"),
    (re.compile(r"fbgemm::split_embedding_codegen_lookup_\w+_function(?:_pt2)?"), "lookup"),
    (re.compile(r"fbgemm::split_embedding_(?:nobag_)?backward_codegen_\w+_(?:exact_cuda|pt2_wrapper|cpu)"), "update"),
    (re.compile(r"fbgemm::dense_embedding_codegen_(?:forward_unweighted_cuda|lookup_function)"), "lookup"),
    (re.compile(r"fbgemm::split_embedding_codegen_grad_indice_weights_(?:cuda|pt2_wrapper)"), "weight_gradient"),
    (re.compile(r"fbgemm::permute_pooled_embs(?:_auto_grad)?(?:_split)?"), "permute_pooled_embs"),
    (re.compile(r"fbgemm::batch_index_select_dim0_backward(?:_cpu_impl)?"), "spread_gradient"),
)
_SEGMENTS, _ON_CPU = "fbgemm::keyed_jagged_index_select_dim1", "fbgemm::permute_1D_sparse_data"
"""What TorchRec calls on a GPU and on a CPU for features that have batches of their own."""


_COPIED = ("aten::clone", "int64")  # numbers made into tensors, as above
_WHOLE = ("aten::index_select",)  # what it does inside is a CPU's own
_LARGE = sharded_steps.ROWS * 16  # elements of a table's gradient, which FBGEMM makes inside one op on a GPU


def name_op(name: str) -> str:
    """The op, with one name for lookups and one for updates wherever they run."""
    return next((word for pattern, word in _GPU if pattern.fullmatch(name)), name)


@dataclass
class Comparison:
    """A set-up: what was captured, and which of it real runs have shown. `missing` ran and was not captured."""

    name: str
    workload: Workload
    seen: set[int] = field(default_factory=set)
    met: set[int] = field(default_factory=set)
    missing: list[Any] = field(default_factory=list)
    runs: list[Real] = field(default_factory=list)

    @property
    def ops(self) -> list[Any]:
        """What rank 0 runs, as captured."""
        return list(list_captured_ops(self.workload.programs[self.workload.ranks[0]]))

    @property
    def told(self) -> list[Any]:
        """What rank 0 exchanges, as captured."""
        return exchanged(self.workload.programs[self.workload.ranks[0]])

    @property
    def complete(self) -> bool:
        """Whether all that was captured has been seen."""
        return len(self.seen) == len(self.ops) and len(self.met) == len(self.told)

    def run_once(self) -> None:
        """One real run more."""
        with tempfile.TemporaryDirectory() as folder:
            run = real_pair(f"tests.planner.torchrec.sharded_steps:{self.name}", Path(folder))
        self.runs.append(run)
        self.seen |= self._match(self.ops, list(list_real_ops(run.trace)), is_same_op)
        self.met |= self._match(self.told, real_exchanged(run.trace), lambda ours, theirs: ours == theirs)

    def _match(self, captured: list[Any], ran: list[Any], same: Callable[[Any, Any], bool]) -> set[int]:
        """Where in the captured order what ran stands."""
        found, at = set(), 0
        for one in ran:
            place = next((i for i in range(at, len(captured)) if same(captured[i], one)), None)
            if place is None:
                self.missing.append(one)
                continue
            found.add(place)
            at = place + 1
        return found


def compare(name: str, *, runs: int) -> Comparison:
    """Captures a set-up and runs it until each captured op was seen: PyTorch's traces of a step now and then lack some
    of its ops (a few of 53 in every second one), never the same."""

    def make_step(batch: int, *, rank: int, world_size: int) -> Any:
        return getattr(sharded_steps, name)(rank, "cuda")

    workload = capture_distributed(
        make_step, world_size=WORLD, batch_size=sharded_steps.BATCH, name=name, rebatch=False
    )
    result = Comparison(name, workload)
    while len(result.runs) < runs and not result.complete and not result.missing:
        result.run_once()
    return result


def list_real_ops(nodes: Any) -> Any:
    """Name and tensors of the outermost ops that are looked at."""
    for node in nodes:
        if node.name.startswith(SEEN):
            tensors = [(shape, dtype) for shape, dtype in tensors_of(node) if shape or dtype == "float32"]
            (shape, dtype), *_ = (*tensors, ((), ""))
            large = node.name == "aten::zeros_like" and len(shape) == 1 and shape[0] >= _LARGE
            if not large and (node.name, dtype) != _COPIED:
                yield name_op(node.name), tensors
        elif node.name not in _WHOLE:
            yield from list_real_ops(node.children)


def list_captured_ops(program: Any) -> Any:
    """The same of a captured program."""
    ops = list(program.ops)
    for op, following in zip(ops, [*ops[1:], ops[-1]], strict=True):
        if op.name == "fbgemm::asynchronous_complete_cumsum" and following.name == _SEGMENTS:
            continue  # where each segment begins, which the CPU's op finds itself
        tensors = [(t.spec.shape, t.spec.dtype) for t in op.inputs]
        if op.name.startswith(SEEN) and (op.name, tensors[0][1]) != _COPIED:
            yield name_op(op.name), tensors


def is_same_op(ours: Any, theirs: Any) -> bool:
    """Lookups take more arguments that say how their tables are; the gradient of weights is told by what it comes
    from."""
    if ours[0] in ("lookup", "update"):
        given = {(shape, dtype) for shape, dtype in ours[1] if dtype != "int32"}  # without where columns begin
        return ours[0] == theirs[0] and given <= set(theirs[1])
    if ours[0] in ("weight_gradient", "spread_gradient"):
        return ours[0] == theirs[0] and ours[1][:2] == theirs[1][:2]
    if ours[0] == _SEGMENTS:
        values, lengths, _, order = ours[1]
        return bool(theirs == (_ON_CPU, [order, lengths, values]))
    return bool(ours == theirs)


def main(names: Sequence[str]) -> int:
    """Prints a line for every set-up."""
    wrong = 0
    for name in names or sharded_steps.SETUPS:
        try:
            found = compare(name, runs=2)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:160]}", flush=True)
            wrong += 1
            continue
        ops, told = found.ops, found.told
        bad = f"; ran and not captured: {found.missing[:2]}" if found.missing else ""
        print(f"{name}: {len(found.seen)} of {len(ops)} ops and {len(found.met)} of {len(told)} collectives seen in "
              f"{len(found.runs)} runs{bad}", flush=True)  # fmt: skip
        wrong += bool(found.missing)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
