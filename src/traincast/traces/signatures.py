"""The ops of a timeline as signatures that lowering understands, from what was recorded and what follows from it."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property

import numpy as np

from traincast.ir.ops import Scalar, Signature, TensorSpec
from traincast.traces.arguments import (
    RecordedArguments,
    derive_outputs,
    find_reduced_dims,
    infer_sized_output,
    infer_window,
    make_contiguous_tensor,
    parse_arguments,
    split_out,
)
from traincast.traces.events import Kind
from traincast.traces.execution import ExecutionTrace
from traincast.traces.link import Linked
from traincast.utils.arrays import BoolArray, IntArray

_CONVOLUTION = re.compile(r"aten::(?:_?convolution|cudnn_convolution|miopen_convolution|conv[123]d)$")
_CONVOLUTION_BACKWARD = re.compile(r"aten::(?:cudnn_|miopen_)?convolution_backward$")
_WRITES_GEOMETRY = ("aten::convolution", "aten::_convolution")
_POOL = re.compile(r"aten::(?:max_pool2d_with_indices|avg_pool2d|_?adaptive_avg_pool2d)$")
_POOL_BACKWARD = re.compile(r"aten::(?:max_pool2d_with_indices|avg_pool2d|_?adaptive_avg_pool2d)_backward$")
_LOOKUP = re.compile(r"fbgemm::split_embedding_codegen_lookup_(\w+?)_function")
_LOOKUP_BACKWARD = re.compile(r"torch::autograd::CppNode<SplitLookupFunction_(\w+)_Op>")
_LISTS = frozenset(
    {"aten::cat", "aten::stack", "aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::_cat"}
)
_DEALS = frozenset({"fbgemm::block_bucketize_sparse_features"})
_BAG_MOVES = _DEALS | {"fbgemm::permute_2D_sparse_data", "fbgemm::permute_sparse_features"}
_JOINS = frozenset({"aten::cat", "aten::_cat", "aten::stack", "aten::hstack", "aten::vstack"})
_JOIN = re.compile(r"CatArray\w*<(?:c10::|at::native::\(anonymous namespace\)::OpaqueType<)?(\w+)")
_WIDTHS = {
    "1": "uint8", "1u": "uint8", "bool": "bool", "2": "bfloat16", "2u": "bfloat16", "BFloat16": "bfloat16",
    "Half": "float16", "4": "float32", "4u": "float32", "float": "float32", "int": "int32", "8": "int64", "8u": "int64",
    "long": "int64", "double": "float64",
}  # fmt: skip
_GRADIENT = re.compile(r"Backward\d*$|AccumulateGrad|CppNode")
_TRANSPOSE = "aten::t"
_COPY = re.compile(r"aten::(?:copy_|clone|_to_copy|contiguous)$")
_WEIGHTS, _INDICES, _OFFSETS, _INDEX_WEIGHTS = 1, 11, 12, 14  # arguments of FBGEMM's lookup functions
_IMAGE_CHANNELS = 4  # an input of no more channels is the image, which gets no gradient


class SignatureReader:
    """Signatures of the ops of one timeline; `node` joins its ops with the execution trace, if there is one."""

    def __init__(self, linked: Linked, execution: ExecutionTrace | None = None, node: IntArray | None = None) -> None:
        self.linked, self.execution, self.node = linked, execution, node
        self._gradient: dict[tuple[int, int], TensorSpec] = {}  # (step, sequence) -> gradient of that op's result
        self._lookup: dict[int, int] = {}  # backward op -> forward lookup, and the other way round
        self._transposed: dict[int, set[tuple[int, ...]]] = {}  # scope -> shapes that `aten::t` made in it
        self._scan_ops()

    def _scan_ops(self) -> None:
        events, host, open_lookups = self.linked.events, self.linked.host, []
        for row in host[(events["kind"][host] == Kind.OP) & self._telling[events["name"][host]]].tolist():
            name = self.linked.get_name(row)
            if name == _TRANSPOSE:
                recorded = self.get_recorded(row)
                if recorded and recorded.tensors:
                    scope = int(self.linked.scope[row])
                    self._transposed.setdefault(scope, set()).add(recorded.tensors[0].shape[::-1])
            if events["forward_thread"][row] > 0 and _GRADIENT.search(name):
                recorded = self.get_recorded(row)
                if recorded and recorded.tensors:
                    key = (int(self.linked.step[row]), int(events["sequence"][row]))
                    self._gradient.setdefault(key, recorded.tensors[0])
            if _LOOKUP.match(name):
                open_lookups.append(row)
            elif _LOOKUP_BACKWARD.match(name):
                self._pair_lookup(row, open_lookups)

    @property
    def _telling(self) -> BoolArray:
        """Which names are of ops that tell something about others."""
        patterns = (_GRADIENT, _LOOKUP, _LOOKUP_BACKWARD)
        names = self.linked.trace.names
        return np.array([name == _TRANSPOSE or any(p.search(name) for p in patterns) for name in names])

    @cached_property
    def _joined_types(self) -> dict[int, str]:
        """A type as wide as what was joined, by op: the profiler leaves the types of lists out, kernels have them in
        their names."""
        linked, found = self.linked, dict[int, str]()
        known = {number: match for number, name in enumerate(linked.trace.names) if (match := _JOIN.search(name))}
        names = linked.events["name"][linked.device]
        for row in linked.device[np.isin(names, list(known)) & (linked.author[linked.device] >= 0)].tolist():
            width = _WIDTHS.get(known[int(linked.events["name"][row])][1])
            for op in linked.iterate_enclosing(int(linked.author[row])):
                if width is not None and linked.get_name(op) in _JOINS:
                    found[op] = width
        return found

    @cached_property
    def _by_parent(self) -> tuple[IntArray, IntArray]:
        """The ops that were called by others, in the order of these, and the caller of each."""
        ops = np.flatnonzero((self.linked.events["kind"] == Kind.OP) & (self.linked.parent >= 0))
        ops = ops[np.argsort(self.linked.parent[ops], kind="stable")]
        return ops, self.linked.parent[ops]

    def _list_called_ops(self, row: int) -> set[str]:
        """The names of the ops directly inside of an op."""
        ops, parents = self._by_parent
        inside = ops[np.searchsorted(parents, row) : np.searchsorted(parents, row, side="right")]
        return {self.linked.get_name(op) for op in inside.tolist()}

    def _pair_lookup(self, row: int, open_lookups: list[int]) -> None:
        """The last lookup whose number of bags fits the gradient is the one it belongs to."""
        recorded = self.get_recorded(row)
        if not recorded or not recorded.tensors:
            return
        batch = recorded.tensors[0].shape[0]
        for lookup in reversed(open_lookups):
            arguments = self.get_recorded(lookup)
            if arguments is None or len(arguments.inputs) <= _OFFSETS or not arguments.inputs[_OFFSETS]:
                continue
            tables = len(arguments.inputs[4]) and arguments.inputs[4][0].numel
            if (arguments.inputs[_OFFSETS][0].numel - 1) == batch * tables:
                self._lookup[row], self._lookup[lookup] = lookup, row
                open_lookups.remove(lookup)
                return

    def get_recorded(self, row: int) -> RecordedArguments | None:
        """What was recorded about an op's arguments, by the execution trace where it has the op."""
        if self.execution is not None and self.node is not None and self.node[row] >= 0:
            recorded = parse_arguments(self.execution.details[self.execution.nodes["details"][self.node[row]]])
            if recorded is not None:
                return recorded
        return parse_arguments(self.linked.trace.details[int(self.linked.events["details"][row])])

    def get_signature(self, row: int, *, strided: bool = False) -> Signature | None:
        """The op as a signature, or None where its shapes are not known. `strided` says that a copy ran a kernel and
        no copy engine, so that its source and target were laid out differently."""
        try:
            return self._make_signature(row, strided)
        except (IndexError, ValueError, ZeroDivisionError):
            return None  # what was recorded does not make a whole op

    def _make_signature(self, row: int, strided: bool) -> Signature | None:
        name, recorded = self.linked.get_name(row), self.get_recorded(row)
        if _LOOKUP_BACKWARD.match(name):
            return self._read_lookup_backward(row)
        if recorded is not None and recorded.listed and row in self._joined_types:
            parts = tuple(make_contiguous_tensor(shape, self._joined_types[row]) for shape in recorded.listed)
            return Signature(name, parts, (), (), (("tensors", len(parts)),))
        if recorded is None or not recorded.tensors:
            return None
        if _LOOKUP.match(name):
            return self._read_lookup_forward(row, recorded)
        if name in _BAG_MOVES and len(recorded.tensors) > 2:
            return _read_bag_move(name, recorded.tensors)
        if name in _LISTS and (recorded.incomplete or not self._has_node(row)):
            return None
        if _CONVOLUTION.match(name):
            return self._read_convolution(row, name, recorded)
        if _CONVOLUTION_BACKWARD.match(name):
            return self._read_convolution_backward(row, name, recorded)
        if _POOL.match(name) or _POOL_BACKWARD.match(name):
            return self._read_pool(row, name, recorded)
        return self._make_plain_signature(row, name, recorded, strided)

    def _has_node(self, row: int) -> bool:
        return self.node is not None and self.node[row] >= 0

    def _make_plain_signature(self, row: int, name: str, recorded: RecordedArguments, strided: bool) -> Signature:
        inputs, out = split_out(name, recorded.tensors)
        large = any(spec.shape for spec in inputs)
        inputs = tuple(replace(spec, device="cpu") if large and not spec.shape else spec for spec in inputs)
        scope = int(self.linked.scope[row])
        backward = bool(scope >= 0 and _GRADIENT.search(self.linked.get_name(scope)))
        backward = backward or self._is_under_gradient(row)
        sized = infer_sized_output(name, inputs[0], recorded)
        derived = (sized,) if sized is not None else derive_outputs(name, inputs, backward=backward)
        outputs = (out,) if out is not None else recorded.outputs or derived
        if not recorded.strided:
            inputs = self._restore_operand_order(name, inputs, scope, backward)
            source = inputs[-1]
            if strided and _COPY.match(name) and source.dtype == outputs[0].dtype and len(source.shape) > 1:
                inputs = (*inputs[:-1], replace(source, stride=_compute_transposed_strides(source.shape)))
        scalars: tuple[tuple[str, Scalar], ...] = ()
        reduced = find_reduced_dims(name, inputs[0], recorded)
        if reduced is not None:
            scalars = (("dim", reduced),)
        elif name in ("aten::sum", "aten::mean") and outputs[0].numel > 1:
            scalars = (("dim", (0,)),)
        if name in ("aten::_index_put_impl_", "aten::index_put_"):
            scalars = (("accumulate", backward),)
        return Signature(name, inputs, outputs, scalars)

    def _is_under_gradient(self, row: int) -> bool:
        return any(_GRADIENT.search(self.linked.get_name(above)) for above in self.linked.iterate_enclosing(row))

    def _restore_operand_order(
        self, name: str, inputs: tuple[TensorSpec, ...], scope: int, backward: bool
    ) -> tuple[TensorSpec, ...]:
        """Operands of GEMMs that `aten::t` turned: the weight of a linear layer, the gradient in its backward.

        (A weight that backward turns again is in order.)
        """
        if name not in ("aten::addmm", "aten::mm"):
            return inputs
        place = len(inputs) - 2 if backward else len(inputs) - 1
        if len(inputs) < 2 or inputs[place].shape not in self._transposed.get(scope, ()):
            return inputs
        if backward and inputs[place].shape[0] == inputs[place].shape[1]:
            return inputs
        turned = replace(inputs[place], stride=_compute_transposed_strides(inputs[place].shape))
        return (*inputs[:place], turned, *inputs[place + 1 :])

    def _read_convolution(self, row: int, name: str, recorded: RecordedArguments) -> Signature | None:
        image, weight, *rest = recorded.tensors
        gradient = self._gradient.get((int(self.linked.step[row]), int(self.linked.events["sequence"][row])))
        result = recorded.outputs[0] if recorded.outputs else gradient
        written = _read_geometry(recorded, first=3) if name in _WRITES_GEOMETRY else None
        if written is not None and result is None:
            result = _infer_convolution_output(image, weight, written)
        scalars = written or _infer_geometry(image, weight, result)
        if result is None or scalars is None:
            return None
        bias = tuple(rest[:1])
        groups = (("input", 1), ("weight", 1), *((("bias", 1),) if bias else ()))
        return Signature(name, (image, weight, *bias), (result,), scalars, groups)

    def _read_convolution_backward(self, row: int, name: str, recorded: RecordedArguments) -> Signature | None:
        if len(recorded.tensors) < 3:
            return None
        first, second, weight = recorded.tensors[:3]
        image, gradient = (first, second) if "cudnn" in name else (second, first)
        scalars = _read_geometry(recorded, first=4) if name == "aten::convolution_backward" else None
        scalars = scalars or _infer_geometry(image, weight, gradient)
        if scalars is None:
            return None
        children = " ".join(self._list_called_ops(row))
        data = image.shape[1] > _IMAGE_CHANNELS
        if "backward_input" in children or "backward_weight" in children:
            data = "backward_input" in children
        elif recorded.values and recorded.values[-1].startswith("["):  # the output mask
            data = recorded.values[-1].startswith("[True")
        scalars = (*scalars, ("output_mask", (data, True, False)))
        groups = (("grad_output", 1), ("input", 1), ("weight", 1))
        return Signature("aten::convolution_backward", (gradient, image, weight), (image, weight), scalars, groups)

    def _read_pool(self, row: int, name: str, recorded: RecordedArguments) -> Signature | None:
        """Where the window was not recorded: one as wide as its stride and half as much again, as pools usually are."""
        if _POOL_BACKWARD.match(name):
            gradient, image = recorded.tensors[:2]
        else:
            key = (int(self.linked.step[row]), int(self.linked.events["sequence"][row]))
            result = recorded.outputs[0] if recorded.outputs else self._gradient.get(key)
            if result is None:
                return None
            image, gradient = recorded.tensors[0], result
        if len(image.shape) != 4 or len(gradient.shape) != 4 or not all(gradient.shape):
            return None
        written = None if "adaptive" in name else recorded.get_integers(2 if _POOL_BACKWARD.match(name) else 1)
        window = written or tuple(-(-3 * image.shape[axis] // (2 * gradient.shape[axis])) for axis in (2, 3))
        scalars: tuple[tuple[str, Scalar], ...] = (("kernel_size", window),)
        if _POOL_BACKWARD.match(name):
            return Signature(name, recorded.tensors, (image,), scalars)
        outputs = (gradient, replace(gradient, dtype="int64")) if "indices" in name else (gradient,)
        return Signature(name, recorded.tensors, outputs, scalars)

    def _split_lookup(self, recorded: RecordedArguments) -> tuple[tuple[str, tuple[TensorSpec, ...]], ...] | None:
        if len(recorded.inputs) <= _INDEX_WEIGHTS:
            return None
        named = (
            ("dev_weights", recorded.inputs[_WEIGHTS]),
            ("indices", recorded.inputs[_INDICES]),
            ("offsets", recorded.inputs[_OFFSETS]),
            ("indice_weights", recorded.inputs[_INDEX_WEIGHTS]),
        )
        return named if all(specs for _, specs in named[:3]) else None

    def _read_lookup_forward(self, row: int, recorded: RecordedArguments) -> Signature | None:
        parts = self._split_lookup(recorded)
        backward = self.get_recorded(self._lookup[row]) if row in self._lookup else None
        if parts is None or backward is None:
            return None
        inputs = tuple(spec for _, specs in parts for spec in specs)
        groups = tuple((name, len(specs)) for name, specs in parts if specs)
        return Signature(self.linked.get_name(row), inputs, backward.tensors[:1], (), groups)

    def _read_lookup_backward(self, row: int) -> Signature | None:
        forward = self.get_recorded(self._lookup[row]) if row in self._lookup else None
        gradient, kind = self.get_recorded(row), _LOOKUP_BACKWARD.match(self.linked.get_name(row))
        parts = self._split_lookup(forward) if forward is not None else None
        if parts is None or gradient is None or kind is None:
            return None
        weighted = "weighted" if parts[3][1] else "unweighted"
        name = f"fbgemm::split_embedding_backward_codegen_{kind[1]}_{weighted}_exact_cuda"
        inputs = (gradient.tensors[0], *(spec for _, specs in parts for spec in specs))
        groups = (("grad_output", 1), *((name, len(specs)) for name, specs in parts if specs))
        return Signature(name, inputs, (), (), groups)


def _read_bag_move(name: str, tensors: tuple[TensorSpec, ...]) -> Signature:
    """Bags in another order, some of them perhaps more than once, or dealt out to ranks; as long as the average."""
    if name in _DEALS:
        return Signature(name, tensors, tensors[:2], (), (("lengths", 1), ("indices", 1), ("other", len(tensors) - 2)))
    order, lengths, *values = tensors
    picked = order.numel / max(lengths.shape[0] if lengths.shape else 0, 1)
    moved = (make_contiguous_tensor((round(picked * spec.numel),), spec.dtype) for spec in values)
    outputs = (make_contiguous_tensor((order.numel, *lengths.shape[1:]), lengths.dtype), *moved)
    return Signature(name, tensors, outputs, (), (("permute", 1), ("lengths", 1), ("values", len(values))))


def _compute_transposed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor whose last two dimensions are stored the other way round."""
    rest = shape[:-2]
    strides = [1, shape[-2]]
    step = shape[-1] * shape[-2]
    for size in reversed(rest):
        strides.insert(0, step)
        step *= size
    return (*strides[: len(rest)], 1, shape[-2])


def _read_geometry(recorded: RecordedArguments, first: int) -> tuple[tuple[str, Scalar], ...] | None:
    """Stride, padding and groups of a convolution where the trace has its arguments: stride, padding, dilation,
    transposed, output padding, groups, from argument `first` on. Others than plain ones are left to be guessed."""
    stride, padding, dilation = (recorded.get_integers(first + i) for i in range(3))
    groups = recorded.get_integers(first + 5)
    if stride is None or padding is None or groups is None or recorded.values[first + 3] != "False":
        return None
    if dilation is None or set(dilation) != {1} or len(stride) != len(padding) or len(groups) != 1:
        return None
    return (("stride", stride), ("padding", padding), ("groups", groups[0]))


def _infer_convolution_output(
    image: TensorSpec, weight: TensorSpec, geometry: tuple[tuple[str, Scalar], ...]
) -> TensorSpec | None:
    """The result of a convolution."""
    stride, padding = (dict(geometry)[name] for name in ("stride", "padding"))
    if not isinstance(stride, tuple) or not isinstance(padding, tuple):
        return None
    window = zip(image.shape[2:], weight.shape[2:], stride, padding, strict=False)
    sizes = tuple((i + 2 * int(p) - k) // max(int(s), 1) + 1 for i, k, s, p in window)  # type: ignore[arg-type]
    if len(sizes) != len(image.shape) - 2 or not all(size > 0 for size in sizes):
        return None
    return make_contiguous_tensor((image.shape[0], weight.shape[0], *sizes), image.dtype)


def _infer_geometry(
    image: TensorSpec, weight: TensorSpec, result: TensorSpec | None
) -> tuple[tuple[str, Scalar], ...] | None:
    """Stride, padding and groups of a convolution, from the three shapes; dilation is taken to be 1."""
    if result is None or not 3 <= len(image.shape) == len(weight.shape) == len(result.shape):
        return None
    sizes = zip(image.shape[2:], result.shape[2:], weight.shape[2:], strict=True)
    windows = [infer_window(*size) for size in sizes]
    known = [window for window in windows if window is not None]
    if len(known) < len(windows) or not weight.shape[1] or image.shape[1] % weight.shape[1]:
        return None
    return (
        ("stride", tuple(stride for stride, _ in known)),
        ("padding", tuple(padding for _, padding in known)),
        ("groups", image.shape[1] // weight.shape[1]),
    )
