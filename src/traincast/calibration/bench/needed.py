"""Which microbenchmarks a given step needs: its own ops, each in the state in which the step finds its operands, first
those that narrow the interval of its predicted time most."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import exp, log

from traincast.calibration.bench.plans import FAR_BYTES, Task
from traincast.costs.cpu.caches import Operand, list_operands
from traincast.costs.cpu.cpu_ops import make_cpu_ops, runs_no_kernel
from traincast.costs.cpu.features import TABLE_KINDS, count_touched_bytes, estimate_rough_seconds, get_kind
from traincast.costs.cpu.op_costs import price_ops, read_table_access
from traincast.costs.cpu.profile import Profile
from traincast.ir.ops import Signature
from traincast.ir.program import Program
from traincast.utils.narrowing import Part, order_by_narrowing, rank_by_remaining_width

_CODE_NEAR = 1 << 20  # bytes ago that an op of the same name ran, its code is still in an L2
_STATES = (0, 1 << 20, 4 << 20, 16 << 20, FAR_BYTES)  # bytes between two calls
_UNKNOWN = 0.5  # log-sigma of an op before anything was fitted: the same for all


class Coverage:
    """The ops of a step as tasks, and how much of its time those take that were measured. A `profile` of the machine
    knows how long each should take and how sure that is; without one bytes and flops say the former, and all are as
    unsure."""

    def __init__(self, program: Program, access: Sequence[str] = (), profile: Profile | None = None) -> None:
        distributions = read_table_access(program, access)
        found = list_operands(
            program, 2.0 * FAR_BYTES, lambda op, one: count_touched_bytes(one, distributions.get(op, ""))
        )
        self._calls: Counter[Task] = Counter()
        seconds: dict[Task, float] = defaultdict(float)
        errors: dict[Task, float] = defaultdict(float)
        cost = iter(() if profile is None else price_ops(program, profile, access))
        for op in program.ops:
            for signature in make_cpu_ops(op.signature):
                price = next(cost, None)
                if runs_no_kernel(signature):
                    continue
                row, code = found[op.index]
                between = _choose_state(signature, row)
                far = bool(between) and code > _CODE_NEAR
                task = Task(signature, between, far, distributions.get(op.index, ""))
                self._calls[task] += 1
                known = estimate_rough_seconds(signature) if price is None else price.seconds
                seconds[task] += known
                errors[task] += known * (_UNKNOWN if price is None else price.sigma)
        total = sum(seconds.values()) or 1.0
        self._parts = {
            task: Part(took / total, errors[task] / took, get_kind(task.signature))
            for task, took in seconds.items()
            if took > 0
        }
        self._rough = {task: calls * estimate_rough_seconds(task.signature) for task, calls in self._calls.items()}
        self._measured: dict[Task, float] = {}

    @property
    def tasks(self) -> list[Task]:
        """All of them, what narrows the interval of the step most first."""
        order = order_by_narrowing(self._parts)
        return [*order, *(task for task in self._calls if task not in order)]

    @property
    def by_kind(self) -> dict[str, float]:
        """Half the 90 % interval of the step's kernels that is left when all ops of a kind are measured, as a share of
        their time; what narrows it most first."""
        shares: dict[str, float] = defaultdict(float)
        errors: dict[str, float] = defaultdict(float)
        for task, part in self._parts.items():
            shares[get_kind(task.signature)] += part.share
            errors[get_kind(task.signature)] += part.error
        return rank_by_remaining_width({kind: Part(share, errors[kind] / share) for kind, share in shares.items()})

    def add(self, task: Task, seconds: float) -> None:
        """A task was measured: seconds of one call."""
        self._measured[task] = self._calls[task] * seconds

    def share(self) -> float:
        """The part of the step's kernel time that was measured. What was not is guessed from bytes and flops, at the
        speed that measured ops of its kind, or all of them, had."""
        done = sum(self._measured.values())
        if not done:
            return 0.0
        speeds = {kind: self._slowness(kind) for kind in ("", *{get_kind(task.signature) for task in self._rough})}
        rest = sum(
            (speeds[get_kind(task.signature)] or speeds[""]) * rough
            for task, rough in self._rough.items()
            if task not in self._measured
        )
        return done / (done + rest)

    def _slowness(self, kind: str) -> float:
        """Measured over guessed seconds of a kind ("": of all); 0 where none was measured."""
        some = [task for task in self._measured if kind in ("", get_kind(task.signature))]
        return sum(self._measured[task] for task in some) / sum(self._rough[task] for task in some) if some else 0.0


def _choose_state(signature: Signature, row: Sequence[Operand]) -> int:
    """The bytes between calls that are most like where the operands are: the table's of a lookup, else on average."""
    counted = row[:1] if get_kind(signature) in TABLE_KINDS else row
    total = sum(operand.nbytes for operand in counted)
    if not total:
        return _STATES[0]
    distance = exp(sum(one.nbytes * log(min(max(one.distance, 1 << 16), FAR_BYTES)) for one in counted) / total)
    return min(_STATES, key=lambda state: abs(log(max(state, 1 << 18) / distance)))
