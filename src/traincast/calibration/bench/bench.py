"""Microbenchmarks: any op as a call on real tensors, which a given step needs, and all of them one after the other into
the store."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from math import exp, inf, log
from typing import Any

import numpy as np
import torch

from traincast.calibration.bench.collectives import CopyCall, CopyTask
from traincast.calibration.bench.device import Device, Reference, run_series, summarise_series
from traincast.calibration.bench.plans import FAR_BYTES, Task
from traincast.calibration.bench.store import Store
from traincast.costs.cpu.features import (
    TABLE_KINDS,
    Operand,
    count_lookups,
    count_touched_bytes,
    estimate_rough_seconds,
    get_kind,
    list_operands,
)
from traincast.costs.cpu.op_costs import make_cpu_ops, price_ops, read_table_access, runs_no_kernel
from traincast.costs.cpu.profile import Profile
from traincast.costs.cpu.samples import Sample, format_signature
from traincast.ir.ops import Scalar, Signature, TensorSpec
from traincast.ir.program import Program
from traincast.models.embeddings.access import Uniform, draw_rows, parse_access
from traincast.utils.arrays import FloatArray
from traincast.utils.errors import TraincastError
from traincast.utils.metrics import Part, order_by_narrowing, rank_by_remaining_width


class OpCall:
    """One op, called on any of several equal sets of operands, each with its own table and result."""

    def __init__(
        self,
        signature: Signature,
        device: Device,
        *,
        sets: int = 1,
        rows: Callable[[int, int], Any] | None = None,
    ) -> None:
        self.signature = signature = make_repeatable(signature)
        self._op = find_op(signature)
        self._rows = rows
        self._arguments = [self._bind(device) for _ in range(sets)]
        self._results: list[Any] = [None] * sets

    def __call__(self, number: int = 0) -> None:
        """Runs the op once on a set of operands; its result is where the set's last one lay."""
        args, kwargs = self._arguments[number]
        self._results[number] = None
        self._results[number] = self._op(*args, **kwargs)

    def _bind(self, device: Device) -> tuple[list[Any], dict[str, Any]]:
        tensors = list(self.signature.inputs)
        given = dict(self.signature.groups)
        scalars = dict(self.signature.scalars)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in self._op._schema.arguments:
            name = argument.name
            if name in given:
                taken, tensors = tensors[: given[name]], tensors[given[name] :]
                value = self._tensor_argument(name, taken, str(argument.type), scalars, device)
            elif name in scalars:
                value = decode_argument(name, scalars[name])
            elif argument.has_default_value():
                continue
            else:
                value = None
            if argument.kwarg_only:
                kwargs[name] = value
            else:
                args.append(value) if len(args) == _find_position(self._op, name) else kwargs.__setitem__(name, value)
        return args, kwargs

    def _tensor_argument(
        self, name: str, specs: list[TensorSpec], kind: str, scalars: dict[str, Scalar], device: Device
    ) -> Any:
        if scalars.get(f"{name}_layout") == "sparse_coo":
            return self._sparse(specs, device)
        made = [self._tensor(name, spec, device) for spec in specs]
        if kind.startswith("List"):
            present = scalars.get(f"{name}_given")
            if isinstance(present, tuple):
                rest = iter(made)
                return [next(rest) if there else None for there in present]
            return made
        return made[0]

    def _sparse(self, specs: list[TensorSpec], device: Device) -> torch.Tensor:
        """A sparse gradient: its indices within the table that it belongs to."""
        rows = self._table_rows()
        count = specs[0].shape[-1]
        values = device.allocate(specs[1].shape, specs[1].dtype)
        indices = device.put(torch.as_tensor(self._draw(rows, count)).view(1, -1))
        return torch.sparse_coo_tensor(
            indices, values, (rows, *specs[1].shape[1:]), check_invariants=False, is_coalesced=False
        )

    def _table_rows(self) -> int:
        """Rows of the table behind this op; where it is not among the operands, as many as there are lookups."""
        number = self.signature.scalar("num_weights")
        lookups, rows, _ = count_lookups(self.signature)
        return int(number) if isinstance(number, int) else max(rows or lookups, 1)

    def _draw(self, rows: int, count: int) -> torch.Tensor:
        if self._rows is not None:
            return torch.as_tensor(self._rows(rows, count))
        return torch.randint(rows, (count,))

    def _tensor(self, name: str, spec: TensorSpec, device: Device) -> torch.Tensor:
        """A tensor of this form; indices and offsets hold values that the op can use."""
        special = self._indices(name, spec)
        if special is not None:
            return device.put(special.to(getattr(torch, spec.dtype)).reshape(spec.shape))
        if spec.is_contiguous or not spec.shape:
            made = device.allocate(spec.shape or (1,), spec.dtype).reshape(spec.shape)
            return torch.sigmoid(made) if "binary_cross_entropy" in self.signature.name else made  # probabilities
        extent = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True) if size)
        return device.allocate((extent,), spec.dtype).as_strided(spec.shape, spec.stride)

    def _indices(self, name: str, spec: TensorSpec) -> torch.Tensor | None:
        signature = self.signature
        if spec.dtype not in ("int64", "int32"):
            return None
        if signature.name == "aten::_embedding_bag":
            lookups, bags = signature.inputs[1].numel, signature.inputs[2].numel
            if name == "offsets":
                return torch.arange(bags) * (lookups // max(bags, 1))
            return self._draw(signature.inputs[0].shape[0], spec.numel)
        if signature.name == "aten::_embedding_bag_backward":
            return self._backward_indices(name, spec)
        if signature.name == "aten::max_pool2d_with_indices_backward":
            return self._largest(spec)
        if signature.name in ("aten::embedding", "aten::embedding_dense_backward", "aten::index_select"):
            return self._draw(self._index_range(), spec.numel)
        return torch.randint(max(self._index_range(), 1), (spec.numel,))

    def _backward_indices(self, name: str, spec: TensorSpec) -> torch.Tensor:
        lookups, bags = self.signature.inputs[1].numel, self.signature.inputs[0].shape[0]
        if name == "indices":
            return self._draw(self._table_rows(), spec.numel)
        per_bag = lookups // max(bags, 1)
        if name == "offset2bag":
            return torch.arange(spec.numel) // max(per_bag, 1)
        if name == "offsets":
            return torch.arange(spec.numel) * per_bag
        return torch.full((spec.numel,), per_bag)

    def _largest(self, spec: TensorSpec) -> torch.Tensor:
        """Where the largest of each window was: its first pixel."""
        height, width = self.signature.inputs[1].shape[-2:]
        down, along = torch.arange(spec.shape[-2]), torch.arange(spec.shape[-1])
        first = (down * height // spec.shape[-2])[:, None] * width + along * width // spec.shape[-1]
        return first.expand(spec.shape)

    def _index_range(self) -> int:
        """How many values an index may take: the smallest dimension that such an op can index."""
        number = self.signature.scalar("num_weights")
        if isinstance(number, int):
            return number
        first = self.signature.inputs[0].shape
        if self.signature.name.startswith("aten::nll_loss") or self.signature.name == "aten::gather":
            shapes = [spec.shape for spec in self.signature.inputs if len(spec.shape) > 1]
            return min(min(shape) for shape in shapes) if shapes else 1
        if self.signature.name in ("aten::embedding", "aten::index_select"):
            return first[0]
        return min(first) if first else 1


def make_repeatable(signature: Signature) -> Signature:
    """The op as it can be run a thousand times on the same operands and take the same time.

    Sparse gradients that are added in place would grow without end, and what is scaled in place would end in denormal
    numbers, which are slow.
    """
    if get_kind(signature) == "sparse_add":
        return replace(signature, name="aten::add")
    if signature.name in ("aten::mul_", "aten::div_") and signature.overload == "Scalar":
        return replace(signature, scalars=tuple((key, 1.0 if key == "other" else v) for key, v in signature.scalars))
    return signature


def find_op(signature: Signature) -> Any:
    """The overload of this signature; the one that takes its arguments where the signature does not name it."""
    namespace, _, name = signature.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        raise TraincastError(f"op {signature.name} is unknown to torch {torch.__version__}")
    if signature.overload and signature.overload in packet.overloads():
        return getattr(packet, signature.overload)
    return packet.default if "default" in packet.overloads() else getattr(packet, packet.overloads()[0])


def decode_argument(name: str, value: Scalar) -> Any:
    """A scalar argument as torch takes it."""
    if isinstance(value, str) and name in ("dtype", "input_dtype", "memory_format", "layout"):
        return getattr(torch, value, None)
    return list(value) if isinstance(value, tuple) else value


def _find_position(op: Any, name: str) -> int:
    return next(i for i, argument in enumerate(op._schema.arguments) if argument.name == name)


_REPEATS, _COPY_REPEATS = 5, 9  # of one visit: most ops get two, minutes apart, copies one
_MOST_SECONDS = 0.12  # for one sample's repetitions: those of long ops are alike, and another shape says more
_MEMORY_SHARE = 0.8  # of what is free that operands may take


def make_task_key(task: Task) -> str:
    """A name for a task that is the same in every run."""
    text = f"{format_signature(task.signature)}|{task.between}|{task.code_far}|{task.access}"
    return blake2b(text.encode(), digest_size=12).hexdigest()


def run_benchmarks(
    device: Device,
    store: Store,
    tasks: Iterable[Task],
    *,
    seconds: float = inf,
    failed: Callable[[Task, str], None] = lambda *_: None,
    progress: Callable[[float], None] = lambda _: None,
    turn: str = "",
) -> int:
    """Measures tasks that the store does not hold until `seconds` have passed or none is left; how many were.

    An op that cannot be run on made-up operands, or has no room, is told to `failed` and left out. What
    is measured in another `turn` stands alongside what was measured before.
    """
    reference = Reference(device)
    start, done = time.monotonic(), 0
    for task in tasks:
        if time.monotonic() - start >= seconds:
            break
        key = make_task_key(task) + turn
        if key not in store:
            try:
                sample = measure_task(device, reference, task)
            except (RuntimeError, IndexError, TypeError, TraincastError) as error:  # it wants values we do not know
                notes = " ".join(str(error).split())[:120]
                _check_alive(device, task.signature.name, notes)
                failed(task, notes)
                continue
            store.append(key, sample)
            done += 1
        progress(min(1.0, (time.monotonic() - start) / seconds))
    store.merge()
    return done


def _check_alive(device: Device, op: str, notes: str) -> None:
    """Ends the run where an op has left the device in a state in which nothing works any more."""
    try:
        device.synchronise()
    except RuntimeError:
        raise TraincastError(
            f"the device answers nothing since {op} failed ({notes}); what was measured is kept: run the same command "
            "with another `seed`, and report the op"
        ) from None


def measure_task(device: Device, reference: Reference, task: Task) -> Sample:
    """One microbenchmark: single calls, each in the state that the task asks for, alongside the reference; medians."""
    needed, free = _count_operand_bytes(task.signature), device.free_bytes()
    if needed > _MEMORY_SHARE * free:
        raise TraincastError(f"its operands take {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    call = OpCall(
        task.signature, device, sets=2 if task.between and not task.code_far else 1, rows=_make_row_drawer(task.access)
    )
    return _measure_call(device, reference, call, task)


def _count_operand_bytes(signature: Signature) -> int:
    """Bytes of the operands of two calls."""
    return 2 * sum(tensor.nbytes for tensor in (*signature.inputs, *signature.outputs))


def measure_copy(device: Device, reference: Reference, task: CopyTask) -> Sample:
    """One copy between host and device, its buffers from memory."""
    return _measure_call(
        device, reference, CopyCall(task, device, sets=2), Task(task.signature, FAR_BYTES), _COPY_REPEATS
    )


def _measure_call(
    device: Device, reference: Reference, call: Callable[[int], object], task: Task, repeats: int = _REPEATS
) -> Sample:
    """A call finds its operands as a step does: touched once, then other data, then, unless the op's code is to be far
    as well, another call of the same op on operands of its own, and then small ops of other kinds, so that at least
    the code that all ops share is at hand."""
    others = _make_other_ops(device)

    def prepare() -> None:
        call(0)
        if task.between:
            device.flush(task.between)
            if not task.code_far:
                call(1)
        others()

    series = run_series(
        device, reference, lambda: call(0), repeats=repeats, seconds=_MOST_SECONDS, prepare=prepare, queued=True
    )
    nothing = reference.nothing
    return Sample(
        signature=task.signature, between=task.between, code_far=task.code_far, access=task.access,
        wall=_correct_for_reference(series.wall - nothing.wall, series.reference_wall),
        busy=_correct_for_reference(series.busy - nothing.busy, series.reference_busy),
        reference_wall=float(np.median(series.reference_wall)),
        reference_busy=float(np.median(series.reference_busy)),
        spread=summarise_series(series, "busy").spread,
    )  # fmt: skip


def _make_other_ops(device: Device) -> Callable[[], object]:
    """A few small ops of different kinds, which push the code of the last call out of the innermost cache."""
    import torch

    small = device.allocate((24, 24))

    def run() -> None:
        torch.cat([torch.relu(torch.mm(small, small)), small.t().contiguous()])
        torch.softmax(small.sum(dim=0) * 0.5, dim=0).sigmoid_().add_(1.0)
        torch.embedding(small, torch.zeros(4, dtype=torch.int64, device=small.device)).mean()

    return run


def _correct_for_reference(seconds: FloatArray, reference: FloatArray) -> float:
    """Seconds at the median reference: the median ratio times it."""
    return float(np.median(seconds / reference) * np.median(reference))


def _make_row_drawer(access: str) -> Callable[[int, int], Any]:
    random = np.random.default_rng(0)
    distribution = parse_access(access) if access else Uniform()
    return lambda rows, lookups: draw_rows(distribution, rows, lookups, random)


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
