"""Optimizers (one parameter at a time as PyTorch 1.8, or lists as PyTorch 2), and FBGEMM's lookup with its fused
update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from traincast.ir.ops import Phase, StorageKind
from traincast.models.embeddings.table import OPTIMIZER_STATE
from traincast.models.layers.builder import Ref, Scalars, StepBuilder

LEARNING_RATE = 0.01
"""Of every built-in step; times do not depend on it."""
TITLES = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "AdamW"}
# PyTorch's defaults
_BETAS, _DECAY = (0.9, 0.999), 0.01
_ADAM_EPSILON, _ADAGRAD_EPSILON = 1e-08, 1e-10
_COUNT = 2  # AdamW's step: the second, since a capture warms up with one
_ADAM_ROOT = (1 - _BETAS[1] ** _COUNT) ** 0.5  # what the root of the second moment is divided by
_ADAM_STEP = -LEARNING_RATE / (1 - _BETAS[0] ** _COUNT)


@dataclass(frozen=True, slots=True)
class OptimizedParameter:
    """A parameter with its optimizer state: a step count on the host, and moments."""

    parameter: Ref
    count: Ref | None
    moments: tuple[Ref, ...]


def make_optimizer_state(builder: StepBuilder, optimizer: str, parameters: Sequence[Ref]) -> list[OptimizedParameter]:
    """Optimizer state of parameters, there before the step."""
    kind, moments = StorageKind.OPTIMIZER_STATE, OPTIMIZER_STATE[optimizer].per_weight
    return [
        OptimizedParameter(
            parameter,
            builder.add_resident_tensor((), kind, device="cpu") if moments else None,
            tuple(builder.add_resident_tensor(parameter.shape, kind, parameter.spec.dtype) for _ in range(moments)),
        )
        for parameter in parameters
    ]


def zero_grad(builder: StepBuilder, optimizer: str, grads: Sequence[Ref] = ()) -> None:
    """Writes zeros into gradients; those that are dropped instead cost host time only."""
    builder.open_scope(f"Optimizer.zero_grad#{TITLES[optimizer]}.zero_grad", Phase.OTHER)
    for grad in grads:
        builder.add_op("aten::zero_", [("self", grad)], [grad])


def write_single_tensor_step(
    builder: StepBuilder, optimizer: str, stepped: Sequence[OptimizedParameter], grads: Sequence[Ref]
) -> None:
    """One update of every parameter by ops of its own."""
    builder.open_scope(f"Optimizer.step#{TITLES[optimizer]}.step", Phase.OPTIMIZER)
    update = {"sgd": _write_sgd, "adagrad": _write_adagrad, "adam": _write_adam}[optimizer]
    last: Ref | None = None
    for parameter, grad in zip(stepped, grads, strict=True):
        last = update(builder, parameter, grad, last)
    _release_denominator(builder, last)


def write_foreach_step(
    builder: StepBuilder, optimizer: str, stepped: Sequence[OptimizedParameter], grads: Sequence[Ref]
) -> None:
    """One update of all parameters by ops over lists (`_foreach_*`)."""
    builder.open_scope(f"Optimizer.step#{TITLES[optimizer]}.step", Phase.OPTIMIZER)
    parameters = [state.parameter for state in stepped]
    if optimizer == "sgd":
        lists = [("self", parameters), ("other", grads)]
        builder.add_op("aten::_foreach_add_", lists, [], [("alpha", -LEARNING_RATE)], overload="List")
        return
    counts = [state.count for state in stepped if state.count is not None]
    moments = [[state.moments[i] for state in stepped] for i in range(len(stepped[0].moments))]
    one = builder.add_resident_tensor((), StorageKind.ACTIVATION, device="cpu")
    builder.add_op("aten::lift_fresh", [("self", one)], [one])
    builder.add_op("aten::_foreach_add_", [("self", counts), ("other", one)], [], [("alpha", 1.0)], overload="Tensor")
    update = _write_foreach_adagrad if optimizer == "adagrad" else _write_foreach_adam
    update(builder, parameters, grads, counts, moments)


def _release_denominator(builder: StepBuilder, previous: Ref | None) -> None:
    """The denominator of the parameter before lives until the name it is bound to is bound anew."""
    if previous is not None:
        builder.free_tensors(previous)


def _write_in_place(
    builder: StepBuilder, name: str, arguments: Sequence[tuple[str, Ref]], scalars: Scalars, overload: str
) -> None:
    builder.add_op(name, arguments, [arguments[0][1]], scalars, overload=overload)


def _write_add(builder: StepBuilder, to: Ref, value: float) -> None:
    _write_in_place(builder, "aten::add_", [("self", to)], [("other", value), ("alpha", 1)], "Tensor")


def _write_sgd(builder: StepBuilder, stepped: OptimizedParameter, grad: Ref, _: Ref | None) -> None:
    arguments = [("self", stepped.parameter), ("other", grad)]
    _write_in_place(builder, "aten::add_", arguments, [("alpha", -LEARNING_RATE)], "Tensor")


def _write_adagrad(builder: StepBuilder, stepped: OptimizedParameter, grad: Ref, previous: Ref | None) -> Ref:
    assert stepped.count is not None
    (moment,) = stepped.moments
    _write_add(builder, stepped.count, 1)
    builder.add_op("aten::_local_scalar_dense", [("self", stepped.count)])
    squares = [("self", moment), ("tensor1", grad), ("tensor2", grad)]
    _write_in_place(builder, "aten::addcmul_", squares, [("value", 1)], "")
    root = builder.add_tensor(moment.shape)
    builder.add_op("aten::sqrt", [("self", moment)], [root])
    _write_add(builder, root, _ADAGRAD_EPSILON)
    _release_denominator(builder, previous)
    quotient = [("self", stepped.parameter), ("tensor1", grad), ("tensor2", root)]
    _write_in_place(builder, "aten::addcdiv_", quotient, [("value", -LEARNING_RATE)], "")
    return root


def _write_adam(builder: StepBuilder, stepped: OptimizedParameter, grad: Ref, previous: Ref | None) -> Ref:
    assert stepped.count is not None
    first, second = stepped.moments
    _write_add(builder, stepped.count, 1)
    _write_in_place(
        builder, "aten::mul_", [("self", stepped.parameter)], [("other", 1 - LEARNING_RATE * _DECAY)], "Tensor"
    )
    _write_in_place(builder, "aten::lerp_", [("self", first), ("end", grad)], [("weight", 1 - _BETAS[0])], "Scalar")
    _write_in_place(builder, "aten::mul_", [("self", second)], [("other", _BETAS[1])], "Tensor")
    squares = [("self", second), ("tensor1", grad), ("tensor2", grad)]
    _write_in_place(builder, "aten::addcmul_", squares, [("value", 1 - _BETAS[1])], "")
    builder.add_op("aten::_local_scalar_dense", [("self", stepped.count)])
    root = builder.add_tensor(second.shape)
    builder.add_op("aten::sqrt", [("self", second)], [root])
    scaled = builder.add_tensor(second.shape)
    builder.add_op("aten::div", [("self", root)], [scaled], [("other", _ADAM_ROOT)], overload="Tensor")
    builder.free_tensors(root)
    _write_add(builder, scaled, _ADAM_EPSILON)
    _release_denominator(builder, previous)
    quotient = [("self", stepped.parameter), ("tensor1", first), ("tensor2", scaled)]
    _write_in_place(builder, "aten::addcdiv_", quotient, [("value", _ADAM_STEP)], "")
    return scaled


def _read_step_counts(builder: StepBuilder, counts: Sequence[Ref]) -> None:
    for count in counts:
        builder.add_op("aten::_local_scalar_dense", [("self", count)])


def _write_foreach_scalar(builder: StepBuilder, name: str, on: Sequence[Ref], value: float) -> None:
    builder.add_op(f"aten::_foreach_{name}", [("self", on)], [], [("scalar", value)], overload="Scalar")


def _write_foreach_squares(builder: StepBuilder, moments: Sequence[Ref], grads: Sequence[Ref], value: float) -> None:
    lists = [("self", moments), ("tensor1", grads), ("tensor2", grads)]
    builder.add_op("aten::_foreach_addcmul_", lists, [], [("value", value)], overload="Scalar")


def _write_foreach_roots(builder: StepBuilder, moments: Sequence[Ref]) -> list[Ref]:
    roots = [builder.add_tensor(moment.shape, moment.spec.dtype) for moment in moments]
    builder.add_op("aten::_foreach_sqrt", [("self", moments)], roots)
    return roots


def _write_foreach_adagrad(
    builder: StepBuilder, parameters: list[Ref], grads: Sequence[Ref], counts: list[Ref], moments: list[list[Ref]]
) -> None:
    _read_step_counts(builder, counts)
    _write_foreach_squares(builder, moments[0], grads, 1)
    roots = _write_foreach_roots(builder, moments[0])
    _write_foreach_scalar(builder, "add_", roots, _ADAGRAD_EPSILON)
    scaled = [builder.add_tensor(grad.shape, grad.spec.dtype) for grad in grads]
    factors: Scalars = [("scalars", (-LEARNING_RATE,) * len(grads))]
    builder.add_op("aten::_foreach_mul", [("self", grads)], scaled, factors, overload="ScalarList")
    quotient = [("self", parameters), ("tensor1", scaled), ("tensor2", roots)]
    builder.add_op("aten::_foreach_addcdiv_", quotient, [], [("value", 1)], overload="Scalar")
    builder.free_tensors(*roots, *scaled)


def _write_foreach_adam(
    builder: StepBuilder, parameters: list[Ref], grads: Sequence[Ref], counts: list[Ref], moments: list[list[Ref]]
) -> None:
    first, second = moments
    _write_foreach_scalar(builder, "mul_", parameters, 1 - LEARNING_RATE * _DECAY)
    ends = [("self", first), ("tensors1", grads)]
    builder.add_op("aten::_foreach_lerp_", ends, [], [("weight", 1 - _BETAS[0])], overload="Scalar")
    _write_foreach_scalar(builder, "mul_", second, _BETAS[1])
    _write_foreach_squares(builder, second, grads, 1 - _BETAS[1])
    _read_step_counts(builder, counts)
    _read_step_counts(builder, counts)
    roots = _write_foreach_roots(builder, second)
    corrected: Scalars = [("scalars", (_ADAM_ROOT,) * len(roots))]
    builder.add_op("aten::_foreach_div_", [("self", roots)], [], corrected, overload="ScalarList")
    _write_foreach_scalar(builder, "add_", roots, _ADAM_EPSILON)
    quotient = [("self", parameters), ("tensor1", first), ("tensor2", roots)]
    steps: Scalars = [("scalars", (_ADAM_STEP,) * len(roots))]
    builder.add_op("aten::_foreach_addcdiv_", quotient, [], steps, overload="ScalarList")
    builder.free_tensors(*roots)


MODULE = "Dlrm.tables"
_CACHE_WAYS = 32  # FBGEMM's set associativity


@dataclass(slots=True, eq=False)
class TableBatchedLookup:
    """One kernel for `tables` tables: their weights and, after `write_forward`, what its backward needs.

    `forms` are the scalars of both kernels. `optimizer` is the one fused into the backward kernel; "dense" tables are
    not updated by it: it gives their gradient. `states` are the fused optimizer's.
    """

    builder: StepBuilder
    tables: int
    weights: Ref
    states: Sequence[Ref]
    forms: Scalars
    optimizer: str
    weighted: bool = False
    indices: Ref | None = None
    offsets: Ref | None = None
    per_sample: Ref | None = None
    op: int = -1
    module: str = MODULE
    _constants: tuple[tuple[str, Ref], ...] = field(init=False)
    _checked: tuple[Ref, Ref] = field(init=False)

    def __post_init__(self) -> None:
        resident, buffer = self.builder.add_resident_tensor, StorageKind.BUFFER
        self._constants = (
            ("weights_offsets", resident((self.tables,), buffer, "int64")),
            ("D_offsets", resident((self.tables + 1,), buffer, "int32")),
        )
        self._checked = (resident((self.tables,), buffer, "int64"), resident((1,), buffer, "int64"))

    @property
    def _weighted(self) -> str:
        return "weighted" if self.weighted else "unweighted"

    def write_bounds_check(self, indices: Ref, offsets: Ref, per_sample: Ref | None = None) -> tuple[Ref, Ref]:
        """Takes the lookups of a batch and checks their bounds; gives them as they are used, in int64. `per_sample`
        are their weights."""
        builder = self.builder
        self.indices, self.offsets, self.per_sample = (
            self._cast_to_int64(indices),
            self._cast_to_int64(offsets),
            per_sample,
        )
        rows, warning = self._checked
        builder.open_scope("fbgemm::bounds_check_indices", Phase.FORWARD)
        checked = [("rows_per_table", rows), ("indices", self.indices), ("offsets", self.offsets), ("warning", warning)]
        builder.add_op("fbgemm::bounds_check_indices", checked, [], [("bounds_check_mode", 1)], module=self.module)
        return self.indices, self.offsets

    def write_forward(self, samples: int, columns: int) -> Ref:
        """Pooled embeddings [samples, columns]."""
        builder, family = self.builder, "dense" if self.optimizer == "dense" else "split"
        builder.open_scope("SplitLookupFunction")
        pooled = builder.add_tensor((samples, columns))
        name = f"fbgemm::{family}_embedding_codegen_forward_{self._weighted}_cuda"
        self.op = builder.add_op(name, self._list_arguments(), [pooled], self.forms, module=self.module)
        return pooled

    def write_cache_fill(self, cache: Ref, scalars: Scalars, populate: str = "fbgemm::lru_cache_populate") -> None:
        """Rows that the cache on the device misses come to it, those they replace go back."""
        builder, indices = self.builder, self.indices
        assert indices is not None
        builder.open_scope("fbgemm::linearize_cache_indices")
        linear = builder.compute(
            "fbgemm::linearize_cache_indices", [("indices", indices)], indices.shape, dtype="int64", module=self.module
        )
        builder.open_scope(populate)
        arguments = [("weights", self.weights), ("linear_cache_indices", linear), ("lxu_cache_weights", cache)]
        builder.add_op(populate, arguments, [], scalars, module=self.module)
        builder.open_scope("fbgemm::lxu_cache_lookup")
        places = builder.compute(
            "fbgemm::lxu_cache_lookup", [("linear_cache_indices", linear)], indices.shape, [("ways", _CACHE_WAYS)],
            dtype="int32", module=self.module,
        )  # fmt: skip
        builder.free_tensors(linear, places)

    def write_backward(self, grad: Ref) -> Ref | None:
        """Updates the tables in place; of dense ones gives the gradient."""
        builder = self.builder
        assert self.indices is not None and self.offsets is not None
        builder.open_scope("SplitLookupFunctionBackward", Phase.BACKWARD)
        name = f"fbgemm::split_embedding_backward_codegen_{self.optimizer}_{self._weighted}_exact_cuda"
        moments = [(f"momentum{i + 1}_dev", state) for i, state in enumerate(self.states)]
        arguments = [("grad_output", grad), *self._list_arguments(), *moments]
        result = builder.add_tensor(self.weights.shape, self.weights.spec.dtype) if self.optimizer == "dense" else None
        scalars = [*self.forms, ("learning_rate", LEARNING_RATE)]
        builder.add_op(
            name, arguments, [] if result is None else [result], scalars, module=self.module, forward=self.op
        )
        builder.free_tensors(self.indices, self.offsets, *([] if self.per_sample is None else [self.per_sample]))
        return result

    def _list_arguments(self) -> list[tuple[str, Ref]]:
        assert self.indices is not None and self.offsets is not None
        arguments = [("dev_weights", self.weights), *self._constants]
        arguments += [("indices", self.indices), ("offsets", self.offsets)]
        return arguments if self.per_sample is None else [*arguments, ("indice_weights", self.per_sample)]

    def _cast_to_int64(self, indices: Ref) -> Ref:
        self.builder.open_scope("aten::to", Phase.FORWARD)
        if indices.spec.dtype == "int64":
            return indices
        wide, _ = self.builder.add_cast(indices, "int64", module=self.module)
        self.builder.free_tensors(indices)  # unless the training loop holds it
        return wide
